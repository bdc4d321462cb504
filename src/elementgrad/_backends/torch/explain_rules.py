"""Tables of PyTorch's functions: what users call them, their kinds, and what each does to a derivative.

`TorchOp` is one recorded call. It keeps the tensors that it read, and runs again by itself: with dual numbers for its
jvp, and with a graph of its own for its vjp.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from elementgrad._backends.torch.isolate import DEVICES, DUAL_NUMBERS, NO_AUTOCAST, Precision, RandomState, set_random
from elementgrad._backends.torch.record.intercept import EXPORTS, VALUE_PROPERTIES, name_of
from elementgrad._backends.torch.tensor import backend
from elementgrad._cleanup import enter, scope
from elementgrad._explain import kinds
from elementgrad._explain.connect import Cut, Cuts
from elementgrad._explain.trace import Numbers, Op
from elementgrad._names import pytree

Tensor = torch.Tensor
USER_NAMES = kinds.parse_words(
    """
    __getitem__=indexing data.__get__=.data multi_head_attention_forward=attention __rsub__=sub __rtruediv__=div
    __rdiv__=div __rpow__=pow __rmatmul__=matmul __float__=float __int__=int __index__=int __bool__=bool
    is_nonzero=bool __array__=numpy __dlpack__=numpy __floordiv__=floor_divide __rfloordiv__=floor_divide __radd__=add
    __rmul__=mul __iadd__=add_ __isub__=sub_ __imul__=mul_ __itruediv__=div_ __ipow__=pow_ __deepcopy__=deepcopy
    """
) | {"__setitem__": "item assignment", "data.__set__": ".data ="}
"""Names that no user writes, and what they call them."""
FROM_PYTHON = {"tensor", "as_tensor", "asarray", "from_numpy"}
"""Make tensors of plain numbers."""
UNSEEN_IMPORTS = ("from_numpy", "frombuffer", "from_dlpack")
"""Functions that make tensors of the memory of others, of which no mode of PyTorch is told."""
COPYING = {"tensor", "new_tensor"}
"""Make tensors of plain numbers or tensors, and never keep a derivative."""
CUTS: Cuts = {
    **dict.fromkeys(("detach", "detach_", "data.__get__", "__deepcopy__"), ("detached", "")),
    **dict.fromkeys((*FROM_PYTHON, "new_tensor"), ("left-framework", "it copies numbers and not where they came from")),
    "grad": ("inner-gradient", "create_graph is False"),
    "data.__set__": ("assigned-state", "it sets numbers and not where they came from"),
}
"""Functions that let no derivative through."""
BRANCHING = {"__bool__", "is_nonzero", "__contains__", "equal", "allclose"}
"""Give a boolean to Python."""
NO_VALUES = frozenset(
    """
    __dir__ __format__ __hash__ __len__ __reduce_ex__ __repr__ __setstate__ _is_view data_ptr dim element_size
    get_device has_names is_complex is_contiguous is_floating_point is_inference is_same_size is_shared
    is_signed ndimension nelement numel register_post_accumulate_grad_hook requires_grad_ retain_grad size
    storage storage_offset stride untyped_storage _has_compatible_shallow_copy_type is_pinned record_stream
    zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full
    """.split()  # noqa: SIM905
)
"""Take a tensor, and read none of its numbers."""
SHAPED_BY_OTHER = {"expand_as", "view_as", "reshape_as", "type_as", "to"}
"""Read the numbers of their first tensor alone; a second one has the shape or the dtype of the result."""


def user_name(func: Any) -> str:
    name = name_of(func)
    if name in USER_NAMES:
        return USER_NAMES[name]
    title = name.partition(".")[0].removeprefix("linalg_").removesuffix("_with_indices")
    return title[2:-2] if title.startswith("__") and title.endswith("__") else title


def reads_no_values(name: str) -> bool:
    """Return True if a function computes nothing from the numbers of its tensors."""
    title, _, access = name.partition(".")
    if access:
        return title not in (*VALUE_PROPERTIES, "data")
    return name in NO_VALUES or (not name.startswith("__") and name.startswith("_"))


def leaves_framework(name: str) -> bool:
    """Return True if a function returns plain numbers, arrays or booleans."""
    return name in EXPORTS or name in BRANCHING


def recording_gap() -> Cut | None:
    """Return why PyTorch computes no gradients of what is called now, or None if it does."""
    if torch.is_inference_mode_enabled():
        return "no-grad", "it runs in inference mode"
    return None if torch.is_grad_enabled() else ("no-grad", "torch.is_grad_enabled() is False there")


def written_tensors(func: Any, name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among the arguments that a function may write to."""
    if name == "apply":  # a function of the user's
        return tensors_in((args, kwargs))
    if name in ("batch_norm", "instance_norm"):  # their statistics
        return tensors_in((args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")))
    if name.endswith("__"):
        writes = name.endswith("__set__") or name.startswith(("__i", "__set"))
    else:
        switched_on = [position for position, x in enumerate(args) if x is True]
        inplace = bool(kwargs.get("inplace")) or (bool(switched_on) and _inplace_position(func) in switched_on)
        writes = name.endswith("_") or "out" in kwargs or inplace
    return tensors_in((args[:1], kwargs.get("out"), kwargs.get("input"))) if writes else []


@lru_cache(1024)
def _inplace_position(func: Any) -> int | None:
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # it is not written in Python
        return None
    return names.index("inplace") if "inplace" in names else None


def tensors_in(value: Any) -> list[Tensor]:
    return [x for x in pytree.leaves_of(value) if isinstance(x, Tensor)]


CLAMPS = {"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_"}
"""They are rectifiers if their only bound is a lower one of zero."""
ADDING = {"sum", "mean", "prod"}
"""Reductions that `scatter_reduce` and the like may do instead of choosing."""
NUMPY_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
NUMPY_DTYPES |= {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
"""The dtypes that NumPy has as well."""


def kind_of(word: str, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return the kind of a function, by the user's word for it and its arguments."""
    kind = kinds.KINDS.get(word)
    if word in CLAMPS:
        named = dict(zip(("input", "min", "max"), args, strict=False)) | dict(kwargs)
        low = named.get("min")
        rectifies = named.get("max") is None and not isinstance(low, Tensor) and low == 0
        return kinds.RECTIFIER if rectifies else None
    flat = [*args, *kwargs.values()]
    adds = kind == kinds.CHOICE and any(isinstance(x, str) and x in ADDING for x in flat)
    return None if adds or any(isinstance(x, torch.dtype) for x in flat) else kind


@dataclass(frozen=True)
class Slot(pytree.Leaf):
    """Stands for an operand among the arguments of a recorded call."""

    index: int


@dataclass(eq=False)
class TorchOp(Op):
    """One recorded call of a function."""

    func: Callable[..., Any] = field(default=lambda: None, repr=False)
    args: Any = field(default=(), repr=False)
    """Positional and keyword arguments, with a `Slot` for each tensor."""
    writes: Sequence[int] = ()
    """The operands that it writes to."""
    returned: Sequence[int] = ()
    """Which of the tensors that it returns or writes to are its results."""
    random: RandomState | None = None
    """The state of the generators before it, if it draws random numbers."""
    precision: Precision = NO_AUTOCAST
    """The autocast in which it ran."""

    def rerun(self, operands: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [y.detach() for y in self._run(operands)]

    def jvp(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        try:
            with DUAL_NUMBERS.hold(), forward_ad.dual_level():
                pairs = zip(self.operands, tangents, strict=True)
                duals = [x if t is None else forward_ad.make_dual(x, t) for x, t in pairs]
                return [_tangent_of(y) for y in self._run(duals)]
        except (NotImplementedError, RuntimeError):  # there is no forward rule
            pass
        return self._transposed(tangents)

    def _transposed(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the jvp as the vjp of the vjp, which is linear in the cotangents."""
        wanted = [t is not None for t in tangents]
        leaves, results = self._run_tracked(wanted)
        outputs = [y for y in results if y.requires_grad]
        if not outputs:
            return [None] * len(results)
        seeds = [torch.zeros_like(y, requires_grad=True) for y in outputs]
        moving = [(x, t) for x, t in zip(leaves, tangents, strict=True) if t is not None]
        inputs = [x for x, _ in moving]
        pulled = torch.autograd.grad(outputs, inputs, seeds, create_graph=True, allow_unused=True)
        pairs = [(g, t) for g, (_, t) in zip(pulled, moving, strict=True) if g is not None and g.requires_grad]
        if not pairs:
            return [None if not y.requires_grad else torch.zeros_like(y) for y in results]
        pushed = torch.autograd.grad([g for g, _ in pairs], seeds, [t for _, t in pairs], allow_unused=True)
        by_output = dict(zip(map(id, outputs), pushed, strict=True))
        return [by_output.get(id(y)) for y in results]

    def vjp(self, cotangents: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        leaves, results = self._run_tracked(wanted)
        pairs = [(y, g) for y, g in zip(results, cotangents, strict=True) if g is not None and y.requires_grad]
        pulled: Sequence[Any] = [None] * sum(wanted)
        if pairs:
            inputs = [x for x, needed in zip(leaves, wanted, strict=True) if needed]
            outputs, seeds = [y for y, _ in pairs], [g for _, g in pairs]
            pulled = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
        gradients = iter([None if g is None else dense(g) for g in pulled])
        return [next(gradients) if needed else None for needed in wanted]

    def _run_tracked(self, wanted: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = zip(self.operands, wanted, strict=True)
        leaves = [x.detach().requires_grad_() if needed else x for x, needed in pairs]
        with torch.enable_grad():
            return leaves, self._run(leaves)

    def _run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        given = [x.clone() if n in self.writes else x for n, x in enumerate(operands)]

        def fill(x: Any) -> Any:
            return given[x.index] if isinstance(x, Slot) else x

        args, kwargs = pytree.map_tree(self.args, fill)
        with self._surroundings():
            made = self.func(*args, **kwargs)
        made = [x for x in pytree.leaves_of(made) if isinstance(x, Tensor)]
        changed = list({id(x): x for x in (*made, *[given[n] for n in self.writes])}.values())
        return [changed[n] for n in self.returned]

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        if self.precision is NO_AUTOCAST and self.random is None:
            yield
            return
        with scope():
            if self.random is not None:
                set_random(self.random)
            for device, (enabled, dtype) in zip(DEVICES, self.precision, strict=True):
                if enabled:
                    enter(torch.autocast(device, dtype=dtype))
            yield


def _tangent_of(x: Tensor) -> Tensor | None:
    return forward_ad.unpack_dual(x).tangent if x.is_floating_point() or x.is_complex() else None


def dense(x: Tensor) -> Tensor:
    return x if x.layout == torch.strided else x.to_dense()


@dataclass(frozen=True)
class Geometry(pytree.Leaf):
    """The place of a tensor in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int

    @classmethod
    def of(cls, x: Tensor) -> "Geometry":
        return cls(tuple(x.shape), x.stride(), int(x.storage_offset()), x.element_size())

    @property
    def end(self) -> int:
        return self.offset + 1 + sum([(n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)])


def overlay(view: Tensor, written: Tensor, at: Geometry, written_at: Geometry) -> Tensor:
    """Return what a tensor holds after a write to another one that shares its memory."""
    if at.itemsize != written_at.itemsize:
        raise NotImplementedError("tensors of several dtypes share memory")
    places = torch.full((max(at.end, written_at.end),), -1)
    numbers = torch.arange(written.numel()).reshape(written_at.shape)
    places.as_strided(written_at.shape, written_at.stride, written_at.offset).copy_(numbers)
    places = places.as_strided(at.shape, at.stride, at.offset).to(view.device)
    return torch.where(places >= 0, written.reshape(-1)[places.clamp(min=0)].to(view.dtype), view)


class TorchNumbers(Numbers):
    def array(self, x: Tensor) -> np.ndarray:
        return super().array(dense(x))


NUMBERS = TorchNumbers(backend)
