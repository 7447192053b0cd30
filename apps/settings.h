// One table of settings makes a subcommand's parser and --help, reads presets and --config files,
// prints the configuration and is copied into checkpoints.
#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <variant>
#include <vector>

#include "model/core/config.h"
#include "tensor/error.h"

namespace fbt::apps {

// Where a setting's value lives; the type says which text and JSON it takes.
// A list of integers is 17,33,65 as a flag; in JSON an array, of a single one also the integer.
using Slot = std::variant<bool*, int*, int64_t*, uint64_t*, double*, std::string*,
                          model::core::Fusion*, std::vector<int>*>;

nlohmann::json list_json(const std::vector<int>& list);  // a single one is an integer
std::string list_text(const std::vector<int>& list);     // 17,33,65

// JSON's encoding: other text cannot be kept in checkpoints and results.
bool is_utf8(const std::string& text);

struct Setting {
    std::string key;      // tokens_per_step; the flag is --tokens-per-step
    std::string section;  // of the JSON form: "model", "train"; empty: of this call, never kept
    Slot slot;
    std::string help;
    bool may_change = false;  // between a run and its continuation
    bool derived = false;     // found out, not asked for: it has no flag
    double least = -std::numeric_limits<double>::infinity();
    double most = std::numeric_limits<double>::infinity();
    bool open = false;       // `least` itself is outside
    bool any_bytes = false;  // of a text: it is never kept as JSON, which is UTF-8

    Setting& at_least(double x) {
        least = x;
        return *this;
    }
    Setting& above(double x) {
        open = true;
        return at_least(x);
    }
    Setting& at_most(double x) {
        most = x;
        return *this;
    }
    Setting& changeable() {
        may_change = true;
        return *this;
    }
    std::string flag() const;      // --tokens-per-step
    nlohmann::json value() const;  // as in JSON
    std::string text() const;      // as a flag takes it
    bool is_flag_alone() const;    // given by its name, without a value
};

class Settings {
  public:
    Settings() = default;
    Settings(const Settings&) = delete;

    // Settings that are added from here on belong to this section.
    void section(const std::string& name) { section_ = name; }
    Setting& add(const std::string& key, Slot slot, const std::string& help);

    // Makes the flags. They are kept as text until take_flags(), so that they win over files.
    void bind(CLI::App& app);
    void take_flags();
    bool given(const std::string& key) const { return texts_.count(key) != 0; }

    // Takes {"model": {...}, "train": {...}}, any subset. Errors  `kind`, naming the origin and the
    // key: unknown keys, wrong types, values out of range.
    void take_json(const nlohmann::json& document, const std::string& origin,
                   tensor::ErrorKind kind = tensor::ErrorKind::usage);
    nlohmann::json to_json() const;  // the same form, complete

    const std::deque<Setting>& all() const { return all_; }

  private:
    std::string section_;
    std::deque<Setting> all_;
    std::map<std::string, std::string> texts_;  // flags given, by key
};

}  // namespace fbt::apps
