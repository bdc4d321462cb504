"""Sweeps through a PyTorch function: reverse through the graph of one evaluation, forward by dual numbers."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch.autograd import forward_ad

from elementgrad.backends.linear import Function, Linear, UnstackableError, UnsupportedError, reason
from elementgrad.backends.torch.quiet import noticing_hooks, random_state, undisturbed

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
        hooks: list[Tensor] = []

        def evaluate(attention: bool) -> Graph:
            with undisturbed(state, attention), noticing_hooks(hooks):
                leaves = [_leaf(x, create_graph) for x in inputs]
                return leaves, list(run(*[leaf.clone() for leaf in leaves]))  # clones may be written to in place

        linear = cls(inputs, evaluate, run, state, create_graph)
        if hooks:
            linear.without["forward"] = "a hook on a tensor in the function changes what reverse sweeps give"
        return linear

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

        linear = TorchLinear(self.inputs, evaluate, replay, self._state, self._create_graph)
        linear.without.update(self.without)
        return linear

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
        options: Any = {"retain_graph": True, "create_graph": self._create_graph, "allow_unused": True}
        with torch.inference_mode(False), _plain_precision(y):
            if len(seeds) == 1:
                swept = torch.autograd.grad(y, leaves, seeds[0], **options)
                return [None if derivative is None else derivative.unsqueeze(0) for derivative in swept]
            paths: list[bool] = []

            def one(seed: Tensor) -> list[Tensor]:
                swept = torch.autograd.grad(y, leaves, seed, **options)
                paths[:] = [derivative is not None for derivative in swept]
                return [derivative for derivative in swept if derivative is not None]

            try:
                with _no_advice():  # not by is_grads_batched=True, which knows fewer rules and worse ones
                    stacks = iter(torch.func.vmap(one)(seeds))
                return [next(stacks) if path else None for path in paths]
            except Exception as error:
                if FUSED in str(error) and not self._attention:
                    raise
                raise UnstackableError(reason(error)) from error

    def push(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        if [_version(x) for x in self.inputs] != self._versions:
            raise UnsupportedError("an argument was changed in place after the function was evaluated")
        sweep = self._push_one if len(seeds) == 1 else self._push_stack
        try:
            try:
                values, tangents = sweep(input, outputs, seeds, self._attention)
            except Exception as error:  # it ran before: what fails now fails for want of a rule
                if FUSED not in str(error) or self._attention:
                    raise
                values, tangents = sweep(input, outputs, seeds, True)
        except Exception as error:
            raise (UnsupportedError if len(seeds) == 1 else UnstackableError)(reason(error)) from error
        self._require_same(outputs, values)
        kept = tangents if self._create_graph else [tangent.detach() for tangent in tangents]
        return [tangent if input in self._paths[o] else None for o, tangent in zip(outputs, kept, strict=True)]

    def _push_stack(
        self, input: int, outputs: Sequence[int], seeds: Tensor, attention: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        def one(seed: Tensor) -> Any:
            return torch.func.jvp(lambda x: self._again(input, outputs, x), (x,), (seed,))

        with undisturbed(self._state, attention), _no_advice():
            x = self.inputs[input]
            x = x if self._create_graph else x.clone() if x.is_inference() else x.detach()
            dims: Any = (None, 0)  # the values are the same for all seeds
            return torch.func.vmap(one, out_dims=dims, randomness="same")(seeds)

    def _push_one(
        self, input: int, outputs: Sequence[int], seeds: Tensor, attention: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        with undisturbed(self._state, attention), forward_ad.dual_level():
            x = forward_ad.make_dual(_leaf(self.inputs[input], self._create_graph), seeds[0])
            duals = [forward_ad.unpack_dual(y) for y in self._again(input, outputs, x)]
            tangents = [torch.zeros_like(y) if tangent is None else tangent for y, tangent in duals]
            return [y for y, _ in duals], [tangent.unsqueeze(0) for tangent in tangents]

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
