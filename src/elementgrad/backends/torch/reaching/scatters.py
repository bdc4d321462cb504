"""How sets go through operations that write or add to where indices say."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elementgrad.backends.torch.reaching.mode import Call
from elementgrad.sparsity.reach import Ids

Tensor = torch.Tensor
Places = Callable[[Call, Tensor], tuple[Tensor, Any, list[Any]]]
"""From the positions of all elements to those written to, beside what is written and the indices that say where."""


def _put(call: Call, positions: Tensor) -> tuple[Tensor, Any, list[Any]]:
    indices = call["indices"]
    return torch.ops.aten.index.Tensor(positions, indices), call["values"], list(indices)


def _scattered(call: Call, positions: Tensor) -> tuple[Tensor, Any, list[Any]]:
    index = call["index"]
    source = call.arguments.get("src", call.arguments.get("value"))
    if isinstance(source, Tensor):
        source = source[tuple(slice(0, size) for size in index.shape)]
    return positions.gather(call["dim"], index), source, [index]


def _rows(call: Call, positions: Tensor) -> tuple[Tensor, Any, list[Any]]:
    index = call["index"]
    source = call.arguments.get("source", call.arguments.get("value"))
    return positions.index_select(call["dim"], index), source, [index]


def scattered(places: Places, adds: bool | str) -> Callable[[Call], Any]:
    """What is written replaces what was there, or is added to it."""

    def rule(call: Call) -> Sequence[Ids | None] | None:
        x = call["self"]
        adding = bool(call.arguments.get(adds)) if isinstance(adds, str) else adds
        own = call.ids(x)
        ids = np.zeros(tuple(x.shape), dtype=np.int64) if own is None else np.array(own)
        positions = torch.arange(x.numel()).reshape(x.shape)
        where, source, indices = places(call, positions)
        written = call.ids(source)
        written = np.zeros((), dtype=np.int64) if written is None else written
        if any(isinstance(index, Tensor) and call.known(index) is None for index in indices):
            return [_anywhere(call, ids, written, indices)]
        targets = where.numpy().reshape(-1)
        spread = np.broadcast_to(written, tuple(where.shape)).reshape(-1)
        united = call.reach.gathered(targets, spread, x.numel()).reshape(ids.shape)
        if adding or call.arguments.get("reduce") is not None:
            return [call.reach.union(ids, united)]
        ids.reshape(-1)[targets] = 0
        return [call.reach.union(ids, united)]

    return rule


def _anywhere(call: Call, ids: Ids, written: Ids, indices: list[Any]) -> Ids:
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


def embedded(call: Call) -> Sequence[Ids | None] | None:
    """Gradients of rows that were looked up are added to them."""
    ids, indices = call.ids(call["grad_output"]), call.known(call["indices"])
    if ids is None or indices is None:
        return None
    rows, width = call.outputs[0].shape
    targets = indices.numpy(force=True).reshape(-1, 1) * width + np.arange(width)
    return [call.reach.gathered(targets.reshape(-1), ids.reshape(-1), rows * width).reshape(rows, width)]


def filled(call: Call) -> Sequence[Ids | None]:
    """One value everywhere."""
    return [call.ids(call["value"])]


SCATTERS: dict[str, Callable[[Call], Any]] = {
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
