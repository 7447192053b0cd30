// Matrix products through cuBLASLt. It thinks in columns: a row-major [rows, columns] matrix is its
// column-major [columns, rows] one, so every product here is computed transposed.
#include "kernels/gpu.h"
#include "kernels/matmul.h"
#include "kernels/matmul_packed.h"

#if defined(__CUDACC__)
#include <cublasLt.h>

#include <algorithm>
#include <compare>
#include <map>
#include <new>
#include <type_traits>
#endif

namespace fbt::kernels::cuda {

#if defined(__CUDACC__)

namespace {

// Column-major d [rows, columns] = beta d + a b, where a or b may be stored transposed.
struct Product {
    cudaDataType_t operands, result;
    cublasOperation_t a_is, b_is;
    int64_t rows, columns, depth;
    int64_t a_stride, b_stride, d_stride;
    uint32_t a_alignment = 0, b_alignment = 0, d_alignment = 0;  // of the arrays, in bytes
    auto operator<=>(const Product&) const = default;
};

// The library assumes 256 bytes unless told otherwise, and no algorithm asks for more.
uint32_t alignment_of(const void* p) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(p);
    return uint32_t(std::min<uintptr_t>(address & (~address + 1), 256));
}

Status status_of(cublasStatus_t status) {
    if (status == CUBLAS_STATUS_SUCCESS) return {};
    return {Code::device_error, cublasLtGetStatusString(status)};
}

constexpr size_t kWorkspaceBytes = 32 << 20;  // what cuBLAS itself takes on sm_90
constexpr size_t kMaxAlgorithms = 4096;       // kept; ragged batches never stop bringing new shapes

template <class T>
constexpr cudaDataType_t kDataType = std::is_same_v<T, bf16> ? CUDA_R_16BF : CUDA_R_32F;

}  // namespace

struct MatmulFast {
    cublasLtHandle_t handle = nullptr;
    void* workspace = nullptr;
    std::map<Product, cublasLtMatmulAlgo_t> algorithms;

    Status run(Product p, void* d, const void* a, const void* b, float beta, Stream s);
};

Status MatmulFast::run(Product p, void* d, const void* a, const void* b, float beta, Stream s) {
    p.a_alignment = alignment_of(a);
    p.b_alignment = alignment_of(b);
    p.d_alignment = alignment_of(d);

    // Descriptions live on the stack. None of these calls touches the device.
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, d_layout;
    const bool a_plain = p.a_is == CUBLAS_OP_N, b_plain = p.b_is == CUBLAS_OP_N;
    for (const cublasStatus_t status :
         {cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSA, &p.a_is,
                                         sizeof p.a_is),
          cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSB, &p.b_is,
                                         sizeof p.b_is),
          cublasLtMatrixLayoutInit(&a_layout, p.operands, a_plain ? p.rows : p.depth,
                                   a_plain ? p.depth : p.rows, p.a_stride),
          cublasLtMatrixLayoutInit(&b_layout, p.operands, b_plain ? p.depth : p.columns,
                                   b_plain ? p.columns : p.depth, p.b_stride),
          cublasLtMatrixLayoutInit(&d_layout, p.result, p.rows, p.columns, p.d_stride)})
        if (status != CUBLAS_STATUS_SUCCESS) return status_of(status);

    auto known = algorithms.find(p);
    if (known == algorithms.end()) {
        cublasLtMatmulPreferenceOpaque_t preference;
        const auto prefer = [&preference](cublasLtMatmulPreferenceAttributes_t what,
                                          const auto& value) {
            return cublasLtMatmulPreferenceSetAttribute(&preference, what, &value, sizeof value);
        };
        for (const cublasStatus_t status :
             {cublasLtMatmulPreferenceInit(&preference),
              prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes),
              prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.a_alignment),
              prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.b_alignment),
              prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.d_alignment),
              prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.d_alignment)})
            if (status != CUBLAS_STATUS_SUCCESS) return status_of(status);
        cublasLtMatmulHeuristicResult_t best;
        int found = 0;
        const cublasStatus_t status =
            cublasLtMatmulAlgoGetHeuristic(handle, &operation, &a_layout, &b_layout, &d_layout,
                                           &d_layout, &preference, 1, &best, &found);
        if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && !found))
            return {Code::unsupported, "cuBLASLt has no algorithm for this product"};
        if (status != CUBLAS_STATUS_SUCCESS) return status_of(status);
        if (algorithms.size() == kMaxAlgorithms) algorithms.clear();
        known = algorithms.emplace(p, best.algo).first;
    }
    const float alpha = 1;
    return status_of(cublasLtMatmul(handle, &operation, &alpha, a, &a_layout, b, &b_layout, &beta,
                                    d, &d_layout, d, &d_layout, &known->second, workspace,
                                    kWorkspaceBytes, static_cast<cudaStream_t>(s.handle)));
}

Status matmul_fast_create(MatmulFast** fast) {
    *fast = nullptr;
    MatmulFast* made = new (std::nothrow) MatmulFast;
    if (!made) return {Code::device_error, "out of host memory"};
    Status status = status_of(cublasLtCreate(&made->handle));
    if (status.ok()) {
        const cudaError_t error = cudaMalloc(&made->workspace, kWorkspaceBytes);
        if (error != cudaSuccess) {
            (void)cudaGetLastError();  // reported here, so not to whoever asks next
            status = {Code::device_error, cudaGetErrorString(error)};
        }
    }
    if (status.ok())
        *fast = made;
    else
        matmul_fast_destroy(made);
    return status;
}

void matmul_fast_destroy(MatmulFast* fast) {
    if (!fast) return;
    if (fast->workspace) (void)cudaFree(fast->workspace);
    if (fast->handle) (void)cublasLtDestroy(fast->handle);
    delete fast;
}

// y^T [N,M] = w x^T
template <class T>
Status matmul_forward_fast(MatmulFast* fast, T* y, const T* x, const T* packed, int64_t M,
                           int64_t N, int64_t K, Stream s) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_forward_fast needs M >= 0 and N, K >= 1"};
    if (M == 0) return {};
    constexpr bool kHalf = std::is_same_v<T, bf16>;  // packed as w, else as w^T
    return fast->run({.operands = kDataType<T>,
                      .result = kDataType<T>,
                      .a_is = kHalf ? CUBLAS_OP_T : CUBLAS_OP_N,
                      .b_is = CUBLAS_OP_N,
                      .rows = N,
                      .columns = M,
                      .depth = K,
                      .a_stride = kHalf ? bf16_packed_depth(K) : f32_packed_columns(N),
                      .b_stride = K,
                      .d_stride = N},
                     y, packed, x, 0.f, s);
}

// dw^T [K,N] += x^T dy
template <class T>
Status matmul_dw_accum_fast(MatmulFast* fast, float* dw, const T* dy, const T* x, int64_t M,
                            int64_t N, int64_t K, Stream s) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_dw_accum_fast needs M >= 0 and N, K >= 1"};
    if (M == 0) return {};
    return fast->run({.operands = kDataType<T>,
                      .result = CUDA_R_32F,
                      .a_is = CUBLAS_OP_N,
                      .b_is = CUBLAS_OP_T,
                      .rows = K,
                      .columns = N,
                      .depth = M,
                      .a_stride = K,
                      .b_stride = N,
                      .d_stride = K},
                     dw, x, dy, 1.f, s);
}

#else

namespace {
constexpr Status kNoLibrary = {Code::unsupported,
                               "the emulated device has no cuBLASLt: use the exact products"};
}

Status matmul_fast_create(MatmulFast** fast) {
    *fast = nullptr;
    return kNoLibrary;
}
void matmul_fast_destroy(MatmulFast*) {}

template <class T>
Status matmul_forward_fast(MatmulFast*, T*, const T*, const T*, int64_t, int64_t, int64_t, Stream) {
    return kNoLibrary;
}
template <class T>
Status matmul_dw_accum_fast(MatmulFast*, float*, const T*, const T*, int64_t, int64_t, int64_t,
                            Stream) {
    return kNoLibrary;
}

#endif

#define INSTANTIATE(T)                                                                            \
    template Status matmul_forward_fast<T>(MatmulFast*, T*, const T*, const T*, int64_t, int64_t, \
                                           int64_t, Stream);                                      \
    template Status matmul_dw_accum_fast<T>(MatmulFast*, float*, const T*, const T*, int64_t,     \
                                            int64_t, int64_t, Stream);
INSTANTIATE(float)
INSTANTIATE(bf16)
#undef INSTANTIATE

}  // namespace fbt::kernels::cuda
