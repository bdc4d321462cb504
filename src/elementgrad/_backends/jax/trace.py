"""A value that stands for its plain number in the user's code, and knows when it is looked at.

Branches and loops of JAX: the branch that is taken, and every turn of a loop, operation by operation.

Indices that lie outside of an array: JAX raises nothing, so that somebody must say so.

Watching JAX code run on its plain numbers: every operation, what it takes and gives, and the user's line.

JAX hands each operation to the trace that is current. This one runs it at once, so that code which looks at values
works as it does outside of any transformation, and keeps what it did.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad._backends.jax import explain_rules
from elementgrad._backends.jax._compat import core, current, current_name_stack
from elementgrad._backends.jax.explain_rules import CUSTOM_JVP, CUSTOM_VJP, JaxOp
from elementgrad._backends.jax.program import FOLLOWED, bind, evaluate

Array = Any
typeof: Callable[[Any], Any] = getattr(core, "typeof" if hasattr(core, "typeof") else "get_aval")
SLOT = "aval" in core.Tracer.__slots__
"""Whether tracers keep their type, or are asked for it."""


class TracedValue(core.Tracer):
    """A value that was computed from the source, with its number."""

    __slots__ = ("number", "value")

    def __init__(self, trace: Any, value: Array, number: int):
        super().__init__(*((trace, typeof(value)) if SLOT else (trace,)))
        self.value = value
        self.number = number

    if not SLOT:
        aval = property(lambda self: typeof(self.value))

    def to_concrete_value(self) -> Array:
        """The number itself."""
        return self.value

    def _left(self, word: str, decides: bool = False) -> Array:
        self._trace.leave(self, word, decides)
        return self.value

    def __bool__(self) -> bool:
        return bool(self._left("bool", decides=True))

    def __int__(self) -> int:
        return int(self._left("int"))

    def __index__(self) -> int:
        return int(self._left("int").__index__())

    def __float__(self) -> float:
        return float(self._left("float"))

    def __complex__(self) -> complex:
        return complex(self._left("complex"))

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self._left("numpy")).__array__(*args, **kwargs)

    def item(self, *args: Any) -> Any:
        """A plain number."""
        return self._left("item").item(*args)

    def tolist(self) -> Any:
        """Plain numbers."""
        return self._left("tolist").tolist()

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __repr__(self) -> str:
        return repr(self.value)

    def block_until_ready(self) -> "TracedValue":
        """It is ready."""
        return self

    def devices(self) -> Any:
        """Where it lives."""
        return self.value.devices()

    @property
    def sharding(self) -> Any:
        """How it is spread out."""
        return self.value.sharding

    @property
    def device(self) -> Any:
        """Where it lives."""
        return self.value.device

    @property
    def committed(self) -> Any:
        """Whether it stays there."""
        return self.value.committed


UNROLLED = 4000
"""A loop of so many operations is followed in every turn; a longer one is one step."""


def short(params: Mapping[str, Any]) -> bool:
    """Whether a loop is followed."""
    return bool(params["length"] * len(params["jaxpr"].jaxpr.eqns) <= UNROLLED)


def _joined(watch: Any, word: str, function: Any, operands: Sequence[Any], here: explain_rules.CallSite) -> list[Any]:
    """A step of ours that moves values around."""
    values = [watch.value(x) for x in operands]
    takes = [watch.number(x) for x in operands]
    step = JaxOp(word, {}, function, values, takes, here.where, word, quiet=True)
    step.run()
    return watch.keep(step, here, any(isinstance(x, TracedValue) for x in operands))


def branch(watch: Any, params: Mapping[str, Any], operands: Sequence[Any], here: explain_rules.CallSite) -> list[Any]:
    """The branch that is taken."""
    index, *rest = operands
    branches = params["branches"]
    chosen = min(max(int(watch.value(index)), 0), len(branches) - 1)
    results = watch.follow(branches[chosen], rest, here, True)
    return _joined(watch, "cond", lambda _, *xs: list(xs), [index, *results], here)


def unrolled(watch: Any, params: Mapping[str, Any], operands: Sequence[Any], here: explain_rules.CallSite) -> list[Any]:
    """Every turn of a loop."""
    length, body = params["length"], params["jaxpr"]
    consts, carry = params["num_consts"], params["num_carry"]
    fixed, carried = list(operands[:consts]), list(operands[consts : consts + carry])
    rows = [
        _joined(watch, "scan", lambda x: [x[turn] for turn in range(length)], [x], here)
        for x in operands[consts + carry :]
    ]
    turns = range(length)[::-1] if params["reverse"] else range(length)
    stacked: list[list[Any]] = [[None] * length for _ in body.jaxpr.outvars[carry:]]
    for turn in turns:
        results = watch.follow(body, [*fixed, *carried, *[row[turn] for row in rows]], here, True)
        carried = list(results[:carry])
        for column, result in zip(stacked, results[carry:], strict=True):
            column[turn] = result
    outputs = zip(body.jaxpr.outvars[carry:], stacked, strict=True)
    return carried + [result for variable, column in outputs for result in _stacked(watch, variable, column, here)]


def _stacked(watch: Any, variable: Any, column: Sequence[Any], here: explain_rules.CallSite) -> list[Any]:
    aval = variable.aval
    if not column:
        return [jnp.zeros((0, *aval.shape), aval.dtype)]
    return _joined(watch, "scan", lambda *xs: [jnp.stack(xs)], list(column), here)


LOOKUPS = {"gather", "scatter", "scatter-add", "scatter_add", "dynamic_slice", "dynamic_update_slice"}
"""Primitives that look up places by numbers."""


def out_of_range(name: str, params: Mapping[str, Any], operands: Sequence[Any]) -> str:
    """What is to be said of the indices of a lookup or write, if some lie outside."""
    if name == "gather":
        numbers = params["dimension_numbers"]
        sizes = [params["slice_sizes"][axis] for axis in numbers.start_index_map]
        return _told(operands[0].shape, operands[1], numbers.start_index_map, sizes, str(params["mode"]), "read")
    if name.startswith("scatter"):
        numbers = params["dimension_numbers"]
        axes = numbers.scatter_dims_to_operand_dims
        return _told(operands[0].shape, operands[1], axes, [1] * len(axes), str(params["mode"]), "write")
    if name == "dynamic_slice":
        shape, sizes = operands[0].shape, params["slice_sizes"]
        starts = np.stack([np.asarray(start) for start in operands[1:]]) if len(operands) > 1 else np.zeros(0, int)
        return _told(shape, starts, range(len(shape)), sizes, "clip", "read")
    return ""


def _told(shape: Sequence[int], indices: Any, axes: Sequence[int], sizes: Sequence[int], mode: str, what: str) -> str:
    columns = np.asarray(indices).reshape(-1, len(axes)) if len(axes) else np.zeros((0, 0), int)
    for column, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        wrong = [int(i) for i in columns[:, column] if not 0 <= i <= shape[axis] - size]
        if wrong:
            head = f"index {wrong[0]} is out of range for axis {axis} of size {shape[axis]}"
            return f"{head}, and JAX {_instead(mode.lower(), what)}"
    return ""


def _instead(mode: str, what: str) -> str:
    if "clip" in mode or mode.endswith("1"):
        return "takes the nearest one instead" if what == "read" else "writes to the nearest one instead"
    if "fill" in mode or "drop" in mode:
        return "gives NaN there" if what == "read" else "drops what is written there"
    return "reads the nearest one and drops its gradient" if what == "read" else "does what it likes"


PLAIN = ("add_any", "broadcast_in_dim", "copy", "copy_p", "name", "pvary", "reshape", "squeeze", "transpose")
"""Primitives that compute nothing, and are left out where steps are shown."""


class JaxOpRecorder(core.Trace):
    """Keeps the steps of the code that runs inside of it."""

    def __init__(self, others: Sequence[Any] = ()) -> None:
        super().__init__()
        self._others = others
        self.steps: list[JaxOp] = []
        self._count = 0
        self._numbers: dict[int, tuple[int, Any]] = {}  # of plain arrays, which are kept so that no other gets their id
        self._source: Any = None
        self.first: TracedValue
        self._borrowed: int | None = None

    @contextmanager
    def on(self) -> Iterator["JaxOpRecorder"]:
        """Watch this thread."""
        with core.set_current_trace(self):
            yield self

    def source(self, x: Array) -> TracedValue:
        """A value from which derivatives start."""
        self._source = None if any(x is other for other in self._others) else x
        self.first = TracedValue(self, self.value(x), self._new())
        return self.first

    def _new(self) -> int:
        self._count += 1
        return self._count

    def number(self, x: Any) -> int:
        """The number of a value; one that was not computed from the source has one of its own."""
        if isinstance(x, TracedValue):
            return x.number
        if x is self._source and x is not None:
            return self._outside()
        known = self._numbers.get(id(x))
        if known is None:
            known = self._numbers[id(x)] = self._new(), x
        return known[0]

    def _outside(self) -> int:
        """The number of the source's own array, where the code takes it from elsewhere than from its argument."""
        if self._borrowed is None:
            self._borrowed = self._new()
            step = JaxOp("closure", {}, lambda x: [x], [self._source], [self.first.number], None, "the array used here")
            step.where = explain_rules.place(current().traceback).where
            step.results, step.gives = [self._source], [self._borrowed]
            step.quiet = True  # it is to blame where nothing else is
            step.stops, step.note = "outside-tape", "the code takes the array itself from outside, not its argument"
            self.steps.append(step)
        return self._borrowed

    def value(self, x: Any) -> Any:
        """The number itself."""
        return x.value if isinstance(x, TracedValue) else x

    def leave(self, x: TracedValue, word: str, decides: bool) -> None:
        """Note that the numbers of a value go to Python."""
        where = explain_rules.place(current().traceback).where
        step = JaxOp(word, {}, lambda x: [], [x.value], [x.number], where, word)
        step.stops, step.decides = "left-framework", decides
        step.note = "plain numbers have no derivatives"
        self.steps.append(step)

    def stage_value(self, val: Any) -> Any:
        """A number as an array."""
        with core.eval_context():
            return val if isinstance(val, TracedValue) else jax.numpy.asarray(val)

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: Mapping[str, Any], /) -> Any:
        """An operation that the user's code comes to."""

        def function(*operands: Any) -> Sequence[Any]:
            results = primitive.bind(*operands, **params)
            return results if primitive.multiple_results else [results]

        here = explain_rules.place(current().traceback)
        results = self.operation(primitive.name, params, function, tracers, here)
        return results if primitive.multiple_results else results[0]

    def process_call(self, primitive: Any, f: Any, tracers: Sequence[Any], params: Any, /) -> Any:
        """A call that means what its function means."""
        with core.set_current_trace(self):
            return f.call_wrapped(*tracers)

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Sequence[Any], /, *, symbolic_zeros: bool
    ) -> Any:
        """A function with a forward rule of its own."""
        params = {"symbolic_zeros": symbolic_zeros}
        return self._custom("process_custom_jvp_call", primitive, (fun, jvp), tracers, params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Sequence[Any], /, *, out_trees: Any, **params: Any
    ) -> Any:
        """A function with a reverse rule of its own."""
        params["out_trees"] = out_trees
        return self._custom("process_custom_vjp_call", primitive, (fun, fwd, bwd), tracers, params)

    def _custom(
        self, process: str, primitive: Any, functions: Sequence[Any], tracers: Sequence[Any], params: Any
    ) -> Any:
        """A function with a rule of its own: staged first, since it can be called only once."""

        def staged(*xs: Any) -> Any:
            with core.take_current_trace() as staging:
                return getattr(staging, process)(primitive, *functions, xs, **params)

        here = explain_rules.place(current().traceback)
        values = [self.value(x) for x in tracers]
        try:
            with core.eval_context():
                program = jax.make_jaxpr(staged)(*values)
        except jax.errors.JAXTypeError:  # it looks at its values: its steps are seen, and not its rule
            with core.set_current_trace(self):
                return functions[0].call_wrapped(*tracers)
        with core.eval_context():
            return self.follow(program, tracers, here, False)

    def _step(self, call: explain_rules.CallSite) -> Callable[[Any, list[Any]], Sequence[Any]]:
        def step(equation: Any, operands: list[Any]) -> Sequence[Any]:
            own = explain_rules.place(equation.source_info.traceback)
            here = explain_rules.CallSite(own.where or call.where, own.word if own.where else call.word)
            function = _binding(equation)
            return self.operation(equation.primitive.name, equation.params, function, operands, here)

        return step

    def follow(self, program: Any, operands: Sequence[Any], call: explain_rules.CallSite, own: bool) -> list[Any]:
        """Run an inner program step by step; those of a function of JAX's own are all where that was called."""
        jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        step = self._step(call)
        if not own:

            def step(equation: Any, operands: list[Any]) -> Sequence[Any]:
                return self.operation(equation.primitive.name, equation.params, _binding(equation), operands, call)

        return evaluate(jaxpr, consts, list(operands), step)

    def operation(
        self,
        name: str,
        params: Mapping[str, Any],
        function: Callable[..., Sequence[Any]],
        operands: Sequence[Any],
        here: explain_rules.CallSite,
    ) -> list[Any]:
        """Run one operation, or the operations that it is made of."""
        with core.eval_context():
            if name in FOLLOWED:
                own = explain_rules.is_own(params) or not name.endswith("jit")
                if own or LOOKUPS & set(explain_rules.primitives(params)):
                    call = (
                        here
                        if own
                        else explain_rules.CallSite(here.where, here.word or explain_rules.of_primitive(params["name"]))
                    )
                    return self.follow(params[FOLLOWED[name]], operands, call, own)
            if name == "cond":
                return branch(self, params, operands, here)
            if name == "scan" and short(params):
                return unrolled(self, params, operands, here)
            return self._taken(name, params, function, operands, here)

    def _taken(
        self, name: str, params: Mapping[str, Any], function: Any, operands: Sequence[Any], here: explain_rules.CallSite
    ) -> list[Any]:
        values = [self.value(x) for x in operands]
        custom = name in CUSTOM_JVP or name in CUSTOM_VJP
        own = custom and explain_rules.is_own(params)
        word = explain_rules.title(params) if custom else here.word
        word = word or explain_rules.of_primitive(str(params.get("name", name)) if name.endswith("jit") else name)
        takes = [self.number(x) for x in operands]
        step = JaxOp(name, params, function, values, takes, here.where, word, own)
        step.path = str(current_name_stack()).replace("/", ".")
        step.run()
        step.quiet = name in PLAIN or (
            name == "convert_element_type" and step.results[0].dtype == jax.numpy.result_type(values[0])
        )
        step.note = out_of_range(name, params, values)
        return self.keep(step, here, any(isinstance(x, TracedValue) for x in operands) or self._borrowed in takes)

    def keep(self, step: JaxOp, here: explain_rules.CallSite, reached: bool) -> list[Any]:
        """Add a step that was run to the account."""
        step.group = (here.where, here.word) if here.word is not None and not step.own else None
        given: list[Any] = []
        gives = []
        for result in step.results:
            value = self._new()
            gives.append(value)
            if reached:
                given.append(TracedValue(self, result, value))
            else:
                self._numbers[id(result)] = value, result
                given.append(result)
        step.gives = gives
        self.steps.append(step)
        return given


def _binding(equation: Any) -> Callable[..., Sequence[Any]]:
    return lambda *operands: bind(equation, operands)
