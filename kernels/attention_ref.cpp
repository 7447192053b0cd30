// Causal attention over spans as plain loops, in the order that the header states.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention.h"

namespace fbt::kernels::ref {
namespace {

// The row of the key store that holds position s of the span's sequence.
int64_t key_row(const SpanTable& table, const Span& span, int s) {
    return table.blocks[span.block + s / kKeyBlock] + s % kKeyBlock;
}

template <class A, class T>
A dot(const T* a, const T* b, int C) {
    A sum = 0;
    for (int c = 0; c < C; ++c) sum += A(a[c]) * A(b[c]);
    return sum;
}

}  // namespace

template <class T, class A>
Status attention_forward(T* o, A* lse, const T* q, const T* k, const T* v, const SpanTable& table,
                         int H, int G, int C, int window, A scale, std::type_identity_t<A>*,
                         Stream) {
    if (Status status = attention_arguments(H, G, C, window); !status.ok()) return status;
    for (int i = 0; i < table.count; ++i) {
        const Span& span = table.spans[i];
        for (int n = 0; n < span.count; ++n)
            for (int h = 0; h < H; ++h) {
                const int g = h / (H / G);
                const int t = span.first + n;
                const int lo = first_visible(t, window);
                const int64_t head = (span.row + n) * H + h;
                A m = -std::numeric_limits<A>::infinity(), l = 0, sum[kMaxHeadDim] = {};
                for (int j = lo / kKeyBlock; j <= t / kKeyBlock; ++j) {
                    const int begin = std::max(lo, j * kKeyBlock);
                    const int end = std::min(t + 1, (j + 1) * kKeyBlock);
                    // One split: m_j, l_j, o_j.
                    A score[kKeyBlock], m_j = -std::numeric_limits<A>::infinity();
                    for (int s = begin; s < end; ++s) {
                        const T* key = k + (key_row(table, span, s) * G + g) * C;
                        score[s - begin] = scale * dot<A>(q + head * C, key, C);
                        m_j = std::max(m_j, score[s - begin]);
                    }
                    A l_j = 0, sum_j[kMaxHeadDim] = {};
                    for (int s = begin; s < end; ++s) {
                        const T* value = v + (key_row(table, span, s) * G + g) * C;
                        const A p = std::exp(score[s - begin] - m_j);
                        l_j += p;
                        for (int c = 0; c < C; ++c) sum_j[c] += p * A(value[c]);
                    }
                    // Combine it with the splits before.
                    const A m_new = std::max(m, m_j);
                    const A old_factor = std::exp(m - m_new), new_factor = std::exp(m_j - m_new);
                    l = l * old_factor + l_j * new_factor;
                    for (int c = 0; c < C; ++c)
                        sum[c] = sum[c] * old_factor + sum_j[c] * new_factor;
                    m = m_new;
                }
                for (int c = 0; c < C; ++c) o[head * C + c] = T(sum[c] / l);
                if (lse) lse[head] = m + std::log(l);
            }
    }
    return {};
}

// dv[s] = sum_t p[t,s]*dout[t]         ds[t,s] = p[t,s]*(dout[t].v[s] - delta[t])
// dq[t] = scale * sum_s ds[t,s]*k[s]   dk[s] = scale * sum_t ds[t,s]*q[t]
template <class T, class A>
Status attention_backward(T* dq, A* dk, A* dv, A* delta, const T* dout, const T* q, const T* k,
                          const T* v, const T* o, const A* lse, const SpanTable& table, int H,
                          int G, int C, int window, A scale, Stream) {
    if (Status status = attention_arguments(H, G, C, window); !status.ok()) return status;
    for (int i = 0; i < table.count; ++i) {
        const Span& span = table.spans[i];
        for (int s = 0; s < span.first + span.count; ++s) {
            const int64_t row = key_row(table, span, s) * G * C;
            std::fill(dk + row, dk + row + G * C, A(0));
            std::fill(dv + row, dv + row + G * C, A(0));
        }
        for (int n = 0; n < span.count; ++n)
            for (int h = 0; h < H; ++h) {
                const int g = h / (H / G);
                const int t = span.first + n;
                const int64_t head = (span.row + n) * H + h;
                const T *query = q + head * C, *grad = dout + head * C;
                delta[head] = dot<A>(grad, o + head * C, C);
                A sum[kMaxHeadDim] = {};  // sum_s ds[t,s]*k[s]
                for (int s = first_visible(t, window); s <= t; ++s) {
                    const int64_t at = (key_row(table, span, s) * G + g) * C;
                    const A p = std::exp(scale * dot<A>(query, k + at, C) - lse[head]);
                    const A ds = p * (dot<A>(grad, v + at, C) - delta[head]);
                    for (int c = 0; c < C; ++c) {
                        sum[c] += ds * A(k[at + c]);
                        dk[at + c] += scale * ds * A(query[c]);
                        dv[at + c] += p * A(grad[c]);
                    }
                }
                for (int c = 0; c < C; ++c) dq[head * C + c] = T(scale * sum[c]);
            }
    }
    return {};
}

template <class T>
int64_t attention_scratch_size(const SpanTable&, int, int, int, int) {
    return 0;
}

#define INSTANTIATE(T)                                                                            \
    template Status attention_forward<T, T>(T*, T*, const T*, const T*, const T*,                 \
                                            const SpanTable&, int, int, int, int, T, T*, Stream); \
    template int64_t attention_scratch_size<T>(const SpanTable&, int, int, int, int);             \
    template Status attention_backward<T, T>(T*, T*, T*, T*, const T*, const T*, const T*,        \
                                             const T*, const T*, const T*, const SpanTable&, int, \
                                             int, int, int, T, Stream);
INSTANTIATE(float)
INSTANTIATE(double)
#undef INSTANTIATE

}  // namespace fbt::kernels::ref
