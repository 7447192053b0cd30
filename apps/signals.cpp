#include "apps/signals.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>

namespace fbt::apps {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGUSR1};

// A handler sees nothing but what has a fixed address; lock-free atomics are safe there.
std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free);

void on_signal(int number) {
    if (received.fetch_add(1) > 0) _exit(128 + number);
}

void handle_with(void (*handler)(int)) {
    struct sigaction action = {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;  // a write in progress goes on
    sigemptyset(&action.sa_mask);
    for (int number : kSignals) sigaction(number, &action, nullptr);
}

}  // namespace

StopSignals::StopSignals() {
    received = 0;
    handle_with(on_signal);
}
StopSignals::~StopSignals() { handle_with(SIG_DFL); }

bool StopSignals::requested() const { return received > 0; }

}  // namespace fbt::apps
