"""`eg.check`: compare entries of a derivative with differences of the function's values."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from elementgrad._backends.autodiff import Linearization, UnsupportedError
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import not_compiled
from elementgrad._explain.api import Explanation, blame_hints, suspect_hints
from elementgrad._explain.blame import FLAT_CAUSES, why_unconnected
from elementgrad._explain.diagnosis import Diagnosis
from elementgrad._explain.differences import EPSILON, STEP_SIZES, UNSTEADY, LineFunctions, judge_gradients
from elementgrad._explain.path import CauseFinding, DataPath
from elementgrad._explain.probe import SampledCall, part_positions, precision_of, real_parts, slope_unit
from elementgrad._explain.trace import uneven_weights
from elementgrad._names import pytree
from elementgrad._names.arguments import NOTHING, gather_arguments
from elementgrad._names.call import BoundCall, Operand, PartialCall, TensorRef
from elementgrad._names.names import expand_patterns
from elementgrad._place.place import Named, Place, parse_place, parse_target
from elementgrad.errors import FrameworkError, OptionError

Tensor = Any
MAX_ENTRIES = 1024
"""More entries are refused: each element takes at least six evaluations."""
RUNS_PER_ELEMENT = 6


@dataclass(frozen=True)
class CheckedEntry:
    """One entry of a derivative, and the difference of values that it is compared with."""

    of: str
    wrt: str
    gradient: float | None
    """None where the framework's derivative has no path."""
    difference: float
    bound: float
    """The largest error that the difference may have."""
    agrees: bool | None
    """None if differences do not decide."""
    why: str = ""
    """The reason if they do not decide."""

    def __str__(self) -> str:
        gradient = "none" if self.gradient is None else f"{self.gradient:.6g}"
        difference = f"difference {self.difference:.6g} (off by at most {self.bound:.1g})"
        return f"{self.of} by {self.wrt}: gradient {gradient}, {difference}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True)
class Check:
    """Entries of a derivative compared with differences, by `eg.check`. `print` it; it is true if all agree."""

    __module__ = "elementgrad"

    entries: Sequence[CheckedEntry]
    dtype: str
    """The precision in which values were compared."""
    diagnosis: Diagnosis | None = None
    """The operation at which gradient and values part, if they do."""

    @property
    def verdict(self) -> Literal["agrees", "differs", "undecided"]:
        """`agrees` if all entries do, `differs` if one does, `undecided` if none differs and some are open."""
        return "differs" if self.mismatches else "undecided" if self.undecided else "agrees"

    @property
    def mismatches(self) -> list[CheckedEntry]:
        """The entries that differ."""
        return [entry for entry in self.entries if entry.agrees is False]

    @property
    def undecided(self) -> list[CheckedEntry]:
        """The entries that differences do not decide."""
        return [entry for entry in self.entries if entry.agrees is None]

    @property
    def operation(self) -> str | None:
        """The operation where the gradient and the values part, if it is known."""
        return self.diagnosis.operation if self.diagnosis is not None else None

    def __bool__(self) -> bool:
        return self.verdict == "agrees"

    def __str__(self) -> str:
        mismatches, undecided, count = self.mismatches, self.undecided, len(self.entries)
        if not mismatches and not undecided:
            bound = max([entry.bound for entry in self.entries], default=0.0)
            entries = "the entry agrees" if count == 1 else f"all {count} entries agree"
            return f"{entries} with differences in {self.dtype}, which are off by at most {bound:.1g}."
        lines = []
        if mismatches:
            lines += [f"{len(mismatches)} of {count} entries differ from differences in {self.dtype}."]
            lines += _first_three(mismatches, ".mismatches")
        if undecided:
            lines += [f"{len(undecided)} of {count} entries are undecided by differences in {self.dtype}."]
            lines += _first_three(undecided, ".undecided")
        if self.diagnosis is not None:
            lines.append(str(self.diagnosis))
        return "\n".join(lines)


def _first_three(entries: Sequence[CheckedEntry], field: str) -> list[str]:
    rest = [f"and {len(entries) - 3} more in {field}"] if len(entries) > 3 else []
    return [str(entry) for entry in entries[:3]] + rest


@not_compiled
def check(
    f: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    of: Named = None,
    wrt: Named = None,
    names_from: Any = None,
    **arguments: Any,
) -> Any:
    """Check that entries of a derivative are the slopes of the function's values, by central differences.

    Values are computed in float64 where the function accepts it, with its arguments and parameters converted, and in
    its own precision otherwise; where a part is always computed in a lower one, step sizes suit that. Each entry says
    how far off its difference may be, by how differences of neighbouring widths spread. At a kink any slope between
    the two sides agrees. Where entries differ, `.diagnosis` names the operation: a custom rule, a hook, a detach. Of
    complex numbers both parts are moved and compared.

    Args:
        f: The function or model.
        *args: Its arguments.
        kwargs: Its keyword arguments.
        of: What is differentiated, by name or place; the only floating output if left out.
        wrt: What it is differentiated by; the only floating input if left out.
        names_from: A model that `f` calls, as for `eg.jacobian`.
        arguments: More keyword arguments of `f`.

    Returns:
        The check. Its verdict is `agrees`, `differs`, or `undecided` where differences do not tell, as for a function
        that gives other numbers each time. `bool()` is true for the first alone. For a pattern such as `"h.*.bias"` a
        dict of checks by the places that it matches.

    Raises:
        OptionError: If more than 1024 entries are named.

    >>> import torch, elementgrad as eg
    >>> print(eg.check(lambda x: x.sin().sum(), torch.tensor([0.5, 1.0]), wrt="x[0]"))
    the entry agrees with differences in float64, which are off by at most ...
    >>> print(eg.check(lambda x: x + (x.round() - x).detach(), torch.tensor([0.2])).operation)
    detach
    """
    place, target_place = parse_place(wrt), parse_target(of)
    call = BoundCall(*gather_arguments(check, f, args, kwargs, arguments, names_from), [place])
    targets, places = expand_patterns(call, target_place, place)
    return pytree.map_tree(targets, lambda of: pytree.map_tree(places, lambda wrt: _check_pair(call, of, wrt)))


def _check_pair(call: BoundCall, target_place: Place, place: Place) -> Check:
    source, target = call.find_source(place), call.find_target(target_place)
    if source.tensor is not None:  # refused before a conversion to float64 gives it a gradient
        call.operand(place, source, 0, source.tensor, batch=False)
    sampled, dtype, linear = _linearize(call, source, target)

    def compare(dtype: str) -> Check:
        with call.backend.precision(sampled.dtype):
            x = linear.inputs[0] if source.computed else sampled.tensors[0]
            wrt_operand = call.operand(place, source, 0, x, batch=False)
            of_operand = call.operand(target_place, target, 0, linear.value(0), batch=False)
            return Check(_compare(sampled, dtype, linear, of_operand, wrt_operand, source.computed), dtype)

    result = compare(dtype)
    if result.mismatches:
        # A part that is computed in a lower precision whatever the function is given, as a norm or a softmax often is,
        # stands still within the narrow widths of a higher one.
        lowest = sampled.lowest_precision(dtype)
        if lowest != dtype:
            pairs = list(zip(result.entries, compare(lowest).entries, strict=True))
            entries = [other if _is_refuted(entry, other) else entry for entry, other in pairs]
            result = result if entries == result.entries else Check(entries, lowest)
    if not result.mismatches:
        return result
    if any(entry.gradient is not None and not np.isfinite(entry.gradient) for entry in result.entries):
        real = "c" not in [call.backend.kind(x) for x in (linear.value(0), linear.inputs[0])]
        diagnosis = Explanation(call, place, target_place, probe=False).diagnosis() if real else None
    else:
        diagnosis = _blame_mismatch(call, source, target, result.mismatches[0])
    return replace(result, diagnosis=diagnosis)


def _is_refuted(entry: CheckedEntry, other: CheckedEntry) -> bool:
    """Return True if a mismatch is none at the widths of a lower precision, where the gradient is the better slope."""
    if entry.agrees is not False or entry.gradient is None or other.agrees is False:
        return False
    return abs(entry.gradient - other.difference) < abs(entry.difference - other.difference)


def _linearize(call: BoundCall, source: TensorRef, target: TensorRef) -> tuple[SampledCall, str, Linearization]:
    """Return the function ready for sweeps, in float64 if it accepts that, and its precision."""
    backend = call.backend
    try:
        sampled = SampledCall(call, source, target, "float64")
        linear = sampled.linearize()
        if precision_of(backend, linear.value(0)) == precision_of(backend, linear.inputs[0]) == "float64":
            return sampled, "float64", linear
    except Exception:  # the user's function is made for another precision; its error, if any, comes again below
        pass
    sampled = SampledCall(call, source, target)
    linear = sampled.linearize()
    names = [precision_of(backend, x) for x in (linear.value(0), linear.inputs[0])]
    known = [name for name in names if name in EPSILON]
    return sampled, max(known, key=EPSILON.__getitem__, default="float32"), linear


def _compare(
    sampled: SampledCall, dtype: str, linear: Linearization, of: Operand, wrt: Operand, computed: bool
) -> list[CheckedEntry]:
    """Return every chosen entry with its difference; `computed` if the source exists only during the run."""
    backend = sampled.backend
    rows, columns = part_positions(of, backend), part_positions(wrt, backend)
    if len(rows) * len(columns) > MAX_ENTRIES:
        raise OptionError(
            f"{len(rows)} x {len(columns)} entries are more than {MAX_ENTRIES}; name some of {of.name} and of "
            f"{wrt.name}"
        )
    jacobian = _jacobian_rows(linear, backend, of, rows, wrt, columns)
    base = backend.zeros(tuple(backend.shape(wrt.tensor)), wrt.tensor) if computed else sampled.tensors[0]
    numbers = sampled.source_parts()
    middle, steady = sampled.find_steady(base, RUNS_PER_ELEMENT * len(columns))
    # Noise may be zero at the point itself, so steadiness is judged at another one, before and after all other runs.
    other, value_there = _move_all(sampled, base, columns, numbers, dtype) or (base, middle)
    steady &= sampled.is_same(value_there, other)
    largest = [0.0 if row is None else float(np.abs(row).max(initial=0.0)) for row in jacobian]
    unit = slope_unit(middle, numbers, max(largest, default=0.0))
    verdicts = []
    for column in columns:

        def at(by: float, column: int = int(column)) -> np.ndarray:
            return sampled.parts_or_nan(sampled.move(base, [column], by), rows)

        gradients = [0.0 if row is None else float(row[column]) for row in jacobian]
        line = LineFunctions(at, middle[rows], float(numbers[column]), dtype, unit)
        verdicts.append(judge_gradients(line, gradients, largest))
    steady &= sampled.is_same(value_there, other)
    entries = []
    for column, column_verdicts in zip(columns, verdicts, strict=True):
        for row, derivatives, verdict in zip(rows, jacobian, column_verdicts, strict=True):
            if not steady[row]:
                verdict = replace(verdict, agrees=None, why=UNSTEADY)
            gradient = None if derivatives is None else float(derivatives[column])
            names = _element_name(of, int(row), backend), _element_name(wrt, int(column), backend)
            difference, bound = verdict.difference, verdict.bound
            entries.append(CheckedEntry(*names, gradient, difference, bound, verdict.agrees, verdict.why))
    return entries


def _move_all(
    sampled: SampledCall, base: Tensor, columns: np.ndarray, numbers: np.ndarray, dtype: str
) -> tuple[Tensor, np.ndarray] | None:
    """Move all chosen elements a little, and return them with the value there; None if the function refuses them."""
    sizes = np.abs(numbers[columns])
    by = STEP_SIZES[dtype] * uneven_weights(len(columns)) * np.where(np.isfinite(sizes), np.fmax(sizes, 1.0), 0.0)
    other = sampled.move(base, list(columns), by)
    try:
        return other, real_parts(sampled.backend, sampled(other))
    except Exception:  # the user's function, at numbers that are not theirs
        return None


def _jacobian_rows(
    linear: Linearization, backend: Backend, of: Operand, rows: np.ndarray, wrt: Operand, columns: np.ndarray
) -> list[np.ndarray | None]:
    """Return rows of the Jacobian: by reverse sweeps, or by forward ones where an operation has no reverse rule."""
    try:
        return [_jacobian_row(linear, backend, of, int(row)) for row in rows]
    except UnsupportedError as error:
        if "c" in (backend.kind(of.tensor), backend.kind(wrt.tensor)):
            raise FrameworkError(f"{backend.name} has no reverse rule for these complex numbers: {error}") from error
    jacobian = np.zeros((len(rows), math.prod(backend.shape(wrt.tensor))))
    try:
        for column in columns:
            seed = backend.load("read").one_hot_seeds(wrt.tensor, np.array([column]), 1)
            (tangent,) = linear.jvp(0, [0], seed)
            if tangent is None:
                return [None] * len(rows)
            jacobian[:, column] = real_parts(backend, tangent)[rows]
    except UnsupportedError as error:
        raise FrameworkError(f"{backend.name} can differentiate this in no direction: {error}") from error
    return list(jacobian)


def _jacobian_row(linear: Linearization, backend: Backend, of: Operand, row: int) -> np.ndarray | None:
    """Return the derivatives of one real part of the target by all real parts of the source."""
    shape = tuple(backend.shape(of.tensor))
    seed = np.zeros(math.prod(shape), np.complex128 if backend.kind(of.tensor) == "c" else np.float64)
    seed.view(np.float64)[row] = 1.0
    seed = seed.conj() if backend.conjugates else seed
    (cotangent,) = linear.vjp(0, [0], backend.cast(seed.reshape(1, *shape), of.tensor))
    if cotangent is None:
        return None
    values = real_parts(backend, cotangent)
    if backend.conjugates and backend.kind(cotangent) == "c":
        values = values * np.tile([1.0, -1.0], len(values) // 2)
    return values


def _element_name(operand: Operand, row: int, backend: Backend) -> str:
    position, part = divmod(row, 2) if backend.kind(operand.tensor) == "c" else (row, None)
    index = ", ".join([str(int(i)) for i in np.unravel_index(position, operand.of)])
    name = f"{operand.name}[{index}]" if operand.of else operand.name
    return name if part is None else f"{name}.{('real', 'imag')[part]}"


def _blame_mismatch(call: BoundCall, source: TensorRef, target: TensorRef, entry: CheckedEntry) -> Diagnosis:
    """Find the operation where gradient and values part, as far as the framework can tell."""
    run = PartialCall(call, [source], [target], stops=False)
    trace = call.backend.load("explain").record(run, [source.tensor]).trace(0, 0)
    path = DataPath(trace.graph)
    suspects = suspect_hints(trace.graph)
    if entry.gradient is None:
        finding = why_unconnected(path, True)
    elif suspects:
        finding = blame_hints(suspects)
    else:
        cuts = [op for op in path.cuts() if op.cut_cause not in FLAT_CAUSES]
        finding = CauseFinding(cuts[0].cut_cause, cuts[0], others=cuts[1:]) if cuts else CauseFinding(None)
    return Diagnosis.made("mismatch", finding, path, call.backend.name, entry.of, entry.wrt)
