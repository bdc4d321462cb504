"""Forwards of a watched PyTorch model: what each ran from, running it again, recording it, and describing it."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from elementgrad._backends.torch import _compat
from elementgrad._backends.torch.autodiff import checkpointing_disabled
from elementgrad._backends.torch.explain import following
from elementgrad._backends.torch.explain_rules import NUMBERS
from elementgrad._backends.torch.isolate import (
    DEVICES,
    BufferCopies,
    Freezable,
    State,
    add_hook,
    generators,
    in_mode,
    isolated,
    precision,
    set_random,
)
from elementgrad._backends.torch.names import TorchModel, unwrap
from elementgrad._backends.torch.trace import TorchOpRecorder, find_caller
from elementgrad._backends.torch.trace_memory import version_of
from elementgrad._backends.torch.watch_update import run_update
from elementgrad._cleanup import defer, enter, scope
from elementgrad._explain.trace import Op
from elementgrad._names import pytree
from elementgrad._names.arguments import BoundArguments
from elementgrad._place.place import Place
from elementgrad._watch.backend import (
    CapturedStep,
    NamedValue,
    OutputRef,
    ReplayedRun,
    StepRecord,
    WatchBackend,
    Watcher,
    WatchOptions,
)
from elementgrad._watch.elements import positions_of
from elementgrad.errors import OptionError

Tensor = torch.Tensor
Module = torch.nn.Module
SMALL = 1 << 16
"""Buffers of so many elements are copied before each forward; larger ones only after writes that PyTorch counts."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StateBefore:
    """The random state, precision, modes and buffers from which a forward runs."""

    def __init__(self, state: State, modes: Sequence[bool], buffers: Sequence[Tensor]):
        self.state, self.modes, self.buffers = state, modes, buffers


class ForwardCall:
    """One call of the model, with all that it takes to run it and its backward again."""

    def __init__(self, step: int, index: int, args: Any, kwargs: Any, before: StateBefore, fresh: bool):
        self.step, self.index = step, index
        self.args, self.kwargs = args, kwargs
        self.where: str | None = find_caller().where
        """The line of the user's on which the model is called."""
        self.versions = [version_of(x) for x in _tensors((args, kwargs))]
        self.before = before
        self.fresh = fresh
        """True if no parameter had a gradient before, so that gradients are those of this backward alone."""
        self.outputs: list[tuple[str, Tensor]] = []
        self.returned = ""
        """The class of the result."""
        self.norm: Tensor | None = None
        """One number that tells if the outputs are finite, until it is read."""
        self.cotangents: dict[int, Tensor] = {}
        self.task: int | None = None
        """The backward in which gradients arrived."""
        self.handles: list[Any] = []
        self.activations: dict[str, list[Tensor]] = {}
        """Gradients of activations that rules are about: a module that is called several times has several."""
        self.loss_arguments: Arguments | None = None
        self.loss_where: str | None = None

    def see_loss(self, args: Any, kwargs: Any) -> None:
        """Note the arguments of the loss, and the line on which it is called."""
        self.loss_arguments, self.loss_where = (args, kwargs), find_caller().where

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the forward, and of the loss if it was called; outputs among these are references."""
        if self.loss_arguments is None:
            return self.args, self.kwargs
        known = {_memory(x): OutputRef(position) for position, (_, x) in enumerate(self.outputs)}
        loss = pytree.map_tree(self.loss_arguments, lambda x: known.get(_memory(x), x) if isinstance(x, Tensor) else x)
        return self.args, self.kwargs, loss

    def release(self) -> None:
        """Remove the hooks from the outputs."""
        for handle in self.handles:
            handle.remove()


class ModelState:
    """A model, and the state that its forwards run from."""

    def __init__(self, model: Module):
        self.called = model
        """The module whose calls are seen: inside of DDP and the like, and outside of what is compiled."""
        while not _compat.is_compiled_wrapper(self.called) and unwrap(self.called) is not self.called:
            self.called = next(self.called.children())
        self.root = _innermost(model)
        named = list(TorchModel(self.root).named_tensors())
        self.parameters = {name: x for name, kind, x in named if kind == "parameter"}
        self.buffers = {name: x for name, kind, x in named if kind == "buffer"}
        self._modules = [module for _, module in TorchModel(self.root).modules()]
        self._copies: dict[str, tuple[int | None, Tensor]] = {}

    def snapshot(self) -> StateBefore:
        """Return the state that a forward would run from now."""
        buffers = [self._copy(name, x) for name, x in self.buffers.items()]
        return StateBefore((generators(), precision()), [module.training for module in self._modules], buffers)

    def _copy(self, name: str, x: Tensor) -> Tensor:
        if x.numel() <= SMALL:
            return x.detach().clone()
        version, copy = self._copies.get(name, (None, x))
        if copy is x or version != version_of(x):
            copy = x.detach().clone()
            self._copies[name] = version_of(x), copy
        return copy

    # Running again

    @contextmanager
    def restored(self, before: StateBefore, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the model the parameters, buffers and modes of a forward, until the end of the block."""
        with scope():
            for x, old in [
                *zip(self.buffers.values(), before.buffers, strict=True),
                *[(self.parameters[name], old) for name, old in parameters.items()],
            ]:
                if not _same_bits(x, old):
                    defer(x.data.copy_, x.detach().clone())
                    x.data.copy_(old)
            for module, mode in zip(self._modules, before.modes, strict=True):
                if module.training != mode:
                    defer(setattr, module, "training", module.training)
                    module.training = mode
            yield

    def record(
        self, call: ForwardCall, loss: Callable[..., Any] | None, parameters: Mapping[str, Tensor] | None = None
    ) -> StepRecord:
        """Run a forward again under the recorder of explanations, uncompiled, and its loss if that is known."""
        args, kwargs = pytree.map_tree((call.args, call.kwargs), _as_leaf)
        here = find_caller().where
        model = TorchModel(self.root)
        recorder = TorchOpRecorder(lambda x: x.requires_grad, model, keeps=True)
        names: dict[int, str] = {}
        counts: dict[str, int] = {}

        def note(path: str, module: Module, _: Any, result: Any) -> None:
            counts[path] = counts.get(path, -1) + 1
            for name, x in pytree.named_leaves(result, f"{path}#{counts[path]}"):
                if isinstance(x, Tensor) and (value := recorder.ids.get(x)) is not None:
                    names.setdefault(value, name)

        with self.restored(call.before, parameters or {}), isolated(self.root, call.before.state):
            for path, module in model.modules():
                if path:
                    add_hook(_compat.forward_hooks(module), partial(note, path))
            with checkpointing_disabled(True, faithful=True), in_mode(Freezable()), recorder.recording():
                result = self.root(*args, **kwargs)
                _locate(recorder.ops, here, call.where)
                remarks: list[str] = []
                try:
                    value = None if loss is None else _call_loss(loss, call, result)
                except Exception as error:  # the user's; the model can be followed without the loss
                    value = None
                    remarks.append(f"the loss could not be followed: {type(error).__name__}: {error}")
                _locate(recorder.ops, here, call.loss_where or call.where)
            outputs = float_outputs(result)
            inputs = _named_inputs(self.root, args, kwargs)
            if value is not None and call.loss_arguments is not None:
                inputs += [(f"loss.{name}", x) for name, x in _named_inputs(loss, *call.loss_arguments)]
            inputs = [(name, x) for name, x in inputs if isinstance(x, Tensor)]
            held = [NamedValue(name, "input", recorder.ids.get(x), x.detach()) for name, x in inputs]
            for kind, some in (("parameter", self.parameters), ("buffer", self.buffers)):
                held += [NamedValue(name, kind, recorder.ids.get(x), x.detach().clone()) for name, x in some.items()]
            named = [NamedValue(name, "output", recorder.id_of(x), x.detach()) for name, x in outputs]
            final = None if value is None else NamedValue("the loss", "output", recorder.id_of(value), value.detach())
        if recorder.failure is not None:
            raise recorder.failure
        once = {path for path, count in counts.items() if not count}
        texts = {n: path if (path := name.partition("#")[0]) in once else name for n, name in names.items()}
        texts = {
            n: text + names[n].partition("#")[2].lstrip("0123456789") * (text in once) for n, text in texts.items()
        }
        ops, hints = recorder.recorded_ops(), recorder.hints
        connected = frozenset(recorder.connected)
        seeds = dict(call.cotangents)
        return StepRecord(
            "torch",
            ops,
            connected,
            NUMBERS,
            held,
            named,
            final,
            seeds,
            texts,
            hints=hints,
            following=following,
            remarks=remarks,
        )

    def results(self, call: ForwardCall) -> dict[str, Tensor]:
        """Run a forward and its backward again, as the model is called, and return outputs and gradients."""
        args, kwargs = pytree.map_tree((call.args, call.kwargs), _as_leaf)
        with scope():
            defer(set_random, generators())
            enter(torch.enable_grad())
            enter(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")  # they are ours
            BufferCopies(None).start()
            set_random(call.before.state[0])
            for device, wanted, now in zip(DEVICES, call.before.state[1], precision(), strict=True):
                if wanted != now and (wanted[0] or now[0]):
                    enter(torch.autocast(device, dtype=wanted[1], enabled=wanted[0]))
            outputs = float_outputs(self.called(*args, **kwargs))
        results = {f"output:{n}": x.detach() for n, (_, x) in enumerate(outputs)}
        pairs = [(outputs[n][1], g) for n, g in call.cotangents.items() if outputs[n][1].requires_grad]
        tracked = {name: p for name, p in self.parameters.items() if p.requires_grad}
        if pairs:
            roots, seeds = [x for x, _ in pairs], [g for _, g in pairs]
            for x, g in pairs:  # of an output that another one is computed from, all that arrived, and not once more
                x.register_hook(lambda _, g=g: g)
            found = torch.autograd.grad(roots, list(tracked.values()), seeds, allow_unused=True)
            gradients = {name: g for name, g in zip(tracked, found, strict=True) if g is not None}
            results |= {f"gradient:{name}": dense_part(g) for name, g in gradients.items()}
        return results

    def capture(
        self, call: ForwardCall, parameters: Mapping[str, Tensor], gradients: bool = False, after: bool = False
    ) -> CapturedStep:
        """Return what a forward ran from; with `gradients`, those of the parameters are of its backward alone."""
        changed = [version_of(x) for x in _tensors((call.args, call.kwargs))] != call.versions
        omitted = ["the arguments as they were: they were written to after the forward"] if changed else []
        omitted += ["the parameters from before the step, which the optimizer has overwritten"] if after else []
        results = {} if after else {f"output:{n}": x for n, (_, x) in enumerate(call.outputs)}
        if gradients and not after:
            found = {name: p.grad for name, p in parameters.items() if p.grad is not None and not version_of(p.grad)}
            results |= {f"gradient:{name}": dense_part(g) for name, g in found.items()}
        (cpu, devices), autocast = call.before.state[0] or generators(), call.before.state[1]
        settings = {
            "modes": list(call.before.modes),
            "autocast": [[enabled, None if dtype is None else str(dtype)] for enabled, dtype in autocast],
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
        }
        buffers = zip(self.buffers, call.before.buffers, strict=True)
        held = {f"parameter:{name}": p.detach() for name, p in parameters.items()}
        return CapturedStep(
            describe(self.root),
            call.arguments(),
            held | {f"buffer:{name}": x for name, x in buffers},
            {"cpu": cpu, **{f"cuda:{n}": state for n, state in enumerate(devices)}},
            {str(n): g for n, g in call.cotangents.items()},
            results,
            settings,
            omitted,
        )

    def line_of(self, call: ForwardCall, name: str) -> str | None:
        """Return the line at which a parameter is read, or an activation is made."""
        try:
            record = self.record(call, None)
        except Exception:  # the rule is true whether or not the line is known
            return None
        ids = {value.id for value in record.held if value.name == name}
        ids |= {value for value, text in record.names.items() if text == name}
        uses = [op for op in record.ops if ids & {*op.inputs, *op.outputs}]
        return uses[0].where if uses else None

    # Elements

    @staticmethod
    def take(x: Tensor, place: Place) -> Tensor:
        return x.reshape(-1)[torch.from_numpy(positions_of(place, tuple(x.shape))).to(x.device)] if place.index else x

    @staticmethod
    def element_state(optimizer: Any, p: Tensor, index: tuple[int, ...]) -> dict[str, float]:
        """Return the optimizer's numbers about one element, its gradient first."""
        found = {} if p.grad is None else {"grad": p.grad}
        found |= dict(optimizer.state.get(p, {}))
        numbers = {}
        for key, value in found.items():
            if isinstance(value, Tensor) and value.shape == p.shape:
                numbers[str(key)] = float((value.to_dense() if value.is_sparse else value)[index].real)
            elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                numbers[str(key)] = float(value)
        return numbers


class TorchWatchRuns(WatchBackend):
    """Watches and replays runs of PyTorch."""

    name = "torch"

    def __init__(self, watcher: Callable[[Any, Any, WatchOptions], Watcher]):
        self._watcher = watcher

    def watcher(self, model: Any, optimizer: Any, options: WatchOptions) -> Watcher:
        return self._watcher(model, optimizer, options)

    def describe(self, model: Any) -> Mapping[str, Any]:
        return describe(_innermost(model))

    def to_bytes(self, x: Any) -> tuple[str, tuple[int, ...], np.ndarray, Mapping[str, Any]]:
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            raise TypeError(type(x).__name__)
        data = x.detach().cpu().resolve_conj().resolve_neg()
        data = data.clone(memory_format=torch.contiguous_format)  # an expanded element counts as contiguous
        content = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else np.zeros(0, np.uint8)
        properties: dict[str, Any] = {"requires_grad": True} if x.requires_grad else {}
        if not x.is_contiguous() and 0 not in x.stride() and x.numel():
            properties["strides"] = list(x.stride())  # kernels may compute other bits for other layouts
        return str(x.dtype).removeprefix("torch."), tuple(x.shape), content, properties

    def from_bytes(
        self, dtype: str, shape: tuple[int, ...], content: np.ndarray, properties: Mapping[str, Any]
    ) -> Tensor:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"{dtype!r} is no dtype of PyTorch")
        x = (
            torch.from_numpy(content.copy()).view(kind).reshape(shape)
            if content.size
            else torch.empty(shape, dtype=kind)
        )
        strides = properties.get("strides")
        if strides is not None:
            strides = tuple(map(int, strides))
            order = sorted(range(len(shape)), key=lambda axis: strides[axis])
            dense = all(
                strides[axis] == math.prod([shape[other] for other in order[:n]]) for n, axis in enumerate(order)
            )
            if dense:
                x = torch.empty_strided(shape, strides, dtype=kind).copy_(x)
        return x.requires_grad_() if properties.get("requires_grad") and kind.is_floating_point else x

    def run(self, model: Any, captured: CapturedStep, loss: Callable[..., Any] | None) -> ReplayedRun:
        state = ModelState(model)
        device = next(iter(state.parameters.values())).device
        settings = captured.settings
        autocast = tuple([(bool(on), _dtype(text)) for on, text in settings["autocast"]])
        devices = [captured.random[name] for name in sorted(captured.random) if name != "cpu"]
        random = captured.random["cpu"], devices if torch.cuda.is_available() else []
        buffers = [captured.held[f"buffer:{name}"].to(x.device) for name, x in state.buffers.items()]
        before = StateBefore((random, autocast), [bool(mode) for mode in settings["modes"]], buffers)
        args, kwargs, *given = pytree.map_tree(
            captured.arguments, lambda x: x.to(device) if isinstance(x, Tensor) else x
        )
        call = ForwardCall(0, 0, args, kwargs, before, True)
        call.loss_arguments, call.where = given[0] if given else None, None
        call.cotangents = {int(n): g.to(device) for n, g in captured.gradients.items()}
        parameters = {name: captured.held[f"parameter:{name}"] for name in state.parameters}
        with state.restored(before, parameters):
            threads = int(settings["threads"])
            if threads != torch.get_num_threads():  # sums are split among them
                defer(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(threads)
            results = state.results(call)
            if settings.get("update"):
                results |= run_update(settings["update"], captured.held)
        return ReplayedRun(results, partial(state.record, call, loss, parameters))


def describe(root: Module) -> dict[str, Any]:
    named = TorchModel(root).named_tensors()
    held = {name: [kind, list(x.shape), str(x.dtype).removeprefix("torch.")] for name, kind, x in named}
    return held | {f"class of {path or 'the model'}": type(m).__qualname__ for path, m in TorchModel(root).modules()}


def _innermost(model: Module) -> Module:
    while (inner := unwrap(model)) is not model:
        model = inner
    return model


def float_outputs(result: Any) -> list[tuple[str, Tensor]]:
    leaves = pytree.named_leaves(result, "output")
    return [(name, x) for name, x in leaves if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]


def local_part(x: Tensor) -> Tensor:
    """Return this process's part of a tensor that is sharded."""
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[no-any-return,operator]


def dense_part(x: Tensor) -> Tensor:
    """Return this process's part of a tensor, with all of its elements."""
    x = local_part(x.detach())
    return x.to_dense() if x.is_sparse else x


def _named_inputs(root: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    arguments = BoundArguments.of(root, args, kwargs).arguments
    return [leaf for name, value in arguments.items() for leaf in pytree.named_leaves(value, name)]


def _call_loss(loss: Callable[..., Any], call: ForwardCall, result: Any) -> Tensor | None:
    """Call the loss with the new outputs; None if its other arguments are not known, or it is no single number."""
    given = call.arguments()[2:]
    if given:
        new = [x for _, x in float_outputs(result)]
        args, kwargs = pytree.map_tree(given[0], lambda x: new[x.position] if isinstance(x, OutputRef) else x)
        value = loss(*args, **kwargs)
    elif _takes_one(loss):
        value = loss(result)
    else:
        return None
    return value if isinstance(value, Tensor) and value.numel() == 1 else None


def _locate(ops: Sequence[Op], here: str, where: str | None) -> None:
    """Give operations that no line of the user's runs the line on which their module was called, for that of now."""
    for op in ops:
        if op.where == here:
            op.where = where


def _takes_one(loss: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in positional if p.default is p.empty]) == 1


def _memory(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), tuple(x.shape), tuple(x.stride()), x.dtype


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.leaves_of(tree) if isinstance(x, Tensor)]


def _as_leaf(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _same_bits(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        raise OptionError(f"a tensor of shape {tuple(y.shape)} was captured, and the model has {tuple(x.shape)}")
    x, y = x.detach(), y.to(x.device)
    return (
        x is y or bool(torch.equal(x, y)) if x.dtype == torch.bool or not x.is_floating_point() else _equal_bits(x, y)
    )


def _equal_bits(x: Tensor, y: Tensor) -> bool:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return bool(torch.equal(x.contiguous().view(kinds[x.element_size()]), y.contiguous().view(kinds[x.element_size()])))


def _dtype(text: Any) -> torch.dtype | None:
    kind = getattr(torch, str(text).removeprefix("torch."), None)
    return kind if isinstance(kind, torch.dtype) else None
