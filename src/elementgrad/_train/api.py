"""`eg.trainable` and `eg.apply`: let elements of a model train, and put a patch into a model.

Everything is checked before anything is changed, and what was changed is taken back if a later step fails.
"""

import os
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.registry import uncompiled
from elementgrad._cleanup import defer, with_rollback
from elementgrad._files import writable
from elementgrad._train.bits import BitArray
from elementgrad._train.diff import weights_of
from elementgrad._train.elements import Elements
from elementgrad._train.entries import Names, place_label
from elementgrad._train.folder import Folder, read_weights, write_weights
from elementgrad._train.history import ElementChange
from elementgrad._train.keep import Keep, find_kept
from elementgrad._train.match import match_patch, require_idle, reverse_patch
from elementgrad._train.patch import Patch
from elementgrad._train.routing import resolve_all, trainer_of
from elementgrad._train.trainer import ElementGroup, FunctionalTrainer, ResolvedPlace, Trainer, groups_by_tensor
from elementgrad.errors import OptionError, PatchError

Model = Any
Tensor = Any
ENDING = ".safetensors"


@with_rollback
@uncompiled
def trainable(
    model: Model, places: Any, *, dtype: Any = None, names: Names | None = None, keep: Keep = None
) -> Elements:
    """Train only the named elements of a model; every other element of its parameters stays the same, to the bit.

    Give `elements.parameters()` to any optimizer that takes vectors, with any options. For a Keras model, call
    `compile` and `fit` as usual, or use `elements.variables`. All parameters are frozen (`requires_grad`) until
    `elements.release()`. In distributed training, wrap the model in `DistributedDataParallel` afterwards, or call
    `fully_shard` before; with `fully_shard`, all processes must make this call.

    Args:
        model: A `torch.nn.Module`, a Keras model or layer, or a pytree of `jax.Array`.
        places: Texts or places, or the path of a patch to train further.
        dtype: The dtype of the values that train; by default float32 for parameters in half precision, and otherwise
            the parameter's.
        names: For a patch, a dict from its names to those of the model, as in `eg.apply`.
        keep: Parameters that stay trainable: a name of a parameter or layer, a wildcard such as `"lora_*"` for whole
            parts of a name, or a list of them.

    Returns:
        The elements, with a tensor for each place.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 10), torch.nn.Linear(10, 2))
    >>> before = model[0].weight.clone()
    >>> elements = eg.trainable(model, "0.weight[0, 5]")
    >>> optimizer = torch.optim.AdamW(elements.parameters(), lr=0.1, weight_decay=0.5)
    >>> model(torch.tensor([0, 3])).sum().backward()
    >>> optimizer.step()
    >>> (model[0].weight != before).nonzero()
    tensor([[0, 5]])
    """
    trainer = trainer_of(model)
    leaf_dtype = trainer.parse_dtype(dtype)
    if isinstance(places, os.PathLike) or (isinstance(places, str) and places.endswith(ENDING)):
        matches = match_patch(trainer, Patch.read(places), names, resume=True)
        groups = [
            _make_group(trainer, target, leaf_dtype, entry.values, _before(trainer, target))
            for target, entry in matches
        ]
    else:
        if names is not None:
            raise OptionError("names= maps the names in a patch, and these are places; leave it out")
        targets = resolve_all(trainer, places)
        require_idle(trainer, targets)
        trainer.check_same_on_all_ranks((target.name, target.positions) for target in targets)
        groups = [_make_group(trainer, target, leaf_dtype) for target in targets]
    kept = find_kept(trainer, keep, groups)
    defer(trainer.cancel, groups)
    trainer.start(groups, kept)
    _record(trainer, groups)
    return Elements(trainer, groups, training=True)


@with_rollback
@uncompiled
def apply(
    model: Model,
    path: str | os.PathLike[str] | Patch,
    *,
    overwrite: bool = False,
    names: Names | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Any:
    """Write the values of a patch into a model, which stays a plain model; `undo` restores the originals, to the bit.

    The patch is refused, and the model left unchanged, unless the tensors are those that it was made for. Patches of
    other elements may be applied before. In a `with` statement the patch is undone at the end of the block. Weights in
    a file or folder are changed in place, atomically; a state dict is not changed.

    Args:
        model: The model, or a pytree of `jax.Array`; or weights: a state dict, a .safetensors or .npz file, or the
            folder of a checkpoint.
        path: The path of a patch, or a patch as `eg.inspect` and `eg.diff` return it.
        overwrite: Allow a patch that overlaps one that was applied before.
        names: A dict from names in the patch to names in the model, or to a name and the order of axes as
            `numpy.transpose` takes it: the same network may have other names for its tensors, and their axes in
            another order, as in another framework.
        out: For a file or folder, the path of the new weights; a folder is copied with all of its files.

    Returns:
        The elements that were changed; of a state dict a new one, and of a file or folder its path.

    Raises:
        PatchError: The patch does not fit the model.

    >>> import copy, tempfile, torch, elementgrad as eg
    >>> path = tempfile.mkdtemp() + "/patch.safetensors"
    >>> model = torch.nn.Linear(3, 2)
    >>> pristine = copy.deepcopy(model)
    >>> elements = eg.trainable(model, "bias[1]")
    >>> with torch.no_grad():
    ...     _ = elements["bias[1]"].fill_(7.0)
    >>> elements.save(path)
    >>> with eg.apply(pristine, path):
    ...     pristine.bias[1].item()
    7.0
    >>> eg.apply(pristine.state_dict(), path)["bias"][1]
    tensor(7.)
    >>> other = torch.nn.ParameterDict({"offset": pristine.bias.detach().clone()})
    >>> eg.apply(other, path, names={"bias": "offset"}).places
    (Place.parse('offset[1]'),)
    """
    if isinstance(model, str | os.PathLike):
        return apply_to_path(model, [path], names=names, overwrite=overwrite, out=out)[0]
    if out is not None:
        raise OptionError("out= says where the weights of a file or folder go, and this is a model; leave it out")
    if isinstance(model, Mapping) and registry.backend_of_model(model) is None:
        return _apply_to_state(model, path, overwrite, names)
    return _apply(model, path, overwrite, names)


def _apply(
    model: Model, path: str | os.PathLike[str] | Patch, overwrite: bool = False, names: Names | None = None
) -> Elements:
    trainer = trainer_of(model)
    matches = match_patch(trainer, read_patch(path), names, overwrite)
    groups = [_make_group(trainer, target, None, entry.values) for target, entry in matches]
    defer(trainer.cancel, groups)
    batch = object()
    for group in groups:
        group.change.batch = batch
    _record(trainer, groups)
    for group, (_, entry) in zip(groups, matches, strict=True):
        trainer.write_to_parameter(group)
        # Values of the tensor's own dtype are in it bit by bit, and need no reading back.
        exact = entry.values.dtype == entry.dtype and not isinstance(trainer, FunctionalTrainer)
        written = entry.values.bits if exact else trainer.read_bits(group.tensor, group.positions)[1]
        group.change.written = written
    return Elements(trainer, groups, training=False)


@with_rollback
@uncompiled
def patches(model: Model) -> list[Elements]:
    """Return the patches that are applied to a model, in the order in which they were applied.

    `undo` switches one of them off, and `redo` on again. A patch that a later one overlaps is undone after that one.

    Args:
        model: The model, or a pytree of `jax.Array` that `elements.merge` returned.

    Returns:
        The elements of each patch, as `eg.apply` returned them.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Linear(3, 2)
    >>> moved = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    >>> _ = eg.apply(model, eg.diff(model, moved))
    >>> (applied,) = eg.patches(model)
    >>> applied.undo()
    >>> eg.patches(model)
    []
    """
    trainer = trainer_of(model)
    tensors = {
        id(trainer.history_key(tensor)): (name, tensor) for name, tensor in reversed([*trainer.named_parameters()])
    }
    batches: dict[int, list[ElementGroup]] = {}
    for name, tensor in tensors.values():
        for change in trainer.history(tensor).changes():
            if change.batch is not None:
                batches.setdefault(id(change.batch), []).append(_group_of(trainer, name, tensor, change))
    ordered = [sorted(groups, key=lambda group: group.change.number) for groups in batches.values()]
    ordered.sort(key=lambda groups: groups[0].change.number)
    return [Elements(trainer, groups, training=False) for groups in ordered]


def _group_of(trainer: Trainer, name: str, tensor: Tensor, change: ElementChange) -> ElementGroup:
    assert change.written is not None
    target = ResolvedPlace(change.where, name, tensor, tuple(tensor.shape), change.positions)
    values, originals = (BitArray(trainer.dtype_name(tensor), bits) for bits in (change.written, change.bits))
    group = trainer.make_group(target, None, values, originals)
    group.change = change
    return group


def read_patch(path: str | os.PathLike[str] | Patch) -> Patch:
    """Return a patch that is given, or read it."""
    if not isinstance(path, str | os.PathLike | Patch):
        raise PatchError(f"{type(path).__name__} is not the path of a patch; give one, such as 'patch.safetensors'")
    return path if isinstance(path, Patch) else Patch.read(path)


@with_rollback
def apply_to_path(
    path: str | os.PathLike[str],
    patches: Sequence[str | os.PathLike[str] | Patch],
    *,
    undo: bool = False,
    overwrite: bool = False,
    names: Names | None = None,
    out: str | os.PathLike[str] | None = None,
    link: bool = False,
) -> tuple[Path, list[str]]:
    """Put patches into weights in a file or folder, or take them back; return where they are, and the places."""
    read = [read_patch(patch) for patch in patches]
    weights = read_weights(path)
    if out is not None and not isinstance(weights, Folder):
        writable(out, "weights.safetensors")
    if undo:
        read = [reverse_patch(weights, read)]
    changed, places = set(), []
    for patch in read:
        elements = _apply(weights, patch, overwrite, names)
        changed |= {group.name for group in elements._groups}
        places += [place_label(place) for place in elements.places]
    return write_weights(weights, path, changed, out, link), places


def _apply_to_state(state: Mapping[str, Any], path: Any, overwrite: bool, names: Names | None) -> Any:
    """Return a state dict, or dicts in one another, with the values of a patch; the tensors that change are new."""
    weights = weights_of(state)
    for name in {group.name for group in _apply(weights, path, overwrite, names)._groups}:
        state = _with_tensor(state, name, weights.tensors[name].bits)
    return state


def _with_tensor(state: Mapping[str, Any], name: str, bits: np.ndarray) -> Any:
    state = copy(state)  # with the attributes that state dicts of modules have
    value: Any
    for key, value in state.items():
        if isinstance(value, Mapping) and name.startswith(f"{key}."):
            state[key] = _with_tensor(value, name.removeprefix(f"{key}."), bits)  # type: ignore[index]
        elif key == name:
            backend = registry.backend_of(value)
            if backend is not None:
                state[key] = backend.load("train").from_bits(bits, value)  # type: ignore[index]
            else:
                state[key] = np.frombuffer(bits.tobytes(), value.dtype).reshape(value.shape)  # type: ignore[index]
    return state


def _make_group(
    trainer: Trainer, target: ResolvedPlace, dtype: Any, values: BitArray | None = None, originals: Any = None
) -> ElementGroup:
    group = trainer.make_group(target, dtype, values, originals)
    bits = trainer.read_bits(group.originals)[1]
    group.change = ElementChange(place_label(target.place), target.positions, bits, where=target.place)
    return group


def _before(trainer: Trainer, target: ResolvedPlace) -> BitArray:
    """Return the elements of a place as they were before any change, which a patch may keep a checksum of alone."""
    return BitArray(trainer.dtype_name(target.tensor), trainer.history(target.tensor).bytes_before(target.positions))


def _record(trainer: Trainer, groups: Sequence[ElementGroup]) -> None:
    """Add groups to the histories of their parameters, where parameters are written to."""
    if isinstance(trainer, FunctionalTrainer):
        return
    for own in groups_by_tensor(groups):
        history, changes = trainer.history(own[0].tensor), [group.change for group in own]
        defer(history.remove_all, changes)
        for change in changes:
            history.add(change)
