"""TensorFlow's part in reads: seeds, sparse matrices, reads as graphs, worker processes, contributions, recordings.

For `eg.contributions` every use of one tensor is found in the graph that the function is traced into. A recording of
eager code is one persistent tape that watches the recorded tensors. TensorFlow numbers eager tensors as it makes them,
so the numbers at the start and the end of the block tell which tensors were made in it.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.autodiff import Linearization, TensorFunction, Use
from elementgrad._backends.source_location import is_user_code, location_text, normal_path
from elementgrad._backends.tensorflow._compat import (
    AutomaticControlDependencies,
    function_of_graph,
    function_options,
    op_def_registry,
    replace_input,
    uid,
)
from elementgrad._backends.tensorflow.autodiff import (
    Sweep,
    TensorflowLinearization,
    copy_tensor,
    run_functions_as_python,
)
from elementgrad._backends.tensorflow.isolate import isolated, with_seeds, without_log
from elementgrad._cleanup import defer, enter
from elementgrad._names.backend import Model
from elementgrad._read.backend import ElementRequest, Layout, Read, ReadBackend, Recorder, UseFlow
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import ElementgradError, FrameworkError, PlaceError

Tensor = Any
Operation = Any
PACKAGES = ("tensorflow", "keras")
"""Packages whose lines of code are not the user's."""
UNTRACEABLE = (TypeError, AttributeError, NotImplementedError, ValueError, tf.errors.OpError)
"""Errors of code that needs the values of tensors while it is traced."""
GATHERS: dict[str, Callable[[Operation, Tensor], Tensor]] = {
    "ResourceGather": lambda operation, x: tf.gather(
        x, operation.inputs[1], batch_dims=operation.get_attr("batch_dims")
    ),
    "ResourceGatherNd": lambda operation, x: tf.gather_nd(x, operation.inputs[1]),
}
"""Operations that read some of a variable's elements, and the same for a tensor."""
NOT_READING = (
    *("VariableShape", "VarIsInitializedOp", "DestroyResourceOp", "ResourceStridedSliceAssign"),
    *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"),
    *(f"ResourceScatter{verb}" for verb in ("Update", "Add", "Sub", "Mul", "Div", "Min", "Max")),
    *(f"ResourceScatterNd{verb}" for verb in ("Update", "Add", "Sub", "Min", "Max")),
)
"""Operations that take a variable and do not read it, or return nothing."""
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
"""Calls of functions that were compiled before."""
HARMLESS = {"Placeholder", "ReadVariableOp", "StatefulPartitionedCall"}
"""Operations with a state that change nothing, or only what those inside them change."""


class TensorflowRecorder(Recorder):
    """Records one block of eager code on a tape."""

    def __init__(self, tensors: Sequence[Tensor]):
        if not tf.executing_eagerly():
            raise FrameworkError(
                "eg.record does not work inside tf.function; use eg.jacobian or eg.grad with a function"
            )
        self._tensors = [_unwrap_variable(x) for x in tensors]
        self._tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self._window = (0, sys.maxsize)
        """Numbers of the tensors made in the block."""

    def start(self) -> None:
        defer(self._close_window)
        self._window = (uid(), sys.maxsize)
        enter(self._tape)
        self._tape.watch(self._tensors)

    def _close_window(self) -> None:
        if self._window[1] == sys.maxsize:
            self._window = (self._window[0], uid())

    def linear(self, of: Sequence[ElementRequest], wrt: Sequence[ElementRequest]) -> Linearization:
        outputs, inputs = [[self._find(request) for request in side] for side in (of, wrt)]
        return _RecordedTape(inputs, outputs, [self._tape], create_graph=False)

    def uses(self, of: ElementRequest, position: int, wrt: ElementRequest) -> list[UseFlow] | None:
        raise FrameworkError(
            "a recording of tensorflow does not know which operation used a tensor; put the code into a function and "
            "use eg.contributions"
        )

    def _find(self, request: ElementRequest) -> Tensor:
        if request.write is not None:
            raise PlaceError(
                f"write={request.write} of a tensor of TensorFlow, which is never written to; leave it out"
            )
        x = _unwrap_variable(request.tensor)
        if any(x is recorded for recorded in self._tensors):
            return x
        tensor_id = getattr(x, "_id", -1)
        if not tf.is_tensor(x) or isinstance(x, tf.Variable) or not self._window[0] <= tensor_id < self._window[1]:
            raise request.outside_error()
        return x


class _RecordedTape(TensorflowLinearization):
    """Sweeps through the tape of a recording, which is paused meanwhile so that it does not record them."""

    def value(self, output: int) -> Tensor:
        return tf.convert_to_tensor(self.outputs[output])

    def peak_bytes(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        with _pause_tape(self._tapes[-1]):
            return super().peak_bytes(forward, source, targets, sweeps)

    def pattern(self, output: int, input: int, local: bool) -> Pattern | None:
        with _pause_tape(self._tapes[-1]):
            return super().pattern(output, input, local)

    def _trace_and_run(self, key: Any, sweep: Sweep, seeds: Tensor) -> list[Tensor | None]:
        with _pause_tape(self._tapes[-1]):
            return super()._trace_and_run(key, sweep, seeds)


@contextmanager
def _pause_tape(tape: Any) -> Iterator[None]:
    if not tape._recording:  # outside its block, or paused already; `stop_recording` would raise
        yield
        return
    with tape.stop_recording():
        yield


def _unwrap_variable(x: Tensor) -> Tensor:
    """Return TensorFlow's variable inside one of Keras."""
    inner = getattr(x, "value", None)
    return inner if not isinstance(x, (tf.Tensor, tf.Variable)) and isinstance(inner, tf.Variable) else x


@dataclass(frozen=True)
class _ChangedFunction:
    """A function of one change for each use, which is added to the tensor in that place alone."""

    function: Callable[..., Any]
    model: Model
    program: Callable[..., Sequence[Tensor]]
    held: Sequence[bool]
    others: Sequence[Tensor] = field(default=())
    inside: bool = False

    def __call__(self, *changes: Tensor) -> Sequence[Tensor]:
        return self.program(*changes)


def linearize_uses(
    run: TensorFunction, inputs: Sequence[Tensor], input: int
) -> tuple[TensorflowLinearization, list[Use]]:
    """Evaluate a function, with the uses of one of its inputs as the inputs of the linearization."""
    trace = _UseTrace(run, inputs, input)
    with isolated():
        wrapped = tf.compat.v1.wrap_function(trace, [])
    changes = [tf.zeros(change.shape, change.dtype) for change in trace.changes]
    program = function_of_graph(wrapped, trace.changes, trace.outputs)
    changed = _ChangedFunction(run.function, run.model, program, [False] * len(changes))
    return TensorflowLinearization.of(changed, changes, create_graph=False, order=1), trace.uses


class _UseTrace:
    """A run in a graph, in which every place where one tensor is used gets a change of its own."""

    def __init__(self, run: TensorFunction, inputs: Sequence[Tensor], input: int):
        self._run = run
        self._inputs = inputs
        self._input = input
        self._held = run.held[input]
        self.uses: list[Use] = []
        self.changes: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def __call__(self) -> list[Tensor]:
        sources: list[Tensor] = []
        self.outputs = self._trace(sources)
        slots = self._find_slots(sources)
        connected = self._are_connected([change for _, change in slots])
        for (operation, change), path in zip(slots, connected, strict=True):
            if path:
                self.uses.append(Use(_snake_case(operation.type), _line_of(operation)))
                self.changes.append(change)
        return self.outputs

    def _trace(self, sources: list[Tensor]) -> list[Tensor]:
        def source(x: Tensor) -> Tensor:
            sources.append(copy_tensor(x))
            return sources[-1]

        arguments: list[Any] = [None if held else x for x, held in zip(self._inputs, self._run.held, strict=True)]
        if self._inputs[self._input] is None:
            arguments[self._input] = source
        elif not self._held:
            arguments[self._input] = source(tf.convert_to_tensor(self._inputs[self._input]))
        try:
            # What is written and read stays in its order; compiled functions are part of the graph.
            with AutomaticControlDependencies() as order, run_functions_as_python():
                return [order.mark_as_return(tf.convert_to_tensor(y)) for y in self._run(*arguments)]
        except ElementgradError:
            raise
        except UNTRACEABLE as error:
            why = (str(error).strip().splitlines() or [""])[-1].strip()  # before it AutoGraph tells where
            raise FrameworkError(
                f"the function cannot be traced, so its uses of a tensor cannot be found ({why}); leave out what needs "
                "the values of tensors in Python, such as .numpy()"
            ) from error

    def _find_slots(self, sources: list[Tensor]) -> list[tuple[Operation, Tensor]]:
        """Return every operation that uses the tensor, once for each argument slot that takes it, with its change."""
        slots: list[tuple[Operation, Tensor]] = []
        if self._held:
            slots += self._find_gathers()
            sources = self._find_reads()
        for source in sources:
            for operation in dict.fromkeys(source.consumers()):
                for slot, argument in enumerate(operation.inputs):
                    if argument is source:
                        change = _make_change(source)
                        replace_input(operation, slot, source + change)
                        slots.append((operation, change))
        order = {id(operation): at for at, operation in enumerate(tf.compat.v1.get_default_graph().get_operations())}
        return sorted(slots, key=lambda slot: order[id(slot[0])])

    def _find_reads(self) -> list[Tensor]:
        """Return the values of the variable, one for each time that it is read."""
        reads = [operation.outputs[0] for operation in self._find_users() if operation.type == "ReadVariableOp"]
        return [_copy_of_read(read) for read in reads]

    def _find_gathers(self) -> list[tuple[Operation, Tensor]]:
        """Return the operations that read some rows of the variable alone; their change is gathered in the same way."""
        slots = []
        for operation in [operation for operation in self._find_users() if operation.type in GATHERS]:
            rows = operation.outputs[0]
            users = list(dict.fromkeys(rows.consumers()))
            change = _make_change(self._inputs[self._input])
            changed = rows + GATHERS[operation.type](operation, change)
            for user in users:
                for slot, argument in enumerate(user.inputs):
                    if argument is rows:
                        replace_input(user, slot, changed)
            slots.append((operation, change))
        return slots

    def _find_users(self) -> list[Operation]:
        """Return the operations that take the variable itself; an unknown one may read it, and is an error."""
        graph = tf.compat.v1.get_default_graph()
        handle = graph.capture(self._inputs[self._input].handle)
        users = list(dict.fromkeys(handle.consumers()))
        for operation in users:
            if operation.type not in ("ReadVariableOp", *GATHERS, *NOT_READING):
                raise FrameworkError(
                    f"the variable is read inside {_describe(operation.type)}, where its uses cannot be distinguished; "
                    "read it before"
                )
        return users

    def _are_connected(self, changes: list[Tensor]) -> list[bool]:
        outputs = [y for y in self.outputs if y.dtype.is_floating or y.dtype.is_complex]
        gradients = tf.gradients(outputs, changes) if outputs and changes else [None] * len(changes)
        return [gradient is not None for gradient in gradients]


def _copy_of_read(read: Tensor) -> Tensor:
    """Return a value that was read, or the copy that `read_value` makes of it, which alone is used then."""
    users = list(dict.fromkeys(read.consumers()))
    copies = [user.outputs[0] for user in users if user.type == "Identity"]
    return copies[0] if len(users) == len(copies) == 1 and copies[0].consumers() else read


def _describe(operation: str) -> str:
    """Return a description of an operation that takes variables, as the user knows it."""
    if operation in CALLS:
        return "a concrete function"
    loops = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
    return "a loop or branch of a graph" if operation in loops else f"the operation {operation}"


def _make_change(like: Tensor) -> Tensor:
    if not like.shape.is_fully_defined():
        raise FrameworkError(f"the shape {tuple(like.shape)} of the tensor is not known while tracing; give it one")
    return tf.compat.v1.placeholder_with_default(tf.zeros(like.shape, like.dtype), like.shape)


def _snake_case(kind: str) -> str:
    """Return the type of an operation in lower case, without its version."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", re.sub(r"V\d+$", "", kind)).lower()


def _line_of(operation: Operation) -> str | None:
    """Return file and line of the user's code that made an operation."""
    for frame in reversed(operation.traceback):
        if normal_path(frame.filename) == normal_path(__file__):
            return None  # from here on outwards it is the caller's
        if is_user_code(frame.filename, PACKAGES):
            return location_text(frame.filename, frame.lineno)
    return None


class TensorflowRead(ReadBackend):
    uses = staticmethod(linearize_uses)

    def one_hot_seeds(self, like: Tensor, positions: np.ndarray, batch: int) -> Tensor:
        seeds = tf.one_hot(positions, math.prod(like.shape) // batch, dtype=like.dtype)
        seeds = tf.repeat(seeds, batch, 0) if batch > 1 else seeds
        shape = len(positions), *like.shape
        # An array takes a fraction of the time of a tuple.
        return tf.reshape(seeds, np.array(shape, np.int64) if tf.executing_eagerly() else shape)

    def transpose(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return tf.transpose(x, axes)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        return tf.matmul(x, y)

    def rounding(self, like: Tensor) -> str:
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        return f"tensorflow {tf.__version__}, {threads} threads" if "CPU" in like.device else ""

    def index(self, positions: np.ndarray, like: Tensor) -> Any:
        return positions  # a graph makes a constant of its own of them

    def gather(self, x: Tensor, index: Any) -> Tensor:
        return tf.gather(x, index)

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Tensor) -> Callable[[Tensor], Any]:
        if layout == "csr":
            raise FrameworkError('TensorFlow keeps sparse matrices by coordinates; use "coo" or "scipy"')
        with tf.init_scope():
            places = tf.constant(np.stack([pattern.rows, pattern.columns], 1).astype(np.int64))
            shape = tf.constant(pattern.shape, tf.int64)
        return lambda values: tf.sparse.SparseTensor(places, values, shape)

    def maybe_compile(self, read: Read) -> Read:
        graph: Read | None = None
        tried = False

        def run(x: Tensor) -> Any:
            nonlocal graph, tried
            if not tried:
                graph, tried = _graph(read, x), True
            return read(x) if graph is None else graph(x)

        return run

    def recorder(self, tensors: Any) -> Recorder:
        return TensorflowRecorder(tensors)

    def ambient_state(self, linear: Linearization) -> Any:
        return linear.seeds if isinstance(linear, TensorflowLinearization) else None

    def restore_ambient_state(self, state: Any) -> AbstractContextManager[Any]:
        return with_seeds(state)

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        return {type(tf.function(lambda: None)): lambda compiled: (tf.function, function_options(compiled))}


def _graph(read: Read, x: Tensor) -> Read | None:
    """Trace a read into a graph; None if it cannot be, or would draw random numbers or write to variables."""
    try:
        with without_log():
            function = tf.function(read, [tf.TensorSpec(x.shape, x.dtype)], autograph=False).get_concrete_function()
    except Exception:  # it runs as it stands
        return None
    definition = function.graph.as_graph_def()
    nodes = [*definition.node, *[node for part in definition.library.function for node in part.node_def]]
    return function if all(node.op in HARMLESS or not _is_stateful(node.op) for node in nodes) else None


def _is_stateful(operation: str) -> bool:
    definition = op_def_registry.get(operation)
    return definition is None or definition.is_stateful


implementation = TensorflowRead()
