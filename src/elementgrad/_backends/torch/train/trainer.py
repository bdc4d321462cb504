"""`TorchTrainer`: checks, starts and stops the training of elements of a model, and freezes the rest of it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from elementgrad._backends.torch.distributed import (
    ShardedStorage,
    accumulate,
    check_not_static_graph,
    check_not_wrapped,
    is_dtensor,
    register_allreduce,
    reshard,
    sharded_storages,
    unregister_allreduce,
)
from elementgrad._backends.torch.names import TorchModel, unwrap
from elementgrad._backends.torch.record.history import Region
from elementgrad._backends.torch.train.modules import TrainedModule, attach, detach
from elementgrad._backends.torch.train.parameter import (
    ParameterStorage,
    TorchElementGroup,
    TorchPartialParameter,
    cast,
    default_leaf_dtype,
    group_of,
    index_tensor,
    tensor_bits,
)
from elementgrad._cleanup import defer, scope
from elementgrad._train.trainer import (
    FreezeClaim,
    Freezer,
    ResolvedPlace,
    TrainBackend,
    Trainer,
    TrainingState,
    groups_by_tensor,
    parameters_of,
)
from elementgrad.errors import DtypeError, FrameworkError, OptionError, UnconnectedError

Tensor = torch.Tensor
Module = torch.nn.Module


class TorchTrainer(Trainer):
    """A module whose elements train."""

    alternatives: Mapping[str, str] = {
        "variables": "elements.parameters()",
        "gradients": "elements.backward({place: loss})",
    }
    other_nouns: Mapping[str, str] = {"activation": "a layer", "buffer": "a buffer"}

    def __init__(self, model: Module):
        check_not_wrapped(model)
        self._model = model
        self._names = TorchModel(model)
        reshard(model)
        self._shards = {id(storage.tensor): storage for storage in sharded_storages(model)}
        self._sharing: dict[int, tuple[str, str]] | None = None
        self._renormed: set[int] | None = None
        self._frozen: list[tuple[torch.nn.Parameter, bool, bool]] = []
        self._owner = object()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sharing = self._renormed = None  # by the ids of other tensors
        self._owner = object()
        _freezer.claim_copies(self._frozen, self._owner)

    def names(self) -> Iterator[str]:
        return (name for name, kind, _ in self._names.named_tensors() if kind == "parameter")

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        def walk(module: Module, path: str, above: tuple[Module, ...]) -> Iterator[tuple[str, Tensor]]:
            module = unwrap(module)
            if module in above:
                return
            for name, tensor in module._parameters.items():
                if tensor is not None and group_of(tensor) is None:
                    yield f"{path}{name}", self._find_shard(tensor)
            for name, child in module._modules.items():
                if child is not None:
                    yield from walk(child, f"{path}{name}.", (*above, module))

        return walk(self._model, "", ())

    def training_state(self, tensor: Tensor) -> TrainingState:
        return _freezer.state(tensor, can_train=tensor.is_floating_point() or tensor.is_complex())

    def has_gradient_hooks(self, tensor: Tensor) -> bool:
        return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))

    def parameter(self, name: str) -> Tensor:
        bearing = self._names.lookup(name)
        for kind, tensor in bearing:
            if kind == "parameter" and tensor is not None:
                return self._find_shard(tensor)
        raise self.unknown_name_error(name, bearing[0][0] if bearing else None)

    def name_of(self, tensor: Tensor) -> str:
        tensor = getattr(tensor, "_elements_of", tensor)  # as modules return a sharded parameter while elements train
        for name, kind, parameter in self._names.named_tensors():
            if kind == "parameter" and (self._find_shard(parameter) is tensor or _is_alias(parameter, tensor)):
                return name
        raise self.not_a_parameter_error(tensor)

    def groups_of(self, tensor: Tensor) -> Sequence[TorchElementGroup]:
        parameter = self._partial_parameters().get(id(tensor))
        return parameter.groups if parameter is not None else []

    def check_parameter(self, tensor: Tensor, name: str) -> None:
        if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
            raise FrameworkError(f"{name} has no shape yet; call the model once before")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise DtypeError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and only floats train")
        shard = self._shards.get(id(tensor))
        if shard is not None:
            shard.check(name)
        elif is_dtensor(tensor):
            raise FrameworkError(
                f"{name} is spread over processes as {tensor.placements}, and not by fully_shard of this model or of "  # type: ignore[attr-defined]
                "modules in it; give the model that fully_shard was called on"
            )
        elif self._shards:
            raise FrameworkError(
                f"{name} is not sharded as other parameters of the model are, so its gradients would not be "
                "reduced; shard it with fully_shard too"
            )
        elif tensor.layout is not torch.strided or type(tensor.data) is not Tensor:
            raise FrameworkError(
                f"{name} is a {type(tensor.data).__name__} of layout {tensor.layout}; dense ones train"
            )
        if tensor.is_meta:
            raise FrameworkError(f"{name} is on the meta device and has no values; load the model first")
        if _repeats_memory(tensor):
            raise FrameworkError(f"{name} is expanded, so that one number is many elements; make it contiguous first")
        if tensor.is_inference():
            raise FrameworkError(f"{name} was made in inference mode and cannot be written to; make the model outside")
        if self._renormed is None:
            tables = [m._parameters for m in self._model.modules() if getattr(m, "max_norm", None) is not None]
            self._renormed = {id(parameter) for table in tables for parameter in table.values()}
        if id(tensor) in self._renormed:
            raise FrameworkError(
                f"{name} is the table of an embedding with max_norm, which rewrites its rows in every forward; "
                "set max_norm=None"
            )

    def parse_dtype(self, dtype: Any) -> torch.dtype | None:
        parsed: Any = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        is_dtype = isinstance(parsed, torch.dtype)
        if dtype is not None and not (is_dtype and (parsed.is_floating_point or parsed.is_complex)):
            raise OptionError(f"dtype={dtype!r} is not a floating dtype; give torch.float32 or torch.float64, or None")
        return parsed

    @torch.inference_mode(False)
    def make_group(
        self, target: ResolvedPlace, dtype: Any, values: Any = None, originals: Any = None
    ) -> TorchElementGroup:
        tensor = target.tensor
        self._check_memory(tensor)
        if dtype is not None and torch.promote_types(dtype, tensor.dtype) != dtype:
            raise OptionError(f"dtype={dtype} cannot hold what {tensor.dtype} holds; give a wider one, or None")
        if dtype is not None and dtype.is_complex and not tensor.is_complex():
            raise OptionError(
                f"dtype={dtype} is complex, and the parameter is {tensor.dtype}; give a real one, or None"
            )
        read = target.current
        initial = self._read(tensor, target.positions) if read is None else _from_bits(read, tensor)
        if values is None:
            new, leaf_dtype = initial, dtype or default_leaf_dtype(tensor.dtype)
        else:
            new = _from_bits(values, tensor)
            dtype = leaf_dtype = dtype or new.dtype
        leaf = torch.nn.Parameter(cast(new, leaf_dtype).clone())
        before = initial if originals is None else _from_bits(originals, tensor)
        return TorchElementGroup(target, leaf, before, initial, dtype)

    def _check_memory(self, tensor: Tensor) -> None:
        """Raise if another parameter shares memory with this one."""
        if self._sharing is None:
            self._sharing = _find_sharing(self.named_parameters())
        if id(tensor) in self._sharing:
            name, other = self._sharing[id(tensor)]
            raise FrameworkError(
                f"{name} and {other} are two parameters that share memory, so that one number would be two "
                "elements; make them one parameter, or give each its own copy"
            )

    def start(self, groups: Sequence[Any], keep: Sequence[Tensor] = ()) -> None:
        parameters = self._partial_parameters()
        changed = []
        for own in groups_by_tensor(groups):
            tensor = own[0].tensor
            parameter = parameters.get(id(tensor)) or TorchPartialParameter(self._storage(tensor))
            for group, leaf_name in zip(own, self._free_leaf_names(parameter)):  # noqa: B905  # there are more names
                group.leaf_name, group.parameter = leaf_name, parameter
            parameter.groups += own
            parameter.refresh()
            changed.append(parameter)
        attach(self._model, changed)
        frozen = _whole_parameters(self._model)
        _freezer.claim(frozen, self._owner, keep)
        states = [(tensor, _freezer.state(tensor)) for tensor in frozen]
        self._frozen = [(tensor, state.trained, state.kept) for tensor, state in states]
        for parameter in changed:
            parameter.write_to_parameter()
        for group in groups:
            register_allreduce(group)

    def stop(self, groups: Sequence[Any]) -> None:
        reshard(self._model)
        self.sync(groups)
        self._remove(groups)

    def cancel(self, groups: Sequence[Any]) -> None:
        for group in groups:
            self._write(group, group.initial)
        self._remove(groups)

    def _remove(self, groups: Sequence[Any]) -> None:
        """Let groups train no longer. Idempotent, so that it can be run again after an interrupt."""
        for group in groups:
            unregister_allreduce(group)
        for parameter in parameters_of(groups):
            parameter.remove(groups)
            parameter.refresh()
        detach(self._model)
        _freezer.leave(_whole_parameters(self._model), self._owner)
        self._frozen = []
        for group in groups:
            group.parameter = None

    def sync(self, groups: Sequence[Any]) -> None:
        own = set(map(id, groups))
        for parameter in parameters_of(groups):
            # An interrupted release starts over after its groups were removed. Then the parameter holds none of their
            # values, and its tables of the other groups may be half updated.
            if not own.isdisjoint(map(id, parameter.groups)):
                parameter.sync()
                parameter.check_not_overwritten()

    def write_to_parameter(self, group: Any) -> None:
        self._write(group, group.leaf)

    def restore(self, group: Any) -> None:
        with torch.no_grad():
            group.leaf.copy_(cast(group.originals, group.leaf.dtype))
        self._write(group, group.originals)

    def check_loss(self, loss: Tensor, of: object) -> None:
        if not isinstance(loss, Tensor):
            raise FrameworkError(f"the loss for {of} is {type(loss).__name__}; give a torch.Tensor of one number")
        if loss.numel() != 1:
            raise OptionError(
                f"the loss for {of} has shape {tuple(loss.shape)}; give one number, such as loss[0] or loss.sum()"
            )
        if not loss.requires_grad:
            raise UnconnectedError(
                f"the loss for {of} has no gradient; compute it with the model, outside of no_grad, or put the step "
                "into a function and call eg.explain(step), which names the line"
            ).about(loss)
        check_not_static_graph(loss, of)

    def gradients(self, loss: Tensor, groups: Sequence[Any], last: bool, tape: Any = None) -> list[Tensor | None]:
        leaves = [group.leaf for group in groups]
        with _without_tensor_hooks(leaves):
            return list(torch.autograd.grad(loss.reshape(()), leaves, retain_graph=not last, allow_unused=True))

    def add_gradient(self, total: Tensor | None, gradient: Tensor, elements: np.ndarray) -> Tensor:
        if len(elements) < len(gradient):
            chosen = index_tensor(elements, gradient.device)
            gradient = torch.zeros_like(gradient).index_copy(0, chosen, gradient.index_select(0, chosen))
        return gradient if total is None else total + gradient

    def accumulate_gradients(
        self, groups: Sequence[Any], gradients: Sequence[Tensor | None], losses: Sequence[Tensor]
    ) -> None:
        pairs = zip(groups, gradients, strict=True)
        sums = [(group.leaf, gradient) for group, gradient in pairs if gradient is not None]
        parameters = self._partial_parameters().values()
        leaves = [leaf for parameter in parameters if not parameter.storage.sharded for leaf in parameter.leaves]
        accumulate(sums, leaves, losses)

    @property
    def is_distributed(self) -> bool:
        return bool(self._shared)

    @property
    def is_rank_zero(self) -> bool:
        return self._shared[0].rank == 0

    def allgather(self, row: np.ndarray) -> np.ndarray:
        return self._shared[0].allgather(row)

    @property
    def _shared(self) -> list[ShardedStorage]:
        return [storage for storage in self._shards.values() if storage.tensor.device_mesh.ndim == 1]

    def read_bits(self, tensor: Tensor, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        return tensor_bits(tensor if positions is None else self._read(tensor, positions))

    def _read(self, tensor: Tensor, positions: np.ndarray) -> Tensor:
        return self._storage(tensor).read(index_tensor(positions, tensor.device))

    def _write(self, group: TorchElementGroup, values: Tensor) -> None:
        device = group.tensor.device
        with torch.no_grad():
            self._storage(group.tensor).write(index_tensor(group.positions, device), values.detach().to(device))

    def _storage(self, tensor: Tensor) -> ParameterStorage:
        return self._shards.get(id(tensor)) or ParameterStorage(tensor)

    def _find_shard(self, tensor: Tensor) -> Tensor:
        """Return the sharded tensor if `tensor` is the whole that a module holds in a forward, else `tensor`."""
        return next((storage.tensor for storage in self._shards.values() if storage.matches(tensor)), tensor)

    def _partial_parameters(self) -> dict[int, TorchPartialParameter]:
        modules = [module for module in self._model.modules() if isinstance(module, TrainedModule)]
        parameters = [parameter for module in modules for parameter in module._trained.values()]
        return {id(parameter.tensor): parameter for parameter in parameters}

    def _free_leaf_names(self, parameter: TorchPartialParameter) -> Iterator[str]:
        """Yield names for more leaves, which are free in all modules that own the parameter."""
        owners = [
            (module, name)
            for module in self._model.modules()
            for name, tensor in module._parameters.items()
            if tensor is parameter.tensor
        ]
        taken = {name for module, _ in owners for name in dir(module)} | set(parameter.leaf_names)
        names = (f"{owners[0][1]}_elements_{suffix}" for suffix in count())
        return (name for name in names if name not in taken)


class TorchTrain(TrainBackend):
    def trainer(self, model: Any) -> Trainer:
        if not isinstance(model, torch.nn.Module):
            raise FrameworkError(f"{model!r} is a method of a model; give the torch.nn.Module itself")
        return TorchTrainer(model)

    def tensor_bits(self, tensor: Tensor) -> tuple[str, np.ndarray]:
        return tensor_bits(tensor)

    def from_bits(self, bits: np.ndarray, like: Tensor) -> Tensor:
        flat = torch.from_numpy(np.array(bits)).reshape(-1)
        return flat.view(like.dtype).reshape(like.shape).to(like.device)


implementation = TorchTrain()


def _from_bits(array: Any, like: Tensor) -> Tensor:
    flat = torch.from_numpy(array.bits.copy()).reshape(-1)
    return flat.view(getattr(torch, array.dtype)).to(like.device)


def _is_alias(parameter: Tensor, tensor: Tensor) -> bool:
    """Return True if `tensor` is the alias that a module returns for a parameter while elements of it train."""
    if is_dtensor(parameter) or is_dtensor(tensor):
        return False
    same_memory = parameter.data_ptr() == tensor.data_ptr()
    return same_memory and parameter.shape == tensor.shape and parameter.dtype == tensor.dtype


@contextmanager
def _without_tensor_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Switch off the hooks of leaves: they run once, when the sum of the gradients is added to the leaf."""
    with scope():
        for hooks in [hooks for leaf in leaves if (hooks := leaf._backward_hooks)]:
            defer(hooks.update, dict(hooks))
            hooks.clear()
        yield


class TorchFreezer(Freezer):
    """Freezes parameters by `requires_grad`, and puts their gradients aside meanwhile."""

    def __init__(self) -> None:
        self._claims: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def get_claim(self, parameter: Tensor) -> FreezeClaim | None:
        return self._claims.get(parameter)

    def set_claim(self, parameter: Tensor, claim: FreezeClaim | None) -> None:
        if claim is None:
            del self._claims[parameter]
        else:
            self._claims[parameter] = claim

    def is_trainable(self, parameter: Tensor) -> bool:
        return parameter.requires_grad

    def set_trainable(self, parameter: Tensor, trainable: bool) -> None:
        parameter.requires_grad_(trainable)

    def get_gradient(self, parameter: Tensor) -> Tensor | None:
        return parameter.grad

    def set_gradient(self, parameter: Tensor, gradient: Tensor | None) -> None:
        parameter.grad = gradient

    def claim_copies(self, tensors: Iterable[tuple[Tensor, bool, bool]], owner: object) -> None:
        """Claim copies of frozen parameters, given which of them were trainable before and which are kept."""
        for tensor, trainable, kept in tensors:
            claim = self._claims.setdefault(tensor, FreezeClaim(trainable))
            claim.owners.add(owner)
            if kept:
                claim.keepers.add(owner)


_freezer = TorchFreezer()


def _whole_parameters(model: Module) -> list[torch.nn.Parameter]:
    return [tensor for tensor in model.parameters() if group_of(tensor) is None]


def _repeats_memory(tensor: Tensor) -> bool:
    """Return True if several elements of a tensor share memory, as after `expand`."""
    if not _is_strided(tensor) or tensor.is_contiguous():
        return False
    region = Region.of(tensor)
    return not region.axes_nest and len(np.unique(region.addresses)) < tensor.numel()


def _find_sharing(parameters: Iterable[tuple[str, Tensor]]) -> dict[int, tuple[str, str]]:
    """Return the parameters that share memory with another one, by id: their name and the other's."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in parameters:
        if _is_strided(tensor) and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    sharing: dict[int, tuple[str, str]] = {}
    for same in by_storage.values():
        same.sort(key=lambda named: _byte_span(named[1]))
        for at, (name, tensor) in enumerate(same):
            end = _byte_span(tensor)[1]
            # Tensors that begin after its end share nothing with it, such as the weights of recurrent layers.
            for other, parameter in takewhile(lambda named: _byte_span(named[1])[0] < end, same[at + 1 :]):  # noqa: B023
                if tensor is not parameter and _share_numbers(tensor, parameter):
                    sharing.setdefault(id(tensor), (name, other))
                    sharing.setdefault(id(parameter), (other, name))
    return sharing


def _share_numbers(left: Tensor, right: Tensor) -> bool:
    """Return True if two tensors of one storage, of which one begins inside the other, have a number in common."""
    if left.is_contiguous() and right.is_contiguous():
        return True
    return bool(Region.of(left).overlap_mask(Region.of(right).addresses, right.dtype.itemsize).any())


def _is_strided(tensor: Tensor) -> bool:
    lazy = isinstance(tensor, torch.nn.parameter.UninitializedParameter)
    return not lazy and not is_dtensor(tensor) and tensor.layout is torch.strided and type(tensor.data) is Tensor


def _byte_span(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins in its storage, and where it ends."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width, start = tensor.dtype.itemsize, int(tensor.storage_offset())
    return start * width, (start + steps + 1) * width
