"""Training under `fully_shard` and `DistributedDataParallel`.

Parameters that `fully_shard` has spread over processes are read and written by `ShardedStorage`, and the gradients of
their leaves are averaged at the end of each backward (`register_allreduce`). DDP reduces the gradients of the leaves
itself, if it knows them: `check_wrapper` makes sure of that. A model that is not distributed runs none of this code in
its forward.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from elementgrad._backends.torch._compat import (
    REPLICATE_MODULE,
    _global_module_registration_hooks,
    active_ddp_module,
    current_backward_id,
    default_store,
    fsdp_state,
    queue_backward_callback,
    shard_offset,
)
from elementgrad._backends.torch.autodiff import graph_nodes
from elementgrad._backends.torch.train.parameter import (
    ParameterStorage,
    TorchElementGroup,
    cast,
    global_hook,
    group_of,
    tensor_bits,
)
from elementgrad._train.trainer import elements_digest, rank_mismatch_error
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
Module = torch.nn.Module


def is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def is_dtensor(tensor: Any) -> bool:
    # Importing the module takes long, and before it is imported there are no such tensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class ShardedStorage(ParameterStorage):
    """A parameter of which this process has a shard.

    Modules hold the sharded tensor, and the whole one while they compute.
    """

    sharded: ClassVar[bool] = True

    def __init__(self, fsdp_param: Any, param_group: Any, state: Any):
        self._fsdp_param, self._param_group, self._state = fsdp_param, param_group, state

    @property
    def tensor(self) -> Any:
        return self._fsdp_param.sharded_param

    @property
    def full_tensor(self) -> Any:
        gathered = self._find_gathered()
        return self.tensor if gathered is None else gathered

    def _find_gathered(self) -> Tensor | None:
        param = self._fsdp_param
        return param.unsharded_param if param.sharded_state.name == "UNSHARDED" else None

    @property
    def process_group(self) -> Any:
        return self.tensor.device_mesh.get_group()

    @property
    def rank(self) -> int:
        return distributed.get_rank(self.process_group)

    @property
    def model_key(self) -> Any:
        """An object that all parameters of one model share, once the model has run."""
        return self._state._state_ctx

    @property
    def scales_gradients(self) -> bool:
        """True if `set_gradient_divide_factor` asks for something else than the mean."""
        return self._param_group.gradient_divide_factor not in (None, distributed.get_world_size(self.process_group))

    @property
    def reduces_gradients(self) -> bool:
        """False while `set_requires_gradient_sync(False)` is in effect."""
        return bool(self._param_group.reduce_grads)

    def matches(self, tensor: Any) -> bool:
        forms = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        return tensor is not None and any(tensor is getattr(self._fsdp_param, form, None) for form in forms)

    def check(self, name: str) -> None:
        """Raise if the parameter is spread in another way than by `fully_shard` over one axis of processes."""
        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        if mesh.ndim != 1 or not placements[0].is_shard():
            raise FrameworkError(
                f"{name} is spread as {placements} over a mesh of {mesh.ndim} axes; elements train in models that "
                "fully_shard spread over one axis of processes"
            )
        if type(self.tensor.to_local()) is not Tensor:
            raise FrameworkError(f"{name} has shards of {type(self.tensor.to_local()).__name__}; dense ones train")
        if self._fsdp_param.offload_to_cpu and self._fsdp_param.device.type != "cpu":
            raise FrameworkError(f"{name} is offloaded to the CPU between steps; leave out offload_policy")

    def read(self, index: Tensor) -> Tensor:
        """Return elements from all shards. A collective operation."""
        local, here, coords = self._locate(index)
        values = torch.zeros(len(index), dtype=local.dtype, device=local.device)
        values[here] = local[coords]
        if len(index):  # sum bytes, which are zero in all processes but one: a sum of floats may lose the sign of zero
            distributed.all_reduce(values.view(torch.uint8), group=self.process_group)
        return values

    def write(self, index: Tensor, values: Tensor) -> None:
        """Write elements to the local shard, and to the whole tensor while that exists."""
        if self._fsdp_param.sharded_state.name == "SHARDED_POST_FORWARD":
            self._param_group.reshard()  # or the next forward would gather what is left of the last one
        local, here, coords = self._locate(index)
        values = cast(values, local.dtype)
        local.index_put_(coords, values[here])
        gathered = self._find_gathered()
        if gathered is not None:
            gathered.detach().view(-1).index_copy_(0, index, values.to(gathered.dtype))

    def still_holds(self, index: Tensor, values: Tensor) -> bool:
        local, here, coords = self._locate(index)
        now, before = local[coords], values[here].to(local.dtype)
        return bool(((now == before) | (now.isnan() & before.isnan())).all())

    def differs_outside(self, index: Tensor, loaded: Any) -> bool:
        """Return True if a tensor that is sharded alike differs in any process. A collective operation."""
        if not is_dtensor(loaded) or loaded.placements != self.tensor.placements:
            return False  # PyTorch refuses to load it
        local, _, coords = self._locate(index)
        differs = loaded.to_local().to(local) != local
        differs[coords] = False
        return bool(self.allgather(np.array([bool(differs.any())], np.int32)).any())

    def allgather(self, row: np.ndarray) -> np.ndarray:
        """Return the rows of all processes. A collective operation."""
        mine = torch.tensor(row, device=self.tensor.device)
        rows = [torch.empty_like(mine) for _ in range(distributed.get_world_size(self.process_group))]
        distributed.all_gather(rows, mine, group=self.process_group)
        return torch.stack(rows).cpu().numpy()

    def _locate(self, index: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the local shard, which of the elements are in it, and their coordinates there."""
        tensor = self.tensor
        local = tensor.to_local().detach()
        axis = tensor.placements[0].dim
        coords = list(torch.unravel_index(index.to(local.device), tensor.shape))
        coords[axis] = coords[axis] - shard_offset(tensor)[axis]
        here = ((coords[axis] >= 0) & (coords[axis] < local.shape[axis])).nonzero().view(-1)
        return local, here, tuple([each[here] for each in coords])


def reshard(model: Module) -> None:
    """Let modules hold shards again, as some keep the whole tensors after a forward."""
    for module in _fsdp_modules(model):
        module.reshard()


def sharded_storages(model: Module) -> Iterator[ShardedStorage]:
    """Iterate over the parameters that `fully_shard` has spread."""
    for module in _fsdp_modules(model):
        state, param_groups = fsdp_state(module)
        for param_group in param_groups:
            yield from (ShardedStorage(fsdp_param, param_group, state) for fsdp_param in param_group.fsdp_params)


def check_replaceable(model: Module, tensors: Mapping[str, Any]) -> None:
    """Raise if one of the parameters is sharded: `fully_shard` would overwrite a tensor that is put in its place."""
    storages = list(sharded_storages(model))
    for name, tensor in tensors.items():
        if any(storage.matches(tensor) for storage in storages):
            raise FrameworkError(
                f"{name} is spread over processes by fully_shard, and no derivatives are read with respect to it; read "
                "them before the model is sharded, or with respect to an activation or an input"
            )


def _fsdp_modules(model: Module) -> Iterator[Any]:
    module = sys.modules.get("torch.distributed.fsdp")
    if module is not None:
        yield from (each for each in model.modules() if isinstance(each, module.FSDPModule))


_allreduce_hooks: WeakKeyDictionary[TorchElementGroup, Any] = WeakKeyDictionary()
"""All groups whose gradients are averaged, in the order of registration, which is the same in all processes."""
_last_backward: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""For each model the id of the last backward that its leaves got gradients from."""


def register_allreduce(group: TorchElementGroup) -> None:
    """Average the leaf's gradient over processes at the end of each backward, if the parameter is sharded.

    The sum of gradients in the leaf is averaged, not the new one alone. What was averaged before is equal in all
    processes and does not change by it, and what was added while synchronisation was off is averaged with the rest, so
    that each gradient counts once, in any order.
    """
    if group.parameter is not None and group.parameter.storage.sharded:
        _allreduce_hooks[group] = group.leaf.register_post_accumulate_grad_hook(_queue_allreduce)


def unregister_allreduce(group: TorchElementGroup) -> None:
    hook = _allreduce_hooks.get(group)
    if hook is not None:
        hook.remove()
        _allreduce_hooks.pop(group, None)


def _queue_allreduce(leaf: Tensor) -> None:
    group: Any = group_of(leaf)
    if len(leaf._post_accumulate_grad_hooks) > 1:  # type: ignore[attr-defined]
        raise FrameworkError(
            f"a hook that runs when {group.leaf_name} has its gradient would get only that of this process; use the "
            "gradient after backward"
        )
    model, backward = group.parameter.storage.model_key, current_backward_id()
    if _last_backward.get(model) != backward:
        _last_backward[model] = backward
        queue_backward_callback(partial(_allreduce, model))


@torch.no_grad()
def _allreduce(model: Any) -> None:
    # All groups of the model take part, as a process may have no gradient where another one has.
    by_process_group: dict[tuple[Any, torch.dtype], list[TorchElementGroup]] = {}
    for group in _allreduce_hooks:
        storage: Any = None if group.parameter is None else group.parameter.storage
        if storage is None or storage.model_key is not model or not storage.reduces_gradients:
            continue
        if group.leaf.grad is not None and group.leaf.grad.requires_grad:
            raise FrameworkError("gradients of a sharded model are reduced as numbers; leave out create_graph")
        if storage.scales_gradients:
            raise FrameworkError(
                "gradients of elements are the mean over all processes; leave set_gradient_divide_factor out, and "
                "scale the loss instead"
            )
        dtype = torch.float64 if _as_real(group.leaf).dtype is torch.float64 else torch.float32
        by_process_group.setdefault((storage.process_group, dtype), []).append(group)
    for (process_group, dtype), groups in by_process_group.items():
        _average(groups, process_group, dtype)


def _average(groups: Sequence[TorchElementGroup], process_group: Any, dtype: torch.dtype) -> None:
    grads = [group.leaf.grad for group in groups]
    flat = [
        _as_real(torch.zeros_like(group.leaf) if grad is None else grad)
        for group, grad in zip(groups, grads, strict=True)
    ]
    # The flags say how many processes have a gradient at all: where none has, it stays None.
    flags = torch.tensor([grad is not None for grad in grads], dtype=dtype, device=flat[0].device)
    total = torch.cat([*[grad.to(dtype) for grad in flat], flags])
    distributed.all_reduce(total, group=process_group)
    *sums, counts = total.split([*[len(grad) for grad in flat], len(groups)])
    size = distributed.get_world_size(process_group)
    for group, sum_, count in zip(groups, sums, counts.tolist(), strict=True):
        if count:
            mean = (sum_ / size).to(_as_real(group.leaf).dtype)
            group.leaf.grad = torch.view_as_complex(mean.view(-1, 2)) if group.leaf.is_complex() else mean


def _as_real(values: Tensor) -> Tensor:
    values = values.detach()
    return torch.view_as_real(values).reshape(-1) if values.is_complex() else values


_wrapper_names: WeakKeyDictionary[DistributedDataParallel, str] = WeakKeyDictionary()
"""A name for each wrapper that is the same in all processes: a digest of its model, and a count of such models."""
_wrapped_models: Counter[str] = Counter()
_wrappers: WeakKeyDictionary[DistributedDataParallel, "_WrapperState"] = WeakKeyDictionary()


@global_hook(_global_module_registration_hooks)
def _name_wrapper(wrapper: Module, name: str, module: Module | None) -> None:
    """Name a DDP wrapper when it is made, which all processes do in the same order."""
    if not isinstance(wrapper, DistributedDataParallel) or name != "module" or module is None:
        return
    parameters = _named_parameters(module)
    if any(group is not None for _, _, group in parameters):
        shapes = [(f"{name} {tuple(tensor.shape)}",) for name, tensor, group in parameters if group is None]
        model = elements_digest(shapes).hex()
        _wrapped_models[model] += 1
        _wrapper_names[wrapper] = f"{model}/{_wrapped_models[model]}"


def _named_parameters(model: Module) -> list[tuple[str, Tensor, TorchElementGroup | None]]:
    return [
        (f"{path}.{name}", tensor, group_of(tensor))
        for path, module in model.named_modules()
        for name, tensor in module._parameters.items()
        if tensor is not None
    ]


class _WrapperState:
    """A DDP wrapper as of the first forward with trained elements under it."""

    def __init__(self, wrapper: DistributedDataParallel):
        self.known_ids = {id(parameter) for parameter in wrapper._module_parameters}
        self._key = f"elementgrad/{wrapper.process_group.group_name}/{_wrapper_names.get(wrapper)}"
        groups = [(name, group) for name, _, group in _named_parameters(wrapper.module) if group is not None]
        self._elements = [(name, group.positions) for name, group in groups]
        self._originals = [(name, tensor_bits(group.originals)[1]) for name, group in groups]
        self._checked = False

    def check_same_elements(self) -> None:
        """Raise if other processes train other elements, as DDP compares only how many tensors there are.

        The first process leaves a digest in the store of the process group and the others compare theirs with it. No
        process waits for another: with other data, that one may get here later or never.
        """
        if self._checked:
            return
        if not self._agrees("elements", self._elements):
            raise rank_mismatch_error(self._elements)
        if not self._agrees("originals", self._originals):
            warnings.warn(
                "the elements of this process had other values than those of another one before the wrapper gave all "
                "those of the first; let all start from the same weights, from a file or by one seed, or save and "
                "undo in the first alone",
                stacklevel=2,
            )
        self._checked = True

    def _agrees(self, topic: str, arrays: list[tuple[Any, ...]]) -> bool:
        store, mine = default_store(), elements_digest(arrays).hex()
        return store is None or store.compare_set(f"{self._key}/{topic}", "", mine).decode() == mine


def check_wrapper(leaves: Iterable[Tensor]) -> None:
    """Raise in a forward under a DDP wrapper that does not reduce the gradients of the leaves."""
    wrapper = active_ddp_module()
    if wrapper is None or not torch.is_grad_enabled():
        return
    state = _wrappers.get(wrapper)
    if state is None:
        _wrappers[wrapper] = state = _WrapperState(wrapper)
    if any(id(leaf) not in state.known_ids and leaf.requires_grad for leaf in leaves):
        raise FrameworkError(
            "the model was wrapped in DistributedDataParallel before eg.trainable was called on its inside, and the "
            "elements' gradients would not be reduced; call eg.trainable first and wrap then"
        )
    state.check_same_elements()


def check_not_wrapped(model: Module) -> None:
    """Raise if a model is scripted, or is or contains a wrapper that would not train its elements."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise FrameworkError("a scripted model is closed; give the module that it was made of")
        if isinstance(module, torch.nn.DataParallel):
            raise FrameworkError("DataParallel copies the model in every forward; use DistributedDataParallel instead")
        kind = type(module).__name__
        if isinstance(module, DistributedDataParallel) or _is_instance(module, REPLICATE_MODULE, "DDP"):
            raise FrameworkError(
                f"the model is wrapped in {kind} already, which would not reduce the elements' gradients; "
                "call eg.trainable first and wrap then"
            )
        if _is_instance(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            raise FrameworkError(f"the model is wrapped in {kind}, which flattens parameters; use fully_shard instead")


def _is_instance(module: Module, library: str, kind: str) -> bool:
    # The library takes long to import, and before it is imported there are no such modules.
    loaded = sys.modules.get(library)
    return loaded is not None and isinstance(module, getattr(loaded, kind))


def check_not_static_graph(loss: Tensor, place: object) -> None:
    """Raise if a loss is of a model in `DistributedDataParallel(static_graph=True)`, which reduces too early here."""
    if is_distributed() and any(map(_is_static_ddp, graph_nodes([loss.grad_fn]))):
        raise FrameworkError(
            f"the loss for {place} is of a model in DistributedDataParallel(static_graph=True), which reduces "
            "gradients before all losses are done; leave static_graph out"
        )


def accumulate(gradients: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor], losses: Sequence[Tensor]) -> None:
    """Add gradients to those of their leaves in one backward, after which DDP reduces them.

    DDP reduces once every leaf that the forward used has a gradient. Leaves in the graphs of the losses that have no
    gradient here get zeros, which are removed again.
    """
    unused: list[Tensor] = []
    if is_distributed():
        nodes = graph_nodes([loss.grad_fn for loss in losses])
        used = {id(node.variable) for node in nodes if hasattr(node, "variable")}
        used -= {id(leaf) for leaf, _ in gradients}
        unused = [leaf for leaf in leaves if id(leaf) in used]
    empty = [leaf for leaf in unused if leaf.grad is None]
    grads = [grad for _, grad in gradients] + [torch.zeros_like(leaf) for leaf in unused]
    torch.autograd.backward([leaf for leaf, _ in gradients] + unused, grads)
    if any(leaf.grad is not None and leaf.grad.any() for leaf in empty):
        raise FrameworkError(
            "another process has a loss for a place without one in this process, so their values would diverge; give "
            "losses for the same places in each"
        )
    for leaf in empty:
        leaf.grad = None


def _is_static_ddp(node: Any) -> bool:
    wrapper = getattr(node, "ddp_weakref", None)
    return wrapper is not None and bool(wrapper().static_graph)
