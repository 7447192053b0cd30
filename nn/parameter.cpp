#include "nn/parameter.h"

#include <cmath>
#include <numbers>

#include "kernels/philox.h"
#include "tensor/file.h"

namespace fbt::nn {
namespace {

// Standard normal numbers by Box and Muller, two from each pair of uniforms.
std::vector<double> normal(const std::string& name, int64_t n, double std, uint64_t seed) {
    const auto key = kernels::philox_key(seed, kernels::Draw::initial_weights,
                                         tensor::hash(tensor::bytes_of(name)));
    std::vector<double> out(n);
    for (int64_t i = 0; i < n; i += 4) {
        const kernels::Philox4 bits = kernels::philox_four(key, uint64_t(i / 4), 0, 0);
        for (int pair = 0; pair < 2; ++pair) {
            const double u = (bits.v[2 * pair] + 0.5) * 0x1p-32, v = bits.v[2 * pair + 1] * 0x1p-32;
            const double r = std * std::sqrt(-2 * std::log(u)), a = 2 * std::numbers::pi * v;
            if (i + 2 * pair < n) out[i + 2 * pair] = r * std::cos(a);
            if (i + 2 * pair + 1 < n) out[i + 2 * pair + 1] = r * std::sin(a);
        }
    }
    return out;
}

}  // namespace

void Parameter::set(Context& context, const std::vector<double>& values, DType dtype,
                    bool trained) {
    const DType master = tensor::accumulate_dtype(dtype);
    dtype_ = dtype;
    weight_.value = Tensor::from_double(context, values, shape_, master);
    if (!trained)
        weight_.grad = {};
    else if (!weight_.grad.defined())
        weight_.grad = Tensor::zeros(context, shape_, master);
    updated();
    if (!owned_) disown();
}

void Parameter::pack(const Tensor& master) {
    tensor::matmul_pack(weight_.packed, master, false, dtype_);
    if (trained()) tensor::matmul_pack(weight_.packed_back, master, true, dtype_);
}

void Parameter::updated() {
    if (role_ != Role::gain) pack(weight_.value);
}

void Parameter::disown() {
    owned_ = false;
    if (weight_.value.defined())
        weight_.value = role_ == Role::embedding ? tensor::cast(weight_.value, dtype_) : Tensor();
}

void Parameter::arrived(const Tensor& values) {
    pack(tensor::widen(values));
    if (role_ == Role::embedding) weight_.value.copy_from(values);
}

Parameter& ParameterSet::add(std::string name, Shape shape, Role role) {
    return all_.emplace_back(std::move(name), std::move(shape), role);
}

Parameter& ParameterSet::at(const std::string& name) {
    for (Parameter& p : all_)
        if (p.name() == name) return p;
    throw tensor::Error(tensor::ErrorKind::internal, "no parameter is named " + name);
}

int64_t ParameterSet::count() const {
    int64_t n = 0;
    for (const Parameter& p : all_) n += tensor::numel_of(p.shape());
    return n;
}

void ParameterSet::initialise(Context& context, DType dtype, uint64_t seed, bool trained) {
    for (Parameter& p : all_) {
        const int64_t n = tensor::numel_of(p.shape());
        const double std =
            p.role() == Role::embedding ? 0.02 : 1 / std::sqrt(double(p.shape().back()));
        p.set(context,
              p.role() == Role::gain ? std::vector<double>(n, 1) : normal(p.name(), n, std, seed),
              dtype, trained);
    }
}

void ParameterSet::zero_gradients() {
    for (Parameter& p : all_)
        if (p.trained()) {
            p.weight().grad.zero();
            p.weight().reached = false;
        }
}

}  // namespace fbt::nn
