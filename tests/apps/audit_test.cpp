// fbt audit: every golden file passes, and one that was tampered with does not.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "tensor/safetensors.h"
#include "tests/apps/program.h"

namespace fbt::tests {
namespace {

namespace fs = std::filesystem;

Arguments golden_files() {
    Arguments files;
    for (const auto& entry : fs::directory_iterator(FBT_SOURCE_DIR "/tests/golden"))
        if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
    return files;
}
const std::string kOne = FBT_SOURCE_DIR "/tests/golden/gated_k2.safetensors";

// A copy of a file with `change` made to the bytes of one tensor.
void copy_changed(const std::string& from, const std::string& to, const std::string& tensor,
                  const std::function<void(std::vector<std::byte>&)>& change) {
    const auto file = tensor::SafetensorsFile::open(from);
    std::vector<tensor::SafetensorsWriter::Item> items;
    for (const auto& [name, entry] : file.entries())
        items.push_back({name, entry.dtype, entry.shape});
    tensor::SafetensorsWriter writer(to, items, file.metadata());
    for (const auto& item : writer.items()) {
        const auto bytes = file.bytes(item.name);
        std::vector<std::byte> copy(bytes.begin(), bytes.end());
        if (item.name == tensor) change(copy);
        writer.write(item.name, copy);
    }
    writer.finish();
}

TEST(Audit, AllGoldenFilesInF32) {
    const Arguments files = golden_files();
    ASSERT_EQ(files.size(), 7u);
    const Result result = fbt(Arguments{"audit", "--threads", "1"} + files);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
}

TEST(Audit, AllGoldenFilesInF64) {
    const Result result =
        fbt(Arguments{"audit", "--device", "ref", "--dtype", "f64"} + golden_files());
    EXPECT_EQ(result.code, 0) << result.out << result.err;
}

TEST(Audit, TamperedValueIsOutside) {
    const TemporaryFolder folder;
    copy_changed(kOne, folder / "bad.safetensors", "hidden/pass_2", [](auto& bytes) {
        double x;  // the last value
        std::memcpy(&x, bytes.data() + bytes.size() - sizeof x, sizeof x);
        x += 1e-3;
        std::memcpy(bytes.data() + bytes.size() - sizeof x, &x, sizeof x);
    });
    const Result result = fbt({"audit", folder / "bad.safetensors", "--json"});
    EXPECT_EQ(result.code, 1) << result.err;
    int outside = 0;
    const nlohmann::json document = nlohmann::json::parse(result.out);
    for (const auto& row : document["files"][0]["rows"])
        if (!row["ok"].get<bool>()) {
            EXPECT_EQ(row["quantity"], "hidden/pass_2");
            ++outside;
        }
    EXPECT_EQ(outside, 1);
}

TEST(Audit, NotANumberIsOutside) {
    const TemporaryFolder folder;
    copy_changed(kOne, folder / "bad.safetensors", "loss/total",
                 [](auto& bytes) { std::memset(bytes.data(), 0xff, bytes.size()); });
    EXPECT_EQ(fbt({"audit", folder / "bad.safetensors"}).code, 1);
}

TEST(Audit, DumpHoldsTheSameNames) {
    const TemporaryFolder folder;
    const std::string dump = folder / "dump.safetensors";
    ASSERT_EQ(fbt({"audit", kOne, "--dump", dump}).code, 0);
    const auto golden = tensor::SafetensorsFile::open(kOne);
    const auto ours = tensor::SafetensorsFile::open(dump);
    for (const char* name : {"loss/total", "hidden/pass_2", "grads/embed.weight", "rollout/soft/k",
                             "replay/fused/pass_1/hidden"}) {
        if (!golden.contains(name)) continue;
        ASSERT_TRUE(ours.contains(name)) << name;
        EXPECT_EQ(ours.entry(name).shape, golden.entry(name).shape);
        EXPECT_EQ(ours.entry(name).dtype, tensor::DType::f32);
    }
    EXPECT_NEAR(ours.read<double>("loss/total")[0], golden.read<double>("loss/total")[0], 1e-4);
}

TEST(Audit, DumpRemovesNothing) {
    const TemporaryFolder folder;
    ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
    EXPECT_TRUE(failed(fbt({"audit", kOne, "--dump", folder / "pipe"}), 2, {"--dump", "pipe"}));
    EXPECT_TRUE(fs::is_fifo(folder / "pipe"));
    EXPECT_TRUE(failed(fbt({"audit", kOne, "--dump", folder / "no/d"}), 5, {"no/"}));
    put(folder / "d", "before");
    EXPECT_EQ(fbt({"audit", folder / "absent", "--dump", folder / "d"}).code, 4);
    EXPECT_EQ(get(folder / "d"), "before");
}

TEST(Audit, BadFiles) {
    const TemporaryFolder folder;
    put(folder / "no.safetensors", "this is no safetensors file");
    EXPECT_TRUE(failed(fbt({"audit", folder / "no.safetensors"}), 4, {"no.safetensors"}));
    put(folder / "cut.safetensors", get(kOne).substr(0, 300000));
    EXPECT_TRUE(failed(fbt({"audit", folder / "cut.safetensors"}), 4, {"cut.safetensors"}));
    EXPECT_TRUE(failed(fbt({"audit", folder / "absent"}), 4, {"absent"}));
    EXPECT_TRUE(failed(fbt({"audit"}), 2, {"FILE"}));
    EXPECT_TRUE(failed(fbt({"audit", kOne, kOne, "--dump", folder / "d"}), 2, {"--dump"}));
    EXPECT_TRUE(failed(fbt({"audit", kOne, "--device", "ref", "--dtype", "bf16"}), 2,
                       {"bf16", "for --device cpu"}));
    EXPECT_TRUE(failed(fbt({"audit", kOne, "--dtype", "f64"}), 2, {"f64", "ref"}));
    EXPECT_TRUE(failed(fbt({"audit", kOne, "--device", "abacus"}), 2, {"abacus", "cpu"}));
}

}  // namespace
}  // namespace fbt::tests
