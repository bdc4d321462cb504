"""The tour as it is shown: `show_tour` prints the answers as they come, and writes them as a page.

In a terminal they have colours; elsewhere they are plain text.
"""

import ast
import textwrap
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from elementgrad._backends import registry
from elementgrad._show.page import Callout, Code, Facts, Heading, Image, Page, Part, PartGroup, Prose, Section, Tone
from elementgrad._tour.runner import CHAPTERS, FRAMEWORK_NAMES, Answer, CellResult, Tour

TITLE = "elementgrad: gradients, one element at a time"
INTRODUCTION = (
    "Questions about single elements of tensors, the usual answers, and those of this library. All "
    "code runs as it is shown, and the numbers and errors are its real output."
)
LEAD = (
    "Read, explain, edit and train single elements of any tensor, in PyTorch, TensorFlow and JAX, at a cost that "
    "depends on the elements that you name, not on the size of their tensors."
)
FIRST_QUESTION = (
    "Which pixels of this handwritten three does one element of one feature map see, and how does it change with each? "
    "That is one line:"
)
FIRST_KEY = "pixel"
"""The question at the head of the page, with its picture and the first statement of its answer."""
ABOUT_PAGE = (
    "This page answers {count} such questions about two small models, and runs the usual answer next to the one with "
    "elementgrad. All code ran on {framework} as it is shown here; the numbers, errors and pictures are "
    "its output."
)
ABOUT_MODELS = (
    "A small convolutional net learns 1500 real handwritten digits of 8 x 8 pixels (Optical Recognition of Handwritten "
    "Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, doi.org/10.24432/C50P49, CC BY 4.0; "
    "scikit-learn's load_digits) and is tried on 297 others. A GRU learns which word comes next in sentences of fifty "
    'words, such as "a brave cat sees the dog".'
)
ABOUT_EXPLORER = (
    "The explorer shows every tensor of a model in a browser: click an element, and see what drives it. This line "
    "trains the digits net again, which takes seconds, and opens it."
)
EXPLORED = "elementgrad._tour.explorer"
"""The module in which the explorer finds the digits net of each framework."""
MODELS = "net", "reader"
"""The cells that train the two models."""
WIDE = 5
"""A matrix with more rows and columns than this is shown in shades, two characters for each number."""
SHADES = "·░▒▓█"
BRIEF = 44
"""Characters of an answer in the table at the end."""
AnsweredChapter = tuple[str, Sequence[Answer]]


def show_tour(framework: str, out: str | None) -> None:
    """Answer every question, print the answers as they come, and write them with their pictures to the page `out`."""
    with TemporaryDirectory() as folder:
        terminal, tour = Terminal(), Tour(framework, Path(folder))
        terminal.head(TITLE, INTRODUCTION)
        terminal.chapter("The two models")
        models = []
        for model in MODELS:
            models.append(tour.run_shared(model))
            terminal.cell("trained", models[-1], "cyan")
        chapters: list[AnsweredChapter] = []
        for chapter in CHAPTERS:
            terminal.chapter(chapter.title)
            answers = []
            for question in chapter.questions:
                answers.append(tour.answer(question))
                terminal.answer(answers[-1])
            chapters.append((chapter.title, answers))
        terminal.chapter("At a glance")
        terminal.glance([answer for _, answers in chapters for answer in answers])
        if out is not None:
            path = make_page(framework, models, chapters).write(out)
            terminal.foot(f"The same with pictures: {path}")
        terminal.foot(f"Click through the digits net: {explore_command(framework)}")


def explore_command(framework: str) -> str:
    """Return the line that opens the explorer on the digits net."""
    return f"elementgrad explore {EXPLORED}:{framework}_net --input {EXPLORED}:{framework}_image"


class PipeConsole(Console):
    """A console that raises an error where the reader of a pipe has left, as all commands do."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich itself would end the process


class Terminal:
    """Prints the tour, one question after another."""

    def __init__(self) -> None:
        self.console = PipeConsole(highlight=False)

    def head(self, title: str, text: str) -> None:
        self.console.print(f"[bold]{title}[/]\n{text}\n")

    def chapter(self, title: str) -> None:

        self.console.print(Rule(Text(title, "bold")))
        self.console.print()

    def answer(self, answer: Answer) -> None:

        self.console.print(Text(f"{answer.number}. {answer.question.text}", "bold"))
        self.console.print()
        if answer.usual is not None:
            self.cell("the usual answer", answer.usual, "red")
        self.cell("elementgrad", answer.ours, "green")

    def cell(self, label: str, result: CellResult, colour: str) -> None:
        """Print the sentence of a cell, its code, and what it gave."""

        texts = [(text, "bold" if index % 2 else "") for index, text in enumerate(result.text.split("`"))]
        sentence = Text.assemble((label, f"bold {colour}"), ": ", *texts)
        code: RenderableType = Text(result.code)
        if self.console.is_terminal:
            code = Syntax(result.code, "python", theme="ansi_dark", background_color="default", word_wrap=True)
        for part, indent in ((sentence, 2), (code, 4), (_outcome(result, colour), 4)):
            self.console.print(Padding(part, (0, 0, 0, indent), expand=False))
        self.console.print()

    def glance(self, answers: Sequence[Answer]) -> None:
        """Print every question with the usual outcome and ours, in one table."""

        table = Table(show_lines=False, expand=True, pad_edge=False, box=SIMPLE_HEAD)
        table.add_column("", justify="right")
        table.add_column("question", ratio=5)
        table.add_column("the usual answer", ratio=3)
        table.add_column("elementgrad", ratio=3)
        for answer in answers:
            usual = Text(_brief(answer.usual) if answer.usual else "", "red")
            ours = Text(_brief(answer.ours), "green")
            table.add_row(str(answer.number), Text(answer.question.text), usual, ours)
        self.console.print(table)
        self.console.print()

    def foot(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)  # so that a command is one line, to be copied


def _outcome(result: CellResult, colour: str) -> RenderableType:

    if result.error is not None:
        return Text(f"→ {result.error}", f"bold {colour}")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column()
    for expression, value in result.values.items():
        rows.add_row(Text(f"→ {expression}", "dim"), _shades(value) or Text(format_value(value), f"bold {colour}"))
    return rows


def _shades(value: Any) -> RenderableType | None:
    """Return a large matrix as shades, red above zero and blue below; None for anything else."""

    if (array := _large_matrix(value)) is None:
        return None
    text = Text()
    for shades, row in zip(format_value(value).splitlines(), array, strict=True):
        for column, number in enumerate(row):
            text.append(shades[2 * column : 2 * column + 2], "red" if number > 0 else "blue" if number < 0 else "dim")
        text.append("\n")
    text.rstrip()
    return text


def _brief(result: CellResult) -> str:
    if result.error is not None:
        return result.error.partition(":")[0]
    return textwrap.shorten(", ".join(map(_format_beside_picture, result.values.values())), BRIEF, placeholder=" ...")


def make_page(framework: str, models: Sequence[CellResult], chapters: Sequence[AnsweredChapter]) -> Page:
    answers = {answer.question.key: answer for _, answers in chapters for answer in answers}
    images = {key: _draw(answer) for key, answer in answers.items()}
    code = answers[FIRST_KEY].ours.code
    statement = ast.get_source_segment(code, ast.parse(code).body[0]) or ""
    about = ABOUT_PAGE.format(count=len(answers), framework=FRAMEWORK_NAMES[framework])
    first_image = images[FIRST_KEY]
    assert first_image is not None
    opening: list[Part] = [Prose(FIRST_QUESTION), Code(statement), first_image, Prose(about)]
    sections = [Section(title, _answer_parts(answers, images)) for title, answers in chapters]
    trained = [_cell_part("trained", result, "calm") for result in models]
    sections.append(Section("The two models", [Prose(ABOUT_MODELS), *trained]))
    explore: list[Part] = [Prose(ABOUT_EXPLORER), Code(explore_command(framework), python=False)]
    sections.append(Section("Click through it yourself", explore))
    return Page(TITLE, sections, LEAD, opening)


def _draw(answer: Answer) -> Image | None:
    """Return the picture of our answer, in light and dark, if it has one."""
    if answer.question.picture is None:
        return None
    return eval(f"plot({answer.question.picture})", answer.ours.names | {"plot": Image.of})


def _answer_parts(answers: Sequence[Answer], images: dict[str, Image | None]) -> list[Part]:
    parts: list[Part] = []
    for answer in answers:
        question = answer.question
        parts.append(Heading(f"{answer.number}. {question.text}"))
        if answer.usual is not None:
            parts.append(_cell_part("The usual answer", answer.usual, "bad"))
        image = images[question.key]
        if image is None:
            parts.append(_cell_part("elementgrad", answer.ours, "good"))
        else:
            picture: list[Part] = [image, Prose(question.caption, ticks=True)]
            parts.append(_cell_part("elementgrad", answer.ours, "good", f"eg.plot({question.picture})", picture))
    return parts


def _cell_part(label: str, result: CellResult, tone: Tone, plot: str = "", picture: Sequence[Part] = ()) -> PartGroup:
    """Return the sentence of a cell, its code, what it gave, and its picture."""
    outcome: Part
    if result.error is not None:
        outcome = Callout(result.error, tone="bad")
    else:
        outcome = Facts([(name, _format_beside_picture(value)) for name, value in result.values.items()])
    code = Code(f"{result.code}\n{plot}".rstrip())
    return PartGroup(label, [Prose(result.text, ticks=True), code, outcome, *picture], tone)


def format_value(value: Any) -> str:
    """Return a value as plain text: a tensor as its numbers, and a large matrix as shades.

    >>> from elementgrad._tour.render import format_value
    >>> format_value([[1.0, 0.25], [0.0, 1e-9]]), format_value("as it is"), format_value(True)
    ('[[1, 0.25],\\n [0, 1e-09]]', 'as it is', 'True')
    """
    if value is None or isinstance(value, (str, bool, int)):
        return str(value)
    array = _to_array(value)
    if array is not None:
        return _format_shades(array) if _is_large(array) else _format_numbers(array.tolist())
    if isinstance(value, tuple) and all(isinstance(size, int) for size in value):
        return str(tuple(value))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, value))
    return str(value)


def _format_beside_picture(value: Any) -> str:
    """Return a value as text where its picture is elsewhere: a large matrix by its shape."""
    if (array := _large_matrix(value)) is not None:
        return f"{' x '.join(map(str, array.shape))} numbers: see the picture"
    return format_value(value)


def _large_matrix(value: Any) -> np.ndarray | None:
    array = None if isinstance(value, str) else _to_array(value)
    return array if array is not None and _is_large(array) else None


def _to_array(value: Any) -> np.ndarray | None:
    """Return the numbers of a tensor or a list of floats; None for anything else."""
    if registry.backend_of(value) is not None:
        value = registry.require_backend(value).to_float64(value)
    if isinstance(value, (list, tuple)) and not isinstance(np.array(value, object).flat[0], float):
        return None
    return np.asarray(value) if isinstance(value, (np.ndarray, float, list, tuple)) else None


def _is_large(array: np.ndarray) -> bool:
    return array.ndim == 2 and min(array.shape) > WIDE


def _format_shades(array: np.ndarray) -> str:
    """Return a matrix by the size of its numbers: the larger, the darker."""
    sizes = np.abs(array)
    steps = np.ceil(4 * sizes / (sizes.max() or 1)).astype(int)
    return "\n".join("".join(SHADES[step] * 2 for step in row) for row in steps)


def _format_numbers(numbers: Any) -> str:
    if not isinstance(numbers, list):
        return f"{numbers:.4g}"
    between = ",\n " if numbers and isinstance(numbers[0], list) else ", "
    return f"[{between.join(map(_format_numbers, numbers))}]"
