"""The commands, one function each, named by the parser in `run`; below them what they print and write.

A function takes the options of its command by name, prints its result to stdout, and returns an exit code, or None
for 0. What concerns the options alone is checked before the user's files are loaded, which may take seconds.
"""

import io
import json
import math
import shutil
import sys
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import elementgrad as eg
from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._cli.load import (
    ARRAY_FILES,
    CommandTarget,
    is_reference,
    load_object,
    load_step,
    require_places,
    user_code,
)
from elementgrad._cli.output import FINDING, InputError, is_stdout_unicode, say, to_cli_words, user_traceback
from elementgrad._cli.parser import make_parser
from elementgrad._files import replace_file, writable
from elementgrad._names.call import BoundCall
from elementgrad._place.place import is_pattern
from elementgrad._read.plan import parse_budget
from elementgrad._train.api import apply_to_path
from elementgrad._train.diff import compare
from elementgrad._train.entries import place_label
from elementgrad._train.folder import read_weights
from elementgrad._train.match import patch_state, reverse_patch
from elementgrad._train.routing import trainer_of
from elementgrad._train.trainer import FunctionalTrainer
from elementgrad._train.weights import ENDINGS, FileTensor, Weights
from elementgrad._watch.api import replay as replay_capture
from elementgrad.errors import require_packages

JSON_FORMAT = 1
"""The version of the objects that `--json` prints."""
PICTURE_FILES = (".png", ".svg", ".pdf")
KERAS_FILES = (".weights.h5", ".keras")
"""Files that a Keras model writes itself."""
TEXT_LIMIT = 1000
"""Arrays of more numbers are shortened in text; files and JSON have all."""
FINDINGS = {
    "zero": "the gradient is zero everywhere; `elementgrad explain` says why",
    "nonfinite": "the gradient is not finite; `elementgrad explain` says why",
}
FILE_ARGUMENTS = ("model", "inputs", "out", "plot", "patch", "target", "before", "after")
"""Arguments for which a shell completes file names."""


def tour(*, framework: str, out: str, no_report: bool) -> None:
    """Show the tour in the terminal, and write its page unless `no_report`."""
    packages = f"rich safetensors {'' if no_report else 'matplotlib jinja2'}"
    require_packages(packages, "the tour", f"show,train,{framework}")  # all that it needs, by one installation
    from elementgrad._tour.render import show_tour

    if not no_report:
        writable(out)
    show_tour(framework, None if no_report else out)


def grad(
    *,
    of: str | None,
    wrt: list[str] | None,
    unconnected: Any,
    budget: int | str | None,
    out: str | None,
    plot: str | None,
    json: bool,
    **target_options: Any,
) -> int:
    """Print, write and draw derivatives."""
    require_places(of, single=True)
    require_places(*(wrt or []))
    parse_budget(budget)
    _require_writable(out, ARRAY_FILES)
    _require_writable(plot, PICTURE_FILES)
    several = len(wrt or []) > 1 or any(is_pattern(name) for name in wrt or [])
    if several and ((out or "").endswith(".npy") or plot is not None):
        raise InputError("a .npy file and a picture hold one gradient; give --wrt once, or an .npz file")
    if plot is not None:
        require_packages("matplotlib", "--plot", "show")
    with user_code():
        target = CommandTarget(**target_options)
        call = BoundCall(target.function, target.args, target.kwargs)
        names = wrt or [call.find_source(eg.Place()).name]
        gradients: list[GradientResult] = []
        try:
            tensors = target.call(eg.grad, of=of, wrt=names, unconnected=unconnected, budget=budget)
            blocks = [
                read if isinstance(read, dict) else {name: read} for name, read in zip(names, tensors, strict=True)
            ]
            gradients = [
                GradientResult.of(name, read, target.backend) for block in blocks for name, read in block.items()
            ]
            finding = _find_problem(gradients, unconnected)
            message = FINDINGS.get(finding or "")
        except eg.UnconnectedError as error:
            if user_traceback(error) is not None:
                raise
            finding, message = "unconnected", to_cli_words(str(error))
        result = {
            "command": "grad",
            "framework": target.backend.name,
            "of": of or call.output_name,
            "gradients": [gradient.to_dict() for gradient in gradients],
            "finding": finding,
            "message": message,
        }
        if plot is not None and gradients:
            file = io.BytesIO()
            picture = eg.plot(tensors[0], title=f"{result['of']} by {names[0]}")
            picture.savefig(file, format=plot.rpartition(".")[2])
            replace_file(plot, file.getvalue())
    if out is not None and gradients:
        _write_gradients(out, gradients, result)
    if json or gradients:
        _print_result(_format_gradients(gradients), result, json)
    if message is not None:
        say(message)
    return 0 if finding is None else FINDING


def explain(
    *, of: str | None, wrt: str | None, no_probe: bool, step: bool, json: bool, model: str, **target_options: Any
) -> int:
    """Print a diagnosis."""
    require_places(of, wrt, single=True)
    with user_code():
        if not step:
            target = CommandTarget(model=model, **target_options)
            diagnosis = target.call(eg.explain, of=of, wrt=wrt, probe=not no_probe)
        elif of is None and wrt is None and not any(target_options.values()):
            diagnosis = eg.explain(load_step(model))
        else:
            raise InputError("--step runs a function as it is; leave inputs, --of, --wrt, --framework and --dtype out")
        result = {"command": "explain", **_diagnosis_to_dict(diagnosis)}
    _print_result(str(diagnosis), result, json)
    return 0 if diagnosis else FINDING


def check(*, of: str | None, wrt: str | None, json: bool, **target_options: Any) -> int:
    """Print how derivatives compare with differences."""
    require_places(of, wrt, single=True)
    with user_code():
        report = CommandTarget(**target_options).call(eg.check, of=of, wrt=wrt)
    result = {
        "command": "check",
        "verdict": report.verdict,
        "dtype": report.dtype,
        "entries": [asdict(entry) for entry in report.entries],
        "diagnosis": None if report.diagnosis is None else _diagnosis_to_dict(report.diagnosis),
    }
    _print_result(str(report), result, json)
    return 0 if report else FINDING


def audit(*, loss: str | None, except_: list[str], json: bool, **target_options: Any) -> int:
    """Print which parameters do not learn."""
    with user_code():
        function = None if loss is None else load_step(loss)
        target = CommandTarget(**target_options, needs_inputs=False, needs_call=function is None)
        result = target.call_model(eg.audit, target.loss(function), except_=except_)
    _print_result(str(result), {"command": "audit", **_from_json(result.to_json())}, json)
    return 0 if result else FINDING


def names(*, kind: str | None, match: str | None, json: bool, **target_options: Any) -> None:
    """Print the table of names; without inputs, of those that need no run."""
    with user_code():
        table = CommandTarget(**target_options, needs_inputs=False).call(eg.names, kind=kind, match=match)
    _print_result(repr(table), {"command": "names", "names": [asdict(name) for name in table]}, json)


def replay(*, capture: str, model: str, loss: str | None, json: bool) -> int:
    """Print what a captured step shows when it runs again."""
    with user_code():
        function = None if loss is None else load_object(loss)[0]
        replayed = replay_capture(capture, load_object(model)[0], function)
    fields = ("same", "place", "cause", "where", "report", "differing")
    _print_result(str(replayed), {"command": "replay", **{name: getattr(replayed, name) for name in fields}}, json)
    return FINDING


def report(
    *,
    model: str,
    of: str | None,
    wrt: list[str] | None,
    out: str,
    title: str | None,
    budget: int | str | None,
    json: bool,
    **target_options: Any,
) -> None:
    """Write a page about a derivative or about a patch."""
    require_places(of, *(wrt or []))
    parse_budget(budget)
    _require_writable(out, (".html", ".htm"))
    if model.endswith(".safetensors"):
        if of is not None or wrt is not None or any(target_options.values()):
            raise InputError(f"{model} is a patch, and a page about one needs nothing else; leave the rest out")
        path = eg.report(out, eg.inspect(model), title=title)
    else:
        with user_code():
            target = CommandTarget(model=model, **target_options)
            path = target.call(partial(eg.report, out), of=of, wrt=wrt, title=title, budget=budget)
    _print_result(str(path), {"command": "report", "out": str(path)}, json)


def explore(*, no_browser: bool, **target_options: Any) -> None:
    """Serve the explorer until Ctrl-C."""
    require_packages("starlette uvicorn", "the explorer", "explore")
    from elementgrad._explore.server import Explorer
    from elementgrad._explore.session import Session
    from elementgrad._explore.spelling import Spelling

    stdout = sys.stdout
    with user_code():
        target = CommandTarget(**target_options)
        references = [target_options["model"], *target_options["inputs"], *target_options["named"]]
        spelling = Spelling.of_references(references, target.args, target.kwargs)
        session = Session(target.function, target.args, target.kwargs, spelling=spelling, surround=target.precision)
        with Explorer(session) as explorer, suppress(KeyboardInterrupt):
            print(explorer.url, file=stdout, flush=True)
            if not no_browser:
                webbrowser.open(explorer.url)
            say("Ctrl-C ends it")
            explorer.wait()


def inspect_patch(*, patch: str, target: str | None, json: bool) -> int:
    """Print the changes that a patch holds, and whether weights are those that it was made for."""
    contents = eg.inspect(patch)
    fields = ("name", "shape", "dtype", "largest_change", "fingerprint")
    entries = [
        {field: getattr(entry, field) for field in fields}
        | {"place": entry.label if entry.is_scattered else entry.place, "elements": len(entry.indices)}
        for entry in contents.entries
    ]
    result = {"command": "patch inspect", "elements": contents.size, "entries": entries}
    text, code = repr(contents), 0
    if target is not None:
        state, reason = patch_state(read_weights(target), contents)
        result |= {"target": target, "state": state}
        text += f"\n{target}: {state}" + (f", since {reason}" if reason else "")
        code = FINDING if reason else 0
    _print_result(text, result, json)
    return code


def diff_patch(
    *, before: str, after: str, out: str, only_common: bool, no_originals: bool, compress: bool, json: bool
) -> None:
    """Write the patch that makes one set of weights of another."""
    _require_writable(out, (".safetensors",))
    with _progress_bar("comparing") as progress:
        patch = compare(read_weights(before), read_weights(after), only_common, not no_originals, progress)
    patch.write(out, compress=compress)
    result = {"command": "patch diff", "elements": patch.size, "tensors": len(patch.entries), "out": out}
    _print_result(repr(patch), result, json)
    say(f"{out} is written: {patch.size} elements of {len(patch.entries)} tensors")


def patch_weights(*, undo: bool, target: str, patch: list[str], out: str | None, link: bool, json: bool) -> None:
    """Put patches into weights or a model, or take them back, write the weights, and print the changed places."""
    if is_reference(target):
        places = _patch_model(undo, target, patch, out)
    else:
        if out is not None and not Path(target).is_dir():
            _require_writable(out, ENDINGS)
        written, places = apply_to_path(target, patch, undo=undo, out=out, link=link)
        out = str(written)
    result = {"command": f"patch {'undo' if undo else 'apply'}", "places": places, "out": out}
    _print_result("\n".join(places), result, json)
    say(f"{out} is written")


def completion(*, shell: str) -> None:
    """Print the script by which a shell completes commands."""
    require_packages("shtab", "completion", "completion")
    import shtab

    parser = make_parser()
    remaining = [parser]
    while remaining:
        for action in remaining.pop()._actions:
            if isinstance(action.choices, dict):
                remaining += action.choices.values()
            elif action.dest in FILE_ARGUMENTS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell))


@dataclass(frozen=True)
class GradientResult:
    """The derivative by one place, as a NumPy array."""

    wrt: str
    values: np.ndarray
    """As float32 where NumPy does not know the dtype."""
    dtype: str

    @classmethod
    def of(cls, wrt: str, tensor: Any, backend: Backend) -> "GradientResult":
        values = backend.to_numpy(tensor)
        assert values is not None
        return cls(wrt, values, backend.dtype(tensor))

    def to_dict(self) -> dict[str, Any]:
        return {"wrt": self.wrt, "shape": self.values.shape, "dtype": self.dtype, "values": self.values}


def _find_problem(gradients: list[GradientResult], unconnected: str) -> str | None:
    """Return the key of `FINDINGS` that fits gradients. Zeros are none with `--unconnected zero`."""
    values = np.concatenate([gradient.values.reshape(-1) for gradient in gradients])
    if not np.isfinite(values).all():
        return "nonfinite"
    zero = values.size and not all(gradient.values.any() for gradient in gradients)
    return "zero" if zero and unconnected == "error" else None


def _format_gradients(gradients: list[GradientResult]) -> str:
    """Return the numbers as text, each gradient below its name where there are several."""
    heads = [f"{gradient.wrt}:\n" if len(gradients) > 1 else "" for gradient in gradients]
    texts = [_format_array(gradient.values) for gradient in gradients]
    return "\n".join(head + text for head, text in zip(heads, texts, strict=True))


def _format_array(values: np.ndarray) -> str:
    if not values.ndim:
        return str(values[()])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    return np.array2string(values, threshold=TEXT_LIMIT, max_line_width=width, separator=", ")


def _write_gradients(path: str, gradients: list[GradientResult], result: Mapping[str, Any]) -> None:
    """Write gradients to a file, as a whole or not at all; by their places where the format holds several."""
    if path.endswith(ENDINGS):
        Weights({gradient.wrt: FileTensor.of(gradient.values) for gradient in gradients}).write(path)
    elif path.endswith(".json"):
        replace_file(path, (_to_json(result) + "\n").encode("utf-8", "backslashreplace"))
    else:
        file = io.BytesIO()
        np.save(file, gradients[0].values)
        replace_file(path, file.getvalue())


def _require_writable(path: str | None, endings: tuple[str, ...]) -> None:
    if path is None:
        return
    if not path.endswith(endings):
        raise InputError(f"{path} has no known ending; give one of {', '.join(endings)}")
    writable(path, f"result{endings[0]}")


def _diagnosis_to_dict(diagnosis: eg.Diagnosis) -> dict[str, Any]:
    fields = ("verdict", "cause", "sentence", "where", "operation", "module", "path", "evidence", "fix", "of", "wrt")
    backend = None if diagnosis.value is None else registry.backend_of(diagnosis.value)
    value = None if backend is None else GradientResult.of("", diagnosis.value, backend).values
    return {field: getattr(diagnosis, field) for field in fields} | {"value": value}


def _patch_model(undo: bool, target: str, paths: list[str], out: str | None) -> list[str]:
    if out is None:
        raise InputError(f"{target} is a model of a program, which is not written to; give --out")
    _require_writable(out, (*ENDINGS, *KERAS_FILES))
    patches = [eg.inspect(path) for path in paths]
    with user_code():
        model = load_object(target)[0]
        places: list[str] = []
        for patch in [reverse_patch(model, patches)] if undo else patches:
            elements = eg.apply(model, patch)
            if isinstance(trainer_of(model), FunctionalTrainer):  # whose parameters are never written to
                model = elements.merge()
            places += map(place_label, elements.places)
        _save_model(model, out)
    return places


@contextmanager
def _progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far something is, where a terminal and rich are there."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda done, total: None
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _save_model(model: Any, out: str) -> None:
    """Write all weights of a model, by the names under which its framework loads them."""
    if out.endswith(KERAS_FILES):
        _save_keras(model, out)
    else:
        trainer = trainer_of(model)
        state_dict = getattr(model, "state_dict", None)
        tensors = state_dict() if state_dict else {name: trainer.parameter(name) for name in trainer.names()}
        file_tensors = {}
        for name, tensor in tensors.items():
            dtype, bits = trainer.read_bits(tensor)
            file_tensors[name] = FileTensor(dtype, tensor.shape, bits)
        Weights(file_tensors).write(out)


def _save_keras(model: Any, out: str) -> None:
    save = getattr(model, "save_weights" if out.endswith(".h5") else "save", None)
    if save is None:
        raise InputError(f"{out} is written by Keras models, and this is {type(model).__name__}; write .safetensors")
    with TemporaryDirectory() as folder:
        ending = next(ending for ending in KERAS_FILES if out.endswith(ending))
        copy = Path(folder, f"model{ending}")
        save(str(copy))
        replace_file(out, copy.read_bytes())  # as a whole or not at all, like all other files


def _print_result(text: str, result: Mapping[str, Any], as_json: bool) -> None:
    print(_to_json(result, ascii=not is_stdout_unicode()) if as_json else text)


def _to_json(result: Mapping[str, Any], ascii: bool = False) -> str:
    return json.dumps(_to_plain({"format": JSON_FORMAT, **result}), allow_nan=False, ensure_ascii=ascii)


def _from_json(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(text)
    return fields


def _to_plain(value: Any) -> Any:
    """Return what JSON has: arrays as lists, complex numbers in two parts, numbers that are not finite as texts."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind == "c":
            return {"real": _to_plain(value.real), "imag": _to_plain(value.imag)}
        return _to_plain(value.tolist())
    if isinstance(value, Mapping):
        return {name: _to_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
