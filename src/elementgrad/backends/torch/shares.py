"""A derivative split over the uses of its source: what flows back through each argument slot that the source feeds."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge

from elementgrad.backends.linear import Use
from elementgrad.backends.recorder import Asked, Flow
from elementgrad.backends.torch.calls import WHERE
from elementgrad.backends.torch.modules import removed_later
from elementgrad.backends.torch.quiet import plainly, undisturbed
from elementgrad.backends.torch.versions import Found, Version, named, same
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
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

    with undisturbed(None), plainly():
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


def split(of: tuple[Asked, Found], position: int, wrt: tuple[Asked, Found]) -> list[Flow] | None:
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
    shares: list[Flow] = []
    sources: Any = [versions[n].edge for n in edges]
    swept = flows(end.edge, seed, sources)
    if source.track is target.track and last in range(int(starts.min()), int(stops.max())):
        here = (addresses == target.addresses(where)[0]) & (starts <= last) & (last < stops)
        if here.any():
            value = torch.from_numpy(here).to(seed.device, seed.dtype)
            value = value.reshape(named_source.positions.shape)
            shares.append(Flow(RETURN, value, (sys.maxsize, 0)))
    reached = bool(swept) or any(same(end.edge, edge) for edge in sources)
    for node, slot, number, derivative in swept:
        taken = _taken(derivative, versions, edges[number], node, slot, (addresses, itemsize, starts, stops))
        if taken is not None:
            operation = named(node, _write_of(node, versions))
            taken = taken.reshape(named_source.positions.shape)
            use = Use(operation, node.metadata.get(WHERE))
            shares.append(Flow(use, taken, (node._sequence_nr(), slot)))
    return shares if reached else None


def _seed(end: Version, target: Found, position: int, like: Tensor) -> Tensor:
    (lands,) = end.region.locate(target.addresses(np.array([position])))
    seed = torch.zeros(end.region.size, dtype=like.dtype, device=like.device)
    seed.view(-1)[int(lands)] = 1
    return seed


def _taken(
    derivative: Tensor, versions: Sequence[Version], number: int, node: Any, slot: int, elements: Any
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


def _write_of(node: Any, versions: Sequence[Version]) -> Any:
    for version in versions:
        if node in version.chain and version.write is not None:
            return version.write
    return None
