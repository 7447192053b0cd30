// The sizes of a tensor's dimensions. At most kMostDimensions of them lie in the object itself:
// decoding makes a thousand shapes a token, and none of them may allocate.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "tensor/error.h"

namespace fbt::tensor {

class Shape {
  public:
    static constexpr size_t kMostDimensions = 6;

    Shape() = default;
    Shape(std::initializer_list<int64_t> sizes) : Shape(sizes.begin(), sizes.end()) {}
    explicit Shape(const std::vector<int64_t>& sizes) : Shape(sizes.begin(), sizes.end()) {}
    template <class Iterator>
    Shape(Iterator first, Iterator last) : count_(size_t(last - first)) {
        if (count_ > kMostDimensions)
            throw Error(ErrorKind::internal, "a tensor of " + std::to_string(count_) +
                                                 " dimensions, at most " +
                                                 std::to_string(kMostDimensions) + " are possible");
        std::copy(first, last, sizes_);
    }

    size_t size() const { return count_; }
    bool empty() const { return count_ == 0; }
    int64_t operator[](size_t i) const { return sizes_[i]; }
    int64_t& operator[](size_t i) { return sizes_[i]; }
    int64_t back() const { return sizes_[count_ - 1]; }
    const int64_t* begin() const { return sizes_; }
    const int64_t* end() const { return sizes_ + count_; }
    bool operator==(const Shape& other) const {  // every op compares some
        bool same = count_ == other.count_;
        for (size_t i = 0; same && i < count_; ++i) same = sizes_[i] == other.sizes_[i];
        return same;
    }

  private:
    int64_t sizes_[kMostDimensions] = {};
    size_t count_ = 0;
};

std::string to_string(const Shape& shape);
int64_t numel_of(const Shape& shape);

}  // namespace fbt::tensor
