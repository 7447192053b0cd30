# The CUDA kernels for real devices: every kernels/*.cu through nvcc, into kernels_cuda. Code for sm_80
# and sm_90, and PTX that newer devices compile. What ptxas says of registers and spills is kept beside
# each object; tests read it.
if(DEFINED ENV{CUDA_HOME})
  set(CUDAToolkit_ROOT $ENV{CUDA_HOME})
endif()
find_package(CUDAToolkit 13 QUIET)  # earlier ones were not tried
if(NOT CUDAToolkit_FOUND)
  message(STATUS "no CUDA toolkit of version 13 (nvcc): --device cuda is not built")
  return()
endif()

set(nvcc ${CMAKE_CXX_COMPILER_LAUNCHER} ${CUDAToolkit_NVCC_EXECUTABLE} -ccbin g++ -std=c++20 -O3
    --expt-relaxed-constexpr -Werror all-warnings -Xcompiler=-Wall,-Wextra
    -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=[sm_90,compute_90]
    -Xptxas=-v -I${CMAKE_SOURCE_DIR})
file(GLOB cu_files CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/kernels/*.cu)
set(cu_objects)
foreach(cu ${cu_files})
  set(object ${CMAKE_BINARY_DIR}/${cu}.o)
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${CMAKE_SOURCE_DIR}/kernels/nvcc.sh ${object}.ptxas ${nvcc}
            -MD -MF ${object}.d -MT ${cu}.o -c ${CMAKE_SOURCE_DIR}/${cu} -o ${object}
    DEPENDS ${CMAKE_SOURCE_DIR}/${cu}
    DEPFILE ${object}.d
    COMMENT "nvcc ${cu}"
    VERBATIM)
  list(APPEND cu_objects ${object})
endforeach()
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/kernels)
add_library(kernels_cuda STATIC ${cu_objects})
set_target_properties(kernels_cuda PROPERTIES LINKER_LANGUAGE CXX)
target_link_libraries(kernels_cuda PUBLIC CUDA::cudart CUDA::cublasLt)
