"""Records JAX functions as programs of their jaxpr's equations, and compiles parts of them for all positions at once.

A compiled part has fixed sizes. Where its regions start is an operand, so that an element elsewhere runs the same code.
The sizes are those that several places need, among them the neighbours of the one that was asked for; a place that
needs more, as some do at borders, gets a program of its own. Derivatives are those of `jax.vjp` of that part.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property, partial
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
from elementgrad._backends.jax.cone.rules import WHOLE, PlacedRegion, Target, cut
from elementgrad._backends.jax.cone.templates import (
    RegionCone,
    Template,
    ValueGroup,
    group_values,
    make_template,
    plan_with,
)
from elementgrad._backends.jax.cone.trace import build, count_equations, run_steps
from elementgrad._backends.jax.program import FOLLOWED, bind, evaluate, follow
from elementgrad._cone.backend import ConeBackend, RecordedProgram
from elementgrad._cone.boxes import Box, Shape, sizes
from elementgrad._cone.plan import Cone, NoConeError, Program, ProgramValue, whole_work
from elementgrad.errors import ElementgradError

Array = jax.Array
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


class TracedProgram(Program):
    """The equations of a jaxpr, with calls opened; the numbers of its constants are apart from it."""

    def __init__(self, jaxpr: Any, constants: Sequence[ProgramValue]):
        built = build(jaxpr, constants)
        super().__init__(built.ops, built.inputs, built.outputs)
        self.constants = constants
        for value in self.inputs:
            value.differentiable = jnp.issubdtype(value.dtype, jnp.inexact)
        self.numbers: dict[ProgramValue, int] = {}
        values = [value for op in self.ops for value in (*op.operands, *op.results) if value is not None]
        for value in (*self.inputs, *constants, *values, *self.outputs):
            self.numbers.setdefault(value, len(self.numbers))
        self._groups: dict[ProgramValue, list[ValueGroup]] = {}
        self._spelled: dict[ProgramValue, Hashable] = {}

    @cached_property
    def variants(self) -> Hashable:
        """The decisions that rules made by the numbers of constants."""
        rules: list[Any] = [op.rule for op in self.ops]
        return tuple([rule.variant for rule in rules])

    def groups(self, of: ProgramValue) -> list[ValueGroup]:
        """Return the groups of what a value depends on."""
        if of not in self._groups:
            self._groups[of] = group_values(self.ops, of)
        return self._groups[of]

    def spell(self, of: ProgramValue) -> Hashable:
        """Return the groups of what a value depends on, as numbers."""
        if of not in self._spelled:
            groups = [tuple([self.numbers[value] for value in group.values]) for group in self.groups(of)]
            self._spelled[of] = tuple(groups)
        return self._spelled[of]

    def forget_constants(self) -> bool:
        """Drop the numbers of constants, if the program is the same with others; return False if it is not."""
        rules: list[Any] = [op.rule for op in self.ops]
        resting = set(self.constants)
        for op, rule in zip(self.ops, rules, strict=True):
            operands = resting.intersection(op.operands)
            if rule.variant not in (None, WHOLE) and any(value.known is not None for value in operands):
                return False
            if operands:
                resting.update([result for result in op.results if result is not None])
        for value in resting:
            value.constant = value.known = None
        return True


class CompiledParts:
    """The parts that programs with equal equations share: compiled code, their sizes, and the paths of derivatives."""

    def __init__(self, jaxpr: Any = None) -> None:
        self.templates: dict[Any, list[Template]] = {}
        self.paths: list[set[int]] | None = None
        self._jaxpr = jaxpr
        self._program: TracedProgram | None = None
        self._parts: OrderedDict[Any, Any] = OrderedDict()

    def trace(self, arrays: Sequence[Any]) -> TracedProgram:
        """Return the program with other numbers of its constants; mostly it is the same one."""
        if self._program is not None:
            return self._program
        constants = [ProgramValue(tuple(array.shape), array, dtype=array.dtype) for array in arrays]
        program = TracedProgram(self._jaxpr, constants)
        if program.forget_constants():
            self._program = program
        return program

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return a compiled part, made now if there is none."""
        # Other threads use and drop parts too, so that one is looked up once, and kept by its own reference.
        part = self._parts.pop(key, None) or make()
        self._parts[key] = part
        while len(self._parts) > MOST_COMPILED:
            self._parts.popitem(last=False)
        return part

    @property
    def is_compiled(self) -> bool:
        return bool(self._parts)


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
        if limit is not None and count_equations(program.jaxpr) > limit:
            raise NoConeError(f"the function has more than {limit} operations for its size")
        found = find_or_make(program, CompiledParts)
        self._is_shared = found is not None
        self._parts, operands = found or (CompiledParts(program.jaxpr), program.consts)
        self._traced = self._parts.trace(operands)
        self.ops, self.inputs, self.outputs = self._traced.ops, self._traced.inputs, self._traced.outputs
        self.recording_seconds = START_SECONDS + JaxCone.op_seconds * len(self.ops)
        self._arrays = dict(zip([*self.inputs, *self._traced.constants], [*arrays, *operands], strict=True))
        self._program = program
        self.sources = arrays
        self.tensors = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in self.outputs]

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

        jax.eval_shape(linearize, *self.sources)
        return found

    # Plans

    def plan(self, of: ProgramValue, box: Box) -> RegionCone:
        groups = self._traced.groups(of)
        templates = self._parts.templates.setdefault((self._traced.spell(of), sizes(box)), [])
        for template in templates:
            cone = plan_with(groups, box, template)
            if cone is not None:
                return cone
        template = make_template(self.ops, groups, box)
        templates.append(template)
        del templates[:-MOST_COMPILED]
        cone = plan_with(groups, box, template)
        assert cone is not None
        return cone

    def pays(self, cone: Any, of: ProgramValue) -> bool:
        """Return True if a part costs less than the whole, and its compilation no more than some reads save."""
        if cone.template.pays is None:
            cone.template.pays = super().pays(cone, of)
        if not self._is_shared or not cone.template.pays:
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
        groups, numbers = self._traced.groups(of), self._traced.numbers
        parts = list(zip(groups, cone.boxes, strict=True))
        # A literal of the program has no array: it is a part of what is compiled.
        given = [(x, self._arrays.get(x, x.constant)) for group in groups for x in group.values if x.maker is None]
        leaves = [value for value, array in given if array is not None]
        arrays = [array for _, array in given if array is not None]
        moving = [
            (group, axis, start)
            for group, box in parts
            for axis, ((start, stop), size) in enumerate(zip(box, group.shape, strict=True))
            if stop - start != size
        ]
        starts = np.array([start for _, _, start in moving], np.int32)
        key = (
            self._traced.spell(of),
            tuple([numbers[value] for value in wrt]),
            count,
            isinstance(seeds, np.ndarray),
            tuple([sizes(box) for box in cone.boxes]),
            tuple([_device(array) for array in arrays]),
            self._traced.variants,
        )
        operands = [array if isinstance(array, jax.Array) else jnp.asarray(array) for array in arrays]
        extra = () if seeds is None else (seeds,)

        def make() -> Any:
            places = {(value, axis): n for n, (group, axis, _) in enumerate(moving) for value in group.values}
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

    def is_recorded(self, x: Any) -> bool:
        return isinstance(x, jax.core.Tracer)


implementation = JaxCone()
