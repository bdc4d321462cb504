"""Which elements of a result can move with some of the operands, for functions of which that is known without a run.

Where the elements that can move with the source meet a gradient, measured in one run and its way back.

Why a step gives no derivative, where its numbers say more than its name.

What is measured of every step of a second run: derivatives going forward, gradients coming back, numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from elementgrad._backends.torch._compat import sequence_number
from elementgrad._backends.torch.explain_ops import Meter, TorchCall
from elementgrad._backends.torch.isolate import generators, isolated
from elementgrad._backends.torch.record.intercept import pause_recording
from elementgrad._explain.dependence import Rerun, dependent_outputs, guess_dependent_outputs, is_tied
from elementgrad._explain.trace import (
    CotangentSizes,
    FiniteFlags,
    TangentSizes,
    cause_of_bound,
    is_masked_score,
    largest_where,
)
from elementgrad._names import pytree

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


def structured(ran: TorchCall, masks: Mapping[int, Mask]) -> list[Mask] | None:
    """Masks for what a function gave, from those of tensors by their id; None if it has to be tried out."""
    tensors = [x for x in pytree.leaves_of((ran.args, dict(ran.kwargs))) if isinstance(x, Tensor)]
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


def _moved(ran: TorchCall, masks: Mapping[int, Mask]) -> list[Mask]:
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
        moved = ran.func(*pytree.map_tree(ran.args, mask), **pytree.map_tree(dict(ran.kwargs), mask))
    return [x.numpy() for x in pytree.leaves_of(moved) if isinstance(x, Tensor)]


def _bound(ran: TorchCall, *names: str) -> list[Any]:
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


KINDS = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool}
KINDS |= {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
"""What NumPy has numbers for."""


class DependenceMasks(Meter):
    """Masks of the elements that can move with some of the source's, and hooks that see whether a gradient arrives."""

    def __init__(self, source: Callable[[], int], mask: np.ndarray):
        self._source = source
        self._mask = mask
        self.masks: dict[int, np.ndarray] = {}
        self.alive: set[int] = set()

    def before(self, taken: Sequence[Tensor], writes: bool) -> Any:
        """The numbers, if the step may overwrite them."""
        self.masks.setdefault(self._source(), self._mask)
        return {id(x): x.detach().clone() for x in taken} if writes else {}

    def after(self, ran: TorchCall, before: Any) -> None:
        """Mask what the step gave."""
        masks = {
            id(x): mask for x, n in zip(ran.taken, ran.takes, strict=True) if (mask := self.masks.get(n)) is not None
        }
        if not masks:
            return
        known = None if before else structured(ran, masks)
        found = tried(ran, before, masks) if known is None else known
        made = {id(x): mask for x, mask in zip(ran.made, found, strict=True)}
        spread = any(mask.any() for mask in made.values())
        for x, number in ran.given:
            mask = made.get(id(x))
            mask = np.full(tuple(x.shape), spread) if mask is None else mask  # it shares memory with one of them
            if mask.any():
                self.masks[number] = mask
                if x.requires_grad and (x.is_floating_point() or x.is_complex()):
                    x.register_hook(self._note(number, mask))

    def _note(self, number: int, mask: np.ndarray) -> Callable[[Tensor], None]:
        everywhere = bool(mask.all())

        def note(gradient: Tensor) -> None:
            dense = gradient.detach() if gradient.layout == torch.strided else gradient.detach().to_dense()
            if bool((dense if everywhere else dense[torch.from_numpy(mask).to(gradient.device)]).any()):
                self.alive.add(number)

        return note


def tried(ran: TorchCall, before: dict[int, Tensor], masks: dict[int, np.ndarray]) -> list[np.ndarray]:
    """Masks for what a step made or wrote to. The user's own functions are not run on numbers that are not theirs."""
    shapes = [tuple(x.shape) for x in ran.made]
    repeated = repeatable(ran, before)
    if repeated is None:
        return guess_dependent_outputs([masks.get(id(x)) for x in ran.taken], shapes)
    again, taken, numbers = repeated
    return dependent_outputs(again, numbers, [masks.get(id(x)) for x in taken], shapes)


def tied(ran: TorchCall, masks: dict[int, np.ndarray]) -> bool:
    """Whether elements of what a choice takes are level with those that it took."""
    repeated = repeatable(ran, {})
    if repeated is None:
        return False
    again, taken, numbers = repeated
    return is_tied(again, numbers, [masks.get(id(x)) for x in taken], [x.dtype == torch.bfloat16 for x in taken])


def repeatable(ran: TorchCall, before: dict[int, Tensor]) -> tuple[Rerun, list[Tensor], list[np.ndarray]] | None:
    """A step that can be run on other numbers, the tensors that it takes, and their numbers; None if it cannot be."""
    flat = pytree.leaves_of((ran.args, dict(ran.kwargs)))
    taken = {id(x): x for x in flat if isinstance(x, Tensor)}
    own = getattr(ran.func, "__name__", "") == "apply" or any(map(callable, flat))
    if own or not all(x.layout == torch.strided and x.dtype in KINDS for x in taken.values()):
        return None

    def again(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        others = {
            key: torch.from_numpy(array.copy()).to(x.device, x.dtype)
            for (key, x), array in zip(taken.items(), arrays, strict=True)
        }

        def other(x: Any) -> Any:
            return others[id(x)] if isinstance(x, Tensor) else x

        with isolated(None), torch.no_grad():
            before = generators()[0]
            result = ran.func(*pytree.map_tree(ran.args, other), **pytree.map_tree(dict(ran.kwargs), other))
            if not torch.equal(before, generators()[0]):
                raise RuntimeError("it draws random numbers, which would be others")
        results = [x for x in pytree.leaves_of(result) if isinstance(x, Tensor)]
        written = [others[id(x)] for x in ran.made if id(x) in others]
        return [_mask_array(x) for x in {id(x): x for x in (*results, *written)}.values()]

    return again, list(taken.values()), [_mask_array(before.get(key, x)) for key, x in taken.items()]


def _mask_array(x: Tensor) -> np.ndarray:
    x = forward_ad.unpack_dual(x).primal.detach().cpu().resolve_conj().resolve_neg()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


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


def why_none(ran: TorchCall, before: Sequence[Tensor | None]) -> str | None:
    """The cause, if it is to be seen, by the derivatives that came in."""
    name = ran.name.removeprefix("linalg_")
    carrying = [(x, t) for x, t in zip(ran.taken, before, strict=True) if t is not None and bool(t.any())]
    x, tangent = carrying[0]
    moved = x.detach()[tangent != 0]
    if name in BOUNDS and len(carrying) == 1 and "out" not in ran.kwargs:  # at a tie it passes a half
        (bound,) = [y for y in (*ran.args, *ran.kwargs.values()) if y is not x]
        return cause_of_bound(name == "maximum", bound.detach().double().cpu().numpy()) or "not-selected"
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
    if name in SHARES and is_masked_score(_array(x), (tangent != 0).cpu().numpy()):
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


def _is_hinge(ran: TorchCall) -> bool:
    """Whether zero is the only bound, from below."""
    named = dict(zip(("input", "min", "max"), ran.args, strict=False)) | dict(ran.kwargs)
    low, high = named.get("min"), named.get("max")
    return high is None and not isinstance(low, Tensor) and low == 0


def _adds_up(ran: TorchCall, before: Sequence[Tensor | None]) -> bool:
    """Whether a sum gives something for parts that come in other amounts: then what came in had cancelled."""
    generator = torch.Generator().manual_seed(0)

    def other(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        amounts = torch.rand(tangent.shape, generator=generator, dtype=torch.float64).to(tangent) + 0.5
        return x, tangent * amounts

    return _again(ran, before, other) > 0


def _is_too_small(ran: TorchCall, before: Sequence[Tensor | None]) -> bool:
    """Whether something leaves if more comes in: a power of two, so that nothing is rounded in another way."""
    size = max([largest(t) for t in before if t is not None])
    if not size < 1:
        return False
    factor = 2.0 ** -math.frexp(size)[1]

    def more(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.complex128 if tangent.is_complex() else torch.float64
        return x, (tangent.to(wide) * factor).to(tangent.dtype)

    return _again(ran, before, more) > 0


def _moves_at_zero(ran: TorchCall, before: Sequence[Tensor | None]) -> bool:
    """Whether there is a slope where nothing is far out; if there is none, its parts cancel everywhere."""
    size = max([largest(t) for t in before if t is not None])
    moves = _again(ran, before, lambda x, tangent: (torch.zeros_like(x), tangent))
    return not moves <= ROUNDING * torch.finfo(ran.made[0].dtype).eps * size


def _again(
    ran: TorchCall, before: Sequence[Tensor | None], change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> float:
    """The largest derivative that leaves for other numbers or derivatives that come in."""
    slots = {id(x): tangent for x, tangent in zip(ran.taken, before, strict=True) if tangent is not None}

    def other(x: Any) -> Any:
        tangent = slots.get(id(x)) if isinstance(x, Tensor) else None
        if tangent is None:
            return x
        return forward_ad.make_dual(*change(forward_ad.unpack_dual(x).primal.detach(), tangent))

    with pause_recording():
        again = ran.func(*pytree.map_tree(ran.args, other), **pytree.map_tree(dict(ran.kwargs), other))
    found = [tangent_of(x) for x in pytree.leaves_of(again) if isinstance(x, Tensor)]
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


class TangentMeter(Meter):
    """The largest derivative of what a step takes and gives by the elements that were asked for."""

    def before(self, taken: Sequence[Tensor], writes: bool) -> Any:
        tangents = [tangent_of(x) for x in taken]
        if writes:
            tangents = [None if t is None else t.clone() for t in tangents]
        return tangents if any(t is not None for t in tangents) else None

    def after(self, ran: TorchCall, before: Any) -> TangentSizes:
        if before is None:
            return TangentSizes(0.0, 0.0)
        arrives = max([largest(t) for t in before if t is not None], default=0.0)
        leaves = max([largest(t) for x in ran.made if (t := tangent_of(x)) is not None], default=0.0)
        cause = None
        if arrives > 0 and (leaves == 0 or ran.name in BOUNDS):
            cause = why_none(ran, before)
        return TangentSizes(arrives, leaves, cause)


class GradientMeter(Meter):
    """Hooks on the nodes that each step made, which note what arrives from behind and what leaves at the front.

    Where a step takes the source itself, what leaves counts at the elements asked for alone.
    """

    def __init__(self, leads: Callable[[Any], bool], source: Callable[[], int], positions: np.ndarray):
        self._leads = leads
        self._source = source
        self._positions = positions

    def after(self, ran: TorchCall, before: Any) -> "GradientFlow":
        flow = GradientFlow()
        start, now = ran.start, sequence_number()
        tops: set[Any] = {x.grad_fn for x in ran.made if x.grad_fn is not None and x.grad_fn._sequence_nr() >= start}
        seen, ahead = set(tops), list(tops)
        while ahead:
            node = ahead.pop()
            ends, first = [], True
            for slot, (following, _) in enumerate(node.next_functions):
                if following is None or hasattr(following, "variable"):
                    continue
                number = following._sequence_nr()
                if start <= number < now:
                    if following not in seen:
                        seen.add(following)
                        ahead.append(following)
                elif self._leads(following):
                    ends.append(slot)
                    first &= number == self._source()
            node.register_hook(note_flow(flow, node in tops, ends, self._positions if ends and first else None))
        return flow


class GradientFlow:
    """What came by one step of a backward sweep."""

    def __init__(self) -> None:
        self.arrives: float | None = None
        self.leaves: float | None = None
        self.there: float | None = None
        self.dead = True

    def pulled(self) -> CotangentSizes | None:
        """The sizes, if anything came by."""
        if self.arrives is None and self.leaves is None:
            return None
        arrives, leaves = self.arrives or 0.0, self.leaves or 0.0
        return CotangentSizes(arrives, leaves, arrives if self.there is None else self.there, self.dead)


def note_flow(flow: GradientFlow, top: bool, ends: Sequence[int], positions: np.ndarray | None = None) -> Any:
    """A hook for a node that notes what arrives, if it is the last of its step, and what leaves at some slots.

    With positions, at those elements alone of what leaves, and of what arrives if it is of the same shape.
    """
    chosen = None if positions is None else torch.from_numpy(positions.copy())

    def hook(inward: Sequence[Tensor | None], outward: Sequence[Tensor | None]) -> None:
        came = whole = [g.detach() for g in outward if g is not None]
        flow.dead = flow.dead and not (top and any(bool(g.any()) for g in came))
        for slot in ends:
            went = inward[slot] if slot < len(inward) else None
            if went is None:
                continue
            same = whole[0] if whole and whole[0].shape == went.shape else None
            if chosen is not None:
                went = _only(went, chosen)
                came = came if same is None else [same.reshape(-1)[chosen]]
            flow.leaves = _worst([flow.leaves, largest(went)])
            if not math.isfinite(flow.leaves) and whole:
                bad = (~torch.isfinite(went.detach())).cpu().numpy()
                there = largest_where(whole[0].abs().double().cpu().numpy(), bad) if bad.any() else None
                flow.there = flow.there if there is None else max(flow.there or 0.0, there)
        if top:
            flow.arrives = _worst([flow.arrives, *map(largest, came)])

    return hook


def _only(x: Tensor, positions: Tensor) -> Tensor:
    """Zeros, but for some flat positions of a gradient."""
    x = x.detach()
    kept = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
    kept[positions.to(x.device)] = True
    return torch.where(kept.reshape(x.shape), x, torch.zeros_like(x))


def _worst(sizes: Sequence[float | None]) -> float:
    known = [size for size in sizes if size is not None]
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)


class FinitenessMeter(Meter):
    """Whether the numbers of each step are finite."""

    all = True

    def before(self, taken: Sequence[Tensor], writes: bool) -> Any:
        return all(map(_finite, taken)), all(bool(x.detach().all()) for x in taken)

    def after(self, ran: TorchCall, before: Any) -> FiniteFlags:
        given = [x for x in pytree.leaves_of((ran.args, ran.kwargs)) if isinstance(x, float)]
        finite, nonzero = before
        grows = nonzero and not any(bool(x.detach().isnan().any()) for x in ran.made)
        return FiniteFlags(finite and all(map(math.isfinite, given)), all(map(_finite, ran.made)), grows)


def _finite(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(x.detach()).all())


class ChecksumMeter(Meter):
    """A number for what each step takes and gives, which is another if any bit of theirs is another."""

    def before(self, taken: Sequence[Tensor], writes: bool) -> Any:
        return _print(taken)

    def after(self, ran: TorchCall, before: Any) -> tuple[int, int]:
        return before, _print(ran.made)


def _print(tensors: Sequence[Tensor]) -> int:
    total = 0
    for number, x in enumerate(tensors, 1):
        if x.is_floating_point() and x.numel():
            bits = x.detach().contiguous().view(BITS[x.element_size()]).reshape(-1)
            places = torch.arange(1, 2 * len(bits), 2, device=x.device)
            total += number * int((bits.long() * (places * 2654435761)).sum())  # it wraps around, which is no harm
    return total


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
