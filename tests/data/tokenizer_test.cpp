#include "model/data/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <random>

#include "tensor/file.h"
#include "tests/data/files.h"

namespace fbt::tests {
namespace {

using namespace model::data;
using tensor::ErrorKind;

// Reproducible English-like text: `sentences` of a few made-up words, some punctuation, some é.
std::string generated_text(int sentences, unsigned seed) {
    std::mt19937 random(seed);
    const char* syllables[] = {"ba", "ko", "ri", "the", "st\xc3\xa9", "ing", "mu", "el"};
    std::string out;
    for (int s = 0; s < sentences; ++s) {
        const int words = 3 + int(random() % 6);
        for (int w = 0; w < words; ++w) {
            if (w) out += ' ';
            const int length = 1 + int(random() % 3);
            for (int i = 0; i < length; ++i) out += syllables[random() % 8];
        }
        out += s % 5 == 4 ? ".\n\n" : s % 3 == 2 ? "?\n- " : s % 7 == 6 ? "!\n\t" : ". ";
    }
    return out;
}

std::unique_ptr<Tokenizer> trained(int vocab_size) {
    const std::string text = generated_text(400, 1);
    return train_sentencepiece([&](const TextSink& sink) { sink(text); }, vocab_size);
}

std::string utf8(uint32_t c) {
    std::string out;
    if (c < 0x80) return std::string(1, char(c));
    if (c < 0x800) return {char(0xc0 | c >> 6), char(0x80 | (c & 63))};
    if (c < 0x10000)
        return {char(0xe0 | c >> 12), char(0x80 | (c >> 6 & 63)), char(0x80 | (c & 63))};
    return {char(0xf0 | c >> 18), char(0x80 | (c >> 12 & 63)), char(0x80 | (c >> 6 & 63)),
            char(0x80 | (c & 63))};
}

void expect_lossless(const Tokenizer& tokenizer, const std::string& text) {
    const auto ids = tokenizer.encode(text);
    for (const int32_t id : ids) {
        ASSERT_GE(id, 0);
        ASSERT_LT(id, tokenizer.vocab_size());
        ASSERT_NE(id, tokenizer.boundary());
    }
    EXPECT_EQ(tokenizer.decode(ids), text) << tensor::in_quotes(text);
}

void expect_lossless_on_everything(const Tokenizer& tokenizer) {
    const std::string hard[] = {
        "",
        " ",
        "  two  spaces  ",
        "\n\n a\r\n\tb \n",
        std::string("nul \0 inside", 12),
        "<s></s><unk><0x41>",
        "\xe2\x96\x81 the mark \xe2\x96\x81\xe2\x96\x81",
        "\xe2\x96\x85",                                    // the trainer's own mark
        "\xef\xac\x81 \xe2\x84\xa2 \xc2\xa0 e\xcc\x81 A",  // what NFKC would change
        "\xef\xbb\xbf\xef\xbf\xbd\xef\xbf\xbf",
        "\xff\xfe broken \xc3",
        "\xe2\x96",
        "\xed\xa0\x80\xf4\x90\x80\x80\xc0\xaf",
        generated_text(30, 2),
        std::string(10'000, ' '),
        std::string(9'001, 'x') + "\xf0\x9f\x98\x80",
    };
    for (const std::string& text : hard) expect_lossless(tokenizer, text);

    std::string bytes;  // every byte, then random ones
    for (int b = 0; b < 256; ++b) bytes += char(b);
    expect_lossless(tokenizer, bytes);
    std::mt19937 random(3);
    for (int round = 0; round < 200; ++round) {
        bytes.resize(random() % 37);
        for (char& c : bytes) c = char(random() % 4 ? 0x80 + random() % 0x80 : random() % 0x80);
        expect_lossless(tokenizer, bytes);
    }
    // Every character there is, a hundred at a time.
    std::string characters;
    for (uint32_t c = 0; c < 0x110000; ++c) {
        if (c >= 0xd800 && c < 0xe000) continue;
        if (c >= 0x3000 && c % 37) continue;  // a sample of the larger planes
        characters += utf8(c);
        if (c % 100 == 0) {
            expect_lossless(tokenizer, characters);
            characters.clear();
        }
    }
}

TEST(Tokenizer, Bytes) {
    const auto tokenizer = make_tokenizer("bytes");
    EXPECT_EQ(tokenizer->name(), "bytes");
    EXPECT_EQ(tokenizer->vocab_size(), 257);
    EXPECT_EQ(tokenizer->boundary(), 256);
    EXPECT_EQ(tokenizer->encode("a\xff"), (std::vector<int32_t>{97, 255}));
    EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{256, 97, 256, 255}), "a\xff");
    EXPECT_EQ(tokenizer->save("/nowhere"), "bytes");
    expect_lossless_on_everything(*tokenizer);
    for (const int32_t id : {-1, 257})
        EXPECT_TRUE(throws(ErrorKind::usage, {"outside the bytes vocabulary of 257"},
                           [&] { tokenizer->piece(id); }));
}

TEST(Tokenizer, SentencePieceTrainsAndLosesNothing) {
    const auto tokenizer = trained(401);
    EXPECT_EQ(tokenizer->name(), "sentencepiece");
    EXPECT_EQ(tokenizer->vocab_size(), 401);
    EXPECT_EQ(tokenizer->piece(tokenizer->boundary()), "");
    const std::string text = generated_text(50, 4);  // not what it was trained on
    EXPECT_LT(tokenizer->encode(text).size() * 2, text.size());
    expect_lossless_on_everything(*tokenizer);
    // The mark for spaces, as text, costs its three bytes and nothing around it.
    EXPECT_EQ(tokenizer->encode("the \xe2\x96\x81 the").size(),
              tokenizer->encode("the ").size() + 3 + tokenizer->encode(" the").size());
    // No space is added in front: the first token of a text is that of its first word.
    EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{tokenizer->encode("the").at(0)})[0], 't');
}

TEST(Tokenizer, EncodingLineByLineIsEncodingTheWhole) {
    const auto tokenizer = trained(401);
    const std::string lines[] = {generated_text(3, 5) + "\n", "- next \xc3\xa9\n\n\n",
                                 "\xff last\n", "- end"};
    std::string whole;
    std::vector<int32_t> ids;
    for (const std::string& line : lines) {
        whole += line;
        const auto more = tokenizer->encode(line);
        ids.insert(ids.end(), more.begin(), more.end());
    }
    EXPECT_EQ(tokenizer->encode(whole), ids);
}

TEST(Tokenizer, SavedModelIsTheSameModel) {
    const TemporaryFolder folder;
    const auto first = trained(333);
    const std::string spec = first->save(folder.path());
    EXPECT_EQ(spec, "tokenizer.model");
    const auto again = make_tokenizer(spec, folder.path());
    const auto direct = make_tokenizer(folder / spec);
    const std::string text = generated_text(20, 6);
    EXPECT_EQ(again->encode(text), first->encode(text));
    EXPECT_EQ(direct->encode(text), first->encode(text));
    EXPECT_EQ(again->boundary(), first->boundary());
    // Training is reproducible, byte for byte.
    const std::string bytes = get(folder / spec);
    trained(333)->save(folder.path());
    EXPECT_EQ(get(folder / spec), bytes);
}

// A model that was trained to normalise, to add a space in front and to drop others.
TEST(Tokenizer, ForeignModelsLoseNothingEither) {
    const TemporaryFolder folder;
    put(folder / "text", generated_text(400, 1));
    for (const char* type : {"unigram", "bpe"}) {
        ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train({{"input", folder / "text"},
                                                                {"model_prefix", folder / type},
                                                                {"model_type", type},
                                                                {"vocab_size", "350"},
                                                                {"byte_fallback", "true"},
                                                                {"minloglevel", "2"}})
                        .ok());
        expect_lossless_on_everything(*make_tokenizer(folder / type + ".model"));
    }
    ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train({{"input", folder / "text"},
                                                            {"model_prefix", folder / "none"},
                                                            {"vocab_size", "60"},
                                                            {"minloglevel", "2"}})
                    .ok());
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"none.model", "byte_fallback"},
                       [&] { make_tokenizer(folder / "none.model"); }));
}

// Our models mean the same to every other program that uses the library.
TEST(Tokenizer, SentencePieceItselfGivesTheSameTokens) {
    const TemporaryFolder folder;
    const auto tokenizer = trained(401);
    tokenizer->save(folder.path());
    sentencepiece::SentencePieceProcessor processor;
    ASSERT_TRUE(processor.Load(folder / "tokenizer.model").ok());
    for (const std::string text : {"the  mustel\n", " kori", "b\xc3\xa9"}) {
        const auto ids = processor.EncodeAsIds(text);
        EXPECT_EQ(tokenizer->encode(text), ids);
        EXPECT_EQ(processor.DecodeIds(ids), text);
    }
}

TEST(Tokenizer, BadSpecsAndModels) {
    const TemporaryFolder folder;
    EXPECT_TRUE(
        throws(ErrorKind::usage, {"\"words\"", "expected bytes"}, [] { make_tokenizer("words"); }));
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"none.model", "No such file"},
                       [&] { make_tokenizer("none.model", folder.path()); }));
    put(folder / "bad.model", "this is no model");
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"bad.model", "not a SentencePiece model"},
                       [&] { make_tokenizer("bad.model", folder.path()); }));
    put(folder / "bad.model", "");
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"bad.model"},
                       [&] { make_tokenizer("bad.model", folder.path()); }));
    trained(333)->save(folder.path());
    const std::string whole = get(folder / "tokenizer.model");
    for (size_t n = 0; n < whole.size(); n += 1 + n / 16) {  // a cut model is refused, no crash
        put(folder / "cut.model", whole.substr(0, n));
        EXPECT_TRUE(throws(ErrorKind::bad_file, {"cut.model"},
                           [&] { make_tokenizer("cut.model", folder.path()); }))
            << n << " of " << whole.size();
    }
}

TEST(Tokenizer, TrainingSizesThatCannotBe) {
    for (const int size : {0, -5, 258, 100'000})
        EXPECT_TRUE(throws(ErrorKind::usage, {"SentencePiece model of"}, [&] { trained(size); }));
    EXPECT_TRUE(throws(ErrorKind::usage, {"no text"},
                       [] { train_sentencepiece([](const TextSink&) {}, 400); }));
}

TEST(Utf8Stream, CharactersCutAnywhereComeWhole) {
    const std::string text = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z";
    for (size_t cut = 0; cut <= text.size(); ++cut) {
        Utf8Stream stream;
        std::string out = stream.push(text.substr(0, cut));
        out += stream.push(text.substr(cut));
        EXPECT_EQ(out, text) << cut;
        EXPECT_EQ(stream.finish(), "");
    }
    Utf8Stream stream;
    std::string out;
    for (const char c : text) out += stream.push(std::string(1, c));
    EXPECT_EQ(out, text);
}

TEST(Utf8Stream, InvalidBytesBecomeReplacements) {
    const std::string r = "\xef\xbf\xbd";
    const struct {
        std::string bytes, want;
    } cases[] = {
        {"\xff", r},
        {"\x80y", r + "y"},
        {"\xc0\xaf", r + r},                  // overlong
        {"\xe0\x80\xaf", r + r + r},          // overlong
        {"\xed\xa0\x80", r + r + r},          // a surrogate
        {"\xf4\x90\x80\x80", r + r + r + r},  // beyond U+10FFFF
        {"\xe2\x82z", r + "z"},               // a maximal part, then a character
        {"\xf0\x9f\x98\xf0\x9f\x98\x80", r + "\xf0\x9f\x98\x80"},
        {"\xc3", r},  // held back until the end
        {"\xf0\x9f\x98", r},
    };
    for (const auto& c : cases) {
        Utf8Stream whole, bytewise;
        std::string out = whole.push(c.bytes);
        out += whole.finish();
        EXPECT_EQ(out, c.want) << tensor::in_quotes(c.bytes);
        out.clear();
        for (const char b : c.bytes) out += bytewise.push(std::string(1, b));
        out += bytewise.finish();
        EXPECT_EQ(out, c.want) << tensor::in_quotes(c.bytes);
    }
}

}  // namespace
}  // namespace fbt::tests
