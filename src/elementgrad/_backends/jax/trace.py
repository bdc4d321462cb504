"""Recording JAX code as it runs on its numbers: every operation, its arrays, and the user's line.

JAX hands each operation to the current trace. `JaxOpRecorder` is a trace that runs the operation at once and records
it, so that code which looks at values works as it does outside of any transformation. `TracedValue` stands for the
arrays that were computed from the source, and records when Python or NumPy reads one. Compiled functions of the user's,
branches and short loops are recorded operation by operation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad._backends.jax._compat import TRACERS_STORE_AVAL, core, current, current_name_stack, scan_sizes, typeof
from elementgrad._backends.jax.explain_rules import (
    CUSTOM_JVP,
    CUSTOM_VJP,
    NUMBERS,
    CallSite,
    JaxOp,
    call_site,
    function_name,
    is_differentiable,
    is_user_function,
    op_word,
    out_of_range,
    primitives,
)
from elementgrad._backends.jax.program import FOLLOWED, bind, evaluate

Array = Any
UNROLLED = 4000
"""The most operations of a loop of which every iteration is recorded; a longer loop is one operation."""
INDEXED_OPS = {"gather", "scatter", "scatter-add", "scatter_add", "dynamic_slice", "dynamic_update_slice"}
EXITS = {"__index__": "int"}
"""The user's words for methods that give numbers to Python, where the name is another."""
COPIES = ("add_any", "broadcast_in_dim", "copy", "copy_p", "name", "pvary", "reshape", "squeeze", "transpose")
"""Primitives that compute nothing; lists of operations leave them out."""


class TracedValue(core.Tracer):
    """An array that was computed from the source, with its value id."""

    __slots__ = ("value", "value_id")

    def __init__(self, trace: Any, value: Array, value_id: int):
        super().__init__(*((trace, typeof(value)) if TRACERS_STORE_AVAL else (trace,)))
        self.value = value
        self.value_id = value_id

    if not TRACERS_STORE_AVAL:
        aval = property(lambda self: typeof(self.value))

    def to_concrete_value(self) -> Array:
        return self.value

    def _leave(self, word: str, branches: bool = False) -> Array:
        self._trace.record_exit(self, word, branches)
        return self.value

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self._leave("numpy")).__array__(*args, **kwargs)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __repr__(self) -> str:
        return repr(self.value)

    def block_until_ready(self) -> "TracedValue":
        return self

    def _read_concrete(self, name: str) -> Any:
        self._trace.differs = True
        return getattr(self.value, name)

    def devices(self) -> Any:
        return self._read_concrete("devices")()

    sharding = property(lambda self: self._read_concrete("sharding"))
    device = property(lambda self: self._read_concrete("device"))
    committed = property(lambda self: self._read_concrete("committed"))


def _exit(method: str, word: str) -> Callable[..., Any]:
    """Return a method of `TracedValue` that gives its numbers to Python."""
    return lambda self, *args: getattr(self._leave(word, branches=word == "bool"), method)(*args)


for _method in ("__bool__", "__int__", "__index__", "__float__", "__complex__", "item", "tolist"):
    setattr(TracedValue, _method, _exit(_method, EXITS.get(_method, _method.strip("_"))))


class JaxOpRecorder(core.Trace):
    """Records the operations of the code that runs inside `record_thread()`."""

    def __init__(self, others: Sequence[Any] = ()) -> None:
        super().__init__()
        self.ops: list[JaxOp] = []
        self.sources: list[TracedValue] = []
        self.differs = False
        """True if JAX may treat the code otherwise when it differentiates it, or refuse it."""
        self._others = others  # arrays that the function gets as well: if a source is one, its use is no closure
        self._source_arrays: dict[int, tuple[Any, TracedValue]] = {}
        self._closure_ids: dict[int, int] = {}
        self._count = 0
        self._ids: dict[int, tuple[int, Any]] = {}  # of other arrays, which are kept so that no other gets their id

    @contextmanager
    def record_thread(self) -> Iterator[None]:
        with core.set_current_trace(self):
            yield

    def trace_source(self, x: Array) -> TracedValue:
        """Return the value that stands for a source in the user's function."""
        source = TracedValue(self, value_of(x), self._new_id())
        self.sources.append(source)
        if isinstance(x, TracedValue):  # it is computed from another source
            self._add_identity("activation", None, x.value, x.value_id, source.value_id, op_type="copy")
        elif all(x is not other for other in self._others):
            self._source_arrays[id(x)] = x, source
        return source

    def _new_id(self) -> int:
        self._count += 1
        return self._count

    def value_id(self, x: Any) -> int:
        if isinstance(x, TracedValue):
            return x.value_id
        if id(x) in self._source_arrays:
            return self._source_closure_id(*self._source_arrays[id(x)])
        known = self._ids.get(id(x))
        if known is None:
            known = self._ids[id(x)] = self._new_id(), x
        return known[0]

    def _source_closure_id(self, x: Array, source: TracedValue) -> int:
        """Return the id of the source's own array, which the code uses although it got a traced value for it."""
        if id(x) not in self._closure_ids:
            value_id = self._closure_ids[id(x)] = self._new_id()
            where = call_site(current().traceback).where
            note = "the code takes the array itself from outside, not its argument"
            word = "the array used here"
            self._add_identity(word, where, x, source.value_id, value_id, cut_cause="outside-tape", note=note)
        return self._closure_ids[id(x)]

    def _add_identity(self, word: str, where: str | None, x: Array, before: int, after: int, **more: Any) -> None:
        """Record that a value is another one: hidden, since it is the cause only if nothing else is."""
        op = JaxOp(word, where, "", (before,), (after,), hidden=True, **more)
        op.operands = op.results = [x]
        self.ops.append(op)

    def record_exit(self, x: TracedValue, word: str, branches: bool) -> None:
        """Record that the numbers of a value go to Python."""
        op = JaxOp(word, call_site(current().traceback).where, "", (x.value_id,), (), "left-framework")
        op.note, op.branches, op.operands = "plain numbers have no derivatives", branches, [x.value]
        self.ops.append(op)

    def stage_value(self, val: Any) -> Any:
        with core.eval_context():
            return val if isinstance(val, TracedValue) else jnp.asarray(val)

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: Mapping[str, Any], /) -> Any:
        def function(*operands: Any) -> Sequence[Any]:
            results = primitive.bind(*operands, **params)
            return results if primitive.multiple_results else [results]

        results = self._run(primitive.name, params, function, tracers, call_site(current().traceback))
        return results if primitive.multiple_results else results[0]

    def process_call(self, primitive: Any, f: Any, tracers: Sequence[Any], params: Any, /) -> Any:
        with core.set_current_trace(self):
            return f.call_wrapped(*tracers)

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Sequence[Any], /, *, symbolic_zeros: bool
    ) -> Any:
        params = {"symbolic_zeros": symbolic_zeros}
        return self._run_custom("process_custom_jvp_call", primitive, (fun, jvp), tracers, params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Sequence[Any], /, *, out_trees: Any, **params: Any
    ) -> Any:
        params["out_trees"] = out_trees
        return self._run_custom("process_custom_vjp_call", primitive, (fun, fwd, bwd), tracers, params)

    def _run_custom(
        self, process: str, primitive: Any, functions: Sequence[Any], tracers: Sequence[Any], params: Any
    ) -> Any:
        """Run a function with a derivative of its own."""

        def take(trace: Any, xs: Any) -> Any:
            return getattr(trace, process)(primitive, *functions, xs, **params)

        site = call_site(current().traceback)
        program = None
        try:
            program, _ = self._stage(take, tracers)
        except jax.errors.JAXTypeError:  # it looks at its values: its operations are recorded, and not its rule
            self.differs = True
        if program is None:
            with core.set_current_trace(self):
                return functions[0].call_wrapped(*tracers)
        with core.eval_context():
            return self._run_program(program, tracers, site, False)

    def process_shard_map(self, primitive: Any, function: Any, tracers: Sequence[Any], /, **params: Any) -> Any:
        return self._run_on_devices(
            lambda trace, xs: trace.process_shard_map(primitive, function, xs, **params), tracers
        )

    def process_map(self, primitive: Any, function: Any, tracers: Sequence[Any], params: Any, /) -> Any:
        """Run `pmap` as versions of JAX have it in which it is no `shard_map`."""
        return self._run_on_devices(lambda trace, xs: trace.process_map(primitive, function, xs, params), tracers)

    def _run_on_devices(self, process: Callable[[Any, Any], Any], tracers: Sequence[Any]) -> Any:
        """Run a function on several devices, as one operation."""
        site = call_site(current().traceback)
        program, structure = self._stage(process, tracers)
        with core.eval_context():
            results = self._run_program(program, tracers, site, False)
        return results if structure is None else structure.update(results)

    def _stage(self, process: Callable[[Any, Any], Any], tracers: Sequence[Any]) -> tuple[Any, Any]:
        """Return the program of functions that can be called only once, and the structure that JAX wants back.

        `process` has a trace take the functions in. The structure is a tree without its values, or None for a list.
        """
        structures: list[Any] = [None]

        def stage(*xs: Any) -> Any:
            with core.take_current_trace() as trace:
                results = process(trace, xs)
            if not hasattr(results, "update"):
                return results
            values = list(results)
            structures.append(results.update([None] * len(values)))  # the traced values must not outlive the trace
            return values

        with core.eval_context():
            return jax.make_jaxpr(stage)(*map(value_of, tracers)), structures[-1]

    def _run_program(self, program: Any, operands: Sequence[Any], site: CallSite, users: bool) -> list[Any]:
        """Run a program one operation at a time; those of a function of JAX's own all belong to its call site."""

        def step(equation: Any, operands: list[Any]) -> Sequence[Any]:
            here = site
            if users:
                inner = call_site(equation.source_info.traceback)
                word = inner.word if inner.where else site.word
                here = CallSite(inner.where or site.where, word, inner.updates or site.updates)
            name, params = equation.primitive.name, equation.params
            return self._run(name, params, lambda *xs: bind(equation, xs), operands, here)

        return evaluate(getattr(program, "jaxpr", program), getattr(program, "consts", ()), list(operands), step)

    def _run(
        self, name: str, params: Mapping[str, Any], function: Any, operands: Sequence[Any], site: CallSite
    ) -> list[Any]:
        """Run and record one operation, or the operations that it is made of."""
        with core.eval_context():
            if name in FOLLOWED:
                users = is_user_function(params) or not name.endswith("jit")
                if users or INDEXED_OPS & set(primitives(params)):
                    if not users:
                        site = site._replace(word=site.word or op_word(params["name"]))
                    return self._run_program(params[FOLLOWED[name]], operands, site, users)
            if name == "cond":
                return self._run_branch(params, operands, site)
            if name == "scan" and params["length"] * len(params["jaxpr"].jaxpr.eqns) <= UNROLLED:
                return self._run_loop(params, operands, site)
            return self._run_primitive(name, params, function, operands, site)

    def _run_branch(self, params: Mapping[str, Any], operands: Sequence[Any], site: CallSite) -> list[Any]:
        index, *rest = operands
        branches = params["branches"]
        branch = branches[min(max(int(value_of(index)), 0), len(branches) - 1)]
        results = self._run_program(branch, rest, site, True)
        return self._run_hidden("cond", lambda _, *xs: list(xs), [index, *results], site)

    def _run_loop(self, params: Mapping[str, Any], operands: Sequence[Any], site: CallSite) -> list[Any]:
        length, body = params["length"], params["jaxpr"]
        consts, carry = scan_sizes(params)
        fixed, carried = list(operands[:consts]), list(operands[consts : consts + carry])

        def unstack(x: Any) -> list[Any]:
            return self._run_hidden("scan", lambda x: [x[turn] for turn in range(length)], [x], site)

        def stack(rows: list[Any], aval: Any) -> Any:
            if not rows:
                return jnp.zeros((0, *aval.shape), aval.dtype)
            return self._run_hidden("scan", lambda *xs: [jnp.stack(xs)], rows, site)[0]

        columns = [unstack(x) for x in operands[consts + carry :]]
        stacks: list[list[Any]] = [[None] * length for _ in body.jaxpr.outvars[carry:]]
        for turn in range(length)[::-1] if params["reverse"] else range(length):
            results = self._run_program(body, [*fixed, *carried, *[rows[turn] for rows in columns]], site, True)
            carried = list(results[:carry])
            for rows, result in zip(stacks, results[carry:], strict=True):
                rows[turn] = result
        outputs = zip(stacks, body.jaxpr.outvars[carry:], strict=True)
        return carried + [stack(rows, variable.aval) for rows, variable in outputs]

    def _run_hidden(self, word: str, function: Any, operands: Sequence[Any], site: CallSite) -> list[Any]:
        """Run an operation of ours that moves values around."""
        op = JaxOp(
            word,
            site.where,
            inputs=tuple(map(self.value_id, operands)),
            hidden=True,
            op_type=word,
            operands=[*map(value_of, operands)],
            function=function,
        )
        return self._add(op, site, any(isinstance(x, TracedValue) for x in operands))

    def _run_primitive(
        self, name: str, params: Mapping[str, Any], function: Any, operands: Sequence[Any], site: CallSite
    ) -> list[Any]:
        values = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in map(value_of, operands)]
        custom = name in CUSTOM_JVP or name in CUSTOM_VJP
        word = function_name(params) if custom else site.word
        missed = out_of_range(name, params, values)
        op = JaxOp(
            word or op_word(str(params.get("name", name)) if name.endswith("jit") else name),
            site.where,
            str(current_name_stack()).replace("/", "."),
            tuple([self.value_id(x) for x in operands]),
            note=missed,
            custom_gradient=custom and is_user_function(params),
            op_type=name,
            operands=values,
            misses=missed,
            function=in_any_precision(name, params, function),
            params=params,
        )
        closures = set(self._closure_ids.values())
        traced = any(isinstance(x, TracedValue) for x in operands) or not closures.isdisjoint(op.inputs)
        results = self._add(op, site, traced)
        is_cast = name == "convert_element_type"
        op.hidden = name in COPIES or (is_cast and op.results[0].dtype == jnp.result_type(values[0]))
        return results

    def _add(self, op: JaxOp, site: CallSite, traced: bool) -> list[Any]:
        """Run an operation and record it; its results are traced if an operand is."""
        op.results = op.rerun(op.operands)
        op.updates = site.updates
        op.call = (site.where, site.word) if site.word is not None and not op.custom_gradient else None
        op.outputs = tuple([self._new_id() for _ in op.results])
        self.ops.append(op)
        if traced:
            return [TracedValue(self, x, value_id) for x, value_id in zip(op.results, op.outputs, strict=True)]
        self._ids.update({id(x): (value_id, x) for x, value_id in zip(op.results, op.outputs, strict=True)})
        return list(op.results)


def in_any_precision(name: str, params: Mapping[str, Any], function: Any) -> Any:
    """Return an operation that runs in float64 too, if it is a compiled call: then by what it is made of."""
    inner = params.get(FOLLOWED.get(name, ""))
    if inner is None:
        return function
    jaxpr, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())

    def step(equation: Any, operands: list[Any]) -> Sequence[Any]:
        wide = [NUMBERS.widen(jnp.asarray(x)) if is_differentiable(x) else x for x in operands]
        run = in_any_precision(equation.primitive.name, equation.params, lambda *xs: bind(equation, xs))
        return list(run(*wide))

    def call(*operands: Any) -> Sequence[Any]:
        pairs = zip(operands, jaxpr.invars, strict=True)
        same = all(jnp.result_type(x) == variable.aval.dtype for x, variable in pairs)
        return function(*operands) if same else evaluate(jaxpr, consts, list(operands), step)

    return call


def value_of(x: Any) -> Any:
    return x.value if isinstance(x, TracedValue) else x
