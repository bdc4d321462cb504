"""Layers that know some of their elements: mixed into a module's class, they send gradients there by kernels."""

import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

from elementgrad.backends.torch.training.attention import Projections
from elementgrad.backends.torch.training.bags import bag
from elementgrad.backends.torch.training.correlations import Correlation, Grid
from elementgrad.backends.torch.training.functions import Alias, ByLookup, Unheard, by_kernel
from elementgrad.backends.torch.training.home import Home
from elementgrad.backends.torch.training.lookups import Lookup
from elementgrad.backends.torch.training.operations import Convolution, LayerNorm, Linear, RMSNorm
from elementgrad.backends.torch.training.products import Product
from elementgrad.backends.torch.training.weight import Weight

Tensor = torch.Tensor
Module = nn.Module


class Use:
    """A parameter that trains in part, in one module: with the kernel that fits there."""

    def __init__(self, weight: Weight):
        self.weight = weight
        self.kernel: Any = None


NOBODY = Use(Weight(Home(torch.empty(0))))


def found(module: Any, name: str) -> tuple[Any, Use | None]:
    """The tensor to compute with, and whose elements are to hear of it."""
    held = module._parameters
    if name not in held:  # computed, as by a parametrization
        return getattr(module, name, None), None
    tensor = held[name]
    use = module._trained.get(name)
    if use is None:
        return tensor, None
    weight = use.weight
    if len(weight.keys) == 1:
        leaves: tuple[Any, ...] = (held[weight.keys[0]],)
        own = leaves[0] is weight.leaves[0]
    else:
        leaves = tuple([held[key] for key in weight.keys])
        own = all([leaf is other for leaf, other in zip(leaves, weight.leaves)])  # noqa: B905, C419
    if not weight.home.stands(tensor):  # somebody's own, as functional_call puts there: it counts as it is given
        return tensor if own else weight.with_values(tensor, leaves), None
    if not own:
        return weight.with_values(tensor, leaves), None
    weight.current()
    if not torch.is_grad_enabled() or (weight.home.spread and tensor is weight.tensor):
        return tensor, None  # as it is; of a sharded one, nothing can be computed before it is gathered
    if not torch.compiler.is_compiling() and transforming():
        return weight.with_values(tensor, leaves), None
    return tensor, use


def transforming() -> bool:
    """Whether vmap, grad or jvp of `torch.func`, or forward mode, see each operation."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def aliased(module: Any, name: str) -> Any:
    """The parameter for whatever use of it."""
    tensor, use = found(module, name)
    weight = module._trained[name].weight
    if weight.home.spread and tensor is weight.tensor and torch.is_grad_enabled():
        return looked_at(name, weight, sys._getframe(1).f_globals.get("__name__", ""))
    return tensor if use is None else alias(use.weight)


def elsewhere(weight: Weight) -> Any:
    """The parameter of another module for whatever use of it."""
    weight.current()
    return alias(weight) if torch.is_grad_enabled() and not transforming() else weight.live


def alias(weight: Weight) -> Any:
    """A parameter that passes gradients on to its elements."""
    tensor = Alias.apply(weight.positions, weight.sizes, weight.live, *weight.leaves)
    if not torch.compiler.is_compiling():
        tensor._is_param = True  # so isinstance(module.weight, nn.Parameter) holds as before
    return tensor


def looked_at(name: str, weight: Weight, module: str) -> Any:
    """A sharded parameter for whoever takes it from a module; who shards it must get the very tensor."""
    if module.startswith("torch.distributed."):
        return weight.tensor
    tensor = Unheard.apply(name, weight.tensor, *weight.leaves)
    tensor._is_param, tensor._elements_of = True, weight.tensor
    return tensor


class Layer:
    """Base of the layers; what they need of a kernel is made when elements come and go."""

    reads: tuple[str, ...] = ()
    """Modules inside whose parameters the layer uses itself, without calling them."""

    def _prepared(self, name: str, weight: Weight) -> Any:
        """The kernel for one parameter."""
        return weight.positions

    def _through(self: Any, operation: Any, x: Tensor) -> Tensor:
        weight, of_weight = found(self, "weight")
        bias, of_bias = found(self, "bias")
        if of_weight is None and of_bias is None:
            return operation.run(x, weight, bias)[0]
        one, other = of_weight or NOBODY, of_bias or NOBODY
        kernels, sizes = (one.kernel, other.kernel), (one.weight.sizes, other.weight.sizes)
        return by_kernel(operation, kernels, sizes, x, weight, bias, *one.weight.leaves, *other.weight.leaves)


class LinearLayer(Layer):
    """`nn.Linear`, and what is made of it."""

    operation = Linear()

    def _prepared(self, name: str, weight: Weight) -> Any:
        return _product(weight) if name == "weight" else weight.positions

    def forward(self: Any, input: Tensor) -> Tensor:
        """As the layer's own."""
        return self._through(self.operation, input)


class TransposedLayer(LinearLayer):
    """The linear layer of GPT-2, whose weight lies the other way round."""

    operation = Linear(transposed=True)


class EmbeddingLayer(Layer):
    """`nn.Embedding`."""

    def _prepared(self, name: str, weight: Weight) -> Any:
        return _lookup(weight)

    def forward(self: Any, input: Tensor) -> Tensor:
        """As the layer's own."""
        table, use = found(self, "weight")
        if use is None:
            return functional.embedding(input, table, self.padding_idx)
        options = self.padding_idx, self.scale_grad_by_freq
        return ByLookup.apply(use.kernel, use.weight.sizes, options, input, table, *use.weight.leaves)


class BagLayer(Layer):
    """`nn.EmbeddingBag`, of sums and means; which elements a maximum takes is left to the framework."""

    def _prepared(self, name: str, weight: Weight) -> Any:
        return _lookup(weight)

    def forward(
        self: Any, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """As the layer's own."""
        table, use = found(self, "weight")
        if use is None or self.mode == "max":
            return super().forward(input, offsets, per_sample_weights)  # type: ignore[misc]

        def run(table: Tensor, weights: Tensor | None) -> Tensor:
            options = self.max_norm, self.norm_type, False, self.mode, False, weights, self.include_last_offset
            return functional.embedding_bag(input, table, offsets, *options, self.padding_idx)

        return bag(self, run, use, table, input, offsets, per_sample_weights)


class ConvolutionLayer(Layer):
    """Convolutions of one to three axes."""

    def _prepared(self: Any, name: str, weight: Weight) -> Any:
        if name != "weight":
            return weight.positions
        shape = tuple(weight.tensor.shape)
        return Correlation(np.unravel_index(weight.everywhere, shape), shape, self._grid(), weight.tensor.device)

    def _grid(self: Any) -> Grid:
        padding = self.padding
        if self.padding_mode != "zeros" or padding == "valid":
            padding = (0,) * len(self.stride)
        elif padding == "same":
            around = self._reversed_padding_repeated_twice[::-1]
            padding = tuple(around[::2])
        return Grid(self.stride, padding, self.dilation, self.groups)

    def forward(self: Any, input: Tensor) -> Tensor:
        """As the layer's own."""
        around = self._reversed_padding_repeated_twice
        if (
            input.ndim != len(self.stride) + 2
            or input.is_complex()
            or (self.padding == "same" and around[::2] != around[1::2])
        ):
            return super().forward(input)  # type: ignore[misc]
        if self.padding_mode != "zeros":
            input = functional.pad(input, around, mode=self.padding_mode)
        return self._through(Convolution(self._grid()), input)


class LayerNormLayer(Layer):
    """`nn.LayerNorm`."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """As the layer's own."""
        if self._parameters.get("weight") is None or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)  # type: ignore[misc]
        return self._through(LayerNorm(self.normalized_shape, self.eps), input)


class RMSNormLayer(Layer):
    """`nn.RMSNorm`."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """As the layer's own."""
        if torch.is_autocast_enabled(x.device.type):
            return super().forward(x)  # type: ignore[misc]
        return self._through(RMSNorm(self.normalized_shape, self.eps), x)


class AttentionLayer(Layer):
    """`nn.MultiheadAttention`: its own projections, and that of its output."""

    reads = ("out_proj",)

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        """As the layer's own."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transforming():
            return super().forward(*arguments, **options)  # type: ignore[misc]
        modules = self, *[getattr(self, name) for name in self.reads]
        held = [(module, name) for module in modules for name in getattr(module, "_trained", ()) if "weight" in name]
        uses = [use for _, use in [found(module, name) for module, name in held] if use is not None]
        return Projections([use.weight for use in uses]).attend(self, *arguments, **options)


LAYERS: dict[str, type[Layer]] = {
    "torch.nn.modules.linear.Linear": LinearLayer,
    "transformers.pytorch_utils.Conv1D": TransposedLayer,
    "torch.nn.modules.sparse.Embedding": EmbeddingLayer,
    "torch.nn.modules.sparse.EmbeddingBag": BagLayer,
    "torch.nn.modules.conv.Conv1d": ConvolutionLayer,
    "torch.nn.modules.conv.Conv2d": ConvolutionLayer,
    "torch.nn.modules.conv.Conv3d": ConvolutionLayer,
    "torch.nn.modules.activation.MultiheadAttention": AttentionLayer,
    "torch.nn.modules.normalization.LayerNorm": LayerNormLayer,
    "torch.nn.modules.normalization.RMSNorm": RMSNormLayer,
}
"""Classes whose computation is known, by name: the libraries they are from need not be there."""


def layer_of(plain: type) -> tuple[type, type[Layer]] | None:
    """The class that is known, of which another is or is made, and what is known about it."""
    names = [(kind, f"{kind.__module__}.{kind.__qualname__}") for kind in plain.__mro__]
    return next(((kind, LAYERS[name]) for kind, name in names if name in LAYERS), None)


def _product(weight: Weight) -> Product:
    rows, columns = weight.tensor.shape
    row, column = np.divmod(weight.everywhere, columns)
    return Product(row, column, rows, columns, weight.tensor.device)


def _lookup(weight: Weight) -> Lookup:
    row, column = np.divmod(weight.everywhere, weight.tensor.shape[1])
    return Lookup(row, column, weight.tensor.shape[1], weight.tensor.device)
