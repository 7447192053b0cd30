// Causal attention over spans: grouped queries, sliding window, keys in fixed splits.
#pragma once
#include <type_traits>

#include "kernels/types.h"

namespace fbt::kernels {

inline constexpr int kMaxHeadDim = 256;

// What every backend needs of the arguments below.
inline Status attention_arguments(int H, int G, int C, int window) {
    if (H < 1 || G < 1 || H % G != 0)
        return {Code::bad_argument, "attention needs H, the query heads, to be a multiple of G"};
    if (C < 2 || C % 2 != 0 || C > kMaxHeadDim)
        return {Code::bad_argument, "attention needs an even head width of at most 256"};
    if (window < 0) return {Code::bad_argument, "attention needs window >= 0"};
    return {};
}

// The first position that position t sees.
FBT_HOST_DEVICE inline int first_visible(int t, int window) {
    return window > 0 && t >= window ? t - window + 1 : 0;
}

// Row t of a span (t its position) attends positions s of its own sequence with
//   lo <= s <= t,   lo = window > 0 ? max(0, t - window + 1) : 0
//   score[s] = scale * sum_c q[t,h,c] * k[s,g,c],   g = h / (H/G)
//   o[t,h,:] = sum_s softmax(score)[s] * v[s,g,:]       lse[t,h] = log sum_s exp(score[s])
// The row rule fixes the order of every sum: keys are walked in splits of kKeyBlock positions
// counted from position 0. Inside split j: m_j = max score, l_j = sum exp(score - m_j),
// o_j = sum exp(score - m_j) v. Splits combine in ascending j, from m = -inf, l = 0, o = 0:
//   m' = max(m, m_j)      l = l*exp(m - m') + l_j*exp(m_j - m')      o likewise
// and the row's output is o / l at the end.
// Splits without a visible key are skipped. Never more than a tile of scores is in memory.
//
// Shapes  q, o [N,H,C] T; k, v: key stores [rows,G,C] T, addressed through the span table, which
//         hold every position [0, first+count) of each span (the span's own rows included);
//         lse [N,H] A, may be null; scratch: attention_scratch_size<T> elements, aligned to 8
//         bytes, or null.
// Dtypes  T = float or, but for ref, bf16 with A = float; ref also T = A = double. In bf16 scores,
//         m, l and sums are float and o is rounded once. On cuda weights are then rounded (to 2^-8)
//         for their product with v, and l_j is the sum of the rounded ones, so that they still add
//         up to 1; on cpu they are not.
// Needs   H % G == 0, C even and <= 256, window >= 0; cuda: scale > 0.      Alias  none.
// Errors  bad_argument where Needs is not met, and on cuda where spans and rows are too many for
//         one grid or stride ("needs several calls").
// FLOPs   4*C*H for each visible (row, key) pair.
// On cuda
//   - nothing behind a span's last position is read; a key before it that a row does not see has
//     weight 0, through which NaN and infinity, and only they, may reach that row;
//   - kernels read spans and blocks in device memory, and grids depend on table.count, max_count
//     and max_end alone: a captured launch serves every later table with the same count whose
//     spans have at most max_count rows (0 is allowed) and end by max_end;
//   - where the size of the scratch is not 0, there are few rows and many keys, and with a scratch
//     the splits of a row are computed all over the device at once: the same bits, sooner;
//   - speed: C = 64, 96 and 128 are tuned, others pad to 64, 96, 128, 192 or 256; rows of whole,
//     aligned 16 bytes (C % 8 == 0 in bf16) are copied asynchronously. None of it changes bits.
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status attention_forward(T* o, A* lse, const T* q, const T* k, const T* v,
                                const SpanTable& table, int H, int G, int C, int window, A scale,
                                std::type_identity_t<A>* scratch, Stream s);
       // 0 on ref and cpu, and in f32; at most 64 MiB. Of the table it depends only on count,
       // max_count and max_end.
       template <class T>
       int64_t attention_scratch_size(const SpanTable& table, int H, int G, int C, int window);)

// Backward, with p[t,s] = exp(score - lse[t]) and delta[t] = sum_c dout[t,c]*o[t,c]:
//   dv[s] = sum_t p[t,s]*dout[t]         ds[t,s] = p[t,s]*(dout[t].v[s] - delta[t])
//   dq[t] = scale * sum_s ds[t,s]*k[s]   dk[s] = scale * sum_t ds[t,s]*q[t]
// Sums over t also run over the H/G heads that share a key head; all in one fixed order, without
// atomics. dk and dv [rows,G,C] A are overwritten at every row that a span's positions
// [0, first+count) occupy (zeros where nothing attends) and untouched elsewhere; no two spans may
// share a key row. delta [N,H] A is scratch.
// Dtypes, needs, errors and tables as in the forward; in bf16 dq is rounded once at the end and, on
// cuda, p and ds for the products they enter. lse must be the forward's.
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status attention_backward(T* dq, A* dk, A* dv, A* delta, const T* dout, const T* q,
                                 const T* k, const T* v, const T* o, const A* lse,
                                 const SpanTable& table, int H, int G, int C, int window, A scale,
                                 Stream s);)

}  // namespace fbt::kernels
