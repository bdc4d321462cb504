"""Callbacks that watch a run of Keras, Lightning or Hugging Face's Trainer, as `eg.watch` watches a loop.

`KerasWatch` goes into `model.fit(callbacks=[...])`, `LightningWatch` into `Trainer(callbacks=[...])` of Lightning, and
`TrainerWatch` into `Trainer(callbacks=[...])` of transformers. Each imports its framework when it is first used.
"""

import sys
from functools import cache
from importlib import import_module
from typing import Any

from elementgrad._watch.api import Watch, WatchReplay
from elementgrad.errors import OptionError, WatchError, require_packages

__all__ = ["KerasWatch", "LightningWatch", "TrainerWatch"]  # noqa: F822 (made when they are first used)


class WatchedRun:
    """The part of a callback that begins and ends a watch; its options are those of `eg.watch`."""

    def __init__(self, *, when: Any = "nonfinite", capture: Any = "nan.capture", loss: Any = None) -> None:
        super().__init__()
        self._options = when, capture, loss
        self._watch: Watch | None = None

    @property
    def error(self) -> WatchError | None:
        """The error that the run was stopped with; None while it is healthy."""
        return None if self._watch is None else self._watch.error

    def replay(self, capture: Any = None) -> WatchReplay:
        """Run the captured step again, as `Watch.replay` does; `capture` is the file, left out for its own."""
        if self._watch is None:
            raise OptionError("nothing was watched yet; call replay after the run")
        return self._watch.replay(capture)

    def _begin(self, model: Any, optimizer: Any, loop: str) -> Watch:
        self._end()
        self._watch = watch = Watch(model, optimizer, *self._options)
        watch.__enter__()
        _end_with_frame(loop, watch)
        return watch

    def _end(self, look: bool = False) -> None:
        if self._watch is not None:
            self._watch.close(look)


class _FrameGuard:
    """Ends a watch when the frame that it is kept in ends, for loops that call no callback after an error."""

    def __init__(self, watch: Watch):
        self._watch = watch

    def __call__(self, *_: Any) -> None:
        return None

    def __del__(self) -> None:
        self._watch.close(False)


def _end_with_frame(name: str, watch: Watch) -> None:
    """End a watch at the latest with the function of this name that is running.

    The field for a trace function is the only one of a frame that takes an object. It is left alone under a debugger.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    if frame is not None and frame.f_trace is None and sys.gettrace() is None:
        frame.f_trace = _FrameGuard(watch)


@cache
def _keras_watch() -> type:
    require_packages("keras", "KerasWatch", "tensorflow")
    base: Any = import_module("keras").callbacks.Callback

    class KerasWatch(WatchedRun, base):  # type: ignore[misc]
        """Watch `model.fit`, and stop it at the first number that is not finite.

        Args:
            when: Rules, as for `eg.watch`.
            capture: The file to write on a hit; None for none.
        """

        def on_train_begin(self, logs: Any = None) -> None:
            self._begin(self.model, None, "fit")

        def on_train_end(self, logs: Any = None) -> None:
            self._end(look=True)

    return KerasWatch


@cache
def _trainer_watch() -> type:
    require_packages("transformers", "TrainerWatch", "torch")
    from transformers import TrainerCallback

    class TrainerWatch(WatchedRun, TrainerCallback):  # type: ignore[misc]
        """Watch a run of Hugging Face's Trainer.

        Args:
            when: Rules, as for `eg.watch`.
            capture: The file to write on a hit; None for none.
        """

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._begin(kwargs["model"], kwargs.get("optimizer"), "train")

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._end(look=True)

    return TrainerWatch


@cache
def _lightning_watch() -> type:
    try:
        require_packages("lightning", "LightningWatch", "torch")
        from lightning.pytorch import Callback
    except ImportError:
        require_packages("pytorch_lightning", "LightningWatch", "torch")
        from pytorch_lightning import Callback  # type: ignore[assignment]

    class LightningWatch(WatchedRun, Callback):  # type: ignore[misc]
        """Watch a run of Lightning's Trainer. The model is the module, and its loss is inside of `training_step`.

        Args:
            when: Rules, as for `eg.watch`.
            capture: The file to write on a hit; None for none.
        """

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._begin(pl_module, list(trainer.optimizers), "fit")

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._end(look=True)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._end()

    return LightningWatch


_CLASSES = {"KerasWatch": _keras_watch, "LightningWatch": _lightning_watch, "TrainerWatch": _trainer_watch}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module 'elementgrad.callbacks' has no attribute {name!r}")
    return _CLASSES[name]()


def __dir__() -> list[str]:
    return sorted(__all__)
