"""Sweeps through a PyTorch function: reverse through the graph of one evaluation, forward by transposing those.

Where that cannot be, forward sweeps go by dual numbers, and the function runs again. Batches of sweeps run under vmap.
While the function runs, checkpoints inside are plain calls, since in a sweep they would run parts of it again.

PyTorch hands out derivatives that are not stored anywhere, or that something else holds too. One may be a tensor of
zeros without memory, a number expanded to a shape, a conjugate or negative that is only marked as such, or a small part
of a large tensor. Such a result cannot be written to, converted to NumPy, or saved at its own size (`materialize`). It
may also be the seed of the sweep, the derivative for another input (`x + y` passes one tensor on to both), or a tensor
that a backward of the user's own has saved and returns: writing to it would change the user's numbers (`unshare`).
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, disable_saved_tensors_hooks, get_gradient_edge

from elementgrad._backends.autodiff import (
    PRECISION,
    Function,
    Linearization,
    NotBatchableError,
    Projection,
    TangentCheck,
    TensorFunction,
    UnsupportedError,
    reason,
)
from elementgrad._backends.torch._compat import (
    REENTRANT_CHECKPOINT,
    _add_batch_dim,
    _engine_run_backward,
    _remove_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    derivative_is_missing,
    is_freed_graph_error,
    is_frozen_leaf_error,
    is_functional_tensor,
    is_functorch_wrapped_tensor,
    is_fused_attention_error,
    is_inplace_error,
    is_zero_tensor,
    lazy_load_decompositions,
    load_forward_rules,
    other_checkpoint,
    output_bytes,
    storage_uses,
    version_of,
)
from elementgrad._backends.torch.isolate import (
    DUAL_NUMBERS,
    Freezable,
    State,
    enter_mode,
    isolated,
    state,
)
from elementgrad._cleanup import AttributePatch, Replace, enter, push, safe_context, scope
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
Graph = tuple[list[Any], list[Tensor]]
"""The ends at which gradients of one evaluation arrive, and its outputs."""
Sweep = Callable[[Any], Sequence[Tensor | None]]
"""One reverse sweep as a function of its seed."""
End = Tensor | GradientEdge
GraphErrors = Mapping[Callable[[BaseException], bool], str]
"""Tests for PyTorch's errors about a graph that can no longer be used, and what they mean."""

GRAPH_ERRORS: GraphErrors = {
    is_inplace_error: "a tensor that this derivative needs was changed in place since it was used, "
    "by the function itself or afterwards, as an optimizer does; write to a clone of it, use eg.record, or make the "
    "Jacobian anew",
    is_freed_graph_error: "backward() freed the graph that this derivative needs; call it with "
    "retain_graph=True, or make a new Jacobian",
}
ENGINE_OPTIONS = {"allow_unreachable": True, "accumulate_grad": False}
"""Options of the autograd engine: return the gradients, None where no path leads, and add to no `.grad`."""
ARGUMENT_WRITTEN = "the function writes to an argument in place"
ARGUMENT_CHANGED = "an argument was changed in place after the function was evaluated"
SAVED_TENSOR_HOOKS = "saved tensor hooks do not go with a stack of sweeps"
UNBATCHABLE_NODES = ("CdistBackward0",)
"""Reverse rules that give wrong numbers, and no error, for a stack of seeds under `torch.func.vmap`."""
OWN_USES = 2
"""The uses of a storage that one tensor holds: the tensor's own, and the one through which it is counted."""


class TorchLinearization(Linearization):
    """One evaluation with its graph.

    Forward sweeps transpose a reverse one, which is linear in its cotangent, so that the function does not run. Where a
    reverse rule has no derivative they go by dual numbers: the function runs again, from the same random numbers.
    """

    graph_errors: GraphErrors = GRAPH_ERRORS
    uses: Mapping[int, Any] = MappingProxyType({})
    """The `TrackedUses` of inputs that are parameters of a model, by their numbers."""
    _sweep_state: State | None = None
    """The state for sweeps, where no code of the user's can run in them."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        evaluate: Callable[[bool], Graph],
        replay: Function,
        state: State,
        create_graph: bool,
    ):
        self.inputs = inputs
        self._evaluate = evaluate
        self._replay = replay
        self.state = state
        self._sweep_state = state if state[0] is None else None
        self._create_graph = create_graph
        self._plain_attention = False
        self._unbatchable: dict[int, str | None] = {}
        self._versions = list(map(_version, inputs))
        self.leaves, self.outputs = evaluate(False)

    @classmethod
    def of(cls, run: TensorFunction, inputs: Sequence[Tensor], create_graph: bool) -> "TorchLinearization":
        """Evaluate a function at its inputs."""
        for x in inputs:
            if x is not None and x.layout is not torch.strided:
                raise FrameworkError(f"elements of layout {x.layout} have no derivatives; give x.to_dense()")
        before = state(run.function)
        values = list(inputs)
        freezes = False
        uses: dict[int, Any] = {}
        held = () if create_graph else [i for i, holds in enumerate(run.held) if holds and inputs[i].numel() > 1]
        tracked: Any = {}
        if held:
            from elementgrad._backends.torch.uses import is_trackable, track

            tracked = {i: track for i in held if is_trackable(inputs[i])}

        def evaluate(plain_attention: bool) -> Graph:
            start, current = (before, None) if plain_attention else (None, before)
            leaves: list[Any] = []
            arguments: list[Any] = []
            uses.clear()
            with isolated(run.function, start, plain_attention, current) as runs_user_code:
                if runs_user_code:
                    disable_checkpointing(run.inside)
                if freezes:
                    enter_mode(Freezable())
                for i, x in enumerate(inputs):
                    leaf: Any = ActivationTap() if x is None else _make_leaf(x, create_graph)
                    leaves.append(leaf)
                    if i in tracked:
                        arguments.append(tracked[i](leaf))
                        uses[i] = arguments[-1].record
                    else:  # the user's code may write to its arguments, which a leaf does not allow
                        arguments.append(leaf.clone() if runs_user_code and x is not None else leaf)
                outputs = run(*arguments)
                if not runs_user_code:  # an argument that is returned as it is must be an output all the same
                    outputs = [y.clone() if y.is_leaf and y.requires_grad else y for y in outputs]
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, ActivationTap):
                    values[i], leaves[i] = leaf.like, leaf.end
            return leaves, list(outputs)

        others = run.others
        versions = list(map(_version, others))
        linear = None
        try:
            linear = cls(values, evaluate, run, before, create_graph)
        except RuntimeError as error:
            if not is_frozen_leaf_error(error):
                raise
        if linear is None:
            freezes = True
            linear = cls(values, evaluate, run, before, create_graph)
        linear.uses, linear.narrows = uses, bool(uses)
        if versions and list(map(_version, others)) != versions:
            linear.missing_rules = {"forward": ARGUMENT_WRITTEN}
        return linear

    def gradient(self, output: int, seed: Tensor) -> "TorchLinearization":
        def evaluate(plain_attention: bool) -> Graph:
            leaves, outputs = self._evaluate(True) if plain_attention else (self.leaves, self.outputs)
            y = outputs[output]
            if not y.requires_grad:
                return leaves, [torch.zeros_like(x, requires_grad=False) for x in self.inputs]
            with isolated(None):
                options: Any = {"create_graph": True, "allow_unused": True}
                gradients = torch.autograd.grad(y, leaves, clone_inference_tensor(seed), **options)
            pairs = zip(gradients, self.inputs, strict=True)
            return leaves, [torch.zeros_like(x, requires_grad=False) if g is None else g for g, x in pairs]

        def replay(*xs: Tensor) -> Sequence[Tensor]:
            return torch.func.vjp(lambda *xs: self._replay(*xs)[output], *xs)[1](clone_inference_tensor(seed))

        linear = TorchLinearization(self.inputs, evaluate, replay, self.state, self._create_graph)
        linear.missing_rules = self.missing_rules
        return linear

    def value(self, output: int) -> Tensor:
        y = self.outputs[output]
        return y if self._create_graph else y.detach().clone()  # it may share its memory with the user's

    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        try:
            return self._vjp(output, inputs, seeds)
        except RuntimeError as error:
            if not self._needs_plain_attention(error):
                raise
        self._evaluate_with_plain_attention(output)
        return self._vjp(output, inputs, seeds)

    def vjp_of_element(self, output: int, inputs: Sequence[int], index: tuple[int, ...]) -> list[Tensor | None] | None:
        y = self.outputs[output]
        if type(y) is not Tensor or not y.requires_grad or not y.is_floating_point():
            return None
        with isolated(None, current=self._sweep_state, sweeps=True):
            try:
                ends = [self.leaves[i] for i in inputs]
                return self._run_one(self._make_vjp(y[index], ends, retain=not self.once), None)
            except RuntimeError as error:
                if not self._needs_plain_attention(error):
                    raise
        self._evaluate_with_plain_attention(output)  # the sweep that failed may have freed a part of the graph
        return None

    def narrow(
        self, output: int, inputs: Sequence[int], positions: Sequence[np.ndarray | None]
    ) -> Linearization | None:
        from elementgrad._backends.torch.uses import narrow

        return narrow(self, output, inputs, positions)

    def jvp(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        if list(map(_version, self.inputs)) != self._versions:
            raise UnsupportedError(ARGUMENT_CHANGED)
        sweep = self._dual_jvp if len(seeds) == 1 else self._batched_jvp
        tangents: list[Tensor | None]
        try:
            try:
                tangents = list(sweep(input, outputs, seeds, self._plain_attention))
            except Exception as error:  # the function ran before, so that what fails now is a missing rule
                if not self._needs_plain_attention(error):
                    raise
                tangents = list(sweep(input, outputs, seeds, True))
        except Exception as error:
            raise (UnsupportedError if len(seeds) == 1 else NotBatchableError)(reason(error)) from error
        return unshare(tangents, self._create_graph)

    def transpose_vjp(self, input: int, output: int, seeds: Tensor, project: Projection) -> tuple[Tensor | None, bool]:
        if list(map(_version, self.inputs)) != self._versions:
            raise UnsupportedError(ARGUMENT_CHANGED)
        y, leaf = self.outputs[output], self.leaves[input]
        if not y.requires_grad:
            return None, True
        try:
            with isolated(None, current=self._sweep_state, sweeps=True):
                cotangent = torch.zeros_like(y, requires_grad=True)
                (gradient,) = _engine_run_backward((y,), (cotangent,), True, True, (leaf,), **ENGINE_OPTIONS)
                if gradient is None:
                    return None, True
                sweep, seeds = self._make_vjp(gradient, [cotangent]), clone_inference_tensor(seeds)
                # In a list, of which `unshare` sees if anything else holds the memory of what is in it.
                count = seeds.shape[0]
                derivatives = list(sweep(seeds[0])) if count == 1 else batched_vjp(sweep, seeds)
                (tangents,) = unshare(derivatives, self._create_graph)
                if tangents is None:
                    raise UnsupportedError("a reverse rule cannot be transposed")
                tangents = tangents.unsqueeze(0) if count == 1 else tangents
                checked = not _is_opaque(tangents)
                if checked:
                    self._check_tangents(y, leaf, tangents, seeds, project)
                return tangents, checked
        except UnsupportedError:
            raise
        except Exception as error:  # a reverse rule without a derivative of its own, or one that cannot be stacked
            raise UnsupportedError(reason(error)) from error

    @np.errstate(all="ignore")  # what overflows in half precision fails the comparison
    def _check_tangents(self, y: Tensor, leaf: End, tangents: Tensor, seeds: Tensor, project: Projection) -> None:
        check = TangentCheck(_to_numpy(tangents), max(PRECISION[x.element_size()] for x in (tangents, seeds)))
        seed = torch.from_numpy(check.seed).view(y.shape).to(y)
        check.expect(_to_numpy(seed))
        for sign, cotangent in ((1, seed), (-1, -seed)):
            (reverse,) = _engine_run_backward((y,), (cotangent,), True, False, (leaf,), **ENGINE_OPTIONS)
            check.compare(sign, project(_to_numpy(reverse)))

    def peak_bytes(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        inputs, outputs = ([source], targets) if forward else (targets, [source])
        ends = {node_of(self.leaves[i]) for i in inputs}
        return max(largest_derivative(self.outputs[output].grad_fn, ends) for output in outputs)

    def pattern(self, output: int, input: int, local: bool) -> Pattern | None:
        from elementgrad._backends.torch.sparsity import find_pattern

        if ARGUMENT_WRITTEN in self.missing_rules.values():
            raise UnsupportedError(f"{ARGUMENT_WRITTEN}, so it is not run again")
        if local and list(map(_version, self.inputs)) != self._versions:
            raise UnsupportedError(ARGUMENT_CHANGED)
        x = self.inputs[input] if isinstance(self.leaves[input], Tensor) else None
        jvp = partial(self._dual_jvp, input, [output], plain_attention=True)
        try:
            return find_pattern(partial(self._evaluate, True), jvp, self.outputs[output], output, x, input, local)
        except RuntimeError as error:
            self._explain_graph_error(error)
            raise

    # Reverse sweeps

    def _vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        sweep = self._make_sweep(output, inputs)
        if sweep is None:
            return [None] * len(inputs)
        seeds = clone_inference_tensor(seeds)
        with isolated(None, current=self._sweep_state, sweeps=True):  # a rule may run parts of the function again
            if seeds.shape[0] == 1:
                return [None if g is None else g.unsqueeze(0) for g in self._run_one(sweep, seeds[0])]
            if output not in self._unbatchable:
                self._unbatchable[output] = first_unbatchable_node(self._start_nodes(output, inputs))
            if self._unbatchable[output] is not None:
                raise NotBatchableError(f"{self._unbatchable[output]} is wrong for a stack of seeds")
            try:
                return unshare(batched_vjp(sweep, seeds), self._create_graph)
            except Exception as error:
                if self._needs_plain_attention(error):
                    raise
                raise NotBatchableError(reason(error)) from error

    def _start_nodes(self, output: int, inputs: Sequence[int]) -> Sequence[Any]:
        """Return the nodes of the graph at which reverse sweeps start."""
        return [self.outputs[output].grad_fn]

    def _make_sweep(self, output: int, inputs: Sequence[int]) -> Sweep | None:
        """Return one reverse sweep as a function of its seed; None if there is no path at all."""
        y = self.outputs[output]
        return self._make_vjp(y, [self.leaves[i] for i in inputs]) if y.requires_grad else None

    def _make_vjp(self, y: Tensor, ends: Sequence[Any], retain: bool = True) -> Sweep:
        """Return sweeps from a tensor; the seed of a single number may be None.

        Without `retain` there is one sweep, which frees what the graph holds as it goes: in large models its memory
        serves the rest of the sweep, which then takes up to a fourth less time.
        """

        def sweep(seed: Tensor | None) -> Sequence[Tensor | None]:
            # What `torch.autograd.grad` does after checks of its arguments, which take a fourth of a small read.
            seeds = (torch.ones_like(y) if seed is None else seed,)
            return _engine_run_backward((y,), seeds, retain, self._create_graph, tuple(ends), **ENGINE_OPTIONS)

        return sweep

    def _run_one(self, sweep: Sweep, seed: Tensor | None) -> list[Tensor | None]:
        try:
            return unshare(list(sweep(seed)), self._create_graph)
        except (NotImplementedError, RuntimeError) as error:
            self._explain_graph_error(error)
            if not derivative_is_missing(error) or self._needs_plain_attention(error):
                raise
            raise UnsupportedError(reason(error)) from error

    def _explain_graph_error(self, error: Exception) -> None:
        for fits, meaning in self.graph_errors.items():
            if fits(error):
                raise FrameworkError(meaning) from error

    def _needs_plain_attention(self, error: Exception) -> bool:
        return not self._plain_attention and is_fused_attention_error(error)

    def _evaluate_with_plain_attention(self, output: int) -> None:
        """Evaluate once more, with attention by kernels that have every derivative."""
        self._plain_attention = True
        before = self.outputs[output]
        self.leaves, self.outputs = self._evaluate(True)
        if not _is_close(before, self.outputs[output]):
            raise FrameworkError(
                "attention must be evaluated again for this derivative, and the function gives another value by now; "
                "make a new Jacobian"
            )

    # Forward sweeps

    def _batched_jvp(
        self, input: int, outputs: Sequence[int], seeds: Tensor, plain_attention: bool
    ) -> Sequence[Tensor]:
        def one(seed: Tensor) -> Any:
            return torch.func.jvp(lambda x: self._rerun(input, outputs, x), (x,), (seed,))[1]

        load_forward_rules()
        with (
            DUAL_NUMBERS.hold(),
            isolated(self._replay, self.state, plain_attention),
            checkpointing_disabled(True),
            no_performance_warnings(),
        ):
            x = self.inputs[input]
            x = x if self._create_graph else x.clone() if x.is_inference() else x.detach()
            return torch.func.vmap(one, randomness="same")(seeds)

    def _dual_jvp(self, input: int, outputs: Sequence[int], seeds: Tensor, plain_attention: bool) -> Sequence[Tensor]:
        load_forward_rules()
        with (
            DUAL_NUMBERS.hold(),
            isolated(self._replay, self.state, plain_attention),
            checkpointing_disabled(True),
            forward_ad.dual_level(),
        ):
            x = forward_ad.make_dual(_make_leaf(self.inputs[input], self._create_graph), seeds[0])
            duals = [forward_ad.unpack_dual(y) for y in self._rerun(input, outputs, x)]
            tangents = [torch.zeros_like(y) if tangent is None else tangent for y, tangent in duals]
            return [tangent.unsqueeze(0) for tangent in tangents]

    def _rerun(self, input: int, outputs: Sequence[int], x: Tensor) -> tuple[Tensor, ...]:
        xs = [x if i == input else other for i, other in enumerate(self.inputs)]
        values = self._replay(*[x.clone() for x in xs])
        return tuple([values[o] for o in outputs])


def _is_close(x: Tensor, y: Tensor) -> bool:
    near = torch.finfo(x.dtype).eps ** 0.5
    return torch.allclose(x.detach(), y.detach(), near, near, equal_nan=True)


def _make_leaf(x: Tensor, create_graph: bool) -> Tensor:
    """Return the same values as a tensor where gradients end, apart from the user's own."""
    if x.is_inference():
        return x.clone().requires_grad_()
    return x.view_as(x) if create_graph and x.requires_grad else x.detach().requires_grad_()


def clone_inference_tensor(x: Tensor) -> Tensor:
    """Return x, cloned if it was made in inference mode, since it could not be saved for a gradient."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def _to_numpy(x: Tensor) -> np.ndarray:
    """Return numbers to compare, of at least four bytes each."""
    return (x if x.element_size() >= 4 else x.double()).numpy(force=True)


def _version(x: Tensor | None) -> int | None:
    return 0 if x is None else None if x.is_inference() else version_of(x)


class ActivationTap:
    """Marks where gradients end at a value that the function computes.

    The function goes on with a copy of the value: it may have the value by another way as well, through which no
    gradients are meant, and may write to it in place, which would leave no trace of a view.
    """

    end: GradientEdge | None
    """None for what has no gradients, such as ints."""
    like: Tensor
    """Zeros of its shape, to which forward sweeps add their seeds."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return what goes on in the place of the value."""
        self.like = torch.zeros_like(x, requires_grad=False)
        if not (x.is_floating_point() or x.is_complex()):
            self.end = None
            return x
        copy = (x if x.requires_grad else x.detach().requires_grad_()).clone()
        self.end = get_gradient_edge(copy)
        return copy


# Batches of sweeps


def batched_vjp(sweep: Sweep, seeds: Tensor) -> list[Tensor | None]:
    """Run sweeps from a batch of seeds, as `torch.func.vmap` does for a function of one tensor, without its trees.

    Not by `is_grads_batched=True`, which knows fewer rules and worse ones.
    """
    lazy_load_decompositions()
    count = seeds.shape[0]
    with scope():
        enter(no_performance_warnings())
        enter(disable_saved_tensors_hooks(SAVED_TENSOR_HOOKS))
        level = _vmap_increment_nesting(count, "error")
        try:
            derivatives = sweep(_add_batch_dim(seeds, 0, level))
            return [None if x is None else _remove_batch_dim(x, level, count, 0) for x in derivatives]
        finally:
            _vmap_decrement_nesting()


@contextmanager
def no_performance_warnings() -> Iterator[None]:
    """Silence PyTorch's warnings about speed, which are about our batches and not about the user's code."""
    with safe_context(warnings.catch_warnings()):
        warnings.filterwarnings("ignore", message=".*performance drop")
        yield


def graph_nodes(starts: Iterable[Any]) -> Iterator[Any]:
    """Yield nodes of the graph, and all that are reached from them, each once; some of them may be None."""
    ahead = [node for node in starts if node is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)


def first_unbatchable_node(starts: Sequence[Any]) -> str | None:
    """Return the name of a reverse rule behind some nodes that must get its seeds one by one, if there is any."""
    names = (str(node.name()) for node in graph_nodes(starts))
    return next((name for name in names if name in UNBATCHABLE_NODES), None)


def node_of(end: End) -> Any:
    """Return the node of the graph at which gradients end; for a leaf, to which its node leads, the tensor itself."""
    return end.node if isinstance(end, GradientEdge) else end if end.grad_fn is None else end.grad_fn


def largest_derivative(start: Any, ends: set[Any]) -> int:
    """Return the bytes of the largest derivative between a node of the graph and some others, or leaves."""
    before: dict[Any, list[Any]] = {}  # the nodes that lead to a node
    leading: set[Any] = set()  # the nodes that lead to the ends; parameters of a model hang on the graph as well
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
    return max([size for node in leading for size in output_bytes(node)], default=0)


# The memory of results


def materialize(x: Tensor) -> Tensor:
    """Return x, copied unless it holds all of its numbers itself and no others."""
    if _is_opaque(x):
        return x
    if is_zero_tensor(x) or x.is_conj() or x.is_neg():
        return x.clone()
    if x.untyped_storage().nbytes() != x.numel() * x.element_size() or _is_expanded(x):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def unshare(derivatives: list[Tensor | None], create_graph: bool) -> list[Tensor | None]:
    """Copy those derivatives in a list whose memory is held by anything else as well, and return the list.

    With `create_graph` each is copied, since what it was computed from may hold it.
    """
    for i in range(len(derivatives)):
        x = derivatives[i]
        if x is None:
            continue
        # Another tensor for the same memory takes its place: the first is gone then, unless something else holds it.
        derivatives[i] = x = x.clone() if create_graph else x.detach()
        if create_graph or _is_opaque(x) or is_zero_tensor(x):
            continue
        if storage_uses(x) > OWN_USES:
            derivatives[i] = x.clone()
    return derivatives


def _is_opaque(x: Tensor) -> bool:
    """Return True if there is no memory to look at: in a transform of the user's, or in a class of its own."""
    return type(x) is not Tensor or is_functorch_wrapped_tensor(x) or is_functional_tensor(x)


def _is_expanded(x: Tensor) -> bool:
    return 0 in x.stride() and any(not step and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))


# Checkpoints


@dataclass(eq=False)
class _DisabledCheckpoints:
    """One `checkpointing_disabled` block that a thread is in."""

    all_kinds: bool
    faithful: bool


class _CheckpointState(threading.local):
    blocks: tuple[_DisabledCheckpoints, ...] = ()


_local = _CheckpointState()


class checkpointing_disabled(scope):  # noqa: N801
    """Make this thread's reentrant checkpoints plain calls, and with `inside` all others too.

    A reentrant one keeps no graph, so that nothing inside has a derivative. Any other would run its part of the
    function again in a sweep, when the tensors that we replaced are back in their places. They differ from plain calls
    in the memory that they take alone. With `faithful`, a reentrant one without a tracked argument stays what it is:
    nothing inside gets a gradient.
    """

    __slots__ = ("_faithful", "_inside")

    def __init__(self, inside: bool, faithful: bool = False):
        self._inside = inside
        self._faithful = faithful

    def __enter__(self) -> None:
        super().__enter__()
        disable_checkpointing(self._inside, self._faithful)


def disable_checkpointing(inside: bool, faithful: bool = False) -> None:
    """Do the same as `checkpointing_disabled` until the innermost open scope is left."""
    if "torch.utils.checkpoint" in sys.modules:
        push(_local, "blocks", _DisabledCheckpoints(inside, faithful))
        _checkpoint_patch.enter()


def _install(replace: Replace) -> None:
    module: Any = sys.modules["torch.utils.checkpoint"]
    other = other_checkpoint(module)
    replace(module, other, _wrap_generator(getattr(module, other)))
    replace(module, REENTRANT_CHECKPOINT, _ReentrantProxy(getattr(module, REENTRANT_CHECKPOINT)))


class _ReentrantProxy:
    """Stands in for the function that a reentrant checkpoint calls, and calls that in threads that are not ours."""

    def __init__(self, original: Any):
        self._original = original

    def apply(self, function: Any, preserve_rng_state: bool, *arguments: Any) -> Any:
        """Call the function plainly in our threads."""
        blocks = _local.blocks
        if blocks and (not blocks[-1].faithful or any(getattr(x, "requires_grad", False) for x in arguments)):
            return function(*arguments)
        return self._original.apply(function, preserve_rng_state, *arguments)


def _wrap_generator(original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Wrap the generator that other checkpoints run before and after their call."""

    def around(*arguments: Any, **options: Any) -> Iterator[None]:
        return _do_nothing() if any(block.all_kinds for block in _local.blocks) else original(*arguments, **options)

    return around


def _do_nothing() -> Iterator[None]:
    yield  # in a generator, as PyTorch throws into it what the call raises


_checkpoint_patch = AttributePatch(_install)
