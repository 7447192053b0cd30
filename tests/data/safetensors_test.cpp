#include "tensor/safetensors.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "tests/compare.h"
#include "tests/data/files.h"

namespace fbt::tests {
namespace {

using namespace tensor;
using kernels::bf16;

// A file around this header, with `data` behind it.
std::string file_with(const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    std::string out(8, '\0');
    std::memcpy(out.data(), &length, 8);
    return out + header + data;
}
std::string one_tensor(const std::string& dtype, const std::string& shape, const std::string& at) {
    return "{\"w\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + at + "}}";
}

void write_small(const std::string& path) {
    SafetensorsWriter writer(path,
                             {{"z", DType::i64, {3}},
                              {"a", DType::f32, {2, 3}},
                              {"scalar", DType::f64, {}},
                              {"empty", DType::f32, {0, 7}},
                              {"b", DType::bf16, {3}},
                              {"bytes", DType::u8, {1}}},
                             {{"format", "pt"}, {"\"odd\n", "\xc3\xa9"}});
    writer.write("a", std::vector<float>{1, -2, 3.5f, 0, 1e-40f, 7});
    writer.write("b", std::vector<bf16>{bf16(1.f), bf16(-2.f), bf16(INFINITY)});
    writer.write("bytes", std::vector<uint8_t>{200});
    writer.write("scalar", std::vector<double>{-0.1});
    writer.write("z", std::vector<int64_t>{-1});  // in two calls
    writer.write("z", std::vector<int64_t>{2, int64_t(1) << 40});
    writer.finish();
}

TEST(Safetensors, RoundTrip) {
    const TemporaryFolder folder;
    const std::string path = folder / "small.safetensors";
    write_small(path);
    const auto file = SafetensorsFile::open(path);
    EXPECT_EQ(file.metadata().at("format"), "pt");
    EXPECT_EQ(file.metadata().at("\"odd\n"), "\xc3\xa9");
    EXPECT_EQ(file.entries().size(), 6u);
    EXPECT_EQ(file.entry("a").shape, (tensor::Shape{2, 3}));
    EXPECT_EQ(file.entry("a").count(), 6);
    EXPECT_EQ(file.entry("scalar").shape.size(), 0u);
    EXPECT_EQ(file.read<float>("a"), (std::vector<float>{1, -2, 3.5f, 0, 1e-40f, 7}));
    EXPECT_EQ(file.read<double>("scalar"), std::vector<double>{-0.1});
    EXPECT_EQ(file.read<float>("scalar"), std::vector<float>{-0.1f});
    EXPECT_EQ(file.read<double>("b"), (std::vector<double>{1, -2, HUGE_VAL}));
    EXPECT_EQ(file.read<int64_t>("z"), (std::vector<int64_t>{-1, 2, int64_t(1) << 40}));
    EXPECT_EQ(file.read<float>("z"), (std::vector<float>{-1, 2, 0x1p40f}));
    EXPECT_EQ(file.read<int32_t>("bytes"), std::vector<int32_t>{200});
    EXPECT_TRUE(file.read<float>("empty").empty());
    EXPECT_TRUE(file.contains("empty"));
    EXPECT_FALSE(file.contains("nothing"));
}

TEST(Safetensors, TensorsBeginAtAMultipleOfEightBytes) {
    const TemporaryFolder folder;
    for (size_t n = 1; n <= 8; ++n) {
        SafetensorsWriter writer(folder / "f", {{std::string(n, 'w'), DType::f64, {1}}});
        writer.write(std::string(n, 'w'), std::vector<double>{0.1});
        writer.finish();
        const auto file = SafetensorsFile::open(folder / "f");
        EXPECT_EQ(file.entry(std::string(n, 'w')).offset % 8, 0u);
        EXPECT_EQ(file.read<double>(std::string(n, 'w')), std::vector<double>{0.1});
    }
}

TEST(Safetensors, ReadsWhatThePythonLibraryWrote) {
    const auto file = SafetensorsFile::open(FBT_SOURCE_DIR "/tests/golden/gated_k2.safetensors");
    EXPECT_EQ(file.metadata().at("format"), "fbt-golden-1");
    const auto lengths = file.read<int32_t>("lengths");
    int64_t rows = 0;
    for (const int32_t n : lengths) rows += n;
    EXPECT_EQ(file.entry("tokens").shape, tensor::Shape{rows});
    EXPECT_TRUE(std::isfinite(file.read<double>("loss/total").at(0)));
}

TEST(Safetensors, ConversionsThatLoseAreRefused) {
    const TemporaryFolder folder;
    const std::string path = folder / "small.safetensors";
    write_small(path);
    const auto file = SafetensorsFile::open(path);
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"small.safetensors", "\"z\"", "element 2", "32-bit"},
                       [&] { file.read<int32_t>("z"); }));
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"\"z\"", "element 0", "8-bit"},
                       [&] { file.read<uint8_t>("z"); }));
    EXPECT_TRUE(
        throws(ErrorKind::bad_file, {"\"a\"", "f32", "integer"}, [&] { file.read<int64_t>("a"); }));
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"small.safetensors", "no tensor \"nothing\""},
                       [&] { file.read<float>("nothing"); }));
}

TEST(Safetensors, Bf16RoundsOnceToNearestEven) {
    // All bf16 values survive; halves go to even; NaN stays NaN, of any payload.
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const float f = std::bit_cast<float>(bits << 16);
        if (std::isnan(f))
            EXPECT_TRUE(std::isnan(float(bf16(f))));
        else
            EXPECT_EQ(bf16(f).bits, bits);
    }
    EXPECT_EQ(bf16(1 + 0x1p-8f).bits, 0x3f80);
    EXPECT_EQ(bf16(1 + 3 * 0x1p-8f).bits, 0x3f82);
    EXPECT_EQ(bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
    EXPECT_TRUE(std::isnan(float(bf16(std::bit_cast<float>(0x7f800001u)))));

    // Just above and below a half, by less than float can tell: rounding twice would go wrong.
    const TemporaryFolder folder;
    SafetensorsWriter writer(folder / "f", {{"x", DType::f64, {6}}});
    const double half = 1 + 0x1p-8, next_half = 1 + 3 * 0x1p-8;
    writer.write("x", std::vector<double>{half + 0x1p-40, next_half - 0x1p-40, -half - 0x1p-40,
                                          1e300, half, 0x1p-133 + 0x1p-134 + 0x1p-180});
    writer.finish();
    std::vector<int> bits;
    for (const bf16 x : SafetensorsFile::open(folder / "f").read<bf16>("x")) bits.push_back(x.bits);
    EXPECT_EQ(bits, (std::vector<int>{0x3f81, 0x3f81, 0xbf81, 0x7f80, 0x3f80, 0x0002}));
}

TEST(Safetensors, EveryTruncationIsOneClearError) {
    const TemporaryFolder folder;
    write_small(folder / "whole");
    const std::string whole = get(folder / "whole");
    for (size_t n = 0; n < whole.size(); ++n) {
        put(folder / "cut", whole.substr(0, n));
        EXPECT_TRUE(throws(ErrorKind::bad_file, {"cut", "expected"}, [&] {
            SafetensorsFile::open(folder / "cut");
        })) << n;
    }
    put(folder / "longer", whole + "x");
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"longer", "1 bytes after"},
                       [&] { SafetensorsFile::open(folder / "longer"); }));
}

// A flipped byte in header or length either still reads as some valid file or is refused: no crash,
// no access outside the file (the sanitizers watch).
TEST(Safetensors, AnyFlippedByteIsReadOrRefused) {
    const TemporaryFolder folder;
    write_small(folder / "whole");
    const std::string whole = get(folder / "whole");
    uint64_t length;
    std::memcpy(&length, whole.data(), 8);
    int refused = 0, read = 0;
    for (size_t at = 0; at < 8 + length; ++at)
        for (const int flip : {0x01, 0x10, 0x80, 0xff}) {
            std::string bytes = whole;
            bytes[at] = char(bytes[at] ^ flip);
            put(folder / "flipped", bytes);
            try {
                const auto file = SafetensorsFile::open(folder / "flipped");
                for (const auto& [name, entry] : file.entries())
                    EXPECT_EQ(int64_t(file.read<double>(name).size()), entry.count());
                ++read;
            } catch (const Error& e) {
                EXPECT_EQ(e.kind(), ErrorKind::bad_file);
                EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
                ++refused;
            }
        }
    EXPECT_GT(refused, 0);
    EXPECT_GT(read, 0);  // letters of names
}

TEST(Safetensors, BadHeaders) {
    const TemporaryFolder folder;
    const std::string f32 = "\"F32\"", data(24, '\1');
    const auto two = [](const std::string& first, const std::string& second) {
        return "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" + first +
               "},\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" + second + "}}";
    };
    const struct {
        std::string header, data;
        const char* word;
    } cases[] = {
        {one_tensor(f32, "[2,3]", "[0,24]") + "x", data, "not JSON"},
        {"{\"w\":", data, "not JSON"},
        {"", "", "not JSON"},
        {std::string(100000, '['), "", "not JSON"},
        {"{\"\xff\":1}", "", "not JSON"},
        {"[]", "", "not a JSON object"},
        {"{\"w\":3}", "", "dtype, shape and data_offsets"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[2]}}", data, "dtype, shape and data_offsets"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24],\"x\":1}}", data,
         "dtype, shape and data_offsets"},
        {one_tensor("\"F8\\n\"", "[6]", "[0,24]"), data, "the dtype \"F8\\x0a\", expected F32"},
        {one_tensor("32", "[6]", "[0,24]"), data, "not a string"},
        {one_tensor(f32, "6", "[0,24]"), data, "shape that is not a list"},
        {one_tensor(f32, "[-6]", "[0,24]"), data, "shape that is not a list"},
        {one_tensor(f32, "[6.0]", "[0,24]"), data, "shape that is not a list"},
        {one_tensor(f32, "[18446744073709551615]", "[0,24]"), data, "shape that is not a list"},
        {one_tensor(f32, "[9223372036854775807,4]", "[0,24]"), data, "more than 63 bits"},
        {one_tensor(f32, "[4294967296,4294967296,0]", "[0,0]"), "", "more than 63 bits"},
        {one_tensor(f32, "[5]", "[0,24]"), data, "24 bytes, but F32 [5] needs 20"},
        {one_tensor("\"F64\"", "[6]", "[0,24]"), data, "needs 48"},
        {one_tensor(f32, "[6]", "[0]"), data, "[begin, end]"},
        {one_tensor(f32, "[6]", "[0,-24]"), data, "[begin, end]"},
        {one_tensor(f32, "[6]", "[24,0]"), data, "bytes 24 to 0"},
        {one_tensor(f32, "[7]", "[0,28]"), data, "bytes 0 to 28 of its data, which has 24"},
        {one_tensor(f32, "[6]", "[9223372036854775783,9223372036854775807]"), data,
         "of its data, which has 24"},
        {two("[0,8]", "[4,12]"), data.substr(0, 12), "an overlap before tensor \"b\""},
        {two("[0,8]", "[0,8]"), data.substr(0, 8), "an overlap before tensor \"b\""},
        {two("[0,8]", "[12,20]"), data.substr(0, 20), "unused bytes before tensor \"b\""},
        {two("[4,12]", "[12,20]"), data.substr(0, 20), "unused bytes before tensor \"a\""},
        {two("[0,8]", "[8,16]"), data.substr(0, 20), "4 bytes after its last tensor"},
        {"{}", "x", "1 bytes after its last tensor"},
        {"{\"w\":1,\"w\":2}", "", "names \"w\" twice"},
        {"{\"w\":{\"dtype\":\"F32\",\"dtype\":\"F64\"}}", "", "names \"dtype\" twice"},
        {"{\"__metadata__\":[]}", "", "__metadata__ that is not an object"},
        {"{\"__metadata__\":{\"k\":1}}", "", "\"k\" that is not a string"},
    };
    for (const auto& c : cases) {
        put(folder / "bad", file_with(c.header, c.data));
        EXPECT_TRUE(throws(ErrorKind::bad_file, {"bad", c.word, "expected"}, [&] {
            SafetensorsFile::open(folder / "bad");
        })) << c.header.substr(0, 200);
    }
    for (const int missing : {1, 2, 8, 9}) {
        std::string bytes = file_with("{}" + std::string(14, ' '), "");
        bytes.resize(bytes.size() - size_t(missing));
        put(folder / "bad", bytes);
        EXPECT_TRUE(throws(ErrorKind::bad_file, {"header of 16 bytes", "cut short"},
                           [&] { SafetensorsFile::open(folder / "bad"); }));
    }
    put(folder / "bad", std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10));
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"header of 18446744073709551615"},
                       [&] { SafetensorsFile::open(folder / "bad"); }));
    put(folder / "good", file_with(one_tensor(f32, "[2,3]", "[0,24]") + "  ", data));
    EXPECT_EQ(SafetensorsFile::open(folder / "good").entries().size(), 1u);
    put(folder / "good", file_with("{}", ""));
    EXPECT_EQ(SafetensorsFile::open(folder / "good").entries().size(), 0u);
}

TEST(Safetensors, WriterHoldsCallersToTheirWord) {
    const TemporaryFolder folder;
    const std::vector<SafetensorsWriter::Item> items = {{"b", DType::f32, {1}},
                                                        {"a", DType::f32, {2}}};
    const std::vector<float> one(1), two(2), three(3);
    using Use = std::function<void(SafetensorsWriter&)>;
    const Use uses[] = {
        [&](SafetensorsWriter& w) { w.write("b", one); },
        [&](SafetensorsWriter& w) { w.write("a", three); },
        [&](SafetensorsWriter& w) { w.write("a", one), w.write("b", one); },
        [&](SafetensorsWriter& w) { w.write("a", two), w.write("c", one); },
        [&](SafetensorsWriter& w) { w.write("a", two), w.write("b", one), w.write("b", one); },
        [&](SafetensorsWriter& w) { w.write("a", two), w.write("b", one), w.write("a", one); },
        [&](SafetensorsWriter& w) { w.write("a", two), w.finish(); },
        [&](SafetensorsWriter& w) { w.finish(); },
    };
    for (const Use& use : uses)
        EXPECT_TRUE(throws(ErrorKind::internal, {"f"}, [&] {
            SafetensorsWriter writer(folder / "f", items);
            use(writer);
        }));
    EXPECT_FALSE(std::filesystem::exists(folder / "f"));
    const std::vector<std::vector<SafetensorsWriter::Item>> impossible = {
        {{"a", DType::f32, {1}}, {"a", DType::f32, {1}}},
        {{"__metadata__", DType::f32, {1}}},
        {{"a", DType::f32, {-1}}},
        {{"a", DType::f64, {int64_t(1) << 62}}},
        {{"\xff", DType::f32, {1}}}};
    for (const auto& list : impossible)
        EXPECT_TRUE(throws(ErrorKind::internal, {"f"}, [&] {
            SafetensorsWriter(folder / "f", list, {{"k", "v"}});
        }));
}

}  // namespace
}  // namespace fbt::tests
