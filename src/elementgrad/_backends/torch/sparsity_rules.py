"""How sets go through products of matrices, convolutions, pools and Fourier transforms.

How sets go through operations that write or add to where indices say.

How sets go through operations that are linear in a seed: elementwise ones, those that move data, and sums.

The pattern of a Jacobian, from one sweep that is watched.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elementgrad._backends.torch.isolate import isolated, plainly
from elementgrad._backends.torch.sparsity import OpCall, Rule, SparsityMode
from elementgrad._sparsity.index_sets import Ids, IndexSets
from elementgrad._sparsity.pattern import Pattern

Tensor = torch.Tensor
MOST = 2 * 10**7
"""More products than this are not looked at one by one for known zeros."""
Sizes = Sequence[int]


def product(left: str, right: str, plus: str | None = None) -> Callable[[OpCall], Any]:
    """The product of two matrices, or of two stacks of them, and what is added to it."""

    def rule(call: OpCall) -> Sequence[Ids | None]:
        a, b = call[left], call[right]
        vector = b.ndim == 1
        parts = []
        ids = call.ids(a)
        if ids is not None:
            ids = ids[None] if a.ndim == 1 else ids
            mask = _mask(call, b)
            found = _through(call.reach, ids, mask[..., None] if vector and mask is not None else mask, _width(b))
            parts.append(found[..., 0] if vector else found)
        ids = call.ids(b)
        if ids is not None:
            ids = ids[:, None] if vector else ids
            mask = _mask(call, a[None] if a.ndim == 1 else a)
            turned = np.swapaxes(ids, -1, -2)
            found = _through(call.reach, turned, None if mask is None else np.swapaxes(mask, -1, -2), _height(a))
            parts.append(np.swapaxes(found, -1, -2)[..., 0] if vector else np.swapaxes(found, -1, -2))
        if a.ndim == 1:
            parts = [part[0] for part in parts]
        added = call.ids(call[plus]) if plus else None
        if added is not None and call.arguments.get("beta", 1) != 0:
            parts.append(added)
        return [call.reach.union(*parts)]

    return rule


def _width(b: Tensor) -> int:
    return 1 if b.ndim == 1 else b.shape[-1]


def _height(a: Tensor) -> int:
    return 1 if a.ndim == 1 else a.shape[-2]


def _mask(call: OpCall, x: Tensor) -> np.ndarray | None:
    """Where a known factor is not zero; None if it is not known, or nowhere zero."""
    known = call.known(x)
    if known is None:
        return None
    mask = (known != 0).numpy(force=True)
    return None if mask.all() else mask


def _through(reach: IndexSets, ids: Ids, mask: np.ndarray | None, width: int) -> Ids:
    """The product of ids with a matrix (or a stack of them) of so many columns, whose zeros may be known."""
    if mask is not None and ids.shape[-2] * int(mask.sum()) <= MOST:
        if mask.ndim == 2:
            return reach.through(ids, mask)
        return np.stack([reach.through(one, part) for one, part in zip(ids, mask, strict=True)])
    whole = reach.over(ids, [-1], keepdims=True)
    return np.broadcast_to(whole, (*whole.shape[:-1], width))


def dot(call: OpCall) -> Sequence[Ids | None]:
    """Of two vectors."""
    sets = []
    for one, two in (("self", "tensor"), ("tensor", "self")):
        other = call[one if one in call.arguments else "other"], call[two if two in call.arguments else "other"]
        ids = call.ids(other[0])
        if ids is not None:
            mask = _mask(call, other[1])
            sets.append(call.reach.over(ids if mask is None else ids[mask], [0]))
    return [call.reach.union(*sets)]


def convolved(
    reach: IndexSets,
    ids: Ids,
    mask: np.ndarray,
    stride: Sizes,
    padding: Sequence[tuple[int, int]],
    dilation: Sizes,
    spacing: Sizes,
    groups: int,
) -> Ids:
    """Windows over channels and space. `mask` is of shape (out, in of a group, *window): where weights are not zero."""
    dims = mask.ndim - 2
    out, each = mask.shape[0] // groups, mask.shape[1]
    results = []
    for group in range(groups):
        mine = ids[:, group * each : (group + 1) * each]
        weights = mask[group * out : (group + 1) * out]
        if weights.all():
            mine, weights = reach.over(mine, [1], keepdims=True), weights[:, :1]
        kinds, inverse = np.unique(weights.reshape(out, -1), axis=0, return_inverse=True)
        size = (mine.shape[1], *mask.shape[2:])
        steps = [1, *stride], [(0, 0), *padding], [1, *dilation], [1, *spacing]
        found = [reach.windows(mine, size, *steps, mask=kind.reshape(size)) for kind in kinds]
        results.append(np.concatenate(found, 1)[:, inverse.reshape(-1)])
    assert results[0].ndim == dims + 2
    return np.concatenate(results, 1)


def _weights(call: OpCall, weight: Tensor) -> np.ndarray:
    known = call.known(weight)
    if known is None:
        return np.ones(tuple(weight.shape), dtype=bool)
    return (known != 0).numpy(force=True)


def _ahead(call: OpCall, ids: Ids, mask: np.ndarray, groups: int) -> Ids:
    stride, padding, dilation = (_each(call[name], mask.ndim - 2) for name in ("stride", "padding", "dilation"))
    pads = [(pad, pad) for pad in padding]
    return convolved(call.reach, ids, mask, stride, pads, dilation, [1] * len(stride), groups)


def _back(call: OpCall, ids: Ids, mask: np.ndarray, groups: int, size: Sizes) -> Ids:
    """The transpose of a convolution, to a tensor of a size; `mask` is that of the convolution."""
    dims = mask.ndim - 2
    stride, padding, dilation = (_each(call[name], dims) for name in ("stride", "padding", "dilation"))
    apart = mask.reshape(groups, mask.shape[0] // groups, *mask.shape[1:])
    turned = np.swapaxes(apart, 1, 2).reshape(-1, apart.shape[1], *mask.shape[2:])
    turned = np.flip(turned, tuple(range(2, turned.ndim)))
    pads = []
    for axis in range(dims):
        span = dilation[axis] * (mask.shape[2 + axis] - 1)
        spread = (ids.shape[2 + axis] - 1) * stride[axis] + 1
        low = span - padding[axis]
        pads.append((low, size[axis] + span - spread - low))
    return convolved(call.reach, ids, turned, [1] * dims, pads, dilation, stride, groups)


def _each(sizes: Sizes, dims: int) -> list[int]:
    sizes = list(sizes)
    return sizes * dims if len(sizes) == 1 else sizes


def convolution(call: OpCall) -> Sequence[Ids | None] | None:
    """A convolution, or its transpose."""
    x, weight = call["input"], call["weight"]
    parts = []
    ids = call.ids(x)
    if ids is not None:
        mask, groups = _weights(call, weight), call["groups"]
        size = call.outputs[0].shape[2:]
        parts.append(_back(call, ids, mask, groups, size) if call["transposed"] else _ahead(call, ids, mask, groups))
    ids = call.ids(weight)
    if ids is not None:
        if call["transposed"]:
            return None
        parts.append(call.reach.over(ids, range(1, ids.ndim)).reshape(-1, *[1] * (ids.ndim - 2)))
    ids = call.ids(call["bias"])
    if ids is not None:
        parts.append(ids.reshape(-1, *[1] * (x.ndim - 2)))
    return [call.reach.union(*parts)]


def convolution_backward(call: OpCall) -> Sequence[Ids | None] | None:
    """To the input, the weight and the bias."""
    ids, x, weight = call.ids(call["grad_output"]), call["input"], call["weight"]
    if ids is None or call.ids(x) is not None or call.ids(weight) is not None:
        return None
    results: list[Ids | None] = []
    others = [0, *range(2, ids.ndim)]
    for wanted, kind in zip(call["output_mask"], ("input", "weight", "bias"), strict=True):
        if not wanted:
            continue
        if kind == "input":
            mask, groups = _weights(call, weight), call["groups"]
            ahead = call["transposed"]
            results.append(_ahead(call, ids, mask, groups) if ahead else _back(call, ids, mask, groups, x.shape[2:]))
        elif kind == "bias":
            results.append(call.reach.over(ids, others))
        elif call["transposed"]:
            results.append(np.full(tuple(weight.shape), call.reach.all_of(ids)))
        else:
            united = call.reach.over(ids, others).reshape(-1, *[1] * (ids.ndim - 1))
            results.append(np.broadcast_to(united, tuple(weight.shape)))
    return results


def unpooled(dims: int) -> Callable[[OpCall], Any]:
    """From windows back to the elements that are in them, whichever of them was taken."""

    def rule(call: OpCall) -> Sequence[Ids | None] | None:
        grad = call["grad_output"]
        ids = call.ids(grad)
        if ids is None:
            return None
        size = _each(call["kernel_size"], dims)
        stride = _each(call["stride"] or size, dims)
        padding, dilation = _each(call["padding"], dims), _each(call.arguments.get("dilation", [1]), dims)
        return [_unpool(call, ids, size, stride, padding, dilation)]

    return rule


def _unpool(call: OpCall, ids: Ids, size: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Ids:
    dims, shape = len(size), call["self"].shape
    lead = ids.ndim - dims
    pads = []
    for axis in range(dims):
        span = dilation[axis] * (size[axis] - 1)
        spread = (ids.shape[lead + axis] - 1) * stride[axis] + 1
        low = span - padding[axis]
        pads.append((low, shape[lead + axis] + span - spread - low))
    return call.reach.windows(ids, size, [1] * dims, pads, dilation, stride)


def transformed(call: OpCall) -> Sequence[Ids | None] | None:
    """Fourier transforms mix all along their axes."""
    ids = call.ids(call["self"])
    if ids is None:
        return None
    united = call.reach.over(ids, call["dim"], keepdims=True)
    return [np.broadcast_to(united, tuple(call.outputs[0].shape))]


def by_matrices(call: OpCall) -> Sequence[Ids | None] | None:
    """Linear algebra on a stack of matrices keeps them apart."""
    several = [ids for x in call.tensors if (ids := call.ids(x)) is not None]
    stacks = {x.shape[:-2] for x in (*call.tensors, *call.outputs) if x.is_floating_point() or x.is_complex()}
    if len(stacks) != 1 or not math.prod(next(iter(stacks))):
        return None
    united = call.reach.union(*[call.reach.over(ids, [-1, -2], keepdims=True) for ids in several])
    return [np.broadcast_to(united, tuple(x.shape)) for x in call.outputs]


PRODUCTS: dict[str, Callable[[OpCall], Any]] = {
    "mm": product("self", "mat2"),
    "bmm": product("self", "mat2"),
    "mv": product("self", "vec"),
    "addmm": product("mat1", "mat2", "self"),
    "baddbmm": product("batch1", "batch2", "self"),
    "addmv": product("mat", "vec", "self"),
    "dot": dot,
    "vdot": dot,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "avg_pool2d_backward": unpooled(2),
    "avg_pool3d_backward": unpooled(3),
    "max_pool2d_with_indices_backward": unpooled(2),
    "max_pool3d_with_indices_backward": unpooled(3),
    "_fft_c2c": transformed,
    "_fft_r2c": transformed,
    "_fft_c2r": transformed,
    "linalg_solve_triangular": by_matrices,
}


Places = Callable[[OpCall, Tensor], tuple[Tensor, Any, list[Any]]]
"""From the positions of all elements to those written to, beside what is written and the indices that say where."""


def _put(call: OpCall, positions: Tensor) -> tuple[Tensor, Any, list[Any]]:
    indices = call["indices"]
    return torch.ops.aten.index.Tensor(positions, indices), call["values"], list(indices)


def _scattered(call: OpCall, positions: Tensor) -> tuple[Tensor, Any, list[Any]]:
    index = call["index"]
    source = call.arguments.get("src", call.arguments.get("value"))
    if isinstance(source, Tensor):
        source = source[tuple(slice(0, size) for size in index.shape)]
    return positions.gather(call["dim"], index), source, [index]


def _rows(call: OpCall, positions: Tensor) -> tuple[Tensor, Any, list[Any]]:
    index = call["index"]
    source = call.arguments.get("source", call.arguments.get("value"))
    return positions.index_select(call["dim"], index), source, [index]


def scattered(places: Places, adds: bool | str) -> Callable[[OpCall], Any]:
    """What is written replaces what was there, or is added to it."""

    def rule(call: OpCall) -> Sequence[Ids | None] | None:
        x = call["self"]
        adding = bool(call.arguments.get(adds)) if isinstance(adds, str) else adds
        own = call.ids(x)
        ids = np.zeros(tuple(x.shape), dtype=np.int64) if own is None else np.array(own)
        positions = torch.arange(x.numel()).reshape(x.shape)
        where, source, indices = places(call, positions)
        written = call.ids(source)
        written = np.zeros((), dtype=np.int64) if written is None else written
        if any(isinstance(index, Tensor) and call.known(index) is None for index in indices):
            return [_scatter_anywhere(call, ids, written, indices)]
        targets = where.numpy().reshape(-1)
        spread = np.broadcast_to(written, tuple(where.shape)).reshape(-1)
        united = call.reach.gathered(targets, spread, x.numel()).reshape(ids.shape)
        if adding or call.arguments.get("reduce") is not None:
            return [call.reach.union(ids, united)]
        ids.reshape(-1)[targets] = 0
        return [call.reach.union(ids, united)]

    return rule


def _scatter_anywhere(call: OpCall, ids: Ids, written: Ids, indices: list[Any]) -> Ids:
    """To places that are not known: anything along the axis, or anywhere."""
    own = [found for index in indices if (found := call.ids(index)) is not None]
    axis = call.arguments.get("dim")
    if axis is None or not written.ndim or own or call.name.startswith("index"):
        return call.reach.union(ids, np.full(ids.shape, call.reach.all_of(written, *own)))
    along = call.reach.over(written, [axis], keepdims=True)
    spread = np.zeros(ids.shape, dtype=np.int64)
    index = indices[0]
    within = [slice(0, size) for size in index.shape]
    within[axis] = slice(None)
    spread[tuple(within)] = along[tuple(slice(0, min(a, b)) for a, b in zip(along.shape, index.shape, strict=True))]
    return call.reach.union(ids, spread)


def embedded(call: OpCall) -> Sequence[Ids | None] | None:
    """Gradients of rows that were looked up are added to them."""
    ids, indices = call.ids(call["grad_output"]), call.known(call["indices"])
    if ids is None or indices is None:
        return None
    rows, width = call.outputs[0].shape
    targets = indices.numpy(force=True).reshape(-1, 1) * width + np.arange(width)
    return [call.reach.gathered(targets.reshape(-1), ids.reshape(-1), rows * width).reshape(rows, width)]


def filled(call: OpCall) -> Sequence[Ids | None]:
    """One value everywhere."""
    return [call.ids(call["value"])]


SCATTERS: dict[str, Callable[[OpCall], Any]] = {
    "index_put": scattered(_put, "accumulate"),
    "_index_put_impl": scattered(_put, "accumulate"),
    "_unsafe_index_put": scattered(_put, "accumulate"),
    "scatter": scattered(_scattered, False),
    "scatter_add": scattered(_scattered, True),
    "scatter_reduce": scattered(_scattered, True),
    "index_add": scattered(_rows, True),
    "index_copy": scattered(_rows, False),
    "index_fill": scattered(_rows, False),
    "embedding_dense_backward": embedded,
    "fill": filled,
}


SLOPES = [
    *("mul", "div", "threshold_backward", "tanh_backward", "sigmoid_backward", "hardtanh_backward", "elu_backward"),
    *("gelu_backward", "leaky_relu_backward", "silu_backward", "softplus_backward"),
]
"""Elementwise operations that are proportional to the one tensor that depends on the seed."""
MOVES = [
    *("clone", "copy", "_to_copy", "contiguous", "lift_fresh", "alias_copy", "cat", "stack", "flip"),
    *("roll", "repeat", "tril", "triu", "constant_pad_nd", "select_backward", "slice_backward"),
    *("diagonal_backward", "slice_scatter", "select_scatter", "diagonal_scatter"),
    *("_reshape_copy", "view_copy", "expand_copy", "permute_copy", "_unsafe_view", "reshape"),
    *(
        "index_select",
        "masked_select",
        "gather",
        "take",
        "index",
        "repeat_interleave",
        "channel_shuffle",
        "pixel_shuffle",
    ),
    *(
        "pixel_unshuffle",
        "diag_embed",
        "rot90",
        "block_diag",
    ),
    *("unbind_copy", "split_copy", "split_with_sizes_copy", "squeeze_copy", "unsqueeze_copy", "t_copy"),
    *("transpose_copy", "slice_copy", "select_copy", "unfold_copy", "view_as_real_copy", "im2col"),
    *("_unsafe_index",),
]
"""What only brings numbers to other places, and fills in zeros."""
ALONG = {"index_select": "dim", "gather": "dim", "take": None, "index": None, "_unsafe_index": None}
"""Moves to where indices say, and the axis along which they do."""
SUMS = ("sum", "mean", "nansum", "amax", "amin", "logsumexp", "prod", "any", "all", "max", "min")


def pointwise(call: OpCall) -> Sequence[Ids | None]:
    """The union of what is at the same place in each tensor; nothing where a known factor is zero."""
    several = [(x, ids) for x in call.tensors if (ids := call.ids(x)) is not None]
    shape = tuple(call.outputs[0].shape)
    ids = call.reach.union(*[ids for _, ids in several])
    if len(several) == 1 and call.name in SLOPES:
        slope = _slope(call, several[0][0])
        if slope is not None:
            ids = np.where(slope, np.broadcast_to(ids, shape), 0)
    return [np.broadcast_to(ids, shape)]


def _slope(call: OpCall, x: Tensor) -> np.ndarray | None:
    """Where the operation passes something on, if everything but one of its tensors is known."""
    others = [other for other in call.tensors if other is not x]
    if (call.name == "div" and call["self"] is not x) or any(call.known(other) is None for other in others):
        return None
    if not others:
        factor = call.arguments.get("other")
        return None if call.name != "mul" or factor != 0 else np.zeros(tuple(x.shape), dtype=bool)
    ones = torch.ones_like(x)
    arguments = {name: ones if value is x else value for name, value in call.arguments.items() if name != "out"}
    return (getattr(torch.ops.aten, call.name)(**arguments) != 0).numpy(force=True)


def where(call: OpCall) -> Sequence[Ids | None]:
    """Of two tensors, the one that a known condition takes."""
    condition = call.known(call["condition"])
    sides = [_zeros(call.ids(call[name])) for name in ("self", "other")]
    if condition is None:
        return [call.reach.union(*sides, _zeros(call.ids(call["condition"])))]
    return [np.where(condition.numpy(force=True), *sides)]


def masked_fill(call: OpCall) -> Sequence[Ids | None]:
    """Another value where a mask is true."""
    mask, ids, filled = call.known(call["mask"]), call.ids(call["self"]), call.ids(call["value"])
    ids, filled = _zeros(ids), _zeros(filled)
    if mask is None:
        return [call.reach.union(ids, filled, _zeros(call.ids(call["mask"])))]
    return [np.where(mask.numpy(force=True), filled, ids)]


def _zeros(ids: Ids | None) -> Ids:
    return np.zeros((), dtype=np.int64) if ids is None else ids


def moved(call: OpCall) -> Sequence[Ids | None] | None:
    """The operation itself, on the ids instead of the numbers."""
    if call.name in ("_to_copy", "copy", "clone", "lift_fresh", "contiguous"):
        return [call.ids(call["src"] if call.name == "copy" else call["self"])]
    if any(not _is_data(x) and call.known(x) is None for x in call.tensors):
        return _anywhere(call)
    try:
        moved = _on_ids(call, torch.int64)
    except NotImplementedError:  # for want of a kernel for integers
        moved = _on_ids(call, torch.float64)
    return [x.numpy().astype(np.int64) for x in moved]


def _on_ids(call: OpCall, dtype: torch.dtype) -> list[Tensor]:
    def replaced(x: Any) -> Any:
        if isinstance(x, Tensor) and _is_data(x):
            ids = call.ids(x)
            if ids is None:
                return torch.zeros(x.shape, dtype=dtype)
            return torch.from_numpy(np.array(ids, order="C")).to(dtype)
        if isinstance(x, (list, tuple)):
            return [replaced(part) for part in x]
        return x.cpu() if isinstance(x, Tensor) else x

    arguments = {name: replaced(x) for name, x in call.arguments.items() if name != "out"}
    if "value" in arguments and call.name == "constant_pad_nd":
        arguments["value"] = 0
    result = getattr(torch.ops.aten, call.name)(**arguments)
    return [result] if isinstance(result, Tensor) else list(result)


def _anywhere(call: OpCall) -> Sequence[Ids | None] | None:
    """Moves to or from places that are not known: what is taken may be any along the axis."""
    axis = ALONG.get(call.name)
    ids = call.ids(call.arguments.get("self"))
    if axis is None or ids is None or not ids.ndim:
        return None
    along = call.reach.over(ids, [call[axis]], keepdims=True)
    shape = tuple(call.outputs[0].shape)
    within = tuple(slice(0, min(a, b)) for a, b in zip(shape, along.shape, strict=True))
    return [np.broadcast_to(along[within], shape)]


def _is_data(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def summed(call: OpCall) -> Sequence[Ids | None] | None:
    """The union over the axes."""
    ids = call.ids(call["self"])
    if ids is None or any(call.ids(x) is not None for x in call.tensors if x is not call["self"]):
        return None
    axes = call.arguments.get("dim")
    axes = [axes] if isinstance(axes, int) else axes
    axes = list(axes) if axes is not None and len(axes) else list(range(ids.ndim))
    keep = bool(call.arguments.get("keepdim", False))
    united = call.reach.over(ids, axes, keep) if ids.ndim else ids
    return [united] * len(call.outputs)


def cumulated(call: OpCall) -> Sequence[Ids | None] | None:
    """The union of all up to each place."""
    ids = call.ids(call["self"])
    if ids is None or not ids.ndim:
        return None if ids is None else [ids]
    return [call.reach.along(ids, call["dim"])]


def nothing(call: OpCall) -> Sequence[Ids | None]:
    """Filled with a constant."""
    return [None for _ in call.outputs]


def _table() -> dict[str, Rule]:
    table: dict[str, Callable[[OpCall], Any]] = dict.fromkeys(MOVES, moved)
    table |= dict.fromkeys(SUMS, summed)
    table |= dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), cumulated)
    table |= {"pointwise": pointwise, "where": where, "masked_fill": masked_fill, "zero": nothing}
    table |= {"complex": pointwise, "view_as_complex": pointwise, "polar": pointwise}
    return table | PRODUCTS | SCATTERS


RULES = _table()


Evaluate = Callable[[], tuple[list[Any], list[Tensor]]]
"""The function once more: where its gradients end, and its outputs."""
MISSING = "is not implemented"
"""Stands in the errors about derivatives that an operation does not have."""


def found(
    evaluate: Evaluate,
    push: Callable[[Tensor], Any],
    y: Tensor,
    output: int,
    x: Tensor | None,
    input: int,
    local: bool,
) -> Pattern | None:
    """By a reverse sweep, or by a forward one where an operation has no rule for that; None without a path."""
    try:
        return _by_reverse(_watching(y.numel(), x, local), evaluate, output, input)
    except (NotImplementedError, RuntimeError) as error:
        if x is None or (MISSING not in str(error) and not isinstance(error, NotImplementedError)):
            raise
    return _by_forward(_watching(x.numel(), x, local), push, x)


def _watching(size: int, x: Tensor | None, local: bool) -> SparsityMode:
    """Someone to watch a sweep from a seed of so many elements.

    Nothing but what varies with `x` is unknown: other constants count with their values, and zeros among them cut
    dependences off. Without `x` no constant counts as known, and with `local` all do.
    """
    mode = SparsityMode(size, RULES, trusting=local or x is not None)
    if x is not None and not local:
        mode.memory.vary(x)
    return mode


def _by_reverse(mode: SparsityMode, evaluate: Evaluate, output: int, input: int) -> Pattern | None:
    """Evaluate a function once more and sweep back from an output to an input; None without a path."""
    with mode.watching():
        leaves, outputs = evaluate()
    y = outputs[output]
    if not y.requires_grad:
        return None
    seed = torch.ones_like(y, requires_grad=False, memory_format=torch.contiguous_format)
    mode.memory.write(seed, mode.reach.start(tuple(seed.shape)))
    with isolated(None), plainly(), mode.watching():
        (swept,) = torch.autograd.grad(y, leaves[input], seed, allow_unused=True)
    return None if swept is None else _pattern(mode, swept).T


def _by_forward(mode: SparsityMode, push: Callable[[Tensor], Any], x: Tensor) -> Pattern:
    """Sweep forward from an input."""
    seed = torch.ones_like(x, requires_grad=False, memory_format=torch.contiguous_format)
    mode.memory.write(seed, mode.reach.start(tuple(seed.shape)))
    with mode.watching():
        (swept,) = push(seed[None])
    return _pattern(mode, swept[0])


def _pattern(mode: SparsityMode, swept: Tensor) -> Pattern:
    ids = mode.memory.ids(swept)
    if ids is None:
        return Pattern.from_entries([], [], (swept.numel(), mode.reach.size))
    return mode.reach.pattern(ids)
