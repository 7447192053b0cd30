#include "tensor/graph.h"

namespace fbt::tensor {
namespace {

// Puts the context's own arena back, also when the work throws.
class ArenaScope {
  public:
    ArenaScope(Context& context, std::shared_ptr<Arena> arena)
        : context_(context), own_(context.use(std::move(arena))) {}
    ~ArenaScope() { context_.use(own_); }
    ArenaScope(const ArenaScope&) = delete;

  private:
    Context& context_;
    std::shared_ptr<Arena> own_;
};

}  // namespace

void Graph::run(Context& context, const std::function<void()>& work) {
    if (context.backend() != Backend::cuda) return work();
    Memory& memory = context.arena()->memory();
    if (recording_) return memory.replay(*recording_);
    if (!arena_) {  // the first time runs as it is: it finds the memory that the recording will use
        const auto arena = std::make_shared<Arena>(context.arena()->shared_memory());
        const ArenaScope scope(context, arena);
        work();
        arena_ = arena;
        return;
    }
    {
        const ArenaScope scope(context, arena_);
        memory.begin_recording();
        try {
            work();
        } catch (...) {
            try {
                memory.end_recording();
            } catch (const Error&) {  // the first error is the one to report
            }
            throw;
        }
        recording_ = memory.end_recording();
    }
    memory.replay(*recording_);
}

}  // namespace fbt::tensor
