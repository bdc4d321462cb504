"""The tour: the questions people ask about single elements, answered on PyTorch with the code that answers them."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from importlib import import_module
from typing import Any

import elementgrad as eg
from elementgrad.errors import FrameworkError

torch: Any = None  # the one framework the tour needs, imported when it starts


def replace_an_element() -> dict[str, Any]:
    """Replace element 2 by a value and differentiate the sum."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    value = torch.tensor(10.0, requires_grad=True)
    new = eg.at(v)[2].set(value)
    new.sum().backward()
    return {"new": new, "v.grad": v.grad, "value.grad": value.grad}


def replace_and_square() -> dict[str, Any]:
    """Replace element 0 by a value and differentiate the sum of squares."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    value = torch.tensor(7.0, requires_grad=True)
    loss = (eg.at(v)[0].set(value) ** 2).sum()
    loss.backward()
    return {"loss": loss, "v.grad": v.grad, "value.grad": value.grad}


def one_element_alone() -> dict[str, Any]:
    """Get the gradient of one element alone, all others zero."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    (eg.at(v)[2].only() ** 2).sum().backward()
    return {"v.grad": v.grad}


def one_step_on_one_element() -> dict[str, Any]:
    """Take one gradient step (learning rate 0.1) on element 1 and move nothing else."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    (eg.at(v)[1].only() ** 2).sum().backward()
    return {"v - 0.1 * v.grad": v - 0.1 * v.grad}


def the_published_answer() -> dict[str, Any]:
    """Beware the usual answer: replace the element first, and every *other* element moves."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    (eg.at(v)[1].set(2.0) ** 2).sum().backward()
    return {"v - 0.1 * v.grad": v - 0.1 * v.grad}


def three_ways_to_element_zero() -> dict[str, Any]:
    """Read element 0 by index, by gather and by mask: indexing is differentiable, and all agree."""
    x = torch.tensor([3.0, 4.0, 5.0], requires_grad=True)

    def gradient(index: Any) -> Any:
        return torch.autograd.grad((eg.at(x)[index].get() ** 2).sum(), x)[0]

    return {
        "gradient(0)": gradient(0),
        "gradient([0])": gradient([0]),
        "gradient(x < 4)": gradient(x < 4),
    }


def element_zero_alone() -> dict[str, Any]:
    """Enable gradients for element 0 alone."""
    x = torch.tensor([3.0, 4.0, 5.0], requires_grad=True)
    (eg.at(x)[0].only() ** 2).sum().backward()
    return {"x.grad": x.grad}


def the_message_about_element_zero() -> dict[str, Any]:
    """What does "element 0 of tensors does not require grad" mean? Element 0 is your *loss*, not x[0]."""
    x = torch.tensor([3.0, 4.0, 5.0])  # requires_grad was forgotten
    try:
        (x[0] ** 2).backward()
    except RuntimeError as error:
        message = str(error)
    return {"message": message}


def a_learned_choice() -> dict[str, Any]:
    """Learn which element to choose: the mask is itself a parameter."""
    x, logits = torch.tensor([3.0, 1.0, 2.0]), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for _ in range(200):
        optimizer.zero_grad()
        (eg.choose(x, logits) - 1.0).square().backward()
        optimizer.step()
    weights, chosen = logits.softmax(0), eg.choose(x, logits, hard=True)
    return {"weights": weights, "chosen": chosen}


def bad_numbers_stay_away() -> dict[str, Any]:
    """A NaN in an untouched element poisons `mask * x`, but no edit of ours."""
    x = torch.tensor([float("nan"), 2.0], requires_grad=True)
    mask = torch.tensor([0.0, 1.0])
    masked = (mask * x).sum()
    (eg.at(x)[0].set(0.0) ** 2).sum().backward()
    return {"masked": masked, "x.grad": x.grad}


STOPS: tuple[Callable[[], dict[str, Any]], ...] = (
    replace_an_element,
    replace_and_square,
    one_element_alone,
    one_step_on_one_element,
    the_published_answer,
    three_ways_to_element_zero,
    element_zero_alone,
    the_message_about_element_zero,
    a_learned_choice,
    bad_numbers_stay_away,
)


def run() -> None:
    """Print every stop: its question, its code, and the numbers that the code has just given."""
    global torch
    torch = _need("torch", extra="torch")
    _need("rich", extra="show")
    from rich.console import Console
    from rich.markup import escape
    from rich.syntax import Syntax
    from rich.table import Table

    console = Console()
    console.print("[bold]elementgrad[/]: gradients, one element at a time\n")
    table = Table(show_lines=True, expand=True)
    table.add_column("question", ratio=3)
    table.add_column("code", ratio=7)
    table.add_column("answer", ratio=4)
    for stop in STOPS:
        code = Syntax(source(stop), "python", theme="ansi_light", background_color="default", word_wrap=True)
        answer = "\n".join(f"{name}\n  [bold cyan]{show(value)}[/]" for name, value in stop().items())
        table.add_row(escape(inspect.getdoc(stop) or ""), code, answer)
    console.print(table)


def source(stop: Callable[..., Any]) -> str:
    """The body of a stop as it runs, without its docstring and return."""
    text = inspect.getsource(stop)
    (function,) = ast.parse(text).body
    body = function.body[1:-1]  # type: ignore[attr-defined]
    return textwrap.dedent("\n".join(text.splitlines()[body[0].lineno - 1 : body[-1].end_lineno]))


def show(value: Any) -> str:
    """A tensor as plain numbers, or a text as it is."""
    if isinstance(value, str):
        return value
    numbers = value.detach().tolist()
    entries = [f"{number:.4g}" for number in (numbers if isinstance(numbers, list) else [numbers])]
    return f"\\[{', '.join(entries)}]" if isinstance(numbers, list) else entries[0]


def _need(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise FrameworkError(f"the tour needs {module}; pip install 'elementgrad[{extra}]'") from None
