// Streams, events, capture and graphs: what is queued, in which order, and when it runs. Queued
// work is a graph of nodes, each after the node before it in its stream and after those it waits
// for; it runs when a synchronisation needs it and not before, so that a missing one shows.
#pragma once
#include <functional>

#include "tests/simt/emu.h"

namespace fbt::simt {

// Runs when its turn comes, with device memory open; an error ends all work on the device.
using Task = std::function<cudaError_t()>;

// Every call of the runtime: holds the lock, refuses calls from within queued work, and reports an
// earlier failure of queued work instead of doing anything.
cudaError_t call(const std::function<cudaError_t()>& body);
// The same for calls that free: they do their work in any case.
cudaError_t freeing_call(const std::function<cudaError_t()>& body);

// The functions below need the lock.

// Whether the stream takes work.
cudaError_t check_stream(cudaStream_t stream);
// Puts `task` behind what is queued in the stream, or into the graph that the stream captures.
cudaError_t submit(cudaStream_t stream, Task task);
// Whether a stream is capturing; such a stream does not run what it is given.
bool is_capturing(cudaStream_t stream);
// An error, which also ends a capture, if this thread may not make unsafe calls now.
cudaError_t check_no_capture();
// Ends the capture that the stream belongs to, in failure.
cudaError_t invalidate_capture(cudaStream_t stream);

cudaError_t run_stream(cudaStream_t stream);
cudaError_t run_everything();
// Runs `task` at once, which is nobody's turn: for calls that the host waits for.
cudaError_t run_now(const Task& task);

}  // namespace fbt::simt
