// fbt data: text files into token shards.
#include <memory>

#include "apps/command.h"
#include "model/data/shards.h"

namespace fbt::apps {
namespace {

using tensor::Error;
using tensor::ErrorKind;

struct Data {
    explicit Data(CLI::App& app) {
        app.add_option("--input", options.inputs,
                       "text files, each one document, or .jsonl with a \"text\" a line")
            ->type_name("FILE...");
        settings.add("tokenizer", &options.tokenizer,
                     "bytes, a SentencePiece .model, or sentencepiece:N to train one of N pieces");
        settings.add("out", &options.out, "new folder for the shards and meta.json");
        machine.declare(settings);
        settings.bind(app);
    }

    int run() {
        settings.take_flags();
        machine.checked_dtype();
        Console console(machine.json);
        if (options.inputs.empty()) throw Error(ErrorKind::usage, "--input FILE... is needed");
        if (options.out.empty()) throw Error(ErrorKind::usage, "--out DIR is needed");
        const model::data::Meta meta = model::data::build_dataset(options);
        Table table({"split", "tokens", "bytes of text"});
        table.row(
            {"train", std::to_string(meta.train_tokens), std::to_string(meta.train_text_bytes)});
        table.row(
            {"validation", std::to_string(meta.val_tokens), std::to_string(meta.val_text_bytes)});
        console.print(table.text());
        console.line(std::to_string(meta.documents) +
                     (meta.documents == 1 ? " document, tokenizer " : " documents, tokenizer ") +
                     meta.tokenizer + ", vocabulary " + std::to_string(meta.vocab_size) +
                     "; wrote " + options.out);
        nlohmann::json result = to_json(meta);
        result["out"] = options.out;
        console.result(result);
        return kDone;
    }

    Settings settings;
    Machine machine;
    model::data::BuildOptions options;
};

}  // namespace

Run add_data(CLI::App& app) {
    CLI::App* command = app.add_subcommand("data", "Turn text into token shards to train on");
    auto data = std::make_shared<Data>(*command);
    return [data] { return data->run(); };
}

}  // namespace fbt::apps
