"""The tour in a terminal, or as plain text where there is none."""

from typing import TYPE_CHECKING, Any

from elementgrad.cli.touring.running import Answer
from elementgrad.cli.touring.visit import Stop
from elementgrad.cli.touring.written import array, is_picture, written

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

    def stop(self, stop: Stop) -> None:
        """A question, the usual answer, and ours."""
        from rich.text import Text

        self.console.print(Text(f"{stop.number}. {stop.question.text}", "bold"))
        self.console.print()
        if stop.usual is not None:
            self.answer("the usual answer", stop.usual, "red")
        self.answer("elementgrad", stop.ours, "green")

    def answer(self, label: str, answer: Answer, colour: str) -> None:
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

    def glance(self, stops: list[Stop]) -> None:
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


def _given(answer: Answer, colour: str) -> "RenderableType":
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
