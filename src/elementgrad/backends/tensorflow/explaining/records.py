"""Operations as they ran, and their derivatives one by one: the rules are TensorFlow's, and those that users write."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context, execute
from tensorflow.python.eager.backprop import _gradient_function
from tensorflow.python.framework import indexed_slices

from elementgrad.backends.touching import guessed, ties, touched
from elementgrad.cleanup import enter, scope

Tensor = Any


ASIDE = {"", "PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "EagerPyFunc", "PyFunc"}
"""What is not run on other numbers: it calls code, or may never end."""


@dataclass(eq=False)
class Record:
    """One operation that ran eagerly; or a way by which numbers left TensorFlow, which has no type."""

    kind: str
    word: str
    where: str | None
    path: str
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    attributes: Sequence[Any] = ()
    recorded: bool = True
    """Whether tapes recorded when it ran."""
    backward: Callable[..., Any] | None = None
    """A rule that was recorded with it, in place of the one for its type."""
    own: bool = False
    """Whether the user wrote that rule."""
    inside: Collection[str] = ()
    """The types of the operations in it, if it is a compiled function."""
    inner: bool = False
    """Whether a tape of the user's did it, to compute a gradient."""
    enters: bool = False
    """Whether it makes a tensor of plain numbers, at the user's wish."""
    stops: str | None = None
    note: str = ""
    passing: list[bool] = field(default_factory=list)
    """Which of its inputs get a derivative."""

    def pull(self, seeds: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the inputs for those of the outputs."""
        if self.backward is not None:
            pulled = self.backward(*seeds)
        else:
            pulled = _gradient_function(
                self.kind, self.attributes, len(self.inputs), list(self.inputs), list(self.outputs), list(seeds), (), ""
            )
        if isinstance(pulled, indexed_slices.IndexedSlices) or not isinstance(pulled, (list, tuple)):
            pulled = [pulled]
        dense = [None if g is None else tf.convert_to_tensor(g) for g in pulled]
        return [*dense, *[None] * (len(self.inputs) - len(dense))]

    def push(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Derivatives of the outputs for those of the inputs: the rule transposed, which is linear in its seeds."""
        seeds = [tf.zeros_like(y) if differentiable(y) else zeros(y) for y in self.outputs]
        free = [seed for seed in seeds if seed is not None and differentiable(seed)]
        with scope():
            tape = tf.GradientTape(watch_accessed_variables=False)
            enter(tape)
            tape.watch(free)
            pulled = self.pull(seeds)
        pairs = [(g, t) for g, t in zip(pulled, tangents, strict=True) if g is not None and t is not None]
        if not pairs:
            return [None] * len(self.outputs)
        pushed = iter(tape.gradient([g for g, _ in pairs], free, [t for _, t in pairs]))
        return [next(pushed) if differentiable(y) else None for y in self.outputs]

    def touched(self, masks: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Which elements of the outputs can move with some of the inputs; a write to a variable keeps its places."""
        if not self.outputs:
            return [mask for mask in masks if mask is not None][:1]
        shapes = [tuple(y.shape) for y in self.outputs]
        if not self._repeatable():
            return guessed(masks, shapes)
        return touched(self._again, [_wide(x) for x in self.inputs], masks, shapes)

    def ties(self, masks: Sequence[np.ndarray | None]) -> bool:
        """Whether elements of what a choice takes are level with those that it took."""
        coarse = [x.dtype == tf.bfloat16 for x in self.inputs]
        return self._repeatable() and ties(self._again, [_wide(x) for x in self.inputs], masks, coarse)

    def _repeatable(self) -> bool:
        """Whether it can be run on other numbers."""
        foreign = [x.dtype in (tf.resource, tf.variant, tf.string) for x in (*self.inputs, *self.outputs)]
        return self.backward is None and not self.inside and self.kind not in ASIDE and not any(foreign)

    def _again(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        tensors = [tf.constant(x, y.dtype) for x, y in zip(inputs, self.inputs, strict=True)]
        given = execute.execute(self.kind, len(self.outputs), tensors, self.attributes, context.context())
        return [_wide(y) for y in given]


def _wide(x: Tensor) -> np.ndarray:
    """Numbers in a precision that NumPy knows."""
    return np.asarray(tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x)


def differentiable(x: Tensor) -> bool:
    """Whether a tensor is of a dtype that has derivatives."""
    return bool(x.dtype.is_floating or x.dtype.is_complex)


def zeros(x: Tensor) -> Tensor | None:
    """A gradient of zeros for a tensor, of whatever kind."""
    return None if x.dtype in (tf.resource, tf.variant, tf.string) else tf.zeros_like(x)
