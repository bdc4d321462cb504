"""How sets go through operations that are linear in a seed: elementwise ones, those that move data, and sums."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elementgrad.backends.torch.reaching.mode import Call, Rule
from elementgrad.backends.torch.reaching.products import PRODUCTS
from elementgrad.backends.torch.reaching.scatters import SCATTERS
from elementgrad.sparsity.reach import Ids

Tensor = torch.Tensor
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


def pointwise(call: Call) -> Sequence[Ids | None]:
    """The union of what is at the same place in each tensor; nothing where a known factor is zero."""
    several = [(x, ids) for x in call.tensors if (ids := call.ids(x)) is not None]
    shape = tuple(call.outputs[0].shape)
    ids = call.reach.union(*[ids for _, ids in several])
    if len(several) == 1 and call.name in SLOPES:
        slope = _slope(call, several[0][0])
        if slope is not None:
            ids = np.where(slope, np.broadcast_to(ids, shape), 0)
    return [np.broadcast_to(ids, shape)]


def _slope(call: Call, x: Tensor) -> np.ndarray | None:
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


def where(call: Call) -> Sequence[Ids | None]:
    """Of two tensors, the one that a known condition takes."""
    condition = call.known(call["condition"])
    sides = [_zeros(call.ids(call[name])) for name in ("self", "other")]
    if condition is None:
        return [call.reach.union(*sides, _zeros(call.ids(call["condition"])))]
    return [np.where(condition.numpy(force=True), *sides)]


def masked_fill(call: Call) -> Sequence[Ids | None]:
    """Another value where a mask is true."""
    mask, ids, filled = call.known(call["mask"]), call.ids(call["self"]), call.ids(call["value"])
    ids, filled = _zeros(ids), _zeros(filled)
    if mask is None:
        return [call.reach.union(ids, filled, _zeros(call.ids(call["mask"])))]
    return [np.where(mask.numpy(force=True), filled, ids)]


def _zeros(ids: Ids | None) -> Ids:
    return np.zeros((), dtype=np.int64) if ids is None else ids


def moved(call: Call) -> Sequence[Ids | None] | None:
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


def _on_ids(call: Call, dtype: torch.dtype) -> list[Tensor]:
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


def _anywhere(call: Call) -> Sequence[Ids | None] | None:
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


def summed(call: Call) -> Sequence[Ids | None] | None:
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


def cumulated(call: Call) -> Sequence[Ids | None] | None:
    """The union of all up to each place."""
    ids = call.ids(call["self"])
    if ids is None or not ids.ndim:
        return None if ids is None else [ids]
    return [call.reach.along(ids, call["dim"])]


def nothing(call: Call) -> Sequence[Ids | None]:
    """Filled with a constant."""
    return [None for _ in call.outputs]


def _table() -> dict[str, Rule]:
    table: dict[str, Callable[[Call], Any]] = dict.fromkeys(MOVES, moved)
    table |= dict.fromkeys(SUMS, summed)
    table |= dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), cumulated)
    table |= {"pointwise": pointwise, "where": where, "masked_fill": masked_fill, "zero": nothing}
    table |= {"complex": pointwise, "view_as_complex": pointwise, "polar": pointwise}
    return table | PRODUCTS | SCATTERS


RULES = _table()
