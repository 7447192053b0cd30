// What tests of failing kernels share.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "kernels/types.h"
#include "tests/simt/emu.h"

namespace fbt::tests {

// What goes wrong with a launch, at once or when it runs; empty if nothing does.
inline std::string failure_of(kernels::Status launched) {
    if (!launched.ok()) return launched.message;
    const cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess) return "";
    const std::string text = cudaGetErrorString(error);
    simt::clear_failure();
    return text;
}

inline testing::AssertionResult fails_with(const std::string& failure, const std::string& text) {
    if (failure.find(text) != std::string::npos) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << (failure.empty() ? "nothing failed" : "the message is: " + failure);
}
inline testing::AssertionResult fails_with(kernels::Status launched, const std::string& text) {
    return fails_with(failure_of(launched), text);
}

}  // namespace fbt::tests
