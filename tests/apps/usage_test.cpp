// Flags, files and data that cannot be: one clear line, and the exit code that belongs to it.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "apps/console.h"
#include "apps/settings.h"
#include "kernels/bf16_dot.h"
#include "model/core/config.h"
#include "model/data/tasks.h"
#include "tests/apps/program.h"

namespace fbt::tests {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using tensor::ErrorKind;

TEST(Usage, HelpAndVersion) {
    EXPECT_EQ(fbt({"--help"}).code, 0);
    EXPECT_EQ(fbt({"--version"}).out.substr(0, 4), "fbt ");
    for (const char* command : {"train", "generate", "replay", "eval", "data", "audit", "info"}) {
        const Result help = fbt({command, "--help"});
        EXPECT_EQ(help.code, 0);
        for (const char* flag : {"--device", "--dtype", "--threads", "--json"})
            EXPECT_NE(help.out.find(flag), std::string::npos) << command << " " << flag;
        EXPECT_TRUE(failed(fbt({command, "--no-such-flag"}), 2, {"--no-such-flag"})) << command;
        EXPECT_TRUE(failed(fbt({command, "--dtype", "f16"}), 2, {})) << command;
    }
    for (const char* flag : {"--help", "--version"})
        EXPECT_EQ(
            WEXITSTATUS(std::system(
                (std::string("'" FBT_BINARY "' ") + flag + " > /dev/full 2> /dev/null").c_str())),
            5)
            << flag;
    EXPECT_EQ(fbt({}).code, 2);
    EXPECT_TRUE(failed(fbt({"dance"}), 2, {"dance", "train", "info"}));
}

TEST(Usage, JsonIsAloneOnStdout) {
    const json info = json::parse(fbt({"info", "--json"}).out);
    EXPECT_EQ(info["presets"], json({"paper-1b", "parity", "quickstart"}));
    EXPECT_EQ(info["devices"][0], "cpu");
    const std::string bf16 = info["cpu_bf16"];
    EXPECT_EQ(bf16, kernels::cpu::dot_kernels().front().name);
    ASSERT_GE(info["gpus"].size(), 1u) << "or why there is none";
    const std::string first = info["gpus"][0], cuda = info["cuda"];
    EXPECT_TRUE(first == cuda || first == "0: " + cuda) << first;
    EXPECT_NE(fbt({"info"}).out.find("bf16 uses  " + bf16 + "\n"), std::string::npos);
    const Workplace w;
    const Result train = fbt(w.train("run", {"--steps", "2", "--json"}));
    EXPECT_EQ(json::parse(train.out)["finished"], true);
    EXPECT_NE(train.err.find("step 2/2"), std::string::npos) << "progress goes to stderr";
}

TEST(Usage, TrainFlags) {
    const Workplace w;
    const auto train = [&](const Arguments& more) { return fbt(w.train("run", more)); };
    EXPECT_TRUE(failed(fbt({"train", "--data", w / "data"}), 2, {"--out"}));
    EXPECT_TRUE(failed(fbt({"train", "--out", w / "run"}), 2, {"--data", "--task"}));
    EXPECT_TRUE(failed(train({"--task", "parity"}), 2, {"--data", "--task"}));
    EXPECT_TRUE(failed(train({"--steps", "many"}), 2, {"--steps", "many", "integer"}));
    EXPECT_TRUE(failed(train({"--steps", "0"}), 2, {"--steps", "at least 1"}));
    EXPECT_TRUE(failed(train({"--steps", "99999999999999999999"}), 2, {"--steps"}));
    EXPECT_TRUE(failed(train({"--jitter", "inf"}), 2, {"--jitter"}));
    EXPECT_TRUE(failed(train({"--mixin", "maybe"}), 2, {"--mixin", "true or false"}));
    EXPECT_TRUE(failed(train({"--fusion", "cold"}), 2, {"--fusion", "gated_product"}));
    EXPECT_TRUE(failed(train({"--rope-theta", "0"}), 2, {"--rope-theta", "above 0"}));
    EXPECT_TRUE(failed(train({"--preset", "none"}), 2, {"none", "quickstart"}));
    Arguments small = w.train("run");
    *(std::find(small.begin(), small.end(), "--tokens-per-step") + 1) = "5";
    EXPECT_TRUE(failed(fbt(small), 2, {"--tokens-per-step", "5", "23"}));
    EXPECT_TRUE(failed(train({"--config", "\xff"}), 2, {"--config", "UTF-8"}));
    EXPECT_TRUE(failed(train({"--length", "9"}), 2, {"--length", "--context"}));
    EXPECT_TRUE(failed(train({"--test-lengths", "9"}), 2, {"--test-lengths", "--context"}));
    EXPECT_TRUE(failed(train({"--vocab-size", "300"}), 2, {"vocab_size", "300", "257"}));
    EXPECT_TRUE(failed(train({"--dtype", "f16"}), 2, {"f16", "f32, bf16, or f64"}));
    EXPECT_TRUE(
        failed(fbt({"train", "--preset", "paper-1b", "--data", w / "data", "--out", w / "run"}), 2,
               {"100352", "257"}));
    EXPECT_FALSE(fs::exists(w / "run")) << "a refused run leaves nothing";
}

TEST(Usage, MemoryBudget) {
    const TemporaryFolder folder;
    const auto train = [&](const char* mib) {
        return fbt({"train", "--preset", "parity", "--steps", "1", "--eval-sequences", "1",
                    "--memory-budget", mib, "--out", folder / "run"});
    };
    EXPECT_TRUE(failed(train("1"), 2,
                       {"--memory-budget is 1 MiB", "44 MiB", "21 MiB with every block recomputed",
                        "raise the budget", "lower --tokens-per-step"}));
    EXPECT_FALSE(fs::exists(folder / "run")) << "a refused run leaves nothing";
    const Result held = train("30");
    EXPECT_EQ(held.code, 0) << held.err;
    EXPECT_NE(held.out.find("memory plan: 21 MiB"), std::string::npos) << held.out;
    EXPECT_NE(held.out.find("every block is recomputed, without that 44 MiB"), std::string::npos);
}

TEST(Usage, LengthsOfTasks) {
    const TemporaryFolder folder;
    const auto train = [&](const Arguments& more) {
        return fbt(Arguments{"train", "--preset", "parity", "--out", folder / "run"} + more);
    };
    for (const char* flag : {"--length", "--test-lengths"})
        for (const char* bad :
             {"16,", ",16", "1,,2", "0", "4,0", "-3", "3.5", "x", "1 2", "99999999999999999999"})
            EXPECT_TRUE(failed(train({std::string(flag) + "=" + bad}), 2,
                               {flag, bad, "an integer, at least 1", "such as 1,2,3"}));
    EXPECT_TRUE(failed(train({"--length", ""}), 2, {"--length", "an integer, at least 1"}));
    EXPECT_TRUE(failed(train({"--length", "9,65"}), 2, {"9,65", "context of 64"}));
    EXPECT_TRUE(
        failed(train({"--tokens-per-step", "30", "--length", "9,31"}), 2, {"30", "31 tokens"}));
    EXPECT_TRUE(failed(train({"--task", "completion", "--length", "16,5"}), 2,
                       {"completion", "at least 13", "is 5"}));
    EXPECT_TRUE(failed(train({"--task", "completion", "--test-lengths", "12"}), 2,
                       {"completion", "at least 13", "is 12"}));
    EXPECT_TRUE(failed(train({"--task", "party"}), 2, {"party", "parity, mod-sum"}));
    EXPECT_FALSE(fs::exists(folder / "run")) << "a refused run leaves nothing";
    for (const char* command : {"train", "eval"})
        for (const std::string& name : model::data::task_names())
            EXPECT_NE(fbt({command, "--help"}).out.find(name), std::string::npos) << name;
}

TEST(Usage, ConfigFiles) {
    const Workplace w;
    const auto with = [&](const std::string& text) {
        put(w / "c.json", text);
        return fbt({"train", "--config", w / "c.json", "--data", w / "data", "--out", w / "run"});
    };
    EXPECT_TRUE(failed(with(R"({"model": {"width": 8}})"), 2, {"c.json", "width", "model"}));
    EXPECT_TRUE(failed(with(R"({"train": {"dim": 8}})"), 2, {"c.json", "dim", "train"}));
    EXPECT_TRUE(failed(with(R"({"trian": {}})"), 2, {"c.json", "trian"}));
    EXPECT_TRUE(failed(with(R"({"model": {"dim": "8"}})"), 2, {"dim", "integer"}));
    EXPECT_TRUE(failed(with(R"({"model": {"dim": 8.5}})"), 2, {"dim", "8.5"}));
    EXPECT_TRUE(failed(with(R"({"train": {"mixin": 1}})"), 2, {"mixin", "true or false"}));
    EXPECT_TRUE(failed(with(R"({"train": {"schedule": "1:0"}})"), 2, {"1:0"}));
    EXPECT_TRUE(failed(with(R"({"model": {"heads": 4, "kv_heads": 3}})"), 2, {"kv_heads"}));
    EXPECT_TRUE(failed(with("[1]"), 2, {"c.json", "object"}));
    EXPECT_TRUE(failed(with("{"), 4, {"c.json", "JSON"}));
    EXPECT_TRUE(
        failed(fbt({"train", "--config", w / "absent", "--out", w / "run"}), 4, {"absent"}));
}

TEST(Usage, DataThatIsNot) {
    const Workplace w;
    const std::string shard = w / "data/train_000000.bin", good = get(shard);
    const auto with = [&](const std::string& bytes) {
        put(shard, bytes);
        return fbt(w.train("run", {"--steps", "1"}));
    };
    std::string wrong = good;
    wrong[0] ^= 1;
    EXPECT_TRUE(failed(with(wrong), 4, {"train_000000.bin", "magic"}));
    EXPECT_TRUE(failed(with(good.substr(0, good.size() - 1)), 4, {"train_000000.bin"}));
    EXPECT_TRUE(failed(with(good + "x"), 4, {"train_000000.bin"}));
    wrong = good;
    wrong[1024 + 2 * 5 + 1] = 2;  // token 5 is now at least 512
    EXPECT_TRUE(failed(with(wrong), 4, {"position 5", "257"}));
    put(shard, good);
    EXPECT_TRUE(failed(fbt({"data", "--input", w / "text.txt", "--out", w / "data"}), 2,
                       {"exists already"}));
    EXPECT_TRUE(failed(fbt({"data", "--input", w / "absent", "--out", w / "new"}), 4, {"absent"}));
    EXPECT_TRUE(failed(fbt({"data", "--out", w / "new"}), 2, {"--input"}));
    EXPECT_TRUE(
        failed(fbt({"data", "--input", w / "text.txt", "--out", w / "new", "--tokenizer", "morse"}),
               2, {"morse"}));
    put(w / "a-file", "");
    Arguments onto_file = w.train("a-file/run", {"--steps", "1"});
    EXPECT_TRUE(failed(fbt(onto_file), 5, {"a-file/run"}));
}

// The section "model" of a configuration is core::Config's own form: no key missing, none more.
TEST(Settings, ModelKeysAreTheConfigsKeys) {
    const TemporaryFolder folder;
    ASSERT_EQ(fbt({"train", "--preset", "parity", "--steps", "1", "--out", folder / "run",
                   "--threads", "1"})
                  .code,
              0);
    const json written = json::parse(get(folder / "run/step_00000001/config.json"))["model"];
    EXPECT_EQ(written, model::core::to_json(model::core::config_from_json(written)));
}

TEST(Settings, NumbersKeepTheirBits) {
    apps::Settings settings;
    double x = 0.1 + 0.2;
    uint64_t seed = 0xfffffffffffffffd;
    settings.section("train");
    settings.add("x", &x, "");
    settings.add("seed", &seed, "");
    const json document = json::parse(settings.to_json().dump());
    x = 0, seed = 0;
    settings.take_json(document, "it");
    EXPECT_EQ(x, 0.1 + 0.2);
    EXPECT_EQ(seed, 0xfffffffffffffffd);
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"it", "seed", "-1"}, [&] {
        settings.take_json({{"train", {{"seed", -1}}}}, "it", ErrorKind::bad_file);
    }));
}

TEST(Settings, ListsOfIntegers) {
    apps::Settings settings;
    std::vector<int> list, least;
    settings.section("train");
    settings.add("list", &list, "");
    const apps::Setting& setting = settings.all()[0];
    for (const auto& [values, document, text] :
         {std::tuple{std::vector<int>{}, json::array(), ""},
          std::tuple{std::vector{7}, json(7), "7"},
          std::tuple{std::vector{-2, 7, 7}, json({-2, 7, 7}), "-2,7,7"}}) {
        list = values;
        const json written = json::parse(settings.to_json().dump());
        EXPECT_EQ(written["train"]["list"], document);
        EXPECT_EQ(setting.text(), text);
        list = {1, 2};
        settings.take_json(written, "it");
        EXPECT_EQ(list, values);
    }
    settings.take_json({{"train", {{"list", json::array({5})}}}}, "it");
    EXPECT_EQ(list, std::vector{5});
    settings.add("least", &least, "").at_least(1).at_most(9);
    for (const json& bad : {json(0), json({3, 10}), json({3, "4"}), json("3"), json(nullptr)})
        EXPECT_TRUE(throws(ErrorKind::usage, {"it: least", "at least 1, at most 9"}, [&] {
            settings.take_json({{"train", {{"least", bad}}}}, "it");
        })) << bad;
}

TEST(Console, TablesAndNumbers) {
    apps::Table table({"a", "loss"});
    table.row({"name", "1"});
    EXPECT_EQ(table.text(), "a    | loss\nname |    1\n");
    EXPECT_EQ(apps::short_count(950), "950");
    EXPECT_EQ(apps::short_count(1500), "1.5k");
    EXPECT_EQ(apps::short_count(198123), "198k");
    EXPECT_EQ(apps::short_count(999999), "1.0M");
    EXPECT_EQ(apps::short_time(41.2), "41s");
    EXPECT_EQ(apps::short_time(120), "2m");
    EXPECT_EQ(apps::short_time(3900), "1h05m");
}

}  // namespace
}  // namespace fbt::tests
