"""Reads by cones: a recorded function in place of an evaluated one, of which every read runs the part that it needs.

`record` gives a `ConeLinearization`, a `Linearization` that the reads of `_read` use as any other.
"""

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import CodeType, MethodType
from typing import Any, NoReturn

import numpy as np

from elementgrad._backends.autodiff import Linearization, UnsupportedError, reason
from elementgrad._backends.base import Backend
from elementgrad._backends.reachable_state import ReachableState
from elementgrad._cleanup import defer, scope
from elementgrad._cone import cost
from elementgrad._cone.backend import RecordedProgram
from elementgrad._cone.boxes import Box, around, sizes, volume, whole
from elementgrad._cone.plan import Cone, NoConeError, UnbuiltError, plan_need
from elementgrad._names.arguments import option_error
from elementgrad._names.call import BoundCall, PartialCall, TensorRef
from elementgrad._place.selection import Selection
from elementgrad.errors import ElementgradError, FrameworkError

Tensor = Any
MAX_PICKED = 100_000
"""Selections of more elements are picked from a tensor of full size."""
MAX_CALLS = 64
"""Calls that are remembered of one function, the last ones."""

_functions: dict[int, tuple[weakref.ref[Any], OrderedDict[Hashable, None]]] = {}
"""By the id of the model, or of the code of a function, as models need not be hashable."""


def parse_cone(cone: Any) -> bool | None:
    """Return the option `cone`, checked."""
    if cone is not None and not isinstance(cone, bool):
        raise option_error("cone", cone, "is none of None, True and False; give one of them")
    return cone


def record(
    call: BoundCall, inputs: Sequence[TensorRef], outputs: Sequence[TensorRef], required: bool, is_built: bool = False
) -> "ConeLinearization | None":
    """Record a function without running it; where its layers have no variables yet, after a run that makes them.

    Args:
        call: the function with its arguments.
        inputs: the tensors by which it is differentiated.
        outputs: the tensors that were named in it.
        required: True to raise an error if it cannot be recorded; False to return None then, or if it has so many
            operations that the recording would take too long, or was recorded in vain before.
        is_built: True if it has run, so that its layers have their variables.
    """
    backend = call.backend
    if not backend.records_programs:
        if required:
            raise FrameworkError(f"cones of {backend.name} cannot be recorded yet; leave cone=True out")
        return None
    # All arguments are recorded, so that nothing is computed with them.
    refs = [*inputs, *[ref for ref in call.inputs if ref not in inputs]]
    implementation = backend.load("cone")
    memory = limit = None
    if not required:
        memory = RecordingMemory(call, inputs, outputs)
        if memory.was_in_vain():
            return None
        limit = cost.most_ops(count_elements(call), implementation.op_seconds)
    state, refusal = ReachableState(call.function, call.arguments), None
    try:
        with scope():
            defer(state.restore, implementation.is_recorded)
            program = implementation.record(PartialCall(call, refs, outputs), [ref.tensor for ref in refs], limit)
    except NoConeError as error:
        refusal = error
    if isinstance(refusal, UnbuiltError) and not is_built:
        if memory is not None:
            return None
        _run_plainly(call, outputs)
        return record(call, inputs, outputs, required, is_built=True)
    if refusal is not None:
        if memory is None:
            _raise_refusal(refusal, call, outputs)
        else:
            memory.note()
        return None
    if state.held_recorded and memory is not None:
        # It keeps a tensor that it computed, so it has to be run. The next time it may only look that tensor up.
        if not cost.may_repeat(program, program.outputs[0]):
            memory.note()
        return None
    return ConeLinearization(backend, program, memory)


def _raise_refusal(refusal: NoConeError, call: BoundCall, outputs: Sequence[TensorRef]) -> NoReturn:
    """Raise the error of a required cone; where the function fails by itself, its own error."""
    if refusal.__cause__ is not None:
        _run_plainly(call, outputs)
    raise _refuse(str(refusal)) from refusal


def _run_plainly(call: BoundCall, outputs: Sequence[TensorRef]) -> None:
    with call.backend.isolated(call.function):
        call.run((), (), outputs)


def _refuse(why: str) -> FrameworkError:
    return FrameworkError(f"a cone cannot be used here: {why}; leave cone=True out")


def count_elements(call: BoundCall) -> int:
    """Return the number of elements of all arguments whose shape is known."""
    shapes = [call.backend.shape(ref.tensor) for ref in call.inputs]
    return sum([math.prod(shape) for shape in shapes if None not in shape])


def is_large(call: BoundCall) -> bool:
    """Return True if the arguments are so large that a recording may pay."""
    return call.backend.records_programs and count_elements(call) >= cost.SMALLEST


class ConeLinearization(Linearization):
    """A recorded function. Every read runs the operations that its elements depend on, and no others.

    A read that fails raises `NoConeError` unless cones are required: the function then runs as a whole, which gives the
    answer, or the error that the user would get without us.
    """

    reads_blocks = True
    missing_rules = {"forward": "a cone is swept in reverse"}  # noqa: RUF012

    def __init__(self, backend: Backend, program: RecordedProgram, memory: "RecordingMemory | None"):
        self._backend = backend
        self._memory = memory
        """Where it is noted that cones fail or do not pay; None if they are required."""
        self.program = program
        self.inputs = program.sources
        self.outputs = program.tensors
        self._last: tuple[Any, Any] = None, None

    def plan(self, output: int, box: Box) -> Cone:
        """Return the cone of a box of an output."""
        last, cone = self._last
        if last != (output, box):
            # One plan is kept, as the read of an element follows the question of whether its cone pays.
            cone = self.program.plan(self.program.outputs[output], box)
            self._last = (output, box), cone
        return cone

    def pays(self, output: int, rows: Selection) -> bool:
        """Return True if the cone of some elements is cheaper than the whole function."""
        of = self.program.outputs[output]
        pays = self.program.pays(self.plan(output, box_of(rows, of.shape)), of)
        if not pays and self._memory is not None and not cost.may_repeat(self.program, of):
            self._memory.note()
        return pays

    def describe(self, output: int, rows: Selection, names: Mapping[int, str]) -> str:
        of = self.program.outputs[output]
        cone = plan_need(self.program.ops, of, box_of(rows, of.shape))
        parts = []
        for number, name in names.items():
            value = self.program.inputs[number]
            parts.append(describe_box(cone.needed.get(value), value.shape, name))
        share = cost.share(self.program, of, cone)
        return f"{' and '.join(parts)}, {share} of the work"

    def is_connected(self, output: int, input: int) -> bool:
        return self.program.is_connected(output, input)

    def _run(self, run: Callable[..., Any], *args: Any) -> Any:
        try:
            return run(*args)
        except ElementgradError:
            raise
        except Exception as error:
            if self._memory is None:
                raise _refuse(reason(error)) from error
            self._memory.note()
            raise NoConeError(reason(error)) from error

    def read_block(
        self, output: int, rows: Selection, inputs: Sequence[int], columns: Sequence[Selection]
    ) -> list[Tensor | None] | None:
        of = self.program.outputs[output]
        box = box_of(rows, of.shape)
        cone = self.plan(output, box)
        positions = inverse = np.zeros(1, np.intp)  # the only element of its box
        if rows.size != 1:
            positions, inverse = np.unique(_flat_in(box, _coordinates(rows, of.shape), rows.size), return_inverse=True)
        values = [self.program.inputs[number] for number in inputs]
        parts = self._run(self.program.gradients, cone, of, values, positions)
        blocks: list[Tensor | None] = []
        for number, value, part, selection in zip(inputs, values, parts, columns, strict=True):
            if not self.is_connected(output, number):
                blocks.append(None)
                continue
            picked = self._pick(part, cone.needed.get(value), selection, len(positions), number)
            if not np.array_equal(inverse, np.arange(len(positions))):
                shape = (len(positions), selection.size)
                order = Selection(shape, (inverse, range(selection.size)), 0, inverse.shape)
                picked = self._backend.take(picked, order)
            blocks.append(picked)
        return blocks

    def _pick(self, part: Tensor | None, box: Box | None, selection: Selection, count: int, number: int) -> Tensor:
        """Return the selected elements of a derivative of which a box is given, as (sweeps, elements)."""
        backend, shape = self._backend, (count, selection.size)
        if part is None or box is None or selection.size > MAX_PICKED:
            full = self._embed(part, box, count, number)
            if selection.whole:
                return backend.reshape(full, shape)
            where = selection.behind((count,)) if selection.basic else selection.stacked((count,))
            return backend.reshape(backend.take(backend.reshape(full, where.of), where), shape)
        at = _coordinates(selection, self.program.inputs[number].shape)
        inside = np.ones(selection.size, bool)
        for axis, interval in zip(at, box, strict=True):
            inside &= (axis >= interval.start) & (axis < interval.stop)
        places = np.zeros(selection.size, np.intp)
        places[inside] = _flat_in(box, [axis[inside] for axis in at], int(inside.sum()))
        flat = backend.reshape(part, (count, volume(box)))
        picked = backend.take(flat, Selection((count, volume(box)), (range(count), places), 1, places.shape))
        if inside.all():
            return picked
        return backend.where(np.broadcast_to(inside, shape), picked, backend.zeros(shape, self.inputs[number]))

    def _embed(self, part: Tensor | None, box: Box | None, count: int, number: int) -> Tensor:
        """Return a derivative of full size, with zeros around the box that is given."""
        shape = self.program.inputs[number].shape
        if part is None or box is None:
            return self._backend.zeros((count, *shape), self.inputs[number])
        margins = [(interval.start, size - interval.stop) for interval, size in zip(box, shape, strict=True)]
        return self.program.embed(part, [(0, 0), *margins])

    def read_value(self, output: int, selection: Selection) -> Tensor:
        of, backend = self.program.outputs[output], self._backend
        box = box_of(selection, of.shape)
        part = self._run(self.program.evaluate, self.plan(output, box), of)
        flat = backend.reshape(part, (volume(box),))
        places = _flat_in(box, _coordinates(selection, of.shape), selection.size)
        return backend.reshape(backend.take(flat, Selection.at_flat(places, (volume(box),))), selection.shape)

    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        of, count = self.program.outputs[output], int(self._backend.shape(seeds)[0])
        cone = self.plan(output, whole(of.shape))
        values = [self.program.inputs[number] for number in inputs]
        parts = self._run(self.program.gradients, cone, of, values, seeds)
        return [
            self._embed(part, cone.needed.get(value), count, number) if self.is_connected(output, number) else None
            for number, value, part in zip(inputs, values, parts, strict=True)
        ]

    def jvp(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        raise UnsupportedError(self.missing_rules["forward"])

    def peak_bytes(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        largest = max([math.prod(shape) for op in self.program.ops for shape in op.shapes], default=0)
        return largest * self._backend.itemsize(self.inputs[0])

    def gradient(self, output: int, seed: Tensor) -> Linearization:
        raise UnsupportedError("a cone has first derivatives")

    def pattern(self, output: int, input: int, local: bool) -> Any:
        raise UnsupportedError("the function was recorded for cones and not evaluated; leave cone=True out")


def _coordinates(selection: Selection, shape: tuple[int, ...]) -> Sequence[np.ndarray]:
    return np.unravel_index(np.asarray(selection.flat()).reshape(-1), shape) if shape else []


def describe_box(box: Box | None, shape: tuple[int, ...], name: str) -> str:
    """Return a part of a tensor in words, by the axes along which it is not the whole.

    >>> from elementgrad._cone.boxes import Interval
    >>> describe_box((Interval(0, 1), Interval(5, 18), Interval(0, 9)), (1, 512, 64), "x")
    '13 x 9 of 512 x 64 of x'
    """
    if box is None:
        return f"nothing of {name}"
    cut = [(each, size) for each, size in zip(sizes(box), shape, strict=True) if each != size]
    if not cut:
        return f"all of {name}"
    return f"{' x '.join(str(each) for each, _ in cut)} of {' x '.join(str(size) for _, size in cut)} of {name}"


def _flat_in(box: Box, coordinates: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Return the flat positions in a box of elements that are in it."""
    if not box or not count:
        return np.zeros(count, np.intp)
    return np.ravel_multi_index(
        [axis - interval.start for axis, interval in zip(coordinates, box, strict=True)], sizes(box)
    )


def box_of(selection: Selection, shape: tuple[int, ...]) -> Box:
    """Return the smallest box around selected elements."""
    return whole(shape) if selection.whole else around(_coordinates(selection, shape))


class RecordingMemory:
    """The calls of one function, by its arguments and by what is read of it, that were recorded in vain.

    Before a function is recorded nothing tells how much it computes, and a recording can take as long as the function.
    So the first read that was recorded in vain is noted, and later reads of the same names, by arguments of the same
    shapes, go the plain way at once. Nothing but this decision is kept, and it never changes an answer: where the
    function has become another since, a cone that would pay is not used.
    """

    def __init__(self, call: BoundCall, inputs: Sequence[TensorRef], outputs: Sequence[TensorRef]):
        function = call.function
        self._owner: Any = function
        if isinstance(function, MethodType):
            self._owner = function.__self__
        elif isinstance(getattr(function, "__code__", None), CodeType):
            # A lambda that is made anew for each read has the same code, and the same objects around it.
            self._owner = function.__code__
        around = tuple(map(id, _objects_around(function)))
        self._key = call.signature, around, *[tuple([ref.name for ref in refs]) for refs in (inputs, outputs)]

    def was_in_vain(self) -> bool:
        """Return True if such a call was recorded before and did not pay."""
        owner, calls = _functions.get(id(self._owner), (None, ()))
        return owner is not None and owner() is self._owner and self._key in calls

    def note(self) -> None:
        """Note that it does not pay to record such a call."""
        number = id(self._owner)
        owner, calls = _functions.get(number, (None, None))
        if calls is None or owner is None or owner() is not self._owner:
            try:
                owner = weakref.ref(self._owner, lambda _: _functions.pop(number, None))
            except TypeError:  # it is recorded again
                return
            calls = OrderedDict()
            _functions[number] = owner, calls
        calls[self._key] = None
        while len(calls) > MAX_CALLS:
            calls.popitem(last=False)


def _objects_around(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield what a function closes over, and the globals that it uses: a model in it may be another the next time."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", None)
    if isinstance(code, CodeType) and names is not None:
        for name in code.co_names:
            yield names.get(name)
