// Orthogonalisation of a matrix by products alone, as Muon does it (Jordan et al., "Muon: An
// optimizer for hidden layers in neural networks", 2024).
#pragma once
#include "tensor/tensor.h"

namespace fbt::tensor {

// One iteration maps every singular value s to p(s) = kA*s + kB*s^3 + kC*s^5 and keeps the singular
// vectors. Five of them take [0.01, 1] into [0.68, 1.14], and [0.002, 1] into [0.68, 1.21]: the
// coefficients were chosen for speed near 0, not to converge to 1.
inline constexpr double kNewtonSchulzA = 3.4445, kNewtonSchulzB = -4.7750, kNewtonSchulzC = 2.0315;
inline constexpr int kNewtonSchulzIterations = 5;

// m = U S V^T  ->  U p(p(p(p(p(S / (||S|| + 1e-7)))))) V^T, with p and the norm above.
// Shapes  m and the result [N,K], N, K >= 1.
// Dtypes  the result and its products `dtype`; m its accumulate dtype, as are Gram matrices.
Tensor newton_schulz(const Tensor& m, DType dtype);

}  // namespace fbt::tensor
