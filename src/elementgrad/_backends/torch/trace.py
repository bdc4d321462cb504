"""`TorchOpRecorder`: record every PyTorch function that code calls, with its values and the user's line.

A function mode sees the calls. Each tensor gets a value id, and a new one after each write to its memory (`ValueIds`),
so that the ids of inputs and outputs make up the graph. Calls of `backward()`, `torch.autograd.grad` and `.grad` are
noted in `GradientRequests`. New parameters take over a tensor's memory without any function call, so
`torch.Tensor._make_subclass` is patched while a recorder is on.
"""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from elementgrad._backends.source_location import location_text, verb_of
from elementgrad._backends.torch import explain_rules
from elementgrad._backends.torch._compat import (
    MAKE_SUBCLASS,
    _global_forward_hooks,
    _global_forward_hooks_always_called,
    _global_forward_pre_hooks,
    is_functorch_wrapped_tensor,
)
from elementgrad._backends.torch.explain_rules import Geometry, Slot, TorchOp, overlay, tensors_in
from elementgrad._backends.torch.isolate import add_hook, enter_mode, generators, precision
from elementgrad._backends.torch.names import TorchModel, unwrap
from elementgrad._backends.torch.read import clone_unrecorded
from elementgrad._backends.torch.record.intercept import (
    active_recorders,
    frames_to_user,
    is_paused,
    name_of,
    pause_recording,
    push_recorder,
)
from elementgrad._backends.torch.trace_memory import (
    HiddenWrite,
    Overwrite,
    SavedValues,
    ValueIds,
    detach,
    detach_all,
    is_same,
    storage_address,
    version_of,
)
from elementgrad._cleanup import AttributePatch, Replace, safe_context, scope
from elementgrad._explain.connect import Cut, cause_of_cut
from elementgrad._explain.kinds import PRODUCT
from elementgrad._explain.trace import Hint, Op
from elementgrad._names import pytree
from elementgrad._names.backend import Model

Tensor = torch.Tensor
HOOK_FUNCTION = "BackwardHookFunction"
"""PyTorch applies it before and after a module that has backward hooks."""
TRANSPARENT = ("CheckpointFunction",)
"""Functions whose forward runs the user's code, which is recorded itself."""
COMPOSITE = {"sample": ("distributions", "sample"), "step": ("optim", "optimizer.step")}
"""Methods of PyTorch's that call many functions: the folder that they live in, and what the user calls them."""


class TorchOpRecorder:
    """Record the operations of the code that runs inside of `recording`."""

    def __init__(self, leads: Callable[[Tensor], bool], model: Model, keeps: bool = False):
        self.ops: list[Op] = []
        self.hints: list[Hint] = []
        self.connected: set[int] = set()
        """The values from which gradients lead to a source."""
        self._nodes: dict[int, Any] = {}  # their graph nodes
        self.ids = ValueIds()
        self._leads = leads
        self._values = SavedValues(keeps)
        self._used: set[int] = set()  # values that an operation read, and that its gradient may need
        self._paths = {id(module): path for path, module in model.modules()}
        self._modules: list[Any] = []
        self._thread = threading.get_ident()
        self._exports: dict[int, Op] = {}
        self._shared: dict[int, tuple[Op, Tensor, Tensor]] = {}
        """By the address of a storage that NumPy shares: the export, the tensor and a copy of its numbers."""
        self._makers: dict[int, str] = {}  # the function that made a value
        self.overwrites: list[Overwrite] = []
        self.requests = GradientRequests()
        self.failure: Exception | None = None
        """The first error of the recorder itself, and not of the code."""
        self.stale: Op | None = None
        """The first operation that read a tensor with a graph from before."""
        self.any_tracked = False
        """True if any operation read a tensor that requires gradients."""
        self._root: int | None = None
        self._leaves: set[int] = set()
        self._checkpoints = 0  # reentrant ones around the running code
        self._block = ""  # the user's line that switched gradients off
        self.hidden_writes: list[HiddenWrite] = []
        self.hidden_before_gradient: list[HiddenWrite] = []
        """Those that there were when a gradient was computed last: what is written later cannot change it."""

    @contextmanager
    def recording(self) -> Iterator["TorchOpRecorder"]:
        """Record this thread."""
        with scope():
            leave = self._leave
            add_hook(_global_forward_pre_hooks, self._enter)
            add_hook(_global_forward_hooks_always_called, leave)
            add_hook(_global_forward_hooks, leave)
            subclass_patch.enter()
            enter_mode(_CallMode(self))
            push_recorder(self)
            yield self
            self._look_for_hidden_writes(self._shared)

    def _enter(self, module: Any, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if _is_scripted(module) and not any(map(_is_scripted, self._modules)):
            self._add_opaque("a scripted module", tensors_in(args))
        if not self._modules and id(unwrap(module)) not in self._paths:
            self._paths.update({id(inner): path for path, inner in TorchModel(module).modules()})
        self._modules.append(module)

    def _leave(self, module: Any, _: Any, __: Any) -> None:
        while threading.get_ident() == self._thread and self._modules and self._modules.pop() is not module:
            pass

    @property
    def module(self) -> str:
        """The path of the module that is running."""
        return next((self._paths[id(m)] for m in reversed(self._modules) if id(m) in self._paths), "")

    def id_of(self, x: Tensor) -> int:
        """Return the value id of a tensor; a new one may share its memory with a known one."""
        known = self.ids.get(x)
        if self._root is not None and self.requests.followed is None and x.is_leaf and x.requires_grad:
            return known if known is not None and known in self._leaves else self._leaf(x, self._root)
        if known is not None:
            return known
        aliases = self.ids.aliases(x)
        value_id = self.ids.assign(x)
        self._connect(x, value_id)
        self.any_tracked = self.any_tracked or x.requires_grad
        if aliases and not any(other.requires_grad and x._base is other for other in aliases):
            self._add_alias(x, value_id, aliases)
        return value_id

    def _leaf(self, x: Tensor, root: int) -> int:
        """Return the id of a leaf: it was there before, or the code made it and tracks it from now on."""
        self.any_tracked = True
        leaf = self.add_source(x)
        self._leaves.add(leaf)
        self.ops.append(Op("a leaf", inputs=(root,), outputs=(leaf,), hidden=True))
        return leaf

    def _add_alias(self, x: Tensor, value_id: int, aliases: Sequence[Tensor]) -> None:
        origin = max([known for other in aliases if (known := self.ids.get(other)) is not None], default=None)
        if origin is None:
            return
        exported = self._exports.get(storage_address(x))
        cause = None if value_id in self.connected else "left-framework" if exported else "detached"
        name = exported.operation if exported else type(x).__name__
        where = exported.where if exported else find_caller().where
        note = "it makes another tensor of the same numbers"
        op = TorchOp(name, where, self.module, (origin,), (value_id,), cause, note, can_rerun=False)
        shared = next(other for other in aliases if self.ids.get(other) == origin)
        self._save([shared, x])
        op.func, op.args = _share, ((x.detach(), Slot(0), Geometry.of(x), Geometry.of(shared)), {})
        op.returned = (0,)
        self.ops.append(op)

    def follow(self, x: Tensor | None) -> int:
        """Start derivatives at a tensor, or at all leaves that require gradients; return the id of the source."""
        self.requests.followed = x
        self._root = self.add_source(torch.empty(0) if x is None else x)
        return self._root

    def substitute(self, x: Any) -> Any:
        """Note that a tensor goes into a transform of `torch.func`, where it cannot be followed. It goes as it is."""
        self._add_opaque("torch.func", [x] if isinstance(x, Tensor) else [])
        return x

    def on_subclass(self, name: str, made: Tensor, kind: Any, data: Tensor, *_: Any, **__: Any) -> None:
        """Note that `made` takes over the memory of `data`."""
        if self.ids.get(data) is not None:
            self.id_of(made)  # while both are alive

    def on_pass(self, results: Sequence[Any], passed: Sequence[Any]) -> None:
        """Take tensors for those that were the results of a function: the user gets them in their place."""
        for x, made in zip(results, passed, strict=True):
            if made is not x:
                self.ids.assign(made, self.id_of(x))

    def _add_opaque(self, user_name: str, inputs: Sequence[Tensor]) -> None:
        if inputs:
            input_ids = tuple([self.id_of(x) for x in inputs])
            self.ops.append(Op(user_name, find_caller().where, self.module, input_ids, opaque=True))

    def add_source(self, x: Tensor, computed_from: Tensor | None = None) -> int:
        """Give an id to a source; one that is computed from another keeps its graph."""
        before = None if computed_from is None else self.id_of(computed_from)
        value_id = self.ids.assign(x)
        self.connected.add(value_id)
        if before is not None and computed_from is not None:
            op = TorchOp("clone", None, self.module, (before,), (value_id,), hidden=True, func=torch.clone)
            op.args, op.returned = ((Slot(0),), {}), (0,)
            self._nodes[value_id] = x.grad_fn
            self._save([computed_from, x])
            self.ops.append(op)
        return value_id

    def _connect(self, x: Tensor, value_id: int) -> None:
        """Note that gradients lead from a value to a source, if they do."""
        if self._leads(x):
            self.connected.add(value_id)
            self._nodes[value_id] = x.grad_fn

    def connected_to(self, source: int, path: Any) -> frozenset[int]:
        """Return the values from which gradients lead to one of the sources."""
        return frozenset([source, *[n for n, node in self._nodes.items() if path.node(node)]])

    def _save(self, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            self._values.save(self.ids.get(x), x)

    def recorded_ops(self) -> list[Op]:
        """Return the operations with their tensors, as they were when each ran."""
        for op in self.ops:
            op.operands, op.results = self._values.of(op.inputs), self._values.of(op.outputs)
            layouts = [x.layout == torch.strided and x.dtype in explain_rules.NUMPY_DTYPES for x in op.operands]
            op.can_rerun = op.can_rerun and all(layouts)
        return self.ops

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch's for the user, and record it."""
        name = name_of(func)
        if is_paused():
            return func(*args, **kwargs)
        if name == "_set_grad_enabled" and torch.is_grad_enabled() != args[0]:
            self._block = "" if args[0] else find_caller().where
        if name == "grad.__get__":
            return self.requests.read(func, args[0], self.module)
        if explain_rules.reads_no_values(name):
            return func(*args, **kwargs)
        if name in ("backward", "grad"):
            self._look_for_hidden_writes(self._shared)
            self.hidden_before_gradient = list(self.hidden_writes)
        if name == "backward":
            roots = tensors_in(args[0] if args else kwargs.get("tensors"))
            return self.requests.backward(func, args, kwargs, self.module, [self.id_of(x) for x in roots])
        if name == "grad":
            outputs = self.requests.note_grad(*args, **kwargs)
            result = self._run_op(func, name, explain_rules.user_name(func), args, kwargs)
            self.requests.note_result([self.id_of(y) for y in outputs], result)
            return result
        if name == "register_hook":
            self._note_hook(args[0])
            return func(*args, **kwargs)
        if explain_rules.leaves_framework(name):
            return self._run_export(func, name, args, kwargs)
        hidden = name == "clone" and sys._getframe(2).f_code is clone_unrecorded.__code__
        return self._run_op(func, name, explain_rules.user_name(func), args, kwargs, hidden=hidden)

    def run(self, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call an `autograd.Function`, which no mode sees, and record it."""
        kind = getattr(apply, "__self__", None)
        name = getattr(kind, "__name__", "Function")
        home = getattr(kind, "__module__", "")
        if name in TRANSPARENT:
            self._checkpoints += 1
            try:
                return apply(*args, **kwargs)
            finally:
                self._checkpoints -= 1
        if name == HOOK_FUNCTION:
            self.hints.append(Hint("hook", "", Op("a backward hook", None, self.module)))
        custom = not home.startswith(("torch.", "elementgrad."))
        return self._run_op(apply, name, name, args, kwargs, custom, not custom)

    def _run_op(
        self,
        func: Callable[..., Any],
        name: str,
        user_name: str,
        args: Any,
        kwargs: Any,
        custom: bool = False,
        hidden: bool = False,
    ) -> Any:
        """Call a function, and record it."""
        notes = self._record(func, name, user_name, args, kwargs, custom, hidden)
        with pause_recording():  # if the call came by a patch, the mode would record the recorder's own calls
            given = self._advance(notes)
            if given is not None:
                result = func(*given[0], **given[1])
                self._advance(notes, result)
                return result
        return func(*args, **kwargs)

    def _advance(self, notes: Generator[tuple[Any, Any], Any, None], result: Any = None) -> tuple[Any, Any] | None:
        """Go on with recording a call; None if that ends. An error is kept, and does not reach the user's code."""
        try:
            return notes.send(result)
        except StopIteration:
            return None
        except Exception as error:
            self.failure = self.failure or error
            return None

    def _record(
        self, func: Callable[..., Any], name: str, user_name: str, args: Any, kwargs: Any, custom: bool, hidden: bool
    ) -> Generator[tuple[Any, Any], Any, None]:
        """Look at the inputs of a call; then, sent its result, add the operation. End at once if there is none."""
        inputs = tensors_in((args, kwargs))
        if name in explain_rules.SHAPED_BY_OTHER:
            del inputs[1:]
        if (not inputs and name not in explain_rules.FROM_PYTHON) or any(map(is_functorch_wrapped_tensor, inputs)):
            return
        if name in explain_rules.COPYING:
            args = pytree.map_tree(args, detach)  # PyTorch warns of tracked ones, and the user's own may not be tracked
        shared = {storage_address(x) for x in inputs} & self._shared.keys() if self._shared else set()
        self._look_for_hidden_writes(shared)
        stale = any(x.grad_fn is not None and self.ids.get(x) is None for x in inputs)
        input_ids = tuple([self.id_of(x) for x in inputs])
        versions = [version_of(x) for x in inputs]
        writable = explain_rules.written_tensors(func, name, args, kwargs)
        nodes = self._grad_fns(inputs) if writable else {}
        self._save(inputs)
        self._save([other for x in writable for other in self.ids.aliases(x)])
        self._values.copy_before_write(writable)
        gap, random = explain_rules.recording_gap(), generators()
        # PyTorch does not report inference mode, so that its first operation stands for it.
        self._block = "" if gap is None else self._block or find_caller().where
        outputs = tensors_in((yield args, kwargs))
        writes = [n for n, (x, version) in enumerate(zip(inputs, versions, strict=True)) if version_of(x) != version]
        # Tensors that share memory count their writes together, and only some of them are what is written to.
        writes = [n for n in writes if any(inputs[n] is x for x in writable)] or writes
        if name == "data.__set__":
            writes = [0]
        written = [inputs[n] for n in writes]
        changed = list({id(x): x for x in (*outputs, *written)}.values())
        overwritten = [(x.shape, known) for x in written if (known := self.ids.get(x)) in self._used]
        new_ids = [self._output_id(x, inputs, written) for x in changed]
        aliases = [other for x in written for other in self.ids.aliases(x) if all(other is not y for y in changed)]
        overwritten += [(x.shape, known) for x in aliases if (known := self.ids.get(x)) in self._used]
        silent = self._is_silent_write(written, aliases, nodes)
        output_ids = tuple([value_id for value_id in new_ids if value_id is not None])
        by = find_caller()
        op = TorchOp(
            by.verb or user_name,
            by.where,
            self.module,
            input_ids,
            output_ids,
            custom_gradient=custom,
            from_python=not inputs,
            hidden=hidden,
            op_type=name,
            random=None if torch.equal(random[0], torch.default_generator.get_state()) else random,
            block=self._block,
        )

        def find_cut(inputs: Sequence[int], made: Sequence[Tensor]) -> Cut:
            lost = [x for x in made if self.ids.get(x) not in self.connected]
            if not lost or not any(n in self.connected for n in inputs):
                return None, ""
            cause, note = cause_of_cut(op, lost, explain_rules.NUMBERS, explain_rules.CUTS, gap)
            return by.cut_cause(cause), note

        made = [x for x, n in zip(changed, new_ids, strict=True) if n is not None]
        op.cut_cause, op.note = find_cut(input_ids, made)
        if op.cut_cause == "no-grad" and self._checkpoints:
            op.operation = "checkpoint"
        self._save(made)
        self._keep_call(op, func, args, kwargs, writes)
        op.returned = [index for index, n in enumerate(new_ids) if n is not None]
        position = len(self.ops)
        self.ops.append(op)
        for x in {id(x): x for x in aliases}.values():
            self._add_alias_write(op, x, written, find_cut)
        self._used.update(input_ids)
        if any(value_id in self.connected for value_id in output_ids):
            self._used.update(output_ids)  # the gradient of a function may need its outputs
        self._makers.update(dict.fromkeys(output_ids, op.operation.strip("_").lower()))
        self.overwrites += [
            Overwrite(op, tuple(shape), self._makers.get(known or 0, "")) for shape, known in overwritten
        ]
        self.stale = self.stale or (op if stale else None)
        if silent:
            ids = [known for _, known in overwritten]
            self._note_hidden_write(op, "autograd does not see that write", ids, position)
        for address in shared & self._shared.keys():  # the operation may have written there as well
            self._share(address, *self._shared[address][:2])
        if custom and any(value_id in self.connected for value_id in output_ids):
            self.hints.append(Hint("custom-rule", "", op))

    def _keep_call(self, op: TorchOp, func: Callable[..., Any], args: Any, kwargs: Any, writes: Sequence[int]) -> None:
        """Keep what it takes to run a call again."""
        flat = pytree.leaves_of((args, dict(kwargs)))
        slots = map(Slot, range(len(op.inputs)))
        op.func, op.writes, op.precision = func, writes, precision()
        op.args = pytree.map_tree((args, dict(kwargs)), lambda x: next(slots, x) if isinstance(x, Tensor) else x)
        op.kind = explain_rules.kind_of(explain_rules.user_name(func), args, kwargs) if "out" not in kwargs else None
        factors = (int, float) if op.kind == PRODUCT else (float,)
        op.scalars = [x for x in flat if type(x) in factors]
        op.can_rerun = op.op_type != "apply" and not op.custom_gradient and not any(map(callable, flat))

    def _add_alias_write(self, op: TorchOp, x: Tensor, written: Sequence[Tensor], find_cut: Any) -> None:
        """Record that a write changes another tensor, which shares the memory."""
        makers, before = [self.id_of(y) for y in written], self.id_of(x)
        value_id = self.ids.assign(x)
        self._connect(x, value_id)
        cause, note = find_cut((*op.inputs, *makers), [x])
        inputs = (*makers, before)
        alias = TorchOp(op.operation, op.where, op.module, inputs, (value_id,), cause, note, hidden=True)
        if alias.cut_cause is None and value_id not in self.connected and any(n in self.connected for n in inputs):
            alias.cut_cause = "assigned-state"
        self._save([x])
        geometries = Geometry.of(x), *map(Geometry.of, written)
        alias.func, alias.returned = _overlay_all, (0,)
        alias.args = (([Slot(n) for n in range(len(makers))], Slot(len(makers)), geometries), {})
        self.ops.append(alias)

    def _grad_fns(self, inputs: Sequence[Tensor]) -> dict[int, Any]:
        """Return the grad_fn of each tensor that a write may reach, by the tensor's `id()`."""
        reached = {id(y): y for x in inputs for y in (x, *self.ids.aliases(x))}
        return {key: x.grad_fn for key, x in reached.items() if x.grad_fn is not None}

    def _is_silent_write(self, written: Sequence[Tensor], aliases: Sequence[Tensor], nodes: Mapping[int, Any]) -> bool:
        """Return True if a write reaches a tensor that has a derivative, and autograd does not see it.

        Then the tensor still has the grad_fn from before: it was written to through `.data` or `detach()`, or inside of
        `no_grad`. For a leaf, only writes count that its version does not count: PyTorch refuses the others where a
        gradient needs the numbers from before.
        """
        if not written:
            return False
        used = [x for x in aliases if x.requires_grad and self.ids.get(x) in self._used]
        same = any(x.grad_fn is not None and x.grad_fn is nodes.get(id(x)) for x in (*written, *aliases))
        return same or not all(map(self.ids.has_counted_write, used))

    def _output_id(self, x: Tensor, inputs: Sequence[Tensor], written: Sequence[Tensor]) -> int | None:
        """Return a new id for an output; None for an input that is passed through unchanged."""
        if any(x is other for other in inputs) and all(x is not other for other in written):
            return None
        value_id = self.ids.assign(x)
        self._connect(x, value_id)
        return value_id

    def _run_export(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        inputs = tensors_in((args, kwargs))
        input_ids = tuple([self.id_of(x) for x in inputs])
        with pause_recording():
            result = func(*detach_all(args), **kwargs)
        op = Op(
            explain_rules.user_name(func),
            find_caller().where,
            self.module,
            input_ids,
            (),
            "left-framework",
            branches=name in explain_rules.BRANCHING,
        )
        self.ops.append(op)
        for x in inputs if name in ("numpy", "__array__", "__dlpack__") else ():
            address = storage_address(x)
            self._exports[address] = op
            if any(other.requires_grad for other in (x, *self.ids.aliases(x))):
                self._share(address, op, x)
        return result

    def on_import(self, name: str, made: Tensor, *_: Any, **__: Any) -> None:
        """Record a tensor made of numbers of NumPy, unless they are the memory of a tensor that is still there."""
        if storage_address(made) in self._exports and any(x is not made for x in self.ids.aliases(made)):
            return
        value_id = self.ids.assign(made)
        self.ops.append(
            TorchOp(name, find_caller().where, self.module, (), (value_id,), from_python=True, op_type=name)
        )

    def _share(self, address: int, op: Op, x: Tensor) -> None:
        with pause_recording():
            self._shared[address] = op, x.detach(), x.detach().clone()

    def _look_for_hidden_writes(self, addresses: Iterable[int]) -> None:
        """Compare numbers that NumPy shares with what they were: a write of NumPy's raises no version."""
        with pause_recording():
            for address in list(addresses):
                op, x, before = self._shared[address]
                if not is_same(x, before):
                    ids = [self.ids.get(other) for other in (x, *self.ids.aliases(x))]
                    self._note_hidden_write(op, "NumPy wrote to the same memory", ids, len(self.ops))
                    del self._shared[address]

    def _note_hidden_write(self, op: Op, evidence: str, overwritten: Iterable[int | None], position: int) -> None:
        hint = Hint("modified-through-data", evidence, op)
        self.hints.append(hint)
        self.hidden_writes.append(HiddenWrite(hint, frozenset(overwritten), position))

    def _note_hook(self, x: Tensor) -> None:
        if self._leads(x):
            self.hints.append(Hint("hook", "", Op("register_hook", find_caller().where, self.module)))


def _share(x: Tensor, shared: Tensor, at: Geometry, shared_at: Geometry) -> Tensor:
    return overlay(x, shared, at, shared_at)


def _overlay_all(written: Sequence[Tensor], view: Tensor, geometries: Sequence[Geometry]) -> Tensor:
    for each, at in zip(written, geometries[1:], strict=True):
        view = overlay(view, each, geometries[0], at)
    return view


class _CallMode(TorchFunctionMode):
    """Hand every call of a PyTorch function to a recorder."""

    def __init__(self, recorder: TorchOpRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.call(func, args, kwargs or {})


def _is_scripted(module: Any) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


class GradientRequests:
    """The gradients that the code asked for, and what became of them."""

    def __init__(self) -> None:
        self.followed: Tensor | None = None
        """The tensor whose .grad is followed, if one is."""
        self.gradient: Tensor | None = None
        self.differentiated = -1
        """The value whose backward gave it that gradient."""
        self.accumulated: Op | None = None
        """The backward call that added to a .grad that was there before."""
        self.backwards: list[Op] = []
        self.target: int | None = None
        """The value that backward was called on last."""
        self.sides: tuple[Sequence[Sequence[Tensor]], str] | None = None
        """Outputs and inputs of the last call of `torch.autograd.grad`, and where it was."""
        self.missing: tuple[Tensor, Op] | None = None
        """The non-leaf tensor whose .grad was read last and is None, and where."""

    def backward(self, func: Callable[..., Any], args: Any, kwargs: Any, path: str, roots: Sequence[int]) -> Any:
        """Call backward for the user, and note what it does to the followed .grad."""
        op = Op("backward", find_caller().where, path, tuple(roots))
        self.backwards.append(op)
        self.target = op.inputs[0] if op.inputs else None
        before = self._grad_of_followed()
        version, old = (None, None) if before is None else (before._version, before.clone())
        with pause_recording():
            result = func(*args, **kwargs)
            after = self._grad_of_followed()
            # Numbers may be the same, or NaN, after a gradient was added to them.
            if after is not None and (after is not before or after._version != version):
                self.gradient, self.differentiated = after.clone(), op.inputs[0] if op.inputs else -1
                if old is not None and bool(old.any()):
                    self.accumulated = op
        return result

    def _grad_of_followed(self) -> Tensor | None:
        x = self.followed
        return None if x is None or not (x.is_leaf or x.retains_grad) else x.grad

    def note_grad(self, outputs: Any = None, inputs: Any = None, *_: Any, **__: Any) -> Sequence[Tensor]:
        """Note a call of `torch.autograd.grad` before it runs; return its outputs."""
        tensors = [[x for x in pytree.leaves_of(side) if isinstance(x, Tensor)] for side in (outputs, inputs)]
        self.sides = tensors, find_caller().where
        return tensors[0]

    def note_result(self, outputs: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Note the gradients that it returned, if that of the followed tensor is one of them."""
        inputs = self.sides[0][1] if self.sides is not None else ()
        for x, g in zip(inputs, gradients, strict=False):
            if x is self.followed and outputs:
                self.target = self.differentiated = outputs[0]
                self.gradient = None if g is None else g.detach().clone()

    def read(self, func: Callable[..., Any], x: Tensor, path: str) -> Any:
        """Read the .grad of a tensor for the user."""
        if not x.requires_grad or x.is_leaf or x.retains_grad:
            return func(x)
        with safe_context(warnings.catch_warnings()):
            warnings.simplefilter("ignore")  # the diagnosis says that it is no leaf
            gradient = func(x)
        if gradient is None:
            self.missing = x, Op(".grad", find_caller().where, path)
        return gradient


@dataclass(frozen=True)
class Caller:
    """A line of the user's, and the verb that it calls if that is ours, or a composite one of PyTorch's."""

    where: str
    verb: str | None = None
    """As the user writes it: `eg.at(...).stop`, `eg.grad`, `sample`, `optimizer.step`."""

    def cut_cause(self, seen: str | None) -> str | None:
        """Return the cause by the verb, in place of the one that was seen for one operation inside of it."""
        if seen is None or self.verb is None:
            return seen
        if self.verb in ("eg.choose", "sample"):
            return "discrete"
        if self.verb.startswith("eg.at"):
            return "detached"
        return "inner-gradient" if self.verb.startswith("eg.") else seen


def find_caller() -> Caller:
    """Return the nearest caller outside of PyTorch and this library."""
    called = None
    for frame in frames_to_user(sys._getframe(1)):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        called = verb_of(frame.f_code) or (_composite_name(file, name) if name in COMPOSITE else None) or called
    return Caller(location_text(frame.f_code.co_filename, frame.f_lineno), called)


def _composite_name(file: str, name: str) -> str | None:
    folder, user_name = COMPOSITE[name]
    return user_name if os.path.join("torch", folder) + os.sep in file else None


def _install(replace: Replace) -> None:
    seen = _report_calls(torch.Tensor, MAKE_SUBCLASS, TorchOpRecorder.on_subclass)
    replace(torch.Tensor, MAKE_SUBCLASS, staticmethod(seen))
    for name in explain_rules.UNSEEN_IMPORTS:
        replace(torch, name, _report_calls(torch, name, TorchOpRecorder.on_import))


def _report_calls(owner: Any, name: str, report: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that makes tensors, and that no mode sees, with a report of each call to recorders."""
    original = getattr(owner, name)

    @wraps(original)
    def make_tensor(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        for watcher in active_recorders() if not is_paused() else ():
            if isinstance(watcher, TorchOpRecorder):
                report(watcher, name, made, *args, **kwargs)
        return made

    return make_tensor


subclass_patch = AttributePatch(_install)
"""While it is on, recorders see tensors that take over the memory of others, or the numbers of NumPy."""
