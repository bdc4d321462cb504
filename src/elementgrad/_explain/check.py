"""`check`: the entries of a derivative against differences of the function's values."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np

from elementgrad._backends.autodiff import UnsupportedError
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import not_compiled
from elementgrad._explain.api import Explanation, blamed, suspected
from elementgrad._explain.blame import FLAT, why_unconnected
from elementgrad._explain.diagnosis import Diagnosis
from elementgrad._explain.differences import (
    EPSILON,
    SIZES,
    UNSTEADY,
    LineFunctions,
    SampledCall,
    moved,
    parts,
    positions_in_parts,
    precision_of,
    unit,
    verdicts,
)
from elementgrad._explain.path import CauseFinding, DataPath
from elementgrad._explain.trace import uneven_weights
from elementgrad._names.call import BoundCall, Operand, PartialCall, TensorRef
from elementgrad._place.place import Place
from elementgrad._read.api import NOTHING, Named, parse_place, parse_target
from elementgrad.errors import FrameworkError, OptionError

Tensor = Any
MOST = 1024
"""So many entries are compared at once, and no more: each element takes at least six evaluations."""
RUNS = 6


@dataclass(frozen=True)
class CheckedEntry:
    """One entry of a derivative, and the difference of values that it is held against."""

    of: str
    wrt: str
    gradient: float | None
    """None where the framework's derivative has no path."""
    difference: float
    bound: float
    """How far off the difference may be."""
    agrees: bool | None
    """None if differences do not decide."""
    why: str = ""
    """Why they do not."""

    def __str__(self) -> str:
        gradient = "none" if self.gradient is None else f"{self.gradient:.6g}"
        difference = f"difference {self.difference:.6g} (off by at most {self.bound:.1g})"
        return f"{self.of} by {self.wrt}: gradient {gradient}, {difference}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True)
class Check:
    """Entries of a derivative against differences. Made by `eg.check`; `print` it. It is true if all agree for sure."""

    __module__ = "elementgrad"

    entries: Sequence[CheckedEntry]
    dtype: str
    """The precision in which values were compared."""
    diagnosis: Diagnosis | None = None
    """Where the two part, if they do."""

    @property
    def verdict(self) -> Literal["agrees", "differs", "undecided"]:
        """Whether all agree, some differ, or none differs and some are open."""
        return "differs" if self.mismatches else "undecided" if self.undecided else "agrees"

    @property
    def mismatches(self) -> list[CheckedEntry]:
        """The entries that differ."""
        return [entry for entry in self.entries if entry.agrees is False]

    @property
    def undecided(self) -> list[CheckedEntry]:
        """The entries of which differences do not tell whether they are right."""
        return [entry for entry in self.entries if entry.agrees is None]

    @property
    def operation(self) -> str | None:
        """The operation where the gradient and the values part, if it is known."""
        return self.diagnosis.operation if self.diagnosis is not None else None

    def __bool__(self) -> bool:
        return self.verdict == "agrees"

    def __str__(self) -> str:
        wrong, undecided, count = self.mismatches, self.undecided, len(self.entries)
        if not wrong and not undecided:
            bound = max([entry.bound for entry in self.entries], default=0.0)
            entries = "the entry agrees" if count == 1 else f"all {count} entries agree"
            return f"{entries} with differences in {self.dtype}, which are off by at most {bound:.1g}."
        lines = []
        if wrong:
            lines += [f"{len(wrong)} of {count} entries differ from differences in {self.dtype}."]
            lines += _told(wrong, ".mismatches")
        if undecided:
            lines += [f"{len(undecided)} of {count} entries are undecided by differences in {self.dtype}."]
            lines += _told(undecided, ".undecided")
        if self.diagnosis is not None:
            lines.append(str(self.diagnosis))
        return "\n".join(lines)


def _told(entries: Sequence[CheckedEntry], where: str) -> list[str]:
    more = [f"and {len(entries) - 3} more in {where}"] if len(entries) > 3 else []
    return [str(entry) for entry in entries[:3]] + more


@not_compiled
def check(
    f: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] = NOTHING, of: Named = None, wrt: Named = None
) -> Check:
    """Whether entries of a derivative are the slopes of the function's values, by central differences.

    Values are computed in float64 where the function accepts it, with its arguments and parameters converted, and in
    its own precision otherwise; each entry says how far off its difference may be, by how differences of neighbouring
    widths spread. At a kink any slope between the two sides agrees. Where entries differ, `.diagnosis` names the
    operation: a rule that somebody wrote, a hook, a detach.

    The verdict is `agrees`, `differs`, or `undecided` where differences do not tell, as for a function that gives other
    numbers each time. `bool()` is true for the first alone. Of complex numbers both parts are moved and compared.

    >>> import torch, elementgrad as eg
    >>> print(eg.check(lambda x: x.sin().sum(), torch.tensor([0.5, 1.0]), wrt="x[0]"))
    the entry agrees with differences in float64, which are off by at most ...
    >>> print(eg.check(lambda x: x + (x.round() - x).detach(), torch.tensor([0.2])).operation)
    detach
    """
    place, target_place = parse_place(wrt), parse_target(of)
    call = BoundCall(f, args, kwargs)
    source, target = call.find_source(place), call.find_target(target_place)
    evaluated = _evaluated(call, source, target)
    with call.backend.precision(evaluated[0].dtype):
        entries = _entries(call, (place, target_place), (source, target), *evaluated)
    found = Check(entries, evaluated[1])
    if not found.mismatches:
        return found
    if any(entry.gradient is not None and not np.isfinite(entry.gradient) for entry in entries):
        real = "c" not in [call.backend.kind(x) for x in (evaluated[2].value(0), evaluated[2].inputs[0])]
        diagnosis = Explanation(call, place, target_place, probe=False).diagnosis() if real else None
    else:
        diagnosis = _parting(call, source, target, found.mismatches[0])
    return replace(found, diagnosis=diagnosis)


def _entries(
    call: BoundCall, places: Sequence[Place], named: Sequence[TensorRef], sampled: SampledCall, dtype: str, linear: Any
) -> list[CheckedEntry]:
    """Every entry asked for, with its difference."""
    (place, target_place), (source, target), backend = places, named, call.backend
    since = call.operand(place, source, 0, linear.inputs[0] if source.computed else sampled.tensors[0], batch=False)
    to = call.operand(target_place, target, 0, linear.value(0), batch=False)
    rows, columns = _positions(to, backend), _positions(since, backend)
    if len(rows) * len(columns) > MOST:
        raise OptionError(
            f"{len(rows)} x {len(columns)} entries are more than {MOST}; name some of {to.name} and of {since.name}"
        )
    pulled = _rows(linear, backend, to, rows, since, columns)
    base = backend.zeros(tuple(backend.shape(since.tensor)), since.tensor) if source.computed else sampled.tensors[0]
    numbers = sampled.numbers()
    middle, steady = sampled.steady(base, RUNS * len(columns))
    other, first = _elsewhere(sampled, base, columns, numbers, dtype) or (base, middle)
    steady &= sampled.same(first, other)
    largest = [0.0 if row is None else float(np.abs(row).max(initial=0.0)) for row in pulled]
    judged = []
    for column in columns:
        at = partial(_at, sampled, base, rows, int(column))
        slopes = [0.0 if row is None else float(row[column]) for row in pulled]
        line = LineFunctions(
            at, middle[rows], float(numbers[column]), dtype, unit(middle, numbers, max(largest, default=0.0))
        )
        judged.append(verdicts(line, slopes, largest))
    steady &= sampled.same(first, other)
    entries = []
    for number, (column, row) in enumerate(product(columns, rows)):
        found, derivatives = judged[number // len(rows)][number % len(rows)], pulled[number % len(rows)]
        if not steady[row]:
            found = replace(found, agrees=None, why=UNSTEADY)
        gradient = None if derivatives is None else float(derivatives[column])
        names = _element(to, int(row), backend), _element(since, int(column), backend)
        entries.append(CheckedEntry(*names, gradient, found.difference, found.bound, found.agrees, found.why))
    return entries


def _elsewhere(
    sampled: SampledCall, base: Tensor, columns: np.ndarray, numbers: np.ndarray, dtype: str
) -> tuple[Tensor, np.ndarray] | None:
    """Move all that is asked about, since noise may be nothing at the point itself; None if the function refuses it."""
    sizes = np.abs(numbers[columns])
    by = SIZES[dtype] * uneven_weights(len(columns)) * np.where(np.isfinite(sizes), np.fmax(sizes, 1.0), 0.0)
    other = moved(sampled, base, list(columns), by)
    try:
        return other, parts(sampled.backend, sampled(other))
    except Exception:  # it is the user's function, at numbers that are not theirs
        return None


def _at(sampled: SampledCall, base: Tensor, rows: np.ndarray, column: int, by: float) -> np.ndarray:
    return sampled.beside(moved(sampled, base, [column], by), rows)


def _evaluated(call: BoundCall, source: TensorRef, target: TensorRef) -> tuple[SampledCall, str, Any]:
    """The function ready for sweeps, in float64 if it accepts that."""
    backend = call.backend
    try:
        sampled = SampledCall(call, source, target, "float64")
        linear = sampled.linear()
        if precision_of(backend, linear.value(0)) == precision_of(backend, linear.inputs[0]) == "float64":
            return sampled, "float64", linear
    except Exception:  # the user's function is made for another precision: what it says then is raised below
        pass
    sampled = SampledCall(call, source, target)
    linear = sampled.linear()
    both = [precision_of(backend, x) for x in (linear.value(0), linear.inputs[0])]
    known = [name for name in both if name in EPSILON]
    return sampled, max(known, key=EPSILON.__getitem__, default="float32"), linear


def _positions(side: Operand, backend: Backend) -> np.ndarray:
    chosen = np.asarray(side.select(..., backend).flat()).reshape(-1)
    return positions_in_parts(backend, side.tensor, chosen)


def _rows(
    linear: Any, backend: Backend, to: Operand, rows: np.ndarray, since: Operand, columns: np.ndarray
) -> list[np.ndarray | None]:
    """Derivatives of some parts of the target: by reverse sweeps, or by forward ones where those have no rule."""
    try:
        return [_row(linear, backend, to, int(row)) for row in rows]
    except UnsupportedError as error:
        if "c" in (backend.kind(to.tensor), backend.kind(since.tensor)):
            raise FrameworkError(f"{backend.name} has no reverse rule for these complex numbers: {error}") from error
    found = np.zeros((len(rows), math.prod(backend.shape(since.tensor))))
    try:
        for column in columns:
            seed = backend.load("read").one_hot_seeds(since.tensor, np.array([column]), 1)
            (pushed,) = linear.jvp(0, [0], seed)
            if pushed is None:
                return [None] * len(rows)
            found[:, column] = parts(backend, pushed)[rows]
    except UnsupportedError as error:
        raise FrameworkError(f"{backend.name} can differentiate this in no direction: {error}") from error
    return list(found)


def _row(linear: Any, backend: Backend, to: Operand, row: int) -> np.ndarray | None:
    """The derivatives of one part of the target by all parts of the source."""
    shape = tuple(backend.shape(to.tensor))
    seed = np.zeros(math.prod(shape), np.complex128 if backend.kind(to.tensor) == "c" else np.float64)
    seed.view(np.float64)[row] = 1.0
    seed = seed.conj() if backend.conjugates else seed
    (pulled,) = linear.vjp(0, [0], backend.cast(seed.reshape(1, *shape), to.tensor))
    if pulled is None:
        return None
    values = parts(backend, pulled)
    if backend.conjugates and backend.kind(pulled) == "c":
        values = values * np.tile([1.0, -1.0], len(values) // 2)
    return values


def _element(side: Operand, row: int, backend: Backend) -> str:
    position, part = divmod(row, 2) if backend.kind(side.tensor) == "c" else (row, None)
    index = ", ".join([str(int(i)) for i in np.unravel_index(position, side.of)])
    name = f"{side.name}[{index}]" if side.of else side.name
    return name if part is None else f"{name}.{('real', 'imag')[part]}"


def _parting(call: BoundCall, source: TensorRef, target: TensorRef, wrong: CheckedEntry) -> Diagnosis:
    """The operation where the gradient and the values part, as far as the framework can tell."""
    witness = call.backend.load("explain").trace(PartialCall(call, [source], [target]), source.tensor, True)
    trail = DataPath(witness.graph)
    suspects = suspected(witness.graph)
    if wrong.gradient is None:
        found = why_unconnected(trail, True)
    elif suspects:
        found = blamed(suspects)
    else:
        cuts = [step for step in trail.cuts() if step.cut_cause not in FLAT]
        found = CauseFinding(cuts[0].cut_cause, cuts[0], others=cuts[1:]) if cuts else CauseFinding(None)
    return Diagnosis.made("mismatch", found, trail, call.backend.name, wrong.of, wrong.wrt)
