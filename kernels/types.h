// The plain types that every kernel contract shares. No allocation, no state.
#pragma once
#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_bf16.h>  // for the one instruction that rounds to bfloat16
#define FBT_HOST_DEVICE __host__ __device__
#else
#define FBT_HOST_DEVICE
#endif

// Every op is declared once, in its contract header, and offered by three backends under the same
// name: `ref` (plain loops, float or double), `cpu` (vectorised) and `cuda` (real or emulated).
#define FBT_OP(...)  \
    namespace ref {  \
    __VA_ARGS__      \
    }                \
    namespace cpu {  \
    __VA_ARGS__      \
    }                \
    namespace cuda { \
    __VA_ARGS__      \
    }

namespace fbt::kernels {

enum class Code { ok, bad_argument, unsupported, device_error };

// What a kernel returns. `message` is a string literal and says what was wrong.
struct [[nodiscard]] Status {
    Code code = Code::ok;
    const char* message = "";
    bool ok() const { return code == Code::ok; }
};

// An ordered queue of one device. Host backends run at once, on `threads` OpenMP threads; for cuda
// `handle` is the cudaStream_t. No result depends on `threads`.
struct Stream {
    void* handle = nullptr;
    int threads = 1;
};

// A bfloat16: the upper half of an IEEE float. It only stores: arithmetic is done in float, and
// bf16(x) rounds to the nearest, ties to even (a NaN stays some NaN).
struct bf16 {
    uint16_t bits;

    bf16() = default;
    FBT_HOST_DEVICE explicit bf16(float x) {
#if defined(__CUDA_ARCH__)
        bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
        // The sum could carry a NaN's bits away, so they are set again; without a branch, so that
        // compilers vectorise it.
        const uint32_t b = std::bit_cast<uint32_t>(x), nan = x != x ? 0x7fc00000u : 0;
        bits = uint16_t(((b + 0x7fffu + (b >> 16 & 1)) | nan) >> 16);
#endif
    }
    FBT_HOST_DEVICE explicit operator float() const {
        return std::bit_cast<float>(uint32_t(bits) << 16);
    }
};

// The type in which sums, saved statistics and parameter gradients are kept.
template <class T>
struct accumulate {
    using type = float;
};
template <>
struct accumulate<double> {
    using type = double;
};
template <class T>
using accumulate_t = typename accumulate<T>::type;

// Attention walks keys in splits of this many positions, counted from position 0 of the sequence:
// online softmax restarts in each split, and splits are combined in order (the row rule). Key
// stores hand out rows in blocks of the same size.
inline constexpr int kKeyBlock = 64;

// Sums over rows (gains' gradients, norms) run over chunks of this many rows, combined in order.
inline constexpr int kRowChunk = 64;
FBT_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FBT_HOST_DEVICE constexpr int64_t row_chunks(int64_t rows) { return ceil_div(rows, kRowChunk); }

// A run of consecutive positions [first, first+count) of one sequence whose earlier positions'
// keys and values are already stored.
struct Span {
    int64_t row;    // its first row in the packed activations [N, ...]
    int64_t block;  // its sequence's first entry in SpanTable::blocks
    int32_t first;  // position of that row in its sequence
    int32_t count;  // rows
};

// Where the keys of every span lie. Position s of a span's sequence is row
//   blocks[span.block + s / kKeyBlock] + s % kKeyBlock
// of the key store, whether the store is contiguous (blocks 64 apart) or paged.
// `spans` and `blocks` point to the memory of the device that runs the kernel.
struct SpanTable {
    const Span* spans = nullptr;
    const int64_t* blocks = nullptr;
    int32_t count = 0;      // spans
    int32_t max_count = 0;  // the longest span's rows
    int32_t max_end = 0;    // no first + count is larger
    int64_t rows = 0;       // N, the sum of the spans' counts
};

}  // namespace fbt::kernels
