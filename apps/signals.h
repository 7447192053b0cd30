// SIGINT, SIGTERM and SIGUSR1 as a request to stop.
#pragma once

namespace fbt::apps {

// From its construction on, the first of these signals only asks. A second SIGINT ends the program
// at once, with exit code 128 + its number, and so does another signal seconds later. At most one
// object at a time; made in main's thread.
class StopSignals {
  public:
    StopSignals();
    ~StopSignals();
    StopSignals(const StopSignals&) = delete;
    StopSignals& operator=(const StopSignals&) = delete;

    bool requested() const;
};

}  // namespace fbt::apps
