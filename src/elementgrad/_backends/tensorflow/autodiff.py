"""Sweeps through a TensorFlow function: one persistent tape, and programs over batches that are traced from it.

While the function runs, functions of `tf.function` inside run as the Python that they were written in, so that names in
them can be captured (`run_functions_as_python`).
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
from elementgrad._backends.tensorflow._compat import (
    Function,
    TfMethodTarget,
    bind_arguments,
    convert_with_autograph_on,
    copy_keras_mask,
    could_possibly_record,
    gen_array_ops,
    gradients_on_tape,
    uses_autograph,
)
from elementgrad._backends.tensorflow.isolate import Seeds, isolated, seeds, without_log
from elementgrad._cleanup import AttributePatch, Replace, assign, enter, scope
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import ElementgradError, OptionError

Tensor = Any
Sweep = Callable[[Tensor], list[Tensor | None]]
Relinearize = Callable[[int, Tensor], "TensorflowLinearization"]
"""The function evaluated again, with another tensor for one of its inputs, if that is an argument of it."""
FEW = 16
"""The sweeps of one kind that run one by one on the tape, before it pays to trace a program for them."""
FILLING = 8
"""A batch is filled with zeros to at most this many times its size."""


class TensorflowLinearization(Linearization):
    """One evaluation on a persistent tape, from which sweeps are traced.

    Forward sweeps transpose the reverse ones, which are linear in their seed: in a traced program nothing is left of
    the first sweep but what the second needs.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        tapes: list[Any],
        create_graph: bool,
        relinearize: Relinearize | None = None,
        seeds: Seeds | None = None,
    ):
        self.inputs = inputs
        self.outputs = outputs
        self._tapes = tapes
        self._create_graph = create_graph
        self._relinearize = relinearize
        self.seeds = seeds
        self._programs: dict[Any, list[_Program]] = {}
        self._on_tape: dict[Any, int] = {}
        """The sweeps of each kind that ran one by one."""

    @classmethod
    def of(
        cls, run: TensorFunction, inputs: Sequence[Any], create_graph: bool, order: int
    ) -> "TensorflowLinearization":
        """Evaluate a function at its inputs, on as many tapes as derivatives will be taken one of another."""
        tapes = [tf.GradientTape(persistent=True, watch_accessed_variables=False) for _ in range(order)]
        if any(held and not isinstance(x, tf.Variable) for x, held in zip(inputs, run.held, strict=True)):
            raise OptionError("a variable of the model cannot be set to a tensor; assign it, and make a new Jacobian")
        # One tensor given twice is two inputs; a variable that the function holds is read by it itself.
        sources = [
            _ActivationTap(tapes) if x is None else x if held else copy_tensor(x)
            for x, held in zip(inputs, run.held, strict=True)
        ]
        random_seeds = seeds()
        with isolated():
            for tape in tapes:
                enter(tape)
                for x in sources:
                    if not isinstance(x, _ActivationTap):
                        tape.watch(x)
            arguments = [None if held else x for x, held in zip(sources, run.held, strict=True)]
            outputs = [y if isinstance(y, tf.Tensor) else tf.convert_to_tensor(y) for y in run(*arguments)]

        def relinearize(number: int, x: Tensor) -> "TensorflowLinearization":
            is_argument = inputs[number] is not None and not run.held[number]
            others = [x if is_argument and i == number else input for i, input in enumerate(inputs)]
            return cls.of(run, others, create_graph, order)

        values = [x.value if isinstance(x, _ActivationTap) else x for x in sources]
        return cls(values, outputs, tapes, create_graph, relinearize, random_seeds)

    def gradient(self, output: int, seed: Tensor) -> "TensorflowLinearization":
        *outer, inner = self._tapes
        with isolated():
            for tape in outer:
                enter(tape)
            zero = tf.UnconnectedGradients.ZERO
            gradients = inner.gradient(self.outputs[output], self.inputs, seed, unconnected_gradients=zero)
            gradients = [tf.convert_to_tensor(g) for g in gradients]

        def relinearize(number: int, x: Tensor) -> "TensorflowLinearization":
            assert self._relinearize is not None
            return self._relinearize(number, x).gradient(output, seed)

        return TensorflowLinearization(self.inputs, gradients, outer, self._create_graph, relinearize, self.seeds)

    def vjp(self, output: int, inputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        return self._sweep(*self._make_vjp(output, inputs), seeds)

    def vjp_of_element(self, output: int, inputs: Sequence[int], index: tuple[int, ...]) -> list[Tensor | None] | None:
        y = self.outputs[output]
        if not tf.executing_eagerly() or self._create_graph or could_possibly_record():
            return None
        seed = None
        if index:
            numbers = np.zeros(y.shape, y.dtype.as_numpy_dtype)
            numbers[index] = 1
            seed = tf.convert_to_tensor(numbers)
        with isolated():
            return self._run_one(self._make_vjp(output, inputs)[1], seed)

    def jvp(self, input: int, outputs: Sequence[int], seeds: Tensor) -> list[Tensor | None]:
        return self._sweep(*self._make_jvp(input, outputs), seeds)

    def _make_vjp(self, output: int, inputs: Sequence[int]) -> tuple[Any, Sweep]:
        tape, y, xs = self._tapes[-1], self.outputs[output], [self.inputs[i] for i in inputs]
        return ("reverse", output, *inputs), partial(_vjp, tape, y, xs)

    def _make_jvp(self, input: int, outputs: Sequence[int]) -> tuple[Any, Sweep]:
        tape, x, ys = self._tapes[-1], self.inputs[input], [self.outputs[output] for output in outputs]
        return ("forward", input, *outputs), lambda seed: [_jvp(tape, x, y, seed) for y in ys]

    def _sweep(self, key: Any, sweep: Sweep, seeds: Tensor) -> list[Tensor | None]:
        program = self._find_program(key, seeds.shape[0]) if seeds.shape[0] > 1 else None
        if program is not None and program.is_pure:
            derivatives = program(seeds)
        else:
            with isolated():  # a rule may run parts of the function again
                derivatives = self._trace_and_run(key, sweep, seeds)
        if self._create_graph or (tf.executing_eagerly() and not could_possibly_record()):
            return derivatives
        return [None if t is None else tf.stop_gradient(t) for t in derivatives]

    def _trace_and_run(self, key: Any, sweep: Sweep, seeds: Tensor) -> list[Tensor | None]:
        if seeds.shape[0] == 1:
            return [None if derivative is None else derivative[None] for derivative in self._run_one(sweep, seeds[0])]
        if self._runs_on_tape(key, seeds.shape[0]):
            rows = [self._run_one(sweep, seed) for seed in tf.unstack(seeds)]
            return [None if parts[0] is None else tf.stack(parts) for parts in zip(*rows, strict=True)]
        try:
            program = self._get_program(key, sweep, seeds.shape[1:], seeds.dtype, seeds.shape[0])
        except Exception as error:
            raise NotBatchableError(reason(error)) from error
        return program(seeds)

    def _runs_on_tape(self, key: Any, count: int) -> bool:
        """Return True for the first few sweeps of a kind, as long as there is no program for them."""
        if not tf.executing_eagerly() or self._programs.get(key) or self._on_tape.get(key, 0) + count > FEW:
            return False
        self._on_tape[key] = self._on_tape.get(key, 0) + count
        return True

    def _run_one(self, sweep: Sweep, seed: Tensor | None) -> list[Tensor | None]:
        try:
            return sweep(seed)
        except (LookupError, NotImplementedError) as error:  # the errors about a missing rule
            raise UnsupportedError(reason(error)) from error

    def _find_program(self, key: Any, count: int) -> "_Program | None":
        """Return the program for a batch of `count` seeds, if it was traced before."""
        programs = self._programs.get(key, [])
        if programs and count <= programs[0].count <= FILLING * count:
            return programs[0]
        return programs[1] if len(programs) > 1 else None

    def _get_program(self, key: Any, sweep: Sweep, shape: Any, dtype: Any, count: int) -> "_Program":
        """Return the program for a batch of `count` seeds: one for the first count that is needed, one for all others.

        A known count makes tracing faster. A smaller batch is filled up to it, unless most would be filling.
        """
        program = self._find_program(key, count)
        if program is None:
            programs = self._programs.setdefault(key, [])
            with without_log():  # what cannot be traced runs in another way, which needs no report
                program = _Program(sweep, shape, dtype, None if programs else count)
            programs.append(program)
        return program

    def pattern(self, output: int, input: int, local: bool) -> Pattern | None:
        from elementgrad._backends.tensorflow.sparsity import find_pattern

        x, y, relinearize = self.inputs[input], self.outputs[output], self._relinearize

        def here(seed: Tensor) -> tuple[None, Tensor | None]:
            return None, self._make_vjp(output, [input])[1](seed)[0]

        def at(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor | None]:
            assert relinearize is not None
            linear = relinearize(input, x)
            return linear.inputs[input], linear._make_vjp(output, [input])[1](seed)[0]

        try:
            if local or relinearize is None:
                return find_pattern(here, None, y, x)
            with isolated():
                return find_pattern(at, x, y, x)
        except ElementgradError:
            raise
        except Exception as error:  # it has run with numbers, so that this is about their absence
            raise UnsupportedError(reason(error)) from error

    def peak_bytes(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        key, sweep = self._make_jvp(source, targets) if forward else self._make_vjp(source, targets)
        if tf.executing_eagerly() and not self._programs.get(key) and self._on_tape.get(key, 0) + sweeps <= FEW:
            ends = self.outputs if forward else self.inputs  # they run one by one, and their results are stacked
            return max([math.prod(ends[i].shape) * ends[i].dtype.size for i in targets], default=0)
        like = (self.inputs if forward else self.outputs)[source]
        try:
            return self._get_program(key, sweep, like.shape, like.dtype, sweeps).peak_bytes
        except Exception:  # what cannot be traced runs one by one
            return 0


def copy_tensor(x: Tensor) -> Tensor:
    """Return the same values as another tensor, with the mask that Keras keeps on a tensor."""
    # `tf.identity` looks for other kinds of tensors first, which takes longer than the copy.
    same = gen_array_ops.identity(x if isinstance(x, tf.Tensor) else tf.convert_to_tensor(x))
    copy_keras_mask(x, same)
    return same


class _ActivationTap:
    """An activation, watched by the tapes from where the function computes it."""

    value: Tensor

    def __init__(self, tapes: Sequence[Any]):
        self._tapes = tapes

    def __call__(self, x: Tensor) -> Tensor:
        self.value = copy_tensor(x)
        for tape in self._tapes if x.dtype.is_floating or x.dtype.is_complex else ():
            tape.watch(self.value)
        return self.value


def _vjp(tape: Any, y: Tensor, xs: Sequence[Tensor], seed: Tensor | None) -> list[Tensor | None]:
    return [
        gradient if gradient is None or isinstance(gradient, tf.Tensor) else tf.convert_to_tensor(gradient)
        for gradient in gradients_on_tape(tape, y, xs, seed)
    ]


def _jvp(tape: Any, x: Tensor, y: Tensor, seed: Tensor) -> Tensor | None:
    cotangent = tf.zeros_like(y)
    with scope():
        outer = tf.GradientTape(watch_accessed_variables=False)
        enter(outer)
        outer.watch(cotangent)
        (gradient,) = _vjp(tape, y, [x], cotangent)
    if gradient is None:
        return None
    try:
        tangent = outer.gradient(gradient, cotangent, output_gradients=seed)
    except (LookupError, NotImplementedError, TypeError, ValueError, tf.errors.OpError) as error:
        raise UnsupportedError(reason(error)) from error
    if tangent is None:
        raise UnsupportedError("a reverse rule cannot be transposed")
    return tf.convert_to_tensor(tangent)


class _Program:
    """A sweep over batches of seeds, traced once; it knows which derivatives have a path, and how large they get."""

    def __init__(self, sweep: Sweep, shape: Any, dtype: Any, count: int | None):
        paths: list[bool] = []
        sizes: list[int] = []

        def one(seed: Tensor) -> list[Tensor]:
            derivatives = sweep(seed)
            paths[:] = [derivative is not None for derivative in derivatives]
            sizes[:] = map(_result_bytes, tf.compat.v1.get_default_graph().get_operations())
            return [derivative for derivative in derivatives if derivative is not None] or [tf.zeros([])]

        signature = [tf.TensorSpec([count, *shape], dtype)]
        traced = tf.function(lambda seeds: tf.vectorized_map(one, seeds), signature, autograph=False)
        self._run = traced.get_concrete_function()
        self._paths = paths
        self.peak_bytes = max(sizes, default=0)
        self.count = count or 0
        self.is_pure = not any(operation.op_def.is_stateful for operation in self._run.graph.get_operations())
        """True if it changes nothing and draws nothing, so that it can run as it stands."""

    def __call__(self, seeds: Tensor) -> list[Tensor | None]:
        count = seeds.shape[0]
        try:
            if count < self.count:
                seeds = tf.concat([seeds, tf.zeros([self.count - count, *seeds.shape[1:]], seeds.dtype)], 0)
            stacks = self._run(seeds)
        except Exception as error:
            raise NotBatchableError(reason(error)) from error
        derivatives = iter([stack[:count] for stack in stacks] if count < self.count else stacks)
        return [next(derivatives) if path else None for path in self._paths]


def _result_bytes(operation: Any) -> int:
    if operation.type == "Placeholder":  # from outside, so that it is there already
        return 0
    known = [y for y in operation.outputs if y.shape.is_fully_defined()]
    return sum(math.prod(y.shape) * y.dtype.size for y in known)


class _StagingState(threading.local):
    graphs: tuple[Any, ...] = ()
    unfinished: Any = None


_local = _StagingState()


@contextmanager
def run_functions_as_python() -> Iterator[None]:
    """Have this thread's calls of compiled functions run their Python, traced or not as the caller is."""
    with scope():
        _call_patch.enter()
        assign(_local, "graphs", (*_local.graphs, _current_graph()))
        yield


def may_leave_unfinished() -> None:
    """Allow the graph that is being traced to end where a run stops, until the innermost open scope is left."""
    assign(_local, "unfinished", _current_graph())


def can_leave_run() -> bool:
    """Return True if what is running can be left now: eager code, or a graph that nothing but a part is used of.

    Other graphs are made to their end, with what they write.
    """
    return tf.executing_eagerly() or _current_graph() is _local.unfinished


def came_through_function(error: BaseException) -> bool:
    """Return True if an exception comes out of a compiled function that ran as Python."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code.co_filename == __file__ and code.co_name == "call_python" for code in codes)


def python_function_of(function: Any) -> Any:
    """Return the function that the user wrote, for one that is compiled; any other is returned as it is."""
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


def is_in_inner_graph(x: Any) -> bool:
    """Return True if a tensor is of a graph inside that in which the run started: of a loop or a branch."""
    return bool(_local.graphs) and getattr(x, "graph", None) is not _local.graphs[-1]


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _install(replace: Replace) -> None:
    original = Function.__call__

    @wraps(original)
    def call_python(function: Any, *args: Any, **kwargs: Any) -> Any:
        python = function.python_function
        if not _local.graphs or _is_of_tensorflow(python):
            return original(function, *args, **kwargs)
        args, kwargs = _convert_arguments(function, args, kwargs)
        if uses_autograph(function) and not tf.executing_eagerly():
            python = convert_with_autograph_on(python)
        return python(*args, **kwargs)

    replace(Function, "__call__", call_python)


_call_patch = AttributePatch(_install)


def _convert_arguments(function: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments as the Python of a compiled function gets them: as tensors where its signature says so."""
    bound = bind_arguments(function, args, kwargs)
    args, kwargs = bound.args, bound.kwargs
    if any(isinstance(leaf, np.ndarray) for leaf in tf.nest.flatten((args, kwargs))):
        args, kwargs = tf.nest.map_structure(_to_tensor, (args, kwargs))
    return args, kwargs


def _to_tensor(x: Any) -> Any:
    return tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x


def _is_of_tensorflow(function: Any) -> bool:
    # Its own functions, such as those of `tf.vectorized_map`, need the graphs that they are traced into.
    return str(getattr(function, "__module__", "")).startswith("tensorflow.")
