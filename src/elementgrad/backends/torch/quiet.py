"""Running the user's function without leaving a trace: modes, buffers, random numbers and compiled code."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._dynamo.eval_frame import cached_backends  # what torch.compile was called with
from torch.nn.modules.module import register_module_forward_pre_hook

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
        stack.callback(_lend_buffers(getattr(function, "__self__", None)))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        if any(cached_backends.values()):  # compiled code has no derivatives beyond the first, and hides its modules
            stack.enter_context(torch.compiler.set_stance("force_eager"))
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


def _lend_buffers(first: Any) -> Callable[[], None]:
    """Lend copies of its buffers to every module that is called from now on, and say how to end that.

    What a module writes to its buffers is lost then. The first is one whose method is called, if it is a module.
    """
    thread = threading.get_ident()
    lent: dict[int, torch.Tensor] = {}  # by the original, so that a shared buffer stays shared
    originals: dict[int, tuple[torch.nn.Module, dict[str, Any]]] = {}

    def lend(module: torch.nn.Module, _: Any) -> None:
        buffers = module._buffers
        if not buffers or id(module) in originals or threading.get_ident() != thread:
            return
        if isinstance(module, torch.jit.ScriptModule):
            return
        kept = dict(buffers)
        originals[id(module)] = module, kept
        for name, buffer in kept.items():
            if buffer is not None:
                if id(buffer) not in lent:
                    lent[id(buffer)] = buffer.detach().clone()
                buffers[name] = lent[id(buffer)]

    if isinstance(first, torch.nn.Module):
        lend(first, None)
    hook = register_module_forward_pre_hook(lend)

    def end() -> None:
        hook.remove()
        for module, kept in originals.values():
            module._buffers.clear()
            module._buffers.update(kept)

    return end
