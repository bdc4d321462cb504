"""Sort the parameters of a model by summaries of their gradients: what is fine, what is not, and what is notable."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from elementgrad._audit.backend import AuditedParameter, GradientSummary, Sweep
from elementgrad._audit.result import Finding, Problem
from elementgrad._explain.differences import EPSILON

BESIDE = 4
"""The number of parameters of the same kind, on either side, that are the neighbours of one."""
OUTLYING = 1e4
"""The factor by which a notable gradient is larger or smaller than those of its neighbours."""
UNMOVED = 2.0**10
"""The largest gradient of a bias that counts as unmoved, in units of rounding of the gradient of its weight."""
SHARE = 0.25
"""A bias is notable if at least this share of its elements is unmoved: a third of a fused one are keys."""


@dataclass(frozen=True)
class ZeroSlices:
    """Rows or channels of a parameter that have no gradient other than zero."""

    parameter: AuditedParameter
    axis: int
    indices: np.ndarray

    def mask(self) -> np.ndarray:
        """Return which elements of the parameter they are."""
        mask = np.zeros(self.parameter.shape, bool)
        mask[(slice(None),) * self.axis + (self.indices,)] = True
        return mask

    def name(self) -> str:
        """Return the parameter's name with an index, such as `fc.weight[[3, 5]]` or `fc.kernel[:, 3]`."""
        return self.parameter.name + f"[{':, ' * self.axis}{index_text(self.indices)}]"


def index_text(indices: np.ndarray) -> str:
    if len(indices) == 1:
        return str(int(indices[0]))
    first, last = int(indices[0]), int(indices[-1])
    return f"{first}:{last + 1}" if last - first + 1 == len(indices) else str([int(index) for index in indices])


@dataclass
class Survey:
    """The parameters of a model, sorted."""

    missing: list[AuditedParameter] = field(default_factory=list)
    """Without a gradient."""
    zero: list[AuditedParameter] = field(default_factory=list)
    nonfinite: list[AuditedParameter] = field(default_factory=list)
    units: list[ZeroSlices] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, parameters: Sequence[AuditedParameter], sweep: Sweep) -> "Survey":
        """Sort parameters by the summaries of their gradients."""
        summaries = sweep.summaries
        survey = cls()
        fine: list[tuple[AuditedParameter, GradientSummary]] = []
        wide = {each.module for each in parameters if not each.is_bias}
        for parameter in parameters:
            summary = summaries.get(parameter.name)
            if summary is None:
                survey.missing.append(parameter)
            elif not math.isfinite(summary.largest):
                survey.nonfinite.append(parameter)
            elif summary.largest == 0:
                survey.zero.append(parameter)
            else:
                fine.append((parameter, summary))
                if summary.is_lookup:
                    survey._note_unused_rows(parameter, summary)
                elif not parameter.is_bias or parameter.module not in wide:  # a bias goes with its weight
                    survey.units += _zero_slices(parameter, summary)
        if not sweep.is_finite and not survey.nonfinite:  # the gradient of a sum is finite, also if the sum is not
            survey.nonfinite = [parameter for parameter, _ in fine]
            if not fine:
                survey.nonfinite, survey.zero = survey.zero, []
        survey._note_unmoved_biases(fine)
        unmoved = {name for note in survey.notes if note.problem == "cannot move" for name in note.parameters}
        survey._note_outliers([pair for pair in fine if pair[0].name not in unmoved])
        return survey

    @property
    def is_fine(self) -> bool:
        """True if there is nothing to explain."""
        return not (self.missing or self.zero or self.nonfinite or self.units)

    def _note_unused_rows(self, parameter: AuditedParameter, summary: GradientSummary) -> None:
        for slices in _zero_slices(parameter, summary)[:1]:
            size, unused = parameter.shape[slices.axis], len(slices.indices)
            reason = f"{unused} of {size} rows are not used by this batch"
            self.notes.append(Finding("unused rows", (parameter.name,), "row-not-used", reason=reason))

    def _note_unmoved_biases(self, fine: Sequence[tuple[AuditedParameter, GradientSummary]]) -> None:
        weights: dict[tuple[str, int], np.ndarray] = {}
        for parameter, summary in fine:
            by_length: dict[int, np.ndarray] = {}
            for sizes in summary.slices.values() if not parameter.is_bias else ():
                # The units of a square weight are its rows or its columns: a dead one is zero in one of them.
                by_length[len(sizes)] = np.minimum(sizes, by_length.get(len(sizes), sizes))
            for length, sizes in by_length.items():
                weights[parameter.module, length] = np.maximum(sizes, weights.get((parameter.module, length), sizes))
        for parameter, summary in fine:
            # A bias of several axes, as of the heads of attention, is looked at along one of them.
            keyed = [((parameter.module, len(sizes)), sizes) for sizes in summary.slices.values()]
            pairs = [(sizes, weights[key]) for key, sizes in keyed if key in weights]
            if not parameter.is_bias or not pairs or EPSILON.get(parameter.dtype, 1.0) > 1e-6:
                continue
            sizes, weight = pairs[0]
            limit = UNMOVED * EPSILON[parameter.dtype] * weight.max()
            # A dead unit has no gradient at its weight either.
            unmoved = (sizes <= limit) & (weight > limit)
            if unmoved.mean() >= (SHARE if len(parameter.shape) < 2 else 1):
                count = "" if unmoved.all() else f"{int(unmoved.sum())} of its {unmoved.size} elements: "
                reason = (
                    f"{count}what is computed with it does not depend on it but for rounding, as for biases in front "
                    "of a normalisation and those of the keys of attention"
                )
                self.notes.append(Finding("cannot move", (parameter.name,), "cancelled", reason=reason))

    def _note_outliers(self, fine: Sequence[tuple[AuditedParameter, GradientSummary]]) -> None:
        outliers: dict[Problem, dict[str, str]] = {}
        for wide in (False, True):
            kind = [(each, summary.largest) for each, summary in fine if each.is_bias != wide]
            for index, (parameter, size) in enumerate(kind):
                beside = kind[max(0, index - BESIDE) : index] + kind[index + 1 : index + 1 + BESIDE]
                if len(beside) < 2:
                    continue
                usual = float(np.median([other for _, other in beside]))
                ratio = size / usual
                if ratio > OUTLYING or ratio < 1 / OUTLYING:
                    text = f"the largest gradient is {size:.2g}, and that of the neighbours about {usual:.2g}"
                    outliers.setdefault("huge" if ratio > 1 else "tiny", {})[parameter.name] = text
        for problem, reasons in outliers.items():
            self.notes.append(Finding(problem, tuple(reasons), reason=next(iter(reasons.values()))))


def _zero_slices(parameter: AuditedParameter, summary: GradientSummary) -> list[ZeroSlices]:
    found = [(axis, np.flatnonzero(sizes == 0)) for axis, sizes in summary.slices.items()]
    return [ZeroSlices(parameter, axis, indices) for axis, indices in found if indices.size]
