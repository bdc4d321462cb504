"""Recording eager PyTorch code: plain tensors get a place in the graph, and every write in place is noted."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from elementgrad import tree
from elementgrad.backends.linear import Linear
from elementgrad.backends.recorder import Asked, Flow, Recorder
from elementgrad.backends.torch import calls
from elementgrad.backends.torch.calls import clock
from elementgrad.backends.torch.functions import watched_by, watchers
from elementgrad.backends.torch.recorded import RecordedLinear
from elementgrad.backends.torch.regions import Region, Write
from elementgrad.backends.torch.shadow import Ground
from elementgrad.backends.torch.shares import uses
from elementgrad.backends.torch.versions import Found, Track, Version, chain, edge_of, same
from elementgrad.backends.torch.writes import Keeper, Writes, storage, unpack
from elementgrad.errors import FrameworkError, PlaceError

Tensor = torch.Tensor


class TorchRecorder(Recorder):
    """Watches a block of code from above, where functions are called, and from below, where memory is written to."""

    def __init__(self, tensors: Sequence[Tensor]):
        for x in tensors:
            if x.layout is not torch.strided or storage(x) is None:
                raise FrameworkError(f"elements of layout {x.layout} have no derivatives; give x.to_dense()")
        self._tensors = list(tensors)
        self._keeper = Keeper()
        self._grounds: dict[int, Ground] = {}
        self._tracks: dict[int, tuple[Track, Any]] = {}
        self._pending: list[tuple[Track, Tensor, Write]] = []
        self._made = calls.Made()
        self._lent: list[tuple[Tensor, Tensor]] = []
        self._writes = 0
        self._limit = 64
        self._window = (0, sys.maxsize)
        self._apart = 0
        self._depth = 0
        self._unseen = False
        self._stack = ExitStack()

    @property
    def copies(self) -> int:
        """How many saved tensors had to be copied, since their memory was written to."""
        return self._keeper.copies

    def start(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(calls.plainly())
            outer = watchers()
            self._keeper = outer[-1]._keeper if outer else self._keeper  # what one saves, another may overwrite
            self._window = (clock(), sys.maxsize)
            together: dict[Any, list[Tensor]] = {}
            for x in self._tensors:
                together.setdefault(storage(x), []).append(x)
            for key, tensors in together.items():
                ground = Ground(tensors, clock())
                self._grounds[key] = self._grounds[storage(ground.tensor) or key] = ground
            stack.enter_context(Writes(self._keeper, self))
            stack.enter_context(_Calls(self))
            stack.enter_context(watched_by(self))
            self._stack = stack.pop_all()

    def stop(self) -> None:
        try:
            self._stack.close()
        finally:
            self._flush()
            self._window = (self._window[0], clock())

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While we work ourselves, nothing is recorded."""
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1

    @property
    def watching(self) -> bool:
        """Whether calls and writes are the user's."""
        return not self._apart

    def linear(self, of: Sequence[Asked], wrt: Sequence[Asked]) -> Linear:
        with self.aside():
            self._require_seen()
            self._flush()
            found = [[(asked, self._find(asked)) for asked in side] for side in (of, wrt)]
            linear = RecordedLinear(self, *found)
            for output in range(len(of)):
                linear.ways(output, range(len(wrt)))  # errors come before any work
            return linear

    def uses(self, of: Asked, position: int, wrt: Asked) -> list[Flow] | None:
        with self.aside():
            self._require_seen()
            self._flush()
            return uses((of, self._find(of)), position, (wrt, self._find(wrt)))

    def _require_seen(self) -> None:
        if self._unseen:
            raise FrameworkError(
                "code that cannot be watched, such as TorchScript, computed with a recorded tensor, so that paths are "
                "missing; record one that requires gradients, as in x.requires_grad_()"
            )

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch's for the user, with stand-ins for the recorded tensors."""
        if not self.watching:
            return func(*args, **kwargs)
        name = calls.name_of(func)
        if name in calls.EXPORTS:
            with self.aside():
                return func(*[x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in args], **kwargs)
        if calls.leaves_alone(func, name):
            self._depth += 1
            try:
                result = func(*args, **kwargs)
            finally:
                self._depth -= 1
            self._after_leaving_alone(name, args)
            return self._noted(result) if name in calls.COPIES else result
        return calls.single(self.run, func, name, args, kwargs)

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
                args, kwargs = tree.mapped(args, stand_in), tree.mapped(kwargs, stand_in)
            with calls.saving(self._keeper.pack, unpack):
                result = calls.with_out(func, args, kwargs)
        finally:
            self._depth -= 1
            self._flush()
        calls.note_lines(result, start)
        self._noted(result, given)
        if not originals:
            return result
        return tree.mapped(result, lambda x: originals.get(id(x), x))

    def stand_in(self, x: Any) -> Any:
        """What takes the place of an argument: a plain tensor that lies in recorded memory, unless it was cut off."""
        if not isinstance(x, Tensor) or x.requires_grad or not torch.is_grad_enabled():
            return x
        ground = self._grounds.get(storage(x) or 0)
        if ground is None:
            return self._lend(x) if x.is_inference() else x
        if not ground.shadow or x in self._made:
            return x
        if x.dtype != ground.dtype:
            return _refuse_dtype(x, ground) if x.is_floating_point() or x.is_complex() else x
        with self.aside():
            return ground.view(x, clock())

    def _lend(self, x: Tensor) -> Tensor:
        """A copy of an inference tensor, which could not be saved for a derivative."""
        copy = x.clone()
        self._lent.append((x, copy))
        return copy

    def _after_leaving_alone(self, name: str, args: Any) -> None:
        if name in ("requires_grad_", "requires_grad.__set__") and args[0].requires_grad:
            ground = self._grounds.get(storage(args[0]) or 0)
            if ground is not None and ground.shadow and any(x is args[0] for x in ground.originals):
                self._writes += 1
                ground.adopt(args[0], self._writes, clock())
        self._flush()

    def _noted(self, result: Any, given: Any = ()) -> Any:
        """Note for each tensor without a place in the graph that it was made here, unless it was given."""
        plain = [x for x in tree.flat(result) if isinstance(x, Tensor) and x.grad_fn is None]
        known = {id(x) for x in tree.flat(given)} if plain else ()
        for x in plain:
            if id(x) not in known:
                self._made.add(x)
        return result

    def is_recorded(self, x: Any) -> bool:
        """Whether this is what stands for a recorded tensor."""
        return self.watching and any(x is ground.tensor for ground in self._grounds.values() if ground.shadow)

    def look(self, args: Any) -> None:
        """Note an operation that nobody called through us, and whose result lacks its path to a recorded tensor."""
        if self._depth or not self.watching or not torch.is_grad_enabled():
            return
        for x in tree.flat(args):
            if isinstance(x, Tensor) and not x.requires_grad and x not in self._made:
                ground = self._grounds.get(storage(x) or 0)
                self._unseen |= ground is not None and ground.shadow

    def before_write(self, x: Tensor, key: int, write: Write) -> None:
        """Below autograd, and before it knows: the graph still leads to what the tensor was."""
        if not self.watching:
            return
        base = x._base if x._is_view() and x._base is not None else x
        track: Track | None = self._grounds.get(key)
        if track is None:
            known = self._tracks.get(key)
            track = known[0] if known else self._begin(key, base)
        self._pending.append((track, base, write))

    def _begin(self, key: int, base: Tensor) -> Track:
        if len(self._tracks) >= self._limit:
            self._tracks = {k: kept for k, kept in self._tracks.items() if not kept[1].expired()}
            self._limit = max(64, 2 * len(self._tracks))
        made = base.grad_fn._sequence_nr() if base.grad_fn is not None else -1
        # Below autograd a leaf does not say where its derivative arrives; what it says afterwards is the same.
        edge = GradientEdge(base.grad_fn, base.output_nr) if base.grad_fn is not None else None
        track = Track(Version(edge, Region.of(base), -1, made))
        self._tracks[key] = track, StorageWeakRef(base.untyped_storage())
        return track

    def _flush(self) -> None:
        """Note the versions that the last function made, now that autograd knows of them."""
        lent, self._lent = self._lent, []
        pending, self._pending = self._pending, []
        if not pending and not lent:
            return
        with self.aside():
            for x, copy in lent:
                if copy._version:
                    with torch.inference_mode():
                        x.copy_(copy.detach())
            for track in dict.fromkeys(track for track, _, _ in pending):
                writes = [(base, write) for other, base, write in pending if other is track]
                self._note_versions(track, writes)

    def _note_versions(self, track: Track, writes: Sequence[tuple[Tensor, Write]]) -> None:
        tensor = writes[-1][0]
        if track.now.edge is None and tensor.is_leaf:
            track.versions[0] = replace(track.versions[0], edge=edge_of(tensor))
        before = track.now.edge
        if isinstance(track, Ground):
            if track.shadow and same(edge_of(track.tensor), before):
                track.cut([write for _, write in writes])
            if track.inference:
                track.give_back()
            tensor = track.tensor
        edge, time = edge_of(tensor), clock()
        if edge is not None:
            calls.note_line(edge.node, self._window[0], None)
        nodes = chain(edge, before)
        for _, write in writes:
            self._writes += 1
            track.versions.append(Version(edge, Region.of(tensor), self._writes, time, write, nodes))

    def _find(self, asked: Asked) -> Found:
        """The track that a named tensor is part of."""
        x = asked.tensor
        key = storage(x)
        if key is None:
            raise asked.outside()
        ground = self._grounds.get(key)
        own = x.requires_grad and x.is_leaf
        if ground is not None and not (own and all(x is not other for other in ground.originals)):
            found = Found(ground, Region.of(x))
            if (ground.now.region.locate(found.addresses(asked.positions)) < 0).any():
                raise asked.outside()
            return found
        base = x._base if x._is_view() and x._base is not None else x
        number = base.grad_fn._sequence_nr() if base.grad_fn is not None else -1
        track = self._tracks[key][0] if key in self._tracks else None
        made = track is not None or base in self._made or x in self._made
        if not made and not self._window[0] <= number < self._window[1]:
            raise asked.outside()
        return Found(track or Track(Version(edge_of(base), Region.of(base), -1, number)), Region.of(x))


def _refuse_dtype(x: Tensor, ground: Ground) -> NoReturn:
    raise PlaceError(  # which operators do not take for their own error, as they would a TypeError
        f"a view of dtype {x.dtype} of a recorded tensor of dtype {ground.dtype} was made outside the block; make it "
        "inside"
    )


class _Calls(TorchFunctionMode):
    """Sees every function of PyTorch's that is called."""

    def __init__(self, recorder: TorchRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.call(func, args, kwargs or {})
