"""The modes of PyTorch in a thread: every verb, and every run of a function in it, leaves them as they were.

Modes are entered by `with` statements, of which an interrupt can skip the end, or set until they are set again, as by
`torch.set_grad_enabled(False)` in the user's function. What is set for the whole process is left alone, since other
threads may set it meanwhile.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from elementgrad.cleanup import defer, scope

functorch: Any = torch._C._functorch
autograd: Any = torch._C._autograd
Switch = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How to read a switch, and how to set it."""
_guards: list[Any] = []  # of inference mode, which ends with the object that set it


def _default_device() -> torch.device | None:
    """Return what `torch.set_default_device` was called with, and None where it was not."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _autocast(device: str) -> list[Switch]:
    return [
        (partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)),
        (partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)),
    ]


SWITCHES: list[Switch] = [
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (_default_device, torch.set_default_device),
    *_autocast("cpu"),
    *_autocast("cuda"),
]


class Ambient(NamedTuple):
    """What code of PyTorch's runs under: how many modes of each kind there are, and how switches are set."""

    inference: bool
    function_modes: int
    dispatch_modes: int
    transforms: int
    dual_levels: int
    saving: Any
    saving_refused: str | None
    switches: list[Any]


def ambient() -> Ambient:
    """Return the modes and switches as they are now."""
    return Ambient(
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        functorch.get_dynamic_layer_stack_depth(),
        forward_ad._current_level,
        autograd._top_saved_tensors_default_hooks(False),
        autograd._saved_tensors_hooks_get_disabled_error_message(),
        [read() for read, _ in SWITCHES],
    )


def enter_mode(mode: Any) -> None:
    """Enter a mode that sees functions or operations, until the innermost open scope is left.

    It is then left wherever it is by that time, since its scope may be left late, after others were entered, and once,
    since `__exit__` takes whichever mode was entered last.
    """
    defer(_leave_mode, mode)
    mode.__enter__()


class in_mode(scope):  # noqa: N801
    """Be in such a mode in a block of code."""

    __slots__ = ("_mode",)

    def __init__(self, mode: Any):
        self._mode = mode

    def __enter__(self) -> None:
        super().__enter__()
        enter_mode(self._mode)


def _leave_mode(mode: Any) -> None:
    functions = isinstance(mode, TorchFunctionMode)
    length = torch._C._len_torch_function_stack if functions else torch._C._len_torch_dispatch_stack
    at: Any = torch._C._get_function_stack_at if functions else torch._C._get_dispatch_stack_at
    pop: Any = torch._C._pop_torch_function_stack if functions else partial(torch._C._pop_torch_dispatch_stack, None)
    push: Any = torch._C._push_on_torch_function_stack if functions else torch._C._push_on_torch_dispatch_stack
    if all(at(number) is not mode for number in range(length())):
        return
    above = []
    while at(length() - 1) is not mode:
        above.append(pop())
    mode.__exit__(None, None, None)
    for other in reversed(above):
        push(other)


def snapshot() -> Callable[[], None]:
    """Note the modes and switches; the undo that is returned puts them back."""
    return partial(restore, ambient())


def _close_dual_level(before: int) -> None:
    """Close a level of forward differentiation of which PyTorch's own count does not know.

    An interrupt between the opening of a level and the note of it leaves that behind, and no other can be opened then.
    """
    if before < 0 and forward_ad._current_level < 0:
        try:
            torch._C._exit_dual_level(level=torch._C._enter_dual_level())
        except RuntimeError:
            torch._C._exit_dual_level(level=0)


def restore(before: Ambient) -> None:
    """Leave the modes that were entered since, the last of them first, and set the switches that were turned."""
    if not isinstance(sys.exc_info()[1], (Exception, type(None))):
        _close_dual_level(before.dual_levels)
    now = ambient()
    if now == before:
        return
    while torch._C._len_torch_dispatch_stack() > before.dispatch_modes:
        torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1).__exit__(None, None, None)
    if now.transforms > before.transforms:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(before.transforms)
    while forward_ad._current_level > before.dual_levels:
        forward_ad.exit_dual_level()
    if now.saving_refused != before.saving_refused and before.saving_refused is None:
        autograd._saved_tensors_hooks_enable()
    while autograd._top_saved_tensors_default_hooks(False) not in (None, before.saving):
        autograd._pop_saved_tensors_default_hooks()
    if now.inference != before.inference:
        _guards.append(torch._C._InferenceMode(before.inference))
        _guards[-1].__enter__()
    # The default device is a mode as well, which setting it enters and leaves: it goes before the count of modes.
    for (read, write), position in zip(SWITCHES, before.switches, strict=True):
        if read() != position:
            write(position)
    while torch._C._len_torch_function_stack() > before.function_modes:
        torch._C._pop_torch_function_stack()
