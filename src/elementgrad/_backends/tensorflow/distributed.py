"""Variables under a `tf.distribute` strategy: a copy on each replica, and what all processes must agree on."""

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
UNMIRRORED = tf.distribute.OneDeviceStrategy
"""The strategy whose variables are plain."""


def unwrap(tensor: Any) -> Any:
    """Return the TensorFlow variable inside of a Keras variable; anything else as it is."""
    # By its type: an attribute that a mirrored variable lacks is looked for in a copy of its whole value.
    return tensor._value if isinstance(tensor, keras.Variable) else tensor


def copies(variable: Variable) -> tuple[Variable, ...]:
    """Return the plain variables behind a TensorFlow variable: one for each replica in this process, or itself.

    >>> import tensorflow as tf
    >>> from elementgrad._backends.tensorflow.distributed import copies
    >>> with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
    ...     mirrored = tf.Variable([1.0, 2.0])
    >>> [copy.numpy().tolist() for copy in copies(mirrored)]
    [[1.0, 2.0]]
    """
    strategy = strategy_of(variable)
    return (variable,) if strategy is None else strategy.experimental_local_results(variable)


def local_copy(variable: Variable) -> Variable:
    """Return the copy of a variable on the current replica; outside of replicas, one of them.

    A mirrored variable itself cannot be read by rows, and would be read whole.
    """
    return variable if strategy_of(variable) is None else variable._get_on_device_or_primary()


def strategy_of(variable: Variable) -> Strategy | None:
    """Return the strategy that mirrors a variable."""
    return variable.distribute_strategy if isinstance(variable, tf.distribute.DistributedValues) else None


def scope(variable: Variable) -> AbstractContextManager[Any]:
    """Return a context in which new variables are mirrored as another one is."""
    strategy = strategy_of(variable)
    return nullcontext() if strategy is None else strategy.scope()


def require_outside(model: Any) -> None:
    """Raise an error for a model of an unknown strategy, and for a call on one of several replicas."""
    _require_known(getattr(model, "_distribute_strategy", None), "the model")
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise FrameworkError("elements are chosen for all replicas at once; call this outside of strategy.run")


def require_mirrored(variable: Variable, name: str) -> None:
    """Raise an error for a variable that has no copy on each replica of the current strategy."""
    own = strategy_of(variable)
    _require_known(own, name)
    if not isinstance(variable, tf.Variable):
        raise FrameworkError(f"{name} is a {type(variable).__name__}; elements of plain and mirrored variables train")
    current = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    if current is not None and current is not own and not (own is None and isinstance(current, UNMIRRORED)):
        raise FrameworkError(
            f"{name} was made outside of the scope of this {type(current).__name__}, and its replicas would not share "
            "it; make the model inside of the scope that it trains in"
        )


def _require_known(strategy: Strategy | None, name: str) -> None:
    if strategy is not None and not isinstance(strategy, (*MIRRORED, UNMIRRORED)):
        raise FrameworkError(
            f"{name} was made under {type(strategy).__name__}; elements train under MirroredStrategy and "
            "MultiWorkerMirroredStrategy, and without a strategy"
        )


def multi_process_strategy(variables: Iterable[Variable]) -> Strategy | None:
    """Return the strategy of several processes, if variables are mirrored by one."""
    strategies = map(strategy_of, variables)
    return next((one for one in strategies if isinstance(one, tf.distribute.MultiWorkerMirroredStrategy)), None)


def allgather(strategy: Strategy, row: np.ndarray) -> np.ndarray:
    """Return the rows of all replicas of a strategy; all of its processes must call this."""
    rows = strategy.experimental_distribute_values_from_function(lambda _: tf.constant(row[None]))
    return np.asarray(strategy.gather(rows, axis=0))
