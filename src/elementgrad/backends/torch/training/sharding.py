"""Parameters that `fully_shard` spread over processes: where their elements are, and how they are read and written."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import distributed

from elementgrad.backends.torch.training.casting import cast
from elementgrad.backends.torch.training.home import Home
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
Module = torch.nn.Module


class Shard(Home):
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


def shards(model: Module) -> Iterator[Shard]:
    """The parameters of a model that `fully_shard` has spread."""
    for module in _spread(model):
        state = module._get_fsdp_state()
        for group in state._fsdp_param_groups:
            yield from (Shard(parameter, group, state) for parameter in group.fsdp_params)


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
