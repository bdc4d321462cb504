"""Every use that a function makes of one tensor, as an input of its own: found in the graph that it is traced into."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from elementgrad._backends.autodiff import TensorFunction, Use
from elementgrad._backends.source_location import is_user_code, location_text, normal_path
from elementgrad._backends.tensorflow._compat import AutomaticControlDependencies
from elementgrad._backends.tensorflow.autodiff import TensorflowLinearization, again, unstaged
from elementgrad._backends.tensorflow.isolate import isolated
from elementgrad.errors import ElementgradError, FrameworkError

Tensor = Any
Operation = Any
PACKAGES = ("tensorflow", "keras")
"""Whose lines of code are not the user's."""
UNTRACEABLE = (TypeError, AttributeError, NotImplementedError, ValueError, tf.errors.OpError)
"""What code raises that needs the values of tensors while it is traced."""
GATHERS: dict[str, Callable[[Operation, Tensor], Tensor]] = {
    "ResourceGather": lambda operation, x: tf.gather(
        x, operation.inputs[1], batch_dims=operation.get_attr("batch_dims")
    ),
    "ResourceGatherNd": lambda operation, x: tf.gather_nd(x, operation.inputs[1]),
}
"""Operations that read some of a variable's elements, and the same of a tensor."""
ASIDE = (
    *("VariableShape", "VarIsInitializedOp", "DestroyResourceOp", "ResourceStridedSliceAssign"),
    *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"),
    *(f"ResourceScatter{verb}" for verb in ("Update", "Add", "Sub", "Mul", "Div", "Min", "Max")),
    *(f"ResourceScatterNd{verb}" for verb in ("Update", "Add", "Sub", "Min", "Max")),
)
"""Operations that take a variable and do not read it, or give nothing."""
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
"""Calls of functions that were compiled before."""


@dataclass(frozen=True)
class _Changed:
    """A function of one change for each use, which is added to the tensor in that place alone."""

    function: Callable[..., Any]
    program: Callable[..., Sequence[Tensor]]
    held: Sequence[bool]
    others: Sequence[Tensor] = field(default=())
    inside: bool = False

    def __call__(self, *changes: Tensor) -> Sequence[Tensor]:
        return self.program(*changes)


def of(run: TensorFunction, inputs: Sequence[Tensor], input: int) -> tuple[TensorflowLinearization, list[Use]]:
    """Evaluate a function as one of the uses that it makes of one of its inputs."""
    trace = _Trace(run, inputs, input)
    with isolated():
        wrapped = tf.compat.v1.wrap_function(trace, [])
    changes = [tf.zeros(change.shape, change.dtype) for change in trace.changes]
    program = wrapped.prune(trace.changes, trace.outputs)
    for operation in program.graph.get_operations():  # a call of a concrete function loses its gradient on the way
        if operation.type in CALLS:
            operation._gradient_function = wrapped.graph.get_operation_by_name(operation.name)._gradient_function
    changed = _Changed(run.function, program, [False] * len(changes))
    return TensorflowLinearization.of(changed, changes, create_graph=False, order=1), trace.uses


class _Trace:
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
        self.outputs = self._traced(sources)
        found = self._slots(sources)
        connected = self._connected([change for _, change in found])
        for (operation, change), path in zip(found, connected, strict=True):
            if path:
                self.uses.append(Use(_spelled(operation.type), _where(operation)))
                self.changes.append(change)
        return self.outputs

    def _traced(self, sources: list[Tensor]) -> list[Tensor]:
        def source(x: Tensor) -> Tensor:
            sources.append(again(x))
            return sources[-1]

        given: list[Any] = [None if held else x for x, held in zip(self._inputs, self._run.held, strict=True)]
        if self._inputs[self._input] is None:
            given[self._input] = source
        elif not self._held:
            given[self._input] = source(tf.convert_to_tensor(self._inputs[self._input]))
        try:
            # What is written and read stays in its order; compiled functions are part of the graph.
            with AutomaticControlDependencies() as order, unstaged():
                return [order.mark_as_return(tf.convert_to_tensor(y)) for y in self._run(*given)]
        except ElementgradError:
            raise
        except UNTRACEABLE as error:
            why = (str(error).strip().splitlines() or [""])[-1].strip()  # before it AutoGraph tells where
            raise FrameworkError(
                f"the function cannot be traced, so its uses of a tensor cannot be found ({why}); leave out what needs "
                "the values of tensors in Python, such as .numpy()"
            ) from error

    def _slots(self, sources: list[Tensor]) -> list[tuple[Operation, Tensor]]:
        """Every operation that uses the tensor, once for each of its arguments that is it, with its change."""
        slots: list[tuple[Operation, Tensor]] = []
        if self._held:
            slots += self._gathered()
            sources = self._reads()
        for source in sources:
            for operation in dict.fromkeys(source.consumers()):
                for number, argument in enumerate(operation.inputs):
                    if argument is source:
                        change = _change(source)
                        operation._update_input(number, source + change)
                        slots.append((operation, change))
        order = {id(operation): at for at, operation in enumerate(tf.compat.v1.get_default_graph().get_operations())}
        return sorted(slots, key=lambda slot: order[id(slot[0])])

    def _reads(self) -> list[Tensor]:
        """The values of the variable, each time that it is read."""
        reads = [operation.outputs[0] for operation in self._users() if operation.type == "ReadVariableOp"]
        return [_inner(read) for read in reads]

    def _gathered(self) -> list[tuple[Operation, Tensor]]:
        """Rows of the variable that are read without the rest: the change is gathered in the same way."""
        slots = []
        for operation in [operation for operation in self._users() if operation.type in GATHERS]:
            rows = operation.outputs[0]
            users = list(dict.fromkeys(rows.consumers()))
            change = _change(self._inputs[self._input])
            changed = rows + GATHERS[operation.type](operation, change)
            for user in users:
                for number, argument in enumerate(user.inputs):
                    if argument is rows:
                        user._update_input(number, changed)
            slots.append((operation, change))
        return slots

    def _users(self) -> list[Operation]:
        """What takes the variable itself: what is none of the known may read it, and is refused."""
        graph = tf.compat.v1.get_default_graph()
        handle = graph.capture(self._inputs[self._input].handle)
        users = list(dict.fromkeys(handle.consumers()))
        for operation in users:
            if operation.type not in ("ReadVariableOp", *GATHERS, *ASIDE):
                raise FrameworkError(
                    f"the variable is read inside {_kind(operation.type)}, where its uses cannot be told apart; read "
                    "it before"
                )
        return users

    def _connected(self, changes: list[Tensor]) -> list[bool]:
        outputs = [y for y in self.outputs if y.dtype.is_floating or y.dtype.is_complex]
        slopes = tf.gradients(outputs, changes) if outputs and changes else [None] * len(changes)
        return [slope is not None for slope in slopes]


def _inner(read: Tensor) -> Tensor:
    """A value that was read, or the copy that `read_value` makes of it, which alone is used then."""
    users = list(dict.fromkeys(read.consumers()))
    copies = [user.outputs[0] for user in users if user.type == "Identity"]
    return copies[0] if len(users) == len(copies) == 1 and copies[0].consumers() else read


def _kind(operation: str) -> str:
    """What the user knows an operation by that takes variables."""
    if operation in CALLS:
        return "a concrete function"
    loops = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
    return "a loop or branch of a graph" if operation in loops else f"the operation {operation}"


def _change(like: Tensor) -> Tensor:
    if not like.shape.is_fully_defined():
        raise FrameworkError(f"the shape {tuple(like.shape)} of the tensor is not known while tracing; give it one")
    return tf.compat.v1.placeholder_with_default(tf.zeros(like.shape, like.dtype), like.shape)


def _spelled(kind: str) -> str:
    """The type of an operation in lower case, without its version."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", re.sub(r"V\d+$", "", kind)).lower()


def _where(operation: Operation) -> str | None:
    """File and line of the user's code that made an operation."""
    for frame in reversed(operation.traceback):
        if normal_path(frame.filename) == normal_path(__file__):
            return None  # from here on outwards it is the caller's
        if is_user_code(frame.filename, PACKAGES):
            return location_text(frame.filename, frame.lineno)
    return None
