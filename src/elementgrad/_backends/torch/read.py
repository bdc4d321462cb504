"""PyTorch's part in reads: seeds, sparse matrices, the state of worker processes, and `eg.contributions`.

Contributions are the derivative that flows back through each argument slot that takes one tensor.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from elementgrad._backends.autodiff import Linearization, TensorFunction, UnsupportedError, Use
from elementgrad._backends.torch import autodiff
from elementgrad._backends.torch._compat import node_number, sequence_number
from elementgrad._backends.torch.autodiff import (
    ActivationTap,
    checkpointing_disabled,
    clone_inference_tensor,
    largest_derivative,
)
from elementgrad._backends.torch.isolate import in_mode, isolated, run_from_state, without_autocast
from elementgrad._backends.torch.record.history import edge_of, operation_name, same_edge
from elementgrad._backends.torch.record.intercept import LINE_KEY, label_nodes
from elementgrad._backends.torch.record.linearization import RETURN_USE, find_slots, sweep_slots
from elementgrad._cleanup import safe_context
from elementgrad._read.backend import Layout, ReadBackend, Recorder
from elementgrad._sparsity.pattern import Pattern

Tensor = torch.Tensor
REVERSE_ONLY = "shares are computed by reverse sweeps only"
OURS = "elementgrad.ours"
"""Key in the metadata of a node of the graph that the user's code did not make."""


def linearize_uses(run: TensorFunction, inputs: Sequence[Tensor | None], input: int) -> tuple[Linearization, list[Use]]:
    """Evaluate a function, with the uses of one of its inputs as the inputs of the linearization."""
    source = ActivationTap()
    x = inputs[input]
    with isolated(run.function), checkpointing_disabled(run.inside), in_mode(_LineRecorder()):
        arguments: list[Any] = list(inputs)
        arguments[input] = source if x is None else source(x.clone() if x.is_inference() else x.detach())
        outputs = list(run(*arguments))
    linear = UsesLinearization(source, outputs)
    return linear, [
        RETURN_USE if node is None else Use(operation_name(node), node.metadata.get(LINE_KEY))
        for node, _ in linear.slots
    ]


def clone_unrecorded(x: Tensor) -> Tensor:
    """Return a clone whose node in the graph is marked as one that the user's code did not make."""
    copy = x.clone()
    node: Any = copy.grad_fn
    if node is not None:
        node.metadata[OURS] = True
    return copy


def _start_edge(output: Tensor) -> GradientEdge | None:
    """Return the edge at which derivatives of an output begin, behind clones of ours."""
    edge = edge_of(output)
    node: Any = None if edge is None else edge.node
    while node is not None and OURS in node.metadata:
        ((node, output_number),) = node.next_functions
        edge = None if node is None else GradientEdge(node, output_number)
    return edge


class UsesLinearization(Linearization):
    """The graph of one evaluation, with the slots that take one tensor as its inputs. It has reverse sweeps alone."""

    missing_rules = MappingProxyType({"forward": REVERSE_ONLY})

    def __init__(self, source: ActivationTap, outputs: Sequence[Tensor]):
        self._source, self._like = source.end, source.like
        self.outputs = outputs
        self._starts = [_start_edge(output) for output in outputs]
        slots = {slot for start in self._starts if start is not None for slot in self._slots_before(start)}
        self.slots: list[tuple[Any, int]] = sorted(slots, key=lambda slot: (node_number(slot[0]), slot[1]))
        if any(self._is_source(start) for start in self._starts):
            self.slots.append((None, 0))
        self.inputs = [source.like] * max(len(self.slots), 1)

    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        """Return the derivatives that flow back through each slot, one seed after another."""
        start = self._starts[output]
        if start is None:
            return [None] * len(inputs)
        with without_autocast():
            rows = [self._derivatives_by_slot(start, seed) for seed in clone_inference_tensor(seeds)]
        zeros = torch.zeros_like(self._like)
        stacks: list[Tensor | None] = []
        for index in inputs:
            derivatives = [row.get(self.slots[index]) for row in rows]
            connected = any(derivative is not None for derivative in derivatives)
            stacks.append(torch.stack([zeros if d is None else d for d in derivatives]) if connected else None)
        return stacks

    def _derivatives_by_slot(self, start: GradientEdge, seed: Tensor) -> dict[tuple[Any, int], Tensor]:
        derivatives = sweep_slots(start, seed, [self._source]) if self._source is not None else []
        by_slot = {(node, slot): derivative for node, slot, _, derivative in derivatives}
        return {**by_slot, (None, 0): seed} if self._is_source(start) else by_slot

    def _slots_before(self, start: GradientEdge) -> list[tuple[Any, int]]:
        """Return the slots before an output that take the tensor."""
        by_node = find_slots(start, [self._source]) if self._source is not None else {}
        return [(node, slot) for node, slots in by_node.items() for slot, _ in slots]

    def _is_source(self, start: GradientEdge | None) -> bool:
        return self._source is not None and same_edge(start, self._source)

    def jvp(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        """Raise `UnsupportedError`: there is no forward sweep from one use alone."""
        raise UnsupportedError(REVERSE_ONLY)

    def peak_bytes(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        """Return the bytes of the largest intermediate derivative."""
        return largest_derivative(
            self.outputs[source].grad_fn, {self._source.node} if self._source is not None else set()
        )

    def gradient(self, output: int, seed: Tensor) -> Linearization:
        """Raise `UnsupportedError`: there is no second derivative by uses."""
        raise UnsupportedError("second derivatives cannot be split into shares")

    def value(self, output: int) -> Tensor:
        """Return a copy of an output, apart from the graph."""
        return self.outputs[output].detach().clone()


class _LineRecorder(TorchFunctionMode):
    """Notes in each node of the graph the user's line that made it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = sequence_number()
        result = func(*args, **(kwargs or {}))
        label_nodes(result, start)
        return result


class TorchRead(ReadBackend):
    materialize = staticmethod(autodiff.materialize)
    uses = staticmethod(linearize_uses)

    def one_hot_seeds(self, like: Tensor, positions: np.ndarray, batch: int) -> Tensor:
        count = len(positions)
        seeds = torch.zeros((count, *like.shape), dtype=like.dtype, device=like.device)
        if count * batch == 1:
            seeds.view(-1)[int(positions[0])].fill_(1)
        else:
            places = torch.from_numpy(positions).to(like.device).view(count, 1, 1).expand(count, batch, 1)
            seeds.view(count, batch, -1).scatter_(2, places, 1)
        return seeds

    def transpose(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x.permute(axes)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        with without_autocast():
            return x @ y

    def free_memory(self, like: Tensor) -> int | None:
        return torch.cuda.mem_get_info(like.device)[0] if like.is_cuda else None

    def rounding(self, like: Tensor) -> str:
        return f"torch {torch.__version__}, {torch.get_num_threads()} threads" if like.device.type == "cpu" else ""

    def index(self, positions: np.ndarray, like: Tensor) -> Tensor:
        return torch.from_numpy(positions).to(like.device)

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Tensor) -> Callable[[Tensor], Tensor]:
        options: Any = {"size": pattern.shape, "check_invariants": False}
        if layout == "coo":
            places = self.index(np.stack([pattern.rows, pattern.columns]).astype(np.int64), like)
            return lambda values: torch.sparse_coo_tensor(places, values, is_coalesced=True, **options)
        starts, columns = (self.index(part.astype(np.int64), like) for part in (pattern.starts, pattern.columns))

        def by_rows(values: Tensor) -> Tensor:
            with safe_context(warnings.catch_warnings()):
                warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
                return torch.sparse_csr_tensor(starts, columns, values, **options)

        return by_rows

    def recorder(self, tensors: Sequence[Tensor]) -> Recorder:
        from elementgrad._backends.torch.record.recorder import TorchRecorder

        return TorchRecorder(tensors)

    def ambient_state(self, linear: Linearization) -> Any:
        return cast(autodiff.TorchLinearization, linear).state, torch.get_default_dtype()

    def restore_ambient_state(self, state: Any) -> AbstractContextManager[Any]:
        return run_from_state(*state)


implementation = TorchRead()
