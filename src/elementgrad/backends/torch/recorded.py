"""Reverse sweeps through the graph that a recording saw: from elements as they were last written to earlier ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch.autograd.graph import GradientEdge

from elementgrad.backends.linear import Linear
from elementgrad.backends.recorder import Asked
from elementgrad.backends.torch.functions import aside
from elementgrad.backends.torch.graph import largest
from elementgrad.backends.torch.linear import Sweep, TorchLinear
from elementgrad.backends.torch.regions import Region
from elementgrad.backends.torch.versions import Found, Version
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
class Pick:
    """From the derivative that arrives at an edge to that of some elements of a tensor."""

    edge: GradientEdge
    elements: Tensor | None
    """Positions in the tensor that was asked about; None for all, as they arrive."""
    arrive: Tensor | None


@dataclass(frozen=True)
class Way:
    """Target elements that share a version, and for each input the versions of its elements that came before them."""

    edge: GradientEdge
    region: Region
    """What a seed for the edge looks like."""
    elements: Tensor | None
    """The target elements, by their position in the tensor asked about; None for all."""
    lands: Tensor | None
    """Where they are in the seed; None if it has the shape of the tensor asked about."""
    picks: Sequence[Sequence[Pick]]


class RecordedLinear(TorchLinear):
    """A graph with its outputs and inputs, each made of one or several versions of a tensor."""

    gone = GONE

    def __init__(self, of: Sequence[tuple[Asked, Found]], wrt: Sequence[tuple[Asked, Found]]):
        Linear.__init__(self)
        self._of, self._wrt = of, wrt
        self.outputs = [asked.tensor.detach() for asked, _ in of]
        self.inputs = [asked.tensor.detach() for asked, _ in wrt]
        self._create_graph = False
        self._attention = True  # which is evaluated again elsewhere, and cannot be here
        self._alone = {}
        self._ways: dict[Any, list[Way]] = {}
        for output in range(len(of)):
            self.without[output]["forward"] = BACKWARDS

    def pull(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        with aside():
            return super().pull(output, inputs, seeds)

    def gradient(self, output: int, seed: Tensor) -> "TorchLinear":
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

    def ways(self, output: int, inputs: Sequence[int]) -> list[Way]:
        """How to sweep from an output to some inputs: one way where no writes set its elements apart."""
        key = output, *inputs
        if key not in self._ways:
            self._ways[key] = list(self._find_ways(*self._of[output], [self._wrt[i] for i in inputs]))
        return self._ways[key]

    def _find_ways(self, asked: Asked, found: Found, wrt: Sequence[tuple[Asked, Found]]) -> Any:
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
            yield Way(version.edge, version.region, None if whole else _index(elements, device), lands, picks)


def _grouped(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The distinct columns, and for each column which of them it is. Sorting numbers is faster than sorting columns."""
    member = np.zeros(rows[0].shape, np.int64)
    first = member[:1]
    for row in rows:
        _, there = np.unique(row, return_inverse=True)
        _, first, member = np.unique(member * (len(row) + 1) + there, return_index=True, return_inverse=True)
    return np.stack(rows)[:, first], member.reshape(-1)


def _picks(asked: Asked, found: Found, count: int, like: Tensor) -> list[Pick]:
    """Where the derivatives of a source's elements arrive: each at its own version."""
    positions = asked.positions.reshape(-1)
    numbers = found.versions(positions, asked.write, count)
    chosen = np.unique(numbers)
    picks = []
    for number in chosen:
        version: Version = found.track.versions[number]
        if version.edge is None:
            continue
        if len(chosen) == 1 and version.region == found.region:
            return [Pick(version.edge, None, None)]
        elements = positions[numbers == number]
        arrive = version.region.locate(found.addresses(elements))
        device = asked.tensor.device
        picks.append(Pick(version.edge, _index(elements, device), _index(arrive, device)))
    return picks


def _swept(way: Way, seed: Tensor, likes: Sequence[Tensor]) -> list[Tensor | None]:
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
