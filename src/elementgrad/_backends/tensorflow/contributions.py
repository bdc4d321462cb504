"""`eg.contributions` on TensorFlow: every use of one tensor, found in the graph that the function is traced into."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from elementgrad._backends.autodiff import TensorFunction, Use
from elementgrad._backends.source_location import is_user_code, location_text, normal_path
from elementgrad._backends.tensorflow._compat import AutomaticControlDependencies, copy_gradient_function, replace_input
from elementgrad._backends.tensorflow.autodiff import TensorflowLinearization, copy_tensor, run_functions_as_python
from elementgrad._backends.tensorflow.isolate import isolated
from elementgrad._names.backend import Model
from elementgrad.errors import ElementgradError, FrameworkError

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
    program = wrapped.prune(trace.changes, trace.outputs)
    for operation in program.graph.get_operations():  # a call of a concrete function loses its gradient on the way
        if operation.type in CALLS:
            copy_gradient_function(wrapped.graph.get_operation_by_name(operation.name), operation)
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
                    f"the variable is read inside {_describe(operation.type)}, where its uses cannot be told apart; "
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
