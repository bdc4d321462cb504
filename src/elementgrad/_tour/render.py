"""The tour in a terminal, or as plain text where there is none.

The tour as a page: one HTML file to be sent to a colleague.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elementgrad._show.page import Callout, Code, Facts, Heading, Image, Page, Part, PartGroup, Prose, Section, Tone
from elementgrad._tour.runner import CellResult, TourStop, array, is_picture, statement, told, written

if TYPE_CHECKING:
    from rich.console import RenderableType


class Terminal:
    """Prints what has been answered, one question after another."""

    def __init__(self) -> None:
        from rich.console import Console

        class Plain(Console):
            def on_broken_pipe(self) -> None:
                raise BrokenPipeError  # as everywhere; rich would end the process

        self.console = Plain(highlight=False)

    def head(self, title: str, text: str) -> None:
        """The first lines."""
        self.console.print(f"[bold]{title}[/]\n{text}\n")

    def chapter(self, title: str) -> None:
        """A line across, with a title."""
        from rich.rule import Rule
        from rich.text import Text

        self.console.print(Rule(Text(title, "bold")))
        self.console.print()

    def stop(self, stop: TourStop) -> None:
        """A question, the usual answer, and ours."""
        from rich.text import Text

        self.console.print(Text(f"{stop.number}. {stop.question.text}", "bold"))
        self.console.print()
        if stop.usual is not None:
            self.answer("the usual answer", stop.usual, "red")
        self.answer("elementgrad", stop.ours, "green")

    def answer(self, label: str, answer: CellResult, colour: str) -> None:
        """What is done, the code, and what it gave."""
        from rich.console import RenderableType
        from rich.padding import Padding
        from rich.syntax import Syntax
        from rich.text import Text

        texts = [(text, "bold" if number % 2 else "") for number, text in enumerate(answer.text.split("`"))]
        said = Text.assemble((label, f"bold {colour}"), ": ", *texts)
        code: RenderableType = Text(answer.code)
        if self.console.is_terminal:
            code = Syntax(answer.code, "python", theme="ansi_dark", background_color="default", word_wrap=True)
        for part, indent in ((said, 2), (code, 4), (_given(answer, colour), 4)):
            self.console.print(Padding(part, (0, 0, 0, indent), expand=False))
        self.console.print()

    def glance(self, stops: list[TourStop]) -> None:
        """Every question with what came of the usual answer and of ours, in one table."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(show_lines=False, expand=True, pad_edge=False, box=SIMPLE_HEAD)
        table.add_column("", justify="right")
        table.add_column("question", ratio=5)
        table.add_column("the usual answer", ratio=3)
        table.add_column("elementgrad", ratio=3)
        for stop in stops:
            usual = Text(stop.usual.brief if stop.usual else "", "red")
            table.add_row(str(stop.number), Text(stop.question.text), usual, Text(stop.ours.brief, "green"))
        self.console.print(table)
        self.console.print()

    def foot(self, text: str) -> None:
        """The last line."""
        self.console.print(text)


def _given(answer: CellResult, colour: str) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    if answer.error is not None:
        return Text(f"→ {answer.error}", f"bold {colour}")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column()
    for expression, value in answer.values.items():
        rows.add_row(Text(f"→ {expression}", "dim"), _signed(value) or Text(written(value), f"bold {colour}"))
    return rows


def _signed(value: Any) -> Any:
    """A large matrix in shades, red above zero and blue below."""
    from rich.text import Text

    numbers = None if isinstance(value, str) else array(value)
    if numbers is None or not is_picture(numbers):
        return None
    text = Text()
    for shades, row in zip(written(value).splitlines(), numbers, strict=True):
        for column, number in enumerate(row):
            text.append(shades[2 * column : 2 * column + 2], "red" if number > 0 else "blue" if number < 0 else "dim")
        text.append("\n")
    text.rstrip()
    return text


HERO = "pixel"
"""The question whose picture is seen first."""
LEAD = (
    "Read, explain, edit and train single elements of any tensor, in PyTorch, TensorFlow and JAX, at a cost set by the "
    "elements you name and not by the tensors they live in."
)
ASKED = (
    "Which pixels of this handwritten three does one element of one feature map see, and how does it change with each? "
    "That is one line:"
)
ABOUT = (
    "This page asks {count} such questions of two small models, and runs what people are usually told beside what "
    "elementgrad does. All code ran just now, on {framework}, as it stands here; the numbers, errors and pictures are "
    "what came out."
)
MODELS = (
    "A small convolutional net learns 1500 real handwritten digits of 8 x 8 pixels (Optical Recognition of Handwritten "
    "Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, doi.org/10.24432/C50P49, CC BY 4.0; "
    "scikit-learn's load_digits) and is tried on 297 others. A GRU learns which word comes next in sentences of fifty "
    'words, such as "a brave cat sees the dog".'
)
NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX"}


def page(framework: str, models: Sequence[CellResult], chapters: Sequence[tuple[str, Sequence[TourStop]]]) -> Page:
    """The whole tour."""
    stops = [stop for _, stops in chapters for stop in stops]
    images = {stop.number: stop.image() for stop in stops}
    hero = next(stop for stop in stops if stop.question.key == HERO)
    asked = statement(hero.ours.code, "field")
    about = ABOUT.format(count=len(stops), framework=NAMES[framework])
    sections = [Section(title, _questions(stops, images)) for title, stops in chapters]
    trained = Section("The two models", [Prose(MODELS), *[_framed("trained", answer, "calm") for answer in models]])
    title = "elementgrad: gradients, one element at a time"
    opening = [part for part in (Prose(ASKED), Code(asked), images[hero.number], Prose(about)) if part is not None]
    return Page(title, [*sections, trained], LEAD, opening)


def _questions(stops: Sequence[TourStop], images: dict[int, Image | None]) -> list[Part]:
    parts: list[Part] = []
    for stop in stops:
        parts.append(Heading(f"{stop.number}. {stop.question.text}"))
        if stop.usual is not None:
            parts.append(_framed("The usual answer", stop.usual, "bad"))
        parts.append(_framed("elementgrad", stop.ours, "good", images[stop.number], stop))
    return parts


def _framed(
    label: str, answer: CellResult, tone: Tone, image: Image | None = None, stop: TourStop | None = None
) -> PartGroup:
    """What is done, the code, what it gave, and its picture."""
    parts: list[Part] = [Prose(answer.text, ticks=True)]
    plotted = [stop.plotted] if stop is not None and stop.plotted else []
    parts.append(Code("\n".join([answer.code, *plotted])))
    if answer.error is not None:
        parts.append(Callout(answer.error, tone="bad"))
    else:
        parts.append(Facts([(expression, told(value)) for expression, value in answer.values.items()]))
    if image is not None and stop is not None:
        parts += [image, Prose(stop.question.seen, ticks=True)]
    return PartGroup(label, parts, tone)
