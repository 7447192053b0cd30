#include "model/data/shards.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include "tensor/error.h"

namespace fbt::model::data {

static_assert(std::endian::native == std::endian::little, "shards are little-endian");

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using tensor::Error;
using tensor::ErrorKind;
using tensor::in_quotes;

constexpr size_t kHeaderInts = 256;
constexpr int32_t kMagic16 = 20240520, kVersion16 = 1;  // uint16 tokens
constexpr int32_t kMagic32 = 20240801, kVersion32 = 7;  // uint32 tokens
constexpr int kMaxVocab16 = 65536;
constexpr const char* kMetaFile = "meta.json";
constexpr size_t kChunkBytes = 4 << 20;  // of text, encoded at a time

[[noreturn]] void bad_file(const std::string& what) { throw Error(ErrorKind::bad_file, what); }

// Writes tokens token_at(0) .. token_at(count-1) as one shard.
template <class TokenAt>
void write_shard_of(const std::string& path, int64_t count, int vocab_size, TokenAt token_at) {
    if (count > std::numeric_limits<int32_t>::max())
        throw Error(ErrorKind::usage, path + " would hold " + std::to_string(count) +
                                          " tokens; a shard's header counts to 2^31 - 1, use more "
                                          "shards");
    const bool narrow = vocab_size <= kMaxVocab16;
    int32_t header[kHeaderInts] = {narrow ? kMagic16 : kMagic32, narrow ? kVersion16 : kVersion32,
                                   int32_t(count)};
    tensor::OutputFile file(path);
    file.write(std::as_bytes(std::span(header)));
    for (int64_t i = 0; i < count; ++i) {
        const int32_t token = token_at(i);
        if (token < 0 || token >= vocab_size)
            throw Error(ErrorKind::internal, path + ": token " + std::to_string(token) +
                                                 " at position " + std::to_string(i) +
                                                 " is outside the vocabulary of " +
                                                 std::to_string(vocab_size));
        const auto wide_token = uint32_t(token);
        const auto narrow_token = uint16_t(token);
        file.write(narrow ? std::as_bytes(std::span(&narrow_token, 1))
                          : std::as_bytes(std::span(&wide_token, 1)));
    }
    file.finish();
}

std::string shard_name(const std::string& split, int64_t number) {
    char digits[24];
    std::snprintf(digits, sizeof digits, "%06lld", static_cast<long long>(number));
    return split + "_" + digits + ".bin";
}

Meta read_meta(const std::string& folder) {
    const std::string path = (fs::path(folder) / kMetaFile).string();
    std::error_code ignored;
    if (!fs::exists(path, ignored))
        bad_file(folder + " has no meta.json; expected a data folder as `fbt data` writes it");
    const json file = json::parse(tensor::read_file(path), nullptr, false);
    if (!file.is_object()) bad_file(path + " is not a JSON object; make the data folder again");
    const auto value = [&](const char* key) -> const json& {
        const auto found = file.find(key);
        if (found == file.end())
            bad_file(path + " has no \"" + key + "\"; make the data folder again");
        return *found;
    };
    const auto integer = [&](const char* key, int64_t low, int64_t high) {
        const json& v = value(key);
        if (!v.is_number_integer() || (v.is_number_unsigned() && v.get<uint64_t>() > INT64_MAX) ||
            v.get<int64_t>() < low || v.get<int64_t>() > high)
            bad_file(path + " has \"" + key + "\": " + in_quotes(v.dump(-1, ' ', true)) +
                     ", expected an integer from " + std::to_string(low) + " to " +
                     std::to_string(high));
        return v.get<int64_t>();
    };
    Meta meta;
    if (!value("tokenizer").is_string())
        bad_file(path + " has a \"tokenizer\" that is not a string; make the data folder again");
    meta.tokenizer = value("tokenizer").get<std::string>();
    meta.vocab_size = int(integer("vocab_size", 1, std::numeric_limits<int32_t>::max()));
    meta.boundary = int32_t(integer("boundary", 0, meta.vocab_size - 1));
    for (const auto& [key, out] :
         {std::pair("documents", &meta.documents), std::pair("train_tokens", &meta.train_tokens),
          std::pair("val_tokens", &meta.val_tokens),
          std::pair("train_text_bytes", &meta.train_text_bytes),
          std::pair("val_text_bytes", &meta.val_text_bytes)})
        *out = integer(key, 0, std::numeric_limits<int64_t>::max());
    return meta;
}

// The tokenizer that meta.json names; a wrong name there is a wrong file.
std::unique_ptr<Tokenizer> tokenizer_of(const Meta& meta, const std::string& folder) {
    const std::string path = (fs::path(folder) / kMetaFile).string();
    std::unique_ptr<Tokenizer> tokenizer;
    try {
        tokenizer = make_tokenizer(meta.tokenizer, folder);
    } catch (const Error& e) {
        if (e.kind() != ErrorKind::usage) throw;
        bad_file(path + ": " + e.what());
    }
    if (tokenizer->vocab_size() != meta.vocab_size || tokenizer->boundary() != meta.boundary)
        bad_file(path + " says vocabulary " + std::to_string(meta.vocab_size) + " and boundary " +
                 std::to_string(meta.boundary) + ", but its tokenizer has " +
                 std::to_string(tokenizer->vocab_size()) + " and " +
                 std::to_string(tokenizer->boundary()) + "; make the data folder again");
    return tokenizer;
}

// Calls sink(chunk, begins) for every non-empty document's text, in chunks that `begins` says to be
// the document's first.
using ChunkSink = std::function<void(std::string_view, bool)>;

// Chunks end where lines end, so that encoding them gives the tokens of the whole text. (A line
// that is longer than a chunk is cut between characters instead, which may change a token there.)
void each_chunk_of_text(std::string_view text, const ChunkSink& sink) {
    for (size_t at = 0; at < text.size();) {
        size_t end = std::min(text.size(), at + kChunkBytes);
        if (end < text.size()) {
            const auto is_line_start = [&](size_t i) {
                return text[i - 1] == '\n' && text[i] != '\n';
            };
            const auto is_character_start = [&](size_t i) {
                return (static_cast<unsigned char>(text[i]) & 0xc0) != 0x80;
            };
            size_t line = end, character = end;
            while (line > at + 1 && !is_line_start(line)) --line;
            while (character > end - 3 && !is_character_start(character)) --character;
            end = is_line_start(line) && line > at ? line : character;
        }
        sink(text.substr(at, end - at), at == 0);
        at = end;
    }
}

void each_line_of_jsonl(std::string_view text, const std::string& path, const ChunkSink& sink) {
    int64_t number = 0;
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find('\n', at), text.size());
        const std::string_view line = text.substr(at, end - at);
        at = end + 1;
        ++number;
        if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
        const json value = json::parse(line.begin(), line.end(), nullptr, false);
        const auto found = value.is_object() ? value.find("text") : value.end();
        if (!value.is_object() || found == value.end() || !found->is_string())
            bad_file(path + " line " + std::to_string(number) +
                     " is not a JSON object with a \"text\" string: " + in_quotes(line));
        each_chunk_of_text(found->get_ref<const std::string&>(), sink);
    }
}

void each_chunk(const std::vector<std::string>& inputs, const ChunkSink& sink) {
    for (const std::string& path : inputs) {
        const tensor::MappedFile file(path);
        const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                                    file.bytes().size());
        if (path.ends_with(".jsonl"))
            each_line_of_jsonl(text, path, sink);
        else
            each_chunk_of_text(text, sink);
    }
}

std::unique_ptr<Tokenizer> tokenizer_for(const BuildOptions& options) {
    constexpr std::string_view kTrain = "sentencepiece:";
    if (!options.tokenizer.starts_with(kTrain)) return make_tokenizer(options.tokenizer);
    const std::string digits = options.tokenizer.substr(kTrain.size());
    if (digits.empty() || digits.size() > 7 ||
        digits.find_first_not_of("0123456789") != std::string::npos)
        throw Error(ErrorKind::usage, "tokenizer " + in_quotes(options.tokenizer) +
                                          " has no vocabulary size; expected sentencepiece:N, such "
                                          "as sentencepiece:8000");
    return train_sentencepiece(
        [&](const TextSink& sink) {
            each_chunk(options.inputs, [&](std::string_view chunk, bool) { sink(chunk); });
        },
        std::stoi(digits));
}

// A folder that is made now and gone at the end, unless it was renamed.
class TemporaryFolder {
  public:
    explicit TemporaryFolder(const fs::path& path) : path_(path) {
        std::error_code error;
        fs::remove_all(path_, error);  // what a killed run may have left
        if (!error) fs::create_directories(path_, error);
        if (error)
            throw Error(ErrorKind::environment,
                        "cannot make the folder " + path_.string() + ": " + error.message());
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    ~TemporaryFolder() {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
    std::string file(const std::string& name) const { return (path_ / name).string(); }
    std::string path() const { return path_.string(); }

  private:
    fs::path path_;
};

// `out` without a trailing slash. It must be free.
fs::path free_folder(const std::string& out) {
    fs::path path = fs::path(out).lexically_normal();
    if (!path.has_filename()) path = path.parent_path();
    const std::string name = path.filename().string();
    if (name.empty() || name == "." || name == "..")
        throw Error(ErrorKind::usage,
                    "the data folder " + in_quotes(out) + " has no name; expected a new folder");
    std::error_code ignored;
    if (fs::exists(path, ignored) &&
        !(fs::is_directory(path, ignored) && fs::is_empty(path, ignored)))
        throw Error(ErrorKind::usage, "the data folder " + path.string() +
                                          " exists already; remove it or name another");
    return path;
}

}  // namespace

json to_json(const Meta& meta) {
    return {{"tokenizer", meta.tokenizer},
            {"vocab_size", meta.vocab_size},
            {"boundary", meta.boundary},
            {"documents", meta.documents},
            {"train_tokens", meta.train_tokens},
            {"val_tokens", meta.val_tokens},
            {"train_text_bytes", meta.train_text_bytes},
            {"val_text_bytes", meta.val_text_bytes}};
}

Shard Shard::open(const std::string& path) {
    Shard shard;
    shard.file_ = tensor::MappedFile(path);
    const auto bytes = shard.file_.bytes();
    if (int64_t(bytes.size()) < kHeaderBytes)
        bad_file(path + " has " + std::to_string(bytes.size()) +
                 " bytes, expected a token shard with a header of 1024");
    int32_t header[3];
    std::memcpy(header, bytes.data(), sizeof header);
    const bool narrow = header[0] == kMagic16;
    if (!narrow && header[0] != kMagic32)
        bad_file(path + " begins with magic " + std::to_string(header[0]) + ", expected " +
                 std::to_string(kMagic16) + " (uint16 tokens) or " + std::to_string(kMagic32) +
                 " (uint32 tokens); is it a token shard?");
    if (header[1] != (narrow ? kVersion16 : kVersion32))
        bad_file(path + " has version " + std::to_string(header[1]) + ", expected " +
                 std::to_string(narrow ? kVersion16 : kVersion32) + " with magic " +
                 std::to_string(header[0]));
    shard.width_ = narrow ? 2 : 4;
    shard.count_ = header[2];
    // A negative count asks for less than the header, which is there.
    if (int64_t(bytes.size()) != kHeaderBytes + shard.count_ * shard.width_)
        bad_file(path + " has " + std::to_string(bytes.size()) + " bytes, but its header counts " +
                 std::to_string(shard.count_) + " tokens of " + std::to_string(shard.width_) +
                 " bytes, " + std::to_string(kHeaderBytes + shard.count_ * shard.width_) +
                 " in all; copy or make it again");
    return shard;
}

void write_shard(const std::string& path, std::span<const int32_t> tokens, int vocab_size) {
    write_shard_of(path, int64_t(tokens.size()), vocab_size,
                   [&](int64_t i) { return tokens[size_t(i)]; });
}

Split Split::open(const std::string& folder, const std::string& name, const Meta& meta,
                  int64_t expected) {
    std::vector<std::string> paths;
    std::error_code error;
    for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
        const std::string file = it->path().filename().string();
        if (file.starts_with(name + "_") && file.ends_with(".bin"))
            paths.push_back(it->path().string());
    }
    if (error) bad_file("cannot list " + folder + ": " + error.message());
    std::sort(paths.begin(), paths.end());

    Split split;
    for (const std::string& path : paths) {
        Shard shard = Shard::open(path);
        for (int64_t i = 0; i < shard.size(); ++i) {
            const int32_t token = shard[i];
            if (uint32_t(token) >= uint32_t(meta.vocab_size))
                bad_file(path + " has token " + std::to_string(uint32_t(token)) + " at position " +
                         std::to_string(i) + ", expected ids below " +
                         std::to_string(meta.vocab_size) + ", the vocabulary of meta.json");
            if (token == meta.boundary || split.size_ + i == 0)
                split.documents_.push_back(split.size_ + i);
        }
        split.begins_.push_back(split.size_);
        split.size_ += shard.size();
        split.shards_.push_back(std::move(shard));
    }
    if (split.size_ != expected)
        bad_file(folder + " holds " + std::to_string(split.size_) + " " + name + " tokens in " +
                 std::to_string(paths.size()) + " files " + name + "_*.bin, but meta.json says " +
                 std::to_string(expected) + "; copy or make the data folder again");
    return split;
}

void Split::copy(int64_t begin, int64_t count, int32_t* out) const {
    if (begin < 0 || count < 0 || begin > size_ - count)
        throw Error(ErrorKind::internal, "tokens " + std::to_string(begin) + " to " +
                                             std::to_string(begin + count) + " of a split of " +
                                             std::to_string(size_));
    // The last shard that begins at or before `begin`; empty shards share their successor's begin.
    size_t s = size_t(std::upper_bound(begins_.begin(), begins_.end(), begin) - begins_.begin());
    for (s = s > 0 ? s - 1 : 0; count > 0; ++s) {
        const int64_t first = begin - begins_[s];
        const int64_t here = std::min(count, shards_[s].size() - first);
        for (int64_t i = 0; i < here; ++i) *out++ = shards_[s][first + i];
        begin += here;
        count -= here;
    }
}

Dataset Dataset::open(const std::string& folder) {
    Dataset out;
    out.meta_ = read_meta(folder);
    out.tokenizer_ = tokenizer_of(out.meta_, folder);
    out.train_ = Split::open(folder, "train", out.meta_, out.meta_.train_tokens);
    if (out.train_.size() == 0)
        bad_file(folder + " has no training tokens; expected files train_*.bin");
    out.val_ = Split::open(folder, "val", out.meta_, out.meta_.val_tokens);
    return out;
}

Meta build_dataset(const BuildOptions& options) {
    if (options.inputs.empty())
        throw Error(ErrorKind::usage, "no input file was named; expected text or .jsonl files");
    if (options.shard_tokens < 1)
        throw Error(ErrorKind::usage, "shards of " + std::to_string(options.shard_tokens) +
                                          " tokens cannot be; expected at least 1");
    const fs::path out = free_folder(options.out);
    const auto tokenizer = tokenizer_for(options);
    const TemporaryFolder folder(out.parent_path() /
                                 std::string(".").append(out.filename()).append(".partial"));

    Meta meta;
    meta.vocab_size = tokenizer->vocab_size();
    meta.boundary = tokenizer->boundary();
    meta.tokenizer = tokenizer->save(folder.path());

    // How many tokens are validation is known only once all are counted, so they are kept in one
    // file first.
    const std::string all_path = folder.file("all_tokens");
    int64_t text_bytes = 0;
    {
        tensor::OutputFile all(all_path);
        each_chunk(options.inputs, [&](std::string_view chunk, bool begins) {
            if (begins) {
                all.write(std::as_bytes(std::span(&meta.boundary, 1)));
                ++meta.documents;
            }
            text_bytes += int64_t(chunk.size());
            const std::vector<int32_t> tokens = tokenizer->encode(chunk);
            all.write(std::as_bytes(std::span(tokens)));
        });
        all.finish();
    }
    if (meta.documents == 0)
        bad_file("the input has no text, the first file being " + options.inputs[0] +
                 "; expected documents that are not empty");
    {
        const tensor::MappedFile all(all_path);
        const auto* tokens = reinterpret_cast<const int32_t*>(all.bytes().data());
        const int64_t total = int64_t(all.bytes().size() / sizeof(int32_t));
        const int64_t cut = total - (total + 19) / 20;  // 5 %, rounded up
        const bool cuts_document = tokens[cut] != meta.boundary;
        meta.train_tokens = cut;
        meta.val_tokens = total - cut + cuts_document;

        const auto write_split = [&](const std::string& name, int64_t count, auto token_at) {
            int64_t bytes = 0;
            for (int64_t at = 0, shard = 0; at < count; at += options.shard_tokens, ++shard)
                write_shard_of(folder.file(shard_name(name, shard)),
                               std::min(options.shard_tokens, count - at), meta.vocab_size,
                               [&](int64_t i) {
                                   const int32_t token = token_at(at + i);
                                   bytes += int64_t(tokenizer->piece(token).size());
                                   return token;
                               });
            return bytes;
        };
        meta.train_text_bytes =
            write_split("train", meta.train_tokens, [&](int64_t i) { return tokens[i]; });
        meta.val_text_bytes = write_split("val", meta.val_tokens, [&](int64_t i) {
            if (!cuts_document) return tokens[cut + i];
            return i == 0 ? meta.boundary : tokens[cut + i - 1];
        });
    }
    if (meta.train_text_bytes + meta.val_text_bytes != text_bytes)
        throw Error(ErrorKind::internal,
                    "the tokens stand for " +
                        std::to_string(meta.train_text_bytes + meta.val_text_bytes) +
                        " bytes, but the text had " + std::to_string(text_bytes));
    std::error_code ignored;
    fs::remove(all_path, ignored);
    tensor::write_file_durably(folder.file(kMetaFile), to_json(meta).dump(2) + "\n");
    tensor::rename_durably(folder.path(), out.string());
    return meta;
}

}  // namespace fbt::model::data
