"""Tapes of the user's own: when each records, what it watches, and what it is asked."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad.backends.patch import Patch, Replace
from elementgrad.backends.tensorflow.explaining.account import account
from elementgrad.backends.tensorflow.explaining.records import Record, differentiable
from elementgrad.backends.tensorflow.explaining.watch import Watch, current, unwatched
from elementgrad.backends.witness import Account, Remark, Step

Tensor = Any
RESLICES = ("indexing", "gather", "slice", "reshape", "read", "identity")
"""Operations that make another tensor of a part of one."""


@dataclass(eq=False)
class Taped:
    """One tape: the spans of records that it saw, and from which on it watched which values."""

    tape: Any
    spans: list[list[int]] = field(default_factory=list)
    watched: dict[int, int] = field(default_factory=dict)

    def sees(self, at: int) -> bool:
        """Whether it recorded then."""
        return any(start <= at < stop for start, stop in self.spans)

    def misses(self, at: int) -> str:
        """Why it did not record then."""
        return "no-grad" if self.spans[0][0] <= at < self.spans[-1][1] else "outside-tape"


@dataclass(eq=False)
class Asked:
    """A gradient that a tape was asked for."""

    taped: Taped
    target: Tensor
    source: Tensor
    records: Sequence[Record]
    """What had run by then."""
    target_number: int
    source_number: int
    result: Tensor | None
    held: Mapping[int, Sequence[int]]
    """The numbers of what variables held."""
    cut: bool = False
    """Whether it is a part of what the tape watches, taken out of it before."""
    parts: Sequence[tuple[int, str | None]] = ()
    """The tensors from before that are parts of it, and where they were first used."""

    def account(self) -> Account:
        """How the tape's target was computed from its source, and where the tape lost it."""
        since = 0 if hasattr(self.source, "handle") else self.taped.watched.get(self.source_number, 0)

        def follows(at: int, each: Record) -> str | None:
            at -= len(self.parts)
            if not self.taped.sees(at):
                return "inner-gradient" if each.inner else self.taped.misses(at)
            if not each.recorded:
                return "outside-tape"
            return "not-tracked" if at < since and self.source_number in each.takes else None

        remark = self._remark()
        outside = [
            Record("", "a closed-over tensor", where, "", (self.source_number,), (number,), stops="outside-tape")
            for number, where in self.parts
        ]
        return account(
            [*outside, *self.records],
            self.source_number,
            self.target_number,
            follows,
            [] if remark is None else [remark],
        )

    def _remark(self) -> Remark | None:
        """What is to be seen of the source alone."""
        source = self.source
        dtype = tf.as_dtype(source.dtype)
        if not dtype.is_floating and not dtype.is_complex:
            return Remark("integer", f"it is of dtype {dtype.name}")
        if hasattr(source, "handle"):
            return self._remark_on_variable()
        if self._tracked(self.source_number):
            return None
        made = next((each for each in self.records if self.source_number in each.gives), None)
        if (
            made is not None
            and made.word in ("indexing", "gather", "slice", "reshape")
            and self._tracked(made.takes[0])
        ):
            return Remark("resliced", "", Step(made.word, made.where, made.path))
        if not any(self.source_number in each.takes for each in self.records):
            if self.cut:
                return Remark("resliced", "it was cut out of what the tape watches before, and is not used itself")
            return Remark("unused", "no step takes it")
        return Remark("not-tracked", "the tape does not watch it")

    def _remark_on_variable(self) -> Remark | None:
        """Whether the tape watches the variable, or would have if it had been used."""
        tape, source = self.taped.tape, self.source
        if any(variable.handle is source.handle for variable in tape.watched_variables()):
            return None
        if not tape._watch_accessed_variables:
            return Remark("not-tracked", "the tape has watch_accessed_variables=False")
        return None if source.trainable else Remark("not-tracked", "its trainable is False")

    def _tracked(self, number: int) -> bool:
        """Whether a tape watches a value, or one that it was computed from."""
        tracked = set(self.taped.watched)
        for variable in self.taped.tape.watched_variables():
            tracked.update(self.held.get(variable.handle._id, ()))
        for at, each in enumerate(self.records):
            if self.taped.sees(at) and not tracked.isdisjoint(each.takes):
                tracked.update(each.gives)
        return number in tracked


class Tapes:
    """The tapes that were met while somebody watched."""

    def __init__(self, seen: Watch):
        self._watch = seen
        self._taped: dict[int, Taped] = {}
        self.asked: list[Asked] = []

    def of(self, tape: Any) -> Taped:
        """What is known of a tape."""
        return self._taped.setdefault(id(tape), Taped(tape))

    def push(self, tape: Any) -> None:
        """It begins to record."""
        self.of(tape).spans.append([len(self._watch.records), sys.maxsize])

    def pop(self, tape: Any) -> None:
        """It stops."""
        self.of(tape).spans[-1][1] = len(self._watch.records)

    def watches(self, tape: Any, tensors: Any) -> None:
        """It is told of tensors."""
        for x in tf.nest.flatten(tensors):
            number = self._watch.number(getattr(x, "handle", x))
            self.of(tape).watched.setdefault(number, len(self._watch.records))

    def ask(self, tape: Any, target: Any, sources: Any, results: Any, records: int) -> None:
        """It was asked for gradients, and gave them."""
        for each in self._watch.records[records:]:
            each.inner = True
        targets = [y for y in tf.nest.flatten(target) if hasattr(y, "_id")]
        for source, result in zip(tf.nest.flatten(sources), tf.nest.flatten(results), strict=True):
            if targets and (hasattr(source, "handle") or hasattr(source, "_id")):
                taped = self.of(tape)
                numbers = self._watch.number(targets[0]), self._source(source, taped)
                before = self._watch.records[:records]
                asked = Asked(taped, targets[0], source, before, *numbers, result, self._watch.held)
                if result is None:
                    asked.cut, asked.parts = self._kin(source, numbers[1], taped)
                self.asked.append(asked)

    def _kin(self, source: Any, number: int, taped: Taped) -> tuple[bool, list[tuple[int, str | None]]]:
        """Whether a tensor is cut out of what a tape watches, and which tensors from before are cut out of it.

        Of what happened before the step there are only numbers to tell by.
        """
        if any(number in each.takes for each in self._watch.records):
            return False, []
        with unwatched():
            numbers = np.asarray(source)
            if hasattr(source, "handle"):
                watched = []
            else:
                watched = [x for n, (x, _) in self._watch.met.items() if n in taped.watched and n != number]
                watched = [x for x in watched if differentiable(x)] + list(taped.tape.watched_variables())
            cut = any(is_part(numbers, np.asarray(x)) for x in watched)
            outside = [(n, x, where) for n, x, where in self._watch.outside() if n != number and n not in taped.watched]
            return cut, [(n, where) for n, x, where in outside if is_part(np.asarray(x), numbers)]

    def _source(self, source: Any, taped: Taped) -> int:
        """The number of a tensor; of a variable that of the value that was read while the tape ran."""
        handle = getattr(source, "handle", None)
        if handle is None:
            return self._watch.number(source)
        held = self._watch.held.get(handle._id, ())
        taken = {n for at, each in enumerate(self._watch.records) if taped.sees(at) for n in each.takes}
        read = [number for number in held if number in taken]
        return read[-1] if read else self._watch.number(handle)


def is_part(part: np.ndarray, whole: np.ndarray) -> bool:
    """Whether numbers are among others, and not such as are everywhere."""
    return part.size <= whole.size and not np.isin(part, (0, 1)).all() and bool(np.isin(part, whole).all())


def _install(replace: Replace) -> None:
    kind = tf.GradientTape
    _after(replace, "_push_tape", Tapes.push)
    _after(replace, "_pop_tape", Tapes.pop)
    _after(replace, "watch", Tapes.watches)
    original = kind.gradient

    @wraps(original)
    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        tapes = _current()
        records = len(tapes._watch.records) if tapes is not None else 0
        results = original(tape, target, sources, *args, **kwargs)
        if tapes is not None:
            tapes.ask(tape, target, sources, results, records)
        return results

    replace(kind, "gradient", gradient)


def _after(replace: Replace, name: str, note: Callable[..., None]) -> None:
    original = getattr(tf.GradientTape, name)

    @wraps(original)
    def method(tape: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tape, *args, **kwargs)
        tapes = _current()
        if tapes is not None:
            note(tapes, tape, *args, **kwargs)
        return result

    replace(tf.GradientTape, name, method)


def _current() -> Tapes | None:
    """Who keeps the tapes of this thread."""
    seen = current()
    return None if seen is None else seen.tapes


_patches = Patch(_install)


@contextmanager
def watching(seen: Watch) -> Iterator[Tapes]:
    """Watch this thread, its tapes too."""
    seen.tapes = Tapes(seen)
    with _patches.on(), seen.on():
        yield seen.tapes
