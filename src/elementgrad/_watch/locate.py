"""Search a recorded step for its earliest bad number.

The search goes backwards from a result that is not finite, along values that are not finite, until an operation that
makes one of finite numbers, or an argument or parameter that is one. Infinities that mask something are no fault: a
`masked_fill` with -inf in front of a softmax is as it should be. Where all results are finite, gradients are pulled
back through the record, up to the first operation from which one comes that is not finite.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from elementgrad._explain.blame import Evidence, why_nonfinite
from elementgrad._explain.causes import SELECTING
from elementgrad._explain.diagnosis import Diagnosis
from elementgrad._explain.path import CauseFinding, DataPath
from elementgrad._explain.replay import finite_flags, pull_cotangents
from elementgrad._explain.trace import CotangentSizes, Op, OpGraph
from elementgrad._watch.backend import NamedValue, StepRecord
from elementgrad._watch.elements import bad_float, find_nonfinite, first_bad, place_text
from elementgrad._watch.report import WatchReport

Tensor = Any
HELD = {"input": "bad-input", "parameter": "bad-parameter", "buffer": "bad-parameter"}
"""The cause where a number is bad before anything runs, by the kind of what holds it."""
EARLIER = frozenset(HELD.values())
MAPPED = frozenset(["shard_map", "xla_pmap"])
"""Operations that are made of many, which run on several devices and are not recorded."""
NO_VALUE = "{} has no finite value or slope at this input"
"""The clause where an operation is singular in its value, or in a slope that is a value of the record."""


def locate(record: StepRecord, tripped: str) -> WatchReport | None:
    """Return the report of the earliest bad number in a record; None if it shows none."""
    with record.following():
        report = _Search(record, tripped).find()
    return None if report is None else replace(report, evidence=(*report.evidence, *record.remarks))


class _Search:
    def __init__(self, record: StepRecord, tripped: str):
        self._record = record
        self._numbers = record.numbers
        self._tripped = tripped
        self._tensors: dict[int, Tensor] = {}
        for op in record.ops:
            self._tensors.update(zip(op.inputs, op.operands, strict=False))
            self._tensors.update(zip(op.outputs, op.results, strict=False))
        self._tensors.update({value.id: value.tensor for value in record.held if value.id is not None})
        for output in self._targets:
            if output.id is not None:
                self._tensors.setdefault(output.id, output.tensor)
        self._bad = {key for key, x in self._tensors.items() if self._is_bad(x)}
        self._masks = self._find_masks()

    @property
    def _targets(self) -> list[NamedValue]:
        return [*self._record.outputs, *([self._record.loss] if self._record.loss is not None else [])]

    def find(self) -> WatchReport | None:
        for target in self._targets:
            if target.id in self._bad and target.id not in self._masks:
                return self._origin({target.id}, target)
        if self._record.loss is not None and self._record.loss.id is not None:
            loss = self._record.loss
            ones = self._numbers.like(np.ones(tuple(loss.tensor.shape)), loss.tensor)
            report = self._find_gradient({self._record.loss.id: ones}, loss)
            if report is not None:
                return report
        # What arrived at an output is the sum of what came from behind it and from other outputs, as where a model
        # returns its loss and the logits that it is of.
        arrived = [(self._record.outputs[position], g) for position, g in sorted(self._record.cotangents.items())]
        totals = {output.id: g for output, g in arrived if output.id is not None}
        bad = [(output, g) for output, g in arrived if self._is_bad(g)]
        inside = self._bad_gradients({}, totals)[0] if bad else {}
        for output, g in bad:
            if output.id not in inside:
                place, value = self._element(output.name, g)
                return WatchReport.of_cause(self._tripped, "outside", place, value, in_gradient=True)
        return self._find_gradient({}, self._record.outputs[0], totals) if totals else None

    def _origin(self, values: set[int], target: NamedValue) -> WatchReport:
        """Walk back from values that are not finite to what made the first of them."""
        wanted, first = set(values), None
        for op in reversed(self._record.ops):
            if wanted.isdisjoint(op.outputs):
                continue
            sources = {value for value in op.inputs if value in self._bad}
            if sources and sources <= self._masks and not set(op.outputs) <= self._masks:
                first, sources = op, set()  # it makes something worse than a mask of the mask
            wanted |= sources - self._masks or sources
            first = first if sources else op
        for value in self._record.held:
            if value.id in wanted:
                reader = next((op for op in self._record.ops if value.id in op.inputs), Op("the model"))
                return self._held(value, reader)
        read = {value for op in self._record.ops if op.outputs for value in op.inputs}
        unread = [value for value in self._record.held if value.id not in read and self._is_bad(value.tensor)]
        made = {value for op in self._record.ops if op.operands or not op.from_python for value in op.outputs}
        for given in sorted(wanted - made):  # a tensor from elsewhere that the code holds, or one of plain numbers
            user = next((op for op in self._record.ops if given in op.inputs), None)
            if user is not None:
                if unread:  # what reads it, and makes the tensor, cannot be followed
                    return self._held(unread[0], user)
                place, number = self._element(f"an input of {user.operation}", self._tensors[given])
                site = {"where": user.where, "module": user.module}
                return WatchReport.of_cause(self._tripped, "bad-input", place, number, **site)
        if first is None:
            return WatchReport.of_cause(self._tripped, "unseen", None, None)
        result = next(value for value in first.outputs if value in self._bad)
        place, number = self._element(self._name(result, first), self._tensors[result])
        if result in self._record.updates:
            return self._update(first, result, target)
        if self._masks.intersection(first.inputs) and not self._made_of_scalars(first):
            site = {"where": first.where, "module": first.module, "operation": first.operation}
            return WatchReport.of_cause(self._tripped, "masked-row", place, number, **site)
        scalars = [x for x in first.scalars if not math.isfinite(x)]
        if scalars:
            site = {"where": first.where, "module": first.module, "operation": first.operation}
            text = f"a number given to {first.operation}"
            return WatchReport.of_cause(self._tripped, "bad-input", text, scalars[0], **site)
        start = next((value for value in first.inputs), result)
        path = DataPath(OpGraph([first], start, result, self._record.connected, self._record.hints))
        finding = why_nonfinite(path, Evidence(flags=lambda: {first: finite_flags(first, self._numbers)}, finite=False))
        finding.evidence = self._inputs_at(first, result)
        report = self._report(finding, path, place, number)
        if report.cause in ("overflow", "singular") and not MAPPED.isdisjoint([first.op_type, *first.inner]):
            clause = f"it comes from inside of {first.operation}, which runs as one operation on all devices"
            return replace(report, cause=None, clause=clause, fix=None)
        return replace(report, clause=NO_VALUE.format(first.operation)) if report.cause == "singular" else report

    def _held(self, value: NamedValue, reader: Op) -> WatchReport:
        """Report a number that is bad before anything runs."""
        place, number = self._element(value.name, value.tensor)
        site = {"where": reader.where, "module": reader.module}
        return WatchReport.of_cause(self._tripped, HELD[value.kind], place, number, **site)

    def _update(self, op: Op, result: int, target: NamedValue) -> WatchReport:
        """Report an update that made a bad number, with what was held about the element before."""
        index = first_bad(self._numbers.array(self._tensors[result]))
        shape = tuple(self._tensors[result].shape)
        index = index if tuple(target.tensor.shape) == shape else first_bad(self._numbers.array(target.tensor))
        shape = tuple(target.tensor.shape)
        state = {
            held.name: float(np.real(self._numbers.array(held.tensor)[index]))
            for held in self._record.held
            if held.kind == "parameter" and tuple(held.tensor.shape) == shape
        }
        value = bad_float(self._numbers.array(target.tensor)[index])
        site = {"where": op.where, "operation": op.operation}
        return WatchReport.of_cause(self._tripped, "update", place_text(target.name, index), value, state=state, **site)

    def _bad_gradients(
        self, seeds: Mapping[int, Tensor], totals: Mapping[int, Tensor]
    ) -> tuple[dict[int, Tensor], dict[Op, CotangentSizes] | None]:
        """Return the gradients inside of the model that are not finite, and the sizes of all at each operation."""
        gradients: dict[int, Tensor] = {}

        def see(value: int, g: Tensor) -> None:
            if self._is_bad(g):
                gradients[value] = g

        record = self._record
        sizes = pull_cotangents(record.ops, record.connected, dict(seeds), self._numbers, see=see, totals=totals)
        return gradients, sizes

    def _find_gradient(
        self, seeds: Mapping[int, Tensor], target: NamedValue, totals: Mapping[int, Tensor] = MappingProxyType({})
    ) -> WatchReport | None:
        ops, numbers = self._record.ops, self._numbers
        gradients, sizes = self._bad_gradients(seeds, totals)
        if sizes is None or not gradients:
            return None
        source = min(gradients)
        path = DataPath(OpGraph(ops, source, target.id or 0, self._record.connected, self._record.hints))
        flags = {op: finite_flags(op, numbers) for op in ops if op.operands}
        finding = why_nonfinite(path, Evidence(flags=lambda: flags, cotangents=lambda: sizes))
        op = finding.op
        if op is None:
            return None
        # What is not finite in the forward is earlier than any gradient, also where a mask or a saturated function
        # takes it out of the results again.
        earlier = {*path.ancestors(op), *op.outputs} & self._bad - self._masks
        if earlier:
            return self._origin(earlier, target)
        value = next((value for value in op.inputs if value in gradients), None)
        if value is None:
            return None
        maker = next((other for other in ops if value in other.outputs), None)
        place, number = self._element(self._name(value, maker), gradients[value])
        index = first_bad(numbers.array(gradients[value]))
        at = numbers.array(self._tensors[value])[index] if value in self._tensors else None
        finding.evidence += [] if at is None else [f"the value there is {float(np.real(at))!r}"]
        return self._report(finding, path, place, number, in_gradient=True)

    def _report(
        self, finding: CauseFinding, path: DataPath, place: str, value: float, in_gradient: bool = False
    ) -> WatchReport:
        names = {"of": "output", "wrt": place}
        diagnosis = Diagnosis.made("nonfinite", finding, path, self._record.framework, **names)
        return WatchReport.of_diagnosis(self._tripped, diagnosis, place, value, in_gradient=in_gradient)

    def _find_masks(self) -> set[int]:
        """Return the values whose infinities are there to mask something.

        They are negative, and come from a buffer, an argument that is called a mask or a bias, or a plain number.
        """
        masks = set()
        for held in self._record.held:
            named = held.kind == "buffer" or any(word in held.name.lower() for word in ("mask", "bias"))
            if held.id in self._bad and held.kind != "parameter" and named and self._is_mask(held.tensor):
                masks.add(held.id)
        made = {value for op in self._record.ops for value in op.outputs}
        known = {held.id for held in self._record.held}
        # A single number in the code, as where a maximum starts from.
        masks |= {
            value
            for value in self._bad - made - known
            if not self._numbers.array(self._tensors[value]).shape and self._is_mask(self._tensors[value])
        }
        for op in self._record.ops:
            bad = [value for value in op.outputs if value in self._bad]
            sources = [value for value in op.inputs if value in self._bad]
            chosen = self._made_of_scalars(op) or op.from_python
            if bad and set(sources) <= masks and (sources or chosen):
                masks.update([value for value in bad if self._is_mask(self._tensors[value])])
        return masks

    @staticmethod
    def _made_of_scalars(op: Op) -> bool:
        return op.operation in SELECTING or any(math.isinf(x) for x in op.scalars)

    def _is_mask(self, x: Tensor) -> bool:
        array = self._numbers.array(x)
        return not np.iscomplexobj(array) and not (np.isnan(array) | (array == np.inf)).any()

    def _is_bad(self, x: Tensor) -> bool:
        return self._numbers.is_differentiable(x) and not math.isfinite(self._numbers.size(x))

    def _element(self, name: str, x: Tensor) -> tuple[str, float]:
        """Return the place and the value of the first element that is not finite."""
        element = find_nonfinite([(name, x)], self._numbers)
        assert element is not None
        return element.place, element.value

    def _name(self, value: int, maker: Op | None) -> str:
        for known in (*self._record.held, *self._record.outputs):
            if known.id == value and known.kind != "output":
                return known.name
        if value in self._record.names:
            return self._record.names[value]
        outputs = [known.name for known in self._record.outputs if known.id == value]
        return outputs[0] if outputs else maker.operation if maker is not None else "its input"

    def _inputs_at(self, op: Op, result: int) -> list[str]:
        """Return what an operation got at the bad element, where its inputs have the shape of its result."""
        index = first_bad(self._numbers.array(self._tensors[result]))
        shape = tuple(self._tensors[result].shape)
        at = [
            float(np.real(self._numbers.array(x)[index]))
            for x in op.operands
            if tuple(x.shape) == shape and self._numbers.is_differentiable(x)
        ]
        return [f"it got {', '.join(map(repr, at))} there"] if at else []
