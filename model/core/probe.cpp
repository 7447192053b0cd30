#include "model/core/probe.h"

#include <linear.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "kernels/philox.h"
#include "model/core/decode.h"

namespace fbt::model::core {
namespace {

// Positions of the store that are in use at a time; a longer sequence has a group of its own.
constexpr int64_t kGroupPositions = 8192;
// Where the solver stops: the gradient's norm, against that at w = 0 and scaled down by the share
// of the rarer side, as liblinear does. Its own default is 0.01.
constexpr double kStop = 1e-4;

[[noreturn]] void refuse(const std::string& what) {
    throw tensor::Error(tensor::ErrorKind::usage, what);
}

// Collects rows of the residual stream by sequence.
class Streams {
  public:
    Streams(const Model& model, size_t sequences)
        : dim_(model.config().dim),
          streams_(model.config().layers + 1, std::vector<float>(sequences * dim_)) {}

    // Row rows[i] of every depth is that of sequence[i].
    void add(const std::vector<Tensor>& depths, const std::vector<int64_t>& rows,
             const std::vector<size_t>& sequence) {
        Context& context = depths[0].context();
        const int64_t n = int64_t(rows.size());
        const Tensor from = Tensor::from(context, rows, {n});
        for (size_t l = 0; l < depths.size(); ++l) {
            Tensor picked = Tensor::empty(context, {n, dim_}, depths[l].dtype());
            tensor::copy_rows(picked, {}, depths[l], from, n);
            const std::vector<double> values = picked.to_double();
            for (int64_t i = 0; i < n; ++i)
                std::copy_n(values.begin() + i * dim_, dim_,
                            streams_[l].begin() + int64_t(sequence[i]) * dim_);
        }
    }
    std::vector<std::vector<float>> take() { return std::move(streams_); }

  private:
    int64_t dim_;
    std::vector<std::vector<float>> streams_;
};

using Sequences = std::vector<std::vector<int32_t>>;  // tokens

// Every position of the sequences `group` plain, in one call.
void prefill_plain(Model& model, const Sequences& tokens, const std::vector<size_t>& group,
                   Streams& out) {
    auto store = std::make_shared<PagedStore>(model);
    auto spans = std::make_shared<SpanBatch>();
    std::vector<int32_t> packed;
    std::vector<int64_t> last;
    for (size_t s : group) {
        PagedStore::Pages pages;
        const int T = int(tokens[s].size());
        store->reserve(pages, 0, T);
        PagedStore::add_span(*spans, pages, 0, T);
        packed.insert(packed.end(), tokens[s].begin(), tokens[s].end());
        last.push_back(int64_t(packed.size()) - 1);
    }
    std::vector<Tensor> depths;
    advance(model, store, spans, packed, {}, &depths);
    out.add(depths, last, group);
}

// Soft decoding of the sequences `group`, of which the first positions are the prompt: one, or all
// but the last.
void decode_soft(Model& model, const Sequences& tokens, std::vector<size_t> group, Prefill prefill,
                 Streams& out) {
    Decoder decoder(model, Mode::soft);
    Sequences prompts;
    for (size_t s : group)
        prompts.emplace_back(tokens[s].begin(), prefill == Prefill::recurrent
                                                    ? tokens[s].begin() + 1
                                                    : tokens[s].end() - 1);
    std::vector<int> ids = decoder.prefill(prompts);
    std::vector<size_t> fed;  // tokens of each sequence, so far
    for (const std::vector<int32_t>& prompt : prompts) fed.push_back(prompt.size());
    while (!group.empty()) {
        std::vector<int32_t> next;
        std::vector<int64_t> done;  // rows of the sequences that end here
        std::vector<size_t> done_sequences;
        for (size_t i = 0; i < group.size(); ++i) {
            next.push_back(tokens[group[i]][fed[i]++]);
            if (fed[i] < tokens[group[i]].size()) continue;
            done.push_back(int64_t(i));
            done_sequences.push_back(group[i]);
        }
        std::vector<Tensor> depths;
        decoder.step(ids, next, done.empty() ? nullptr : &depths);
        if (done.empty()) continue;
        out.add(depths, done, done_sequences);
        for (size_t k = done.size(); k-- > 0;) {
            decoder.drop(ids[done[k]]);
            ids.erase(ids.begin() + done[k]);
            fed.erase(fed.begin() + done[k]);
            group.erase(group.begin() + done[k]);
        }
    }
}

// The fold of each row.
std::vector<int> fold_of_rows(const std::vector<int64_t>& groups, int folds, uint64_t seed) {
    const auto key = kernels::philox_key(seed, kernels::Draw::probe);
    std::set<std::pair<uint32_t, int64_t>> order;  // drawn number, group
    const auto entry = [&](int64_t g) {
        return std::pair(kernels::philox_bits(key, uint64_t(g)), g);
    };
    for (int64_t g : groups) order.insert(entry(g));
    if (int64_t(order.size()) < folds)
        refuse("there are " + std::to_string(order.size()) + " groups for " +
               std::to_string(folds) + " folds; needed at least one group a fold");
    std::map<int64_t, int> fold;
    int next = 0;
    for (const auto& [bits, group] : order) fold[group] = next++ % folds;
    std::vector<int> out;
    for (int64_t g : groups) out.push_back(fold[g]);
    return out;
}

// Rows as liblinear takes them: (1-based column, value) pairs up to column -1, standardised by the
// training rows, with a last column of ones.
std::vector<feature_node> standardised(const std::vector<float>& features, int64_t width,
                                       const std::vector<char>& training) {
    const int64_t R = int64_t(training.size());
    std::vector<double> mean(width, 0), scale(width, 0);
    const double n = double(std::count(training.begin(), training.end(), 1));
    const auto over_training = [&](auto&& f) {
        for (int64_t r = 0; r < R; ++r)
            if (training[r])
                for (int64_t d = 0; d < width; ++d) f(d, double(features[r * width + d]));
    };
    // Floats add up exactly in double as long as they are equal and fewer than 2^29, so a constant
    // column's deviation is exactly 0.
    over_training([&](int64_t d, double x) { mean[d] += x; });
    for (double& m : mean) m /= n;
    over_training([&](int64_t d, double x) { scale[d] += (x - mean[d]) * (x - mean[d]); });
    for (double& s : scale) s = s > 0 ? 1 / std::sqrt(s / n) : 0;

    std::vector<feature_node> nodes;
    nodes.reserve(R * (width + 2));
    for (int64_t r = 0; r < R; ++r) {
        for (int64_t d = 0; d < width; ++d)
            nodes.push_back({int(d + 1), (double(features[r * width + d]) - mean[d]) * scale[d]});
        nodes.push_back({int(width + 1), 1});
        nodes.push_back({-1, 0});
    }
    return nodes;
}

}  // namespace

std::vector<std::vector<float>> query_streams(Model& model, const Batch& batch, Prefill prefill) {
    const size_t S = batch.lengths.size();
    Sequences tokens;
    int64_t row = 0;
    for (size_t s = 0; s < S; ++s) {
        const int64_t T = batch.lengths[s];
        if (T < 1)
            refuse("sequence " + std::to_string(s) + " is empty; its query needs a position");
        tokens.emplace_back(batch.tokens.begin() + row, batch.tokens.begin() + row + T);
        row += T;
    }
    Streams out(model, S);
    std::vector<size_t> plain, fused;  // groups: sequences that are computed together
    int64_t positions = 0;
    const auto compute = [&] {
        if (!plain.empty()) prefill_plain(model, tokens, plain, out);
        if (!fused.empty()) decode_soft(model, tokens, fused, prefill, out);
        plain.clear();
        fused.clear();
        positions = 0;
    };
    for (size_t s = 0; s < S; ++s) {
        const int64_t T = batch.lengths[s];
        const int64_t taken =
            (T + kernels::kKeyBlock - 1) / kernels::kKeyBlock * kernels::kKeyBlock;
        if (positions > 0 && positions + taken > kGroupPositions) compute();
        positions += taken;
        (prefill == Prefill::standard || T == 1 ? plain : fused).push_back(s);
    }
    compute();
    return out.take();
}

ProbeResult probe(const std::vector<float>& features, int64_t width,
                  const std::vector<int32_t>& labels, const std::vector<int64_t>& groups, double l2,
                  int folds, uint64_t seed) {
    const size_t R = labels.size();
    if (width < 1 || features.size() != R * size_t(width) || groups.size() != R)
        refuse("a probe has " + std::to_string(R) + " labels, " + std::to_string(groups.size()) +
               " groups and " + std::to_string(features.size()) + " features of width " +
               std::to_string(width) + "; needed a group and a row of features for each label");
    if (!(l2 > 0) || !std::isfinite(l2))
        refuse("l2 is " + std::to_string(l2) + ", needed a finite number above 0");
    if (folds < 2) refuse("folds is " + std::to_string(folds) + ", needed 2 or more");
    const std::vector<int> fold = fold_of_rows(groups, folds, seed);
    if (std::set<int32_t>(labels.begin(), labels.end()).size() < 2)
        refuse("all " + std::to_string(R) + " labels are " + std::to_string(labels[0]) +
               "; needed at least two classes");
    for (size_t i = 0; i < features.size(); ++i)
        if (!std::isfinite(features[i]))
            refuse("feature " + std::to_string(i % width) + " of row " + std::to_string(i / width) +
                   " is " + std::to_string(features[i]) + ", needed a finite number");

    set_print_string_function([](const char*) {});  // the library would print its progress
    ProbeResult result;
    int64_t right = 0;
    for (int k = 0; k < folds; ++k) {
        std::vector<char> training(R);
        for (size_t r = 0; r < R; ++r) training[r] = fold[r] != k;
        std::vector<feature_node> nodes = standardised(features, width, training);
        const auto node_row = [&](size_t r) { return nodes.data() + r * size_t(width + 2); };
        std::vector<feature_node*> x;
        std::vector<double> y;
        for (size_t r = 0; r < R; ++r)
            if (training[r]) {
                x.push_back(node_row(r));
                y.push_back(labels[r]);
            }
        ::problem problem{};
        problem.l = int(x.size());
        problem.n = int(width + 1);
        problem.y = y.data();
        problem.x = x.data();
        problem.bias = -1;  // the column of ones is ours
        ::parameter parameter{};
        parameter.solver_type = L2R_LR;
        parameter.eps = kStop;
        parameter.C = 1 / l2;
#if LIBLINEAR_VERSION >= 240
        parameter.regularize_bias = 1;
#endif
        const auto release = [](::model* m) { free_and_destroy_model(&m); };
        const std::unique_ptr<::model, decltype(release)> trained(train(&problem, &parameter));
        int64_t rows = 0, fold_right = 0;
        for (size_t r = 0; r < R; ++r)
            if (!training[r]) {
                ++rows;
                fold_right += int32_t(predict(trained.get(), node_row(r))) == labels[r];
            }
        right += fold_right;
        result.folds.push_back(double(fold_right) / double(rows));
    }
    result.accuracy = double(right) / double(R);
    return result;
}

}  // namespace fbt::model::core
