#include "apps/settings.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "tensor/file.h"

namespace fbt::apps {

using model::core::Fusion;
using nlohmann::json;
using tensor::Error;
using tensor::ErrorKind;

bool is_utf8(const std::string& text) {
    try {
        json(text).dump();
        return true;
    } catch (const json::type_error&) {
        return false;
    }
}

json list_json(const std::vector<int>& list) {
    return list.size() == 1 ? json(list[0]) : json(list);
}

std::string list_text(const std::vector<int>& list) {
    std::string text;
    for (int x : list) text += (text.empty() ? "" : ",") + std::to_string(x);
    return text;
}

namespace {

// "0", "0.95", "100352"
std::string shown(double x) {
    const bool integer = x == std::floor(x) && std::abs(x) < 1e15;
    return (integer ? json(int64_t(x)) : json(x)).dump();
}

// "an integer, at least 1"
template <class T>
std::string wanted(const Setting& setting, const T*) {
    std::string text = std::is_floating_point_v<T> ? "a number" : "an integer";
    if (std::isfinite(setting.least))
        text += (setting.open ? ", above " : ", at least ") + shown(setting.least);
    if (std::isfinite(setting.most)) text += ", at most " + shown(setting.most);
    return text;
}
std::string wanted(const Setting& setting, const std::vector<int>*) {
    return wanted(setting, static_cast<const int*>(nullptr)) +
           ", or several with commas between, such as 1,2,3 (in JSON [1,2,3])";
}
std::string wanted(const Setting&, const bool*) { return "true or false"; }
std::string wanted(const Setting&, const std::string*) { return "text in UTF-8"; }
std::string wanted(const Setting&, const Fusion*) {
    return "gated_product, concat_projection or linear_addition";
}

bool inside(const Setting& setting, double x) {
    return (setting.open ? x > setting.least : x >= setting.least) && x <= setting.most;
}

// Takes the value, or says no.
template <class T>
bool take(const Setting& setting, const json& value, T* slot) {
    if constexpr (std::is_floating_point_v<T>) {
        if (!value.is_number()) return false;
        *slot = value.get<T>();
        return std::isfinite(*slot) && inside(setting, *slot);
    } else {
        if (!value.is_number_integer()) return false;
        const bool fits = value.is_number_unsigned() ? std::in_range<T>(value.get<uint64_t>())
                                                     : std::in_range<T>(value.get<int64_t>());
        if (fits) *slot = value.get<T>();
        return fits && inside(setting, double(*slot));
    }
}
bool take(const Setting& setting, const json& value, std::vector<int>* slot) {
    if (!value.is_array()) return take(setting, json::array({value}), slot);
    slot->resize(value.size());
    for (size_t i = 0; i < slot->size(); ++i)
        if (!take(setting, value[i], &(*slot)[i])) return false;
    return true;
}
bool take(const Setting&, const json& value, bool* slot) {
    if (value.is_boolean()) *slot = value.get<bool>();
    return value.is_boolean();
}
bool take(const Setting& setting, const json& value, std::string* slot) {
    if (!value.is_string()) return false;
    *slot = value.get<std::string>();
    return setting.any_bytes || is_utf8(*slot);
}
bool take(const Setting&, const json& value, Fusion* slot) {
    if (!value.is_string()) return false;
    for (Fusion f : {Fusion::gated_product, Fusion::concat_projection, Fusion::linear_addition})
        if (to_string(f) == value.get<std::string>()) {
            *slot = f;
            return true;
        }
    return false;
}

void set(const Setting& setting, const json& value, const std::string& name, ErrorKind kind) {
    std::visit(
        [&](auto* slot) {
            if (!take(setting, value, slot))
                throw Error(kind, name + " is " +
                                      value.dump(-1, ' ', true, json::error_handler_t::replace) +
                                      ", needed " + wanted(setting, slot));
        },
        setting.slot);
}

// The JSON value that a flag's text stands for; text that is no number stays text, and so do "nan"
// and "inf", which JSON cannot hold.
template <class T>
json value_of(const std::string& text, const T*) {
    T number{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    bool whole = error == std::errc() && end == text.data() + text.size();
    if constexpr (std::is_floating_point_v<T>) whole = whole && std::isfinite(number);
    if (whole) return number;
    return text;
}
json value_of(const std::string& text, const std::vector<int>*) {
    json list = json::array();
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find(',', at), text.size());
        list.push_back(value_of(text.substr(at, end - at), static_cast<const int*>(nullptr)));
        if (list.back().is_string()) return text;
        at = end + 1;
    }
    return list.size() == 1 ? list[0] : list;
}
json value_of(const std::string& text, const bool*) {
    if (text == "true" || text == "false") return text == "true";
    return text;
}
json value_of(const std::string& text, const std::string*) { return text; }
json value_of(const std::string& text, const Fusion*) { return text; }

const char* type_name(const Slot& slot) {
    if (std::holds_alternative<bool*>(slot)) return "true|false";
    if (std::holds_alternative<double*>(slot)) return "NUMBER";
    if (std::holds_alternative<std::string*>(slot)) return "TEXT";
    if (std::holds_alternative<Fusion*>(slot)) return "NAME";
    if (std::holds_alternative<std::vector<int>*>(slot)) return "INTEGER,...";
    return "INTEGER";
}

}  // namespace

std::string Setting::flag() const {
    std::string text = "--" + key;
    std::replace(text.begin(), text.end(), '_', '-');
    return text;
}

json Setting::value() const {
    return std::visit(
        [](auto* slot) -> json {
            if constexpr (std::is_same_v<decltype(slot), Fusion*>)
                return to_string(*slot);
            else if constexpr (std::is_same_v<decltype(slot), std::vector<int>*>)
                return list_json(*slot);
            else
                return *slot;
        },
        slot);
}

std::string Setting::text() const {
    if (const auto list = std::get_if<std::vector<int>*>(&slot)) return list_text(**list);
    const json json_value = value();
    return json_value.is_string() ? json_value.get<std::string>() : json_value.dump();
}

// A choice of this one call is off until it is named; a kept one can also be switched off.
bool Setting::is_flag_alone() const {
    return std::holds_alternative<bool*>(slot) && section.empty();
}

Setting& Settings::add(const std::string& key, Slot slot, const std::string& help) {
    Setting setting;
    setting.key = key;
    setting.section = section_;
    setting.slot = slot;
    setting.help = help;
    return all_.emplace_back(std::move(setting));
}

void Settings::bind(CLI::App& app) {
    for (const Setting& setting : all_) {
        if (setting.derived) continue;
        CLI::Option* option = nullptr;
        if (setting.is_flag_alone()) {
            option = app.add_flag_function(
                setting.flag(), [this, &setting](int64_t) { texts_[setting.key] = "true"; },
                setting.help);
        } else {
            option = app.add_option(
                setting.flag(),
                [this, &setting](const CLI::results_t& texts) {
                    texts_[setting.key] = texts.at(0);
                    return true;
                },
                setting.help);
            option->type_name(type_name(setting.slot));
            if (const std::string text = setting.text(); !text.empty()) option->default_str(text);
        }
        option->group(setting.section == "model"   ? "Model"
                      : setting.section == "train" ? "Training"
                                                   : "Options");
    }
}

void Settings::take_flags() {
    for (const Setting& setting : all_) {
        if (!given(setting.key)) continue;
        const std::string& text = texts_.at(setting.key);
        const json value =
            std::visit([&](auto* slot) { return value_of(text, slot); }, setting.slot);
        set(setting, value, setting.flag(), ErrorKind::usage);
    }
}

void Settings::take_json(const json& document, const std::string& origin, ErrorKind kind) {
    if (!document.is_object())
        throw Error(kind, origin + " is not an object with the keys \"model\" and \"train\"");
    for (const auto& section : document.items()) {
        const auto is_here = [&](const Setting& s) { return s.section == section.key(); };
        if (section.key().empty() || std::none_of(all_.begin(), all_.end(), is_here))
            throw Error(kind, origin + ": unknown key " + tensor::in_quotes(section.key()) +
                                  ", expected \"model\" and \"train\"");
        if (!section.value().is_object())
            throw Error(kind, origin + ": " + section.key() + " is not an object of keys");
        for (const auto& entry : section.value().items()) {
            const auto it = std::find_if(all_.begin(), all_.end(), [&](const Setting& s) {
                return is_here(s) && s.key == entry.key();
            });
            if (it == all_.end())
                throw Error(kind, origin + ": unknown key " + tensor::in_quotes(entry.key()) +
                                      " in \"" + section.key() + "\"");
            set(*it, entry.value(), origin + ": " + entry.key(), kind);
        }
    }
}

json Settings::to_json() const {
    json document = json::object();
    for (const Setting& setting : all_)
        if (!setting.section.empty()) document[setting.section][setting.key] = setting.value();
    return document;
}

}  // namespace fbt::apps
