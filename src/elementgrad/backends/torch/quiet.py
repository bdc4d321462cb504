"""Running the user's function without leaving a trace: modes, buffers, random numbers and compiled code."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.attention as attention_kernels

from elementgrad.backends.torch.ambient import snapshot
from elementgrad.backends.torch.modules import Lending, still
from elementgrad.cleanup import defer, enter, scope

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


class undisturbed(scope):  # noqa: N801
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
                defer(snapshot())
            if random is not None:
                Lending(self._function).start()
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
