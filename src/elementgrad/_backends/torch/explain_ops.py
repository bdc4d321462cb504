"""Functions of PyTorch's in the words of the user, and what each does to a derivative.

A call of a function that was watched, and who measures it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elementgrad._backends.torch.record.intercept import EXPORTS, VALUE_PROPERTIES, name_of
from elementgrad._explain.trace import Op

WORDS = {
    "__getitem__": "indexing",
    "__setitem__": "item assignment",
    "data.__get__": ".data",
    "data.__set__": ".data =",
    "multi_head_attention_forward": "attention",
    "__rsub__": "sub",
    "__rtruediv__": "div",
    "__rdiv__": "div",
    "__rpow__": "pow",
    "__rmatmul__": "matmul",
    "__float__": "float",
    "__int__": "int",
    "__index__": "int",
    "__bool__": "bool",
    "is_nonzero": "bool",
    "__array__": "numpy",
    "__dlpack__": "numpy",
    "__floordiv__": "floor_divide",
    "__rfloordiv__": "floor_divide",
    "__radd__": "add",
    "__rmul__": "mul",
    "__iadd__": "add_",
    "__isub__": "sub_",
    "__imul__": "mul_",
    "__itruediv__": "div_",
    "__ipow__": "pow_",
    "__deepcopy__": "deepcopy",
}
"""Names that no user writes, and what they write instead."""
DETACHES = {"detach", "detach_", "data.__get__", "__deepcopy__"}
"""Give the same numbers without their derivative."""
IMPORTS = {"tensor", "as_tensor", "asarray", "from_numpy"}
"""Make tensors of plain numbers."""
COPIES = {"tensor", "new_tensor"}
"""Of those, the ones that never keep a derivative."""
DECIDES = {"__bool__", "is_nonzero", "__contains__", "equal", "allclose"}
"""Give a truth to Python."""
ASIDE = {
    "__dir__",
    "__format__",
    "__hash__",
    "__len__",
    "__reduce_ex__",
    "__repr__",
    "__setstate__",
    "_is_view",
    "data_ptr",
    "dim",
    "element_size",
    "get_device",
    "has_names",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_same_size",
    "is_shared",
    "is_signed",
    "ndimension",
    "nelement",
    "numel",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "retain_grad",
    "size",
    "storage",
    "storage_offset",
    "stride",
    "type",
    "untyped_storage",
    "_has_compatible_shallow_copy_type",
    "is_pinned",
    "record_stream",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
    "new_tensor",
}
"""Take a tensor and nothing of its numbers."""
ASIDE -= {"new_tensor", "type"}


def word(func: Any) -> str:
    """What the user calls a function."""
    name = name_of(func)
    if name in WORDS:
        return WORDS[name]
    title = name.partition(".")[0].removeprefix("linalg_").removesuffix("_with_indices")
    return title[2:-2] if title.startswith("__") and title.endswith("__") else title


def may_write(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function may write to what it takes, by its name or by what it is told."""
    if name.endswith("__"):
        return name.endswith("__set__") or name.startswith(("__i", "__set"))
    return name.endswith("_") or bool(kwargs.get("inplace")) or "out" in kwargs or any(x is True for x in args)


def is_aside(name: str) -> bool:
    """Whether a function computes nothing from the numbers of its tensors."""
    title, _, access = name.partition(".")
    if access:
        return title not in (*VALUE_PROPERTIES, "data")
    return name in ASIDE or (not name.startswith("__") and name.startswith("_"))


def leaves(name: str) -> bool:
    """Whether a function gives plain numbers, arrays or truths."""
    return name in EXPORTS or name in DECIDES


def why_stopped(name: str, own: bool, made: list[torch.Tensor], grad: bool) -> tuple[str | None, str]:
    """Why a function that took a connected tensor gave one that is not: a cause, and what was seen."""
    if name in DETACHES:
        return "detached", ""
    if name in IMPORTS or name == "new_tensor":
        return "left-framework", "it copies numbers and not where they came from"
    if made and not any(x.is_floating_point() or x.is_complex() for x in made):
        return "discrete", f"{str(made[0].dtype).removeprefix('torch.')} comes out"
    if torch.is_inference_mode_enabled():
        return "no-grad", "it runs in inference mode"
    if not grad:
        return "no-grad", "torch.is_grad_enabled() is False there"
    if name == "grad":
        return "inner-gradient", "create_graph is False"
    if own:
        return "custom-rule", "its result does not require gradients"
    if name == "data.__set__":
        return "assigned-state", "it sets numbers and not where they came from"
    return None, ""


Tensor = torch.Tensor


@dataclass(frozen=True)
class Overwrite:
    """A write in place to a tensor that a step had used before."""

    step: Op
    shape: tuple[int, ...]
    maker: str
    """The function that the tensor came from."""


@dataclass(frozen=True)
class TorchCall:
    """One call of a function."""

    name: str
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    taken: Sequence[Tensor]
    """Those of the tensors it took that are measured."""
    made: Sequence[Tensor]
    start: int
    """How many operations autograd had counted when it began."""
    takes: Sequence[int] = ()
    """The numbers of those that are measured."""
    given: Sequence[tuple[Tensor, int]] = ()
    """What has a new number now, those included that share memory with what was written to."""


class Meter:
    """Takes a measure of every step: of what it takes, before it runs, and of what it gave."""

    all = False
    """Whether what is not computed from the source is measured as well."""

    def before(self, taken: Sequence[Tensor], writes: bool) -> Any:
        """A measure of what a step takes, and may write to."""

    def after(self, ran: TorchCall, before: Any) -> Any:
        """The measure of a step."""
