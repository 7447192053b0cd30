#include "tensor/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "tensor/error.h"

namespace fbt::tensor {
namespace {

// Larger than a write call's overhead matters, small against memory.
constexpr size_t kBufferBytes = 1 << 20;

[[noreturn]] void fail(const std::string& doing, const std::string& path, int code) {
    const char* advice = code == ENOSPC || code == EDQUOT ? "; free some space and run again" : "";
    throw Error(ErrorKind::environment,
                "cannot " + doing + " " + path + ": " + std::strerror(code) + advice);
}

std::string folder_of(const std::string& path) {
    const std::string folder = std::filesystem::path(path).parent_path().string();
    return folder.empty() ? "." : folder;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
    // O_NONBLOCK: a FIFO would be waited for before it could be refused.
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        throw Error(ErrorKind::bad_file,
                    "cannot open " + path + ": " + std::strerror(errno) + "; expected a file");
    struct stat info;
    if (::fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) {
        ::close(descriptor);
        throw Error(ErrorKind::bad_file, path + " is not a regular file; expected a file");
    }
    if (info.st_size > 0) {
        void* data = ::mmap(nullptr, size_t(info.st_size), PROT_READ, MAP_PRIVATE, descriptor, 0);
        const int code = errno;
        ::close(descriptor);
        if (data == MAP_FAILED) fail("map", path, code);
        data_ = static_cast<const std::byte*>(data);
        size_ = size_t(info.st_size);
    } else {
        ::close(descriptor);
    }
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

MappedFile::~MappedFile() {
    if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

OutputFile::OutputFile(const std::string& path) : path_(path) {
    descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (descriptor_ < 0) fail("create", path, errno);
}

OutputFile::~OutputFile() {
    if (descriptor_ < 0) return;
    struct stat info;
    const bool regular = ::fstat(descriptor_, &info) == 0 && S_ISREG(info.st_mode);
    ::close(descriptor_);
    if (regular) ::unlink(path_.c_str());  // a device or a pipe is not ours to remove
}

void OutputFile::write_through(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t n = ::write(descriptor_, bytes.data(), bytes.size());
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail("write", path_, errno);
        if (n == 0) fail("write", path_, ENOSPC);
        bytes = bytes.subspan(size_t(n));
    }
}

void OutputFile::write(std::span<const std::byte> bytes) {
    if (descriptor_ < 0)
        throw Error(ErrorKind::internal, "write to " + path_ + " after it was finished");
    if (buffer_.size() + bytes.size() > kBufferBytes) {
        write_through(std::as_bytes(std::span(buffer_)));
        buffer_.clear();
    }
    if (bytes.size() > kBufferBytes)
        write_through(bytes);
    else
        buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

void OutputFile::finish() {
    if (descriptor_ < 0)
        throw Error(ErrorKind::internal, "finish of " + path_ + ", which was finished before");
    write_through(std::as_bytes(std::span(buffer_)));
    if (::fsync(descriptor_) != 0) fail("fsync", path_, errno);
    if (::close(std::exchange(descriptor_, -1)) != 0) {
        const int code = errno;
        std::error_code none;
        if (std::filesystem::is_regular_file(path_, none)) ::unlink(path_.c_str());
        fail("close", path_, code);
    }
}

std::string read_file(const std::string& path) {
    const MappedFile file(path);
    return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

std::string temporary_beside(const std::string& path) {
    const std::filesystem::path whole(path);
    return whole.parent_path() / std::string(".").append(whole.filename()).append(".tmp");
}

void write_file_durably(const std::string& path, std::span<const std::byte> bytes) {
    const std::string temporary = temporary_beside(path);
    OutputFile file(temporary);
    file.write(bytes);
    file.finish();
    rename_durably(temporary, path);
}

void rename_durably(const std::string& from, const std::string& to) {
    if (std::rename(from.c_str(), to.c_str()) != 0) fail("rename " + from + " to", to, errno);
    fsync_folder(folder_of(to));
}

void fsync_folder(const std::string& folder) {
    const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) fail("open folder", folder, errno);
    const int result = ::fsync(descriptor), code = errno;
    ::close(descriptor);
    // Some file systems have no fsync for folders (EINVAL); there is nothing more to ask of them.
    if (result != 0 && code != EINVAL) fail("fsync folder", folder, code);
}

uint64_t hash(std::span<const std::byte> bytes, uint64_t h) {
    for (const std::byte b : bytes) h = (h ^ uint64_t(b)) * 1099511628211u;
    return h;
}

std::string in_quotes(std::string_view text) {
    constexpr size_t kMost = 80;
    std::string out = "\"";
    for (const char c : text.substr(0, kMost)) {
        const auto u = static_cast<unsigned char>(c);
        if (u >= 0x20 && u < 0x7f) {
            out += c;
        } else {
            char hex[8];
            std::snprintf(hex, sizeof hex, "\\x%02x", unsigned(u));
            out += hex;
        }
    }
    return out + (text.size() > kMost ? "...\"" : "\"");
}

}  // namespace fbt::tensor
