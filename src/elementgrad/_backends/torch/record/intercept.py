"""Interception of the user's calls for the active recorders of a thread.

Most calls come by a `TorchFunctionMode`. Two kinds do not, and are patched while a recorder is active:
`autograd.Function.apply`, and the functions by which `torch.func` wraps its arguments. The tables of names say which
functions of PyTorch need special treatment. Every graph node made on the way is labeled with the user's line.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, wraps
from types import MethodType
from typing import Any, Protocol

import torch

from elementgrad._backends.source_location import is_user_code, location_text
from elementgrad._backends.torch._compat import (
    APPLY_IS_IN_C,
    FUNCTORCH_WRAPPERS,
    FunctionMeta,
    _SingleLevelFunction,
    autograd_function,
    functorch_is_active,
)
from elementgrad._cleanup import AttributePatch, Replace, assign, close_scopes_after, push, scope
from elementgrad._names import pytree

Tensor = torch.Tensor
LINE_KEY = "elementgrad.where"
"""Key in a graph node's metadata: the user's line that made it."""
EXPORTS = {
    *("numpy", "__array__", "tolist", "item", "is_nonzero", "__bool__", "__complex__", "__dlpack__", "__float__"),
    *("__index__", "__int__"),
}
"""Functions that return bare values, which PyTorch refuses or warns about for a tensor that requires gradients."""
TENSOR_METHODS = {
    *("__deepcopy__", "__dir__", "__format__", "__hash__", "__reduce_ex__", "__repr__", "__setstate__", "_is_view"),
    *("data_ptr", "detach_", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"),
    *("storage", "untyped_storage"),
}
"""Methods about the tensor object and not about its values; they get the user's tensor and no proxy."""
ENABLE_GRAD = {"requires_grad_", "requires_grad.__set__"}
COPIES = {"__deepcopy__", "data.__get__"}
"""Those of `TENSOR_METHODS`, and of properties such as `grad` and `_base`, that return a new tensor."""
VALUE_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag"}
"""Properties about the values; all other properties are about the tensor object."""
MULTI_VIEWS = {"unbind", "split", "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit"}
"""Functions that return several views at once."""


class CallInterceptor(Protocol):
    """A recorder of the user's calls."""

    def substitute(self, x: Any) -> Any:
        """Return the tensor to use in place of `x`."""

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function for the user."""


class _ThreadState(threading.local):
    recorders: tuple[CallInterceptor, ...] = ()
    """Innermost last."""
    pauses: int = 0
    """Number of `pause_recording` blocks that the thread is in."""
    applying: str = ""
    """The next lookup of PyTorch, in C, for a function that it applies: none yet, `PLAIN` or `PASSING`."""
    applied: Any = None
    """The class of that function."""
    returns_one: bool = False
    """True if that function returned no tuple."""


_local = _ThreadState()


def push_recorder(recorder: CallInterceptor) -> None:
    """Send every call of this thread to a recorder, until the innermost open scope is left."""
    push(_local, "recorders", recorder)
    assign(_local, "applying", "")
    _patch.enter()


def active_recorders() -> tuple[Any, ...]:
    """Return the recorders of this thread, innermost last."""
    return _local.recorders


class pause_recording(scope):  # noqa: N801
    """Block of the library's own code, whose calls no recorder of this thread records."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        assign(_local, "pauses", _local.pauses + 1)


def is_paused() -> bool:
    """Return True if this thread is in `pause_recording`."""
    return bool(_local.pauses)


def _install(replace: Replace) -> None:
    # Before 2.15 `Function.apply` finds the method of its base class, also where it was looked up before.
    replace(_SingleLevelFunction, "apply", classmethod(_apply))
    if APPLY_IS_IN_C:
        replace(torch.autograd.Function, "apply", classmethod(_apply))
        replace(FunctionMeta, "__getattribute__", _look_up)
        replace(autograd_function, BIND, partial(_bind_arguments, getattr(autograd_function, BIND)))
    for module, name in FUNCTORCH_WRAPPERS:
        replace(module, name, _with_substitutes(getattr(module, name)))


_patch = AttributePatch(_install)


@close_scopes_after
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    call: Callable[..., Any] = MethodType(apply, cls)
    for recorder in active_recorders() if not is_paused() else ():
        call = partial(_run, recorder, call)
    return call(*args, **kwargs)


def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function as PyTorch does. Recorders get it as a method of its class, and know it by that and its name."""
    with scope():
        assign(_local, "applying", PLAIN)
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)


# An `apply` that was bound before the recording, since PyTorch 2.15. It is a function in C, which no patch reaches, but
# it looks up all that it needs in the user's class: whether there is a `setup_context`, then `forward`, and so on. So
# the lookups of these classes are patched. They pretend that there is a `setup_context`: PyTorch then has a function in
# Python, which is patched as well, bind the arguments of `forward`. There the recorders apply the user's function. The
# results become the arguments of `_PassedOn`, whose parts answer all lookups that are left.

PLAIN, PASSING = "plain", "passing"
"""PyTorch is to look up the user's function itself; it is to look up `_PassedOn` in its place."""
BIND = "_bind_default_args"


def _is_recorded() -> bool:
    return bool(_local.recorders) and not _local.applying and not is_paused() and not functorch_is_active()


def _look_up(cls: Any, name: str) -> Any:
    find = type.__getattribute__
    if _local.applying == PASSING and not is_paused():
        if name == "setup_context":  # the last lookup
            _local.applying = ""
        return find(_PassedOn, name)
    if name == "setup_context" and cls is not _SingleLevelFunction and _is_recorded():
        _local.applied = cls
        return find(cls if _has_setup_context(cls) else _PassedOn, name)
    if name == "forward" and _local.applying == PLAIN and not _has_setup_context(cls):
        _local.applying = ""  # what runs inside is recorded again; others get there in `_bind_arguments`
    return find(cls, name)


def _has_setup_context(cls: Any) -> bool:
    find = type.__getattribute__
    return find(cls, "setup_context") is not find(_SingleLevelFunction, "setup_context")


@close_scopes_after
def _bind_arguments(bind: Callable[..., Any], forward: Any, args: Any, kwargs: Any) -> Any:
    if not _is_recorded():
        _local.applying = ""
        return bind(forward, args, kwargs)
    results = _apply(_local.applied, *args, **(kwargs or {}))
    _local.applying, _local.returns_one = PASSING, not isinstance(results, tuple)
    return ((results,) if _local.returns_one else results), {}


class _PassedOn(torch.autograd.Function):
    """The results of the user's function, as tensors that are no views and may be written to in place."""

    @staticmethod
    def forward(*results: Any) -> Any:
        with pause_recording():
            passed = tuple([x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in results])
            for recorder in active_recorders():
                if hasattr(recorder, "on_pass"):
                    recorder.on_pass(results, passed)
        return passed[0] if _local.returns_one else passed

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return upstream


def _run(recorder: CallInterceptor, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return recorder.run(apply, args, kwargs)


def _with_substitutes(wrap_tensor: Callable[..., Any]) -> Callable[..., Any]:
    @close_scopes_after
    @wraps(wrap_tensor)
    def wrap(x: Any, *args: Any) -> Any:
        for recorder in reversed(active_recorders()) if not is_paused() else ():
            x = recorder.substitute(x)
        return wrap_tensor(x, *args)

    return wrap


def name_of(func: Any) -> str:
    """Return the name of a function; of a property with the kind of access, as in `grad.__get__`."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return f"{getattr(func.__self__, '__name__', '')}.{name}"
    return name


def takes_originals(name: str) -> bool:
    """Return True for a function that must get the user's tensors and no proxies."""
    title, _, access = name.partition(".")
    return title not in VALUE_PROPERTIES if access else name in TENSOR_METHODS


def call_with_out(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function; write to `out=` afterwards, since PyTorch has no derivatives for `out=`."""
    out = kwargs.get("out")
    if out is None or not torch.is_grad_enabled() or not _any_requires_grad((args, kwargs)):
        return func(*args, **kwargs)
    result = func(*args, **{key: value for key, value in kwargs.items() if key != "out"})
    for destination, value in zip(_as_sequence(out), _as_sequence(result), strict=False):
        if destination.shape != value.shape:
            destination.resize_(value.shape)
        destination.copy_(value)
    return out


def call_with_separate_views(
    run: Callable[..., Any], func: Callable[..., Any], name: str, args: Any, kwargs: Any
) -> Any:
    """Run a function such that each tensor of the result is a view of its own.

    PyTorch forbids writes to views that one function returned together, as `unbind` does.
    """
    if name == "__iter__" and args[0].ndim:
        return iter(run(lambda x: [x.select(0, i) for i in range(len(x))], args, kwargs))
    if name in MULTI_VIEWS:
        return run(lambda *args, **kwargs: _separate_views(func(*args, **kwargs)), args, kwargs)
    return run(func, args, kwargs)


def _separate_views(views: Any) -> Any:
    return type(views)(
        [
            x if x._base is None or not x.requires_grad else x._base.as_strided(x.shape, x.stride(), x.storage_offset())
            for x in views
        ]
    )


def _as_sequence(value: Any) -> Any:
    return value if isinstance(value, (tuple, list)) else (value,)


def _any_requires_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(map(_any_requires_grad, value.values()))
    return isinstance(value, (tuple, list)) and any(map(_any_requires_grad, value))


def label_nodes(result: Any, start: int) -> None:
    """Store the user's line in each graph node behind `result` that is not older than sequence number `start`."""
    line = None
    for x in pytree.leaves_of(result):
        if isinstance(x, Tensor) and x.grad_fn is not None:
            line = label_node(x.grad_fn, start, line)


def label_node(node: Any, start: int, line: str | None) -> str | None:
    """Store the user's line in a node and in those before it that are new and unlabeled; return the line if known."""
    stack = [node]
    while stack:
        node = stack.pop()
        if node is None or node._sequence_nr() < start or hasattr(node, "variable") or LINE_KEY in node.metadata:
            continue
        line = line or _user_line()
        node.metadata[LINE_KEY] = line
        stack.extend([parent for parent, _ in node.next_functions])
    return line


def _user_line() -> str:
    *_, frame = frames_to_user(sys._getframe(1))
    return location_text(frame.f_code.co_filename, frame.f_lineno)


def frames_to_user(frame: Any) -> Iterator[Any]:
    """Yield frames outwards, up to the nearest one outside PyTorch and this library, which comes last."""
    while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
        yield frame
        frame = frame.f_back
    yield frame


@lru_cache(4096)
def _is_users(filename: str) -> bool:
    return is_user_code(filename, ("torch",))


class TensorSet:
    """Set of tensors by identity, which does not keep them alive."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Tensor]] = {}

    def add(self, x: Tensor) -> None:
        """Add a tensor."""
        refs, key = self._refs, id(x)
        refs[key] = weakref.ref(x, lambda _: refs.pop(key, None))

    def __contains__(self, x: Tensor) -> bool:
        ref = self._refs.get(id(x))
        return ref is not None and ref() is x
