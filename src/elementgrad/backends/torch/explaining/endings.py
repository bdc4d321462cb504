"""Why a step gives no derivative, where its numbers say more than its name."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from elementgrad import tree
from elementgrad.backends.torch.explaining.measures import Ran
from elementgrad.backends.torch.explaining.meeting import tied
from elementgrad.backends.torch.functions import aside
from elementgrad.backends.witness import bounded, counts_for_nothing

Tensor = torch.Tensor
CHOOSES = frozenset(
    """
    max min amax amin topk maximum minimum fmax fmin sort kthvalue median nanmedian mode cummax cummin scatter_reduce
    index_reduce segment_reduce max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
    fractional_max_pool2d fractional_max_pool3d
    """.split()  # noqa: SIM905
)
ADDS = {"sum", "mean", "prod"}
"""What `scatter_reduce` and its like may be told to do instead of choosing."""
BOUNDS = {"maximum", "minimum"}
"""Of those, the ones that may take a constant as a bound."""
HINGES = {"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_"}
SUMS = {"sum", "mean", "add", "sub", "__rsub__", "matmul", "mm", "bmm", "mv", "dot", "linear", "einsum", "addmm"}
SUMS |= {"baddbmm", "conv1d", "conv2d", "conv3d", "cumsum", "logsumexp", "bilinear"}
NORMS = {"layer_norm", "group_norm", "instance_norm", "batch_norm"}
"""Functions that take a mean away."""
PRODUCTS = {"mul", "mul_", "__rmul__", "__imul__", "div", "true_divide"}
SHARES = {"softmax", "log_softmax", "softmin", "cross_entropy"}
"""Functions of differences between elements alone."""
CURVES = {"sigmoid", "tanh", "gelu", "silu", "elu", "selu", "softplus", "erf", "logsigmoid", "mish", "exp", *SHARES}
"""Smooth functions of which a derivative is asked again."""
ROUNDING = 64.0


def why_none(ran: Ran, before: Sequence[Tensor | None]) -> str | None:
    """The cause, if it is to be seen, by the derivatives that came in."""
    name = ran.name.removeprefix("linalg_")
    carrying = [(x, t) for x, t in zip(ran.taken, before, strict=True) if t is not None and bool(t.any())]
    x, tangent = carrying[0]
    moved = x.detach()[tangent != 0]
    if name in BOUNDS and len(carrying) == 1 and "out" not in ran.kwargs:  # at a tie it passes a half
        (bound,) = [y for y in (*ran.args, *ran.kwargs.values()) if y is not x]
        return bounded(name == "maximum", bound.detach().double().cpu().numpy()) or "not-selected"
    adds = any(isinstance(x, str) and x in ADDS for x in (*ran.args, *ran.kwargs.values()))
    if name in CHOOSES and not adds and ran.made and ran.made[0].is_floating_point():
        masks = {id(x): (t != 0).cpu().numpy() for x, t in carrying}
        return "tie" if tied(ran, masks) else "not-selected"
    if name in HINGES and _is_hinge(ran):
        return "dead-relu"
    if name == "relu6" and bool((moved > 0).all()):
        return "clamped"
    if name in CURVES and _is_too_small(ran, before):
        return "underflow"
    if name in SHARES and counts_for_nothing(_array(x), (tangent != 0).cpu().numpy()):
        return "masked"
    if name in SHARES and not _moves_at_zero(ran, before):
        return "cancelled"
    if name in PRODUCTS:
        if len(carrying) > 1:
            return "stationary" if not bool(moved.any()) else "cancelled"
        others = [y for y in ran.args if y is not x and isinstance(y, (Tensor, float, int))]
        if others and bool(torch.as_tensor(others[0]).detach().ne(0).all()):
            return "underflow"
    if name in NORMS:
        return "cancelled"
    if name in SUMS:
        return "cancelled" if _adds_up(ran, before) else "masked"
    return None


def _array(x: Tensor) -> np.ndarray:
    return forward_ad.unpack_dual(x).primal.detach().double().cpu().numpy()


def _is_hinge(ran: Ran) -> bool:
    """Whether zero is the only bound, from below."""
    named = dict(zip(("input", "min", "max"), ran.args, strict=False)) | dict(ran.kwargs)
    low, high = named.get("min"), named.get("max")
    return high is None and not isinstance(low, Tensor) and low == 0


def _adds_up(ran: Ran, before: Sequence[Tensor | None]) -> bool:
    """Whether a sum gives something for parts that come in other amounts: then what came in had cancelled."""
    generator = torch.Generator().manual_seed(0)

    def other(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        amounts = torch.rand(tangent.shape, generator=generator, dtype=torch.float64).to(tangent) + 0.5
        return x, tangent * amounts

    return _again(ran, before, other) > 0


def _is_too_small(ran: Ran, before: Sequence[Tensor | None]) -> bool:
    """Whether something leaves if more comes in: a power of two, so that nothing is rounded in another way."""
    size = max([largest(t) for t in before if t is not None])
    if not size < 1:
        return False
    factor = 2.0 ** -math.frexp(size)[1]

    def more(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.complex128 if tangent.is_complex() else torch.float64
        return x, (tangent.to(wide) * factor).to(tangent.dtype)

    return _again(ran, before, more) > 0


def _moves_at_zero(ran: Ran, before: Sequence[Tensor | None]) -> bool:
    """Whether there is a slope where nothing is far out; if there is none, its parts cancel everywhere."""
    size = max([largest(t) for t in before if t is not None])
    moves = _again(ran, before, lambda x, tangent: (torch.zeros_like(x), tangent))
    return not moves <= ROUNDING * torch.finfo(ran.made[0].dtype).eps * size


def _again(
    ran: Ran, before: Sequence[Tensor | None], change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> float:
    """The largest derivative that leaves for other numbers or derivatives that come in."""
    slots = {id(x): tangent for x, tangent in zip(ran.taken, before, strict=True) if tangent is not None}

    def other(x: Any) -> Any:
        tangent = slots.get(id(x)) if isinstance(x, Tensor) else None
        if tangent is None:
            return x
        return forward_ad.make_dual(*change(forward_ad.unpack_dual(x).primal.detach(), tangent))

    with aside():
        again = ran.func(*tree.mapped(ran.args, other), **tree.mapped(dict(ran.kwargs), other))
    found = [tangent_of(x) for x in tree.flat(again) if isinstance(x, Tensor)]
    return max([largest(t) for t in found if t is not None], default=0.0)


def tangent_of(x: Tensor) -> Tensor | None:
    """The derivative of a tensor, if it has one."""
    return forward_ad.unpack_dual(x).tangent if x.is_floating_point() or x.is_complex() else None


def largest(x: Tensor) -> float:
    """The largest in size; NaN if there is one."""
    x = x.detach()
    if not x.numel():
        return 0.0
    if x.is_complex():
        return float(x.abs().max())
    least, most = torch.aminmax(x)
    return float(torch.maximum(-least, most))
