"""Running the user's function without leaving a trace: modes, buffers, random numbers and compiled code."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from elementgrad.backends.torch.modules import Lending, still

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


class undisturbed:  # noqa: N801
    """Run a function with gradients on, maybe from an earlier state; buffers and generators are as before afterwards.

    With `attention`, attention is computed by the kernels that have derivatives of every order and direction. Whoever
    has just asked for the state may pass it as `now`; of what leaves no trace nothing is kept. On entering it says
    whether anything may happen: code that PyTorch did not write, or writes to the input.
    """

    def __init__(self, function: Any, again: State | None = None, attention: bool = False, now: State | None = None):
        self._function = function
        self._again = again
        self._attention = attention
        self._now = now

    def __enter__(self) -> bool:
        self._random = generators() if self._now is None else self._now[0]
        self._lending = None if self._random is None else Lending(self._function)
        try:
            self._modes = modes(self._again, self._attention)
        except BaseException:
            self._end()
            raise
        return self._lending is not None

    def __exit__(self, *error: Any) -> None:
        try:
            if self._modes is not NOTHING:
                self._modes.__exit__(*error)
        finally:
            self._end()

    def _end(self) -> None:
        if self._lending is not None:
            self._lending.end()
        _set_random(self._random)


def modes(again: State | None = None, attention: bool = False) -> AbstractContextManager[Any]:
    """Gradients on, out of inference mode, and without the compiler, which hides what it runs."""
    modes: list[Any] = []
    if torch.is_inference_mode_enabled():
        modes.append(torch.inference_mode(False))
    if not torch.is_grad_enabled():
        modes.append(torch.enable_grad())
    frames = sys.modules.get("torch._dynamo.eval_frame")
    # Compiled code has no derivatives beyond the first, and hides its modules.
    if frames is not None and any(frames.cached_backends.values()):
        modes += [torch.compiler.set_stance("force_eager"), _hushed()]
    if attention:
        modes.append(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
    if again is not None:
        _set_random(again[0])
        for device, before, now in zip(DEVICES, again[1], _precision(), strict=True):
            if before != now and (before[0] or now[0]):
                modes.append(torch.autocast(device, dtype=before[1], enabled=before[0]))
    return _entered(modes)


@contextmanager
def from_state(state: State, dtype: torch.dtype) -> Iterator[None]:
    """Run from an earlier state, of this process or another, and with its default dtype."""
    random, before = generators(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with modes(state):
            yield
    finally:
        torch.set_default_dtype(before)
        _set_random(random)


@contextmanager
def _hushed() -> Iterator[None]:
    """Leave out PyTorch's warning that modules have hooks which see compiled ones twice: they are ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        yield


def plainly() -> AbstractContextManager[Any]:
    """For sweeps: out of inference mode, and in the precision of the evaluation where the caller has autocast on."""
    if not torch.is_inference_mode_enabled() and not torch._C._is_any_autocast_enabled():
        return NOTHING
    full = [torch.autocast(device, enabled=False) for device in DEVICES if torch.is_autocast_enabled(device)]
    return _entered([torch.inference_mode(False), *full])


def _entered(modes: list[Any]) -> AbstractContextManager[Any]:
    """Several contexts, entered already, as one; mostly there is none, and every sweep waits for this."""
    if not modes:
        return NOTHING
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        return stack.pop_all()
