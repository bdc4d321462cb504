"""Every use that a function makes of one tensor, as an input of its own: what flows back through each argument slot."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from elementgrad._backends.autodiff import Linearization, TensorFunction, UnsupportedError, Use
from elementgrad._backends.torch._compat import sequence_number
from elementgrad._backends.torch.autodiff import ActivationTap, checkpointing_disabled, largest, normal
from elementgrad._backends.torch.isolate import in_mode, isolated, plainly
from elementgrad._backends.torch.record.history import edge_of, operation_name, same_edge
from elementgrad._backends.torch.record.intercept import LINE_KEY, label_nodes
from elementgrad._backends.torch.record.linearization import RETURN_USE, find_slots, sweep_slots

Tensor = torch.Tensor
OURS = "elementgrad.ours"
"""Under this key a node of the graph says that it is no use of the user's."""


def uses(run: TensorFunction, inputs: Sequence[Tensor | None], input: int) -> tuple[Linearization, list[Use]]:
    """Evaluate a function as one of the uses that it makes of one of its inputs."""
    source = ActivationTap()
    x = inputs[input]
    with isolated(run.function), checkpointing_disabled(run.inside), in_mode(_Lines()):
        given: list[Any] = list(inputs)
        given[input] = source if x is None else source(x.clone() if x.is_inference() else x.detach())
        outputs = list(run(*given))
    linear = UsesLinearization(source, outputs)
    return linear, [
        RETURN_USE if node is None else Use(operation_name(node), node.metadata.get(LINE_KEY))
        for node, _ in linear.slots
    ]


def kept(x: Tensor) -> Tensor:
    """The same values in memory of their own. In the graph this is known for what the user did not do."""
    copy = x.clone()
    node: Any = copy.grad_fn
    if node is not None:
        node.metadata[OURS] = True
    return copy


def _end(output: Tensor) -> GradientEdge | None:
    """Where derivatives of an output begin, behind a copy that is ours."""
    edge = edge_of(output)
    node: Any = None if edge is None else edge.node
    while node is not None and OURS in node.metadata:
        ((node, number),) = node.next_functions
        edge = None if node is None else GradientEdge(node, number)
    return edge


class UsesLinearization(Linearization):
    """The graph of one evaluation, with the slots that take one tensor as its inputs. It has reverse sweeps alone."""

    def __init__(self, source: ActivationTap, outputs: Sequence[Tensor]):
        super().__init__()
        self._source, self._like = source.end, source.like
        self.outputs = outputs
        self._ends = [_end(output) for output in outputs]
        found = {slot for end in self._ends if end is not None for slot in self._taking(end)}
        self.slots: list[tuple[Any, int]] = sorted(found, key=lambda slot: (slot[0]._sequence_nr(), slot[1]))
        if any(self._is_source(end) for end in self._ends):
            self.slots.append((None, 0))
        self.inputs = [source.like] * max(len(self.slots), 1)
        for output in range(len(outputs)):
            self.without[output]["forward"] = "shares flow back alone"

    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        """What flows back through each slot, one seed after another."""
        end = self._ends[output]
        if end is None:
            return [None] * len(inputs)
        with plainly():
            rows = [self._row(end, seed) for seed in normal(seeds)]
        nothing = torch.zeros_like(self._like)
        stacks: list[Tensor | None] = []
        for number in inputs:
            found = [row.get(self.slots[number]) for row in rows]
            reached = any(derivative is not None for derivative in found)
            stacks.append(torch.stack([nothing if d is None else d for d in found]) if reached else None)
        return stacks

    def _row(self, end: GradientEdge, seed: Tensor) -> dict[tuple[Any, int], Tensor]:
        swept = sweep_slots(end, seed, [self._source]) if self._source is not None else []
        row = {(node, slot): derivative for node, slot, _, derivative in swept}
        return {**row, (None, 0): seed} if self._is_source(end) else row

    def _taking(self, end: GradientEdge) -> list[tuple[Any, int]]:
        """The slots before an output that take the tensor."""
        taken = find_slots(end, [self._source]) if self._source is not None else {}
        return [(node, slot) for node, slots in taken.items() for slot, _ in slots]

    def _is_source(self, end: GradientEdge | None) -> bool:
        return self._source is not None and same_edge(end, self._source)

    def jvp(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        """There is no forward sweep from one use alone."""
        raise UnsupportedError("shares flow back alone")

    def work(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        """The bytes of the largest derivative on the way."""
        return largest(self.outputs[source].grad_fn, {self._source.node} if self._source is not None else set())

    def gradient(self, output: int, seed: Tensor) -> Linearization:
        """There is no second derivative by uses."""
        raise UnsupportedError("shares of second derivatives are not told")

    def value(self, output: int) -> Tensor:
        """An output, apart from the graph."""
        return self.outputs[output].detach().clone()


class _Lines(TorchFunctionMode):
    """Notes in each node of the graph the user's line that made it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = sequence_number()
        result = func(*args, **(kwargs or {}))
        label_nodes(result, start)
        return result
