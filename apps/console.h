// What a subcommand says: text for people, one JSON document for programs, tables of numbers.
#pragma once
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fbt::apps {

enum class Colour { none, red, green, yellow, dim };

// As std::printf, into a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

class Console {
  public:
    // json: stdout is kept for the one JSON document, and text goes to stderr.
    // silent: nothing is said at all, by the ranks of a job but one.
    // plain: no colours; launchers give their ranks a terminal whatever their own output is.
    explicit Console(bool json, bool silent = false, bool plain = false);

    // Text for people, at once; line() adds a newline.
    void print(const std::string& text);
    void line(const std::string& text) { print(text + "\n"); }
    // `fbt: text` on stderr.
    void warn(const std::string& text);
    // The result for programs: printed with --json only. Errors  environment when stdout fails
    // (a full disk), but not when its reader left.
    void result(const nlohmann::json& document);

    bool json() const { return json_; }
    // Whoever read our text has left (`fbt generate ... | head`): more of it reaches nobody.
    bool reader_left() const { return reader_left_; }
    // The text in a colour, on a terminal whose user did not set NO_COLOR.
    std::string paint(Colour colour, const std::string& text) const;

  private:
    void write(std::FILE* to, const std::string& text);

    bool json_, silent_, colours_, reader_left_ = false;
};

// Rows of cells under a heading, columns aligned: text at the left, all others at the right.
class Table {
  public:
    explicit Table(std::vector<std::string> heading) : rows_{std::move(heading)} {}
    void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
    std::string text() const;
    std::string markdown() const;

  private:
    std::vector<std::vector<std::string>> rows_;
};

// 950, 1.5k, 198k, 2.3M
std::string short_count(double n);
// 41s, 2m, 1h05m
std::string short_time(double seconds);

}  // namespace fbt::apps
