"""`elementgrad grad`."""

import io
from typing import Any

import numpy as np

import elementgrad as eg
from elementgrad.cli.failures import FINDING, InputError, say, their_traceback, typed
from elementgrad.cli.loading import workplace
from elementgrad.cli.results import ARRAYS, PICTURES, Gradient, require_writable, show, text_of, write
from elementgrad.cli.subject import Subject, require_places
from elementgrad.extras import require
from elementgrad.plan import budget as bytes_of
from elementgrad.trace import Call
from elementgrad.train.replacement import replace

SAYS = {
    "zero": "the gradient is zero everywhere; `elementgrad explain` says why",
    "nonfinite": "the gradient is not finite; `elementgrad explain` says why",
}


def grad(
    *,
    of: str | None,
    wrt: list[str] | None,
    unconnected: Any,
    budget: str | None,
    out: str | None,
    plot: str | None,
    json: bool,
    **given: Any,
) -> int:
    """Print, write and draw the derivatives."""
    require_places(of, *(wrt or []))
    bytes_of.parse(budget)
    require_writable(out, ARRAYS)
    require_writable(plot, PICTURES)
    if len(wrt or []) > 1 and ((out or "").endswith(".npy") or plot is not None):
        raise InputError("a .npy file and a picture hold one gradient; give --wrt once, or an .npz file")
    if plot is not None:
        require("matplotlib", "--plot", "show")
    with workplace():
        subject = Subject(**given)
        call = Call(subject.function, subject.args, subject.kwargs)
        names = wrt or [call.source(eg.Place()).name]
        gradients: list[Gradient] = []
        try:
            with subject.precision():
                found = eg.grad(
                    subject.function,
                    *subject.args,
                    kwargs=subject.kwargs,
                    of=of,
                    wrt=names,
                    unconnected=unconnected,
                    budget=budget,
                )
                gradients = [Gradient.of(*one, subject.backend) for one in zip(names, found, strict=True)]
            finding, message = _judged(gradients, unconnected)
        except eg.UnconnectedError as error:
            if their_traceback(error) is not None:
                raise
            finding, message = "unconnected", typed(str(error))
        told = {
            "command": "grad",
            "framework": subject.backend.name,
            "of": of or call.output,
            "gradients": [one.described() for one in gradients],
            "finding": finding,
            "message": message,
        }
        if plot is not None and gradients:
            title = f"{told['of']} by {names[0]}"
            drawn = io.BytesIO()
            eg.plot(found[0], title=title).savefig(drawn, format=plot.rpartition(".")[2])
            replace(plot, drawn.getvalue())
    if out is not None and gradients:
        write(out, gradients, told)
    if json or gradients:
        show(_written(gradients), told, json)
    if message is not None:
        say(message)
    return FINDING if finding is not None else 0


def _judged(gradients: list[Gradient], unconnected: str) -> tuple[str | None, str | None]:
    """What is wrong with gradients, and in words. Zeros that were asked for are not."""
    every = np.concatenate([one.values.reshape(-1) for one in gradients])
    finding = "nonfinite" if not np.isfinite(every).all() else None
    if finding is None and every.size and unconnected == "error":
        finding = None if all(one.values.any() for one in gradients) else "zero"
    return finding, SAYS.get(finding or "")


def _written(gradients: list[Gradient]) -> str:
    """The numbers, each gradient below its name where there are several."""
    heads = [f"{one.wrt}:\n" if len(gradients) > 1 else "" for one in gradients]
    return "\n".join(head + text_of(one.values) for head, one in zip(heads, gradients, strict=True))
