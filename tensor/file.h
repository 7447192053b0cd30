// Files that must survive a kill or a full disk, and files read in place.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace fbt::tensor {

// A file's bytes, mapped read-only. Empty files are allowed. The file must not shrink meanwhile:
// fbt replaces files by renaming, which leaves those that are mapped alone.
// Errors  bad_file when it cannot be opened or is not a regular file, environment when not mapped.
class MappedFile {
  public:
    MappedFile() = default;
    explicit MappedFile(const std::string& path);
    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&& other) noexcept;
    ~MappedFile();

    std::span<const std::byte> bytes() const { return {data_, size_}; }
    const std::string& path() const { return path_; }

  private:
    std::string path_;
    const std::byte* data_ = nullptr;
    size_t size_ = 0;
};

// A file written front to back through a buffer. Only finish() makes it count: it flushes, fsyncs
// and closes; a regular file that is dropped before that is removed.
// Errors  environment, with the path and the system's reason (a full disk included).
class OutputFile {
  public:
    explicit OutputFile(const std::string& path);  // creates or truncates
    OutputFile(const OutputFile&) = delete;
    OutputFile& operator=(const OutputFile&) = delete;
    ~OutputFile();

    void write(std::span<const std::byte> bytes);
    void finish();
    const std::string& path() const { return path_; }

  private:
    void write_through(std::span<const std::byte> bytes);

    std::string path_;
    std::string buffer_;
    int descriptor_ = -1;
};

// The bytes of a text, as OutputFile and hash take them.
inline std::span<const std::byte> bytes_of(std::string_view text) {
    return std::as_bytes(std::span(text.data(), text.size()));
}

// The whole file. Errors as MappedFile.
std::string read_file(const std::string& path);

// `.NAME.tmp` in the same folder: what is to become `path` is written there and then renamed, so
// that a file of that name is always whole.
std::string temporary_beside(const std::string& path);

// Replaces `path` by these bytes, entirely or not at all: writes temporary_beside(path), fsyncs,
// renames, fsyncs the folder.
void write_file_durably(const std::string& path, std::span<const std::byte> bytes);
inline void write_file_durably(const std::string& path, std::string_view text) {
    write_file_durably(path, bytes_of(text));
}

// Renames a file or folder and makes the new name durable.
void rename_durably(const std::string& from, const std::string& to);

// Makes the names in a folder durable.
void fsync_folder(const std::string& folder);

// FNV-1a, 64 bits: h = (h ^ byte) * 1099511628211, starting from `h`, so that calls can be chained.
inline constexpr uint64_t kHashStart = 0xcbf29ce484222325u;
uint64_t hash(std::span<const std::byte> bytes, uint64_t h = kHashStart);

// `text` in quotes on one printable line: control bytes and everything outside ASCII as \xNN, cut
// after 80 bytes. For names that come from files and may hold anything.
std::string in_quotes(std::string_view text);

}  // namespace fbt::tensor
