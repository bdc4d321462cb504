"""The tour as a page: one HTML file to be sent to a colleague."""

from collections.abc import Sequence

from elementgrad.cli.touring.running import Answer, statement
from elementgrad.cli.touring.visit import Stop
from elementgrad.cli.touring.written import told
from elementgrad.show.page import Code, Facts, Finding, Framed, Heading, Image, Page, Part, Prose, Section, Tone

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


def page(framework: str, models: Sequence[Answer], chapters: Sequence[tuple[str, Sequence[Stop]]]) -> Page:
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


def _questions(stops: Sequence[Stop], images: dict[int, Image | None]) -> list[Part]:
    parts: list[Part] = []
    for stop in stops:
        parts.append(Heading(f"{stop.number}. {stop.question.text}"))
        if stop.usual is not None:
            parts.append(_framed("The usual answer", stop.usual, "bad"))
        parts.append(_framed("elementgrad", stop.ours, "good", images[stop.number], stop))
    return parts


def _framed(label: str, answer: Answer, tone: Tone, image: Image | None = None, stop: Stop | None = None) -> Framed:
    """What is done, the code, what it gave, and its picture."""
    parts: list[Part] = [Prose(answer.text, ticks=True)]
    plotted = [stop.plotted] if stop is not None and stop.plotted else []
    parts.append(Code("\n".join([answer.code, *plotted])))
    if answer.error is not None:
        parts.append(Finding(answer.error, tone="bad"))
    else:
        parts.append(Facts([(expression, told(value)) for expression, value in answer.values.items()]))
    if image is not None and stop is not None:
        parts += [image, Prose(stop.question.seen, ticks=True)]
    return Framed(label, parts, tone)
