// fbt replay's flags and what it refuses, on rollouts of a tiny model.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>

#include "tensor/safetensors.h"
#include "tests/apps/program.h"

namespace fbt::tests {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using tensor::DType;
using tensor::SafetensorsFile;
using tensor::SafetensorsWriter;

// Tensors of a file of states and caches, changed by a test and written again.
struct Tensors {
    explicit Tensors(const std::string& path) {
        const SafetensorsFile file = SafetensorsFile::open(path);
        metadata = file.metadata();
        for (const auto& [name, entry] : file.entries())
            all[name] = {{name, entry.dtype, entry.shape}, file.read<float>(name)};
    }
    void write(const std::string& path) const {
        std::vector<SafetensorsWriter::Item> items;
        for (const auto& [name, tensor] : all) items.push_back(tensor.first);
        SafetensorsWriter writer(path, items, metadata);
        for (const auto& item : writer.items()) {
            const std::vector<float>& v = all.at(item.name).second;
            if (item.dtype == DType::bf16)
                writer.write(item.name, std::vector<kernels::bf16>(v.begin(), v.end()));
            else
                writer.write(item.name, v);
        }
        writer.finish();
    }
    std::map<std::string, std::pair<SafetensorsWriter::Item, std::vector<float>>> all;
    std::map<std::string, std::string> metadata;
};

class ReplayFlags : public testing::Test {
  protected:
    void SetUp() override { w.train_20("run"); }
    // Two rollouts of 8 prompt tokens and 12 sampled ones: 19 fed positions.
    void generate(const Arguments& more = {"--states"}, const char* tokens = "12") const {
        ASSERT_EQ(
            fbt(Arguments{"generate", "--checkpoint", w / "run", "--threads", "1", "--prompt",
                          "123 and", "--tokens", tokens, "--samples", "2", "--out", w / "r.jsonl"} +
                more)
                .code,
            0);
    }
    Arguments command(const Arguments& more) const {
        return Arguments{"replay",      "--checkpoint", w / "run", "--rollout",
                         w / "r.jsonl", "--threads",    "1"} +
               more;
    }
    Result replay(const Arguments& more) const { return fbt(command(more)); }
    json document(const Arguments& more) const {
        const Result result = replay(more + Arguments{"--json"});
        EXPECT_EQ(result.code, 0) << result.err;
        return json::parse(result.out);
    }
    // Saves the cache and puts it into the rollouts' own file, as if it had been kept.
    void record_cache(const Arguments& more = {}) const {
        ASSERT_EQ(replay(Arguments{"--certify", "--save", w / "kept.safetensors"} + more).code, 0);
        fs::rename(w / "kept.safetensors", w / "r.safetensors");
        edit_rows([](json& row) { row["cache"] = row["states"] = "r.safetensors"; });
    }
    void edit_rows(const std::function<void(json&)>& edit) const {
        std::istringstream in(get(w / "r.jsonl"));
        std::string text;
        for (std::string line; std::getline(in, line);) {
            json row = json::parse(line);
            edit(row);
            text += row.dump() + "\n";
        }
        put(w / "r.jsonl", text);
    }
    const Workplace w;
};

TEST_F(ReplayFlags, CertifiesWithoutDecoding) {
    for (const char* dtype : {"f32", "bf16"})
        for (const char* mode : {"standard", "soft", "fused"}) {
            generate({"--states", "--mode", mode, "--dtype", dtype});
            for (bool cache : {false, true}) {
                if (cache) record_cache({"--dtype", dtype});
                const json rollouts = document({"--certify", "--dtype", dtype})["rollouts"];
                ASSERT_EQ(rollouts.size(), 2u);
                for (const json& rollout : rollouts) {
                    const json& c = rollout["certificate"];
                    EXPECT_TRUE(c["certified"].get<bool>());
                    EXPECT_TRUE(c["states"].get<bool>());
                    EXPECT_EQ(c["cache"], cache);
                    EXPECT_TRUE(c["position"].is_null());
                    EXPECT_TRUE(c["ms"].is_number());
                    EXPECT_TRUE(rollout["rows"].empty());
                    EXPECT_FALSE(rollout.contains("decode_ms")) << "nothing was decoded";
                }
            }
        }
    const Result text = replay({"--certify", "--dtype", "bf16"});
    EXPECT_NE(text.out.find("certified in "), std::string::npos) << text.out;
    EXPECT_NE(text.out.find("the states, the cache, 12 log-probabilities"), std::string::npos);
}

TEST_F(ReplayFlags, TheCertificateIsRefusedForOneBit) {
    for (const char* dtype : {"f32", "bf16"}) {
        generate({"--states", "--dtype", dtype});
        record_cache({"--dtype", dtype});
        const Tensors good(w / "r.safetensors");
        const auto refused = [&](const std::string& name, size_t element, const char* what,
                                 int position) {
            Tensors bad = good;
            float& x = bad.all.at(name).second.at(element);
            const float before = x;
            uint32_t bits;
            std::memcpy(&bits, &x, sizeof bits);
            bits ^= std::strcmp(dtype, "f32") == 0 ? 1u : 1u << 16;
            std::memcpy(&x, &bits, sizeof bits);
            EXPECT_NE(before, x);
            bad.write(w / "r.safetensors");
            const Result result = replay({"--certify", "--dtype", dtype});
            const std::string where =
                "at position " + std::to_string(position) + " (" + std::string(what) + ")";
            EXPECT_TRUE(failed(result, 1, {"prompt 1, sample 2 is refused", where.c_str()}));
            EXPECT_NE(result.out.find("certified"), std::string::npos) << "the other rollout is";
        };
        // D 16, L 2, G 1, C 6, T 19
        for (int t : {0, 7, 8, 18}) {
            refused("states/0.1", size_t(16 * t + 5), "state", t);
            refused("keys/0.1", size_t((19 + t) * 6 + 3), "keys of layer 2", t);
            refused("values/0.1", size_t(t * 6), "values of layer 1", t);
        }
        good.write(w / "r.safetensors");
        EXPECT_EQ(replay({"--certify", "--dtype", dtype}).code, 0);
        // A log-probability, whose bits JSON keeps.
        const std::string rows = get(w / "r.jsonl");
        int number = 0;
        edit_rows([&](json& row) {
            const double x = row["logprobs"][11];
            if (number++ == 1) row["logprobs"][11] = std::nextafter(x, -1e30);
        });
        EXPECT_TRUE(failed(replay({"--certify", "--dtype", dtype}), 1,
                           {"refused", "at position 19 (log-probability)"}));
        EXPECT_EQ(json::parse(replay({"--certify", "--dtype", dtype, "--json"})
                                  .out)["rollouts"][1]["certificate"]["position"],
                  19);
        put(w / "r.jsonl", rows);
    }
}

// The log-probabilities alone certify a rollout whose inputs carry nothing.
TEST_F(ReplayFlags, StandardRolloutsNeedNoStates) {
    generate({"--mode", "standard"});
    const json c = document({"--certify"})["rollouts"][1]["certificate"];
    EXPECT_TRUE(c["certified"].get<bool>());
    EXPECT_FALSE(c["states"].get<bool>());
    EXPECT_TRUE(failed(replay({"--certify", "--passes", "2"}), 2, {"standard", "--certify alone"}));
    edit_rows([](json& row) { row["tokens"][10] = (row["tokens"][10].get<int>() + 1) % 256; });
    EXPECT_TRUE(fbt(command({"--certify"})).code == 1);
    // On the device ref in double, where log-probabilities are doubles too.
    generate({"--mode", "standard", "--device", "ref", "--dtype", "f64"});
    document({"--certify", "--device", "ref", "--dtype", "f64"});
}

TEST_F(ReplayFlags, EndsByToleranceExactnessAndInBlocks) {
    generate({"--mode", "fused"});
    const json all =
        document({"--passes", "2,1,2", "--tolerance", "1e-3", "--until-exact"})["rollouts"][0];
    const json& rows = all["rows"];
    ASSERT_EQ(rows.size(), 4u);
    EXPECT_TRUE(all["decode_ms"].is_number());
    const char* names[] = {"1", "2", "tolerance 0.001", "exact"};
    for (size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(rows[i]["passes"], names[i]);
        EXPECT_EQ(rows[i]["positions"], 11);
        EXPECT_EQ(rows[i]["visited"], 11 * rows[i]["ran"].get<int>());
        EXPECT_LE(rows[i]["computed"], rows[i]["visited"]);
        EXPECT_GE(rows[i]["ms"], 0.0);
    }
    EXPECT_EQ(rows[0]["ran"], 1);
    EXPECT_EQ(rows[1]["computed"], 22);
    EXPECT_GT(rows[2]["ran"], 2);
    EXPECT_LT(rows[2]["keys"], rows[1]["keys"]);
    EXPECT_LE(rows[3]["ran"], 12);
    EXPECT_EQ(rows[3]["keys"], 0.0);
    EXPECT_EQ(rows[3]["exact"], 11);
    EXPECT_LE(rows[3]["computed"], 11 + 11 * 12 / 2);

    const json swept =
        document({"--tolerance", "1e-3", "--until-exact", "--block", "4"})["rollouts"][0]["rows"];
    ASSERT_EQ(swept.size(), 2u) << "the usual numbers of passes only where nothing else is asked";
    EXPECT_EQ(swept[0]["block"], 4);
    EXPECT_EQ(swept[1]["exact"], 11);
    EXPECT_LT(swept[1]["computed"], rows[3]["computed"]);
    const json counted = document({"--passes", "2", "--block", "4"})["rollouts"][0]["rows"];
    EXPECT_EQ(counted[0]["ran"], 2 * 3);
    EXPECT_EQ(counted[0]["visited"], 2 * 11);
    EXPECT_EQ(document({"--block", "4"})["rollouts"][0]["rows"].size(), 5u);

    const Result text = replay({"--until-exact"});
    EXPECT_NE(text.out.find("computed"), std::string::npos) << text.out;
    EXPECT_NE(text.out.find("11/11 |"), std::string::npos) << text.out;
}

// A certified rollout's own trace is what replays are compared with.
TEST_F(ReplayFlags, CertifiesAndComparesInOneCall) {
    generate();
    const json certified = document({"--certify", "--passes", "3"})["rollouts"][0];
    const json decoded = document({"--passes", "3"})["rollouts"][0];
    EXPECT_FALSE(certified.contains("decode_ms"));
    EXPECT_EQ(certified["rows"][0]["keys"], decoded["rows"][0]["keys"]);
    EXPECT_EQ(certified["rows"][0]["kl"], decoded["rows"][0]["kl"]);
}

TEST_F(ReplayFlags, SavesAndCompares) {
    const auto compare = [&](const char* a, const char* b, const Arguments& more = {}) {
        return fbt(Arguments{"replay", "--compare", w / a, w / b} + more);
    };
    for (const char* dtype : {"f32", "bf16"}) {
        const Arguments in = {"--dtype", dtype};
        generate(in + Arguments{"--states"});
        ASSERT_EQ(replay(in + Arguments{"--certify", "--save", w / "a.safetensors"}).code, 0);
        ASSERT_EQ(replay(in + Arguments{"--passes", "1", "--save", w / "b.safetensors"}).code, 0);
        const Result same = compare("a.safetensors", "b.safetensors", {"--json"});
        EXPECT_EQ(same.code, 0) << "both are of the recorded states: " << same.err;
        EXPECT_EQ(json::parse(same.out)["tensors"].size(), 6u);
        // The states are those that generating recorded.
        const Tensors own(w / "r.safetensors"), saved(w / "a.safetensors");
        for (const char* name : {"states/0.0", "states/0.1"}) {
            EXPECT_EQ(own.all.at(name).second, saved.all.at(name).second);
            EXPECT_EQ(saved.all.at(name).first.dtype, own.all.at(name).first.dtype);
        }
        EXPECT_EQ(saved.all.at("keys/0.1").first.shape, (tensor::Shape{2, 19, 1, 6}));
        EXPECT_EQ(saved.metadata, own.metadata);

        // Without recorded states it is the last replay that is saved.
        edit_rows([](json& row) { row["states"] = nullptr; });
        ASSERT_EQ(
            replay(in + Arguments{"--passes", "2", "--until-exact", "--save", w / "b.safetensors"})
                .code,
            0);
        EXPECT_EQ(compare("a.safetensors", "b.safetensors").code, 0);
        ASSERT_EQ(replay(in + Arguments{"--passes", "2,3", "--save", w / "b.safetensors"}).code, 0);
        const Result other = compare("a.safetensors", "b.safetensors", {"--json"});
        EXPECT_EQ(other.code, 1);
        const json document = json::parse(other.out);
        EXPECT_FALSE(document["ok"].get<bool>());
        for (const json& row : document["tensors"]) {
            EXPECT_EQ(row["position"], 10) << "three passes make two of the response exact";
            EXPECT_GT(row["relative"], 0.0);
            EXPECT_LT(row["relative"], 1.0);
        }
    }
    // Every element counts, and so does the sign of a zero.
    Tensors tensors(w / "a.safetensors");
    tensors.all.at("values/0.1").second[19 * 6 + 6 * 4 + 3] = 0.0f;
    tensors.all.at("values/0.1").second[6 * 9] = 0.0f;
    tensors.write(w / "c.safetensors");
    tensors.all.at("values/0.1").second[19 * 6 + 6 * 4 + 3] = -0.0f;
    // In the second layer, position 4; in the first one, a later one.
    tensors.all.at("values/0.1").second[6 * 9] = -0.0f;
    tensors.write(w / "d.safetensors");
    const Result zero = compare("c.safetensors", "d.safetensors", {"--json"});
    EXPECT_EQ(zero.code, 1);
    const json last = json::parse(zero.out)["tensors"].back();
    EXPECT_EQ(last["tensor"], "values/0.1");
    EXPECT_EQ(last["position"], 4);
    EXPECT_EQ(last["relative"], 0.0);
    EXPECT_NE(compare("c.safetensors", "d.safetensors").out.find("the files differ"),
              std::string::npos);

    // What is not a number is never the same.
    Tensors broken(w / "a.safetensors");
    broken.all.at("keys/0.0").second[6 * 3] = NAN;
    broken.write(w / "c.safetensors");
    const Result nan = compare("c.safetensors", "c.safetensors", {"--json"});
    EXPECT_EQ(nan.code, 1);
    EXPECT_EQ(json::parse(nan.out)["tensors"][0]["position"], 3);

    tensors.metadata["weights"] = "0123456789abcdef";
    tensors.write(w / "c.safetensors");
    EXPECT_NE(compare("c.safetensors", "d.safetensors").err.find("different weights"),
              std::string::npos);
    tensors.all.erase("keys/0.0");
    tensors.write(w / "c.safetensors");
    EXPECT_TRUE(failed(compare("c.safetensors", "d.safetensors"), 4,
                       {"\"keys/0.0\"", "c.safetensors lacks it"}));
    EXPECT_TRUE(failed(compare("d.safetensors", "c.safetensors"), 4,
                       {"\"keys/0.0\"", "c.safetensors lacks it"}));
    Tensors shape(w / "a.safetensors");
    shape.all.at("states/0.0").first.shape = {38, 8};
    shape.write(w / "c.safetensors");
    EXPECT_TRUE(failed(compare("a.safetensors", "c.safetensors"), 4,
                       {"states/0.0", "[19,16] bf16", "[38,8] bf16"}));
    shape.all.at("states/0.0").first = {"states/0.0", DType::f32, {19, 16}};
    shape.write(w / "c.safetensors");
    EXPECT_TRUE(failed(compare("a.safetensors", "c.safetensors"), 4, {"states/0.0", "f32"}));
    EXPECT_TRUE(failed(compare("a.safetensors", "run/step_00000020/model.safetensors"), 4,
                       {"model.safetensors holds", "expected states/"}));
    EXPECT_TRUE(failed(compare("a.safetensors", "absent"), 4, {"absent"}));
    tensors.all.clear();
    tensors.write(w / "c.safetensors");
    EXPECT_TRUE(failed(compare("c.safetensors", "c.safetensors"), 4, {"no tensor"}));
    put(w / "c.safetensors", get(w / "a.safetensors").substr(0, 3000));
    EXPECT_TRUE(failed(compare("c.safetensors", "a.safetensors"), 4, {"c.safetensors"}));
}

TEST_F(ReplayFlags, FlagsThatCannotBe) {
    generate({});
    EXPECT_TRUE(failed(replay({"--certify"}), 2,
                       {"--certify needs recorded states", "prompt 1, sample 1", "--states"}));
    generate();
    EXPECT_TRUE(failed(replay({"--certify", "--block", "4"}), 2, {"--block", "--until-exact"}));
    EXPECT_TRUE(failed(replay({"--certify", "--recorded"}), 2, {"--certify", "--recorded"}));
    EXPECT_TRUE(failed(replay({"--block", "0"}), 2, {"--block"}));
    for (const char* value : {"0", "-1", "nan", "x"})
        EXPECT_TRUE(failed(replay({"--tolerance", value}), 2, {"--tolerance"})) << value;
    EXPECT_TRUE(failed(replay({"--save", w / "x.bin"}), 2, {"--save", ".safetensors"}));
    EXPECT_TRUE(failed(replay({"--save", w / "no/x.safetensors"}), 5, {"no/"}));
    EXPECT_TRUE(failed(replay({"--save", w / "r.safetensors"}), 2, {"--save", "overwrite"}));
    EXPECT_TRUE(failed(replay({"--save", w / "x.safetensors", "--device", "ref", "--dtype", "f64"}),
                       2, {"f64"}));
    EXPECT_TRUE(failed(replay({"--certify", "--dtype", "bf16"}), 2,
                       {"recorded states are f32", "--dtype f32"}));
    EXPECT_TRUE(failed(fbt({"replay", "--rollout", "x"}), 2, {"--checkpoint"}));
    EXPECT_TRUE(failed(fbt({"replay", "--checkpoint", "x"}), 2, {"--rollout"}));
    EXPECT_TRUE(failed(replay({"--compare", "a", "b"}), 2, {"--compare", "--checkpoint"}));
    EXPECT_TRUE(
        failed(fbt({"replay", "--compare", "a", "b", "--certify"}), 2, {"--compare", "--certify"}));
    EXPECT_TRUE(failed(fbt({"replay", "--compare", "a"}), 2, {"--compare"}));
    EXPECT_FALSE(fs::exists(w / "x.safetensors"));
    const std::string help = fbt({"replay", "--help"}).out;
    for (const char* flag : {"--passes", "--tolerance", "--until-exact", "--block", "--recorded",
                             "--certify", "--save", "--compare"})
        EXPECT_NE(help.find(flag), std::string::npos) << flag;
}

TEST_F(ReplayFlags, BadFilesOfStatesAndCaches) {
    generate();
    record_cache();
    const std::string rows = get(w / "r.jsonl"), bytes = get(w / "r.safetensors");
    const Tensors good(w / "r.safetensors");
    const auto with = [&](const std::function<void(Tensors&)>& edit) {
        Tensors tensors = good;
        edit(tensors);
        tensors.write(w / "r.safetensors");
        return replay({"--certify"});
    };
    EXPECT_EQ(with([](Tensors&) {}).code, 0) << "unchanged";
    EXPECT_TRUE(failed(with([](Tensors& t) { t.metadata["weights"] = "0123456789abcdef"; }), 4,
                       {"line 1", "r.safetensors", "weights \"0123456789abcdef\""}));
    EXPECT_TRUE(failed(with([](Tensors& t) { t.metadata.erase("weights"); }), 4,
                       {"r.safetensors", "does not name"}));
    EXPECT_TRUE(
        failed(with([](Tensors& t) { t.all.erase("keys/0.1"); }), 4, {"line 2", "keys/0.1"}));
    EXPECT_TRUE(failed(with([](Tensors& t) {
                           t.all.at("values/0.0").first.shape = {1, 19, 2, 6};
                       }),
                       4, {"line 1", "values/0.0", "[1,19,2,6] f32", "[2,19,1,6]"}));
    EXPECT_TRUE(failed(with([](Tensors& t) {
                           t.all.at("states/0.0").first.shape = {38, 8};
                       }),
                       4, {"states/0.0", "[38,8]", "[19,16]"}));
    EXPECT_TRUE(failed(with([](Tensors& t) { t.all.at("keys/0.0").first.dtype = DType::bf16; }), 4,
                       {"keys/0.0", "bf16", "f32"}));
    EXPECT_TRUE(failed(with([](Tensors& t) { t.all.at("keys/0.0").second[7] = NAN; }), 4,
                       {"keys/0.0", "element 7", "finite"}));
    for (size_t size : {size_t(0), size_t(5), size_t(100), bytes.size() - 1}) {
        put(w / "r.safetensors", bytes.substr(0, size));
        EXPECT_TRUE(failed(replay({"--certify"}), 4, {"line 1", "r.safetensors"})) << size;
    }
    std::string header = bytes;
    header[9] = '!';
    put(w / "r.safetensors", header);
    EXPECT_TRUE(failed(replay({"--certify"}), 4, {"r.safetensors", "JSON"}));
    put(w / "r.safetensors", bytes);

    const auto with_row = [&](const char* key, const json& value) {
        put(w / "r.jsonl", rows);
        edit_rows([&](json& row) { row[key] = value; });
        return replay({"--certify"});
    };
    EXPECT_TRUE(failed(with_row("cache", "absent.safetensors"), 4, {"absent.safetensors"}));
    EXPECT_TRUE(failed(with_row("cache", 3), 4, {"line 1"}));
    EXPECT_TRUE(failed(with_row("prompt_length", 0), 4, {"line 1", "prompt_length"}));
    EXPECT_TRUE(failed(with_row("prompt_length", 21), 4, {"line 1", "prompt_length"}));
    EXPECT_TRUE(failed(with_row("prompt_length", 9), 4, {"line 1", "12 logprobs for 11"}));
    EXPECT_TRUE(failed(with_row("weights", "0123456789abcdef"), 4, {"weights"}));
    // Two that --save would give one name.
    EXPECT_TRUE(failed(
        [&] {
            put(w / "r.jsonl", rows + rows);
            return replay({"--certify", "--save", w / "x.safetensors"});
        }(),
        4, {"prompt 1, sample 1 twice"}));
    EXPECT_EQ(replay({"--certify"}).code, 0);
    // A refusal writes nothing.
    put(w / "r.jsonl", rows);
    with([](Tensors& t) { t.all.at("keys/0.1").second[7] += 1; });
    EXPECT_EQ(replay({"--certify", "--save", w / "x.safetensors"}).code, 1);
    EXPECT_FALSE(fs::exists(w / "x.safetensors"));
}

// Whoever samples one token has fed its prompt only.
TEST_F(ReplayFlags, ARolloutOfOneToken) {
    generate({"--states"}, "1");
    document({"--certify", "--save", w / "a.safetensors"});
    document({"--until-exact", "--save", w / "b.safetensors"});
    EXPECT_EQ(fbt({"replay", "--compare", w / "a.safetensors", w / "b.safetensors"}).code, 0);
}

}  // namespace
}  // namespace fbt::tests
