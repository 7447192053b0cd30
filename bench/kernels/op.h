// One op at one shape: how it is called, checked against the reference, and counted.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/types.h"

namespace fbt::bench {

using namespace kernels;

// What one call must do at least: the numerator of its rate.
struct Work {
    enum class Unit { flop, byte } unit;
    double amount;
};
inline Work flops(double amount) { return {Work::Unit::flop, amount}; }
inline Work bytes(double amount) { return {Work::Unit::byte, amount}; }
// `count` numbers of dtype T.
template <class T>
Work moved(double count) {
    return bytes(count * sizeof(T));
}

// `count` numbers of T, or of A = accumulate_t<T>, that start uniform on [low, high]. In every
// dtype they are numbers that T holds, so that rounding the arguments is no part of an error.
struct Array {
    enum class Element { t, a } element;
    int64_t count;
    float low = -1, high = 1;
};
inline Array in_t(int64_t count, float low = -1, float high = 1) {
    return {Array::Element::t, count, low, high};
}
inline Array in_a(int64_t count, float low = -1, float high = 1) {
    return {Array::Element::a, count, low, high};
}

// Passes when |cpu - ref| <= absolute + relative*|ref|, ref computed in double. It bounds what is
// computed in float; the last rounding, to T, is added to it.
struct Bound {
    double absolute, relative = 0;
};
// Relative error of n roundings to float (Higham, Accuracy and Stability, eq. 3.3).
inline double gamma(double n) {
    const double u = std::numeric_limits<float>::epsilon() / 2;
    return n * u / (1 - n * u);
}
// Relative error of one rounding to T on the way, beyond float's.
template <class T>
constexpr double kRounding = std::is_same_v<T, bf16> ? 0x1p-8 : 0;

using Call = std::function<Status(void* const* arrays, Stream s)>;

struct Op {
    std::string name, shape;
    Work work;
    std::vector<Array> arrays;
    std::vector<Bound> outputs;  // of arrays 0, 1, ...: as many as are checked
    Call call, ref;
    Call prepare = {}, ref_prepare = {};  // once, before the first call: what the op takes as given
    std::string kernel = "cpu";
    std::string dtype = {};    // set by Ops::add, with the two below
    int64_t element_size = 0;  // bytes of a T
    double rounding = 0;       // kRounding<T>
};

// One expression, called on both backends: with E = T for `cpu` and with E = double for `ref`.
// In it t(i) and a(i) are array i, of E and of A = accumulate_t<E>.
#define FBT_CALL_ON(BACKEND, TYPE, ...)                                                    \
    [=](void* const* arrays, Stream s) -> Status {                                         \
        namespace backend = fbt::kernels::BACKEND;                                         \
        using E [[maybe_unused]] = TYPE;                                                   \
        using A [[maybe_unused]] = accumulate_t<TYPE>;                                     \
        const auto t [[maybe_unused]] = [=](int i) { return static_cast<E*>(arrays[i]); }; \
        const auto a [[maybe_unused]] = [=](int i) { return static_cast<A*>(arrays[i]); }; \
        return __VA_ARGS__;                                                                \
    }
#define FBT_CALL(...) FBT_CALL_ON(cpu, T, __VA_ARGS__), FBT_CALL_ON(ref, double, __VA_ARGS__)

// Sizes of a model and of its training step.
struct Sizes {
    int64_t N;  // rows of a step: N/T sequences of T
    int D, H, G, C, F, V, T;
};

class Ops {
  public:
    explicit Ops(const Sizes& sizes) : sizes(sizes) {}
    template <class T>
    void add(Op op) {
        op.dtype = std::is_same_v<T, bf16> ? "bf16" : "f32";
        op.element_size = sizeof(T);
        op.rounding = kRounding<T>;
        all.push_back(std::move(op));
    }
    const Sizes sizes;
    std::vector<Op> all;
};

// Logits exist for so many rows at a time (autograd/ops.h).
inline int64_t logit_rows(const Sizes& m) { return std::min<int64_t>(256, m.N); }

inline std::string by(std::initializer_list<int64_t> sizes) {
    std::string text;
    for (int64_t n : sizes) text += (text.empty() ? "" : "x") + std::to_string(n);
    return text;
}

// 0, 1, ..., n-1 in some order.
inline std::shared_ptr<const std::vector<int64_t>> shuffled(int64_t n) {
    auto v = std::make_shared<std::vector<int64_t>>(n);
    std::iota(v->begin(), v->end(), 0);
    std::shuffle(v->begin(), v->end(), std::mt19937(1));
    return v;
}

inline std::shared_ptr<const std::vector<int32_t>> random_tokens(int64_t n, int V) {
    auto tokens = std::make_shared<std::vector<int32_t>>(n);
    std::mt19937 random(1);
    for (int32_t& t : *tokens) t = int32_t(random() % unsigned(V));
    return tokens;
}

// One function a file of this folder: its ops at these sizes, in every dtype that they have.
void add_matmul(Ops& ops);
void add_attention(Ops& ops);
void add_rmsnorm(Ops& ops);
void add_qk_norm_rope(Ops& ops);
void add_swiglu(Ops& ops);
void add_gate(Ops& ops);
void add_embedding(Ops& ops);
void add_cross_entropy(Ops& ops);
void add_carry(Ops& ops);
void add_kv_store(Ops& ops);
void add_elementwise(Ops& ops);
void add_square_sum(Ops& ops);
void add_adamw(Ops& ops);
void add_normuon(Ops& ops);
void add_sampling(Ops& ops);

}  // namespace fbt::bench
