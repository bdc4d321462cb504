"""Rules by which index sets go through PyTorch's ops.

`RULES` at the end is the table from ops to rules; ops that PyTorch tags as pointwise take the rule `pointwise`. An op
without a rule is decomposed into simpler ones, as `_softmax_backward_data` (softmax) is into mul, sum and sub; only one
without a decomposition is taken to mix everything. `_sparsity/rules.py` has what the frameworks share.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elementgrad._backends.torch._compat import tree_leaves
from elementgrad._backends.torch.axis_matrices import LARGEST, PROBES, axis_matrices, per_axis
from elementgrad._sparsity import rules
from elementgrad._sparsity.index_sets import EMPTY, Ids, IndexSets

if TYPE_CHECKING:
    from elementgrad._backends.torch.sparsity import SparsityMode

Tensor = torch.Tensor
Sizes = Sequence[int]


@dataclass
class OpCall:
    """One op as it was called, for the rules."""

    mode: "SparsityMode"
    function: Any
    name: str
    arguments: dict[str, Any]
    """By the names of the op's schema, with defaults."""
    outputs: list[Tensor]

    @property
    def sets(self) -> IndexSets:
        return self.mode.sets

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first output."""
        return tuple(self.outputs[0].shape)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument that not all overloads have."""
        return self.arguments.get(name, default)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [x for x in tree_leaves(self.arguments) if isinstance(x, Tensor)]

    def ids(self, x: Any) -> Ids | None:
        """Return the ids of a tensor; None if it does not depend on the seed, or is no tensor."""
        return self.mode.table.ids(x) if isinstance(x, Tensor) else None

    def ids_or_empty(self, x: Any) -> Ids:
        """Return the ids of a tensor; the empty set, which broadcasts, if it does not depend on the seed."""
        ids = self.ids(x)
        return np.array(EMPTY) if ids is None else ids

    def known_value(self, x: Any) -> Tensor | None:
        """Return a constant whose values are the same at every point, as numbers are; else None."""
        if not isinstance(x, Tensor):
            return torch.as_tensor(x)
        varies = self.mode.table.varies(x) or not self.mode.constants_known or self.ids(x) is not None
        return None if varies else x

    def mask(self, x: Any) -> np.ndarray | None:
        """Return where a known tensor is not zero; None for one that is not known."""
        known = self.known_value(x)
        return None if known is None else (known != 0).numpy(force=True)


Results = Sequence[Ids | None] | None
Rule = Callable[[OpCall], Results]
"""Returns the ids of each output; None for a call that the rule does not cover."""

LINEAR = [
    *("mul", "div", "threshold_backward", "tanh_backward", "sigmoid_backward", "hardtanh_backward", "elu_backward"),
    *("gelu_backward", "leaky_relu_backward", "silu_backward", "softplus_backward"),
]
"""Elementwise ops that are proportional to the one tensor that depends on the seed."""


def pointwise(call: OpCall) -> Results:
    """The union of the tensors at the same place; empty where a known factor is zero."""
    dependent = [(x, ids) for x in call.tensors if (ids := call.ids(x)) is not None]
    ids = np.broadcast_to(call.sets.union(*[ids for _, ids in dependent]), call.shape)
    if len(dependent) == 1 and call.name in LINEAR:
        mask = _factor_mask(call, dependent[0][0])
        if mask is not None:
            ids = np.where(mask, ids, EMPTY)
    return [ids]


def _factor_mask(call: OpCall, x: Tensor) -> np.ndarray | None:
    """Return where an op that is linear in x has a nonzero factor, if everything but x is known."""
    others = [other for other in call.tensors if other is not x]
    if (call.name == "div" and call["self"] is not x) or any(call.known_value(other) is None for other in others):
        return None
    if not others:
        return None if call.name != "mul" or call.get("other") != 0 else np.zeros(tuple(x.shape), dtype=bool)
    ones = torch.ones_like(x)
    arguments = {name: ones if value is x else value for name, value in call.arguments.items() if name != "out"}
    return (getattr(torch.ops.aten, call.name)(**arguments) != 0).numpy(force=True)


def where(call: OpCall) -> Results:
    """By a known condition one of two tensors, else either."""
    return _select(call, call["condition"], call["self"], call["other"])


def masked_fill(call: OpCall) -> Results:
    """Another value where a mask is true."""
    return _select(call, call["mask"], call["value"], call["self"])


def _select(call: OpCall, condition: Tensor, if_true: Any, if_false: Any) -> Results:
    cases = [call.ids_or_empty(x) for x in (if_true, if_false)]
    known = call.known_value(condition)
    if known is None:
        return [call.sets.union(*cases, call.ids_or_empty(condition))]
    return [np.where(known.numpy(force=True), *cases)]


MOVES = [
    *("clone", "copy", "_to_copy", "contiguous", "lift_fresh", "alias_copy", "cat", "stack", "flip"),
    *("roll", "repeat", "tril", "triu", "constant_pad_nd", "select_backward", "slice_backward"),
    *("diagonal_backward", "slice_scatter", "select_scatter", "diagonal_scatter"),
    *("_reshape_copy", "view_copy", "expand_copy", "permute_copy", "_unsafe_view", "reshape"),
    *("index_select", "masked_select", "gather", "take", "index", "_unsafe_index", "repeat_interleave"),
    *("channel_shuffle", "pixel_shuffle", "pixel_unshuffle", "diag_embed", "rot90", "block_diag"),
    *("unbind_copy", "split_copy", "split_with_sizes_copy", "squeeze_copy", "unsqueeze_copy", "t_copy"),
    *("transpose_copy", "slice_copy", "select_copy", "unfold_copy", "view_as_real_copy", "im2col"),
]
"""Ops that only move data, and fill in zeros."""


def move(call: OpCall) -> Results:
    """The op itself, on the ids."""
    if call.name in ("_to_copy", "copy", "clone", "lift_fresh", "contiguous"):
        return [call.ids(call["src"] if call.name == "copy" else call["self"])]
    if any(not _is_data(x) and call.known_value(x) is None for x in call.tensors):
        return _gather_anywhere(call)
    try:
        results = _run_on_ids(call, torch.int64)
    except NotImplementedError:  # the op has no kernel for integers
        results = _run_on_ids(call, torch.float64)
    return [x.numpy().astype(np.int64) for x in results]


def _run_on_ids(call: OpCall, dtype: torch.dtype) -> list[Tensor]:
    def replace(x: Any) -> Any:
        if isinstance(x, Tensor) and _is_data(x):
            ids = call.ids(x)
            if ids is None:
                return torch.zeros(x.shape, dtype=dtype)
            return torch.from_numpy(np.array(ids, order="C")).to(dtype)
        if isinstance(x, (list, tuple)):
            return [replace(part) for part in x]
        return x.cpu() if isinstance(x, Tensor) else x

    arguments = {name: replace(x) for name, x in call.arguments.items() if name != "out"}
    if call.name == "constant_pad_nd" and "value" in arguments:
        arguments["value"] = EMPTY
    result = getattr(torch.ops.aten, call.name)(**arguments)
    return [result] if isinstance(result, Tensor) else list(result)


def _gather_anywhere(call: OpCall) -> Results:
    """By unknown indices any element along the axis may be meant."""
    ids = call.ids(call.get("self"))
    if call.name not in ("index_select", "gather") or ids is None or not ids.ndim:
        return None
    reduced = call.sets.reduce(ids, [call["dim"]], keepdims=True)
    corner = tuple(slice(0, min(a, b)) for a, b in zip(call.shape, reduced.shape, strict=True))
    return [np.broadcast_to(reduced[corner], call.shape)]


def _is_data(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def reduce(call: OpCall) -> Results:
    ids = call.ids(call["self"])
    if ids is None or any(call.ids(x) is not None for x in call.tensors if x is not call["self"]):
        return None
    axes = call.get("dim")
    axes = [axes] if isinstance(axes, int) else axes
    axes = list(axes) if axes is not None and len(axes) else list(range(ids.ndim))
    keepdims = bool(call.get("keepdim", False))
    return [call.sets.reduce(ids, axes, keepdims) if ids.ndim else ids] * len(call.outputs)


def cumulative(call: OpCall) -> Results:
    ids = call.ids(call["self"])
    if ids is None:
        return None
    return [call.sets.cumulative(ids, call["dim"]) if ids.ndim else ids]


def fill(call: OpCall) -> Results:
    return [call.ids(call["value"])]


def zero(call: OpCall) -> Results:
    return [None for _ in call.outputs]


Destinations = Callable[[OpCall, Tensor], tuple[Tensor, Any, list[Any]]]
"""From the positions of all elements to those written to, with the updates and the indices that say where."""


def _put_destinations(call: OpCall, positions: Tensor) -> tuple[Tensor, Any, list[Any]]:
    indices = call["indices"]
    return torch.ops.aten.index.Tensor(positions, indices), call["values"], list(indices)


def _scatter_destinations(call: OpCall, positions: Tensor) -> tuple[Tensor, Any, list[Any]]:
    index = call["index"]
    updates = call.get("src", call.get("value"))
    if isinstance(updates, Tensor):
        updates = updates[tuple(slice(0, size) for size in index.shape)]
    return positions.gather(call["dim"], index), updates, [index]


def _slice_destinations(call: OpCall, positions: Tensor) -> tuple[Tensor, Any, list[Any]]:
    index = call["index"]
    return positions.index_select(call["dim"], index), call.get("source", call.get("value")), [index]


def scatter(destinations: Destinations, adds: bool | str) -> Rule:
    """Return the rule of an op that replaces elements, or adds to them if `adds`: True, or a true argument's name."""

    def rule(call: OpCall) -> Results:
        x = call["self"]
        ids = np.array(np.broadcast_to(call.ids_or_empty(x), tuple(x.shape)), order="C")
        targets, source, indices = destinations(call, torch.arange(x.numel()).reshape(x.shape))
        updates = call.ids_or_empty(source)
        if any(isinstance(index, Tensor) and call.known_value(index) is None for index in indices):
            return [_scatter_anywhere(call, ids, updates, indices)]
        owners = targets.numpy().reshape(-1)
        is_sum = bool(call.get(adds)) if isinstance(adds, str) else adds
        if not is_sum and call.get("reduce") is None:
            ids.reshape(-1)[owners] = EMPTY
        updates = np.broadcast_to(updates, tuple(targets.shape)).reshape(-1)
        return [call.sets.union(ids, call.sets.union_by_owner(owners, updates, ids.size).reshape(ids.shape))]

    return rule


def _scatter_anywhere(call: OpCall, ids: Ids, updates: Ids, indices: list[Any]) -> Ids:
    """At unknown indices updates land anywhere along the axis, or anywhere at all."""
    index_ids = [own for index in indices if (own := call.ids(index)) is not None]
    axis = call.get("dim")
    if axis is None or not updates.ndim or index_ids or call.name.startswith("index"):
        return call.sets.union(ids, np.full(ids.shape, call.sets.union_all(updates, *index_ids)))
    reduced = call.sets.reduce(updates, [axis], keepdims=True)
    landed = np.zeros(ids.shape, dtype=np.int64)
    index = indices[0]
    within = [slice(0, size) for size in index.shape]
    within[axis] = slice(None)
    corner = tuple(slice(0, min(a, b)) for a, b in zip(reduced.shape, index.shape, strict=True))
    landed[tuple(within)] = reduced[corner]
    return call.sets.union(ids, landed)


def embedding_backward(call: OpCall) -> Results:
    """Gradients of the rows that were looked up are added to them."""
    ids, indices = call.ids(call["grad_output"]), call.known_value(call["indices"])
    if ids is None or indices is None:
        return None
    rows, width = call.shape
    owners = indices.numpy(force=True).reshape(-1, 1) * width + np.arange(width)
    return [call.sets.union_by_owner(owners.reshape(-1), ids.reshape(-1), rows * width).reshape(rows, width)]


def matmul(left: str, right: str, bias: str | None = None) -> Rule:
    """Return the rule of a product of two matrices or stacks of them, by the names of its arguments."""

    def rule(call: OpCall) -> Results:
        a, b = call[left], call[right]

        def matrices(x: np.ndarray | None, is_left: bool) -> np.ndarray | None:
            """Return a vector as a matrix of one row or column."""
            if x is None or x.ndim > 1:
                return x
            return x[None] if is_left else x[:, None]

        factors = matrices(call.ids(a), True), matrices(call.ids(b), False)
        masks = matrices(call.mask(a), True), matrices(call.mask(b), False)
        parts = []
        if any(factor is not None for factor in factors):
            rows, columns = 1 if a.ndim == 1 else a.shape[-2], 1 if b.ndim == 1 else b.shape[-1]
            product = rules.matmul(call.sets, factors, masks, rows, columns)
            product = product[..., 0] if b.ndim == 1 else product
            parts.append(product[0] if a.ndim == 1 else product)
        added = call.ids(call[bias]) if bias else None
        if added is not None and call.get("beta", 1) != 0:
            parts.append(added)
        return [call.sets.union(*parts)]

    return rule


def dot(call: OpCall) -> Results:
    a, b = call["self"], call.get("tensor", call.get("other"))
    parts = []
    for x, other in ((a, b), (b, a)):
        ids = call.ids(x)
        if ids is not None:
            mask = call.mask(other)
            parts.append(call.sets.reduce(ids if mask is None else ids[mask], [0]))
    return [call.sets.union(*parts)]


def fft(call: OpCall) -> Results:
    """Everything along the transformed axes mixes."""
    ids = call.ids(call["self"])
    return None if ids is None else [rules.spread(call.sets, ids, call["dim"], call.shape)]


MATRIX_OPS = [
    *("linalg_solve_triangular", "_linalg_solve_ex", "linalg_lu_solve", "linalg_lu_factor_ex", "linalg_inv_ex"),
    *("cholesky_solve", "linalg_matrix_exp", "linalg_pinv"),
]


def mix_matrices(call: OpCall) -> Results:
    """Everything in a matrix mixes, and nothing across the matrices of a stack."""
    tensors = [ids for x in call.tensors if (ids := call.ids(x)) is not None]
    stacks = {x.shape[:-2] for x in (*call.tensors, *call.outputs) if _is_data(x)}
    if len(stacks) != 1 or not math.prod(next(iter(stacks))):
        return None
    union = call.sets.union(*[call.sets.reduce(ids, [-1, -2], keepdims=True) for ids in tensors])
    everything = call.sets.union_all(*tensors)
    return [
        np.broadcast_to(union, tuple(x.shape)) if _is_data(x) else np.full(tuple(x.shape), everything)
        for x in call.outputs
    ]


def convolution(call: OpCall) -> Results:
    """A convolution, or its transpose."""
    x, weight = call["input"], call["weight"]
    parts = []
    ids = call.ids(x)
    if ids is not None:
        parts.append(_convolve(call, ids, call["transposed"], call.shape[2:]))
    ids = call.ids(weight)
    if ids is not None:
        if call["transposed"]:
            return None
        parts.append(call.sets.reduce(ids, range(1, ids.ndim)).reshape(-1, *[1] * (ids.ndim - 2)))
    ids = call.ids(call["bias"])
    if ids is not None:
        parts.append(ids.reshape(-1, *[1] * (x.ndim - 2)))
    return [call.sets.union(*parts)]


def convolution_backward(call: OpCall) -> Results:
    """The gradients for the input, the weight and the bias, as far as they are wanted."""
    ids, x, weight = call.ids(call["grad_output"]), call["input"], call["weight"]
    if ids is None or call.ids(x) is not None or call.ids(weight) is not None:
        return None
    results: list[Ids | None] = []
    for is_wanted, kind in zip(call["output_mask"], ("input", "weight", "bias"), strict=True):
        if not is_wanted:
            continue
        if kind == "input":
            results.append(_convolve(call, ids, not call["transposed"], x.shape[2:]))
            continue
        if kind == "weight" and call["transposed"]:
            results.append(np.full(tuple(weight.shape), call.sets.union_all(ids)))
            continue
        per_channel = call.sets.reduce(ids, [0, *range(2, ids.ndim)])
        if kind == "bias":
            results.append(per_channel)
        else:
            results.append(np.broadcast_to(per_channel.reshape(-1, *[1] * (ids.ndim - 1)), tuple(weight.shape)))
    return results


def _convolve(call: OpCall, ids: Ids, transposed: bool, size: Sizes) -> Ids:
    weight, groups = call["weight"], call["groups"]
    mask = call.mask(weight)
    mask = np.ones(tuple(weight.shape), dtype=bool) if mask is None else mask
    stride, padding, dilation = (per_axis(call[name], mask.ndim - 2) for name in ("stride", "padding", "dilation"))
    if transposed:
        steps = size, stride, padding, dilation, groups, sys.maxsize
        return rules.convolve_transposed(call.sets, ids, mask, *steps)
    pads = [(pad, pad) for pad in padding]
    return rules.convolve(call.sets, ids, mask, stride, pads, dilation, None, groups, sys.maxsize)


def pool_backward(dims: int) -> Rule:
    """Return the rule of the gradient of a pool: each window's value goes to some of its elements."""

    def rule(call: OpCall) -> Results:
        ids = call.ids(call["grad_output"])
        if ids is None:
            return None
        size = per_axis(call["kernel_size"], dims)
        stride = per_axis(call["stride"] or size, dims)
        padding, dilation = per_axis(call["padding"], dims), per_axis(call.get("dilation", [1]), dims)
        shape = call["self"].shape
        return [rules.windows_transposed(call.sets, ids, shape, size, stride, padding, dilation)]

    return rule


PRECISIONS = (torch.float32, torch.float64)
"""A position on the edge between two pixels may round to either, so that what either precision reads is taken."""


def resize_backward(call: OpCall) -> Results:
    """The gradient of an op that multiplies each of the last axes with a matrix."""
    ids, name = call.ids(call["grad_output"]), call.name.removesuffix("_backward")
    if ids is None:
        return None
    lead = ids.ndim - int(name[-2])
    sizes = call.shape[lead:], ids.shape[lead:]
    found = [axis_matrices(name, call.arguments, *sizes, dtype) for dtype in PRECISIONS]
    if found[0] is None or found[1] is None:
        return None
    for axis, (single, double) in enumerate(zip(*found, strict=True), lead):
        ids = rules.along_axis(call.sets, ids, axis, ((single != 0) | (double != 0)).numpy())
    return [ids]


OTHERWISE = ("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d")
"""Averages whose gradient is that of another op, or is a pool with a rule of its own."""


def grid_backward(call: OpCall) -> Results:
    """The gradients of an image that is sampled at known points, and of the points."""
    ids, x, grid = call.ids(call["grad_output"]), call["input"], call["grid"]
    if ids is None:
        return None
    of_points = np.broadcast_to(call.sets.reduce(ids, [1])[..., None], tuple(grid.shape))
    if not call["output_mask"][0]:  # the gradient of the points is always there
        return [of_points] if len(call.outputs) == 1 else [None, of_points]
    return [_unsample(call, ids, x, grid), of_points]


def _unsample(call: OpCall, ids: Ids, x: Tensor, grid: Tensor) -> Ids:
    """Return the gradient of an image from those of its samples, by the pixels that each sample was made of."""
    examples, channels = ids.shape[:2]
    options = call["interpolation_mode"], call["padding_mode"], call["align_corners"]
    pixels = math.prod(x.shape[2:])
    parts = []
    for example in range(examples):
        if call.known_value(grid) is None or pixels * ids[example, 0].size > LARGEST:
            return np.broadcast_to(call.sets.reduce(ids, range(2, ids.ndim), keepdims=True), tuple(x.shape))
        flat = ids[example].reshape(channels, -1)
        used = np.zeros((flat.shape[1], pixels), bool)
        for dtype in PRECISIONS:
            units = torch.eye(pixels, dtype=dtype).reshape(1, pixels, *x.shape[2:])
            points = grid[example : example + 1].to(dtype).cpu()
            used |= (torch.grid_sampler(units, points, *options)[0].reshape(pixels, -1).T != 0).numpy()
        parts.append(rules.along_axis(call.sets, flat, 1, used).reshape(channels, *x.shape[2:]))
    return np.stack(parts)


def distance_backward(call: OpCall) -> Results:
    """The gradient of the distances of each row to all others: all coordinates of a row mix."""
    ids = call.ids(next(iter(call.arguments.values())))  # `grad`, or `grad_output` since 2.15
    if ids is None or any(call.ids(call[name]) is not None for name in ("x1", "x2")):
        return None
    return [np.broadcast_to(call.sets.reduce(ids, [-1], keepdims=True), call.shape)]


def bag_backward(call: OpCall) -> Results:
    """The gradient of a bag of rows goes to each of them."""
    ids, indices, offsets = call.ids(call["grad"]), call.known_value(call["indices"]), call.known_value(call["offsets"])
    if ids is None or indices is None or offsets is None:
        return None
    rows, width = call.shape
    taken = indices.numpy(force=True).reshape(-1)
    bags = np.searchsorted(offsets.numpy(force=True)[: len(ids)], np.arange(len(taken)), side="right") - 1
    owners = taken[:, None] * width + np.arange(width)
    return [call.sets.union_by_owner(owners.reshape(-1), ids[bags].reshape(-1), rows * width).reshape(rows, width)]


def masked_scatter_backward(call: OpCall) -> Results:
    """The gradients at the true elements of a mask, one after another, and zeros behind them."""
    ids, mask = call.ids(call["grad_output"]), call.known_value(call["mask"])
    if ids is None or mask is None:
        return None
    taken = ids[np.broadcast_to(mask.numpy(force=True), ids.shape)]
    result = np.full(math.prod(call.shape), EMPTY)
    result[: len(taken)] = taken
    return [result.reshape(call.shape)]


RULES: dict[str, Rule] = {
    "pointwise": pointwise,
    **dict.fromkeys(("complex", "view_as_complex", "polar"), pointwise),
    "where": where,
    "masked_fill": masked_fill,
    **dict.fromkeys(MOVES, move),
    **dict.fromkeys(["sum", "mean", "nansum", "amax", "amin", "logsumexp", "prod", "any", "all", "max", "min"], reduce),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), cumulative),
    "fill": fill,
    "zero": zero,
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), scatter(_put_destinations, "accumulate")),
    "scatter": scatter(_scatter_destinations, False),
    "scatter_add": scatter(_scatter_destinations, True),
    "scatter_reduce": scatter(_scatter_destinations, True),
    "index_add": scatter(_slice_destinations, True),
    "index_copy": scatter(_slice_destinations, False),
    "index_fill": scatter(_slice_destinations, False),
    "embedding_dense_backward": embedding_backward,
    "mm": matmul("self", "mat2"),
    "bmm": matmul("self", "mat2"),
    "mv": matmul("self", "vec"),
    "addmm": matmul("mat1", "mat2", "self"),
    "baddbmm": matmul("batch1", "batch2", "self"),
    "addmv": matmul("mat", "vec", "self"),
    "dot": dot,
    "vdot": dot,
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), fft),
    **dict.fromkeys(MATRIX_OPS, mix_matrices),
    **dict.fromkeys(("hardshrink_backward", "softshrink_backward"), pointwise),
    **dict.fromkeys([f"{name}_backward" for name in PROBES if name not in OTHERWISE], resize_backward),
    **dict.fromkeys(("grid_sampler_2d_backward", "grid_sampler_3d_backward"), grid_backward),
    "_cdist_backward": distance_backward,
    "_embedding_bag_backward": bag_backward,
    "masked_scatter_backward": masked_scatter_backward,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    **dict.fromkeys(("avg_pool2d_backward", "max_pool2d_with_indices_backward"), pool_backward(2)),
    **dict.fromkeys(("avg_pool3d_backward", "max_pool3d_with_indices_backward"), pool_backward(3)),
}
"""The rule of each op, by its name without `aten::` and without the underscore of ops in place."""
