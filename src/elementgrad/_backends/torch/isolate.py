"""Runs the user's function without leaving a trace: modes, buffers, random states and compiled code.

Modes of a thread are entered by `with` statements, of which an interrupt can skip the end, or set until they are set
again, as by `torch.set_grad_enabled(False)` in the user's function. `ambient_state` reads them all, and
`restore_ambient_state` restores them. What is set for the whole process is left alone, as other threads may set it.

Modules that the function calls work on copies of their buffers (`BufferCopies`), so that what they write to them, such
as the running statistics of BatchNorm, is lost. `isolated` puts all of this together.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import call
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from elementgrad._backends.torch import _compat
from elementgrad._cleanup import AttributePatch, Lock, Replace, call_atomically, close_generators, defer, enter, scope

Switch = tuple[Callable[[], Any], Callable[[Any], Any]]
"""A function that reads a switch, and one that sets it."""
Modes = tuple[Any, ...]
_guards: list[Any] = []  # inference mode ends when the object that set it is freed
LEFT_MARK = "_elementgrad_left"
"""Marks a mode of ours that was left. PyTorch takes modes off for a moment, and may put it back after that."""


def _set_device_context(context: Any) -> None:
    """Set the mode of the default device; whether it is on is restored with the other modes.

    Not by `torch.set_default_device`, which takes all modes off and puts them on again, one after the other.
    """
    call_atomically(
        partial(setattr, _compat.default_device, "device_context", context),
        partial(setattr, _compat.device_module, "CURRENT_DEVICE", None if context is None else context.device),
    )


def _autocast(device: str) -> list[Switch]:
    return [
        (partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)),
        (partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)),
    ]


_NESTING = partial(torch.autocast_increment_nesting), partial(torch.autocast_decrement_nesting)


def _set_autocast_nesting(depth: int) -> None:
    """Set the number of open autocast blocks; leaving the last one clears the cache of casts."""
    missing = depth - call_atomically(*_NESTING)[1]
    call_atomically(*[_NESTING[missing < 0]] * abs(missing))
    if depth == 0:
        torch.clear_autocast_cache()


SWITCHES: list[Switch] = [
    (torch.is_grad_enabled, _compat._set_grad_enabled),
    (partial(getattr, _compat.default_device, "device_context", None), _set_device_context),
    *_autocast("cpu"),
    *_autocast("cuda"),
]
# All of them are written in C, so that no interrupt comes between the last two, of which the second undoes the first
# and returns the number of open autocast blocks.
_READS: tuple[Callable[[], Any], ...] = (*[read for read, _ in SWITCHES], *_NESTING)
_WRITES: tuple[Callable[[Any], Any], ...] = (*[write for _, write in SWITCHES], lambda _: None, _set_autocast_nesting)


class Stack(NamedTuple):
    """The modes of one kind that are on in a thread, the outermost first."""

    length: Callable[[], int]
    at: Callable[[int], Any]
    pop: Callable[[], Any]
    push: Callable[[Any], None]

    def modes(self) -> Modes:
        return tuple([self.at(index) for index in range(self.length())])

    def change(self, before: Modes, after: Sequence[Any]) -> "list[partial[Any]]":
        """Return the steps from some modes to others."""
        same = 0
        while same < min(len(before), len(after)) and before[same] is after[same]:
            same += 1
        return [partial(self.pop)] * (len(before) - same) + [partial(self.push, mode) for mode in after[same:]]


FUNCTIONS = Stack(
    _compat._len_torch_function_stack,
    _compat._get_function_stack_at,
    _compat._pop_torch_function_stack,
    _compat._push_on_torch_function_stack,
)
OPERATIONS = Stack(
    _compat._len_torch_dispatch_stack,
    _compat._get_dispatch_stack_at,
    partial(_compat._pop_torch_dispatch_stack, None),
    _compat._push_on_torch_dispatch_stack,
)


class AmbientState(NamedTuple):
    """The modes and switches of a thread."""

    inference: bool
    function_modes: Modes
    dispatch_modes: Modes
    transforms: int
    dual_levels: int
    saving: Any
    saving_refused: str | None
    switches: list[Any]
    """The results of `_READS`."""


def ambient_state() -> AmbientState:
    """Return the modes and switches as they are now."""
    state = (
        torch.is_inference_mode_enabled(),
        FUNCTIONS.modes() if FUNCTIONS.length() else (),  # every verb reads this twice, mostly without any modes
        OPERATIONS.modes() if OPERATIONS.length() else (),
        _compat.functorch.get_dynamic_layer_stack_depth(),
        own_dual_level(),
        _compat.saved_tensor_hooks._top_saved_tensors_default_hooks(False),
        _compat.saved_tensor_hooks._saved_tensors_hooks_get_disabled_error_message(),
        list(map(call, _READS)),
    )
    return tuple.__new__(AmbientState, state)  # its own constructor is written in Python


def enter_mode(mode: Any) -> None:
    """Enter a function or dispatch mode until the innermost open scope is left.

    It is removed from wherever it is in the stack by then, as modes that were entered later may still be on. A `with`
    on the mode itself would hide an interrupt behind an error: PyTorch takes modes off for a moment, an interrupt in
    that moment loses the mode, and its `__exit__` finds nothing to leave.
    """
    vars(mode).pop(LEFT_MARK, None)  # it may have been on before
    defer(_leave_mode, mode, _flags())
    mode.__enter__()


class in_mode(scope):  # noqa: N801
    """A `with` block in a function or dispatch mode."""

    __slots__ = ("_mode",)

    def __init__(self, mode: Any):
        self._mode = mode

    def __enter__(self) -> None:
        super().__enter__()
        enter_mode(self._mode)


def _leave_mode(mode: Any, before: list[bool]) -> None:
    """Leave a mode. Not by its `__exit__`, which cannot run again after an interrupt in the middle of it."""
    if hasattr(mode, LEFT_MARK):
        return
    functions = isinstance(mode, TorchFunctionMode)
    stack = FUNCTIONS if functions else OPERATIONS
    modes = stack.modes()
    at = next((index for index, other in enumerate(modes) if other is mode), len(modes))
    steps = stack.change(modes, [*modes[:at], *modes[at + 1 :]])
    if not functions:
        steps += _set_flags(_saved_flags(mode) or before, modes[at + 1 :])
    call_atomically(*steps, partial(setattr, mode, LEFT_MARK, True))


def _flags() -> list[bool]:
    return [_compat.dispatch_flags[name] for name in _compat.FLAGS.values()]


def _saved_flags(mode: Any) -> list[bool]:
    """Return the flags from before a mode was entered, if it got to save them all; it may be entered in itself."""
    saved = [getattr(mode, name, None) for name in _compat.FLAGS]
    return [flags[0] for flags in saved if flags] if all(saved) else []


def _set_flags(flags: Sequence[bool], above: Modes = ()) -> "list[partial[Any]]":
    """Return the steps that restore flags, now or, with modes above, when the next of these is left."""
    if above:
        saved = [getattr(above[0], name, None) for name in _compat.FLAGS]
        return [partial(old.__setitem__, 0, flag) for old, flag in zip(saved, flags, strict=True) if old]
    set_all = [
        partial(_compat.dispatch_flags.__setitem__, name, flag)
        for name, flag in zip(_compat.FLAGS.values(), flags, strict=True)
    ]
    return [*set_all, partial(_compat.set_compiler_flag, flags[-1])]


def snapshot_ambient_state() -> Callable[[], None]:
    """Return a function that restores the modes and switches as they are now."""
    now = ambient_state()
    if now.function_modes or now.dispatch_modes:
        for stack, modes in ((FUNCTIONS, now.function_modes), (OPERATIONS, now.dispatch_modes)):
            if any(hasattr(mode, LEFT_MARK) for mode in modes):
                _set_modes(stack, modes)
                now = ambient_state()
    return partial(restore_ambient_state, now)


def restore_after_interrupt() -> Callable[[], None]:
    """Return a function that restores the modes and switches as they are now, if an interrupt ends a block of code."""
    return partial(_restore_after_interrupt, ambient_state())


def _restore_after_interrupt(before: AmbientState) -> None:
    # At the end of a block its generator gets a GeneratorExit, while the exception of the block is being handled.
    error = sys.exc_info()[1]
    end = error if isinstance(error, (GeneratorExit, type(None))) else error.__context__
    if isinstance(end, GeneratorExit) and (error is not end or _is_interrupt(end.__context__)):
        close_generators(end.__context__)
        restore_ambient_state(before)


def _is_interrupt(error: BaseException | None) -> bool:
    return not isinstance(error, (Exception, type(None)))


def _set_modes(stack: Stack, modes: Modes) -> None:
    """Turn on these modes and no others, except for modes of ours that were left meanwhile."""
    now = stack.modes()
    after = [mode for mode in modes if not hasattr(mode, LEFT_MARK)]
    steps = stack.change(now, after)
    if not steps:
        return
    gone = [mode for mode in now if all(mode is not other for other in after)]
    flags = _saved_flags(gone[0]) if gone else []
    call_atomically(*steps, *(_set_flags(flags) if flags else ()))


DUAL_NUMBERS = Lock()
"""Held while our sweeps use dual numbers: PyTorch has one level of them for all threads."""


def own_dual_level() -> int:
    """Return the level of forward differentiation, -1 for none or that of another thread's sweeps."""
    level = _compat.dual_level()
    return -1 if level >= 0 and DUAL_NUMBERS.is_held_elsewhere() else level


def _close_dual_level(before: int) -> None:
    """Close a level of forward differentiation that is not in PyTorch's own count.

    An interrupt between the opening of a level and its count leaves it open, and then no other can be opened.
    """
    if before < 0 and _compat.dual_level() < 0 and not DUAL_NUMBERS.is_held_elsewhere():
        try:
            _compat._exit_dual_level(level=_compat._enter_dual_level())
        except RuntimeError:
            _compat._exit_dual_level(level=0)


def _close_dual_levels(before: int) -> None:
    """Close levels of forward differentiation; PyTorch may have closed one and not have counted that yet."""
    while (level := _compat.dual_level()) > before:
        with suppress(RuntimeError):
            _compat._exit_dual_level(level=level)
        _compat.set_dual_level(level - 1)


def restore_ambient_state(before: AmbientState) -> None:
    """Leave the modes that were entered since, and set the switches back."""
    error = sys.exc_info()[1]
    if _is_interrupt(error):
        close_generators(error)
        _close_dual_level(before.dual_levels)
    now = ambient_state()
    if now == before:
        return
    _set_modes(OPERATIONS, before.dispatch_modes)
    if now.transforms > before.transforms:
        _compat.functorch.pop_dynamic_layer_stack_and_undo_to_depth(before.transforms)
    if not DUAL_NUMBERS.is_held_elsewhere():
        _close_dual_levels(before.dual_levels)
    if now.saving_refused != before.saving_refused and before.saving_refused is None:
        _compat.saved_tensor_hooks._saved_tensors_hooks_enable()
    while _compat.saved_tensor_hooks._top_saved_tensors_default_hooks(False) not in (None, before.saving):
        _compat.saved_tensor_hooks._pop_saved_tensors_default_hooks()
    if now.inference != before.inference:
        _guards.append(_compat._InferenceMode(before.inference))
        _guards[-1].__enter__()
    for write, position, value in zip(_WRITES, before.switches, list(map(call, _READS)), strict=True):
        if value != position:
            write(position)
    _set_modes(FUNCTIONS, before.function_modes)


Module = torch.nn.Module
DRAWING = frozenset({"RReLU", "MultiheadAttention", "FractionalMaxPool2d", "FractionalMaxPool3d"})
STATELESS = frozenset(
    kind
    for file in ("activation", "container", "conv", "flatten", "fold", "linear", "normalization", "padding", "pooling")
    for name, kind in vars(getattr(torch.nn.modules, file)).items()
    if isinstance(kind, type) and issubclass(kind, Module) and name not in DRAWING
)
"""PyTorch's modules that draw no random numbers."""


BUFFERS = Lock()
"""Held by the thread whose run has copies of buffers in modules, until the run ends."""


class BufferCopies:
    """Gives copies of its buffers to every module that this thread calls, during each call, until the end of a run.

    Within one run a module finds what it wrote in an earlier call. Its attributes are restored at the end, since they
    may depend on its buffers. If the function is a method of a module, that module is the first.
    """

    def __init__(self, function: Any):
        self._thread = threading.get_ident()
        self._copies: dict[
            int, tuple[Any, Any]
        ] = {}  # by the id of the original, which is kept alive: a shared buffer stays shared
        self._open: list[tuple[Module, dict[str, Any]]] = []
        self._attributes: dict[int, tuple[Module, dict[str, Any]]] = {}
        self._leaving: Any = None
        self._function = function

    def start(self) -> None:
        """Give copies until the innermost open scope is left."""
        defer(self._end)
        first = getattr(self._function, "__self__", None)
        if isinstance(first, Module):
            self._enter(first, None)
        _compat._global_forward_pre_hooks[id(self)] = self._enter

    def _enter(self, module: Module, _: Any) -> None:
        buffers = module._buffers
        if not buffers or threading.get_ident() != self._thread or isinstance(module, torch.jit.ScriptModule):
            return
        if any(isinstance(buffer, torch.nn.UninitializedBuffer) for buffer in buffers.values()):
            return  # its first call initializes it, which cannot be undone
        # A copy in a module is seen by all threads, and another read would take it for the buffer itself.
        BUFFERS.take()
        buffers = module._buffers
        if self._leaving is None:  # only once a module has buffers, as hooks slow down every call of a module
            self._leaving = id(self._open)
            _compat._global_forward_hooks_always_called[self._leaving] = True
            _compat._global_forward_hooks[self._leaving] = self._leave
        originals = dict(buffers)
        self._attributes.setdefault(id(module), (module, dict(module.__dict__)))
        # PyTorch does not call `_leave` after an interrupt. These buffers must then be restored before anything that
        # was changed earlier, as by a scope that put these very buffers there.
        defer(self._restore_from, len(self._open))
        self._open.append((module, originals))
        for name, buffer in originals.items():
            if buffer is not None:
                if id(buffer) not in self._copies:
                    self._copies[id(buffer)] = buffer, buffer.clone()
                buffers[name] = self._copies[id(buffer)][1]

    def _leave(self, module: Module, _: Any, __: Any) -> None:
        if self._open and self._open[-1][0] is module and threading.get_ident() == self._thread:
            self._restore_from(len(self._open) - 1)

    def _restore_from(self, depth: int) -> None:
        while len(self._open) > depth:
            self._restore(*self._open[-1])
            self._open.pop()

    def _restore(self, module: Module, originals: dict[str, Any]) -> None:
        for name, buffer in originals.items():
            if buffer is not None:
                self._copies[id(buffer)] = buffer, module._buffers.get(name)  # it may have been replaced
        module._buffers.clear()
        module._buffers.update(originals)

    def _end(self) -> None:
        _compat._global_forward_pre_hooks.pop(id(self), None)
        if self._leaving is not None:
            _compat._global_forward_hooks.pop(self._leaving, None)
            _compat._global_forward_hooks_always_called.pop(self._leaving, None)
        self._restore_from(0)
        for module, attributes in self._attributes.values():
            restore_attributes(module, attributes)


def restore_attributes(module: Module, before: Mapping[str, Any]) -> None:
    """Give a module the attributes that it had, and no others."""
    for name in set(module.__dict__) - set(before):
        del module.__dict__[name]
    module.__dict__.update(before)


def add_hook(hooks: Any, hook: Any) -> None:
    """Add a hook to those of a module, or of all modules, until the innermost open scope is left.

    Not by registering it: that is written in Python, and an interrupt in it would leave the hook without a handle.
    """
    defer(hooks.pop, id(hook), None)
    hooks[id(hook)] = hook


def is_own_hook(hook: Any) -> bool:
    """Return True if a hook is the library's, and not the user's."""
    return getattr(getattr(hook, "func", hook), "__module__", "").startswith("elementgrad.")


def deferred_handles() -> list[Any]:
    """Return a list for the handles of hooks on nodes of a graph, which are removed when the innermost scope is left.

    Register hooks through the list, as in `handles.extend(map(node.register_hook, [hook]))`: that runs in C, so no
    interrupt comes between the hook and its handle.
    """
    handles: list[Any] = []
    defer(_remove, handles)
    return handles


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def leaves_no_trace(function: Any) -> bool:
    """Return True if a function is a module that leaves no trace, so that nothing has to be saved.

    It and all modules inside are PyTorch's own, without buffers and hooks, write to no input and draw no random
    numbers.
    """
    if not isinstance(function, Module) or _compat._global_forward_hooks or _compat._global_forward_pre_hooks:
        return False
    modules: list[Any] = [function]
    for module in modules:
        if module is None:
            continue
        if type(module) not in STATELESS:
            return False
        attributes = module.__dict__
        if "forward" in attributes or attributes["_buffers"] or attributes.get("inplace"):
            return False
        if attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]:
            return False
        modules += attributes["_modules"].values()
    return True


DEVICES = ("cpu", "cuda")
CUDA = torch.backends.cuda.is_built()
RandomState = tuple[torch.Tensor, list[torch.Tensor]]
Precision = tuple[tuple[bool, torch.dtype | None], ...]
State = tuple[RandomState | None, Precision]
"""The state that a function runs from: the generators, unless it leaves no trace, and the autocast of each device."""


NO_AUTOCAST: Precision = tuple([(False, None) for _ in DEVICES])
"""No autocast, whatever dtype it would have."""


def state(function: Any = None) -> State:
    """Return the state that a function would run from now."""
    return None if leaves_no_trace(function) else generators(), precision()


def generators() -> RandomState:
    """Return the state of the generators of random numbers."""
    devices = torch.cuda.get_rng_state_all() if CUDA and torch.cuda.is_initialized() else []
    return torch.default_generator.get_state(), devices


def set_random(state: RandomState | None) -> None:
    if state is None:
        return
    torch.default_generator.set_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def precision() -> Precision:
    if not _compat._is_any_autocast_enabled():
        return NO_AUTOCAST
    return tuple([(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES])


class isolated(scope):  # noqa: N801
    """A `with` block for a run of a function with gradients on; then buffers, generators and modes are as before.

    Args:
        function: the function that runs in the block.
        start: an earlier state to run from.
        attention: True to compute attention by the kernels that have derivatives of every order and direction.
        current: the state as it is, if it was just read.
        sweeps: True for sweeps, which run in the precision of the evaluation and not in that of an autocast.

    The value of the block is False if the function leaves no trace, and True if it may do anything.
    """

    __slots__ = ("_attention", "_current", "_function", "_start", "_sweeps")

    def __init__(
        self,
        function: Any,
        start: State | None = None,
        attention: bool = False,
        current: State | None = None,
        sweeps: bool = False,
    ):
        self._function = function
        self._start = start
        self._attention = attention
        self._current = current
        self._sweeps = sweeps

    def __enter__(self) -> bool:
        super().__enter__()
        try:
            random = generators() if self._current is None else self._current[0]
            if random is not None:
                defer(set_random, random)
                if self._function is not None:
                    defer(snapshot_ambient_state())
                BufferCopies(self._function).start()
            enter_modes(self._start, self._attention)
            if self._sweeps:
                leave_autocast()
        except BaseException:
            self.close()
            raise
        return random is not None


def _install_force_eager(replace: Replace) -> None:
    # As `torch.compiler.set_stance("force_eager")` does. Threads share the stance, so the last to leave restores it.
    frames = _compat.eval_frame_module()
    replace(frames, "_stance", type(frames._stance)("force_eager"))


_force_eager = AttributePatch(_install_force_eager)


def enter_modes(start: State | None = None, attention: bool = False) -> None:
    """Turn gradients on, and inference mode and the compiler off, until the innermost open scope is left."""
    if torch.is_inference_mode_enabled():
        enter(torch.inference_mode(False))
    if not torch.is_grad_enabled():
        enter(torch.enable_grad())
    frames = _compat.eval_frame_module()
    # Compiled code has no derivatives beyond the first, and hides its modules.
    if frames is not None and any(frames.cached_backends.values()):
        _force_eager.enter()
        # PyTorch warns of global hooks, which are ours, on compiled modules. `safe_context` would open a scope of its
        # own, which would stay open as long as a recording, and take what is registered after it.
        enter(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
    if attention:
        # Not by `sdpa_kernel`: an interrupt while it restores the kernels leaves some of them off.
        defer(_compat._sdpa_kernel, _compat._cur_sdpa_kernel_backends())
        _compat._sdpa_kernel([SDPBackend.MATH])
    if start is not None:
        set_random(start[0])
        for device, before, now in zip(DEVICES, start[1], precision(), strict=True):
            if before != now and (before[0] or now[0]):
                enter(torch.autocast(device, dtype=before[1], enabled=before[0]))


@contextmanager
def run_from_state(state: State, dtype: torch.dtype) -> Iterator[None]:
    """Run what is inside from an earlier state, of this process or another, and with its default dtype."""
    with scope():
        defer(set_random, generators())
        defer(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        enter_modes(state)
        yield


class without_autocast(scope):  # noqa: N801
    """A `with` block for sweeps, without inference mode and autocast: they run in the precision of the evaluation."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        leave_autocast()


def leave_autocast() -> None:
    """Turn inference mode and autocast off until the innermost open scope is left."""
    if torch.is_inference_mode_enabled() or _compat._is_any_autocast_enabled():
        enter(torch.inference_mode(False))
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                enter(torch.autocast(device, enabled=False))


SETTER = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class Freezable(TorchFunctionMode):
    """Lets the user's function freeze its parameters, where computed tensors replace them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].detach_() if is_freezing_call(func, args, kwargs or {}) else func(*args, **(kwargs or {}))


def is_freezing_call(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if a call sets `requires_grad` to False on a tensor for which PyTorch would raise an error."""
    if func != torch.Tensor.requires_grad_ and func != SETTER:
        return False
    flag = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    return not flag and not args[0].is_leaf
