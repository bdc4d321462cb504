"""`eg.explore`: the page in a notebook, or on a server of its own."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elementgrad._explore.server import Explorer
from elementgrad._explore.session import Session
from elementgrad._explore.spelling import Spelling, calling_frame
from elementgrad._explore.widget import make_widget
from elementgrad._names.arguments import NOTHING, gather_arguments
from elementgrad.errors import require_packages


def explore(
    model: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    tokens: Sequence[Any] | None = None,
    labels: Sequence[Any] | None = None,
) -> Any:
    """Open a page on which an element of any tensor of a model can be clicked, to see what drives it.

    In a notebook this is a widget. Elsewhere the page is served on this machine alone, for as long as the program runs;
    `explorer.wait()` at the end of a script keeps it up. It reads in a thread of its own: do not train meanwhile.

    Args:
        model: A function or model of PyTorch, TensorFlow or JAX. It is run, and left as it is.
        args: The positional arguments of `model`.
        kwargs: The keyword arguments of `model`.
        tokens: A text for each position of a sequence, or a list of these for each example.
        labels: A text for each class of the output, or else for each example.

    Returns:
        The widget in a notebook; elsewhere an `Explorer`, with `url` and `close()`.

    Raises:
        OptionError: `tokens` or `labels` do not fit.

    >>> import torch, elementgrad as eg
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> explorer = eg.explore(net, torch.ones(1, 3), labels=["cat", "dog"])
    >>> explorer.url.startswith("http://127.0.0.1:")
    True
    >>> explorer.close()
    """
    is_notebook = runs_in_notebook()
    if is_notebook:
        require_packages("anywidget", "eg.explore in a notebook", "explore")
    else:
        require_packages("starlette uvicorn", "eg.explore", "explore")
    spelling = Spelling.of(calling_frame(1), model, args, kwargs)
    model, args, kwargs = gather_arguments(explore, model, args, kwargs, {})
    if len(spelling.args) != len(args):  # the dict of a tokenizer has become keywords
        spelling = Spelling(spelling.function, [], {name: f"{spelling.args[0]}[{name!r}]" for name in kwargs})
    session = Session(model, args, kwargs, tokens, labels, spelling)
    return make_widget(session) if is_notebook else Explorer(session)


def runs_in_notebook() -> bool:
    """Return True in a kernel of Jupyter, VS Code or Colab, and in marimo."""
    ipython, marimo = sys.modules.get("IPython"), sys.modules.get("marimo")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None or (marimo is not None and marimo.running_in_notebook())
