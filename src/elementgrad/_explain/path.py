"""The path of data from source to target through an `OpGraph`, and the finding that a search along it ends with."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from elementgrad._explain.trace import Hint, Op, OpGraph


@dataclass
class CauseFinding:
    """A cause and the operation that it is about, as far as the evidence decides."""

    cause: str | None
    op: Op | None = None
    evidence: list[str] = field(default_factory=list)
    others: list[Op] = field(default_factory=list)
    """Further operations at which other paths end."""
    variant: str | None = None
    """Chooses the words for the cause in place of the operation, if there is something closer."""

    @classmethod
    def of_hint(cls, hint: Hint) -> "CauseFinding":
        """Return the finding for something that the backend knew at once."""
        evidence = [hint.evidence] if hint.evidence else []
        return cls(hint.cause, hint.op, evidence, variant=hint.variant)


class PathStep(str):
    """The name of an operation on a path, with the module and the line that it was called from."""

    site: str

    @classmethod
    def of(cls, op: Op, broken: bool) -> "PathStep":
        step = cls(f"{op.operation} (broken here)" if broken else op.operation)
        step.site = ", ".join([text for text in (f"in {op.module}" if op.module else "", op.where or "") if text])
        return step


class DataPath:
    """The operations of a graph that lie between source and target, by their data."""

    def __init__(self, graph: OpGraph):
        self.graph = graph
        self.from_source = {graph.source}
        """Values computed from the source, itself included."""
        for op in graph.ops:
            if not self.from_source.isdisjoint(op.inputs):
                self.from_source.update(op.outputs)
        self.to_target = {graph.target}
        """Values that the target is computed from, itself included."""
        for op in reversed(graph.ops):
            if not self.to_target.isdisjoint(op.outputs):
                self.to_target.update(op.inputs)

    @property
    def reaches_target(self) -> bool:
        """True if the target was computed from the source, with or without derivatives."""
        return self.graph.target in self.from_source

    def is_between(self, op: Op) -> bool:
        """Return True if data passes the operation on its way from source to target."""
        return not self.from_source.isdisjoint(op.inputs) and any(
            value in self.from_source and value in self.to_target for value in op.outputs
        )

    def is_cut(self, op: Op) -> bool:
        """Return True if no output of the operation is connected."""
        return not any(value in self.graph.connected for value in op.outputs)

    def cuts(self, needed: Collection[int] | None = None) -> list[Op]:
        """Return the operations at which paths end: a connected value goes in, and an unconnected one comes out.

        The latter is among the `needed` values; by default those that the target is computed from.
        """
        connected = self.graph.connected
        needed = self.to_target if needed is None else needed
        return [
            op
            for op in self.graph.ops
            if any(value in connected for value in op.inputs)
            and any(value in needed and value in self.from_source and value not in connected for value in op.outputs)
        ]

    def exits(self) -> list[Op]:
        """Return the operations by which values computed from the source left the framework."""
        return [
            op
            for op in self.graph.ops
            if op.cut_cause == "left-framework" and not self.from_source.isdisjoint(op.inputs)
        ]

    def comes_back(self, exit: Op) -> bool:
        """Return True if the target is computed from plain numbers that became a tensor after `exit`."""
        later = self.graph.ops[self.graph.ops.index(exit) :]
        return any(op.from_python and not self.to_target.isdisjoint(op.outputs) for op in later)

    def ancestors(self, op: Op) -> set[int]:
        """Return the values that an operation was computed from, its inputs included."""
        values = set(op.inputs)
        for earlier in reversed(self.graph.ops[: self.graph.ops.index(op)]):
            if not values.isdisjoint(earlier.outputs):
                values.update(earlier.inputs)
        return values

    def most_downstream(self, ops: Sequence[Op]) -> Op:
        """Return the last of several operations in their order if all others lead to it, and the first otherwise."""
        ancestors = self.ancestors(ops[-1])
        return ops[-1] if all(not ancestors.isdisjoint(op.outputs) for op in ops[:-1]) else ops[0]

    def opaque_finding(self) -> CauseFinding | None:
        """Return a finding without a cause if something reads the source that cannot be looked into."""
        for op in self.graph.ops:
            if op.opaque and not self.from_source.isdisjoint(op.inputs):
                return CauseFinding(None, op, [f"{op.operation} takes it, and cannot be looked into"])
        return None

    def operations(self, broken: Op | None = None) -> list[str]:
        """Return the names of the operations on one way from source to target, through `broken` if it is given."""
        if broken not in self.graph.ops:
            way = self._way_to(self.graph.target) if self.reaches_target else []
        else:
            assert broken is not None
            way = [*self._way_to(*[value for value in broken.inputs if value in self.from_source][:1]), broken]
            way += self._way_from(broken)
        return [PathStep.of(op, op is broken) for op in way if not op.hidden or op is broken]

    def _way_to(self, *values: int) -> list[Op]:
        """Return the operations of one way from the source to the first of `values`."""
        makers = {value: op for op in self.graph.ops for value in op.outputs}
        way: list[Op] = []
        ahead = list(values)
        while ahead and ahead[0] in makers and ahead[0] != self.graph.source:
            op = makers[ahead[0]]
            way.append(op)
            ahead = [value for value in op.inputs if value in self.from_source]
            ahead.sort(key=lambda value: value not in self.graph.connected)
        return way[::-1]

    def _way_from(self, op: Op) -> list[Op]:
        """Return the operations of one way from an operation to the target; none if there is no way."""
        way: list[Op] = []
        for later in self.graph.ops[self.graph.ops.index(op) + 1 :]:
            if not set(op.outputs).isdisjoint(later.inputs) and not self.to_target.isdisjoint(later.outputs):
                way.append(later)
                op = later
        return way
