"""Measures of every call while a run is followed again, and the rules that read them.

The meters: tangents going forward (`TangentMeter`), gradients coming back (`GradientMeter`), finite numbers
(`FinitenessMeter`), changes between two runs (`ChecksumMeter`), and which elements depend on the source and have a
gradient (`DependenceMasks`). `why_no_tangent` says why a call lets no tangent through, where its numbers say more than
its name. `known_dependence` has the functions whose dependence is known without running them again.
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


class TangentMeter(Meter):
    """The largest tangent of a call's inputs and outputs."""

    def before(self, inputs: Sequence[Tensor], writes: bool) -> Any:
        tangents = [tangent_of(x) for x in inputs]
        if writes:
            tangents = [None if t is None else t.clone() for t in tangents]
        return tangents if any(t is not None for t in tangents) else None

    def after(self, call: TorchCall, before: Any) -> TangentSizes:
        if before is None:
            return TangentSizes(0.0, 0.0)
        at_inputs = max([largest_abs(t) for t in before if t is not None], default=0.0)
        at_outputs = max([largest_abs(t) for x in call.outputs if (t := tangent_of(x)) is not None], default=0.0)
        cause = None
        if at_inputs > 0 and (at_outputs == 0 or call.name in BOUNDS):
            cause = why_no_tangent(call, before)
        return TangentSizes(at_inputs, at_outputs, cause)


class GradientMeter(Meter):
    """Hooks on the graph nodes of each call, which note the gradient at its outputs and at its inputs.

    Where a call reads the source itself, only the source's chosen elements count at its inputs.
    """

    def __init__(self, leads: Callable[[Any], bool], source: Callable[[], int], positions: np.ndarray):
        self._leads = leads
        self._source = source
        self._positions = positions

    def after(self, call: TorchCall, before: Any) -> "GradientFlow":
        flow = GradientFlow()
        start, now = call.start, sequence_number()
        tops: set[Any] = {
            x.grad_fn for x in call.outputs if x.grad_fn is not None and x.grad_fn._sequence_nr() >= start
        }
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
            node.register_hook(flow_hook(flow, node in tops, ends, self._positions if ends and first else None))
        return flow


class GradientFlow:
    """The sizes of the gradient at one call, as the backward sweep passes."""

    def __init__(self) -> None:
        self.at_outputs: float | None = None
        self.at_inputs: float | None = None
        self.where_nonfinite: float | None = None
        self.all_zero = True

    def sizes(self) -> CotangentSizes | None:
        if self.at_outputs is None and self.at_inputs is None:
            return None
        at_outputs, at_inputs = self.at_outputs or 0.0, self.at_inputs or 0.0
        where_nonfinite = at_outputs if self.where_nonfinite is None else self.where_nonfinite
        return CotangentSizes(at_outputs, at_inputs, where_nonfinite, self.all_zero)


def flow_hook(flow: GradientFlow, top: bool, ends: Sequence[int], positions: np.ndarray | None = None) -> Any:
    """Return a hook for a graph node of a call.

    It notes the gradient at the outputs if the node is the `top` one of its call, and at the inputs in the slots
    `ends`. With positions only those elements count: of the inputs, and of the outputs if they have the same shape.
    """
    chosen = None if positions is None else torch.from_numpy(positions.copy())

    def hook(input_grads: Sequence[Tensor | None], output_grads: Sequence[Tensor | None]) -> None:
        counted = arriving = [g.detach() for g in output_grads if g is not None]
        flow.all_zero = flow.all_zero and not (top and any(bool(g.any()) for g in arriving))
        for slot in ends:
            leaving = input_grads[slot] if slot < len(input_grads) else None
            if leaving is None:
                continue
            same = arriving[0] if arriving and arriving[0].shape == leaving.shape else None
            if chosen is not None:
                leaving = _only(leaving, chosen)
                counted = counted if same is None else [same.reshape(-1)[chosen]]
            flow.at_inputs = _worst([flow.at_inputs, largest_abs(leaving)])
            if not math.isfinite(flow.at_inputs) and arriving:
                bad = (~torch.isfinite(leaving.detach())).cpu().numpy()
                size = largest_where(arriving[0].abs().double().cpu().numpy(), bad) if bad.any() else None
                if size is not None:
                    flow.where_nonfinite = max(flow.where_nonfinite or 0.0, size)
        if top:
            flow.at_outputs = _worst([flow.at_outputs, *map(largest_abs, counted)])

    return hook


def _only(x: Tensor, positions: Tensor) -> Tensor:
    """Return a gradient with zeros everywhere but at some flat positions."""
    x = x.detach()
    mask = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
    mask[positions.to(x.device)] = True
    return torch.where(mask.reshape(x.shape), x, torch.zeros_like(x))


def _worst(sizes: Sequence[float | None]) -> float:
    known = [size for size in sizes if size is not None]
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)


class FinitenessMeter(Meter):
    """Flags for each call: all inputs finite, all outputs finite."""

    measures_all = True

    def before(self, inputs: Sequence[Tensor], writes: bool) -> Any:
        return all(map(_finite, inputs)), all(bool(x.detach().all()) for x in inputs)

    def after(self, call: TorchCall, before: Any) -> FiniteFlags:
        floats = [x for x in pytree.leaves_of((call.args, call.kwargs)) if isinstance(x, float)]
        finite, nonzero = before
        overflows = nonzero and not any(bool(x.detach().isnan().any()) for x in call.outputs)
        return FiniteFlags(finite and all(map(math.isfinite, floats)), all(map(_finite, call.outputs)), overflows)


def _finite(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(x.detach()).all())


class ChecksumMeter(Meter):
    """A checksum of each call's inputs and outputs, which is another if any bit of theirs is another."""

    def before(self, inputs: Sequence[Tensor], writes: bool) -> Any:
        return _checksum(inputs)

    def after(self, call: TorchCall, before: Any) -> tuple[int, int]:
        return before, _checksum(call.outputs)


def _checksum(tensors: Sequence[Tensor]) -> int:
    total = 0
    for index, x in enumerate(tensors, 1):
        if x.is_floating_point() and x.numel():
            bits = x.detach().contiguous().view(BITS[x.element_size()]).reshape(-1)
            places = torch.arange(1, 2 * len(bits), 2, device=x.device)
            # Overflow wraps around, which does no harm to a checksum.
            total += index * int((bits.long() * (places * 2654435761)).sum())
    return total


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tangent_of(x: Tensor) -> Tensor | None:
    return forward_ad.unpack_dual(x).tangent if x.is_floating_point() or x.is_complex() else None


def largest_abs(x: Tensor) -> float:
    """Return the largest absolute value; NaN if there is one."""
    x = x.detach()
    if not x.numel():
        return 0.0
    if x.is_complex():
        return float(x.abs().max())
    low, high = torch.aminmax(x)
    return float(torch.maximum(-low, high))


NUMPY_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
NUMPY_DTYPES |= {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
"""The dtypes that NumPy has as well."""


class DependenceMasks(Meter):
    """Masks of the elements that can move with the source's, and hooks that see whether a gradient arrives there."""

    def __init__(self, source: Callable[[], int], mask: np.ndarray):
        self._source = source
        self._mask = mask
        self.masks: dict[int, np.ndarray] = {}
        self.alive: set[int] = set()

    def before(self, inputs: Sequence[Tensor], writes: bool) -> Any:
        self.masks.setdefault(self._source(), self._mask)
        return {id(x): x.detach().clone() for x in inputs} if writes else {}

    def after(self, call: TorchCall, before: Any) -> None:
        masks = {
            id(x): mask
            for x, n in zip(call.inputs, call.input_ids, strict=True)
            if (mask := self.masks.get(n)) is not None
        }
        if not masks:
            return
        output_masks = None if before else known_dependence(call, masks)
        if output_masks is None:
            output_masks = probe_dependence(call, before, masks)
        mask_of = {id(x): mask for x, mask in zip(call.outputs, output_masks, strict=True)}
        any_moves = any(mask.any() for mask in output_masks)
        for x, value_id in call.new_values:
            mask = mask_of.get(id(x))
            mask = np.full(tuple(x.shape), any_moves) if mask is None else mask  # it shares memory with an output
            if mask.any():
                self.masks[value_id] = mask
                if x.requires_grad and (x.is_floating_point() or x.is_complex()):
                    x.register_hook(self._alive_hook(value_id, mask))

    def _alive_hook(self, value_id: int, mask: np.ndarray) -> Callable[[Tensor], None]:
        everywhere = bool(mask.all())

        def hook(gradient: Tensor) -> None:
            dense = gradient.detach() if gradient.layout == torch.strided else gradient.detach().to_dense()
            if bool((dense if everywhere else dense[torch.from_numpy(mask).to(gradient.device)]).any()):
                self.alive.add(value_id)

        return hook


def probe_dependence(call: TorchCall, before: dict[int, Tensor], masks: dict[int, np.ndarray]) -> list[np.ndarray]:
    """Return masks for the outputs by running the call on other numbers, unless it is a function of the user's."""
    shapes = [tuple(x.shape) for x in call.outputs]
    rerunnable = make_rerun(call, before)
    if rerunnable is None:
        return guess_dependent_outputs([masks.get(id(x)) for x in call.inputs], shapes)
    rerun, inputs, numbers = rerunnable
    return dependent_outputs(rerun, numbers, [masks.get(id(x)) for x in inputs], shapes)


def has_tie(call: TorchCall, masks: dict[int, np.ndarray]) -> bool:
    """Return True if some masked element is level with the one that a maximum or the like chose."""
    rerunnable = make_rerun(call, {})
    if rerunnable is None:
        return False
    rerun, inputs, numbers = rerunnable
    return is_tied(rerun, numbers, [masks.get(id(x)) for x in inputs], [x.dtype == torch.bfloat16 for x in inputs])


def make_rerun(call: TorchCall, before: dict[int, Tensor]) -> tuple[Rerun, list[Tensor], list[np.ndarray]] | None:
    """Return a function that runs the call on other numbers, its input tensors and their arrays; None if unsafe."""
    flat = pytree.leaves_of((call.args, dict(call.kwargs)))
    inputs = {id(x): x for x in flat if isinstance(x, Tensor)}
    users = getattr(call.func, "__name__", "") == "apply" or any(map(callable, flat))
    if users or not all(x.layout == torch.strided and x.dtype in NUMPY_DTYPES for x in inputs.values()):
        return None

    def rerun(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        others = {
            key: torch.from_numpy(array.copy()).to(x.device, x.dtype)
            for (key, x), array in zip(inputs.items(), arrays, strict=True)
        }

        def other(x: Any) -> Any:
            return others[id(x)] if isinstance(x, Tensor) else x

        with isolated(None), torch.no_grad():
            before = generators()[0]
            result = call.func(*pytree.map_tree(call.args, other), **pytree.map_tree(dict(call.kwargs), other))
            if not torch.equal(before, generators()[0]):
                raise RuntimeError("it draws random numbers, which would be others")
        results = [x for x in pytree.leaves_of(result) if isinstance(x, Tensor)]
        written = [others[id(x)] for x in call.outputs if id(x) in others]
        return [_to_numpy(x) for x in {id(x): x for x in (*results, *written)}.values()]

    return rerun, list(inputs.values()), [_to_numpy(before.get(key, x)) for key, x in inputs.items()]


def _to_numpy(x: Tensor) -> np.ndarray:
    x = forward_ad.unpack_dual(x).primal.detach().cpu().resolve_conj().resolve_neg()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


CHOOSING = frozenset(
    """
    max min amax amin topk maximum minimum fmax fmin sort kthvalue median nanmedian mode cummax cummin scatter_reduce
    index_reduce segment_reduce max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
    fractional_max_pool2d fractional_max_pool3d
    """.split()  # noqa: SIM905
)
ADDING = {"sum", "mean", "prod"}
"""Reductions that `scatter_reduce` and the like may do instead of choosing."""
BOUNDS = {"maximum", "minimum"}
"""Functions that choose, and may take a constant as a bound."""
HINGES = {"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_"}
SUMS = {"sum", "mean", "add", "sub", "__rsub__", "matmul", "mm", "bmm", "mv", "dot", "linear", "einsum", "addmm"}
SUMS |= {"baddbmm", "conv1d", "conv2d", "conv3d", "cumsum", "logsumexp", "bilinear"}
NORMS = {"layer_norm", "group_norm", "instance_norm", "batch_norm"}
"""Functions that subtract a mean."""
PRODUCTS = {"mul", "mul_", "__rmul__", "__imul__", "div", "true_divide"}
SHARES = {"softmax", "log_softmax", "softmin", "cross_entropy"}
"""Functions that see differences between elements alone."""
CURVES = {"sigmoid", "tanh", "gelu", "silu", "elu", "selu", "softplus", "erf", "logsigmoid", "mish", "exp", *SHARES}
"""Smooth functions whose tangent is computed again on other numbers."""
ROUNDING = 64.0


def why_no_tangent(call: TorchCall, before: Sequence[Tensor | None]) -> str | None:
    """Return why no tangent leaves a call, by its inputs and their tangents; None if they do not show it."""
    name = call.name.removeprefix("linalg_")
    moving = [(x, t) for x, t in zip(call.inputs, before, strict=True) if t is not None and bool(t.any())]
    x, tangent = moving[0]
    numbers = x.detach()[tangent != 0]
    if name in BOUNDS and len(moving) == 1 and "out" not in call.kwargs:  # at a tie half of the tangent passes
        (bound,) = [y for y in (*call.args, *call.kwargs.values()) if y is not x]
        return cause_of_bound(name == "maximum", bound.detach().double().cpu().numpy()) or "not-selected"
    adds = any(isinstance(x, str) and x in ADDING for x in (*call.args, *call.kwargs.values()))
    if name in CHOOSING and not adds and call.outputs and call.outputs[0].is_floating_point():
        masks = {id(x): (t != 0).cpu().numpy() for x, t in moving}
        return "tie" if has_tie(call, masks) else "not-selected"
    if name in HINGES and _is_hinge(call):
        return "dead-relu"
    if name == "relu6" and bool((numbers > 0).all()):
        return "clamped"
    if name in CURVES and _is_too_small(call, before):
        return "underflow"
    if name in SHARES and is_masked_score(_array(x), (tangent != 0).cpu().numpy()):
        return "masked"
    if name in SHARES and not _moves_at_zero(call, before):
        return "cancelled"
    if name in PRODUCTS:
        if len(moving) > 1:
            return "stationary" if not bool(numbers.any()) else "cancelled"
        others = [y for y in call.args if y is not x and isinstance(y, (Tensor, float, int))]
        if others and bool(torch.as_tensor(others[0]).detach().ne(0).all()):
            return "underflow"
    if name in NORMS:
        return "cancelled"
    if name in SUMS:
        return "cancelled" if _adds_up(call, before) else "masked"
    return None


def _array(x: Tensor) -> np.ndarray:
    return forward_ad.unpack_dual(x).primal.detach().double().cpu().numpy()


def _is_hinge(call: TorchCall) -> bool:
    """Return True if the only bound is a lower one of zero."""
    named = dict(zip(("input", "min", "max"), call.args, strict=False)) | dict(call.kwargs)
    low, high = named.get("min"), named.get("max")
    return high is None and not isinstance(low, Tensor) and low == 0


def _adds_up(call: TorchCall, before: Sequence[Tensor | None]) -> bool:
    """Return True if a sum has a tangent for uneven tangents of its inputs: then the given ones had cancelled."""
    generator = torch.Generator().manual_seed(0)

    def other(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        amounts = torch.rand(tangent.shape, generator=generator, dtype=torch.float64).to(tangent) + 0.5
        return x, tangent * amounts

    return _largest_tangent_with(call, before, other) > 0


def _is_too_small(call: TorchCall, before: Sequence[Tensor | None]) -> bool:
    """Return True if a tangent leaves for larger ones of the inputs, by a power of two so that rounding is the same."""
    size = max([largest_abs(t) for t in before if t is not None])
    if not size < 1:
        return False
    factor = 2.0 ** -math.frexp(size)[1]

    def scale(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.complex128 if tangent.is_complex() else torch.float64
        return x, (tangent.to(wide) * factor).to(tangent.dtype)

    return _largest_tangent_with(call, before, scale) > 0


def _moves_at_zero(call: TorchCall, before: Sequence[Tensor | None]) -> bool:
    """Return True if there is a slope at zero, where nothing saturates; if not, its parts cancel everywhere."""
    size = max([largest_abs(t) for t in before if t is not None])
    moves = _largest_tangent_with(call, before, lambda x, tangent: (torch.zeros_like(x), tangent))
    return not moves <= ROUNDING * torch.finfo(call.outputs[0].dtype).eps * size


def _largest_tangent_with(
    call: TorchCall, before: Sequence[Tensor | None], change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> float:
    """Return the largest output tangent for changed inputs or tangents."""
    slots = {id(x): tangent for x, tangent in zip(call.inputs, before, strict=True) if tangent is not None}

    def other(x: Any) -> Any:
        tangent = slots.get(id(x)) if isinstance(x, Tensor) else None
        if tangent is None:
            return x
        return forward_ad.make_dual(*change(forward_ad.unpack_dual(x).primal.detach(), tangent))

    with pause_recording():
        result = call.func(*pytree.map_tree(call.args, other), **pytree.map_tree(dict(call.kwargs), other))
    tangents = [tangent_of(x) for x in pytree.leaves_of(result) if isinstance(x, Tensor)]
    return max([largest_abs(t) for t in tangents if t is not None], default=0.0)


Mask = np.ndarray
MaskOf = Callable[[Any], Mask | None]
"""Returns the mask of an argument: all false for a tensor that does not move, None for what is no tensor."""
ELEMENTWISE = frozenset(
    """
    add __radd__ sub __rsub__ mul __rmul__ div true_divide __rdiv__ neg __neg__ tanh sigmoid relu gelu silu exp clone
    contiguous float double half bfloat16
    """.split()  # noqa: SIM905
)
"""Functions that work element by element."""
MOVING = frozenset(
    """
    view reshape flatten transpose permute T.__get__ mT.__get__ squeeze unsqueeze split chunk unbind cat stack expand
    embedding index_select gather narrow __getitem__
    """.split()  # noqa: SIM905
)
"""Functions that only move elements to other places."""


def known_dependence(call: TorchCall, masks: Mapping[int, Mask]) -> list[Mask] | None:
    """Return masks for the outputs, given masks of tensors by their id; None if the call has to run again for that."""
    tensors = [x for x in pytree.leaves_of((call.args, dict(call.kwargs))) if isinstance(x, Tensor)]
    if "out" in call.kwargs or any(id(x) in masks and not x.is_floating_point() for x in tensors):
        return None
    if call.name in MOVING and not any(isinstance(x, torch.dtype) for x in call.args):
        return _move_masks(call, masks)
    rule = RULES.get(call.name)
    if rule is None or len(call.outputs) != 1 or any(type(x) in (int, float) and x == 0 for x in call.args):
        return None

    def mask(x: Any) -> Mask | None:
        return masks.get(id(x), np.zeros(tuple(x.shape), bool)) if isinstance(x, Tensor) else None

    result = rule(mask, call.args, call.kwargs)
    return None if result is None else [np.array(np.broadcast_to(result, tuple(call.outputs[0].shape)))]


def _move_masks(call: TorchCall, masks: Mapping[int, Mask]) -> list[Mask]:
    """Run the same function on the masks."""

    def mask(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not (x.is_floating_point() or x.is_complex()):
            return x.cpu()
        known = masks.get(id(x))
        return torch.zeros(x.shape, dtype=torch.bool) if known is None else torch.from_numpy(known.copy())

    with torch.no_grad():
        if call.name == "embedding":  # it has options about gradients, which masks do not have
            arguments = dict(zip(("input", "weight"), call.args, strict=False)) | dict(call.kwargs)
            return [mask(arguments["weight"])[arguments["input"].cpu()].numpy()]
        result = call.func(*pytree.map_tree(call.args, mask), **pytree.map_tree(dict(call.kwargs), mask))
    return [x.numpy() for x in pytree.leaves_of(result) if isinstance(x, Tensor)]


def _elementwise(mask: MaskOf, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mask:
    masks = [m for x in args if (m := mask(x)) is not None]
    result = np.zeros(np.broadcast_shapes(*[m.shape for m in masks]), bool)
    for each in masks:
        result |= each
    return result


def _product(a: Mask, b: Mask) -> Mask:
    return np.any(a, -1, keepdims=True) | np.any(b, -2, keepdims=True)


def _matmul(mask: MaskOf, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mask | None:
    pair = [mask(x) for x in args]
    if kwargs or len(pair) != 2 or any(m is None or m.ndim < 2 for m in pair):
        return None
    return _product(*pair)  # type: ignore[arg-type]


def _addmm(mask: MaskOf, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mask | None:
    if kwargs or len(args) != 3:
        return None
    added, *pair = [mask(x) for x in args]
    return added | _product(*pair)  # type: ignore[operator,arg-type]


def _linear(mask: MaskOf, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mask | None:
    parts = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    x, weight, bias = mask(parts["input"]), mask(parts["weight"]), mask(parts.get("bias"))
    if x is None or weight is None:
        return None
    result = np.any(x, -1, keepdims=True) | np.any(weight, -1)
    return result if bias is None else result | bias


def _layer_norm(mask: MaskOf, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mask | None:
    names = ("input", "normalized_shape", "weight", "bias")
    parts = dict(zip(names, args, strict=False)) | dict(kwargs)
    x = mask(parts["input"])
    axes = tuple(range(-len(tuple(parts["normalized_shape"])), 0))
    if x is None or np.prod([x.shape[axis] for axis in axes]) < 3:  # of two numbers it gives signs, of one nothing
        return None
    result = np.broadcast_to(x.any(axes, keepdims=True), x.shape)
    for name in ("weight", "bias"):
        scale = mask(parts.get(name))
        result = result if scale is None else result | scale
    return result


RULES: Mapping[str, Callable[[MaskOf, Sequence[Any], Mapping[str, Any]], Mask | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(["matmul", "mm", "bmm"], _matmul),
    "addmm": _addmm,
    "baddbmm": _addmm,
    "linear": _linear,
    "layer_norm": _layer_norm,
}
