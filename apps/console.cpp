#include "apps/console.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdarg>
#include <cstdlib>
#include <cstring>

#include "tensor/error.h"

namespace fbt::apps {

using tensor::Error;
using tensor::ErrorKind;

std::string format(const char* pattern, ...) {
    va_list arguments, again;
    va_start(arguments, pattern);
    va_copy(again, arguments);
    std::string out(size_t(std::max(0, std::vsnprintf(nullptr, 0, pattern, arguments))), '\0');
    std::vsnprintf(out.data(), out.size() + 1, pattern, again);
    va_end(again);
    va_end(arguments);
    return out;
}

Console::Console(bool json, bool silent, bool plain) : json_(json), silent_(silent) {
    const char* no_colour = std::getenv("NO_COLOR");  // https://no-color.org: set and not empty
    colours_ = !plain && isatty(json ? STDERR_FILENO : STDOUT_FILENO) && !(no_colour && *no_colour);
}

void Console::write(std::FILE* to, const std::string& text) {
    if (silent_ || (to == stdout && reader_left_)) return;
    errno = 0;
    if (std::fwrite(text.data(), 1, text.size(), to) == text.size() && std::fflush(to) == 0) return;
    const int reason = errno;
    std::clearerr(to);
    if (to != stdout) return;  // there is nowhere left to say so
    if (reason != EPIPE)
        throw Error(ErrorKind::environment,
                    std::string("cannot write to standard output: ") + std::strerror(reason));
    reader_left_ = true;
}

void Console::print(const std::string& text) { write(json_ ? stderr : stdout, text); }

void Console::warn(const std::string& text) { write(stderr, "fbt: " + text + "\n"); }

void Console::result(const nlohmann::json& document) {
    if (!json_) return;
    write(stdout, document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

std::string Console::paint(Colour colour, const std::string& text) const {
    const char* code = colour == Colour::red      ? "31"
                       : colour == Colour::green  ? "32"
                       : colour == Colour::yellow ? "33"
                                                  : "2";
    if (!colours_ || colour == Colour::none) return text;
    return std::string("\033[") + code + "m" + text + "\033[0m";
}

namespace {

// Columns that a cell takes: colours take none.
size_t width_of(const std::string& cell) {
    size_t width = 0;
    bool in_colour = false;
    for (char c : cell) {
        if (c == '\033') in_colour = true;
        if (!in_colour) ++width;
        if (c == 'm') in_colour = false;
    }
    return width;
}

}  // namespace

std::string Table::text() const {
    std::vector<size_t> widths(rows_[0].size(), 0);
    for (const auto& row : rows_)
        for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(row[i]));
    std::string out;
    for (const auto& row : rows_) {
        std::string line;
        for (size_t i = 0; i < row.size(); ++i) {
            const std::string pad(widths[i] - width_of(row[i]), ' ');
            line += (i == 0 ? "" : " | ") + (i == 0 ? row[i] + pad : pad + row[i]);
        }
        out += line + "\n";
    }
    return out;
}

std::string Table::markdown() const {
    std::string out;
    for (size_t r = 0; r < rows_.size(); ++r) {
        out += "|";
        for (const std::string& cell : rows_[r]) {
            out += ' ';
            for (char c : cell) out += c == '|' ? std::string("\\|") : std::string(1, c);
            out += " |";
        }
        out += "\n";
        if (r > 0) continue;
        out += "|";
        for (size_t i = 0; i < rows_[0].size(); ++i) out += "---|";
        out += "\n";
    }
    return out;
}

std::string short_count(double n) {
    const char* unit = "";
    for (const char* next : {"k", "M", "G"}) {
        if (n < 999.5) break;
        n /= 1000;
        unit = next;
    }
    return format(n < 9.95 && *unit ? "%.1f%s" : "%.0f%s", n, unit);
}

std::string short_time(double seconds) {
    if (!(seconds < 360000)) return "long";
    const int64_t s = std::llround(std::max(seconds, 0.0));
    if (s < 100) return format("%llds", static_cast<long long>(s));
    if (s < 3600) return format("%lldm", static_cast<long long>((s + 30) / 60));
    return format("%lldh%02lldm", static_cast<long long>(s / 3600),
                  static_cast<long long>(s % 3600 / 60));
}

}  // namespace fbt::apps
