"""Traces TensorFlow functions into graphs, and runs parts of these graphs eagerly under a tape.

The graph holds the operations of which a tape would make its record. A cone runs them again on parts, so that every
derivative rule is TensorFlow's own. Compiled functions are inlined. A loop or branch, with the lists that it fills, is
one operation that runs on whole tensors.
"""

import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from elementgrad._backends.autodiff import TensorFunction, UnsupportedError, reason
from elementgrad._backends.tensorflow._compat import (
    could_possibly_record,
    custom_gradient,
    registered_gradient,
)
from elementgrad._backends.tensorflow.autodiff import copy_tensor, may_leave_unfinished, run_functions_as_python
from elementgrad._backends.tensorflow.cone import arithmetic, moves, windows  # noqa: F401 (they fill the table of rules)
from elementgrad._backends.tensorflow.cone.layer_state import holds_unbuilt_layers, restore_layers
from elementgrad._backends.tensorflow.cone.rules import GraphCall, TensorflowCall, cut, find_rule
from elementgrad._backends.tensorflow.graph_ops import see_operations, static_shape
from elementgrad._backends.tensorflow.isolate import isolated, without_log
from elementgrad._cleanup import AttributePatch, Replace, assign, enter, scope
from elementgrad._cone.backend import ConeBackend, RecordedProgram
from elementgrad._cone.boxes import sizes, whole
from elementgrad._cone.plan import Cone, NoConeError, ProgramOp, ProgramValue, UnbuiltError
from elementgrad.errors import ElementgradError, FrameworkError

Tensor = Any
Operation = Any
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
ALIASES = {"Identity", "IdentityN", "Snapshot", "PlaceholderWithDefault"}
"""Operations whose results are their operands."""
RESHAPES = {"Reshape", "Squeeze", "ExpandDims"}
"""Operations that copy nothing. Those on constants, such as the bias of a layer, run once, while recording."""
CONTROL = {"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"}
STATELESS = {"ReadVariableOp", "ResourceGather", "Placeholder", "VarHandleOp", *CALLS, *CONTROL}
"""Operations with a state that only read it, or only change what those inside them change."""
WITHOUT_SLOPE = {"StopGradient", "Floor", "Ceil", "Rint", "Round", "FloorDiv", "ZerosLike", "OnesLike"}
"""Operations whose derivative is None, which no tape goes through."""


START_SECONDS = 8e-3
"""The time that a trace takes beside its operations, roughly."""


class ReadVariables:
    """Variables that a call reads by itself each time it runs, with their values while it was recorded."""

    def __init__(self, variables: Iterable[Any]):
        self._variables = list(variables)
        self._values = [variable.read_value() for variable in self._variables]

    def require_unchanged(self) -> None:
        for variable, value in zip(self._variables, self._values, strict=True):
            now = variable.read_value()
            # NaN is unequal to itself.
            same = tf.equal(value, now) | (tf.not_equal(value, value) & tf.not_equal(now, now))
            if not bool(tf.reduce_all(same)):
                raise FrameworkError(
                    "a variable that is read inside a loop, or a function with a gradient of its own, has changed "
                    "since the function was recorded; record it again"
                )


class CustomGradientCall(TensorflowCall):
    """A call of a function with a gradient of its own, which runs again with that gradient."""

    def __init__(self, function: Any, args: Any, slots: Sequence[int], variables: Iterable[Any]):
        self._function, self._args, self._slots = function, args, slots
        self._variables = ReadVariables(variables)

    def run(self, *tensors: Tensor) -> list[Tensor]:
        self._variables.require_unchanged()
        leaves = tf.nest.flatten(self._args)
        for slot, tensor in zip(self._slots, tensors, strict=True):
            leaves[slot] = tensor
        made = custom_gradient.custom_gradient(self._function)(*tf.nest.pack_sequence_as(self._args, leaves))
        return tf.nest.flatten(made)


class ClusterCall(TensorflowCall):
    """Operations that run together on whole tensors: loops and branches with the lists that they fill."""

    def __init__(self, function: Any):
        self._function = function
        captured = {id(x) for x in function.captured_inputs}
        self._variables = ReadVariables([v for v in function.graph.variables if id(v.handle) in captured])

    def run(self, *tensors: Tensor) -> list[Tensor]:
        self._variables.require_unchanged()
        made = self._function(*tensors)
        return list(made) if isinstance(made, (list, tuple)) else [made]


class TracedCustomCall(NamedTuple):
    """A call of a function with a gradient of its own, as it was traced."""

    function: Any
    args: Any
    numbers: dict[str, int]
    """The number of each result, by the name of its tensor."""
    ops: range
    """The operations that the call added to its graph."""


Calls = dict[tuple[Any, str], TracedCustomCall]
"""Calls by the graph and the name of the operation that ends them; graphs of loops have names of their own."""


class _RecordingState(threading.local):
    calls: Calls | None = None


_local = _RecordingState()


def _install(replace: Replace) -> None:
    original = custom_gradient._graph_mode_decorator

    def note(function: Any, args: Any, kwargs: Any) -> Any:
        first = _count_ops()
        made = original(function, args, kwargs)
        if _local.calls is not None and not kwargs:
            for number, y in enumerate(tf.nest.flatten(made)):
                if tf.is_tensor(y):
                    call = TracedCustomCall(function, args, {}, range(first, _count_ops()))
                    _local.calls.setdefault((y.graph, y.op.name), call).numbers[y.name] = number
        return made

    replace(custom_gradient, "_graph_mode_decorator", note)


_patch = AttributePatch(_install)


def _count_ops() -> int:
    return len(tf.compat.v1.get_default_graph().get_operations())


class _GivenUpError(BaseException):
    """Raised to leave a function that cannot be recorded, past handlers of the user's errors."""


class _Trace:
    """A function, traced into a graph with its inputs as tensors of that graph."""

    def __init__(self, run: TensorFunction, inputs: Sequence[Tensor | None], limit: int | None):
        self._run, self._inputs, self._limit = run, inputs, limit
        self.sources: list[Any] = [None] * len(inputs)
        """The tensor of the graph for each input; None for a variable, which the function reads itself."""
        self.outputs: list[Any] = []
        self.calls: Calls = {}
        self._seen = 0
        self._gave_up = False
        self._unbuilt = ""
        try:
            with isolated(), without_log(), scope():
                restore_layers(self._see_layer)
                _patch.enter()
                assign(_local, "calls", self.calls)
                self.function = tf.compat.v1.wrap_function(self._trace, [])
        except (_GivenUpError, Exception):
            if not self._gave_up and not self._unbuilt:
                raise
        if self._unbuilt:
            raise UnbuiltError(f"the variables of {self._unbuilt} are made in each of its runs")
        if self._gave_up:  # also where the user's code caught it
            raise NoConeError(f"the function has more than {limit} operations for its size")
        self.graph = self.function.graph

    def _trace(self) -> list[Any]:
        arguments: list[Any] = []
        for position, (x, held) in enumerate(zip(self._inputs, self._run.held, strict=True)):
            if x is None:
                arguments.append(partial(self._tap, position))
            elif held:
                arguments.append(None)
            else:
                self.sources[position] = copy_tensor(tf.convert_to_tensor(x))
                arguments.append(self.sources[position])
        with scope():
            enter(run_functions_as_python())
            may_leave_unfinished()  # only what the named tensors depend on is used
            if self._limit is not None:
                see_operations(self._count)
            self.outputs = [tf.convert_to_tensor(y) for y in self._run(*arguments)]
        return self.outputs

    def _see_layer(self, layer: Any) -> None:
        if holds_unbuilt_layers(layer):
            self._unbuilt = layer.name
            raise _GivenUpError

    def _count(self, *_: Any, **__: Any) -> None:
        """Leave the function once it has too many operations. This is done once, as its code may catch it and go on."""
        assert self._limit is not None
        self._seen += 1
        if self._seen > self._limit and not self._gave_up:
            self._gave_up = True
            raise _GivenUpError

    def _tap(self, position: int, activation: Tensor) -> Tensor:
        if self.sources[position] is not None:
            raise NoConeError("a named activation is computed several times")
        self.sources[position] = copy_tensor(activation)
        return self.sources[position]


class TensorflowProgram(RecordedProgram):
    """A recorded function, with its differentiated inputs and the tensors that were named in it."""

    speed = 7e9

    def __init__(self, run: TensorFunction, inputs: Sequence[Tensor | None], limit: int | None):
        if not tf.executing_eagerly():
            raise NoConeError("the function is called while a graph is traced")
        try:
            trace = _Trace(run, inputs, limit)
        except (NoConeError, ElementgradError):
            raise
        except Exception as error:  # the plain way will raise it again if it is the user's own
            raise NoConeError(f"it cannot be traced into a graph ({_last_line(error)})") from error
        try:
            builder = _Builder(trace, inputs)
            self.outputs = builder.build(trace.outputs)
        except (NoConeError, ElementgradError):
            raise
        except Exception as error:  # the plain way does without what TensorFlow could not do here
            raise NoConeError(f"its graph cannot be taken apart ({_last_line(error)})") from error
        self.ops = builder.ops
        # All operations of the graph were traced, also those that nothing is computed with.
        self.recording_seconds = START_SECONDS + TensorflowCone.op_seconds * len(trace.graph.get_operations())
        self.inputs = builder.inputs
        self.tensors = trace.outputs
        self.sources = [trace.sources[position] if x is None else x for position, x in enumerate(inputs)]
        self._behind: dict[int, set[ProgramValue]] = {}

    def is_connected(self, output: int, input: int) -> bool:
        if output not in self._behind:
            seen = {self.outputs[output]}
            for op in reversed(self.ops):
                if any(result in seen and result.differentiable for result in op.results if result is not None):
                    seen.update(op.operands)
            self._behind[output] = {value for value in seen if value.differentiable}
        return self.inputs[input] in self._behind[output]

    def evaluate(self, cone: Cone, of: ProgramValue) -> Tensor:
        return tf.stop_gradient(run_cone(cone, of, (), None)[0])

    def gradients(self, cone: Cone, of: ProgramValue, wrt: Sequence[ProgramValue], seeds: Any) -> list[Tensor | None]:
        count = len(seeds)
        with isolated():
            tape = tf.GradientTape(persistent=count > 1, watch_accessed_variables=False)
            with scope():
                enter(tape)
                y, leaves = run_cone(cone, of, wrt, tape)
            kept = [value for value in wrt if value in leaves]
            if not kept or not count:
                return [None] * len(wrt)
            ends = [leaves[value] for value in kept]
            try:
                sweeps = [tape.gradient(y, ends, output_gradients=_cotangent(y, seed)) for seed in seeds]
            except (LookupError, NotImplementedError) as error:  # the errors about a missing rule
                raise UnsupportedError(reason(error)) from error
            found = {}
            for value, end, parts in zip(kept, ends, zip(*sweeps, strict=True), strict=True):
                stack = tf.stack([tf.zeros_like(end) if part is None else tf.convert_to_tensor(part) for part in parts])
                found[value] = tf.stop_gradient(stack) if could_possibly_record() else stack
        return [found.get(value) for value in wrt]

    def embed(self, part: Tensor, around: Sequence[tuple[int, int]]) -> Tensor:
        return tf.pad(part, np.array(around, np.int32)) if any(map(any, around)) else part


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def _cotangent(y: Tensor, seed: Any) -> Tensor:
    if tf.is_tensor(seed):
        return seed
    numbers = np.zeros(y.shape, y.dtype.as_numpy_dtype)
    numbers.reshape(-1)[int(seed)] = 1
    return tf.convert_to_tensor(numbers)


def run_cone(
    cone: Cone, of: ProgramValue, wrt: Sequence[ProgramValue], tape: Any
) -> tuple[Tensor, dict[ProgramValue, Tensor]]:
    """Run the operations of a cone on their parts; return the part that was asked for, and the leaves."""
    held: dict[ProgramValue, Tensor] = {}
    leaves: dict[ProgramValue, Tensor] = {}
    for value, box in cone.needed.items():
        if value.constant is not None:
            region = cut(value.constant, box, whole(value.shape))
            if value in wrt:
                region = leaves[value] = tf.identity(region)
                tape.watch(region)
            held[value] = region
    for step in cone.steps:
        regions = [
            None if need is None else cut(held[value], need, cone.needed[value])
            for value, need in zip(step.op.operands, step.needs, strict=True)
        ]
        if step.is_empty:
            pairs = zip(step.op.results, step.boxes, strict=True)
            results: Any = [
                tf.zeros(sizes(box), value.dtype) if value and box is not None else None for value, box in pairs
            ]
        else:
            results = step.op.rule.run(regions, step.needs, step.boxes)
        for made, result, part in zip(step.op.results, results, step.boxes, strict=True):
            if made is None or part is None:
                continue
            if tuple(result.shape) != sizes(part):
                raise NoConeError(f"{step.op.name} gave shape {tuple(result.shape)} for {sizes(part)}")
            if made in wrt:
                result = leaves[made] = tf.identity(result)
                tape.watch(result)
            held[made] = result
    return held[of], leaves


class _Builder:
    """Makes a program of a graph, from the outputs backwards."""

    def __init__(self, trace: _Trace, inputs: Sequence[Tensor | None]):
        self.ops: list[ProgramOp] = []
        self._trace = trace
        self._captured = {id(inner): external for external, inner in trace.graph.captures}
        self._variables: dict[int, ProgramValue] = {}
        """The value of each variable that was read, by its handle."""
        self.inputs: list[Any] = [None] * len(inputs)
        self._env: dict[int, ProgramValue] = {}
        self._taps: dict[int, int] = {}
        for position, (x, source) in enumerate(zip(inputs, trace.sources, strict=True)):
            if x is None:
                if source is None:
                    raise NoConeError("a named activation is not computed")
                self._taps[id(source)] = position
                continue
            value = self._constant(tf.convert_to_tensor(x))
            value.differentiable = value.dtype.is_floating or value.dtype.is_complex
            value.known = None if value.differentiable else value.constant
            self.inputs[position] = value
            if source is None:
                self._variables[id(x.handle)] = value
            else:
                self._env[id(source)] = value
        self._held = {
            id(x.handle) for x, source in zip(inputs, trace.sources, strict=True) if x is not None and source is None
        }
        if self._held and trace.calls:
            raise NoConeError("a parameter is named, and a function has a gradient of its own")
        self._order = {op.name: at for at, op in enumerate(trace.graph.get_operations())}
        self._written: dict[int, int] = {}
        for op in trace.graph.get_operations():
            if op.type == "Assert":
                raise NoConeError("the function checks values with an assertion")
            if op.type.startswith(("Assign", "ResourceScatter", "ResourceStridedSliceAssign", "ResourceApply")):
                self._written.setdefault(id(op.inputs[0]), self._order[op.name])

    def build(self, outputs: Sequence[Any]) -> list[ProgramValue]:
        clusters = _find_clusters(outputs, self._env)
        values = self._follow(outputs, self._env, clusters, True)
        for source, position in self._taps.items():
            if self.inputs[position] is None:  # nothing that was named depends on it
                self.inputs[position] = self._env.get(source) or ProgramValue(
                    tuple(static_shape(self._trace.sources[position]) or ()), differentiable=True
                )
        return values

    def _constant(self, x: Tensor) -> ProgramValue:
        return ProgramValue(tuple(x.shape), x, dtype=x.dtype, known=x)

    def _follow(
        self, results: Sequence[Any], env: dict[int, ProgramValue], clusters: Any, top: bool
    ) -> list[ProgramValue]:
        """Return the values of some tensors of a graph, and note all operations that they need."""
        stack: list[Any] = list(reversed(results))
        while stack:
            y = stack[-1]
            if id(y) in env:
                stack.pop()
                continue
            node = clusters.get(y.op.name) if top else None
            inputs = node.inputs if node is not None else self._inputs_of(y.op, top)
            missing = [x for x in inputs if id(x) not in env]
            if missing:
                stack += missing
                continue
            if node is not None:
                self._note_cluster(node, env)
            else:
                self._note_op(y.op, env, top)
            if id(y) not in env:
                raise NoConeError(f"{y.op.type} cannot be followed")
        return [env[id(y)] for y in results]

    def _inputs_of(self, op: Operation, top: bool) -> list[Any]:
        if (op.graph, op.name) in self._trace.calls and top:
            call = self._trace.calls[op.graph, op.name]
            return [x for x in tf.nest.flatten(call.args) if _is_of(x, self._trace.graph)]
        if op.type in ("Shape", "ShapeN", "Size", "Rank", "ReadVariableOp", "Placeholder"):
            return []
        if op.type == "ResourceGather":
            return [op.inputs[1]]
        return [x for x in op.inputs if x.dtype != tf.resource or op.type not in CALLS]

    def _note_op(self, op: Operation, env: dict[int, ProgramValue], top: bool) -> None:
        kind = op.type
        if (op.graph, op.name) in self._trace.calls and top:
            self._note_custom(op, env)
        elif kind == "Const":
            env[id(op.outputs[0])] = self._constant(tf.constant(tf.make_ndarray(op.get_attr("value"))))
        elif kind == "Placeholder":
            external = self._captured.get(id(op.outputs[0]))
            if external is None or not hasattr(external, "numpy") or external.dtype in (tf.resource, tf.variant):
                raise NoConeError("the function uses a tensor of another graph")
            env[id(op.outputs[0])] = self._constant(external)
        elif kind == "ReadVariableOp":
            env[id(op.outputs[0])] = self._variable(op, env)
        elif kind in ("Shape", "ShapeN", "Size", "Rank"):
            self._note_shapes(op, env)
        elif kind in CALLS:
            self._note_call(op, env)
        elif kind in ALIASES and not _has_own_gradient(op):
            for x, y in zip(op.inputs, op.outputs, strict=True):
                if id(y) in self._taps:
                    self._note(op, "Identity", [env[id(x)]], [y], GraphCall(op), env)
                    value = env[id(y)]
                    value.differentiable = value.dtype.is_floating or value.dtype.is_complex
                    self.inputs[self._taps[id(y)]] = value
                else:
                    env[id(y)] = env[id(x)]
        else:
            if _has_own_gradient(op):
                raise NoConeError("a gradient is replaced")
            if kind in CONTROL or any(x.dtype == tf.variant for x in (*op.inputs, *op.outputs)):
                raise NoConeError("a compiled function has a loop or a branch")
            if op.op_def.is_stateful and kind not in STATELESS:
                raise NoConeError(f"{kind} draws random numbers or has a state")
            operands = [env[id(x)] for x in op.inputs if x.dtype != tf.resource]
            if kind == "ResourceGather":
                operands.insert(0, self._variable(op, env))
            if kind in RESHAPES and all(value.known is not None for value in operands):
                (made,) = GraphCall(op).run(*[value.known for value in operands])
                env[id(op.outputs[0])] = self._constant(made)
                return
            self._note(op, kind, operands, op.outputs, GraphCall(op), env)

    def _note(
        self,
        op: Operation,
        name: str,
        operands: Sequence[ProgramValue],
        outputs: Sequence[Any],
        call: Any,
        env: dict[int, ProgramValue],
    ) -> None:
        sloped = any(value.differentiable for value in operands) and name not in WITHOUT_SLOPE
        if sloped and isinstance(call, GraphCall):
            sloped = registered_gradient(op) is not None
        results: list[ProgramValue | None] = []
        for number, y in enumerate(outputs):
            shape = static_shape(y)
            if shape is None:
                if number == 0 or y.consumers():
                    raise NoConeError(f"the shape of a result of {op.type} depends on values")
                results.append(None)
                continue
            inner = y.dtype.is_floating or y.dtype.is_complex
            results.append(ProgramValue(tuple(shape), dtype=y.dtype, differentiable=sloped and inner))
        made = ProgramOp(name, operands, results, find_rule, None, call)
        for y, value in zip(outputs, results, strict=True):
            if value is not None:
                value.maker = made
                env[id(y)] = value
        self.ops.append(made)

    def _variable(self, op: Operation, env: dict[int, ProgramValue]) -> ProgramValue:
        inner = op.inputs[0]
        handle = self._captured.get(id(inner)) if inner.op.type == "Placeholder" else None
        if handle is None and id(inner) in env:
            handle = env[id(inner)].constant
        if handle is None:
            raise NoConeError("a variable is made inside of the function")
        if self._written.get(id(inner), len(self._order)) < self._order.get(op.name, -1):
            raise NoConeError("a variable is read after it was written to")
        if id(handle) not in self._variables:
            dtype = op.get_attr("dtype")
            value = self._constant(tf.identity(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)))
            self._variables[id(handle)] = value
        return self._variables[id(handle)]

    def _note_shapes(self, op: Operation, env: dict[int, ProgramValue]) -> None:
        for x, y in zip(op.inputs, op.outputs, strict=True):
            shape = static_shape(x)
            if shape is None:
                raise NoConeError(f"the shape of a result of {x.op.type} depends on values")
            number: Any = {"Size": int(np.prod(shape)), "Rank": len(shape)}.get(op.type, shape)
            env[id(y)] = self._constant(tf.constant(number, y.dtype))

    def _note_call(self, op: Operation, env: dict[int, ProgramValue]) -> None:
        """Note what is inside of a call of a compiled function."""
        graph = op.graph._get_function(op.get_attr("f").name).graph
        if len(graph.inputs) != len(op.inputs) or len(graph.outputs) != len(op.outputs):
            raise NoConeError("a compiled function was differentiated before")
        inside: dict[int, ProgramValue] = {}
        for x, inner in zip(op.inputs, graph.inputs, strict=True):
            if x.dtype == tf.resource:
                handle = (
                    self._captured.get(id(x)) if id(x) in self._captured else getattr(env.get(id(x)), "constant", None)
                )
                if handle is None or id(x) in self._written:
                    raise NoConeError("a compiled function reads a variable that is written to")
                inside[id(inner)] = ProgramValue((), handle)
            else:
                inside[id(inner)] = env[id(x)]
        for each in graph.get_operations():
            if each.op_def.is_stateful and each.type not in STATELESS:
                raise NoConeError(f"{each.type} in a compiled function draws random numbers or has a state")
        for y, value in zip(op.outputs, self._follow(graph.outputs, inside, {}, False), strict=True):
            env[id(y)] = value

    def _note_custom(self, op: Operation, env: dict[int, ProgramValue]) -> None:
        function, args, numbers, span = self._trace.calls[op.graph, op.name]
        if _closes_over_graph(function, self._trace.graph):
            raise NoConeError("a function with a gradient of its own uses tensors that are no arguments of it")
        leaves = tf.nest.flatten(args)
        slots = [slot for slot, x in enumerate(leaves) if _is_of(x, self._trace.graph)]
        outputs: list[Any] = [None] * len(numbers)
        for y in op.outputs:
            if y.name in numbers:
                outputs[numbers[y.name]] = y
        if any(y is None for y in outputs):
            raise NoConeError("a gradient is replaced")
        module = str(getattr(function, "__module__", ""))
        plain = module == "tensorflow.python.ops.nn_impl" and len(outputs) == 1
        name = "custom_gradient of one element" if plain else "custom_gradient"
        inside = self._trace.graph.get_operations()[span.start : span.stop]
        handles = {id(self._captured.get(id(x))) for each in inside for x in each.inputs if x.dtype == tf.resource}
        variables = [v for v in self._trace.graph.variables if id(v.handle) in handles]
        call = CustomGradientCall(function, args, slots, variables)
        self._note(op, name, [env[id(leaves[slot])] for slot in slots], outputs, call, env)

    def _note_cluster(self, node: "_Cluster", env: dict[int, ProgramValue]) -> None:
        for op in node.ops:
            for graph in _graphs_inside(op):
                for inner in graph.get_operations():
                    if inner.op_def.is_stateful and inner.type not in STATELESS:
                        raise NoConeError(f"{inner.type} in a loop draws random numbers or has a state")
                    if _has_own_gradient(inner):
                        raise NoConeError("a function with a gradient of its own is called inside a loop or a branch")
            if op.op_def.is_stateful and op.type not in STATELESS:
                raise NoConeError(f"{op.type} draws random numbers or has a state")
            for x in op.inputs:
                if x.dtype == tf.resource and id(self._captured.get(id(x))) in self._held:
                    raise NoConeError("a named parameter is read inside a loop or a branch")
                if x.dtype == tf.resource and id(x) in self._written:
                    raise NoConeError("a loop reads a variable that is written to")
        # Constants stay inside: the shapes of lists must be known there. So do eager tensors that the function closes
        # over, which `prune` feeds itself.
        inputs = [x for x in node.inputs if x.op.type != "Const" and id(x) not in self._captured]
        call = ClusterCall(self._trace.function.prune(inputs, node.outputs))
        self._note(node.ops[-1], "loop or branch", [env[id(x)] for x in inputs], node.outputs, call, env)


def _is_of(x: Any, graph: Any) -> bool:
    return tf.is_tensor(x) and getattr(x, "graph", None) is graph


def _has_own_gradient(op: Operation) -> bool:
    return "_gradient_op_type" in op.node_def.attr


def _closes_over_graph(function: Any, graph: Any, depth: int = 2) -> bool:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if any(_is_of(x, graph) for x in tf.nest.flatten(content)):
            return True
        if depth and callable(content) and _closes_over_graph(content, graph, depth - 1):
            return True
    return False


def _graphs_inside(op: Operation) -> Iterable[Any]:
    names = ["body", "cond", "then_branch", "else_branch", "f"]
    for name in names:
        if name in op.node_def.attr:
            inner = op.graph._get_function(op.get_attr(name).name).graph
            yield inner
            for each in inner.get_operations():
                yield from _graphs_inside(each)


class _Cluster:
    """Operations that run as one."""

    def __init__(self, ops: list[Operation]):
        names = {op.name for op in ops}
        self.ops = ops
        inputs = [x for op in ops for x in op.inputs if x.op.name not in names and x.dtype != tf.resource]
        self.inputs = list({id(x): x for x in inputs}.values())
        self.outputs = [
            y
            for op in ops
            for y in op.outputs
            if y.dtype not in (tf.variant, tf.resource) and any(user.name not in names for user in y.consumers())
        ]


def _find_clusters(outputs: Sequence[Any], env: dict[int, Any]) -> dict[str, _Cluster]:
    """Return the cluster of each operation that is in one, by its name.

    A cluster is a loop or branch, with all that passes lists to it or takes them from it, and with what lies between.
    """
    order: list[Operation] = []
    done: set[str] = set()
    stack = [y.op for y in outputs]
    while stack:
        op = stack[-1]
        missing = [x.op for x in op.inputs if id(x) not in env and x.op.name not in done]
        if op.name in done or not missing:
            stack.pop()
            if op.name not in done:
                done.add(op.name)
                order.append(op)
        else:
            stack += missing
    apart = [op for op in order if op.type in CONTROL or any(x.dtype == tf.variant for x in (*op.inputs, *op.outputs))]
    groups: list[set[str]] = []
    for op in apart:
        linked = {op.name} | {x.op.name for x in op.inputs if x.dtype == tf.variant}
        touching = [group for group in groups if group & linked]
        groups = [group for group in groups if not group & linked] + [set().union(linked, *touching)]
    groups = _close(groups, order)
    found: dict[str, _Cluster] = {}
    for group in groups:
        cluster = _Cluster([op for op in order if op.name in group])
        # An output of the function counts as used.
        names = {id(y) for y in cluster.outputs}
        cluster.outputs += [
            y for y in {id(y): y for y in outputs}.values() if y.op.name in group and id(y) not in names
        ]
        found.update(dict.fromkeys(group, cluster))
    return found


def _close(groups: list[set[str]], order: Sequence[Operation]) -> list[set[str]]:
    """Add what lies between the operations of a group, and join groups that meet."""
    while True:
        closed: list[set[str]] = []
        for group in groups:
            after, before = set(group), set(group)
            for op in order:
                if any(x.op.name in after for x in op.inputs):
                    after.add(op.name)
            for op in reversed(order):
                if op.name in before:
                    before.update(x.op.name for x in op.inputs)
            whole_group = after & before
            touching = [other for other in closed if other & whole_group]
            closed = [other for other in closed if not other & whole_group]
            closed.append(set().union(whole_group, *touching))
        if closed == groups:
            return groups
        groups = closed


class TensorflowCone(ConeBackend):
    op_seconds = 1e-3

    def record(self, run: TensorFunction, inputs: Sequence[Tensor | None], limit: int | None) -> TensorflowProgram:
        return TensorflowProgram(run, inputs, limit)

    def is_recorded(self, x: Any) -> bool:
        return tf.is_symbolic_tensor(x)


implementation = TensorflowCone()
