// What the tests of row-wise and elementwise kernels share: arrays that begin at any alignment, and
// what a store rounds.
#pragma once
#include "tests/compare.h"
#include "tests/cuda/device.h"

namespace fbt::tests {

// Values on the device, `skip` elements after the start of an allocation: with skip = 1 no pointer
// is aligned to 16 bytes, and kernels must take their narrow path.
template <class T>
class DeviceRows {
  public:
    explicit DeviceRows(const std::vector<T>& values, size_t skip = 0)
        : skip_(skip), array_(padded(values, skip)) {}
    explicit DeviceRows(size_t size, size_t skip = 0) : skip_(skip), array_(skip + size) {}
    T* data() { return array_.data() + skip_; }
    std::vector<T> host() const {
        std::vector<T> values = array_.host();
        values.erase(values.begin(), values.begin() + std::ptrdiff_t(skip_));
        return values;
    }

  private:
    static std::vector<T> padded(std::vector<T> values, size_t skip) {
        values.insert(values.begin(), skip, T(0.f));
        return values;
    }
    size_t skip_;
    DeviceArray<T> array_;
};

template <class T>
std::vector<T> row_of(const std::vector<T>& values, int64_t n, int64_t width) {
    return {values.begin() + n * width, values.begin() + (n + 1) * width};
}

inline double largest(const std::vector<double>& v) {
    double most = 0;
    for (double x : v) most = std::max(most, std::abs(x));
    return most;
}

}  // namespace fbt::tests
