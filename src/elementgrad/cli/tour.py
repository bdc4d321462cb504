"""The tour: every founding question, the usual answer beside ours, in the terminal and as a page."""

from elementgrad.cli.touring.visit import Visit
from elementgrad.extras import require
from elementgrad.train.replacement import writable

INTRODUCTION = (
    "What people ask about single elements of tensors, what they are usually told, and what this library does. All "
    "code runs as it is shown, and the numbers and errors are what just came out."
)


def run(framework: str = "torch", out: str = "tour.html", no_report: bool = False) -> None:
    """Answer every question, print the answers, and write them with their pictures to a page."""
    require("rich" if no_report else "rich matplotlib jinja2", "the tour", "show")
    require("safetensors", "the tour", "train")
    from elementgrad.cli.touring.terminal import Terminal

    if not no_report:
        writable(out)
    terminal, visit = Terminal(), Visit(framework)
    terminal.head("elementgrad: gradients, one element at a time", INTRODUCTION)
    terminal.chapter("The two models")
    models = []
    for answer in visit.models():
        terminal.answer("trained", answer, "cyan")
        models.append(answer)
    chapters = []
    for title, stops in visit.chapters():
        terminal.chapter(title)
        answered = []
        for stop in stops:
            terminal.stop(stop)
            answered.append(stop)
        chapters.append((title, answered))
    terminal.chapter("At a glance")
    terminal.glance([stop for _, stops in chapters for stop in stops])
    if not no_report:
        from elementgrad.cli.touring.paper import page

        written = page(framework, models, chapters).write(out)
        terminal.foot(f"The same with pictures: {written}")
