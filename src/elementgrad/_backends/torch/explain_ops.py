"""Tables of PyTorch's functions: what users call them, and what each does to a derivative.

Also `TorchCall`, one recorded call, and `Meter`, which measures calls while they are recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elementgrad._backends.torch.record.intercept import EXPORTS, VALUE_PROPERTIES, name_of
from elementgrad._explain.trace import Op

USER_NAMES = {
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
"""Names that no user writes, and what they call them."""
DETACHING = {"detach", "detach_", "data.__get__", "__deepcopy__"}
"""Return the same numbers without their derivative."""
FROM_PYTHON = {"tensor", "as_tensor", "asarray", "from_numpy"}
"""Make tensors of plain numbers."""
COPYING = {"tensor", "new_tensor"}
"""Make tensors of plain numbers or tensors, and never keep a derivative."""
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


def user_name(func: Any) -> str:
    name = name_of(func)
    if name in USER_NAMES:
        return USER_NAMES[name]
    title = name.partition(".")[0].removeprefix("linalg_").removesuffix("_with_indices")
    return title[2:-2] if title.startswith("__") and title.endswith("__") else title


def may_write(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if a function may write to its inputs, by its name or its arguments."""
    if name.endswith("__"):
        return name.endswith("__set__") or name.startswith(("__i", "__set"))
    return name.endswith("_") or bool(kwargs.get("inplace")) or "out" in kwargs or any(x is True for x in args)


def reads_no_values(name: str) -> bool:
    """Return True if a function computes nothing from the numbers of its tensors."""
    title, _, access = name.partition(".")
    if access:
        return title not in (*VALUE_PROPERTIES, "data")
    return name in NO_VALUES or (not name.startswith("__") and name.startswith("_"))


def leaves_framework(name: str) -> bool:
    """Return True if a function returns plain numbers, arrays or booleans."""
    return name in EXPORTS or name in BRANCHING


def cut_cause(name: str, custom: bool, outputs: list[torch.Tensor], grad_enabled: bool) -> tuple[str | None, str]:
    """Return why a function with a connected input has an unconnected output: a cause, and the evidence."""
    if name in DETACHING:
        return "detached", ""
    if name in FROM_PYTHON or name == "new_tensor":
        return "left-framework", "it copies numbers and not where they came from"
    if outputs and not any(x.is_floating_point() or x.is_complex() for x in outputs):
        return "discrete", f"{str(outputs[0].dtype).removeprefix('torch.')} comes out"
    if torch.is_inference_mode_enabled():
        return "no-grad", "it runs in inference mode"
    if not grad_enabled:
        return "no-grad", "torch.is_grad_enabled() is False there"
    if name == "grad":
        return "inner-gradient", "create_graph is False"
    if custom:
        return "custom-rule", "its result does not require gradients"
    if name == "data.__set__":
        return "assigned-state", "it sets numbers and not where they came from"
    return None, ""


Tensor = torch.Tensor


@dataclass(frozen=True)
class Overwrite:
    """A write in place to a tensor that an operation had used before."""

    op: Op
    shape: tuple[int, ...]
    maker: str
    """The function that made the tensor."""


@dataclass(frozen=True)
class TorchCall:
    """One recorded call of a function."""

    name: str
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    inputs: Sequence[Tensor]
    """The input tensors that are measured."""
    outputs: Sequence[Tensor]
    start: int
    """The number of operations that autograd had counted when the call began."""
    input_ids: Sequence[int] = ()
    """The value ids of the inputs."""
    new_values: Sequence[tuple[Tensor, int]] = ()
    """Tensors with a new value id, including those that share memory with what was written to."""


class Meter:
    """Measures every recorded call: its inputs before it runs, and its outputs afterwards."""

    measures_all = False
    """True to measure also inputs that are not computed from the source."""

    def before(self, inputs: Sequence[Tensor], writes: bool) -> Any:
        """Measure the inputs of a call, which may write to them."""

    def after(self, call: TorchCall, before: Any) -> Any:
        """Return the measure of a call."""
