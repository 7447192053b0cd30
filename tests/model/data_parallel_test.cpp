// Training by several ranks: here the ranks are threads of this process.
#include "model/engine/data_parallel.h"

#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <limits>
#include <thread>

#include "model/core/flops.h"
#include "model/data/tasks.h"
#include "model/engine/trainer.h"
#include "tensor/safetensors.h"
#include "tests/compare.h"
#include "tests/data/files.h"
#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

using namespace model::core;
using namespace model::engine;
using tensor::DType;

// What the ranks of one job share.
struct Job {
    explicit Job(int n) : size(n), meeting(n), tensors(size_t(n)) {}
    int size;
    std::barrier<> meeting;
    std::vector<Tensor> tensors;
};

// Collectives whose result comes at wait(), as late as it may, and whose other pieces become NaN
// where they are unspecified. Sums are in the order of the ranks.
class ThreadCommunicator : public Communicator {
  public:
    ThreadCommunicator(Job& job, int rank) : job_(job) {
        rank_ = rank;
        size_ = job.size;
    }
    Ticket all_reduce(const Tensor& x) override {
        return later([this, x] { sum(x, 0, x.numel()); }, x, "all_reduce");
    }
    Ticket reduce_scatter(const Tensor& x, const std::vector<int64_t>& counts) override {
        return later(
            [this, x, counts] {
                int64_t first = 0, end = 0;
                for (int r = 0; r <= rank_; ++r) {
                    first = end;
                    end += counts[size_t(r)];
                }
                sum(x, first, end);
            },
            x, "reduce_scatter");
    }
    Ticket all_gather(const Tensor& x, const std::vector<int64_t>& counts) override {
        return later(
            [this, x, counts] {
                meet(x);
                size_t at = 0;
                const size_t width = size_t(tensor::size_of(x.dtype()));
                for (int r = 0; r < size_; ++r) {
                    const size_t n = size_t(counts[size_t(r)]) * width;
                    if (r != rank_)
                        std::memcpy(x.raw() + at, job_.tensors[size_t(r)].raw() + at, n);
                    at += n;
                }
                job_.meeting.arrive_and_wait();
            },
            x, "all_gather");
    }
    Ticket broadcast(const Tensor& x, int root) override {
        return later(
            [this, x, root] {
                meet(x);
                if (rank_ != root)
                    std::memcpy(x.raw(), job_.tensors[size_t(root)].raw(), x.bytes());
                job_.meeting.arrive_and_wait();
            },
            x, "broadcast");
    }
    void wait(Ticket ticket) override {
        for (; done_ < ticket; ++done_) queue_[size_t(done_)]();
    }

    std::vector<std::string> log;  // ops in their order

  private:
    Ticket later(std::function<void()> f, const Tensor& x, const char* op) {
        log.push_back(std::string(op) + " " + std::to_string(x.numel()));
        queue_.push_back(std::move(f));
        return Ticket(queue_.size());
    }
    void meet(const Tensor& x) {
        job_.tensors[size_t(rank_)] = x;
        job_.meeting.arrive_and_wait();
    }
    template <class T>
    void sum_as(const Tensor& x, int64_t first, int64_t end) {
        std::vector<T> sums(size_t(x.numel()), std::numeric_limits<T>::quiet_NaN());
        for (int64_t i = first; i < end; ++i) {
            T s = job_.tensors[0].data<T>()[i];
            for (int r = 1; r < size_; ++r) s += job_.tensors[size_t(r)].data<T>()[i];
            sums[size_t(i)] = s;
        }
        job_.meeting.arrive_and_wait();
        std::memcpy(x.raw(), sums.data(), x.bytes());
    }
    void sum(const Tensor& x, int64_t first, int64_t end) {
        meet(x);
        if (x.dtype() == DType::f64)
            sum_as<double>(x, first, end);
        else
            sum_as<float>(x, first, end);
    }

    Job& job_;
    std::vector<std::function<void()>> queue_;
    Ticket done_ = 0;
};

// Runs f(rank, communicator) as ranks 0..n-1 of a job.
void run_ranks(int n,
               const std::function<void(int, const std::shared_ptr<ThreadCommunicator>&)>& f) {
    Job job(n);
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r)
        threads.emplace_back([&, r] { f(r, std::make_shared<ThreadCommunicator>(job, r)); });
    for (std::thread& t : threads) t.join();
}

Config tiny() {
    Config config = small_config();
    config.vocab_size = 4;
    return config;
}

TrainConfig settings(int zero) {
    TrainConfig t;
    t.steps = 8;
    t.tokens_per_step = 200;  // sequences of 5 to 16 tokens
    t.schedule = PassSchedule::parse("100:1@1+2@1+3@1");
    t.learning_rate = 1e-2;
    t.warmup = 2;
    t.zero = zero;
    return t;
}

struct Trained {
    std::vector<double> losses;              // of every step and pass, and the norms
    std::vector<std::vector<double>> state;  // parameters and moments, by name
    double spread = 0;
};

std::vector<std::vector<double>> state_of(const std::string& run) {
    std::vector<std::vector<double>> out;
    for (const char* file : {"/model.safetensors", "/optimizer.safetensors"}) {
        const auto f = tensor::SafetensorsFile::open(find_checkpoint(run) + file);
        for (const auto& [name, entry] : f.entries())
            if (entry.dtype != DType::i64) out.push_back(f.read<double>(name));
    }
    return out;
}

// Trains up to step `end`, from the newest checkpoint in `run` if there is one, and saves there.
Trained train(const std::string& run, int ranks, int zero, DType dtype, int64_t end) {
    Trained out;
    run_ranks(ranks, [&](int rank, const std::shared_ptr<ThreadCommunicator>& communicator) {
        tensor::Context context(dtype == DType::f64 ? "ref" : "cpu", 1);
        const auto source = model::data::make_task("parity", {5, 9, 16}, 1);
        Model model(context, tiny(), dtype);
        Trainer trainer(model, *source, settings(zero), rank % 2 == 1,  // which changes no bit
                        communicator);
        if (const auto checkpoint = newest_checkpoint(run)) trainer.load(*checkpoint);
        while (trainer.step() < end) {
            const StepReport report = trainer.advance();
            if (rank > 0) continue;
            out.losses.push_back(report.total);
            out.losses.push_back(report.norm);
            for (double loss : report.pass_loss) out.losses.push_back(loss);
            out.spread = std::max(out.spread, report.spread);
        }
        trainer.save(run, {{"model", to_json(tiny())}, {"train", nlohmann::json::object()}}, 9);
    });
    out.state = state_of(run);
    return out;
}

testing::AssertionResult same_state(const Trained& a, const Trained& b) {
    for (size_t i = 0; i < a.state.size(); ++i)
        if (const auto same = same_bits(a.state[i], b.state.at(i)); !same) return same;
    return same_bits(a.losses, b.losses);
}

constexpr int64_t kSteps = 8;

// In double, what the numbers of ranks differ by is the order of sums alone, some 1e-16 of each
// gradient; eight updates of Adam, which divides by gradients' sizes, leave it far below 1e-10.
// Forty ranks are more than a batch has sequences.
TEST(DataParallel, AnyNumberOfRanksTrainsTheSameModel) {
    const TemporaryFolder folder;
    const Trained one = train(folder / "1", 1, 1, DType::f64, kSteps);
    EXPECT_EQ(one.spread, 0);
    for (int ranks : {2, 3, 4, 40})
        for (int zero : {0, 1}) {
            const Trained many =
                train(folder / (std::to_string(ranks) + "_" + std::to_string(zero)), ranks, zero,
                      DType::f64, kSteps);
            EXPECT_TRUE(close(many.losses, one.losses, 1e-10, 1e-10)) << ranks << " " << zero;
            ASSERT_EQ(many.state.size(), one.state.size());
            for (size_t i = 0; i < one.state.size(); ++i)
                EXPECT_TRUE(close(many.state[i], one.state[i], 1e-8, 1e-8)) << ranks << " " << i;
            EXPECT_GT(many.spread, 0);
        }
}

// ZeRO-1 changes where numbers are, not which; and the same number of ranks gives the same bits.
TEST(DataParallel, ShardingChangesNoBit) {
    for (DType dtype : {DType::f32, DType::bf16}) {
        const TemporaryFolder folder;
        const Trained plain = train(folder / "plain", 3, 0, dtype, kSteps);
        EXPECT_TRUE(same_state(train(folder / "sharded", 3, 1, dtype, kSteps), plain));
        EXPECT_TRUE(same_state(train(folder / "again", 3, 1, dtype, kSteps), plain));
    }
}

// A checkpoint holds the whole state: another number of ranks goes on from it, and the same number
// with the same bits.
TEST(DataParallel, ResumesOnAnyNumberOfRanks) {
    const TemporaryFolder folder;
    const Trained whole = train(folder / "whole", 2, 1, DType::f32, kSteps);
    train(folder / "cut", 2, 1, DType::f32, 3);
    const Trained rest = train(folder / "cut", 2, 0, DType::f32, kSteps);
    EXPECT_TRUE(same_bits(rest.state[0], whole.state[0]));

    const Trained one = train(folder / "one", 1, 1, DType::f64, kSteps);
    train(folder / "hop", 2, 1, DType::f64, 2);
    train(folder / "hop", 4, 1, DType::f64, 5);
    const Trained last = train(folder / "hop", 1, 1, DType::f64, kSteps);
    for (size_t i = 0; i < one.state.size(); ++i)
        EXPECT_TRUE(close(last.state[i], one.state[i], 1e-8, 1e-8)) << i;
}

// Sums travel while the way back is still under way, in the same order on every rank, although a
// rank whose prefixes cover its sequences never reaches the fusion.
TEST(DataParallel, BucketsTravelDuringTheWayBack) {
    std::vector<std::vector<std::string>> logs(2);
    std::vector<std::vector<size_t>> sent(2);  // at each parameter's completion
    run_ranks(2, [&](int rank, const std::shared_ptr<ThreadCommunicator>& communicator) {
        tensor::Context context("cpu", 1);
        Model model(context, small_config(), DType::f32);
        model.parameters().initialise(context, DType::f32, 1, true);
        DataParallel parallel(model.parameters(), communicator, true, 1);
        const Batch batch = random_batch({7, 12}, 23, 1);
        PassPlan plan;
        plan.passes = 2;
        plan.plain = {rank == 0 ? std::vector<int32_t>{7, 12} : std::vector<int32_t>{2, 3}};
        autograd::Tape tape(true);
        objective(model, tape, batch, plan, {});
        parallel.begin(tape);
        const size_t at_once = communicator->log.size();
        EXPECT_EQ(at_once > 0, rank == 0);  // the fusion, which is not reached here
        tape.backward({}, [&](autograd::Weight& w) {
            parallel.ready(w);
            sent[size_t(rank)].push_back(communicator->log.size());
        });
        const size_t all = communicator->log.size();
        parallel.finish();
        EXPECT_EQ(communicator->log.size(), all + 1);  // who was reached
        EXPECT_TRUE(model.parameters().at("feedback.state.weight").weight().reached);
        logs[size_t(rank)] = communicator->log;
    });
    EXPECT_EQ(logs[0], logs[1]);
    for (const auto& counts : sent) {
        ASSERT_GT(counts.size(), 20u);
        EXPECT_GE(counts[counts.size() / 2], counts.back() / 3);
    }
}

// The deal is by work, and its spread is what the heaviest rank has above the mean.
TEST(DataParallel, SharesAreDealtByTheWorkOfAllPasses) {
    const Config config = small_config();
    const Batch batch = random_batch({30, 30, 60, 60}, 23, 1);
    PassPlan plan;
    plan.passes = 2;
    plan.plain = {{1, 30, 1, 60}};  // the first and the third are computed twice
    const Share a = share_of(config, batch, plan, 0, 2), b = share_of(config, batch, plan, 1, 2);
    EXPECT_EQ(a.sequences, (std::vector<size_t>{2}));
    EXPECT_EQ(b.sequences, (std::vector<size_t>{0, 1, 3}));
    const double heavy = pass_flops(config, 0, 60) + pass_flops(config, 1, 60);
    const double rest = 2 * pass_flops(config, 0, 30) + pass_flops(config, 1, 30) +
                        pass_flops(config, 0, 60) + 0 * heavy;
    EXPECT_NEAR(a.spread, std::max(heavy, rest) / ((heavy + rest) / 2) - 1, 1e-12);
    EXPECT_EQ(a.spread, b.spread);
    const Share five = share_of(config, batch, plan, 4, 5);
    EXPECT_TRUE(five.sequences.empty());
}

// Costs of updates are even among owners; masters and moments are only there.
TEST(DataParallel, OwnersAreDealtWholeParametersByCost) {
    run_ranks(2, [&](int rank, const std::shared_ptr<ThreadCommunicator>& communicator) {
        tensor::Context context("cpu", 1);
        Model model(context, small_config(), DType::bf16);
        model.parameters().initialise(context, DType::bf16, 1, true);
        const DataParallel parallel(model.parameters(), communicator, true);
        const std::vector<int> owner = owners(model.parameters(), 2, true);
        const nn::AdamW optimizer(model.parameters(), {});
        int64_t owned = 0, all = 0;
        for (size_t i = 0; i < owner.size(); ++i) {
            const nn::Parameter& p = model.parameters().all()[i];
            const bool mine = owner[i] == rank || owner[i] == kEveryRank;
            EXPECT_EQ(p.owned(), mine) << p.name();
            EXPECT_EQ(optimizer.states()[i].m.defined(), mine) << p.name();
            EXPECT_EQ(owner[i] == kEveryRank, p.role() == nn::Role::gain) << p.name();
            const Tensor& value = p.weight().value;
            EXPECT_EQ(value.defined(), mine || p.role() == nn::Role::embedding) << p.name();
            EXPECT_EQ(value.dtype() == DType::bf16, !mine && p.role() == nn::Role::embedding);
            const int64_t n = tensor::numel_of(p.shape());
            owned += mine ? n : 0;
            all += n;
        }
        EXPECT_NEAR(double(owned) / double(all), 0.5, 0.02);
    });
}

}  // namespace
}  // namespace fbt::tests
