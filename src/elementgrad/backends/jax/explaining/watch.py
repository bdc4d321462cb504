"""Watching JAX code run on its plain numbers: every operation, what it takes and gives, and the user's line.

JAX hands each operation to the trace that is current. This one runs it at once, so that code which looks at values
works as it does outside of any transformation, and keeps what it did.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import core
from jax._src.source_info_util import current, current_name_stack

from elementgrad.backends.jax.explaining import indices, loops, words
from elementgrad.backends.jax.explaining.steps import CUSTOM_JVP, CUSTOM_VJP, Taken
from elementgrad.backends.jax.explaining.tracer import Watched
from elementgrad.backends.jax.program import FOLLOWED, bind, evaluate

Array = Any
PLAIN = ("add_any", "broadcast_in_dim", "copy", "copy_p", "name", "pvary", "reshape", "squeeze", "transpose")
"""Primitives that compute nothing, and are left out where steps are shown."""


class Watch(core.Trace):
    """Keeps the steps of the code that runs inside of it."""

    def __init__(self, others: Sequence[Any] = ()) -> None:
        super().__init__()
        self._others = others
        self.steps: list[Taken] = []
        self._count = 0
        self._numbers: dict[int, tuple[int, Any]] = {}  # of plain arrays, which are kept so that no other gets their id
        self._source: Any = None
        self.first: Watched
        self._borrowed: int | None = None

    @contextmanager
    def on(self) -> Iterator["Watch"]:
        """Watch this thread."""
        with core.set_current_trace(self):
            yield self

    def source(self, x: Array) -> Watched:
        """A value from which derivatives start."""
        self._source = None if any(x is other for other in self._others) else x
        self.first = Watched(self, self.value(x), self._new())
        return self.first

    def _new(self) -> int:
        self._count += 1
        return self._count

    def number(self, x: Any) -> int:
        """The number of a value; one that was not computed from the source has one of its own."""
        if isinstance(x, Watched):
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
            step = Taken("closure", {}, lambda x: [x], [self._source], [self.first.number], None, "the array used here")
            step.where = words.place(current().traceback).where
            step.results, step.gives = [self._source], [self._borrowed]
            step.quiet = True  # it is to blame where nothing else is
            step.stops, step.note = "outside-tape", "the code takes the array itself from outside, not its argument"
            self.steps.append(step)
        return self._borrowed

    def value(self, x: Any) -> Any:
        """The number itself."""
        return x.value if isinstance(x, Watched) else x

    def leave(self, x: Watched, word: str, decides: bool) -> None:
        """Note that the numbers of a value go to Python."""
        where = words.place(current().traceback).where
        step = Taken(word, {}, lambda x: [], [x.value], [x.number], where, word)
        step.stops, step.decides = "left-framework", decides
        step.note = "plain numbers have no derivatives"
        self.steps.append(step)

    def stage_value(self, val: Any) -> Any:
        """A number as an array."""
        with core.eval_context():
            return val if isinstance(val, Watched) else jax.numpy.asarray(val)

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: Mapping[str, Any], /) -> Any:
        """An operation that the user's code comes to."""

        def function(*operands: Any) -> Sequence[Any]:
            results = primitive.bind(*operands, **params)
            return results if primitive.multiple_results else [results]

        here = words.place(current().traceback)
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

        here = words.place(current().traceback)
        values = [self.value(x) for x in tracers]
        try:
            with core.eval_context():
                program = jax.make_jaxpr(staged)(*values)
        except jax.errors.JAXTypeError:  # it looks at its values: its steps are seen, and not its rule
            with core.set_current_trace(self):
                return functions[0].call_wrapped(*tracers)
        with core.eval_context():
            return self.follow(program, tracers, here, False)

    def _step(self, call: words.Place) -> Callable[[Any, list[Any]], Sequence[Any]]:
        def step(equation: Any, operands: list[Any]) -> Sequence[Any]:
            own = words.place(equation.source_info.traceback)
            here = words.Place(own.where or call.where, own.word if own.where else call.word)
            function = _binding(equation)
            return self.operation(equation.primitive.name, equation.params, function, operands, here)

        return step

    def follow(self, program: Any, operands: Sequence[Any], call: words.Place, own: bool) -> list[Any]:
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
        here: words.Place,
    ) -> list[Any]:
        """Run one operation, or the operations that it is made of."""
        with core.eval_context():
            if name in FOLLOWED:
                own = words.is_own(params) or not name.endswith("jit")
                if own or indices.LOOKUPS & set(words.primitives(params)):
                    call = here if own else words.Place(here.where, here.word or words.of_primitive(params["name"]))
                    return self.follow(params[FOLLOWED[name]], operands, call, own)
            if name == "cond":
                return loops.branch(self, params, operands, here)
            if name == "scan" and loops.short(params):
                return loops.unrolled(self, params, operands, here)
            return self._taken(name, params, function, operands, here)

    def _taken(
        self, name: str, params: Mapping[str, Any], function: Any, operands: Sequence[Any], here: words.Place
    ) -> list[Any]:
        values = [self.value(x) for x in operands]
        custom = name in CUSTOM_JVP or name in CUSTOM_VJP
        own = custom and words.is_own(params)
        word = words.title(params) if custom else here.word
        word = word or words.of_primitive(str(params.get("name", name)) if name.endswith("jit") else name)
        takes = [self.number(x) for x in operands]
        step = Taken(name, params, function, values, takes, here.where, word, own)
        step.path = str(current_name_stack()).replace("/", ".")
        step.run()
        step.quiet = name in PLAIN or (
            name == "convert_element_type" and step.results[0].dtype == jax.numpy.result_type(values[0])
        )
        step.note = indices.out_of_range(name, params, values)
        return self.keep(step, here, any(isinstance(x, Watched) for x in operands) or self._borrowed in takes)

    def keep(self, step: Taken, here: words.Place, reached: bool) -> list[Any]:
        """Add a step that was run to the account."""
        step.group = (here.where, here.word) if here.word is not None and not step.own else None
        given: list[Any] = []
        gives = []
        for result in step.results:
            value = self._new()
            gives.append(value)
            if reached:
                given.append(Watched(self, result, value))
            else:
                self._numbers[id(result)] = value, result
                given.append(result)
        step.gives = gives
        self.steps.append(step)
        return given


def _binding(equation: Any) -> Callable[..., Sequence[Any]]:
    return lambda *operands: bind(equation, operands)
