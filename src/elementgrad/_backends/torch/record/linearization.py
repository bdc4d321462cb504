"""Reverse sweeps through the graph that a recording saw: from elements as they were last written to earlier ones.

A derivative split over the uses of its source: what flows back through each argument slot that the source feeds.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch.autograd.graph import GradientEdge

from elementgrad._backends.autodiff import Linearization, Use
from elementgrad._backends.torch.autodiff import Sweep, TorchLinearization, largest
from elementgrad._backends.torch.isolate import isolated, plainly, removed_later
from elementgrad._backends.torch.record.calls import WHERE, aside
from elementgrad._backends.torch.record.history import Region, TensorVersion, TrackedTensor, named, same
from elementgrad._read.recorder import ElementRequest, UseFlow
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
GONE = {
    "modified by an inplace operation": "a tensor that this derivative needs was saved before the recording and "
    "changed in place since; record from before it was made",
    "backward through the graph a second time": "backward() freed the graph that this derivative needs; call it with "
    "retain_graph=True, or record again",
}
BACKWARDS = "a recording has no function to run again"


@dataclass(frozen=True)
class ElementPick:
    """From the derivative that arrives at an edge to that of some elements of a tensor."""

    edge: GradientEdge
    elements: Tensor | None
    """Positions in the tensor that was asked about; None for all, as they arrive."""
    arrive: Tensor | None


@dataclass(frozen=True)
class VersionPath:
    """Target elements that share a version, and for each input the versions of its elements that came before them."""

    edge: GradientEdge
    region: Region
    """What a seed for the edge looks like."""
    elements: Tensor | None
    """The target elements, by their position in the tensor asked about; None for all."""
    lands: Tensor | None
    """Where they are in the seed; None if it has the shape of the tensor asked about."""
    picks: Sequence[Sequence[ElementPick]]


class RecordedLinearization(TorchLinearization):
    """A graph with its outputs and inputs, each made of one or several versions of a tensor."""

    gone = GONE

    def __init__(
        self, of: Sequence[tuple[ElementRequest, TrackedTensor]], wrt: Sequence[tuple[ElementRequest, TrackedTensor]]
    ):
        Linearization.__init__(self)
        self._of, self._wrt = of, wrt
        self.outputs = [asked.tensor.detach() for asked, _ in of]
        self.inputs = [asked.tensor.detach() for asked, _ in wrt]
        self._create_graph = False
        self._attention = True  # which is evaluated again elsewhere, and cannot be here
        self._alone = {}
        self._ways: dict[Any, list[VersionPath]] = {}
        for output in range(len(of)):
            self.without[output]["forward"] = BACKWARDS

    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        with aside():
            return super().vjp(output, inputs, seeds)

    def gradient(self, output: int, seed: Tensor) -> "TorchLinearization":
        raise FrameworkError("a recording has first derivatives alone; use eg.hessian with a function")

    def pattern(self, output: int, input: int, local: bool) -> NoReturn:
        raise FrameworkError(
            "what was recorded is not run again, so which entries can be nonzero is not found; use eg.jacobian with a "
            "function"
        )

    def value(self, output: int) -> Tensor:
        return self.outputs[output].clone()

    def work(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        sizes = [0]
        for way in self.ways(source, targets):
            ends = {pick.edge.node for picks in way.picks for pick in picks}
            sizes.append(largest(way.edge.node, ends))
        return max(sizes)

    def _starts(self, output: int, inputs: Sequence[int]) -> Sequence[Any]:
        return [way.edge.node for way in self.ways(output, inputs)]

    def _sweep(self, output: int, inputs: Sequence[int]) -> Sweep | None:
        ways = self.ways(output, inputs)
        if not ways:
            return None
        likes = [self.inputs[i] for i in inputs]

        def sweep(seed: Tensor) -> list[Tensor | None]:
            total: list[Tensor | None] = [None] * len(likes)
            for way in ways:
                for i, part in enumerate(_swept(way, seed, likes)):
                    before = total[i]
                    total[i] = part if before is None else before if part is None else before + part
            return total

        return sweep

    def ways(self, output: int, inputs: Sequence[int]) -> list[VersionPath]:
        """How to sweep from an output to some inputs: one way where no writes set its elements apart."""
        key = output, *inputs
        if key not in self._ways:
            self._ways[key] = list(self._find_ways(*self._of[output], [self._wrt[i] for i in inputs]))
        return self._ways[key]

    def _find_ways(
        self, asked: ElementRequest, found: TrackedTensor, wrt: Sequence[tuple[ElementRequest, TrackedTensor]]
    ) -> Any:
        positions = asked.positions.reshape(-1)
        written = any(len(source.track.versions) > 1 for _, source in wrt)
        numbers = found.versions(positions, asked.write) if written or asked.write is not None else None
        last = len(found.track.versions) - 1
        ends = np.full(positions.shape, last) if numbers is None or asked.write is None else numbers
        counts = [np.ones(positions.shape, np.int64) for _ in wrt]
        if numbers is not None and written:
            counts = [source.track.before(found.track, numbers) for _, source in wrt]
        groups, member = _grouped([ends, *counts])
        for group in range(groups.shape[1]):
            version = found.track.versions[groups[0, group]]
            if version.edge is None:
                continue
            elements = positions[member == group] if groups.shape[1] > 1 else positions
            device = asked.tensor.device
            lands = None
            if version.region != found.region:
                lands = _index(version.region.locate(found.addresses(elements)), device)
            whole = lands is None and groups.shape[1] == 1
            picks = [
                _picks(one, source, int(count), asked.tensor)
                for (one, source), count in zip(wrt, groups[1:, group], strict=True)
            ]
            yield VersionPath(version.edge, version.region, None if whole else _index(elements, device), lands, picks)


def _grouped(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The distinct columns, and for each column which of them it is. Sorting numbers is faster than sorting columns."""
    member = np.zeros(rows[0].shape, np.int64)
    first = member[:1]
    for row in rows:
        _, there = np.unique(row, return_inverse=True)
        _, first, member = np.unique(member * (len(row) + 1) + there, return_index=True, return_inverse=True)
    return np.stack(rows)[:, first], member.reshape(-1)


def _picks(asked: ElementRequest, found: TrackedTensor, count: int, like: Tensor) -> list[ElementPick]:
    """Where the derivatives of a source's elements arrive: each at its own version."""
    positions = asked.positions.reshape(-1)
    numbers = found.versions(positions, asked.write, count)
    chosen = np.unique(numbers)
    picks = []
    for number in chosen:
        version: TensorVersion = found.track.versions[number]
        if version.edge is None:
            continue
        if len(chosen) == 1 and version.region == found.region:
            return [ElementPick(version.edge, None, None)]
        elements = positions[numbers == number]
        arrive = version.region.locate(found.addresses(elements))
        device = asked.tensor.device
        picks.append(ElementPick(version.edge, _index(elements, device), _index(arrive, device)))
    return picks


def _swept(way: VersionPath, seed: Tensor, likes: Sequence[Tensor]) -> list[Tensor | None]:
    if way.elements is not None:
        values = seed.reshape(-1)[way.elements]
        lands, shape = (way.elements, seed.shape) if way.lands is None else (way.lands, way.region.size)
        seed = seed.new_zeros(int(np.prod(shape))).index_put((lands,), values, accumulate=True).reshape(shape)
    edges: list[GradientEdge] = []
    numbers: dict[tuple[Any, int], int] = {}
    for picks in way.picks:
        for pick in picks:
            key = pick.edge.node, pick.edge.output_nr
            if key not in numbers:
                numbers[key] = len(edges)
                edges.append(pick.edge)
    if not edges:
        return [None] * len(likes)
    arrived = torch.autograd.grad([way.edge], edges, [seed], retain_graph=True, allow_unused=True)
    parts: list[Tensor | None] = []
    for picks, like in zip(way.picks, likes, strict=True):
        part = None
        for pick in picks:
            derivative = arrived[numbers[pick.edge.node, pick.edge.output_nr]]
            if derivative is None:
                continue
            if pick.elements is None or pick.arrive is None:
                part = derivative
                continue
            room = like.new_zeros(like.numel()) if part is None else part.reshape(-1)
            part = room.index_put((pick.elements,), derivative.reshape(-1)[pick.arrive])
        parts.append(None if part is None else part.reshape(like.shape))
    return parts


def _index(positions: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(positions, np.int64).reshape(-1)).to(device)


Slot = tuple[Any, int, int, Tensor]
"""A node, one of its slots, the number of the source that feeds it, and the derivative that flows back there."""

RETURN = Use("return", None)
"""Where the target is the source itself."""


def feeds(output: GradientEdge, sources: Sequence[GradientEdge]) -> dict[Any, list[tuple[int, int]]]:
    """For each node before an output that takes some of the sources, its slots and the number of the source in each."""
    found: dict[Any, list[tuple[int, int]]] = {}
    ends = {(source.node, source.output_nr): number for number, source in enumerate(sources)}
    seen, ahead = {output.node}, [output.node]
    while ahead:
        node = ahead.pop()
        for slot, following in enumerate(node.next_functions):
            if following in ends:
                found.setdefault(node, []).append((slot, ends[following]))
            if following[0] is not None and following[0] not in seen:
                seen.add(following[0])
                ahead.append(following[0])
    return found


def flows(output: GradientEdge, seed: Tensor, sources: Sequence[GradientEdge]) -> list[Slot]:
    """What flows back from an output to each of some sources, by the slots that take it, in order of computation.

    One sweep. The sum over the slots of a source is its derivative, of which the seed is a part where the output is
    the source itself. A slot that the sweep does not reach is left out.
    """
    taken = feeds(output, sources)
    found: list[Slot] = []

    def note(node: Any, inward: Sequence[Tensor | None], _: Any) -> None:
        for slot, source in taken[node]:
            derivative = inward[slot]
            if derivative is not None:
                found.append((node, slot, source, _fitted(derivative, sources[source])))

    with isolated(None), plainly():
        handles = removed_later()
        for node in taken:
            handles.extend(map(node.register_hook, [partial(note, node)]))
        arrived = torch.autograd.grad([output], list(sources), [seed], retain_graph=True, allow_unused=True)
        for number, source in enumerate(sources):
            parts = [derivative for _, _, other, derivative in found if other == number]
            parts += [seed] if same(output, source) else []
            whole = arrived[number]
            if whole is not None and parts:
                _require_sum(parts, _fitted(whole, source))
    return sorted(found, key=lambda flow: (flow[0]._sequence_nr(), flow[1]))


def _require_sum(parts: Sequence[Tensor], whole: Tensor) -> None:
    """What flowed through the slots of a source is what arrived there, but for rounding."""
    total, size = sum(parts[1:], parts[0]), sum([part.abs() for part in parts[1:]], parts[0].abs())
    near = (total - whole).abs() <= 4 * len(parts) * torch.finfo(whole.dtype).eps * size
    finite = total.isfinite()
    if not ((total == whole) | torch.where(finite, near, ~whole.isfinite())).all():
        raise FrameworkError(
            "a hook on the tensor changes its derivative, of which there are no shares then; remove the hook, or ask "
            "for the gradient"
        )


def _fitted(derivative: Tensor, source: GradientEdge) -> Tensor:
    """In the shape and dtype of the source, which has strides."""
    derivative = derivative if derivative.layout is torch.strided else derivative.to_dense()
    made = source.node._input_metadata[source.output_nr]  # type: ignore[attr-defined]
    return derivative.sum_to_size(tuple(made.shape)).to(made.dtype).clone()


def split(
    of: tuple[ElementRequest, TrackedTensor], position: int, wrt: tuple[ElementRequest, TrackedTensor]
) -> list[UseFlow] | None:
    """The derivative of one element with respect to others, by their uses; None if no path leads there.

    An element of a tensor that is written to in place elsewhere lives on in later versions: their slots are uses too,
    up to the next write of the element. What only carries it on from version to version is none.
    """
    (asked, target), (named_source, source) = of, wrt
    where = np.array([position])
    (number,) = target.versions(where, asked.write)
    last = int(number) if asked.write is not None else len(target.track.versions) - 1
    end = target.track.versions[last]
    (count,) = source.track.before(target.track, np.array([number]))
    elements = named_source.positions.reshape(-1)
    if not elements.size:
        return []
    addresses, itemsize = source.addresses(elements), source.region.itemsize
    starts = source.versions(elements, named_source.write, int(count))
    stops = source.track.after(starts, addresses, itemsize)
    versions = source.track.versions
    alive = [n for n in range(int(starts.min()), int(stops.max())) if versions[n].edge is not None]
    edges = [n for i, n in enumerate(alive) if i == 0 or not same(versions[n].edge, versions[alive[i - 1]].edge)]
    if end.edge is None or not edges:
        return None
    seed = _seed(end, target, position, asked.tensor)
    shares: list[UseFlow] = []
    sources: Any = [versions[n].edge for n in edges]
    swept = flows(end.edge, seed, sources)
    if source.track is target.track and last in range(int(starts.min()), int(stops.max())):
        here = (addresses == target.addresses(where)[0]) & (starts <= last) & (last < stops)
        if here.any():
            value = torch.from_numpy(here).to(seed.device, seed.dtype)
            value = value.reshape(named_source.positions.shape)
            shares.append(UseFlow(RETURN, value, (sys.maxsize, 0)))
    reached = bool(swept) or any(same(end.edge, edge) for edge in sources)
    for node, slot, number, derivative in swept:
        taken = _taken(derivative, versions, edges[number], node, slot, (addresses, itemsize, starts, stops))
        if taken is not None:
            operation = named(node, _write_of(node, versions))
            taken = taken.reshape(named_source.positions.shape)
            use = Use(operation, node.metadata.get(WHERE))
            shares.append(UseFlow(use, taken, (node._sequence_nr(), slot)))
    return shares if reached else None


def _seed(end: TensorVersion, target: TrackedTensor, position: int, like: Tensor) -> Tensor:
    (lands,) = end.region.locate(target.addresses(np.array([position])))
    seed = torch.zeros(end.region.size, dtype=like.dtype, device=like.device)
    seed.view(-1)[int(lands)] = 1
    return seed


def _taken(
    derivative: Tensor, versions: Sequence[TensorVersion], number: int, node: Any, slot: int, elements: Any
) -> Tensor | None:
    """Of what flows into a version the part for the named elements that live in it; None if that is no use of any."""
    addresses, itemsize, starts, stops = elements
    group = [n for n in range(number, len(versions)) if same(versions[n].edge, versions[number].edge)]
    counted = (starts <= group[-1]) & (group[0] < stops)
    following = [version for version in versions[group[-1] + 1 :] if node in version.chain]
    if slot == 0 and following:  # it makes a later version: a use for what it computes from the old values alone
        used = np.zeros(counted.shape, bool)
        for version in following:
            if version.write is not None and not version.write.overwrites:
                used |= version.write.hits(addresses, itemsize)
        counted &= used
    arrive = versions[number].region.locate(addresses)
    counted &= _handed_on(node, versions[number].region.size)[np.maximum(arrive, 0)]
    if not counted.any():
        return None
    value = derivative.reshape(-1)[torch.from_numpy(np.maximum(arrive, 0)).to(derivative.device)]
    return torch.where(torch.from_numpy(counted).to(value.device), value, torch.zeros_like(value))


def _handed_on(node: Any, size: tuple[int, ...]) -> np.ndarray:
    """Which elements of its argument an operation looks at, as far as it is one that picks some of them."""
    marks = torch.zeros(size, dtype=torch.bool)
    name = node.name()
    if name.startswith("SelectBackward"):
        marks.select(node._saved_dim, _signed(node._saved_index)).fill_(True)
    elif name.startswith("SliceBackward"):
        length = size[node._saved_dim]
        start, stop = _signed(node._saved_start or 0), _signed(length if node._saved_end is None else node._saved_end)
        marks.transpose(0, node._saved_dim)[slice(start, stop, node._saved_step)] = True
    elif name.startswith("IndexBackward"):
        marks[tuple([slice(None) if part is None else part.cpu() for part in node._saved_indices])] = True
    else:
        marks.fill_(True)
    return marks.reshape(-1).numpy()


def _signed(number: int) -> int:
    """PyTorch shows what it saved of an int as one without a sign."""
    return number - 2**64 if number >= 2**63 else number


def _write_of(node: Any, versions: Sequence[TensorVersion]) -> Any:
    for version in versions:
        if node in version.chain and version.write is not None:
            return version.write
    return None
