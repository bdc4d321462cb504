"""Watching NumPy take the numbers of eager tensors: it reads their memory, and asks them for nothing on the way.

A tensor lends its memory to `np.tanh(x)` or `np.asarray(x)` without any of its methods being called. So those names of
NumPy's are replaced while code is watched, and do what they did.


Watching eager TensorFlow code run: every operation, the tensors it takes and gives, and the user's line.

Tapes of the user's own: when each records, what it watches, and what it is asked.
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

from elementgrad._backends.monkeypatch import AttributePatch, Replace
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
from elementgrad._backends.tensorflow.explain_rules import TensorflowOp, account, differentiable
from elementgrad._backends.tensorflow.names import layer_of
from elementgrad._backends.tensorflow.top import see_operations
from elementgrad._cleanup import assign, enter, scope
from elementgrad._explain.trace import Hint, Op, OpGraph

Note = Callable[[CodeType, Sequence[Any]], None]
"""Told the code that calls NumPy, and the tensors whose numbers it hands over."""
MAKES = ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "asarray_chkfinite")
"""Functions that make an array, and that NumPy offers nobody to take over."""
ASIDE = frozenset(
    """
    shape ndim size result_type common_type can_cast min_scalar_type iscomplexobj isrealobj may_share_memory
    shares_memory zeros_like ones_like empty_like full_like array_repr array_str array2string
    """.split()  # noqa: SIM905
)
"""Functions that take nothing of the numbers of a tensor, or only print them."""


class _Ufunc:
    """A function of NumPy's that works element by element, with all its attributes."""

    def __init__(self, original: np.ufunc, note: Note):
        self._original = original
        self._note = note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _look(self._note, args, sys._getframe(1).f_code)
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __eq__(self, other: Any) -> bool:
        return self._original is (other._original if isinstance(other, _Ufunc) else other)

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> Any:
        return _named, (self._original.__name__,)  # where nobody watches it is the function itself


def _named(name: str) -> Any:
    return getattr(np, name)


def install(replace: Replace, note: Note) -> None:
    """Have NumPy's functions say which tensors they take numbers of."""
    for name, original in [pair for pair in vars(np).items() if isinstance(pair[1], np.ufunc)]:
        replace(np, name, _Ufunc(original, note))
    for name in [name for name in MAKES if hasattr(np, name)]:
        replace(np, name, _noting_arrays(getattr(np, name), note))

    def array_function(_: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """NumPy calls this for its other functions, in place of what they do."""
        if func.__name__ not in ASIDE:
            _look(note, args, sys._getframe(1).f_code)
        return func._implementation(*args, **kwargs)

    replace(_EagerTensorBase, "__array_function__", array_function)


def _noting_arrays(original: Callable[..., Any], note: Note) -> Callable[..., Any]:
    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        _look(note, args, sys._getframe(1).f_code)
        return original(*args, **kwargs)

    return make


def _look(note: Note, args: Sequence[Any], code: CodeType) -> None:
    given = [x for each in args for x in (each if isinstance(each, (list, tuple)) else (each,))]
    tensors = [x for x in given if isinstance(x, _EagerTensorBase)]
    if tensors:
        note(code, tensors)


Tensor = Any
AUTOGRAPH = "__autograph_generated_file"
"""How the files begin into which TensorFlow writes the user's code anew."""
PACKAGES = ("tensorflow", "keras", "numpy", "wrapt", "absl", "optree", "tree", "opt_einsum")
"""Whose lines of code are not the user's."""


class _RecorderState(threading.local):
    def __init__(self) -> None:
        self.watch: TensorflowOpRecorder | None = None


_local = _RecorderState()


def _noting(note: Callable[..., None]) -> Callable[..., None]:
    """A method by which a watch is told of something: what fails in it is no business of the user's code."""

    @wraps(note)
    def noting(self: "TensorflowOpRecorder", *args: Any, **kwargs: Any) -> None:
        try:
            note(self, *args, **kwargs)
        except Exception as error:
            self.failed = self.failed or error

    return noting


class TensorflowOpRecorder:
    """Keeps the operations of the code that runs inside of it."""

    def __init__(self, function: Any, entry: CodeType):
        self.records: list[TensorflowOp] = []
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
        self._root = layer_of(function)
        self._entry = entry
        self.start = uid()

    @contextmanager
    def on(self) -> Iterator["TensorflowOpRecorder"]:
        """Watch this thread."""
        with scope():
            _patches.enter()
            enter(names.track_layer_calls())
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
                return location_text(frame.f_code.co_filename, frame.f_lineno), around
            around.append(verb_of(frame.f_code) or frame.f_code.co_name)
            frame = frame.f_back
        return None, around

    @property
    def path(self) -> str:
        """Which layer of a model the code is in now."""
        inside = names.current_layers()
        return "/".join([layer.name for layer in inside if layer is not self._root])

    @_noting
    def _saw(
        self, kind: Any, inputs: Any, attributes: Any, outputs: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if graph is not None or kind in explain_rules.ASIDE:
            return
        takes = [self.number(x) for x in inputs]
        if kind == "ReadVariableOp":  # what it gives is what the variable holds
            self._numbers[outputs[0]._id] = takes[0]
            return
        gives = [self.new(y) for y in outputs]
        if not outputs and inputs and inputs[0].dtype == tf.resource:  # a variable is written to
            takes = takes[1:] if kind == explain_rules.REPLACES else takes
            gives = [self.new(inputs[0])]
        where, around = self.line()
        self.records.append(
            TensorflowOp(
                kind,
                explain_rules.word(kind, around),
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
            TensorflowOp(
                kind,
                explain_rules.written(kind) if own else explain_rules.word(kind, around),
                where,
                self.path,
                takes,
                tuple([self.new(y) for y in outputs]),
                (*inputs, *outputs) if before else tuple(inputs),
                tuple(outputs),
                backward=backward,
                own=own,
                recorded=record.could_possibly_record(),
                inside=explain_rules.inside(kind),
            )
        )

    @_noting
    def left(self, word: str, tensors: Sequence[Tensor], given: Sequence[Tensor] = ()) -> None:
        """The numbers of tensors leave TensorFlow; those of others may come back by the same way."""
        where, around = self.line()
        takes = tuple([self.number(x) for x in tensors])
        gives = tuple([self.new(y) for y in given])
        self.records.append(
            TensorflowOp(
                "",
                explain_rules.word(word, around),
                where,
                self.path,
                takes,
                gives,
                tensors,
                given,
                stops="left-framework",
            )
        )

    @_noting
    def entered(self, x: Tensor) -> None:
        """A tensor is made of plain numbers; the user may have asked for it, or written a number beside a tensor."""
        where, around = self.line()
        number = self.new(x)
        self.met[number] = x, where
        enters = any(name in explain_rules.ENTERS for name in around)
        self.records.append(TensorflowOp("", "constant", where, self.path, gives=(number,), enters=enters))

    def imported(self) -> list[tuple[int, Tensor, str | None]]:
        """The floating tensors that were made of plain numbers on the way."""
        return [(n, x, where) for n, (x, where) in self.met.items() if x._id >= self.start and differentiable(x)]

    def outside(self) -> list[tuple[int, Tensor, str | None]]:
        """The floating tensors that were there before."""
        return [(n, x, where) for n, (x, where) in self.met.items() if x._id < self.start and differentiable(x)]


def current() -> TensorflowOpRecorder | None:
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
    return AUTOGRAPH not in filename and is_user_code(filename, PACKAGES)


def is_own(rule: Any) -> bool:
    """Whether the user wrote a rule: TensorFlow has it in a function of its own."""
    cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    codes = [getattr(getattr(cell, "func", cell), "__code__", None) for cell in cells if callable(cell)]
    return any(is_line_of_user(code.co_filename) for code in codes if code is not None)


def _install_recorder(replace: Replace) -> None:
    _replace(replace, _EagerTensorBase, "_numpy", _before_numpy)
    install(replace, _before_array)
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


def _before_numpy(watch: TensorflowOpRecorder, x: Tensor) -> None:
    word = explain_rules.LEAVES.get(sys._getframe(2).f_code.co_name)  # what is printed leaves nothing behind
    if word is not None:
        watch.left(word, [x])


def _before_array(code: CodeType, tensors: Sequence[Tensor]) -> None:
    """NumPy takes numbers for the user, and not for TensorFlow itself."""
    asked = code.co_name == "convert_to_numpy"  # of Keras
    if _local.watch is not None and (asked or is_line_of_user(code.co_filename)):
        _local.watch.left("numpy", tensors)


def _before_record(
    watch: TensorflowOpRecorder,
    op_type: Any,
    output_tensors: Any,
    input_tensors: Any,
    backward_function: Any,
    *_: Any,
    **__: Any,
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


RESLICES = ("indexing", "gather", "slice", "reshape", "read", "identity")
"""Operations that make another tensor of a part of one."""


@dataclass(eq=False)
class TapeRecord:
    """One tape: the spans of records that it saw, and from which on it watched which values."""

    tape: Any
    spans: list[list[int]] = field(default_factory=list)
    watched: dict[int, int] = field(default_factory=dict)

    def sees(self, at: int) -> bool:
        """Whether it recorded then."""
        return any(start <= at < stop for start, stop in self.spans)

    def misses(self, at: int) -> str:
        """Why it did not record then."""
        return "no-grad" if self.spans[0][0] <= at < self.spans[-1][1] else "outside-tape"


@dataclass(eq=False)
class TapeRequest:
    """A gradient that a tape was asked for."""

    taped: TapeRecord
    target: Tensor
    source: Tensor
    records: Sequence[TensorflowOp]
    """What had run by then."""
    target_number: int
    source_number: int
    result: Tensor | None
    held: Mapping[int, Sequence[int]]
    """The numbers of what variables held."""
    cut: bool = False
    """Whether it is a part of what the tape watches, taken out of it before."""
    parts: Sequence[tuple[int, str | None]] = ()
    """The tensors from before that are parts of it, and where they were first used."""

    def account(self) -> OpGraph:
        """How the tape's target was computed from its source, and where the tape lost it."""
        since = 0 if hasattr(self.source, "handle") else self.taped.watched.get(self.source_number, 0)

        def follows(at: int, each: TensorflowOp) -> str | None:
            at -= len(self.parts)
            if not self.taped.sees(at):
                return "inner-gradient" if each.inner else self.taped.misses(at)
            if not each.recorded:
                return "outside-tape"
            return "not-tracked" if at < since and self.source_number in each.takes else None

        remark = self._remark()
        outside = [
            TensorflowOp("", "a closed-over tensor", where, "", (self.source_number,), (number,), stops="outside-tape")
            for number, where in self.parts
        ]
        return account(
            [*outside, *self.records],
            self.source_number,
            self.target_number,
            follows,
            [] if remark is None else [remark],
        )

    def _remark(self) -> Hint | None:
        """What is to be seen of the source alone."""
        source = self.source
        dtype = tf.as_dtype(source.dtype)
        if not dtype.is_floating and not dtype.is_complex:
            return Hint("integer", f"it is of dtype {dtype.name}")
        if hasattr(source, "handle"):
            return self._remark_on_variable()
        if self._tracked(self.source_number):
            return None
        made = next((each for each in self.records if self.source_number in each.gives), None)
        if (
            made is not None
            and made.word in ("indexing", "gather", "slice", "reshape")
            and self._tracked(made.takes[0])
        ):
            return Hint("resliced", "", Op(made.word, made.where, made.path))
        if not any(self.source_number in each.takes for each in self.records):
            if self.cut:
                return Hint("resliced", "it was cut out of what the tape watches before, and is not used itself")
            return Hint("unused", "no step takes it")
        return Hint("not-tracked", "the tape does not watch it")

    def _remark_on_variable(self) -> Hint | None:
        """Whether the tape watches the variable, or would have if it had been used."""
        tape, source = self.taped.tape, self.source
        if any(variable.handle is source.handle for variable in tape.watched_variables()):
            return None
        if not tape._watch_accessed_variables:
            return Hint("not-tracked", "the tape has watch_accessed_variables=False")
        return None if source.trainable else Hint("not-tracked", "its trainable is False")

    def _tracked(self, number: int) -> bool:
        """Whether a tape watches a value, or one that it was computed from."""
        tracked = set(self.taped.watched)
        for variable in self.taped.tape.watched_variables():
            tracked.update(self.held.get(variable.handle._id, ()))
        for at, each in enumerate(self.records):
            if self.taped.sees(at) and not tracked.isdisjoint(each.takes):
                tracked.update(each.gives)
        return number in tracked


class TapeLog:
    """The tapes that were met while somebody watched."""

    def __init__(self, seen: TensorflowOpRecorder):
        self._watch = seen
        self._taped: dict[int, TapeRecord] = {}
        self.asked: list[TapeRequest] = []

    def of(self, tape: Any) -> TapeRecord:
        """What is known of a tape."""
        return self._taped.setdefault(id(tape), TapeRecord(tape))

    def jvp(self, tape: Any) -> None:
        """It begins to record."""
        self.of(tape).spans.append([len(self._watch.records), sys.maxsize])

    def pop(self, tape: Any) -> None:
        """It stops."""
        self.of(tape).spans[-1][1] = len(self._watch.records)

    def watches(self, tape: Any, tensors: Any) -> None:
        """It is told of tensors."""
        for x in tf.nest.flatten(tensors):
            number = self._watch.number(getattr(x, "handle", x))
            self.of(tape).watched.setdefault(number, len(self._watch.records))

    def ask(self, tape: Any, target: Any, sources: Any, results: Any, records: int) -> None:
        """It was asked for gradients, and gave them."""
        for each in self._watch.records[records:]:
            each.inner = True
        targets = [y for y in tf.nest.flatten(target) if hasattr(y, "_id")]
        for source, result in zip(tf.nest.flatten(sources), tf.nest.flatten(results), strict=True):
            if targets and (hasattr(source, "handle") or hasattr(source, "_id")):
                taped = self.of(tape)
                numbers = self._watch.number(targets[0]), self._source(source, taped)
                before = self._watch.records[:records]
                asked = TapeRequest(taped, targets[0], source, before, *numbers, result, self._watch.held)
                if result is None:
                    asked.cut, asked.parts = self._kin(source, numbers[1], taped)
                self.asked.append(asked)

    def _kin(self, source: Any, number: int, taped: TapeRecord) -> tuple[bool, list[tuple[int, str | None]]]:
        """Whether a tensor is cut out of what a tape watches, and which tensors from before are cut out of it.

        Of what happened before the step there are only numbers to tell by.
        """
        if any(number in each.takes for each in self._watch.records):
            return False, []
        with unwatched():
            numbers = np.asarray(source)
            if hasattr(source, "handle"):
                watched = []
            else:
                watched = [x for n, (x, _) in self._watch.met.items() if n in taped.watched and n != number]
                watched = [x for x in watched if differentiable(x)] + list(taped.tape.watched_variables())
            cut = any(is_part(numbers, np.asarray(x)) for x in watched)
            outside = [(n, x, where) for n, x, where in self._watch.outside() if n != number and n not in taped.watched]
            return cut, [(n, where) for n, x, where in outside if is_part(np.asarray(x), numbers)]

    def _source(self, source: Any, taped: TapeRecord) -> int:
        """The number of a tensor; of a variable that of the value that was read while the tape ran."""
        handle = getattr(source, "handle", None)
        if handle is None:
            return self._watch.number(source)
        held = self._watch.held.get(handle._id, ())
        taken = {n for at, each in enumerate(self._watch.records) if taped.sees(at) for n in each.takes}
        read = [number for number in held if number in taken]
        return read[-1] if read else self._watch.number(handle)


def is_part(part: np.ndarray, whole: np.ndarray) -> bool:
    """Whether numbers are among others, and not such as are everywhere."""
    return part.size <= whole.size and not np.isin(part, (0, 1)).all() and bool(np.isin(part, whole).all())


def _install_tapes(replace: Replace) -> None:
    kind = tf.GradientTape
    _after(replace, "_push_tape", TapeLog.jvp)
    _after(replace, "_pop_tape", TapeLog.pop)
    _after(replace, "watch", TapeLog.watches)
    original = kind.gradient

    @wraps(original)
    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        tapes = _current()
        records = len(tapes._watch.records) if tapes is not None else 0
        results = original(tape, target, sources, *args, **kwargs)
        if tapes is not None:
            tapes.ask(tape, target, sources, results, records)
        return results

    replace(kind, "gradient", gradient)


def _after(replace: Replace, name: str, note: Callable[..., None]) -> None:
    original = getattr(tf.GradientTape, name)

    @wraps(original)
    def method(tape: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tape, *args, **kwargs)
        tapes = _current()
        if tapes is not None:
            note(tapes, tape, *args, **kwargs)
        return result

    replace(tf.GradientTape, name, method)


def _current() -> TapeLog | None:
    """Who keeps the tapes of this thread."""
    seen = current()
    return None if seen is None else seen.tapes


def _install(replace: Replace) -> None:
    _install_recorder(replace)
    _install_tapes(replace)


_patches = AttributePatch(_install)


@contextmanager
def watching(seen: TensorflowOpRecorder) -> Iterator[TapeLog]:
    """Watch this thread, its tapes too."""
    seen.tapes = TapeLog(seen)
    with seen.on():
        yield seen.tapes
