#include "apps/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "tensor/error.h"
#include "tensor/file.h"

namespace fbt::apps {

using nlohmann::json;

namespace {

// A row that a kill cut short is no JSON.
bool is_row_until(std::string_view line, int64_t step) {
    const json row = json::parse(line.begin(), line.end(), nullptr, false);
    if (!row.is_object()) return false;
    const auto at = row.find("step");
    return at != row.end() && at->is_number_integer() && at->get<int64_t>() <= step;
}

std::string rows_until(const std::string& text, int64_t step) {
    std::string kept;
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find('\n', at), text.size());
        const std::string_view line = std::string_view(text).substr(at, end - at);
        if (is_row_until(line, step)) kept.append(line) += '\n';
        at = end + 1;
    }
    return kept;
}

}  // namespace

Metrics::Metrics(const std::string& path, int64_t step) : path_(path) {
    std::string kept;
    if (step > 0 && std::filesystem::exists(path)) kept = rows_until(tensor::read_file(path), step);
    if (!kept.empty())  // each row ends with a newline
        last_kept_ = json::parse(kept.substr(kept.rfind('\n', kept.size() - 2) + 1));
    tensor::write_file_durably(path, kept);
    descriptor_ = open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
    if (descriptor_ < 0) fail();
}

Metrics::~Metrics() {
    if (descriptor_ >= 0) close(descriptor_);
}

void Metrics::append(const json& row) {
    const std::string line = row.dump() + "\n";
    for (size_t at = 0; at < line.size();) {
        const ssize_t n = write(descriptor_, line.data() + at, line.size() - at);
        if (n < 0 && errno != EINTR) fail();
        if (n > 0) at += size_t(n);
    }
}

void Metrics::sync() {
    if (fsync(descriptor_) != 0) fail();
}

void Metrics::fail() const {
    throw tensor::Error(tensor::ErrorKind::environment,
                        "cannot write " + path_ + ": " + std::strerror(errno));
}

}  // namespace fbt::apps
