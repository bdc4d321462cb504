"""The patch that takes other patches back, of a model that holds them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from elementgrad.errors import ElementgradError, PatchError
from elementgrad.train.elements import reader
from elementgrad.train.fingerprint import fingerprint, fits
from elementgrad.train.named import trainer_of
from elementgrad.train.numbers import Numbers
from elementgrad.train.patch import Entry, Patch


def reversal(model: Any, patches: Sequence[Patch]) -> Patch:
    """What to apply to a model so that it is as before some patches, which all it holds now; checked to the bit.

    >>> import copy, tempfile, torch, elementgrad as eg
    >>> from elementgrad.train.reversal import reversal
    >>> path = tempfile.mkdtemp() + "/patch.safetensors"
    >>> model = torch.nn.Linear(3, 2)
    >>> before = model.weight.clone()
    >>> elements = eg.trainable(model, "weight[0, 1]")
    >>> with torch.no_grad():
    ...     _ = elements["weight[0, 1]"].fill_(7.0)
    >>> elements.save(path)
    >>> elements.release()
    >>> elsewhere = copy.deepcopy(model)  # which knows nothing of elements
    >>> _ = eg.apply(elsewhere, reversal(elsewhere, [eg.inspect(path)]))
    >>> torch.equal(elsewhere.weight, before)
    True
    """
    trainer = trainer_of(model)
    entries = [entry for patch in patches for entry in patch.entries]
    reverse = []
    for entry in entries:
        try:
            tensor = trainer.parameter(entry.name)
        except ElementgradError as error:
            raise PatchError(f"the patch does not fit: {error}") from None
        read = reader(trainer, tensor)
        dtype = trainer.bits(tensor, np.zeros(0, np.int64))[0]
        if (tuple(tensor.shape), dtype) != (entry.shape, entry.dtype):
            raise PatchError(
                f"the patch is for {entry.name} as {entry.dtype} of shape {entry.shape}, and here it is {dtype} of "
                f"shape {tuple(tensor.shape)}"
            )
        held = Numbers(dtype, read(entry.indices))
        if held != entry.values.rounded(dtype):
            raise PatchError(f"{entry.place} does not hold the values of the patch; there is nothing to undo")
        positions, bits = _before([other for other in entries if other.name == entry.name])
        if not fits(entry.fingerprint, entry.shape, dtype, read, positions=positions, bits=bits):
            raise PatchError(
                f"{entry.name} is not the tensor that the patch was made for: other elements of it differ; undo "
                "what was applied later first, or together with it"
            )
        known = fingerprint(entry.shape, dtype, read)
        reverse.append(replace(entry, values=entry.originals, originals=held, fingerprint=known))
    return Patch(tuple(reverse))


def _before(entries: Sequence[Entry]) -> tuple[np.ndarray, np.ndarray]:
    """Where entries change a tensor, and the bytes that stood there first."""
    positions, first = np.unique(np.concatenate([entry.indices for entry in entries]), return_index=True)
    return positions, np.concatenate([entry.originals.bits for entry in entries])[first]
