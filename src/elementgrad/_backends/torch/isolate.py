"""The modes of PyTorch in a thread: every verb, and every run of a function in it, leaves them as they were.

Modes are entered by `with` statements, of which an interrupt can skip the end, or set until they are set again, as by
`torch.set_grad_enabled(False)` in the user's function. What is set for the whole process is left alone, since other
threads may set it meanwhile.


Modules that the user's function calls work on copies of their buffers, so that what they write to them is lost.

Running the user's function without leaving a trace: modes, buffers, random numbers and compiled code.

A function that freezes its own parameters, while computed tensors stand for them.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.attention as attention_kernels
import torch.utils._device
import torch.utils._python_dispatch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from elementgrad._backends.torch._compat import (
    _global_forward_hooks,
    _global_forward_hooks_always_called,
    _global_forward_pre_hooks,
    set_is_in_mode_without_ignore_compile_internals,
)
from elementgrad._cleanup import call_atomically, close_generators, defer, enter, scope

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
    call_atomically(
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
    return call_atomically(*_NESTING)[1]


def _set_autocast_nesting(number: int) -> None:
    missing = number - _autocast_nesting()
    call_atomically(*[_NESTING[missing < 0]] * abs(missing))
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


class AmbientState(NamedTuple):
    """What code of PyTorch's runs under: the modes of each kind, or how many there are, and how switches are set."""

    inference: bool
    function_modes: Modes
    dispatch_modes: Modes
    transforms: int
    dual_levels: int
    saving: Any
    saving_refused: str | None
    switches: list[Any]


def ambient_state() -> AmbientState:
    """Return the modes and switches as they are now."""
    return AmbientState(
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
    call_atomically(*steps, partial(setattr, mode, LEFT, True))


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


def snapshot_ambient_state() -> Callable[[], None]:
    """Note the modes and switches; the undo that is returned puts them back."""
    now = ambient_state()
    for stack, modes in ((FUNCTIONS, now.function_modes), (OPERATIONS, now.dispatch_modes)):
        if any(hasattr(mode, LEFT) for mode in modes):
            _set_modes(stack, modes)
            now = ambient_state()
    return partial(restore_ambient_state, now)


def after_interrupt() -> Callable[[], None]:
    """Note the modes and switches; the undo that is returned puts them back if an interrupt ends a block of code."""
    return partial(_restore_after_interrupt, ambient_state())


def _restore_after_interrupt(before: AmbientState) -> None:
    # The end of a block is told by an exception that its generator gets, while that of the block is being handled.
    error = sys.exc_info()[1]
    end = error if isinstance(error, (GeneratorExit, type(None))) else error.__context__
    if isinstance(end, GeneratorExit) and (error is not end or _stops(end.__context__)):
        close_generators(end.__context__)
        restore_ambient_state(before)


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
    call_atomically(*steps, *(_set_flags(flags) if flags else ()))


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


def restore_ambient_state(before: AmbientState) -> None:
    """Leave the modes that were entered since, and set the switches that were turned."""
    error = sys.exc_info()[1]
    if _stops(error):
        close_generators(error)
        _close_dual_level(before.dual_levels)
    now = ambient_state()
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


Module = torch.nn.Module
STILL = frozenset(
    f"torch.nn.modules.{kind}"
    for kind in ("activation", "container", "conv", "flatten", "fold", "linear", "normalization", "padding", "pooling")
)
"""Where PyTorch keeps modules that draw no random numbers, but for `DRAWING`."""
DRAWING = frozenset({"RReLU", "MultiheadAttention", "FractionalMaxPool2d", "FractionalMaxPool3d"})


class BufferCopies:
    """Lends copies of its buffers to every module that this thread calls, for the time of each call, until the end.

    Within one run a module finds what it wrote there in an earlier call. Its attributes are put back at the end, since
    they may say something about its buffers. The first is one whose method is called without a call of the module.
    """

    def __init__(self, function: Any):
        self._thread = threading.get_ident()
        self._copies: dict[int, tuple[Any, Any]] = {}  # by the original, which is kept: a shared buffer stays shared
        self._open: list[tuple[Module, dict[str, Any]]] = []
        self._attributes: dict[int, tuple[Module, dict[str, Any]]] = {}
        self._leaving: Any = None
        self._function = function

    def start(self) -> None:
        """Begin to lend; the scope that is open now ends it."""
        defer(self._end)
        first = getattr(self._function, "__self__", None)
        if isinstance(first, Module):
            self._enter(first, None)
        _global_forward_pre_hooks[id(self)] = self._enter  # as registering does, in a tenth of the time

    def _enter(self, module: Module, _: Any) -> None:
        buffers = module._buffers
        if not buffers or threading.get_ident() != self._thread or isinstance(module, torch.jit.ScriptModule):
            return
        if any(isinstance(buffer, torch.nn.UninitializedBuffer) for buffer in buffers.values()):
            return  # it becomes itself in its first call, which cannot be undone
        if self._leaving is None:  # not before something is lent: each call of a module waits for its hooks
            self._leaving = id(self._open)
            _global_forward_hooks_always_called[self._leaving] = True
            _global_forward_hooks[self._leaving] = self._leave
        kept = dict(buffers)
        self._attributes.setdefault(id(module), (module, dict(module.__dict__)))
        # PyTorch does not call `_leave` after an interrupt. What has been lent must then come back before anything that
        # was changed earlier does, as by the scope that put these very buffers there.
        defer(self._take_back_from, len(self._open))
        self._open.append((module, kept))
        for name, buffer in kept.items():
            if buffer is not None:
                if id(buffer) not in self._copies:
                    self._copies[id(buffer)] = buffer, buffer.clone()
                buffers[name] = self._copies[id(buffer)][1]

    def _leave(self, module: Module, _: Any, __: Any) -> None:
        if self._open and self._open[-1][0] is module and threading.get_ident() == self._thread:
            self._take_back_from(len(self._open) - 1)

    def _take_back_from(self, number: int) -> None:
        while len(self._open) > number:
            self._take_back(*self._open[-1])
            self._open.pop()

    def _take_back(self, module: Module, kept: dict[str, Any]) -> None:
        for name, buffer in kept.items():
            if buffer is not None:
                self._copies[id(buffer)] = buffer, module._buffers.get(name)  # it may have been replaced
        module._buffers.clear()
        module._buffers.update(kept)

    def _end(self) -> None:
        """Put back what is still lent, and what was kept."""
        _global_forward_pre_hooks.pop(id(self), None)
        if self._leaving is not None:
            _global_forward_hooks.pop(self._leaving, None)
            _global_forward_hooks_always_called.pop(self._leaving, None)
        self._take_back_from(0)
        for module, attributes in self._attributes.values():
            restore_attributes(module, attributes)


def restore_attributes(module: Module, before: Mapping[str, Any]) -> None:
    """Give a module the attributes that it had, and no others."""
    for name in set(module.__dict__) - set(before):
        del module.__dict__[name]
    module.__dict__.update(before)


def add_hook(hooks: Any, hook: Any) -> None:
    """Put a hook among those of a module, or of all, until the innermost open scope is left.

    Registering it does the same, in Python: an interrupt there would leave the hook behind without a handle.
    """
    defer(hooks.pop, id(hook), None)
    hooks[id(hook)] = hook


def removed_later() -> list[Any]:
    """Return a list for handles of hooks on nodes of a graph, which are removed when the innermost scope is left.

    Have the list itself register hooks, as by `handles.extend(map(node.register_hook, [hook]))`: that runs in C, and no
    interrupt comes between the hook and the note of it.
    """
    handles: list[Any] = []
    defer(_remove, handles)
    return handles


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def still(function: Any) -> bool:
    """Whether a function is a module that leaves no trace: it and all inside are PyTorch's own, without buffers and
    hooks, write to no input and draw no random numbers. Then nothing needs to be kept, and every call is faster."""
    if not isinstance(function, Module) or _global_forward_hooks or _global_forward_pre_hooks:
        return False
    inside: list[Any] = [function]
    for part in inside:
        if part is None:
            continue
        kept, kind = part.__dict__, type(part)
        if "forward" in kept or kept["_buffers"] or kept["_forward_pre_hooks"] or kept["_forward_hooks"]:
            return False
        if kept.get("inplace") or kind.__module__ not in STILL or kind.__name__ in DRAWING:
            return False
        inside += kept["_modules"].values()
    return True


DEVICES = ("cpu", "cuda")
CUDA = torch.backends.cuda.is_built()
RandomState = tuple[torch.Tensor, list[torch.Tensor]]
Precision = tuple[tuple[bool, torch.dtype | None], ...]
State = tuple[RandomState | None, Precision]
"""What a function runs from: the generators, unless it leaves no trace, and the autocast of each device."""


FULL: Precision = tuple([(False, None) for _ in DEVICES])
"""No autocast, whatever dtype it would have."""
NOTHING: AbstractContextManager[Any] = nullcontext()


def state(function: Any = None) -> State:
    """What a function would run from now."""
    return None if still(function) else generators(), _precision()


def generators() -> RandomState:
    """The state of the generators of random numbers."""
    devices = torch.cuda.get_rng_state_all() if CUDA and torch.cuda.is_initialized() else []
    return torch.default_generator.get_state(), devices


def _set_random(state: RandomState | None) -> None:
    if state is None:
        return
    torch.default_generator.set_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def _precision() -> Precision:
    if not torch._C._is_any_autocast_enabled():
        return FULL
    return tuple([(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES])


class isolated(scope):  # noqa: N801
    """Run a function with gradients on, maybe from an earlier state; then buffers, generators and modes are as before.

    With `attention`, attention is computed by the kernels that have derivatives of every order and direction. Whoever
    has just asked for the state may pass it as `now`; of what leaves no trace nothing is kept. On entering it says
    whether anything may happen: code that PyTorch did not write, or writes to the input.
    """

    __slots__ = ("_again", "_attention", "_function", "_now")

    def __init__(self, function: Any, again: State | None = None, attention: bool = False, now: State | None = None):
        self._function = function
        self._again = again
        self._attention = attention
        self._now = now

    def __enter__(self) -> bool:
        super().__enter__()
        try:
            random = generators() if self._now is None else self._now[0]
            defer(_set_random, random)
            if self._function is not None and random is not None:
                defer(snapshot_ambient_state())
            if random is not None:
                BufferCopies(self._function).start()
            enter_modes(self._again, self._attention)
        except BaseException:
            self.close()
            raise
        return random is not None


def enter_modes(again: State | None = None, attention: bool = False) -> None:
    """Until the scope is left: gradients on, out of inference mode, and no compiler, which hides what it runs."""
    if torch.is_inference_mode_enabled():
        enter(torch.inference_mode(False))
    if not torch.is_grad_enabled():
        enter(torch.enable_grad())
    frames = sys.modules.get("torch._dynamo.eval_frame")
    # Compiled code has no derivatives beyond the first, and hides its modules.
    if frames is not None and any(frames.cached_backends.values()):
        defer(frames._set_stance, frames._stance)  # a stance is taken as soon as it is named, and not on entering it
        torch.compiler.set_stance("force_eager")
        # PyTorch warns of hooks on modules that see compiled ones twice: they are ours. Not by a context that opens
        # a scope of its own: that would stay open as long as a recording, and take what is registered after it.
        enter(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
    if attention:
        # Not by `sdpa_kernel`: an interrupt while that puts the kernels back leaves some of them off.
        defer(attention_kernels._sdpa_kernel, attention_kernels._cur_sdpa_kernel_backends())
        attention_kernels._sdpa_kernel([attention_kernels.SDPBackend.MATH])
    if again is not None:
        _set_random(again[0])
        for device, before, now in zip(DEVICES, again[1], _precision(), strict=True):
            if before != now and (before[0] or now[0]):
                enter(torch.autocast(device, dtype=before[1], enabled=before[0]))


@contextmanager
def from_state(state: State, dtype: torch.dtype) -> Iterator[None]:
    """Run from an earlier state, of this process or another, and with its default dtype."""
    with scope():
        defer(_set_random, generators())
        defer(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        enter_modes(state)
        yield


class plainly(scope):  # noqa: N801
    """For sweeps: out of inference mode, and in the precision of the evaluation where the caller has autocast on."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        if torch.is_inference_mode_enabled() or torch._C._is_any_autocast_enabled():
            enter(torch.inference_mode(False))
            for device in DEVICES:
                if torch.is_autocast_enabled(device):
                    enter(torch.autocast(device, enabled=False))


SETTER = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class Freezable(TorchFunctionMode):
    """Tensors that stand for the user's parameters may be frozen as those may."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].detach_() if freezes(func, args, kwargs or {}) else func(*args, **(kwargs or {}))


def freezes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call sets `requires_grad` to False on a tensor that PyTorch would refuse that for."""
    if func != torch.Tensor.requires_grad_ and func != SETTER:
        return False
    flag = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    return not flag and not args[0].is_leaf
