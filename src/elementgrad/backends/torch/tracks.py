"""What a recording saw written to: the versions of each piece of memory, noted as the writes happen."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef

from elementgrad.backends.torch.calls import Made, clock, note_line
from elementgrad.backends.torch.functions import aside
from elementgrad.backends.torch.regions import Region, Write
from elementgrad.backends.torch.shadow import Ground
from elementgrad.backends.torch.versions import Track, Version, chain, edge_of
from elementgrad.backends.torch.writes import storage

Tensor = torch.Tensor


class Tracks:
    """The grounds of the recorded tensors, and a track for all other memory that is written to."""

    def __init__(self) -> None:
        self._start = clock()
        self._thread = threading.get_ident()
        self._grounds: dict[int, Ground] = {}
        self._tracks: dict[int, tuple[Track, Any]] = {}
        self._limit = 64
        self._pending: list[tuple[Track, Tensor, Write]] = []
        self._lent: list[tuple[Tensor, Tensor]] = []
        self._writes = 0
        self._open = True

    def lay(self, tensors: Sequence[Tensor], made: Made, outer: Sequence["Tracks"]) -> None:
        """Lay the grounds of the recorded tensors, on those of recordings around this one where these have some."""
        together: dict[Any, list[Tensor]] = {}
        for x in tensors:
            together.setdefault(storage(x), []).append(x)
        for key, group in together.items():
            around = [tracks._grounds[key].stand for tracks in outer if key in tracks._grounds]
            ground = Ground(group, clock(), made, next((stand for stand in reversed(around) if stand), None))
            self._grounds[key] = self._grounds[storage(ground.tensor) or key] = ground

    def close(self) -> None:
        """Note the last writes. None come afterwards."""
        self._open = False
        self.flush()
        for ground in self._grounds.values():
            ground.leave()

    def ground(self, x: Tensor) -> Ground | None:
        """That of the memory in which a tensor lies, if any of it is recorded."""
        return self._grounds.get(storage(x) or 0)

    def is_stand_in(self, x: Any) -> bool:
        """Whether this is what stands for a recorded tensor."""
        return any(x is ground.tensor for ground in self._grounds.values() if ground.stand)

    def written(self, x: Tensor) -> Track | None:
        """The track of the memory in which a tensor lies, if it was written to and none of it is recorded."""
        known = self._tracks.get(storage(x) or 0)
        return known[0] if known else None

    def lend(self, x: Tensor) -> Tensor:
        """A copy of an inference tensor, which could not be saved for a derivative."""
        copy = x.clone()
        self._lent.append((x, copy))
        return copy

    def adopt(self, x: Tensor) -> None:
        """Go on with the user's own tensor if it is a recorded one that requires gradients by now."""
        ground = self.ground(x)
        if ground is not None and ground.stand and any(x is other for other in ground.originals):
            self._writes += 1
            ground.adopt(x, self._writes, clock())

    def before_write(self, x: Tensor, key: int, write: Write) -> None:
        """Below autograd, and before it knows: the graph still leads to what the tensor was."""
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

    def flush(self) -> None:
        """Note the versions that the last function made, now that autograd knows of them.

        Somebody who asks from another thread does not know whether it is done with its writes.
        """
        if self._open and threading.get_ident() != self._thread:
            return
        lent, self._lent = self._lent, []
        pending, self._pending = self._pending, []
        if not pending and not lent:
            return
        with aside():
            for x, copy in lent:
                if copy._version:
                    with torch.inference_mode():
                        x.copy_(copy.detach())
            for track in dict.fromkeys(track for track, _, _ in pending):
                self._note(track, [(base, write) for other, base, write in pending if other is track])

    def _note(self, track: Track, writes: Sequence[tuple[Tensor, Write]]) -> None:
        tensor = writes[-1][0]
        if track.now.edge is None and tensor.is_leaf:
            track.versions[0] = replace(track.versions[0], edge=edge_of(tensor))
        before = track.now.edge
        if isinstance(track, Ground):
            track.settle([write for _, write in writes])
            tensor = track.tensor
        edge, time = edge_of(tensor), clock()
        if edge is not None:
            note_line(edge.node, self._start, None)
        nodes = chain(edge, before)
        for _, write in writes:
            self._writes += 1
            track.versions.append(Version(edge, Region.of(tensor), self._writes, time, write, nodes))
