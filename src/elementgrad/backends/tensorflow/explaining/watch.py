"""Watching eager TensorFlow code run: every operation, the tensors it takes and gives, and the user's line."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from types import CodeType
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import record
from tensorflow.python.framework import constant_op
from tensorflow.python.framework.ops import _EagerTensorBase, uid
from tensorflow.python.ops import script_ops
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from elementgrad.backends.lines import is_users, spelled, verb
from elementgrad.backends.patch import Patch, Replace
from elementgrad.backends.tensorflow import layers
from elementgrad.backends.tensorflow.explaining import arrays, words
from elementgrad.backends.tensorflow.explaining.records import Record, differentiable
from elementgrad.backends.tensorflow.model import root
from elementgrad.backends.tensorflow.sharing import see_operations
from elementgrad.cleanup import assign, enter, scope

Tensor = Any
AUTOGRAPH = "__autograph_generated_file"
"""How the files begin into which TensorFlow writes the user's code anew."""
PACKAGES = ("tensorflow", "keras", "numpy", "wrapt", "absl", "optree", "tree", "opt_einsum")
"""Whose lines of code are not the user's."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.watch: Watch | None = None


_local = _Local()


def _noting(note: Callable[..., None]) -> Callable[..., None]:
    """A method by which a watch is told of something: what fails in it is no business of the user's code."""

    @wraps(note)
    def noting(self: "Watch", *args: Any, **kwargs: Any) -> None:
        try:
            note(self, *args, **kwargs)
        except Exception as error:
            self.failed = self.failed or error

    return noting


class Watch:
    """Keeps the operations of the code that runs inside of it."""

    def __init__(self, function: Any, entry: CodeType):
        self.records: list[Record] = []
        self.met: dict[int, tuple[Tensor, str | None]] = {}
        """Tensors that were taken and that no operation gave, and where they were first taken."""
        self.tapes: Any = None
        """Who keeps the tapes of the user's own, if somebody does."""
        self.held: dict[int, list[int]] = {}
        """The numbers of what each variable held, one after another."""
        self.failed: Exception | None = None
        """What went wrong in watching, and not in the code that is watched."""
        self._numbers: dict[int, int] = {}
        self._count = 0
        self._root = root(function)
        self._entry = entry
        self.start = uid()

    @contextmanager
    def on(self) -> Iterator["Watch"]:
        """Watch this thread."""
        with scope():
            _patches.enter()
            enter(layers.entered())
            assign(_local, "watch", self)
            see_operations(self._saw)
            yield self

    def new(self, x: Tensor) -> int:
        """A new number for a tensor, or for what a variable holds from now on."""
        self._count += 1
        self._numbers[x._id] = self._count
        if x.dtype == tf.resource:
            self.held.setdefault(x._id, []).append(self._count)
        return self._count

    def number(self, x: Tensor) -> int:
        """The number of a tensor, or of what a variable holds; it may be met for the first time."""
        known = self._numbers.get(x._id)
        if known is None:
            known = self.new(x)
            self.met[known] = x, self.line()[0]
        return known

    def line(self) -> tuple[str | None, list[str]]:
        """The user's line, and the names of the functions of libraries that it is in, innermost first."""
        frame: Any = sys._getframe(2)
        around: list[str] = []
        while frame is not None and frame.f_code is not self._entry:
            if is_line_of_user(frame.f_code.co_filename):
                return spelled(frame.f_code.co_filename, frame.f_lineno), around
            around.append(verb(frame.f_code.co_filename, frame.f_code.co_name) or frame.f_code.co_name)
            frame = frame.f_back
        return None, around

    @property
    def path(self) -> str:
        """Which layer of a model the code is in now."""
        inside = layers.calling()
        return "/".join([layer.name for layer in inside if layer is not self._root])

    @_noting
    def _saw(
        self, kind: Any, inputs: Any, attributes: Any, outputs: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if graph is not None or kind in words.ASIDE:
            return
        takes = [self.number(x) for x in inputs]
        if kind == "ReadVariableOp":  # what it gives is what the variable holds
            self._numbers[outputs[0]._id] = takes[0]
            return
        gives = [self.new(y) for y in outputs]
        if not outputs and inputs and inputs[0].dtype == tf.resource:  # a variable is written to
            takes = takes[1:] if kind == words.REPLACES else takes
            gives = [self.new(inputs[0])]
        where, around = self.line()
        self.records.append(
            Record(
                kind,
                words.word(kind, around),
                where,
                self.path,
                tuple(takes),
                tuple(gives),
                tuple(inputs),
                tuple(outputs),  # some code goes on to change the list
                attributes,
                record.could_possibly_record(),
            )
        )

    @_noting
    def recorded(self, kind: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], backward: Any) -> None:
        """Some code tells tapes of a rule for what it computed."""
        if not all(isinstance(x, _EagerTensorBase) for x in (*outputs, *inputs)):
            return
        where, around = self.line()
        called = self.records and self.records[-1].kind == kind and not self.records[-1].recorded
        before = () if called else tuple([self._numbers[y._id] for y in outputs if y._id in self._numbers])
        if called:  # a function that was compiled: the rule is for this call
            self.records.pop()
        takes = (*[self.number(x) for x in inputs], *before)
        own = is_own(backward)
        self.records.append(
            Record(
                kind,
                words.written(kind) if own else words.word(kind, around),
                where,
                self.path,
                takes,
                tuple([self.new(y) for y in outputs]),
                (*inputs, *outputs) if before else tuple(inputs),
                tuple(outputs),
                backward=backward,
                own=own,
                recorded=record.could_possibly_record(),
                inside=words.inside(kind),
            )
        )

    @_noting
    def left(self, word: str, tensors: Sequence[Tensor], given: Sequence[Tensor] = ()) -> None:
        """The numbers of tensors leave TensorFlow; those of others may come back by the same way."""
        where, around = self.line()
        takes = tuple([self.number(x) for x in tensors])
        gives = tuple([self.new(y) for y in given])
        self.records.append(
            Record("", words.word(word, around), where, self.path, takes, gives, tensors, given, stops="left-framework")
        )

    @_noting
    def entered(self, x: Tensor) -> None:
        """A tensor is made of plain numbers; the user may have asked for it, or written a number beside a tensor."""
        where, around = self.line()
        number = self.new(x)
        self.met[number] = x, where
        enters = any(name in words.ENTERS for name in around)
        self.records.append(Record("", "constant", where, self.path, gives=(number,), enters=enters))

    def imported(self) -> list[tuple[int, Tensor, str | None]]:
        """The floating tensors that were made of plain numbers on the way."""
        return [(n, x, where) for n, (x, where) in self.met.items() if x._id >= self.start and differentiable(x)]

    def outside(self) -> list[tuple[int, Tensor, str | None]]:
        """The floating tensors that were there before."""
        return [(n, x, where) for n, (x, where) in self.met.items() if x._id < self.start and differentiable(x)]


def current() -> Watch | None:
    """Who watches this thread."""
    return _local.watch


@contextmanager
def unwatched() -> Iterator[None]:
    """Look at numbers without being seen."""
    with scope():
        assign(_local, "watch", None)
        yield


@lru_cache(4096)
def is_line_of_user(filename: str) -> bool:
    """Whether code in a file is the user's, and not what TensorFlow made of it."""
    return AUTOGRAPH not in filename and is_users(filename, PACKAGES)


def is_own(rule: Any) -> bool:
    """Whether the user wrote a rule: TensorFlow has it in a function of its own."""
    cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    codes = [getattr(getattr(cell, "func", cell), "__code__", None) for cell in cells if callable(cell)]
    return any(is_line_of_user(code.co_filename) for code in codes if code is not None)


def _install(replace: Replace) -> None:
    _replace(replace, _EagerTensorBase, "_numpy", _before_numpy)
    arrays.install(replace, _before_array)
    for name in ("record_operation", "record_operation_backprop_only"):
        _replace(replace, record, name, _before_record)
    convert = constant_op.convert_to_eager_tensor

    @wraps(convert)
    def convert_to_eager_tensor(*args: Any, **kwargs: Any) -> Any:
        made = convert(*args, **kwargs)
        if _local.watch is not None and made is not args[0]:
            _local.watch.entered(made)
        return made

    replace(constant_op, "convert_to_eager_tensor", convert_to_eager_tensor)
    original = script_ops.py_func_common

    @wraps(original)
    def py_func_common(func: Any, inp: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = original(func, inp, *args, **kwargs)
        watch = _local.watch
        if watch is not None and tf.executing_eagerly():
            watch.left("numpy_function", _tensors(inp), _tensors(result))
        return result

    replace(script_ops, "py_func_common", py_func_common)
    internal = script_ops._internal_py_func

    @wraps(internal)
    def internal_py_func(func: Any, inp: Any, Tout: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803
        """The Python of a `tf.py_function` runs as it stands; its rule could be asked once only."""
        plain = kwargs.get("use_eager_py_func") and not kwargs.get("is_grad_func") and tf.executing_eagerly()
        if _local.watch is None or not plain:
            return internal(func, inp, Tout, *args, **kwargs)
        result = func(*[tf.convert_to_tensor(x) for x in inp])
        if not isinstance(Tout, (list, tuple)):
            return tf.convert_to_tensor(result, Tout)
        results = result if isinstance(result, (list, tuple)) else [result]
        return [tf.convert_to_tensor(y, kind) for y, kind in zip(results, Tout, strict=True)]

    replace(script_ops, "_internal_py_func", internal_py_func)
    execute = pywrap_tfe.TFE_Py_FastPathExecute

    @wraps(execute)
    def fast_path_execute(*args: Any, **kwargs: Any) -> Any:
        """Variables are read where everybody sees it, and not on the way."""
        return execute(*(map(_read, args) if _local.watch is not None else args), **kwargs)

    replace(pywrap_tfe, "TFE_Py_FastPathExecute", fast_path_execute)


def _replace(replace: Replace, owner: Any, name: str, before: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if _local.watch is not None:
            before(_local.watch, *args, **kwargs)
        return original(*args, **kwargs)

    replace(owner, name, watched)


def _before_numpy(watch: Watch, x: Tensor) -> None:
    word = words.LEAVES.get(sys._getframe(2).f_code.co_name)  # what is printed leaves nothing behind
    if word is not None:
        watch.left(word, [x])


def _before_array(code: CodeType, tensors: Sequence[Tensor]) -> None:
    """NumPy takes numbers for the user, and not for TensorFlow itself."""
    asked = code.co_name == "convert_to_numpy"  # of Keras
    if _local.watch is not None and (asked or is_line_of_user(code.co_filename)):
        _local.watch.left("numpy", tensors)


def _before_record(
    watch: Watch, op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Any, *_: Any, **__: Any
) -> None:
    watch.recorded(op_type, output_tensors, input_tensors, backward_function)


def _read(argument: Any) -> Any:
    """What a variable holds; in a list as well."""
    if isinstance(argument, BaseResourceVariable):
        return tf.convert_to_tensor(argument)
    listed = isinstance(argument, (list, tuple)) and any(isinstance(x, BaseResourceVariable) for x in argument)
    return list(map(_read, argument)) if listed else argument


def _tensors(values: Any) -> list[Tensor]:
    flat = [getattr(x, "handle", x) for x in tf.nest.flatten(values)]
    return [x for x in flat if isinstance(x, _EagerTensorBase)]


_patches = Patch(_install)
