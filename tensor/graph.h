// Work that is queued again and again on the same memory, as decoding's steps are. A CUDA device
// runs it the first time, records it the second (a CUDA graph), and from then on takes all of it in
// one call; other devices just run it.
#pragma once
#include <functional>

#include "tensor/context.h"

namespace fbt::tensor {

class Graph {
  public:
    // Does `work`. It must queue the same kernels on the same arguments every time, keep no tensor
    // that it made, and neither read nor write host memory. Its intermediate tensors lie in an
    // arena of this graph, since a recording uses their memory whenever it is replayed.
    //
    // Errors  environment when the device fails; internal when work copies from or to the host, or
    //         takes more memory than it did the first time.
    void run(Context& context, const std::function<void()>& work);
    bool recorded() const { return recording_ != nullptr; }

  private:
    std::shared_ptr<Arena> arena_;
    std::unique_ptr<Recording> recording_;
};

}  // namespace fbt::tensor
