"""Plans whose regions have fixed sizes, so that one compiled program serves all places.

Most values are needed in just the same part as the result that they are computed for, as in a chain of elementwise
operations. Such values are a group, and a plan is made of groups: `group_values` finds them once for a program, and
`place_groups` computes where they are for each element that is read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elementgrad._cone.boxes import Box, Interval, Shape, join, sizes
from elementgrad._cone.maps import Relation
from elementgrad._cone.plan import Cone, ConeStep, ProgramOp, ProgramValue, empty

NEIGHBOURS = 16
"""So many places next to each other are planned for together, as strides make them differ."""
MOST_WORK = 1.5
"""A template fits the borders too where that takes at most so many times the work."""


@dataclass(eq=False)
class ValueGroup:
    """Values of one shape that are always needed in the same part."""

    shape: Shape
    values: list[ProgramValue]
    needed_by: Sequence[tuple[int, Relation | None]] = ()
    """The groups that they are computed for, by their numbers; None for the same part."""


@dataclass
class Template:
    """Sizes of the parts of groups, by their numbers, that are enough for many places."""

    sizes: dict[int, Shape]
    steps: list[ConeStep] = field(default_factory=list)
    """The operations, with boxes of these sizes at some place."""
    pays: bool | None = None
    """True if a part of these sizes costs less than the whole; None until that was asked for."""


@dataclass
class RegionCone(Cone):
    """A cone whose boxes have the sizes of a template; only the sizes of those in `steps` are meant."""

    boxes: Sequence[Box] = ()
    """The part of each group."""
    template: Template = field(default_factory=lambda: Template({}))


def group_values(ops: Sequence[ProgramOp], of: ProgramValue) -> list[ValueGroup]:
    """Return the groups of all values that a value depends on, each behind those that it is needed by."""
    groups = [ValueGroup(of.shape, [of])]
    numbers = {of: 0}
    ways: dict[ProgramValue, dict[tuple[int, Relation | None], None]] = {}
    scalars: int | None = None

    def settle(value: ProgramValue) -> None:
        nonlocal scalars
        if value in numbers:
            return
        found = ways.pop(value)
        same = next(iter(found)) if len(found) == 1 else (0, ...)
        if value.shape == ():
            if scalars is None:
                scalars = len(groups)
                groups.append(ValueGroup((), []))
            numbers[value] = scalars
        elif same[1] is None:
            numbers[value] = same[0]
        else:
            numbers[value] = len(groups)
            groups.append(ValueGroup(value.shape, [], tuple(found)))
        groups[numbers[value]].values.append(value)

    for op in reversed(ops):
        needed = [(result, row) for result, row in zip(op.results, op.rule.relations, strict=True) if result in ways]
        if of in op.results:
            needed += [(of, op.rule.relations[list(op.results).index(of)])]
        for result, row in needed:
            assert result is not None
            settle(result)
            for operand, relation in zip(op.operands, row, strict=True):
                found = ways.setdefault(operand, {})
                if relation is not None:
                    found[numbers[result], None if relation.keeps_boxes else relation] = None
    for value in list(ways):
        settle(value)
    return groups


def place_groups(groups: Sequence[ValueGroup], box: Box, template: Template, grow: bool = False) -> list[Box] | None:
    """Return where the parts of groups are for a box of the first, in the sizes of a template.

    A template that is too small is made to fit with `grow`; otherwise None is returned.
    """
    have = template.sizes
    boxes: list[Box] = []
    for number, group in enumerate(groups):
        here: Box | None = None if number else box
        for by, relation in group.needed_by:
            need = boxes[by] if relation is None else relation.need(boxes[by])
            here = need if here is None else join(here, need)
        if here is None:
            here = empty(group.shape)
        mine, fixed = sizes(here), have.get(number)
        if mine != fixed:
            if fixed is None or any(size > most for size, most in zip(mine, fixed, strict=True)):
                if not grow:
                    return None
                fixed = have[number] = mine if fixed is None else tuple(map(max, mine, fixed))
            here = tuple(map(_stretch, here, fixed, group.shape))
        boxes.append(here)
    return boxes


def make_template(ops: Sequence[ProgramOp], groups: Sequence[ValueGroup], box: Box) -> Template:
    """Return sizes that are enough for a box, those next to it, and those at the ends if they need little more."""
    shape = groups[0].shape
    near = [*[_move(box, shape, by) for by in range(-NEIGHBOURS // 2, NEIGHBOURS // 2)], box]
    far = max(shape, default=0)
    ends = [_move(box, shape, by, axis) for by in (-far, far) for axis in (None, *range(len(shape)))]
    narrow = _grow(ops, groups, near, Template({}))
    wide = _grow(ops, groups, [*ends, box], Template(dict(narrow.sizes)))
    if not wide.steps:
        return narrow
    return wide if Cone(wide.steps).count_work() <= MOST_WORK * Cone(narrow.steps).count_work() else narrow


def _grow(ops: Sequence[ProgramOp], groups: Sequence[ValueGroup], boxes: Sequence[Box], template: Template) -> Template:
    """Return a template that is made to fit all boxes, if it can be, with steps for the last of them."""
    for _ in range(3):
        before = dict(template.sizes)
        for box in boxes:
            place_groups(groups, box, template, grow=True)
        if before == template.sizes:
            break
    parts = place_groups(groups, boxes[-1], template)
    if parts is not None:
        needed = map_values(groups, parts)
        found = [(op, [None if result is None else needed.get(result) for result in op.results]) for op in ops]
        template.steps = [ConeStep(op, (), boxes) for op, boxes in found if boxes.count(None) < len(boxes)]
    return template


def plan_with(groups: Sequence[ValueGroup], box: Box, template: Template) -> RegionCone | None:
    """Return the cone of a box, or None if it does not fit into the template."""
    boxes = place_groups(groups, box, template)
    return None if boxes is None else RegionCone(template.steps, map_values(groups, boxes), boxes, template)


def map_values(groups: Iterable[ValueGroup], boxes: Iterable[Box]) -> dict[ProgramValue, Box]:
    """Return the part of each value."""
    return {value: box for group, box in zip(groups, boxes, strict=True) for value in group.values}


def _move(box: Box, shape: Shape, by: int, only: int | None = None) -> Box:
    """Return a box of the same size that is moved along all axes, or one, as far as there is room."""
    moved = []
    for axis, (interval, size) in enumerate(zip(box, shape, strict=True)):
        start = interval.start + (by if only is None or only == axis else 0)
        start = min(max(start, 0), size - interval.size)
        moved.append(Interval(start, start + interval.size))
    return tuple(moved)


def _stretch(interval: Interval, size: int, whole_size: int) -> Interval:
    start = max(0, min(interval.start, whole_size - size))
    return Interval(start, start + size)
