#include "tensor/tensor.h"

#include <algorithm>

namespace fbt::tensor {

std::string to_string(const Shape& shape) {
    std::string s = "[";
    for (size_t i = 0; i < shape.size(); ++i) s += (i ? "," : "") + std::to_string(shape[i]);
    return s + "]";
}

int64_t numel_of(const Shape& shape) {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
}

Tensor Tensor::empty(Context& context, Shape shape, DType dtype, Use use) {
    Tensor t;
    t.context_ = &context;
    t.numel_ = numel_of(shape);
    t.shape_ = std::move(shape);
    t.dtype_ = dtype;
    t.storage_ = std::make_shared<Storage>(context.arena(), t.bytes(), use);
    return t;
}

Tensor Tensor::zeros(Context& context, Shape shape, DType dtype) {
    Tensor t = empty(context, std::move(shape), dtype);
    t.zero();
    return t;
}

Tensor Tensor::from_double(Context& context, const std::vector<double>& values, Shape shape,
                           DType dtype) {
    if (dtype == DType::f64) return from(context, values, std::move(shape));
    if (dtype == DType::bf16) {
        std::vector<kernels::bf16> rounded(values.size());
        std::transform(values.begin(), values.end(), rounded.begin(), round_to_bf16);
        return from(context, rounded, std::move(shape));
    }
    return from(context, std::vector<float>(values.begin(), values.end()), std::move(shape));
}

Tensor Tensor::view(Shape shape) const {
    if (numel_of(shape) != numel_)
        throw Error(ErrorKind::internal,
                    "view: " + to_string(shape_) + " cannot be seen as " + to_string(shape));
    Tensor t = *this;
    t.shape_ = std::move(shape);
    return t;
}

Tensor Tensor::rows(int64_t first, int64_t count) const {
    if (first < 0 || count < 0 || first + count > shape_[0])
        throw Error(ErrorKind::internal, "rows: " + std::to_string(first) + "+" +
                                             std::to_string(count) + " of " + to_string(shape_));
    Tensor t = *this;
    const int64_t width = shape_[0] ? numel_ / shape_[0] : 0;
    t.offset_ += size_t(first * width) * size_of(dtype_);
    t.shape_[0] = count;
    t.numel_ = count * width;
    return t;
}

void Tensor::zero() { context_->arena()->memory().zero(raw(), bytes()); }

void Tensor::copy_from(const Tensor& other) {
    if (other.numel_ != numel_ || other.dtype_ != dtype_)
        throw Error(ErrorKind::internal, "copy: " + to_string(other.shape_) + " " +
                                             name_of(other.dtype_) + " into " + to_string(shape_) +
                                             " " + name_of(dtype_));
    context_->arena()->memory().copy(raw(), other.raw(), bytes());
}

void Tensor::copy_in(const void* host, size_t n) {
    if (n != bytes())
        throw Error(ErrorKind::internal, "copy in: " + std::to_string(n) + " bytes into " +
                                             to_string(shape_) + " " + name_of(dtype_));
    context_->arena()->memory().copy_in(raw(), host, n);
}

void Tensor::copy_out(void* host, DType wanted) const {
    if (wanted != dtype_) wrong_dtype(name_of(wanted));
    context_->arena()->memory().copy_out(host, raw(), bytes());
}

std::vector<double> Tensor::to_double() const {
    if (dtype_ == DType::f64) return to_vector<double>();
    if (dtype_ == DType::bf16) {
        std::vector<double> out;
        for (const kernels::bf16 x : to_vector<kernels::bf16>()) out.push_back(float(x));
        return out;
    }
    const std::vector<float> v = to_vector<float>();
    return {v.begin(), v.end()};
}

void Tensor::wrong_dtype(const char* wanted) const {
    throw Error(ErrorKind::internal, std::string("tensor ") + to_string(shape_) + " is " +
                                         name_of(dtype_) + ", wanted " + wanted);
}

}  // namespace fbt::tensor
