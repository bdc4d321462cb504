"""Names in a PyTorch module: its submodules, parameters and buffers, without what wraps it (DDP, `torch.compile`)."""

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode

from elementgrad._backends.registry import require_keras_on_tensorflow
from elementgrad._backends.torch._compat import MODULE_CALL_CODE, _global_forward_hooks, _global_forward_pre_hooks
from elementgrad._backends.torch.isolate import add_hook, enter_mode, is_own_hook, restore_attributes
from elementgrad._backends.torch.read import clone_unrecorded
from elementgrad._cleanup import Lock, defer, enter, scope
from elementgrad._names import pytree
from elementgrad._names.backend import GIVEN, Model, NamesBackend, Replacement, add_prefix, split_prefix
from elementgrad._names.capture import Capture
from elementgrad._names.stopping import plain_attributes

Module = torch.nn.Module
Tensor = torch.Tensor
WRAPPED = ("module", "_orig_mod")
"""The attributes in which a wrapper of PyTorch keeps the wrapped module: `DataParallel`, `torch.compile`, ..."""
WRAPPERS = ("torch.nn.parallel.", "torch.optim.", "torch._dynamo.")
"""The packages of these wrappers."""
SHARDED = ("torch.nn.parallel.", "torch.distributed.")
"""The packages of modules that talk to other processes."""
RUNS = "elementgrad._names.call"
"""The Python module whose frames call the user's function."""
KERAS_PARAMETERS = "._torch_params"
"""The submodule in which a Keras layer on PyTorch keeps parameters, from where it does not read them."""
_locks: WeakKeyDictionary[Module, Lock] = WeakKeyDictionary()
_originals: dict[
    int, Tensor
] = {}  # the tensors of models that are replaced in any thread, by the id of what replaces them


class TorchModel(Model):
    """A function with the modules that it is, is a method of, or is given."""

    @staticmethod
    def root_of(value: Any) -> Module | None:
        return module_of(value)

    def named_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        seen = set()
        for path, module in self.modules():
            for kind, tensors in _tensors_of(module):
                for name, tensor in tensors.items():
                    tensor = _original(tensor)
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield add_prefix(path, name), kind, tensor

    def layers(self) -> Iterator[str]:
        return (path for path, _ in self.modules() if path)

    def modules(self) -> Iterator[tuple[str, Module]]:
        """Yield every module by its first path, a root by its prefix."""
        seen: set[int] = set()
        ahead = list(self.roots.items())[::-1]
        while ahead:
            path, module = ahead.pop()
            module = unwrap(module)
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module
                children = [
                    (add_prefix(path, name), child) for name, child in module._modules.items() if child is not None
                ]
                ahead += children[::-1]

    def restore_training_flags(self) -> None:
        """Restore the training flags of all modules when the innermost open scope is left."""
        defer(_set_training_flags, [(module, module.training) for _, module in self.modules()])

    def structure(self) -> Hashable:
        parts: list[Hashable] = [*self.roots]
        for module in self._all_modules():
            parts += id(module), module.training
            if module._modules:
                parts += [(name, id(child)) for name, child in module._modules.items()]
            if not type(module).__module__.startswith("torch.nn.modules."):
                parts.append(plain_attributes(module.__dict__))
        return tuple(parts)

    def _all_modules(self) -> list[Module]:
        """Return every module once, without its path, as each read of a parameter needs them."""
        modules: dict[int, Module] = {}
        ahead = list(self.roots.values())
        for module in ahead:
            if module is not None and id(module) not in modules:
                module = unwrap(module)
                modules[id(module)] = module
                if module._modules:
                    ahead += module._modules.values()
        return list(modules.values())

    def may_stop(self) -> bool:
        """Return True unless a module that is being called has a hook, or a forward of its own, that ends something.

        What begins in a hook before a call often ends in one behind it: sharded and offloaded models load and free
        their parameters so. An exception would skip the second. Processes that train together must also all run the
        same parts.
        """
        if not all(map(is_own_hook, (*_global_forward_hooks.values(), *_global_forward_pre_hooks.values()))):
            return False
        frame: FrameType | None = sys._getframe(1)
        finished = False
        while frame is not None:
            code = frame.f_code
            if code is _capture_result.__code__:
                finished = True  # the module of the innermost call has returned, and its own hooks came before ours
            elif code is MODULE_CALL_CODE:
                module = frame.f_locals["self"]
                hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
                if not finished and ("forward" in module.__dict__ or not all(map(is_own_hook, hooks))):
                    return False
                if type(module).__module__.startswith(SHARDED):
                    return False
                finished = False
            elif frame.f_globals.get("__name__") == RUNS:
                break
            frame = frame.f_back
        return True

    def lookup(self, name: str) -> list[tuple[str, Tensor | None]]:
        matches: list[tuple[str, Tensor | None]] = []
        above, _, last = name.rpartition(".")
        if above.endswith(KERAS_PARAMETERS):
            for module in self._find(above.removesuffix(KERAS_PARAMETERS)):
                require_keras_on_tensorflow(module)
        layers = [root for prefix, root in self.roots.items() if prefix == name]
        for module in self._find(above) if last else ():
            layers += [module] if module._modules.get(last) is not None else []
            matches += [
                (kind, _original(tensors[last]))
                for kind, tensors in _tensors_of(module)
                if tensors.get(last) is not None
            ]
        return matches + [("activation", None) for _ in layers]

    @contextmanager
    def prepare(self, replacements: Sequence[Replacement], capture: Capture | None) -> Iterator[Callable[..., Any]]:
        with scope():
            if capture is not None:
                enter(capture.open())
                for path, module in self._select_modules(capture.everything, capture.bases):
                    add_hook(module._forward_hooks, partial(_capture_result, capture, path))
                given = {name.removesuffix(GIVEN) for name in capture.bases if name.endswith(GIVEN)}
                for path, module in self._select_modules(capture.given, given):
                    hook = partial(_capture_given, capture, path)
                    add_hook(module._forward_pre_hooks_with_kwargs, hook)
                    add_hook(module._forward_pre_hooks, hook)
            if replacements:
                if "torch.distributed.fsdp" in sys.modules:
                    # Imported here, since code for training imports the compiler of PyTorch.
                    from elementgrad._backends.torch.distributed import check_replaceable

                    for root in self.roots.values():
                        check_replaceable(root, {each.name: each.held for each in replacements})
                self._replace(replacements)
            yield self.function

    def _select_modules(self, everything: bool, names: Collection[str]) -> Iterator[tuple[str, Module]]:
        if everything:
            yield from ((path, module) for path, module in self.modules() if path)
        for name in names:
            yield from ((name, module) for module in self._find(name))

    def _replace(self, new: Sequence[Replacement]) -> None:
        """Replace tensors until the scope is left, in all modules that share them.

        Attributes that modules derive from them are restored too. One thread at a time: the first to restore would
        leave the tensors of the second in the model. A parameter that is in none of the modules is replaced in the
        arguments of calls.
        """
        for root in sorted(self.roots.values(), key=id):  # in the same order in all threads
            _locks.setdefault(root, Lock()).take()
        defer(_forget_originals, [id(each.new) for each in new])
        others = {id(each.held): each.new for each in new}
        held_in_modules = set()
        _originals.update({id(each.new): each.held for each in new})
        for module in self._all_modules():
            for tensors in (module._parameters, module._buffers):
                here = [name for name, tensor in tensors.items() if id(tensor) in others] if tensors else ()
                if here:
                    held_in_modules.update([id(tensors[name]) for name in here])
                    defer(_restore_module, module, tensors, dict(tensors), dict(module.__dict__))
                    _assign_items(tensors, {name: others[id(tensors[name])] for name in here})
        closed_over = {key: other for key, other in others.items() if key not in held_in_modules}
        if closed_over:
            # Imported here, since plain reads do not need it.
            from elementgrad._backends.torch.record.intercept import push_recorder

            substitution = _Substitution(closed_over)
            push_recorder(substitution)
            enter_mode(substitution)

    def _find(self, path: str) -> list[Module]:
        """Return the modules with this path; they are several where two roots have the same names."""
        matches = []
        for prefix, root in self.roots.items():
            rest = split_prefix(prefix, path)
            module = None if rest is None else unwrap(root)
            for name in rest.split(".") if rest else ():
                child = module._modules.get(name) if module is not None else None
                module = None if child is None else unwrap(child)
            matches += [] if module is None else [module]
        return matches


class TorchNames(NamesBackend):
    """Names in PyTorch modules."""

    model = TorchModel
    snapshot = staticmethod(clone_unrecorded)

    def traceable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_call_in_mode, function)

    def is_model(self, function: Any) -> bool:
        return isinstance(function, Module) or module_of(function) is not None

    def forward_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return unwrap(function).forward if isinstance(function, Module) else function

    def name_closed_over(self, x: Tensor) -> str | None:
        is_parameter = isinstance(x, torch.nn.Parameter) or (x.is_leaf and x.requires_grad)
        return "parameter" if is_parameter else None


class _Substitution(TorchFunctionMode):
    """Passes other tensors in place of some parameters, wherever a function of PyTorch is called with them."""

    def __init__(self, others: Mapping[int, Tensor]):
        super().__init__()
        self._others = others

    def substitute(self, x: Any) -> Any:
        return self._others.get(id(x), x)

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.map_tree((args, kwargs), self.substitute)
        return func(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from elementgrad._backends.torch.record.intercept import name_of, takes_originals

        kwargs = kwargs or {}
        return func(*args, **kwargs) if takes_originals(name_of(func)) else self.run(func, args, kwargs)


def module_of(function: Any) -> Module | None:
    """Return the module that a function is, or is a method of; None for scripted ones, which hide their contents."""
    owner = function if isinstance(function, Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, Module) and not isinstance(owner, torch.jit.ScriptModule) else None


def _restore_module(module: Module, tensors: Any, before: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
    _assign_items(tensors, before)
    restore_attributes(module, attributes)


def _assign_items(tensors: Any, new: Mapping[str, Any]) -> None:
    for name, x in new.items():  # the tensors of a scripted module are no dict, and have no update()
        tensors[name] = x


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


def _capture_given(capture: Capture, path: str, module: Module, args: Any, kwargs: Any) -> Any:
    return capture.capture_given(path, args, kwargs, module.forward) if capture.active else None


def _capture_result(capture: Capture, path: str, module: Module, _: Any, result: Any) -> Any:
    new = capture.capture("activation", path, result) if capture.active else result
    return None if new is result else new


def _call_in_mode(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, with gradients enabled again where it has left them disabled: its results are read next."""
    enabled = torch.is_grad_enabled()
    result = function(*args, **kwargs)
    if torch.is_grad_enabled() is not enabled:
        torch.set_grad_enabled(enabled)
    return result


def _set_training_flags(modules: Iterable[tuple[Module, bool]]) -> None:
    for module, training in modules:
        module.training = training
