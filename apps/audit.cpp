// fbt audit: golden files against the engine.
#include "model/core/audit.h"

#include <memory>

#include "apps/command.h"
#include "tensor/file.h"
#include "tensor/safetensors.h"

namespace fbt::apps {
namespace {

namespace core = model::core;
using nlohmann::json;
using tensor::DType;
using tensor::Error;
using tensor::ErrorKind;

// The engine's own values under the golden file's names; whatever was there stays until they are
// whole.
void dump(const std::string& path, const core::Audit& audit, DType dtype) {
    std::vector<tensor::SafetensorsWriter::Item> items;
    for (const auto& [name, value] : audit.values) items.push_back({name, dtype, value.first});
    const std::string temporary = tensor::temporary_beside(path);
    tensor::SafetensorsWriter writer(temporary, items);
    for (const auto& item : writer.items()) {
        const std::vector<double>& values = audit.values.at(item.name).second;
        if (dtype == DType::f64)
            writer.write(item.name, values);
        else
            writer.write(item.name, std::vector<float>(values.begin(), values.end()));
    }
    writer.finish();
    tensor::rename_durably(temporary, path);
}

struct Audit {
    explicit Audit(CLI::App& app) {
        app.add_option("files", files, "golden files (format fbt-golden-1)")->type_name("FILE...");
        settings.add("dump", &out, "safetensors file for the engine's values, of one golden file");
        machine.declare(settings);
        settings.bind(app);
    }

    int run() {
        settings.take_flags();
        Console console(machine.json);
        if (files.empty()) throw Error(ErrorKind::usage, "a golden FILE is needed");
        if (!out.empty() && files.size() > 1)
            throw Error(ErrorKind::usage, "--dump takes the values of one golden file, but " +
                                              std::to_string(files.size()) + " are named");
        if (!out.empty()) check_output("--dump", out);
        const DType dtype = machine.checked_dtype();
        tensor::Context context = machine.context();
        bool ok = true;
        json documents = json::array();
        for (const std::string& file : files) {
            const core::Audit audit = core::audit(context, file, dtype);
            if (!out.empty()) dump(out, audit, dtype);
            documents.push_back(report(console, file, audit));
            ok = ok && audit.ok;
        }
        console.result({{"ok", ok}, {"files", documents}});
        return ok ? kDone : kCheckFailed;
    }

    json report(Console& console, const std::string& file, const core::Audit& audit) const {
        Table table({"quantity", "error", "bound", "ok"});
        json rows = json::array();
        size_t outside = 0;
        for (const core::AuditRow& row : audit.rows) {
            table.row({row.quantity, format("%.2e", row.error), format("%.2e", row.bound),
                       row.ok ? console.paint(Colour::green, "ok")
                              : console.paint(Colour::red, "OUTSIDE")});
            rows.push_back({{"quantity", row.quantity},
                            {"error", row.error},
                            {"bound", row.bound},
                            {"ok", row.ok}});
            if (!row.ok) ++outside;
        }
        console.line(file + " on " + machine.device + " in " + machine.dtype);
        console.print(table.text());
        console.line(file + ": " + std::to_string(audit.rows.size()) + " quantities, " +
                     std::to_string(outside) + " outside their bounds");
        return {{"file", file}, {"ok", audit.ok}, {"rows", rows}};
    }

    Settings settings;
    Machine machine;
    std::vector<std::string> files;
    std::string out;
};

}  // namespace

Run add_audit(CLI::App& app) {
    CLI::App* command =
        app.add_subcommand("audit", "Check the engine against golden files of the reference");
    auto audit = std::make_shared<Audit>(*command);
    return [audit] { return audit->run(); };
}

}  // namespace fbt::apps
