"""Sweeps through a PyTorch function: reverse through the graph of one evaluation, forward by dual numbers."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch.autograd import forward_ad

from elementgrad.backends.linear import Function, Linear, UnsupportedError, reason
from elementgrad.backends.torch.quiet import random_state, undisturbed

Tensor = torch.Tensor
Graph = tuple[list[Tensor], list[Tensor]]
"""The leaves of one evaluation, and its outputs."""
FUSED = "scaled_dot_product"
"""Stands in the errors about attention kernels that lack a derivative which the plain kernel has."""


class TorchLinear(Linear):
    """One evaluation with its graph; forward sweeps run the function again, from the same random numbers."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        evaluate: Callable[[bool], Graph],
        replay: Function,
        state: Any,
        create_graph: bool,
    ):
        self.inputs = inputs
        self._evaluate = evaluate
        self._replay = replay
        self._state = state
        self._create_graph = create_graph
        self._attention = False
        self._versions = [_version(x) for x in inputs]
        self.leaves, self.outputs = evaluate(False)

    @classmethod
    def of(cls, run: Function, inputs: Sequence[Tensor], create_graph: bool) -> "TorchLinear":
        """Evaluate a function at its inputs."""
        state = random_state()

        def evaluate(attention: bool) -> Graph:
            with undisturbed(state, attention):
                leaves = [_leaf(x, create_graph) for x in inputs]
                return leaves, list(run(*[leaf.clone() for leaf in leaves]))  # clones may be written to in place

        return cls(inputs, evaluate, run, state, create_graph)

    def gradient(self, output: int, seed: Tensor) -> "TorchLinear":
        def evaluate(attention: bool) -> Graph:
            leaves, outputs = self._evaluate(True) if attention else (self.leaves, self.outputs)
            y = outputs[output]
            if not y.requires_grad:
                return leaves, [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
            with torch.inference_mode(False), torch.enable_grad():
                gradients = torch.autograd.grad(y, leaves, seed, create_graph=True, materialize_grads=True)
            return leaves, list(gradients)

        def replay(*xs: Tensor) -> Sequence[Tensor]:
            return torch.func.vjp(lambda *xs: self._replay(*xs)[output], *xs)[1](seed)

        return TorchLinear(self.inputs, evaluate, replay, self._state, self._create_graph)

    def value(self, output: int) -> Tensor:
        return self.outputs[output] if self._create_graph else self.outputs[output].detach()

    def pull(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        try:
            return self._pull(output, inputs, seeds)
        except RuntimeError as error:
            if FUSED not in str(error) or self._attention:
                raise
            self._attention = True
            self.leaves, self.outputs = self._evaluate(True)
            return self._pull(output, inputs, seeds)

    def _pull(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        y = self.outputs[output]
        if not y.requires_grad:
            return [None] * len(inputs)
        leaves = [self.leaves[i] for i in inputs]

        def grad(seed: Tensor, batched: bool) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(
                y,
                leaves,
                seed,
                retain_graph=True,
                create_graph=self._create_graph,
                allow_unused=True,
                is_grads_batched=batched,
            )

        with torch.inference_mode(False), _plain_precision(y):
            if len(seeds) > 1 and "reverse" not in self.looped:
                try:
                    with _no_advice():
                        return list(grad(seeds, True))
                except Exception as error:  # no rule for a stack: what the loop raises is the user's
                    self.looped["reverse"] = reason(error)
            sweeps = [grad(seed, False) for seed in seeds]
        return [None if of_one[0] is None else _stack(of_one) for of_one in zip(*sweeps, strict=True)]

    def push(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        if [_version(x) for x in self.inputs] != self._versions:
            raise UnsupportedError("an argument was changed in place after the function was evaluated")
        values, tangents = self._try_push(input, outputs, seeds)
        self._require_same(outputs, values)
        kept = tangents if self._create_graph else [tangent.detach() for tangent in tangents]
        return [tangent if input in self._paths[o] else None for o, tangent in zip(outputs, kept, strict=True)]

    def _try_push(self, input: int, outputs: Sequence[int], seeds: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Try a stack before a loop, and then both with the attention kernels that have every rule."""
        ways = [self._push_stack] if len(seeds) > 1 and "forward" not in self.looped else []
        failures: list[Exception] = []
        for attention in (self._attention, True):
            for way in (*ways, self._push_each):
                try:
                    swept = way(input, outputs, seeds, attention)
                except Exception as error:  # it ran before: what fails now fails for want of a rule
                    failures.append(error)
                    continue
                if ways and way == self._push_each:
                    self.looped["forward"] = reason(failures[-1])
                return swept
            if not any(FUSED in str(failure) for failure in failures):
                break
        raise UnsupportedError(reason(failures[-1]))

    def _push_stack(
        self, input: int, outputs: Sequence[int], seeds: Tensor, attention: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        def one(seed: Tensor) -> Any:
            return torch.func.jvp(lambda x: self._again(input, outputs, x), (x,), (seed,))

        with undisturbed(self._state, attention), _no_advice():
            x = self.inputs[input]
            x = x if self._create_graph else x.clone() if x.is_inference() else x.detach()
            dims: Any = (None, 0)  # the values are the same for all seeds
            values, tangents = torch.func.vmap(one, out_dims=dims, randomness="same")(seeds)
        return list(values), list(tangents)

    def _push_each(
        self, input: int, outputs: Sequence[int], seeds: Tensor, attention: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        sweeps = []
        for seed in seeds:
            with undisturbed(self._state, attention), forward_ad.dual_level():
                x = forward_ad.make_dual(_leaf(self.inputs[input], self._create_graph), seed)
                duals = [forward_ad.unpack_dual(y) for y in self._again(input, outputs, x)]
                values = [dual.primal for dual in duals]
                sweeps.append([torch.zeros_like(y) if t is None else t for y, t in duals])
        return values, [_stack(of_one) for of_one in zip(*sweeps, strict=True)]

    def _again(self, input: int, outputs: Sequence[int], x: Tensor) -> tuple[Tensor, ...]:
        values = self._replay(*[(x if i == input else other).clone() for i, other in enumerate(self.inputs)])
        return tuple([values[o] for o in outputs])

    def _require_same(self, outputs: Sequence[int], values: Sequence[Tensor]) -> None:
        for output, value in zip(outputs, values, strict=True):
            first, value = self.outputs[output].detach(), value.detach()
            near = torch.finfo(first.dtype).eps ** 0.5
            scale = first.abs().nan_to_num(0, 0, 0).max().item() if first.numel() else 0
            if not torch.allclose(first, value, near, near * scale, equal_nan=True):
                raise UnsupportedError("the function gives another value when it is run again")

    def work(self, forward: bool, source: int, targets: Sequence[int]) -> int:
        return max(self._walk[output][0] for output in (targets if forward else [source]))

    @cached_property
    def _paths(self) -> list[set[int]]:
        return [{i for i, leaf in enumerate(self.leaves) if _node(leaf) in nodes} for _, nodes in self._walk]

    @cached_property
    def _walk(self) -> list[tuple[int, set[Any]]]:
        """For each output the bytes of the largest derivative on the way to the leaves, and the nodes of its graph."""
        return [_walk(y) for y in self.outputs]


def _walk(y: Tensor) -> tuple[int, set[Any]]:
    seen: set[Any] = set()
    largest = 0
    ahead = [y.grad_fn] if y.grad_fn is not None else []
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        for made in node._input_metadata:
            largest = max(largest, math.prod(made.shape) * made.dtype.itemsize)
        ahead.extend(following for following, _ in node.next_functions if following is not None)
    return largest, seen


def _node(leaf: Tensor) -> Any:
    with torch.inference_mode(False), torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(leaf).node


def _leaf(x: Tensor, create_graph: bool) -> Tensor:
    """The same values, as the place where gradients are asked for, apart from the user's own tensor."""
    if x.is_inference():
        return x.clone().requires_grad_()
    return x.view_as(x) if create_graph and x.requires_grad else x.detach().requires_grad_()


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tuple(tensors))


@contextmanager
def _no_advice() -> Iterator[None]:
    """Leave out PyTorch's warnings about speed: they are about our stacks and not about the user's code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*performance drop")
        yield


def _plain_precision(y: Tensor) -> Any:
    """Sweeps run in the precision of the evaluation, also where the caller has autocast on."""
    device = y.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
