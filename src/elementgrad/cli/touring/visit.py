"""A visit to every question on one framework: the models are trained, and the answers run in order."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import elementgrad as eg
from elementgrad.cli.touring.data import digits, sentences
from elementgrad.cli.touring.questions import CHAPTERS, Question
from elementgrad.cli.touring.running import Answer, run
from elementgrad.errors import FrameworkError

if TYPE_CHECKING:
    from elementgrad.show.page import Image

NEEDS = {
    "torch": {"torch": "torch"},
    "tensorflow": {"tf": "tensorflow", "keras": "keras"},
    "jax": {"jax": "jax", "jnp": "jax.numpy", "optax": "optax"},
}
"""For each framework the modules that its code uses, by the names that they have there."""
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}
"""For models as small as these: several threads make them slower, far slower where others work too, and so does a
compiler that takes its time. And no logs on the way."""


@dataclass(frozen=True)
class Stop:
    """A question, and its answers."""

    number: int
    question: Question
    ours: Answer
    usual: Answer | None = None

    def image(self) -> "Image | None":
        """The picture of our answer, in light and dark, if it has one."""
        from elementgrad.show.page import Image

        if self.question.picture is None:
            return None
        names = self.ours.names | {"eg": _Plotting(Image.of)}
        return eval(f"eg.plot({self.question.picture})", names)

    @property
    def plotted(self) -> str:
        """The line that makes the picture."""
        return f"eg.plot({self.question.picture})" if self.question.picture else ""


@dataclass(frozen=True)
class _Plotting:
    """What stands for `eg` where a picture is made for the page, which has all in two themes."""

    plot: Any


class Visit:
    """All questions on one framework."""

    def __init__(self, framework: str):
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        self.framework = framework
        self.names: dict[str, Any] = {"eg": eg, "np": np}
        for name, module in NEEDS[framework].items():
            self.names[name] = _needed(module, f"'elementgrad[{framework}]'" if module in NEEDS else module)

    def models(self) -> Iterator[Answer]:
        """Train the two models."""
        images, labels = digits()
        self.names |= {"images": images, "labels": labels, "sentences": sentences()}
        for name in ("net", "reader"):
            answer = run(getattr(self._module("models"), name), self.names)
            self.names |= answer.names
            yield answer

    def chapters(self) -> Iterator[tuple[str, Iterator[Stop]]]:
        """The chapters by their titles, with their questions as they are answered."""
        number = 1
        with tempfile.TemporaryDirectory() as folder:
            self.names["folder"] = Path(folder)
            for chapter in CHAPTERS:
                module = self._module(chapter.module)
                yield chapter.title, self._stops(module, chapter.questions, number)
                number += len(chapter.questions)

    def _stops(self, module: Any, questions: Any, number: int) -> Iterator[Stop]:
        for position, question in enumerate(questions):
            usual = getattr(module, f"{question.key}_usually", None)
            theirs = run(usual, self.names, catch=True) if usual is not None else None
            yield Stop(number + position, question, run(getattr(module, question.key), self.names), theirs)

    def _module(self, name: str) -> Any:
        return import_module(f"elementgrad.cli.stops.on_{self.framework}.{name}")


def _needed(module: str, install: str) -> Any:
    """A module that the tour cannot do without."""
    try:
        return import_module(module)
    except ImportError:
        raise FrameworkError(f"the tour needs {module}; pip install {install}") from None
