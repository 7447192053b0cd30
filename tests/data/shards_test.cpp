#include "model/data/shards.h"

#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/data/files.h"

namespace fbt::tests {
namespace {

using namespace model::data;
using tensor::ErrorKind;

std::vector<int32_t> all_of(const Split& split) {
    std::vector<int32_t> out(static_cast<size_t>(split.size()));
    split.copy(0, split.size(), out.data());
    return out;
}

template <class T>
void poke(std::string& bytes, size_t at, T value) {
    std::memcpy(bytes.data() + at, &value, sizeof value);
}

// A data folder of two documents, "hello world..." and "second", in shards of 7 tokens.
Meta small_dataset(const TemporaryFolder& folder) {
    put(folder / "a.txt", "hello world, this is the first\n");
    put(folder / "b.txt", "second");
    return build_dataset({{folder / "a.txt", folder / "b.txt"}, "bytes", folder / "data", 7});
}

TEST(Shard, RoundTripInBothWidths) {
    const TemporaryFolder folder;
    const std::vector<int32_t> tokens = {0, 1, 65535, 37};
    write_shard(folder / "narrow", tokens, 65536);
    EXPECT_EQ(get(folder / "narrow").size(), 1024 + 4 * 2u);
    std::vector<int32_t> wide_tokens = tokens;
    wide_tokens.push_back(100'351);
    write_shard(folder / "wide", wide_tokens, 100'352);
    EXPECT_EQ(get(folder / "wide").size(), 1024 + 5 * 4u);
    write_shard(folder / "empty", {}, 257);
    int32_t header[3];
    std::memcpy(header, get(folder / "narrow").data(), sizeof header);
    EXPECT_EQ(header[0], 20240520);
    EXPECT_EQ(header[1], 1);
    EXPECT_EQ(header[2], 4);
    std::memcpy(header, get(folder / "wide").data(), sizeof header);
    EXPECT_EQ(header[0], 20240801);
    EXPECT_EQ(header[1], 7);
    EXPECT_EQ(header[2], 5);
    const auto expect_tokens = [&](const std::string& name, const std::vector<int32_t>& want) {
        const Shard shard = Shard::open(folder / name);
        ASSERT_EQ(shard.size(), int64_t(want.size()));
        for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(shard[int64_t(i)], want[i]);
    };
    expect_tokens("narrow", tokens);
    expect_tokens("wide", wide_tokens);
    expect_tokens("empty", {});
    EXPECT_TRUE(throws(ErrorKind::internal, {"token 257", "position 1", "vocabulary of 257"}, [&] {
        write_shard(folder / "bad", std::vector<int32_t>{256, 257}, 257);
    }));
    EXPECT_FALSE(std::filesystem::exists(folder / "bad"));
}

TEST(Shard, DamagedFilesAreNamed) {
    const TemporaryFolder folder;
    write_shard(folder / "good", std::vector<int32_t>{1, 2, 3}, 257);
    const std::string good = get(folder / "good");
    const auto refuses = [&](const std::string& bytes, std::initializer_list<const char*> words) {
        put(folder / "bad", bytes);
        return throws(ErrorKind::bad_file, words, [&] { Shard::open(folder / "bad"); });
    };
    for (size_t n = 0; n < good.size(); ++n)
        EXPECT_TRUE(refuses(good.substr(0, n), {"bad", "bytes"})) << n;
    EXPECT_TRUE(refuses(good + "x", {"1031 bytes", "counts 3 tokens", "1030 in all"}));
    EXPECT_TRUE(refuses(good.substr(0, 1028), {"1028 bytes", "counts 3 tokens"}));
    std::string bytes = good;
    poke(bytes, 0, int32_t(20240521));
    EXPECT_TRUE(refuses(bytes, {"magic 20240521", "expected 20240520", "20240801"}));
    poke(bytes, 0, int32_t(20240801));
    EXPECT_TRUE(refuses(bytes, {"version 1", "expected 7"}));
    bytes = good;
    poke(bytes, 4, int32_t(7));
    EXPECT_TRUE(refuses(bytes, {"version 7", "expected 1"}));
    bytes = good;
    poke(bytes, 8, int32_t(-1));
    EXPECT_TRUE(refuses(bytes, {"counts -1 tokens"}));
    poke(bytes, 8, std::numeric_limits<int32_t>::max());
    EXPECT_TRUE(refuses(bytes, {"counts 2147483647 tokens"}));
}

TEST(Dataset, HoldsEveryByteOfTheText) {
    const TemporaryFolder folder;
    const Meta made = small_dataset(folder);
    const Dataset data = Dataset::open(folder / "data");
    // 2 boundaries + 31 + 6 bytes = 39 tokens; 5 % rounded up = 2, cut inside "second".
    EXPECT_EQ(made.documents, 2);
    EXPECT_EQ(made.train_tokens, 37);
    EXPECT_EQ(made.val_tokens, 3);
    EXPECT_EQ(made.train_text_bytes, 35);
    EXPECT_EQ(made.val_text_bytes, 2);
    EXPECT_EQ(data.meta().train_tokens, 37);
    EXPECT_EQ(data.meta().val_text_bytes, 2);
    EXPECT_EQ(data.train().documents(), (std::vector<int64_t>{0, 32}));
    EXPECT_EQ(data.val().documents(), std::vector<int64_t>{0});
    const auto train = all_of(data.train()), val = all_of(data.val());
    EXPECT_EQ(train[0], 256);
    EXPECT_EQ(train[32], 256);
    EXPECT_EQ(val[0], 256);
    EXPECT_EQ(data.tokenizer().decode(train), "hello world, this is the first\nseco");
    EXPECT_EQ(data.tokenizer().decode(val), "nd");
    EXPECT_TRUE(std::filesystem::exists(folder / "data/train_000005.bin"));
    EXPECT_FALSE(std::filesystem::exists(folder / "data/train_000006.bin"));
    EXPECT_FALSE(std::filesystem::exists(folder / "data/all_tokens"));
    EXPECT_FALSE(std::filesystem::exists(folder / ".data.partial"));
    // Any range, across shards.
    for (int64_t begin = 0; begin <= 37; ++begin)
        for (int64_t count = 0; begin + count <= 37; ++count) {
            std::vector<int32_t> part(static_cast<size_t>(count));
            data.train().copy(begin, count, part.data());
            EXPECT_TRUE(std::equal(part.begin(), part.end(), train.begin() + begin));
        }
    int32_t one;
    EXPECT_TRUE(throws(ErrorKind::internal, {"37"}, [&] { data.train().copy(37, 1, &one); }));
    EXPECT_TRUE(throws(ErrorKind::internal, {"-1"}, [&] { data.train().copy(-1, 1, &one); }));
}

TEST(Dataset, LargeTextsAreEncodedInChunksWithoutATrace) {
    const TemporaryFolder folder;
    std::string text;  // above the chunk's 4 MiB, then a line that is longer than a chunk
    for (int i = 0; text.size() < (5u << 20); ++i)
        text += "line line line line " + std::to_string(i) + (i % 7 ? "\n" : "\n\n\n");
    while (text.substr((4u << 20) - 2, 4) != "line")
        text.insert(text.begin(), 'x');  // a token to be cut
    const size_t lines_size = text.size();
    while (text.size() < (10u << 20)) text += "\xc3\xa9\xe2\x82\xac";
    put(folder / "a.txt", text);
    put(folder / "small.txt", text.substr(0, 10'000));
    build_dataset({{folder / "small.txt"}, "sentencepiece:300", folder / "small"});
    for (const std::string& tokenizer : {std::string("bytes"), folder / "small/tokenizer.model"}) {
        const std::string out = folder / (tokenizer == "bytes" ? "one" : "two");
        build_dataset({{folder / "a.txt"}, tokenizer, out});
        const Dataset data = Dataset::open(out);
        EXPECT_EQ(data.tokenizer().decode(all_of(data.train())) +
                      data.tokenizer().decode(all_of(data.val())),
                  text);
        EXPECT_EQ(data.meta().documents, 1);
        EXPECT_EQ(data.train().documents(), std::vector<int64_t>{0});
        const auto want = data.tokenizer().encode(text.substr(0, lines_size));
        std::vector<int32_t> got(want.size());
        data.train().copy(1, int64_t(got.size()), got.data());
        EXPECT_EQ(got, want);
    }
}

TEST(Dataset, JsonLinesAreDocuments) {
    const TemporaryFolder folder;
    put(folder / "a.jsonl",
        "{\"text\":\"one\\n\\u00e9\",\"id\":1}\n\n{\"text\":\"\"}\r\n{\"id\":2,\"text\":\"two\"}");
    const Meta meta = build_dataset({{folder / "a.jsonl"}, "bytes", folder / "data/"});
    EXPECT_EQ(meta.documents, 2);
    const Dataset data = Dataset::open(folder / "data");
    EXPECT_EQ(data.tokenizer().decode(all_of(data.train())), "one\n\xc3\xa9tw");
    EXPECT_EQ(data.tokenizer().decode(all_of(data.val())), "o");
    for (const char* line :
         {"{\"text\":1}", "{\"no\":\"text\"}", "[]", "{\"text\":\"a\"", "\xff"}) {
        put(folder / "bad.jsonl", std::string("{\"text\":\"fine\"}\n\n") + line + "\n");
        EXPECT_TRUE(throws(ErrorKind::bad_file, {"bad.jsonl line 3", "\"text\""}, [&] {
            build_dataset({{folder / "bad.jsonl"}, "bytes", folder / "bad"});
        }));
        EXPECT_FALSE(std::filesystem::exists(folder / "bad"));
        EXPECT_FALSE(std::filesystem::exists(folder / ".bad.partial"));
    }
}

TEST(Dataset, SentencePieceFolderStandsAlone) {
    const TemporaryFolder folder;
    std::string text;
    for (int i = 0; i < 300; ++i) text += "the number is " + std::to_string(i * 37) + ".\n";
    put(folder / "a.txt", text);
    const Meta meta = build_dataset({{folder / "a.txt"}, "sentencepiece:300", folder / "data"});
    EXPECT_EQ(meta.tokenizer, "tokenizer.model");
    EXPECT_EQ(meta.vocab_size, 300);
    std::filesystem::rename(folder / "data", folder / "moved");
    const Dataset data = Dataset::open(folder / "moved");
    EXPECT_EQ(data.meta().train_text_bytes + data.meta().val_text_bytes, int64_t(text.size()));
    EXPECT_EQ(data.tokenizer().decode(all_of(data.val())).size(),
              size_t(data.meta().val_text_bytes));
    // Another folder can use the same tokenizer by its path.
    build_dataset({{folder / "a.txt"}, folder / "moved/tokenizer.model", folder / "other"});
    EXPECT_EQ(all_of(Dataset::open(folder / "other").train()), all_of(data.train()));
}

TEST(Dataset, WhatCannotBeBuilt) {
    const TemporaryFolder folder;
    put(folder / "a.txt", "text");
    put(folder / "empty.txt", "");
    const auto build = [&](std::vector<std::string> inputs, const char* tokenizer,
                           const std::string& out, int64_t shard_tokens = 100) {
        return [=] { build_dataset({inputs, tokenizer, out, shard_tokens}); };
    };
    const std::string a = folder / "a.txt", out = folder / "out";
    EXPECT_TRUE(throws(ErrorKind::usage, {"no input file"}, build({}, "bytes", out)));
    EXPECT_TRUE(throws(ErrorKind::usage, {"\"words\""}, build({a}, "words", out)));
    for (const char* spec : {"sentencepiece:", "sentencepiece:x", "sentencepiece:99999999"})
        EXPECT_TRUE(throws(ErrorKind::usage, {spec, "expected"}, build({a}, spec, out)));
    EXPECT_TRUE(throws(ErrorKind::usage, {"shards of 0"}, build({a}, "bytes", out, 0)));
    EXPECT_TRUE(throws(ErrorKind::usage, {"exists already"}, build({a}, "bytes", folder.path())));
    EXPECT_TRUE(throws(ErrorKind::usage, {"exists already"}, build({a}, "bytes", a)));
    for (const char* none : {"", ".", "/", ".."})
        EXPECT_TRUE(throws(ErrorKind::usage, {"expected a new folder"}, build({a}, "bytes", none)));
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"none.txt", "No such file"},
                       build({a, folder / "none.txt"}, "bytes", out)));
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"empty.txt", "no text"},
                       build({folder / "empty.txt"}, "bytes", out)));
    EXPECT_TRUE(throws(ErrorKind::environment, {"a.txt"}, build({a}, "bytes", a + "/under")));
    EXPECT_FALSE(std::filesystem::exists(out));
    // What a killed run left behind does not stand in the way, nor does an empty folder.
    std::filesystem::create_directories(folder / ".out.partial/deep");
    std::filesystem::create_directories(out);
    build({a}, "bytes", out)();
    EXPECT_EQ(Dataset::open(out).meta().documents, 1);
    EXPECT_FALSE(std::filesystem::exists(folder / ".out.partial"));
}

// Whenever it is killed: there is a whole data folder or none, and the next run succeeds.
TEST(Dataset, AKillLeavesNothingThatPassesAsWhole) {
    const TemporaryFolder folder;
    std::string text;
    for (int i = 0; i < 20'000; ++i) text += "line " + std::to_string(i) + "\n";
    put(folder / "a.txt", text);
    const auto build = [&] { build_dataset({{folder / "a.txt"}, "bytes", folder / "data", 5000}); };
    int killed = 0;
    for (int delay = 0; delay < 15; ++delay) {
        const pid_t child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            try {
                build();
            } catch (...) {
                ::_exit(1);
            }
            ::_exit(0);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(delay));
        ::kill(child, SIGKILL);
        int status = 0;
        ::waitpid(child, &status, 0);
        killed += WIFSIGNALED(status);
        EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
        if (std::filesystem::exists(folder / "data")) {
            const Dataset data = Dataset::open(folder / "data");
            EXPECT_EQ(data.meta().train_text_bytes + data.meta().val_text_bytes,
                      int64_t(text.size()));
            std::filesystem::remove_all(folder / "data");
        }
    }
    EXPECT_GT(killed, 0);
    build();
    EXPECT_EQ(Dataset::open(folder / "data").meta().documents, 1);
}

TEST(Dataset, DamagedFoldersAreNamed) {
    const TemporaryFolder folder;
    small_dataset(folder);
    const std::string data = folder / "data", meta_path = data + "/meta.json",
                      shard_path = data + "/train_000002.bin";
    const auto refuses = [&](std::initializer_list<const char*> words) {
        return throws(ErrorKind::bad_file, words, [&] { Dataset::open(data); });
    };
    const std::string meta = get(meta_path), shard = get(shard_path);

    EXPECT_TRUE(throws(ErrorKind::bad_file, {"nothing has no meta.json"},
                       [] { Dataset::open("nothing"); }));
    for (size_t n = 0; n + 2 < meta.size(); ++n) {
        put(meta_path, meta.substr(0, n));
        EXPECT_TRUE(refuses({"meta.json", "not a JSON object"})) << n;
    }
    const auto with = [&](const char* key, const nlohmann::json& value) {
        auto changed = nlohmann::json::parse(meta);
        changed[key] = value;
        put(meta_path, changed.dump());
    };
    with("vocab_size", "257");
    EXPECT_TRUE(refuses({"meta.json", "vocab_size", "expected an integer"}));
    with("vocab_size", 258);
    EXPECT_TRUE(refuses({"meta.json says vocabulary 258", "257"}));
    with("boundary", 257);
    EXPECT_TRUE(refuses({"boundary", "from 0 to 256"}));
    with("boundary", 3);
    EXPECT_TRUE(refuses({"boundary 3", "256"}));
    with("train_tokens", -1);
    EXPECT_TRUE(refuses({"train_tokens", "expected an integer"}));
    with("train_tokens", 18446744073709551615u);
    EXPECT_TRUE(refuses({"train_tokens", "expected an integer"}));
    with("train_tokens", 36);
    EXPECT_TRUE(refuses({"37 train tokens", "meta.json says 36"}));
    with("val_tokens", 4);
    EXPECT_TRUE(refuses({"3 val tokens", "meta.json says 4"}));
    with("tokenizer", 3);
    EXPECT_TRUE(refuses({"\"tokenizer\" that is not a string"}));
    with("tokenizer", "words");
    EXPECT_TRUE(refuses({"meta.json", "\"words\""}));
    with("tokenizer", "tokenizer.model");
    EXPECT_TRUE(refuses({"tokenizer.model", "No such file"}));
    const auto whole = nlohmann::json::parse(meta);
    for (const auto& [key, value] : whole.items()) {
        auto without = whole;
        without.erase(key);
        put(meta_path, without.dump());
        EXPECT_TRUE(refuses({"meta.json has no", key.c_str()}));
    }
    put(meta_path, meta);

    std::string bytes = shard;
    poke(bytes, 1024 + 2 * 3, uint16_t(257));
    put(shard_path, bytes);
    EXPECT_TRUE(refuses({"train_000002.bin", "token 257 at position 3", "below 257"}));
    write_shard(shard_path, std::vector<int32_t>{1, 2, 70000}, 70001);
    EXPECT_TRUE(refuses({"train_000002.bin", "token 70000 at position 2"}));
    bytes = get(shard_path);
    poke(bytes, 1024, uint32_t(0xffffffff));
    put(shard_path, bytes);
    EXPECT_TRUE(refuses({"train_000002.bin", "token 4294967295 at position 0"}));
    put(shard_path, shard.substr(0, 1030));
    EXPECT_TRUE(refuses({"train_000002.bin", "1030 bytes"}));
    std::filesystem::remove(shard_path);
    EXPECT_TRUE(refuses({"30 train tokens in 5 files train_*.bin", "meta.json says 37"}));
    put(shard_path, shard);
    EXPECT_EQ(Dataset::open(data).train().size(), 37);

    for (int i = 0; i < 6; ++i)
        std::filesystem::remove(data + "/train_00000" + std::to_string(i) + ".bin");
    EXPECT_TRUE(refuses({"0 train tokens in 0 files train_*.bin"}));
    with("train_tokens", 0);
    EXPECT_TRUE(refuses({"no training tokens", "train_*.bin"}));
}

}  // namespace
}  // namespace fbt::tests
