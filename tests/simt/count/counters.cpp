#include "tests/simt/count/counters.h"

#include <cxxabi.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <unordered_map>

#include "tests/simt/device_memory.h"
#include "tests/simt/scheduler.h"

namespace fbt::simt {
namespace {

constexpr unsigned kLanes = 32, kBanks = 32;
constexpr uintptr_t kSector = 32, kWord = 4;
constexpr size_t kWidest = 16;      // bytes that one instruction moves for a lane
constexpr size_t kManyOpen = 4096;  // accesses of one instruction that lanes have not all reached

// ---- names ----

// The program's own table of symbols: kernels are local symbols, which dladdr does not know.
std::map<uintptr_t, std::string> read_symbols() {
    std::map<uintptr_t, std::string> names;
    std::ifstream file("/proc/self/exe", std::ios::binary);
    const std::string image((std::istreambuf_iterator<char>(file)), {});
    if (image.size() < sizeof(ElfW(Ehdr))) return names;
    uintptr_t base = 0;  // the first object is the program
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* out) {
            *static_cast<uintptr_t*>(out) = info->dlpi_addr;
            return 1;
        },
        &base);
    const auto at = [&](size_t offset, auto& out) {
        if (offset + sizeof out <= image.size()) std::memcpy(&out, &image[offset], sizeof out);
    };
    ElfW(Ehdr) header{};
    at(0, header);
    for (unsigned s = 0; s < header.e_shnum; ++s) {
        ElfW(Shdr) symbols{}, strings{};
        at(header.e_shoff + s * header.e_shentsize, symbols);
        if (symbols.sh_type != SHT_SYMTAB) continue;
        at(header.e_shoff + symbols.sh_link * header.e_shentsize, strings);
        for (size_t i = 0; i * sizeof(ElfW(Sym)) < symbols.sh_size; ++i) {
            ElfW(Sym) symbol{};
            at(symbols.sh_offset + i * sizeof symbol, symbol);
            if ((symbol.st_info & 15) == STT_FUNC)
                names[base + symbol.st_value] = &image[strings.sh_offset + symbol.st_name];
        }
    }
    return names;
}

// Without namespaces and parameters.
std::string name_of(const void* kernel) {
    static const std::map<uintptr_t, std::string> symbols = read_symbols();
    const auto found = symbols.find(reinterpret_cast<uintptr_t>(kernel));
    if (found == symbols.end()) return "?";
    int status = 0;
    char* text = abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, &status);
    std::string name = status == 0 ? text : found->second;
    std::free(text);
    for (const std::string scope : {"(anonymous namespace)::", "fbt::kernels::"})
        for (size_t at; (at = name.find(scope)) != std::string::npos;) name.erase(at, scope.size());
    int depth = 0;
    size_t start = 0, end = 0;
    for (; end < name.size() && (name[end] != '(' || depth > 0); ++end) {
        depth += name[end] == '<' ? 1 : name[end] == '>' ? -1 : 0;
        if (depth == 0 && (name[end] == ' ' || name[end] == ':')) start = end + 1;
    }
    return name.substr(start, end - start);
}

// ---- accesses ----

struct Access {  // by the lanes of one warp
    uint32_t lanes = 0;
    uintptr_t address[kLanes];
};

// All executions of one instruction by one warp.
struct Series {
    bool shared = false, write = false;
    size_t bytes = 0;
    uint64_t executed[kLanes] = {};
    uint64_t first = 0;  // execution that `open` begins with
    std::vector<Access> open;
};

struct Site {
    const void* instruction;
    size_t bytes;
    unsigned warp;
    bool shared;
    bool operator==(const Site& other) const {
        return instruction == other.instruction && bytes == other.bytes && warp == other.warp &&
               shared == other.shared;
    }
};
struct SiteHash {
    size_t operator()(const Site& s) const {
        return (reinterpret_cast<uintptr_t>(s.instruction) * 64 + s.warp * 2 + s.shared) *
               (2 * s.bytes + 1);
    }
};

std::vector<Counts> counts;
std::map<const void*, size_t> count_index;  // by kernel
Counts* current = nullptr;
std::unordered_map<Site, Series, SiteHash> block_series;

// A store that the next one may continue.
struct Store {
    int thread = -1;
    uintptr_t address = 0;
    size_t bytes = 0;
    const void* site = nullptr;
};
Store last_store;

size_t distinct(std::vector<uintptr_t>& values) {
    std::sort(values.begin(), values.end());
    return size_t(std::unique(values.begin(), values.end()) - values.begin());
}

void count_global(const Access& access, const Series& series) {
    std::vector<uintptr_t> sectors;
    std::vector<std::pair<uintptr_t, uintptr_t>> spans;
    for (unsigned i = 0; i < kLanes; ++i) {
        if (!(access.lanes >> i & 1)) continue;
        const uintptr_t begin = access.address[i], end = begin + series.bytes;
        for (uintptr_t s = begin / kSector; s <= (end - 1) / kSector; ++s) sectors.push_back(s);
        spans.push_back({begin, end});
    }
    // Bytes that several lanes ask for count once.
    std::sort(spans.begin(), spans.end());
    uintptr_t bytes = 0, covered = 0;
    for (const auto& [begin, end] : spans) {
        if (end > covered) bytes += end - std::max(begin, covered);
        covered = std::max(covered, end);
    }
    (series.write ? current->stores : current->loads) += 1;
    current->sectors += distinct(sectors);
    current->ideal_sectors += (bytes + kSector - 1) / kSector;
}

// Lanes go together as long as their bytes fit into one pass over the banks: all 32 with 4 bytes
// each, halves of the warp with 8, quarters with 16. A pass takes one wavefront for every word that
// the busiest bank must give.
void count_shared(const Access& access, const Series& series) {
    current->shared_accesses += 1;
    const unsigned group = series.bytes <= 4 ? 32 : series.bytes <= 8 ? 16 : 8;
    for (unsigned first = 0; first < kLanes; first += group) {
        std::vector<uintptr_t> words;
        for (unsigned i = first; i < first + group; ++i) {
            if (!(access.lanes >> i & 1)) continue;
            const uintptr_t begin = access.address[i], end = begin + series.bytes;
            for (uintptr_t w = begin / kWord; w <= (end - 1) / kWord; ++w) words.push_back(w);
        }
        if (words.empty()) continue;
        words.resize(distinct(words));
        size_t in_bank[kBanks] = {}, busiest = 0;
        for (uintptr_t word : words) busiest = std::max(busiest, ++in_bank[word % kBanks]);
        current->extra_wavefronts += busiest - (words.size() + kBanks - 1) / kBanks;
    }
}

void count_open(Series& series, size_t how_many) {
    for (size_t i = 0; i < how_many; ++i)
        (series.shared ? count_shared : count_global)(series.open[i], series);
    series.open.erase(series.open.begin(), series.open.begin() + ptrdiff_t(how_many));
    series.first += how_many;
}

void note(unsigned thread, uintptr_t address, size_t bytes, bool write, const void* instruction) {
    const unsigned lane = thread % kLanes;
    const bool shared = is_shared_memory(reinterpret_cast<const void*>(address));
    Series& series = block_series[{instruction, bytes, thread / kLanes, shared}];
    series.shared = shared;
    series.write = write;
    series.bytes = bytes;
    const uint64_t k = series.executed[lane]++;
    if (k < series.first) {  // an early one that the others did not wait for: alone
        Access alone;
        alone.lanes = 1u << lane;
        alone.address[lane] = address;
        (shared ? count_shared : count_global)(alone, series);
        return;
    }
    if (k - series.first >= series.open.size()) series.open.resize(k - series.first + 1);
    Access& access = series.open[k - series.first];
    access.lanes |= 1u << lane;
    access.address[lane] = address;
    if (series.open.size() >= 2 * kManyOpen && lane == kLanes - 1) {
        const uint64_t all = *std::min_element(series.executed, series.executed + kLanes);
        if (all > series.first)
            count_open(series, std::min<size_t>(all - series.first, series.open.size()));
    }
}

void flush_store() {
    if (last_store.thread >= 0)
        note(unsigned(last_store.thread), last_store.address, last_store.bytes, true,
             last_store.site);
    last_store.thread = -1;
}

bool counted_memory(const void* p) { return is_shared_memory(p) || is_device_memory(p); }

// Of compiled code, where a vector's store comes as several.
void compiled_access(const void* memory, size_t bytes, bool write, const void* site) {
    const int thread = current ? counted_thread() : -1;
    if (thread < 0 || !counted_memory(memory)) return;
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
    if (write && bytes >= kWord) {
        const bool continues = last_store.thread == thread &&
                               address == last_store.address + last_store.bytes &&
                               address % kWidest != 0;
        if (continues) {
            last_store.bytes += bytes;
            return;
        }
        flush_store();
        if (bytes < kWidest) {
            last_store = {thread, address, bytes, site};
            return;
        }
    }
    for (size_t at = 0; at < bytes; at += kWidest)
        note(unsigned(thread), address + at, std::min(kWidest, bytes - at), write,
             static_cast<const char*>(site) + at);
}

void grid_begins(const void* kernel) {
    const auto [known, is_new] = count_index.try_emplace(kernel, counts.size());
    if (is_new) {
        counts.emplace_back();
        counts.back().kernel = name_of(kernel);
    }
    current = &counts[known->second];
    current->launches += 1;
}

void block_ends() {
    flush_store();
    for (auto& [site, series] : block_series) count_open(series, series.open.size());
    block_series.clear();
}

void explicit_access(unsigned thread, const void* memory, size_t bytes, bool write,
                     const void* site) {
    if (current && counted_memory(memory))
        note(thread, reinterpret_cast<uintptr_t>(memory), bytes, write, site);
}

constexpr Observer kObserver{grid_begins, block_ends, explicit_access};

}  // namespace

void start_counting() {
    counts.clear();
    count_index.clear();
    current = nullptr;
    set_observer(&kObserver);
}

std::vector<Counts> stop_counting() {
    set_observer(nullptr);
    current = nullptr;
    return counts;
}

std::string table(const std::vector<Counts>& rows) {
    std::string text;
    const auto add = [&](auto... columns) {
        char line[256];
        std::snprintf(line, sizeof line, columns...);
        text += line;
    };
    add("%-48s %8s %9s %9s %9s %7s %9s %9s\n", "kernel", "launches", "loads", "stores", "sectors",
        "ratio", "shared", "conflicts");
    for (const Counts& c : rows)
        add("%-48.48s %8llu %9llu %9llu %9llu %7.3f %9llu %9llu\n", c.kernel.c_str(),
            (unsigned long long)c.launches, (unsigned long long)c.loads,
            (unsigned long long)c.stores, (unsigned long long)c.sectors, c.sector_ratio(),
            (unsigned long long)c.shared_accesses, (unsigned long long)c.extra_wavefronts);
    return text;
}

}  // namespace fbt::simt

// ---- what -fsanitize=thread calls ----

#define FBT_SITE __builtin_return_address(0)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define FBT_ACCESSES(bytes)                                                                     \
    void __tsan_read##bytes(void* p) { fbt::simt::compiled_access(p, bytes, false, FBT_SITE); } \
    void __tsan_write##bytes(void* p) { fbt::simt::compiled_access(p, bytes, true, FBT_SITE); } \
    void __tsan_unaligned_read##bytes(void* p) {                                                \
        fbt::simt::compiled_access(p, bytes, false, FBT_SITE);                                  \
    }                                                                                           \
    void __tsan_unaligned_write##bytes(void* p) {                                               \
        fbt::simt::compiled_access(p, bytes, true, FBT_SITE);                                   \
    }                                                                                           \
    void __tsan_volatile_read##bytes(void* p) {                                                 \
        fbt::simt::compiled_access(p, bytes, false, FBT_SITE);                                  \
    }                                                                                           \
    void __tsan_volatile_write##bytes(void* p) {                                                \
        fbt::simt::compiled_access(p, bytes, true, FBT_SITE);                                   \
    }
FBT_ACCESSES(1)
FBT_ACCESSES(2)
FBT_ACCESSES(4)
FBT_ACCESSES(8)
FBT_ACCESSES(16)

void __tsan_read_range(void* p, size_t bytes) {
    fbt::simt::compiled_access(p, bytes, false, FBT_SITE);
}
void __tsan_write_range(void* p, size_t bytes) {
    fbt::simt::compiled_access(p, bytes, true, FBT_SITE);
}

// Atomic operations are only carried out. Whatever order is asked for, the strongest is right.
#define FBT_FETCH(bits, type, name)                                          \
    type __tsan_atomic##bits##_fetch_##name(volatile type* p, type v, int) { \
        return __atomic_fetch_##name(p, v, __ATOMIC_SEQ_CST);                \
    }
#define FBT_ATOMICS(bits, type)                                                                    \
    type __tsan_atomic##bits##_load(const volatile type* p, int) {                                 \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                               \
    }                                                                                              \
    void __tsan_atomic##bits##_store(volatile type* p, type v, int) {                              \
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                  \
    }                                                                                              \
    type __tsan_atomic##bits##_exchange(volatile type* p, type v, int) {                           \
        return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                        \
    }                                                                                              \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile type* p, type* expected, type v,    \
                                                      int, int) {                                  \
        return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST,                \
                                           __ATOMIC_SEQ_CST);                                      \
    }                                                                                              \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile type* p, type* expected, type v, int, \
                                                    int) {                                         \
        return __atomic_compare_exchange_n(p, expected, v, true, __ATOMIC_SEQ_CST,                 \
                                           __ATOMIC_SEQ_CST);                                      \
    }                                                                                              \
    FBT_FETCH(bits, type, add)                                                                     \
    FBT_FETCH(bits, type, sub)                                                                     \
    FBT_FETCH(bits, type, and)                                                                     \
    FBT_FETCH(bits, type, or)                                                                      \
    FBT_FETCH(bits, type, xor)
FBT_ATOMICS(8, unsigned char)
FBT_ATOMICS(16, unsigned short)
FBT_ATOMICS(32, unsigned)
FBT_ATOMICS(64, unsigned long long)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

}  // extern "C"
