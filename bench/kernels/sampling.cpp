// Sampling of sixteen sequences' next tokens, by argmax and from the forty largest logits.
#include "kernels/sampling.h"

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

template <class T>
Op sample_op(const Sizes& m, const std::string& name, const Sampling& how) {
    constexpr int64_t N = 16;
    struct Rows {
        std::vector<Sampling> settings;
        std::vector<float> uniform;
        std::vector<int32_t> tokens, ids;
    };
    const auto rows = std::make_shared<Rows>();
    rows->settings.assign(N, how);
    for (int64_t n = 0; n < N; ++n) rows->uniform.push_back((float(n) + 0.5f) / N);
    rows->tokens.resize(N);
    rows->ids.resize(size_t(N * m.V));
    const auto as_numbers = [rows](auto* out, Status status) {
        std::copy(rows->tokens.begin(), rows->tokens.end(), out);
        return status;
    };
    return {name,
            by({N, m.V}),
            moved<T>(double(N * m.V)),
            {in_a(N), in_t(N * m.V)},  // tokens, logits
            {{0}},
            FBT_CALL(as_numbers(
                a(0), backend::sample(rows->tokens.data(), t(1), rows->settings.data(),
                                      rows->uniform.data(), N, m.V, rows->ids.data(), s)))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(sample_op<T>(ops.sizes, "sample_argmax", {.temperature = 0}));
    ops.add<T>(sample_op<T>(ops.sizes, "sample_top_k", {.temperature = 0.8f, .top_k = 40}));
}

}  // namespace

void add_sampling(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
