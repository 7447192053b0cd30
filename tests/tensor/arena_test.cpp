// The caching allocator, over a memory that counts and has an end.
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "tensor/context.h"
#include "tests/compare.h"

namespace fbt::tests {
namespace {

using tensor::Arena;

class CountedMemory : public tensor::Memory {
  public:
    explicit CountedMemory(size_t limit) : limit_(limit) {}
    void* allocate(size_t bytes) override {
        if (held() + bytes > limit_) return nullptr;
        void* p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
        blocks_[p] = bytes;
        return p;
    }
    void release(void* p) override {
        EXPECT_EQ(blocks_.erase(p), 1u);
        std::free(p);
    }
    size_t held() const {
        size_t sum = 0;
        for (const auto& [p, bytes] : blocks_) sum += bytes;
        return sum;
    }
    void copy_in(void*, const void*, size_t) override {}
    void copy_out(void*, const void*, size_t) override {}
    void copy(void*, const void*, size_t) override {}
    void zero(void*, size_t) override {}
    void synchronize() override {}
    void* stream() override { return nullptr; }

  private:
    size_t limit_;
    std::map<void*, size_t> blocks_;
};

constexpr size_t kMiB = 1 << 20;

TEST(Arena, BlocksNeverOverlapAndAllIsGivenBack) {
    const auto memory = std::make_shared<CountedMemory>(1 << 30);
    struct Block {
        unsigned char* p;
        size_t bytes;
        unsigned char tag;
    };
    std::vector<Block> live;
    std::mt19937 random(1);
    {
        Arena arena(memory);
        for (int i = 0; i < 3000; ++i) {
            if (live.size() < 40 && random() % 5 < 3) {
                const size_t bytes = 1 + random() % (random() % 2 ? 1000 : 300000);
                auto* p = static_cast<unsigned char*>(arena.allocate(bytes));
                EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 64, 0u);
                std::memset(p, int(i % 251), bytes);
                live.push_back({p, bytes, static_cast<unsigned char>(i % 251)});
            } else if (!live.empty()) {
                std::swap(live[random() % live.size()], live.back());
                const Block b = live.back();
                live.pop_back();
                EXPECT_TRUE(
                    std::all_of(b.p, b.p + b.bytes, [&](unsigned char c) { return c == b.tag; }));
                arena.release(b.p, b.bytes);
            }
            EXPECT_EQ(arena.held(), memory->held());
            EXPECT_LE(arena.in_use(), arena.held());
        }
        for (const Block& b : live) arena.release(b.p, b.bytes);
        EXPECT_EQ(arena.in_use(), 0u);
    }
    EXPECT_EQ(memory->held(), 0u);
}

// A step's blocks are released in about the order of their making, and the next step's differ.
TEST(Arena, StepsOfDifferentSizesShareMemory) {
    Arena arena(std::make_shared<CountedMemory>(1 << 30));
    std::mt19937 random(2);
    for (int step = 0; step < 50; ++step) {
        std::vector<std::pair<void*, size_t>> kept;
        const size_t rows = 1000 + random() % 1000;
        for (int i = 0; i < 60; ++i) {
            const size_t bytes = rows * (i % 3 == 0 ? 700 : 250);
            kept.emplace_back(arena.allocate(bytes), bytes);
            void* passing = arena.allocate(rows * 400);
            arena.release(passing, rows * 400);
        }
        for (; !kept.empty(); kept.pop_back()) arena.release(kept.back().first, kept.back().second);
    }
    // Chunks grow by an eighth at a time, and a piece may be left at the end of each.
    EXPECT_LE(double(arena.held()), 1.25 * double(arena.peak()));
}

TEST(Arena, FreeNeighboursBecomeOnePiece) {
    Arena arena(std::make_shared<CountedMemory>(1 << 30));
    arena.release(arena.allocate(6 * kMiB), 6 * kMiB);  // one chunk
    const size_t held = arena.held();
    void* p[3];
    for (void*& block : p) block = arena.allocate(2 * kMiB);
    for (int i : {0, 2, 1}) arena.release(p[i], 2 * kMiB);
    void* whole = arena.allocate(6 * kMiB);
    EXPECT_EQ(whole, p[0]);
    EXPECT_EQ(arena.held(), held);
    arena.release(whole, 6 * kMiB);
}

TEST(Arena, GivesUnusedChunksBackWhenTheDeviceHasNoMore) {
    const auto memory = std::make_shared<CountedMemory>(20 * kMiB);
    Arena arena(memory);
    void* kept = arena.allocate(3 * kMiB);
    arena.release(arena.allocate(10 * kMiB), 10 * kMiB);
    void* p = arena.allocate(14 * kMiB);
    EXPECT_LE(memory->held(), 20 * kMiB);
    EXPECT_THROW(arena.allocate(4 * kMiB), tensor::Error);
    EXPECT_EQ(arena.in_use(), 17 * kMiB);
    arena.release(p, 14 * kMiB);
    arena.release(kept, 3 * kMiB);
}

}  // namespace
}  // namespace fbt::tests
