"""PyTorch: operations on tensors, edits, and what `torch.compile` must know of our functions.

Importing the compiler takes as long as PyTorch itself, so they are registered with it when the user imports it.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from elementgrad import _cleanup
from elementgrad._backends import registry
from elementgrad._backends.autodiff import Linearization, TensorFunction
from elementgrad._backends.base import Backend, DtypeRange, Kind
from elementgrad._backends.torch import isolate
from elementgrad._backends.torch._compat import get_eval_frame_callback, is_compiling, is_functional_tensor, to_list
from elementgrad._backends.torch.autodiff import TorchLinearization
from elementgrad._backends.torch.names import TorchNames
from elementgrad._place.edit import EditBackend
from elementgrad._place.selection import Selection
from elementgrad.errors import FrameworkError, TracedError

COMPILER = "torch._dynamo"
Function = TypeVar("Function", bound=Callable[..., Any])
_waiting: list[Callable[[], object]] = []


def once_imported(callback: Callable[[], object]) -> None:
    """Call a function as soon as the compiler is imported, which may be now."""
    if COMPILER in sys.modules:
        callback()
        return
    if not any(isinstance(finder, _CompilerFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CompilerFinder())
    _waiting.append(callback)


def in_graph(function: Function) -> Function:
    """Have the compiler keep a function as one node of its graph, instead of tracing through it."""
    once_imported(lambda: torch.compiler.allow_in_graph(function))
    return function


class _CompilerFinder(MetaPathFinder):
    """Calls the waiting callbacks when the compiler is imported, and then removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != COMPILER:
            return None
        sys.meta_path.remove(self)  # or else it would be called again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                while _waiting:
                    _waiting.pop(0)()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


Tensor = torch.Tensor


SYMBOLIC: dict[type, Kind] = {torch.SymInt: "i", torch.SymFloat: "f", torch.SymBool: "b"}
"""The types by which the compiler replaces numbers that change from call to call."""
NUMPY_DTYPES: dict[Kind, type] = {"b": np.bool_, "i": np.int64, "f": np.float64, "c": np.complex128}
"""The dtypes of the numbers of `Tensor.tolist`."""


class TorchEdit(EditBackend):
    """Edits and choices of `torch.Tensor`."""

    def number_kind(self, value: Any) -> Kind | None:
        return SYMBOLIC.get(type(value))

    def accumulate(self, x: Tensor, selection: Selection, value: Any, multiply: bool) -> Tensor:
        if multiply:
            traced = next(part for part in selection.parts if isinstance(part, Tensor))
            self._backend.require_concrete(
                traced,
                "PyTorch cannot multiply at traced indices, which may repeat; "
                "give concrete indices, or .set(place.get() * value) if none repeats",
            )
        return x.index_put(_mesh(x, selection), self._backend.cast(value, x), accumulate=True)

    def soft_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        weights = torch.softmax(logits, axis).to(x.dtype)
        return (weights * torch.where(weights == 0, 0, x)).sum(axis)

    def hard_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        chosen = logits.argmax(axis, keepdim=True)
        return x.gather(axis, chosen.expand(*x.shape[:axis], 1, *x.shape[axis + 1 :])).squeeze(axis)

    def straight_through(self, value: Tensor, surrogate: Tensor) -> Tensor:
        return _straight_through(value, surrogate)


class TorchBackend(Backend):
    """The operations of `Backend` on `torch.Tensor`."""

    name = "torch"
    records_programs = True

    def __init__(self) -> None:
        super().__init__(TorchEdit(self), TorchNames())

    def owns(self, kind: type) -> bool:
        return issubclass(kind, Tensor)

    def caches_type(self, kind: type) -> bool:
        return not kind.__module__.startswith("torch._")  # types of the compiler, which cannot guard on them

    def shape(self, x: Tensor) -> tuple[int, ...]:
        if x.is_nested and x.layout is torch.strided:  # one of layout jagged has a shape
            raise FrameworkError("elements of a nested tensor have no places; give its parts, as in x.unbind()")
        return x.shape

    def kind(self, x: Tensor) -> Kind:
        dtype = x.dtype
        if dtype.is_floating_point:
            return "f"
        return "c" if dtype.is_complex else "b" if dtype is torch.bool else "i"

    def read(self, x: Tensor) -> np.ndarray | None:
        if is_functional_tensor(x):
            return None
        try:
            return x.numpy(force=True)
        except (RuntimeError, TypeError):  # no storage to read, or a dtype that NumPy lacks
            if type(x) is not Tensor or is_compiling():
                return None
        if x.is_floating_point() and x.element_size() < 4:
            return self.read(x.float())
        return _read_wrapped(x, NUMPY_DTYPES[self.kind(x)])

    def require_concrete(self, traced: Tensor, why: str) -> NoReturn:
        if is_compiling():
            traced.nonzero()  # where graph breaks are allowed, the compiler takes this as its cue for one
        raise TracedError(why)

    is_compiling = staticmethod(torch.compiler.is_dynamo_compiling)

    def dtype(self, x: Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def compiles_here(self) -> bool:
        return torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() not in (None, False)

    def call_uncompiled(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)  # `torch.compiler.disable` wraps this one below

    def dtype_range(self, x: Tensor) -> DtypeRange | None:
        return _dtype_range(x.dtype)

    def cast(self, value: Any, like: Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(like.dtype)
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.tensor(array.astype(array.dtype.newbyteorder("="), copy=False))

    def copy(self, x: Tensor) -> Tensor:
        return x.clone()

    def take(self, x: Tensor, selection: Selection) -> Tensor:
        if selection.traced:
            return torch.ops.aten.index.Tensor(x, _mesh(x, selection))  # x[...] would read an index of no axes
        index, flips = selection.basic or selection.native(partial(_place_on, x.device))
        taken = x[index]
        return taken.flip(flips) if flips else taken

    def put(self, x: Tensor, selection: Selection, value: Any) -> Tensor:
        if selection.traced:
            return x.index_put(_mesh(x, selection), self.cast(value, x))
        index, flips = selection.basic or selection.native(partial(_place_on, x.device))
        edited = x.clone()
        try:
            edited[index] = value.expand(selection.shape).flip(flips) if flips and isinstance(value, Tensor) else value
        except (RuntimeError, TypeError) as error:
            if x.layout is not torch.strided:
                raise FrameworkError(f"elements of layout {x.layout} cannot be set; give x.to_dense()") from None
            if "vmap" not in str(error):
                raise
            # vmap refuses to write what it maps over into what it does not; index_put makes the batch itself.
            return x.index_put(_mesh(x, selection), value)
        return edited

    def where(self, mask: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(_place_on(x.device, mask), x, y)

    def stop(self, x: Tensor) -> Tensor:
        return x.detach()

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.reshape(shape)

    def broadcast(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.expand(shape)

    def precision(self, dtype: str | None) -> AbstractContextManager[Any]:
        from elementgrad._backends.torch.explain import WideningMode

        return isolate.in_mode(WideningMode()) if dtype in ("float64", "complex128") else nullcontext()

    isolated = staticmethod(isolate.isolated)

    def linearize(self, run: TensorFunction, inputs: Sequence[Tensor], create_graph: bool, order: int) -> Linearization:
        return TorchLinearization.of(run, inputs, create_graph)

    def itemsize(self, x: Tensor) -> int:
        return x.element_size()

    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def to_float64(self, x: Tensor) -> np.ndarray | None:
        return self.read(x.detach().double())

    def convert(self, x: Tensor, dtype: str) -> Tensor:
        return x.detach().to(getattr(torch, dtype))

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, surrogate: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
        return None, upstream

    @staticmethod
    def jvp(ctx: Any, value: Tensor, surrogate: Tensor) -> Tensor:
        return surrogate.clone()


@in_graph  # the compiler cannot trace through a Function that has forward mode
def _straight_through(value: Tensor, surrogate: Tensor) -> Tensor:
    return _StraightThrough.apply(value, surrogate)


@cache
def _dtype_range(dtype: torch.dtype) -> DtypeRange | None:
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return DtypeRange.from_floats(torch.finfo(dtype))
        return DtypeRange.from_integers(torch.iinfo(dtype))
    except TypeError:  # booleans, and bits without a meaning
        return None


def _read_wrapped(x: Tensor, dtype: type) -> np.ndarray | None:
    """Read a tensor inside `torch.func.grad` or `jvp`, which has values though no storage; None inside vmap."""
    try:
        return np.array(to_list(x), dtype=dtype).reshape(x.shape)
    except (RuntimeError, OverflowError):
        return None


def _place_on(device: torch.device, array: Any) -> Tensor:
    """Return an index array as a tensor on a device; traced ones are tensors already."""
    if not isinstance(array, np.ndarray):
        return array
    return torch.from_numpy(array.copy()).to(device)  # a copy, as PyTorch warns of read-only memory


def _mesh(x: Tensor, selection: Selection) -> tuple[Tensor, ...]:
    parts = [_place_on(x.device, np.asarray(part) if isinstance(part, int) else part) for part in selection.mesh()]
    # Beside others an index without axes gets one: otherwise the compiler takes the result for a scalar.
    return tuple([part.reshape(1) if not part.ndim and selection.shape else part for part in parts])


backend = TorchBackend()
registry.register_compiler(in_graph)
_cleanup.register_snapshot(isolate.snapshot_ambient_state)
once_imported(lambda: setattr(TorchBackend, "call_uncompiled", torch.compiler.disable(TorchBackend.call_uncompiled)))
