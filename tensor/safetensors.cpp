#include "tensor/safetensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <type_traits>
#include <utility>

#include "tensor/error.h"

namespace fbt::tensor {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

namespace {

using nlohmann::json;

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr const char* kMetadata = "__metadata__";

constexpr std::pair<const char*, DType> kDTypes[] = {{"F32", DType::f32},   {"F64", DType::f64},
                                                     {"BF16", DType::bf16}, {"I32", DType::i32},
                                                     {"I64", DType::i64},   {"U8", DType::u8}};

std::optional<DType> dtype_named(const std::string& name) {
    for (const auto& [text, dtype] : kDTypes)
        if (name == text) return dtype;
    return {};
}

std::string file_name_of(DType dtype) {
    for (const auto& [text, value] : kDTypes)
        if (value == dtype) return text;
    throw Error(ErrorKind::internal, std::string("safetensors has no dtype ") + name_of(dtype));
}

// The bytes of a tensor; nothing when a size is negative or the product exceeds 63 bits.
std::optional<int64_t> byte_count(DType dtype, const Shape& shape) {
    int64_t n = size_of(dtype);
    for (const int64_t d : shape)
        if (d < 0 || __builtin_mul_overflow(n, d, &n)) return {};
    return n;
}

// Reads and checks one header.
class HeaderReader {
  public:
    explicit HeaderReader(const MappedFile& file) : file_(file) {}

    void read(std::map<std::string, std::string>& metadata,
              std::map<std::string, SafetensorsFile::Entry>& entries) {
        const size_t size = file_.bytes().size();
        if (size < kLengthBytes)
            bad("has " + std::to_string(size) +
                " bytes, expected at least 8 (the header's length)");
        uint64_t length;
        std::memcpy(&length, file_.bytes().data(), kLengthBytes);
        if (length > kMaxHeader)
            bad("claims a header of " + std::to_string(length) + " bytes, expected at most " +
                std::to_string(kMaxHeader));
        if (length > size - kLengthBytes)
            bad("claims a header of " + std::to_string(length) + " bytes, but only " +
                std::to_string(size - kLengthBytes) + " follow: it is cut short or damaged");
        data_ = kLengthBytes + length;
        const json header = parse(length);
        for (const auto& [name, value] : header.items()) {
            if (name == kMetadata)
                read_metadata(value, metadata);
            else
                entries.emplace(name, read_entry(in_quotes(name), value));
        }
        check_tiling(entries);
    }

  private:
    [[noreturn]] void bad(const std::string& what) const {
        throw Error(ErrorKind::bad_file, file_.path() + " " + what +
                                             " (a safetensors file was expected; fetch or write it "
                                             "again)");
    }

    // nlohmann::json keeps the last of repeated keys, so they are looked for while parsing.
    json parse(uint64_t length) const {
        const char* text = reinterpret_cast<const char*>(file_.bytes().data()) + kLengthBytes;
        std::vector<std::set<std::string>> keys;  // of the objects that are open
        const auto watch = [&](int, json::parse_event_t event, json& value) {
            if (event == json::parse_event_t::object_start) keys.emplace_back();
            if (event == json::parse_event_t::object_end) keys.pop_back();
            if (event == json::parse_event_t::key) {
                const std::string key = value.get<std::string>();
                if (!keys.back().insert(key).second)
                    bad("names " + in_quotes(key) + " twice in its header");
            }
            return true;
        };
        json header;
        try {
            header = json::parse(text, text + length, watch);
        } catch (const json::parse_error& e) {
            bad("has a header that is not JSON (at byte " + std::to_string(e.byte) + ")");
        }
        if (!header.is_object()) bad("has a header that is not a JSON object");
        return header;
    }

    void read_metadata(const json& value, std::map<std::string, std::string>& metadata) const {
        if (!value.is_object()) bad("has a __metadata__ that is not an object of strings");
        for (const auto& [key, text] : value.items()) {
            if (!text.is_string())
                bad("has a __metadata__ entry " + in_quotes(key) + " that is not a string");
            metadata[key] = text.get<std::string>();
        }
    }

    SafetensorsFile::Entry read_entry(const std::string& name, const json& value) const {
        if (!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
            !value.contains("shape") || !value.contains("data_offsets"))
            bad("describes tensor " + name + " otherwise than by dtype, shape and data_offsets");
        const json &dtype = value["dtype"], &shape = value["shape"],
                   &offsets = value["data_offsets"];
        if (!dtype.is_string()) bad("gives tensor " + name + " a dtype that is not a string");
        const auto known = dtype_named(dtype.get<std::string>());
        if (!known)
            bad("gives tensor " + name + " the dtype " + in_quotes(dtype.get<std::string>()) +
                ", expected F32, F64, BF16, I32, I64 or U8");
        if (!is_sizes(shape)) bad("gives tensor " + name + " a shape that is not a list of sizes");
        if (!is_sizes(offsets) || offsets.size() != 2)
            bad("gives tensor " + name + " data_offsets that are not [begin, end]");

        if (shape.size() > Shape::kMostDimensions)
            bad("gives tensor " + name + " " + std::to_string(shape.size()) +
                " dimensions, at most " + std::to_string(Shape::kMostDimensions) +
                " are possible here");
        SafetensorsFile::Entry entry{*known, Shape(shape.get<std::vector<int64_t>>()), 0, 0};
        const uint64_t begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
        const uint64_t available = file_.bytes().size() - data_;
        if (begin > end || end > available)
            bad("places tensor " + name + " at bytes " + std::to_string(begin) + " to " +
                std::to_string(end) + " of its data, which has " + std::to_string(available));
        const auto needed = byte_count(entry.dtype, entry.shape);
        if (!needed || uint64_t(*needed) != end - begin)
            bad("gives tensor " + name + " " + std::to_string(end - begin) + " bytes, but " +
                dtype.get<std::string>() + " " + shape.dump() + " needs " +
                (needed ? std::to_string(*needed) : "more than 63 bits can count"));
        entry.offset = data_ + begin;
        entry.bytes = end - begin;
        return entry;
    }

    // A list of integers in 0 .. 2^63 - 1.
    static bool is_sizes(const json& list) {
        return list.is_array() && std::all_of(list.begin(), list.end(), [](const json& n) {
                   return n.is_number_unsigned() && n.get<uint64_t>() <= uint64_t(INT64_MAX);
               });
    }

    // Tensors must cover the data once, so that nothing is hidden in it or read twice.
    void check_tiling(const std::map<std::string, SafetensorsFile::Entry>& entries) const {
        std::vector<std::pair<std::pair<size_t, size_t>, std::string>> places;
        for (const auto& [name, e] : entries) places.push_back({{e.offset, e.bytes}, name});
        std::sort(places.begin(), places.end());
        size_t end = data_;
        for (const auto& [place, name] : places) {
            if (place.first != end)
                bad("has " + std::string(place.first < end ? "an overlap" : "unused bytes") +
                    " before tensor " + in_quotes(name) + ", at byte " +
                    std::to_string(std::min(place.first, end) - data_) + " of its data");
            end += place.second;
        }
        if (end != file_.bytes().size())
            bad("has " + std::to_string(file_.bytes().size() - end) +
                " bytes after its last tensor, expected none");
    }

    const MappedFile& file_;
    size_t data_ = 0;  // where the tensors begin
};

template <class T>
T load(const std::byte* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// One value; nothing when To is an integer type and cannot hold it.
template <class To, class From>
std::optional<To> convert(From x) {
    if constexpr (std::is_same_v<To, From>) {
        return x;
    } else if constexpr (std::is_same_v<From, kernels::bf16>) {
        return convert<To>(float(x));
    } else if constexpr (std::is_same_v<To, kernels::bf16>) {
        return round_to_bf16(double(x));
    } else if constexpr (std::is_floating_point_v<To>) {
        return To(x);
    } else if constexpr (std::is_floating_point_v<From>) {
        return {};
    } else {
        return std::in_range<To>(x) ? std::optional(To(x)) : std::nullopt;
    }
}

template <class To, class From>
std::vector<To> convert_all(std::span<const std::byte> bytes, const std::string& what) {
    std::vector<To> out(bytes.size() / sizeof(From));
    for (size_t i = 0; i < out.size(); ++i) {
        const auto value = convert<To>(load<From>(bytes.data() + i * sizeof(From)));
        if (!value)
            throw Error(ErrorKind::bad_file, what + " has an element " + std::to_string(i) +
                                                 " that a " + std::to_string(8 * sizeof(To)) +
                                                 "-bit integer may not hold; integers in that "
                                                 "range were expected");
        out[i] = *value;
    }
    return out;
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::string& path) {
    SafetensorsFile out;
    out.file_ = MappedFile(path);
    HeaderReader(out.file_).read(out.metadata_, out.entries_);
    return out;
}

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end())
        throw Error(ErrorKind::bad_file, path() + " has no tensor " + in_quotes(name) +
                                             " among its " + std::to_string(entries_.size()) +
                                             "; was it written by another program or version?");
    return found->second;
}

std::span<const std::byte> SafetensorsFile::bytes(const std::string& name) const {
    const Entry& e = entry(name);
    return file_.bytes().subspan(e.offset, e.bytes);
}

template <class To>
std::vector<To> SafetensorsFile::read(const std::string& name) const {
    const auto from = bytes(name);
    const std::string what =
        path() + " tensor " + in_quotes(name) + " (" + name_of(entry(name).dtype) + ")";
    switch (entry(name).dtype) {
        case DType::f32:
            return convert_all<To, float>(from, what);
        case DType::f64:
            return convert_all<To, double>(from, what);
        case DType::bf16:
            return convert_all<To, kernels::bf16>(from, what);
        case DType::i32:
            return convert_all<To, int32_t>(from, what);
        case DType::i64:
            return convert_all<To, int64_t>(from, what);
        case DType::u8:
            return convert_all<To, uint8_t>(from, what);
    }
    throw Error(ErrorKind::internal, what + " has an impossible dtype");
}
template std::vector<float> SafetensorsFile::read(const std::string&) const;
template std::vector<double> SafetensorsFile::read(const std::string&) const;
template std::vector<kernels::bf16> SafetensorsFile::read(const std::string&) const;
template std::vector<int32_t> SafetensorsFile::read(const std::string&) const;
template std::vector<int64_t> SafetensorsFile::read(const std::string&) const;
template std::vector<uint8_t> SafetensorsFile::read(const std::string&) const;

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<Item> items,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path), items_(std::move(items)) {
    std::sort(items_.begin(), items_.end(),
              [](const Item& a, const Item& b) { return a.name < b.name; });
    json header = json::object();
    if (!metadata.empty()) header[kMetadata] = metadata;
    int64_t offset = 0;
    for (const Item& item : items_) {
        const auto bytes = byte_count(item.dtype, item.shape);
        int64_t end = 0;
        if (!bytes || __builtin_add_overflow(offset, *bytes, &end) || header.contains(item.name) ||
            item.name == kMetadata)
            throw Error(ErrorKind::internal, "cannot write tensor " + in_quotes(item.name) +
                                                 " to " + path +
                                                 ": its name is taken or its shape impossible");
        header[item.name] = {{"dtype", file_name_of(item.dtype)},
                             {"shape", std::vector<int64_t>(item.shape.begin(), item.shape.end())},
                             {"data_offsets", {offset, end}}};
        offset = end;
    }
    std::string text;
    try {
        text = header.dump();
    } catch (const json::type_error&) {
        throw Error(ErrorKind::internal, "cannot write " + path + ": a name is not UTF-8");
    }
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t length = text.size();
    file_.write(std::as_bytes(std::span(&length, 1)));
    file_.write(bytes_of(text));
}

void SafetensorsWriter::write(const std::string& name, std::span<const std::byte> bytes) {
    const auto size = [&] { return size_t(*byte_count(items_[next_].dtype, items_[next_].shape)); };
    // Tensors that are complete, or empty and never mentioned, are passed over.
    while (next_ < items_.size() && items_[next_].name != name && written_ == size()) {
        ++next_;
        written_ = 0;
    }
    if (next_ == items_.size() || items_[next_].name != name || written_ + bytes.size() > size())
        throw Error(ErrorKind::internal,
                    file_.path() + ": " + std::to_string(bytes.size()) + " bytes of tensor " +
                        in_quotes(name) + " came, expected " +
                        (next_ == items_.size() ? std::string("nothing")
                                                : std::to_string(size() - written_) + " of " +
                                                      in_quotes(items_[next_].name)));
    file_.write(bytes);
    written_ += bytes.size();
}

void SafetensorsWriter::finish() {
    for (; next_ < items_.size(); ++next_, written_ = 0)
        if (written_ != size_t(*byte_count(items_[next_].dtype, items_[next_].shape)))
            throw Error(ErrorKind::internal, file_.path() + ": tensor " +
                                                 in_quotes(items_[next_].name) + " is incomplete");
    file_.finish();
}

}  // namespace fbt::tensor
