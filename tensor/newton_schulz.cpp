#include "tensor/newton_schulz.h"

#include "tensor/ops.h"

namespace fbt::tensor {

// With X tall, so that the square matrices are the small ones:
//   G = X^T X      X <- kA*X + X (kB*G + kC*G^2)
Tensor newton_schulz(const Tensor& m, DType dtype) {
    if (m.shape().size() != 2 || m.numel() == 0)
        throw Error(ErrorKind::internal,
                    "newton_schulz: m is " + to_string(m.shape()) + ", needed a matrix");
    const bool wide = m.dim(0) < m.dim(1);
    Tensor x = frobenius_normalize(wide ? transpose(m) : m, dtype);
    const int64_t K = x.dim(1);
    const DType a = accumulate_dtype(dtype);
    Tensor gram = Tensor::empty(m.context(), {K, K}, a);
    Tensor square = Tensor::empty(m.context(), {K, K}, a);
    Tensor product = Tensor::empty(m.context(), x.shape(), dtype);
    PackedMatrix packed;
    for (int i = 0; i < kNewtonSchulzIterations; ++i) {
        gram.zero();
        matmul_dw_accum(gram, x, x);
        const Tensor rounded = cast(gram, dtype);
        square.zero();
        matmul_dw_accum(square, rounded, rounded);  // G^T G, and G is symmetric
        axpby(square, kNewtonSchulzB, gram, kNewtonSchulzC);
        matmul_pack(packed, square, true, dtype);
        matmul_forward(product, x, packed);
        axpby(product, kNewtonSchulzA, x, 1);
        std::swap(x, product);
    }
    return wide ? transpose(x) : x;
}

}  // namespace fbt::tensor
