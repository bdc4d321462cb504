"""`eg.watch` on PyTorch: look at outputs, gradients and parameters of a training loop.

A call of the model goes through `MODULE_CALL`, an attribute of its own, so that it is seen outside of what
`torch.compile` compiles. If the plain model was given and what `torch.compile` returned for it is called, then that
call is seen. A hook on each output keeps the gradient that arrives there. Gradients are looked at when the
next thing happens after a backward: another forward, the norm of `clip_grad_norm_`, which then is not computed again,
the optimizer's step, or the end of the block. Nothing was overwritten by then, so that the step can be run again.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import distributed

from elementgrad._backends.torch import _compat
from elementgrad._backends.torch.explain_rules import NUMBERS
from elementgrad._backends.torch.isolate import add_hook
from elementgrad._backends.torch.names import TorchModel, unwrap
from elementgrad._backends.torch.trace_memory import version_of
from elementgrad._backends.torch.watch_patch import patch, pause, watchers
from elementgrad._backends.torch.watch_run import (
    ForwardCall,
    ModelState,
    TorchWatchRuns,
    dense_part,
    float_outputs,
    local_part,
)
from elementgrad._backends.torch.watch_update import UpdateBefore
from elementgrad._cleanup import assign, defer, with_cleanup
from elementgrad._names import pytree
from elementgrad._place.grammar import nearest
from elementgrad._place.place import Place
from elementgrad._watch.backend import CapturedStep, Hit, Rule, Watcher, WatchOptions
from elementgrad._watch.elements import BadElement, bad_float, find_nonfinite, largest_element
from elementgrad.errors import FrameworkError, OptionError, PlaceError, quoted

Tensor = torch.Tensor
Module = torch.nn.Module
PENDING_LIMIT = 16
"""The number of forwards without a backward that are kept."""
NOT_CALLED = "no call of the model was seen: call the model itself, or watch the module that is called"
FLOATS = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128])


class TorchWatcher(Watcher):
    """Watches one training loop."""

    def __init__(self, model: Any, optimizer: Any, options: WatchOptions):
        if not isinstance(model, Module) or isinstance(model, torch.jit.ScriptModule):
            raise FrameworkError(
                f"{type(model).__name__} cannot be watched; give a torch.nn.Module that is not scripted"
            )
        self._state = ModelState(model)
        self._parameters = dict(self._state.parameters)
        if not self._parameters:
            raise FrameworkError(f"{type(model).__name__} has no parameters, so there is no training to watch")
        self._optimizers = _optimizers(optimizer)
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._options = options
        self._module_of: dict[str, str] = {}
        """The paths of the modules that make the activations of rules, by the names of these."""
        self._returned: set[str] = set()
        """The names of those that were made."""
        self._rules = {text: self._bind_rule(place, rule) for text, (place, rule) in options.rules.items()}
        self._calls: list[ForwardCall] = []
        """Forwards of this step that a hit may be about, in order."""
        self._step = 0
        self._ended = False
        """True if the first optimizer has taken this step: the next forward is of another."""
        self.count = 0
        """The number of steps that optimizers took."""
        self._micro_batch = 0
        self._thread = threading.get_ident()
        self._inside = False
        """True while the model runs: calls of it in there are not looked at."""
        self.pauses: tuple[object, ...] = ()
        """One mark for each report that is being made, in whichever thread: nothing is looked at meanwhile."""
        self._scaled: set[Any] = set()
        """The optimizers whose gradients a GradScaler may have scaled; None stands for all if none was given."""
        self._unscaled: set[Any] = set()
        """The optimizers whose gradients it unscaled: it skips, or has skipped, their steps if these are not finite."""
        self._unseen = False
        """True if there was a backward that was not looked at."""
        self._looked = False
        """True if gradients were looked at since the last step."""
        self._ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        if self._ranks > 1 and not self._optimizers:
            raise OptionError(
                "no optimizer was given, and several processes agree to stop when one steps; give it, as in "
                "eg.watch(model, optimizer)"
            )
        self._later: list[tuple[Tensor, int]] = []
        """On an accelerator: norms of parameters that were not read yet, with their steps."""
        self._stopped = False
        self._suspect: Hit | None = None
        """With several processes: a hit that they do not know of yet."""
        self._last: ForwardCall | None = None
        self._updates: dict[Any, UpdateBefore | None] = {}
        """The optimizers that stepped in this step, with what each started from if the model is small."""
        self._versions: list[int | None] = []
        """The versions of the parameters when they were last seen to be finite."""

    # The block

    def start(self) -> None:
        self._thread = threading.get_ident()
        self._require_finite_parameters(0, "at the start")
        self._versions = self._current_versions()
        target = self._state.called
        original = _compat.call_module(target)
        defer(self._end)
        assign(target, _compat.MODULE_CALL, partial(self._call, original))
        for optimizer in self._optimizers:
            before, after = _compat.optimizer_hooks(optimizer)
            add_hook(before, self._before_step)
            add_hook(after, self._after_step)
        if not self._optimizers:
            add_hook(_compat.all_optimizers_hooks(), self._before_other_step)
        for path, module in self._activations():
            add_hook(_compat.forward_hooks(module), partial(self._see_activation, path))
        if isinstance(self._options.loss, Module):
            see = self._see_loss  # one object, as hooks are known by it
            for hooks in _compat.forward_pre_hooks_with_kwargs(self._options.loss):
                add_hook(hooks, see)
        watchers.append(self)
        patch.enter()

    def _end(self) -> None:
        self._stopped = True
        if self in watchers:
            watchers.remove(self)
        for call in self._calls:
            call.release()
        self._calls.clear()

    def finish(self) -> None:
        if not self._stopped:
            self._look()
            self._read_later()
            self._agree_to_stop()

    # What happens in the loop

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside or self.pauses or self._stopped:
            return original(*args, **kwargs)
        if threading.get_ident() != self._thread or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        self._look()
        self._read_later()
        call = self._begin(args, kwargs)
        try:
            self._inside = True
            result = original(*args, **kwargs)
        finally:
            self._inside = False
        self._see_outputs(call, result)
        return result

    def see_compiled(self, wrapper: Module, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of what `torch.compile` returned, seen if it is the model's that is watched."""
        return partial(self._call, original) if unwrap(wrapper) is self._state.called else original

    def _begin(self, args: Any, kwargs: Any) -> ForwardCall:
        self._begin_step()
        fresh = all(p.grad is None for p in self._parameters.values())
        call = ForwardCall(self._step, self._micro_batch, args, kwargs, self._state.snapshot(), fresh)
        self._micro_batch += 1
        self._last = call
        return call

    def _see_outputs(self, call: ForwardCall, result: Any) -> None:
        call.returned = type(result).__name__
        outputs = [(name, x) for name, x in float_outputs(result) if x.dtype in FLOATS]
        call.outputs = [(name, x.detach()) for name, x in outputs]
        for position, (_, x) in enumerate(outputs):
            if x.requires_grad:
                # Through the list of handles, so that no interrupt comes between a hook and its handle.
                call.handles.extend(map(x.register_hook, [partial(self._see_gradient, call, position)]))
        call.norm = _norm([x for _, x in call.outputs])
        if call.norm is not None and call.norm.device.type == "cpu" and self._ranks == 1:
            self._judge_outputs(call)
        if call.handles or call.norm is not None:
            self._calls.append(call)
        while len(self._calls) > PENDING_LIMIT:
            self._calls.pop(0).release()

    def _judge_outputs(self, call: ForwardCall) -> None:
        norm, call.norm = call.norm, None
        if norm is None or math.isfinite(_number(norm)):
            return
        bad = _find_bad(call.outputs)
        if bad is not None:
            self._hit([call], str(bad), bad.place)

    def _see_gradient(self, call: ForwardCall, position: int, g: Tensor) -> None:
        if self._stopped:
            return
        task = _compat.graph_task_id()
        if any(other.task not in (None, task) for other in self._calls):
            self._look(keep=call)  # of a backward before this one
        if call.task not in (None, task):
            call.fresh = False
            call.cotangents.clear()
        call.task = task
        call.cotangents[position] = g.detach()
        self._unseen = True

    def _see_activation(self, path: str, module: Module, args: Any, result: Any) -> None:
        if not self._inside or self.pauses or self._last is None:
            return
        call = self._last
        leaves = dict(pytree.named_leaves(result, path))
        for name in {name for name, _, _ in self._rules.values() if self._module_of.get(name) == path}:
            if name not in leaves and name not in self._returned:  # later calls may return less
                raise PlaceError(f"no tensor is named {name!r} in what {path} returns; {nearest(name, list(leaves))}")
            self._returned.add(name)
            x = leaves.get(name)
            if isinstance(x, Tensor) and x.requires_grad:
                call.handles.extend(map(x.register_hook, [call.activations.setdefault(name, []).append]))

    def _see_loss(self, module: Any, args: Any, kwargs: Any) -> None:
        if not (self._inside or self.pauses) and self._last is not None:
            self._last.see_loss(args, kwargs)

    def call_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self._last is not None:
            self._last.see_loss(args, kwargs)
        assert self._options.loss is not None
        return self._options.loss(*args, **kwargs)

    def see_norm(self, grads: Sequence[Tensor], norm: Tensor, kind: float) -> None:
        """Take over a norm of gradients that `clip_grad_norm_` computed."""
        if self._stopped or threading.get_ident() != self._thread or kind < 1:
            return
        covered = {id(g) for g in grads}
        if all(p.grad is None or id(p.grad) in covered for p in self._watched()):
            self._look(norm)

    def see_scale(self) -> None:
        """Note that a GradScaler scaled a loss."""
        if threading.get_ident() == self._thread:
            self._scaled.update(self._optimizers or [None])

    def see_unscaled(self, optimizer: Any) -> None:
        """Note that a GradScaler unscaled the gradients of an optimizer."""
        if optimizer in self._optimizers:
            self._scaled.discard(optimizer)
            self._unscaled.add(optimizer)

    def see_scaler_step(self, optimizer: Any, stepped: bool) -> None:
        """Note that a GradScaler took or skipped a step."""
        if not stepped and optimizer in self._optimizers and not self._stopped:
            self._require_finite_parameters(self._step, "when the step is skipped")
            self._agree_to_stop()
            self.see_unscaled(optimizer)  # a fused optimizer unscales by itself
            self._next_step(optimizer)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._stopped or _skips_step(optimizer):
            return None
        if optimizer in self._updates:
            self._begin_step()
        self.count += 1
        self._scaled.discard(optimizer)
        self._unscaled.discard(optimizer)
        self._look(at_step=True)
        if self._versions != self._current_versions():  # written to since the last step, by something else
            self._require_finite_parameters(self._step, "before the step")
        self._agree_to_stop()
        closes = any(map(callable, (*args, *kwargs.values())))
        self._updates[optimizer] = UpdateBefore.of(optimizer) if self._options.captures and not closes else None
        if not closes:
            return None
        args = tuple([self._looking(x) if callable(x) else x for x in args])
        return args, {key: self._looking(x) if callable(x) else x for key, x in kwargs.items()}

    def _before_other_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Look at gradients before an optimizer that was not given writes to the parameters."""
        is_ours = any(id(p) in self._names for _, p in _members(optimizer))
        if is_ours and not self._stopped and threading.get_ident() == self._thread:
            self._look(at_step=True)

    def _looking(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return the closure of an optimizer, with a look at the gradients that it makes: it may clear them itself."""

        @wraps(closure)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._looked = False  # what was looked at before are the gradients of the last step
            result = closure(*args, **kwargs)
            if not self._stopped:
                self._look(at_step=True)
            return result

        return run

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stopped or _skips_step(optimizer):
            return
        norm = _norm([local_part(p) for p in self._trained().values() if p.dtype in FLOATS])
        if norm is not None and norm.device.type != "cpu":
            self._later.append((norm, self._step))
        elif norm is not None and not math.isfinite(_number(norm)):
            self._judge_parameters(self._step)
        self._versions = self._current_versions()
        self._agree_to_stop()
        self._next_step(optimizer)

    def _current_versions(self) -> list[int | None]:
        return [version_of(p) for p in self._parameters.values()]

    def _next_step(self, optimizer: Any) -> None:
        for call in self._calls:
            call.release()
        self._calls.clear()
        self._unseen = self._looked = False
        self._micro_batch = 0
        self._ended = self._ended or optimizer is self._optimizers[0]

    def _begin_step(self) -> None:
        """Count a step once something of the next one happens: until then, other optimizers take the same step."""
        if self._ended:
            self._step += 1
            self._ended = False
            self._updates.clear()

    # Looking at numbers

    def _trained(self) -> dict[int, Tensor]:
        """Return the parameters that the optimizers have now; a group may have been added."""
        return {id(p): p for one in self._optimizers for _, p in _members(one)}

    def _watched(self) -> Iterator[Tensor]:
        """Yield the parameters whose gradients are looked at."""
        yield from self._parameters.values()
        yield from (p for p in self._trained().values() if id(p) not in self._names)

    def _with_gradients(self, apart_from: set[Any]) -> Iterator[Tensor]:
        """Yield the parameters that have gradients, apart from those of some optimizers.

        A parameter of no optimizer goes with the first.
        """
        first = self._optimizers[0] if self._optimizers else None
        owners = {id(p): one for one in self._optimizers if apart_from for _, p in _members(one)}
        for p in self._watched():
            is_left_out = bool(apart_from) and owners.get(id(p), first) in apart_from
            if p.grad is not None and p.grad.dtype in FLOATS and not is_left_out:
                yield p

    def _look(self, norm: Tensor | None = None, at_step: bool = False, keep: ForwardCall | None = None) -> None:
        """Look at the outputs and gradients that were not looked at yet; forget forwards apart from `keep`."""
        outputs = [call for call in self._calls if call.norm is not None]
        grads = None if self._scaled else norm  # the norm of scaled gradients may overflow
        if grads is None and (self._unseen or (at_step and not self._looked)):
            found = [local_part(p.grad) for p in self._with_gradients(self._scaled) if p.grad is not None]
            grads = _norm([g.coalesce().values() if g.is_sparse else g for g in found])
        self._unseen = self._unseen and bool(self._scaled)
        self._looked = self._looked or grads is not None
        flags = [call.norm for call in outputs if call.norm is not None] + ([] if grads is None else [grads])
        finite = not flags or _all_finite(flags)
        if not finite:
            for call in outputs:
                self._judge_outputs(call)
            if grads is not None:
                self._judge_gradients()
        for call in outputs:
            call.norm = None
        if not self._scaled and (finite or not self._unscaled):
            self._judge_rules()
            for call in [call for call in self._calls if call.task is not None or not call.handles]:
                if call is not keep:
                    call.release()
                    self._calls.remove(call)

    def _judge_gradients(self) -> None:
        params = self._with_gradients(self._scaled | self._unscaled)
        bad = _find_bad([(self._name(p), p.grad) for p in params if p.grad is not None])
        if bad is not None:
            calls = [call for call in self._calls if call.task is not None]
            self._hit(calls, f"the gradient of {bad}", bad.place)

    def _name(self, p: Tensor) -> str:
        return self._names.get(id(p), "a parameter")

    def _judge_parameters(self, step: int) -> None:
        """Stop at a parameter that is not finite after a step of an optimizer."""
        for optimizer, group, p in [(one, group, p) for one in self._optimizers for group, p in _members(one)]:
            bad = _find_bad([(self._name(p), p)])
            if bad is None:
                continue
            update = self._updates.get(optimizer) if step == self._step else None
            before = None if update is None else update.values().get(id(p))
            if before is not None and not math.isfinite(bad_float(NUMBERS.array(before)[bad.index])):
                # Something has written to it through `.data`, which no version counts.
                self._stop_at_parameter(bad, step, "before the step", partial(self._capture_update, optimizer))
                return
            bad_gradient = None if p.grad is None else _find_bad([(self._name(p), p.grad)])
            if bad_gradient is not None:
                evidence = ["it was written to after it was looked at, as by a hook of the optimizer"]
                tripped = f"the gradient of {bad_gradient}"
                self._stop(Hit(tripped, step, place=bad_gradient.place, evidence=evidence))
                return
            settings = [f"{key} is {value!r}" for key, value in group.items() if type(value) in (float, tuple)]
            hit = Hit(
                f"{bad} after the step",
                step,
                captured=None if self._last is None else partial(self._capture_update, optimizer, self._last, step),
                cause="update",
                place=bad.place,
                value=bad.value,
                module=bad.name.rpartition(".")[0],
                state=self._state.element_state(optimizer, p, bad.index),
                evidence=settings[:3],
            )
            self._stop(hit)

    def _capture_update(self, optimizer: Any, call: ForwardCall, step: int) -> CapturedStep:
        """Capture a step after optimizers have taken it: with the parameters from before, if they are known."""
        updates = list(self._updates.values()) if step == self._step else [None]
        update = self._updates.get(optimizer)
        if update is None or None in updates:
            return self._state.capture(call, self._parameters, after=True)
        before: dict[int, Tensor] = {}
        for each in reversed(updates):  # of a parameter that several write to, from before the first
            before |= {} if each is None else each.values()
        parameters = {name: before.get(id(p), p) for name, p in self._parameters.items()}
        captured = self._state.capture(call, parameters)
        tensors, settings, results = update.capture()
        omitted = [] if results else ["the update, which optimizers of torch.optim alone can take again"]
        return replace(
            captured,
            held={**captured.held, **tensors},
            results={**captured.results, **results},
            settings={**captured.settings, "update": settings},
            omitted=[*captured.omitted, *omitted],
        )

    def _judge_rules(self) -> None:
        for text, (name, place, rule) in self._rules.items():
            seen = [(call, g) for call in self._calls for g in call.activations.pop(name, ())]
            p = self._parameters.get(name)
            calls = [call for call in self._calls if call.task is not None]
            if p is not None and p.grad is not None and calls:
                seen = [(calls[-1], p.grad)]
            for call, g in seen:
                g = dense_part(g)
                if not rule(self._state.take(g, place)):
                    continue
                element, value = largest_element(name, place, NUMBERS.array(g))
                hit = Hit(
                    f"the gradient of {text} is such that its rule is true",
                    call.step,
                    call.index,
                    captured=partial(self._state.capture, call, self._parameters),
                    cause="rule",
                    place=element,
                    value=value,
                    where=self._line_of(call, name),
                    module=self._module_of.get(name, name.rpartition(".")[0]),
                )
                self._stop(hit)

    @with_cleanup
    def _line_of(self, call: ForwardCall, name: str) -> str | None:
        pause()
        return self._state.line_of(call, name)

    def _read_later(self) -> None:
        """Read the norms of parameters on an accelerator, one step late, so that no step waits for them."""
        later, self._later = self._later, []
        for norm, step in later:
            if not math.isfinite(_number(norm)):
                self._judge_parameters(step)

    def _require_finite_parameters(self, step: int, when: str) -> None:
        norm = _norm([local_part(p) for p in self._parameters.values() if p.dtype in FLOATS])
        if norm is None or math.isfinite(_number(norm)):
            return
        bad = _find_bad([(name, p) for name, p in self._parameters.items() if p.dtype in FLOATS])
        if bad is not None:
            self._stop_at_parameter(bad, step, when, self._capture_now)

    def _capture_now(self, call: ForwardCall, step: int) -> CapturedStep:
        return self._state.capture(call, self._parameters)

    def _stop_at_parameter(
        self, bad: BadElement, step: int, when: str, capture: Callable[[ForwardCall, int], CapturedStep]
    ) -> None:
        """Stop at an element of a parameter that no update of an optimizer has made."""
        call = self._last
        hit = Hit(
            f"{bad} {when}",
            step,
            captured=None if call is None else partial(capture, call, step),
            cause="bad-parameter",
            place=bad.place,
            value=bad.value,
            where=None if call is None else self._line_of(call, bad.name),
            module=bad.name.rpartition(".")[0],
        )
        self._stop(hit)

    # Hits

    def _hit(self, calls: Sequence[ForwardCall], tripped: str, place: str) -> None:
        """Stop at a number that one of these forwards, or the backward of them all, made bad."""
        if not calls:
            self._require_finite_parameters(self._step, "before the step")
        hit = None if calls else Hit(tripped, self._step, place=place, evidence=[self._why_unseen()])
        alone = len(calls) == 1 and calls[0].fresh and self._ranks == 1
        for call in reversed(calls):
            record = partial(self._state.record, call, self._options.loss)
            captured = partial(self._state.capture, call, self._parameters, alone)
            hit = Hit(tripped, call.step, call.index, record, captured, otherwise=hit)
        assert hit is not None
        self._stop(hit)

    def _why_unseen(self) -> str:
        if self._last is None or self._last.step != self._step:
            return NOT_CALLED
        what = f"the model returns {self._last.returned}, in which no tensor with a gradient was found"
        return f"{what}; return tensors, in tuples, dicts or dataclasses"

    def _stop(self, hit: Hit) -> None:
        """Stop at once, or with several processes when all of them can."""
        if self._ranks == 1:
            self._raise(hit)
        self._suspect = self._suspect or hit

    @with_cleanup
    def _raise(self, hit: Hit) -> None:
        self._stopped = True
        pause()
        self._options.stop(hit)

    def _agree_to_stop(self) -> None:
        """Stop in all processes if one of them has a hit: the others would wait for it forever."""
        if self._ranks == 1:
            return
        flag = torch.tensor([float(self._suspect is not None)], device=next(iter(self._parameters.values())).device)
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)
        if _number(flag):
            self._raise(self._suspect or Hit("another process has stopped", self._step))

    def agree(self, report: dict[str, Any], decided: bool) -> tuple[dict[str, Any], bool]:
        if self._ranks == 1:
            return report, True
        reports: list[Any] = [None] * self._ranks
        distributed.all_gather_object(reports, [report, decided])
        chosen = next((rank for rank, (_, found) in enumerate(reports) if found), 0)
        return {**reports[chosen][0], "rank": chosen}, chosen == distributed.get_rank()

    # Places and rules

    def _bind_rule(self, place: Place, rule: Rule) -> tuple[str, Place, Rule]:
        names = TorchModel(self._state.root)
        name = str(place.name)
        p = self._parameters.get(name)
        if p is not None:
            place.select(tuple(p.shape))
            return name, place, rule
        # An output of a module that returns several is named by its place in them, as `lstm.0` is.
        paths = [path for path in names.layers() if name == path or name.startswith(f"{path}.")]
        if not paths:
            known = [*self._parameters, *names.layers()]
            raise PlaceError(f"no tensor is named {name!r}; {nearest(name, known)}")
        self._module_of[name] = max(paths, key=len)
        return name, place, rule

    def _activations(self) -> Iterator[tuple[str, Module]]:
        wanted = set(self._module_of.values())
        return ((path, module) for path, module in TorchModel(self._state.root).modules() if path in wanted)


def _optimizers(optimizer: Any) -> list[Any]:
    given = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    found = []
    for one in given:
        while isinstance(getattr(one, "optimizer", None), torch.optim.Optimizer):  # wrapped, as accelerate does
            one = one.optimizer
        found.append(one)
        if not isinstance(one, torch.optim.Optimizer):
            raise OptionError(f"optimizer={quoted(one)[:80]} is no torch.optim.Optimizer; give the one of the loop")
    return found


def _skips_step(optimizer: Any) -> bool:
    """Return True if a fused optimizer is told by a GradScaler to skip its step, which it then does by itself."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and _number(found) > 0


def _members(optimizer: Any) -> list[tuple[dict[str, Any], Tensor]]:
    """Return the parameters of an optimizer, each with its group."""
    return [(group, p) for group in optimizer.param_groups for p in group["params"]]


def _find_bad(named: Iterable[tuple[str, Tensor]]) -> BadElement | None:
    return find_nonfinite(((name, dense_part(x)) for name, x in named), NUMBERS)


def _norm(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one number that is not finite if one of these tensors is not; it may also be too large itself."""
    filled = [x.detach() for x in tensors if x.numel()]
    return torch.nn.utils.get_total_norm(filled) if filled else None


def _number(x: Tensor) -> float:
    """Return a number; on the processor without an operation, and thus without a synchronisation."""
    return float(x.detach().numpy().item()) if x.device.type == "cpu" and x.dtype != torch.bfloat16 else float(x)


def _all_finite(flags: Sequence[Tensor]) -> bool:
    if all(flag.device.type == "cpu" for flag in flags):
        return all(math.isfinite(_number(flag)) for flag in flags)
    return bool(torch.stack([flag.float().to(flags[-1].device) for flag in flags]).isfinite().all())


implementation = TorchWatchRuns(TorchWatcher)
