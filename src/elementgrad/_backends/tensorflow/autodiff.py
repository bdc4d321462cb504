"""Sweeps through a TensorFlow function: one persistent tape, and programs over stacks traced from it.

Functions of `tf.function` that run as the Python they were written in, so that what they compute can be met.
"""

import math
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.autodiff import Linearization, NotBatchableError, TensorFunction, UnsupportedError, reason
from elementgrad._backends.monkeypatch import AttributePatch, Replace
from elementgrad._backends.tensorflow._compat import (
    ControlStatusCtx,
    Function,
    Status,
    TfMethodTarget,
    bind_function_inputs,
    could_possibly_record,
)
from elementgrad._backends.tensorflow.isolate import Seeds, isolated, seeds, without_log
from elementgrad._cleanup import assign, enter, scope
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import ElementgradError, OptionError

Tensor = Any
Sweep = Callable[[Tensor], list[Tensor | None]]
Anew = Callable[[int, Tensor], "TensorflowLinearization"]
"""The function evaluated again, with another tensor for one of its inputs, if that is an argument of it."""
FILLING = 8
"""A stack is filled with zeros to at most so many times its size."""


class TensorflowLinearization(Linearization):
    """One evaluation on a persistent tape. Sweeps are traced from the tape, so that they start where it ends.

    Forward sweeps transpose the reverse ones, which are linear in their seed: in a traced program nothing is left of
    the first sweep but what the second needs.
    """

    traces = True

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        tapes: list[Any],
        create_graph: bool,
        anew: Anew | None = None,
        seeds: Seeds | None = None,
    ):
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self._tapes = tapes
        self._create_graph = create_graph
        self._anew = anew
        self.seeds = seeds
        self._programs: dict[Any, list[_Program]] = {}

    @classmethod
    def of(
        cls, run: TensorFunction, inputs: Sequence[Any], create_graph: bool, order: int
    ) -> "TensorflowLinearization":
        """Evaluate a function at its inputs, on as many tapes as derivatives will be taken one of another."""
        tapes = [tf.GradientTape(persistent=True, watch_accessed_variables=False) for _ in range(order)]
        if any(held and not isinstance(x, tf.Variable) for x, held in zip(inputs, run.held, strict=True)):
            raise OptionError(
                "a variable that the model holds is not set to a tensor; assign it, and make the Jacobian anew"
            )
        # One tensor given twice is two inputs; a variable that the function holds is read by it itself.
        sources = [
            _ActivationTap(tapes) if x is None else x if held else again(x)
            for x, held in zip(inputs, run.held, strict=True)
        ]
        drawn = seeds()
        with isolated():
            for tape in tapes:
                enter(tape)
                tape.watch([x for x in sources if not isinstance(x, _ActivationTap)])
            given = [None if held else x for x, held in zip(sources, run.held, strict=True)]
            outputs = [tf.convert_to_tensor(y) for y in run(*given)]

        def anew(number: int, x: Tensor) -> "TensorflowLinearization":
            other = inputs[number] is not None and not run.held[number]
            given = [x if other and i == number else input for i, input in enumerate(inputs)]
            return cls.of(run, given, create_graph, order)

        values = [x.value if isinstance(x, _ActivationTap) else x for x in sources]
        return cls(values, outputs, tapes, create_graph, anew, drawn)

    def gradient(self, output: int, seed: Tensor) -> "TensorflowLinearization":
        *outer, inner = self._tapes
        with isolated():
            for tape in outer:
                enter(tape)
            zero = tf.UnconnectedGradients.ZERO
            gradients = inner.gradient(self.outputs[output], self.inputs, seed, unconnected_gradients=zero)
            gradients = [tf.convert_to_tensor(g) for g in gradients]

        def anew(number: int, x: Tensor) -> "TensorflowLinearization":
            assert self._anew is not None
            return self._anew(number, x).gradient(output, seed)

        return TensorflowLinearization(self.inputs, gradients, outer, self._create_graph, anew, self.seeds)

    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        return self._sweep(*self._pulling(output, inputs), seeds)

    def jvp(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        return self._sweep(*self._pushing(input, outputs), seeds)

    def _pulling(self, output: int, inputs: Sequence[int]) -> tuple[Any, Sweep]:
        tape, y, xs = self._tapes[-1], self.outputs[output], [self.inputs[i] for i in inputs]
        return ("reverse", output, *inputs), partial(_pulled, tape, y, xs)

    def _pushing(self, input: int, outputs: Sequence[int]) -> tuple[Any, Sweep]:
        tape, x, ys = self._tapes[-1], self.inputs[input], [self.outputs[output] for output in outputs]
        return ("forward", input, *outputs), lambda seed: [_pushed(tape, x, y, seed) for y in ys]

    def _sweep(self, key: Any, sweep: Sweep, seeds: Tensor) -> list[Tensor | None]:
        program = self._known(key, seeds.shape[0]) if seeds.shape[0] > 1 else None
        if program is not None and program.pure:
            swept = self._stacked(program, seeds)
        else:
            with isolated():  # a rule may run parts of the function again
                swept = self._swept(key, sweep, seeds)
        if self._create_graph or (tf.executing_eagerly() and not could_possibly_record()):
            return swept
        return [None if t is None else tf.stop_gradient(t) for t in swept]

    def _swept(self, key: Any, sweep: Sweep, seeds: Tensor) -> list[Tensor | None]:
        if seeds.shape[0] == 1:
            try:
                return [None if derivative is None else derivative[None] for derivative in sweep(seeds[0])]
            except (LookupError, NotImplementedError) as error:  # how a rule is missed
                raise UnsupportedError(reason(error)) from error
        try:
            program = self._program(key, sweep, seeds.shape[1:], seeds.dtype, seeds.shape[0])
        except Exception as error:
            raise NotBatchableError(reason(error)) from error
        return self._stacked(program, seeds)

    def _stacked(self, program: "_Program", seeds: Tensor) -> list[Tensor | None]:
        try:
            return program(seeds)
        except Exception as error:
            raise NotBatchableError(reason(error)) from error

    def _known(self, key: Any, count: int) -> "_Program | None":
        """The program for a stack of so many seeds, if it was traced before."""
        programs = self._programs.get(key, [])
        if programs and count <= programs[0].count <= FILLING * count:
            return programs[0]
        return programs[1] if len(programs) > 1 else None

    def _program(self, key: Any, sweep: Sweep, shape: Any, dtype: Any, count: int) -> "_Program":
        """The program for a stack of so many seeds: one for the first count asked for, one for all others.

        A known count makes tracing faster. A smaller stack is filled up to it, unless most would be filling.
        """
        known = self._known(key, count)
        if known is None:
            programs = self._programs.setdefault(key, [])
            known = _Program.quietly(sweep, shape, dtype, None if programs else count)
            programs.append(known)
        return known

    def pattern(self, output: int, input: int, local: bool) -> Pattern | None:
        from elementgrad._backends.tensorflow.sparsity import find_pattern

        x, y, anew = self.inputs[input], self.outputs[output], self._anew

        def here(seed: Tensor) -> tuple[None, Tensor | None]:
            return None, self._pulling(output, [input])[1](seed)[0]

        def at(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor | None]:
            assert anew is not None
            linear = anew(input, x)
            return linear.inputs[input], linear._pulling(output, [input])[1](seed)[0]

        try:
            if local or anew is None:
                return find_pattern(here, None, y, x)
            with isolated():
                return find_pattern(at, x, y, x)
        except ElementgradError:
            raise
        except Exception as error:  # it has run with numbers, so that this is about their absence
            raise UnsupportedError(reason(error)) from error

    def work(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        key, sweep = self._pushing(source, targets) if forward else self._pulling(source, targets)
        like = (self.inputs if forward else self.outputs)[source]
        try:
            return self._program(key, sweep, like.shape, like.dtype, sweeps).work
        except Exception:  # what cannot be traced runs one by one
            return 0


def again(x: Tensor) -> Tensor:
    """The same values as another tensor, with what Keras keeps on a tensor to say which steps count."""
    same = tf.identity(x)
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        same._keras_mask = mask
    return same


class _ActivationTap:
    """A value that the function computes, watched from where it passes."""

    value: Tensor

    def __init__(self, tapes: Sequence[Any]):
        self._tapes = tapes

    def __call__(self, x: Tensor) -> Tensor:
        self.value = again(x)
        for tape in self._tapes if x.dtype.is_floating or x.dtype.is_complex else ():
            tape.watch(self.value)
        return self.value


def _pulled(tape: Any, y: Tensor, xs: Sequence[Tensor], seed: Tensor) -> list[Tensor | None]:
    gradients = tape.gradient(y, xs, output_gradients=seed)
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def _pushed(tape: Any, x: Tensor, y: Tensor, seed: Tensor) -> Tensor | None:
    seed_of_output = tf.zeros_like(y)
    with scope():
        outer = tf.GradientTape(watch_accessed_variables=False)
        enter(outer)
        outer.watch(seed_of_output)
        (pulled,) = _pulled(tape, y, [x], seed_of_output)
    if pulled is None:
        return None
    try:
        pushed = outer.gradient(pulled, seed_of_output, output_gradients=seed)
    except (LookupError, NotImplementedError, TypeError, ValueError, tf.errors.OpError) as error:
        raise UnsupportedError(reason(error)) from error
    if pushed is None:
        raise UnsupportedError("a reverse rule on the way cannot be transposed")
    return tf.convert_to_tensor(pushed)


class _Program:
    """A sweep over stacks of seeds, traced once; it knows which derivatives have a path, and how large they get."""

    def __init__(self, sweep: Sweep, shape: Any, dtype: Any, count: int | None):
        paths: list[bool] = []
        work: list[int] = []

        def one(seed: Tensor) -> list[Tensor]:
            swept = sweep(seed)
            paths[:] = [derivative is not None for derivative in swept]
            work[:] = map(_bytes, tf.compat.v1.get_default_graph().get_operations())
            return [derivative for derivative in swept if derivative is not None] or [tf.zeros([])]

        signature = [tf.TensorSpec([count, *shape], dtype)]
        traced = tf.function(lambda seeds: tf.vectorized_map(one, seeds), signature, autograph=False)
        self._run = traced.get_concrete_function()
        self._paths = paths
        self.work = max(work, default=0)
        self.count = count or 0
        self.pure = not any(operation.op_def.is_stateful for operation in self._run.graph.get_operations())
        """Whether it changes nothing and draws nothing, so that it can run as it stands."""

    @classmethod
    def quietly(cls, sweep: Sweep, shape: Any, dtype: Any, count: int | None) -> "_Program":
        """Trace without TensorFlow's reports: what cannot be traced runs in another way."""
        with without_log():
            return cls(sweep, shape, dtype, count)

    def __call__(self, seeds: Tensor) -> list[Tensor | None]:
        count = seeds.shape[0]
        if count < self.count:
            seeds = tf.concat([seeds, tf.zeros([self.count - count, *seeds.shape[1:]], seeds.dtype)], 0)
        swept = self._run(seeds)
        derivatives = iter([stack[:count] for stack in swept] if count < self.count else swept)
        return [next(derivatives) if path else None for path in self._paths]


def _bytes(operation: Any) -> int:
    """The bytes of what an operation makes; what it is given from outside is there already."""
    if operation.type == "Placeholder":
        return 0
    known = [y for y in operation.outputs if y.shape.is_fully_defined()]
    return sum(math.prod(y.shape) * y.dtype.size for y in known)


class _StagingState(threading.local):
    graphs: tuple[Any, ...] = ()


_local = _StagingState()


@contextmanager
def unstaged() -> Iterator[None]:
    """Have this thread's calls of compiled functions run their Python, traced or not as the caller is."""
    with scope():
        _calls.enter()
        assign(_local, "graphs", (*_local.graphs, _graph()))
        yield


def passed_by(error: BaseException) -> bool:
    """Whether an exception comes out of a compiled function that ran as Python."""
    return any(frame.f_code.co_filename == __file__ for frame, _ in traceback.walk_tb(error.__traceback__))


def written(function: Any) -> Any:
    """The function that the user wrote, of one that is compiled; any other is that itself."""
    if not isinstance(function, Function):
        return function
    python = function.python_function
    for inner in ("__original_wrapped__", "__wrapped__"):  # AutoGraph puts its own in the second, once it has run
        if hasattr(python, inner):
            python = getattr(python, inner)
            break
    owner = getattr(python, "__self__", None)
    # A compiled method holds its object in a box.
    return MethodType(python.__func__, owner.target) if isinstance(owner, TfMethodTarget) else python


def inside(x: Any) -> bool:
    """Whether a tensor is of a graph inside of that in which the run started: of a loop or a branch."""
    return bool(_local.graphs) and getattr(x, "graph", None) is not _local.graphs[-1]


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _install(replace: Replace) -> None:
    original = Function.__call__

    @wraps(original)
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        python = function.python_function
        if not _local.graphs or _of_tensorflow(python):
            return original(function, *args, **kwargs)
        args, kwargs = _converted(function, args, kwargs)
        if function._autograph and not tf.executing_eagerly():
            python = tf.__internal__.autograph.tf_convert(python, ControlStatusCtx(Status.ENABLED))
        return python(*args, **kwargs)

    replace(Function, "__call__", call)


_calls = AttributePatch(_install)


def _converted(function: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as the Python of a compiled function gets them: tensors for arrays and where its signature says so."""
    bound = bind_function_inputs(args, kwargs, function.function_type, function._default_values)
    args, kwargs = bound.args, bound.kwargs
    if any(isinstance(leaf, np.ndarray) for leaf in tf.nest.flatten((args, kwargs))):
        args, kwargs = tf.nest.map_structure(_tensor, (args, kwargs))
    return args, kwargs


def _tensor(x: Any) -> Any:
    return tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x


def _of_tensorflow(function: Any) -> bool:
    """TensorFlow's own functions, such as those of `tf.vectorized_map`, need the graphs that they are traced into."""
    return str(getattr(function, "__module__", "")).startswith("tensorflow.")
