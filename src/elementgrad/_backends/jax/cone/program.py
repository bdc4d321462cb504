"""Records JAX functions as programs of their jaxpr's equations, and compiles parts of them for all positions at once.

A compiled part has fixed sizes. Where its regions start is an operand, so that an element elsewhere runs the same code.
The sizes are those that several places need, among them the neighbours of the one that was asked for; a place that
needs more, as some do at borders, gets a program of its own. Derivatives are those of `jax.vjp` of that part.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from elementgrad._backends.autodiff import TensorFunction, reason
from elementgrad._backends.jax._compat import jaxprs_in_params, linear_jaxpr, scan_sizes
from elementgrad._backends.jax.autodiff import LinearProgram, _add_change, _fill_in_changes
from elementgrad._backends.jax.compile_cache import can_compile, find_or_make
from elementgrad._backends.jax.cone import custom, moves, windows  # noqa: F401 (they fill the table of rules)
from elementgrad._backends.jax.cone.rules import PlacedRegion, Target, cut
from elementgrad._backends.jax.cone.trace import build, run_steps
from elementgrad._backends.jax.program import FOLLOWED, bind, evaluate, follow
from elementgrad._cone.backend import ConeBackend, RecordedProgram
from elementgrad._cone.boxes import Box, Interval, Shape, join, sizes
from elementgrad._cone.plan import Cone, ConeStep, NoConeError, ProgramValue, whole_work
from elementgrad.errors import ElementgradError

Array = jax.Array
NEIGHBOURS = 16
"""So many places next to each other are planned for together, as strides make them differ."""
MOST_UNROLLED = 4000
"""Loops of so many operations in all their turns are recorded turn by turn; longer ones are operations."""
CHUNK = 16
"""The number of reverse sweeps that run together."""
MOST_COMPILED = 32
"""The number of parts that are kept compiled for one program, the last used ones."""
START_SECONDS = 1e-3
"""The time that a recording takes beside its operations, roughly."""
SECONDS_PER_STEP = 5e-3
"""The time to compile one operation, roughly."""


class CompiledParts:
    """The parts that programs with equal equations share: compiled code, their sizes, and the paths of derivatives."""

    def __init__(self, run: Any = None) -> None:
        self.templates: dict[Any, list[dict[int, Shape]]] = {}
        self.paths: list[set[int]] | None = None
        self._parts: OrderedDict[Any, Any] = OrderedDict()

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return a compiled part, made now if there is none."""
        if key not in self._parts:
            self._parts[key] = make()
            while len(self._parts) > MOST_COMPILED:
                self._parts.popitem(last=False)
        self._parts.move_to_end(key)
        return self._parts[key]

    @property
    def is_compiled(self) -> bool:
        return bool(self._parts)


class _TooLargeError(Exception):
    """A place needs more of a value than a template has."""


@dataclass
class RegionCone(Cone):
    """A cone whose boxes have fixed sizes."""

    template: dict[int, Shape] = field(default_factory=dict)


class JaxProgram(RecordedProgram):
    """A traced function, with its differentiated inputs and the arrays that were named in it."""

    def __init__(self, run: TensorFunction, inputs: Sequence[Array | None], limit: int | None = None):
        given = [x for x in inputs if x is not None]
        if not can_compile(given):
            raise NoConeError("the function runs inside of a transformation of JAX, or with jit disabled")
        if any(isinstance(x, jax.Array) and len(x.devices()) > 1 for x in given):
            raise NoConeError("an array lies on several devices")
        try:
            is_activation = [x is None for x in inputs]
            arrays = _fill_in_changes(run, inputs) if any(is_activation) else list(given)

            def run_changed(*xs: Array) -> Sequence[Array]:
                pairs = zip(xs, is_activation, strict=True)
                return tuple(run(*[partial(_add_change, x) if new else x for x, new in pairs]))

            program = _unrolled(jax.make_jaxpr(run_changed)(*arrays))
        except ElementgradError:
            raise
        except Exception as error:  # the plain way will raise it again if it is the user's own
            raise NoConeError(reason(error)) from error
        if program.jaxpr.effects:
            raise NoConeError("the function has side effects")
        built = build(program, limit)
        self.ops, self.inputs, self.outputs = built.ops, built.inputs, built.outputs
        self.recording_seconds = START_SECONDS + JaxCone.op_seconds * len(self.ops)
        for value, array in zip(self.inputs, arrays, strict=True):
            value.differentiable = jnp.issubdtype(array.dtype, jnp.inexact)
        self._arrays = dict(zip(self.inputs, arrays, strict=True))
        self._program = program
        self.sources = arrays
        self.tensors = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in self.outputs]
        found = find_or_make(program, CompiledParts)
        self._is_shared = found is not None
        self._parts = CompiledParts() if found is None else found[0]
        self._numbers: dict[ProgramValue, int] = {}
        for value in self.inputs:
            self._numbers[value] = len(self._numbers)
        for op in self.ops:
            for each in (*op.operands, *op.results):
                if each is not None and each not in self._numbers:
                    self._numbers[each] = len(self._numbers)
        for value in self.outputs:
            self._numbers.setdefault(value, len(self._numbers))

    # Connections

    def is_connected(self, output: int, input: int) -> bool:
        if self._parts.paths is None:
            self._parts.paths = self._find_paths()
        return input in self._parts.paths[output]

    def _find_paths(self) -> list[set[int]]:
        numbers = [number for number, value in enumerate(self.inputs) if value.differentiable]
        found: list[set[int]] = []

        def linearize(*arrays: Array) -> tuple[()]:
            def run(*varied: Array) -> Any:
                xs = list(arrays)
                for number, x in zip(numbers, varied, strict=True):
                    xs[number] = x
                return tuple(evaluate(self._program.jaxpr, self._program.consts, xs, bind))

            varied = [arrays[number] for number in numbers]
            outputs, linear = jax.linearize(run, *varied)
            paths = LinearProgram(linear_jaxpr(linear, varied, len(outputs)), len(varied)).paths
            found.extend([{numbers[number] for number in path} for path in paths])
            return ()

        jax.eval_shape(linearize, *self._arrays.values())
        return found

    # Plans

    def plan(self, of: ProgramValue, box: Box) -> RegionCone:
        key = self._numbers[of], sizes(box)
        templates = self._parts.templates.setdefault(key, [])
        for template in templates:
            try:
                return self._walk(of, box, template, grow=False)
            except _TooLargeError:
                continue
        template = self._make_template(of, box)
        templates.append(template)
        del templates[:-MOST_COMPILED]
        return self._walk(of, box, template, grow=False)

    def _make_template(self, of: ProgramValue, box: Box) -> dict[int, Shape]:
        """Return sizes that are enough for a box, those next to it, and those at the ends if they need little more."""
        template: dict[int, Shape] = {}
        for _ in range(3):
            before = dict(template)
            for shift in range(-NEIGHBOURS // 2, NEIGHBOURS // 2):
                self._walk(of, _moved(box, of.shape, shift), template, grow=True)
            self._walk(of, box, template, grow=True)
            if before == template:
                break
        work = self._walk(of, box, template, grow=False).count_work()
        wider = dict(template)
        for _ in range(3):
            for shift in (-max(of.shape, default=0), max(of.shape, default=0)):
                for axis in (None, *range(len(box))):
                    self._walk(of, _moved(box, of.shape, shift, axis), wider, grow=True)
        try:
            wide = self._walk(of, box, wider, grow=False)
        except _TooLargeError:
            return template
        return wider if wide.count_work() <= 1.5 * work else template

    def _walk(self, of: ProgramValue, box: Box, template: dict[int, Shape], grow: bool) -> RegionCone:
        """Walk the program backwards with boxes of the sizes of a template, which is made to fit with `grow`."""
        numbers = self._numbers
        needed: dict[ProgramValue, Box] = {of: box}
        final: dict[ProgramValue, Box] = {}
        steps: list[ConeStep] = []

        def settle(value: ProgramValue) -> Box:
            if value in final:
                return final[value]
            here, number = needed[value], numbers[value]
            have = template.get(number)
            mine = sizes(here)
            if mine == have:
                final[value] = here
                return here
            if have is None or any(size > fixed for size, fixed in zip(mine, have, strict=True)):
                if not grow:
                    raise _TooLargeError
                mine = mine if have is None else tuple(map(max, mine, have))
                have = template[number] = mine
            found = tuple(
                [
                    _stretch(interval, size, whole_size)
                    for interval, size, whole_size in zip(here, have, value.shape, strict=True)
                ]
            )
            final[value] = found
            return found

        for op in reversed(self.ops):
            if not any(result in needed for result in op.results):
                continue
            boxes = [settle(result) if result in needed else None for result in op.results]
            needs = op.rule.needs(boxes)
            for value, need in zip(op.operands, needs, strict=True):
                if need is None:
                    need = tuple([Interval(0, 0)] * len(value.shape))
                joined = join(needed.get(value), need)
                assert joined is not None
                needed[value] = joined
            steps.append(ConeStep(op, needs, boxes))
        for value in needed:
            settle(value)
        return RegionCone(steps[::-1], final, dict(template))

    def pays(self, cone: Cone, of: ProgramValue) -> bool:
        """Return True if a part costs less than the whole, and its compilation no more than some reads save."""
        if not self._is_shared or not super().pays(cone, of):
            return False
        # A read goes forwards and backwards, at three times the work of the value.
        return self._parts.is_compiled or 3 * whole_work(self.ops, of) / self.speed > SECONDS_PER_STEP * len(cone.steps)

    # Runs

    def evaluate(self, cone: Cone, of: ProgramValue) -> Array:
        return self._call(cone, of, (), 0, None)

    def gradients(self, cone: Cone, of: ProgramValue, wrt: Sequence[ProgramValue], seeds: Any) -> list[Array | None]:
        present = [value for value in wrt if value in cone.needed]
        count = len(seeds)
        stacks: list[list[Array]] = [[] for _ in present]
        for start in range(0, count, CHUNK):
            chunk = seeds[start : start + CHUNK]
            missing = 0 if count <= CHUNK else CHUNK - len(chunk)
            if isinstance(chunk, np.ndarray):
                chunk = np.append(chunk, [0] * missing).astype(np.int32)
            elif missing:
                chunk = jnp.concatenate([chunk, jnp.zeros((missing, *chunk.shape[1:]), chunk.dtype)])
            if not present:
                break
            made = self._call(cone, of, present, len(chunk), chunk)
            for stack, y in zip(stacks, made, strict=True):
                stack.append(y[: len(chunk) - missing] if missing else y)
        found = {
            value: stack[0] if len(stack) == 1 else jnp.concatenate(stack)
            for value, stack in zip(present, stacks, strict=True)
            if stack
        }
        return [found.get(value) for value in wrt]

    def embed(self, part: Array, around: Sequence[tuple[int, int]]) -> Array:
        if not any(map(any, around)):
            return part
        shape = tuple([before + size + behind for (before, behind), size in zip(around, part.shape, strict=True)])
        return _embed(part, np.array([before for before, _ in around], np.int32), shape)

    def _call(self, cone: Any, of: ProgramValue, wrt: Sequence[ProgramValue], count: int, seeds: Any) -> Any:
        # A literal of the program is a part of what is compiled.
        held = cone.needed
        needed = [x for x in held if x.maker is not None or x in self._arrays or x.constant is not None]
        leaves = [value for value in needed if value.maker is None]
        arrays = [self._arrays.get(value, value.constant) for value in leaves]
        moving = [
            (value, axis)
            for value in needed
            for axis, (interval, size) in enumerate(zip(cone.needed[value], value.shape, strict=True))
            if interval.size != size
        ]
        starts = np.array([cone.needed[value][axis].start for value, axis in moving], np.int32)
        numbers = self._numbers
        key = (
            numbers[of],
            tuple([numbers[value] for value in wrt]),
            count,
            isinstance(seeds, np.ndarray),
            tuple([(numbers[value], sizes(cone.needed[value])) for value in needed]),
            tuple([_device(array) for array in arrays]),
            tuple([step.op.rule.variant for step in cone.steps]),
        )
        operands = [jnp.asarray(array) for array in arrays]
        extra = () if seeds is None else (seeds,)

        def make() -> Any:
            places = {pair: number for number, pair in enumerate(moving)}
            function = partial(self._run, cone.needed, leaves, places, of, list(wrt), isinstance(seeds, np.ndarray))
            return jax.jit(function).lower(operands, starts, *extra).compile()

        return self._parts.find(key, make)(operands, starts, *extra)

    def _run(
        self,
        needed: Mapping[ProgramValue, Box],
        leaves: Sequence[ProgramValue],
        places: Mapping[tuple[ProgramValue, int], int],
        of: ProgramValue,
        wrt: Sequence[ProgramValue],
        by_position: bool,
        arrays: Sequence[Array],
        starts: Array,
        seeds: Any = None,
    ) -> Any:
        """Compute a part, and its derivatives if there are seeds; this is traced, and compiled."""

        def place(value: ProgramValue) -> Target:
            axes = range(len(value.shape))
            where = tuple([starts[places[value, axis]] if (value, axis) in places else 0 for axis in axes])
            return Target(where, sizes(needed[value]))

        regions = {}
        for value, array in zip(leaves, arrays, strict=True):
            target = place(value)
            part = cut(PlacedRegion(array, (0,) * array.ndim), target.starts, target.sizes)
            regions[value] = PlacedRegion(part, target.starts)

        def part_of(*varied: Array) -> Array:
            given = dict(regions)
            for value, array in zip(wrt, varied, strict=True):
                given[value] = PlacedRegion(array, regions[value].starts)
            return run_steps(self.ops, given, place, [of])[of].array

        if seeds is None:
            return part_of()
        y, sweep = jax.vjp(part_of, *[regions[value].array for value in wrt])
        if by_position:
            seeds = (jnp.arange(prod(y.shape))[None] == seeds[:, None]).astype(y.dtype).reshape(-1, *y.shape)
        return jax.vmap(sweep)(seeds)


@partial(jax.jit, static_argnums=2)
def _embed(part: Array, starts: Any, shape: Shape) -> Array:
    return lax.dynamic_update_slice(jnp.zeros(shape, part.dtype), part, list(starts))


def _device(array: Any) -> Any:
    return next(iter(array.devices())) if isinstance(array, jax.Array) else None


def _moved(box: Box, shape: Shape, by: int, only: int | None = None) -> Box:
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


def _loops(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        elif equation.primitive.name in FOLLOWED:
            yield from (loop for inner in jaxprs_in_params(equation.params) for loop in _loops(inner))


def _is_short(equation: Any) -> bool:
    return equation.params["length"] * len(equation.params["jaxpr"].jaxpr.eqns) <= MOST_UNROLLED


def _unrolled(program: Any) -> Any:
    """Return a program with the turns of short loops one after the other."""
    if not any(map(_is_short, _loops(program.jaxpr))):
        return program

    def step(equation: Any, operands: list[Any]) -> Sequence[Any]:
        if equation.primitive.name == "scan" and _is_short(equation):
            return _unroll(equation, operands, step)
        return follow(equation, operands, step) if equation.primitive.name in FOLLOWED else bind(equation, operands)

    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.in_avals]
    return jax.make_jaxpr(lambda *xs: tuple(evaluate(program.jaxpr, program.consts, xs, step)))(*types)


def _unroll(equation: Any, operands: list[Any], step: Any) -> list[Any]:
    params = equation.params
    fixed, carried = scan_sizes(params)
    consts, carry, xs = operands[:fixed], operands[fixed : fixed + carried], operands[fixed + carried :]
    body, length = params["jaxpr"], params["length"]
    stacks: list[Any] = [[None] * length for _ in range(len(equation.outvars) - carried)]
    for turn in reversed(range(length)) if params["reverse"] else range(length):
        rows = [lax.index_in_dim(x, turn, keepdims=False) for x in xs]
        results = evaluate(body.jaxpr, body.consts, [*consts, *carry, *rows], step)
        carry = results[:carried]
        for stack, y in zip(stacks, results[carried:], strict=True):
            stack[turn] = y
    empty = [variable.aval for variable in equation.outvars[carried:]]
    return [
        *carry,
        *[
            jnp.stack(stack) if length else jnp.zeros(aval.shape, aval.dtype)
            for stack, aval in zip(stacks, empty, strict=True)
        ],
    ]


class JaxCone(ConeBackend):
    op_seconds = 1e-4

    def record(self, run: TensorFunction, inputs: Sequence[Array | None], limit: int | None) -> JaxProgram:
        return JaxProgram(run, inputs, limit)


implementation = JaxCone()
