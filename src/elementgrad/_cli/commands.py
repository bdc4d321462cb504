"""`elementgrad explain` and `elementgrad check`.

`elementgrad grad`.

`elementgrad names`.

`elementgrad patch inspect`, `apply` and `undo`.

`elementgrad report`.

The tour: every founding question, the usual answer beside ours, in the terminal and as a page.

`elementgrad completion`.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import elementgrad as eg
from elementgrad._backends import registry
from elementgrad._cli.load import CommandTarget, is_reference, load, require_places, step, workplace
from elementgrad._cli.output import FINDING, InputError, say, their_traceback, typed
from elementgrad._cli.parser import parser
from elementgrad._cli.results import ARRAYS, PICTURES, GradientResult, plain, require_writable, show, text_of, write
from elementgrad._files import replace_file, writable
from elementgrad._names.call import BoundCall
from elementgrad._optional import require
from elementgrad._read.budget import parse
from elementgrad._tour.runner import Tour
from elementgrad._train.api import reverse_patch
from elementgrad._train.resolve import trainer_of
from elementgrad._train.trainer import FunctionalTrainer, Trainer
from elementgrad._train.weights import ENDINGS, FileTensor, Weights


def explain(
    *, of: str | None, wrt: str | None, no_probe: bool, step: bool, json: bool, model: str, **given: Any
) -> int:
    """Print the diagnosis."""
    require_places(of, wrt)
    with workplace():
        if step:
            diagnosis = _of_step(model, of, wrt, given)
        else:
            subject = CommandTarget(model=model, **given)
            with subject.precision():
                diagnosis = eg.explain(
                    subject.function, *subject.args, kwargs=subject.kwargs, of=of, wrt=wrt, probe=not no_probe
                )
        told = {"command": "explain", **_described(diagnosis)}
    show(str(diagnosis), told, json)
    return 0 if diagnosis else FINDING


def check(*, of: str | None, wrt: str | None, json: bool, **given: Any) -> int:
    """Print how derivatives compare with differences."""
    require_places(of, wrt)
    with workplace():
        subject = CommandTarget(**given)
        with subject.precision():
            found = eg.check(subject.function, *subject.args, kwargs=subject.kwargs, of=of, wrt=wrt)
    told = {
        "command": "check",
        "verdict": found.verdict,
        "dtype": found.dtype,
        "entries": [asdict(entry) for entry in found.entries],
        "diagnosis": None if found.diagnosis is None else _described(found.diagnosis),
    }
    show(str(found), told, json)
    return 0 if found else FINDING


def _of_step(model: str, of: str | None, wrt: str | None, given: dict[str, Any]) -> eg.Diagnosis:
    if of is not None or wrt is not None or any(given.values()):
        raise InputError("--step runs a function as it is; leave inputs, --of, --wrt, --framework and --dtype out")
    return eg.explain(step(model))


def _described(diagnosis: eg.Diagnosis) -> dict[str, Any]:
    """A diagnosis as an object of JSON."""
    names = ("verdict", "cause", "sentence", "where", "operation", "module", "path", "evidence", "fix", "of", "wrt")
    told = {name: getattr(diagnosis, name) for name in names}
    value = diagnosis.value
    owner = None if value is None else registry.backend_of(value)
    return told | {"value": None if owner is None else plain(GradientResult.of("", value, owner).values)}


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
    parse(budget)
    require_writable(out, ARRAYS)
    require_writable(plot, PICTURES)
    if len(wrt or []) > 1 and ((out or "").endswith(".npy") or plot is not None):
        raise InputError("a .npy file and a picture hold one gradient; give --wrt once, or an .npz file")
    if plot is not None:
        require("matplotlib", "--plot", "show")
    with workplace():
        subject = CommandTarget(**given)
        call = BoundCall(subject.function, subject.args, subject.kwargs)
        names = wrt or [call.find_source(eg.Place()).name]
        gradients: list[GradientResult] = []
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
                gradients = [GradientResult.of(*one, subject.backend) for one in zip(names, found, strict=True)]
            finding, message = _judged(gradients, unconnected)
        except eg.UnconnectedError as error:
            if their_traceback(error) is not None:
                raise
            finding, message = "unconnected", typed(str(error))
        told = {
            "command": "grad",
            "framework": subject.backend.name,
            "of": of or call.output_name,
            "gradients": [one.described() for one in gradients],
            "finding": finding,
            "message": message,
        }
        if plot is not None and gradients:
            title = f"{told['of']} by {names[0]}"
            drawn = io.BytesIO()
            eg.plot(found[0], title=title).savefig(drawn, format=plot.rpartition(".")[2])
            replace_file(plot, drawn.getvalue())
    if out is not None and gradients:
        write(out, gradients, told)
    if json or gradients:
        show(_written(gradients), told, json)
    if message is not None:
        say(message)
    return FINDING if finding is not None else 0


def _judged(gradients: list[GradientResult], unconnected: str) -> tuple[str | None, str | None]:
    """What is wrong with gradients, and in words. Zeros that were asked for are not."""
    every = np.concatenate([one.values.reshape(-1) for one in gradients])
    finding = "nonfinite" if not np.isfinite(every).all() else None
    if finding is None and every.size and unconnected == "error":
        finding = None if all(one.values.any() for one in gradients) else "zero"
    return finding, SAYS.get(finding or "")


def _written(gradients: list[GradientResult]) -> str:
    """The numbers, each gradient below its name where there are several."""
    heads = [f"{one.wrt}:\n" if len(gradients) > 1 else "" for one in gradients]
    return "\n".join(head + text_of(one.values) for head, one in zip(heads, gradients, strict=True))


def names(*, kind: str | None, json: bool, **given: Any) -> None:
    """Print the table of names."""
    with workplace():
        subject = CommandTarget(**given)
        with subject.precision():
            found = eg.names(subject.function, *subject.args, kwargs=subject.kwargs)
    chosen = type(found)([name for name in found if kind in (None, name.kind)])
    show(repr(chosen), {"command": "names", "names": [asdict(name) for name in chosen]}, json)


OF_KERAS = (".weights.h5", ".keras")
"""What a Keras model writes itself."""


def look(*, patch: str, json: bool) -> None:
    """Print what a patch changes."""
    found = eg.inspect(patch)
    names = ("place", "name", "shape", "dtype", "largest_change", "fingerprint")
    entries = [
        {name: getattr(entry, name) for name in names} | {"elements": len(entry.indices)} for entry in found.entries
    ]
    show(repr(found), {"command": "patch inspect", "elements": found.size, "entries": entries}, json)


def put(*, target: str, patch: list[str], out: str, json: bool) -> None:
    """Write weights with the values of patches in them."""
    read = [eg.inspect(path) for path in patch]
    _changed("apply", target, out, json, lambda model: _all_applied(model, read))


def take_back(*, target: str, patch: list[str], out: str, json: bool) -> None:
    """Write weights as they were before patches."""
    read = [eg.inspect(path) for path in patch]
    _changed("undo", target, out, json, lambda model: _all_applied(model, [reverse_patch(model, read)]))


def _changed(action: str, target: str, out: str, json: bool, change: Callable[[Any], tuple[Any, list[str]]]) -> None:
    require_writable(out, (*ENDINGS, *OF_KERAS))
    with workplace():
        model = load(target)[0] if is_reference(target) else _weights(target)
        model, places = change(model)
        _save(model, out)
    told = {"command": f"patch {action}", "places": places, "out": out}
    show("\n".join(places), told, json)
    say(f"{out} is written")


def _weights(path: str) -> Weights:
    if not path.endswith(ENDINGS):
        raise InputError(f"{path} is no weights; give a .safetensors or .npz file, or file.py:name of a model")
    return Weights.read(path)


def _all_applied(model: Any, patches: Sequence[eg.Patch]) -> tuple[Any, list[str]]:
    """A model with patches in it, and the places that they changed."""
    places: list[str] = []
    for patch in patches:
        elements = eg.apply(model, patch)
        if isinstance(trainer_of(model), FunctionalTrainer):  # whose parameters are never written to
            model = elements.merge()
        places += map(str, elements.places)
    return model, places


def _save(model: Any, out: str) -> None:
    """Write all weights of a model, by the names that its framework loads them by."""
    if out.endswith(OF_KERAS):
        write = getattr(model, "save_weights" if out.endswith(".h5") else "save", None)
        if write is None:
            raise InputError(
                f"{out} is written by Keras models, and this is {type(model).__name__}; write .safetensors"
            )
        with TemporaryDirectory() as folder:
            beside = Path(folder, f"model{next(ending for ending in OF_KERAS if out.endswith(ending))}")
            write(str(beside))
            replace_file(out, beside.read_bytes())  # as a whole or not at all, like all other files
        return
    if isinstance(model, Weights):
        model.write(out)
        return
    trainer = trainer_of(model)
    state = getattr(model, "state_dict", None)
    tensors = state() if state is not None else {name: trainer.parameter(name) for name in trainer.names()}
    Weights({name: _held(trainer, tensor) for name, tensor in tensors.items()}).write(out)


def _held(trainer: Trainer, tensor: Any) -> FileTensor:
    dtype, bits = trainer.read_bits(tensor)
    return FileTensor(dtype, tensor.shape, bits)


def report(
    *,
    model: str,
    of: str | None,
    wrt: list[str] | None,
    out: str,
    title: str | None,
    budget: str | None,
    json: bool,
    **given: Any,
) -> None:
    """Write the page, about a derivative or about a patch."""
    require_places(of, *(wrt or []))
    parse(budget)
    require_writable(out, (".html", ".htm"))
    if model.endswith(".safetensors"):
        if of is not None or wrt is not None or any(given.values()):
            raise InputError(f"{model} is a patch, and a page about one needs nothing else; leave the rest out")
        path = eg.report(out, eg.inspect(model), title=title)
    else:
        with workplace():
            subject = CommandTarget(model=model, **given)
            with subject.precision():
                path = eg.report(
                    out,
                    subject.function,
                    *subject.args,
                    kwargs=subject.kwargs,
                    of=of,
                    wrt=wrt,
                    title=title,
                    budget=budget,
                )
    show(str(path), {"command": "report", "out": str(path)}, json)


INTRODUCTION = (
    "What people ask about single elements of tensors, what they are usually told, and what this library does. All "
    "code runs as it is shown, and the numbers and errors are what just came out."
)


def run_tour(framework: str = "torch", out: str = "tour.html", no_report: bool = False) -> None:
    """Answer every question, print the answers, and write them with their pictures to a page."""
    require("rich" if no_report else "rich matplotlib jinja2", "the tour", "show")
    require("safetensors", "the tour", "train")
    from elementgrad._tour.render import Terminal

    if not no_report:
        writable(out)
    terminal, visit = Terminal(), Tour(framework)
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
        from elementgrad._tour.render import page

        written = page(framework, models, chapters).write(out)
        terminal.foot(f"The same with pictures: {written}")


FILES = ("model", "inputs", "out", "plot", "patch", "target")
"""Arguments for which files are offered."""


def completion(*, shell: str) -> None:
    """Print the script that a shell completes by."""
    require("shtab", "completion", "completion")
    import shtab

    made = parser()
    waiting = [made]
    while waiting:
        for action in waiting.pop()._actions:
            if isinstance(action.choices, dict):
                waiting += action.choices.values()
            elif action.dest in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(made, shell))
