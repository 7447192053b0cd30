#include "model/data/tasks.h"

#include <cmath>
#include <set>

#include "tests/data/files.h"

namespace fbt::tests {
namespace {

using namespace model::data;
using tensor::ErrorKind;

TEST(Task, ParityLabelsEveryPosition) {
    for (const int length : {1, 3, 37, 1601}) {
        const auto source = make_task("parity", length, 11);
        EXPECT_EQ(source->vocab_size(), 4);
        const Sequences s = source->next(3 * int64_t(length) + length / 2);
        ASSERT_EQ(s.lengths, std::vector<int32_t>(3, length));
        EXPECT_EQ(s.indices, (std::vector<int64_t>{0, 1, 2}));
        ASSERT_EQ(s.tokens.size(), size_t(3 * length));
        ASSERT_EQ(s.targets.size(), s.tokens.size());
        for (size_t row = 0; row < s.tokens.size(); row += size_t(length)) {
            int ones = 0;
            for (size_t t = row; t < row + size_t(length); ++t) {
                ASSERT_TRUE(s.tokens[t] == 0 || s.tokens[t] == 1);
                ones += s.tokens[t];
                EXPECT_EQ(s.targets[t], 2 + ones % 2);
            }
        }
    }
}

TEST(Task, BitsAreFair) {
    const int n = 20000;
    const Sequences s = make_task("parity", 100, 1)->next(n);
    int ones = 0, changes = 0;
    for (size_t i = 0; i < s.tokens.size(); ++i) {
        ones += s.tokens[i];
        changes += i > 0 && s.tokens[i] != s.tokens[i - 1];
    }
    // Five standard deviations of a binomial of n halves.
    EXPECT_LT(std::abs(ones - n / 2), 2.5 * std::sqrt(n));
    EXPECT_LT(std::abs(changes - n / 2), 2.5 * std::sqrt(n));
}

TEST(Task, SequencesDependOnSeedAndIndexOnly) {
    const auto a = make_task("parity", 64, 1), b = make_task("parity", 64, 1);
    const Sequences five = a->next(5 * 64);
    EXPECT_EQ(a->position(), (Position{0, 5}));
    b->seek({0, 3});
    const Sequences two = b->next(2 * 64);
    EXPECT_EQ(two.indices, (std::vector<int64_t>{3, 4}));
    EXPECT_TRUE(std::equal(two.tokens.begin(), two.tokens.end(), five.tokens.begin() + 3 * 64));
    EXPECT_TRUE(std::equal(two.targets.begin(), two.targets.end(), five.targets.begin() + 3 * 64));
    EXPECT_NE(make_task("parity", 64, 2)->next(5 * 64).tokens, five.tokens);
    // A longer sequence begins like the shorter one of the same index.
    const Sequences longer = make_task("parity", 100, 1)->next(100);
    EXPECT_TRUE(std::equal(longer.tokens.begin(), longer.tokens.begin() + 64, five.tokens.begin()));
}

TEST(Task, EvaluationAndTrainingNeverMeet) {
    const int length = 64, n = 500;
    std::set<std::vector<int32_t>> seen;
    for (const TaskStream stream : {TaskStream::training, TaskStream::evaluation}) {
        const Sequences s = make_task("parity", length, 1, stream)->next(n * length);
        for (int i = 0; i < n; ++i)
            seen.insert({s.tokens.begin() + i * length, s.tokens.begin() + (i + 1) * length});
    }
    EXPECT_EQ(seen.size(), size_t(2 * n));  // by chance: 2^20 pairs / 2^64
}

TEST(Task, BadSettingsAreNamed) {
    EXPECT_EQ(task_names(), std::vector<std::string>{"parity"});
    EXPECT_TRUE(throws(ErrorKind::usage, {"\"party\"", "known tasks: parity"},
                       [] { make_task("party", 10, 1); }));
    EXPECT_TRUE(throws(ErrorKind::usage, {"length is 0"}, [] { make_task("parity", 0, 1); }));
    const auto source = make_task("parity", 10, 1);
    EXPECT_TRUE(
        throws(ErrorKind::usage, {"10 tokens", "9 tokens per step"}, [&] { source->next(9); }));
    for (const Position& p : {Position{1, 0}, Position{0, -1}})
        EXPECT_TRUE(throws(ErrorKind::bad_file, {"generated task"}, [&] { source->seek(p); }));
}

}  // namespace
}  // namespace fbt::tests
