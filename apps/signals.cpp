#include "apps/signals.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace fbt::apps {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGUSR1};

// A handler sees nothing but what has a fixed address; lock-free atomics are safe there.
std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);

std::atomic<int64_t> first_at{0};  // seconds

// A launcher passes the same signal on twice, or lets another follow at once: only an impatient
// Ctrl-C, or a repetition after a while, is meant as the end.
void on_signal(int number) {
    constexpr int64_t kSoon = 2;
    timespec now = {};
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (received.fetch_add(1) == 0)
        first_at = now.tv_sec;
    else if (number == SIGINT || now.tv_sec - first_at > kSoon)
        _exit(128 + number);
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
