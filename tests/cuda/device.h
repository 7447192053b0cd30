// What the tests of CUDA kernels share: arrays on the device, and the schedules to run under. The
// same tests are built twice: against the emulated device (simt_test), under several schedules, and
// with nvcc against a real one (cuda_test), where each reports itself skipped when there is no GPU.
#pragma once
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/types.h"
#ifdef FBT_SIMT
#include "tests/simt/emu.h"
#endif

#if defined(__SANITIZE_ADDRESS__)
#define FBT_TEST_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define FBT_TEST_TSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FBT_TEST_ASAN 1
#elif __has_feature(thread_sanitizer)
#define FBT_TEST_TSAN 1
#endif
#endif
#ifndef FBT_TEST_ASAN
#define FBT_TEST_ASAN 0
#endif
#ifndef FBT_TEST_TSAN
#define FBT_TEST_TSAN 0
#endif

#ifdef FBT_SIMT
namespace fbt::simt {
inline std::string to_string(const Schedule& schedule) {
    const char* names[] = {"forward", "reverse", "lifo", "random"};
    std::string name = names[int(schedule.order)];
    if (schedule.order == Order::random) name += std::to_string(schedule.seed);
    return name;
}
inline void PrintTo(const Schedule& schedule, std::ostream* out) {  // for gtest's listings
    *out << to_string(schedule);
}
}  // namespace fbt::simt
#endif

namespace fbt::tests {

// An allocation of its own, so that AddressSanitizer sees its ends.
template <class T>
class DeviceArray {
  public:
    // Unwritten: all ones, NaN in float.
    explicit DeviceArray(size_t size) : size_(size) {
        void* memory = nullptr;
        check(cudaMalloc(&memory, size * sizeof(T)));
        data_ = static_cast<T*>(memory);
    }
    explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
        copy(data_, host.data(), cudaMemcpyHostToDevice);
    }
    DeviceArray(const DeviceArray&) = delete;
    ~DeviceArray() { cudaFree(data_); }

    T* data() { return data_; }
    std::vector<T> host() const {
        std::vector<T> values(size_);
        copy(values.data(), data_, cudaMemcpyDeviceToHost);
        return values;
    }

  private:
    void copy(T* to, const T* from, cudaMemcpyKind kind) const {
        check(cudaMemcpyAsync(to, from, size_ * sizeof(T), kind, nullptr));
        check(cudaStreamSynchronize(nullptr));  // a kernel that failed says so here
    }
    static void check(cudaError_t error) {
        if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
    }
    T* data_;
    size_t size_;
};

#ifdef FBT_SIMT
inline constexpr const char* kDevice = "simt";
using Schedule = simt::Schedule;
inline const Schedule kSchedules[] = {{simt::Order::forward, 1},
                                      {simt::Order::reverse, 1},
                                      {simt::Order::lifo, 1},
                                      {simt::Order::random, 1},
                                      {simt::Order::random, 2}};
#else  // the GPU has its own
inline constexpr const char* kDevice = "cuda";
struct Schedule {};
inline const Schedule kSchedules[] = {{}};
inline std::string to_string(const Schedule&) { return "gpu"; }
#endif
inline std::string schedule_name(const testing::TestParamInfo<Schedule>& info) {
    return to_string(info.param);
}

inline void skip_without_device() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
        GTEST_SKIP() << "no CUDA device";
}

// A test that runs under each of them.
class ScheduleTest : public testing::TestWithParam<Schedule> {
  protected:
#ifdef FBT_SIMT
    void SetUp() override { simt::set_schedule(GetParam()); }
    void TearDown() override {
        simt::set_schedule({});
        simt::clear_failure();
    }
#else
    void SetUp() override { skip_without_device(); }
#endif
};

inline testing::AssertionResult ok(kernels::Status status) {
    if (status.ok()) return testing::AssertionSuccess();
    return testing::AssertionFailure() << status.message;
}

}  // namespace fbt::tests
