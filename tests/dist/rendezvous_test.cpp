// The ranks of a job meet over TCP on this machine: all of them, in any order, among strangers; and
// what they are told when they cannot.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "dist/dist.h"

namespace fbt::tests {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

int bind_anywhere(int s, int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (bind(s, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
        getsockname(s, reinterpret_cast<sockaddr*>(&address), &length) != 0)
        return 0;
    return ntohs(address.sin_port);
}
int free_port() {
    const int s = socket(AF_INET, SOCK_STREAM, 0);
    const int port = bind_anywhere(s, 0);
    close(s);
    return port;
}

// A connection of somebody who is no rank, made as soon as there is one to be had.
class Stranger {
  public:
    explicit Stranger(int port) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(uint16_t(port));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        for (int i = 0; i < 500; ++i) {
            socket_ = socket(AF_INET, SOCK_STREAM, 0);
            if (connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0)
                return;
            close(socket_);
            socket_ = -1;
            std::this_thread::sleep_for(milliseconds(10));
        }
    }
    ~Stranger() { close(socket_); }
    Stranger(const Stranger&) = delete;
    bool say(const std::string& text) {
        return send(socket_, text.data(), text.size(), MSG_NOSIGNAL) == ssize_t(text.size());
    }
    // What is said to it until the other side hangs up, or five seconds are over.
    std::string hears() {
        std::string all;
        pollfd wanted{socket_, POLLIN, 0};
        for (char c; poll(&wanted, 1, 5000) > 0 && recv(socket_, &c, 1, 0) == 1;) all += c;
        return all;
    }

  private:
    int socket_ = -1;
};

struct Met {
    std::string bytes, error;
    milliseconds took{0};
};

// One rank's side; rank 0 has the bytes "0-data".
Met meet(int rank, int size, int port, double seconds, const std::string& address = "127.0.0.1",
         const std::string& before = "?-data") {
    std::string bytes = rank == 0 ? "0-data" : before;
    Met met;
    const Clock::time_point begun = Clock::now();
    try {
        dist::exchange_over_tcp(std::as_writable_bytes(std::span(bytes)), rank, size, address, port,
                                seconds);
        met.bytes = bytes;
    } catch (const tensor::Error& e) {
        met.error = e.what();
        if (e.kind() != tensor::ErrorKind::environment) met.error = "of another kind: " + met.error;
    }
    met.took = std::chrono::duration_cast<milliseconds>(Clock::now() - begun);
    return met;
}

struct Job {
    std::vector<Met> met;
    std::vector<std::thread> threads;
    explicit Job(int ranks) : met(size_t(ranks)) {}
    template <class F>
    void start(int slot, F f) {
        threads.emplace_back([this, slot, f] { met[size_t(slot)] = f(); });
    }
    void end() {
        for (std::thread& t : threads) t.join();
    }
};

testing::AssertionResult has(const Met& met, const std::vector<std::string>& parts) {
    for (const std::string& part : parts)
        if (met.error.find(part) == std::string::npos)
            return testing::AssertionFailure()
                   << "the error is: '" << met.error << "', without: " << part;
    return testing::AssertionSuccess();
}

TEST(Rendezvous, EveryRankGetsRankZerosBytes) {
    for (const char* address : {"127.0.0.1", "::1", "localhost"})
        for (const int last : {0, 3}) {  // the others try until it is there
            const int port = free_port(), size = 4;
            Job job(size);
            for (int r = 0; r < size; ++r)
                job.start(r, [=] {
                    if (r == last) std::this_thread::sleep_for(milliseconds(250));
                    return meet(r, size, port, 20, address);
                });
            job.end();
            for (const Met& met : job.met) {
                EXPECT_EQ(met.error, "");
                EXPECT_EQ(met.bytes, "0-data");
            }
        }
    EXPECT_EQ(meet(0, 1, 0, 1).bytes, "0-data");  // alone
}

TEST(Rendezvous, ManyRanks) {
    const int port = free_port(), size = 48;
    Job job(size);
    for (int r = 0; r < size; ++r) job.start(r, [=] { return meet(r, size, port, 30); });
    job.end();
    for (const Met& met : job.met) EXPECT_EQ(met.bytes, "0-data") << met.error;
}

TEST(Rendezvous, StrangersDoNotMatter) {
    const int port = free_port();
    Job job(4);
    for (int r : {0, 1}) job.start(r, [=] { return meet(r, 4, port, 20); });
    Stranger mute(port), wrong(port), brief(port), chatty(port);
    EXPECT_TRUE(wrong.say("GET / HTTP/1.1\r\nHost: x\r\n\r\n"));
    EXPECT_TRUE(brief.say("fbthel"));
    EXPECT_TRUE(chatty.say(std::string("fbthello\0\0\0\2\0\0\0\4and more", 24)));
    EXPECT_EQ(wrong.hears(), "");
    EXPECT_EQ(chatty.hears(), "");
    { Stranger gone(port); }
    {  // a rank that goes may come again, until all are there
        Stranger first(port);
        EXPECT_TRUE(first.say(std::string("fbthello\0\0\0\2\0\0\0\4", 16)));
    }
    for (int r : {2, 3}) job.start(r, [=] { return meet(r, 4, port, 20); });
    job.end();
    for (const Met& met : job.met) EXPECT_EQ(met.bytes, "0-data") << met.error;
}

TEST(Rendezvous, AnotherJobsRankIsRefused) {
    const int port = free_port();
    Job job(4);
    job.start(0, [=] { return meet(0, 3, port, 5); });
    job.start(1, [=] { return meet(1, 2, port, 60); });
    job.start(3, [=] { return meet(5, 6, port, 60); });
    job.end();
    const std::string where = "127.0.0.1:" + std::to_string(port);
    EXPECT_TRUE(has(job.met[1], {"rank 1 was refused at " + where, "rank 1 of 2",
                                 "none of this job's 3 ranks"}));
    EXPECT_TRUE(has(job.met[3], {"rank 5 of 6", "none of this job's 3 ranks"}));
    EXPECT_LT(job.met[1].took, milliseconds(30000)) << "at once, not when the time is over";
    EXPECT_TRUE(has(job.met[0], {"rank 0 of 3 waited 5 s at " + where, "rank 1, 2", "refused"}));
}
TEST(Rendezvous, AnotherJobsRankDoesNotStopThisOne) {
    const int port = free_port();
    Job job(3);
    job.start(2, [=] { return meet(1, 3, port, 10); });
    job.start(0, [=] { return meet(0, 2, port, 20); });
    job.threads.front().join();  // it has been refused
    job.threads.front() = std::thread([&job, port] { job.met[1] = meet(1, 2, port, 20); });
    job.end();
    EXPECT_TRUE(has(job.met[2], {"rank 1 of 3", "this job's 2 ranks"}));
    EXPECT_EQ(job.met[0].bytes, "0-data") << job.met[0].error;
    EXPECT_EQ(job.met[1].bytes, "0-data") << job.met[1].error;
}

TEST(Rendezvous, OfAnotherVersion) {
    const int port = free_port();
    Job job(2);
    job.start(0, [=] { return meet(0, 2, port, 20); });
    job.start(1, [=] { return meet(1, 2, port, 20, "127.0.0.1", "longer"); });
    job.end();
    EXPECT_EQ(job.met[1].bytes, "0-data");
    Job next(2);
    next.start(0, [=] { return meet(0, 2, port, 20); });
    next.start(1, [=] { return meet(1, 2, port, 20, "127.0.0.1", "much longer"); });
    next.end();
    EXPECT_TRUE(has(next.met[1], {"rank 1 was refused", "6 bytes where 11 were expected"}));
}

TEST(Rendezvous, TwoOfOneRank) {
    const int port = free_port();
    Job job(3);
    job.start(0, [=] { return meet(0, 4, port, 60); });
    for (int slot : {1, 2}) job.start(slot, [=] { return meet(2, 4, port, 60); });
    job.end();
    for (const Met& met : job.met) {
        EXPECT_TRUE(has(met, {"rank 2 of 4 came to 127.0.0.1:" + std::to_string(port) + " twice",
                              "127.0.0.1 and 127.0.0.1", "a rank of its own"}));
        EXPECT_LT(met.took, milliseconds(30000));
    }
}

TEST(Rendezvous, NobodyComes) {
    const int port = free_port();
    const std::string where = "127.0.0.1:" + std::to_string(port);
    const Met alone = meet(0, 3, port, 0.5);
    EXPECT_TRUE(has(alone, {"rank 0 of 3 waited 0.5 s at " + where, "not there: rank 1, 2"}));
    EXPECT_GE(alone.took, milliseconds(500));
    EXPECT_LT(alone.took, milliseconds(30000));
    const Met other = meet(2, 3, port, 0.5);
    EXPECT_TRUE(has(other, {"rank 2 of 3 waited 0.5 s for rank 0 at " + where, "refused"}));
    EXPECT_LT(other.took, milliseconds(30000));
}

// Those who are there are not said to be missing, and learn from rank 0 who is.
TEST(Rendezvous, NamesWhoIsMissing) {
    const int port = free_port();
    Job job(2);
    for (int r : {0, 1}) job.start(r, [=] { return meet(r, 3, port, 2); });
    job.end();
    for (const Met& met : job.met)
        EXPECT_TRUE(has(met, {"waited 2 s at 127.0.0.1:", "not there: rank 2"}));
    EXPECT_TRUE(has(job.met[1], {"rank 1 was refused"}));
}

// Somebody listens, and says nothing, or something else.
TEST(Rendezvous, NoRankZeroBehindThePort) {
    for (const std::string& answer : {std::string(), std::string("220 mail.example ready\r\n")}) {
        const int s = socket(AF_INET, SOCK_STREAM, 0);
        const int port = bind_anywhere(s, 0);
        ASSERT_EQ(listen(s, 5), 0);
        Job job(1);
        std::atomic<bool> over = false;
        job.start(0, [port, &over] {
            const Met met = meet(1, 2, port, 1);
            over = true;
            return met;
        });
        std::vector<int> guests;
        pollfd wanted{s, POLLIN, 0};
        while (!over) {
            if (poll(&wanted, 1, 10) <= 0) continue;
            guests.push_back(accept(s, nullptr, nullptr));
            EXPECT_EQ(send(guests.back(), answer.data(), answer.size(), MSG_NOSIGNAL),
                      ssize_t(answer.size()));
        }
        job.end();
        for (int guest : guests) close(guest);
        close(s);
        EXPECT_TRUE(has(job.met[0], {"waited 1 s for rank 0 at 127.0.0.1:" + std::to_string(port),
                                     answer.empty() ? "does not answer" : "is no rank 0"}));
        EXPECT_LT(job.met[0].took, milliseconds(30000));
    }
}

TEST(Rendezvous, PortInUse) {
    const int s = socket(AF_INET, SOCK_STREAM, 0);
    const int port = bind_anywhere(s, 0);
    ASSERT_EQ(listen(s, 1), 0);
    const Met met = meet(0, 2, port, 60);
    close(s);
    EXPECT_TRUE(has(met, {"cannot listen at 127.0.0.1:" + std::to_string(port), "in use"}));
    EXPECT_LT(met.took, milliseconds(30000));
}

TEST(Rendezvous, AddressesThatCannotBe) {
    EXPECT_TRUE(has(meet(1, 2, 29500, 1, "no-such-host.invalid"),
                    {"rank 1 of 2 waited 1 s for rank 0 at no-such-host.invalid:29500: ", "ame"}));
    EXPECT_TRUE(has(meet(1, 2, 70000, 1), {"127.0.0.1:70000", "ports 1 to 65535"}));
    EXPECT_TRUE(has(meet(1, 2, 0, 1, "::1"), {"[::1]:0"}));
    EXPECT_TRUE(has(meet(2, 2, 29500, 1), {"rank 2 of 2", "127.0.0.1:29500"}));
    EXPECT_TRUE(has(meet(-1, 2, 29500, 1), {"rank -1 of 2"}));
}

}  // namespace
}  // namespace fbt::tests
