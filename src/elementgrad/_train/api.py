"""`eg.trainable` and `eg.apply`: let elements of a model train, and put a patch into a model.

Everything is checked before anything is changed, and what was changed is taken back if a later step fails.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.registry import uncompiled
from elementgrad._cleanup import defer, with_rollback
from elementgrad._files import writable
from elementgrad._place.grammar import listed, nearest
from elementgrad._place.place import Place
from elementgrad._train.diff import weights_of
from elementgrad._train.elements import Elements
from elementgrad._train.entries import (
    Entry,
    MappedEntry,
    Names,
    element_text,
    map_entries,
    place_label,
)
from elementgrad._train.fingerprint import fingerprint, fits
from elementgrad._train.folder import Folder, read_weights, write_weights
from elementgrad._train.history import BitsAt, ElementChange, ReadBytes, are_among, first_bits
from elementgrad._train.numbers import BitArray
from elementgrad._train.patch import Patch
from elementgrad._train.routing import check_disjoint, resolve, resolve_all, trainer_of
from elementgrad._train.trainer import ElementGroup, FunctionalTrainer, ResolvedPlace, Trainer, groups_by_tensor
from elementgrad._train.weights import Weights
from elementgrad.errors import DuplicateError, ElementgradError, OptionError, PatchError, PlaceError, warn

Model = Any
Tensor = Any
NamedParameters = Sequence[tuple[str, Tensor]]
"""Every name of every parameter."""
Keep = str | Iterable[str] | None
"""A name or a wildcard, or several of them."""
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
        matches = _match_patch(trainer, Patch.read(places), names, resume=True)
        groups = [
            _make_group(trainer, target, leaf_dtype, entry.values, _before(trainer, target))
            for target, entry in matches
        ]
    else:
        if names is not None:
            raise OptionError("names= maps the names in a patch, and these are places; leave it out")
        targets = resolve_all(trainer, places)
        _require_idle(trainer, targets)
        trainer.check_same_on_all_ranks((target.name, target.positions) for target in targets)
        groups = [_make_group(trainer, target, leaf_dtype) for target in targets]
    kept = _find_kept(trainer, keep, groups)
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
    matches = _match_patch(trainer, read_patch(path), names, overwrite)
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


def _require_idle(trainer: Trainer, targets: Sequence[ResolvedPlace]) -> None:
    for same in groups_by_tensor(targets):
        groups = trainer.groups_of(same[0].tensor)
        training = np.concatenate([np.zeros(0, np.int64), *[group.positions for group in groups]])
        wanted = np.concatenate([target.positions for target in same])
        for twice in wanted[are_among(wanted, training)][:1]:
            place = next(target.place for target in same if twice in target.positions)
            which = element_text(same[0].name, same[0].shape, twice)
            raise DuplicateError(f"{which} of {place_label(place)} trains already; release those elements first")


def _match_patch(
    trainer: Trainer, patch: Patch, names: Names | None, overwrite: bool = False, resume: bool = False
) -> list[tuple[ResolvedPlace, Entry]]:
    """Find the elements that a patch is for, and check that all of it fits before anything is changed."""
    entries = map_entries(patch.entries, names)
    # Before any parameter is read: reading a sharded one needs all processes.
    trainer.check_same_on_all_ranks((one.entry.name, one.entry.indices, one.entry.values.bits) for one in entries)
    matches = [(_match_entry(trainer, one, overwrite, resume), one.entry) for one in entries]
    try:
        check_disjoint([target for target, _ in matches])  # tensors may be tied here that were not at the source
    except DuplicateError as error:
        raise PatchError(f"the patch does not fit: {error}") from None
    return matches


def _match_entry(trainer: Trainer, mapped: MappedEntry, overwrite: bool, resume: bool) -> ResolvedPlace:
    entry, source = mapped.entry, mapped.source
    source.require_applicable()
    try:
        tensor = trainer.parameter(entry.name)
    except ElementgradError as error:
        hint = "; names= says what it is called here" if entry.name == source.name else ""
        raise PatchError(f"the patch does not fit: {error}{hint}") from None
    trainer.check_parameter(tensor, entry.name)
    shape, dtype = tuple(tensor.shape), trainer.dtype_name(tensor)
    if (shape, dtype) != (entry.shape, entry.dtype):
        raise _shape_error(mapped, shape, dtype)
    target = ResolvedPlace(_place_in(trainer, mapped, tensor), entry.name, tensor, shape, entry.indices)
    _require_idle(trainer, [target])
    if entry.name == source.name and entry.tied is not None:  # of models with other names, ties are not known
        _require_tied(trainer, tensor, entry.name, entry.tied)
    history, read = trainer.history(tensor), trainer.byte_reader(tensor)
    # The bytes in the order of the source, as a checksum of them depends on it.
    in_source_order = mapped.to_model(source.indices)
    now = read(in_source_order)
    if source.originals_match(now) and _fits(mapped, dtype, read, None):
        # Made for the tensor as it is now, whatever was changed before.
        return target if mapped.is_transposed else replace(target, current=source.originals or BitArray(dtype, now))
    earlier = history.find_overlap(entry.indices)
    is_same_place = resume and earlier is not None and np.array_equal(earlier.positions, entry.indices)
    if earlier is not None and not (overwrite or is_same_place):
        raise PatchError(
            f"{entry.label} overlaps {earlier.place}, which was changed before; undo that first, or give overwrite=True"
        )
    same = source.originals_match(history.bytes_before(in_source_order))
    if not same or not _fits(mapped, dtype, read, history.originals()):
        raise PatchError(
            f"{entry.name} is not the tensor that the patch was made for: "
            + ("other elements of it differ" if same else f"{entry.label} has other values there")
            + "; give the model as it was before training"
            + (", and the right order of axes" if mapped.is_transposed else "")
        )
    return target


def _place_in(trainer: Trainer, mapped: MappedEntry, tensor: Tensor) -> Place:
    """Return the place of an entry in a model, which may call a shared tensor by another of its names."""
    entry = mapped.entry
    if entry.is_scattered:
        return entry.where
    target = next(resolve(trainer, [entry.where]))
    if target.tensor is not tensor:
        raise PatchError(f"the patch takes {entry.label} for {entry.name}, and here it is another tensor")
    return target.place


def _fits(mapped: MappedEntry, dtype: str, read: ReadBytes, originals: BitsAt | None) -> bool:
    """Return True if the fingerprint of an entry is that of a tensor, of which some elements have these originals."""
    source = mapped.source
    known = None if originals is None else BitsAt(mapped.to_source(originals.positions), originals.bits)
    before = first_bits([source.since, known])
    return fits(source.fingerprint, source.shape, dtype, lambda some: read(mapped.to_model(some)), before)


def _require_tied(trainer: Trainer, tensor: Any, name: str, tied_in_patch: Sequence[str]) -> None:
    """Raise a `PatchError` if a tensor has other names than at the source, so that too much or too little changes."""
    every = list(trainer.named_parameters())
    known = {spelling for other in tied_in_patch for spelling in (other, trainer.stable_name(other))}
    stable = trainer.stable_name(name)
    tied_here = [other for other, parameter in every if parameter is tensor and trainer.stable_name(other) != stable]
    apart = [other for other, parameter in every if other in tied_in_patch and parameter is not tensor]
    if apart:
        raise PatchError(
            f"the patch was made where {name} and {listed(apart)} are one tensor, and here they are not: it would "
            "change only one of them; tie them first, or leave all but one out of a file"
        )
    surplus = [other for other in tied_here if known.isdisjoint((other, trainer.stable_name(other)))]
    if surplus:
        raise PatchError(
            f"{name} and {listed(surplus)} are one tensor here, and were not where the patch was made: it would change "
            "both; give the model as it was"
        )


def _shape_error(mapped: MappedEntry, shape: tuple[int, ...], dtype: str) -> PatchError:
    entry, source = mapped.entry, mapped.source
    transposed = f", which axes {mapped.axes} make {entry.shape}" if mapped.is_transposed else ""
    here = "it" if entry.name == source.name else entry.name
    is_permutation = shape != entry.shape and sorted(shape) == sorted(entry.shape)
    hint = "; names= takes the order of its axes" if is_permutation else ""
    return PatchError(
        f"the patch is for {source.name} as {source.dtype} of shape {source.shape}{transposed}, "
        f"and here {here} is {dtype} of shape {shape}{hint}"
    )


def _find_kept(trainer: Trainer, keep: Keep, groups: Sequence[ElementGroup]) -> list[Tensor]:
    """Return the parameters that `keep` names; without it, warn about those that train now and will not.

    Nothing is changed yet, so that a warning that is turned into an error leaves the model alone.
    """
    if not trainer.freezes:
        if keep is not None:
            raise OptionError(
                "keep= names parameters that stay trainable while all others are frozen, and here nothing is frozen; "
                "leave it out, and optimise other arrays together with elements.values"
            )
        return []
    every = list(trainer.named_parameters())
    matches = [match for pattern in _patterns(keep) for match in _match_names(trainer, pattern, every)]
    kept = {id(tensor): tensor for _, tensor in matches}
    for group in groups:
        if id(group.tensor) in kept:
            raise DuplicateError(
                f"keep={keep!r} lets all of {group.name} train, and {group.place} some of it; leave one of them out"
            )
        if trainer.training_state(group.tensor).kept:
            raise DuplicateError(
                f"all of {group.name} trains, as keep= of an earlier eg.trainable says, and {group.place} names some "
                "of it; release those elements first"
            )
    for name, tensor in matches:
        if trainer.groups_of(tensor):
            raise DuplicateError(f"keep={keep!r} lets all of {name} train, and elements of it do; release them first")
    if keep is None:
        _warn_of_frozen(trainer, every, [id(group.tensor) for group in groups])
    _warn_of_hooks(trainer, groups)
    return list(kept.values())


def _patterns(keep: Keep) -> list[str]:
    if keep is None:
        return []
    patterns: list[Any] = list(keep) if isinstance(keep, Iterable) and not isinstance(keep, str) else [keep]
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise OptionError(f"keep={keep!r} names no parameters; give a name or a wildcard, such as 'lora_*', or a list")
    return patterns


def _match_names(trainer: Trainer, pattern: str, every: NamedParameters) -> NamedParameters:
    """Return the parameters of that very name, or else those of which it matches some successive parts of the name.

    So `lora_*` is `base_model.model.h.0.attn.lora_A.default.weight` too, and `head` is all that `head` holds.
    """
    matches = [(name, tensor) for name, tensor in every if name == pattern]
    matches = matches or [(name, tensor) for name, tensor in every if _is_match(pattern, name, trainer.separator)]
    if not matches:
        raise PlaceError(f"keep={pattern!r} names no {trainer.noun}; {nearest(pattern, [name for name, _ in every])}")
    if not any(trainer.training_state(tensor).trained for _, tensor in matches):
        names = listed([name for name, _ in matches])
        raise OptionError(f"keep={pattern!r} names {names}, which did not train before; let it train first")
    return matches


def _is_match(pattern: str, name: str, separator: str) -> bool:
    parts = name.split(separator)
    runs = ((first, last) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1))
    return any(fnmatchcase(separator.join(parts[first:last]), pattern) for first, last in runs)


def _warn_of_frozen(trainer: Trainer, every: NamedParameters, partly_trained: Collection[int]) -> None:
    """Warn about parameters that the user chose to train, by freezing others, and that are frozen now."""
    names = {id(tensor): name for name, tensor in reversed(every)}
    states = {id(tensor): trainer.training_state(tensor) for _, tensor in every}
    new = [key for key, state in states.items() if state.can_train and not state.claimed]
    frozen = [names[key] for key in new if states[key].trained and key not in partly_trained]
    if frozen and not all(states[key].trained for key in new):
        warn(
            f"{listed(frozen)} trained before, while others of the model did not, and eg.trainable freezes "
            f"{'it' if len(frozen) == 1 else 'them'}; name what should stay trainable by keep={frozen[0]!r}, a "
            "wildcard or a list"
        )


def _warn_of_hooks(trainer: Trainer, groups: Sequence[ElementGroup]) -> None:
    for group in {id(group.tensor): group for group in groups}.values():
        if trainer.has_gradient_hooks(group.tensor):
            warn(
                f"{group.name} has gradient hooks, which do not run for elements of it; register them on the tensors "
                "that elements.parameters() gives"
            )


def reverse_patch(model: Any, patches: Sequence[Patch]) -> Patch:
    """Return the patch that takes patches back out of a model, which must hold the values of all of them, to the bit.

    >>> import copy, tempfile, torch, elementgrad as eg
    >>> from elementgrad._train.api import reverse_patch
    >>> path = tempfile.mkdtemp() + "/patch.safetensors"
    >>> model = torch.nn.Linear(3, 2)
    >>> before = model.weight.clone()
    >>> elements = eg.trainable(model, "weight[0, 1]")
    >>> with torch.no_grad():
    ...     _ = elements["weight[0, 1]"].fill_(7.0)
    >>> elements.save(path)
    >>> elements.release()
    >>> elsewhere = copy.deepcopy(model)  # a model without a history
    >>> _ = eg.apply(elsewhere, reverse_patch(elsewhere, [eg.inspect(path)]))
    >>> torch.equal(elsewhere.weight, before)
    True
    """
    trainer = trainer_of(model)
    entries = [entry for patch in patches for entry in patch.entries]
    reverse = []
    for entry in entries:
        originals = entry.require_originals("taking it back")
        try:
            tensor = trainer.parameter(entry.name)
        except ElementgradError as error:
            raise PatchError(f"the patch does not fit: {error}") from None
        read = trainer.byte_reader(tensor)
        dtype = trainer.dtype_name(tensor)
        if (tuple(tensor.shape), dtype) != (entry.shape, entry.dtype):
            raise PatchError(
                f"the patch is for {entry.name} as {entry.dtype} of shape {entry.shape}, and here it is {dtype} of "
                f"shape {tuple(tensor.shape)}"
            )
        values = BitArray(dtype, read(entry.indices))
        if values != entry.values.round_to(dtype):
            raise PatchError(f"{entry.label} does not hold the values of the patch; there is nothing to undo")
        same = [other for other in entries if other.name == entry.name]
        known = [BitsAt(other.indices, other.require_originals("taking it back").bits) for other in same]
        if not fits(entry.fingerprint, entry.shape, dtype, read, first_bits([entry.since, *known])):
            raise PatchError(
                f"{entry.name} is not the tensor that the patch was made for: other elements of it differ; undo "
                "what was applied later first, or together with it"
            )
        mark = fingerprint(entry.shape, dtype, read)
        reverse.append(replace(entry, values=originals, originals=values, fingerprint=mark, since=None))
    return Patch(tuple(reverse))


def patch_state(weights: Weights, patch: Patch) -> tuple[str, str | None]:
    """Return whether a patch fits weights, is applied to them or does not fit, and then why."""
    try:
        _match_patch(trainer_of(weights), patch, None)
        return "fits", None
    except PatchError as error:
        with suppress(PatchError):
            reverse_patch(weights, [patch])
            return "is applied", None
        return "does not fit", str(error)
