"""Variables under a `tf.distribute` strategy: one copy on each replica, and what all of them must agree on."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elementgrad.errors import FrameworkError

Strategy = Any
Variable = Any
MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
"""The strategies that keep a whole copy of each variable on each replica, all of them equal."""
ALONE = tf.distribute.OneDeviceStrategy
"""The one whose variables are plain."""


def inside(tensor: Any) -> Any:
    """TensorFlow's own variable in one of Keras's; anything else as it is."""
    # Asked by its kind: an attribute that a mirrored variable lacks is looked for in a copy of its whole value.
    return tensor._value if isinstance(tensor, keras.Variable) else tensor


def copies(variable: Variable) -> tuple[Variable, ...]:
    """The plain variables that hold a variable of TensorFlow's: one for each replica in this process, or itself.

    >>> import tensorflow as tf
    >>> from elementgrad._backends.tensorflow.distributed import copies
    >>> with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
    ...     mirrored = tf.Variable([1.0, 2.0])
    >>> [copy.numpy().tolist() for copy in copies(mirrored)]
    [[1.0, 2.0]]
    """
    strategy = strategy_of(variable)
    return (variable,) if strategy is None else strategy.experimental_local_results(variable)


def here(variable: Variable) -> Variable:
    """The copy of a variable on the replica that asks for it; on none, one of them.

    A mirrored variable itself has no way to read some of its rows, and would be read whole.
    """
    return variable if strategy_of(variable) is None else variable._get_on_device_or_primary()


def strategy_of(variable: Variable) -> Strategy | None:
    """The strategy that a variable is spread over replicas by."""
    return variable.distribute_strategy if isinstance(variable, tf.distribute.DistributedValues) else None


def scope(variable: Variable) -> AbstractContextManager[Any]:
    """Where variables are made that have their copies where another one has its."""
    strategy = strategy_of(variable)
    return nullcontext() if strategy is None else strategy.scope()


def require_outside(model: Any) -> None:
    """Refuse a model of a strategy that is not known here, and to be called on one replica of several."""
    _require_mirrored(getattr(model, "_distribute_strategy", None), "the model")
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise FrameworkError("elements are chosen for all replicas at once; call this outside of strategy.run")


def require_mirrored(variable: Variable, name: str) -> None:
    """Refuse a variable that has no copy on each replica of the strategy whose scope this is."""
    own = strategy_of(variable)
    _require_mirrored(own, name)
    if not isinstance(variable, tf.Variable):
        raise FrameworkError(f"{name} is a {type(variable).__name__}; elements of plain and mirrored variables train")
    here = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    if here is not None and here is not own and not (own is None and isinstance(here, ALONE)):
        raise FrameworkError(
            f"{name} was made outside of the scope of this {type(here).__name__}, and its replicas would not share "
            "it; make the model inside of the scope that it trains in"
        )


def _require_mirrored(strategy: Strategy | None, name: str) -> None:
    if strategy is not None and not isinstance(strategy, (*MIRRORED, ALONE)):
        raise FrameworkError(
            f"{name} was made under {type(strategy).__name__}; elements train under MirroredStrategy and "
            "MultiWorkerMirroredStrategy, and without a strategy"
        )


def shared(strategies: Iterable[Strategy | None]) -> Strategy | None:
    """The strategy of several processes, if there is one."""
    several = tf.distribute.MultiWorkerMirroredStrategy
    return next((strategy for strategy in strategies if isinstance(strategy, several)), None)


def gathered(strategy: Strategy, row: np.ndarray) -> np.ndarray:
    """A row of numbers from each replica of a strategy, all processes of which must ask."""
    each = strategy.experimental_distribute_values_from_function(lambda _: tf.constant(row[None]))
    return np.asarray(strategy.gather(each, axis=0))
