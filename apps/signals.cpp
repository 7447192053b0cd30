#include "apps/signals.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace fbt::apps {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGUSR1};

// When the first one came, in seconds; 0: none yet. A handler sees nothing but what has a fixed
// address, and two may run at once, on two threads; lock-free atomics are safe there.
std::atomic<int64_t> first_at{0};
static_assert(std::atomic<int64_t>::is_always_lock_free);

// A launcher passes the same signal on twice, or lets another follow at once: only an impatient
// Ctrl-C, or a repetition after a while, is meant as the end.
void on_signal(int number) {
    constexpr int64_t kSoon = 2;
    timespec now = {};
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t before = 0;
    if (first_at.compare_exchange_strong(before, now.tv_sec + 1)) return;
    if (number == SIGINT || now.tv_sec + 1 - before > kSoon) _exit(128 + number);
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
    first_at = 0;
    handle_with(on_signal);
}
StopSignals::~StopSignals() { handle_with(SIG_DFL); }

bool StopSignals::requested() const { return first_at > 0; }

}  // namespace fbt::apps
