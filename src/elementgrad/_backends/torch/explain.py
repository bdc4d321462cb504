"""What PyTorch says when it refuses a gradient, as a cause and a step.

A run of a PyTorch function, watched, and followed again where numbers are asked for.

A function in float64 that holds tensors of its own, which nobody can convert beforehand.
"""

import re
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from elementgrad._backends.autodiff import TensorFunction
from elementgrad._backends.source_location import is_user_code, location_text
from elementgrad._backends.torch.autodiff import checkpointing_disabled
from elementgrad._backends.torch.explain_ops import Meter, Overwrite
from elementgrad._backends.torch.explain_rules import (
    ChecksumMeter,
    DependenceMasks,
    FinitenessMeter,
    GradientMeter,
    TangentMeter,
)
from elementgrad._backends.torch.isolate import Freezable, generators, in_mode, isolated, plainly, state
from elementgrad._backends.torch.record.intercept import name_of, pause_recording
from elementgrad._backends.torch.trace import LenientMode, TorchOpRecorder
from elementgrad._explain.backend import ExplainBackend, Picked
from elementgrad._explain.trace import (
    LEAF_WRITE,
    MOVING_STATISTIC,
    CotangentSizes,
    FiniteFlags,
    Hint,
    LiveReport,
    Op,
    OpGraph,
    ReachOverlap,
    TangentSizes,
    Trace,
    uneven_weights,
)
from elementgrad._names import pytree

CHANGED = "modified by an inplace operation"
TWICE = "backward through the graph a second time"
LEAF = "leaf Variable that requires grad"
UNUSED = "appears to not have been used in the graph"
UNTRACKED = "does not require grad"
MISSING = re.compile(r"(?:derivative for '?(?:aten::)?|: )(\w+)'? is not implemented")
SHAPE = re.compile(r"\[torch\.\w+ \[([\d, ]*)\]\]")
ARGUMENT = re.compile(r"function '(\w+)' is not differentiable with respect to argument '(\w+)'")
MAKER = re.compile(r"output \d+ of (\w+?)(?:Backward)?\d*,")


def undifferentiable(error: RuntimeError) -> Hint | None:
    """What PyTorch says of an argument by which a function has no derivative; None if it is about something else.

    A batch norm has none by its statistics, and a cross entropy none by the weights of its classes.
    """
    found = ARGUMENT.search(str(error))
    if found is None:
        return None
    function, argument = found.group(1).removeprefix("native_"), found.group(2)
    evidence = f"PyTorch has no derivative of {function} by {argument}"
    if argument.startswith("running_"):
        return Hint("not-tracked", evidence, Op(MOVING_STATISTIC))
    return Hint("no-rule", evidence, Op(function, _line(error)))


@dataclass(frozen=True)
class RefusedCall:
    """What ran before PyTorch refused."""

    steps: Sequence[Op]
    overwrites: Sequence[Overwrite]
    backwards: Sequence[Op]
    carried: Op | None

    @classmethod
    def after(cls, watch: TorchOpRecorder) -> "RefusedCall":
        """What a watch has seen."""
        return cls(watch.steps, watch.overwrites, watch.asking.backwards, watch.carried)

    def remark(self, error: BaseException) -> Hint | None:
        """The cause of an error of PyTorch's; None if it is none that is known."""
        for text in (str(error), str(error.__cause__ or "")):
            if CHANGED in text:
                return Hint("modified-in-place", "the gradient needs the numbers from before", self._writer(text))
            if LEAF in text:
                return Hint("modified-in-place", "", Op(LEAF_WRITE, _line(error)))
            if TWICE in text:
                return self._twice()
            missing = MISSING.search(text)
            if missing:
                word = missing.group(1).strip("_")
                step = next((step for step in self.steps if step.operation == word), Op(word))
                return Hint("no-rule", "", step)
        return None

    def _twice(self) -> Hint:
        if self.carried is not None:
            evidence = f"{self.carried.operation} takes a tensor that was computed before, in a graph that is gone"
            return Hint("freed-graph", evidence, self.carried)
        earlier = [step.where for step in self.backwards[:-1] if step.where]
        evidence = f"backward() was called before, at {earlier[-1]}" if earlier else ""
        return Hint("freed-graph", evidence, self.backwards[-1] if self.backwards else None)

    def _writer(self, text: str) -> Op | None:
        """The write that PyTorch complains of: to a tensor of that shape, made by that function, if it says so."""
        found = SHAPE.search(text)
        shape = tuple([int(size) for size in found.group(1).split(",") if size.strip()]) if found else None
        fitting = [write for write in self.overwrites if shape is None or write.shape == shape] or self.overwrites
        maker = MAKER.search(text)
        if maker:
            fitting = [write for write in fitting if write.maker == maker.group(1).lower()] or fitting
        return fitting[-1].step if fitting else None


def _line(error: BaseException) -> str | None:
    """The user's line that an error comes from."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [location_text(file, line) for file, line in frames if is_user_code(file, ["torch"])]
    return users[-1] if users else None


Tensor = torch.Tensor


class PathToSource:
    """Whether gradients lead from a tensor back to the source."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}
        self.first = 0

    def start(self, source: Tensor) -> None:
        """Where they lead to."""
        self.first = source.grad_fn._sequence_nr()  # type: ignore[union-attr]
        self._known[self.first] = True

    def __call__(self, x: Tensor) -> bool:
        """Whether they do."""
        return x.requires_grad and self.node(x.grad_fn)

    def node(self, node: Any) -> bool:
        """The same for a node of the graph."""
        ahead, order = [node], []
        while ahead:
            here = ahead.pop()
            if here is None or hasattr(here, "variable"):
                continue
            number = here._sequence_nr()
            if number in self._known or number < self.first:
                continue
            order.append(here)
            self._known[number] = False
            ahead.extend([following for following, _ in here.next_functions])
        for here in sorted(order, key=lambda node: node._sequence_nr()):
            self._known[here._sequence_nr()] = any(self._is(following) for following, _ in here.next_functions)
        return self._is(node)

    def _is(self, node: Any) -> bool:
        return node is not None and not hasattr(node, "variable") and self._known.get(node._sequence_nr(), False)


class TorchTrace(Trace):
    """Runs a function under a mode that sees every call; each sweep runs it again from the same state."""

    def __init__(self, run: TensorFunction, source: Tensor | None):
        self._run = run
        self._given = source
        self._state = state()
        try:
            watch, number, target, met = self._watched(None)
        except RuntimeError as error:
            remark = undifferentiable(error)
            if remark is None or source is None:
                raise
            self._tell(remark, source)
            return
        self._refused = RefusedCall.after(watch)
        frozen = [] if met.requires_grad else [Hint("not-tracked", "the function sets its requires_grad to False")]
        remarks = [*_about(run, source), *frozen, *watch.remarks]
        connected = frozenset(watch.connected)
        self.graph = OpGraph(watch.steps, number, watch.number(target), connected, remarks, self._draws)
        self.source = met if source is None else source
        self.target = target.detach()
        self._live: tuple[Tensor, Tensor] | None = (target, met)  # until the gradient is asked for

    def _tell(self, remark: Hint, source: Tensor) -> None:
        """That PyTorch does not run the function with this source tracked."""
        with isolated(self._run.function, self._state), torch.no_grad():
            (target,) = self._run(source.detach())
        self.graph = OpGraph([], 0, 1, frozenset([0]), [remark])
        self.source, self.target = source, target.detach()
        self._live = self.target, self.source  # which do not lead to each other

    def _watched(
        self, meter: Callable[[PathToSource], Meter] | None, tangent: Tensor | None = None, shift: Tensor | None = None
    ) -> tuple[TorchOpRecorder, int, Tensor, Tensor]:
        leads = PathToSource()
        watch = TorchOpRecorder(leads, self._run.function, None if meter is None else meter(leads))
        found: list[tuple[int, Tensor]] = []

        def start(x: Tensor) -> Tensor:
            with pause_recording():
                passed = _passed(x if shift is None else x.detach() + shift, tangent)
                if tangent is None:
                    leads.start(passed)
            found.append((watch.source(passed), passed))
            return passed

        attention = tangent is not None  # the plain kernel has forward derivatives
        quiet = isolated(self._run.function, self._state, attention)
        with quiet:
            before = generators()[0]
            with checkpointing_disabled(True, faithful=True), in_mode(Freezable()), watch.on():
                given: Any = start if self._given is None else start(self._given)
                (target,) = self._run(given)
            self._draws = not torch.equal(before, generators()[0])
        if watch.failed is not None:
            raise watch.failed
        number, passed = found[0]
        return watch, number, target, passed

    def _follow(self, watch: TorchOpRecorder) -> Sequence[Any] | None:
        """The measures of a run, if it took the same steps as the first."""
        same = [step.operation for step in watch.steps] == [step.operation for step in self.graph.ops]
        return watch.measures if same else None

    def gradient(self, of: np.ndarray, share: np.ndarray) -> Tensor | None:
        target, passed = self._live or self._watched(None)[2:]
        self._live = None
        if not target.requires_grad or not passed.requires_grad:
            return None
        return self._back(target, passed, of, share)

    def _back(self, target: Tensor, passed: Tensor, of: np.ndarray, share: np.ndarray) -> Tensor | None:
        seed = torch.zeros_like(target, requires_grad=False).reshape(-1)
        seed[torch.from_numpy(of.copy()).to(seed.device)] = torch.from_numpy(share).to(seed)
        with isolated(None), plainly():
            (pulled,) = torch.autograd.grad(target, passed, seed.reshape(target.shape), allow_unused=True)
        return pulled if pulled is None or pulled.layout == torch.strided else pulled.to_dense()

    def tangent_sizes(self, wrt: np.ndarray) -> tuple[Sequence[TangentSizes | None], np.ndarray] | None:
        tangent = torch.zeros_like(self.source, requires_grad=False).reshape(-1)
        tangent[torch.from_numpy(wrt.copy()).to(tangent.device)] = torch.from_numpy(uneven_weights(len(wrt))).to(
            tangent
        )
        try:
            with forward_ad.dual_level():
                watch, _, target, _ = self._watched(lambda leads: TangentMeter(), tangent.reshape(self.source.shape))
                reached = forward_ad.unpack_dual(target).tangent
        except (NotImplementedError, RuntimeError):  # a rule is missing on the way
            return self._shifted(tangent.reshape(self.source.shape))
        steps = self._follow(watch)
        values = torch.zeros_like(target) if reached is None else reached
        return None if steps is None else (steps, values.detach().double().cpu().numpy())

    def _shifted(self, tangent: Tensor) -> tuple[Sequence[TangentSizes | None], np.ndarray] | None:
        """The same by comparison: two runs, one of them with the elements moved a little. Sizes are 1 or 0."""
        size = torch.finfo(tangent.dtype).eps ** 0.4
        runs = [self._watched(lambda leads: ChecksumMeter(), shift=sign * size * tangent) for sign in (0.0, 1.0)]
        still, moved = [self._follow(watch) for watch, _, _, _ in runs]
        if still is None or moved is None:
            return None
        pairs = [None if a is None or b is None else (a, b) for a, b in zip(still, moved, strict=True)]
        steps = [
            None if p is None else TangentSizes(float(p[0][0] != p[1][0]), float(p[0][1] != p[1][1])) for p in pairs
        ]
        values = (runs[1][2].detach() - runs[0][2].detach()).double() / size
        return steps, values.cpu().numpy()

    def cotangent_sizes(
        self, of: np.ndarray, share: np.ndarray, wrt: np.ndarray
    ) -> Sequence[CotangentSizes | None] | None:
        watch, _, target, passed = self._watched(lambda leads: GradientMeter(leads.node, lambda: leads.first, wrt))
        steps = self._follow(watch)
        if steps is None or not target.requires_grad or not passed.requires_grad:
            return None
        self._back(target, passed, of, share)
        return [None if flow is None else flow.pulled() for flow in steps]

    def reach_overlap(self, of: np.ndarray, share: np.ndarray, wrt: np.ndarray) -> ReachOverlap | None:
        mask = np.zeros(self.source.numel(), bool)
        mask[wrt] = True
        meter = DependenceMasks(lambda: self.graph.source, mask.reshape(tuple(self.source.shape)))
        watch, number, target, passed = self._watched(lambda leads: meter)
        if self._follow(watch) is None or number != self.graph.source or not target.requires_grad:
            return None
        self._back(target, passed, of, share)
        return ReachOverlap(set(meter.masks), meter.alive)

    def finite_flags(self) -> Sequence[FiniteFlags | None] | None:
        watch, _, _, _ = self._watched(lambda leads: FinitenessMeter())
        return self._follow(watch)

    def hint_for_error(self, error: Exception) -> Hint | None:
        return self._refused.remark(error)

    def apply_source_hooks(self, gradient: Tensor) -> Tensor:
        hooks = getattr(self._given, "_backward_hooks", None) if self._given is not None else None
        for hook in list((hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient


def _passed(x: Tensor, tangent: Tensor | None) -> Tensor:
    """What goes into the function: the same numbers, with a place of their own in the graph or a derivative."""
    with nullcontext() if not x.is_inference() else torch.inference_mode(False):
        plain = x.clone() if x.is_inference() else x.detach()
        if tangent is not None:
            return forward_ad.make_dual(plain.clone(), tangent)
        return (plain if not x.requires_grad else x.detach()).requires_grad_().clone()


def _about(run: TensorFunction, source: Tensor | None) -> list[Hint]:
    """What is to be seen of the source itself."""
    if source is None:
        return []
    remarks = []
    if run.held[0] and isinstance(source, torch.nn.Parameter) and not source.requires_grad:
        remarks.append(Hint("not-tracked", "its requires_grad is False"))
    if getattr(source, "_backward_hooks", None):
        remarks.append(Hint("hook", "the tensor has a hook of its own", Op("register_hook")))
    return remarks


def sample(run: TensorFunction, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Run a function at other numbers, with the first of them tracked."""
    first = tensors[0]

    def once() -> Sequence[Tensor]:
        with isolated(run.function), in_mode(LenientMode()):
            return run(None if first is None else _passed(first, None), *tensors[1:])

    try:
        with NoSavedTensors():
            return once()
    except Exception:  # it may take gradients itself; what else it raises comes again
        return once()


class NoSavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """A graph that keeps no numbers, for a run that nobody goes back through."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, self._refuse)

    @staticmethod
    def _refuse(_: Any) -> Tensor:
        raise RuntimeError("nothing is kept")


WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
WIDER |= {torch.complex64: torch.complex128}


class WideningMode(TorchFunctionMode):
    """Where a tensor in float64 meets narrower ones, as the weights of a module, those are widened for the call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kinds = {x.dtype for x in pytree.leaves_of((args, kwargs)) if isinstance(x, Tensor)}
        if kinds.isdisjoint(WIDER.values()) or kinds.isdisjoint(WIDER) or _means_itself(name_of(func), kwargs):
            return func(*args, **kwargs)
        return func(*pytree.map_tree(args, _wide), **pytree.map_tree(kwargs, _wide))


def _means_itself(name: str, kwargs: Any) -> bool:
    """Whether a function is about the very tensors that it is given: it writes to them, or asks for their gradients."""
    writes = (name.endswith("_") and not name.endswith("__")) or name.endswith((".__set__", "__setitem__"))
    return writes or "__i" in name or name in ("grad", "backward") or kwargs.get("out") is not None


def _wide(x: Any) -> Any:
    return x.to(WIDER[x.dtype]) if isinstance(x, Tensor) and x.dtype in WIDER else x


class TorchExplain(ExplainBackend):
    name = "torch"
    run_at = staticmethod(sample)

    def trace(self, run: TensorFunction, source: Tensor | None, probe: bool) -> Trace:
        return TorchTrace(run, source)

    def report_live(self, of: Picked, wrt: Picked) -> LiveReport:
        from elementgrad._backends.torch.explain_live import report_live

        return report_live(of, wrt)

    def report_step(self, function: Callable[[], Any], wrt: Tensor | None) -> LiveReport:
        from elementgrad._backends.torch.explain_live import report_step

        return report_step(function, wrt)


implementation = TorchExplain()
