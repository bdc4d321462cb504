"""The questions of the tour, and the runner that executes their answers.

`cells/tour_<framework>.py` is a script in cells: `# %% setup`, the models `# %% net` and `# %% reader`, then for each
question `# %% <key>` with our answer and, for most, `# %% <key>: usual` with the usual one. The script is read as a
text and never imported: the text of a cell that is shown is the text that runs.
"""

import ast
import linecache
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from elementgrad.errors import FrameworkError

FRAMEWORK_NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX"}


@dataclass(frozen=True)
class Question:
    """A question of the tour, the same on every framework."""

    key: str
    """The name of the cells that answer it."""
    text: str
    picture: str | None = None
    """Arguments of `eg.plot`, as text, in the names of our answer."""
    caption: str = ""
    same: str | None = None
    """The name of an array that both answers compute: the tour fails if its numbers differ."""


@dataclass(frozen=True)
class Chapter:
    """Questions that belong together."""

    title: str
    questions: Sequence[Question]


CHAPTERS = (
    Chapter(
        "One element of a vector",
        [
            Question("replaced", "How do I replace one element and still get gradients?"),
            Question("alone", "How do I get the gradient of one element alone, all others zero?"),
            Question("stepped", "How do I take one gradient step on one element and leave the others?"),
        ],
    ),
    Chapter(
        "One element of a result",
        [
            Question("itself", "How do I differentiate X[1, 2] with respect to X? And the sum of X?"),
            Question("product", "What is the gradient of one element of a matrix product?"),
            Question(
                "pixel",
                "How does one feature-map element depend on one pixel?",
                "field, image=image, mark=(3, 4)",
                "The receptive field over the digit, 5 x 5 of 8 x 8 pixels, and in it the pixel in question.",
            ),
            Question("photo", "And on a whole photograph, behind six convolutions, at what cost?", same="gradient"),
            Question(
                "score",
                "Which feature maps, and which single weight, drive the score of this digit?",
                'slopes["maps"], title="The score of 3 by the first feature maps"',
                "More of what is orange raises the score of 3, more of what is blue lowers it.",
            ),
            Question(
                "words",
                "Which word of the sentence drives the next word?",
                'of_words, tokens=sentence, title="The score of cat by each word"',
                "Each word by the size of its gradient.",
            ),
            Question(
                "large",
                "What if the Jacobian would never fit?",
                "J",
                "The Jacobian of conv2 by the pixels: most of it is zero, as every element sees 25 pixels.",
            ),
            Question("second", "How do I get one entry of a Hessian?"),
        ],
    ),
    Chapter(
        "An element that makes another",
        [
            Question(
                "uses",
                "y = 2 x[2] + sum(x). How much of the gradient of x[2] comes through which use?",
                'shares, title="d y / d x[2]"',
                "The shares as a waterfall.",
            ),
            Question("twice", "sum(x * w): is the gradient of x[2] hidden in there? And if I ask twice?"),
            Question("own_rule", "How do I write a derivative rule of my own that takes an index?"),
            Question("written", "t[1], t[3] and t[4] are written one after another. What is d t[4] / d t[1]?"),
        ],
    ),
    Chapter(
        '"element 0 of tensors does not require grad"',
        [
            Question("message", "Why is there no gradient, and which line is to blame?"),
            Question("three_ways", "Is plain indexing differentiable?"),
            Question("element_zero", "How do I enable gradients for element 0 alone?"),
            Question(
                "choice",
                "Can a model learn which element to take?",
                'weights, title="The weight of each element"',
                "After 200 steps, element 1 has nearly all of the weight.",
            ),
        ],
    ),
    Chapter(
        "Train single elements",
        [
            Question("entry", "How do I train one entry of an embedding, [0, 5] of 100 x 10, and nothing else?"),
            Question(
                "token",
                "How do I train one number of one word in a sequence model?",
                'steps, title="The one number that trains"',
                "The entry over twelve steps of Adam.",
            ),
            Question("unseen", "The gradient of my embedding entry is zero. Why?"),
            Question("routed", "How do I give each entry a loss of its own?"),
            Question(
                "shipped",
                "How do I fix one mistake of a model, ship the fix, and take it back?",
                'patch, title="A row of the head, before and after"',
                "What the patch holds: the elements before and after.",
            ),
        ],
    ),
)
QUESTIONS = [question for chapter in CHAPTERS for question in chapter.questions]
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}
"""Environment variables for small models: threads and an optimizing compiler make these slower. No logs either."""
MESSAGE_LIMIT = 180
"""Characters of an error message that are shown."""
SAME = 1e-5
"""The largest difference of arrays that are the same, relative to their largest entry; they are in float32."""


@dataclass(frozen=True)
class CellResult:
    """A cell and what it gave."""

    text: str
    """A sentence or two on what the code does."""
    code: str
    values: dict[str, Any] = field(default_factory=dict)
    """The values of the last line, by their expressions."""
    error: str | None = None
    """The error that was raised instead."""
    names: dict[str, Any] = field(default_factory=dict, repr=False)
    """The namespace in which the code ran."""


@dataclass(frozen=True)
class Answer:
    """Our answer to a question, and the usual one where there is one."""

    number: int
    question: Question
    ours: CellResult
    usual: CellResult | None


class Tour:
    """All questions on one framework, to be answered one after another.

    Answers do not see each other's names: each starts with a copy of those that `setup` and the models left.
    """

    def __init__(self, framework: str, folder: Path):
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        self._cells = read_cells(framework)
        self._names: dict[str, Any] = {"folder": folder}
        try:
            self.run_shared("setup")
        except ImportError as error:
            package = error.name or framework
            install = f"'elementgrad[{framework}]'" if package == framework else package
            raise FrameworkError(f"the tour needs {package}; pip install {install}") from None

    def run_shared(self, key: str) -> CellResult:
        """Run a cell whose names all later cells see."""
        result = self._run(key)
        self._names |= result.names
        return result

    def answer(self, question: Question) -> Answer:
        usual = None
        if f"{question.key}: usual" in self._cells:
            usual = self._run(f"{question.key}: usual", catch=True)
        answer = Answer(QUESTIONS.index(question) + 1, question, self._run(question.key), usual)
        check_same(answer)
        return answer

    def _run(self, key: str, catch: bool = False) -> CellResult:
        return run_cell(key, self._cells[key], self._names, catch)


def check_same(answer: Answer) -> None:
    """Raise an error if both answers computed an array that is to be the same, and it differs."""
    name = answer.question.same
    if name is None or answer.usual is None:
        return
    if answer.usual.error is not None:
        raise AssertionError(f"{answer.question.key!r} has no usual answer to compare with: {answer.usual.error}")
    expected, given = (np.asarray(result.names[name], "float64") for result in (answer.usual, answer.ours))
    if expected.shape != given.shape:
        raise AssertionError(f"{name} of {answer.question.key!r} has shape {given.shape} instead of {expected.shape}")
    error, largest = np.abs(given - expected).max(), np.abs(expected).max()
    if not error <= SAME * largest:  # also where a number is NaN
        raise AssertionError(f"{name} of {answer.question.key!r} is wrong by {error:.2g}, beside {largest:.2g}")


def read_cells(framework: str) -> dict[str, str]:
    """Return the source of every cell of a framework's script, by what follows its `# %%`."""
    script = resources.files("elementgrad._tour").joinpath(f"cells/tour_{framework}.py").read_text("utf-8")
    _, *parts = re.split(r"^# %% (.+)\n", script, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def run_cell(key: str, source: str, names: dict[str, Any], catch: bool = False) -> CellResult:
    """Execute the source of a cell in a module of its own, which begins with `names`.

    With `catch`, an error of the code is part of the result; without, it is raised.

    >>> from elementgrad._tour.runner import run_cell
    >>> source = "# Square some numbers.\\nsquares = [n**2 for n in numbers]\\nsquares, sum(squares)"
    >>> result = run_cell("squares", source, {"numbers": [1, 2, 3]})
    >>> result.text, result.code, result.values
    ('Square some numbers.', 'squares = [n**2 for n in numbers]', {'squares': [1, 4, 9], 'sum(squares)': 14})
    """
    text, code, expressions = split_cell(source)
    name = key.replace(": ", "_")
    # Frameworks and tracebacks look up source lines by file name and modules by `__name__`. Both are those of the cell
    # alone, so that line numbers count from the first line that is shown.
    file = f"{name}.py"
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    module = sys.modules[f"tour.{name}"] = ModuleType(f"tour.{name}")
    namespace = vars(module)
    namespace |= names
    namespace["__name__"] = module.__name__
    try:
        exec(compile(code, file, "exec"), namespace)
        values = {expression: eval(expression, namespace) for expression in expressions}
    except Exception as error:
        if not catch:
            raise
        message = textwrap.shorten(" ".join(str(error).split()), MESSAGE_LIMIT, placeholder=" ...")
        return CellResult(text, code, error=f"{type(error).__name__}: {message}", names=namespace)
    return CellResult(text, code, values, names=namespace)


def split_cell(source: str) -> tuple[str, str, list[str]]:
    """Return the sentence of a cell, its code, and the expressions of its last line, which is not part of the code."""
    comment = re.match(r"(?:#.*\n)*", source)[0]  # type: ignore[index]
    # Two blank lines around a function are for scripts; the tour shows one.
    code = re.sub(r"\n{3,}", "\n\n", source[len(comment) :].strip())
    last = ast.parse(code).body[-1]
    expressions = []
    if isinstance(last, ast.Expr):
        values = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        expressions = [ast.get_source_segment(code, value) or "" for value in values]
        code = "\n".join(code.splitlines()[: last.lineno - 1]).rstrip()
    text = " ".join(line.removeprefix("#").strip() for line in comment.splitlines())
    return text, code, expressions
