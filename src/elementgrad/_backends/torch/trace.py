"""Who called a function of PyTorch's: the user's line, and the verb of ours that stands there.

What code asks of gradients as it runs: `backward()`, `torch.autograd.grad`, and the `.grad` of a tensor.

Parameters that are made on the way: they take the numbers of a tensor, and no function of PyTorch's is called.

Tracked tensors that leave PyTorch as if they were plain, as those are that the user gave.

Numbers for tensors: one for each that is met, and another after each write to its memory.

Watching PyTorch code run: every function that is called, the numbers it takes and gives, and the user's line.
"""

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from elementgrad._backends.monkeypatch import AttributePatch, Replace
from elementgrad._backends.source_location import location_text, verb_of
from elementgrad._backends.torch import explain_ops
from elementgrad._backends.torch._compat import (
    _global_forward_hooks,
    _global_forward_hooks_always_called,
    _global_forward_pre_hooks,
    sequence_number,
)
from elementgrad._backends.torch.contributions import clone_unrecorded
from elementgrad._backends.torch.explain_ops import COPIES, Meter, Overwrite, TorchCall
from elementgrad._backends.torch.isolate import add_hook, enter_mode, is_freezing_call
from elementgrad._backends.torch.names import TorchModel, unwrap
from elementgrad._backends.torch.record.intercept import (
    EXPORTS,
    active_recorders,
    frames_to_user,
    is_paused,
    name_of,
    pause_recording,
    push_recorder,
)
from elementgrad._cleanup import safe_context, scope
from elementgrad._explain.trace import Hint, Op
from elementgrad._names import pytree

CALLED = {"sample": ("distributions", "sample"), "step": ("optim", "optimizer.step")}
"""Methods of PyTorch's that do many things at once: the folder that they live in, and what the user calls them."""


@dataclass(frozen=True)
class Caller:
    """A line of the user's, and what they called there if it was ours, or does many things at once."""

    where: str
    verb: str | None = None
    """As the user writes it: `eg.at(...).stop`, `eg.grad`, `sample`, `optimizer.step`."""

    def stops(self, seen: str | None) -> str | None:
        """The cause if that verb lets no derivative through, in place of what is to be seen of one step of it."""
        if seen is None or self.verb is None:
            return seen
        if self.verb in ("eg.choose", "sample"):
            return "discrete"
        if self.verb.startswith("eg.at"):
            return "detached"
        return "inner-gradient" if self.verb.startswith("eg.") else seen


def caller() -> Caller:
    """The nearest caller outside PyTorch and this library."""
    called = None
    for frame in frames_to_user(sys._getframe(1)):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        called = verb_of(frame.f_code) or (_of_torch(file, name) if name in CALLED else None) or called
    return Caller(location_text(frame.f_code.co_filename, frame.f_lineno), called)


def _of_torch(file: str, name: str) -> str | None:
    folder, word = CALLED[name]
    return word if os.path.join("torch", folder) + os.sep in file else None


Tensor = torch.Tensor


class LastRequest:
    """What was asked last, and what became of it."""

    def __init__(self) -> None:
        self.followed: Tensor | None = None
        """The tensor whose .grad is looked at, if one is."""
        self.gradient: Tensor | None = None
        self.accumulated: Op | None = None
        """What became of its .grad, and the backward that added to it."""
        self.backwards: list[Op] = []
        self.target: int | None = None
        """What backward was called on last."""
        self.sides: tuple[Sequence[Sequence[Tensor]], str] | None = None
        """What `torch.autograd.grad` was asked last, outputs and inputs, and where."""
        self.missing: tuple[Tensor, Op] | None = None
        """The tensor that is no leaf and whose .grad was read last and is None, and where."""

    def backward(self, func: Callable[..., Any], args: Any, kwargs: Any, path: str, roots: Sequence[int]) -> Any:
        """Call backward for the user."""
        step = Op("backward", caller().where, path, tuple(roots))
        self.backwards.append(step)
        self.target = step.inputs[0] if step.inputs else None
        before = self._held()
        with pause_recording():
            result = func(*args, **kwargs)
            after = self._held()
            if after is not None and (before is None or not torch.equal(before, after)):
                self.gradient = after
                if before is not None and bool(before.any()):
                    self.accumulated = step
        return result

    def _held(self) -> Tensor | None:
        x = self.followed
        kept = x is not None and (x.is_leaf or x.retains_grad)
        return x.grad.clone() if kept and x is not None and x.grad is not None else None

    def note(self, outputs: Any = None, inputs: Any = None, *_: Any, **__: Any) -> None:
        """That `torch.autograd.grad` is asked."""
        found = [[x for x in pytree.leaves_of(side) if isinstance(x, Tensor)] for side in (outputs, inputs)]
        self.sides = found, caller().where

    def read(self, func: Callable[..., Any], x: Tensor, path: str) -> Any:
        """Read the .grad of a tensor for the user."""
        if not x.requires_grad or x.is_leaf or x.retains_grad:
            return func(x)
        with safe_context(warnings.catch_warnings()):
            warnings.simplefilter("ignore")  # that it is no leaf is what will be said
            gradient = func(x)
        if gradient is None:
            self.missing = x, Op(".grad", caller().where, path)
        return gradient


def _install(replace: Replace) -> None:
    original = torch.Tensor._make_subclass

    @wraps(original)
    def make_subclass(kind: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(kind, data, *args, **kwargs)
        for watcher in active_recorders() if not is_paused() else ():
            if hasattr(watcher, "remade"):
                watcher.remade(data, made)
        return made

    replace(torch.Tensor, "_make_subclass", staticmethod(make_subclass))


seen = AttributePatch(_install)
"""While it is on, whoever watches is told of them."""


class LenientMode(TorchFunctionMode):
    """Lets them out, and be frozen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_freezing_call(func, args, kwargs or {}):
            return args[0].detach_()
        name = name_of(func)
        if name in EXPORTS:
            args = plain(args)
        elif name in COPIES:
            args = pytree.map_tree(args, plainly)
        return func(*args, **(kwargs or {}))


def plain(args: Any) -> list[Any]:
    """Arguments without their derivatives."""
    return [plainly(x) for x in args]


def plainly(x: Any) -> Any:
    """A tensor without its derivative, and anything else as it is."""
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


class ValueIds:
    """Numbers for tensors: one for each tensor that is met, and another after each write to its memory."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int, int | None]] = {}
        self._memory: dict[int, list[weakref.ref[Tensor]]] = {}
        self._count = 0

    def new(self, x: Tensor) -> int:
        """A new number for a tensor."""
        numbers, key, number = self._numbers, id(x), self._count
        self._count += 1
        known = numbers.get(key)
        if known is None or known[0]() is not x:
            memory = memory_of(x)
            ref = weakref.ref(x, lambda _: numbers.pop(key, None))
            if memory:
                living = [other for other in self._memory.get(memory, ()) if other() is not None]
                self._memory[memory] = [*living, ref]
        else:
            ref = known[0]
        numbers[key] = ref, number, version_of(x)
        return number

    def counts(self, x: Tensor) -> bool:
        """Whether a tensor has counted a write since it got its number."""
        return version_of(x) != self._numbers[id(x)][2]

    def known(self, x: Tensor) -> int | None:
        """The number of a tensor that was met."""
        found = self._numbers.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def sharing(self, x: Tensor) -> list[Tensor]:
        """The tensors met that live in the memory of one, and are alive."""
        found = [ref() for ref in self._memory.get(memory_of(x), ())]
        begin, end = _span(x)
        others = [(other, _span(other)) for other in found if other is not None and other is not x]
        return [other for other, (first, last) in others if first < end and begin < last]


def memory_of(x: Tensor) -> int:
    """Where the memory of a tensor begins; 0 if it has none."""
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a stand-in without memory
        return 0


def _span(x: Tensor) -> tuple[int, int]:
    """From where to where a tensor lies in its memory."""
    if x.layout is not torch.strided or not x.numel():
        return 0, 0
    last = sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)])
    begin = int(x.storage_offset()) * x.element_size()
    return begin, begin + (int(last) + 1) * x.element_size()


def version_of(x: Tensor) -> int | None:
    """How many writes a tensor has counted; what was made in inference mode counts none."""
    return None if x.is_inference() else x._version


is_wrapped: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether `torch.func` has hold of a tensor, which then is one of several or of none."""
HOOKS = "BackwardHookFunction"
"""What PyTorch puts before and after a module that has backward hooks."""
LOOKED_INTO = ("CheckpointFunction",)
"""Functions that run the user's code in their forward."""


class TorchOpRecorder:
    """Keeps the steps of the code that runs inside of it."""

    def __init__(self, leads: Callable[[Tensor], bool], function: Any = None, meter: Meter | None = None):
        self.steps: list[Op] = []
        self.measures: list[Any] = []
        self.remarks: list[Hint] = []
        self.connected: set[int] = set()
        self.values = ValueIds()
        self._leads = leads
        self._meter = meter
        self._reached: set[int] = set()  # values computed from the source
        self._used: set[int] = set()  # values that a step took, and that its gradient may need
        self._paths = {id(module): path for path, module in TorchModel(function)._modules()}
        self._modules: list[Any] = []
        self._thread = threading.get_ident()
        self._exported: dict[int, Op] = {}
        self._makers: dict[int, str] = {}  # the function that a value came from
        self.overwrites: list[Overwrite] = []
        self.asking = LastRequest()
        self.failed: Exception | None = None
        """What went wrong in watching, and not in the code that is watched."""
        self.carried: Op | None = None
        """The first step that took a tensor with a graph from before."""
        self.tracked = False
        """Whether any step took a tensor that is tracked."""
        self._root: int | None = None
        self._leaves: set[int] = set()
        self._checkpoints = 0  # reentrant ones that the code is in

    @contextmanager
    def on(self) -> Iterator["TorchOpRecorder"]:
        """Watch this thread."""
        with scope():
            leave = self._leave
            add_hook(_global_forward_pre_hooks, self._enter)
            add_hook(_global_forward_hooks_always_called, leave)
            add_hook(_global_forward_hooks, leave)
            seen.enter()
            enter_mode(_CallMode(self))
            push_recorder(self)
            yield self

    def _enter(self, module: Any, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if _scripted(module) and not any(map(_scripted, self._modules)):
            self._close("a scripted module", _tensors(args))
        if not self._modules and id(unwrap(module)) not in self._paths:
            self._paths.update({id(inner): path for path, inner in TorchModel(module)._modules()})
        self._modules.append(module)

    def _leave(self, module: Any, _: Any, __: Any) -> None:
        while threading.get_ident() == self._thread and self._modules and self._modules.pop() is not module:
            pass

    @property
    def path(self) -> str:
        """Where in a model the code is now."""
        return next((self._paths[id(m)] for m in reversed(self._modules) if id(m) in self._paths), "")

    def number(self, x: Tensor) -> int:
        """The number of a tensor; one that was never seen may share its memory with one that was."""
        known = self.values.known(x)
        if self._root is not None and self.asking.followed is None and x.is_leaf and x.requires_grad:
            return known if known is not None and known in self._leaves else self._leaf(x, self._root)
        if known is not None:
            return known
        sharing = self.values.sharing(x)
        number = self.values.new(x)
        if self._leads(x):
            self.tracked = True
            self.connected.add(number)
        if sharing and not any(other.requires_grad and x._base is other for other in sharing):
            self._note_alias(x, number, sharing)
        return number

    def _leaf(self, x: Tensor, root: int) -> int:
        """A tensor that derivatives start at: it was there before, or the code made it and tracks it from now on."""
        self.tracked = True
        leaf = self.source(x)
        self._leaves.add(leaf)
        self._add(Op("a leaf", inputs=(root,), outputs=(leaf,), hidden=True))
        return leaf

    def _note_alias(self, x: Tensor, number: int, sharing: Sequence[Tensor]) -> None:
        origin = max([found for other in sharing if (found := self.values.known(other)) is not None], default=None)
        if origin is None:
            return
        exported = self._exported.get(memory_of(x))
        stops = None if number in self.connected else "left-framework" if exported else "detached"
        word = exported.operation if exported else type(x).__name__
        where = exported.where if exported else caller().where
        if origin in self._reached:
            self._reached.add(number)
        self._add(
            Op(word, where, self.path, (origin,), (number,), stops, "it makes another tensor of the same numbers")
        )

    def follow(self, x: Tensor | None) -> int:
        """Derivatives start at a tensor, or at all leaves that are tracked."""
        self.asking.followed = x
        self._root = self.source(torch.empty(0) if x is None else x)
        return self._root

    def substitute(self, x: Any) -> Any:
        """Note that a tensor goes where nobody can follow: into a transform of `torch.func`. It goes as it is."""
        self._close("torch.func", [x] if isinstance(x, Tensor) else [])
        return x

    def remade(self, x: Tensor, made: Tensor) -> None:
        """A tensor of another kind takes over the memory of one."""
        if self.values.known(x) is not None:
            self.number(made)  # while both are alive

    def _close(self, word: str, taken: Sequence[Tensor]) -> None:
        if taken:
            numbers = tuple([self.number(x) for x in taken])
            self._add(Op(word, caller().where, self.path, numbers, opaque=True))

    def source(self, x: Tensor) -> int:
        """A tensor from which derivatives start."""
        number = self.values.new(x)
        self.connected.add(number)
        self._reached.add(number)
        return number

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch's for the user, and note what it did."""
        name = name_of(func)
        if is_paused():
            return func(*args, **kwargs)
        if name == "grad.__get__":
            return self.asking.read(func, args[0], self.path)
        if explain_ops.is_aside(name):
            return func(*args, **kwargs)
        if name == "backward":
            roots = _tensors(args[0] if args else kwargs.get("tensors"))
            return self.asking.backward(func, args, kwargs, self.path, [self.number(x) for x in roots])
        if name == "grad":
            self.asking.note(*args, **kwargs)
        if name == "register_hook":
            self._note_hook(args[0])
            return func(*args, **kwargs)
        if explain_ops.leaves(name):
            return self._leaving(func, name, args, kwargs)
        quiet = name == "clone" and sys._getframe(2).f_code is clone_unrecorded.__code__
        return self._step(func, name, explain_ops.word(func), args, kwargs, quiet=quiet)

    def run(self, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call an `autograd.Function` of the user's, which no mode sees."""
        kind = getattr(apply, "__self__", None)
        name = getattr(kind, "__name__", "Function")
        home = getattr(kind, "__module__", "")
        if name in LOOKED_INTO:
            self._checkpoints += 1
            try:
                return apply(*args, **kwargs)
            finally:
                self._checkpoints -= 1
        if name == HOOKS:
            self.remarks.append(Hint("hook", "", Op("a backward hook", None, self.path)))
        own = not home.startswith(("torch.", "elementgrad."))
        return self._step(apply, name, name, args, kwargs, own=own, quiet=not own)

    def _step(
        self,
        func: Callable[..., Any],
        name: str,
        word: str,
        args: Any,
        kwargs: Any,
        own: bool = False,
        quiet: bool = False,
    ) -> Any:
        """Call a function, and note it. What fails in the noting is kept, and is no business of the user's code."""
        notes = self._noting(func, name, word, args, kwargs, own, quiet)
        try:
            args, kwargs = next(notes)
        except StopIteration:
            return func(*args, **kwargs)
        except Exception as error:
            self.failed = self.failed or error
            return func(*args, **kwargs)
        with pause_recording():
            result = func(*args, **kwargs)
        try:
            notes.send(result)
        except StopIteration:
            pass
        except Exception as error:
            self.failed = self.failed or error
        return result

    def _noting(
        self, func: Callable[..., Any], name: str, word: str, args: Any, kwargs: Any, own: bool, quiet: bool
    ) -> Generator[tuple[Any, Any], Any, None]:
        """Look at what a function takes; then, sent what it gave, add the step. Nothing, if it is none of interest."""
        taken = _tensors((args, kwargs))
        if (not taken and name not in explain_ops.IMPORTS) or any(map(is_wrapped, taken)):
            return
        if name in explain_ops.COPIES:
            args = pytree.map_tree(args, plainly)  # PyTorch warns of tracked ones, which the user's may not be
        carried = any(x.grad_fn is not None and self.values.known(x) is None for x in taken)
        numbers = tuple([self.number(x) for x in taken])
        versions = [version_of(x) for x in taken]
        writes = explain_ops.may_write(name, args, kwargs)
        nodes = self._nodes(taken) if writes else {}
        meter = self._meter
        looked = [
            pair for pair in zip(taken, numbers, strict=True) if meter and (meter.all or pair[1] in self._reached)
        ]
        measured = [x for x, _ in looked]
        with pause_recording():
            before = meter.before(measured, writes) if meter and measured else None
        grad, start = torch.is_grad_enabled(), sequence_number()
        made = _tensors((yield args, kwargs))
        written = [x for x, version in zip(taken, versions, strict=True) if version_of(x) != version]
        if name == "data.__set__":
            written.append(args[0])
        changed = list({id(x): x for x in (*made, *written)}.values())
        old = [(x.shape, known) for x in written if (known := self.values.known(x)) in self._used]
        gives = [self._given(x, taken, written) for x in changed]
        behind = [other for x in written for other in self.values.sharing(x) if all(other is not y for y in changed)]
        old += [(x.shape, known) for x in behind if (known := self.values.known(x)) in self._used]
        silent = self._silent(written, behind, nodes)
        gives += [self._given(x, (), behind) for x in behind]
        news = [(x, n) for x, n in zip((*changed, *behind), gives, strict=True) if n is not None]
        given = tuple([number for _, number in news])
        stops, note = None, ""
        if any(number in self.connected for number in numbers) and any(n not in self.connected for n in given):
            lost = [x for x in (*changed, *behind) if self.values.known(x) not in self.connected]
            stops, note = explain_ops.why_stopped(name, own, lost, grad)
            if stops is None and behind:
                stops = "assigned-state"
        by = caller()
        if by.verb is not None:
            word, stops = by.verb, by.stops(stops)
        if stops == "no-grad" and self._checkpoints:
            word = "checkpoint"
        step = Op(word, by.where, self.path, numbers, given, stops, note, own, from_python=not taken, hidden=quiet)
        if not self._reached.isdisjoint(numbers):
            self._reached.update(given)
        with pause_recording():
            ran = TorchCall(name, func, args, kwargs, measured, changed, start, [n for _, n in looked], news)
            self._add(step, meter.after(ran, before) if meter and measured else None)
        self._used.update(numbers)
        if any(number in self.connected for number in given):
            self._used.update(given)  # a function may need what it gave
        self._makers.update(dict.fromkeys(given, word.strip("_").lower()))
        self.overwrites += [Overwrite(step, tuple(shape), self._makers.get(known or 0, "")) for shape, known in old]
        self.carried = self.carried or (step if carried else None)
        if silent:
            self.remarks.append(Hint("modified-through-data", "autograd does not see that write", step))
        if own and any(number in self.connected for number in given):
            self.remarks.append(Hint("custom-rule", "", step))

    def _nodes(self, taken: Sequence[Tensor]) -> dict[int, Any]:
        """By the id of each tensor that a write may reach, the node of the graph that made it."""
        reached = {id(y): y for x in taken for y in (x, *self.values.sharing(x))}
        return {key: x.grad_fn for key, x in reached.items() if x.grad_fn is not None}

    def _silent(self, written: Sequence[Tensor], behind: Sequence[Tensor], nodes: Mapping[int, Any]) -> bool:
        """Whether a write reaches a tensor that has a derivative, and autograd does not see it.

        It has the node that it had before then: through `.data` or `detach()`, or inside of `no_grad`. Of a leaf only
        that counts which is not counted as a write, since what is counted is refused where a gradient needs it.
        """
        for x in (*written, *behind) if written else ():
            if x.grad_fn is not None and x.grad_fn is nodes.get(id(x)):
                return True
        for x in behind if written else ():
            if x.requires_grad and self.values.known(x) in self._used and not self.values.counts(x):
                return True
        return False

    def _given(self, x: Tensor, taken: Sequence[Tensor], written: Sequence[Tensor]) -> int | None:
        """The number of what a step gave; what it was given and hands on unchanged has its number already."""
        if any(x is other for other in taken) and all(x is not other for other in written):
            return None
        number = self.values.new(x)
        if self._leads(x):
            self.connected.add(number)
        return number

    def _leaving(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        taken = _tensors((args, kwargs))
        numbers = tuple([self.number(x) for x in taken])
        with pause_recording():
            result = func(*plain(args), **kwargs)
        step = Op(
            explain_ops.word(func),
            caller().where,
            self.path,
            numbers,
            (),
            "left-framework",
            branches=name in explain_ops.DECIDES,
        )
        self._add(step)
        for x in taken if name in ("numpy", "__array__", "__dlpack__") else ():
            self._exported[memory_of(x)] = step
        return result

    def _note_hook(self, x: Tensor) -> None:
        if self._leads(x):
            self.remarks.append(Hint("hook", "", Op("register_hook", caller().where, self.path)))

    def _add(self, step: Op, measure: Any = None) -> None:
        self.steps.append(step)
        self.measures.append(measure)


class _CallMode(TorchFunctionMode):
    """Sees every function of PyTorch's that is called."""

    def __init__(self, watch: TorchOpRecorder):
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.call(func, args, kwargs or {})


def _scripted(module: Any) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.leaves_of(value) if isinstance(x, Tensor)]
