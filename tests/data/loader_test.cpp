#include "model/data/loader.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "model/data/shards.h"
#include "tests/data/files.h"

namespace fbt::tests {
namespace {

using namespace model::data;
using tensor::ErrorKind;

// Documents of these many bytes; every byte of a document says where it stands.
Dataset dataset_of(const TemporaryFolder& folder, const std::vector<int>& lengths) {
    std::vector<std::string> inputs;
    for (size_t d = 0; d < lengths.size(); ++d) {
        std::string text;
        for (int i = 0; i < lengths[d]; ++i) text += char('A' + (i + int(d)) % 26);
        inputs.push_back(folder / (std::to_string(d) + ".txt"));
        put(inputs.back(), text);
    }
    const std::string out = folder / "data";
    build_dataset({inputs, "bytes", out, 37});
    return Dataset::open(out);
}

void expect_same(const Sequences& a, const Sequences& b) {
    EXPECT_EQ(a.tokens, b.tokens);
    EXPECT_EQ(a.targets, b.targets);
    EXPECT_EQ(a.lengths, b.lengths);
    EXPECT_EQ(a.indices, b.indices);
}

void expect_well_formed(const Sequences& s, int64_t budget, int context) {
    ASSERT_EQ(s.lengths.size(), s.indices.size());
    ASSERT_EQ(s.tokens.size(), s.targets.size());
    ASSERT_EQ(int64_t(s.tokens.size()),
              std::accumulate(s.lengths.begin(), s.lengths.end(), int64_t(0)));
    EXPECT_LE(int64_t(s.tokens.size()), budget);
    EXPECT_FALSE(s.lengths.empty());
    size_t row = 0;
    for (const int32_t n : s.lengths) {
        EXPECT_GE(n, 2);
        EXPECT_LE(n, context);
        for (int32_t i = 0; i + 1 < n; ++i, ++row) EXPECT_EQ(s.targets[row], s.tokens[row + 1]);
        EXPECT_EQ(s.targets[row++], -1);
    }
}

TEST(Cut, PiecesOverlapByOneAndMakeEveryTokenATargetOnce) {
    const TemporaryFolder folder;
    const Dataset data = dataset_of(folder, {1, 2, 3, 36, 37, 38, 73, 1, 1601});
    const Split& split = data.train();
    for (const int context : {2, 3, 4, 37, 5000}) {
        std::vector<int> times(static_cast<size_t>(split.size()));
        std::set<int64_t> begins;
        for (const Piece& p : cut(split, context)) {
            EXPECT_GE(p.count, 2);
            EXPECT_LE(p.count, context);
            for (int64_t i = p.begin + 1; i < p.begin + p.count; ++i) ++times[size_t(i)];
            begins.insert(p.begin);
        }
        std::vector<int> want(times.size(), 1);
        for (const int64_t d : split.documents()) {
            want[size_t(d)] = 0;
            EXPECT_EQ(begins.count(d), 1u);
        }
        EXPECT_EQ(times, want) << context;
    }
    // 5 tokens with context 3: [0,3), [2,5).
    const TemporaryFolder other;
    const Dataset five = dataset_of(other, {4, 100});
    const auto pieces = cut(five.train(), 3);
    EXPECT_EQ(pieces[0].begin, 0);
    EXPECT_EQ(pieces[0].count, 3);
    EXPECT_EQ(pieces[1].begin, 2);
    EXPECT_EQ(pieces[1].count, 3);
    EXPECT_EQ(pieces[2].begin, 5);
    for (const int context : {1, 0, -3})
        EXPECT_TRUE(throws(ErrorKind::usage, {"context length", "at least 2"},
                           [&] { cut(split, context); }));
}

TEST(Shuffle, IsAPermutationThatSeedAndEpochChange) {
    for (const int64_t n : {0, 1, 2, 3, 37, 1601}) {
        auto order = shuffled(7, 0, n);
        EXPECT_EQ(order, shuffled(7, 0, n));
        if (n >= 37) {
            EXPECT_NE(order, shuffled(7, 1, n));
            EXPECT_NE(order, shuffled(8, 0, n));
        }
        std::sort(order.begin(), order.end());
        for (int64_t i = 0; i < n; ++i) EXPECT_EQ(order[size_t(i)], uint32_t(i));
    }
    EXPECT_TRUE(throws(ErrorKind::usage, {"too many"}, [] { shuffled(0, 0, int64_t(1) << 31); }));
}

// All 6 orders of 3 equally often: chi-square with 5 degrees of freedom exceeds 20.5 with
// probability 0.001; the seeds are fixed, so this either always passes or never.
TEST(Shuffle, IsUniform) {
    std::map<std::vector<uint32_t>, int> seen;
    const int draws = 6000;
    for (int epoch = 0; epoch < draws; ++epoch) ++seen[shuffled(1, epoch, 3)];
    double chi_square = 0;
    for (const auto& [order, count] : seen)
        chi_square += (count - draws / 6.0) * (count - draws / 6.0) / (draws / 6.0);
    EXPECT_EQ(seen.size(), 6u);
    EXPECT_LT(chi_square, 20.5);
}

TEST(Loader, AnEpochIsEveryPieceOnce) {
    const TemporaryFolder folder;
    const Dataset data = dataset_of(folder, {1, 300, 37, 52, 1601, 3, 900});
    const int context = 37, budget = 111;
    Loader loader(data.train(), 257, context, 5);
    const int64_t n = loader.sequences_per_epoch();
    EXPECT_EQ(loader.vocab_size(), 257);
    std::multiset<std::vector<int32_t>> want, got[2];
    for (const Piece& p : cut(data.train(), context)) {
        std::vector<int32_t> tokens(static_cast<size_t>(p.count));
        data.train().copy(p.begin, p.count, tokens.data());
        want.insert(tokens);
    }
    std::vector<std::vector<int32_t>> orders[2];
    int64_t expected_index = 0;
    while (expected_index < 2 * n) {
        const Sequences s = loader.next(budget);
        expect_well_formed(s, budget, context);
        auto at = s.tokens.begin();
        for (size_t i = 0; i < s.lengths.size(); ++i) {
            EXPECT_EQ(s.indices[i], expected_index++);
            const std::vector<int32_t> tokens(at, at + s.lengths[i]);
            at += s.lengths[i];
            const int64_t epoch = s.indices[i] / n;
            if (epoch < 2) {
                got[epoch].insert(tokens);
                orders[epoch].push_back(tokens);
            }
        }
        // Packed greedily: what comes next would not have fitted.
        const Position here = loader.position();
        EXPECT_EQ(here.epoch * n + here.index, expected_index);
        const int32_t following = loader.next(budget).lengths.at(0);
        EXPECT_GT(int64_t(s.tokens.size()) + following, budget);
        loader.seek(here);
    }
    EXPECT_EQ(got[0], want);
    EXPECT_EQ(got[1], want);
    EXPECT_NE(orders[0], orders[1]);
}

TEST(Loader, ResumedAnywhereGoesOnTheSame) {
    const TemporaryFolder folder;
    const Dataset data = dataset_of(folder, {300, 37, 52, 700});
    Loader loader(data.train(), 257, 37, 5);
    std::vector<Position> positions;
    std::vector<Sequences> steps;
    for (int step = 0; step < 40; ++step) {  // several epochs
        positions.push_back(loader.position());
        steps.push_back(loader.next(150));
    }
    EXPECT_GT(positions.back().epoch, 2);
    for (size_t k = 0; k < positions.size(); ++k) {
        Loader resumed(data.train(), 257, 37, 5);
        resumed.seek(positions[k]);
        for (size_t i = k; i < std::min(k + 3, steps.size()); ++i)
            expect_same(resumed.next(150), steps[i]);
    }
    Loader other_seed(data.train(), 257, 37, 6);
    EXPECT_NE(other_seed.next(150).tokens, steps[0].tokens);
}

TEST(Loader, BadSettingsAreNamed) {
    const TemporaryFolder folder;
    const Dataset data = dataset_of(folder, {300});
    Loader loader(data.train(), 257, 37, 5);
    EXPECT_TRUE(
        throws(ErrorKind::usage, {"37 tokens", "36 tokens per step", "context length"}, [&] {
            for (;;) loader.next(36);  // short pieces may come first
        }));
    const int64_t n = loader.sequences_per_epoch();
    for (const Position& p : {Position{0, n}, Position{0, -1}, Position{-1, 0}})
        EXPECT_TRUE(throws(ErrorKind::bad_file, {"outside the data"}, [&] { loader.seek(p); }));
    const TemporaryFolder other;
    const Dataset tiny = dataset_of(other, {1});  // its one byte is validation
    EXPECT_TRUE(
        throws(ErrorKind::bad_file, {"two tokens"}, [&] { Loader(tiny.train(), 257, 37, 5); }));
}

TEST(InOrder, GivesAllValidationTextOnce) {
    const TemporaryFolder folder;
    const Dataset data = dataset_of(folder, {3000, 61, 37});
    for (const int64_t budget : {5, 36, 37, 1000}) {
        InOrder validation(data.val(), 5);
        std::vector<int32_t> targets;
        int64_t index = 0;
        while (const auto s = validation.next(budget)) {
            expect_well_formed(*s, budget, 5);
            for (const int64_t i : s->indices) EXPECT_EQ(i, index++);
            for (const int32_t t : s->targets)
                if (t >= 0) targets.push_back(t);
        }
        EXPECT_FALSE(validation.next(budget));
        std::vector<int32_t> all(static_cast<size_t>(data.val().size()));
        data.val().copy(0, data.val().size(), all.data());
        EXPECT_EQ(data.tokenizer().decode(targets), data.tokenizer().decode(all));
        EXPECT_EQ(int64_t(data.tokenizer().decode(targets).size()), data.meta().val_text_bytes);
    }
    InOrder validation(data.val(), 5);
    EXPECT_TRUE(throws(ErrorKind::usage, {"tokens per step"}, [&] { validation.next(4); }));
}

}  // namespace
}  // namespace fbt::tests
