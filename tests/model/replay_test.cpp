// Replay from tokens, all its ways to end, and the certificate from recorded states; by memcmp.
#include "model/core/replay.h"

#include <bit>

#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

using namespace model::core;

constexpr int T = 110;

class ReplayOf : public testing::TestWithParam<std::tuple<Fusion, Mode, DType>> {
  protected:
    ReplayOf()
        : mode(std::get<1>(GetParam())),
          dtype(std::get<2>(GetParam())),
          context("cpu", 1),
          model(
              context,
              [] {
                  Config c = small_config();
                  c.fusion = std::get<0>(GetParam());
                  return c;
              }(),
              dtype) {
        randomise(model, false);
        tokens = random_tokens(T, model.config().vocab_size, 3);
    }

    // What replay computed before positions could leave: every pass runs the whole response.
    Rows recomputed(int P, int passes) {
        Decoder decoder(model, mode);
        std::vector<Tensor> head;
        const int id = decoder.prefill({{tokens.begin(), tokens.begin() + P}}, &head)[0];
        Tensor hidden = Tensor::empty(context, {T, model.config().dim}, dtype);
        hidden.rows(0, P).copy_from(head[0]);
        for (int k = 1; k <= passes; ++k) {
            const Tensor carried = k == 1 ? Tensor() : hidden.rows(P - 1, T - P);
            const Tensor h = decoder.rerun(id, P, {tokens.begin() + P, tokens.end()}, carried);
            hidden.rows(P, T - P).copy_from(h);
        }
        return rows_of(trace_of(decoder, id, hidden));
    }

    const Mode mode;
    const DType dtype;
    Context context;
    Model model;
    std::vector<int32_t> tokens;
};

// The window of 70 is shorter than the prompt of 90; a prompt of one token; one fed response token.
constexpr int kPrompts[] = {90, 1, T - 1};

TEST_P(ReplayOf, WhatHasSettledLeavesWithTheBitsOfComputingItAgain) {
    for (int P : kPrompts) {
        const int n = T - P;
        Replay replay(model, tokens, P, mode);
        int64_t computed = 0;
        for (int k = 1; k <= std::min(n + 3, 12); ++k) {
            replay.next();
            expect_same(rows_of(replay.trace()), recomputed(P, k));
            EXPECT_EQ(replay.passes(), k);
            EXPECT_EQ(replay.visited(), int64_t(k) * n);
            // Pass k leaves out at least the k-2 that the passes before it made exact.
            computed += std::max(0, k == 1 ? n : n - (k - 2));
            EXPECT_LE(replay.computed(), computed) << k;
            if (k <= 2) {
                EXPECT_EQ(replay.computed(), computed);
            }
            EXPECT_EQ(replay.exact(), k > n) << "P " << P << ", pass " << k;
        }
    }
}

TEST_P(ReplayOf, UntilExactIsTheRollout) {
    for (int P : kPrompts) {
        const int n = T - P;
        const Rows rollout = rows_of(decode_known(model, tokens, P, mode));
        Replay replay(model, tokens, P, mode);
        replay.next();  // run() begins anew
        replay.run({});
        expect_same(rows_of(replay.trace()), rollout);
        EXPECT_TRUE(replay.exact());
        EXPECT_LE(replay.passes(), n + 1);
        EXPECT_LE(replay.computed(), n + n * (n + 1) / 2);
        for (int block : {1, 7, n, 1000}) {
            replay.run({.block = block});
            expect_same(rows_of(replay.trace()), rollout);
            EXPECT_TRUE(replay.exact());
            EXPECT_LE(replay.computed(), replay.visited());
        }
    }
}

TEST_P(ReplayOf, PassesAndToleranceEndIt) {
    const int P = 30, n = T - P;
    Replay stepwise(model, tokens, P, mode), replay(model, tokens, P, mode);
    std::vector<double> changes;
    for (int k = 1; k <= 6; ++k) {
        stepwise.next();
        changes.push_back(stepwise.change());
        replay.run({.passes = k});
        EXPECT_EQ(replay.passes(), k);
        expect_same(rows_of(replay.trace()), rows_of(stepwise.trace()));
        EXPECT_EQ(replay.change(), stepwise.change());
        EXPECT_FALSE(replay.exact());
        // One block is the whole response.
        replay.run({.passes = k, .block = n});
        expect_same(rows_of(replay.trace()), rows_of(stepwise.trace()));
    }
    EXPECT_EQ(changes[0], INFINITY);
    // The change is that of all the response's states, those that stayed as they were included.
    const std::vector<double> a = recomputed(P, 5).hidden, b = recomputed(P, 6).hidden;
    double difference = 0, size = 0;
    for (size_t i = size_t(P * model.config().dim); i < a.size(); ++i) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
    }
    EXPECT_NEAR(changes[5], std::sqrt(difference / size), 1e-12 * changes[5]);

    // Ends with the first pass that changed so little.
    const double tolerance = changes[3];
    size_t first = 0;
    while (!(changes[first] <= tolerance)) ++first;
    replay.run({.tolerance = tolerance});
    EXPECT_EQ(replay.passes(), int(first) + 1);
    replay.run({.passes = 2, .tolerance = tolerance});
    EXPECT_EQ(replay.passes(), 2);

    // Each block is what a replay of that block alone gives after the blocks before it.
    constexpr int kBlock = 33;
    replay.run({.passes = 2, .block = kBlock});
    EXPECT_EQ(replay.passes(), 2 * 3);
    EXPECT_EQ(replay.visited(), 2 * n);
    EXPECT_FALSE(replay.exact());
    const Rows swept = rows_of(replay.trace());
    Decoder decoder(model, mode);
    std::vector<Tensor> head;
    const int id = decoder.prefill({{tokens.begin(), tokens.begin() + P}}, &head)[0];
    Tensor hidden = Tensor::empty(context, {T, model.config().dim}, dtype);
    hidden.rows(0, P).copy_from(head[0]);
    for (int begin = P; begin < T; begin += kBlock) {
        const int count = std::min(kBlock, T - begin);
        const std::vector<int32_t> block(tokens.begin() + begin, tokens.begin() + begin + count);
        for (int k = 0; k < 2; ++k) {
            const Tensor h =
                decoder.rerun(id, begin, block, k == 0 ? Tensor() : hidden.rows(begin - 1, count));
            hidden.rows(begin, count).copy_from(h);
        }
    }
    expect_same(swept, rows_of(trace_of(decoder, id, hidden)));
}

// What generating would have recorded of these tokens, the last one sampled and never fed.
struct Recording {
    Recording(Model& model, const std::vector<int32_t>& tokens, int P, Mode mode) {
        const std::vector<int32_t> fed(tokens.begin(), tokens.end() - 1);
        const Trace trace = decode_known(model, fed, P, mode);
        const Rows rows = rows_of(trace);
        states.assign(rows.hidden.begin(), rows.hidden.end());
        keys.assign(rows.keys.begin(), rows.keys.end());
        values.assign(rows.values.begin(), rows.values.end());
        const int64_t n = int64_t(tokens.size()) - P;
        for (int64_t i = 0; i < n; ++i)  // one at a time, as they were sampled
            logprobs.push_back(log_probabilities(model.logits(trace.hidden.rows(P - 1 + i, 1)),
                                                 {tokens[size_t(P + i)]})[0]);
    }
    Record record() const { return {states, keys, values, logprobs}; }
    std::vector<float> states, keys, values;
    std::vector<double> logprobs;
};

void flip(float& x, DType dtype) {  // its last bit: bit 16 of a bf16
    x = std::bit_cast<float>(std::bit_cast<uint32_t>(x) ^ (dtype == DType::f32 ? 1u : 1u << 16));
}

TEST_P(ReplayOf, OnePassCertifiesAndEveryWrongBitIsNamed) {
    for (int P : kPrompts) {
        Recording kept(model, tokens, P, mode);
        const auto certified = [&] { return certify(model, tokens, P, mode, kept.record()); };
        const Certificate good = certified();
        EXPECT_TRUE(good.holds()) << good.difference.what << " at " << good.difference.position;
        const std::vector<int32_t> fed(tokens.begin(), tokens.end() - 1);
        expect_same(rows_of(good.trace), rows_of(decode_known(model, fed, P, mode)));

        const auto refused = [&](float& x, int64_t position, const char* what) {
            const float before = x;
            flip(x, dtype);
            const Difference d = certified().difference;
            EXPECT_EQ(d.position, position) << what << ", P " << P;
            EXPECT_EQ(d.what, what) << "P " << P;
            x = before;
        };
        const Config& c = model.config();
        const int64_t fed_count = T - 1, row = c.kv_heads * c.head_dim;
        // The first, the prompt's last, the response's first, some and the last.
        for (int64_t t : {int64_t(0), int64_t(P - 1), std::min<int64_t>(P, T - 2), int64_t(95),
                          int64_t(T - 2)}) {
            refused(kept.states[size_t(t * c.dim + 5)], t, "state");
            refused(kept.keys[size_t((2 * fed_count + t) * row + 3)], t, "keys of layer 3");
            refused(kept.values[size_t(t * row + row - 1)], t, "values of layer 1");
        }
        for (size_t i : {size_t(0), kept.logprobs.size() - 1}) {
            const double before = kept.logprobs[i];
            kept.logprobs[i] = std::nextafter(before, -1e9);
            EXPECT_EQ(certified().difference.position, P + int64_t(i));
            EXPECT_EQ(certified().difference.what, "log-probability");
            kept.logprobs[i] = before;
        }
        // Other tokens than those whose states these are; the last one has no state.
        for (size_t at : {size_t(P), size_t(T - 1)}) {
            const int32_t before = tokens[at];
            tokens[at] = (before + 1) % c.vocab_size;
            EXPECT_EQ(certified().difference.position, int64_t(at));
            tokens[at] = before;
        }
        EXPECT_TRUE(certified().holds());
    }
}

TEST_P(ReplayOf, ARecordOfAnotherSizeIsRefused) {
    const int P = 90;
    const Recording kept(model, tokens, P, mode);
    Record record = kept.record();
    record.states = record.states.first(record.states.size() - 1);
    EXPECT_THROW(certify(model, tokens, P, mode, record), tensor::Error);
    record = kept.record();
    record.keys = record.keys.first(1);
    EXPECT_THROW(certify(model, tokens, P, mode, record), tensor::Error);
    record = kept.record();
    record.logprobs = record.logprobs.first(1);
    EXPECT_THROW(certify(model, tokens, P, mode, record), tensor::Error);
    record = kept.record();
    record.states = {};
    EXPECT_THROW(certify(model, tokens, P, mode, record), tensor::Error);
    record.states = kept.record().states;
    record.keys = record.values = {};
    record.logprobs = {};
    EXPECT_TRUE(certify(model, tokens, P, mode, record).holds()) << "states alone";
}

INSTANTIATE_TEST_SUITE_P(Cpu, ReplayOf,
                         testing::Combine(testing::Values(Fusion::gated_product,
                                                          Fusion::concat_projection,
                                                          Fusion::linear_addition),
                                          testing::Values(Mode::soft, Mode::fused),
                                          testing::Values(DType::f32, DType::bf16)),
                         [](const auto& info) {
                             return to_string(std::get<0>(info.param)) + "_" +
                                    to_string(std::get<1>(info.param)) + "_" +
                                    tensor::name_of(std::get<2>(info.param));
                         });

// A model whose carried states weigh little settles long before as many passes as tokens.
TEST(Replay, SettlesEarlyWhereLittleIsCarried) {
    Context context("cpu", 1);
    Config c = small_config();
    c.fusion = Fusion::linear_addition;
    Model model(context, c, DType::f32);
    randomise(model, false);
    for (nn::Parameter& p : model.parameters().all()) {
        if (p.name() != "feedback.state.weight") continue;
        std::vector<double> weak = normal<double>(tensor::numel_of(p.shape()), 1);
        for (double& x : weak) x *= 1e-5;
        p.set(context, weak, DType::f32, false);
    }
    const std::vector<int32_t> tokens = random_tokens(T, c.vocab_size, 3);
    Replay replay(model, tokens, 10, Mode::soft);
    replay.run({});
    expect_same(rows_of(replay.trace()), rows_of(decode_known(model, tokens, 10, Mode::soft)));
    EXPECT_LT(replay.passes(), 50);
    EXPECT_LT(replay.computed(), replay.visited());
}

TEST(Replay, OfStandardDecodingIsOnePass) {
    Context context("cpu", 1);
    Model model(context, small_config(), DType::f32);
    randomise(model, false);
    const int P = 20;
    std::vector<int32_t> tokens = random_tokens(T, 23, 3);
    const Rows rollout = rows_of(decode_known(model, tokens, P, Mode::standard));
    Replay replay(model, tokens, P, Mode::standard);
    replay.run({.block = 50});
    EXPECT_TRUE(replay.exact());
    EXPECT_EQ(replay.passes(), 2);
    EXPECT_EQ(replay.computed(), T - P);
    expect_same(rows_of(replay.trace()), rollout);

    Recording kept(model, tokens, P, Mode::standard);
    Record record = kept.record();
    EXPECT_TRUE(certify(model, tokens, P, Mode::standard, record).holds());
    record.states = {};  // nothing is carried, so none are needed
    EXPECT_TRUE(certify(model, tokens, P, Mode::standard, record).holds());
    kept.values[7] += 1;
    EXPECT_EQ(certify(model, tokens, P, Mode::standard, kept.record()).difference.position, 0);
}

TEST(Replay, WhatIsNotANumberIsNeverCertified) {
    Context context("cpu", 1);
    Model model(context, small_config(), DType::f32);
    randomise(model, false);
    nn::Parameter& embed = model.parameters().all().front();
    std::vector<double> values = normal<double>(tensor::numel_of(embed.shape()), 1);
    values[0] = NAN;  // of token 0, and of its logit
    embed.set(context, values, DType::f32, false);
    std::vector<int32_t> tokens(12, 5);
    tokens[9] = 0;
    Recording kept(model, tokens, 4, Mode::soft);
    ASSERT_TRUE(std::isnan(kept.states[9 * 24]));
    EXPECT_EQ(certify(model, tokens, 4, Mode::soft, {kept.states, {}, {}, {}}).difference.position,
              9);
    EXPECT_EQ(certify(model, tokens, 4, Mode::soft, kept.record()).difference.what,
              "log-probability");
}

// With one sampled token, or none, no position of the response was fed.
TEST(Replay, CertifiesARolloutThatFedItsPromptOnly) {
    Context context("cpu", 1);
    Model model(context, small_config(), DType::f32);
    randomise(model, false);
    const std::vector<int32_t> tokens = random_tokens(9, 23, 3);
    for (Mode mode : {Mode::standard, Mode::soft, Mode::fused}) {
        Recording kept(model, tokens, 8, mode);
        ASSERT_EQ(kept.logprobs.size(), 1u);
        EXPECT_TRUE(certify(model, tokens, 8, mode, kept.record()).holds());
        flip(kept.states[3], DType::f32);
        EXPECT_EQ(certify(model, tokens, 8, mode, kept.record()).difference.position, 0);
        const std::vector<int32_t> prompt(tokens.begin(), tokens.end() - 1);
        flip(kept.states[3], DType::f32);
        EXPECT_TRUE(certify(model, prompt, 8, mode, {kept.states, {}, {}, {}}).holds());
    }
}

}  // namespace
}  // namespace fbt::tests
