// Element types of tensors and of safetensors files.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/types.h"

namespace fbt::tensor {

enum class DType { f32, f64, bf16, i32, i64, u8 };

constexpr int64_t size_of(DType t) {
    switch (t) {
        case DType::f32:
        case DType::i32:
            return 4;
        case DType::f64:
        case DType::i64:
            return 8;
        case DType::bf16:
            return 2;
        case DType::u8:
            return 1;
    }
    return 0;
}

constexpr const char* name_of(DType t) {
    switch (t) {
        case DType::f32:
            return "f32";
        case DType::f64:
            return "f64";
        case DType::bf16:
            return "bf16";
        case DType::i32:
            return "i32";
        case DType::i64:
            return "i64";
        case DType::u8:
            return "u8";
    }
    return "?";
}

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
    static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<double> {
    static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<kernels::bf16> {
    static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<int32_t> {
    static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<int64_t> {
    static constexpr DType value = DType::i64;
};
template <>
struct dtype_of<uint8_t> {
    static constexpr DType value = DType::u8;
};
template <>
struct dtype_of<kernels::Span> {  // span tables travel as raw bytes
    static constexpr DType value = DType::u8;
};

// The nearest bfloat16, ties to even, in one rounding. Rounding to float first would round twice;
// setting the last bit of a truncated float when anything was cut off ("round to odd") makes the
// second rounding right (Boldo and Melquiond, 2008: 24 >= 8 + 2 bits suffice).
inline kernels::bf16 round_to_bf16(double x) {
    float f = float(x);
    if (std::isfinite(f) && double(f) != x) {
        if (std::abs(double(f)) > std::abs(x)) f = std::nextafter(f, 0.0f);
        f = std::bit_cast<float>(std::bit_cast<uint32_t>(f) | 1u);
    }
    return kernels::bf16(f);
}

}  // namespace fbt::tensor
