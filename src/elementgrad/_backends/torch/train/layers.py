"""Layers whose operation is known: mixed into a module's class, they send gradients to the leaves by kernels.

`operand` returns the tensor that a trained module computes with. Modules that are not in `LAYERS` read their parameters
as attributes and get `aliased_attribute` there.
"""

import sys
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from elementgrad._backends.torch._compat import active_ddp_module, in_function_transform
from elementgrad._backends.torch.distributed import check_wrapper
from elementgrad._backends.torch.train.functions import (
    AliasFunction,
    BagFunction,
    ConvolutionOp,
    LayerNormOp,
    LinearOp,
    LookupFunction,
    NoGradientFunction,
    RMSNormOp,
    run_with_kernels,
    token_counts,
)
from elementgrad._backends.torch.train.kernels import TorchConvGrid, TorchCorrelation, TorchLookup, TorchProduct
from elementgrad._backends.torch.train.parameter import TorchPartialParameter

Tensor = torch.Tensor


def operand(module: Any, name: str) -> tuple[Any, TorchPartialParameter | None]:
    """Return a parameter of a trained module to compute with.

    The second value is the partial parameter if gradients have yet to be sent to its leaves, and None if they need not
    be: nothing of the parameter trains, gradients are off, or the tensor is a function of the leaves already.
    """
    parameters = module._parameters
    if name not in parameters:  # computed, as by a parametrization
        return getattr(module, name, None), None
    tensor = parameters[name]
    parameter: TorchPartialParameter | None = module._trained.get(name)
    if parameter is None:
        return tensor, None
    leaves = [parameters[leaf_name] for leaf_name in parameter.leaf_names]
    same_leaves = all(map(is_, leaves, parameter.leaves))
    # `torch.func.functional_call` puts other tensors in the place of the parameter or of the leaves.
    if not parameter.storage.matches(tensor):
        return tensor if same_leaves else parameter.insert(tensor, leaves), None
    if not same_leaves:
        return parameter.insert(tensor, leaves), None
    _sync(parameter)
    if not torch.is_grad_enabled() or (parameter.storage.sharded and tensor is parameter.tensor):
        return tensor, None  # a shard is only looked at: what computes with the parameter gathers it first
    if not torch.compiler.is_compiling() and in_function_transform():
        return parameter.insert(tensor, leaves), None
    return tensor, parameter


def _sync(parameter: TorchPartialParameter) -> None:
    if not torch.compiler.is_compiling() and active_ddp_module() is not None:
        check_wrapper(parameter.leaves)
    parameter.sync()


def aliased_attribute(module: Any, name: str) -> Any:
    """Return a parameter for any use of it, as the attribute `name` of its module."""
    tensor, parameter = operand(module, name)
    if parameter is not None:
        return alias(parameter)
    parameter = module._trained[name]
    if parameter.storage.sharded and tensor is parameter.tensor and torch.is_grad_enabled():
        return _shard_attribute(name, parameter, sys._getframe(1).f_globals.get("__name__", ""))
    return tensor


def aliased_elsewhere(parameter: TorchPartialParameter) -> Any:
    """Return a parameter for any use of it by a module that does not own it."""
    _sync(parameter)
    if torch.is_grad_enabled() and not in_function_transform():
        return alias(parameter)
    return parameter.storage.full_tensor


def alias(parameter: TorchPartialParameter) -> Any:
    """Return a view of the parameter that passes gradients on to the leaves."""
    tensor = AliasFunction.apply(parameter.index, parameter.storage.full_tensor, parameter.leaf)
    if not torch.compiler.is_compiling():
        tensor._is_param = True  # so that isinstance(module.weight, nn.Parameter) is still true
    return tensor


def _shard_attribute(name: str, parameter: TorchPartialParameter, caller: str) -> Any:
    if caller.startswith("torch.distributed."):
        return parameter.tensor  # FSDP compares it by identity
    tensor = NoGradientFunction.apply(name, parameter.tensor, parameter.leaf)
    tensor._is_param, tensor._elements_of = True, parameter.tensor
    return tensor


class Layer:
    """Base of the layers, which are mixed into classes of users: their names must not clash with those of a user."""

    def _make_kernel(self, name: str, parameter: TorchPartialParameter) -> Any:
        return parameter.index

    def _run_op(self: Any, op: Any, x: Tensor) -> Tensor:
        weight, of_weight = operand(self, "weight")
        bias, of_bias = operand(self, "bias")
        if of_weight is None and of_bias is None:
            return op.forward(x, weight, bias)[0]
        leaves = [None if parameter is None else parameter.leaf for parameter in (of_weight, of_bias)]
        kernels = self._element_kernels.get("weight"), self._element_kernels.get("bias")
        return run_with_kernels(op, kernels, x, weight, bias, *leaves)


class LinearLayer(Layer):
    """`nn.Linear`."""

    _linear_op = LinearOp()

    def _make_kernel(self, name: str, parameter: TorchPartialParameter) -> Any:
        if name != "weight":
            return parameter.index
        rows, columns = parameter.tensor.shape
        row, column = np.divmod(parameter.positions, columns)
        return TorchProduct(row, column, rows, columns, parameter.tensor.device)

    def forward(self: Any, input: Tensor) -> Tensor:
        return self._run_op(self._linear_op, input)


class TransposedLayer(LinearLayer):
    """The `Conv1D` of GPT-2: a linear layer whose weight is transposed."""

    _linear_op = LinearOp(transposed=True)


class EmbeddingLayer(Layer):
    """`nn.Embedding`."""

    def _make_kernel(self, name: str, parameter: TorchPartialParameter) -> Any:
        return _make_lookup(parameter)

    def forward(self: Any, input: Tensor) -> Tensor:
        table, parameter = operand(self, "weight")
        if parameter is None:
            return functional.embedding(input, table, self.padding_idx)
        options, kernel = (self.padding_idx, self.scale_grad_by_freq), self._element_kernels["weight"]
        return LookupFunction.apply(kernel, options, input, table, parameter.leaf)


class BagLayer(Layer):
    """`nn.EmbeddingBag` with sums and means; a maximum uses an alias."""

    def _make_kernel(self, name: str, parameter: TorchPartialParameter) -> Any:
        return _make_lookup(parameter)

    def forward(
        self: Any, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        table, parameter = operand(self, "weight")
        if parameter is None or self.mode == "max":
            return super().forward(input, offsets, per_sample_weights)  # type: ignore[misc]

        def run(table: Tensor, weights: Tensor | None) -> Tensor:
            options = self.max_norm, self.norm_type, False, self.mode, False, weights, self.include_last_offset
            return functional.embedding_bag(input, table, offsets, *options, self.padding_idx)

        tokens = input.reshape(-1)
        bags = _bag_of_each_token(input, offsets, self.include_last_offset)
        if self.padding_idx is not None:
            tokens = tokens.where(tokens != self.padding_idx, -1)
        share = counted = (tokens >= 0).to(table.dtype)
        if self.mode == "mean":
            count = len(input) if offsets is None else len(offsets) - self.include_last_offset
            share = counted / counted.new_zeros(count).index_add(0, bags, counted).clamp(min=1).index_select(0, bags)
        frequency = token_counts(tokens) if self.scale_grad_by_freq else None
        inputs = tokens, bags, share, frequency, table, per_sample_weights
        return BagFunction.apply(self._element_kernels["weight"], run, *inputs, parameter.leaf)


def _make_lookup(parameter: TorchPartialParameter) -> TorchLookup:
    row, column = np.divmod(parameter.positions, parameter.tensor.shape[1])
    return TorchLookup(row, column, parameter.tensor.shape[1], parameter.tensor.device)


def _bag_of_each_token(ids: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor:
    if offsets is None:
        return torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    starts = offsets[:-1] if include_last_offset else offsets
    return torch.searchsorted(starts, torch.arange(len(ids), device=ids.device).to(starts.dtype), right=True) - 1


class ConvolutionLayer(Layer):
    """`nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`."""

    def _make_kernel(self: Any, name: str, parameter: TorchPartialParameter) -> Any:
        if name != "weight":
            return parameter.index
        shape = tuple(parameter.tensor.shape)
        coordinates = np.unravel_index(parameter.positions, shape)
        return TorchCorrelation(coordinates, shape, self._conv_grid(), parameter.tensor.device)

    def _conv_grid(self: Any) -> TorchConvGrid:
        padding = self.padding
        if self.padding_mode != "zeros" or padding == "valid":
            padding = (0,) * len(self.stride)
        elif padding == "same":
            padding = tuple(self._reversed_padding_repeated_twice[::-1][::2])
        return TorchConvGrid(self.stride, padding, self.dilation, self.groups)

    def forward(self: Any, input: Tensor) -> Tensor:
        around = self._reversed_padding_repeated_twice
        if (
            input.ndim != len(self.stride) + 2
            or input.is_complex()
            or (self.padding == "same" and around[::2] != around[1::2])
        ):
            return super().forward(input)  # type: ignore[misc]
        if self.padding_mode != "zeros":
            input = functional.pad(input, around, mode=self.padding_mode)
        return self._run_op(ConvolutionOp(self._conv_grid()), input)


class LayerNormLayer(Layer):
    """`nn.LayerNorm`."""

    def forward(self: Any, input: Tensor) -> Tensor:
        if self._parameters.get("weight") is None or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)  # type: ignore[misc]
        return self._run_op(LayerNormOp(self.normalized_shape, self.eps), input)


class RMSNormLayer(Layer):
    """`nn.RMSNorm`."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return super().forward(x)  # type: ignore[misc]
        return self._run_op(RMSNormOp(self.normalized_shape, self.eps), x)


LAYERS: dict[str, type[Layer]] = {
    "torch.nn.modules.linear.Linear": LinearLayer,
    "transformers.pytorch_utils.Conv1D": TransposedLayer,
    "torch.nn.modules.sparse.Embedding": EmbeddingLayer,
    "torch.nn.modules.sparse.EmbeddingBag": BagLayer,
    "torch.nn.modules.conv.Conv1d": ConvolutionLayer,
    "torch.nn.modules.conv.Conv2d": ConvolutionLayer,
    "torch.nn.modules.conv.Conv3d": ConvolutionLayer,
    "torch.nn.modules.normalization.LayerNorm": LayerNormLayer,
    "torch.nn.modules.normalization.RMSNorm": RMSNormLayer,
}
"""Layers by the name of the class, so that the libraries that have them need not be installed."""


def layer_of(cls: type) -> tuple[type, type[Layer]] | None:
    """Return the base of a class that is in `LAYERS`, and the layer for it."""
    names = [(base, f"{base.__module__}.{base.__qualname__}") for base in cls.__mro__]
    return next(((base, LAYERS[name]) for base, name in names if name in LAYERS), None)
