"""`elementgrad patch inspect`, `apply` and `undo`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import elementgrad as eg
from elementgrad.backends.training import FunctionalTrainer, Trainer
from elementgrad.cli.failures import InputError, say
from elementgrad.cli.loading import is_reference, load, workplace
from elementgrad.cli.results import require_writable, show
from elementgrad.train.named import trainer_of
from elementgrad.train.replacement import replace
from elementgrad.train.reversal import reversal
from elementgrad.train.weights import ENDINGS, Held, Weights

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
    _changed("undo", target, out, json, lambda model: _all_applied(model, [reversal(model, read)]))


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
            replace(out, beside.read_bytes())  # as a whole or not at all, like all other files
        return
    if isinstance(model, Weights):
        model.write(out)
        return
    trainer = trainer_of(model)
    state = getattr(model, "state_dict", None)
    tensors = state() if state is not None else {name: trainer.parameter(name) for name in trainer.names()}
    Weights({name: _held(trainer, tensor) for name, tensor in tensors.items()}).write(out)


def _held(trainer: Trainer, tensor: Any) -> Held:
    dtype, bits = trainer.bits(tensor)
    return Held(dtype, tensor.shape, bits)
