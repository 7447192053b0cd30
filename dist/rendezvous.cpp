// How the ranks of a job meet where nothing else has brought them together: over TCP, through rank
// 0.
//   a rank says   "fbthello" rank size                8 bytes and two 32-bit numbers, big-endian
//   rank 0 says   "fbtreply" verdict length ...       the bytes (verdict 0), or why not (verdict 1)
// It replies to all at once, when all have come; to those that do not belong, at once.
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "dist/dist.h"

namespace fbt::dist {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kMagic = 8, kHead = kMagic + 2 * sizeof(uint32_t);
constexpr char kHello[] = "fbthello", kReply[] = "fbtreply";
constexpr milliseconds kRetry{100};  // between two attempts to connect
constexpr milliseconds kPatience{
    5000};                             // with one address that does not answer, or one who is mute
constexpr size_t kLongestText = 1000;  // of a reply that is no

[[noreturn]] void fail(const std::string& text) {
    throw tensor::Error(tensor::ErrorKind::environment, text);
}

class Socket {
  public:
    explicit Socket(int descriptor = -1) : descriptor_(descriptor) {}
    ~Socket() {
        if (descriptor_ >= 0) close(descriptor_);
    }
    Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(descriptor_, other.descriptor_);
        return *this;
    }
    operator int() const { return descriptor_; }

  private:
    int descriptor_;
};

using Head = std::array<char, kHead>;
Head make_head(const char* magic, uint32_t a, uint32_t b) {
    Head head;
    std::memcpy(head.data(), magic, kMagic);
    const uint32_t numbers[] = {htonl(a), htonl(b)};
    std::memcpy(head.data() + kMagic, numbers, sizeof numbers);
    return head;
}
// False where it begins otherwise.
bool read_head(const char* head, const char* magic, uint32_t& a, uint32_t& b) {
    uint32_t numbers[2];
    std::memcpy(numbers, head + kMagic, sizeof numbers);
    a = ntohl(numbers[0]);
    b = ntohl(numbers[1]);
    return std::memcmp(head, magic, kMagic) == 0;
}

// Whether the socket is ready before the deadline.
bool ready(int socket, short events, Clock::time_point deadline) {
    for (;;) {
        const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
        if (left <= 0) return false;
        pollfd wanted{socket, events, 0};
        const int n = poll(&wanted, 1, int(std::min<int64_t>(left, 1000)));
        if (n > 0) return true;
        if (n < 0 && errno != EINTR) return false;
    }
}
bool is_passing(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// All of the bytes, on a socket that does not block; otherwise why not.
std::string send_all(int socket, const char* data, size_t bytes, Clock::time_point deadline) {
    while (bytes > 0) {
        if (!ready(socket, POLLOUT, deadline)) return "it does not take data";
        const ssize_t n = send(socket, data, bytes, MSG_NOSIGNAL);
        if (n < 0 && !is_passing(errno)) return std::strerror(errno);
        if (n > 0) {
            data += n;
            bytes -= size_t(n);
        }
    }
    return {};
}
std::string receive_all(int socket, char* data, size_t bytes, Clock::time_point deadline) {
    while (bytes > 0) {
        if (!ready(socket, POLLIN, deadline)) return "it does not answer";
        const ssize_t n = recv(socket, data, bytes, 0);
        if (n == 0) return "it hung up";
        if (n < 0 && !is_passing(errno)) return std::strerror(errno);
        if (n > 0) {
            data += n;
            bytes -= size_t(n);
        }
    }
    return {};
}

// What an address and a port stand for. A null host: any address of this machine.
struct Addresses {
    addrinfo* first = nullptr;
    int error = 0;
    Addresses(const char* host, int port) {
        addrinfo hints{};
        hints.ai_family = AF_UNSPEC;
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = AI_NUMERICSERV | (host ? 0 : AI_PASSIVE);
        error = getaddrinfo(host, std::to_string(port).c_str(), &hints, &first);
    }
    ~Addresses() {
        if (first) freeaddrinfo(first);
    }
    Addresses(const Addresses&) = delete;
};
Socket new_socket(const addrinfo& a) {
    return Socket(socket(a.ai_family, a.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, a.ai_protocol));
}

// 300 or 0.5.
std::string in_words(double seconds) {
    std::string text = std::to_string(seconds);
    text.erase(text.find_last_not_of('0') + 1);
    if (text.ends_with('.')) text.pop_back();
    return text;
}

std::string peer_of(int socket) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    char host[NI_MAXHOST] = "?";
    if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &length) == 0)
        (void)getnameinfo(reinterpret_cast<sockaddr*>(&address), length, host, sizeof host, nullptr,
                          0, NI_NUMERICHOST);
    return host;
}

// ---- rank 0 ----

struct Guest {
    Socket socket;
    std::string from;
    Clock::time_point since;
    Head head{};
    size_t got = 0;  // of the head
    int rank = -1;   // when it is one of ours
};

std::vector<Socket> listen_on(int port, const std::string& where) {
    const Addresses any(nullptr, port);
    std::vector<Socket> listeners;
    std::string trouble = any.error ? gai_strerror(any.error) : "";
    for (const addrinfo* a = any.first; a; a = a->ai_next) {
        Socket s = new_socket(*a);
        if (s < 0) continue;  // a machine without IPv6, say
        const int on = 1;
        (void)setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (a->ai_family == AF_INET6)
            (void)setsockopt(s, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
        if (bind(s, a->ai_addr, a->ai_addrlen) == 0 && listen(s, SOMAXCONN) == 0) {
            listeners.push_back(std::move(s));
        } else {
            trouble = std::strerror(errno);
            if (errno == EADDRINUSE) listeners.clear();
            if (errno == EADDRINUSE) break;  // others would reach somebody else
        }
    }
    if (listeners.empty()) fail("rank 0 cannot listen at " + where + ": " + trouble);
    return listeners;
}

void reply(const Guest& guest, uint32_t verdict, const char* data, size_t bytes,
           Clock::time_point deadline) {
    const Head head = make_head(kReply, verdict, uint32_t(bytes));
    std::vector<char> all(head.begin(), head.end());
    all.insert(all.end(), data, data + bytes);
    (void)send_all(guest.socket, all.data(), all.size(), deadline);  // who is gone misses it
}

// Reads what has come of a guest's greeting. False when the guest is to go: it has hung up, or says
// more than a greeting.
bool hear(Guest& guest) {
    for (;;) {
        char more;
        const bool whole = guest.got == kHead;
        const ssize_t n = recv(guest.socket, whole ? &more : guest.head.data() + guest.got,
                               whole ? 1 : kHead - guest.got, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return is_passing(errno);
        if (n == 0 || whole) return false;
        guest.got += size_t(n);
    }
}

void gather_ranks(std::span<const std::byte> bytes, int size, int port, const std::string& where,
                  double seconds, Clock::time_point deadline) {
    const std::vector<Socket> listeners = listen_on(port, where);
    std::vector<Guest> guests;
    std::string refused;  // the last one, for the error
    const auto ranks_there = [&] {
        return std::ranges::count_if(guests, [](const Guest& g) { return g.rank >= 0; });
    };
    while (ranks_there() < size - 1) {
        if (Clock::now() >= deadline) {
            std::string missing;
            for (int r = 1; r < size; ++r)
                if (std::ranges::none_of(guests, [&](const Guest& g) { return g.rank == r; }))
                    missing += (missing.empty() ? "" : ", ") + std::to_string(r);
            const std::string why = "rank 0 of " + std::to_string(size) + " waited " +
                                    in_words(seconds) + " s at " + where + "; not there: rank " +
                                    missing + (refused.empty() ? "" : "; refused: " + refused);
            for (const Guest& g : guests)
                if (g.rank >= 0) reply(g, 1, why.data(), why.size(), Clock::now() + kRetry);
            fail(why);
        }
        std::vector<pollfd> wanted;
        for (const Socket& s : listeners) wanted.push_back({s, POLLIN, 0});
        for (const Guest& g : guests) wanted.push_back({g.socket, POLLIN, 0});
        (void)poll(wanted.data(), wanted.size(), int(kRetry.count()));
        for (const Socket& s : listeners)
            for (int made;
                 (made = accept4(s, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;)
                guests.push_back({Socket(made), peer_of(made), Clock::now()});
        std::vector<Guest> staying;
        for (Guest& guest : guests) {
            if (!hear(guest)) continue;  // it may come again
            uint32_t rank = 0, its_size = 0;
            if (guest.got < kHead) {
                if (Clock::now() - guest.since > kPatience) continue;
            } else if (!read_head(guest.head.data(), kHello, rank, its_size)) {
                continue;
            } else if (its_size != uint32_t(size) || rank == 0 || rank >= its_size) {
                const std::string why = "rank " + std::to_string(rank) + " of " +
                                        std::to_string(its_size) + " from " + guest.from +
                                        " is none of this job's " + std::to_string(size) + " ranks";
                reply(guest, 1, why.data(), why.size(), Clock::now() + kRetry);
                refused = why;
                continue;
            } else {
                guest.rank = int(rank);
            }
            staying.push_back(std::move(guest));
        }
        guests = std::move(staying);
        for (size_t i = 0; i < guests.size(); ++i)
            for (size_t j = 0; j < i; ++j) {
                if (guests[i].rank < 0 || guests[i].rank != guests[j].rank) continue;
                const std::string why = "rank " + std::to_string(guests[i].rank) + " of " +
                                        std::to_string(size) + " came to " + where +
                                        " twice, from " + guests[j].from + " and " +
                                        guests[i].from + "; every process needs a rank of its own";
                for (const Guest& g : guests)
                    reply(g, 1, why.data(), why.size(), Clock::now() + kRetry);
                fail(why);
            }
    }
    for (const Guest& guest : guests)
        if (guest.rank >= 0)
            reply(guest, 0, reinterpret_cast<const char*>(bytes.data()), bytes.size(), deadline);
}

// ---- the others ----

// One attempt: empty when the bytes are there, else what was in the way of this one.
std::string ask(std::span<std::byte> bytes, int rank, int size, const std::string& address,
                int port, const std::string& where, Clock::time_point deadline) {
    const Addresses found(address.c_str(), port);
    if (found.error) return gai_strerror(found.error);  // names, too, may come with the machine
    std::string trouble;
    for (const addrinfo* a = found.first; a; a = a->ai_next) {
        const Socket s = new_socket(*a);
        if (s < 0 || (connect(s, a->ai_addr, a->ai_addrlen) != 0 && errno != EINPROGRESS)) {
            trouble = std::strerror(errno);
            continue;
        }
        if (!ready(s, POLLOUT, std::min(deadline, Clock::now() + kPatience))) {
            trouble = "it does not answer";
            continue;
        }
        int error = 0;
        socklen_t length = sizeof error;
        (void)getsockopt(s, SOL_SOCKET, SO_ERROR, &error, &length);
        if (error) {
            trouble = std::strerror(error);
            continue;
        }
        Head head = make_head(kHello, uint32_t(rank), uint32_t(size));
        trouble = send_all(s, head.data(), kHead, deadline);
        if (trouble.empty()) trouble = receive_all(s, head.data(), kHead, deadline);
        if (!trouble.empty()) continue;
        uint32_t verdict = 0, count = 0;
        // This may also be the socket itself, where a port of the machine's own choice is tried
        // before anybody listens there.
        if (!read_head(head.data(), kReply, verdict, count)) {
            trouble = "what answers is no rank 0";
            continue;
        }
        if (verdict == 0 && count == bytes.size())
            return receive_all(s, reinterpret_cast<char*>(bytes.data()), count, deadline);
        std::string why(std::min<size_t>(count, kLongestText), ' ');
        if (verdict == 0)
            why = "it sends " + std::to_string(count) + " bytes where " +
                  std::to_string(bytes.size()) + " were expected; is it the same version?";
        else if (!receive_all(s, why.data(), why.size(), deadline).empty())
            why = "it gives no reason";
        fail("rank " + std::to_string(rank) + " was refused at " + where + ": " + why);
    }
    return trouble;
}

}  // namespace

void exchange_over_tcp(std::span<std::byte> bytes, int rank, int size, const std::string& address,
                       int port, double seconds) {
    const bool v6 = address.find(':') != std::string::npos;
    const std::string where = (v6 ? "[" + address + "]" : address) + ":" + std::to_string(port);
    if (size < 2) return;
    if (rank < 0 || rank >= size || port < 1 || port > 65535)
        fail("rank " + std::to_string(rank) + " of " + std::to_string(size) +
             " cannot meet the others at " + where + ": ranks are 0 to size - 1, ports 1 to 65535");
    const Clock::time_point deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(
                           std::chrono::duration<double>(patience(seconds, rank)));
    if (rank == 0) return gather_ranks(bytes, size, port, where, seconds, deadline);
    std::string trouble;  // of the last attempt that had its time
    for (;;) {
        const std::string now = ask(bytes, rank, size, address, port, where, deadline);
        if (now.empty()) return;
        if (trouble.empty() || Clock::now() < deadline) trouble = now;
        if (Clock::now() + kRetry >= deadline)
            fail("rank " + std::to_string(rank) + " of " + std::to_string(size) + " waited " +
                 in_words(seconds) + " s for rank 0 at " + where + ": " + trouble);
        std::this_thread::sleep_for(kRetry);
    }
}

}  // namespace fbt::dist
