"""The recorder of eager PyTorch code: swaps proxies in at function calls, and sees writes below autograd."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.torch._compat import PlainDispatchMode, sequence_number
from elementgrad._backends.torch.autodiff import disable_checkpointing
from elementgrad._backends.torch.isolate import enter_mode, enter_modes, restore_after_interrupt
from elementgrad._backends.torch.record import intercept
from elementgrad._backends.torch.record.history import (
    Region,
    StorageHistory,
    TensorVersion,
    TrackedTensor,
    Write,
    base_of,
    edge_of,
)
from elementgrad._backends.torch.record.intercept import (
    active_recorders,
    is_paused,
    pause_recording,
    push_recorder,
)
from elementgrad._backends.torch.record.linearization import RecordedLinearization, split_by_use
from elementgrad._backends.torch.record.writes import (
    SavedTensors,
    WriteHistory,
    describe_write,
    pack_saved_tensors,
    plain_storage_key,
    tensors_written_by,
)
from elementgrad._cleanup import close_scopes_after, defer
from elementgrad._names import pytree
from elementgrad._read.backend import ElementRequest, Recorder, UseFlow
from elementgrad.errors import FrameworkError, PlaceError

Tensor = torch.Tensor


class TorchRecorder(Recorder):
    """Records one block of eager code, by a mode for function calls and a mode for ops below autograd."""

    history: WriteHistory

    def __init__(self, tensors: Sequence[Tensor]):
        for x in tensors:
            if x.layout is not torch.strided or plain_storage_key(x) is None:
                raise FrameworkError(f"elements of layout {x.layout} have no derivatives; give x.to_dense()")
        self._tensors = list(tensors)
        self.saved = SavedTensors()
        self._detached = intercept.TensorSet()
        """Tensors that the block made without a place in the graph."""
        self._window = (0, sys.maxsize)
        """Sequence numbers of the block."""
        self._depth = 0
        """Number of intercepted functions that are running."""
        self._missed_path = False

    def start(self) -> None:
        outer = active_recorders()
        # The recorder's own code enters modes by `with`, which an interrupt may leave open.
        defer(restore_after_interrupt())
        defer(self._close_window)
        enter_modes()
        disable_checkpointing(True)
        self.saved = outer[-1].saved if outer else self.saved  # what one saves, another may overwrite
        self._window = (sequence_number(), sys.maxsize)
        self.history = WriteHistory()
        defer(self.history.close)
        with pause_recording():
            self.history.add_recorded(self._tensors, self._detached, [recorder.history for recorder in outer])
        enter_mode(_WriteMode(self))
        enter_mode(_RecordingMode(self))
        push_recorder(self)

    def _close_window(self) -> None:
        if self._window[1] == sys.maxsize:
            self._window = (self._window[0], sequence_number())

    def linear(self, of: Sequence[ElementRequest], wrt: Sequence[ElementRequest]) -> Linearization:
        with pause_recording():
            self._require_complete()
            self.history.flush()
            outputs, inputs = [[(request, self._find(request)) for request in side] for side in (of, wrt)]
            linear = RecordedLinearization(outputs, inputs)
            for output in range(len(of)):
                linear.paths(output, range(len(wrt)))  # so that errors come before any work
            return linear

    def uses(self, of: ElementRequest, position: int, wrt: ElementRequest) -> list[UseFlow] | None:
        with pause_recording():
            self._require_complete()
            self.history.flush()
            return split_by_use((of, self._find(of)), position, (wrt, self._find(wrt)))

    def _require_complete(self) -> None:
        if self._missed_path:
            raise FrameworkError(
                "code that cannot be watched, such as TorchScript, computed with a recorded tensor, so that paths are "
                "missing; record one that requires gradients, as in x.requires_grad_()"
            )

    def _find(self, request: ElementRequest) -> TrackedTensor:
        """Return the history that a named tensor is part of."""
        x = request.tensor
        if plain_storage_key(x) is None:
            raise request.outside_error()
        storage = self.history.recorded_storage(x)
        if storage is not None and x in self._detached:
            raise PlaceError(
                f"the tensor of shape {tuple(x.shape)} was cut off in the block from the one that was recorded, as by "
                "detach(); name that one, or record this one in its own block"
            )
        is_leaf = x.requires_grad and x.is_leaf
        if storage is not None and not (is_leaf and all(x is not original for original in storage.originals)):
            tracked = TrackedTensor(storage, Region.of(x))
            if (storage.latest.region.locate(tracked.addresses(request.positions)) < 0).any():
                raise request.outside_error()
            return tracked
        base = base_of(x)
        time = base.grad_fn._sequence_nr() if base.grad_fn is not None else -1
        history = self.history.other_history(x)
        is_inside = history is not None or base in self._detached or x in self._detached
        if not is_inside and not self._window[0] <= time < self._window[1]:
            raise request.outside_error()
        history = history or StorageHistory(TensorVersion(edge_of(base), Region.of(base), -1, time))
        return TrackedTensor(history, Region.of(x))

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch for the user, with proxies for the recorded tensors."""
        if is_paused():
            return func(*args, **kwargs)
        name = intercept.name_of(func)
        if name in intercept.EXPORTS:
            with pause_recording():
                return func(*[x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in args], **kwargs)
        if not intercept.takes_originals(name):
            return intercept.call_with_separate_views(self.run, func, name, args, kwargs)
        self._depth += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._depth -= 1
        if name in intercept.COPIES:
            self._note_detached(result, ())
        if name in intercept.ENABLE_GRAD and args[0].requires_grad:
            self.history.adopt(args[0])
        self.history.flush()
        return result

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function with proxies, and note what it made and wrote."""
        start, originals, users_arguments = sequence_number(), {}, (args, kwargs)
        self._depth += 1

        def substitute(x: Any) -> Any:
            proxy = self.substitute(x)
            if proxy is not x:
                originals[id(proxy)] = x
            return proxy

        try:
            if torch.is_grad_enabled():
                args, kwargs = pytree.map_tree(args, substitute), pytree.map_tree(kwargs, substitute)
            with pack_saved_tensors(self.saved):
                result = intercept.call_with_out(func, args, kwargs)
        finally:
            self._depth -= 1
            self.history.flush()
        intercept.label_nodes(result, start)
        self._note_detached(result, users_arguments)
        return pytree.map_tree(result, lambda x: originals.get(id(x), x)) if originals else result

    def substitute(self, x: Any) -> Any:
        """Return the proxy for a plain tensor in recorded memory that was not detached; else the argument itself."""
        if not isinstance(x, Tensor) or (x.requires_grad and not x._is_view()) or not torch.is_grad_enabled():
            return x
        storage = self.history.recorded_storage(x)
        with pause_recording():
            if storage is not None:
                return storage.substitute(x, sequence_number())
            return self.history.copy_inference(x) if x.is_inference() else x

    def _note_detached(self, result: Any, arguments: Any) -> None:
        plain = [x for x in pytree.leaves_of(result) if isinstance(x, Tensor) and x.grad_fn is None]
        known = {id(x) for x in pytree.leaves_of(arguments)} if plain else ()
        for x in plain:
            if id(x) not in known:
                self._detached.add(x)

    def check_op(self, args: Any) -> None:
        """Note that a path is missing if an op outside intercepted calls computes with recorded memory."""
        if self._depth or is_paused() or not torch.is_grad_enabled():
            return
        for x in pytree.leaves_of(args):
            if isinstance(x, Tensor) and not x.requires_grad:
                storage = self.history.recorded_storage(x)
                self._missed_path |= (
                    storage is not None and storage.proxy is not None and not storage.proxy.is_detached(x)
                )

    def before_write(self, x: Tensor, key: int, write: Write) -> None:
        """Copy what autograd saved of a storage that is about to change, and note the write."""
        self.saved.copy_before_write(key)
        if not is_paused():
            self.history.note_write(x, key, write)


class _RecordingMode(TorchFunctionMode):
    """Sees every call of a PyTorch function."""

    def __init__(self, recorder: TorchRecorder):
        super().__init__()
        self._recorder = recorder

    @close_scopes_after
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.call(func, args, kwargs or {})


class _WriteMode(PlainDispatchMode):
    """Sees every op below autograd; the op's schema says which arguments it writes to."""

    def __init__(self, recorder: TorchRecorder):
        super().__init__()
        self._recorder = recorder

    @close_scopes_after
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name not in ("aten::detach", "aten::alias"):  # these compute nothing
            self._recorder.check_op(args)
        for x, is_out in tensors_written_by(func, args, kwargs):
            key, name = plain_storage_key(x), func._schema.name.partition("::")[2]
            if key is None:
                continue
            if torch.Tag.inplace_view not in func.tags:
                self._recorder.before_write(x, key, describe_write(func, name, x, is_out, args, kwargs))
            elif not is_paused() and self._recorder.history.is_proxy(x):
                raise FrameworkError(
                    f"{name} gives a recorded tensor another shape or memory; use {name.rstrip('_')}, which makes a "
                    "new tensor"
                )
        return func(*args, **kwargs)
