"""The modes of PyTorch in a thread: every verb, and every run of a function in it, leaves them as they were.

Modes are entered by `with` statements, of which an interrupt can skip the end, or set until they are set again, as by
`torch.set_grad_enabled(False)` in the user's function. What is set for the whole process is left alone, since other
threads may set it meanwhile.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils._device
import torch.utils._python_dispatch
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from elementgrad.cleanup import atomically, defer, finish_blocks, scope

functorch: Any = torch._C._functorch
autograd: Any = torch._C._autograd
Switch = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How to read a switch, and how to set it."""
Modes = tuple[Any, ...]
_guards: list[Any] = []  # of inference mode, which ends with the object that set it
_dispatch: dict[str, Any] = vars(torch.utils._python_dispatch)
FLAGS = {
    "old_dispatch_mode_flags": "_is_in_torch_dispatch_mode",
    "old_non_infra_dispatch_mode_flags": "_is_in_non_infra_torch_dispatch_mode",
    "old_without_ignore_compile_internals_dispatch_mode_flags": "_is_in_any_mode_without_ignore_compile_internals",
}
"""By these PyTorch knows whether a mode that sees operations is on, and where each such mode notes what they were."""
LEFT = "_elementgrad_left"
"""Marks a mode of ours that was left: PyTorch takes modes off for a moment, and may put one back later than that."""


def _device_context() -> Any:
    """Return the mode that `torch.set_default_device` entered, and None where it entered none."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _set_device_context(context: Any) -> None:
    """Make a mode that of the default device; whether it is on is a matter of the modes.

    Not by `torch.set_default_device`, which takes all modes off and puts them on again, one after the other.
    """
    atomically(
        partial(setattr, torch._GLOBAL_DEVICE_CONTEXT, "device_context", context),
        partial(setattr, torch.utils._device, "CURRENT_DEVICE", None if context is None else context.device),
    )


def _autocast(device: str) -> list[Switch]:
    return [
        (partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)),
        (partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)),
    ]


_NESTING = partial(torch.autocast_increment_nesting), partial(torch.autocast_decrement_nesting)


def _autocast_nesting() -> int:
    """Return in how many blocks of autocast the thread is, of which the last to be left forgets the copies made."""
    return atomically(*_NESTING)[1]


def _set_autocast_nesting(number: int) -> None:
    missing = number - _autocast_nesting()
    atomically(*[_NESTING[missing < 0]] * abs(missing))
    if number == 0:
        torch.clear_autocast_cache()


SWITCHES: list[Switch] = [
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (_device_context, _set_device_context),
    *_autocast("cpu"),
    *_autocast("cuda"),
    (_autocast_nesting, _set_autocast_nesting),
]


class Stack(NamedTuple):
    """The modes of one kind that are on in a thread, the first to be entered first."""

    length: Callable[[], int]
    at: Callable[[int], Any]
    pop: Callable[[], Any]
    push: Callable[[Any], None]

    def modes(self) -> Modes:
        """Return the modes."""
        count = self.length()
        return tuple([self.at(number) for number in range(count)]) if count else ()

    def change(self, before: Modes, after: Sequence[Any]) -> "list[partial[Any]]":
        """Return the steps from some modes to others."""
        same = 0
        while same < min(len(before), len(after)) and before[same] is after[same]:
            same += 1
        return [partial(self.pop)] * (len(before) - same) + [partial(self.push, mode) for mode in after[same:]]


FUNCTIONS = Stack(
    torch._C._len_torch_function_stack,
    torch._C._get_function_stack_at,
    torch._C._pop_torch_function_stack,
    torch._C._push_on_torch_function_stack,
)
OPERATIONS = Stack(
    torch._C._len_torch_dispatch_stack,
    torch._C._get_dispatch_stack_at,
    partial(torch._C._pop_torch_dispatch_stack, None),
    torch._C._push_on_torch_dispatch_stack,
)


class Ambient(NamedTuple):
    """What code of PyTorch's runs under: the modes of each kind, or how many there are, and how switches are set."""

    inference: bool
    function_modes: Modes
    dispatch_modes: Modes
    transforms: int
    dual_levels: int
    saving: Any
    saving_refused: str | None
    switches: list[Any]


def ambient() -> Ambient:
    """Return the modes and switches as they are now."""
    return Ambient(
        torch.is_inference_mode_enabled(),
        FUNCTIONS.modes(),
        OPERATIONS.modes(),
        functorch.get_dynamic_layer_stack_depth(),
        forward_ad._current_level,
        autograd._top_saved_tensors_default_hooks(False),
        autograd._saved_tensors_hooks_get_disabled_error_message(),
        [read() for read, _ in SWITCHES],
    )


def enter_mode(mode: Any) -> None:
    """Enter a mode that sees functions or operations, until the innermost open scope is left.

    It is then left wherever it is by that time, since its scope may be left late, after others were entered. A `with`
    on the mode itself would hide an interrupt behind an error: PyTorch takes modes off for a moment, an interrupt in
    that moment loses the mode, and its `__exit__` finds nothing to leave.
    """
    vars(mode).pop(LEFT, None)  # it may have been on before
    defer(_leave_mode, mode, _flags())
    mode.__enter__()


class in_mode(scope):  # noqa: N801
    """Be in such a mode in a block of code."""

    __slots__ = ("_mode",)

    def __init__(self, mode: Any):
        self._mode = mode

    def __enter__(self) -> None:
        super().__enter__()
        enter_mode(self._mode)


def _leave_mode(mode: Any, before: list[bool]) -> None:
    """Leave a mode, by none of PyTorch's `__exit__`: that cannot run again after an interrupt in the middle of it."""
    if hasattr(mode, LEFT):
        return
    functions = isinstance(mode, TorchFunctionMode)
    stack = FUNCTIONS if functions else OPERATIONS
    modes = stack.modes()
    at = next((number for number, other in enumerate(modes) if other is mode), len(modes))
    steps = stack.change(modes, [*modes[:at], *modes[at + 1 :]])
    if not functions:
        steps += _set_flags(_noted(mode) or before, modes[at + 1 :])
    atomically(*steps, partial(setattr, mode, LEFT, True))


def _flags() -> list[bool]:
    return [_dispatch[name] for name in FLAGS.values()]


def _noted(mode: Any) -> list[bool]:
    """Return the flags from before a mode was entered, if it came to note them all; it may be entered in itself."""
    notes = [getattr(mode, name, None) for name in FLAGS]
    return [note[0] for note in notes if note] if all(notes) else []


def _set_flags(flags: Sequence[bool], above: Modes = ()) -> "list[partial[Any]]":
    """Return the steps that give flags their former values, now or when the next of the modes above is left."""
    if above:
        notes = [getattr(above[0], name, None) for name in FLAGS]
        return [partial(note.__setitem__, 0, flag) for note, flag in zip(notes, flags, strict=True) if note]
    set_all = [partial(_dispatch.__setitem__, name, flag) for name, flag in zip(FLAGS.values(), flags, strict=True)]
    return [*set_all, partial(set_is_in_mode_without_ignore_compile_internals, flags[-1])]


def snapshot() -> Callable[[], None]:
    """Note the modes and switches; the undo that is returned puts them back."""
    now = ambient()
    for stack, modes in ((FUNCTIONS, now.function_modes), (OPERATIONS, now.dispatch_modes)):
        if any(hasattr(mode, LEFT) for mode in modes):
            _set_modes(stack, modes)
            now = ambient()
    return partial(restore, now)


def after_interrupt() -> Callable[[], None]:
    """Note the modes and switches; the undo that is returned puts them back if an interrupt ends a block of code."""
    return partial(_restore_after_interrupt, ambient())


def _restore_after_interrupt(before: Ambient) -> None:
    # The end of a block is told by an exception that its generator gets, while that of the block is being handled.
    error = sys.exc_info()[1]
    end = error if isinstance(error, (GeneratorExit, type(None))) else error.__context__
    if isinstance(end, GeneratorExit) and (error is not end or _stops(end.__context__)):
        finish_blocks(end.__context__)
        restore(before)


def _stops(error: BaseException | None) -> bool:
    """Whether this is no error but an interrupt."""
    return not isinstance(error, (Exception, type(None)))


def _set_modes(stack: Stack, wanted: Modes) -> None:
    """Have these modes on and no others, but for modes of ours that were left meanwhile."""
    now = stack.modes()
    after = [mode for mode in wanted if not hasattr(mode, LEFT)]
    steps = stack.change(now, after)
    if not steps:
        return
    gone = [mode for mode in now if all(mode is not other for other in after)]
    flags = _noted(gone[0]) if gone else []
    atomically(*steps, *(_set_flags(flags) if flags else ()))


def _close_dual_level(before: int) -> None:
    """Close a level of forward differentiation of which PyTorch's own count does not know.

    An interrupt between the opening of a level and the note of it leaves that behind, and no other can be opened then.
    """
    if before < 0 and forward_ad._current_level < 0:
        try:
            torch._C._exit_dual_level(level=torch._C._enter_dual_level())
        except RuntimeError:
            torch._C._exit_dual_level(level=0)


def _close_dual_levels(before: int) -> None:
    """Close levels of forward differentiation; PyTorch may have closed one and not have come to the note of it."""
    while (level := forward_ad._current_level) > before:
        with suppress(RuntimeError):
            torch._C._exit_dual_level(level=level)
        forward_ad._current_level = level - 1


def restore(before: Ambient) -> None:
    """Leave the modes that were entered since, and set the switches that were turned."""
    error = sys.exc_info()[1]
    if _stops(error):
        finish_blocks(error)
        _close_dual_level(before.dual_levels)
    now = ambient()
    if now == before:
        return
    _set_modes(OPERATIONS, before.dispatch_modes)
    if now.transforms > before.transforms:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(before.transforms)
    _close_dual_levels(before.dual_levels)
    if now.saving_refused != before.saving_refused and before.saving_refused is None:
        autograd._saved_tensors_hooks_enable()
    while autograd._top_saved_tensors_default_hooks(False) not in (None, before.saving):
        autograd._pop_saved_tensors_default_hooks()
    if now.inference != before.inference:
        _guards.append(torch._C._InferenceMode(before.inference))
        _guards[-1].__enter__()
    for (read, write), position in zip(SWITCHES, before.switches, strict=True):
        if read() != position:
            write(position)
    _set_modes(FUNCTIONS, before.function_modes)
