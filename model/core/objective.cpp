#include "model/core/objective.h"

#include "kernels/philox.h"
#include "model/core/pass_rows.h"

namespace fbt::model::core {
namespace {

// Pass 1's keys and values, kept for the later passes; and a later pass's store, joined from them.
class TrainingStore : public nn::KeyValueStore {
  public:
    explicit TrainingStore(int layers) : kept_(layers) {}
    nn::KeyValues prefix(int) override { return {}; }
    nn::KeyValues join(Tape&, int, const nn::KeyValues&, const nn::KeyValues& own) override {
        return own;  // whole sequences: the span's rows are the store
    }
    void keep(int layer, const nn::KeyValues& own) override { kept_[layer] = own; }
    const nn::KeyValues& kept(int layer) const { return kept_[layer]; }

  private:
    std::vector<nn::KeyValues> kept_;
};

class JoinedStore : public nn::KeyValueStore {
  public:
    JoinedStore(std::shared_ptr<TrainingStore> first, int64_t rows, Tensor src, Tensor dst,
                Tensor own)
        : first_(first), rows_(rows), src_(src), dst_(dst), own_(own) {}
    nn::KeyValues prefix(int layer) override { return first_->kept(layer); }
    nn::KeyValues join(Tape& tape, int, const nn::KeyValues& prefix,
                       const nn::KeyValues& own) override {
        return {autograd::join_rows(tape, rows_, prefix.k, src_, dst_, own.k, own_),
                autograd::join_rows(tape, rows_, prefix.v, src_, dst_, own.v, own_)};
    }
    void keep(int, const nn::KeyValues&) override {}

  private:
    std::shared_ptr<TrainingStore> first_;
    int64_t rows_;
    Tensor src_, dst_, own_;
};

template <class T>
Tensor upload(Context& context, const std::vector<T>& v) {
    return Tensor::from(context, v, {int64_t(v.size())});
}

// The part of `all` [N] that a pass computes, [rows.count].
template <class T>
std::vector<T> suffix(const std::vector<T>& all, const PassRows& whole, const PassRows& rows) {
    std::vector<T> out;
    for (size_t s = 0; s < rows.first.size(); ++s)
        for (int t = rows.first[s]; t < rows.length[s]; ++t) out.push_back(all[whole.row(s, t)]);
    return out;
}

}  // namespace

std::vector<std::vector<int32_t>> draw_prefixes(const Batch& batch, int passes, bool mixin,
                                                uint64_t seed, int64_t step) {
    std::vector<std::vector<int32_t>> plain(passes - 1);
    for (int k = 0; k < passes - 1; ++k) {
        const auto key = kernels::philox_key(seed, kernels::Draw::prefix, step, k);
        for (size_t s = 0; s < batch.lengths.size(); ++s)
            plain[k].push_back(
                !mixin ? 1
                       : 1 + int32_t(kernels::uniform_below(
                                 kernels::philox_bits(key, batch.indices[s]), batch.lengths[s])));
    }
    return plain;
}

Objective objective(Model& model, Tape& tape, const Batch& batch, const PassPlan& plan,
                    const ObjectiveConfig& config) {
    Context& context = model.context();
    const int K = plan.passes, D = model.config().dim;
    const size_t S = batch.lengths.size();
    const PassRows whole(batch.lengths, std::vector<int32_t>(S, 0));
    const DType a = tensor::accumulate_dtype(model.dtype());

    // Loss weights: a prefix position's term counts once for pass 1 and once for each feedback
    // pass that kept it plain.
    const int64_t counted = config.counted > 0 ? config.counted : batch.targets_counted();
    const double unit = counted > 0 ? 1.0 / double(counted) : 0;
    const double feedback = K > 1 ? unit * config.feedback_weight / (K - 1) : 0;
    std::vector<double> first_weight(batch.tokens.size(), unit);
    for (int k = 0; k < K - 1; ++k)
        for (size_t s = 0; s < S; ++s)
            for (int t = 0; t < plan.plain[k][s]; ++t) first_weight[whole.row(s, t)] += feedback;

    // Pass 1: whole sequences, plain.
    auto first_store = std::make_shared<TrainingStore>(model.config().layers);
    auto spans = std::make_shared<SpanBatch>();
    for (size_t s = 0; s < S; ++s) spans->add_contiguous(0, batch.lengths[s], whole.row(s, 0));
    spans->upload(context);
    const Var h1 = model.stack(tape, model.embed(tape, upload(context, batch.tokens)), spans,
                               first_store, config.recompute);
    const auto classify = [&](const Var& h, const std::vector<int32_t>& targets,
                              const std::vector<double>& weight) {
        return model.classify(tape, h, upload(context, targets),
                              Tensor::from_double(context, weight, {h.value().dim(0)}, a),
                              config.z_weight);
    };
    // What each pass computed itself. It is read after the last pass, so that the device never
    // waits for the host in between.
    std::vector<std::pair<PassRows, autograd::Classified>> terms;
    terms.emplace_back(whole, classify(h1, batch.targets, first_weight));

    Objective out;
    if (config.keep_states) out.states.push_back(h1.value());

    // Feedback passes: suffixes, fused with the pass before.
    Var previous;  // undefined: the pass before is pass 1
    PassRows previous_rows = whole;
    for (int k = 0; k < K - 1; ++k) {
        const PassRows rows(batch.lengths, plan.plain[k]);
        if (rows.count == 0) {  // everything plain: this pass is pass 1
            terms.emplace_back(rows, autograd::Classified{});
            if (config.keep_states) out.states.push_back(h1.value());
            previous = {};
            previous_rows = whole;
            continue;
        }
        const CarrySource from =
            carry_source(whole, previous_rows, !previous.defined(), rows, batch.indices);
        tensor::CarryNoise noise;
        if (!plan.noise.empty()) {
            std::vector<double> given;
            for (int64_t row : from.disturbed)
                given.insert(given.end(), plan.noise[k].begin() + row * D,
                             plan.noise[k].begin() + (row + 1) * D);
            noise.given = Tensor::from_double(context, given, {rows.count, D}, a);
        } else if (plan.jitter > 0) {
            noise.half_width = plan.jitter;
            noise.key = kernels::philox_key(plan.seed, kernels::Draw::jitter, plan.step, k);
            noise.sequence = upload(context, from.sequence);
            noise.position = upload(context, from.position);
        }
        const Var carried =
            autograd::carry(tape, h1, previous, upload(context, from.source), noise);
        const Var u = model.fuse(tape, carried, upload(context, suffix(batch.tokens, whole, rows)));

        auto joined = std::make_shared<SpanBatch>();
        std::vector<int64_t> src, dst;
        int64_t start = 0;
        for (size_t s = 0; s < S; ++s) {
            if (rows.first[s] == rows.length[s]) continue;
            for (int t = 0; t < rows.first[s]; ++t) {
                src.push_back(whole.row(s, t));
                dst.push_back(start + t);
            }
            joined->add_contiguous(rows.first[s], rows.length[s] - rows.first[s], start);
            start += rows.length[s];
        }
        joined->upload(context);
        const auto store = std::make_shared<JoinedStore>(first_store, start, upload(context, src),
                                                         upload(context, dst),
                                                         upload(context, joined->own_slots()));
        const Var h = model.stack(tape, u, joined, store, config.recompute);
        terms.emplace_back(rows, classify(h, suffix(batch.targets, whole, rows),
                                          std::vector<double>(rows.count, feedback)));
        if (config.keep_states) {
            Tensor full = Tensor::empty(context, h1.value().shape(), model.dtype());
            full.copy_from(h1.value());
            std::vector<int64_t> where;
            for (size_t s = 0; s < S; ++s)
                for (int t = rows.first[s]; t < rows.length[s]; ++t)
                    where.push_back(whole.row(s, t));
            tensor::copy_rows(full, upload(context, where), h.value(), {}, rows.count);
            out.states.push_back(full);
        }
        previous = h;
        previous_rows = rows;
    }

    // L_k from pass 1's terms of the prefixes and pass k's own terms of the suffixes.
    const auto host = [](const Tensor& t) {
        return t.defined() ? t.to_double() : std::vector<double>();
    };
    const std::vector<double> ce1 = host(terms[0].second.ce), lse1 = host(terms[0].second.lse);
    std::vector<double> pass_z;
    for (const auto& [rows, own] : terms) {
        const std::vector<double> ce = host(own.ce), lse = host(own.lse);
        double loss = 0, z = 0;
        for (size_t s = 0; s < S; ++s)
            for (int t = 0; t < batch.lengths[s]; ++t) {
                const int64_t n = whole.row(s, t);
                if (batch.targets[n] < 0) continue;
                const bool shared = t < rows.first[s];
                const double l = shared ? lse1[n] : lse[rows.row(s, t)];
                loss += shared ? ce1[n] : ce[rows.row(s, t)];
                z += l * l;
            }
        out.pass_loss.push_back(loss * unit);
        pass_z.push_back(z * unit);
    }
    const auto mix = [&](const std::vector<double>& x) {
        double sum = 0;
        for (int k = 1; k < K; ++k) sum += x[k];
        return x[0] + (K > 1 ? config.feedback_weight * sum / (K - 1) : 0);
    };
    out.total = mix(out.pass_loss) + config.z_weight * mix(pass_z);
    return out;
}

}  // namespace fbt::model::core
