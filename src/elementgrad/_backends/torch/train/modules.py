"""Modules that know their trained elements: the class is swapped for one made of it, and back.

Where the elements of a parameter lie in memory: whether one number is several of them, or of two parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from elementgrad._backends.torch.distributed import is_spread
from elementgrad._backends.torch.train.layers import (
    Layer,
    LayerKernel,
    TorchPartialParameter,
    aliased,
    elsewhere,
    layer_of,
)
from elementgrad._backends.torch.train.parameter import part_of
from elementgrad._names import pytree
from elementgrad._place import grammar
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
Module = torch.nn.Module
OWN = frozenset(vars(Module())) | {"_trained", "_elsewhere"}
"""Where every module keeps what it keeps."""


class TrainedModule:
    """What a module does besides, while elements of its parameters train. It looks like the module it was."""

    _trained: dict[str, LayerKernel]
    _elsewhere: list[TorchPartialParameter]
    _plain: type[Module]
    _names: tuple[str, ...]
    _lists: tuple[str, ...]

    def __init_subclass__(cls, **options: Any) -> None:
        """Nobody who keeps account of classes hears of this one."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        use = self.__dict__.get("_trained", {}).get(name)
        if use is None:
            return super().__setattr__(name, value)
        if use.weight.home.spread and use.weight.home.stands(value):  # gathered for a computation, or given back
            self._parameters[name] = value
            return None
        if is_spread(value) and not use.weight.home.spread:
            raise FrameworkError(
                f"{name} has elements that train, and would be spread over processes without them; call fully_shard "
                "on the plain model first, and eg.trainable then"
            )
        if not isinstance(value, Tensor) or _memory(value) != _memory(use.weight.tensor):
            raise AttributeError(_kept(name))
        return None  # as it is tied already

    def __delattr__(self: Any, name: str) -> None:
        if name in self.__dict__.get("_trained", {}):
            raise AttributeError(_kept(name))
        super().__delattr__(name)

    def register_parameter(self: Any, name: str, param: Any) -> None:
        """As the module's own, for all others."""
        if name in self._trained:
            raise AttributeError(_kept(name))
        super().register_parameter(name, param)  # type: ignore[misc]

    def named_parameters(self: Any, *arguments: Any, **options: Any) -> Any:
        """As the module's own, when leaves and parameters agree.

        `DistributedDataParallel` lists them before it gives all processes what the first has. If a parameter had been
        written to by then and its leaf had not, each process would find out for itself which of them to believe.
        """
        if not torch.compiler.is_compiling():
            for use in self._trained.values():
                # What is spread over processes is read by all of them at once, and not here.
                if type(use.weight.tensor.data) is Tensor:
                    use.weight.current()
        return super().named_parameters(*arguments, **options)  # type: ignore[misc]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _rebuilt, (self._plain, self._names, self._lists), self.__getstate__()

    def _save_to_state_dict(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        for use in self._trained.values():
            use.weight.current()
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for use in self._trained.values():
            for key in use.weight.keys:
                destination.pop(prefix + key, None)

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
        held = self._parameters
        leaves = {key: held.pop(key) for use in self._trained.values() for key in use.weight.keys}
        other = {name: _differs(use.weight, state.get(prefix + name)) for name, use in self._trained.items()}
        try:
            super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)  # type: ignore[misc]
        finally:
            held.update(leaves)
        unexpected[:] = [key for key in unexpected if key.removeprefix(prefix) not in leaves]
        for name, use in self._trained.items():
            use.weight.read_from_parameter()
            if other[name]:  # another model altogether: what its elements were is what was loaded
                for part in use.weight.groups:
                    part.rebase()

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        weights = [use.weight for use in self._trained.values()]
        if any(weight.home.spread for weight in weights):
            raise FrameworkError(
                "a sharded model cannot be moved or converted while elements of it train; do it before eg.trainable, "
                "or release them first"
            )
        for weight in weights:
            weight.current()
        before = [(part, part.leaf.detach()) for weight in weights for part in weight.groups]
        with torch.no_grad():  # recurrent layers note their parameters then, and not aliases of them
            result = super()._apply(fn, recurse)  # type: ignore[misc]
        for part, values in before:
            tensor = part.tensor
            part.leaf.data = values.to(tensor.device, part.kept_dtype(tensor.dtype))
            if part.originals.dtype != tensor.dtype:
                part.begin_from(part.originals.to(tensor.dtype))
        for weight in weights:
            weight.arrange()
        prepare(self)
        return result


def _kept(name: str) -> str:
    return f"{name} has elements that train and cannot be replaced; copy into it, or release the elements first"


def attach(model: Module, weights: Sequence[TorchPartialParameter]) -> None:
    """Let every module of a model know the elements that train, wherever it keeps those parameters."""
    new = {id(weight.tensor): weight for weight in weights}
    for module in model.modules():
        uses = dict(vars(module).get("_trained", {}))
        before = [use.weight for use in uses.values()] + vars(module).get("_elsewhere", [])
        known = {id(weight.tensor): weight for weight in before} | new
        uses |= {name: LayerKernel(new[id(tensor)]) for name, tensor in module._parameters.items() if id(tensor) in new}
        kept = {
            name: found for name, value in vars(module).items() if name not in OWN if (found := _held(value, known))
        }
        if any(known[key].home.spread for found in kept.values() for key in found):
            raise FrameworkError(
                f"a {type(module).__name__} keeps its parameters in {grammar.listed(list(kept))} too, where sharded ones "
                "are not gathered; leave its elements out"
            )
        own = [id(use.weight.tensor) for use in uses.values()]
        read = _held([child._parameters for child in _read(module)], known)
        others = [known[key] for key in read.union(*kept.values()) if key not in own]
        if uses or others:
            patch_class(module, uses, others, tuple(kept))


def patch_class(
    module: Any, uses: dict[str, LayerKernel], elsewhere: list[TorchPartialParameter], lists: tuple[str, ...]
) -> None:
    """Give a module the class that its uses need, or its own where there are none.

    What it is to know is noted first, so that all the rest can be done again from there after an interrupt.
    """
    uses = {name: use for name, use in uses.items() if use.weight.groups}
    elsewhere = [weight for weight in elsewhere if weight.groups]
    plain: Any = module._plain if isinstance(module, TrainedModule) else type(module)
    kind = _class(plain, tuple(uses), lists) if uses or elsewhere else plain  # first, as it may be refused
    held = vars(module)
    held.update(_trained=uses, _elsewhere=elsewhere)
    parameters = module._parameters
    for key in [key for key, leaf in parameters.items() if leaf is not None and part_of(leaf) is not None]:
        del parameters[key]
    for use in uses.values():
        parameters.update(zip(use.weight.keys, use.weight.leaves, strict=True))
    module.__class__ = kind
    if uses or elsewhere:
        prepare(module)
    else:
        held.pop("_elsewhere", None)
        held.pop("_trained", None)


def detach(model: Module) -> None:
    """Let every module of a model forget elements that train no longer."""
    for module in model.modules():
        held = vars(module)
        if "_trained" in held or isinstance(module, TrainedModule):
            patch_class(module, held.get("_trained", {}), held.get("_elsewhere", []), getattr(module, "_lists", ()))


def prepare(module: Any) -> None:
    """Make the kernels of a module's uses."""
    for name, use in module._trained.items():
        if isinstance(module, Layer):
            use.kernel = module._prepared(name, use.weight)


@cache
def _class(plain: Any, names: tuple[str, ...], lists: tuple[str, ...]) -> type[Module]:
    members: dict[str, Any] = {"_plain": plain, "_names": names, "_lists": lists}
    members |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    members |= {name: property(partial(aliased, name=name)) for name in names}
    members |= {name: property(partial(_with_aliases, name=name), partial(_store, name)) for name in lists}
    return type(plain.__name__, (TrainedModule, *_bases(plain)), members)


def _bases(plain: type[Module]) -> tuple[type, ...]:
    """The class, with what is known about layers of its kind before that kind itself."""
    known = layer_of(plain)
    if known is None:
        return (plain,)
    kind, layer = known
    base = type(kind.__name__, (layer, kind), {})
    return (base,) if kind is plain else (plain, base)


def _rebuilt(plain: Any, names: tuple[str, ...], lists: tuple[str, ...]) -> Module:
    kind = _class(plain, names, lists)
    return kind.__new__(kind)


def _read(module: Module) -> list[Module]:
    """The modules inside of one whose parameters it uses itself."""
    known = layer_of(type(module))
    return [getattr(module, name) for name in known[1].reads] if known else []


def _held(value: Any, tensors: Mapping[int, TorchPartialParameter]) -> set[int]:
    """Which of the tensors a list, tuple, dict or dataclass holds."""
    return {id(leaf) for leaf in pytree.leaves_of(value)} & tensors.keys()


def _with_aliases(module: Any, name: str) -> Any:
    names = {id(use.weight.tensor): key for key, use in module._trained.items()}
    others = {id(weight.tensor): weight for weight in module._elsewhere}

    def alias(leaf: Any) -> Any:
        key = names.get(id(leaf))
        return aliased(module, key) if key else elsewhere(others[id(leaf)]) if id(leaf) in others else leaf

    return pytree.map_tree(module.__dict__[name], alias)


def _store(name: str, module: Any, value: Any) -> None:
    """Keep what a module notes: the parameters themselves, where it was given aliases of them."""
    weights = [use.weight for use in module._trained.values()] + module._elsewhere
    own = {_memory(weight.tensor): weight.tensor for weight in weights}
    module.__dict__[name] = pytree.map_tree(value, lambda leaf: own.get(_memory(leaf), leaf))


def _memory(value: Any) -> Any:
    """Where a tensor lies; for what a transform wraps, and for all else, nowhere."""
    try:
        return value.data_ptr(), value.shape, value.stride()
    except (RuntimeError, AttributeError):
        return id(value)


def _differs(weight: TorchPartialParameter, loaded: Any) -> bool:
    """Whether what is loaded differs where nothing trains."""
    if not isinstance(loaded, Tensor) or loaded.shape != weight.tensor.shape:
        return False
    return weight.home.differs(loaded, weight.positions)


def repeats(tensor: Tensor) -> bool:
    """Return whether one number in memory is several elements of a tensor."""
    if not _lies(tensor) or tensor.is_contiguous() or not tensor.numel():
        return False
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return True
    # Each axis steps over all that the narrower ones span, as in any permutation of a contiguous tensor.
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return len(_numbers(tensor).unique()) < tensor.numel()
            span += (size - 1) * stride
    return False


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have a number in common; one that is the other does not count."""
    if one is other or not (_lies(one) and _lies(other) and one.numel() and other.numel()):
        return False
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (first, last), (begin, end) = _span(one), _span(other)
    if last < begin or end < first:  # as weights of recurrent layers, which lie one after another
        return False
    if one.dtype.itemsize != other.dtype.itemsize or (one.is_contiguous() and other.is_contiguous()):
        return True
    return bool(torch.isin(_numbers(one), _numbers(other)).any())


def _lies(tensor: Tensor) -> bool:
    """Whether it has a plain memory of its own or of another tensor's."""
    lazy = isinstance(tensor, torch.nn.parameter.UninitializedParameter)
    return not lazy and not is_spread(tensor) and tensor.layout is torch.strided and type(tensor.data) is Tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first and the last byte."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width, start = tensor.dtype.itemsize, int(tensor.storage_offset())
    return start * width, (start + steps + 1) * width - 1


def _numbers(tensor: Tensor) -> Tensor:
    """Which numbers of its storage the elements of a tensor are."""
    every = torch.arange(tensor.untyped_storage().nbytes() // tensor.dtype.itemsize)
    return every.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).reshape(-1)
