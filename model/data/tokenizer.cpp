#include "model/data/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "tensor/error.h"
#include "tensor/file.h"

namespace fbt::model::data {
namespace {

using tensor::Error;
using tensor::ErrorKind;
namespace sp = sentencepiece;

constexpr const char* kModelFile = "tokenizer.model";
constexpr std::string_view kSpaceMark = "\xe2\x96\x81";    // U+2581, SentencePiece's space
constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD
constexpr size_t kLongestRun = 4096;         // bytes; bounds SentencePiece's time and memory
constexpr size_t kTrainingBytes = 64 << 20;  // of text, from the front; the trainer holds it all

// What stands at the front of non-empty `text` (Unicode 15, table 3-7, well-formed sequences):
// n > 0, a character of n bytes; 0, the beginning of one that is cut off; -n, n bytes that are
// none.
int front_of_utf8(std::string_view text) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned lead = byte(0);
    if (lead < 0x80) return 1;
    if (lead < 0xc2 || lead > 0xf4) return -1;
    const size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    // The second byte's range excludes overlong forms, surrogates and what exceeds U+10FFFF.
    unsigned low = 0x80, high = 0xbf;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
    for (size_t i = 1; i < length; ++i) {
        if (i == text.size()) return 0;
        if (byte(i) < low || byte(i) > high) return -int(i);
        low = 0x80, high = 0xbf;
    }
    return int(length);
}

// Cuts a text into runs of whole characters, each at most one line with the newlines after it, and
// runs of bytes that a SentencePiece model cannot take: invalid UTF-8, and the mark that it uses
// for spaces.
void each_run(std::string_view text, const std::function<void(std::string_view)>& characters,
              const std::function<void(std::string_view)>& bytes) {
    size_t begin = 0, i = 0;
    const auto flush = [&] {
        if (i > begin) characters(text.substr(begin, i - begin));
        begin = i;
    };
    while (i < text.size()) {
        const int n = front_of_utf8(text.substr(i));
        if (n <= 0 || text.substr(i, 3) == kSpaceMark) {
            const size_t length = n == 0 ? text.size() - i : size_t(n < 0 ? -n : n);
            flush();
            bytes(text.substr(i, length));
            i = begin = i + length;
            continue;
        }
        const bool line_ends = i > begin && text[i - 1] == '\n' && text[i] != '\n';
        if (line_ends || i + size_t(n) - begin > kLongestRun) flush();
        i += size_t(n);
    }
    flush();
}

class BytesTokenizer : public Tokenizer {
  public:
    BytesTokenizer() {
        for (int b = 0; b < 256; ++b) pieces_.push_back(std::string(1, char(b)));
        pieces_.emplace_back();
        boundary_ = 256;
    }
    std::string name() const override { return "bytes"; }
    std::vector<int32_t> encode(std::string_view text) const override {
        std::vector<int32_t> ids(text.size());
        std::transform(text.begin(), text.end(), ids.begin(),
                       [](char c) { return int32_t(static_cast<unsigned char>(c)); });
        return ids;
    }
    std::string save(const std::string&) const override { return "bytes"; }
};

class SentencePieceTokenizer : public Tokenizer {
  public:
    // `origin` names the model in errors.
    SentencePieceTokenizer(std::string model, const std::string& origin)
        : model_(std::move(model)) {
        // A protobuf reader merges repeated messages, so these bytes at the end replace settings of
        // the model's normalizer_spec (field 3): precompiled_charsmap (2) = "", add_dummy_prefix
        // (3) = remove_extra_whitespaces (4) = false, escape_whitespaces (5) = true.
        static constexpr char kLossless[] = {0x1a, 8, 0x12, 0, 0x18, 0, 0x20, 0, 0x28, 1};
        if (!processor_.LoadFromSerializedProto(model_ + std::string(kLossless, sizeof kLossless))
                 .ok())
            throw Error(ErrorKind::bad_file,
                        origin +
                            " is not a SentencePiece model; expected a .model file as "
                            "spm_train writes it");
        bytes_.fill(-1);
        for (int id = 0; id < processor_.GetPieceSize(); ++id) {
            std::string piece;
            if (processor_.IsByte(id)) {
                unsigned byte = 256;
                if (std::sscanf(processor_.IdToPiece(id).c_str(), "<0x%2X>", &byte) == 1) {
                    piece.assign(1, char(byte));
                    bytes_[byte] = id;
                }
            } else if (!processor_.IsControl(id) && !processor_.IsUnknown(id)) {
                piece = processor_.IdToPiece(id);
                for (size_t at; (at = piece.find(kSpaceMark)) != std::string::npos;)
                    piece.replace(at, kSpaceMark.size(), 1, ' ');
            }
            pieces_.push_back(piece);
        }
        if (std::count(bytes_.begin(), bytes_.end(), -1) > 0)
            throw Error(ErrorKind::bad_file,
                        origin +
                            " lacks pieces for single bytes (<0x00> to <0xFF>) and would lose "
                            "text; train it with --byte_fallback");
        boundary_ = processor_.bos_id() >= 0 ? processor_.bos_id() : processor_.eos_id();
        if (boundary_ < 0)
            throw Error(
                ErrorKind::bad_file,
                origin + " has neither <s> nor </s>; one is needed to begin documents with");
    }

    std::string name() const override { return "sentencepiece"; }

    std::vector<int32_t> encode(std::string_view text) const override {
        std::vector<int32_t> ids;
        const auto add_bytes = [&](std::string_view run) {
            for (const char c : run) ids.push_back(bytes_[static_cast<unsigned char>(c)]);
        };
        const auto add_characters = [&](std::string_view run) {
            std::vector<int> found;
            const auto status = processor_.Encode({run.data(), run.size()}, &found);
            if (!status.ok())
                throw Error(ErrorKind::internal, "SentencePiece refuses " + tensor::in_quotes(run));
            ids.insert(ids.end(), found.begin(), found.end());
        };
        each_run(text, add_characters, add_bytes);
        return ids;
    }

    std::string save(const std::string& folder) const override {
        tensor::write_file_durably((std::filesystem::path(folder) / kModelFile).string(), model_);
        return kModelFile;
    }

  private:
    std::string model_;  // as it was read
    sp::SentencePieceProcessor processor_;
    std::array<int32_t, 256> bytes_;  // the pieces of single bytes
};

// Texts in memory, as SentencePiece's trainer reads them.
class Lines : public sp::SentenceIterator {
  public:
    explicit Lines(std::vector<std::string> lines) : lines_(std::move(lines)) {}
    bool done() const override { return next_ == lines_.size(); }
    void Next() override { ++next_; }
    const std::string& value() const override { return lines_[next_]; }
    sp::util::Status status() const override { return {}; }

  private:
    std::vector<std::string> lines_;
    size_t next_ = 0;
};

}  // namespace

const std::string& Tokenizer::piece(int32_t id) const {
    if (id < 0 || id >= vocab_size())
        throw Error(ErrorKind::usage, "token " + std::to_string(id) + " is outside the " + name() +
                                          " vocabulary of " + std::to_string(vocab_size()) +
                                          "; use the tokenizer that the tokens were made with");
    return pieces_[size_t(id)];
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
    std::string out;
    for (const int32_t id : ids) out += piece(id);
    return out;
}

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec, const std::string& folder) {
    if (spec == "bytes") return std::make_unique<BytesTokenizer>();
    if (!spec.ends_with(".model"))
        throw Error(ErrorKind::usage, "tokenizer " + tensor::in_quotes(spec) +
                                          " is unknown; expected bytes, the path of a "
                                          "SentencePiece .model, or sentencepiece:N to train one");
    const std::string path = (std::filesystem::path(folder) / spec).string();
    return std::make_unique<SentencePieceTokenizer>(tensor::read_file(path), path);
}

std::unique_ptr<Tokenizer> train_sentencepiece(
    const std::function<void(const TextSink&)>& each_text, int vocab_size) {
    const auto refuse = [&](const std::string& why) {
        throw Error(ErrorKind::usage, "cannot train a SentencePiece model of " +
                                          std::to_string(vocab_size) + " pieces: " + why);
    };
    constexpr int kFixed = 256 + 2;  // byte pieces, <unk>, <s>
    if (vocab_size <= kFixed) refuse("expected more than " + std::to_string(kFixed));

    std::vector<std::string> lines;
    size_t bytes = 0;
    each_text([&](std::string_view text) {
        text = text.substr(0, kTrainingBytes - bytes);
        bytes += text.size();
        each_run(
            text, [&](std::string_view run) { lines.emplace_back(run); }, [](std::string_view) {});
    });
    if (lines.empty()) refuse("the input has no text");

    Lines iterator(std::move(lines));
    std::string model;
    const auto status =
        sp::SentencePieceTrainer::Train({{"model_type", "bpe"},
                                         {"vocab_size", std::to_string(vocab_size)},
                                         {"byte_fallback", "true"},
                                         {"normalization_rule_name", "identity"},
                                         {"add_dummy_prefix", "false"},
                                         {"remove_extra_whitespaces", "false"},
                                         {"allow_whitespace_only_pieces", "true"},
                                         {"max_sentence_length", std::to_string(2 * kLongestRun)},
                                         {"unk_id", "0"},
                                         {"bos_id", "1"},
                                         {"eos_id", "-1"},
                                         {"pad_id", "-1"},
                                         {"minloglevel", "2"}},
                                        &iterator, &model);
    if (!status.ok()) {
        std::string why = status.ToString();
        std::replace(why.begin(), why.end(), '\n', ' ');
        refuse(why);
    }
    return std::make_unique<SentencePieceTokenizer>(std::move(model), "the model just trained");
}

std::string Utf8Stream::push(std::string_view bytes) {
    const std::string text = held_ + std::string(bytes);
    held_.clear();
    std::string out;
    for (size_t i = 0; i < text.size();) {
        const int n = front_of_utf8(std::string_view(text).substr(i));
        if (n == 0) {
            held_ = text.substr(i);
            break;
        }
        if (n > 0)
            out.append(text, i, size_t(n));
        else
            out += kReplacement;
        i += size_t(n > 0 ? n : -n);
    }
    return out;
}

std::string Utf8Stream::finish() {
    const bool cut = !held_.empty();
    held_.clear();
    return cut ? std::string(kReplacement) : std::string();
}

}  // namespace fbt::model::data
