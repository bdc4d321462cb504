"""Recording eager PyTorch code: plain tensors get a place in the graph, and every write in place is noted."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.torch.autodiff import call_plainly
from elementgrad._backends.torch.isolate import enter_mode, enter_modes, restore_after_interrupt
from elementgrad._backends.torch.record import calls
from elementgrad._backends.torch.record.calls import aside, clock, watch, watchers, watching
from elementgrad._backends.torch.record.history import (
    Region,
    StorageHistory,
    TensorVersion,
    TrackedTensor,
    Write,
    edge_of,
)
from elementgrad._backends.torch.record.linearization import RecordedLinearization, split
from elementgrad._backends.torch.record.proxies import SavedTensors, WriteHistory, WriteMode, saving, storage
from elementgrad._cleanup import close_scopes_after, defer
from elementgrad._names import pytree
from elementgrad._read.recorder import ElementRequest, Recorder, UseFlow
from elementgrad.errors import FrameworkError, PlaceError

Tensor = torch.Tensor


class TorchRecorder(Recorder):
    """Watches a block of code from above, where functions are called, and from below, where memory is written to."""

    tracks: WriteHistory

    def __init__(self, tensors: Sequence[Tensor]):
        for x in tensors:
            if x.layout is not torch.strided or storage(x) is None:
                raise FrameworkError(f"elements of layout {x.layout} have no derivatives; give x.to_dense()")
        self._tensors = list(tensors)
        self.keeper = SavedTensors()
        self._made = calls.TensorSet()
        self._window = (0, sys.maxsize)
        self._depth = 0
        self._unseen = False

    def start(self) -> None:
        outer = watchers()
        defer(
            restore_after_interrupt()
        )  # code of ours that watches the user's enters modes by `with`, which can go wrong
        defer(self._close_window)
        enter_modes()
        call_plainly(True)
        self.keeper = outer[-1].keeper if outer else self.keeper  # what one saves, another may overwrite
        self._window = (clock(), sys.maxsize)
        self.tracks = WriteHistory()
        defer(self.tracks.close)
        with aside():
            self.tracks.lay(self._tensors, self._made, [recorder.tracks for recorder in outer])
        enter_mode(WriteMode(self.keeper, self))
        enter_mode(_RecordingMode(self))
        watch(self)

    def _close_window(self) -> None:
        if self._window[1] == sys.maxsize:
            self._window = (self._window[0], clock())

    def linear(self, of: Sequence[ElementRequest], wrt: Sequence[ElementRequest]) -> Linearization:
        with aside():
            self._require_seen()
            self.tracks.flush()
            found = [[(asked, self._find(asked)) for asked in side] for side in (of, wrt)]
            linear = RecordedLinearization(*found)
            for output in range(len(of)):
                linear.ways(output, range(len(wrt)))  # errors come before any work
            return linear

    def uses(self, of: ElementRequest, position: int, wrt: ElementRequest) -> list[UseFlow] | None:
        with aside():
            self._require_seen()
            self.tracks.flush()
            return split((of, self._find(of)), position, (wrt, self._find(wrt)))

    def _require_seen(self) -> None:
        if self._unseen:
            raise FrameworkError(
                "code that cannot be watched, such as TorchScript, computed with a recorded tensor, so that paths are "
                "missing; record one that requires gradients, as in x.requires_grad_()"
            )

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch's for the user, with stand-ins for the recorded tensors."""
        if not watching():
            return func(*args, **kwargs)
        name = calls.name_of(func)
        if name in calls.EXPORTS:
            with aside():
                return func(*[x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in args], **kwargs)
        if not calls.leaves_alone(name):
            return calls.single(self.run, func, name, args, kwargs)
        self._depth += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._depth -= 1
        if name in calls.COPIES:
            self._note_made(result, ())
        if name in calls.REQUIRES and args[0].requires_grad:
            self.tracks.adopt(args[0])
        self.tracks.flush()
        return result

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function with stand-ins, and note what it made and wrote."""
        start, originals, given = clock(), {}, (args, kwargs)
        self._depth += 1

        def stand_in(x: Any) -> Any:
            other = self.stand_in(x)
            if other is not x:
                originals[id(other)] = x
            return other

        try:
            if torch.is_grad_enabled():
                args, kwargs = pytree.map_tree(args, stand_in), pytree.map_tree(kwargs, stand_in)
            with saving(self.keeper):
                result = calls.with_out(func, args, kwargs)
        finally:
            self._depth -= 1
            self.tracks.flush()
        calls.note_lines(result, start)
        self._note_made(result, given)
        return pytree.map_tree(result, lambda x: originals.get(id(x), x)) if originals else result

    def stand_in(self, x: Any) -> Any:
        """What takes the place of an argument: a plain tensor that lies in recorded memory, unless it was cut off."""
        if not isinstance(x, Tensor) or (x.requires_grad and not x._is_view()) or not torch.is_grad_enabled():
            return x
        ground = self.tracks.ground(x)
        with aside():
            if ground is not None:
                return ground.stand_in(x, clock())
            return self.tracks.lend(x) if x.is_inference() else x

    def _note_made(self, result: Any, given: Any) -> None:
        """Note for each tensor without a place in the graph that it was made here, unless it was given."""
        plain = [x for x in pytree.leaves_of(result) if isinstance(x, Tensor) and x.grad_fn is None]
        known = {id(x) for x in pytree.leaves_of(given)} if plain else ()
        for x in plain:
            if id(x) not in known:
                self._made.add(x)

    def is_recorded(self, x: Any) -> bool:
        """Whether this is what stands for a recorded tensor."""
        return watching() and self.tracks.is_stand_in(x)

    def look(self, args: Any) -> None:
        """Note an operation that nobody called through us, and whose result lacks its path to a recorded tensor."""
        if self._depth or not watching() or not torch.is_grad_enabled():
            return
        for x in pytree.leaves_of(args):
            if isinstance(x, Tensor) and not x.requires_grad:
                ground = self.tracks.ground(x)
                self._unseen |= ground is not None and ground.stand is not None and not ground.stand.cut_off(x)

    def before_write(self, x: Tensor, key: int, write: Write) -> None:
        """Note a write that is about to happen."""
        if watching():
            self.tracks.before_write(x, key, write)

    def _find(self, asked: ElementRequest) -> TrackedTensor:
        """The track that a named tensor is part of."""
        x = asked.tensor
        if storage(x) is None:
            raise asked.outside()
        ground = self.tracks.ground(x)
        if ground is not None and x in self._made:
            raise PlaceError(
                f"the tensor of shape {tuple(x.shape)} was cut off in the block from the one that was recorded, as by "
                "detach(); name that one, or record this one in a block of its own"
            )
        own = x.requires_grad and x.is_leaf
        if ground is not None and not (own and all(x is not other for other in ground.originals)):
            found = TrackedTensor(ground, Region.of(x))
            if (ground.now.region.locate(found.addresses(asked.positions)) < 0).any():
                raise asked.outside()
            return found
        base = x._base if x._is_view() and x._base is not None else x
        number = base.grad_fn._sequence_nr() if base.grad_fn is not None else -1
        track = self.tracks.written(x)
        made = track is not None or base in self._made or x in self._made
        if not made and not self._window[0] <= number < self._window[1]:
            raise asked.outside()
        return TrackedTensor(
            track or StorageHistory(TensorVersion(edge_of(base), Region.of(base), -1, number)), Region.of(x)
        )


class _RecordingMode(TorchFunctionMode):
    """Sees every function of PyTorch's that is called."""

    def __init__(self, recorder: TorchRecorder):
        super().__init__()
        self._recorder = recorder

    @close_scopes_after
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.call(func, args, kwargs or {})
