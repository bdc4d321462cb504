"""Running the user's function without leaving a trace: modes, buffers, random numbers and compiled code."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from elementgrad.backends.torch.modules import Lending

DEVICES = ("cpu", "cuda")
RandomState = tuple[torch.Tensor, list[torch.Tensor]]
Precision = tuple[tuple[bool, torch.dtype], ...]
State = tuple[RandomState, Precision]
"""What a function runs from: the generators, and the autocast of each device."""


def state() -> State:
    """What a function would run from now."""
    return _random(), _precision()


def _random() -> RandomState:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), devices


def _set_random(state: RandomState) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def _precision() -> Precision:
    return tuple([(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES])


@contextmanager
def undisturbed(function: Any, again: State | None = None, attention: bool = False) -> Iterator[None]:
    """Run a function with gradients on, maybe from an earlier state; buffers and generators are as before afterwards.

    With `attention`, attention is computed by the kernels that have derivatives of every order and direction.
    """
    with ExitStack() as stack:
        stack.callback(_set_random, _random())
        stack.callback(Lending(getattr(function, "__self__", None)).end)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        frames = sys.modules.get("torch._dynamo.eval_frame")
        # Compiled code has no derivatives beyond the first, and hides its modules.
        if frames is not None and any(frames.cached_backends.values()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")  # they are ours
        if attention:
            stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        if again is not None:
            _set_random(again[0])
            for device, before, now in zip(DEVICES, again[1], _precision(), strict=True):
                if before != now:
                    stack.enter_context(torch.autocast(device, dtype=before[1], enabled=before[0]))
        yield


def plainly() -> Any:
    """For sweeps: out of inference mode, and in the precision of the evaluation where the caller has autocast on."""
    if not torch.is_inference_mode_enabled() and not torch._C._is_any_autocast_enabled():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    for device in DEVICES:
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack
