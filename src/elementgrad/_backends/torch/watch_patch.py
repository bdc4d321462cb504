"""Functions of PyTorch that watchers see while a block runs: norms, scaled losses, and calls of compiled models."""

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from elementgrad._backends.torch import _compat
from elementgrad._cleanup import AttributePatch, Replace, push

if TYPE_CHECKING:
    from elementgrad._backends.torch.watch import TorchWatcher

Tensor = torch.Tensor
watchers: "list[TorchWatcher]" = []
"""The watchers of all blocks that run."""


def pause() -> None:
    """Have no watcher look at calls until the innermost open scope is left: the model runs for a report."""
    mark = object()  # one of its own, as blocks of other threads may pause the same watchers
    for watcher in list(watchers):
        push(watcher, "pauses", mark)


def _install(replace: Replace) -> None:
    total_norm = getattr(_compat.clip_grad, _compat.TOTAL_NORM)
    scale, unscale, step = [getattr(torch.amp.GradScaler, name) for name in ("scale", "unscale_", "step")]

    @wraps(total_norm)
    def seen_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **kw: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm = total_norm(tensors, norm_type, False, *args, **kw)
        for watcher in list(watchers):
            watcher.see_norm(tensors, norm, float(norm_type))
        return total_norm(tensors, norm_type, True, *args, **kw) if error_if_nonfinite else norm

    @wraps(scale)
    def seen_scale(self: Any, outputs: Any) -> Any:
        for watcher in list(watchers) if self.is_enabled() else ():
            watcher.see_scale()
        return scale(self, outputs)

    @wraps(unscale)
    def seen_unscale(self: Any, optimizer: Any) -> Any:
        result = unscale(self, optimizer)
        for watcher in list(watchers) if self.is_enabled() else ():
            watcher.see_unscaled(optimizer)
        return result

    @wraps(step)
    def seen_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(watcher, watcher.count) for watcher in watchers]
        result = step(self, optimizer, *args, **kwargs)
        for watcher, count in before:
            watcher.see_scaler_step(optimizer, watcher.count != count)
        return result

    wrapper = _compat.compiled_wrapper()
    if wrapper is not None:
        call = wrapper.__call__

        @wraps(call)
        def seen_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            function: Callable[..., Any] = partial(call, self)
            for watcher in list(watchers):
                function = watcher.see_compiled(self, function)
            return function(*args, **kwargs)

        replace(wrapper, "__call__", seen_call)
    replace(_compat.clip_grad, _compat.TOTAL_NORM, seen_norm)
    replace(torch.amp.GradScaler, "scale", seen_scale)
    replace(torch.amp.GradScaler, "unscale_", seen_unscale)
    replace(torch.amp.GradScaler, "step", seen_step)


patch = AttributePatch(_install)
"""While it is on, watchers see norms of gradients and scaled losses."""
