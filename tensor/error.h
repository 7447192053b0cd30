// The one exception type of fbt. Its kind decides the program's exit code.
#pragma once
#include <stdexcept>
#include <string>

namespace fbt::tensor {

enum class ErrorKind {
    usage,        // a flag, key or argument that cannot be (exit code 2)
    diverged,     // training went non-finite too often (3)
    bad_file,     // an input file that is not what it should be (4)
    environment,  // disk, memory, device or another rank failed (5)
    internal,     // a broken contract between fbt's own parts: op, argument, shape (5)
};

// what() is one line: what was found, what was expected, what to do.
class Error : public std::runtime_error {
  public:
    Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
    ErrorKind kind() const { return kind_; }

  private:
    ErrorKind kind_;
};

}  // namespace fbt::tensor
