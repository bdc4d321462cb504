"""Parameters that `fully_shard` spread over processes: where their elements are, and how they are read and written.

Gradients of elements in a sharded model: the mean over all processes, k numbers at the end of a backward.

Wrappers that reduce gradients between processes reduce those of the parameters that they have met.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from elementgrad._backends.torch._compat import _global_module_registration_hooks
from elementgrad._backends.torch.train.parameter import (
    ParameterStorage,
    TorchElementGroup,
    bits,
    cast,
    part_of,
    while_training,
)
from elementgrad._train.trainer import elements_digest, rank_mismatch_error
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
Module = torch.nn.Module


class ShardedStorage(ParameterStorage):
    """One parameter of a sharded model: some of it is here, the rest in other processes.

    Outside of a computation its modules hold the sharded tensor; during one they hold the whole, gathered from all.
    """

    spread: ClassVar[bool] = True

    def __init__(self, parameter: Any, group: Any, state: Any):
        self._parameter, self._group, self._state = parameter, group, state

    @property
    def tensor(self) -> Any:
        """The parameter, as it is named, saved and loaded."""
        return self._parameter.sharded_param

    @property
    def whole(self) -> Tensor | None:
        """All of it, while it is gathered; else nothing can be computed."""
        gathered = self._parameter.sharded_state.name == "UNSHARDED"
        return self._parameter.unsharded_param if gathered else None

    @property
    def processes(self) -> Any:
        """The processes that it is spread over."""
        return self.tensor.device_mesh.get_group()

    @property
    def rank(self) -> int:
        """Which of these processes this is."""
        return distributed.get_rank(self.processes)

    @property
    def together(self) -> Any:
        """By what parameters of one model are known, whichever of its modules they are in, once it has run."""
        return self._state._state_ctx

    @property
    def scaled(self) -> bool:
        """Whether gradients are to be something else than a mean, which `set_gradient_divide_factor` says."""
        return self._group.gradient_divide_factor not in (None, distributed.get_world_size(self.processes))

    @property
    def synchronising(self) -> bool:
        """Whether gradients are reduced now, which `set_requires_gradient_sync` says."""
        return bool(self._group.reduce_grads)

    def stands(self, tensor: Any) -> bool:
        """Whether a tensor stands for this parameter in its modules."""
        forms = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        return tensor is not None and any(tensor is getattr(self._parameter, form, None) for form in forms)

    def check(self, name: str) -> None:
        """Refuse what is spread in another way than by `fully_shard` over one axis of processes."""
        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        if mesh.ndim != 1 or not placements[0].is_shard():
            raise FrameworkError(
                f"{name} is spread as {placements} over a mesh of {mesh.ndim} axes; elements train in models that "
                "fully_shard spread over one axis of processes"
            )
        if type(self.tensor.to_local()) is not Tensor:
            raise FrameworkError(f"{name} has shards of {type(self.tensor.to_local()).__name__}; dense ones train")
        if self._parameter.offload_to_cpu and self._parameter.device.type != "cpu":
            raise FrameworkError(f"{name} is offloaded to the CPU between steps; leave out offload_policy")

    def take(self, positions: Tensor) -> Tensor:
        """Elements, the same in all processes, each of which must ask for them."""
        local, here, coords = self._here(positions)
        found = torch.zeros(len(positions), dtype=local.dtype, device=local.device)
        found[here] = local[coords]
        if len(positions):  # as bytes, of which all processes but one have zero: a sum of floats may lose a sign
            distributed.all_reduce(found.view(torch.uint8), group=self.processes)
        return found

    def put(self, positions: Tensor, values: Tensor) -> None:
        """Write elements, each process those that it has; and into the whole while it is there."""
        if self._parameter.sharded_state.name == "SHARDED_POST_FORWARD":
            self._group.reshard()  # or the next computation would gather what was left over from the last
        local, here, coords = self._here(positions)
        values = cast(values, local.dtype)
        local.index_put_(coords, values[here])
        if self.whole is not None:
            whole = self.whole.detach()
            whole.view(-1).index_copy_(0, positions, values.to(whole.dtype))

    def kept(self, positions: Tensor, values: Tensor) -> bool:
        """Whether those that are here are still those that were written last."""
        local, here, coords = self._here(positions)
        found, last = local[coords], values[here].to(local.dtype)
        return bool(((found == last) | (found.isnan() & last.isnan())).all())

    def differs(self, loaded: Any, positions: Tensor) -> bool:
        """Whether another one, spread alike, differs in any of the processes."""
        if not is_spread(loaded) or loaded.placements != self.tensor.placements:
            return False  # which nothing loads
        local, _, coords = self._here(positions)
        other = loaded.to_local().to(local) != local
        other[coords] = False
        return self.said(bool(other.any()))

    def said(self, answer: bool) -> bool:
        """Whether any of the processes says yes, each of which must be asked."""
        return bool(self.gathered(np.array([answer], np.int32)).any())

    def gathered(self, row: np.ndarray) -> np.ndarray:
        """A row of numbers from each of the processes, each of which must ask."""
        mine = torch.tensor(row, device=self.tensor.device)
        every = [torch.empty_like(mine) for _ in range(distributed.get_world_size(self.processes))]
        distributed.all_gather(every, mine, group=self.processes)
        return torch.stack(every).cpu().numpy()

    def _here(self, positions: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """What is here of the parameter, which of the elements are in it, and where."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        tensor = self.tensor
        local = tensor.to_local().detach()
        _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        axis = tensor.placements[0].dim
        coords = list(torch.unravel_index(positions.to(local.device), tensor.shape))
        coords[axis] = coords[axis] - start[axis]
        here = ((coords[axis] >= 0) & (coords[axis] < local.shape[axis])).nonzero().view(-1)
        return local, here, tuple([each[here] for each in coords])


def is_spread(tensor: Any) -> bool:
    """Whether a tensor is one of several processes; nobody has made one before that module was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def reshard(model: Module) -> None:
    """Let modules hold the shards of their parameters again, which some leave gathered after a computation."""
    for module in _spread(model):
        module.reshard()


def shards(model: Module) -> Iterator[ShardedStorage]:
    """The parameters of a model that `fully_shard` has spread."""
    for module in _spread(model):
        state = module._get_fsdp_state()
        for group in state._fsdp_param_groups:
            yield from (ShardedStorage(parameter, group, state) for parameter in group.fsdp_params)


def require_whole(model: Module, tensors: Mapping[str, Any]) -> None:
    """Refuse to exchange parameters of a model that `fully_shard` gathers over whatever stands in for them."""
    spread = list(shards(model))
    for name, tensor in tensors.items():
        if any(shard.stands(tensor) for shard in spread):
            raise FrameworkError(
                f"{name} is spread over processes by fully_shard, and no derivatives are read with respect to it; read "
                "them before the model is sharded, or with respect to an activation or an input"
            )


def _spread(model: Module) -> Iterator[Any]:
    module = sys.modules.get("torch.distributed.fsdp")
    if module is not None:
        yield from (each for each in model.modules() if isinstance(each, module.FSDPModule))


_parts: WeakValueDictionary[int, TorchElementGroup] = WeakValueDictionary()
"""All that are exchanged, in the order in which they came, which is the same in all processes."""
_numbers = count()
_heard: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""For each model the last backward that it heard of."""


def hear(part: TorchElementGroup) -> None:
    """Let all processes have the same gradients of a part, if its parameter is spread over them.

    What a leaf has heard before and every process has alike is its own mean, and what one alone has heard while
    gradients were not synchronised is reduced with the next that are: so each gradient counts once, in any order.
    """
    if part.parameter.home.spread:
        part.number = next(_numbers)
        _parts[part.number] = part
        part.hook = part.leaf.register_post_accumulate_grad_hook(_hear)


def unhear(part: TorchElementGroup) -> None:
    """Leave the gradients of a part alone."""
    if part.hook is not None:
        part.hook.remove()
        part.hook = None
        _parts.pop(part.number, None)


def _hear(leaf: Tensor) -> None:
    part = part_of(leaf)
    assert part is not None
    if len(leaf._post_accumulate_grad_hooks) > 1:  # type: ignore[attr-defined]
        raise FrameworkError(
            f"a hook that runs when {part.key} has its gradient would see that of this process alone; use the gradient "
            "after backward"
        )
    model, sweep = part.parameter.home.together, torch._C._current_graph_task_id()
    if _heard.get(model) != sweep:  # once for each backward, after all of its leaves
        _heard[model] = sweep
        reduce = partial(_reduce, model)
        torch.autograd.Variable._execution_engine.queue_callback(reduce)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _reduce(model: Any) -> None:
    """For all that train in a model: a process may have heard nothing of what another has heard of."""
    homes = [(part, part.parameter.home) for part in _parts.values() if part.parameter is not None]
    parts = [part for part, home in homes if home.together is model and home.synchronising]
    if any(part.leaf.grad is not None and part.leaf.grad.requires_grad for part in parts):
        raise FrameworkError("gradients of a sharded model are reduced as numbers; leave out create_graph")
    if any(part.parameter.home.scaled for part in parts):
        raise FrameworkError(
            "gradients of elements are the mean over all processes; leave set_gradient_divide_factor out, and scale "
            "the loss instead"
        )
    exchanged: dict[tuple[Any, torch.dtype], list[TorchElementGroup]] = {}
    for part in parts:
        exchanged.setdefault((part.parameter.home.processes, _exchanged(part.leaf)), []).append(part)
    for (processes, dtype), some in exchanged.items():
        _mean(some, processes, dtype)


def _mean(parts: Sequence[TorchElementGroup], processes: Any, dtype: torch.dtype) -> None:
    heard = [part.leaf.grad is not None for part in parts]
    each = [_real(torch.zeros_like(part.leaf) if part.leaf.grad is None else part.leaf.grad) for part in parts]
    # A process whose data did not reach a leaf adds nothing, and must still hear what the others found.
    flags = torch.tensor(heard, dtype=dtype, device=each[0].device)
    whole = torch.cat([*[gradient.to(dtype) for gradient in each], flags])
    distributed.all_reduce(whole, group=processes)
    *sums, counts = whole.split([*[len(gradient) for gradient in each], len(parts)])
    size = distributed.get_world_size(processes)
    for part, total, heard_by in zip(parts, sums, counts.tolist(), strict=True):
        if heard_by:
            mean = (total / size).to(_real(part.leaf).dtype)
            part.leaf.grad = torch.view_as_complex(mean.view(-1, 2)) if part.leaf.is_complex() else mean


def _exchanged(leaf: Tensor) -> torch.dtype:
    """The dtype that a leaf's gradient is summed in: halves lose too much."""
    return torch.float64 if _real(leaf).dtype is torch.float64 else torch.float32


def _real(values: Tensor) -> Tensor:
    values = values.detach()
    return torch.view_as_real(values).reshape(-1) if values.is_complex() else values


_met: WeakKeyDictionary[DistributedDataParallel, "_WrapperState"] = WeakKeyDictionary()
_notes: WeakKeyDictionary[DistributedDataParallel, str] = WeakKeyDictionary()
"""What a wrapper is called between processes: its model, and how many were made around models like it before."""
_made: Counter[str] = Counter()


class _WrapperState:
    """What is known of a wrapper since elements were first computed with under it."""

    def __init__(self, wrapper: DistributedDataParallel):
        self.ids = {id(parameter) for parameter in wrapper._module_parameters}
        """Of the parameters that it met when it was made. It keeps them, so that these stay."""
        self._note = f"elementgrad/{wrapper.process_group.group_name}/{_notes.get(wrapper)}"
        parts = [(name, part) for name, _, part in _named(wrapper.module) if part is not None]
        self._elements = [(name, part.positions) for name, part in parts]
        self._began = [(name, bits(part.originals)[1]) for name, part in parts]
        self._alike = False

    def require_alike(self) -> None:
        """Refuse elements that are not those of the other processes: the wrapper compares nothing but their number.

        Whoever comes first leaves a note where processes find each other, and the others compare. Nobody waits: others
        may come later, or never if their data does not lead here.
        """
        if self._alike:
            return
        if not self._noted("elements", self._elements):
            raise rank_mismatch_error(self._elements)
        if not self._noted("originals", self._began):
            warnings.warn(
                "the elements of this process had other values than those of another one before the wrapper gave all "
                "those of the first; let all start from the same weights, from a file or by one seed, or save and "
                "undo in the first alone",
                stacklevel=2,
            )
        self._alike = True

    def _noted(self, what: str, numbers: list[tuple[Any, ...]]) -> bool:
        """Whether a note about some numbers is that of this process, which leaves one if there is none."""
        store, mine = distributed_c10d._get_default_store(), elements_digest(numbers).hex()  # type: ignore[no-untyped-call]
        return store is None or store.compare_set(f"{self._note}/{what}", "", mine).decode() == mine


@while_training(_global_module_registration_hooks)
def _wrap(wrapper: Module, name: str, module: Module | None) -> None:
    """Give a wrapper its name as it takes its model in: all processes make them together, and so in the same order."""
    if not isinstance(wrapper, DistributedDataParallel) or name != "module" or module is None:
        return
    named = _named(module)
    if any(part is not None for _, _, part in named):  # models of others are left alone, those without shapes too
        kind = elements_digest(
            [(f"{name} {tuple(tensor.shape)}",) for name, tensor, part in named if part is None]
        ).hex()
        _made[kind] += 1
        _notes[wrapper] = f"{kind}/{_made[kind]}"


def _named(model: Module) -> list[tuple[str, torch.Tensor, TorchElementGroup | None]]:
    """The parameters of a model and the leaves of its elements, with which elements those are."""
    return [
        (f"{path}.{name}", tensor, part_of(tensor))
        for path, module in model.named_modules()
        for name, tensor in module._parameters.items()
        if tensor is not None
    ]


def require_met(leaves: Iterable[torch.Tensor]) -> None:
    """Refuse a forward under a wrapper that was made before the leaves, as each process would train its own."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or not torch.is_grad_enabled():
        return
    meeting = _met.get(wrapper)
    if meeting is None:
        _met[wrapper] = meeting = _WrapperState(wrapper)
    if any(id(leaf) not in meeting.ids and leaf.requires_grad for leaf in leaves):
        raise FrameworkError(
            "the model was wrapped in DistributedDataParallel before eg.trainable was called on its inside, and the "
            "elements' gradients would not be reduced; call eg.trainable first and wrap then"
        )
    meeting.require_alike()


def require_unwrapped(model: Module) -> None:
    """Refuse a model that is closed, or that has a wrapper around it or inside which knows nothing of elements."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise FrameworkError("a scripted model is closed; give the module that it was made of")
        if isinstance(module, torch.nn.DataParallel):
            raise FrameworkError("DataParallel copies the model in every forward; use DistributedDataParallel instead")
        kind = type(module).__name__
        if isinstance(module, DistributedDataParallel) or _is(module, "torch.distributed._composable.replicate", "DDP"):
            raise FrameworkError(
                f"the model is wrapped in {kind} already, which would not reduce the elements' gradients; "
                "call eg.trainable first and wrap then"
            )
        if _is(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            raise FrameworkError(f"the model is wrapped in {kind}, which flattens parameters; use fully_shard instead")


def _is(module: Module, home: str, kind: str) -> bool:
    """Whether a module is of a class in a home of PyTorch's that takes long to import: if nobody has, it is not."""
    found = sys.modules.get(home)
    return found is not None and isinstance(module, getattr(found, kind))
