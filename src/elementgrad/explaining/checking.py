"""`check`: the entries of a derivative against differences of the function's values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad.backends import Backend, plain
from elementgrad.errors import OptionError
from elementgrad.explaining.diagnosis import Diagnosis
from elementgrad.explaining.following import FLAT, why_unconnected
from elementgrad.explaining.inquiry import Inquiry, blamed, suspected
from elementgrad.explaining.precision import EPSILON, Sampled, differences
from elementgrad.explaining.trail import Finding, Trail
from elementgrad.place import Place
from elementgrad.read import NOTHING, Named, parsed, parsed_target
from elementgrad.side import Side
from elementgrad.source import Source
from elementgrad.trace import Call, Run

Tensor = Any
MOST = 1024
"""So many entries are compared at once, and no more: each element takes seven evaluations."""
SLACK = {"float64": 1e-6, "float32": 1e-2, "float16": 1e-1, "bfloat16": 2e-1}
"""By how much of its size a difference may be off beyond its own bound."""


@dataclass(frozen=True)
class Entry:
    """One entry of a derivative, and the difference of values that it is held against."""

    of: str
    wrt: str
    gradient: float | None
    """None where the framework's derivative has no path."""
    difference: float
    bound: float
    """How far off the difference may be."""
    agrees: bool

    def __str__(self) -> str:
        gradient = "none" if self.gradient is None else f"{self.gradient:.6g}"
        difference = f"difference {self.difference:.6g} (off by at most {self.bound:.1g})"
        return f"{self.of} by {self.wrt}: gradient {gradient}, {difference}"


@dataclass(frozen=True)
class Check:
    """Entries of a derivative against differences. Made by `eg.check`; `print` it. It is true if all agree."""

    entries: Sequence[Entry]
    dtype: str
    """The precision in which values were compared."""
    diagnosis: Diagnosis | None = None
    """Where the two part, if they do."""

    @property
    def mismatches(self) -> list[Entry]:
        """The entries that differ."""
        return [entry for entry in self.entries if not entry.agrees]

    @property
    def operation(self) -> str | None:
        """The operation where the gradient and the values part, if it is known."""
        return self.diagnosis.operation if self.diagnosis is not None else None

    def __bool__(self) -> bool:
        return not self.mismatches

    def __str__(self) -> str:
        wrong, count = self.mismatches, len(self.entries)
        if not wrong:
            bound = max([entry.bound for entry in self.entries], default=0.0)
            entries = "the entry agrees" if count == 1 else f"all {count} entries agree"
            return f"{entries} with differences in {self.dtype}, which are off by at most {bound:.1g}."
        lines = [f"{len(wrong)} of {count} entries differ from differences in {self.dtype}."]
        lines += [str(entry) for entry in wrong[:3]]
        if len(wrong) > 3:
            lines.append(f"and {len(wrong) - 3} more in .mismatches")
        if self.diagnosis is not None:
            lines.append(str(self.diagnosis))
        return "\n".join(lines)


@plain
def check(
    f: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] = NOTHING, of: Named = None, wrt: Named = None
) -> Check:
    """Whether entries of a derivative are the slopes of the function's values, by central differences.

    Values are computed in float64 where the function accepts it, with its arguments and parameters converted, and in
    its own precision otherwise; each entry says how far off its difference may be. At a kink any slope between the two
    sides agrees. Where entries differ, `.diagnosis` names the operation: a rule that somebody wrote, a hook, a detach.

    >>> import torch, elementgrad as eg
    >>> print(eg.check(lambda x: x.sin().sum(), torch.tensor([0.5, 1.0]), wrt="x[0]"))
    the entry agrees with differences in float64, which are off by at most ...
    >>> print(eg.check(lambda x: x + (x.round() - x).detach(), torch.tensor([0.2])).operation)
    detach
    """
    place, target_place = parsed(wrt), parsed_target(of)
    call = Call(f, args, kwargs)
    source, target = call.source(place), call.target(target_place)
    evaluated = _evaluated(call, source, target)
    with call.backend.precision(evaluated[0].dtype):
        entries = _entries(call, (place, target_place), (source, target), *evaluated)
    wrong = not all(entry.agrees for entry in entries)
    if any(entry.gradient is not None and not np.isfinite(entry.gradient) for entry in entries):
        return Check(entries, evaluated[1], Inquiry(call, place, target_place, probe=False).diagnosis())
    return Check(entries, evaluated[1], _parting(call, source, target, entries) if wrong else None)


def _entries(
    call: Call, places: Sequence[Place], named: Sequence[Source], sampled: Sampled, dtype: str, linear: Any
) -> list[Entry]:
    """Every entry asked for, with its difference."""
    (place, target_place), (source, target), backend = places, named, call.backend
    since = call.side(place, source, 0, linear.inputs[0] if source.met else sampled.tensors[0], batch=False)
    to = call.side(target_place, target, 0, linear.value(0), batch=False)
    rows, columns = _positions(to, backend), _positions(since, backend)
    if len(rows) * len(columns) > MOST:
        raise OptionError(
            f"{len(rows)} x {len(columns)} entries are more than {MOST}; name some of {to.name} and of {since.name}"
        )
    pulled = [_row(linear, backend, to, row) for row in rows]
    base = backend.zeros(tuple(backend.shape(since.tensor)), since.tensor) if source.met else sampled.tensors[0]
    numbers = None if source.met else backend.floats(base)
    entries = []
    for column in columns:
        found = differences(sampled, numbers, base, rows, int(column), dtype)
        for number, row in enumerate(rows):
            derivatives = pulled[number]
            gradient = None if derivatives is None else float(derivatives[column])
            slopes = [float(side[number]) for side in (found.central, found.left, found.right)]
            bound = float(found.bound[number])
            slack = 2 * bound + SLACK[dtype] * max(map(abs, slopes))
            agrees = min(slopes) - slack <= (gradient or 0.0) <= max(slopes) + slack
            names = _element(to, int(row)), _element(since, int(column))
            entries.append(Entry(*names, gradient, slopes[0], bound, agrees))
    return entries


def _evaluated(call: Call, source: Source, target: Source) -> tuple[Sampled, str, Any]:
    """The function ready for sweeps, in float64 if it accepts that."""
    backend = call.backend
    try:
        sampled = Sampled(call, source, target, "float64")
        linear = sampled.linear()
        if backend.dtype(linear.value(0)) == backend.dtype(linear.inputs[0]) == "float64":
            return sampled, "float64", linear
    except Exception:  # the user's function is made for another precision: what it says then is raised below
        pass
    sampled = Sampled(call, source, target)
    linear = sampled.linear()
    known = [name for name in (backend.dtype(linear.value(0)), backend.dtype(linear.inputs[0])) if name in EPSILON]
    return sampled, max(known, key=EPSILON.__getitem__, default="float32"), linear


def _positions(side: Side, backend: Backend) -> np.ndarray:
    return np.asarray(side.select(..., backend).flat()).reshape(-1)


def _row(linear: Any, backend: Backend, to: Side, row: int) -> np.ndarray | None:
    (pulled,) = linear.pull(0, [0], backend.units(to.tensor, np.array([row]), 1))
    values = None if pulled is None else backend.floats(pulled)
    return None if values is None else values.reshape(-1)


def _element(side: Side, position: int) -> str:
    index = ", ".join([str(int(i)) for i in np.unravel_index(position, side.of)])
    return f"{side.name}[{index}]" if side.of else side.name


def _parting(call: Call, source: Source, target: Source, entries: Sequence[Entry]) -> Diagnosis:
    """The operation where the gradient and the values part, as far as the framework can tell."""
    witness = call.backend.witness(Run(call, [source], [target]), source.tensor, True)
    trail = Trail(witness.account)
    wrong = next(entry for entry in entries if not entry.agrees)
    suspects = suspected(witness.account)
    if wrong.gradient is None:
        found = why_unconnected(trail, True)
    elif suspects:
        found = blamed(suspects)
    else:
        cuts = [step for step in trail.cuts() if step.stops not in FLAT]
        found = Finding(cuts[0].stops, cuts[0], others=cuts[1:]) if cuts else Finding(None)
    return Diagnosis.made("mismatch", found, trail, call.backend.name, wrong.of, wrong.wrt)
