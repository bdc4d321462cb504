"""What an answer gave, as text: numbers of any framework, and whatever prints itself.

The questions of the tour, in order and in people's words: the same on every framework.

The code that answers a question stands in `stops/on_<framework>/`, in the module of its chapter: a function of its key,
and one of its key and `_usually` for the usual answer.


Running the code of the tour: the text that is shown is the text that runs.

A visit to every question on one framework: the models are trained, and the answers run in order.

The smallest stop, for the docstring of `run`.
"""

import ast
import inspect
import linecache
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

import elementgrad as eg
from elementgrad._backends import registry
from elementgrad._tour.data import digits, sentences
from elementgrad.errors import FrameworkError

if TYPE_CHECKING:
    from elementgrad._show.page import Image

WIDE = 5
"""A matrix of more columns is shown in shades, two characters for each number."""
SHADES = "·░▒▓█"


def written(value: Any) -> str:
    """A value as plain text: a tensor as its numbers, and a large matrix as shades.

    >>> from elementgrad._tour.runner import written
    >>> written([[1.0, 0.25], [0.0, 1e-9]]), written("as it is"), written(True)
    ('[[1, 0.25],\\n [0, 1e-09]]', 'as it is', 'True')
    """
    if value is None or isinstance(value, (str, bool, int)):
        return str(value)
    numbers = array(value)
    if numbers is not None:
        return shades(numbers) if is_picture(numbers) else _numbers(numbers.tolist())
    if isinstance(value, tuple) and all(isinstance(size, int) for size in value):
        return str(tuple(value))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(written, value))
    return str(value)


def told(value: Any) -> str:
    """A value as text where there is a picture of it elsewhere: of a large matrix the size alone."""
    numbers = None if isinstance(value, str) else array(value)
    if numbers is not None and is_picture(numbers):
        return f"{' x '.join(map(str, numbers.shape))} numbers: see the picture"
    return written(value)


def array(value: Any) -> np.ndarray | None:
    """The numbers of a tensor or a list of floats; None of anything else."""
    if registry.backend_of(value) is not None:
        value = registry.require_backend(value).to_float64(value)
    if isinstance(value, (list, tuple)) and not isinstance(np.array(value, object).flat[0], float):
        return None
    return np.asarray(value) if isinstance(value, (np.ndarray, float, list, tuple)) else None


def is_picture(numbers: np.ndarray) -> bool:
    """Whether these are so many numbers that they are looked at rather than read."""
    return numbers.ndim == 2 and min(numbers.shape) > WIDE


def shades(numbers: np.ndarray) -> str:
    """A matrix by the size of its numbers: the larger, the darker."""
    sizes = np.abs(numbers)
    steps = np.ceil(4 * sizes / (sizes.max() or 1)).astype(int)
    return "\n".join("".join(SHADES[step] * 2 for step in row) for row in steps)


def _numbers(numbers: Any) -> str:
    if not isinstance(numbers, list):
        return f"{numbers:.4g}"
    between = ",\n " if numbers and isinstance(numbers[0], list) else ", "
    return f"[{between.join(map(_numbers, numbers))}]"


@dataclass(frozen=True)
class TourQuestion:
    """What people ask."""

    key: str
    text: str
    picture: str | None = None
    """Arguments of `eg.plot`, as text, in the names of the answer."""
    seen: str = ""
    """What there is to be seen in the picture."""


@dataclass(frozen=True)
class Chapter:
    """Questions that belong together."""

    module: str
    title: str
    questions: Sequence[TourQuestion]


CHAPTERS = (
    Chapter(
        "vectors",
        "One element of a vector",
        [
            TourQuestion("replaced", "How do I replace one element and still get gradients?"),
            TourQuestion("alone", "How do I get the gradient of one element alone, all others zero?"),
            TourQuestion("stepped", "How do I take one gradient step on one element and leave the others?"),
        ],
    ),
    Chapter(
        "results",
        "One element of a result",
        [
            TourQuestion("itself", "How do I differentiate X[1, 2] with respect to X? And the sum of X?"),
            TourQuestion("product", "What is the gradient of one element of a matrix product?"),
            TourQuestion(
                "pixel",
                "How does one feature-map element depend on one pixel?",
                "field, image=image, mark=(3, 4)",
                "The receptive field over the digit, 5 x 5 of 8 x 8 pixels, and in it the pixel that was asked about.",
            ),
            TourQuestion(
                "score",
                "Which feature maps, and which single weight, drive the score of this digit?",
                'slopes["maps"], title="The score of 3 by the first feature maps"',
                "More of what is orange raises the score of 3, more of what is blue lowers it.",
            ),
            TourQuestion(
                "words",
                "Which word of the sentence drives the next word?",
                'of_words, tokens=sentence, title="The score of cat by each word"',
                "Each word by the size of its gradient.",
            ),
            TourQuestion(
                "large",
                "What if the Jacobian would never fit?",
                "J",
                "The Jacobian of conv2 by the pixels: most of it is zero, as every element sees 25 pixels.",
            ),
            TourQuestion("second", "How do I get one entry of a Hessian?"),
        ],
    ),
    Chapter(
        "inside",
        "An element that makes another",
        [
            TourQuestion(
                "uses",
                "y = 2 x[2] + sum(x). How much of the gradient of x[2] comes through which use?",
                'shares, title="d y / d x[2]"',
                "The shares as a waterfall.",
            ),
            TourQuestion("twice", "sum(x * w): is the gradient of x[2] hidden in there? And if I ask twice?"),
            TourQuestion("own_rule", "How do I write a derivative rule of my own that takes an index?"),
            TourQuestion("written", "t[1], t[3] and t[4] are written one after another. What is d t[4] / d t[1]?"),
        ],
    ),
    Chapter(
        "missing",
        '"element 0 of tensors does not require grad"',
        [
            TourQuestion("message", "Why is there no gradient, and which line is to blame?"),
            TourQuestion("three_ways", "Is plain indexing differentiable?"),
            TourQuestion("element_zero", "How do I enable gradients for element 0 alone?"),
            TourQuestion(
                "choice",
                "Can a model learn which element to take?",
                'weights, title="The weight of each element"',
                "After 200 steps, element 1 has nearly all of the weight.",
            ),
        ],
    ),
    Chapter(
        "training",
        "Train single elements",
        [
            TourQuestion("entry", "How do I train one entry of an embedding, [0, 5] of 100 x 10, and nothing else?"),
            TourQuestion(
                "token",
                "How do I train one number of one word in a sequence model?",
                'steps, title="The one number that trains"',
                "The entry over twelve steps of Adam.",
            ),
            TourQuestion("unseen", "The gradient of my embedding entry is zero. Why?"),
            TourQuestion("routed", "How do I give each entry a loss of its own?"),
            TourQuestion(
                "shipped",
                "How do I fix one mistake of a model, ship the fix, and take it back?",
                'patch, title="A row of the head, before and after"',
                "What the patch holds: the elements before and after.",
            ),
        ],
    ),
)


RAISED = 180
"""Characters of the message of an error."""
BRIEF = 44
"""Characters of a brief answer."""


@dataclass(frozen=True)
class CellResult:
    """Code, and what came of it."""

    text: str
    """What the code does, in a sentence or two."""
    code: str
    values: dict[str, Any] = field(default_factory=dict)
    """What is to be seen, by the expression that gave it."""
    error: str | None = None
    """What it raised instead."""
    names: dict[str, Any] = field(default_factory=dict, repr=False)
    """Every name that the code can see or has made."""

    @property
    def brief(self) -> str:
        """What came of it, in a few words."""
        if self.error is not None:
            return self.error.partition(":")[0]
        return textwrap.shorten(", ".join(map(told, self.values.values())), BRIEF, placeholder=" ...")


def run(stop: Callable[..., Any], names: dict[str, Any], catch: bool = False) -> CellResult:
    """Run the body of a function as a file of its own, in which the given names are known.

    The function itself is never called: its body is the code, what it returns is what is to be seen, and its docstring
    says what it does. Lines in error messages are therefore those of the code as it is shown. What the code raises
    comes through, or is told with `catch`.

    >>> from elementgrad._tour.runner import run
    >>> from elementgrad._tour.runner import squares
    >>> answer = run(squares, {"numbers": [1, 2, 3]})
    >>> answer.text, answer.code, answer.values
    ('Square some numbers.', 'squared = [number**2 for number in numbers]', {'squared': [1, 4, 9], 'sum(squared)': 14})
    """
    text, code, shown = parts(stop)
    file = f"{stop.__name__}.py"
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    module = ModuleType(f"tour.{stop.__name__}")
    vars(module).update(names | {"__name__": module.__name__})
    sys.modules[module.__name__] = module  # where frameworks look up the file of a function
    names = vars(module)
    try:
        exec(compile(code, file, "exec"), names)
        values = {expression: eval(expression, names) for expression in shown}
    except Exception as error:
        if not catch:
            raise
        return CellResult(text, code, error=raised(error), names=names)
    return CellResult(text, code, values, names=names)


def parts(stop: Callable[..., Any]) -> tuple[str, str, list[str]]:
    """The docstring of a function, its body as a text, and the expressions that it returns."""
    whole = textwrap.dedent(inspect.getsource(stop))
    (function,) = ast.parse(whole).body
    *body, last = function.body[1:]  # type: ignore[attr-defined]
    first = min(node.lineno for node in [body[0], *getattr(body[0], "decorator_list", [])])
    lines = whole.splitlines()[first - 1 : body[-1].end_lineno]
    shown = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
    code = textwrap.dedent("\n".join(lines))
    return (
        " ".join((inspect.getdoc(stop) or "").split()),
        code,
        [ast.get_source_segment(whole, value) or "" for value in shown],
    )


def statement(code: str, name: str) -> str:
    """The statement of some code that gives a name its value."""
    tree = ast.parse(code)
    nodes = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return ast.get_source_segment(code, nodes[0]) or ""


def raised(error: Exception) -> str:
    """An error in a line: its type, and the first sentence or so of its message."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {textwrap.shorten(message, RAISED, placeholder=' ...')}"


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
class TourStop:
    """A question, and its answers."""

    number: int
    question: TourQuestion
    ours: CellResult
    usual: CellResult | None = None

    def image(self) -> "Image | None":
        """The picture of our answer, in light and dark, if it has one."""
        from elementgrad._show.page import Image

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


class Tour:
    """All questions on one framework."""

    def __init__(self, framework: str):
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        self.framework = framework
        self.names: dict[str, Any] = {"eg": eg, "np": np}
        for name, module in NEEDS[framework].items():
            self.names[name] = _needed(module, f"'elementgrad[{framework}]'" if module in NEEDS else module)

    def models(self) -> Iterator[CellResult]:
        """Train the two models."""
        images, labels = digits()
        self.names |= {"images": images, "labels": labels, "sentences": sentences()}
        for name in ("net", "reader"):
            answer = run(getattr(self._module("models"), name), self.names)
            self.names |= answer.names
            yield answer

    def chapters(self) -> Iterator[tuple[str, Iterator[TourStop]]]:
        """The chapters by their titles, with their questions as they are answered."""
        number = 1
        with tempfile.TemporaryDirectory() as folder:
            self.names["folder"] = Path(folder)
            for chapter in CHAPTERS:
                module = self._module(chapter.module)
                yield chapter.title, self._stops(module, chapter.questions, number)
                number += len(chapter.questions)

    def _stops(self, module: Any, questions: Any, number: int) -> Iterator[TourStop]:
        for position, question in enumerate(questions):
            usual = getattr(module, f"{question.key}_usually", None)
            theirs = run(usual, self.names, catch=True) if usual is not None else None
            yield TourStop(number + position, question, run(getattr(module, question.key), self.names), theirs)

    def _module(self, name: str) -> Any:
        return import_module(f"elementgrad._tour.cells.{self.framework}")


def _needed(module: str, install: str) -> Any:
    """A module that the tour cannot do without."""
    try:
        return import_module(module)
    except ImportError:
        raise FrameworkError(f"the tour needs {module}; pip install {install}") from None


def squares(numbers):  # type: ignore[no-untyped-def]
    """Square some numbers."""
    squared = [number**2 for number in numbers]
    return squared, sum(squared)
