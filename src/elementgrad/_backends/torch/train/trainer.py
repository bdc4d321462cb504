"""Training elements of a PyTorch model: which parameters there are, freezing the others, routing losses."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

from elementgrad._backends.torch.distributed import (
    ShardedStorage,
    hear,
    is_spread,
    require_unwrapped,
    reshard,
    shards,
    unhear,
)
from elementgrad._backends.torch.names import TorchModel, unwrap
from elementgrad._backends.torch.train import modules, parameter
from elementgrad._backends.torch.train.kernels import index
from elementgrad._backends.torch.train.layers import TorchPartialParameter
from elementgrad._backends.torch.train.modules import TrainedModule, attach, detach
from elementgrad._backends.torch.train.parameter import (
    ParameterStorage,
    TorchElementGroup,
    bits,
    cast,
    freezer,
    part_of,
    whole_parameters,
)
from elementgrad._train.backend import TrainBackend
from elementgrad._train.freeze import TrainingState
from elementgrad._train.trainer import ResolvedPlace, Trainer
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
        require_unwrapped(model)
        self._model = model
        self._named = TorchModel(model)
        reshard(model)
        self._shards = {id(shard.tensor): shard for shard in shards(model)}
        self._alone: set[int] = set()
        self._frozen: list[tuple[torch.nn.Parameter, bool, bool]] = []
        self._owner = object()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._owner = object()
        freezer.claim_copies(self._frozen, self._owner)

    def names(self) -> Iterator[str]:
        return (name for name, kind, _ in self._named.named_tensors() if kind == "parameter")

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        def walk(module: Module, path: str, above: tuple[Module, ...]) -> Iterator[tuple[str, Tensor]]:
            module = unwrap(module)
            if module in above:
                return
            for name, tensor in module._parameters.items():
                if tensor is not None and part_of(tensor) is None:
                    yield f"{path}{name}", self._lasting(tensor)
            for name, child in module._modules.items():
                if child is not None:
                    yield from walk(child, f"{path}{name}.", (*above, module))

        return walk(self._model, "", ())

    def training_state(self, tensor: Tensor) -> TrainingState:
        return freezer.state(tensor, can_train=tensor.is_floating_point() or tensor.is_complex())

    def has_gradient_hooks(self, tensor: Tensor) -> bool:
        return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))

    def parameter(self, name: str) -> Tensor:
        bearing = self._named.lookup(name)
        for kind, tensor in bearing:
            if kind == "parameter" and tensor is not None:
                return self._lasting(tensor)
        raise self.unknown_name_error(name, bearing[0][0] if bearing else None)

    def name_of(self, tensor: Tensor) -> str:
        tensor = getattr(tensor, "_elements_of", tensor)  # what a module hands out of a sharded one
        for name, kind, held in self._named.named_tensors():
            if kind == "parameter" and (self._lasting(held) is tensor or _same(held, tensor)):
                return name
        raise self.not_a_parameter_error(tensor)

    def groups_of(self, tensor: Tensor) -> Sequence[TorchElementGroup]:
        weight = self._weights().get(id(tensor))
        return weight.groups if weight is not None else []

    def check_parameter(self, tensor: Tensor, name: str) -> None:
        if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
            raise FrameworkError(f"{name} has no shape yet; call the model once before")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise DtypeError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and only floats train")
        shard = self._shards.get(id(tensor))
        if shard is not None:
            shard.check(name)
        elif is_spread(tensor):
            raise FrameworkError(
                f"{name} is spread over processes as {tensor.placements}, and not by fully_shard of this model or of "  # type: ignore[attr-defined]
                "modules in it; give the model that fully_shard was called on"
            )
        elif self._shards:
            raise FrameworkError(
                f"{name} is not sharded as other parameters of the model are, so that nobody would reduce its "
                "gradients; let fully_shard have it too"
            )
        elif tensor.layout is not torch.strided or type(tensor.data) is not Tensor:
            raise FrameworkError(
                f"{name} is a {type(tensor.data).__name__} of layout {tensor.layout}; dense ones train"
            )
        if tensor.is_meta:
            raise FrameworkError(f"{name} is on the meta device and has no values; load the model first")
        if modules.repeats(tensor):
            raise FrameworkError(f"{name} is expanded, so that one number is many elements; make it contiguous first")
        if tensor.is_inference():
            raise FrameworkError(f"{name} was made in inference mode and cannot be written to; make the model outside")
        for module in self._model.modules():
            if getattr(module, "max_norm", None) is not None and any(
                held is tensor for held in module._parameters.values()
            ):
                raise FrameworkError(
                    f"{name} is the table of an embedding with max_norm, which rewrites its rows in every forward; "
                    "set max_norm=None"
                )

    def parse_dtype(self, dtype: Any) -> torch.dtype | None:
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and not (isinstance(found, torch.dtype) and (found.is_floating_point or found.is_complex)):
            raise OptionError(f"dtype={dtype!r} is no floating dtype; give torch.float32 or torch.float64, or None")
        return found

    def make_group(
        self, target: ResolvedPlace, dtype: Any, values: Any = None, originals: Any = None
    ) -> TorchElementGroup:
        with torch.inference_mode(False):
            return self._make_group(target, dtype, values, originals)

    def _make_group(self, target: ResolvedPlace, dtype: Any, values: Any, originals: Any) -> TorchElementGroup:
        tensor = target.tensor
        self._require_alone(tensor)
        held = self._take(tensor, target.positions)
        before = held if originals is None else _of_bits(originals, tensor)
        if dtype is not None and torch.promote_types(dtype, tensor.dtype) != dtype:
            raise OptionError(f"dtype={dtype} cannot hold what {tensor.dtype} holds; give a wider one, or None")
        if dtype is not None and dtype.is_complex and not tensor.is_complex():
            raise OptionError(
                f"dtype={dtype} is complex, and the parameter is {tensor.dtype}; give a real one, or None"
            )
        group = TorchElementGroup(target, held, before, held, dtype)
        now = held if values is None else _of_bits(values, tensor)
        kept = group.kept_dtype(tensor.dtype) if values is None or dtype is not None else now.dtype
        group.dtype = kept if values is not None else dtype
        group.become(torch.nn.Parameter(cast(now, kept).clone()))
        return group

    def _require_alone(self, tensor: Tensor) -> None:
        """Refuse a parameter that shares memory with another one, unless it is that very parameter."""
        if id(tensor) in self._alone:
            return
        every = list(self.named_parameters())
        for other, held in every:
            if modules.overlap(tensor, held):
                name = next(name for name, held in every if held is tensor)
                raise FrameworkError(
                    f"{name} and {other} are two parameters that share memory, so that one number would be two "
                    "elements; make them one parameter, or give each its own copy"
                )
        self._alone.add(id(tensor))

    def start(self, groups: Sequence[Any], keep: Sequence[Tensor] = ()) -> None:
        weights = self._weights()
        for group in groups:
            weight = weights.setdefault(id(group.tensor), TorchPartialParameter(self._home(group.tensor)))
            group.key = self._key(weight)
            group.parameter = weight
            weight.groups.append(group)
            weight.arrange()
        changed = [weights[key] for key in dict.fromkeys(id(group.tensor) for group in groups)]
        attach(self._model, changed)
        frozen = whole_parameters(self._model)
        freezer.claim(frozen, self._owner, keep)
        states = [(tensor, freezer.state(tensor)) for tensor in frozen]
        self._frozen = [(tensor, state.trained, state.kept) for tensor, state in states]
        for weight in changed:
            weight.write_to_parameter()
        for group in groups:
            hear(group)

    def stop(self, groups: Sequence[Any]) -> None:
        reshard(self._model)
        for group in groups:
            self.sync(group)
        self._forget(groups)

    def cancel(self, groups: Sequence[Any]) -> None:
        for group in groups:
            self._put(group, group.initial)
        self._forget(groups)

    def _forget(self, groups: Sequence[Any]) -> None:
        """Let groups train no longer; done again, it goes on from wherever it was interrupted."""
        for group in groups:
            unhear(group)
            weight = group.parameter
            if weight is not None:
                weight.groups[:] = [other for other in weight.groups if other is not group]
                weight.arrange()
        detach(self._model)
        freezer.leave(whole_parameters(self._model), self._owner)
        self._frozen = []
        for group in groups:
            group.parameter = None

    def sync(self, group: Any) -> None:
        if group.parameter is not None and any(other is group for other in group.parameter.groups):
            group.parameter.current()
            group.parameter.require_kept()

    def write_to_parameter(self, group: Any) -> None:
        self._put(group, group.leaf)
        if group.parameter is not None:
            group.parameter.write_to_parameter()

    def restore(self, group: Any) -> None:
        with torch.no_grad():
            group.leaf.copy_(cast(group.originals, group.leaf.dtype))
        self._put(group, group.originals)
        if group.parameter is not None:
            group.parameter.write_to_parameter()

    def check_loss(self, loss: Tensor, of: str) -> None:
        if not isinstance(loss, Tensor):
            raise FrameworkError(f"the loss for {of} is {type(loss).__name__}; give a torch.Tensor of one number")
        if loss.numel() != 1:
            raise OptionError(
                f"the loss for {of} has shape {tuple(loss.shape)}; give one number, such as loss[0] or loss.sum()"
            )
        if not loss.requires_grad:
            raise UnconnectedError(
                f"the loss for {of} has no gradient; compute it with the model, outside of no_grad, or put the step "
                "into a function and ask eg.explain(step), which names the line"
            ).about(loss)
        parameter.check(loss, of)

    def gradients(self, loss: Tensor, groups: Sequence[Any], last: bool, tape: Any = None) -> list[Tensor | None]:
        leaves = [group.leaf for group in groups]
        with parameter.muted(leaves):
            return list(torch.autograd.grad(loss.reshape(()), leaves, retain_graph=not last, allow_unused=True))

    def accumulate_gradients(
        self, gradients: Sequence[tuple[Any, Tensor, np.ndarray]], losses: Sequence[Tensor]
    ) -> None:
        totals: dict[int, tuple[Tensor, Tensor]] = {}
        for group, gradient, elements in gradients:
            if len(elements) < len(gradient):
                chosen = index(elements, gradient.device)
                gradient = torch.zeros_like(gradient).index_copy(0, chosen, gradient.index_select(0, chosen))
            before = totals.get(id(group))
            totals[id(group)] = group.leaf, gradient if before is None else before[1] + gradient
        every = [leaf for weight in self._weights().values() if not weight.home.spread for leaf in weight.leaves]
        parameter.deliver(list(totals.values()), every, losses)

    @property
    def is_distributed(self) -> bool:
        return bool(self._shared)

    @property
    def is_rank_zero(self) -> bool:
        return self._shared[0].rank == 0

    def allgather(self, row: np.ndarray) -> np.ndarray:
        return self._shared[0].gathered(row)

    @property
    def _shared(self) -> list[ShardedStorage]:
        """The parameters that are spread over one axis of processes, which all train the model."""
        return [shard for shard in self._shards.values() if shard.tensor.device_mesh.ndim == 1]

    def read_bits(self, tensor: Tensor, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        return bits(tensor if positions is None else self._take(tensor, positions))

    def _take(self, tensor: Tensor, positions: np.ndarray) -> Tensor:
        return self._home(tensor).take(index(positions, tensor.device))

    def _put(self, group: TorchElementGroup, values: Tensor) -> None:
        device = group.tensor.device
        with torch.no_grad():
            self._home(group.tensor).put(index(group.positions, device), values.detach().to(device))

    def _home(self, tensor: Tensor) -> ParameterStorage:
        return self._shards.get(id(tensor)) or ParameterStorage(tensor)

    def _lasting(self, tensor: Tensor) -> Tensor:
        """The parameter, where a module holds what stands for it during a computation."""
        return next((shard.tensor for shard in self._shards.values() if shard.stands(tensor)), tensor)

    def _weights(self) -> dict[int, TorchPartialParameter]:
        """What trains already, by the parameter it is of."""
        swapped = [module for module in self._model.modules() if isinstance(module, TrainedModule)]
        uses = [use.weight for module in swapped for use in module._trained.values()]
        return {id(weight.tensor): weight for weight in uses}

    def _key(self, weight: TorchPartialParameter) -> str:
        """What another leaf is called beside its parameter, in every module that has that parameter."""
        owners = [
            (module, name)
            for module in self._model.modules()
            for name, tensor in module._parameters.items()
            if tensor is weight.tensor
        ]
        taken = {key for module, _ in owners for key in dir(module)} | set(weight.keys)
        keys = (f"{owners[0][1]}_elements_{number}" for number in count())
        return next(key for key in keys if key not in taken)


def _of_bits(numbers: Any, like: Tensor) -> Tensor:
    flat = torch.from_numpy(numbers.bits.copy()).reshape(-1)
    return flat.view(getattr(torch, numbers.dtype)).to(like.device)


def _same(held: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor is the alias that a module gives of a parameter in training."""
    if is_spread(held) or is_spread(tensor):
        return False  # these are handed out as they are
    return held.data_ptr() == tensor.data_ptr() and held.shape == tensor.shape and held.dtype == tensor.dtype


class TorchTrain(TrainBackend):
    def trainer(self, model: Any) -> Trainer:
        if not isinstance(model, torch.nn.Module):
            raise FrameworkError(f"{model!r} is a method of a model; give the torch.nn.Module itself")
        return TorchTrainer(model)


implementation = TorchTrain()
