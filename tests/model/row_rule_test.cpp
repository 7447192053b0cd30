// The row rule by memcmp: the same position computed in a whole-sequence call, in a call cut
// anywhere, alone, in any batch, on 1 or 2 threads; hence decoding, prefill, training's forward and
// replay from recorded states agree bit for bit. Lengths go beyond three attention splits, and the
// sliding window starts inside a split.
#include "model/core/replay.h"
#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

using namespace model::core;

constexpr int T = 3 * kernels::kKeyBlock + 9;  // 201

class RowRule : public testing::TestWithParam<std::tuple<int, DType>> {  // threads, dtype
  protected:
    RowRule()
        : threads(std::get<0>(GetParam())),
          dtype(std::get<1>(GetParam())),
          context("cpu", threads),
          model(context, small_config(), dtype) {
        randomise(model, false);
        tokens = random_tokens(T, model.config().vocab_size, 7);
    }

    // The plain stack over the sequence, in calls that end at `cuts`, with `others` in the batch.
    Rows in_pieces(const std::vector<int>& cuts, const std::vector<int>& others = {}) {
        auto store = std::make_shared<PagedStore>(model);
        Tensor hidden = Tensor::empty(context, {T, model.config().dim}, dtype);
        PagedStore::Pages pages;
        std::vector<PagedStore::Pages> other_pages(others.size());
        int first = 0;
        for (int end : cuts) {
            auto spans = std::make_shared<SpanBatch>();
            std::vector<int32_t> ids;
            // Other sequences around ours, each from its own beginning in every call.
            const auto add_other = [&](size_t i) {
                store->reserve(other_pages[i], 0, others[i]);
                PagedStore::add_span(*spans, other_pages[i], 0, others[i]);
                const auto more = random_tokens(others[i], model.config().vocab_size, 50 + i);
                ids.insert(ids.end(), more.begin(), more.end());
            };
            for (size_t i = 0; i < others.size() / 2; ++i) add_other(i);
            const int64_t row = int64_t(ids.size());
            store->reserve(pages, first, end);
            PagedStore::add_span(*spans, pages, first, end - first);
            ids.insert(ids.end(), tokens.begin() + first, tokens.begin() + end);
            for (size_t i = others.size() / 2; i < others.size(); ++i) add_other(i);
            const Tensor h = advance(model, store, spans, ids);
            hidden.rows(first, end - first).copy_from(h.rows(row, end - first));
            first = end;
        }
        Trace trace{hidden, {}, {}};
        for (int l = 0; l < model.config().layers; ++l) {
            trace.keys.push_back(store->read_keys(pages, l, 0, T));
            trace.values.push_back(store->read_values(pages, l, 0, T));
        }
        return rows_of(trace);
    }

    int threads;
    DType dtype;
    Context context;
    Model model;
    std::vector<int32_t> tokens;
};

TEST_P(RowRule, PlainStackDoesNotDependOnCutsOrCompany) {
    const Rows whole = in_pieces({T});
    std::vector<int> single(T);
    for (int t = 0; t < T; ++t) single[t] = t + 1;
    expect_same(in_pieces(single), whole);
    for (const std::vector<int>& cuts :
         std::vector<std::vector<int>>{{1, T}, {T - 1, T}, {64, 128, 192, T}, {63, 65, 130, T}})
        expect_same(in_pieces(cuts), whole);
    expect_same(in_pieces({T}, {5, 1, 130, 64}), whole);
    expect_same(in_pieces({100, T}, {1, 300}), whole);
}

TEST_P(RowRule, ThreadsDoNotMatter) {
    const Rows here = in_pieces({T});
    Context other("cpu", 3 - threads);
    Model same(other, small_config(), dtype);
    randomise(same, false);
    auto store = std::make_shared<PagedStore>(same);
    auto spans = std::make_shared<SpanBatch>();
    PagedStore::Pages pages;
    store->reserve(pages, 0, T);
    PagedStore::add_span(*spans, pages, 0, T);
    EXPECT_TRUE(same_bits(advance(same, store, spans, tokens).to_double(), here.hidden));
}

TEST_P(RowRule, DecodingEqualsPrefillEqualsTraining) {
    const int P = 70;
    const Rows decoded = rows_of(decode_known(model, tokens, P, Mode::standard));
    expect_same(decoded, in_pieces({T}));

    Batch batch = random_batch({3, T, 10}, model.config().vocab_size, 9);
    std::copy(tokens.begin(), tokens.end(), batch.tokens.begin() + 3);
    Tape tape(false);
    const Objective training = objective(model, tape, batch, {}, {.keep_states = true});
    EXPECT_TRUE(same_bits(training.states[0].rows(3, T).to_double(), decoded.hidden));
}

// With pass 1's prompt as the prefix, training's second pass fuses response position t with the
// plain state before it; so does replay's.
TEST_P(RowRule, TrainingPassesEqualReplayPasses) {
    const int P = 75;
    Batch batch = random_batch({T, 4}, model.config().vocab_size, 9);
    std::copy(tokens.begin(), tokens.end(), batch.tokens.begin());
    PassPlan plan;
    plan.passes = 4;
    plan.plain.assign(3, {P, 1});
    Tape tape(false);
    const Objective training = objective(model, tape, batch, plan, {.keep_states = true});
    Replay replay(model, tokens, P, Mode::soft);
    for (int k = 0; k < 4; ++k) {
        replay.next();
        EXPECT_TRUE(
            same_bits(training.states[k].rows(0, T).to_double(), replay.trace().hidden.to_double()))
            << "pass " << k + 1;
    }
}

// The fused prompt is training's second pass with position 0 plain.
TEST_P(RowRule, FusedPrefillEqualsTheSecondPass) {
    for (int P : {1, 2, 3, 150}) {
        Batch batch = random_batch({P}, model.config().vocab_size, 9);
        std::copy_n(tokens.begin(), P, batch.tokens.begin());
        PassPlan plan;
        plan.passes = 2;
        plan.plain = {{1}};
        Tape tape(false);
        const Objective training = objective(model, tape, batch, plan, {.keep_states = true});
        std::vector<Tensor> states;
        Decoder(model, Mode::fused).prefill({batch.tokens}, &states);
        EXPECT_TRUE(same_bits(states[0].to_double(), training.states[1].to_double())) << P;
    }
}

// Prompts are packed into calls of at most 4096 rows.
TEST_P(RowRule, PrefillDoesNotDependOnGrouping) {
    std::vector<std::vector<int32_t>> prompts;
    for (int length : {4097, 1, 2, 1500, 2594, 2593})
        prompts.push_back(random_tokens(length, model.config().vocab_size, unsigned(length)));
    std::vector<Tensor> together;
    Decoder decoder(model, Mode::fused);
    const std::vector<int> ids = decoder.prefill(prompts, &together);
    for (size_t i = 0; i < prompts.size(); ++i) {
        std::vector<Tensor> alone;
        Decoder one(model, Mode::fused);
        const int id = one.prefill({prompts[i]}, &alone)[0];
        EXPECT_TRUE(same_bits(together[i].to_double(), alone[0].to_double()));
        EXPECT_TRUE(same_bits(decoder.states({ids[i]}).to_double(), one.states({id}).to_double()));
    }
}

TEST_P(RowRule, RecordedStatesRebuildTheRolloutBitForBit) {
    for (Mode mode : {Mode::standard, Mode::soft, Mode::fused})
        for (int P : {1, 64, 131}) {
            const Trace rollout = decode_known(model, tokens, P, mode);
            const Trace again = replay_recorded(model, tokens, P, mode, rollout.hidden);
            expect_same(rows_of(again), rows_of(rollout));
            const ReplayError e = compare(model, rollout, again, P, std::vector<int32_t>(T - P, 3));
            EXPECT_EQ(e.keys, 0);
            EXPECT_EQ(e.values, 0);
            EXPECT_EQ(e.kl, 0);
            EXPECT_EQ(e.logprob, 0);
            EXPECT_EQ(e.argmax, 1);
            EXPECT_EQ(e.exact, T - P);
            EXPECT_EQ(e.prefix, T - P);
            // One state that differs ends the prefix, and is one position that is not exact.
            std::vector<double> states = again.hidden.to_double();
            states[size_t(P + 2) * size_t(again.hidden.dim(1))] += 1;
            const Trace other = {
                Tensor::from_double(context, states, again.hidden.shape(), again.hidden.dtype()),
                again.keys, again.values};
            const ReplayError d = compare(model, rollout, other, P, std::vector<int32_t>(T - P, 3));
            EXPECT_EQ(d.prefix, 2);
            EXPECT_EQ(d.exact, T - P - 1);
        }
}

// A state that is off by one bit anywhere is noticed: the certificate can fail.
TEST_P(RowRule, OneWrongBitInTheRecordShows) {
    const int P = 64;
    const Trace rollout = decode_known(model, tokens, P, Mode::soft);
    Tensor states = Tensor::empty(context, rollout.hidden.shape(), dtype);
    states.copy_from(rollout.hidden);
    // Bit 16 of a float, the last of a bf16.
    states.rows(100, 1).raw()[dtype == DType::f32 ? 2 : 0] ^= std::byte(1);
    const Trace again = replay_recorded(model, tokens, P, Mode::soft, states);
    EXPECT_FALSE(same_bits(again.hidden.to_double(), rollout.hidden.to_double()));
}

TEST_P(RowRule, SoftDecodingDoesNotDependOnTheBatch) {
    const int P = 20;
    const Rows alone = rows_of(decode_known(model, tokens, P, Mode::soft));
    Decoder decoder(model, Mode::soft);
    std::vector<std::vector<int32_t>> prompts = {
        random_tokens(90, 23, 1), {tokens.begin(), tokens.begin() + P}, random_tokens(1, 23, 2)};
    std::vector<int> ids = decoder.prefill(prompts);
    ids.push_back(decoder.fork(ids[1]));  // a sample that takes another way
    const int64_t D = model.config().dim;
    std::vector<double> hidden(alone.hidden.begin(), alone.hidden.begin() + P * D);
    for (int t = P; t < T; ++t) {
        const Tensor h = decoder.step(ids, {int32_t(t % 23), tokens[t], int32_t(t % 7), 5});
        const std::vector<double> row = h.rows(1, 1).to_double();
        hidden.insert(hidden.end(), row.begin(), row.end());
    }
    EXPECT_TRUE(same_bits(hidden, alone.hidden));
    // The fork did not write into the pages it shares.
    const auto keys = decoder.store().read_keys(decoder.pages(ids[1]), 0, 0, T).to_double();
    EXPECT_TRUE(same_bits(keys, {alone.keys.begin(), alone.keys.begin() + int64_t(keys.size())}));
}

// After n passes the first n-1 response positions are exact for any weights.
TEST_P(RowRule, ReplayMakesOnePositionExactAPass) {
    const int P = 60, length = 72;
    const std::vector<int32_t> some(tokens.begin(), tokens.begin() + length);
    for (Mode mode : {Mode::soft, Mode::fused}) {
        const Trace rollout = decode_known(model, some, P, mode);
        Replay replay(model, some, P, mode);
        for (int n = 1; n <= length - P + 1; ++n) {
            replay.next();
            const ReplayError e =
                compare(model, rollout, replay.trace(), P, std::vector<int32_t>(length - P, 1));
            EXPECT_GE(e.prefix, n - 1);
            EXPECT_GE(e.exact, e.prefix);
            if (n == length - P + 1) {
                EXPECT_EQ(e.keys, 0);
                EXPECT_EQ(e.exact, length - P);
            } else if (n < 5) {
                EXPECT_GT(e.keys, 0) << n;
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Cpu, RowRule,
                         testing::Combine(testing::Values(1, 2),
                                          testing::Values(DType::f32, DType::bf16)),
                         [](const auto& info) {
                             return std::to_string(std::get<0>(info.param)) +
                                    (std::get<0>(info.param) == 1 ? "_thread_" : "_threads_") +
                                    tensor::name_of(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace fbt::tests
