"""Memory of results: PyTorch hands out derivatives that are not stored anywhere, or that somebody else holds too.

A derivative may be a tensor of zeros without memory, a number expanded to a shape, a conjugate or negative that is only
marked as such, or a small part of a large tensor. Such a result cannot be written to, converted to NumPy, or saved at
its own size. It may also be the seed of the sweep, the derivative for another input (`x + y` passes one tensor on to
both), or a tensor that a backward of the user's own has saved and returns: writing to it would change the user's
numbers, or those of the next read.


Sweeps that run as one stack: what `torch.func.vmap` does for a function of one tensor, without its trees.

The graph of one evaluation: where gradients end, and how large they get on their way.

Checkpoints run a part of a function again when its gradients are asked for: while we look inside, they do not.

A reentrant one keeps no graph, so nothing inside has a derivative. Any other would run again after the tensors that we
replaced are back in their places. They differ from plain calls in the memory that they take alone.


Sweeps through a PyTorch function: reverse through the graph of one evaluation, forward by transposing those.

Where that cannot be, and for a single one, forward sweeps go by dual numbers.
"""

import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, disable_saved_tensors_hooks, get_gradient_edge

from elementgrad._backends.autodiff import (
    Function,
    Linearization,
    NotBatchableError,
    TensorFunction,
    UnsupportedError,
    reason,
)
from elementgrad._backends.monkeypatch import AttributePatch, Replace
from elementgrad._backends.torch._compat import (
    _add_batch_dim,
    _remove_batch_dim,
    is_functorch_wrapped_tensor,
    lazy_load_decompositions,
)
from elementgrad._backends.torch._compat import _engine_run_backward as engine
from elementgrad._backends.torch._compat import _storage_Use_Count as use_count
from elementgrad._backends.torch._compat import _vmap_decrement_nesting as leave_vmap
from elementgrad._backends.torch._compat import _vmap_increment_nesting as enter_vmap
from elementgrad._backends.torch.isolate import NOTHING, Freezable, State, in_mode, isolated, plainly, state
from elementgrad._cleanup import enter, push, safe_context, scope
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
ALONE = 2
"""The uses of a storage that one tensor holds: the tensor's own, and the one through which we look at it."""


def materialize(x: Tensor) -> Tensor:
    """Return x, copied unless it holds all of its numbers itself and no others."""
    if _is_opaque(x):
        return x
    if x._is_zerotensor() or x.is_conj() or x.is_neg():
        return x.clone()
    if x.untyped_storage().nbytes() != x.numel() * x.element_size() or _is_expanded(x):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def unshare(derivatives: list[Tensor | None], create_graph: bool) -> list[Tensor | None]:
    """Copy those of the derivatives in a list whose memory is held by anything else as well, and return the list.

    With `create_graph` each is copied, since what it was computed from may hold it.
    """
    for i in range(len(derivatives)):
        x = derivatives[i]
        if x is None:
            continue
        # Another tensor for the same memory takes its place: the first is gone then, unless something else holds it.
        derivatives[i] = x = x.clone() if create_graph else x.detach()
        if create_graph or _is_opaque(x) or x._is_zerotensor():
            continue
        if use_count(x.untyped_storage()._cdata) > ALONE:
            derivatives[i] = x.clone()
    return derivatives


def _is_opaque(x: Tensor) -> bool:
    """Return whether there is no memory to look at: in a transform of the user's, or in a class of its own."""
    return type(x) is not Tensor or is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x)


def _is_expanded(x: Tensor) -> bool:
    return 0 in x.stride() and any(not step and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))


# type: ignore[attr-defined]
# type: ignore[attr-defined]


HOOKS = "saved tensor hooks do not go with a stack of sweeps"


def together(sweep: Callable[[Tensor], Sequence[Tensor | None]], seeds: Tensor) -> list[Tensor | None]:
    """Sweeps from a stack of seeds.

    Not by `is_grads_batched=True`, which knows fewer rules and worse ones.
    """
    lazy_load_decompositions()
    count = len(seeds)
    with scope():
        enter(no_advice())
        enter(disable_saved_tensors_hooks(HOOKS))
        level = enter_vmap(count, "error")
        try:
            swept = sweep(_add_batch_dim(seeds, 0, level))
            return [None if x is None else _remove_batch_dim(x, level, count, 0) for x in swept]
        finally:
            leave_vmap()


@contextmanager
def no_advice() -> Iterator[None]:
    """Leave out PyTorch's warnings about speed: they are about our stacks and not about the user's code."""
    with safe_context(warnings.catch_warnings()):
        warnings.filterwarnings("ignore", message=".*performance drop")
        yield


End = Tensor | GradientEdge
UNBATCHABLE_NODES = ("CdistBackward0",)
"""Reverse rules that give wrong numbers, and no error, for a stack of seeds under `torch.func.vmap`."""


class ActivationTap:
    """Where gradients end at a value that the function computes, from where it passes.

    What goes on is a copy of it: the function may have the value by another way as well, which is none of ours, and may
    write to it in place, which would leave no trace of a view.
    """

    end: GradientEdge | None
    """None for what has no gradients, such as ints."""
    like: Tensor
    """Zeros of its shape, to which forward sweeps add their seeds."""

    def __call__(self, x: Tensor) -> Tensor:
        """What goes on in the place of the value."""
        self.like = torch.zeros_like(x, requires_grad=False)
        if not (x.is_floating_point() or x.is_complex()):
            self.end = None
            return x
        copy = (x if x.requires_grad else x.detach().requires_grad_()).clone()
        self.end = get_gradient_edge(copy)
        return copy


def node_of(end: End) -> Any:
    """The node of the graph at which gradients end; for a leaf, to which its node leads, the tensor itself."""
    return end.node if isinstance(end, GradientEdge) else end if end.grad_fn is None else end.grad_fn


def alone(starts: Sequence[Any]) -> str | None:
    """A reverse rule behind nodes of the graph that must get its seeds one by one, if there is any."""
    ahead = list(starts)
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if node.name() in UNBATCHABLE_NODES:
            return str(node.name())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
    return None


def largest(start: Any, ends: set[Any]) -> int:
    """The bytes of the largest derivative on the way from a node of the graph to some others, or to leaves."""
    before: dict[Any, list[Any]] = {}  # who leads to a node
    leading: set[Any] = set()  # parameters of a model hang on the graph as well
    ahead = [start] if start is not None else []
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        after = node.next_functions
        if not after and getattr(node, "variable", None) in ends:
            leading.add(node)
        for following, _ in after:
            if following is not None:
                before.setdefault(following, []).append(node)
                if following not in seen:
                    seen.add(following)
                    ahead.append(following)
    leading |= ends & seen
    ahead = list(leading)
    while ahead:
        for node in before.get(ahead.pop(), ()):
            if node not in leading:
                leading.add(node)
                ahead.append(node)
    sizes = [math.prod(made.shape) * made.dtype.itemsize for node in leading for made in node._input_metadata]
    return max(sizes, default=0)


REENTRANT, OTHER = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
"""What the two sorts of checkpoints are called in PyTorch's module."""


@dataclass(eq=False)
class _DisabledCheckpoints:
    """One `straight` that a thread is in."""

    inside: bool
    faithful: bool


class _CheckpointState(threading.local):
    looks: tuple[_DisabledCheckpoints, ...] = ()


_local = _CheckpointState()


class checkpointing_disabled(scope):  # noqa: N801
    """In here this thread's reentrant checkpoints are plain calls, and all others too if we look inside.

    With `faithful`, a reentrant one without a tracked argument stays what it is: nothing inside gets a gradient.
    """

    __slots__ = ("_faithful", "_inside")

    def __init__(self, inside: bool, faithful: bool = False):
        self._inside = inside
        self._faithful = faithful

    def __enter__(self) -> None:
        super().__enter__()
        call_plainly(self._inside, self._faithful)


def call_plainly(inside: bool, faithful: bool = False) -> None:
    """Do the same until the innermost open scope is left."""
    if "torch.utils.checkpoint" in sys.modules:
        push(_local, "looks", _DisabledCheckpoints(inside, faithful))
        _stand_ins.enter()


def _install(replace: Replace) -> None:
    module: Any = sys.modules["torch.utils.checkpoint"]
    replace(module, OTHER, _around(getattr(module, OTHER)))
    replace(module, REENTRANT, _ReentrantProxy(getattr(module, REENTRANT)))


class _ReentrantProxy:
    """Stands in for what a reentrant checkpoint calls, and is that for threads that are not ours."""

    def __init__(self, original: Any):
        self._original = original

    def apply(self, function: Any, preserve_rng_state: bool, *arguments: Any) -> Any:
        """Call the function plainly in our threads."""
        looks = _local.looks
        if looks and (not looks[-1].faithful or any(getattr(x, "requires_grad", False) for x in arguments)):
            return function(*arguments)
        return self._original.apply(function, preserve_rng_state, *arguments)


def _around(original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Stand in for what other checkpoints do before and after their call."""

    def around(*arguments: Any, **options: Any) -> Iterator[None]:
        inside = any(look.inside for look in _local.looks)
        return _nothing() if inside else original(*arguments, **options)

    return around


def _nothing() -> Iterator[None]:
    """Do nothing before and after; a generator, as PyTorch throws into it what the call raises."""
    yield


_stand_ins = AttributePatch(_install)


Graph = tuple[list[Any], list[Tensor]]
"""Where gradients of one evaluation end, and its outputs."""
Sweep = Callable[[Tensor], Sequence[Tensor | None]]
FUSED = "scaled_dot_product"
"""Stands in the errors about attention kernels that lack a derivative which the plain kernel has."""

GONE = {
    "modified by an inplace operation": "a tensor that this derivative needs was changed in place since it was used, "
    "by the function itself or afterwards, as an optimizer does; write to a clone of it, use eg.record, or make the "
    "Jacobian anew",
    "backward through the graph a second time": "backward() freed the graph that this derivative needs; call it with "
    "retain_graph=True, or make the Jacobian anew",
}
"""What PyTorch says when the graph of the evaluation can no longer be used, and what that means."""
TO_INPUTS = {"allow_unreachable": True, "accumulate_grad": False}
"""Of the autograd engine: give the gradients, None where no path leads, and add to no `.grad`."""
FROZEN = "change requires_grad flags of leaf"
"""Stands in the error about a parameter that the function freezes while a computed tensor stands for it."""
WRITES = "the function writes to an argument in place"
CHANGED = "an argument was changed in place after the function was evaluated"
MISSING = "is not implemented"
"""Stands in the errors about derivatives that an operation does not have."""


class TorchLinearization(Linearization):
    """One evaluation with its graph.

    A stack of forward sweeps transposes a reverse one. A single one goes by dual numbers, which know no reverse rule,
    and so does a stack where a reverse rule has no derivative: the function runs again, from the same random numbers.
    """

    gone: Mapping[str, str] = GONE
    _now: State | None = None
    """For sweeps: that no code of the user's can run in them, where that is known."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        evaluate: Callable[[bool], Graph],
        replay: Function,
        state: State,
        create_graph: bool,
    ):
        super().__init__()
        self.inputs = inputs
        self._evaluate = evaluate
        self._replay = replay
        self.state = state
        self._now = state if state[0] is None else None
        self._create_graph = create_graph
        self._attention = False
        self._transposes = True
        self._alone: dict[int, str | None] = {}
        self._versions = [_version(x) for x in inputs]
        self.leaves, self.outputs = evaluate(False)

    @classmethod
    def of(cls, run: TensorFunction, inputs: Sequence[Tensor], create_graph: bool) -> "TorchLinearization":
        """Evaluate a function at its inputs."""
        for x in inputs:
            if x is not None and x.layout is not torch.strided:
                raise FrameworkError(f"elements of layout {x.layout} have no derivatives; give x.to_dense()")
        now = state(run.function)
        given = inputs
        inputs = list(inputs)
        freezes = False

        def evaluate(attention: bool) -> Graph:
            again, this = (now, None) if attention else (None, now)
            leaves: list[Any] = []
            passed: list[Any] = []
            with (
                isolated(run.function, again, attention, this) as anything,
                checkpointing_disabled(run.inside) if anything else NOTHING,
                in_mode(Freezable()) if freezes else NOTHING,
            ):
                for x in given:
                    leaf: Any = ActivationTap() if x is None else _leaf(x, create_graph)
                    leaves.append(leaf)
                    passed.append(leaf.clone() if anything and x is not None else leaf)  # clones may be written to
                outputs = run(*passed)
                if not anything:  # what is handed through is an output nevertheless
                    outputs = [y.clone() if y.is_leaf and y.requires_grad else y for y in outputs]
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, ActivationTap):
                    inputs[i], leaves[i] = leaf.like, leaf.end
            return leaves, list(outputs)

        others = run.others
        versions = [_version(x) for x in others]
        try:
            linear = cls(inputs, evaluate, run, now, create_graph)
        except RuntimeError as error:
            if FROZEN not in str(error):
                raise
            freezes = True
            linear = cls(inputs, evaluate, run, now, create_graph)
        if [_version(x) for x in others] != versions:
            for output in range(len(linear.outputs)):
                linear.without[output]["forward"] = WRITES
        return linear

    def gradient(self, output: int, seed: Tensor) -> "TorchLinearization":
        def evaluate(attention: bool) -> Graph:
            leaves, outputs = self._evaluate(True) if attention else (self.leaves, self.outputs)
            y = outputs[output]
            if not y.requires_grad:
                return leaves, [torch.zeros_like(x, requires_grad=False) for x in self.inputs]
            with isolated(None):
                options: Any = {"create_graph": True, "allow_unused": True}
                gradients = torch.autograd.grad(y, leaves, normal(seed), **options)
            pairs = zip(gradients, self.inputs, strict=True)
            return leaves, [torch.zeros_like(x, requires_grad=False) if g is None else g for g, x in pairs]

        def replay(*xs: Tensor) -> Sequence[Tensor]:
            return torch.func.vjp(lambda *xs: self._replay(*xs)[output], *xs)[1](normal(seed))

        linear = TorchLinearization(self.inputs, evaluate, replay, self.state, self._create_graph)
        for i in range(len(linear.outputs)):
            linear.without[i].update(self.without[output])
        return linear

    def value(self, output: int) -> Tensor:
        y = self.outputs[output]
        return y if self._create_graph else y.detach().clone()  # it may share its memory with the user's

    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        try:
            return self._pull(output, inputs, seeds)
        except RuntimeError as error:
            if FUSED not in str(error) or self._attention:
                raise
        self._attend(output)
        return self._pull(output, inputs, seeds)

    def _attend(self, output: int) -> None:
        """Evaluate once more, with attention by kernels that have every derivative."""
        self._attention = True
        before = self.outputs[output]
        self.leaves, self.outputs = self._evaluate(True)
        if not _alike(before, self.outputs[output]):
            raise FrameworkError(
                "attention must be evaluated again for this derivative, and the function gives another value by now; "
                "make the Jacobian anew"
            )

    def row(self, output: int, inputs: Sequence[int], index: tuple[int, ...]) -> list[Tensor | None] | None:
        y = self.outputs[output]
        if type(y) is not Tensor or not y.requires_grad or not y.is_floating_point():
            return None
        with isolated(None, now=self._now), plainly():
            try:
                return self._one(self._back(y[index], [self.leaves[i] for i in inputs]), None)
            except RuntimeError as error:
                if FUSED not in str(error) or self._attention:
                    raise
        return None

    def _pull(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        sweep = self._sweep(output, inputs)
        if sweep is None:
            return [None] * len(inputs)
        seeds = normal(seeds)
        with isolated(None, now=self._now), plainly():  # a rule may run parts of the function again
            if seeds.shape[0] == 1:
                return [None if g is None else g.unsqueeze(0) for g in self._one(sweep, seeds[0])]
            if output not in self._alone:
                self._alone[output] = alone(self._starts(output, inputs))
            if self._alone[output] is not None:
                raise NotBatchableError(f"{self._alone[output]} is wrong for a stack of seeds")
            try:
                return unshare(together(sweep, seeds), self._create_graph)
            except Exception as error:
                if FUSED in str(error) and not self._attention:
                    raise
                raise NotBatchableError(reason(error)) from error

    def _starts(self, output: int, inputs: Sequence[int]) -> Sequence[Any]:
        """The nodes of the graph at which reverse sweeps start."""
        return [self.outputs[output].grad_fn]

    def _sweep(self, output: int, inputs: Sequence[int]) -> Sweep | None:
        """One reverse sweep as a function of its seed; None if there is no path at all."""
        y, leaves = self.outputs[output], [self.leaves[i] for i in inputs]
        return self._back(y, leaves) if y.requires_grad else None

    def _back(self, y: Tensor, ends: list[Any]) -> Callable[[Tensor | None], Sequence[Tensor | None]]:
        """Sweeps from a tensor; the seed of a single number may be None."""

        def sweep(seed: Tensor | None) -> Sequence[Tensor | None]:
            # What `torch.autograd.grad` does when it has looked at its arguments, which takes a fourth of a small read.
            seeds = (torch.ones_like(y) if seed is None else seed,)
            return engine((y,), seeds, True, self._create_graph, tuple(ends), **TO_INPUTS)

        return sweep

    def _one(self, sweep: Callable[[Any], Sequence[Tensor | None]], seed: Tensor | None) -> list[Tensor | None]:
        try:
            return unshare(list(sweep(seed)), self._create_graph)
        except (NotImplementedError, RuntimeError) as error:
            self._require_there(error)
            if MISSING not in str(error) and not isinstance(error, NotImplementedError):
                raise
            if FUSED in str(error) and not self._attention:
                raise
            raise UnsupportedError(reason(error)) from error

    def _require_there(self, error: Exception) -> None:
        """Say what PyTorch means when the graph can no longer be used."""
        for sign, why in self.gone.items():
            if sign in str(error):
                raise FrameworkError(why) from error

    def jvp(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        if [_version(x) for x in self.inputs] != self._versions:
            raise UnsupportedError(CHANGED)
        if len(seeds) > 1 and self._transposes:
            try:
                return unshare([self._push_back(input, output, seeds) for output in outputs], self._create_graph)
            except Exception:  # reverse rules without derivatives of their own; then the function runs again
                self._transposes = False
        sweep = self._push_one if len(seeds) == 1 else self._push_stack
        tangents: list[Tensor | None]
        try:
            try:
                tangents = list(sweep(input, outputs, seeds, self._attention))
            except Exception as error:  # it ran before: what fails now fails for want of a rule
                if FUSED not in str(error) or self._attention:
                    raise
                tangents = list(sweep(input, outputs, seeds, True))
        except Exception as error:
            raise (UnsupportedError if len(seeds) == 1 else NotBatchableError)(reason(error)) from error
        return unshare(tangents, self._create_graph)

    def _push_back(self, input: int, output: int, seeds: Tensor) -> Tensor | None:
        """Forward sweeps as transposes of reverse ones, which are linear in their seed: the function does not run."""
        y, leaf = self.outputs[output], self.leaves[input]
        if not y.requires_grad:
            return None
        with isolated(None), plainly():
            seed = torch.zeros_like(y, requires_grad=True)
            (pulled,) = torch.autograd.grad(y, leaf, seed, create_graph=True, allow_unused=True)
            if pulled is None:
                return None
            (pushed,) = together(self._back(pulled, [seed]), normal(seeds))
        if pushed is None:
            raise UnsupportedError("a reverse rule on the way cannot be transposed")
        return pushed

    def _push_stack(self, input: int, outputs: Sequence[int], seeds: Tensor, attention: bool) -> Sequence[Tensor]:
        def one(seed: Tensor) -> Any:
            return torch.func.jvp(lambda x: self._again(input, outputs, x), (x,), (seed,))[1]

        with isolated(self._replay, self.state, attention), checkpointing_disabled(True), no_advice():
            x = self.inputs[input]
            x = x if self._create_graph else x.clone() if x.is_inference() else x.detach()
            return torch.func.vmap(one, randomness="same")(seeds)

    def _push_one(self, input: int, outputs: Sequence[int], seeds: Tensor, attention: bool) -> Sequence[Tensor]:
        with isolated(self._replay, self.state, attention), checkpointing_disabled(True), forward_ad.dual_level():
            x = forward_ad.make_dual(_leaf(self.inputs[input], self._create_graph), seeds[0])
            duals = [forward_ad.unpack_dual(y) for y in self._again(input, outputs, x)]
            tangents = [torch.zeros_like(y) if tangent is None else tangent for y, tangent in duals]
            return [tangent.unsqueeze(0) for tangent in tangents]

    def _again(self, input: int, outputs: Sequence[int], x: Tensor) -> tuple[Tensor, ...]:
        xs = [x if i == input else other for i, other in enumerate(self.inputs)]
        values = self._replay(*[x.clone() for x in xs])
        return tuple([values[o] for o in outputs])

    def pattern(self, output: int, input: int, local: bool) -> Pattern | None:
        from elementgrad._backends.torch.sparsity import find_pattern

        if WRITES in self.without[output].values():
            raise UnsupportedError(f"{WRITES}, so it is not run again")
        if local and [_version(x) for x in self.inputs] != self._versions:
            raise UnsupportedError(CHANGED)
        x = self.inputs[input] if isinstance(self.leaves[input], Tensor) else None
        push = partial(self._push_one, input, [output], attention=True)
        try:
            return find_pattern(partial(self._evaluate, True), push, self.outputs[output], output, x, input, local)
        except RuntimeError as error:
            self._require_there(error)
            raise

    def work(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        ends = [source] if forward else targets
        outputs = targets if forward else [source]
        nodes = {node_of(self.leaves[i]) for i in ends}
        return max(largest(self.outputs[output].grad_fn, nodes) for output in outputs)


def _alike(x: Tensor, y: Tensor) -> bool:
    near = torch.finfo(x.dtype).eps ** 0.5
    return torch.allclose(x.detach(), y.detach(), near, near, equal_nan=True)


def _leaf(x: Tensor, create_graph: bool) -> Tensor:
    """The same values, as the place where gradients are asked for, apart from the user's own tensor."""
    if x.is_inference():
        return x.clone().requires_grad_()
    return x.view_as(x) if create_graph and x.requires_grad else x.detach().requires_grad_()


def normal(x: Tensor) -> Tensor:
    """What was made in inference mode cannot be saved for a gradient."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def _version(x: Tensor | None) -> int | None:
    return 0 if x is None else None if x.is_inference() else x._version
