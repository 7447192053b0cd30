// The engine against one sequence at a time, by memcmp: random arrivals, cancellations, pages that
// run out, cuts of prompts, shared prompts, continued rollouts.
#include <cmath>
#include <cstring>

#include "kernels/philox.h"
#include "model/core/replay.h"
#include "model/engine/engine.h"
#include "tests/data/files.h"
#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

using namespace model::core;
using namespace model::engine;
using kernels::kKeyBlock;

constexpr int kLongest = 90;  // sampled tokens

Config tiny_config(Fusion fusion) {
    Config c;
    c.vocab_size = 11;
    c.dim = 16;
    c.layers = 2;
    c.heads = 2;
    c.kv_heads = 1;
    c.head_dim = 8;
    c.ffn_dim = 21;
    c.context = 240;
    c.window = 40;  // shorter than most prompts
    c.full_attention_every = 2;
    c.fusion = fusion;
    return c;
}

// A request, and what decoding it alone gives: a plain loop over the decoder, token by token.
struct Alone {
    Request request;
    std::vector<int32_t> tokens;
    std::vector<double> logprobs;
    std::vector<float> states;  // of all tokens but the last
};

Alone decode_alone(Model& model, const Request& request, int sample) {
    Alone out{request, request.tokens, {}, {}};
    out.request.stream += uint64_t(sample);
    const auto keep = [&](const Tensor& t) {
        const std::vector<double> x = t.to_double();
        out.states.insert(out.states.end(), x.begin(), x.end());
    };
    Decoder decoder(model, request.mode);
    std::vector<Tensor> head;
    const int id = decoder.prefill({request.tokens}, &head)[0];
    keep(head[0]);
    const auto key = kernels::philox_key(request.seed, kernels::Draw::sampling);
    Tensor h = head[0].rows(head[0].dim(0) - 1, 1);
    for (int n = 0; n < kLongest && int(out.tokens.size()) < model.config().context; ++n) {
        if (n > 0) keep(h = decoder.step({id}, {out.tokens.back()}));
        const Tensor logits = model.logits(h);
        const float uniform =
            kernels::uniform_float(kernels::philox_bits(key, out.request.stream, uint32_t(n)));
        const auto token = tensor::sample(logits, {request.sampling}, {uniform});
        out.tokens.push_back(token[0]);
        out.logprobs.push_back(log_probabilities(logits, token)[0]);
    }
    return out;
}

template <class T>
bool begins_with(const std::vector<T>& whole, const std::vector<T>& part) {
    return part.empty() || (part.size() <= whole.size() &&
                            std::memcmp(whole.data(), part.data(), part.size() * sizeof(T)) == 0);
}

class Requests {
  protected:
    Requests(Fusion fusion, DType dtype)
        : context("cpu", 1), model(context, tiny_config(fusion), dtype) {
        randomise(model, false);
        // Prompts of one token, around a page, and beyond two; some begin alike.
        const std::vector<int32_t> common = random_tokens(140, 11, 5);
        unsigned seed = 1;
        for (int length : {1, 2, 63, 64, 65, 100, 128, 139})
            for (Mode mode : {Mode::standard, Mode::soft, Mode::fused}) {
                Request r;
                r.tokens = {common.begin(), common.begin() + length};
                if (seed % 4 == 0) r.tokens[0] = (r.tokens[0] + 1) % 11;
                r.mode = mode;
                r.sampling = {seed % 3 == 0 ? 0.f : 1.f, int(seed % 5), seed % 2 ? 1.f : 0.9f};
                r.seed = seed;
                r.stream = uint64_t(seed) << 32;
                r.max_tokens = kLongest;
                r.keep_states = true;
                requests.push_back(r);
                ++seed;
            }
    }

    Context context;
    Model model;
    std::vector<Request> requests;
};

class Schedules : public Requests, public testing::TestWithParam<std::tuple<Fusion, DType>> {
  protected:
    Schedules() : Requests(std::get<0>(GetParam()), std::get<1>(GetParam())) {
        for (const Request& r : requests)
            alone.push_back({decode_alone(model, r, 0), decode_alone(model, r, 1)});
    }
    void run(unsigned seed);

    std::vector<std::array<Alone, 2>> alone;  // two samples of each request
    Engine::Counts counts;                    // of all runs
    int cancelled = 0, continued = 0;
};

class OneEngine : public Requests, public testing::Test {
  protected:
    OneEngine() : Requests(Fusion::gated_product, DType::f32) {}
};

void Schedules::run(unsigned seed) {
    std::mt19937 random(seed);
    const auto below = [&](int n) { return int(random() % unsigned(n)); };
    // Four pages hold the longest sequence alone.
    EngineConfig config;
    config.sequences = 1 + below(7);
    config.rows = 1 + below(2) * below(150);
    config.pages = below(4) == 0 ? 0 : 4 + below(6);
    Engine engine(model, config);
    std::map<int64_t, const Alone*> live;
    std::map<int64_t, Request> asked;
    int left = 3 + below(8);
    while (left > 0 || !engine.idle()) {
        if (left > 0 && below(4) == 0) {
            --left;
            const std::array<Alone, 2>& chosen = alone[size_t(below(int(alone.size())))];
            Request r = chosen[0].request;
            r.max_tokens = 1 + below(kLongest);
            int samples = 1 + below(2);
            if (below(4) == 0) {  // goes on with a rollout of n tokens
                const int n = 1 + below(kLongest - 1), P = int(r.tokens.size());
                r.prompt_length = P;
                r.tokens.assign(chosen[0].tokens.begin(), chosen[0].tokens.begin() + P + n);
                r.logprobs.assign(chosen[0].logprobs.begin(), chosen[0].logprobs.begin() + n);
                r.max_tokens = n + 1 + below(kLongest - n);
                const int64_t D = model.config().dim, T = P + n - 1;
                if (r.mode != Mode::standard)
                    r.states = Tensor::from_double(
                        context, {chosen[0].states.begin(), chosen[0].states.begin() + T * D},
                        {T, D}, model.dtype());
                samples = 1;
                ++continued;
            }
            const int64_t id = engine.submit(r, samples);
            for (int i = 0; i < samples; ++i) {
                live[id + i] = &chosen[size_t(i)];
                asked[id + i] = r;
            }
        }
        if (!live.empty() && below(100) == 0) {
            auto at = live.begin();
            std::advance(at, below(int(live.size())));
            cancelled += !engine.ended(at->first);
            engine.cancel(at->first);
        }
        engine.step();
        ASSERT_TRUE(config.pages == 0 || engine.store().held() <= config.pages);
        for (auto at = live.begin(); at != live.end();) {
            const auto [id, want] = *at;
            if (!engine.ended(id)) {
                ++at;
                continue;
            }
            const Rollout r = engine.take(id);
            at = live.erase(at);
            const std::string which = "seed " + std::to_string(seed) + ", sequence " +
                                      std::to_string(id) + ", " + to_string(r.mode) + ", prompt " +
                                      std::to_string(r.prompt_length) + ", " + to_string(r.finish);
            ASSERT_TRUE(begins_with(want->tokens, r.tokens)) << which;
            ASSERT_TRUE(begins_with(want->logprobs, r.logprobs)) << which;
            ASSERT_TRUE(begins_with(want->states, r.states)) << which;
            if (r.finish == Finish::interrupted) continue;
            ASSERT_EQ(r.finish, Finish::length) << which;
            ASSERT_EQ(int(r.logprobs.size()), asked[id].max_tokens) << which;
            ASSERT_EQ(r.states.size(), (r.tokens.size() - 1) * size_t(model.config().dim)) << which;
        }
    }
    ASSERT_EQ(engine.store().held(), 0) << "seed " << seed << " leaks pages";
    counts.preempted += engine.counts().preempted;
    counts.rebuilt += engine.counts().rebuilt;
    counts.reused += engine.counts().reused;
}

// Six of these make more than a thousand schedules (FBT_SCHEDULES is 170, with sanitizers fewer).
TEST_P(Schedules, ChangeNoBit) {
    const auto [fusion, dtype] = GetParam();
    for (unsigned i = 0; i < FBT_SCHEDULES; ++i) {
        run(i + 1000 * (2 * unsigned(fusion) + (dtype == DType::bf16)));
        if (HasFatalFailure()) return;
    }
    // All of it happened.
    EXPECT_GT(counts.preempted, FBT_SCHEDULES / 4);
    EXPECT_GT(counts.rebuilt, 5 * FBT_SCHEDULES);
    EXPECT_GT(counts.reused, 5 * FBT_SCHEDULES);
    EXPECT_GT(cancelled, FBT_SCHEDULES / 2);
    EXPECT_GT(continued, FBT_SCHEDULES / 2);
}

INSTANTIATE_TEST_SUITE_P(Tiny, Schedules,
                         testing::Combine(testing::Values(Fusion::gated_product,
                                                          Fusion::concat_projection,
                                                          Fusion::linear_addition),
                                          testing::Values(DType::f32, DType::bf16)),
                         [](const auto& info) {
                             return to_string(std::get<0>(info.param)) + "_" +
                                    tensor::name_of(std::get<1>(info.param));
                         });

// One sequence at a time, so that pages are found by what earlier ones left.
TEST_F(OneEngine, PlainPrefixesAreComputedOnce) {
    Engine engine(model);
    const auto decode = [&](Request request) {
        request.max_tokens = 3;
        const int64_t id = engine.submit(request);
        const int64_t rows = engine.counts().rows;
        while (!engine.idle()) engine.step();
        EXPECT_EQ(engine.take(id).finish, Finish::length);
        return engine.counts().rows - rows;
    };
    // Of the last three requests one is of each mode, with prompts of 139 tokens.
    const size_t n = requests.size();
    const Request &standard = requests[n - 3], &soft = requests[n - 2], &fused = requests[n - 1];
    Request same = soft;
    same.tokens = standard.tokens;
    EXPECT_EQ(decode(standard), 139 + 2);
    EXPECT_EQ(decode(same), 11 + 2) << "two whole pages are plain in both modes";
    EXPECT_EQ(decode(standard), 11 + 2);
    EXPECT_EQ(engine.counts().reused, 4 * kKeyBlock);
    EXPECT_EQ(decode(fused), 139 + 138 + 2) << "runs its prompt twice";
    EXPECT_EQ(decode(fused), 139 + 138 + 2) << "and shares it with nobody";
    // Standard decoding is plain all over: its response is found too.
    Request longer = standard;
    longer.max_tokens = 90;
    const int64_t id = engine.submit(longer);
    while (!engine.idle()) engine.step();
    longer.tokens = engine.take(id).tokens;
    EXPECT_EQ(longer.tokens.size(), 139u + 90);
    EXPECT_EQ(decode(longer), 229 - 3 * kKeyBlock + 2);
    // A prompt of whole pages: its last position is computed, for the token after it.
    Request whole = standard;
    whole.tokens.resize(2 * kKeyBlock);
    EXPECT_EQ(decode(whole), kKeyBlock + 2);
}

TEST_F(OneEngine, AWrongBitInARecordEndsIt) {
    for (size_t i : {13u, 14u}) {  // soft and fused
        const Alone a = decode_alone(model, requests[i], 0);
        Request r = a.request;
        const int P = int(r.tokens.size()), n = 20, T = P + n - 1, D = model.config().dim;
        ASSERT_NE(r.mode, Mode::standard);
        r.prompt_length = P;
        r.tokens.assign(a.tokens.begin(), a.tokens.begin() + P + n);
        r.logprobs.assign(a.logprobs.begin(), a.logprobs.begin() + n);
        for (int position : {0, P - 1, P, T - 1}) {
            r.states = Tensor::empty(context, {T, D}, model.dtype());
            r.states.copy_from(Tensor::from_double(
                context, {a.states.begin(), a.states.begin() + T * D}, {T, D}, model.dtype()));
            r.states.rows(position, 1).raw()[0] ^= std::byte(1);
            Engine engine(model);
            const int64_t id = engine.submit(r);
            while (!engine.idle()) EXPECT_TRUE(engine.step().empty());
            EXPECT_EQ(engine.rollout(id).mismatch, position);
            const Rollout rollout = engine.take(id);
            EXPECT_EQ(rollout.finish, Finish::mismatch);
            EXPECT_EQ(rollout.tokens, r.tokens);
            EXPECT_TRUE(rollout.states.empty());
        }
    }
}

// Whoever has states to be compared with computes its own prompt, one of several samples too.
TEST_F(OneEngine, SamplesOfAPromptWithItsStates) {
    for (size_t i : {12u, 13u, 14u}) {  // one of each mode
        const Alone a[] = {decode_alone(model, requests[i], 0),
                           decode_alone(model, requests[i], 1)};
        Request r = requests[i];
        const int64_t T = int64_t(r.tokens.size()) - 1, D = model.config().dim;
        r.states = Tensor::from_double(context, {a[0].states.begin(), a[0].states.begin() + T * D},
                                       {T, D}, model.dtype());
        Engine engine(model);
        const int64_t id = engine.submit(r, 2);
        while (!engine.idle()) engine.step();
        for (int sample : {0, 1}) {
            const Rollout rollout = engine.take(id + sample);
            EXPECT_EQ(rollout.finish, Finish::length);
            EXPECT_EQ(rollout.tokens, a[sample].tokens);
        }
    }
}

// What goes on from approximate states is the same however often it gives up its pages on the way.
TEST_F(OneEngine, ApproximateStatesArePreempted) {
    for (size_t i : {13u, 14u}) {  // soft and fused
        const Alone a = decode_alone(model, requests[i], 0);
        Request r = requests[i];
        const int P = int(r.tokens.size()), n = 30, T = P + n - 1;
        r.prompt_length = P;
        r.tokens.assign(a.tokens.begin(), a.tokens.begin() + P + n);
        r.logprobs.assign(a.logprobs.begin(), a.logprobs.begin() + n);
        r.approximate = r.keep_cache = true;
        Replay replay(model, {r.tokens.begin(), r.tokens.begin() + T}, P, r.mode);
        replay.next();  // after a single pass far from the rollout's own
        r.states = replay.trace().hidden;
        const auto run = [&](int pages, bool cancelled) {
            Engine engine(model, {.pages = pages});
            Request older = requests[9];  // which takes all four pages in the end
            older.max_tokens = 170;
            engine.submit(older);
            const int64_t id = engine.submit(r);
            while (!engine.ended(id)) {
                engine.step();
                if (cancelled && engine.counts().preempted > 0) engine.cancel(id);
            }
            EXPECT_EQ(engine.counts().preempted > 0, pages > 0);
            return engine.take(id);
        };
        const Rollout whole = run(0, false), preempted = run(4, false), cancelled = run(4, true);
        EXPECT_EQ(whole.finish, Finish::length);
        EXPECT_EQ(preempted.finish, Finish::length);
        EXPECT_EQ(preempted.tokens, whole.tokens);
        EXPECT_EQ(preempted.logprobs, whole.logprobs);
        EXPECT_EQ(preempted.states, whole.states);
        EXPECT_EQ(preempted.keys, whole.keys);
        EXPECT_EQ(preempted.values, whole.values);
        EXPECT_EQ(cancelled.finish, Finish::interrupted);
        EXPECT_TRUE(cancelled.states.empty()) << "what it would be rebuilt from is not its own";
    }
}

TEST_F(OneEngine, StopTokensAndNothingToSample) {
    Request r = requests[4];
    const std::vector<int32_t> tokens = decode_alone(model, r, 0).tokens;
    const size_t P = r.tokens.size();
    const auto run = [&](const Request& request) {
        Engine engine(model);
        const int64_t id = engine.submit(request);
        while (!engine.idle()) engine.step();
        EXPECT_THROW(engine.take(id + 1), tensor::Error);
        return engine.take(id);
    };
    r.stop_tokens = {tokens[P + 5], 11};
    const size_t first = size_t(
        std::find(tokens.begin() + int64_t(P), tokens.end(), tokens[P + 5]) - tokens.begin());
    const Rollout stopped = run(r);
    EXPECT_EQ(stopped.finish, Finish::stop);
    EXPECT_EQ(stopped.tokens.size(), first + 1);
    r.max_tokens = 0;
    const Rollout none = run(r);
    EXPECT_EQ(none.finish, Finish::length);
    EXPECT_EQ(none.tokens, r.tokens);
    EXPECT_EQ(none.states.size(), P * size_t(model.config().dim));
    r.max_tokens = 1000;
    r.stop_tokens = {};
    r.tokens = random_tokens(model.config().context - 2, 11, 3);
    const Rollout full = run(r);
    EXPECT_EQ(full.finish, Finish::context);
    EXPECT_EQ(full.logprobs.size(), 2u);
}

TEST_F(OneEngine, RequestsThatCannotBe) {
    EXPECT_TRUE(throws(tensor::ErrorKind::usage, {"0 sequences"},
                       [&] { Engine none(model, {.sequences = 0}); }));
    Engine engine(model, {.pages = 3});
    const Request good = requests[4];
    const auto refused = [&](std::initializer_list<const char*> words, auto&& change) {
        Request r = good;
        change(r);
        return throws(tensor::ErrorKind::usage, words, [&] { engine.submit(r); });
    };
    EXPECT_TRUE(refused({"prompt 1 is empty"}, [](Request& r) { r.tokens.clear(); }));
    EXPECT_TRUE(refused({"token 11", "vocabulary of 11"}, [](Request& r) { r.tokens[1] = 11; }));
    EXPECT_TRUE(refused({"token -1"}, [](Request& r) { r.tokens[0] = -1; }));
    EXPECT_TRUE(refused({"240 tokens", "context is 240"},
                        [](Request& r) { r.tokens = random_tokens(240, 11, 1); }));
    EXPECT_TRUE(refused({"193 positions", "4 pages of 64", "all are 3"}, [](Request& r) {
        r.tokens = random_tokens(100, 11, 1);
        r.max_tokens = 94;
    }));
    EXPECT_TRUE(refused({"log-probabilities"}, [](Request& r) { r.prompt_length = 1; }));
    EXPECT_TRUE(refused({"its 6 states of 16"}, [](Request& r) {
        r.mode = Mode::soft;
        r.tokens = {1, 2, 3, 4, 5, 6, 7};
        r.prompt_length = 4;
        r.logprobs = {-1, -1, -1};
    }));
    EXPECT_TRUE(
        refused({"temperature"}, [](Request& r) { r.sampling.temperature = std::nanf(""); }));
    EXPECT_TRUE(refused({"top_k"}, [](Request& r) { r.sampling.top_k = -1; }));
    EXPECT_TRUE(engine.idle());
}

}  // namespace
}  // namespace fbt::tests
