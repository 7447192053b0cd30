#include "autograd/ops.h"

#include <cmath>

namespace fbt::autograd {
namespace {

using tensor::accumulate_dtype;
using tensor::DType;
using tensor::Shape;

Tensor like(const Tensor& t) { return Tensor::empty(t.context(), t.shape(), t.dtype()); }

// Saved statistics are worth their memory only when a rule will read them.
Tensor saved(const Tape& tape, const Tensor& x, Shape shape) {
    if (!tape.recording()) return {};
    return Tensor::empty(x.context(), std::move(shape), accumulate_dtype(x.dtype()));
}

bool trains(const Weight& w) { return w.grad.defined(); }

// Keys' and values' gradients arrive in the accumulate dtype; here their path narrows.
Tensor narrow(const Tensor& gradient, const Tensor& x) { return tensor::cast(gradient, x.dtype()); }

void reach(Weight& w) { w.reached = w.reached || trains(w); }

}  // namespace

// dx = sum_i dy_i W_i      dW_i += dy_i^T x
std::vector<Var> linear(Tape& tape, const Var& x, const std::vector<Weight*>& ws) {
    std::vector<const tensor::PackedMatrix*> packed;
    packed.reserve(ws.size());
    for (Weight* w : ws) {
        w->settle();
        packed.push_back(&w->packed);
    }
    std::vector<Tensor> ys = tensor::matmul_forward(x.value(), packed);
    if (!tape.notes()) return tape.constants(std::move(ys));
    return tape.record(
        std::move(ys), {x},
        [x, ws](const std::vector<Tensor>& d) -> std::vector<Tensor> {
            Tensor dx;
            for (size_t i = ws.size(); i-- > 0;) {
                if (!d[i].defined()) continue;
                const Tensor dy = narrow(d[i], x.value());
                if (trains(*ws[i])) {
                    tensor::matmul_dw_accum(ws[i]->grad, dy, x.value());
                    reach(*ws[i]);
                }
                if (!x.needs_grad()) continue;
                const Tensor part = tensor::matmul_forward(dy, ws[i]->packed_back);
                if (dx.defined())
                    tensor::add_accum(dx, part);
                else
                    dx = part;
            }
            return {dx};
        },
        ws);
}

Var linear(Tape& tape, const Var& x, Weight& w) {
    if (!tape.notes()) {
        w.settle();
        return tape.constant(tensor::matmul_forward(x.value(), w.packed));
    }
    return linear(tape, x, std::vector<Weight*>{&w})[0];
}

// dw[v] += sum over n with tokens[n] = v of dy[n]
Var embedding(Tape& tape, const Tensor& tokens, Weight& w) {
    w.settle();
    return tape.record(tensor::embedding_forward(tokens, w.value, w.packed.data.dtype()), {},
                       [tokens, &w](const std::vector<Tensor>& d) -> std::vector<Tensor> {
                           tensor::embedding_backward_accum(w.grad, d[0], tokens);
                           reach(w);
                           return {};
                       },
                       {&w});
}

// g = dy*gain, xhat = x*rstd:   dx = rstd*(g - xhat*mean_d(g*xhat))    dgain = sum_n dy*xhat
Var rmsnorm(Tape& tape, const Var& x, Weight& gain, double eps) {
    Tensor y = like(x.value());
    Tensor rstd = saved(tape, x.value(), {x.value().dim(0)});
    tensor::rmsnorm_forward(y, rstd, x.value(), gain.value, eps);
    return tape.record(
        std::move(y), {x},
        [x, rstd, &gain](const std::vector<Tensor>& d) -> std::vector<Tensor> {
            reach(gain);
            return {tensor::rmsnorm_backward(gain.grad, d[0], x.value(), gain.value, rstd, 1)};
        },
        {&gain});
}

// dx = dy      dbranch, dgain: RMSNorm's, of alpha*dy
Var residual_rmsnorm(Tape& tape, const Var& x, const Var& branch, Weight& gain, double alpha,
                     double eps) {
    Tensor y = like(x.value());
    Tensor rstd = saved(tape, x.value(), {x.value().dim(0)});
    tensor::residual_rmsnorm_forward(y, rstd, x.value(), branch.value(), gain.value, alpha, eps);
    return tape.record(
        std::move(y), {x, branch},
        [branch, rstd, &gain, alpha](const std::vector<Tensor>& d) -> std::vector<Tensor> {
            reach(gain);
            return {d[0], tensor::rmsnorm_backward(gain.grad, d[0], branch.value(), gain.value,
                                                   rstd, alpha)};
        },
        {&gain});
}

// dz = dy rotated by -t; then RMSNorm's rule over C, dgain over rows and heads
Var qk_norm_rope(Tape& tape, const Var& x, Weight& gain, const Tensor& cos, const Tensor& sin,
                 const Tensor& positions, double eps) {
    Tensor y = like(x.value());
    Tensor rstd = saved(tape, x.value(), {x.value().dim(0), x.value().dim(1)});
    tensor::qk_norm_rope_forward(y, rstd, x.value(), gain.value, cos, sin, positions, eps);
    return tape.record(
        std::move(y), {x},
        [=, &gain](const std::vector<Tensor>& d) -> std::vector<Tensor> {
            reach(gain);
            return {tensor::qk_norm_rope_backward(gain.grad, narrow(d[0], x.value()), x.value(),
                                                  gain.value, rstd, cos, sin, positions)};
        },
        {&gain});
}

// With p = exp(score - lse), delta = dout.o:   ds = p*(dout.v - delta)
// dq = scale*sum_s ds*k      dk = scale*sum_t ds*q      dv = sum_t p*dout
Var attention(Tape& tape, const Var& q, const Var& k, const Var& v,
              const std::shared_ptr<const tensor::SpanBatch>& spans, int window) {
    const Tensor& x = q.value();
    const double scale = 1 / std::sqrt(double(x.dim(2)));
    Tensor o = like(x);
    Tensor lse = saved(tape, x, {x.dim(0), x.dim(1)});
    tensor::attention_forward(o, lse, x, k.value(), v.value(), *spans, window, scale);
    return tape.record(o, {q, k, v}, [=](const std::vector<Tensor>& d) -> std::vector<Tensor> {
        Tensor dq = like(q.value());
        const DType a = accumulate_dtype(q.value().dtype());
        Tensor dk = Tensor::empty(k.value().context(), k.value().shape(), a);
        Tensor dv = Tensor::empty(v.value().context(), v.value().shape(), a);
        tensor::attention_backward(dq, dk, dv, d[0], q.value(), k.value(), v.value(), o, lse,
                                   *spans, window, scale);
        return {dq, dk, dv};
    });
}

// s = sigmoid(g):   dx = dy*s      dg = s*(1-s)*sum_c dy*x
Var gate(Tape& tape, const Var& x, const Var& g) {
    const int64_t rows = g.value().numel(), width = x.value().numel() / std::max<int64_t>(rows, 1);
    const Tensor flat_x = x.value().view({rows, width}), flat_g = g.value().view({rows});
    const Shape shape = x.value().shape(), gate_shape = g.value().shape();
    Tensor y = tensor::gate_forward(flat_x, flat_g).view(shape);
    return tape.record(std::move(y), {x, g},
                       [=](const std::vector<Tensor>& d) -> std::vector<Tensor> {
                           Tensor dx, dg;
                           tensor::gate_backward(dx, dg, d[0].view({rows, width}), flat_x, flat_g);
                           return {dx.view(shape), dg.view(gate_shape)};
                       });
}

// s = sigmoid(a):   da = dy*up*s*(1 + a*(1-s))      dup = dy*a*s
Var swiglu(Tape& tape, const Var& a, const Var& up) {
    return tape.record(tensor::swiglu_forward(a.value(), up.value()), {a, up},
                       [=](const std::vector<Tensor>& d) -> std::vector<Tensor> {
                           Tensor da, dup;
                           tensor::swiglu_backward(da, dup, d[0], a.value(), up.value());
                           return {da, dup};
                       });
}

// da = dy      db = dy
Var add(Tape& tape, const Var& a, const Var& b) {
    return tape.record(tensor::add(a.value(), b.value()), {a, b},
                       [](const std::vector<Tensor>& d) -> std::vector<Tensor> {
                           return {d[0], d[0]};
                       });
}

// [da | db] = dy
Var concat_columns(Tape& tape, const Var& a, const Var& b) {
    return tape.record(tensor::concat_columns(a.value(), b.value()), {a, b},
                       [=](const std::vector<Tensor>& d) -> std::vector<Tensor> {
                           Tensor da = like(a.value()), db = like(b.value());
                           tensor::split_columns(da, db, d[0]);
                           return {da, db};
                       });
}

Var view(Tape& tape, const Var& x, Shape shape) {
    const Shape before = x.value().shape();
    return tape.record(x.value().view(std::move(shape)), {x},
                       [before](const std::vector<Tensor>& d) -> std::vector<Tensor> {
                           return {d[0].view(before)};
                       });
}

// dsource[its row] = dy      (rows that nothing gathers get zero)
Var carry(Tape& tape, const Var& first, const Var& previous, const Tensor& source,
          const tensor::CarryNoise& noise) {
    const auto value = [](const Var& v) { return v.defined() ? v.value() : Tensor(); };
    Tensor y = tensor::carry_forward(value(first), value(previous), source, noise);
    return tape.record(std::move(y), {first, previous},
                       [=](const std::vector<Tensor>& d) -> std::vector<Tensor> {
                           const auto zeros = [](const Var& v) {
                               if (!v.defined()) return Tensor();
                               Tensor t = like(v.value());
                               t.zero();
                               return t;
                           };
                           Tensor dfirst = zeros(first), dprevious = zeros(previous);
                           tensor::carry_backward_accum(dfirst, dprevious, d[0], source);
                           return {dfirst, dprevious};
                       });
}

// dprefix[src] += dstore[dst]      down = dstore[own_dst]
Var join_rows(Tape& tape, int64_t rows, const Var& prefix, const Tensor& prefix_src,
              const Tensor& prefix_dst, const Var& own, const Tensor& own_dst) {
    Shape shape = own.value().shape();
    shape[0] = rows;
    Tensor store = Tensor::empty(own.value().context(), shape, own.value().dtype());
    tensor::copy_rows(store, prefix_dst, prefix.value(), prefix_src, prefix_src.numel());
    tensor::copy_rows(store, own_dst, own.value(), {}, own_dst.numel());
    return tape.record(
        std::move(store), {prefix, own}, [=](const std::vector<Tensor>& d) -> std::vector<Tensor> {
            const auto gradient_of = [&](const Var& v) {
                return Tensor::empty(d[0].context(), v.value().shape(), d[0].dtype());
            };
            Tensor dprefix = gradient_of(prefix), down = gradient_of(own);
            dprefix.zero();
            tensor::copy_rows(dprefix, prefix_src, d[0], prefix_dst, prefix_src.numel());
            tensor::copy_rows(down, {}, d[0], own_dst, own_dst.numel());
            return {dprefix, down};
        });
}

// dlogits = weight*((1 + 2*z*lse)*softmax - onehot)      dh = dlogits E      dE += dlogits^T h
Classified classifier(Tape& tape, const Var& h, Weight& embedding, const Tensor& targets,
                      const Tensor& weight, double z_weight) {
    embedding.settle();
    const Tensor& x = h.value();
    const int64_t N = x.dim(0), V = embedding.packed.N;
    const DType a = accumulate_dtype(x.dtype());
    Classified out{Tensor::empty(x.context(), {N}, a), Tensor::empty(x.context(), {N}, a)};
    const bool gradients = tape.recording() && (h.needs_grad() || trains(embedding));
    Tensor dh = gradients ? like(x) : Tensor();
    Tensor buffer = Tensor::empty(x.context(), {std::min(N, kLogitRows), V}, x.dtype());
    for (int64_t first = 0; first < N; first += kLogitRows) {
        const int64_t count = std::min(kLogitRows, N - first);
        const Tensor rows = x.rows(first, count), target = targets.rows(first, count);
        Tensor logits = buffer.rows(0, count);
        Tensor ce = out.ce.rows(first, count), lse = out.lse.rows(first, count);
        tensor::matmul_forward(logits, rows, embedding.packed);
        tensor::cross_entropy_forward(ce, lse, logits, target);
        if (!gradients) continue;
        tensor::cross_entropy_backward(logits, logits, lse, target, weight.rows(first, count),
                                       z_weight);
        Tensor dh_rows = dh.rows(first, count);
        tensor::matmul_forward(dh_rows, logits, embedding.packed_back);
        if (trains(embedding)) tensor::matmul_dw_accum(embedding.grad, logits, rows);
    }
    if (!gradients) return out;
    reach(embedding);
    tape.record_root({h}, [dh](const std::vector<Tensor>&) -> std::vector<Tensor> { return {dh}; });
    return out;
}

}  // namespace fbt::autograd
