"""One table of functions with a derivative, each written once for the three frameworks, and what the framework itself
gives as the whole Jacobian and Hessian of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tensorflow as tf
import torch

from tests.support.operations import OPS, Operations, point

ZERO = tf.UnconnectedGradients.ZERO


@dataclass(frozen=True)
class Case:
    name: str
    f: Callable[[Any, Any], Any]  # of the framework's operations and a float64 tensor
    point: np.ndarray
    kink: bool = False  # at a tie or kink, or with a rule of its own: finite differences do not apply
    eager: bool = False  # looks at values, in one framework at least: not for jit and vmap
    second: bool = True  # every framework can differentiate it twice
    frameworks: tuple[str, ...] = ("torch", "tensorflow", "jax")

    def __str__(self) -> str:
        return self.name


class ThriceOnePlusSum(torch.autograd.Function):
    """3 * x[index] + x.sum(). An index goes on the context: `save_for_backward` takes tensors alone."""

    @staticmethod
    def forward(ctx: Any, x: Any, index: int) -> Any:
        ctx.index, ctx.shape = index, x.shape
        return 3 * x[index] + x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        of_x = gradient.expand(ctx.shape).clone()
        of_x[ctx.index] += 3 * gradient
        return of_x, None


def spread(o: Any, x: Any, axis: int) -> Any:
    """To mean 0 and variance 1."""
    centred = x - o.mean(x, axis=axis, keepdims=True)
    return centred * o.rsqrt(o.mean(centred**2, axis=axis, keepdims=True) + 1e-5)


def positive(o: Any, x: Any) -> Any:
    """A symmetric matrix with positive eigenvalues."""
    return x @ o.transpose(x, (1, 0)) + o.array(np.diag([1.0, 1.5, 2.0]))


def gru_cell(o: Any, x: Any) -> Any:
    entry, hidden, weights = x[:1], x[1:], o.numbers(3, 6, 3)
    reset = o.sigmoid(o.concat([entry, hidden], axis=1) @ weights[0])
    update = o.sigmoid(o.concat([entry, hidden], axis=1) @ weights[1])
    return (1 - update) * o.tanh(o.concat([entry, reset * hidden], axis=1) @ weights[2]) + update * hidden


def lstm_cell(o: Any, x: Any) -> Any:
    entry, hidden, cell = o.split(x, 3, 0)
    gates = o.split(o.concat([entry, hidden], axis=1) @ o.numbers(4, 8), 4, 1)
    cell = o.sigmoid(gates[0]) * cell + o.sigmoid(gates[1]) * o.tanh(gates[2])
    return o.concat([o.sigmoid(gates[3]) * o.tanh(cell), cell], axis=0)


def rnn(o: Any, x: Any) -> Any:
    weights, hidden = o.numbers(2, 2, 2), [o.numbers(1, 2)]
    for step in range(4):
        hidden.append(o.tanh(x[step : step + 1] @ weights[0] + hidden[-1] @ weights[1]))
    return o.concat(hidden[1:], axis=0)


def attention(o: Any, x: Any) -> Any:
    """The first axis is the head."""
    weights = o.numbers(3, 2, 2)
    query, key, value = (o.einsum("hsd,de->hse", x, weights[index]) for index in range(3))
    scores = o.softmax(o.einsum("hqd,hkd->hqk", query, key) / 2**0.5, axis=-1)
    return o.einsum("hqk,hkd->hqd", scores, value)


def polynomial(o: Any, x: Any) -> Any:
    y = 0.0
    for coefficient in (1.0, -2.0, 0.5, 3.0):
        y = y * x + coefficient
    return y


def branch(o: Any, x: Any) -> Any:
    if x[0] > 0:
        return o.sin(x) * x[0]
    return o.exp(x[1:])


def double(o: Any, x: Any) -> Any:
    while o.sum(x * x) < 50:
        x = x * 2 + o.sin(x)
    return x


def square_root(o: Any, x: Any) -> Any:
    y = x
    while o.amax(o.abs(y * y - x)) > 1e-13:
        y = (y + x / y) / 2
    return y


def running(o: Any, x: Any) -> Any:
    y = x
    for index in range(1, 4):
        y = o.put(y, (index, y[index - 1] * x[index]))
    return y


def sinkhorn(o: Any, x: Any) -> Any:
    for _ in range(3):
        x = x - o.logsumexp(x, axis=0, keepdims=True)
        x = x - o.logsumexp(x, axis=1, keepdims=True)
    return o.exp(x)


def euler(o: Any, x: Any) -> Any:
    return o.loop(4, lambda x: x + 0.1 * o.stack([x[1], -o.sin(x[0])], 0), x)


def circular(o: Any, x: Any) -> Any:
    return o.real(o.ifft(o.fft(x) * o.fft(o.numbers(5))))


def power_spectrum(o: Any, x: Any) -> Any:
    z = o.fft(x)
    return o.real(z) ** 2 + o.imag(z) ** 2


def straight_through(o: Any, x: Any) -> Any:
    return o.custom(o.round, lambda x, gradient: gradient)(x) ** 2


def smooth_rule(o: Any, x: Any) -> Any:
    return o.custom(o.softplus, lambda x, gradient: gradient * o.sigmoid(x))(x)


ABOVE = {"low": 0.3, "high": 2.0}
HALVES = np.array([-0.5, 0.5, 1.0, -2.0, 0.1])
TIES = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])

CASES = [
    # one element at a time
    Case("square, no axes", lambda o, x: x * x, np.array(0.7)),
    Case("sine and cosine", lambda o, x: o.sin(x) * o.cos(2 * x), point(4)),
    Case("tangent", lambda o, x: o.tan(x / 2), point(3)),
    Case("hyperbolic", lambda o, x: o.sinh(x) / o.cosh(x) ** 2, point(3)),
    Case("atan2", lambda o, x: o.atan2(x[0], x[1]), point(2, 3)),
    Case("exp", lambda o, x: o.exp(x), point(4)),
    Case("log", lambda o, x: o.log(x), point(4, **ABOVE)),
    Case("log1p and expm1", lambda o, x: o.log1p(x * x) + o.expm1(x), point(4)),
    Case("square root", lambda o, x: o.sqrt(x), point(4, **ABOVE)),
    Case("reciprocal", lambda o, x: 1 / x, point(4, **ABOVE)),
    Case("cube", lambda o, x: x**3, point(4)),
    Case("power of two inputs", lambda o, x: x[0] ** x[1], point(2, 3, **ABOVE)),
    Case("remainder", lambda o, x: x * (x % 0.7), point(4)),
    Case("abs", lambda o, x: o.abs(x) ** 1.5, point(4)),
    Case("abs at zero", lambda o, x: o.abs(x), np.array([0.0, 1.0, 0.0, -2.0]), kink=True),
    Case("sigmoid", lambda o, x: o.sigmoid(x), point(4)),
    Case("tanh", lambda o, x: o.tanh(x), point(2, 2)),
    Case("gelu", lambda o, x: x * (1 + o.erf(x / 2**0.5)) / 2, point(4)),
    Case("silu", lambda o, x: o.silu(x), point(4)),
    Case("softplus", lambda o, x: o.softplus(x), point(4)),
    Case("elu", lambda o, x: o.elu(x), point(4)),
    Case("relu", lambda o, x: o.relu(x) * x, point(5)),
    Case("relu at zero", lambda o, x: o.relu(x), np.array([0.0, 1.0, -1.0, 0.0]), kink=True),
    Case("erf", lambda o, x: o.erf(x), point(3)),
    Case("lgamma", lambda o, x: o.lgamma(x), point(3, **ABOVE)),
    Case("clip", lambda o, x: o.clip(x, -0.5, 0.5) * x, point(5)),
    Case("clip at its limits", lambda o, x: o.clip(x, -0.5, 0.5), HALVES, kink=True),
    Case("maximum and minimum", lambda o, x: o.maximum(x[0], x[1]) * o.minimum(x[0], x[1]), point(2, 3)),
    Case("maximum of equals", lambda o, x: o.maximum(x, o.flip(x, [0])), np.array([1.0, 2.0, 1.0]), kink=True),
    Case("where", lambda o, x: o.where(x > 0, x * x, o.exp(x)), point(5)),
    Case("where with a fixed mask", lambda o, x: o.where(o.numbers(2, 3) > 0, x * x, 3 * x), point(2, 3)),
    Case("huber", lambda o, x: o.where(o.abs(x) < 0.6, x * x / 2, 0.6 * (o.abs(x) - 0.3)), point(5)),
    # reductions
    Case("sum of squares", lambda o, x: o.sum(x * x), point(2, 3)),
    Case("sum over an axis", lambda o, x: o.sum(o.sin(x), axis=1), point(2, 3)),
    Case("sum over two axes", lambda o, x: o.sum(x**3, axis=(0, 2)), point(2, 3, 2)),
    Case("mean", lambda o, x: o.mean(x, axis=0), point(3, 2)),
    Case("variance", lambda o, x: o.mean((x - o.mean(x)) ** 2), point(5)),
    Case("product", lambda o, x: o.prod(x, axis=1), point(2, 3)),
    # TensorFlow's second derivative of a product is wrong at a zero.
    Case("product with a zero", lambda o, x: o.prod(x), np.array([0.5, 0.0, 2.0]), second=False),
    Case("logsumexp", lambda o, x: o.logsumexp(x, axis=1), point(2, 3)),
    Case("max", lambda o, x: o.amax(x * x, axis=1), point(2, 3)),
    Case("max with ties", lambda o, x: o.amax(x, axis=1), TIES, kink=True),
    Case("max of all, with ties", lambda o, x: o.amax(x), TIES, kink=True),
    Case("min", lambda o, x: o.amin(o.exp(x), axis=0), point(2, 3)),
    Case("range", lambda o, x: o.amax(x) - o.amin(x), point(4)),
    Case("norm", lambda o, x: o.norm(x), point(4)),
    Case("norm of rows", lambda o, x: o.norm(x, axis=1), point(3, 2)),
    Case("norm of power 3", lambda o, x: o.sum(o.abs(x) ** 3) ** (1 / 3), point(4)),
    Case("unit length", lambda o, x: x / o.norm(x), point(4)),
    Case("cumsum", lambda o, x: o.cumsum(x * x, axis=0), point(5)),
    Case("cumprod", lambda o, x: o.cumprod(x, axis=0), point(4)),
    # order
    Case("sort", lambda o, x: o.sort(x) * o.numbers(5), point(5)),
    Case("sort of rows", lambda o, x: o.sort(x)[:, 1] ** 2, point(3, 3)),
    Case("sort with ties", lambda o, x: o.sort(x) * o.numbers(5), np.array([2.0, 1.0, 2.0, 1.0, 2.0]), kink=True),
    Case("median", lambda o, x: o.sort(x)[2], point(5)),
    Case("top two", lambda o, x: o.top(x, 2) ** 2, point(5)),
    Case("top two with ties", lambda o, x: o.top(x, 2), np.array([1.0, 3.0, 3.0, 3.0]), kink=True),
    # shape and position
    Case("reshape", lambda o, x: o.reshape(x * x, (3, 2)), point(2, 3)),
    Case("transpose", lambda o, x: o.transpose(o.sin(x), (2, 0, 1)), point(2, 3, 2)),
    Case("slice", lambda o, x: x[1:, ::2] ** 2, point(3, 3)),
    Case("flip and roll", lambda o, x: o.flip(x, [0]) * o.roll(x, 1, 0), point(5)),
    Case("pad", lambda o, x: o.pad(x * x, (1, 0), (0, 2)), point(2, 2)),
    Case("concat", lambda o, x: o.concat([x, o.exp(x)], axis=1), point(2, 2)),
    Case("stack", lambda o, x: o.stack([x, x * x, o.sin(x)], 0), point(3)),
    Case("stack of a number", lambda o, x: o.stack([x, x * x, o.sin(x)], 0), np.array(0.4)),
    Case("split", lambda o, x: (lambda a, b: a * o.exp(b))(*o.split(x, 2, 0)), point(4, 2)),
    Case("tile", lambda o, x: o.tile(x, (2, 2)) * o.numbers(2, 6), point(1, 3)),
    Case("broadcasting", lambda o, x: x[:, None] * o.numbers(3) + x[None, :3] ** 2, point(4)),
    Case("broadcast_to", lambda o, x: o.broadcast_to(x, (3, 2)) ** 2 * o.numbers(3, 2), point(1, 2)),
    Case("take", lambda o, x: o.take(x, [2, 0, 2], 0) ** 2, point(4)),
    Case("take columns", lambda o, x: o.take(x, [1, 1, 2], 1) * o.numbers(2, 3), point(2, 3)),
    Case("take one of each row", lambda o, x: o.exp(o.take_each(x, [[2], [0], [1]])), point(3, 3)),
    Case("add at repeated indices", lambda o, x: o.add_at(o.sin(x), [1, 1, 3], x[:3] ** 2), point(4)),
    Case("differences", lambda o, x: (x[1:] - x[:-1]) ** 2, point(5)),
    Case("lower triangle", lambda o, x: o.tril(x * x), point(3, 3)),
    Case("diagonal", lambda o, x: o.diagonal(x @ x), point(3, 3)),
    Case("trace", lambda o, x: o.trace(x @ x @ x), point(3, 3)),
    Case("only the first input", lambda o, x: o.exp(x[0]) * o.numbers(3), point(4)),
    Case("some outputs constant", lambda o, x: o.concat([x[:2] ** 2, o.numbers(2)], axis=0), point(3)),
    # writes
    Case("write an element", lambda o, x: o.put(x * x, (1, x[0] * x[2])), point(4)),
    Case("write a row", lambda o, x: o.put(x * x, (0, x[1] * x[2])), point(3, 2)),
    Case("write twice to one place", lambda o, x: o.put(x, (1, x[0]), (1, x[2] ** 2), (0, x[1])), point(4)),
    Case("write in a loop", running, point(4)),
    # products
    Case("matmul", lambda o, x: x @ o.numbers(3, 2), point(2, 3)),
    Case("gram", lambda o, x: x @ o.transpose(x, (1, 0)), point(2, 3)),
    Case("matrix cubed", lambda o, x: x @ x @ x, point(2, 2)),
    Case("quadratic form", lambda o, x: o.sum(x * (o.numbers(3, 3) @ x)), point(3, 1)),
    Case("outer", lambda o, x: o.einsum("i,j->ij", x, o.exp(x)), point(3)),
    Case("kron", lambda o, x: o.reshape(o.einsum("ij,kl->ikjl", x, x), (4, 4)), point(2, 2)),
    Case("batches of matrices", lambda o, x: o.einsum("bij,bjk->bik", x, x), point(2, 2, 2)),
    Case("einsum to a number", lambda o, x: o.einsum("ijk,jki->", x, x), point(2, 2, 2)),
    Case("conv1d", lambda o, x: o.conv(x, o.numbers(2, 2, 3)), point(1, 2, 5)),
    Case("conv1d, the kernel", lambda o, x: o.conv(o.numbers(1, 2, 5), x) ** 2, point(2, 2, 2)),
    Case("conv1d with a stride", lambda o, x: o.tanh(o.conv(x, o.numbers(1, 1, 2), 2)), point(2, 1, 6)),
    Case("conv2d", lambda o, x: o.conv(x, o.numbers(2, 1, 2, 2)) ** 2, point(1, 1, 3, 4)),
    Case("average pool", lambda o, x: o.avg_pool(x * x, 2), point(1, 2, 4)),
    Case("max pool", lambda o, x: o.max_pool(x, 2) ** 2, point(1, 2, 4)),
    Case("max pool with ties", lambda o, x: o.max_pool(x, 2), np.array([[[1.0, 1.0, 0.0, 0.0]]]), kink=True),
    # linear algebra
    Case("inverse", lambda o, x: o.inv(x), point(3, 3)),
    Case("solve", lambda o, x: o.solve(x, o.numbers(3, 2)), point(3, 3)),
    Case("determinant", lambda o, x: o.det(x), point(3, 3)),
    Case("log determinant", lambda o, x: o.slogdet(positive(o, x))[1], point(3, 2)),
    Case("cholesky", lambda o, x: o.cholesky(positive(o, x)), point(3, 2)),
    Case("eigenvalues", lambda o, x: o.eigvalsh(positive(o, x)), point(3, 2)),
    Case("singular values", lambda o, x: o.svdvals(x), point(2, 3)),
    Case("qr", lambda o, x: o.qr(x)[1], point(3, 2)),
    Case("distances", lambda o, x: o.norm(x[:, None] - o.numbers(2, 2)[None], axis=-1), point(3, 2)),
    # complex in between
    Case("power spectrum", power_spectrum, point(5)),
    Case("low pass", lambda o, x: o.irfft(o.rfft(x)[:2], 4) ** 2, point(6)),
    Case("circular convolution", circular, point(5)),
    Case("complex power", lambda o, x: o.imag(o.complex(x[0], x[1]) ** 3), point(2, 2)),
    Case("complex magnitude", lambda o, x: o.abs(o.complex(x[0], x[1])), point(2, 2)),
    # losses and layers
    Case("softmax", lambda o, x: o.softmax(x, axis=-1), point(2, 3)),
    Case("log softmax", lambda o, x: o.log_softmax(x, axis=0), point(3, 2)),
    Case("cross entropy", lambda o, x: -o.take_each(o.log_softmax(x, axis=-1), [[2], [0]]), point(2, 3)),
    Case("logistic loss", lambda o, x: o.mean(o.softplus(o.numbers(4) * x)), point(4)),
    Case("squared error", lambda o, x: o.mean((x - o.numbers(2, 3)) ** 2), point(2, 3)),
    Case("dense layer", lambda o, x: o.tanh(x @ o.numbers(3, 2) + o.numbers(2)), point(2, 3)),
    Case("two layers", lambda o, x: o.silu(x @ o.numbers(2, 4)) @ o.numbers(4, 2), point(2, 2)),
    Case("layer norm", lambda o, x: spread(o, x, 1) * o.numbers(3), point(2, 3)),
    Case("batch norm", lambda o, x: spread(o, x, 0) * o.numbers(2), point(4, 2)),
    Case("attention", attention, point(2, 3, 2)),
    Case("gru cell", gru_cell, point(2, 3)),
    Case("lstm cell", lstm_cell, point(3, 2)),
    Case("recurrent network", rnn, point(4, 2)),
    Case("sinkhorn", sinkhorn, point(3, 3)),
    # control flow
    Case("polynomial by a loop", polynomial, point(3)),
    Case("branch on a value, taken", branch, np.array([0.5, -1.0, 2.0]), eager=True),
    Case("branch on a value, not taken", branch, np.array([-0.5, -1.0, 2.0]), eager=True),
    Case("loop on values", double, point(3), eager=True),
    Case("loop to convergence", square_root, point(3, **ABOVE), eager=True),
    Case("native loop", euler, point(2)),
    Case("native condition", lambda o, x: o.cond(x[0] > 0, o.sin, o.exp, x), np.array([0.3, -0.8]), eager=True),
    # transformations inside
    Case("vmap inside", lambda o, x: o.vmap(lambda row: o.sum(o.exp(row)) * row)(x), point(2, 3)),
    Case("gradient inside", lambda o, x: o.grad(lambda x: o.sum(o.sin(x) * x[0]))(x), point(3)),
    # TensorFlow refuses to differentiate `tf.recompute_grad` twice.
    Case("recomputed", lambda o, x: o.recomputed(lambda x: o.tanh(x) * o.sum(x))(x), point(3), second=False),
    Case("rule of its own", smooth_rule, point(4)),
    Case("straight through", straight_through, np.array([0.4, 1.6, -2.3]), kink=True),
    Case("half stopped", lambda o, x: x * o.stop(x), point(3), kink=True),
]


def scalar(o: Operations, case: Case) -> Callable[[Any], Any]:
    """A number made of the function, curved even where the function is linear."""

    def g(x: Any) -> Any:
        y = case.f(o, x)
        return o.sum(o.numbers(*y.shape) * y) + o.sum(y * y) / 2

    return g


def jacobian(framework: str, case: Case) -> np.ndarray:
    """The framework's own, in the shape of the output followed by that of the input."""
    return derivative(framework, case)(case.point)


def derivative(framework: str, case: Case) -> Callable[[np.ndarray], np.ndarray]:
    """The framework's own Jacobian at any point."""
    o = OPS[framework]
    if framework == "torch":
        own = torch.autograd.functional.jacobian
        return lambda point: o.framework.numpy(own(lambda x: case.f(o, x), o.array(point)))
    if framework == "jax":
        swept = jax.jacrev(lambda x: case.f(o, x))
        compiled_once = swept if case.eager else jax.jit(swept)  # each operation would be compiled otherwise
        return lambda point: np.asarray(compiled_once(o.array(point)))
    return lambda point: tape_jacobian(lambda x: case.f(o, x), o.array(point))


def hessian(framework: str, case: Case) -> np.ndarray:
    """The framework's own, of the number that `scalar` makes; reverse over reverse."""
    o = OPS[framework]
    x, g = o.array(case.point), scalar(o, case)
    if framework == "torch":
        return o.framework.numpy(torch.autograd.functional.hessian(g, x))
    if framework == "jax":
        return compiled(case, jax.jacrev(jax.jacrev(g)), x)
    return tape_jacobian(o.grad(g), x)


def compiled(case: Case, f: Callable[[Any], Any], x: jax.Array) -> np.ndarray:
    """JAX compiles each operation otherwise, which takes several times as long."""
    return np.asarray((f if case.eager else jax.jit(f))(x))


def tape_jacobian(f: Callable[[Any], Any], x: tf.Tensor) -> np.ndarray:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tf.convert_to_tensor(f(x))
    return np.asarray(tape.jacobian(y, x, unconnected_gradients=ZERO, experimental_use_pfor=False))
