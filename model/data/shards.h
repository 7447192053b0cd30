// Token shards in llm.c's format, and the data folder around them.
//
//   bytes          what (little-endian)
//   0 .. 1024      256 int32: magic, version, count, zeros
//   1024 ..        count tokens: uint16 for magic 20240520 version 1, uint32 for 20240801 version 7
//
// A data folder holds train_000000.bin ..., val_000000.bin ... and meta.json. The shards of a
// split, in order of name, are one stream of documents, each beginning with the boundary token; a
// document may run from one shard into the next.
#pragma once
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "model/data/tokenizer.h"
#include "tensor/file.h"

namespace fbt::model::data {

// One shard, mapped. Errors  bad_file for a wrong magic or version, or a file that is shorter or
// longer than its header says.
class Shard {
  public:
    static Shard open(const std::string& path);

    int64_t size() const { return count_; }
    int32_t operator[](int64_t i) const {
        return width_ == 2 ? int32_t(load<uint16_t>(i)) : int32_t(load<uint32_t>(i));
    }

  private:
    template <class T>
    T load(int64_t i) const {  // the header's 1024 bytes keep the tokens aligned
        return reinterpret_cast<const T*>(file_.bytes().data() + kHeaderBytes)[i];
    }
    static constexpr int64_t kHeaderBytes = 1024;

    tensor::MappedFile file_;
    int64_t count_ = 0;
    int width_ = 2;  // bytes a token
};

// Writes one shard, flushed to the disk: uint16 tokens when vocab_size <= 65536, else uint32.
void write_shard(const std::string& path, std::span<const int32_t> tokens, int vocab_size);

// meta.json
struct Meta {
    std::string tokenizer;  // spec for make_tokenizer(spec, folder)
    int vocab_size = 0;
    int32_t boundary = 0;
    int64_t documents = 0;
    int64_t train_tokens = 0, val_tokens = 0;          // boundary tokens included
    int64_t train_text_bytes = 0, val_text_bytes = 0;  // of the tokens' text: nats a token
                                                       // * tokens / bytes / ln 2 = bits a byte
};

nlohmann::json to_json(const Meta& meta);  // what meta.json holds

// All tokens of one split. Opening it reads every token once to check it and to find documents.
class Split {
  public:
    int64_t size() const { return size_; }
    void copy(int64_t begin, int64_t count, int32_t* out) const;
    // Where documents begin, ascending. A stream that does not begin with the boundary token (the
    // rest of a document whose beginning is elsewhere) counts its first token as a beginning.
    const std::vector<int64_t>& documents() const { return documents_; }

  private:
    friend class Dataset;
    // `expected` tokens in the files NAME_*.bin.
    static Split open(const std::string& folder, const std::string& name, const Meta& meta,
                      int64_t expected);

    std::vector<Shard> shards_;
    std::vector<int64_t> begins_;  // the stream position of each shard's first token
    std::vector<int64_t> documents_;
    int64_t size_ = 0;
};

// Errors  bad_file for a missing or wrong meta.json, no train shards, a shard that is not one, a
//         token outside the vocabulary (with its position), or counts that differ from meta.json.
class Dataset {
  public:
    static Dataset open(const std::string& folder);

    const Meta& meta() const { return meta_; }
    const Tokenizer& tokenizer() const { return *tokenizer_; }
    const Split& train() const { return train_; }
    const Split& val() const { return val_; }

  private:
    Meta meta_;
    std::unique_ptr<Tokenizer> tokenizer_;
    Split train_, val_;
};

// Makes a data folder. Every text file is one document, as is the "text" of every line of a
// `.jsonl` file; empty documents are dropped. The last 5 % of the tokens (rounded up) are
// validation; where that cuts a document, its second part gets a boundary token too.
//   tokenizer  a spec of make_tokenizer, or "sentencepiece:N" to train one of N pieces on the
//              inputs' text
//   out        must not exist, or be an empty folder. It appears complete or not at all.
// Errors  bad_file (input), usage (spec, out), environment (disk).
struct BuildOptions {
    std::vector<std::string> inputs;
    std::string tokenizer = "bytes";
    std::string out;
    int64_t shard_tokens = 100'000'000;  // at most, in one shard
};
Meta build_dataset(const BuildOptions& options);

}  // namespace fbt::model::data
