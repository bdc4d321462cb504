"""Names in a PyTorch module: its submodules, parameters and buffers, without what wraps it (DDP, `torch.compile`)."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from elementgrad._backends.registry import require_keras_on_tensorflow
from elementgrad._backends.torch.isolate import add_hook, restore_attributes
from elementgrad._backends.torch.read import clone_unrecorded
from elementgrad._cleanup import Lock, defer, enter, scope
from elementgrad._names.backend import Model, NamesBackend
from elementgrad._names.capture import Capture

Module = torch.nn.Module
Tensor = torch.Tensor
WRAPPED = ("module", "_orig_mod")
"""The attributes in which a wrapper of PyTorch keeps the wrapped module: `DataParallel`, `torch.compile`, ..."""
WRAPPERS = ("torch.nn.parallel.", "torch.optim.", "torch._dynamo.")
"""The packages of these wrappers."""
KERAS_PARAMETERS = "._torch_params"
"""The submodule in which a Keras layer on PyTorch keeps parameters, from where it does not read them."""
_locks: WeakKeyDictionary[Module, Lock] = WeakKeyDictionary()
_originals: dict[
    int, Tensor
] = {}  # the tensors of models that are replaced in any thread, by the id of what replaces them


class TorchNames(NamesBackend):
    """Names in PyTorch modules."""

    snapshot = staticmethod(clone_unrecorded)

    def is_model(self, function: Any) -> bool:
        return isinstance(function, Module) or module_of(function) is not None

    def model(self, function: Callable[..., Any]) -> Model:
        return TorchModel(function)

    def forward_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return unwrap(function).forward if isinstance(function, Module) else function


class TorchModel(Model):
    """A module, or a method of one."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._root = module_of(function)

    def named_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        seen = set()
        for path, module in self._modules():
            for kind, tensors in _tensors_of(module):
                for name, tensor in tensors.items():
                    tensor = _original(tensor)
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield _join(path, name), kind, tensor

    def layers(self) -> Iterator[str]:
        return (path for path, _ in self._modules() if path)

    def modules(self) -> Iterator[tuple[str, Module]]:
        return self._modules()

    def lookup(self, name: str) -> list[tuple[str, Tensor | None]]:
        if self._root is None:
            return []
        matches: list[tuple[str, Tensor | None]] = []
        above, _, last = name.rpartition(".")
        module = self._find(above)
        if above.endswith(KERAS_PARAMETERS):
            require_keras_on_tensorflow(self._find(above.removesuffix(KERAS_PARAMETERS)))
        if module is not None:
            matches += [
                (kind, _original(tensors[last]))
                for kind, tensors in _tensors_of(module)
                if tensors.get(last) is not None
            ]
        return matches + ([("activation", None)] if self._find(name) is not None else [])

    @contextmanager
    def prepare(self, replacements: Mapping[str, Tensor], capture: Capture | None) -> Iterator[Callable[..., Any]]:
        with scope():
            if capture is not None:
                enter(capture.open())
                for path, module in self._captured_modules(capture):
                    add_hook(module._forward_hooks, partial(_capture_result, capture, path))
            if replacements:
                tensors = {name: self.lookup(name)[0][1] for name in replacements}
                if self._root is not None and "torch.distributed.fsdp" in sys.modules:
                    # Imported here, since code for training imports the compiler of PyTorch.
                    from elementgrad._backends.torch.distributed import check_replaceable

                    check_replaceable(self._root, tensors)
                self._replace(list(zip(tensors.values(), replacements.values(), strict=True)))
            yield self.function

    def _captured_modules(self, capture: Capture) -> Iterator[tuple[str, Module]]:
        if capture.everything:
            yield from ((path, module) for path, module in self._modules() if path)
        for name in capture.bases:
            module = self._find(name)
            if module is not None:
                yield name, module

    def _replace(self, new: Sequence[tuple[Any, Tensor]]) -> None:
        """Replace tensors until the scope is left, in all modules that share them.

        Attributes that modules derive from them are restored too. One thread at a time: the first to restore would
        leave the tensors of the second in the model.
        """
        if self._root is not None:
            _locks.setdefault(self._root, Lock()).take()
        defer(_forget_originals, [id(other) for _, other in new])
        others = {id(tensor): other for tensor, other in new}
        _originals.update({id(other): tensor for tensor, other in new})
        for _, module in self._modules():
            for tensors in (module._parameters, module._buffers):
                here = {name: others[id(tensor)] for name, tensor in tensors.items() if id(tensor) in others}
                if here:
                    defer(_restore_module, module, tensors, dict(tensors), dict(module.__dict__))
                    tensors.update(here)  # type: ignore[arg-type]

    def _modules(self) -> Iterator[tuple[str, Module]]:
        """Yield every module by its first path, the root by an empty one."""
        seen: set[int] = set()

        def walk(module: Module, path: str) -> Iterator[tuple[str, Module]]:
            module = unwrap(module)
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module
                for name, child in module._modules.items():
                    if child is not None:
                        yield from walk(child, _join(path, name))

        return walk(self._root, "") if self._root is not None else iter(())

    def _find(self, path: str) -> Module | None:
        module = None if self._root is None else unwrap(self._root)
        for name in path.split(".") if path else ():
            child = module._modules.get(name) if module is not None else None
            module = None if child is None else unwrap(child)
        return module


def module_of(function: Any) -> Module | None:
    """Return the module that a function is, or is a method of; None for scripted ones, which hide their contents."""
    owner = function if isinstance(function, Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, Module) and not isinstance(owner, torch.jit.ScriptModule) else None


def _restore_module(module: Module, tensors: Any, before: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
    tensors.update(before)
    restore_attributes(module, attributes)


def _forget_originals(others: Sequence[int]) -> None:
    for other in others:
        _originals.pop(other, None)


def unwrap(module: Module) -> Module:
    """Return the module inside of PyTorch's wrappers."""
    while type(module).__module__.startswith(WRAPPERS) and list(module._modules) in ([name] for name in WRAPPED):
        module = next(iter(module._modules.values()))  # type: ignore[assignment]
    return module


def _tensors_of(module: Module) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Return parameters and buffers of a module, without the leaves of elements that train."""
    trained = module.__dict__.get("_trained")
    parameters: Mapping[str, Any] = module._parameters
    if trained:
        leaves = {name for parameter in trained.values() for name in parameter.leaf_names}
        parameters = {name: tensor for name, tensor in parameters.items() if name not in leaves}
    return ("parameter", parameters), ("buffer", module._buffers)


def _original(tensor: Any) -> Any:
    return _originals.get(id(tensor), tensor)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _capture_result(capture: Capture, path: str, module: Module, _: Any, result: Any) -> Any:
    new = capture.capture("activation", path, result) if capture.active else result
    return None if new is result else new
