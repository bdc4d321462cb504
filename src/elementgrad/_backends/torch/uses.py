"""Some elements of a parameter's derivative, from the layers that use it and without the rest of it.

While a function runs, a `TrackedParameter` stands for a parameter of its model. It notes each use as the weight of a
linear layer, an embedding or a convolution: the input, and where the output is in the graph. The graph itself is the
plain one, and the whole derivative is read through it as for any tensor. To read some elements, a sweep ends at the
outputs of these layers, and a kernel of training computes the elements from what arrives there (`narrow`).

Any other use gets a copy of the parameter, as the code may write to it, and then there are no kernels. So it is where
the graph has a path to the parameter that was not noted, for example through compiled code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from elementgrad._backends.autodiff import Linearization, UnsupportedError
from elementgrad._backends.torch._compat import (
    _is_any_autocast_enabled,
    functorch_is_active,
    is_fused_attention_error,
    tree_map_tensors,
    version_of,
)
from elementgrad._backends.torch.autodiff import Sweep, TorchLinearization, largest_derivative

Tensor = torch.Tensor
Entries = Callable[[Tensor], Tensor]
"""From the derivative of a layer's output to the elements of the derivative of its weight."""
MIN_SIZE = 1 << 14
"""Smaller parameters are read whole, which takes no longer than to make a kernel."""
KERNEL_SHARE = 8
"""A kernel is used for at most one in this many of the elements; more are read from the whole derivative."""
LINEAR = ("input", "weight", "bias")
EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
LOOKS = frozenset(
    ["size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_contiguous", "element_size"]
)
"""Methods of a tensor that read none of its numbers."""
FACTS = frozenset(["shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_sparse", "is_meta"])
"""Attributes of a tensor that say nothing of its numbers."""


@dataclass(frozen=True, eq=False)
class LayerUse:
    """One use of a parameter as the weight of a layer."""

    x: Tensor
    version: int
    output: GradientEdge
    before: Sequence[Any]
    """The nodes of the graph that lead to the other arguments."""
    make_kernel: Callable[[np.ndarray, tuple[int, ...]], Entries]


@dataclass(eq=False)
class TrackedUses:
    """A parameter in one evaluation: its leaf, and the uses that were made of it."""

    leaf: Tensor
    uses: list[LayerUse] = field(default_factory=list)
    copied: Tensor | None = None
    """The tensor that all other uses get; the parameter has no kernels then."""

    def copy(self) -> Tensor:
        if self.copied is not None:
            return self.copied
        # The code may be in a block without gradients, and may use the parameter again behind it.
        with torch.inference_mode(False), torch.enable_grad():
            copied = self.leaf.clone()
        if copied.requires_grad:  # it does not below autograd, in a dispatch mode of the user's
            self.copied = copied
        return copied


class TrackedParameter(torch.Tensor):
    """Stands for a parameter, and notes its uses. It is connected to the leaf, for code that does not look at it."""

    record: TrackedUses

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in LOOKS or _is_fact(func):
            return func(*tree_map_tensors(_leaf_of, args), **tree_map_tensors(_leaf_of, kwargs))
        found = None if functorch_is_active() or _is_any_autocast_enabled() else _find_use(func, args, kwargs)
        if found is None:
            return func(*tree_map_tensors(_copy_of, args), **tree_map_tensors(_copy_of, kwargs))
        record, x, others, make_kernel = found
        result = func(*map(_leaf_of, args), **dict(zip(kwargs, map(_leaf_of, kwargs.values()), strict=True)))
        if result.requires_grad:
            before = [other.grad_fn for other in others if other.grad_fn is not None]
            use = LayerUse(x, version_of(x), get_gradient_edge(result), before, make_kernel)
            record.uses.append(use)
        return result


def track(leaf: Tensor) -> TrackedParameter:
    """Return what a model gets in the place of a parameter, of which the leaf has the numbers."""
    tracked = leaf.as_subclass(TrackedParameter)
    tracked.record = TrackedUses(leaf)
    tracked._is_param = True  # so that isinstance(module.weight, nn.Parameter) is still true
    return tracked


def is_trackable(x: Tensor) -> bool:
    """Return True if a parameter is so large that reads of some of its elements need not compute all of them."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided and not x.is_inference()
    return plain and x.is_floating_point() and x.ndim >= 2 and x.numel() >= MIN_SIZE and not functorch_is_active()


def _is_fact(func: Any) -> bool:
    owner = getattr(func, "__self__", None)
    return getattr(func, "__name__", "") == "__get__" and getattr(owner, "__name__", "") in FACTS


def _leaf_of(x: Any) -> Any:
    if not isinstance(x, TrackedParameter):
        return x
    return x.record.leaf if x.record.copied is None else x.record.copied


def _copy_of(x: Tensor) -> Tensor:
    return x.record.copy() if isinstance(x, TrackedParameter) else x


# Uses that have a kernel. Kernels are imported when they are made, since training imports more than reads need.


def _find_use(func: Any, args: Any, kwargs: Any) -> tuple[TrackedUses, Tensor, list[Tensor], Any] | None:
    """Return the parameter, the input, all other arguments and the kernel of a call; None if it has no kernel."""
    names = ARGUMENTS.get(func)
    if names is None or len(args) > len(names):
        return None
    given = dict(zip(names, args, strict=False)) | kwargs
    weight, x = given.get("weight"), given.get("input")
    others = [value for name, value in given.items() if name != "weight" and isinstance(value, Tensor)]
    if not isinstance(weight, TrackedParameter) or not isinstance(x, Tensor) or not given.keys() <= set(names):
        return None
    if weight.record.copied is not None or any(isinstance(other, TrackedParameter) for other in others):
        return None
    x = x.detach()  # or it would keep its graph alive
    kernel = KERNELS[names](func, given, x, weight.record.leaf.detach())
    return None if kernel is None else (weight.record, x, others, kernel)


def _linear_kernel(func: Any, given: Any, x: Tensor, weight: Tensor) -> Any:
    transposed = func is not functional.linear
    if weight.ndim != 2 or x.ndim < (2 if transposed else 1) or x.dtype != weight.dtype:
        return None

    def make(positions: np.ndarray, shape: tuple[int, ...]) -> Entries:
        product = _make_product(positions, shape, weight.device)
        rows = x.reshape(-1, x.shape[-1])
        if transposed:
            return lambda gradient: product(rows, gradient.reshape(-1, shape[1]))
        return lambda gradient: product(gradient.reshape(-1, shape[0]), rows)

    return make


def _make_product(positions: np.ndarray, shape: tuple[int, ...], device: torch.device) -> Callable[..., Tensor]:
    """Return a function to some entries of the product of two matrices over their rows."""
    row, column = np.divmod(positions, shape[1])
    if len(positions) == 1:  # nothing to plan, and planning would take longer than a small sweep
        i, j = int(row[0]), int(column[0])
        return lambda left, right: (left[:, i] * right[:, j]).sum(0, keepdim=True)
    from elementgrad._backends.torch.train.kernels import TorchProduct

    return TorchProduct(row, column, shape[0], shape[1], device)


def _embedding_kernel(func: Any, given: Any, x: Tensor, weight: Tensor) -> Any:
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse"):
        return None
    padding = given.get("padding_idx")

    def make(positions: np.ndarray, shape: tuple[int, ...]) -> Entries:
        from elementgrad._backends.torch.train.kernels import TorchLookup

        lookup = TorchLookup(*np.divmod(positions, shape[1]), shape[1], weight.device)
        tokens = x.reshape(-1)
        if padding is not None:
            tokens = tokens.where(tokens != padding % shape[0], -1)
        return lambda gradient: lookup(tokens, gradient.reshape(-1, shape[1]))

    return make


def _convolution_kernel(func: Any, given: Any, x: Tensor, weight: Tensor) -> Any:
    axes = weight.ndim - 2
    padding = given.get("padding", 0)
    if x.ndim != weight.ndim or isinstance(padding, str) or x.dtype != weight.dtype:
        return None
    stride, padding, dilation = [
        _per_axis(value, axes) for value in (given.get("stride", 1), padding, given.get("dilation", 1))
    ]
    groups = given.get("groups", 1)

    def make(positions: np.ndarray, shape: tuple[int, ...]) -> Entries:
        from elementgrad._backends.torch.train.kernels import TorchConvGrid, TorchCorrelation

        grid = TorchConvGrid(stride, padding, dilation, groups)
        correlation = TorchCorrelation(np.unravel_index(positions, shape), shape, grid, weight.device)
        return lambda gradient: correlation(gradient, x)

    return make


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


PRODUCT, SUM = ("input", "weight"), ("bias", "input", "weight")
ARGUMENTS: dict[Any, tuple[str, ...]] = {
    functional.linear: LINEAR,
    functional.embedding: EMBEDDING,
    functional.conv1d: CONVOLUTION,
    functional.conv2d: CONVOLUTION,
    functional.conv3d: CONVOLUTION,
    torch.matmul: PRODUCT,
    torch.Tensor.matmul: PRODUCT,
    torch.Tensor.__matmul__: PRODUCT,
    torch.addmm: SUM,
}
"""The parameters of the functions that have kernels."""
KERNELS = {
    LINEAR: _linear_kernel,
    PRODUCT: _linear_kernel,
    SUM: _linear_kernel,
    EMBEDDING: _embedding_kernel,
    CONVOLUTION: _convolution_kernel,
}


# Reads


def narrow(
    linear: TorchLinearization, output: int, inputs: Sequence[int], positions: Sequence[np.ndarray | None]
) -> Linearization | None:
    """Return the same function with some elements of parameters as its inputs; None if it has no kernels for any.

    The inputs of the result are those of `inputs`, in their order; None for `positions` leaves one whole.
    """
    y = linear.outputs[output]
    ends: list[Any] = []
    for number, wanted in zip(inputs, positions, strict=True):
        record = linear.uses.get(number)
        x = linear.inputs[number]
        few = wanted is not None and len(wanted) * KERNEL_SHARE <= x.numel()
        if wanted is not None and few and record is not None and y.requires_grad and _are_all(record, y):
            ends.append(_NarrowEnd.of(record, wanted, tuple(x.shape)))
        else:
            ends.append(linear.leaves[number])
    if not any(isinstance(end, _NarrowEnd) for end in ends):
        return None
    return NarrowLinearization(linear, inputs, ends)


def _are_all(record: Any, y: Tensor) -> bool:
    """Return True if every path from an output to a parameter goes through one of the uses that were noted."""
    if not record.uses or record.copied is not None or any(version_of(use.x) != use.version for use in record.uses):
        return False
    before = {use.output.node: use.before for use in record.uses}
    leaf = get_gradient_edge(record.leaf).node
    ahead: list[Any] = [y.grad_fn]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if node is leaf:
            return False
        following = before[node] if node in before else [other for other, _ in node.next_functions]
        for other in following:
            if other is not None and other not in seen:
                seen.add(other)
                ahead.append(other)
    return True


@dataclass(frozen=True, eq=False)
class _NarrowEnd:
    """Some elements of a parameter, as an end of sweeps."""

    edges: Sequence[GradientEdge]
    kernels: Sequence[Entries]
    positions: np.ndarray

    @classmethod
    def of(cls, record: Any, positions: np.ndarray, shape: tuple[int, ...]) -> "_NarrowEnd":
        kernels = [use.make_kernel(positions, shape) for use in record.uses]
        return cls([use.output for use in record.uses], kernels, positions)

    def entries(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        parts = [kernel(g) for kernel, g in zip(self.kernels, gradients, strict=True) if g is not None]
        return sum(parts[1:], parts[0]) if parts else None


class NarrowLinearization(TorchLinearization):
    """An evaluation whose inputs are elements of parameters. It has reverse sweeps alone."""

    def __init__(self, whole: TorchLinearization, inputs: Sequence[int], ends: Sequence[Any]):
        vars(self).update(vars(whole))
        self.uses, self.narrows = {}, False
        self._whole, self._numbers = whole, list(inputs)
        self.leaves = list(ends)
        self.inputs = [
            torch.empty(len(end.positions), dtype=whole.inputs[n].dtype, device=whole.inputs[n].device)
            if isinstance(end, _NarrowEnd)
            else whole.inputs[n]
            for n, end in zip(inputs, ends, strict=True)
        ]

    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        try:
            return self._vjp(output, inputs, seeds)
        except RuntimeError as error:
            if not is_fused_attention_error(error):
                raise
        # The function is evaluated again then, in which other uses are noted.
        stacks = self._whole.vjp(output, [self._numbers[i] for i in inputs], seeds)
        return [self._pick(stack, self.leaves[i]) for i, stack in zip(inputs, stacks, strict=True)]

    def _pick(self, stack: Tensor | None, end: Any) -> Tensor | None:
        if stack is None or not isinstance(end, _NarrowEnd):
            return stack
        index = torch.from_numpy(end.positions).to(stack.device)
        return stack.reshape(len(stack), -1).index_select(1, index)

    def _make_vjp(self, y: Tensor, ends: Sequence[Any], retain: bool = True) -> Sweep:
        edges = [edge for end in ends for edge in (end.edges if isinstance(end, _NarrowEnd) else [end])]
        run = super()._make_vjp(y, edges, retain)

        def sweep(seed: Tensor | None) -> Sequence[Tensor | None]:
            gradients = iter(run(seed))
            with torch.no_grad():
                return [
                    end.entries([next(gradients) for _ in end.edges])
                    if isinstance(end, _NarrowEnd)
                    else next(gradients)
                    for end in ends
                ]

        return sweep

    def jvp(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        """Raise `UnsupportedError`: forward sweeps start at whole parameters."""
        raise UnsupportedError("forward sweeps start at whole parameters")

    def peak_bytes(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        """Return the bytes of the largest derivative between the output and the layers that use the parameters."""
        ends = set()
        for end in self.leaves:
            if isinstance(end, _NarrowEnd):
                ends |= {edge.node for edge in end.edges}
            else:
                ends.add(end.node if isinstance(end, GradientEdge) else end)
        return max(largest_derivative(self.outputs[source].grad_fn, ends), prod(self.outputs[source].shape) * 4)
