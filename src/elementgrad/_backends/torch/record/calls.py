"""Which functions of PyTorch's are called for the user in which way, and the user's line that called them.

Calls that no mode of PyTorch's sees: the user's own `autograd.Function`s, and the transforms of `torch.func`.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, wraps
from typing import Any, Protocol

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap

from elementgrad._backends.monkeypatch import AttributePatch, Replace
from elementgrad._backends.source_location import is_user_code, location_text
from elementgrad._backends.torch._compat import _SingleLevelFunction
from elementgrad._cleanup import assign, close_scopes_after, push, scope
from elementgrad._names import pytree

Tensor = torch.Tensor
clock: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""How many operations autograd has counted so far."""
WHERE = "elementgrad.where"
"""Under this key a node of the graph says which line of the user's made it."""
EXPORTS = {
    "numpy",
    "__array__",
    "tolist",
    "item",
    "is_nonzero",
    "__bool__",
    "__complex__",
    "__dlpack__",
    "__float__",
    "__index__",
    "__int__",
}
"""Leave PyTorch with bare values, which it refuses or warns of where a tensor has derivatives."""
ALONE = {
    "__deepcopy__",
    "__dir__",
    "__format__",
    "__hash__",
    "__reduce_ex__",
    "__repr__",
    "__setstate__",
    "_is_view",
    "data_ptr",
    "detach_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "retain_grad",
    "storage",
    "untyped_storage",
}
"""Are about the tensor itself and not about its values."""
REQUIRES = {"requires_grad_", "requires_grad.__set__"}
"""Switch gradients on."""
COPIES = {"__deepcopy__", "data.__get__"}
"""Of those and of properties, such as `grad` and `_base`, the ones that give a new tensor."""
PROPERTIES = {"T", "mT", "H", "mH", "real", "imag"}
"""Are about its values, while all other properties are about the tensor."""


SEVERAL = {"unbind", "split", "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit"}
"""Give several views at once."""


def name_of(func: Any) -> str:
    """The name of a function; of a property with what is done to it, as in `grad.__get__`."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return f"{getattr(func.__self__, '__name__', '')}.{name}"
    return name


def leaves_alone(name: str) -> bool:
    """Whether a function gets the user's tensors as they are."""
    title, _, access = name.partition(".")
    return title not in PROPERTIES if access else name in ALONE


def with_out(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function. PyTorch has no derivatives for `out=`, so a result is written there afterwards."""
    out = kwargs.get("out")
    if out is None or not torch.is_grad_enabled() or not _any_requires_grad((args, kwargs)):
        return func(*args, **kwargs)
    result = func(*args, **{key: value for key, value in kwargs.items() if key != "out"})
    for room, value in zip(_listed(out), _listed(result), strict=False):
        if room.shape != value.shape:
            room.resize_(value.shape)
        room.copy_(value)
    return out


def single(run: Callable[..., Any], func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Run a function such that each tensor it gives is a view of its own: of several at once none may be written to."""
    if name == "__iter__" and args[0].ndim:
        return iter(run(lambda x: [x.select(0, i) for i in range(len(x))], args, kwargs))
    if name in SEVERAL:
        return run(lambda *args, **kwargs: _apart(func(*args, **kwargs)), args, kwargs)
    return run(func, args, kwargs)


def _apart(views: Any) -> Any:
    return type(views)([x if x._base is None or not x.requires_grad else _again(x._base, x) for x in views])


def _again(base: Tensor, x: Tensor) -> Tensor:
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


def note_lines(result: Any, start: int) -> None:
    """Note the user's line in each node behind a result that was made since autograd counted to `start`."""
    where = None
    for x in pytree.leaves_of(result):
        if isinstance(x, Tensor) and x.grad_fn is not None:
            where = note_line(x.grad_fn, start, where)


def note_line(node: Any, start: int, where: str | None) -> str | None:
    """Note the user's line in each node that was made since autograd counted to `start`, and did not say yet."""
    ahead = [node]
    while ahead:
        node = ahead.pop()
        if node is None or node._sequence_nr() < start or hasattr(node, "variable") or WHERE in node.metadata:
            continue
        where = where or user_line()
        node.metadata[WHERE] = where
        ahead.extend([following for following, _ in node.next_functions])
    return where


def user_line() -> str:
    """The line, as `file.py:12`, of the nearest caller outside PyTorch and this library."""
    *_, frame = outwards(sys._getframe(1))
    return location_text(frame.f_code.co_filename, frame.f_lineno)


def outwards(frame: Any) -> Iterator[Any]:
    """The calls that lead to a frame, up to the nearest of the user's own, which comes last."""
    while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
        yield frame
        frame = frame.f_back
    yield frame


@lru_cache(4096)
def _is_users(filename: str) -> bool:
    return is_user_code(filename, ("torch",))


class TensorSet:
    """Tensors, by identity, for as long as they live."""

    def __init__(self) -> None:
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def add(self, x: Tensor) -> None:
        """Remember a tensor."""
        made, key = self._made, id(x)
        made[key] = weakref.ref(x, lambda _: made.pop(key, None))

    def __contains__(self, x: Tensor) -> bool:
        known = self._made.get(id(x))
        return known is not None and known() is x


def _listed(value: Any) -> Any:
    return value if isinstance(value, (tuple, list)) else (value,)


def _any_requires_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(map(_any_requires_grad, value.values()))
    return isinstance(value, (tuple, list)) and any(map(_any_requires_grad, value))


WRAPPERS: Any = [(torch._functorch.vmap, "_add_batch_dim"), (torch._functorch.eager_transforms, "_wrap_for_grad")]
"""By these `torch.func` takes hold of its arguments."""


class FunctionWatcher(Protocol):
    """Who calls functions for the user."""

    def stand_in(self, x: Any) -> Any:
        """What takes the place of a tensor."""

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call one."""


class _RecordingState(threading.local):
    watchers: tuple[FunctionWatcher, ...] = ()
    """Who watches in this thread, innermost last."""
    apart: int = 0
    """In how many `aside` the thread is."""


_local = _RecordingState()


def watch(recorder: FunctionWatcher) -> None:
    """Have a recorder called for every function that this thread applies, until the innermost open scope is left."""
    push(_local, "watchers", recorder)
    _watched.enter()


def watchers() -> tuple[Any, ...]:
    """Who watches in this thread, innermost last."""
    return _local.watchers


class aside(scope):  # noqa: N801
    """While we work ourselves, no recording of this thread takes it for the user's."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        assign(_local, "apart", _local.apart + 1)


def watching() -> bool:
    """Whether what this thread does is the user's."""
    return not _local.apart


def _install(replace: Replace) -> None:
    """`Function.apply` finds the method of its base class, also where it was looked up before: there it is watched."""
    replace(_SingleLevelFunction, "apply", classmethod(_apply))
    for home, name in WRAPPERS:
        replace(home, name, _wrapping(getattr(home, name)))


_watched = AttributePatch(_install)


@close_scopes_after
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = super(_SingleLevelFunction, cls).apply
    for watcher in watchers() if watching() else ():
        apply = partial(_run, watcher, apply)
    return apply(*args, **kwargs)


def _run(watcher: FunctionWatcher, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return watcher.run(apply, args, kwargs)


def _wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.func` wraps a tensor with, given the stand-in of a recorded one."""

    @close_scopes_after
    @wraps(original)
    def wrap(x: Any, *args: Any) -> Any:
        for watcher in reversed(watchers()) if watching() else ():
            x = watcher.stand_in(x)
        return original(x, *args)

    return wrap
