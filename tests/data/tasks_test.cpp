#include "model/data/tasks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "tests/data/files.h"

namespace fbt::tests {
namespace {

using namespace model::data;
using tensor::ErrorKind;
using Ids = std::vector<int32_t>;

struct Row {
    Ids tokens, labels;
};

std::vector<Row> rows_of(const Sequences& s) {
    std::vector<Row> rows;
    auto token = s.tokens.begin(), label = s.targets.begin();
    for (const int32_t length : s.lengths) {
        rows.push_back({{token, token + length}, {label, label + length}});
        token += length, label += length;
    }
    EXPECT_TRUE(token == s.tokens.end() && label == s.targets.end());
    return rows;
}

std::vector<Row> draw(const std::string& name, int length, int n, uint64_t seed = 1,
                      TaskStream stream = TaskStream::training) {
    return rows_of(make_task(name, {length}, seed, stream)->next(int64_t(n) * length));
}

// The labels of a sequence, found otherwise than by its generator; failures where the inputs are
// none of the task's.
Ids parity_labels(const Ids& in) {
    Ids out;
    for (size_t t = 0; t < in.size(); ++t)
        out.push_back(2 + int32_t(std::count(in.begin(), in.begin() + long(t) + 1, 1) % 2));
    return out;
}

Ids mod_sum_labels(const Ids& in) {
    Ids out;
    for (size_t t = 0; t < in.size(); ++t)
        out.push_back(5 + std::accumulate(in.begin(), in.begin() + long(t) + 1, 0) % 5);
    return out;
}

// Matrices of permutations: m[place][item] is 1 where the item lies.
Ids swap_labels(const Ids& in) {
    using Matrix = std::array<std::array<int, 5>, 5>;
    std::vector<Matrix> swaps;
    Matrix one{};
    for (size_t i = 0; i < 5; ++i) one[i][i] = 1;
    for (size_t i = 0; i < 5; ++i)
        for (size_t j = i + 1; j < 5; ++j) {
            swaps.push_back(one);
            std::swap(swaps.back()[i], swaps.back()[j]);
        }
    Matrix m = one;
    Ids out;
    for (const int32_t token : in) {
        const Matrix before = m;
        m = {};
        for (size_t i = 0; i < 5; ++i)
            for (size_t j = 0; j < 5; ++j)
                for (size_t k = 0; k < 5; ++k)
                    m[i][j] += swaps.at(size_t(token))[i][k] * before[k][j];
        for (int32_t place = 0; place < 5; ++place)
            if (m[size_t(place)][0] == 1) out.push_back(10 + place);
    }
    return out;
}

// Backwards from the query to the last write of its register.
Ids registers_labels(const Ids& in) {
    Ids out(in.size(), -1);
    std::map<int32_t, int> writes;
    for (size_t t = 0; t + 1 < in.size(); ++t) ++writes[in[t] / 2];
    EXPECT_EQ(writes.size(), 8u);
    for (const auto& [r, count] : writes)
        EXPECT_EQ(count, (int(in.size()) - 1 + 7 - r) / 8) << "register " << r;
    size_t t = in.size() - 2;
    while (in[t] / 2 != in.back() - 16 && t > 0) --t;
    EXPECT_EQ(in[t] / 2, in.back() - 16);
    out.back() = 24 + in[t] % 2;
    return out;
}

Ids completion_labels(const Ids& in) {
    Ids out(in.size(), -1);
    std::array<long, 3> over{};  // updates beyond each goal, after the last of them
    for (size_t t = 3; t < 12; ++t) {
        EXPECT_TRUE(in[t] >= 9 && in[t] < 12) << "no update: " << in[t];
        bool met = true;
        for (int32_t c = 0; c < 3; ++c) {
            EXPECT_EQ(in[size_t(c)] / 3, c);
            over[size_t(c)] = std::count(in.begin() + 3, in.begin() + long(t) + 1, 9 + c) -
                              (in[size_t(c)] % 3 + 1);
            met = met && over[size_t(c)] >= 0;
        }
        out[t] = 15 + met;
    }
    std::sort(over.begin(), over.end());
    EXPECT_GE(over[0], -1) << "one short";
    EXPECT_GE(over[1], 0) << "one counter only";
    for (size_t t = 12; t + 1 < in.size(); ++t) EXPECT_EQ(in[t] / 2, 6) << "no scratch: " << in[t];
    EXPECT_EQ(in.back(), 14);
    out.back() = out[11];
    return out;
}

Ids memory_labels(const Ids& in) {
    Ids out(in.size(), -1);
    for (size_t t = 1; t + 1 < in.size(); ++t) EXPECT_EQ(in[t] / 2, 1) << "no scratch: " << in[t];
    EXPECT_EQ(in.back(), 4);
    out.back() = in[0] == 1 ? 6 : 5;
    return out;
}

// Each label is walked to from the start.
Ids pointer_labels(const Ids& in) {
    Ids out(in.size(), -1);
    std::map<int32_t, int32_t> f;
    std::set<int32_t> ends;
    for (size_t t = 0; t < 8; ++t) {
        f[in[t] / 8] = in[t] % 8;
        ends.insert(in[t] % 8);
    }
    EXPECT_EQ(f.size(), 8u);
    EXPECT_EQ(ends.size(), 8u);
    for (size_t t = 8; t < in.size(); ++t) {
        EXPECT_TRUE(t == 8 || in[t] == 72) << "no hop: " << in[t];
        int32_t node = in[8] - 64;
        for (size_t hop = 8; hop <= t; ++hop) node = f.at(node);
        out[t] = 73 + node;
    }
    return out;
}

struct Facts {
    const char* name;
    int vocab, inputs, shortest;
    Ids (*labels)(const Ids&);
};
const Facts kFacts[] = {{"parity", 4, 2, 1, parity_labels},
                        {"mod-sum", 10, 5, 1, mod_sum_labels},
                        {"swap-s5", 15, 10, 1, swap_labels},
                        {"registers", 26, 24, 9, registers_labels},
                        {"completion", 17, 15, 13, completion_labels},
                        {"memory", 7, 5, 2, memory_labels},
                        {"pointer-chase", 81, 73, 9, pointer_labels}};

TEST(Task, EveryLabelIsRight) {
    ASSERT_EQ(task_names().size(), std::size(kFacts));
    for (const Facts& task : kFacts)
        for (const int more : {0, 1, 3, 8, 36, 260}) {
            const int length = task.shortest + more;
            SCOPED_TRACE(std::string(task.name) + " at " + std::to_string(length));
            const auto source = make_task(task.name, {length}, 11);
            EXPECT_EQ(source->vocab_size(), task.vocab);
            const Sequences s = source->next(50 * int64_t(length) + length - 1);
            ASSERT_EQ(s.lengths, Ids(50, length));
            for (size_t i = 0; i < 50; ++i) EXPECT_EQ(s.indices[i], int64_t(i));
            for (const Row& row : rows_of(s)) {
                for (const int32_t token : row.tokens)
                    ASSERT_TRUE(token >= 0 && token < task.inputs) << token;
                ASSERT_EQ(row.labels, task.labels(row.tokens));
            }
        }
}

TEST(Task, EveryIdIsUsed) {
    for (const Facts& task : kFacts) {
        std::set<int32_t> ids;
        for (const Row& row : draw(task.name, 40, 2000)) {
            ids.insert(row.tokens.begin(), row.tokens.end());
            ids.insert(row.labels.begin(), row.labels.end());
        }
        ids.erase(-1);
        EXPECT_EQ(ids.size(), size_t(task.vocab)) << task.name;
        EXPECT_EQ(*ids.begin(), 0) << task.name;
        EXPECT_EQ(*ids.rbegin(), task.vocab - 1) << task.name;
    }
}

// Passes when the n drawn ids are as if uniform on [first, first + count): each within five
// standard deviations of a binomial.
testing::AssertionResult uniform(const Ids& ids, int32_t first, int32_t count) {
    const double n = double(ids.size()), p = 1.0 / count;
    for (int32_t id = first; id < first + count; ++id) {
        const double found = double(std::count(ids.begin(), ids.end(), id));
        if (!(std::abs(found - n * p) <= 5 * std::sqrt(n * p * (1 - p))))
            return testing::AssertionFailure() << id << " is " << found << " of " << n;
    }
    return testing::AssertionSuccess();
}

TEST(Task, AnswersAndDrawsAreBalanced) {
    constexpr int kLength = 41, kLast = kLength - 1, n = 20000;
    struct Draw {
        const char* name;
        int position, first, count;
    };
    std::map<std::string, std::vector<Row>> rows;
    for (const Facts& task : kFacts) {
        rows[task.name] = draw(task.name, kLength, n);
        Ids answers;
        for (const Row& row : rows[task.name]) answers.push_back(row.labels.back());
        EXPECT_TRUE(uniform(answers, task.inputs, task.vocab - task.inputs)) << task.name;
    }
    // Of registers, 40 writes are five to each.
    for (const Draw& d : {Draw{"parity", 0, 0, 2},         Draw{"parity", kLast, 0, 2},
                          Draw{"mod-sum", 0, 0, 5},        Draw{"mod-sum", kLast, 0, 5},
                          Draw{"swap-s5", 0, 0, 10},       Draw{"swap-s5", kLast, 0, 10},
                          Draw{"registers", 0, 0, 16},     Draw{"registers", 20, 0, 16},
                          Draw{"registers", 39, 0, 16},    Draw{"registers", kLast, 16, 8},
                          Draw{"completion", 0, 0, 3},     Draw{"completion", 1, 3, 3},
                          Draw{"completion", 2, 6, 3},     Draw{"completion", 3, 9, 3},
                          Draw{"completion", 11, 9, 3},    Draw{"completion", 12, 12, 2},
                          Draw{"completion", 39, 12, 2},   Draw{"memory", 0, 0, 2},
                          Draw{"memory", 1, 2, 2},         Draw{"memory", 39, 2, 2},
                          Draw{"pointer-chase", 0, 0, 64}, Draw{"pointer-chase", 7, 0, 64},
                          Draw{"pointer-chase", 8, 64, 8}}) {
        Ids ids;
        for (const Row& row : rows[d.name]) ids.push_back(row.tokens[size_t(d.position)]);
        EXPECT_TRUE(uniform(ids, d.first, d.count)) << d.name << " at " << d.position;
    }
    // Completion: which counter is short, and where the updates beyond the goals go: when one is
    // short, to the next or the one after it.
    Ids lacking, over, over_beside;
    for (const Row& row : rows["completion"]) {
        int32_t excess[3], lack = -1;
        for (int32_t c = 0; c < 3; ++c) {
            excess[c] = int32_t(std::count(row.tokens.begin(), row.tokens.end(), 9 + c)) -
                        (row.tokens[size_t(c)] % 3 + 1);
            if (excess[c] < 0) lack = c;
        }
        for (int32_t c = 0; c < 3; ++c)
            for (int32_t i = 0; i < excess[c]; ++i)
                lack < 0 ? over.push_back(c) : over_beside.push_back((c - lack + 3) % 3);
        if (lack >= 0) lacking.push_back(lack);
    }
    EXPECT_TRUE(uniform(over, 0, 3));
    EXPECT_TRUE(uniform(over_beside, 1, 2));
    EXPECT_TRUE(uniform(lacking, 0, 3));
    EXPECT_FALSE(uniform(lacking, 0, 2)) << "the check can fail";
}

TEST(Task, NeighboursAreIndependent) {
    const int n = 20000;
    const Sequences s = make_task("parity", {100}, 1)->next(n);
    int changes = 0;
    for (size_t i = 1; i < s.tokens.size(); ++i) changes += s.tokens[i] != s.tokens[i - 1];
    EXPECT_LT(std::abs(changes - n / 2), 2.5 * std::sqrt(n));  // five standard deviations
}

// Published numbers rest on these very sequences.
TEST(Task, ParityIsTheBitsThemselves) {
    const auto key = kernels::philox_key(7, kernels::Draw::task);
    for (const auto& [stream, flag] : {std::pair{TaskStream::training, uint64_t(0)},
                                       std::pair{TaskStream::evaluation, uint64_t(1) << 63}}) {
        const std::vector<Row> rows = draw("parity", 37, 5, 7, stream);
        for (uint64_t i = 0; i < 5; ++i)
            for (uint32_t t = 0; t < 37; ++t)
                EXPECT_EQ(rows[i].tokens[t], int32_t(kernels::philox_bits(key, i | flag, t) & 1));
    }
}

TEST(Task, SequencesDependOnSeedAndIndexOnly) {
    for (const Facts& task : kFacts) {
        SCOPED_TRACE(task.name);
        const std::vector<Row> five = draw(task.name, 64, 5);
        const auto source = make_task(task.name, {64}, 1);
        source->seek({0, 3});
        const Sequences two = source->next(2 * 64);
        EXPECT_EQ(source->position(), (Position{0, 5}));
        EXPECT_EQ(two.indices, (std::vector<int64_t>{3, 4}));
        for (size_t i = 0; i < 2; ++i) {
            EXPECT_EQ(rows_of(two)[i].tokens, five[3 + i].tokens);
            EXPECT_EQ(rows_of(two)[i].labels, five[3 + i].labels);
        }
        EXPECT_NE(five[0].tokens, five[1].tokens);
        EXPECT_NE(draw(task.name, 64, 1, 2)[0].tokens, five[0].tokens);
    }
}

TEST(Task, AShorterSequenceBeginsTheLongerOne) {
    for (const char* name : {"parity", "mod-sum", "swap-s5", "pointer-chase"}) {
        const std::vector<Row> longer = draw(name, 100, 30);
        for (const int length : {9, 37, 99}) {
            const std::vector<Row> shorter = draw(name, length, 30);
            for (size_t i = 0; i < 30; ++i) {
                Row begin = longer[i];
                begin.tokens.resize(size_t(length));
                begin.labels.resize(size_t(length));
                EXPECT_EQ(shorter[i].tokens, begin.tokens) << name;
                EXPECT_EQ(shorter[i].labels, begin.labels) << name;
            }
        }
    }
}

TEST(Task, LengthsDifferInTheScratchOnly) {
    for (const auto& [name, head] : {std::pair{"completion", 12}, std::pair{"memory", 1}}) {
        const std::vector<Row> longer = draw(name, 269, 200);
        for (const int length : {head + 1, head + 2, 37}) {
            const std::vector<Row> shorter = draw(name, length, 200);
            for (size_t i = 0; i < 200; ++i) {
                Row cut = longer[i];  // a piece of its scratch taken out
                cut.tokens.erase(cut.tokens.begin() + length - 1, cut.tokens.end() - 1);
                cut.labels.erase(cut.labels.begin() + length - 1, cut.labels.end() - 1);
                EXPECT_EQ(shorter[i].tokens, cut.tokens) << name;
                EXPECT_EQ(shorter[i].labels, cut.labels) << name;
            }
        }
    }
}

TEST(Task, EvaluationAndTrainingNeverMeet) {
    const int n = 500;
    for (const Facts& task : kFacts) {
        std::set<Ids> seen;
        for (const TaskStream stream : {TaskStream::training, TaskStream::evaluation})
            for (const Row& row : draw(task.name, 64, n, 1, stream)) seen.insert(row.tokens);
        // By chance: 2^19 pairs over 8! * 8! * 8 = 2^33.6 of pointer-chase, which has the fewest.
        EXPECT_EQ(seen.size(), size_t(2 * n)) << task.name;
    }
}

TEST(Task, LengthsOfAListAreDrawnByIndex) {
    const int64_t budget = 100000;
    const std::vector<int> list = {17, 33, 65};
    for (const Facts& task : kFacts) {
        SCOPED_TRACE(task.name);
        const auto source = make_task(task.name, list, 1);
        const Sequences all = source->next(budget);
        Ids which;
        for (const int32_t length : all.lengths)
            which.push_back(int32_t(std::find(list.begin(), list.end(), length) - list.begin()));
        EXPECT_TRUE(uniform(which, 0, 3));
        // What a sequence holds is what it holds where all have its length.
        const std::vector<Row> rows = rows_of(all);
        for (const int length : list) {
            const std::vector<Row> alone = draw(task.name, length, 40);
            for (size_t i = 0; i < 40; ++i)
                if (all.lengths[i] == length) {
                    EXPECT_EQ(rows[i].tokens, alone[i].tokens);
                    EXPECT_EQ(rows[i].labels, alone[i].labels);
                }
        }
        source->seek({0, 30});
        const Sequences later = source->next(400);
        EXPECT_TRUE(
            std::equal(later.lengths.begin(), later.lengths.end(), all.lengths.begin() + 30));
        EXPECT_NE(make_task(task.name, list, 2)->next(budget).lengths, all.lengths);
        EXPECT_NE(make_task(task.name, list, 1, TaskStream::evaluation)->next(budget).lengths,
                  all.lengths);
    }
}

TEST(Task, ALengthTellsNothingOfWhatIsInside) {
    std::map<size_t, Ids> first;
    for (const Row& row : rows_of(make_task("mod-sum", {5, 6, 7}, 1)->next(50000)))
        first[row.tokens.size()].push_back(row.tokens[0]);
    EXPECT_EQ(first.size(), 3u);
    for (const auto& [length, tokens] : first) EXPECT_TRUE(uniform(tokens, 0, 5)) << length;
}

TEST(Task, AsManyWholeSequencesAsFit) {
    const auto source = make_task("parity", {3, 10, 37}, 1);
    const Ids lengths = make_task("parity", {3, 10, 37}, 1)->next(30000).lengths;
    size_t done = 0;
    for (int64_t budget = 37; budget < 200; ++budget) {
        const Sequences s = source->next(budget);
        const int64_t total = std::accumulate(s.lengths.begin(), s.lengths.end(), int64_t(0));
        EXPECT_EQ(int64_t(s.tokens.size()), total);
        EXPECT_LE(total, budget);
        for (const int32_t length : s.lengths) EXPECT_EQ(length, lengths.at(done++));
        EXPECT_GT(total + lengths.at(done), budget);
    }
    const size_t at = size_t(std::find(lengths.begin(), lengths.end(), 37) - lengths.begin());
    source->seek({0, int64_t(at)});
    EXPECT_TRUE(
        throws(ErrorKind::usage, {"37 tokens", "36 tokens per step"}, [&] { source->next(36); }));
    EXPECT_EQ(source->position(), (Position{0, int64_t(at)}));
}

TEST(Task, BadSettingsAreNamed) {
    EXPECT_TRUE(throws(ErrorKind::usage, {"\"party\"", "known tasks: parity, mod-sum, swap-s5"},
                       [] { make_task("party", {10}, 1); }));
    for (const Facts& task : kFacts) {
        EXPECT_EQ(find_task(task.name).shortest(), task.shortest);
        const std::string shortest = "at least " + std::to_string(task.shortest),
                          length = "is " + std::to_string(task.shortest - 1);
        EXPECT_TRUE(throws(ErrorKind::usage, {task.name, shortest.c_str(), length.c_str()}, [&] {
            make_task(task.name, {100, task.shortest - 1}, 1);
        }));
        EXPECT_TRUE(throws(ErrorKind::usage, {task.name, "no length"},
                           [&] { make_task(task.name, {}, 1); }));
    }
    const auto source = make_task("parity", {10}, 1);
    EXPECT_TRUE(
        throws(ErrorKind::usage, {"10 tokens", "9 tokens per step"}, [&] { source->next(9); }));
    for (const Position& p : {Position{1, 0}, Position{0, -1}})
        EXPECT_TRUE(throws(ErrorKind::bad_file, {"generated task"}, [&] { source->seek(p); }));
}

}  // namespace
}  // namespace fbt::tests
