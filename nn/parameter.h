// Named parameters: master weights, gradients, and the copies that kernels want.
#pragma once
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "autograd/ops.h"

namespace fbt::nn {

using autograd::Weight;
using tensor::Context;
using tensor::DType;
using tensor::Shape;
using tensor::Tensor;

// What a parameter is decides how it is initialised, stored and optimised.
enum class Role {
    gain,       // [D]: starts at 1, never decayed
    matrix,     // [out, in]: normal with std 1/sqrt(in)
    embedding,  // [V, D]: normal with std 0.02; looked up and, tied, multiplied by
};

class Parameter {
  public:
    Parameter(std::string name, Shape shape, Role role)
        : name_(std::move(name)), shape_(std::move(shape)), role_(role) {}

    const std::string& name() const { return name_; }
    const Shape& shape() const { return shape_; }
    Role role() const { return role_; }
    // What an optimiser multiplies its learning rate by for this parameter.
    double rate() const { return rate_; }
    void set_rate(double rate) { rate_ = rate; }
    Weight& weight() { return weight_; }
    const Weight& weight() const { return weight_; }
    bool trained() const { return weight_.grad.defined(); }
    // Whether it is updated here. Of a matrix or embedding that another process updates there is no
    // master copy: weight().value is undefined, or the embedding's table in the compute dtype.
    bool owned() const { return owned_; }

    // Puts values in place, in the accumulate dtype of `dtype`, in which products will be computed;
    // with a gradient if it is trained: zero, unless there is one already.
    void set(Context& context, const std::vector<double>& values, DType dtype, bool trained);
    // To be called whenever weight().value changed: refreshes the packed copies.
    void updated();
    // Lets the master copy go, now and at every set(). Not for gains, which are used as they are.
    void disown();
    // The owner's new values of one that is not owned: its master, rounded to the compute dtype.
    void arrived(const Tensor& values);

  private:
    void pack(const Tensor& master);

    std::string name_;
    Shape shape_;
    Role role_;
    double rate_ = 1;
    bool owned_ = true;
    Weight weight_;
    DType dtype_ = DType::f32;
};

// The parameters of a model, in the order of its checkpoint names. Addresses stay valid.
class ParameterSet {
  public:
    Parameter& add(std::string name, Shape shape, Role role);
    std::deque<Parameter>& all() { return all_; }
    const std::deque<Parameter>& all() const { return all_; }
    Parameter& at(const std::string& name);
    int64_t count() const;  // numbers, not tensors

    // Embedding normal with std 0.02, gains 1, matrices normal with std 1/sqrt(fan_in), drawn by
    // counter from the seed and the parameter's name, so that adding one moves no other.
    void initialise(Context& context, DType dtype, uint64_t seed, bool trained);
    void zero_gradients();

  private:
    std::deque<Parameter> all_;
};

}  // namespace fbt::nn
