// Products with weights: 2 M N K FLOPs. Of few rows (decoding) the weights are all there is to
// move.
#include "kernels/matmul.h"

#include "bench/kernels/op.h"
#include "bench/onednn_matmul.h"

namespace fbt::bench {
namespace {

template <class T>
Work work_of(int64_t M, int64_t N, int64_t K) {
    return M <= 16 ? moved<T>(double(M * K + N * K + M * N)) : flops(2.0 * double(M * N * K));
}

// K products of at most 1.
Bound bound_of(int64_t K) { return {gamma(double(K)) * double(K)}; }

template <class T>
Op forward(int64_t M, int64_t N, int64_t K) {
    const int64_t packed =
        std::max(cpu::matmul_packed_size<T>(N, K), ref::matmul_packed_size<double>(N, K));
    return {"matmul_forward",
            by({M, N, K}),
            work_of<T>(M, N, K),
            {in_t(M * N), in_t(M * K), in_t(packed), in_a(N * K)},  // y, x, packed, w
            {bound_of(K)},
            FBT_CALL(backend::matmul_forward(t(0), t(1), t(2), M, N, K, s)),
            FBT_CALL(backend::matmul_pack(t(2), a(3), N, K, false, s))};
}

// oneDNN's product of the same shape, the ceiling of ours.
template <class T>
Op onednn_forward(int64_t M, int64_t N, int64_t K) {
    const auto product = std::make_shared<OneDnnMatmul>(
        M, N, K, std::is_same_v<T, bf16> ? OneDnnMatmul::DType::bf16 : OneDnnMatmul::DType::f32);
    Op op = forward<T>(M, N, K);
    op.kernel = "onednn";
    op.arrays[2].count = std::max(ref::matmul_packed_size<double>(N, K),
                                  ceil_div(product->packed_bytes(), int64_t(sizeof(T))));
    op.call = [product](void* const* arrays, Stream s) {
        product->forward(arrays[0], arrays[1], arrays[2], s.threads);
        return Status{};
    };
    op.prepare = [product](void* const* arrays, Stream) {
        product->pack(arrays[2], static_cast<const float*>(arrays[3]));
        return Status{};
    };
    return op;
}

template <class T>
Op dw_accum(int64_t M, int64_t N, int64_t K) {
    return {"matmul_dw_accum",
            by({M, N, K}),
            flops(2.0 * double(M * N * K)),
            {in_a(N * K), in_t(M * N), in_t(M * K)},   // dw, dy, x
            {{gamma(double(M + 2)) * double(M + 1)}},  // M products and what was there
            FBT_CALL(backend::matmul_dw_accum(a(0), t(1), t(2), M, N, K, s))};
}

template <class T>
void add(Ops& ops) {
    const Sizes& m = ops.sizes;
    const int64_t rows = logit_rows(m);
    const int64_t shapes[][3] = {{m.N, int64_t(m.H) * m.C, m.D},  // the queries
                                 {m.N, m.F, m.D},                 // the feed-forward's up
                                 {m.N, m.D, m.F},                 // and down
                                 {rows, m.V, m.D},                // logits
                                 {1, m.F, m.D},                   // decoding
                                 {16, m.F, m.D},
                                 {1, m.V, m.D}};
    for (const auto& [M, N, K] : shapes) {
        ops.add<T>(forward<T>(M, N, K));
        ops.add<T>(onednn_forward<T>(M, N, K));
    }
    ops.add<T>(dw_accum<T>(m.N, m.F, m.D));
    ops.add<T>(dw_accum<T>(rows, m.V, m.D));
}

}  // namespace

void add_matmul(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
