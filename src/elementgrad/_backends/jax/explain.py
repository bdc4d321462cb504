"""Explanations on JAX: a run of a function on its numbers, which can be followed again.

The records of one call of a public function, such as `jax.nn.softmax`, are merged into one. JAX's own rules tell which
results have a derivative. Sweeps over the same records follow tangents, cotangents and masks of elements, one operation
at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad._backends.autodiff import TensorFunction, reason
from elementgrad._backends.jax.autodiff import JaxLinearization, plain_errors
from elementgrad._backends.jax.explain_rules import (
    CUTS,
    NUMBERS,
    RANDOM_OPS,
    JaxOp,
    is_differentiable,
    is_user_file,
    kind_of,
)
from elementgrad._backends.jax.trace import JaxOpRecorder, TracedValue, value_of
from elementgrad._backends.source_location import user_line_of
from elementgrad._cleanup import enter, scope
from elementgrad._explain.backend import ExplainBackend
from elementgrad._explain.connect import connect
from elementgrad._explain.trace import Hint, Op, OpGraph, Record, Trace
from elementgrad.errors import TracedError

Array = Any


class JaxRecord(Record):
    """A function that ran on its numbers."""

    def __init__(self, run: TensorFunction, sources: Sequence[Array | None]):
        if any(isinstance(x, jax.core.Tracer) for x in (*sources, *run.others)):
            raise TracedError("explain looks at numbers, and code that is traced has none; call it outside of jax.jit")
        self.run, self.arguments = run, sources
        recorder = JaxOpRecorder(run.others)
        started: dict[int, TracedValue] = {}

        def start(index: int, x: Array) -> TracedValue:
            return started.setdefault(index, recorder.trace_source(x))

        with plain_errors(), recorder.record_thread():
            pairs = enumerate(sources)
            targets = run(*[partial(start, n) if x is None else start(n, x) for n, x in pairs])
        self.sources = [started[n] for n in range(len(sources))]
        self.targets = [(recorder.value_id(y), value_of(y)) for y in targets]
        self.ops = merge_calls(recorder.ops, [value_id for value_id, _ in self.targets])
        self.differs = recorder.differs
        self.is_random = any(not RANDOM_OPS.isdisjoint({op.op_type, *op.inner}) for op in recorder.ops)

    def linearize(self) -> JaxLinearization:
        """Linearize the function itself, by one more run of it."""
        # Where numbers leave JAX no trace of the function succeeds, so that none is tried. The sizes of activations
        # are known from the record.
        traceable = not any(op.cut_cause == "left-framework" for op in self.ops)
        zeros = [jnp.zeros_like(source.value) for source in self.sources]
        return JaxLinearization.of(self.run, list(self.arguments), zeros, traceable)

    def trace(self, source: int, target: int) -> Trace:
        return JaxTrace(self, source, target)


class JaxTrace(Trace):
    """A record, seen from one source to one target."""

    graph: OpGraph[JaxOp]
    numbers = NUMBERS

    def __init__(self, record: JaxRecord, source: int, target: int):
        self._record, self._index = record, (source, target)
        start, (target_id, self.target) = record.sources[source], record.targets[target]
        self.source = start.value
        # The rules are asked only now that the run is over: the user's own may expect to be called once in a run.
        self.graph = connect(record.ops, [start.value_id], target_id, NUMBERS, CUTS, is_random=record.is_random)

    @property
    def follows_rules(self) -> bool:  # type: ignore[override]
        """True unless the record may differ from the function.

        JAX may refuse to differentiate a function in which numbers leave JAX, and it connects what a branch of `cond`
        connects that was not taken.
        """
        ops, connected = self.graph.ops, self.graph.target in self.graph.connected
        if self._record.differs or any(op.cut_cause == "left-framework" and not op.branches for op in ops):
            return False
        return connected or all(op.op_type != "cond" for op in ops)

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Array | None:
        source, target = self._index
        seed = self.numbers.at(self.target, of, weights)
        with plain_errors():
            pulled = self._record.linearize().vjp(target, [source], seed[None])
        return next((g[0] for g in pulled if g is not None), None)

    def hint_for_error(self, error: Exception) -> Hint | None:
        why = f"jax refuses to differentiate it: {reason(error)}"
        exits = [op for op in self.graph.ops if op.cut_cause == "left-framework" and not op.branches]
        if isinstance(error, jax.errors.JAXTypeError) and exits:
            return Hint("left-framework", why, exits[0])
        for op in self.graph.ops:
            if op.error is not None:
                return Hint(op.cut_cause or "no-rule", reason(op.error), op)
        # The function itself ran without an error, so that this one comes from tracing it.
        return Hint(None, why, Op("a transformation of jax", user_line_of(error, is_user_file)))


class JaxExplain(ExplainBackend):
    name = "jax"

    def record(self, run: TensorFunction, sources: Sequence[Array | None]) -> Record:
        return JaxRecord(run, sources)

    def run_at(self, run: TensorFunction, tensors: Sequence[Array | None]) -> Sequence[Array]:
        return run(*tensors)

    @contextmanager
    def without_number_checks(self) -> Iterator[None]:
        with scope():
            enter(jax.debug_nans(False))
            enter(jax.debug_infs(False))
            yield

    def maybe_compile(self, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return jax.jit(function)


implementation = JaxExplain()


def merge_calls(ops: Sequence[JaxOp], targets: Sequence[int]) -> list[JaxOp]:
    """Make one operation of those that follow each other in one call.

    What such a function does inside is then its own business: a softmax subtracts its largest element without a
    derivative, and is differentiable all the same.
    """
    calls = [list(call) for _, call in groupby(ops, key=lambda op: id(op) if op.call is None else op.call)]
    last_use = {value: index for index, call in enumerate(calls) for op in call for value in op.inputs}
    last_use |= dict.fromkeys(targets, len(calls))
    return [call[0] if len(call) == 1 else _merge(call, index, last_use) for index, call in enumerate(calls)]


def _merge(call: Sequence[JaxOp], index: int, last_use: Mapping[int, int]) -> JaxOp:
    made = {value: x for op in call for value, x in zip(op.outputs, op.results, strict=True)}
    operands = {v: x for op in call for v, x in zip(op.inputs, op.operands, strict=True) if v not in made}
    results = {value: x for value, x in made.items() if last_use.get(value, -1) > index}

    def function(*xs: Array) -> list[Array]:
        values = dict(zip(operands, xs, strict=True))
        for op in call:
            values.update(zip(op.outputs, op.function(*[values[v] for v in op.inputs]), strict=True))
        return [values[v] for v in results]

    first = call[0]
    inner = frozenset(name for op in call for name in op.inner)
    note = next((op.note for op in call if op.note), "")
    return JaxOp(
        first.operation,
        first.where,
        first.module,
        tuple(operands),
        tuple(results),
        note=note,
        hidden=all(op.hidden for op in call),
        op_type="call",
        kind=kind_of("call", first.operation, inner),
        operands=list(operands.values()),
        results=list(results.values()),
        misses=next((op.misses for op in call if op.misses), ""),
        written=_written_values(call),
        can_rerun=all(op.can_rerun for op in call),
        function=function,
        inner=inner,
        updates=first.updates,
        compares=any(op.compares or not all(map(is_differentiable, op.results)) for op in call),
    )


def _written_values(call: Sequence[JaxOp]) -> frozenset[int]:
    """Return the ids of the values that lead to an array that one of the operations writes into."""
    written: set[int] = set()
    for op in reversed(call):
        written.update(op.written)
        if not written.isdisjoint(op.outputs) and not op.written:
            written.update(op.inputs)
    return frozenset(written)
