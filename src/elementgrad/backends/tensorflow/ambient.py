"""The global seed of TensorFlow: every verb, and every run of a function in it, leaves it as it was."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tensorflow.python.eager.context import context


def snapshot() -> Callable[[], None]:
    """Note the seed; the undo that is returned puts it back."""
    return partial(restore, getattr(context(), "_seed", None))


def restore(seed: Any) -> None:
    """Put the seed back, and not by `tf.random.set_seed`, which would begin its sequence anew."""
    context()._seed = seed
