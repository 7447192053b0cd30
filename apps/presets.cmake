# Puts apps/presets/*.json and the facts of the build that `fbt info` prints into a source file, so
# that the one binary needs no files. Adds it to app_sources.
file(GLOB preset_files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/apps/presets/*.json)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${preset_files})
set(FBT_PRESETS "")
foreach(preset_file IN LISTS preset_files)
  get_filename_component(preset_name ${preset_file} NAME_WE)
  file(READ ${preset_file} preset_text)
  string(APPEND FBT_PRESETS "        {\"${preset_name}\", R\"json(${preset_text})json\"},\n")
endforeach()
configure_file(${CMAKE_SOURCE_DIR}/apps/embedded.cpp.in ${CMAKE_BINARY_DIR}/embedded.cpp @ONLY)
list(APPEND app_sources ${CMAKE_BINARY_DIR}/embedded.cpp)
