"""Modules with trained elements: `patch_class` gives a module a subclass of its class, `restore_class` its own again.

The subclass reads trained parameters through properties, and keeps leaves out of `state_dict`. It has the name of the
class that it is made of, so that the module looks as before. A module whose operation is known has a `Layer` mixed into
its class, which sends gradients to the leaves by kernels; all others read their parameters as attributes and get an
alias there (`alias_attribute`). `operand` returns the tensor that a trained module computes with.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from elementgrad._backends.torch._compat import active_ddp_module, in_function_transform
from elementgrad._backends.torch.distributed import check_wrapper, is_dtensor
from elementgrad._backends.torch.train.kernels import (
    AliasFunction,
    BagFunction,
    ConvolutionOp,
    LinearOp,
    LookupFunction,
    NoGradientFunction,
    TorchConvGrid,
    TorchCorrelation,
    TorchLookup,
    TorchProduct,
    run_with_kernels,
    token_counts,
)
from elementgrad._backends.torch.train.parameter import TorchPartialParameter, cast, group_of
from elementgrad._names import pytree
from elementgrad._place.grammar import listed
from elementgrad.errors import FrameworkError

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


def alias_attribute(module: Any, name: str) -> Any:
    """Return a parameter for any use of it, as the attribute `name` of its module."""
    tensor, parameter = operand(module, name)
    if parameter is not None:
        return alias(parameter)
    parameter = module._trained[name]
    if parameter.storage.sharded and tensor is parameter.tensor and torch.is_grad_enabled():
        return _shard_attribute(name, parameter, sys._getframe(1).f_globals.get("__name__", ""))
    return tensor


def alias_elsewhere(parameter: TorchPartialParameter) -> Any:
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

    def _run_op(self: Any, op: Any, x: Tensor) -> Tensor:
        weight, of_weight = operand(self, "weight")
        bias, of_bias = operand(self, "bias")
        if of_weight is None and of_bias is None:
            return op.forward(x, weight, bias)
        leaves = [None if parameter is None else parameter.leaf for parameter in (of_weight, of_bias)]
        kernels = self._element_kernels.get("weight"), self._element_kernels.get("bias")
        return run_with_kernels(op, kernels, x, weight, bias, *leaves)


class LinearLayer(Layer):
    """`nn.Linear`."""

    _linear_op = LinearOp()

    def _weight_kernel(self, parameter: TorchPartialParameter) -> Any:
        rows, columns = parameter.tensor.shape
        row, column = np.divmod(parameter.positions, columns)
        return TorchProduct(row, column, rows, columns, parameter.tensor.device)

    def forward(self: Any, input: Tensor) -> Tensor:
        return self._run_op(self._linear_op, input)


class TransposedLayer(LinearLayer):
    """The `Conv1D` of GPT-2: a linear layer whose weight is transposed."""

    _linear_op = LinearOp(transposed=True)


class TableLayer(Layer):
    """Base of layers that look up rows of a table."""

    def _weight_kernel(self, parameter: TorchPartialParameter) -> Any:
        row, column = np.divmod(parameter.positions, parameter.tensor.shape[1])
        return TorchLookup(row, column, parameter.tensor.shape[1], parameter.tensor.device)


class EmbeddingLayer(TableLayer):
    """`nn.Embedding`."""

    def forward(self: Any, input: Tensor) -> Tensor:
        table, parameter = operand(self, "weight")
        if parameter is None:
            return functional.embedding(input, table, self.padding_idx)
        options, kernel = (self.padding_idx, self.scale_grad_by_freq), self._element_kernels["weight"]
        return LookupFunction.apply(kernel, options, input, table, parameter.leaf)


class BagLayer(TableLayer):
    """`nn.EmbeddingBag` with sums and means; a maximum uses an alias."""

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


def _bag_of_each_token(ids: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor:
    if offsets is None:
        return torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    starts = offsets[:-1] if include_last_offset else offsets
    return torch.searchsorted(starts, torch.arange(len(ids), device=ids.device).to(starts.dtype), right=True) - 1


class ConvolutionLayer(Layer):
    """`nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`."""

    def _weight_kernel(self: Any, parameter: TorchPartialParameter) -> Any:
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


LAYERS: dict[str, type[Layer]] = {
    "torch.nn.modules.linear.Linear": LinearLayer,
    "transformers.pytorch_utils.Conv1D": TransposedLayer,
    "torch.nn.modules.sparse.Embedding": EmbeddingLayer,
    "torch.nn.modules.sparse.EmbeddingBag": BagLayer,
    "torch.nn.modules.conv.Conv1d": ConvolutionLayer,
    "torch.nn.modules.conv.Conv2d": ConvolutionLayer,
    "torch.nn.modules.conv.Conv3d": ConvolutionLayer,
}
"""Layers by the name of the class, so that the libraries that have them need not be installed."""


def layer_of(cls: type) -> tuple[type, type[Layer]] | None:
    """Return the base of a class that is in `LAYERS`, and the layer for it."""
    names = [(base, f"{base.__module__}.{base.__qualname__}") for base in cls.__mro__]
    return next(((base, LAYERS[name]) for base, name in names if name in LAYERS), None)


Module = torch.nn.Module
STATE = ("_borrowed_elements", "_element_kernels", "_trained")
"""The attributes that a module has only while elements of its parameters train."""
MODULE_ATTRIBUTES = frozenset(vars(Module())) | set(STATE)


class TrainedModule:
    """Base of the subclasses that modules get while elements of their parameters train."""

    _trained: dict[str, TorchPartialParameter]
    """The module's own parameters of which elements train, by name."""
    _borrowed_elements: list[TorchPartialParameter]
    """Those of other modules that this one keeps in attributes of its own."""
    _element_kernels: dict[str, Any]
    """The kernels of these parameters, by name, if the module is a `Layer`."""
    _original_class: type[Module]
    _property_names: tuple[str, ...]
    _list_names: tuple[str, ...]
    """Attributes with parameters in lists or other containers, as `_flat_weights` of recurrent layers."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Skip the `__init_subclass__` of the user's classes, which may register subclasses."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        parameter = self.__dict__.get("_trained", {}).get(name)
        if parameter is None:
            return super().__setattr__(name, value)
        sharded = parameter.storage.sharded
        if sharded and parameter.storage.matches(value):  # FSDP swaps the shards and the whole
            self._parameters[name] = value
            return None
        if is_dtensor(value) and not sharded:
            raise FrameworkError(
                f"{name} has elements that train, and would be spread over processes without them; call fully_shard "
                "on the plain model first, and eg.trainable then"
            )
        if not isinstance(value, Tensor) or _memory_of(value) != _memory_of(parameter.tensor):
            raise _replaced_error(name)
        return None  # the same memory: weights that are already tied are tied again

    def __delattr__(self: Any, name: str) -> None:
        if name in self.__dict__.get("_trained", {}):
            raise _replaced_error(name)
        super().__delattr__(name)

    def register_parameter(self: Any, name: str, param: Any) -> None:
        if name in self._trained:
            raise _replaced_error(name)
        super().register_parameter(name, param)  # type: ignore[misc]

    def named_parameters(self: Any, *arguments: Any, **options: Any) -> Any:
        # `DistributedDataParallel` lists the parameters before it broadcasts those of the first process. Leaves and
        # parameters must be equal by then, or each process would decide for itself which of the two is newer. Reading
        # shards is a collective operation, so sharded parameters are left out.
        if not torch.compiler.is_compiling():
            for parameter in self._trained.values():
                if type(parameter.tensor.data) is Tensor:
                    parameter.sync()
        return super().named_parameters(*arguments, **options)  # type: ignore[misc]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _rebuild, (self._original_class, self._property_names, self._list_names), self.__getstate__()

    def _save_to_state_dict(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        for parameter in self._trained.values():
            parameter.sync()
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for parameter in self._trained.values():
            for leaf_name in parameter.leaf_names:
                destination.pop(prefix + leaf_name, None)

    def _load_from_state_dict(
        self: Any,
        state: Any,
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: list[str],
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            errors.append(f"{prefix}* has elements that train: load with assign=False, or release the elements first")
            return
        leaves = {name: self._parameters.pop(name) for each in self._trained.values() for name in each.leaf_names}
        is_other_model = {name: _differs(each, state.get(prefix + name)) for name, each in self._trained.items()}
        try:
            super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)  # type: ignore[misc]
        finally:
            self._parameters.update(leaves)
        unexpected[:] = [key for key in unexpected if key.removeprefix(prefix) not in leaves]
        for name, parameter in self._trained.items():
            parameter.read_from_parameter()
            if is_other_model[name]:  # then the originals are what was loaded
                for group in parameter.groups:
                    group.set_originals(cast(group.leaf.detach(), group.tensor.dtype).clone())

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        parameters = list(self._trained.values())
        if any(parameter.storage.sharded for parameter in parameters):
            raise FrameworkError(
                "a sharded model cannot be moved or converted while elements of it train; do it before eg.trainable, "
                "or release them first"
            )
        for parameter in parameters:
            parameter.sync()
        before = [(group, group.leaf.detach()) for parameter in parameters for group in parameter.groups]
        with torch.no_grad():  # recurrent layers copy their attributes into a list then, and must not get aliases
            result = super()._apply(fn, recurse)  # type: ignore[misc]
        for group, values in before:  # a leaf may be more precise than the parameter, and stays so
            group.leaf.data = values.to(group.tensor.device, group.leaf_dtype())
            if group.originals.dtype != group.tensor.dtype:
                group.set_originals(group.originals.to(group.tensor.dtype))
        for parameter in parameters:
            parameter.refresh()
        _make_kernels(self)
        return result


def _replaced_error(name: str) -> AttributeError:
    return AttributeError(
        f"{name} has elements that train and cannot be replaced; copy into it, or release the elements first"
    )


def _differs(parameter: TorchPartialParameter, loaded: Any) -> bool:
    """Return True if a loaded tensor differs from the parameter where nothing trains."""
    if not isinstance(loaded, Tensor) or loaded.shape != parameter.tensor.shape:
        return False
    return parameter.storage.differs_outside(parameter.index, loaded)


def attach(model: Module, parameters: Sequence[TorchPartialParameter]) -> None:
    """Patch all modules of a model that hold one of the parameters, by name or in a container."""
    new = {id(parameter.tensor): parameter for parameter in parameters}
    for module in model.modules():
        trained = dict(vars(module).get("_trained", {}))
        old = [*trained.values(), *vars(module).get("_borrowed_elements", [])]
        known = {id(parameter.tensor): parameter for parameter in old} | new
        trained |= {name: new[id(tensor)] for name, tensor in module._parameters.items() if id(tensor) in new}
        lists = {
            name: ids
            for name, value in vars(module).items()
            if name not in MODULE_ATTRIBUTES and (ids := _ids_in(value, known))
        }
        borrowed = [known[key] for key in set().union(*lists.values()) - {id(each.tensor) for each in trained.values()}]
        if any(known[key].storage.sharded for ids in lists.values() for key in ids):
            raise FrameworkError(
                f"a {type(module).__name__} keeps its parameters in {listed(list(lists))} too, where sharded ones "
                "are not gathered; leave its elements out"
            )
        if trained or borrowed:
            patch_class(module, trained, borrowed, tuple(lists))


def detach(model: Module) -> None:
    """Remove elements that no longer train from all modules of a model."""
    for module in model.modules():
        state = vars(module)
        if "_trained" in state or isinstance(module, TrainedModule):
            lists = getattr(module, "_list_names", ())
            patch_class(module, state.get("_trained", {}), state.get("_borrowed_elements", []), lists)


def patch_class(
    module: Any, trained: Mapping[str, TorchPartialParameter], borrowed: Sequence[TorchPartialParameter], lists: Any
) -> None:
    """Give a module the subclass for its trained parameters and add their leaves to it; none left restores its class.

    The parameters are noted first, so that after an interrupt all the rest can be done again.
    """
    trained = {name: parameter for name, parameter in trained.items() if parameter.groups}
    borrowed = [parameter for parameter in borrowed if parameter.groups]
    if not trained and not borrowed:
        restore_class(module)
        return
    subclass = _subclass(_original_class(module), tuple(trained), lists)  # first, as Python may refuse it
    vars(module).update(_trained=trained, _borrowed_elements=borrowed)
    _remove_leaves(module)
    for parameter in trained.values():
        module._parameters.update(zip(parameter.leaf_names, parameter.leaves, strict=True))
    module.__class__ = subclass
    _make_kernels(module)


def restore_class(module: Any) -> None:
    """Give a module its own class again, and remove the leaves. Idempotent."""
    _remove_leaves(module)
    module.__class__ = _original_class(module)
    for name in STATE:  # `_trained` last: while it exists, an interrupted `detach` starts over
        vars(module).pop(name, None)


def _original_class(module: Any) -> Any:
    return module._original_class if isinstance(module, TrainedModule) else type(module)


def _remove_leaves(module: Module) -> None:
    parameters = module._parameters
    for name in [name for name, tensor in parameters.items() if tensor is not None and group_of(tensor) is not None]:
        del parameters[name]


def _make_kernels(module: Any) -> None:
    """Make the kernel of a layer's weight, and take the positions alone for each other parameter, such as a bias."""
    trained = vars(module)["_trained"] if isinstance(module, Layer) else {}
    vars(module)["_element_kernels"] = {
        name: module._weight_kernel(parameter) if name == "weight" else parameter.index
        for name, parameter in trained.items()
    }


@cache
def _subclass(original: Any, properties: tuple[str, ...], lists: tuple[str, ...]) -> type[Module]:
    members: dict[str, Any] = {"_original_class": original, "_property_names": properties, "_list_names": lists}
    members |= {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {name: property(partial(alias_attribute, name=name)) for name in properties}
    members |= {name: property(partial(_get_list, name=name), partial(_set_list, name)) for name in lists}
    return type(original.__name__, (TrainedModule, *_bases(original)), members)


def _bases(original: type[Module]) -> tuple[type, ...]:
    """Return the class, with the `Layer` for one of its bases put before that base."""
    known = layer_of(original)
    if known is None:
        return (original,)
    base, layer = known
    mixed = type(base.__name__, (layer, base), {})
    return (mixed,) if base is original else (original, mixed)


def _rebuild(original: Any, properties: tuple[str, ...], lists: tuple[str, ...]) -> Module:
    cls = _subclass(original, properties, lists)
    return cls.__new__(cls)


def _ids_in(container: Any, tensors: Mapping[int, Any]) -> set[int]:
    return {id(leaf) for leaf in pytree.leaves_of(container)} & tensors.keys()


def _get_list(module: Any, name: str) -> Any:
    """Return an attribute with aliases in the place of trained parameters."""
    names = {id(parameter.tensor): key for key, parameter in module._trained.items()}
    borrowed = {id(parameter.tensor): parameter for parameter in module._borrowed_elements}

    def replace(leaf: Any) -> Any:
        if id(leaf) in names:
            return alias_attribute(module, names[id(leaf)])
        return alias_elsewhere(borrowed[id(leaf)]) if id(leaf) in borrowed else leaf

    return pytree.map_tree(module.__dict__[name], replace)


def _set_list(name: str, module: Any, value: Any) -> None:
    """Set an attribute, with the parameters themselves in the place of aliases."""
    parameters = [*module._trained.values(), *module._borrowed_elements]
    own = {_memory_of(parameter.tensor): parameter.tensor for parameter in parameters}
    module.__dict__[name] = pytree.map_tree(value, lambda leaf: own.get(_memory_of(leaf), leaf))


def _memory_of(value: Any) -> Any:
    """Return the address and layout of a tensor; an id for tensors inside transforms and for other values."""
    try:
        return value.data_ptr(), value.shape, value.stride()
    except (RuntimeError, AttributeError):
        return id(value)
