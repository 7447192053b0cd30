// Text to token ids and back, without loss: decode(encode(text)) == text for any bytes.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fbt::model::data {

class Tokenizer {
  public:
    virtual ~Tokenizer() = default;

    virtual std::string name() const = 0;  // "bytes", "sentencepiece"
    int vocab_size() const { return int(pieces_.size()); }
    int32_t boundary() const { return boundary_; }  // the token that begins every document

    // Token ids of a text, without the boundary. Text is cut after each run of newlines before it
    // is encoded, so encoding line by line gives the same tokens.
    virtual std::vector<int32_t> encode(std::string_view text) const = 0;

    // The bytes that a token stands for; none for the boundary and other control tokens.
    //
    // Errors  usage, when the id is outside the vocabulary.
    const std::string& piece(int32_t id) const;
    // Raw bytes; they need not be valid UTF-8 (see Utf8Stream).
    std::string decode(std::span<const int32_t> ids) const;

    // Puts what is needed to make this tokenizer again into a folder, durably, and returns the spec
    // for make_tokenizer(spec, folder).
    virtual std::string save(const std::string& folder) const = 0;

  protected:
    std::vector<std::string> pieces_;
    int32_t boundary_ = 0;
};

// spec  "bytes" (ids 0..255 are the bytes, 256 the boundary), or the path of a SentencePiece
//       `.model`, relative to `folder` when that is given. Such a model is used with identity
//       normalisation and without a dummy prefix, whatever it was trained with, to lose nothing.
// Errors  usage for an unknown spec; bad_file for a model that cannot be read, has no byte pieces
//         (byte_fallback) or no <s> or </s> to begin documents with.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec, const std::string& folder = "");

// Trains a SentencePiece BPE model of vocab_size pieces (256 byte pieces, <unk> and <s> included)
// with byte fallback and identity normalisation. `each_text` calls its argument for every text.
// The same texts give the same model. Errors  usage when the size does not suit the text.
using TextSink = std::function<void(std::string_view)>;
std::unique_ptr<Tokenizer> train_sentencepiece(
    const std::function<void(const TextSink&)>& each_text, int vocab_size);

// Bytes in, complete UTF-8 out: what a console gets while tokens arrive one by one. Bytes that
// cannot be part of UTF-8 become U+FFFD, one for each maximal part (Unicode 15, section 3.9).
class Utf8Stream {
  public:
    std::string push(std::string_view bytes);
    std::string finish();  // what is still held back, as U+FFFD

  private:
    std::string held_;  // the beginning of a sequence, at most three bytes
};

}  // namespace fbt::model::data
