"""A run of a PyTorch function, watched, and followed again where numbers are asked for."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from elementgrad.backends.linear import Run
from elementgrad.backends.torch.ambient import in_mode
from elementgrad.backends.torch.checkpoints import straight
from elementgrad.backends.torch.explaining.lenient import Lenient
from elementgrad.backends.torch.explaining.measures import Meter
from elementgrad.backends.torch.explaining.meeting import Meeting
from elementgrad.backends.torch.explaining.meters import Gradients, Numbers, Prints, Tangents
from elementgrad.backends.torch.explaining.refusals import Refused, undifferentiable
from elementgrad.backends.torch.explaining.watch import Watch
from elementgrad.backends.torch.freezable import Freezable
from elementgrad.backends.torch.functions import aside
from elementgrad.backends.torch.quiet import generators, plainly, state, undisturbed
from elementgrad.backends.witness import Account, Met, Pulled, Pushed, Remark, Seen, Step, Witness, weights

Tensor = torch.Tensor


class Leading:
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


class TorchWitness(Witness):
    """Runs a function under a mode that sees every call; each sweep runs it again from the same state."""

    def __init__(self, run: Run, source: Tensor | None):
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
        self._refused = Refused.after(watch)
        frozen = [] if met.requires_grad else [Remark("not-tracked", "the function sets its requires_grad to False")]
        remarks = [*_about(run, source), *frozen, *watch.remarks]
        connected = frozenset(watch.connected)
        self.account = Account(watch.steps, number, watch.number(target), connected, remarks, self._draws)
        self.source = met if source is None else source
        self.target = target.detach()
        self._live: tuple[Tensor, Tensor] | None = (target, met)  # until the gradient is asked for

    def _tell(self, remark: Remark, source: Tensor) -> None:
        """That PyTorch does not run the function with this source tracked."""
        with undisturbed(self._run.function, self._state), torch.no_grad():
            (target,) = self._run(source.detach())
        self.account = Account([], 0, 1, frozenset([0]), [remark])
        self.source, self.target = source, target.detach()
        self._live = self.target, self.source  # which do not lead to each other

    def _watched(
        self, meter: Callable[[Leading], Meter] | None, tangent: Tensor | None = None, shift: Tensor | None = None
    ) -> tuple[Watch, int, Tensor, Tensor]:
        leads = Leading()
        watch = Watch(leads, self._run.function, None if meter is None else meter(leads))
        found: list[tuple[int, Tensor]] = []

        def start(x: Tensor) -> Tensor:
            with aside():
                passed = _passed(x if shift is None else x.detach() + shift, tangent)
                if tangent is None:
                    leads.start(passed)
            found.append((watch.source(passed), passed))
            return passed

        attention = tangent is not None  # the plain kernel has forward derivatives
        quiet = undisturbed(self._run.function, self._state, attention)
        with quiet:
            before = generators()[0]
            with straight(True, faithful=True), in_mode(Freezable()), watch.on():
                given: Any = start if self._given is None else start(self._given)
                (target,) = self._run(given)
            self._draws = not torch.equal(before, generators()[0])
        if watch.failed is not None:
            raise watch.failed
        number, passed = found[0]
        return watch, number, target, passed

    def _follow(self, watch: Watch) -> Sequence[Any] | None:
        """The measures of a run, if it took the same steps as the first."""
        same = [step.operation for step in watch.steps] == [step.operation for step in self.account.steps]
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
        with undisturbed(None), plainly():
            (pulled,) = torch.autograd.grad(target, passed, seed.reshape(target.shape), allow_unused=True)
        return pulled if pulled is None or pulled.layout == torch.strided else pulled.to_dense()

    def push(self, wrt: np.ndarray) -> tuple[Sequence[Pushed | None], np.ndarray] | None:
        tangent = torch.zeros_like(self.source, requires_grad=False).reshape(-1)
        tangent[torch.from_numpy(wrt.copy()).to(tangent.device)] = torch.from_numpy(weights(len(wrt))).to(tangent)
        try:
            with forward_ad.dual_level():
                watch, _, target, _ = self._watched(lambda leads: Tangents(), tangent.reshape(self.source.shape))
                reached = forward_ad.unpack_dual(target).tangent
        except (NotImplementedError, RuntimeError):  # a rule is missing on the way
            return self._shifted(tangent.reshape(self.source.shape))
        steps = self._follow(watch)
        values = torch.zeros_like(target) if reached is None else reached
        return None if steps is None else (steps, values.detach().double().cpu().numpy())

    def _shifted(self, tangent: Tensor) -> tuple[Sequence[Pushed | None], np.ndarray] | None:
        """The same by comparison: two runs, one of them with the elements moved a little. Sizes are 1 or 0."""
        size = torch.finfo(tangent.dtype).eps ** 0.4
        runs = [self._watched(lambda leads: Prints(), shift=sign * size * tangent) for sign in (0.0, 1.0)]
        still, moved = [self._follow(watch) for watch, _, _, _ in runs]
        if still is None or moved is None:
            return None
        pairs = [None if a is None or b is None else (a, b) for a, b in zip(still, moved, strict=True)]
        steps = [None if p is None else Pushed(float(p[0][0] != p[1][0]), float(p[0][1] != p[1][1])) for p in pairs]
        values = (runs[1][2].detach() - runs[0][2].detach()).double() / size
        return steps, values.cpu().numpy()

    def pull(self, of: np.ndarray, share: np.ndarray, wrt: np.ndarray) -> Sequence[Pulled | None] | None:
        watch, _, target, passed = self._watched(lambda leads: Gradients(leads.node, lambda: leads.first, wrt))
        steps = self._follow(watch)
        if steps is None or not target.requires_grad or not passed.requires_grad:
            return None
        self._back(target, passed, of, share)
        return [None if flow is None else flow.pulled() for flow in steps]

    def meet(self, of: np.ndarray, share: np.ndarray, wrt: np.ndarray) -> Met | None:
        mask = np.zeros(self.source.numel(), bool)
        mask[wrt] = True
        meter = Meeting(lambda: self.account.source, mask.reshape(tuple(self.source.shape)))
        watch, number, target, passed = self._watched(lambda leads: meter)
        if self._follow(watch) is None or number != self.account.source or not target.requires_grad:
            return None
        self._back(target, passed, of, share)
        return Met(set(meter.masks), meter.alive)

    def values(self) -> Sequence[Seen | None] | None:
        watch, _, _, _ = self._watched(lambda leads: Numbers())
        return self._follow(watch)

    def refusal(self, error: Exception) -> Remark | None:
        return self._refused.remark(error)

    def arriving(self, gradient: Tensor) -> Tensor:
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


def _about(run: Run, source: Tensor | None) -> list[Remark]:
    """What is to be seen of the source itself."""
    if source is None:
        return []
    remarks = []
    if run.held[0] and isinstance(source, torch.nn.Parameter) and not source.requires_grad:
        remarks.append(Remark("not-tracked", "its requires_grad is False"))
    if getattr(source, "_backward_hooks", None):
        remarks.append(Remark("hook", "the tensor has a hook of its own", Step("register_hook")))
    return remarks


def sample(run: Run, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Run a function at other numbers, with the first of them tracked."""
    first = tensors[0]

    def once() -> Sequence[Tensor]:
        with undisturbed(run.function), in_mode(Lenient()):
            return run(None if first is None else _passed(first, None), *tensors[1:])

    try:
        with Forgetful():
            return once()
    except Exception:  # it may take gradients itself; what else it raises comes again
        return once()


class Forgetful(torch.autograd.graph.saved_tensors_hooks):
    """A graph that keeps no numbers, for a run that nobody goes back through."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, self._refuse)

    @staticmethod
    def _refuse(_: Any) -> Tensor:
        raise RuntimeError("nothing is kept")
