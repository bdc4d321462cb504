"""Reverse sweeps through the graph of a recording, from the versions of target elements to those of source elements.

`RecordedLinearization` gives whole derivatives. `split_by_use` splits one over the slots that the source feeds.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch
from torch.autograd.graph import GradientEdge

from elementgrad._backends.autodiff import Use
from elementgrad._backends.torch._compat import is_freed_graph_error, is_inplace_error
from elementgrad._backends.torch.autodiff import GraphErrors, Sweep, TorchLinearization, largest_derivative
from elementgrad._backends.torch.isolate import deferred_handles, isolated, without_autocast
from elementgrad._backends.torch.record.history import (
    Region,
    TensorVersion,
    TrackedTensor,
    Write,
    operation_name,
    same_edge,
)
from elementgrad._backends.torch.record.intercept import LINE_KEY, pause_recording
from elementgrad._read.backend import ElementRequest, UseFlow
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
Request = tuple[ElementRequest, TrackedTensor]
"""Named elements, and the history of their tensor."""
GRAPH_ERRORS: GraphErrors = {
    is_inplace_error: "a tensor that this derivative needs was saved before the recording and "
    "changed in place since; record from before it was made",
    is_freed_graph_error: "backward() freed the graph that this derivative needs; call it with "
    "retain_graph=True, or record again",
}
"""Texts of PyTorch's errors about a graph that cannot be swept, and what to say instead."""
RETURN_USE = Use("return", None)
"""The use of a source that is the target itself."""


@dataclass(frozen=True)
class ElementPick:
    """Some elements of a source, and where their derivatives arrive."""

    edge: GradientEdge
    elements: Tensor | None
    """Positions in the tensor of the request; None for all, in its shape."""
    positions: Tensor | None
    """Positions in the derivative that arrives at the edge."""


@dataclass(frozen=True)
class VersionPath:
    """Target elements that share a version, and for each input the versions of its elements that came before."""

    edge: GradientEdge
    region: Region
    """Region of the version, whose shape a seed for the edge has."""
    elements: Tensor | None
    """Positions of the target elements in the tensor of the request; None for all."""
    positions: Tensor | None
    """Their positions in the seed; None if it has the shape of the tensor of the request."""
    picks: Sequence[Sequence[ElementPick]]


class RecordedLinearization(TorchLinearization):
    """The graph of a recording with its outputs and inputs, each made of one or several versions of a tensor."""

    graph_errors = GRAPH_ERRORS
    missing_rules = MappingProxyType({"forward": "a recording has no function to run again"})

    def __init__(self, of: Sequence[Request], wrt: Sequence[Request]):
        self._of, self._wrt = of, wrt
        self.outputs = [request.tensor.detach() for request, _ in of]
        self.inputs = [request.tensor.detach() for request, _ in wrt]
        self._create_graph = False
        self._plain_attention = True  # elsewhere attention is evaluated again, which a recording cannot do
        self._unbatchable = {}
        self._paths: dict[Any, list[VersionPath]] = {}

    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        with pause_recording():
            return super().vjp(output, inputs, seeds)

    def gradient(self, output: int, seed: Tensor) -> "TorchLinearization":
        raise FrameworkError("a recording has only first derivatives; use eg.hessian with a function")

    def pattern(self, output: int, input: int, local: bool) -> NoReturn:
        raise FrameworkError(
            "what was recorded is not run again, so which entries can be nonzero is not found; use eg.jacobian with a "
            "function"
        )

    def value(self, output: int) -> Tensor:
        return self.outputs[output].clone()

    def peak_bytes(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        sizes = [0]
        for path in self.paths(source, targets):
            ends = {pick.edge.node for picks in path.picks for pick in picks}
            sizes.append(largest_derivative(path.edge.node, ends))
        return max(sizes)

    def _start_nodes(self, output: int, inputs: Sequence[int]) -> Sequence[Any]:
        return [path.edge.node for path in self.paths(output, inputs)]

    def _make_sweep(self, output: int, inputs: Sequence[int]) -> Sweep | None:
        paths = self.paths(output, inputs)
        if not paths:
            return None
        likes = [self.inputs[i] for i in inputs]

        def sweep(seed: Tensor) -> list[Tensor | None]:
            total: list[Tensor | None] = [None] * len(likes)
            for path in paths:
                for i, part in enumerate(_sweep_path(path, seed, likes)):
                    before = total[i]
                    total[i] = part if before is None else before if part is None else before + part
            return total

        return sweep

    def paths(self, output: int, inputs: Sequence[int]) -> list[VersionPath]:
        """Return the sweeps from an output to some inputs: a single one where no writes set its elements apart."""
        key = output, *inputs
        if key not in self._paths:
            self._paths[key] = list(_find_paths(*self._of[output], [self._wrt[i] for i in inputs]))
        return self._paths[key]


def _find_paths(request: ElementRequest, target: TrackedTensor, wrt: Sequence[Request]) -> Iterator[VersionPath]:
    positions, device = request.positions.reshape(-1), request.tensor.device
    is_written = any(len(source.history.versions) > 1 for _, source in wrt)
    indices = None
    if is_written or request.write is not None:
        indices = target.version_indices(positions, request.write)
    # Without a chosen write the seed goes to the last version, through which all earlier ones are reached.
    last = len(target.history.versions) - 1
    ends = np.full(positions.shape, last) if indices is None or request.write is None else indices
    counts = [np.ones(positions.shape, np.int64) for _ in wrt]
    if indices is not None and is_written:
        counts = [source.history.count_before(target.history, indices) for _, source in wrt]
    groups, membership = _distinct_columns([ends, *counts])
    for group in range(groups.shape[1]):
        version = target.history.versions[groups[0, group]]
        if version.edge is None:
            continue
        elements = positions[membership == group] if groups.shape[1] > 1 else positions
        in_seed = None
        if version.region != target.region:
            in_seed = _index(version.region.locate(target.addresses(elements)), device)
        is_whole = in_seed is None and groups.shape[1] == 1
        picks = [_find_picks(*source, int(count)) for source, count in zip(wrt, groups[1:, group], strict=True)]
        yield VersionPath(version.edge, version.region, None if is_whole else _index(elements, device), in_seed, picks)


def _distinct_columns(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct columns, and for each column which of them it is.

    Rows are folded into one key after another, since sorting integers is faster than sorting columns.
    """
    membership = np.zeros(rows[0].shape, np.int64)
    first = membership[:1]
    for row in rows:
        _, values = np.unique(row, return_inverse=True)
        _, first, membership = np.unique(membership * (len(row) + 1) + values, return_index=True, return_inverse=True)
    return np.stack(rows)[:, first], membership.reshape(-1)


def _find_picks(request: ElementRequest, source: TrackedTensor, count: int) -> list[ElementPick]:
    """Return where the derivatives of a source's elements arrive, each at its version among the first `count`."""
    positions, device = request.positions.reshape(-1), request.tensor.device
    indices = source.version_indices(positions, request.write, count)
    distinct = np.unique(indices)
    picks = []
    for index in distinct:
        version = source.history.versions[index]
        if version.edge is None:
            continue
        if len(distinct) == 1 and version.region == source.region:
            return [ElementPick(version.edge, None, None)]
        elements = positions[indices == index]
        arriving = version.region.locate(source.addresses(elements))
        picks.append(ElementPick(version.edge, _index(elements, device), _index(arriving, device)))
    return picks


def _sweep_path(path: VersionPath, seed: Tensor, likes: Sequence[Tensor]) -> list[Tensor | None]:
    if path.elements is not None:
        values = seed.reshape(-1)[path.elements]
        in_seed, shape = (path.elements, seed.shape) if path.positions is None else (path.positions, path.region.size)
        seed = seed.new_zeros(int(np.prod(shape))).index_put((in_seed,), values, accumulate=True).reshape(shape)
    edges = {(pick.edge.node, pick.edge.output_nr): pick.edge for picks in path.picks for pick in picks}
    if not edges:
        return [None] * len(likes)
    swept = torch.autograd.grad([path.edge], list(edges.values()), [seed], retain_graph=True, allow_unused=True)
    derivatives = dict(zip(edges, swept, strict=True))
    parts: list[Tensor | None] = []
    for picks, like in zip(path.picks, likes, strict=True):
        part = None
        for pick in picks:
            derivative = derivatives[pick.edge.node, pick.edge.output_nr]
            if derivative is None:
                continue
            if pick.elements is None or pick.positions is None:
                part = derivative
                continue
            flat = like.new_zeros(like.numel()) if part is None else part.reshape(-1)
            part = flat.index_put((pick.elements,), derivative.reshape(-1)[pick.positions])
        parts.append(None if part is None else part.reshape(like.shape))
    return parts


def _index(positions: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(positions, np.int64).reshape(-1)).to(device)


Slot = tuple[Any, int, int, Tensor]
"""A graph node, one of its slots, the index of the source that feeds it, and the derivative that flows back there."""


def find_slots(output: GradientEdge, sources: Sequence[GradientEdge]) -> dict[Any, list[tuple[int, int]]]:
    """Return for each node before `output` that takes a source its slots, each with the index of the source."""
    slots: dict[Any, list[tuple[int, int]]] = {}
    indices = {(source.node, source.output_nr): index for index, source in enumerate(sources)}
    seen, stack = {output.node}, [output.node]
    while stack:
        node = stack.pop()
        for slot, parent in enumerate(node.next_functions):
            if parent in indices:
                slots.setdefault(node, []).append((slot, indices[parent]))
            if parent[0] is not None and parent[0] not in seen:
                seen.add(parent[0])
                stack.append(parent[0])
    return slots


def sweep_slots(output: GradientEdge, seed: Tensor, sources: Sequence[GradientEdge]) -> list[Slot]:
    """Return what one sweep sends back to each source, by the slots that take it, in order of computation.

    The sum over the slots of a source is its derivative, of which the seed is a part where the output is the source
    itself. A slot that the sweep does not reach is left out.
    """
    slots = find_slots(output, sources)
    flows: list[Slot] = []

    def collect(node: Any, derivatives: Sequence[Tensor | None], _: Any) -> None:
        for slot, source in slots[node]:
            derivative = derivatives[slot]
            if derivative is not None:
                flows.append((node, slot, source, _fit_to_source(derivative, sources[source])))

    with isolated(None), without_autocast():
        handles = deferred_handles()
        for node in slots:
            handles.extend(map(node.register_hook, [partial(collect, node)]))
        swept = torch.autograd.grad([output], list(sources), [seed], retain_graph=True, allow_unused=True)
        for index, (source, whole) in enumerate(zip(sources, swept, strict=True)):
            parts = [derivative for _, _, other, derivative in flows if other == index]
            parts += [seed] if same_edge(output, source) else []
            if whole is not None and parts:
                _require_sum(parts, _fit_to_source(whole, source))
    return sorted(flows, key=lambda flow: (flow[0]._sequence_nr(), flow[1]))


def _require_sum(parts: Sequence[Tensor], whole: Tensor) -> None:
    """Raise unless the parts add up to the whole, but for rounding."""
    total, size = sum(parts[1:], parts[0]), sum([part.abs() for part in parts[1:]], parts[0].abs())
    near = (total - whole).abs() <= 4 * len(parts) * torch.finfo(whole.dtype).eps * size
    finite = total.isfinite()
    if not ((total == whole) | torch.where(finite, near, ~whole.isfinite())).all():
        raise FrameworkError(
            "a hook on the tensor changes its derivative, of which there are no shares then; remove the hook, or ask "
            "for the gradient"
        )


def _fit_to_source(derivative: Tensor, source: GradientEdge) -> Tensor:
    """Return a strided copy in the shape and dtype of the source."""
    derivative = derivative if derivative.layout is torch.strided else derivative.to_dense()
    metadata = source.node._input_metadata[source.output_nr]  # type: ignore[attr-defined]
    return derivative.sum_to_size(tuple(metadata.shape)).to(metadata.dtype).clone()


@dataclass(frozen=True)
class _LiveElements:
    """Source elements, each with the range of versions in which it has the requested value."""

    addresses: np.ndarray
    itemsize: int
    starts: np.ndarray
    stops: np.ndarray


def split_by_use(of: Request, position: int, wrt: Request) -> list[UseFlow] | None:
    """Return the derivative of one element with respect to others, by their uses; None if no path leads there.

    A source element stays alive in later versions, which are made by writes to other elements: their slots are uses
    too, up to the next write of the element. A slot that only carries it from version to version is not a use.
    """
    (request, target), (source_request, source) = of, wrt
    target_position = np.array([position])
    (written,) = target.version_indices(target_position, request.write)
    last = int(written) if request.write is not None else len(target.history.versions) - 1
    end = target.history.versions[last]
    (count,) = source.history.count_before(target.history, np.array([written]))
    elements = source_request.positions.reshape(-1)
    if not elements.size:
        return []
    addresses, itemsize = source.addresses(elements), source.region.itemsize
    starts = source.version_indices(elements, source_request.write, int(count))
    stops = source.history.next_write(starts, addresses, itemsize)
    live = _LiveElements(addresses, itemsize, starts, stops)
    versions = source.history.versions
    alive = [n for n in range(int(starts.min()), int(stops.max())) if versions[n].edge is not None]
    distinct = [
        n for i, n in enumerate(alive) if i == 0 or not same_edge(versions[n].edge, versions[alive[i - 1]].edge)
    ]
    if end.edge is None or not distinct:
        return None
    seed = _make_seed(end, target, position, request.tensor)
    shape = source_request.positions.shape
    uses: list[UseFlow] = []
    edges: Any = [versions[n].edge for n in distinct]
    flows = sweep_slots(end.edge, seed, edges)
    if source.history is target.history and last in range(int(starts.min()), int(stops.max())):
        is_target = (addresses == target.addresses(target_position)[0]) & (starts <= last) & (last < stops)
        if is_target.any():
            ones = torch.from_numpy(is_target).to(seed.device, seed.dtype)
            uses.append(UseFlow(RETURN_USE, ones.reshape(shape), (sys.maxsize, 0)))
    for node, slot, index, derivative in flows:
        value = _use_value(derivative, versions, distinct[index], node, slot, live)
        if value is not None:
            use = Use(operation_name(node, _write_of(node, versions)), node.metadata.get(LINE_KEY))
            uses.append(UseFlow(use, value.reshape(shape), (node._sequence_nr(), slot)))
    is_reached = bool(flows) or any(same_edge(end.edge, edge) for edge in edges)
    return uses if is_reached else None


def _make_seed(end: TensorVersion, target: TrackedTensor, position: int, like: Tensor) -> Tensor:
    (in_seed,) = end.region.locate(target.addresses(np.array([position])))
    seed = torch.zeros(end.region.size, dtype=like.dtype, device=like.device)
    seed.view(-1)[int(in_seed)] = 1
    return seed


def _use_value(
    derivative: Tensor, versions: Sequence[TensorVersion], index: int, node: Any, slot: int, live: _LiveElements
) -> Tensor | None:
    """Return the part of a version's derivative for the elements alive in it; None if it is no use of any."""
    group = [n for n in range(index, len(versions)) if same_edge(versions[n].edge, versions[index].edge)]
    is_used = (live.starts <= group[-1]) & (group[0] < live.stops)
    later = [version for version in versions[group[-1] + 1 :] if node in version.chain]
    if slot == 0 and later:  # the node makes a later version, and uses only the old values that it computes with
        is_read = np.zeros(is_used.shape, bool)
        for version in later:
            if version.write is not None and not version.write.overwrites:
                is_read |= version.write.element_mask(live.addresses, live.itemsize)
        is_used &= is_read
    positions = np.maximum(versions[index].region.locate(live.addresses), 0)
    is_used &= _read_mask(node, versions[index].region.size)[positions]
    if not is_used.any():
        return None
    value = derivative.reshape(-1)[torch.from_numpy(positions).to(derivative.device)]
    return torch.where(torch.from_numpy(is_used).to(value.device), value, torch.zeros_like(value))


def _read_mask(node: Any, size: tuple[int, ...]) -> np.ndarray:
    """Return which elements of its argument a node's op reads: some for select, slice and index, else all."""
    marks = torch.zeros(size, dtype=torch.bool)
    name = node.name()
    if name.startswith("SelectBackward"):
        marks.select(node._saved_dim, _to_signed(node._saved_index)).fill_(True)
    elif name.startswith("SliceBackward"):
        end = size[node._saved_dim] if node._saved_end is None else node._saved_end
        where = slice(_to_signed(node._saved_start or 0), _to_signed(end), node._saved_step)
        marks.transpose(0, node._saved_dim)[where] = True
    elif name.startswith("IndexBackward"):
        marks[tuple([slice(None) if part is None else part.cpu() for part in node._saved_indices])] = True
    else:
        marks.fill_(True)
    return marks.reshape(-1).numpy()


def _to_signed(value: int) -> int:
    """Return an int that PyTorch saved, which it shows as one of 64 bits without a sign."""
    return value - 2**64 if value >= 2**63 else value


def _write_of(node: Any, versions: Sequence[TensorVersion]) -> Write | None:
    for version in versions:
        if node in version.chain and version.write is not None:
            return version.write
    return None
