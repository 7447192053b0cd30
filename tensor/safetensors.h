// Safetensors files (https://github.com/huggingface/safetensors, format section).
//
//   bytes        what
//   0 .. 8       n, the header's length, little-endian u64
//   8 .. 8+n     JSON {"NAME": {"dtype": "F32", "shape": [2,3], "data_offsets": [begin, end]}, ...,
//                "__metadata__": {"KEY": "VALUE", ...}}, padded with spaces
//   8+n ..       the tensors, row-major, little-endian; offsets count from here; they cover
//                the rest of the file without holes or overlaps
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "tensor/dtype.h"
#include "tensor/file.h"
#include "tensor/shape.h"

namespace fbt::tensor {

// A file opened for reading. Everything the header claims is checked when it is opened, so the
// accessors cannot run outside the file.
// Errors  bad_file, one line: what was found, what was expected.
class SafetensorsFile {
  public:
    struct Entry {
        DType dtype;
        Shape shape;           // empty for a scalar
        size_t offset, bytes;  // offset counts from the start of the file
        int64_t count() const { return int64_t(bytes) / size_of(dtype); }
    };

    static SafetensorsFile open(const std::string& path);

    const std::string& path() const { return file_.path(); }
    const std::map<std::string, std::string>& metadata() const { return metadata_; }
    const std::map<std::string, Entry>& entries() const { return entries_; }
    bool contains(const std::string& name) const { return entries_.count(name) != 0; }

    // All three: bad_file when the name is absent.
    const Entry& entry(const std::string& name) const;
    std::span<const std::byte> bytes(const std::string& name) const;  // may be unaligned
    // The values as To = float, double, bf16, int32_t, int64_t or uint8_t, rounded to nearest even.
    // Errors  bad_file when an integer type is asked of floats or cannot hold a value.
    template <class To>
    std::vector<To> read(const std::string& name) const;

  private:
    MappedFile file_;
    std::map<std::string, std::string> metadata_;
    std::map<std::string, Entry> entries_;
};

// Writes one file front to back, so that no copy of all tensors ever exists.
//   SafetensorsWriter writer(path, items, metadata);
//   for (const auto& item : writer.items()) writer.write(item.name, bytes of the tensor);
//   writer.finish();
// A writer that is dropped before finish() removes its file.
// Errors  environment with the path and the system's reason (a full disk included); internal when
//         names repeat or tensors arrive in another order or size than announced.
class SafetensorsWriter {
  public:
    struct Item {
        std::string name;
        DType dtype;
        Shape shape;
    };

    SafetensorsWriter(const std::string& path, std::vector<Item> items,
                      const std::map<std::string, std::string>& metadata = {});

    // In the order in which tensors must be written: sorted by name.
    const std::vector<Item>& items() const { return items_; }
    // A tensor's bytes; large tensors may come in several calls.
    void write(const std::string& name, std::span<const std::byte> bytes);
    template <class T>
    void write(const std::string& name, const std::vector<T>& values) {
        write(name, std::as_bytes(std::span(values)));
    }
    void finish();

  private:
    OutputFile file_;
    std::vector<Item> items_;
    size_t next_ = 0;     // the tensor that is being written
    size_t written_ = 0;  // its bytes so far
};

}  // namespace fbt::tensor
