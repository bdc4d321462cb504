"""JAX's part in reads: seeds, sparse matrices, the configuration of worker processes, and `eg.contributions`.

For contributions, every argument slot of every equation that takes one value is an input of its own.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from elementgrad._backends.autodiff import Linearization, TensorFunction, Use, reason
from elementgrad._backends.jax._compat import jaxprs_in_params
from elementgrad._backends.jax.autodiff import JaxLinearization, plain_errors
from elementgrad._backends.jax.program import FOLLOWED, Step, bind, evaluate, follow, shift
from elementgrad._backends.jax.sharding import make_varying, varying_axes
from elementgrad._backends.jax.tensor import WIDE
from elementgrad._backends.source_location import is_user_code, location_text
from elementgrad._cleanup import enter, scope
from elementgrad._read.backend import Layout, Read, ReadBackend, Recorder
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import DtypeError, FrameworkError

Array = jax.Array
MARK = "elementgrad"
"""The name of the value in the program; no tag has it, as theirs go on after a colon."""
JAX_PACKAGES = ("jax", "jaxlib", "flax")
"""Packages whose lines of code are not the user's."""


def linearize_uses(
    run: TensorFunction, inputs: Sequence[Array | None], input: int
) -> tuple[JaxLinearization, list[Use]]:
    """Linearize a function in changes to one of its inputs, each in one of its uses alone, at zero."""
    program = _WatchedProgram(run, inputs, input)
    uses = program.find_uses()
    linear = JaxLinearization(program.outputs, program.zeros(len(uses)))
    connected = sorted(set().union(*linear.paths))
    if connected and len(connected) == len(uses):
        return linear, uses
    if not connected:  # one input all the same, since it tells the shape
        return JaxLinearization(lambda _: program.outputs(*[None] * len(uses)), program.zeros(1)), []

    def run_connected(*changes: Array) -> Sequence[Array]:
        by_use = dict(zip(connected, changes, strict=True))
        return program.outputs(*[by_use.get(index) for index in range(len(uses))])

    return JaxLinearization(run_connected, program.zeros(len(connected))), [uses[index] for index in connected]


class _WatchedValue:
    """The value, wherever it goes in the program under another name."""

    def __init__(self, value: Any):
        self.value = value


class _WatchedProgram:
    """A program that follows one value, and changes it in some of its uses."""

    def __init__(self, run: TensorFunction, inputs: Sequence[Array | None], input: int):
        x = inputs[input]
        try:
            with plain_errors():
                self._program = jax.make_jaxpr(
                    lambda: tuple(
                        run(*inputs[:input], self._mark if x is None else self._mark(x), *inputs[input + 1 :])
                    )
                )()
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise FrameworkError(
                f"contributions need a function that JAX can trace, and this one branches on values: {reason(error)}"
            ) from error

    def find_uses(self) -> list[Use]:
        """Return all uses, in the order of computation."""
        uses: list[Use] = []
        jax.eval_shape(lambda: self._run([], uses))
        return uses

    def outputs(self, *changes: Array | None) -> list[Array]:
        """Return the results, with a change in each of the uses, or None for none."""
        return self._run(changes, [])

    def zeros(self, count: int) -> list[Array]:
        """Return `count` changes that change nothing."""
        return [make_varying(jnp.zeros(self._shape, self._dtype), self._axes) for _ in range(count)]

    def _run(self, changes: Sequence[Array | None], uses: list[Use]) -> list[Array]:
        def change_in_use(value: Any, operation: str, where: str | None) -> Any:
            change = changes[len(uses)] if changes else None
            uses.append(Use(operation, where))
            return value if change is None else shift(value, change)

        def make_step(call: str | None) -> Step:
            def step(equation: Any, operands: list[Any]) -> Sequence[Any]:
                if equation.primitive.name == "name" and equation.params["name"] == MARK:
                    return [_WatchedValue(*operands)]
                if not any(isinstance(operand, _WatchedValue) for operand in operands):
                    return bind(equation, operands)
                if equation.primitive.name == "name":
                    return operands  # a name is no use
                where = _line_of(equation) or call  # JAX's own functions know nothing of their caller
                if equation.primitive.name in FOLLOWED:
                    return follow(equation, operands, make_step(where))
                use = _name_of(equation), where
                return bind(
                    equation, [change_in_use(x.value, *use) if isinstance(x, _WatchedValue) else x for x in operands]
                )

            return step

        results = evaluate(self._program.jaxpr, self._program.consts, [], make_step(None))
        return [
            change_in_use(result.value, "return", None) if isinstance(result, _WatchedValue) else result
            for result in results
        ]

    def _mark(self, x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise DtypeError(
                f"what is named is of dtype {x.dtype}, which has no gradients; make it floating point first"
            )
        self._shape, self._dtype, self._axes = x.shape, x.dtype, varying_axes(x)
        return checkpoint_name(x, MARK)


def _name_of(equation: Any) -> str:
    """Return the name that the user knows: of the function that has rules of its own, or of the body of a loop."""
    primitive = equation.primitive.name
    inner = next(iter(jaxprs_in_params(equation.params)), None)
    if inner is None or primitive in ("cond", "while"):
        return primitive
    name, _, source = str(getattr(inner.debug_info, "func_src_info", None) or "").partition(" at ")
    if len(inner.eqns) == 1 and inner.eqns[0].primitive.name in FOLLOWED:
        name = name or inner.eqns[0].params.get("name", "")
    own = primitive == "scan" and not is_user_code(source, JAX_PACKAGES)  # a loop that JAX makes around the body
    return primitive if own or not name.isidentifier() else name


def _line_of(equation: Any) -> str | None:
    """Return the innermost line of the user's code that an equation comes from."""
    traceback = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if is_user_code(frame.file_name, JAX_PACKAGES):
            return location_text(frame.file_name, frame.line_num)
    return None


class JaxRead(ReadBackend):
    uses = staticmethod(linearize_uses)

    def one_hot_seeds(self, like: Array, positions: np.ndarray, batch: int) -> Array:
        return _one_hot_seeds(positions, like.shape, like.dtype, batch)

    def transpose(self, x: Array, axes: tuple[int, ...]) -> Array:
        return jnp.transpose(x, axes)

    def matmul(self, x: Array, y: Array) -> Array:
        return x @ y

    def rounding(self, like: Array) -> str:
        return f"jax {jax.__version__}" if all(each.platform == "cpu" for each in like.devices()) else ""

    def index(self, positions: np.ndarray, like: Array) -> Any:
        # As few bits as hold them: JAX has 64 only if its configuration says so.
        return positions.astype(np.int32) if positions.max(initial=0) < 2**31 else positions

    def gather(self, x: Array, index: Any) -> Array:
        return jnp.take(x, index, mode="clip")  # all are in range, and this is the fastest mode

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Array) -> Callable[[Array], Any]:
        from jax.experimental import sparse  # which imports SciPy, a third of what JAX itself takes to import

        promises: Any = {"shape": pattern.shape, "indices_sorted": True, "unique_indices": True}
        with jax.ensure_compile_time_eval():  # numbers, not a part of a program that is being traced
            zeros = jnp.zeros(pattern.size, like.dtype)
            if layout == "csr":
                parts = zeros, jnp.asarray(pattern.columns), jnp.asarray(pattern.starts)
                empty: Any = sparse.BCSR(parts, **promises)
            else:
                places = jnp.asarray(np.stack([pattern.rows, pattern.columns], 1))
                empty = sparse.BCOO((zeros, places), **promises)
        (_, *rest), structure = jax.tree.flatten(empty)  # putting it together anew takes as long as a small sweep
        return lambda values: jax.tree.unflatten(structure, [values, *rest])

    def maybe_compile(self, read: Read) -> Read:
        compiled = jax.jit(read)
        traceable = True

        def run(x: Array) -> tuple[Array | None, Array | None, Array]:
            nonlocal traceable
            if traceable:
                try:
                    return compiled(x)
                except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # it branches in Python on values
                    if isinstance(x, jax.core.Tracer):
                        raise
                    traceable = False
            return read(x)

        return run

    def recorder(self, tensors: Sequence[Array]) -> Recorder:
        raise FrameworkError(
            "eager code of jax cannot be recorded, since it leaves no trace; put it into a function f and use "
            "eg.jacobian(f, x) or eg.grad(f, x)"
        )

    def ambient_state(self, linear: Linearization) -> Any:
        return jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    @contextmanager
    def restore_ambient_state(self, state: Any) -> Iterator[None]:
        wide, precision = state
        with scope():
            enter(WIDE(wide))
            enter(jax.default_matmul_precision(precision))
            yield


@partial(jax.jit, static_argnums=(1, 2, 3))
def _one_hot_seeds(positions: np.ndarray, shape: tuple[int, ...], dtype: Any, batch: int) -> Array:
    seeds = positions[:, None, None] == jnp.arange(math.prod(shape) // batch)[None, None]
    return jnp.broadcast_to(seeds, (len(positions), batch, seeds.shape[2])).astype(dtype).reshape(-1, *shape)


implementation = JaxRead()
