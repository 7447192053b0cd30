// fbt eval: loss of every pass on validation data; of a task also accuracy beyond its length.
#include <algorithm>
#include <cmath>
#include <memory>

#include "apps/command.h"
#include "apps/report.h"
#include "apps/run_folder.h"

namespace fbt::apps {
namespace {

namespace core = model::core;
using nlohmann::json;
using tensor::Error;
using tensor::ErrorKind;

class Eval {
  public:
    explicit Eval(CLI::App& app);
    int run();

  private:
    json print_passes(Console& console, const Corpus& corpus, const PassReport& report) const;
    json print_lengths(Console& console, core::Model& model, const Corpus& corpus) const;

    Settings settings_;
    Machine machine_;
    std::string checkpoint_, data_, task_;
    std::vector<int> lengths_;
    int passes_ = 3, context_ = 0;
    int64_t sequences_ = 0, tokens_per_batch_ = 0;
    uint64_t seed_ = 1;
};

constexpr int64_t kTaskSequences = 256;
constexpr int64_t kDecodedTokens = 1 << 16;  // at once: keys and values of all of them are kept

Eval::Eval(CLI::App& app) {
    Settings& s = settings_;
    s.add("checkpoint", &checkpoint_,
          "a run (its newest checkpoint), or one step_... folder of it");
    s.add("data", &data_, "data folder; without --data and --task, the run's own");
    s.add("task", &task_, "generated task instead of data: " + task_list());
    s.add("passes", &passes_, "passes 1 to this number").at_least(1).at_most(1000000);
    s.add("context", &context_, "length of the sequences, in tokens; 0: as in training")
        .at_least(0)
        .at_most(1 << 24);
    s.add("lengths", &lengths_, "at which a task is decoded; none: the run's test lengths")
        .at_least(1)
        .at_most(1 << 24);
    s.add("sequences", &sequences_, "how many; 0: all validation data, or 256 of a task")
        .at_least(0);
    s.add("tokens_per_batch", &tokens_per_batch_, "at most; 0: 4096, or one sequence")
        .at_least(0)
        .at_most(1 << 24);
    s.add("seed", &seed_, "of the permutations and of a task's sequences");
    machine_.declare(s);
    s.bind(app);
}

std::string cell(const char* pattern, double x) { return std::isnan(x) ? "-" : format(pattern, x); }

json Eval::print_passes(Console& console, const Corpus& corpus, const PassReport& report) const {
    const bool text = corpus.is_text();
    Table table({"pass", "loss", text ? "bits/byte" : "accuracy %", "change", "permuted", "mean"});
    json rows = json::array();
    for (const core::PassResult& pass : report.passes) {
        const double score = text ? report.bits_per_byte(pass) : 100 * pass.accuracy;
        table.row({std::to_string(pass.pass), cell("%.4f", pass.loss),
                   cell(text ? "%.4f" : "%.2f", score), cell("%.2e", pass.change),
                   cell("%.4f", pass.permuted), cell("%.4f", pass.mean)});
        json row = {{"pass", pass.pass},         {"loss", pass.loss},
                    {"accuracy", pass.accuracy}, {"change", pass.change},
                    {"permuted", pass.permuted}, {"mean", pass.mean},
                    {"targets", pass.targets}};
        if (text) row["bits_per_byte"] = report.bits_per_byte(pass);
        rows.push_back(row);
    }
    console.print(table.text());
    return rows;
}

// Decoded one position at a time: does what was learnt at one length hold at longer ones?
json Eval::print_lengths(Console& console, core::Model& model, const Corpus& corpus) const {
    Table table({"length", "standard all %", "standard last %", "soft all %", "soft last %"});
    json rows = json::array();
    const int64_t sequences = sequences_ > 0 ? sequences_ : kTaskSequences;
    for (int length : lengths_) {
        std::vector<std::string> cells = {std::to_string(length)};
        for (core::Mode mode : {core::Mode::standard, core::Mode::soft}) {
            const core::Accuracy accuracy =
                core::decode_accuracy(model,
                                      corpus.validation({length}, seed_, sequences,
                                                        std::max<int64_t>(kDecodedTokens, length)),
                                      mode);
            cells.push_back(format("%.2f", 100 * accuracy.all));
            cells.push_back(format("%.2f", 100 * accuracy.last));
            rows.push_back({{"length", length},
                            {"mode", core::to_string(mode)},
                            {"accuracy", accuracy.all},
                            {"accuracy_last", accuracy.last},
                            {"targets", accuracy.targets},
                            {"sequences", accuracy.sequences}});
        }
        table.row(cells);
    }
    console.print("\ndecoded step by step: accuracy at all labels, and at each last one\n" +
                  table.text());
    return rows;
}

int Eval::run() {
    settings_.take_flags();
    Console console(machine_.json);
    if (checkpoint_.empty()) throw Error(ErrorKind::usage, "--checkpoint RUN is needed");
    const tensor::DType dtype = machine_.checked_dtype();
    tensor::Context context = machine_.context();
    const Loaded loaded = load(checkpoint_, context, dtype);
    if (data_.empty() && task_.empty()) {
        data_ = loaded.data;
        task_ = loaded.task;
    }
    const Corpus corpus(data_, task_);
    const core::Config& config = loaded.model->config();
    if (corpus.vocab_size() != config.vocab_size)
        throw Error(ErrorKind::usage,
                    "the data's vocabulary has " + std::to_string(corpus.vocab_size()) +
                        " tokens, but the model's has " + std::to_string(config.vocab_size));

    const std::vector<int> lengths = context_ > 0 ? std::vector{context_} : loaded.lengths;
    corpus.check_lengths(lengths);
    if (!lengths_.empty() && corpus.is_text())
        throw Error(ErrorKind::usage, "--lengths is for tasks; --context is the length of text");
    if (lengths_.empty()) lengths_ = loaded.test_lengths;
    corpus.check_lengths(lengths_);
    const int64_t sequences = sequences_ == 0 && !corpus.is_text() ? kTaskSequences : sequences_;
    const int64_t tokens =
        tokens_per_batch_ > 0
            ? tokens_per_batch_
            : std::max<int64_t>(4096, *std::max_element(lengths.begin(), lengths.end()));
    console.line(loaded.checkpoint + ": sequences of " + list_text(lengths) + " tokens");
    const PassReport report =
        report_passes(*loaded.model, corpus, corpus.validation(lengths, seed_, sequences, tokens),
                      passes_, seed_, true);
    json result = {{"checkpoint", loaded.checkpoint}, {"length", list_json(lengths)}};
    result["passes"] = print_passes(console, corpus, report);
    if (!corpus.is_text()) result["lengths"] = print_lengths(console, *loaded.model, corpus);
    console.result(result);
    return kDone;
}

}  // namespace

Run add_eval(CLI::App& app) {
    CLI::App* command =
        app.add_subcommand("eval", "Loss of every pass, and what disturbed states do to it");
    auto eval = std::make_shared<Eval>(*command);
    return [eval] { return eval->run(); };
}

}  // namespace fbt::apps
