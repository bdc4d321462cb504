"""A training step of the user's, run as it is: why it raises, or what its own tape says of a tensor's gradient.

A run of a TensorFlow function, watched; its operations can be followed again one by one.
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.autodiff import TensorFunction
from elementgrad._backends.source_location import location_text
from elementgrad._backends.tensorflow import explain_rules
from elementgrad._backends.tensorflow.autodiff import again, passed_by, unstaged
from elementgrad._backends.tensorflow.explain_rules import DECIDES, TensorflowOp, account
from elementgrad._backends.tensorflow.isolate import isolated, without_log
from elementgrad._backends.tensorflow.names import KerasModel
from elementgrad._backends.tensorflow.trace import TapeRequest, TensorflowOpRecorder, is_line_of_user, watching
from elementgrad._cleanup import assign, enter, scope
from elementgrad._explain.backend import ExplainBackend
from elementgrad._explain.trace import (
    MOVING_STATISTIC,
    CotangentSizes,
    FiniteFlags,
    Hint,
    LiveReport,
    Op,
    ReachOverlap,
    TangentSizes,
    Trace,
    Verdict,
    cannot_follow,
    uneven_weights,
)
from elementgrad.errors import ElementgradError, FrameworkError, UnconnectedError

Tensor = Any
TWICE = "non-persistent"
"""What TensorFlow says of a tape that is asked again."""
UNRULED = "gradient registry has no entry for"


def told(function: Callable[[], Any], wrt: Tensor | None) -> LiveReport:
    """Run a step under the eyes of a watch."""
    if not tf.executing_eagerly():
        raise FrameworkError("eg.explain inside tf.function, where there are no numbers yet; call it outside")
    seen = TensorflowOpRecorder(function, told.__code__)
    try:
        with unstaged(), watching(seen):
            function()
    except Exception as error:
        found = _raised(seen, error, wrt)
        if found is None:
            raise
        return found
    asked = _about_step(seen, wrt)
    if seen.failed is not None:
        gone = any(each.result is None for each in asked)
        return _unfollowed("unconnected" if gone else "flows", seen.failed)
    if wrt is not None and not asked:
        return LiveReport("unconnected", None, Hint("unused", "no tape was asked for it"), wrt="the tensor")
    missing = [each for each in asked if each.result is None]
    return _answer(missing[0] if missing else asked[-1]) if missing or wrt is not None else LiveReport("flows")


def _raised(seen: TensorflowOpRecorder, error: Exception, wrt: Tensor | None) -> LiveReport | None:
    """What an exception tells of gradients, if it is about them."""
    text = str(error)
    if TWICE in text:
        return LiveReport("unconnected", None, Hint("freed-graph", "", Op("tape.gradient", _line(error))))
    if UNRULED in text:
        kind = text.rpartition(":")[2].strip(" '\"")
        steps = [Op(each.word, each.where, each.path) for each in seen.records if each.kind == kind]
        return LiveReport("unconnected", None, Hint("no-rule", text.strip("'\""), steps[-1] if steps else None))
    missing = [each for each in _about_step(seen, wrt) if each.result is None]
    if seen.failed is not None and missing:
        return _unfollowed("unconnected", seen.failed)
    told = isinstance(error, UnconnectedError) or "None" in text or "gradients" in text
    return _answer(missing[0]) if missing and told else None


def _unfollowed(verdict: Verdict, error: Exception) -> LiveReport:
    """What is known of a step that could not be watched to its end."""
    return LiveReport(verdict, None, Hint(None, cannot_follow(error)))


def _about_step(seen: TensorflowOpRecorder, wrt: Tensor | None) -> Sequence[TapeRequest]:
    """What tapes were asked, of one tensor if it is named."""
    handle = getattr(wrt, "handle", wrt)
    return [each for each in seen.tapes.asked if wrt is None or getattr(each.source, "handle", each.source) is handle]


def _answer(asked: TapeRequest) -> LiveReport:
    account = asked.account()
    names: dict[str, Any] = {"wrt": getattr(asked.source, "path", None) or "the tensor"}
    if asked.result is None:
        remarks = [remark for remark in account.hints if remark.cause != "custom-rule"]
        return LiveReport("unconnected", account, remarks[0] if remarks else None, **names)
    value = tf.convert_to_tensor(asked.result)
    finite = bool(tf.reduce_all(tf.math.is_finite(tf.abs(value))))
    verdict: Verdict = "nonfinite" if not finite else "flows" if bool(tf.reduce_any(value != 0)) else "zero"
    if verdict == "flows":
        return LiveReport("flows", value=value, **names)
    seed = tf.ones_like(asked.target)
    pulled = explain_rules.pulled(asked.records, account.connected, (asked.target_number, seed))
    return LiveReport(verdict, account, None, value=value, cotangents=pulled, **names)


def _line(error: Exception) -> str | None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_line_of_user(frame.filename)]
    return location_text(frames[-1].filename, frames[-1].lineno or 0) if frames else None


class TensorflowTrace(Trace):
    """Runs a function eagerly, on a tape and under a watch. What was recorded serves all sweeps."""

    def __init__(self, run: TensorFunction, source: Tensor | None, probe: bool):
        if not tf.executing_eagerly():
            raise FrameworkError("eg.explain inside tf.function, where there are no numbers yet; call it outside")
        self._run = run
        self._given = source
        self._held = run.held[0]
        self._later: Sequence[int] = ()
        try:
            watch = self._watched(unstaged())
        except FrameworkError:
            if not self._of_inner_tape():  # it returns what its own tape gave, and that is None
                raise
            return
        except ElementgradError:
            raise
        except Exception as error:  # some code runs only where it is compiled: then such a function is one step
            if not passed_by(error):
                raise
            watch = self._watched(nullcontext())
        self._records = watch.records
        self._target_number = watch.number(self.target)
        self._records += self._unseen(watch, probe)
        handle = getattr(self.source, "handle", None)
        self._later = () if handle is None else watch.held[handle._id]  # what a variable holds after it is written to
        self.graph = account(
            self._records,
            self._source_number,
            self._target_number,
            lambda _, each: _stopped(each),
            _about_trace(run, source),
            self._later,
        )

    def _watched(self, stage: Any, change: Callable[[Tensor], Tensor] | None = None) -> TensorflowOpRecorder:
        """One run, for which the source may be changed; a variable that the function holds is read by it itself."""
        self._seen = watch = TensorflowOpRecorder(self._run.function, TensorflowTrace._watched.__code__)
        self._tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)

        def start(x: Tensor) -> Tensor:
            if self._held and change is not None:
                x.assign(change(x))
            self.source = x if self._held else again(x if change is None else change(x))
            self._tape.watch(self.source)
            self._source_number = watch.new(getattr(self.source, "handle", self.source))
            return self.source

        with isolated():
            enter(self._tape)
            given: Any = start if self._given is None else start(self._given)
            with stage, watching(watch):
                (target,) = self._run(None if self._held else given)
                self.target = tf.convert_to_tensor(target)
        if watch.failed is not None:
            raise watch.failed
        return watch

    def _of_inner_tape(self) -> bool:
        """Tell of a gradient for the source that a tape of the user's own did not give."""
        asked = [each for each in self._seen.tapes.asked if each.result is None]
        for each in [each for each in asked if each.source_number == self._source_number]:
            self._records, self.target, self._target_number = each.records, each.target, each.target_number
            self.graph = each.account()
            self._tape = None
            return True
        return False

    def _unseen(self, watch: TensorflowOpRecorder, probe: bool) -> list[TensorflowOp]:
        """Ways from the source that no operation shows: through NumPy, or around the function altogether."""
        reached = explain_rules.reached(self._records, self._source_number)

        def leaves(each: TensorflowOp) -> bool:
            return each.stops is not None and each.word not in DECIDES and not reached.isdisjoint(each.takes)

        if self._target_number in reached or any(map(leaves, self._records)):
            return []
        leading = explain_rules.leading(self._records, self._target_number)
        found = [
            (number, x, where, "outside-tape")
            for number, x, where in watch.outside()
            if number in leading and self._is_part(x)
        ]
        imported = [entry for entry in watch.imported() if probe and entry[0] in leading]
        found += [(*entry, "left-framework") for entry in self._moving(imported)] if not found and imported else []
        source = (self._source_number,)
        return [
            TensorflowOp(
                "",
                "a closed-over tensor" if cause == "outside-tape" else "numpy",
                where,
                "",
                source,
                (number,),
                stops=cause,
            )
            for number, _, where, cause in found
        ]

    def _is_part(self, x: Tensor) -> bool:
        """Whether a tensor that was there before the run is the source itself, or cut out of it."""
        if any(x is other for other in self._run.others):
            return False
        if x is self._given:
            return True
        given: Any = self._given
        if not hasattr(given, "_id") or x._id < given._id:
            return False
        return bool(np.isin(x.numpy(), given.numpy()).all())

    def _moving(self, imported: Sequence[tuple[int, Tensor, str | None]]) -> list[tuple[int, Tensor, str | None]]:
        """Those tensors made of plain numbers that are others when the source is another."""
        try:
            with scope():
                for name in ("source", "target", "_tape", "_source_number"):
                    assign(self, name, getattr(self, name))
                watch = self._watched(unstaged(), _moved)
        except Exception:  # it is the user's function, at numbers that were not theirs
            return []
        after = {number: x for number, x, _ in watch.imported()}
        return [
            (number, x, where)
            for number, x, where in imported
            if number in after and not np.array_equal(x.numpy(), after[number].numpy(), equal_nan=True)
        ]

    def gradient(self, of: np.ndarray, share: np.ndarray) -> Tensor | None:
        if self._tape is None:
            return None
        with isolated():
            pulled = self._tape.gradient(self.target, self.source, output_gradients=self._seed(of, share))
        return None if pulled is None else tf.convert_to_tensor(pulled)

    def hint_for_error(self, error: Exception) -> Hint | None:
        if not isinstance(error, (LookupError, NotImplementedError)):
            return None
        steps = self._unruled()
        return Hint("no-rule", str(error).strip("'\""), steps[0] if steps else None)

    def _unruled(self) -> list[Op]:
        return [step for step in self.graph.ops if step.cut_cause == "no-rule"]

    def tangent_sizes(self, wrt: np.ndarray) -> tuple[Sequence[TangentSizes | None], np.ndarray] | None:
        tangent = explain_rules.spread(self.source, wrt, uneven_weights(len(wrt)))
        start = dict.fromkeys([self._source_number, *self._later], tangent)
        try:
            with isolated(), without_log():
                steps, reached = explain_rules.pushed(self._records, self.graph.connected, start, self._target_number)
        except (
            LookupError,
            NotImplementedError,
            TypeError,
            ValueError,
            tf.errors.OpError,
        ):  # a rule of a rule is missing
            return None
        values = np.zeros(tuple(self.target.shape)) if reached is None else tf.cast(reached, tf.float64).numpy()
        return steps, values

    def cotangent_sizes(
        self, of: np.ndarray, share: np.ndarray, wrt: np.ndarray
    ) -> Sequence[CotangentSizes | None] | None:
        start = self._target_number, self._seed(of, share)
        with isolated(), without_log():
            return explain_rules.pulled(self._records, self.graph.connected, start, (self._source_number, wrt))

    def reach_overlap(self, of: np.ndarray, share: np.ndarray, wrt: np.ndarray) -> ReachOverlap | None:
        start = self._target_number, self._seed(of, share)
        gradients: dict[int, Tensor] = {}
        with isolated(), without_log():
            explain_rules.pulled(self._records, self.graph.connected, start, None, gradients)
            mask = explain_rules.spread(self.source, wrt, np.ones(len(wrt))).numpy() != 0
            masks = explain_rules.touching(self._records, dict.fromkeys([self._source_number, *self._later], mask))
        alive = {n for n, mask in masks.items() if n in gradients and gradients[n].numpy()[mask].any()}
        return ReachOverlap(set(masks), alive)

    def finite_flags(self) -> Sequence[FiniteFlags | None] | None:
        return [explain_rules.seen(each) for each in self._records]

    def _seed(self, of: np.ndarray, share: np.ndarray) -> Tensor:
        return explain_rules.spread(self.target, of, share)


def _stopped(each: TensorflowOp) -> str | None:
    return None if each.recorded else "outside-tape"


def _moved(x: Tensor) -> Tensor:
    """A tensor a little off, everywhere."""
    return tf.convert_to_tensor(x) * tf.cast(1.0078125, x.dtype) + tf.cast(0.0078125, x.dtype)


def _about_trace(run: TensorFunction, source: Tensor | None) -> list[Hint]:
    """What is to be seen of the source itself."""
    if not isinstance(source, tf.Variable):
        return []
    held = KerasModel(run.function)._variables() if run.held[0] else ()
    frozen = [(kind, variable) for _, kind, variable in held if variable._value is source and not variable.trainable]
    if not frozen and source.trainable:
        return []
    moved = any(kind == "buffer" for kind, _ in frozen)  # no layer that is unfrozen trains it
    return [Hint("not-tracked", "its trainable is False", Op(MOVING_STATISTIC) if moved else None)]


class TensorflowExplain(ExplainBackend):
    name = "tensorflow"
    report_step = staticmethod(told)

    def trace(self, run: TensorFunction, source: Tensor | None, probe: bool) -> Trace:
        return TensorflowTrace(run, source, probe)

    def run_at(self, run: TensorFunction, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
        with isolated():
            return run(*tensors)


implementation = TensorflowExplain()
