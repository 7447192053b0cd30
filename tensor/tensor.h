// A dense, row-major array in the memory of one context. Copying a Tensor shares its storage.
// Tensors know nothing of gradients.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "tensor/context.h"
#include "tensor/dtype.h"
#include "tensor/shape.h"

namespace fbt::tensor {

class Tensor {
  public:
    Tensor() = default;  // undefined: no storage

    // Contents unspecified.
    static Tensor empty(Context& context, Shape shape, DType dtype, Use use = Use::work);
    static Tensor zeros(Context& context, Shape shape, DType dtype);
    // Values from the host.
    template <class T>
    static Tensor from(Context& context, const std::vector<T>& values, Shape shape) {
        Tensor t = empty(context, std::move(shape), dtype_of<T>::value, Use::inbox);
        t.copy_in(values.data(), values.size() * sizeof(T));
        return t;
    }
    // Values kept in double on the host, stored in a floating dtype.
    static Tensor from_double(Context& context, const std::vector<double>& values, Shape shape,
                              DType dtype);

    bool defined() const { return storage_ != nullptr; }
    const Shape& shape() const { return shape_; }
    int64_t dim(int i) const { return shape_[i]; }
    int64_t numel() const { return numel_; }
    DType dtype() const { return dtype_; }
    size_t bytes() const { return size_t(numel_) * size_of(dtype_); }
    Context& context() const { return *context_; }
    bool shares_storage() const { return storage_.use_count() > 1; }

    // Device pointer; throws internal when T is not the dtype. Null for an undefined tensor.
    template <class T>
    T* data() const {
        if (!storage_) return nullptr;
        if (dtype_of<T>::value != dtype_) wrong_dtype(name_of(dtype_of<T>::value));
        return reinterpret_cast<T*>(raw());
    }
    std::byte* raw() const { return static_cast<std::byte*>(storage_->pointer) + offset_; }

    // The same elements in another shape; a slice of dimension 0. Errors  internal when the sizes
    // do not fit.
    Tensor view(Shape shape) const;
    Tensor rows(int64_t first, int64_t count) const;

    void zero();
    void copy_from(const Tensor& other);  // same numel and dtype
    void copy_in(const void* host, size_t bytes);
    template <class T>
    std::vector<T> to_vector() const {
        std::vector<T> out(numel_);
        if (numel_ > 0) copy_out(out.data(), dtype_of<T>::value);
        return out;
    }
    std::vector<double> to_double() const;  // from a floating dtype

  private:
    struct Storage {
        std::shared_ptr<Arena> arena;
        void* pointer;
        size_t bytes;
        Use use;
        Storage(std::shared_ptr<Arena> a, size_t n, Use u)
            : arena(std::move(a)), pointer(arena->allocate(n, u)), bytes(n), use(u) {}
        ~Storage() { arena->release(pointer, bytes, use); }
    };
    [[noreturn]] void wrong_dtype(const char* wanted) const;
    void copy_out(void* host, DType wanted) const;

    std::shared_ptr<Storage> storage_;
    Context* context_ = nullptr;
    size_t offset_ = 0;  // bytes
    int64_t numel_ = 0;
    Shape shape_;
    DType dtype_ = DType::f32;
};

}  // namespace fbt::tensor
