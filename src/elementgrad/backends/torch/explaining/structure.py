"""Which elements of a result can move with some of the operands, for functions of which that is known without a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from elementgrad import tree
from elementgrad.backends.torch.explaining.measures import Ran

Tensor = torch.Tensor
Mask = np.ndarray
Masked = Callable[[Any], Mask | None]
"""The mask of an operand: all false for one that does not move, None for what is no tensor."""
EACH = frozenset(
    """
    add __radd__ sub __rsub__ mul __rmul__ div true_divide __rdiv__ neg __neg__ tanh sigmoid relu gelu silu exp clone
    contiguous float double half bfloat16
    """.split()  # noqa: SIM905
)
"""Work element by element."""
MOVE = frozenset(
    """
    view reshape flatten transpose permute T.__get__ mT.__get__ squeeze unsqueeze split chunk unbind cat stack expand
    embedding index_select gather narrow __getitem__
    """.split()  # noqa: SIM905
)
"""Only take elements elsewhere."""


def structured(ran: Ran, masks: Mapping[int, Mask]) -> list[Mask] | None:
    """Masks for what a function gave, from those of tensors by their id; None if it has to be tried out."""
    tensors = [x for x in tree.flat((ran.args, dict(ran.kwargs))) if isinstance(x, Tensor)]
    if "out" in ran.kwargs or any(id(x) in masks and not x.is_floating_point() for x in tensors):
        return None
    if ran.name in MOVE and not any(isinstance(x, torch.dtype) for x in ran.args):
        return _moved(ran, masks)
    rule = RULES.get(ran.name)
    if rule is None or len(ran.made) != 1 or any(type(x) in (int, float) and x == 0 for x in ran.args):
        return None

    def mask(x: Any) -> Mask | None:
        return masks.get(id(x), np.zeros(tuple(x.shape), bool)) if isinstance(x, Tensor) else None

    found = rule(mask, ran.args, ran.kwargs)
    return None if found is None else [np.array(np.broadcast_to(found, tuple(ran.made[0].shape)))]


def _moved(ran: Ran, masks: Mapping[int, Mask]) -> list[Mask]:
    """The same function on the masks themselves."""

    def mask(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not (x.is_floating_point() or x.is_complex()):
            return x.cpu()
        known = masks.get(id(x))
        return torch.zeros(x.shape, dtype=torch.bool) if known is None else torch.from_numpy(known.copy())

    with torch.no_grad():
        if ran.name == "embedding":  # it has a scale and hooks for gradients, which masks have none of
            weight, ids = _bound(ran, "input", "weight")[::-1]
            return [mask(weight)[ids.cpu()].numpy()]
        moved = ran.func(*tree.mapped(ran.args, mask), **tree.mapped(dict(ran.kwargs), mask))
    return [x.numpy() for x in tree.flat(moved) if isinstance(x, Tensor)]


def _bound(ran: Ran, *names: str) -> list[Any]:
    given = dict(zip(names, ran.args, strict=False)) | dict(ran.kwargs)
    return [given[name] for name in names]


def _each(mask: Masked, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mask:
    found = [m for x in args if (m := mask(x)) is not None]
    whole = np.zeros(np.broadcast_shapes(*[m.shape for m in found]), bool)
    for each in found:
        whole |= each
    return whole


def _product(a: Mask, b: Mask) -> Mask:
    return np.any(a, -1, keepdims=True) | np.any(b, -2, keepdims=True)


def _matmul(mask: Masked, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mask | None:
    pair = [mask(x) for x in args]
    if kwargs or len(pair) != 2 or any(m is None or m.ndim < 2 for m in pair):
        return None
    return _product(*pair)  # type: ignore[arg-type]


def _addmm(mask: Masked, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mask | None:
    if kwargs or len(args) != 3:
        return None
    added, *pair = [mask(x) for x in args]
    return added | _product(*pair)  # type: ignore[operator,arg-type]


def _linear(mask: Masked, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mask | None:
    parts = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    x, weight, bias = mask(parts["input"]), mask(parts["weight"]), mask(parts.get("bias"))
    if x is None or weight is None:
        return None
    found = np.any(x, -1, keepdims=True) | np.any(weight, -1)
    return found if bias is None else found | bias


def _layer_norm(mask: Masked, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mask | None:
    names = ("input", "normalized_shape", "weight", "bias")
    parts = dict(zip(names, args, strict=False)) | dict(kwargs)
    x = mask(parts["input"])
    axes = tuple(range(-len(tuple(parts["normalized_shape"])), 0))
    if x is None or np.prod([x.shape[axis] for axis in axes]) < 3:  # of two numbers it gives signs, of one nothing
        return None
    found = np.broadcast_to(x.any(axes, keepdims=True), x.shape)
    for name in ("weight", "bias"):
        scale = mask(parts.get(name))
        found = found if scale is None else found | scale
    return found


RULES: Mapping[str, Callable[[Masked, Sequence[Any], Mapping[str, Any]], Mask | None]] = {
    **dict.fromkeys(EACH, _each),
    **dict.fromkeys(["matmul", "mm", "bmm"], _matmul),
    "addmm": _addmm,
    "baddbmm": _addmm,
    "linear": _linear,
    "layer_norm": _layer_norm,
}
