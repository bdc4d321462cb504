"""Group parameters that do not learn by what stops their gradients, and explain one of each group.

One recorded run serves all of them. Where a path is cut, the operation at which it ends makes the group. Where the
gradient is zero, one sweep back through the record shows the values that a gradient arrives at, and the operations
behind which none does: parameters in front of the same ones share the cause. Parameters that nothing takes are grouped
by the largest module that has no others.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from elementgrad._audit.backend import AuditedParameter, Summaries, separator_of
from elementgrad._audit.custom_rules import find_differing_rules, is_flat
from elementgrad._audit.result import Finding, Problem
from elementgrad._audit.survey import Survey, ZeroSlices
from elementgrad._audit.units import HARMLESS_CAUSES, LostGradient, ZeroFactor, follow_slices, lies_apart, usual_cause
from elementgrad._explain.api import Explanation, SharedRun
from elementgrad._explain.blame import describe, why_unconnected
from elementgrad._explain.causes import words_for
from elementgrad._explain.diagnosis import Diagnosis
from elementgrad._explain.path import DataPath
from elementgrad._explain.replay import pull_cotangents
from elementgrad._explain.trace import Op, Trace, cannot_follow
from elementgrad._names.backend import Model
from elementgrad._names.call import ONLY_OUTPUT, BoundCall
from elementgrad._place.place import Place, at, parse_target
from elementgrad._watch.backend import NamedValue, StepRecord
from elementgrad._watch.locate import EARLIER, locate

Tensor = Any
PARAMETER = "the parameter"
"""Stands for each parameter of a group in words about it."""
NOT_ASKED = f"the loss depends on {PARAMETER}, but the step asks for the gradients of others alone"
ASK = "leave inputs= of backward() out, or add it there, or to the sources of tape.gradient()"
USE = f"use {PARAMETER} in the loss, freeze it, or name it in except_"
UNSEEN = "what the model computes with it was not seen, so that the cause is not known"
BLOCKED = "no-grad"
"""The cause of a whole block of code, whichever of its operations reads a parameter."""
FLATTENING = ("dead-relu", "clamped")
"""Causes of single units that may be chance: other numbers may wake them."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same problem and the same end of their paths."""

    problem: Problem
    members: list[AuditedParameter]
    ends: Sequence[Op] = ()
    """The operations at which the paths end."""


class Investigation:
    """One recorded run of a loss, and the parameters to explain by it."""

    def __init__(
        self,
        call: BoundCall,
        model: Model,
        parameters: Sequence[AuditedParameter],
        summaries: Summaries,
        survey: Survey,
        explain_step: Callable[[Tensor], Diagnosis] | None = None,
    ):
        self._call = call
        self._model = model
        self._explain_step = explain_step
        self._survey = survey
        self._summaries = summaries
        self._parameters = list(parameters)
        self._run = SharedRun(call)
        self._target = parse_target(None)
        self._questions = {
            each.name: Explanation(call, self._place(each), self._target, True, self._run) for each in self._parameters
        }
        for question in self._questions.values():
            self._run.add(question)
        self._traces: dict[str, Trace] = {}
        self._paths: dict[str, DataPath] = {}

    def _place(self, parameter: AuditedParameter) -> Place:
        """Return the place of a parameter in the call; by name where one array is several leaves of a pytree."""
        if parameter.place is not None:
            return parameter.place
        same = [ref.name for ref in self._call.inputs if ref.tensor is parameter.tensor]
        if len(same) < 2:
            return Place(parameter.tensor)
        return Place(None, next((name for name in same if name.endswith(f".{parameter.name}")), same[0]), kind="input")

    def results(self, rules: AbstractSet[str] = frozenset()) -> tuple[list[Finding], list[Finding]]:
        """Return the findings and the notes; of the derivatives that the user wrote, look at those of `rules`."""
        survey = self._survey
        groups = [
            *self._group("no gradient", survey.missing, self._cut_key),
            *self._group("zero", survey.zero, self._zero_key),
            *self._group("not finite", survey.nonfinite, self._nonfinite_key),
        ]
        explained = [self._explain(group) for group in groups]
        explained += self._explain_units(survey.units)
        explained += self._explain_rules(rules) if rules else []
        merged = _merge(explained)
        order = {each.name: number for number, each in enumerate(self._parameters)}

        def position(pair: tuple[Finding, bool]) -> int:
            first = pair[0].parameters[0]
            return order.get(first, order.get(first.rpartition("[")[0], 0))

        merged.sort(key=position)
        return [each for each, found in merged if found], [each for each, found in merged if not found]

    def _trace(self, parameter: AuditedParameter) -> Trace:
        name = parameter.name
        if name not in self._traces:
            self._traces[name] = self._run.trace(self._questions[name].source, ONLY_OUTPUT)
        return self._traces[name]

    def _path(self, parameter: AuditedParameter) -> DataPath:
        if parameter.name not in self._paths:
            self._paths[parameter.name] = DataPath(self._trace(parameter).graph)
        return self._paths[parameter.name]

    def _group(
        self,
        problem: Problem,
        parameters: Sequence[AuditedParameter],
        key_of: Callable[[AuditedParameter], tuple[Hashable, Sequence[Op]]],
    ) -> list[ParameterGroup]:
        groups: dict[Hashable, ParameterGroup] = {}
        for parameter in parameters:
            try:
                key, ends = key_of(parameter)
            except Exception:  # the run cannot be followed, and its explanation says so
                key, ends = None, ()
            if key is None:
                key = self._unused_key(parameter, groups) or _largest_module(parameter, parameters, self._parameters)
            groups.setdefault(key, ParameterGroup(problem, [], ends)).members.append(parameter)
        return list(groups.values())

    def _unused_key(self, parameter: AuditedParameter, groups: dict[Hashable, ParameterGroup]) -> Hashable:
        """Return the key of a group whose parameters are used for the same results as this one, if there is one."""
        for key, group in groups.items():
            shared = [self._results_of(each) & self._results_of(parameter) for each in group.members[-1:]]
            if not group.ends and any(shared):
                return key
        return None

    def _results_of(self, parameter: AuditedParameter) -> set[int]:
        """Return the values that are computed from a parameter; none if the run cannot be followed."""
        try:
            return self._path(parameter).from_source - {self._trace(parameter).graph.source}
        except Exception:  # its explanation says so
            return set()

    def _cut_key(self, parameter: AuditedParameter) -> tuple[Hashable, Sequence[Op]]:
        finding = why_unconnected(self._path(parameter), None)
        op = finding.op
        if op is None or finding.cause == "unused":
            return None, ()
        if finding.cause == BLOCKED and op.block:
            return ("block", op.block), [op]
        return ("end", self._index(parameter, op), op.where, op.operation), [op]

    def _index(self, parameter: AuditedParameter, op: Op) -> int:
        return next((n for n, other in enumerate(self._trace(parameter).graph.ops) if other is op), -1)

    def _zero_key(self, parameter: AuditedParameter) -> tuple[Hashable, Sequence[Op]]:
        if self._arrivals is None:
            return None, ()
        path = self._path(parameter)
        alive = {value for value, mask in self._arrivals.items() if mask.any()} & path.from_source
        ends = [
            (index, op)
            for index, op in enumerate(path.graph.ops)
            if not alive.isdisjoint(op.outputs) and alive.isdisjoint(op.inputs) and path.is_between(op)
        ]
        return (frozenset([index for index, _ in ends]) or None), [op for _, op in ends]

    def _nonfinite_key(self, parameter: AuditedParameter) -> tuple[Hashable, Sequence[Op]]:
        trace = self._trace(parameter)
        if not np.isfinite(trace.numbers.array(trace.target)).all():
            return "the loss", ()
        path = self._path(parameter)
        sizes = self._sizes or ()
        ends = [
            index
            for index, (op, size) in enumerate(zip(path.graph.ops, sizes, strict=False))
            if size is not None
            and np.isfinite(size.at_outputs)
            and not np.isfinite(size.at_inputs)
            and path.is_between(op)
        ]
        return (ends[-1] if ends else None), ()

    @cached_property
    def _sweep(self) -> tuple[Any, dict[int, np.ndarray] | None]:
        """One sweep back from the loss: sizes at each operation, and the elements of each value with a gradient."""
        survey = self._survey
        asked = [*survey.zero, *survey.nonfinite, *[slices.parameter for slices in survey.units]]
        traces = [self._trace(each) for each in asked]
        first = traces[0]
        connected = frozenset().union(*[trace.graph.connected for trace in traces])
        arrivals: dict[int, np.ndarray] = {}

        def see(value: int, cotangent: Tensor) -> None:
            arrivals[value] = first.numbers.array(cotangent) != 0

        seed = {first.graph.target: first.numbers.at(first.target, np.arange(1), np.ones(1))}
        with first.following():
            sizes = pull_cotangents(first.graph.ops, connected, seed, first.numbers, see=see)
        if sizes is None:
            return None, None
        # A backend may copy operations for each source, so that they are known by their positions.
        return [sizes.get(op) for op in first.graph.ops], arrivals

    @property
    def _sizes(self) -> Any:
        return self._sweep[0]

    @property
    def _arrivals(self) -> dict[int, np.ndarray] | None:
        return self._sweep[1]

    def _explain(self, group: ParameterGroup) -> tuple[Finding, bool]:
        """Explain the last parameter of a group, which is the nearest to the end of its path; False for a note."""
        member = group.members[-1]
        names = tuple([each.name for each in group.members])
        try:
            diagnosis = self._questions[member.name].diagnosis()
        except Exception as error:  # the loss does not run under the recorder
            return Finding(group.problem, names, reason=cannot_follow(error)), True
        if group.problem == "no gradient" and diagnosis.verdict == "flows" and self._explain_step is not None:
            diagnosis = self._explain_step(member.tensor)
            if diagnosis.cause is None:
                return Finding(group.problem, names, reason=NOT_ASKED, fix=ASK), True
        finding = _from_diagnosis(group.problem, names, diagnosis)
        ends = [op for op in group.ends if (op.where, op.operation) == (diagnosis.where, diagnosis.operation)]
        if diagnosis.cause == BLOCKED and group.ends and group.ends[0].block:
            first = group.ends[0]
            evidence = f"the first operation there is {describe(first)}"
            return replace(finding, where=first.block, evidence=(*finding.evidence, evidence)), True
        if group.problem == "not finite" and diagnosis.verdict != "nonfinite":  # the loss alone is not finite
            finding = Finding(group.problem, names, diagnosis=diagnosis)
        if group.problem == "not finite" and finding.cause in (None, "masked-branch"):
            return self._blame_earlier(finding, member), True
        if group.problem != "zero":
            return self._locate(finding, member), True
        if diagnosis.cause == "cancelled" and all(len(each.shape) <= 1 for each in group.members):
            return replace(finding, problem="cannot move"), False
        if diagnosis.cause in ("masked", "dead-relu") and (ends or group.ends):
            return self._blame_factor(finding, member, ends or group.ends)
        return finding, True

    def _locate(self, finding: Finding, member: AuditedParameter) -> Finding:
        """Return a finding about what is not used with a fix, and with the last line that uses it, if there is one."""
        if finding.where is not None or finding.cause != "unused":
            return finding
        results = self._results_of(member)
        ops = [op for op in self._trace(member).graph.ops if not results.isdisjoint(op.outputs)] if results else []
        if not ops:
            return replace(finding, fix=USE)
        return replace(finding, where=ops[-1].where, operation=ops[-1].operation, module=ops[-1].module)

    def _blame_earlier(self, finding: Finding, member: AuditedParameter) -> Finding:
        """Return a finding that blames the earliest number that is not finite, if one is there before anything runs.

        Where the gradient itself is finite, as that of a sum with infinity, an operation may have made it as well.
        """
        trace, path = self._trace(member), self._path(member)
        graph, numbers = trace.graph, trace.numbers
        ops = [op for op in graph.ops if not path.to_target.isdisjoint(op.outputs)]
        sources = [(each.name, self._trace(each)) for each in self._parameters]
        held = [
            NamedValue(name, "parameter", value, each.source)
            for name, each in sources
            for value in (each.graph.source, *each.later_ids)
        ]
        # Of frozen parameters and buffers a record has no ids. They are known by their bits.
        known = {value for op in ops for value in op.outputs} | {each.id for each in held}
        named = [(name, kind, numbers.array(x)) for name, kind, x in self._model.named_tensors()]
        for value, x in {value: x for op in ops for value, x in zip(op.inputs, op.operands, strict=False)}.items():
            if value not in known and numbers.is_differentiable(x) and not math.isfinite(numbers.size(x)):
                same = [each for each in named if np.array_equal(numbers.array(x), each[2], equal_nan=True)]
                held += [NamedValue(name, kind, value, x) for name, kind, _ in same[:1]]
        loss = NamedValue("the loss", "output", graph.target, trace.target)
        framework, following = self._call.backend.name, trace.following
        record = StepRecord(framework, ops, graph.connected, numbers, held, (), loss, following=following)
        report = locate(record, "")
        if report is None or report.cause in (None, "unseen") or (finding.cause and report.cause not in EARLIER):
            return finding
        return replace(
            finding,
            cause=report.cause,
            where=report.where,
            operation=report.operation,
            module=report.module,
            reason=report.clause or "",
            fix=report.fix or "",
            evidence=tuple(report.evidence),
        )

    def _blame_factor(self, finding: Finding, member: AuditedParameter, ends: Sequence[Op]) -> tuple[Finding, bool]:
        """Look for where zeros come from that a parameter is multiplied by, or that a rectifier is flat at.

        Another operation may have made them. Or they are weights that start at zero and learn, as in a fresh adapter
        (LoRA): what these multiply learns from the second step on, so that it is a note.
        """
        path = self._path(member)
        makers = {value: op for op in path.graph.ops for value in op.outputs}
        factor = ZeroFactor.of(ends[-1], path, makers, self._trace(member).numbers)
        if factor is None:
            return finding, True
        waits = [
            each.name
            for each in (self._parameters if factor.sources and finding.cause == "masked" else ())
            if self._trace(each).graph.source in factor.sources
            and each.name in self._summaries
            and self._summaries[each.name].largest > 0
        ]
        if waits:
            reason = (
                f"it is multiplied by weights such as {waits[0]}, which are zero now and learn: it follows a step later"
            )
            return replace(finding, problem="waits", reason=reason, fix=""), False
        cause = None if factor.maker is None else usual_cause(factor.maker)
        if factor.maker is None or cause is None:
            return finding, True
        blamed = _at_op(finding, factor.maker, cause, self._call.backend.name)
        return replace(blamed, evidence=(*finding.evidence, f"it makes the zeros in {finding.operation}")), True

    def _explain_units(self, units: Sequence[ZeroSlices]) -> list[tuple[Finding, bool]]:
        explained: list[tuple[Finding, bool]] = []
        for slices in units:
            try:
                explained += [] if self._arrivals is None else self._explain_slices(slices)
            except Exception as error:  # an operation cannot run again, so that the cause is not known
                explained.append((Finding("dead units", (slices.name(),), reason=cannot_follow(error)), False))
        return explained

    def _explain_slices(self, slices: ZeroSlices) -> Iterable[tuple[Finding, bool]]:
        trace, path = self._trace(slices.parameter), self._path(slices.parameter)
        assert self._arrivals is not None
        with trace.following():
            lost = follow_slices(trace, path, self._arrivals, slices.mask())
            if lost is None and not path.reaches_target:
                return [(Finding("dead units", (slices.name(),), reason=UNSEEN), False)]
            if lost is None or self._reads(lost.op, trace):
                return []  # what it is multiplied by is zero, which is said about whatever made it so
            cause = lost.cause(trace.numbers)
            if cause is None:
                return [self._explain_place(slices)]
            if cause == "custom-rule" and is_flat(trace.graph.ops, lost.op, lost.masks, trace.numbers):
                cause = "clamped"  # its derivative is right
            apart = self._split(slices, lost, trace) if cause in FLATTENING else slices
        found: list[tuple[Finding, bool]] = []
        if apart is not None and cause not in HARMLESS_CAUSES:
            found.append((self._unit_finding(apart, lost.op, cause), True))
        rest = np.setdiff1d(slices.indices, apart.indices if found and apart is not None else [])
        if rest.size:
            found.append((self._unit_finding(replace(slices, indices=rest), lost.op, cause), False))
        return found

    def _explain_place(self, slices: ZeroSlices) -> tuple[Finding, bool]:
        """Ask for an explanation of the slices themselves."""
        place = at(slices.parameter.tensor)[(slice(None),) * slices.axis + (slices.indices,)]
        diagnosis = Explanation(self._call, place, self._target, True, self._run).diagnosis()
        names = (slices.name(), *self._biases(slices))
        return _from_diagnosis("dead units", names, diagnosis), diagnosis.cause not in HARMLESS_CAUSES

    @cached_property
    def rules(self) -> set[str] | None:
        """The names of the operations whose derivatives the user wrote; None if the run cannot be followed."""
        try:
            return {op.operation for op in self._trace(self._parameters[0]).graph.ops if op.custom_gradient}
        except Exception:  # an explanation says so
            return None

    def _explain_rules(self, rules: AbstractSet[str]) -> Iterable[tuple[Finding, bool]]:
        traces = [self._trace(each) for each in self._parameters]
        trace, ops = traces[0], traces[0].graph.ops
        connected = frozenset().union(*[each.graph.connected for each in traces])
        with trace.following():
            differing = find_differing_rules(ops, connected, trace.numbers, rules)
        survey = self._survey
        others = {each.name for each in (*survey.missing, *survey.zero, *survey.nonfinite)}
        for rule in differing:
            op = ops[rule.index]
            values = {op.inputs[operand] for operand in rule.operands}
            paths = [(each.name, self._path(each)) for each in self._parameters if each.name not in others]
            through = [(name, path) for name, path in paths if path.is_between(path.graph.ops[rule.index])]
            names = [name for name, path in through if not values.isdisjoint(path.from_source)]
            if not names:
                continue
            found = _at_op(Finding("wrong", tuple(names)), op, "custom-rule", self._call.backend.name)
            found = replace(found, evidence=(rule.evidence,))
            if rule.purpose is None:
                fix = f"{found.fix}; if it is meant to be so, give except_=[{op.operation!r}]"
                yield replace(found, fix=fix), True
            else:
                reason = f"the custom derivative of {op.operation} is not its slope; it {rule.purpose}"
                yield replace(found, problem="surrogate", reason=reason, fix=""), False

    def _reads(self, op: Op, trace: Trace) -> bool:
        """Return True if an operation takes the parameter itself, cast or moved to another shape at most."""
        moved = {trace.graph.source, *trace.later_ids}
        for other in trace.graph.ops:
            if other is op:
                break
            if other.kind in ("move", "elementwise") and set(other.inputs) <= moved:
                moved.update(other.outputs)
        return not moved.isdisjoint(op.inputs)

    def _split(self, slices: ZeroSlices, lost: LostGradient, trace: Trace) -> ZeroSlices | None:
        """Return the slices whose units are far from where others are, and not just below zero for this batch."""
        if lies_apart(lost, trace.numbers):
            return slices
        if len(slices.indices) == 1:
            return None
        apart = []
        for index in slices.indices:
            single = replace(slices, indices=np.array([index]))
            one = follow_slices(trace, self._path(slices.parameter), self._arrivals or {}, single.mask())
            if one is not None and lies_apart(one, trace.numbers):
                apart.append(index)
        return replace(slices, indices=np.array(apart)) if apart else None

    def _unit_finding(self, slices: ZeroSlices, op: Op, cause: str | None) -> Finding:
        names = [slices.name(), *self._biases(slices)]
        found = Finding("dead units", tuple(names))
        return _at_op(found, op, cause, self._call.backend.name)

    def _biases(self, slices: ZeroSlices) -> list[str]:
        """Return the bias elements of the same units."""
        size = slices.parameter.shape[slices.axis]
        names = []
        for each in self._parameters:
            summary = self._summaries.get(each.name)
            same = each.module == slices.parameter.module and each.shape == (size,) and each is not slices.parameter
            if same and summary is not None and 0 in summary.slices and not summary.slices[0][slices.indices].any():
                names.append(replace(slices, parameter=each, axis=0).name())
        return names


def _from_diagnosis(problem: Problem, names: tuple[str, ...], diagnosis: Diagnosis) -> Finding:
    return Finding(
        problem,
        names,
        diagnosis.cause,
        diagnosis.where,
        diagnosis.operation,
        diagnosis.module,
        _about(diagnosis.clause or "", diagnosis),
        _about(diagnosis.fix or "", diagnosis),
        tuple(diagnosis.evidence),
        diagnosis,
    )


def _about(text: str, diagnosis: Diagnosis) -> str:
    """Return words about one parameter and the output as words about all of a group and the loss."""
    if text.startswith("it is not computed from "):  # the output
        text = text.replace("it is", "the loss is", 1)
    return text.replace(diagnosis.wrt, PARAMETER) if diagnosis.wrt else text


def _at_op(finding: Finding, op: Op, cause: str | None, framework: str) -> Finding:
    """Return a finding that blames an operation."""
    words = words_for(cause, op.operation)
    filled = {"operation": op.operation, "of": "the loss", "wrt": PARAMETER}
    return replace(
        finding,
        cause=cause,
        where=op.where,
        operation=op.operation,
        module=op.module,
        reason=words.clause.format(**filled),
        fix=words.fix_in(framework).format(**filled),
    )


def _merge(explained: Sequence[tuple[Finding, bool]]) -> list[tuple[Finding, bool]]:
    """Make one finding of those with the same problem, cause and line; one about units goes with a whole one."""
    merged: dict[Hashable, tuple[Finding, bool]] = {}
    for finding, found in explained:
        place = finding.where, finding.operation
        located = finding.cause is not None and finding.where is not None
        problem = "zero" if finding.problem == "dead units" and found else finding.problem
        key: Hashable = (problem, finding.cause, place, found) if located else (id(finding),)
        known = merged.get(key)
        if known is None:
            merged[key] = finding, found
        else:
            names = tuple(dict.fromkeys([*known[0].parameters, *finding.parameters]))
            first = finding if known[0].problem == "dead units" and finding.problem == "zero" else known[0]
            merged[key] = replace(first, parameters=names), found
    return list(merged.values())


def _largest_module(
    parameter: AuditedParameter, alike: Iterable[AuditedParameter], every: Iterable[AuditedParameter]
) -> str:
    """Return the largest module around a parameter in which all parameters have the same problem."""
    separator = separator_of(parameter.name)
    others = {each.name for each in every} - {each.name for each in alike}
    parts = parameter.name.split(separator)
    prefixes = [separator.join([*parts[:count], ""]) for count in range(len(parts))]
    return next((prefix for prefix in prefixes if not any(name.startswith(prefix) for name in others)), parameter.name)
