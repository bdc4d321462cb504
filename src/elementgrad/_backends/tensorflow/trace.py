"""Recording eager TensorFlow code as it runs: every operation, its tensors, the user's line, and the user's tapes.

An op callback of TensorFlow reports the operations of this thread. Patches report the rest while a recorder is on:
gradient functions that code hands to tapes, tensors made of plain numbers, numbers that leave for Python or NumPy, and
what the user's tapes watch and are asked for. NumPy reads the memory of a tensor without calling any method of it, so
NumPy's functions are patched too. In threads without a recorder all of them do what they always did.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from types import CodeType
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.source_location import is_user_code, location_text, verb_of
from elementgrad._backends.tensorflow import explain_rules, names
from elementgrad._backends.tensorflow._compat import (
    BaseResourceVariable,
    _EagerTensorBase,
    constant_op,
    pywrap_tfe,
    record,
    script_ops,
    uid,
)
from elementgrad._backends.tensorflow.explain_rules import TensorflowOp, inner_op_types, is_differentiable
from elementgrad._backends.tensorflow.graph_ops import see_operations
from elementgrad._cleanup import AttributePatch, Replace, assign, enter, scope
from elementgrad._explain.provenance import is_assigned_from
from elementgrad._names.backend import Model, add_prefix

Tensor = Any
Leaf = tuple[int, Tensor, str | None]
"""The id of a value that no recorded operation made, its tensor, and the line that used it first."""
AUTOGRAPH = "__autograph_generated_file"
"""Part of the names of files into which TensorFlow rewrites the user's code."""
PACKAGES = ("tensorflow", "keras", "numpy", "wrapt", "absl", "optree", "tree", "opt_einsum")
"""Packages whose lines are not the user's."""
NUMPY_CONSTRUCTORS = ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "asarray_chkfinite")
"""Functions of NumPy that make an array and do not go through `__array_function__`."""
NUMPY_WITHOUT_VALUES = frozenset(
    """
    shape ndim size result_type common_type can_cast min_scalar_type iscomplexobj isrealobj may_share_memory
    shares_memory zeros_like ones_like empty_like full_like array_repr array_str array2string
    """.split()  # noqa: SIM905
)
"""Functions of NumPy that do not use the numbers of a tensor, or only print them."""


class _RecorderState(threading.local):
    recorder: "TensorflowOpRecorder | None" = None


_local = _RecorderState()


def _keep_error(method: Callable[..., None]) -> Callable[..., None]:
    """Decorate a recording method: its errors are kept in `error`, and do not reach the user's code."""

    @wraps(method)
    def guarded(self: "TensorflowOpRecorder", *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.error = self.error or error

    return guarded


class TensorflowOpRecorder:
    """Records the operations of a model inside `record_thread()`; the search for the user's line ends at `entry`."""

    def __init__(self, model: Model, entry: CodeType):
        self.ops: list[TensorflowOp] = []
        self.leaves: dict[int, tuple[Tensor, str | None]] = {}
        """The tensors that no recorded operation made, by value id, and the lines that used them first."""
        self.variable_values: dict[int, list[int]] = {}
        """The ids of the successive values of each variable, by its handle."""
        self.error: Exception | None = None
        """The first error in recording, as opposed to the user's code."""
        self.tapes = TapeLog(self)
        self._ids: dict[int, int] = {}
        self._count = 0
        self._prefixes = {id(root): prefix for prefix, root in model.roots.items()}
        self.function = model.function
        self._entry = entry
        self._first_uid = uid()

    @contextmanager
    def record_thread(self) -> Iterator[None]:
        with scope():
            _patches.enter()
            enter(names.track_layer_calls())
            assign(_local, "recorder", self)
            see_operations(self._record_op)
            yield

    def new_id(self, x: Tensor) -> int:
        """Give a new value id to a tensor, or to a variable from now on."""
        self._count += 1
        self._ids[x._id] = self._count
        if x.dtype == tf.resource:
            self.variable_values.setdefault(x._id, []).append(self._count)
        return self._count

    def value_id(self, x: Tensor) -> int:
        """Return the value id of a tensor, or of what a variable holds now; one without an id becomes a leaf."""
        value_id = self._ids.get(x._id)
        if value_id is None:
            value_id = self.new_id(x)
            self.leaves[value_id] = x, self._user_line()[0]
        return value_id

    def imported_tensors(self) -> list[Leaf]:
        """Return the floating leaves that were made of plain numbers during the run."""
        return [leaf for leaf in self._floating_leaves() if leaf[1]._id >= self._first_uid]

    def outside_tensors(self) -> list[Leaf]:
        """Return the floating leaves that existed before the run."""
        return [leaf for leaf in self._floating_leaves() if leaf[1]._id < self._first_uid]

    def _floating_leaves(self) -> list[Leaf]:
        return [(value_id, x, where) for value_id, (x, where) in self.leaves.items() if is_differentiable(x)]

    def _user_line(self) -> tuple[str | None, list[str]]:
        """Return the user's line, and the names of the library functions inside it, innermost first."""
        frame: Any = sys._getframe(2)
        callers: list[str] = []
        while frame is not None and frame.f_code is not self._entry:
            if is_user_file(frame.f_code.co_filename):
                return location_text(frame.f_code.co_filename, frame.f_lineno), callers
            callers.append(verb_of(frame.f_code) or frame.f_code.co_name)
            frame = frame.f_back
        return None, callers

    @property
    def _module(self) -> str:
        prefix = path = ""
        for layer in names.current_layers():
            if id(layer) in self._prefixes:
                prefix, path = self._prefixes[id(layer)], ""
            else:
                path = f"{path}/{layer.name}" if path else layer.name
        return add_prefix(prefix, path)

    @_keep_error
    def _record_op(
        self, op_type: Any, operands: Any, params: Any, results: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        op_type = op_type.decode() if isinstance(op_type, bytes) else op_type
        if graph is not None or op_type in explain_rules.SHAPE_OPS:
            return
        inputs = [self.value_id(x) for x in operands]
        if op_type == "ReadVariableOp":  # its result is the value of the variable
            self._ids[results[0]._id] = inputs[0]
            return
        outputs = [self.new_id(y) for y in results]
        if not results and operands and operands[0].dtype == tf.resource:  # a variable is written to
            inputs = inputs[1:] if op_type == explain_rules.OVERWRITE else inputs
            outputs = [self.new_id(operands[0])]
        where, callers = self._user_line()
        op = TensorflowOp(
            explain_rules.op_word(op_type, callers),
            where,
            self._module,
            tuple(inputs),
            tuple(outputs),
            op_type=op_type,
            operands=tuple(operands),  # some code goes on to change the list
            results=tuple(results),
            params=params,
            recorded=record.could_possibly_record(),
        )
        self.ops.append(op)

    @_keep_error
    def record_backward(
        self, op_type: str, output_tensors: Any, input_tensors: Any, backward_function: Any, *_: Any, **__: Any
    ) -> None:
        """Record a gradient function that code hands to tapes for what it computed."""
        operands, results = tuple(input_tensors), tuple(output_tensors)
        if not all(isinstance(x, _EagerTensorBase) for x in (*results, *operands)):
            return
        where, callers = self._user_line()
        if self.ops and self.ops[-1].op_type == op_type and not self.ops[-1].recorded:
            self.ops.pop()  # the call of a compiled function, whose gradient function this is
            before = []
        else:
            before = [self._ids[y._id] for y in results if y._id in self._ids]
        custom_gradient = is_user_rule(backward_function)
        if custom_gradient:
            operation = "custom_gradient" if op_type == "<lambda>" else op_type
        else:
            operation = explain_rules.op_word(op_type, callers)
        op = TensorflowOp(
            operation,
            where,
            self._module,
            (*[self.value_id(x) for x in operands], *before),
            tuple([self.new_id(y) for y in results]),
            custom_gradient=custom_gradient,
            op_type=op_type,
            operands=(*operands, *results) if before else operands,
            results=results,
            recorded=record.could_possibly_record(),
            backward=backward_function,
            inner=inner_op_types(op_type),
        )
        self.ops.append(op)

    @_keep_error
    def record_exit(self, word: str, operands: Sequence[Tensor], results: Sequence[Tensor] = ()) -> None:
        """Record that the numbers of tensors leave TensorFlow; `results` come back by the same call."""
        where, callers = self._user_line()
        ids = tuple(map(self.value_id, operands)), tuple(map(self.new_id, results))
        op = TensorflowOp(explain_rules.op_word(word, callers), where, self._module, *ids, "left-framework")
        op.operands, op.results, op.can_rerun = operands, results, False
        self.ops.append(op)

    @_keep_error
    def record_constant(self, x: Tensor) -> None:
        """Record a tensor made of plain numbers: by a call of the user's, or of a number beside a tensor."""
        where, callers = self._user_line()
        value_id = self.new_id(x)
        self.leaves[value_id] = x, where
        from_python = any(name in explain_rules.CONVERSIONS for name in callers)
        op = TensorflowOp("constant", where, self._module, outputs=(value_id,), from_python=from_python)
        op.hidden = not is_differentiable(x)  # such as an axis
        self.ops.append(op)


@dataclass(eq=False)
class TapeRecord:
    """One tape of the user's."""

    tape: Any
    spans: list[list[int]] = field(default_factory=list)
    """The ranges of op indices during which it recorded."""
    watched: dict[int, int] = field(default_factory=dict)
    """The ids of the values that it watches, and the op index from which on."""

    def records_at(self, index: int) -> bool:
        return any(start <= index < stop for start, stop in self.spans)

    def gap_cause(self, index: int) -> str:
        """Return why it did not record an operation."""
        return "no-grad" if self.spans[0][0] <= index < self.spans[-1][1] else "outside-tape"


@dataclass(eq=False)
class TapeRequest:
    """A gradient that one of the user's tapes was asked for."""

    tape: TapeRecord
    target: Tensor
    source: Tensor
    ops: Sequence[TensorflowOp]
    """The operations before the request."""
    target_id: int
    source_id: int
    result: Tensor | None
    variable_values: Mapping[int, Sequence[int]]
    is_slice: bool = False
    """True if the source was cut out of something that the tape watches before the run."""
    slices: Sequence[tuple[int, str | None]] = ()
    """The tensors that were cut out of the source before the run, and the lines that used them first."""
    imports: Sequence[Leaf] = ()
    """The floating tensors that were made of plain numbers until then."""


class TapeLog:
    """The user's tapes in a recorded run, and the gradients that they were asked for."""

    def __init__(self, recorder: TensorflowOpRecorder):
        self.requests: list[TapeRequest] = []
        self._recorder = recorder
        self._tapes: dict[int, TapeRecord] = {}

    def start(self, tape: Any) -> None:
        self._of(tape).spans.append([len(self._recorder.ops), sys.maxsize])

    def stop(self, tape: Any) -> None:
        self._of(tape).spans[-1][1] = len(self._recorder.ops)

    def watch(self, tape: Any, tensors: Any) -> None:
        for x in tf.nest.flatten(tensors):
            value_id = self._recorder.value_id(getattr(x, "handle", x))
            self._of(tape).watched.setdefault(value_id, len(self._recorder.ops))

    def add_requests(self, tape: Any, target: Any, sources: Any, results: Any, count: int) -> None:
        """Add the gradients of one call of `tape.gradient`, before which `count` operations had run."""
        recorder, tape = self._recorder, self._of(tape)
        for op in recorder.ops[count:]:
            op.in_gradient = True
        targets = [y for y in tf.nest.flatten(target) if hasattr(y, "_id")]
        for source, result in zip(tf.nest.flatten(sources), tf.nest.flatten(results), strict=True):
            if targets and (hasattr(source, "handle") or hasattr(source, "_id")):
                ids = recorder.value_id(targets[0]), self._source_id(source, tape)
                ops = recorder.ops[:count]
                request = TapeRequest(tape, targets[0], source, ops, *ids, result, recorder.variable_values)
                if result is None:
                    request.imports = recorder.imported_tensors()
                    self._find_slices(request)
                self.requests.append(request)

    def _of(self, tape: Any) -> TapeRecord:
        return self._tapes.setdefault(id(tape), TapeRecord(tape))

    def _source_id(self, source: Any, tape: TapeRecord) -> int:
        """Return the id of a tensor; of a variable that of the last value that was used while the tape recorded."""
        recorder, handle = self._recorder, getattr(source, "handle", None)
        if handle is None:
            return recorder.value_id(source)
        used = {value for index, op in enumerate(recorder.ops) if tape.records_at(index) for value in op.inputs}
        read = [value for value in recorder.variable_values.get(handle._id, ()) if value in used]
        return read[-1] if read else recorder.value_id(handle)

    def _find_slices(self, request: TapeRequest) -> None:
        """Find what was cut out of what before the run, of which nothing was recorded: by the code around the step.

        Where the code cannot be read, equal numbers tell, if they are not everywhere.
        """
        recorder, tape, source, source_id = self._recorder, request.tape, request.source, request.source_id
        if any(source_id in op.inputs for op in recorder.ops):
            return
        with _pause_recording():
            values = np.asarray(source)
            if not hasattr(source, "handle"):
                watched = [x for n, (x, _) in recorder.leaves.items() if n in tape.watched and n != source_id]
                watched = [x for x in watched if is_differentiable(x)] + list(tape.tape.watched_variables())
                request.is_slice = any(self._is_part(source, values, x, np.asarray(x)) for x in watched)
            others = [leaf for leaf in recorder.outside_tensors() if leaf[0] not in (source_id, *tape.watched)]
            request.slices = [
                (n, where) for n, x, where in others if self._is_part(x, np.asarray(x), source, values, computed=True)
            ]

    def _is_part(
        self, part: Tensor, values: np.ndarray, whole: Tensor, all_values: np.ndarray, computed: bool = False
    ) -> bool:
        """Return True if a tensor was cut out of another one before the run, or `computed` from it in any way."""
        assigned = is_assigned_from(self._recorder.function, part, whole, _is_same_tensor)
        fits = computed or (values.size <= all_values.size and bool(np.isin(values, all_values).all()))
        return _has_same_numbers(values, all_values) if assigned is None else assigned and fits


def _is_same_tensor(x: Any, tensor: Any) -> bool:
    handle = getattr(tensor, "handle", None)
    return x is tensor or (handle is not None and getattr(getattr(x, "_value", x), "handle", None) is handle)


def _has_same_numbers(part: np.ndarray, whole: np.ndarray) -> bool:
    """Return True if all numbers of `part` are in `whole`, and not only zeros and ones, which are everywhere."""
    return part.size <= whole.size and not np.isin(part, (0, 1)).all() and bool(np.isin(part, whole).all())


@contextmanager
def _pause_recording() -> Iterator[None]:
    with scope():
        assign(_local, "recorder", None)
        yield


@lru_cache(4096)
def is_user_file(filename: str) -> bool:
    return AUTOGRAPH not in filename and is_user_code(filename, PACKAGES)


def is_user_rule(rule: Any) -> bool:
    # TensorFlow wraps the user's gradient function in one of its own, which holds it in its closure.
    cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    codes = [getattr(getattr(cell, "func", cell), "__code__", None) for cell in cells if callable(cell)]
    if any(is_user_file(code.co_filename) for code in codes if code is not None):
        return True
    return any(hasattr(cell, "_tf_decorator") for cell in cells)  # a public function, which no rule of TensorFlow's is


def _install(replace: Replace) -> None:
    _wrap(replace, _EagerTensorBase, "_numpy", _read_numbers)
    _wrap(replace, record, "record_operation", _record_operation)
    _wrap(replace, record, "record_operation_backprop_only", _record_operation)
    _wrap(replace, constant_op, "convert_to_eager_tensor", _convert_to_eager_tensor)
    _wrap(replace, script_ops, "py_func_common", _py_func_common)
    _wrap(replace, script_ops, "_internal_py_func", _internal_py_func)
    _wrap(replace, pywrap_tfe, "TFE_Py_FastPathExecute", _fast_path_execute)
    _wrap_tape_method(replace, "_push_tape", TapeLog.start)
    _wrap_tape_method(replace, "_pop_tape", TapeLog.stop)
    _wrap_tape_method(replace, "watch", TapeLog.watch)
    _wrap(replace, tf.GradientTape, "gradient", _gradient)
    for name, original in [pair for pair in vars(np).items() if isinstance(pair[1], np.ufunc)]:
        replace(np, name, _Ufunc(original))
    for name in [name for name in NUMPY_CONSTRUCTORS if hasattr(np, name)]:
        _wrap(replace, np, name, _make_array)
    replace(_EagerTensorBase, "__array_function__", _array_function)


_patches = AttributePatch(_install)


def _wrap(replace: Replace, owner: Any, name: str, run: Callable[..., Any]) -> None:
    """Patch a function: `run` gets the recorder of the thread, if it has one, and the original before the arguments."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = _local.recorder
        return original(*args, **kwargs) if recorder is None else run(recorder, original, *args, **kwargs)

    replace(owner, name, wrapper)


def _read_numbers(recorder: TensorflowOpRecorder, original: Any, x: Tensor) -> Any:
    word = explain_rules.EXITS.get(sys._getframe(2).f_code.co_name)  # not for numbers that are only printed
    if word is not None:
        recorder.record_exit(word, [x])
    return original(x)


def _record_operation(recorder: TensorflowOpRecorder, original: Any, *args: Any, **kwargs: Any) -> Any:
    recorder.record_backward(*args, **kwargs)
    return original(*args, **kwargs)


def _convert_to_eager_tensor(recorder: TensorflowOpRecorder, original: Any, *args: Any, **kwargs: Any) -> Any:
    tensor = original(*args, **kwargs)
    if tensor is not args[0]:
        recorder.record_constant(tensor)
    return tensor


def _py_func_common(
    recorder: TensorflowOpRecorder, original: Any, func: Any, inp: Any = None, *args: Any, **kwargs: Any
) -> Any:
    result = original(func, inp, *args, **kwargs)
    if tf.executing_eagerly():
        recorder.record_exit("numpy_function", _tensors(inp), _tensors(result))
    return result


def _internal_py_func(
    recorder: TensorflowOpRecorder,
    original: Any,
    func: Any,
    inp: Any,
    Tout: Any,  # noqa: N803
    *args: Any,
    **kwargs: Any,
) -> Any:
    # The Python code of an eager `tf.py_function` runs as it stands. The gradient of the operation works only once.
    eager = kwargs.get("use_eager_py_func") and not kwargs.get("is_grad_func") and tf.executing_eagerly()
    if not eager:
        return original(func, inp, Tout, *args, **kwargs)
    result = func(*[tf.convert_to_tensor(x) for x in inp])
    if not isinstance(Tout, (list, tuple)):
        return tf.convert_to_tensor(result, Tout)
    results = result if isinstance(result, (list, tuple)) else [result]
    return [tf.convert_to_tensor(y, dtype) for y, dtype in zip(results, Tout, strict=True)]


def _fast_path_execute(recorder: TensorflowOpRecorder, original: Any, *args: Any, **kwargs: Any) -> Any:
    # The fast path reads variables without an operation that a callback could see, so they are read before.
    return original(*map(_read_variables, args), **kwargs)


def _read_variables(argument: Any) -> Any:
    if isinstance(argument, BaseResourceVariable):
        return tf.convert_to_tensor(argument)
    if isinstance(argument, (list, tuple)) and any(isinstance(x, BaseResourceVariable) for x in argument):
        return list(map(_read_variables, argument))
    return argument


def _tensors(values: Any) -> list[Tensor]:
    flat = [getattr(x, "handle", x) for x in tf.nest.flatten(values)]
    return [x for x in flat if isinstance(x, _EagerTensorBase)]


def _wrap_tape_method(replace: Replace, name: str, note: Callable[..., None]) -> None:
    def run(recorder: TensorflowOpRecorder, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        note(recorder.tapes, *args, **kwargs)
        return result

    _wrap(replace, tf.GradientTape, name, run)


def _gradient(
    recorder: TensorflowOpRecorder, original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    count = len(recorder.ops)
    results = original(tape, target, sources, *args, **kwargs)
    recorder.tapes.add_requests(tape, target, sources, results, count)
    return results


class _Ufunc:
    """Stands for a ufunc of NumPy, with all of its attributes."""

    def __init__(self, original: np.ufunc):
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _record_numpy(args, sys._getframe(1).f_code)
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __eq__(self, other: Any) -> bool:
        return self._original is (other._original if isinstance(other, _Ufunc) else other)

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> Any:
        return _numpy_attribute, (self._original.__name__,)  # unpickled, it is the ufunc itself


def _numpy_attribute(name: str) -> Any:
    return getattr(np, name)


def _make_array(_: TensorflowOpRecorder, original: Any, *args: Any, **kwargs: Any) -> Any:
    _record_numpy(args, sys._getframe(2).f_code)
    return original(*args, **kwargs)


def _array_function(_: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    # NumPy calls this for its other functions, in place of their implementation.
    if func.__name__ not in NUMPY_WITHOUT_VALUES:
        _record_numpy(args, sys._getframe(1).f_code)
    return func._implementation(*args, **kwargs)


def _record_numpy(args: Sequence[Any], caller: CodeType) -> None:
    """Record that NumPy reads tensors, for the user or in `keras.ops.convert_to_numpy`, not for TensorFlow itself."""
    recorder = _local.recorder
    if recorder is None:
        return
    values = [x for each in args for x in (each if isinstance(each, (list, tuple)) else (each,))]
    tensors = [x for x in values if isinstance(x, _EagerTensorBase)]
    if tensors and (caller.co_name == "convert_to_numpy" or is_user_file(caller.co_filename)):
        recorder.record_exit("numpy", tensors)
