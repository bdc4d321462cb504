"""`Elements`: some elements of a model's parameters, which train, are saved, taken back and let go together."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._backends.registry import not_compiled
from elementgrad._cleanup import defer, with_cleanup
from elementgrad._html import Rows, Tabular
from elementgrad._place.grammar import listed
from elementgrad._place.place import Place
from elementgrad._train.entries import NamedElements, named
from elementgrad._train.fingerprint import fingerprint
from elementgrad._train.functional import Functional
from elementgrad._train.history import Change, ChangeLog, Read
from elementgrad._train.numbers import BitArray
from elementgrad._train.patch import Entry, Patch, shortened
from elementgrad._train.routing import routed
from elementgrad._train.trainer import ElementGroup, FunctionalTrainer, Trainer
from elementgrad.errors import FrameworkError, PatchError, PlaceError

Tensor = Any


def reader(trainer: Trainer, tensor: Tensor) -> Read:
    """How the bytes of a tensor are read."""
    return lambda positions: trainer.bits(tensor, positions)[1]


@dataclass(frozen=True, eq=False)
class TrainedPlace(NamedElements):
    """The elements of one place, with their values and what they were."""

    part: ElementGroup
    mark: Change


class Elements(Tabular, Functional):
    """Named elements of a model, each place with a small tensor of its own that an optimizer can have.

    Made by `eg.trainable` and `eg.apply`. It maps places to these tensors, in the order in which the places were given.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Linear(3, 2)
    >>> elements = eg.trainable(model, ["weight[0, 1]", "bias"])
    >>> elements
    place         elements  shape  dtype
    weight[0, 1]  1         2x3    float32
    bias          2         2      float32
    >>> elements["bias"].shape, len(elements), elements.size
    (torch.Size([2]), 2, 3)
    """

    __module__ = "elementgrad"

    def __init__(self, trainer: Trainer, members: Sequence[TrainedPlace], training: bool):
        self._trainer = trainer
        self._members = tuple(members)
        self._training = training
        self._taken_back = False

    @property
    def places(self) -> tuple[Place, ...]:
        """The places, in the order in which they were given."""
        return tuple([member.place for member in self._members])

    @property
    def size(self) -> int:
        """How many elements there are."""
        return sum(len(member.positions) for member in self._members)

    @property
    def training(self) -> bool:
        """Whether they train now: not those of a patch that was only applied, and none after `release`."""
        return self._training

    def parameters(self) -> Iterator[Tensor]:
        """The tensors to give to an optimizer: one for each place, in one row.

        >>> import torch, elementgrad as eg
        >>> model = torch.nn.Linear(3, 2)
        >>> elements = eg.trainable(model, ["weight[0, :]", "bias[1]"])
        >>> optimizer = torch.optim.AdamW(elements.parameters(), lr=0.1, weight_decay=0.1)
        """
        self._require("parameters")
        self._settle()
        return iter([member.part.leaf for member in self._members])

    @property
    def variables(self) -> list[Tensor]:
        """The Keras variables that hold the values: one for each place, in one row.

        `model.fit` moves them by itself; a loop of your own gives them to the tape and to the optimizer.

        >>> import numpy as np, keras, elementgrad as eg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="fc")])
        >>> elements = eg.trainable(model, ["fc/kernel[0, :]", "fc/bias[1]"])
        >>> [variable.shape.as_list() for variable in elements.variables]
        [[2], [1]]
        """
        self._require("variables")
        return [member.part.leaf for member in self._members]

    def __getitem__(self, place: Place | str) -> Tensor:
        self._require_training()
        self._settle()
        return self._find(place).part.leaf

    def __iter__(self) -> Iterator[Place]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, place: Any) -> bool:
        try:
            self._find(place)
        except (PlaceError, IndexError):
            return False
        return True

    @with_cleanup
    def backward(self, losses: Mapping[Any, Tensor] | Tensor, *, retain_graph: bool = False) -> None:
        """Let each place hear its own loss: `{place: loss}`, or `{(place, place): loss}` for several of one loss.

        The gradients are added to those of the tensors, as `loss.backward()` does, one backward for each loss. Places
        that are left out hear nothing.

        >>> import torch, elementgrad as eg
        >>> table = torch.nn.Embedding(4, 3)
        >>> elements = eg.trainable(table, ["weight[0, 1]", "weight[2, 0]"])
        >>> rows = table(torch.tensor([0, 2]))
        >>> elements.backward({"weight[0, 1]": 2 * rows.sum(), "weight[2, 0]": 5 * rows.sum()})
        >>> elements["weight[0, 1]"].grad, elements["weight[2, 0]"].grad
        (tensor([2.]), tensor([5.]))
        """
        self._require("backward")
        heard = routed(self._trainer, self._members, losses, keep=retain_graph)
        self._trainer.hear(heard, list(losses.values()) if isinstance(losses, Mapping) else [losses])

    @not_compiled
    def gradients(self, tape: Any, losses: Mapping[Any, Tensor] | Tensor) -> list[Tensor | None]:
        """The gradient that each place hears of its own loss, by a `tf.GradientTape`, in the order of `variables`.

        `{place: loss}`, or `{(place, place): loss}` for several of one loss; several losses need a persistent tape.
        Places that are left out hear nothing, and have None.

        >>> import tensorflow as tf, keras, elementgrad as eg
        >>> table = keras.layers.Embedding(4, 3, name="table")
        >>> _ = table(tf.constant([0]))
        >>> elements = eg.trainable(table, ["embeddings[0, 1]", "embeddings[2, 0]"])
        >>> with tf.GradientTape(persistent=True) as tape:
        ...     total = tf.reduce_sum(table(tf.constant([0, 2])))
        ...     losses = {"embeddings[0, 1]": 2 * total, "embeddings[2, 0]": 5 * total}
        >>> [gradient.numpy().tolist() for gradient in elements.gradients(tape, losses)]
        [[2.0], [5.0]]
        """
        self._require("gradients")
        found: dict[int, Tensor] = {}
        for part, gradient, chosen in routed(self._trainer, self._members, losses, tape=tape):
            found[id(part)] = self._trainer.heard(found.get(id(part)), gradient, chosen)
        return [found.get(id(member.part)) for member in self._members]

    def save(self, path: str | os.PathLike[str], *, full: bool = False) -> None:
        """Write a patch: where the elements are, their values, what they were, and by what the tensors are known.

        The tensors are known by a sample of their other elements; with `full` by all of them. Where several
        processes share its parameters, all of them call this, and the first one writes.

        >>> import tempfile, torch, elementgrad as eg
        >>> path = tempfile.mkdtemp() + "/patch.safetensors"
        >>> model = torch.nn.Linear(3, 2)
        >>> elements = eg.trainable(model, "weight[0, 1]")
        >>> elements.save(path)
        >>> eg.inspect(path)
        place         elements  shape  dtype    largest change
        weight[0, 1]  1         2x3    float32  0
        """
        patch = patch_of(self, full)
        self._trainer.on_rank_zero(lambda: patch.write(path))

    @with_cleanup
    def undo(self) -> None:
        """Give the elements back the values that they had before, to the bit; once that is done, not again.

        >>> import torch, elementgrad as eg
        >>> model = torch.nn.Linear(3, 2)
        >>> before = model.weight.clone()
        >>> elements = eg.trainable(model, "weight[0, :]")
        >>> with torch.no_grad():
        ...     _ = elements["weight[0, :]"].fill_(7.0)
        >>> elements.undo()
        >>> torch.equal(model.weight, before)
        True
        """
        if self._taken_back:
            return  # whatever is there now is not theirs
        self._require_undoable()
        defer(self._undo)  # so that it is done to its end, whatever interrupts it

    def _undo(self) -> None:
        for member in self._members:
            self._trainer.restore(member.part)
        if not self._training:
            for member in self._members:
                self._ledger(member).remove(member.mark)
            self._taken_back = True

    def _require_undoable(self) -> None:
        self._settle()
        self._require_there("undo")
        for member in self._members:
            over = self._ledger(member).overlapping(member.positions, after=member.mark)
            if over is not None:
                raise PatchError(f"{over.place} was changed after {member.place} and is over it; undo that one first")

    @with_cleanup
    def release(self, *, keep: bool = True) -> None:
        """Give the plain model back, with the values that the elements have now or, without `keep`, had before.

        >>> import torch, elementgrad as eg
        >>> model = torch.nn.Linear(3, 2)
        >>> elements = eg.trainable(model, "weight[0, 1]")
        >>> elements.release()
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['weight', 'bias']
        """
        self._refuse("release")
        if not keep:
            self.undo()
        if self._training:
            defer(self._stop, keep)  # so that it is done to its end, whatever interrupts it

    def _stop(self, keep: bool) -> None:
        self._trainer.stop([member.part for member in self._members])
        for member in self._members:
            member.mark.written = self._trainer.bits(member.tensor, member.positions)[1]
            if not keep:
                self._ledger(member).remove(member.mark)
        self._taken_back = not keep
        self._training = False

    def _rows(self) -> Rows:
        rows = [("place", "elements", "shape", "dtype")]
        for member in self._members:
            shape = "x".join(map(str, member.shape)) or "()"
            dtype = self._dtype(member.part.leaf)
            rows.append((shortened(str(member.place)), str(len(member.positions)), shape, dtype))
        return rows

    def _entry(self, member: TrainedPlace, full: bool) -> Entry:
        dtype = self._dtype(member.part.originals)
        ledger = self._ledger(member)
        positions, bits = ledger.changed()
        known = fingerprint(
            member.shape, dtype, reader(self._trainer, member.tensor), positions=positions, bits=bits, full=full
        )
        values = BitArray(*self._trainer.bits(member.part.leaf))
        originals = BitArray(dtype, ledger.before(member.positions))
        every = self._trainer.spelled()
        tied = tuple([name for name, tensor in every if tensor is member.tensor and name != member.name])
        return Entry(
            str(member.place), member.name, member.shape, dtype, member.positions, values, originals, known, tied
        )

    def _find(self, place: Place | str) -> TrainedPlace:
        asked = named(self._trainer, place)
        for member in self._members:
            if member.tensor is asked.tensor and np.array_equal(member.positions, asked.positions):
                return member
        raise PlaceError(f"{asked.place} is not one of these places: {listed([str(place) for place in self.places])}")

    def _ledger(self, member: TrainedPlace) -> ChangeLog:
        return ChangeLog(self._trainer.lasting(member.tensor), reader(self._trainer, member.tensor))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a copy, with a model of its own, whose tensors bear no marks yet
        for member in self._members:
            if not self._taken_back:
                self._ledger(member).add(member.mark)

    def _settle(self) -> None:
        """Let values and parameters agree, whichever of them was written to."""
        for member in self._members:
            self._trainer.sync(member.part)

    def _require_there(self, verb: str) -> None:
        if isinstance(self._trainer, FunctionalTrainer):
            return  # nobody can write over what is never written to
        for member in self._members:
            converted = self._dtype(member.part.originals) != self._dtype(member.tensor)  # as by model.half()
            if not (self._ledger(member).holds(member.mark) or (converted and verb == "undo")):
                raise PatchError(f"{member.place} was written over or taken back since; there is nothing to {verb}")

    def _require(self, word: str) -> None:
        self._refuse(word)
        self._require_training()

    def _refuse(self, word: str) -> None:
        """Refuse a word that belongs to another framework."""
        if word in self._trainer.elsewhere:
            raise FrameworkError(f"elements of this model have no {word}; use {self._trainer.elsewhere[word]}")

    def _dtype(self, tensor: Tensor) -> str:
        return self._trainer.bits(tensor, np.zeros(0, np.int64))[0]

    def _require_training(self) -> None:
        if not self._training:
            raise PlaceError("these elements do not train; give their places or their patch to eg.trainable")


def patch_of(elements: Elements, full: bool = False) -> Patch:
    """What was trained, as a value: the places, what they were and what they are now."""
    elements._settle()
    elements._require_there("save")
    return Patch(tuple([elements._entry(member, full) for member in elements._members]))
