"""Every use that a function makes of one tensor, as an input of its own: what flows back through each argument slot."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from elementgrad.backends.linear import Linear, Run, UnsupportedError, Use
from elementgrad.backends.torch.calls import WHERE, clock, note_lines
from elementgrad.backends.torch.checkpoints import straight
from elementgrad.backends.torch.graph import largest
from elementgrad.backends.torch.quiet import plainly, undisturbed
from elementgrad.backends.torch.shares import feeds, flows
from elementgrad.backends.torch.versions import edge_of, named

Tensor = torch.Tensor


def uses(run: Run, inputs: Sequence[Tensor | None], input: int) -> tuple[Linear, list[Use]]:
    """Evaluate a function as one of the uses that it makes of one of its inputs."""
    source = _Source()
    x = inputs[input]
    with undisturbed(run.function), straight(run.inside), _Lines():
        given: list[Any] = list(inputs)
        given[input] = source if x is None else source(x.detach())
        outputs = list(run(*given))
    linear = UsesLinear(source, outputs)
    return linear, [Use(named(node), node.metadata.get(WHERE)) for node, _ in linear.slots]


class _Source:
    """The tensor whose uses are told, from where it begins or passes."""

    edge: GradientEdge
    like: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        self.like = x.detach()
        if not x.requires_grad and (x.is_floating_point() or x.is_complex()):
            x = x.detach().requires_grad_().clone()  # which may be written to in place
        edge = edge_of(x)
        if edge is not None:
            self.edge = edge
        return x


class UsesLinear(Linear):
    """The graph of one evaluation, with the slots that take one tensor as its inputs. It has reverse sweeps alone."""

    def __init__(self, source: _Source, outputs: Sequence[Tensor]):
        super().__init__()
        self._source = source
        self.outputs = outputs
        ends = [edge for edge in map(edge_of, outputs) if edge is not None]
        found = {slot for end in ends for slot in _slots(end, source.edge)}
        self.slots = sorted(found, key=lambda slot: (slot[0]._sequence_nr(), slot[1]))
        self.inputs = [source.like] * max(len(self.slots), 1)
        for output in range(len(outputs)):
            self.without[output]["forward"] = "shares flow back alone"

    def pull(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        """What flows back through each slot, one seed after another."""
        edge = edge_of(self.outputs[output])
        if edge is None:
            return [None] * len(inputs)
        with plainly():
            rows = [
                {(node, slot): derivative for node, slot, _, derivative in flows(edge, seed, [self._source.edge])}
                for seed in seeds
            ]
        nothing = torch.zeros_like(self._source.like)
        stacks: list[Tensor | None] = []
        for number in inputs:
            found = [row.get(self.slots[number]) for row in rows]
            reached = any(derivative is not None for derivative in found)
            stacks.append(torch.stack([nothing if d is None else d for d in found]) if reached else None)
        return stacks

    def push(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        """There is no forward sweep from one use alone."""
        raise UnsupportedError("shares flow back alone")

    def work(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        """The bytes of the largest derivative on the way."""
        return largest(self.outputs[source].grad_fn, {self._source.edge.node})

    def gradient(self, output: int, seed: Tensor) -> Linear:
        """There is no second derivative by uses."""
        raise UnsupportedError("shares of second derivatives are not told")

    def value(self, output: int) -> Tensor:
        """An output, apart from the graph."""
        return self.outputs[output].detach().clone()


def _slots(output: GradientEdge, source: GradientEdge) -> list[tuple[Any, int]]:
    return [(node, slot) for node, taken in feeds(output, [source]).items() for slot, _ in taken]


class _Lines(TorchFunctionMode):
    """Notes in each node of the graph the user's line that made it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = clock()
        result = func(*args, **(kwargs or {}))
        note_lines(result, start)
        return result
