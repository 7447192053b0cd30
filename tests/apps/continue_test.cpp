// fbt generate --continue, and what --sequences, --pages and --cache do and do not change.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "apps/rollouts.h"
#include "tests/apps/program.h"

namespace fbt::tests {
namespace {

using nlohmann::json;

class Continue : public testing::Test {
  protected:
    void SetUp() override { w.train_20("run"); }
    Arguments generate(const Arguments& more) const {
        return Arguments{"generate", "--checkpoint", w / "run", "--threads", "1", "--json"} + more;
    }
    // Prompts of four and two tokens, two samples of each; the rollouts go into NAME.jsonl.
    Arguments sampled(const std::string& name, const std::string& mode,
                      const std::string& tokens) const {
        put(w / "p.txt", "abc\n7\n");
        return generate({"--prompts", w / "p.txt", "--samples", "2", "--mode", mode, "--tokens",
                         tokens, "--states", "--out", w / (name + ".jsonl")});
    }
    Result goes_on(const std::string& from, const std::string& to, const Arguments& more) const {
        return fbt(generate({"--continue", w / (from + ".jsonl"), "--out", w / (to + ".jsonl")}) +
                   more);
    }
    json rollouts(const Result& result) const { return json::parse(result.out)["rollouts"]; }
    const Workplace w;
};

// The states' files have equal bytes, so that names, shapes and all values are equal.
TEST_F(Continue, FromRecordedStatesItIsTheUninterruptedOne) {
    for (const char* mode : {"standard", "soft", "fused"}) {
        const Result whole = fbt(sampled("whole", mode, "15"));
        ASSERT_EQ(whole.code, 0) << whole.err;
        for (const auto& [cut, more] : std::vector<std::pair<const char*, const char*>>{
                 {"1", "14"}, {"2", "13"}, {"9", "6"}, {"14", "1"}}) {
            ASSERT_EQ(fbt(sampled("cut", mode, cut)).code, 0);
            const Result rest = goes_on("cut", "rest", {"--tokens", more, "--states"});
            ASSERT_EQ(rest.code, 0) << rest.err;
            EXPECT_EQ(rollouts(rest), rollouts(whole)) << mode << " " << cut;
            EXPECT_EQ(get(w / "rest.safetensors"), get(w / "whole.safetensors")) << mode << cut;
        }
    }
}

TEST_F(Continue, FromTokensItSaysHowManyAgree) {
    const Result whole = fbt(sampled("whole", "soft", "15"));
    ASSERT_EQ(fbt(sampled("cut", "soft", "9")).code, 0);
    const Result forced = goes_on("cut", "rest", {"--tokens", "6", "--passes", "3"});
    ASSERT_EQ(forced.code, 0) << forced.err;
    std::string rows = get(w / "cut.jsonl");
    for (size_t at = 0; (at = rows.find("\"cut.safetensors\"")) != std::string::npos;)
        rows.replace(at, sizeof "\"cut.safetensors\"" - 1, "null");
    put(w / "cut.jsonl", rows);
    const Result result = goes_on("cut", "rest", {"--tokens", "6"});
    ASSERT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(rollouts(forced), rollouts(result)) << "the record makes no difference";
    ASSERT_EQ(rollouts(result).size(), 4u);
    for (size_t i = 0; i < 4; ++i) {
        const json got = rollouts(result)[i], want = rollouts(whole)[i];
        int agree = 0, first = 6;
        for (size_t t = got["tokens"].size() - 6; t < got["tokens"].size(); ++t)
            if (got["tokens"][t] == want["tokens"][t])
                ++agree;
            else
                first = std::min(first, int(t - (got["tokens"].size() - 6)));
        EXPECT_EQ(got["agree"], agree);
        EXPECT_EQ(got["agree_first"], first);
        EXPECT_NE(result.err.find(std::to_string(agree) + " of 6 tokens agree"), std::string::npos)
            << result.err;
    }
    // With as many passes as positions it is exact, whatever the weights.
    const Result exact = goes_on("cut", "rest", {"--tokens", "6", "--passes", "10"});
    for (const json& rollout : rollouts(exact)) EXPECT_EQ(rollout["agree"], 6);
}

TEST_F(Continue, AWrongBitInTheRecordIsFound) {
    ASSERT_EQ(
        fbt(generate({"--prompt", "abc", "--tokens", "9", "--states", "--out", w / "cut.jsonl"}))
            .code,
        0);
    const std::string good = get(w / "cut.safetensors");
    const size_t row = 16 * sizeof(float);
    for (size_t position : {0, 3, 4, 11}) {  // 12 were fed
        std::string bytes = good;
        bytes[bytes.size() - (12 - position) * row + 8] ^= 1;
        put(w / "cut.safetensors", bytes);
        const Result result = goes_on("cut", "rest", {"--tokens", "3"});
        EXPECT_EQ(result.code, 1);
        EXPECT_NE(result.err.find("state of position " + std::to_string(position) + " is not"),
                  std::string::npos)
            << result.err;
        EXPECT_EQ(rollouts(result)[0]["tokens"].size(), 13u) << "nothing is added";
        // Passes do not need the record, nor does what they are compared with.
        const Result passes = goes_on("cut", "rest", {"--tokens", "3", "--passes", "10"});
        EXPECT_EQ(passes.code, 0) << passes.err;
        EXPECT_EQ(rollouts(passes)[0]["agree"], 3);
    }
}

TEST_F(Continue, TheTextIsShownFromItsBeginning) {
    const Arguments plain = {"generate", "--checkpoint", w / "run", "--threads", "1"};
    const Result whole = fbt(plain + Arguments{"--prompt", "abc", "--tokens", "9"});
    ASSERT_EQ(fbt(generate({"--prompt", "abc", "--tokens", "4", "--out", w / "cut.jsonl"})).code,
              0);
    const Result rest = fbt(plain + Arguments{"--continue", w / "cut.jsonl", "--tokens", "5",
                                              "--passes", "2000000000"});
    EXPECT_EQ(rest.code, 0) << rest.err;
    EXPECT_EQ(rest.out, whole.out +
                            "prompt 1, sample 1: 5 of 5 tokens agree with exact decoding, the "
                            "first 5 without a difference\n");
}

TEST_F(Continue, WhatHasEndedIsLeft) {
    const Result whole = fbt(sampled("whole", "soft", "500"));
    const Result again = goes_on("whole", "again", {"--tokens", "5"});
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_NE(again.err.find("prompt 2, sample 2 is left as it is: the context of 23 is full"),
              std::string::npos)
        << again.err;
    EXPECT_EQ(rollouts(again), rollouts(whole));
    EXPECT_EQ(get(w / "again.safetensors"), "") << "states that nobody asked for";
    EXPECT_EQ(goes_on("whole", "again", {"--tokens", "5", "--states"}).code, 0);
    EXPECT_EQ(get(w / "again.safetensors"), get(w / "whole.safetensors"));
}

TEST_F(Continue, RefusesWhatItCannotGoOnWith) {
    ASSERT_EQ(fbt(sampled("cut", "soft", "3")).code, 0);
    const std::string rows = get(w / "cut.jsonl"), states = get(w / "cut.safetensors");
    for (const char* flag : {"--mode", "--samples", "--seed", "--temperature", "--top-k"})
        EXPECT_TRUE(
            failed(goes_on("cut", "rest", {flag, flag == std::string("--mode") ? "soft" : "1"}), 2,
                   {flag, "--continue"}));
    EXPECT_TRUE(failed(goes_on("cut", "rest", {"--prompt", "a"}), 2, {"--prompt", "--continue"}));
    EXPECT_TRUE(failed(goes_on("cut", "rest", {"--passes", "1"}), 2, {"--passes"}));
    EXPECT_TRUE(
        failed(fbt(generate({"--prompt", "a", "--passes", "3"})), 2, {"--passes", "--continue"}));
    EXPECT_TRUE(failed(goes_on("cut", "rest", {"--dtype", "bf16"}), 2, {"f32", "bf16"}));
    EXPECT_TRUE(failed(goes_on("absent", "rest", {}), 4, {"absent.jsonl"}));
    EXPECT_TRUE(
        failed(goes_on("cut", "rest", {"--passes", "3", "--states"}), 2, {"passes", "--states"}));
    const auto with = [&](const char* key, const json& value) {
        json row = json::parse(rows.substr(0, rows.find('\n')));
        if (value.is_null())
            row.erase(key);
        else
            row[key] = value;
        put(w / "cut.jsonl", row.dump() + "\n");
        return goes_on("cut", "rest", {});
    };
    EXPECT_TRUE(failed(with("weights", "0123456789abcdef"), 4, {"weights", "0123456789abcdef"}));
    EXPECT_TRUE(failed(with("tokens", {256, 97, 98, 99, 300, 1, 2}), 4, {"line 1", "tokens[4]"}));
    EXPECT_TRUE(failed(with("prompt_length", 3), 4, {"line 1", "logprobs"}));
    EXPECT_TRUE(failed(with("seed", json()), 4, {"rollout 1", "seed"}));
    EXPECT_TRUE(failed(with("temperature", "warm"), 4, {"rollout 1", "temperature"}));
    EXPECT_TRUE(failed(with("top_p", 7), 4, {"rollout 1", "top_p"}));
    put(w / "cut.jsonl", rows + rows);
    EXPECT_TRUE(
        failed(goes_on("cut", "rest", {"--states"}), 4, {"prompt 1, sample 1 twice", "leave"}));
    EXPECT_EQ(goes_on("cut", "rest", {}).code, 0);
    put(w / "cut.jsonl", rows);
    put(w / "cut.safetensors", states.substr(0, states.size() / 2));
    EXPECT_TRUE(failed(goes_on("cut", "rest", {}), 4, {"cut.safetensors"}));
}

TEST_F(Continue, PagesAndCompanyChangeNothing) {
    Arguments prompts = sampled("free", "soft", "15");
    const Result free = fbt(prompts);
    for (const Arguments& limits :
         std::vector<Arguments>{{"--sequences", "1"}, {"--sequences", "3", "--pages", "2"}}) {
        const Result result = fbt(prompts + limits);
        ASSERT_EQ(result.code, 0) << result.err;
        EXPECT_EQ(rollouts(result), rollouts(free));
    }
    const json counts = json::parse(free.out)["engine"];
    EXPECT_EQ(counts["reused"], 6) << "two samples share four positions, two share two";
    EXPECT_EQ(counts["positions"], 6 + 4 * 14);
    EXPECT_EQ(counts["calls"], 15);
    EXPECT_TRUE(failed(fbt(prompts + Arguments{"--sequences", "0"}), 2, {"--sequences"}));
}

TEST_F(Continue, TheCacheIsKeptAndCertified) {
    ASSERT_EQ(fbt(generate({"--prompt", "abc", "--tokens", "9", "--states", "--cache", "--out",
                            w / "r.jsonl"}))
                  .code,
              0);
    const Arguments certify = {"replay", "--checkpoint",     w / "run",     "--threads",
                               "1",      "--rollout",        w / "r.jsonl", "--certify",
                               "--save", w / "s.safetensors"};
    const Result result = fbt(certify);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_NE(result.out.find("the states, the cache, 9 log-probabilities"), std::string::npos)
        << result.out;
    EXPECT_EQ(get(w / "s.safetensors"), get(w / "r.safetensors")) << "rebuilt to the last bit";
    EXPECT_TRUE(failed(fbt(generate({"--prompt", "a", "--cache"})), 2, {"--cache", "--out"}));
}

// Weights that overflow: what was sampled before stays, and it is said.
TEST_F(Continue, ANumberThatIsNotFiniteEndsIt) {
    const std::string path = w / "run/step_00000020/model.safetensors";
    std::string bytes = get(path);
    const uint64_t header = *reinterpret_cast<const uint64_t*>(bytes.data());
    const json names = json::parse(bytes.substr(8, header));
    const json at = names["final_norm.gain"]["data_offsets"];
    for (size_t i = at[0]; i < at[1].get<size_t>(); i += sizeof(float))
        *reinterpret_cast<float*>(bytes.data() + 8 + header + i) = 3e38f;
    put(path, bytes);
    const Result result = fbt(generate({"--prompt", "abc", "--out", w / "r.jsonl"}));
    EXPECT_TRUE(result.code == 3) << result.code << result.err;
    EXPECT_NE(result.err.find("log-probability is no finite number"), std::string::npos)
        << result.err;
    const json row = json::parse(get(w / "r.jsonl"));
    EXPECT_EQ(row["finish"], "overflow");
    for (const json& logprob : row["logprobs"]) EXPECT_TRUE(logprob.is_number()) << logprob;
}

// Neither of the two files is replaced where one of them cannot be written.
TEST(Rollouts, AreWrittenWithTheirStatesOrNotAtAll) {
    const TemporaryFolder folder;
    model::core::Config config;
    config.dim = 2;
    apps::RolloutFile file{"w", {{}}, {json::object()}, tensor::DType::f32, {}};
    file.rollouts[0].tokens = {1, 2};
    file.rollouts[0].prompt_length = 1;
    file.rollouts[0].states = {1, 2};
    const auto write = [&](float state) {
        file.rollouts[0].states[0] = state;
        apps::write_rollouts(folder / "r.jsonl", file, config);
    };
    write(1);
    const std::string rows = get(folder / "r.jsonl"), states = get(folder / "r.safetensors");
    for (const char* name : {".r.jsonl.tmp", ".r.safetensors.tmp"}) {
        const std::filesystem::path in_the_way = folder / name;
        std::filesystem::create_directory(in_the_way);
        EXPECT_THROW(write(3), tensor::Error);
        std::filesystem::remove(in_the_way);
        EXPECT_EQ(get(folder / "r.jsonl"), rows);
        EXPECT_EQ(get(folder / "r.safetensors"), states);
        EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 2);
    }
    write(3);
    EXPECT_EQ(get(folder / "r.jsonl"), rows);
    EXPECT_NE(get(folder / "r.safetensors"), states);
}

}  // namespace
}  // namespace fbt::tests
