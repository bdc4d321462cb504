"""Find the operation to blame for a gradient that is missing, zero or not finite, and the cause, from an `OpGraph`.

No framework is involved, only operations, values and sizes. `why_unconnected` looks for where the path was cut,
`why_nonfinite` for the operation at which infinity or NaN appears. `why_zero` compares two sweeps: forwards go the
elements that can move with the chosen ones, at whatever numbers; backwards goes the gradient of the target. An
operation whose outputs have elements with both, and whose inputs have none, is where the derivative was lost.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np

from elementgrad._explain.causes import (
    ADDITIONS,
    CAUSE_BY_OPERATION,
    DIVISIONS,
    ELSEWHERE,
    EMPTY,
    GROWING,
    MATRIX_PRODUCTS,
    OWN_MASK,
    SELECTING,
    SHARES,
    SINGULAR,
)
from elementgrad._explain.kinds import PADDING
from elementgrad._explain.path import CauseFinding, DataPath
from elementgrad._explain.trace import CotangentSizes, FiniteFlags, Op, ReachOverlap, Tangents, TangentSizes

DECISIVE_CAUSES = ("not-tracked", "integer", "freed-graph")
"""Hints of these causes settle why there is no path."""
MASKING_CAUSES = frozenset(
    "masked unused not-selected overwritten dropped clamped dead-relu row-not-used step-function".split()  # noqa: SIM905
)
"""Elements are taken out of a value, so that no gradient comes back to them."""
FLAT_CAUSES = ("discrete", "step-function")
"""Ends of a path at which no slope is lost, since there is none."""
UNRELATED_CAUSES = ("unused", "row-not-used")
"""The value has nothing to do with the elements."""
SELECTION_CAUSES = (*UNRELATED_CAUSES, "not-selected")
"""Other elements are taken, which explains nothing where another path ends too."""
CONSEQUENT_CAUSES = ("stationary", "masked", "kink")
"""They may only follow from an earlier zero: its square is flat, and so is what it multiplies."""
MAYBE_UNDERFLOW = (None, "masked", "cancelled")
"""A number that is too small for its precision looks like these."""
BRANCHES = "it only decides which branch the code takes"
ROUNDING = 64.0
"""Up to so many units of rounding count as nothing where sums cancel."""


def unknown() -> None:
    """Return nothing, for evidence that there is none of."""


@dataclass(frozen=True)
class Evidence:
    """The facts that can be learned of a gradient that is zero or not finite.

    Each function takes more runs, of operations or of the user's function, so that it is called only where its answer
    decides. It returns None if that is unknown.
    """

    flags: Callable[[], Mapping[Op, FiniteFlags] | None] = unknown
    tangents: Callable[[], Tangents | None] = unknown
    cotangents: Callable[[], Mapping[Op, CotangentSizes] | None] = unknown
    overlap: Callable[[], ReachOverlap | None] = unknown
    """Finds where elements that can move have a gradient."""
    precise: Callable[[], float | None] = unknown
    """Computes the size of the gradient in higher precision."""
    moves: Callable[[], bool | None] = unknown
    """Tries whether the target moves with the chosen elements."""
    overflows: Callable[[Op], bool] = lambda op: False
    """Tells whether an operation gives finite numbers in higher precision."""
    finite: bool = True
    """True if the value itself is finite."""
    rounding: bool = False
    """True if the gradient is mere rounding, and not exactly zero."""
    epsilon: float = 0.0
    """The precision of the numbers."""


def describe(op: Op) -> str:
    return f"{op.operation} at {op.where}" if op.where else op.operation


def why_unconnected(path: DataPath, moves: bool | None) -> CauseFinding:
    """Find why the framework's derivative has no path. `moves` is True if the target moves with the elements."""
    graph = path.graph
    readers = [op for op in graph.ops if graph.source in op.inputs]
    for hint in graph.hints:
        if hint.cause in DECISIVE_CAUSES or (hint.cause == "no-rule" and not graph.ops):
            finding = CauseFinding.of_hint(hint)
            finding.op = finding.op or next(iter(readers), None)
            return finding
    cuts, exits = path.cuts(), path.exits()
    if path.reaches_target and not cuts:
        return _custom_rule(path) or CauseFinding(None, None, ["every recorded operation passes gradients on"])
    if cuts or moves:
        return _moved_beside(path, cuts, exits if moves else [])
    branch = _only_branch(path, exits)
    if branch is not None:
        evidence = [f"{BRANCHES}, in {describe(branch)}"]
        if moves is None:
            return CauseFinding(None, branch, [*evidence, "it was not tried whether the output changes with it"])
        return CauseFinding("unused", None, [*evidence, "the output did not change with it"])
    if exits and moves is None:
        if path.comes_back(exits[0]):
            return _left_framework(exits)
        evidence = ["its values left the framework, and it was not tried whether they are used again"]
        return CauseFinding(None, exits[0], evidence)
    opaque = path.opaque_finding()
    if opaque is not None:
        return opaque
    if not readers:
        return CauseFinding("unused", None, ["no operation uses it"])
    evidence = [f"{describe(readers[0])} uses it, but the result is not used for this output"]
    return CauseFinding("unused", None, evidence, variant=ELSEWHERE)


def _moved_beside(path: DataPath, cuts: Sequence[Op], exits: Sequence[Op]) -> CauseFinding:
    """Return the finding for a target that moves with the elements by a way that is no path of the derivative."""
    if cuts:
        return cut_by(cuts, exits)
    branch = _only_branch(path, exits)
    if branch is not None:
        return CauseFinding("discrete", branch, [BRANCHES])
    if exits:
        return _left_framework(exits)
    imports = [op for op in path.graph.ops if op.from_python and not op.hidden]
    imports = [op for op in imports if not path.to_target.isdisjoint(op.outputs)]
    if imports:  # its numbers left in a way that is not seen, such as a function of SciPy
        return _left_framework([replace(op, operation="numpy") for op in imports])
    return CauseFinding(None, None, ["the output changes with it, but no recorded operation leads there"])


def cut_by(cuts: Sequence[Op], exits: Sequence[Op]) -> CauseFinding:
    """Return the finding for a path that is cut: blame one operation, and list the others."""
    known = [op for op in cuts if op.cut_cause]
    # Comparisons are mostly there for masks, and hidden operations are to blame only where nothing else is.
    known.sort(key=lambda op: (op.hidden, op.cut_cause == "discrete"))
    op = known[0] if known else cuts[0]
    evidence = [op.note] if op.note else []
    others = [other for other in (*cuts, *exits) if other is not op]
    if op.cut_cause is None:
        evidence.append("a connected value goes in and one without derivatives comes out, for no reason that is known")
    return CauseFinding(op.cut_cause, op, evidence, others)


def _only_branch(path: DataPath, exits: Sequence[Op]) -> Op | None:
    """Return the operation that decides which way the code takes, if values leave the framework for that alone."""
    if not exits or not all(op.branches for op in exits):
        return None
    return (path.cuts(path.ancestors(exits[0])) or exits)[0]


def _custom_rule(path: DataPath) -> CauseFinding | None:
    """Blame a rule of the user's: no other operation can be on the path and give no derivative."""
    ops = [hint.op for hint in path.graph.hints if hint.cause == "custom-rule" and hint.op]
    ops = [op for op in ops if path.is_between(op)]
    if len(ops) == 1:
        return CauseFinding("custom-rule", ops[0], ["its rule gives None"])
    several = Op("one of several rules")
    return CauseFinding("custom-rule", several, [f"it may be {describe(op)}" for op in ops]) if ops else None


def _left_framework(exits: Sequence[Op]) -> CauseFinding:
    exits = [op for op in exits if not op.branches]
    if len({op.where for op in exits}) == 1:
        return CauseFinding("left-framework", exits[0], [exits[0].note] if exits[0].note else [])
    several = Op("one of several ways", module=exits[0].module)
    return CauseFinding("left-framework", several, [f"they leave in {describe(op)}" for op in exits])


def why_nonfinite(path: DataPath, evidence: Evidence) -> CauseFinding:
    """Find why the gradient is not finite. Where several operations may be to blame, those count that have tangents."""
    flags = evidence.flags() or {}
    if not evidence.finite and flags:
        op = _first_nonfinite(path, flags, {path.graph.target})
        if op is None:
            return CauseFinding(None, None, ["the value itself is not finite, and so are numbers that were given"])
        grows = op.operation in GROWING and op in flags and flags[op].overflows
        singular = op.operation in SINGULAR and not grows and not evidence.overflows(op)
        cause = "singular" if singular or (op in flags and flags[op].undefined) else "overflow"
        for hint in path.graph.hints:
            if hint.cause == "out-of-range" and hint.op is op:
                return CauseFinding.of_hint(hint)
        return CauseFinding(cause, op, ["the value itself is not finite from there on"])
    cotangents = (evidence.cotangents() if evidence.finite else None) or {}
    suspects = [
        op for op, size in cotangents.items() if np.isfinite(size.at_outputs) and not np.isfinite(size.at_inputs)
    ]
    tangents = evidence.tangents() if len(suspects) > 1 else None
    if tangents is not None:
        suspects = [op for op in suspects if op in tangents.sizes] or suspects
    hooks = [hint for hint in path.graph.hints if hint.cause == "hook"] if evidence.finite else []
    if not suspects:
        if hooks:
            return CauseFinding.of_hint(hooks[0])
        return CauseFinding(None, None, ["no recorded operation is the first that is not finite"])
    suspects.sort(key=lambda op: op.operation in SINGULAR)  # zero times infinity comes from what made infinity
    op = suspects[-1]
    sizes = cotangents[op]
    if op in flags and not flags[op].inputs:
        return _nonfinite_input(op, _first_nonfinite(path, flags, set(op.inputs)))
    if sizes.where_nonfinite == 0:
        masked = _is_masked_later(path, op, cotangents)
        cause = "masked-branch" if masked else "singular" if op.operation in SINGULAR else "overflow"
        return CauseFinding(cause, op, ["the gradient that arrives there is zero, and zero times infinity is NaN"])
    singular = op.operation in SINGULAR and not evidence.overflows(op)
    known = op.operation in SINGULAR or op.operation in CAUSE_BY_OPERATION
    if not known and hooks:
        return CauseFinding.of_hint(hooks[0])
    seen = f"the gradient is {sizes.at_outputs:.3g} at its output and {sizes.at_inputs} at its input"
    return CauseFinding("singular" if singular else "overflow" if known else None, op, [seen])


def _first_nonfinite(path: DataPath, flags: Mapping[Op, FiniteFlags], values: set[int]) -> Op | None:
    """Walk back from `values` along values that are not finite, to the operation that made the first of them."""
    first = None
    for op in reversed(path.graph.ops):
        flag = flags.get(op)
        if flag is not None and not flag.outputs and not values.isdisjoint(op.outputs):
            first = op
            if flag.inputs:
                return op
            values |= set(op.inputs)
    return first if first is not None and not first.inputs else None


def _nonfinite_input(op: Op, maker: Op | None) -> CauseFinding:
    """Blame a value that is not finite, which a mask takes out of the target and not out of the gradient."""
    if maker is None:
        return CauseFinding("masked-branch", op, ["the arguments contain values that are not finite"])
    return CauseFinding(
        "masked-branch", maker, [f"its result is not finite, and {describe(op)} uses it in the gradient"]
    )


def _is_masked_later(path: DataPath, op: Op, cotangents: Mapping[Op, CotangentSizes]) -> bool:
    """Return True if the outputs are masked later, and not just multiplied by what is zero there, as in a square.

    If no gradient arrives at all, the next operation that gets one decides. If some elements get none, any operation
    on their way does.
    """
    downstream: set[int] = set(op.outputs)
    deciding = []
    for later in path.graph.ops:
        if later is op or downstream.isdisjoint(later.inputs):
            continue
        alive = later in cotangents and not cotangents[later].all_zero
        deciding += [later] if alive else []
        if not (cotangents[op].all_zero and alive):
            downstream.update(later.outputs)
    return any(_masks_elements(path, later, downstream) for later in deciding)


def _masks_elements(path: DataPath, op: Op, downstream: AbstractSet[int]) -> bool:
    """Return True if an operation takes elements out, by its name; a product does unless its other factor moves too."""
    if op.operation in DIVISIONS:
        return False
    cause = "masked" if op.operation in MATRIX_PRODUCTS else CAUSE_BY_OPERATION.get(op.operation)
    if cause == "masked" and op.operation not in SELECTING:
        others = [value for value in op.inputs if value not in downstream]
        return not any(value in path.graph.connected for value in others) and len(set(op.inputs) & downstream) < 2
    return cause in MASKING_CAUSES


def why_zero(path: DataPath, evidence: Evidence) -> CauseFinding:
    """Find why the gradient is zero."""
    tangents = evidence.tangents()
    if tangents is None:
        return _verify_unrelated(path, _search_backwards(path, evidence), evidence, None)
    sizes = {op: size for op, size in tangents.sizes.items() if path.is_between(op)}
    largest = max([size.at_outputs for size in sizes.values()], default=0.0)
    if tangents.reached > ROUNDING * evidence.epsilon * largest:
        finding = _search_backwards(path, evidence)
        finding.evidence.append("in forward mode the derivative is not zero")
        return finding
    return _VanishedTangent(path, sizes, tangents.elsewhere, evidence).find()


class _VanishedTangent:
    """Tangents that were followed forwards, and do not arrive at the target."""

    def __init__(self, path: DataPath, sizes: Mapping[Op, TangentSizes], elsewhere: bool, evidence: Evidence):
        self._path = path
        self._graph = path.graph
        self._sizes = sizes
        self._elsewhere = elsewhere
        self._evidence = evidence
        self._overlap = evidence.overlap()

    def find(self) -> CauseFinding:
        ended = [op for op, size in self._sizes.items() if size.at_inputs > 0 and size.at_outputs == 0]
        lost = self._ops_losing_gradient()
        both = [op for op in ended if op in lost]
        end = self._most_telling(ended) if ended else None
        exact = ended and not self._evidence.rounding
        rounded = [] if exact else [op for op, size in self._sizes.items() if self._is_rounding(size)]
        if both:
            return self._finding_at(self._most_telling(both), ended)
        inconclusive = (None, *SELECTION_CAUSES, *CONSEQUENT_CAUSES)
        if end is not None and not self._path.is_cut(end) and self._cause(end) not in inconclusive:
            return self._finding_at(end, ended)  # nothing is left of it, and the operation says why
        if rounded and (not lost or CAUSE_BY_OPERATION.get(rounded[-1].operation) == "cancelled"):
            return CauseFinding("cancelled", rounded[-1], ["what remains is rounding"], ended)
        if lost and not (end is not None and self._may_explain(end, self._most_telling(lost))):
            return self._finding_at(self._most_telling(lost), lost)
        if end is not None:
            return self._finding_at(end, ended)
        used = [op for op, size in self._sizes.items() if size.at_outputs > 0]
        masking = [op for op in used if op.operation in OWN_MASK and not self._is_query(op)]
        if masking:
            return CauseFinding("masked", masking[-1], ["other elements of its result depend on it"])
        if self._elsewhere:
            finding = CauseFinding(
                "unused", None, ["other elements of the output depend on it, but not those that were named"]
            )
            return _verify_unrelated(self._path, finding, self._evidence, self._overlap)
        if used:
            finding = CauseFinding("unused", used[-1], ["that part of its result is not used"])
            return _verify_unrelated(self._path, finding, self._evidence, self._overlap)
        return self._path.opaque_finding() or CauseFinding(None, None, ["no recorded operation stops it"])

    def _ops_losing_gradient(self) -> list[Op]:
        """Return the operations with a gradient at outputs that can move, and with none at their inputs."""
        overlap = self._overlap
        if overlap is None or self._graph.source in overlap.alive:
            return []
        lost = [
            op
            for op in self._graph.ops
            if not overlap.alive.isdisjoint(op.outputs) and overlap.alive.isdisjoint(op.inputs)
        ]
        return [self._mask_before_softmax(op) or op for op in lost if not overlap.dependent.isdisjoint(op.inputs)]

    def _mask_before_softmax(self, op: Op) -> Op | None:
        """Return the mask in front of a softmax, which is flat where the mask has put its lowest number."""
        if op.operation not in SHARES:
            return None
        return next((maker for maker in self._makers(op) if maker.operation in SELECTING), None)

    def _mask_addition(self, op: Op) -> Op | None:
        """Return the operation that adds a mask to the input of a softmax."""
        connected = set(self._graph.connected)
        additions = [
            maker for maker in self._makers(op) if maker.operation in ADDITIONS and not set(maker.inputs) <= connected
        ]
        return additions[-1] if additions else None

    def _makers(self, op: Op) -> list[Op]:
        return [other for other in self._graph.ops if not set(other.outputs).isdisjoint(op.inputs)]

    def _may_explain(self, end: Op, lost: Op) -> bool:
        """Return True if a zero made by `end` may be why `lost` loses the gradient."""
        if self._path.is_cut(end) or self._cause(end) in (*UNRELATED_CAUSES, "kink"):  # a kink is not flat
            return False
        # A factor of zero may also be why a rectifier is at or below zero; a matrix has zeros because of one.
        factor = self._cause(end) == "masked" and end.operation not in MATRIX_PRODUCTS
        dead = factor and self._cause(lost) == "dead-relu"
        follows = dead or self._cause(lost) in CONSEQUENT_CAUSES
        return follows and not self._path.ancestors(lost).isdisjoint(end.outputs)

    def _is_rounding(self, size: TangentSizes) -> bool:
        return 0 < size.at_outputs <= ROUNDING * self._evidence.epsilon * size.at_inputs

    def _most_telling(self, ops: Sequence[Op]) -> Op:
        """Choose the operation that explains most: prefer lost derivatives to cuts and to selections of elements."""
        rank = {op: (self._path.is_cut(op), self._cause(op) in SELECTION_CAUSES) for op in ops}
        best = min(rank.values())
        return self._path.most_downstream([op for op in ops if rank[op] == best])

    def _cause(self, op: Op) -> str | None:
        if self._is_emptied(op):
            return "unused"
        size = self._sizes.get(op)
        if size is not None and size.cause is not None:
            return size.cause
        cause = (op.cut_cause if self._path.is_cut(op) else None) or _usual_cause(op)
        if cause == "masked" and self._is_square_of_kink(op):
            return "stationary"
        return "masked" if cause == "cancelled" and op.operation in MATRIX_PRODUCTS else cause

    def _is_query(self, op: Op) -> bool:
        """Return True if only queries of an attention move: each has a result of its own, which no mask removes."""
        moving = self._overlap.dependent if self._overlap is not None else set(op.inputs)
        return op.operation.endswith("attention") and moving.isdisjoint(op.inputs[1:])

    def _is_emptied(self, op: Op) -> bool:
        """Return True if an operation has no elements in its results, and not because it selects none."""
        empty = bool(op.results) and all(0 in tuple(result.shape) for result in op.results)
        return empty and not self._path.is_cut(op) and _usual_cause(op) not in SELECTION_CAUSES

    def _is_square_of_kink(self, op: Op) -> bool:
        """Return True if an operation multiplies the output of a kink by another moving value.

        At a kink the slope is taken to be zero, so the factor seems not to move.
        """
        if self._overlap is None or op.operation in (*SELECTING, *OWN_MASK):
            return False
        moving = self._overlap.dependent & set(self._graph.connected)
        kinks = [
            other
            for other, size in self._sizes.items()
            if size.at_inputs > 0 and size.at_outputs == 0 and _usual_cause(other) == "kink"
        ]
        ancestors = self._path.ancestors(op)
        return set(op.inputs) <= moving and any(not ancestors.isdisjoint(kink.outputs) for kink in kinks)

    def _finding_at(self, op: Op, ended: Sequence[Op]) -> CauseFinding:
        cause = self._cause(op)
        if cause == PADDING:
            return CauseFinding("row-not-used", replace(op, operation=PADDING))
        if cause == "masked" and op.operation in SHARES:
            evidence = [f"it is so low that {op.operation} gives it no weight"]
            return CauseFinding("masked", self._mask_addition(op) or op, evidence)
        if self._moves_only_by_cuts(op):
            ancestors = self._path.ancestors(op)
            cuts = [cut for cut in _dependent_cuts(self._path, self._overlap) if not ancestors.isdisjoint(cut.outputs)]
            if cuts:
                return cut_by(cuts, [])
        if cause in MAYBE_UNDERFLOW and _usual_cause(op) != "saturated":
            scale = max([size.at_outputs for size in self._sizes.values()], default=0.0)
            cause = "underflow" if _survives_in_float64(self._evidence.precise(), cause, scale) else cause
        noted = op.note and (self._path.is_cut(op) or not op.cut_cause)
        finding = CauseFinding(cause, op, [op.note] if noted else [], [other for other in ended if other is not op])
        if self._is_emptied(op):
            finding.variant = EMPTY
        return _verify_unrelated(self._path, finding, self._evidence, self._overlap)

    def _moves_only_by_cuts(self, op: Op) -> bool:
        """Return True if every input that can move does so by ways that are cut."""
        dependent = () if self._overlap is None else self._overlap.dependent
        return not any(value in dependent and value in self._graph.connected for value in op.inputs)


def _search_backwards(path: DataPath, evidence: Evidence) -> CauseFinding:
    """Blame the last operation, going backwards, with a gradient at its outputs and none at its inputs."""
    graph, cotangents = path.graph, evidence.cotangents()
    for hint in graph.hints:
        if hint.cause in ("hook", "custom-rule") and cotangents is None:
            return CauseFinding.of_hint(hint)
    ended = [
        op
        for op, size in (cotangents or {}).items()
        if path.is_between(op) and size.at_outputs > 0 and size.at_inputs == 0
    ]
    if not ended:
        hooks = [hint for hint in graph.hints if hint.cause in ("hook", "out-of-range")]
        if hooks:
            return CauseFinding.of_hint(hooks[0])
        join = _join_of_gradients(path, cotangents or {})
        if join is not None:
            return CauseFinding("cancelled", join, ["gradients come back by several ways, and add up to zero"])
        return CauseFinding("underflow" if evidence.precise() else None, None, [])
    op = ended[-1]
    for hint in graph.hints:
        if hint.cause == "out-of-range" and hint.op is op:
            return CauseFinding.of_hint(hint)
    cause = _usual_cause(op)
    survives = cause in MAYBE_UNDERFLOW and _survives_in_float64(evidence.precise(), cause, 1.0)
    return CauseFinding("underflow" if survives else cause, op)


def _join_of_gradients(path: DataPath, cotangents: Mapping[Op, CotangentSizes]) -> Op | None:
    """Return the first operation that all readers of the source with a gradient lead to, if they are several."""
    graph = path.graph
    readers = [
        op
        for op, size in cotangents.items()
        if graph.source in op.inputs and path.is_between(op) and 0 < size.at_inputs < float("inf")
    ]
    for op in graph.ops if len(readers) > 1 else ():
        if not path.is_between(op):
            continue
        ancestors = path.ancestors(op)
        if all(reader is op or not ancestors.isdisjoint(reader.outputs) for reader in readers):
            return op
    return None


def _verify_unrelated(
    path: DataPath, finding: CauseFinding, evidence: Evidence, overlap: ReachOverlap | None
) -> CauseFinding:
    """Keep a finding that elements are not used, or masked, only if the target does not move with them all the same."""
    unrelated, op = finding.cause in UNRELATED_CAUSES, finding.op
    cuts = _dependent_cuts(path, overlap)
    steep = [cut for cut in cuts if cut.cut_cause not in FLAT_CAUSES]
    if not unrelated and (finding.cause not in (*SELECTION_CAUSES, "masked") or not steep):
        return finding
    cuts = steep or cuts
    exits = [op for op in path.exits() if overlap is None or not overlap.dependent.isdisjoint(op.inputs)]
    exits = exits if unrelated and not steep else []
    moved = evidence.moves()
    if moved is None and (cuts or exits):
        ends = [end for end in (op, *cuts, *exits) if end is not None]
        return CauseFinding(None, None, [f"it ends in {describe(end)}" for end in ends])
    if not moved:
        return finding
    if op is not None and cuts and all(_is_boolean_index(cut, op) for cut in cuts):
        return CauseFinding("masked", op, ["a mask selects other elements"])
    return _moved_beside(path, cuts, exits)


def _dependent_cuts(path: DataPath, overlap: ReachOverlap | None) -> list[Op]:
    return [cut for cut in path.cuts() if overlap is None or not overlap.dependent.isdisjoint(cut.inputs)]


def _is_boolean_index(cut: Op, op: Op) -> bool:
    """Return True if `cut` makes booleans by which `op` takes elements."""
    return cut.cut_cause == "discrete" and cut.note.startswith("bool") and not set(cut.outputs).isdisjoint(op.inputs)


def _survives_in_float64(precise: float | None, cause: str | None, scale: float) -> bool:
    """Return True if there is a gradient in float64, beyond the rounding of the parts of a sum that cancels."""
    least = ROUNDING * sys.float_info.epsilon * scale if cause == "cancelled" else 0.0
    return precise is not None and precise > least


def _usual_cause(op: Op) -> str | None:
    return "custom-rule" if op.custom_gradient else CAUSE_BY_OPERATION.get(op.operation)
