// fbt generate, replay, eval, data: from a trained model to certified rollouts.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "model/data/tasks.h"
#include "tensor/safetensors.h"
#include "tests/apps/program.h"

namespace fbt::tests {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::vector<json> lines_of(const std::string& path) {
    std::vector<json> rows;
    std::istringstream in(get(path));
    for (std::string line; std::getline(in, line);) rows.push_back(json::parse(line));
    return rows;
}

// Throws unless the text is UTF-8.
void expect_utf8(const std::string& text) { EXPECT_NO_THROW(json(text).dump()) << text; }

class OnTrained : public testing::Test {
  protected:
    void SetUp() override { w.train_20("run"); }
    Arguments generate(const Arguments& more) const {
        return Arguments{"generate", "--checkpoint", w / "run", "--threads", "1"} + more;
    }
    Arguments replay(const Arguments& more = {}) const {
        return Arguments{"replay",    "--checkpoint", w / "run",
                         "--rollout", w / "r.jsonl",  "--threads",
                         "1",         "--recorded",   "--json"} +
               more;
    }
    const Workplace w;
};

TEST_F(OnTrained, RolloutsReplayExactlyFromRecordedStates) {
    for (const char* mode : {"soft", "fused"}) {
        ASSERT_EQ(fbt(generate({"--prompt", "123 and", "--mode", mode, "--tokens", "12",
                                "--samples", "3", "--out", w / "r.jsonl", "--states"}))
                      .code,
                  0);
        const std::vector<json> rows = lines_of(w / "r.jsonl");
        ASSERT_EQ(rows.size(), 3u);
        EXPECT_EQ(rows[1]["prompt_length"], 8) << "7 bytes after the boundary token";
        EXPECT_EQ(rows[1]["tokens"][0], 256);
        EXPECT_EQ(rows[1]["tokens"].size(), 20u);
        EXPECT_EQ(rows[1]["logprobs"].size(), 12u);
        EXPECT_EQ(rows[1]["states"], "r.safetensors");
        EXPECT_NE(rows[0]["tokens"], rows[1]["tokens"]) << "samples differ";
        const Result result = fbt(replay());
        ASSERT_EQ(result.code, 0) << result.err;
        const json document = json::parse(result.out);
        ASSERT_EQ(document["rollouts"].size(), 3u);
        for (const json& rollout : document["rollouts"]) {
            EXPECT_TRUE(rollout["states_equal"].get<bool>());
            const json& recorded = rollout["rows"].back();
            EXPECT_EQ(recorded["passes"], "recorded");
            EXPECT_EQ(recorded["keys"], 0.0);
            EXPECT_EQ(recorded["values"], 0.0);
            EXPECT_EQ(recorded["kl"], 0.0);
            EXPECT_EQ(recorded["logprob"], 0.0);
            EXPECT_EQ(recorded["exact"], 11);
            EXPECT_GT(rollout["rows"][0]["keys"].get<double>(), 0) << "one pass is not exact";
            EXPECT_GE(rollout["rows"][2]["exact"].get<int>(), 2) << "n passes: n-1 positions";
        }
    }
}

TEST_F(OnTrained, OneWrongBitInTheRecordedStatesIsFound) {
    ASSERT_EQ(
        fbt(generate({"--prompt", "7 and", "--tokens", "9", "--out", w / "r.jsonl", "--states"}))
            .code,
        0);
    std::string bytes = get(w / "r.safetensors");
    const size_t row = 16 * sizeof(float);
    bytes[bytes.size() - 3 * row] ^= 1;  // the lowest bit of a value three positions from the end
    put(w / "r.safetensors", bytes);
    const size_t fed = lines_of(w / "r.jsonl")[0]["tokens"].size() - 1;
    const Result result = fbt(replay());
    EXPECT_EQ(result.code, 1);
    EXPECT_NE(result.err.find("first at position " + std::to_string(fed - 3) + "\n"),
              std::string::npos)
        << result.err;
}

TEST_F(OnTrained, ReplayRefusesWhatItCannotReplay) {
    ASSERT_EQ(fbt(generate({"--prompt", "a", "--mode", "standard", "--tokens", "3", "--out",
                            w / "r.jsonl"}))
                  .code,
              0);
    EXPECT_TRUE(failed(fbt(replay()), 2, {"standard", "needs no replay"}));
    ASSERT_EQ(fbt(generate({"--prompt", "a", "--tokens", "1", "--out", w / "r.jsonl"})).code, 0);
    const Result single = fbt(replay());
    EXPECT_EQ(single.code, 0);
    EXPECT_NE(single.err.find("nothing to replay"), std::string::npos) << single.err;

    json row = lines_of(w / "r.jsonl")[0];
    const auto with = [&](const char* key, const json& value) {
        json changed = row;
        changed[key] = value;
        put(w / "r.jsonl", changed.dump() + "\n");
        return fbt(replay());
    };
    EXPECT_TRUE(failed(with("weights", "0123456789abcdef"), 4, {"weights", "0123456789abcdef"}));
    EXPECT_TRUE(failed(with("prompt_length", 9), 4, {"line 1", "prompt_length"}));
    EXPECT_TRUE(failed(with("tokens", {256, 97, 300}), 4, {"line 1", "tokens[2]", "300", "256"}));
    const json wrong = {-1, 1.5, "1", 4294967297, uint64_t(1) << 63, nullptr};
    for (const json& value : wrong) {
        for (const char* key : {"prompt", "sample", "prompt_length"})
            EXPECT_TRUE(failed(with(key, value), 4, {"line 1", key, "integer"})) << value;
        EXPECT_TRUE(failed(with("tokens", {256, value}), 4, {"line 1", "tokens[1]"})) << value;
    }
    EXPECT_TRUE(failed(with("tokens", std::vector<int>(24, 1)), 4, {"line 1", "24", "23"}));
    EXPECT_TRUE(failed(with("tokens", 3), 4, {"line 1", "tokens", "array"}));
    for (const json& value : json({0.5, -1e300, nullptr}))
        EXPECT_TRUE(failed(with("logprobs", json::array({value})), 4, {"line 1", "logprobs[0]"}))
            << value;
    EXPECT_TRUE(failed(with("mode", "hard"), 4, {"line 1", "hard"}));
    EXPECT_TRUE(failed(with("logprobs", json::array()), 4, {"line 1", "logprobs"}));
    EXPECT_TRUE(failed(with("states", "absent.safetensors"), 4, {"absent.safetensors"}));
    put(w / "r.jsonl", "not json\n");
    EXPECT_TRUE(failed(fbt(replay()), 4, {"r.jsonl line 1"}));
    put(w / "r.jsonl", "");
    EXPECT_TRUE(failed(fbt(replay()), 4, {"no rollout"}));
    EXPECT_TRUE(failed(fbt(replay({"--passes", "1,x"})), 2, {"--passes", "1,x"}));
    EXPECT_TRUE(failed(fbt(replay({"--passes", "0"})), 2, {"--passes"}));
}

TEST_F(OnTrained, StreamsUtf8Whatever) {
    // At this temperature nearly any byte is as likely, so most of the text is not UTF-8.
    const Result result = fbt(generate(
        {"--prompt", "n\xc3\xa4", "--tokens", "18", "--seed", "3", "--temperature", "20"}));
    ASSERT_EQ(result.code, 0) << result.err;
    EXPECT_TRUE(result.out.starts_with("n\xc3\xa4")) << result.out;
    expect_utf8(result.out);
    EXPECT_NE(result.out.find("\xef\xbf\xbd"), std::string::npos) << "no byte was replaced";
    const Result document =
        fbt(generate({"--prompt", "a", "--tokens", "18", "--seed", "3", "--json"}));
    EXPECT_TRUE(json::parse(document.out)["rollouts"][0]["text"].is_string());
}

TEST_F(OnTrained, PromptsAndTheContext) {
    EXPECT_TRUE(failed(fbt(generate({"--prompt", ""})), 2, {"--prompt is empty"}));
    EXPECT_TRUE(failed(fbt(generate({})), 2, {"--prompt", "--prompts"}));
    EXPECT_TRUE(failed(fbt(generate({"--prompt", "a", "--prompts", "b"})), 2, {"--prompts"}));
    EXPECT_TRUE(failed(fbt(generate({"--prompt", std::string(22, 'x')})), 2, {"context", "23"}));
    const Result full = fbt(generate({"--prompt", "abc", "--tokens", "500"}));
    EXPECT_EQ(full.code, 0);
    EXPECT_NE(full.err.find("stopped after 19 tokens: the context of 23 is full"),
              std::string::npos)
        << full.err;
    put(w / "p.txt", "one\ntwo two\n");
    put(w / "p.jsonl", "{\"prompt\": \"one\"}\n{\"prompt\": \"two two\"}\n");
    const Arguments more = {"--tokens", "4", "--json"};
    const Result text = fbt(generate(Arguments{"--prompts", w / "p.txt"} + more));
    const Result lines = fbt(generate(Arguments{"--prompts", w / "p.jsonl"} + more));
    EXPECT_EQ(json::parse(text.out)["rollouts"].size(), 2u);
    EXPECT_EQ(text.out, lines.out);
    put(w / "p.txt", "one\n\ntwo\n");
    EXPECT_TRUE(failed(fbt(generate({"--prompts", w / "p.txt"})), 4, {"line 2", "empty"}));
    put(w / "p.jsonl", "{\"text\": \"one\"}\n");
    EXPECT_TRUE(failed(fbt(generate({"--prompts", w / "p.jsonl"})), 4, {"line 1", "prompt"}));
    EXPECT_TRUE(failed(fbt(generate({"--prompts", w / "absent"})), 4, {"absent"}));
}

TEST_F(OnTrained, FlagsThatCannotBe) {
    const Arguments prompt = {"--prompt", "a"};
    EXPECT_TRUE(failed(fbt(generate(prompt + Arguments{"--mode", "hard"})), 2, {"hard", "soft"}));
    EXPECT_TRUE(failed(fbt(generate(prompt + Arguments{"--top-p", "0"})), 2, {"--top-p"}));
    EXPECT_TRUE(failed(fbt(generate(prompt + Arguments{"--top-p", "nan"})), 2, {"--top-p"}));
    EXPECT_TRUE(
        failed(fbt(generate(prompt + Arguments{"--temperature", "-1"})), 2, {"--temperature"}));
    EXPECT_TRUE(failed(fbt(generate(prompt + Arguments{"--tokens", "0"})), 2, {"--tokens"}));
    EXPECT_TRUE(failed(fbt(generate(prompt + Arguments{"--states"})), 2, {"--states", "--out"}));
    EXPECT_TRUE(failed(fbt(generate(prompt + Arguments{"--out", "x.txt"})), 2, {".jsonl"}));
    EXPECT_TRUE(failed(fbt(generate(prompt + Arguments{"--out", w / "no/x.jsonl"})), 5, {"no/"}));
    fs::create_directories(w / "d.jsonl");
    EXPECT_TRUE(failed(fbt(generate(prompt + Arguments{"--out", w / "d.jsonl"})), 2,
                       {"--out", "d.jsonl", "no regular file"}));
    const auto flag = [&](const char* name, const char* text) {
        return fbt(generate(prompt + Arguments{name, text}));
    };
    EXPECT_TRUE(failed(flag("--temperature", "1e39"), 2, {"--temperature", "1e+39"}));
    EXPECT_TRUE(failed(flag("--temperature", "nan"), 2, {"--temperature", "nan"}));
    EXPECT_TRUE(failed(flag("--temperature", "inf"), 2, {"--temperature", "inf"}));
    EXPECT_TRUE(failed(flag("--top-p", "1e-300"), 2, {"--top-p", "1e-300"}));
    EXPECT_TRUE(failed(flag("--samples", "65537"), 2, {"--samples", "65536"}));
    EXPECT_TRUE(failed(flag("--out", "\xff.jsonl"), 2, {"--out", "UTF-8"}));
    EXPECT_EQ(fbt(generate({"--prompt", "\xff", "--tokens", "2"})).code, 0) << "any bytes";
}

TEST_F(OnTrained, SettingsOfTheTrainingOfAnotherType) {
    const std::string path = w / "run/step_00000020/config.json";
    const json good = json::parse(get(path));
    const auto with = [&](const char* key, const json& value) {
        json config = good;
        config["train"][key] = value;
        put(path, config.dump());
        return fbt({"eval", "--checkpoint", w / "run", "--threads", "1"});
    };
    EXPECT_TRUE(failed(with("data", 5), 4, {"config.json", "data", "5"}));
    EXPECT_TRUE(failed(with("length", "x"), 4, {"config.json", "length", "integer"}));
    EXPECT_TRUE(failed(with("tokenizer", false), 4, {"config.json", "tokenizer"}));
    json config = good;
    config["train"] = json::array();
    put(path, config.dump());
    EXPECT_TRUE(failed(fbt(generate({"--prompt", "a"})), 4, {"config.json", "train"}));
}

TEST_F(OnTrained, StandardAndSoftShareTheFirstToken) {
    json first;
    for (const char* mode : {"standard", "soft"}) {
        const Result result = fbt(generate(
            {"--prompt", "abc", "--mode", mode, "--tokens", "4", "--temperature", "0", "--json"}));
        const json rollout = json::parse(result.out)["rollouts"][0];
        const json now = {rollout["tokens"][4], rollout["logprobs"][0]};
        if (first.is_null()) first = now;
        EXPECT_EQ(now, first);
    }
}

TEST_F(OnTrained, BadCheckpoints) {
    const std::string step = w / "run/step_00000020", path = step + "/model.safetensors";
    const std::string good = get(path);
    const auto file = tensor::SafetensorsFile::open(path);
    const std::string victim = file.entries().begin()->first;
    // Writes the parameters with one of them treated otherwise, and generates.
    const auto with = [&](auto&& edit) {
        std::map<std::string, tensor::SafetensorsWriter::Item> items;
        std::map<std::string, std::vector<float>> values;
        for (const auto& [name, entry] : file.entries()) {
            items[name] = {name, entry.dtype, entry.shape};
            values[name] = file.read<float>(name);
        }
        edit(items, values);
        std::vector<tensor::SafetensorsWriter::Item> list;
        for (const auto& [name, item] : items) list.push_back(item);
        tensor::SafetensorsWriter writer(w / "changed", list);
        for (const auto& item : writer.items()) writer.write(item.name, values[item.name]);
        writer.finish();
        fs::remove(path);
        fs::copy_file(w / "changed", path);
        return fbt(generate({"--prompt", "a", "--tokens", "1"}));
    };
    const char* name = victim.c_str();
    EXPECT_EQ(with([&](auto&, auto&) {}).code, 0) << "unchanged";
    EXPECT_TRUE(failed(with([&](auto& items, auto&) { items.erase(victim); }), 4,
                       {"model.safetensors", "lacks", name}));
    EXPECT_TRUE(failed(with([&](auto& items, auto& values) {
                           items["extra"] = {"extra", tensor::DType::f32, {1}};
                           values["extra"] = {1};
                       }),
                       4, {"model.safetensors", "extra"}));
    EXPECT_TRUE(failed(with([&](auto& items, auto& values) {
                           items[victim].shape = {1};
                           values[victim] = {1};
                       }),
                       4, {name, "expected"}));
    EXPECT_TRUE(failed(with([&](auto&, auto& values) { values[victim][0] = NAN; }), 4,
                       {name, "not finite"}));
    put(path, good.substr(0, good.size() / 2));
    EXPECT_TRUE(failed(fbt(generate({"--prompt", "a"})), 4, {"model.safetensors"}));
    put(path, good);

    json config = json::parse(get(step + "/config.json"));
    config["model"]["colour"] = 1;
    put(step + "/config.json", config.dump());
    EXPECT_TRUE(failed(fbt(generate({"--prompt", "a"})), 4, {"config.json", "colour"}));
    put(step + "/config.json", "{");
    EXPECT_TRUE(failed(fbt(generate({"--prompt", "a"})), 4, {"config.json", "JSON"}));
    fs::remove(step + "/state.json");
    EXPECT_TRUE(failed(fbt(generate({"--prompt", "a"})), 4, {"no complete checkpoint"}));
    EXPECT_TRUE(failed(fbt({"generate", "--checkpoint", w / "absent", "--prompt", "a"}), 4,
                       {"absent", "does not exist"}));
}

TEST_F(OnTrained, EvalGivesEveryPass) {
    const Result result = fbt({"eval", "--checkpoint", w / "run", "--passes", "30", "--context",
                               "40", "--sequences", "6", "--threads", "1", "--json"});
    ASSERT_EQ(result.code, 0) << result.err;
    const json rows = json::parse(result.out)["passes"];
    ASSERT_EQ(rows.size(), 30u);
    EXPECT_TRUE(rows[0]["change"].is_null());
    for (const json& row : rows) {
        const double loss = row["loss"], bits = row["bits_per_byte"];
        EXPECT_GT(loss, 0);
        EXPECT_LT(loss, 6.5) << "a little more than ln 257 at worst";
        // Every target is a byte of text here.
        EXPECT_NEAR(bits, loss / std::log(2.0), 1e-9);
    }
    EXPECT_NE(rows[1]["loss"], rows[1]["permuted"]);
    EXPECT_NE(rows[1]["loss"], rows[1]["mean"]);
    EXPECT_TRUE(failed(fbt({"eval", "--checkpoint", w / "run", "--task", "parity"}), 2,
                       {"vocabulary", "4", "257"}));
    EXPECT_TRUE(
        failed(fbt({"eval", "--checkpoint", w / "run", "--data", w / "absent"}), 4, {"absent"}));
    EXPECT_TRUE(failed(fbt({"eval", "--checkpoint", w / "run", "--lengths", "9"}), 2,
                       {"--lengths", "--context"}));
}

TEST_F(OnTrained, SignalWritesWhatThereIs) {
    // A copy of the run with room for a long response.
    const std::string step = w / "run/step_00000020/config.json";
    json config = json::parse(get(step));
    config["model"]["context"] = 1000000;
    put(step, config.dump());
    Program program(
        generate({"--prompt", "a", "--tokens", "900000", "--out", w / "r.jsonl", "--states"}));
    ASSERT_TRUE(eventually([&] { return program.out().size() > 20; })) << program.err();
    program.signal(SIGINT);
    EXPECT_EQ(program.wait(), 75) << program.err();
    const json row = lines_of(w / "r.jsonl").at(0);
    EXPECT_EQ(row["finish"], "interrupted");
    EXPECT_GT(row["tokens"].size(), 5u);
    EXPECT_EQ(fbt(replay({"--passes", "1"})).code, 0);
}

TEST_F(OnTrained, ReaderThatLeavesEndsIt) {
    const std::string command = "bash -c \"'" FBT_BINARY "' generate --threads 1 --checkpoint '" +
                                (w / "run") + "' --prompt a | true; exit \\${PIPESTATUS[0]}\"";
    EXPECT_EQ(std::system(command.c_str()), 0);
    const std::string full = "bash -c \"'" FBT_BINARY "' info > /dev/full 2> /dev/null\"";
    EXPECT_EQ(WEXITSTATUS(std::system(full.c_str())), 5) << "but a full disk is an error";
}

TEST(Tasks, TokenIdsInAndOut) {
    const TemporaryFolder folder;
    ASSERT_EQ(fbt({"train", "--preset", "parity", "--steps", "2", "--out", folder / "run",
                   "--threads", "1"})
                  .code,
              0);
    const Arguments generate = {"generate", "--checkpoint", folder / "run", "--threads", "1"};
    const Result result = fbt(generate + Arguments{"--prompt", "0 1  1", "--tokens", "3"});
    ASSERT_EQ(result.code, 0) << result.err;
    EXPECT_TRUE(result.out.starts_with("0 1  1 | ")) << result.out;
    EXPECT_TRUE(failed(fbt(generate + Arguments{"--prompt", "hello"}), 2, {"token ids", "hello"}));
    EXPECT_TRUE(failed(fbt(generate + Arguments{"--prompt", "0 7"}), 2, {"7", "vocabulary of 4"}));
    const Result eval = fbt(
        {"eval", "--checkpoint", folder / "run", "--sequences", "9", "--json", "--threads", "1"});
    ASSERT_EQ(eval.code, 0) << eval.err;
    const json lengths = json::parse(eval.out)["lengths"];
    ASSERT_EQ(lengths.size(), 6u) << "1, 2 and 4 times the trained length in two modes";
    EXPECT_EQ(lengths[0]["length"], 16);
    EXPECT_EQ(lengths[5]["length"], 64);
    EXPECT_EQ(lengths[5]["mode"], "soft");
    EXPECT_EQ(lengths[5]["targets"], 64 * 9);
    EXPECT_FALSE(lengths[5].contains("factor"));
}

TEST(Tasks, EveryOneTrainsAndIsDecoded) {
    const TemporaryFolder folder;
    for (const std::string& name : model::data::task_names()) {
        SCOPED_TRACE(name);
        const std::string run = folder / name;
        const Result train = fbt({"train",    "--task",     name, "--length",
                                  "13,15,20", "--dim",      "8",  "--layers",
                                  "1",        "--heads",    "1",  "--kv-heads",
                                  "1",        "--head-dim", "4",  "--ffn-dim",
                                  "8",        "--context",  "20", "--tokens-per-step",
                                  "40",       "--steps",    "2",  "--schedule",
                                  "1:2",      "--threads",  "1",  "--eval-sequences",
                                  "5",        "--out",      run,  "--json"});
        ASSERT_EQ(train.code, 0) << train.err;
        const double loss = json::parse(train.out)["validation"]["val/pass_2"];
        EXPECT_NEAR(loss, std::log(model::data::find_task(name).vocab_size()), 1.5);
        const auto eval = [&](const Arguments& more) {
            const Result result = fbt(Arguments{"eval", "--checkpoint", run, "--sequences", "7",
                                                "--threads", "1", "--json"} +
                                      more);
            EXPECT_EQ(result.code, 0) << result.err;
            return json::parse(result.out);
        };
        const json usual = eval({});
        EXPECT_EQ(usual["length"], json({13, 15, 20}));
        ASSERT_EQ(usual["lengths"].size(), 6u);
        EXPECT_EQ(usual["lengths"][5]["length"], 80) << "4 times the longest";
        const json asked = eval({"--lengths", "14,33", "--context", "16"});
        EXPECT_EQ(asked["length"], 16);
        ASSERT_EQ(asked["lengths"].size(), 4u);
        EXPECT_EQ(asked["lengths"][1]["length"], 14);
        EXPECT_EQ(asked["lengths"][2]["length"], 33);
        // As many labels as the task has in seven sequences, in both tables.
        int64_t targets = 0;
        for (const int32_t label : model::data::make_task(name, {33}, 1)->next(7 * 33).targets)
            targets += label >= 0;
        EXPECT_EQ(asked["lengths"][2]["targets"], targets);
        EXPECT_EQ(eval({"--context", "33"})["passes"][0]["targets"], targets);
        const int shortest = model::data::find_task(name).shortest();
        if (shortest == 1) continue;
        const std::string least = std::to_string(shortest), less = std::to_string(shortest - 1);
        for (const char* flag : {"--lengths", "--context"}) {
            const Result result = fbt({"eval", "--checkpoint", run, flag, less});
            EXPECT_TRUE(failed(result, 2, {name.c_str(), least.c_str(), less.c_str()}));
            EXPECT_EQ(result.out, "") << "said before the work";
        }
    }
}

TEST(Tasks, TestLengthsAreTheRunsAndMayChange) {
    const TemporaryFolder folder;
    const std::string run = folder / "run";
    ASSERT_EQ(fbt({"train", "--preset", "parity", "--steps", "2", "--stop-after", "1", "--out", run,
                   "--threads", "1", "--test-lengths", "5"})
                  .code,
              0);
    const auto lengths = [&](const Arguments& more) {
        const Result result = fbt(
            Arguments{"eval", "--checkpoint", run, "--threads", "1", "--json", "--passes", "1"} +
            more);
        EXPECT_EQ(result.code, 0) << result.err;
        const json document = json::parse(result.out);
        json out;
        for (const json& row : document["lengths"])
            if (row["mode"] == "soft") out.push_back({row["length"], row["sequences"]});
        return out.dump();
    };
    EXPECT_EQ(lengths({}), "[[5,256]]");
    ASSERT_EQ(fbt({"train", "--resume", "--out", run, "--test-lengths", "9,3"}).code, 0);
    EXPECT_EQ(lengths({}), "[[9,256],[3,256]]");
    EXPECT_EQ(lengths({"--lengths", "64", "--sequences", "1100"}), "[[64,1100]]")
        << "more than are decoded at once";
    // What a run without such a setting, and with the length in either form, is tested at.
    const std::string path = run + "/step_00000002/config.json";
    json config = json::parse(get(path));
    config["train"].erase("test_lengths");
    for (const json& length : {json(3), json::array({3})}) {
        config["train"]["length"] = length;
        put(path, config.dump());
        EXPECT_EQ(lengths({"--sequences", "2"}), "[[3,2],[6,2],[12,2]]");
    }
    for (const json& bad : {json("3"), json({3, 0}), json(3.5), json("x")}) {
        config["train"]["length"] = bad;
        put(path, config.dump());
        EXPECT_TRUE(failed(fbt({"eval", "--checkpoint", run}), 4,
                           {"config.json", "length", "an integer, at least 1"}));
    }
}

TEST(SentencePiece, TravelsWithTheRun) {
    const Workplace w;
    const Result made = fbt({"data", "--input", w / "text.txt", "--tokenizer", "sentencepiece:300",
                             "--out", w / "sp", "--json"});
    ASSERT_EQ(made.code, 0) << made.err;
    EXPECT_EQ(json::parse(made.out)["vocab_size"], 300);
    Arguments train = w.train("run", {"--steps", "3"});
    *(std::find(train.begin(), train.end(), "--data") + 1) = w / "sp";
    ASSERT_EQ(fbt(train).code, 0);
    fs::remove_all(w / "sp");
    fs::create_symlink("run/step_00000003", w / "link");
    for (const char* name :
         {"run/step_00000003", "run/step_00000003/", "run/step_00000003/.", "link"}) {
        const Result result = fbt({"generate", "--checkpoint", w / name, "--prompt", "42 and",
                                   "--tokens", "4", "--threads", "1"});
        ASSERT_EQ(result.code, 0) << name << ": " << result.err;
        EXPECT_TRUE(result.out.starts_with("42 and")) << result.out;
    }
}

}  // namespace
}  // namespace fbt::tests
