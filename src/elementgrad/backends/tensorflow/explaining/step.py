"""A training step of the user's, run as it is: why it raises, or what its own tape says of a tensor's gradient."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from elementgrad.backends.lines import spelled
from elementgrad.backends.tensorflow.explaining import meters
from elementgrad.backends.tensorflow.explaining.tapes import Asked, watching
from elementgrad.backends.tensorflow.explaining.watch import Watch, is_line_of_user
from elementgrad.backends.tensorflow.staging import unstaged
from elementgrad.backends.witness import Remark, Step, Told, Verdict, unfollowed
from elementgrad.errors import FrameworkError, UnconnectedError

Tensor = Any
TWICE = "non-persistent"
"""What TensorFlow says of a tape that is asked again."""
UNRULED = "gradient registry has no entry for"


def told(function: Callable[[], Any], wrt: Tensor | None) -> Told:
    """Run a step under the eyes of a watch."""
    if not tf.executing_eagerly():
        raise FrameworkError("eg.explain inside tf.function, where there are no numbers yet; call it outside")
    seen = Watch(function, told.__code__)
    try:
        with unstaged(), watching(seen):
            function()
    except Exception as error:
        found = _raised(seen, error, wrt)
        if found is None:
            raise
        return found
    asked = _about(seen, wrt)
    if seen.failed is not None:
        gone = any(each.result is None for each in asked)
        return _unfollowed("unconnected" if gone else "flows", seen.failed)
    if wrt is not None and not asked:
        return Told("unconnected", None, Remark("unused", "no tape was asked for it"), wrt="the tensor")
    missing = [each for each in asked if each.result is None]
    return _answer(missing[0] if missing else asked[-1]) if missing or wrt is not None else Told("flows")


def _raised(seen: Watch, error: Exception, wrt: Tensor | None) -> Told | None:
    """What an exception tells of gradients, if it is about them."""
    text = str(error)
    if TWICE in text:
        return Told("unconnected", None, Remark("freed-graph", "", Step("tape.gradient", _line(error))))
    if UNRULED in text:
        kind = text.rpartition(":")[2].strip(" '\"")
        steps = [Step(each.word, each.where, each.path) for each in seen.records if each.kind == kind]
        return Told("unconnected", None, Remark("no-rule", text.strip("'\""), steps[-1] if steps else None))
    missing = [each for each in _about(seen, wrt) if each.result is None]
    if seen.failed is not None and missing:
        return _unfollowed("unconnected", seen.failed)
    told = isinstance(error, UnconnectedError) or "None" in text or "gradients" in text
    return _answer(missing[0]) if missing and told else None


def _unfollowed(verdict: Verdict, error: Exception) -> Told:
    """What is known of a step that could not be watched to its end."""
    return Told(verdict, None, Remark(None, unfollowed(error)))


def _about(seen: Watch, wrt: Tensor | None) -> Sequence[Asked]:
    """What tapes were asked, of one tensor if it is named."""
    handle = getattr(wrt, "handle", wrt)
    return [each for each in seen.tapes.asked if wrt is None or getattr(each.source, "handle", each.source) is handle]


def _answer(asked: Asked) -> Told:
    account = asked.account()
    names: dict[str, Any] = {"wrt": getattr(asked.source, "path", None) or "the tensor"}
    if asked.result is None:
        remarks = [remark for remark in account.remarks if remark.cause != "custom-rule"]
        return Told("unconnected", account, remarks[0] if remarks else None, **names)
    value = tf.convert_to_tensor(asked.result)
    finite = bool(tf.reduce_all(tf.math.is_finite(tf.abs(value))))
    verdict: Verdict = "nonfinite" if not finite else "flows" if bool(tf.reduce_any(value != 0)) else "zero"
    if verdict == "flows":
        return Told("flows", value=value, **names)
    seed = tf.ones_like(asked.target)
    pulled = meters.pulled(asked.records, account.connected, (asked.target_number, seed))
    return Told(verdict, account, None, value=value, pulled=pulled, **names)


def _line(error: Exception) -> str | None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_line_of_user(frame.filename)]
    return spelled(frames[-1].filename, frames[-1].lineno or 0) if frames else None
