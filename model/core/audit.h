// A golden file's quantities, computed by the engine (tests/golden/README.md gives the format).
#pragma once
#include <map>
#include <string>
#include <vector>

#include "model/core/model.h"

namespace fbt::model::core {

struct AuditRow {
    std::string quantity;
    double error, bound;  // max |engine - golden|, absolute
    bool ok;              // error <= bound; a NaN is never ok
};

struct Audit {
    std::vector<AuditRow> rows;
    std::map<std::string, std::pair<tensor::Shape, std::vector<double>>> values;  // the engine's
    bool ok = true;
};

// Runs the whole file: objective with gradients, three decoding modes, replays.
// Errors  bad_file when the file is not a golden file, or lacks or misshapes a tensor.
Audit audit(Context& context, const std::string& path, DType dtype);

}  // namespace fbt::model::core
