"""Shared checks of elements under `tf.distribute`; each kind of strategy has processes of its own."""

import json
import traceback

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import elementgrad as eg
from tests.support.keras_training import TARGETS, TOKENS, bits

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "adamw": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
}
BATCH = 8


def copies_of(variable):
    """Return the values of a variable on each replica of this process."""
    held = variable._value
    if not isinstance(held, tf.distribute.DistributedValues):
        return [held.numpy()]
    return [copy.numpy() for copy in held.distribute_strategy.experimental_local_results(held)]


def assert_replicas_agree(model, elements=None, replicas=2):
    for variable in [*model.weights, *(elements.variables if elements else [])]:
        first, *others = copies_of(variable)
        assert len(others) == replicas - 1, variable.path
        for other in others:
            assert np.array_equal(bits(first), bits(other)), variable.path
    for place, variable in zip(elements or [], elements.variables if elements else [], strict=True):
        whole = next(held for held in model.weights if held.path.endswith(place.name))
        flat = place.select(tuple(whole.shape)).flat().reshape(-1)
        for values, leaf in zip(copies_of(whole), copies_of(variable), strict=True):
            assert np.array_equal(values.reshape(-1)[flat], leaf.astype(values.dtype)), str(place)


def assert_close(model, other):
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def small():
    """Tokens to scores, by few layers."""
    keras.utils.set_random_seed(0)
    x = keras.Input((4,), dtype="int32")
    y = layers.LayerNormalization(name="norm")(layers.Embedding(20, 6, name="table")(x))
    return keras.Model(x, layers.Dense(3, name="head")(layers.Flatten()(y)))


SMALL = ["table/embeddings[0, 5]", "table/embeddings[2]", "norm/gamma[::2]", "head/kernel[:5, 1]"]
SMALL_MOVED = {"embeddings": 7, "gamma": 3, "head/kernel": 5}


def spread(strategy, make=small):
    with strategy.scope():
        return make()


def stepper(model, elements, strategy, optimizer, routed=False):
    """A step of a loop of one's own: each replica has its share of the batch, and of the loss."""
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            scores = model(x, training=True)
            loss = tf.reduce_mean((scores - y) ** 2) / replicas
            other = tf.reduce_mean(scores[:, 0] ** 2) / replicas
        if routed:
            first, *rest = elements
            gradients = elements.gradients(tape, {first: other, tuple(rest): loss})
        else:
            gradients = tape.gradient(loss, elements.variables)
        optimizer.apply(gradients, elements.variables)
        return loss

    if strategy is None:
        return tf.function(step)
    with strategy.scope():
        optimizer.build(elements.variables)
    return tf.function(lambda x, y: strategy.run(step, args=(x, y)))


def parts_of(strategy, array):
    """The rows that each replica has: the replicas' shares of the batch, in their order."""
    shares = np.split(array, strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(shares[context.replica_id_in_sync_group])
    )


def batches():
    for start in range(0, len(TOKENS), BATCH):
        yield TOKENS[start : start + BATCH], TARGETS[start : start + BATCH]


def loop(model, elements, strategy, optimizer, routed=False):
    step = stepper(model, elements, strategy, optimizer, routed)
    for batch in batches():
        step(*(batch if strategy is None else [parts_of(strategy, array) for array in batch]))


# A model of small whole numbers that is linear in its elements, so that its training is exact in float32: how sums are
# split over replicas cannot matter.
EXACT = ["table/embeddings[0, 1]", "table/embeddings[2]", "head/bias[1]"]


def whole_numbers():
    x = keras.Input((2,), dtype="int32")
    y = layers.Flatten()(layers.Embedding(40, 3, name="table")(x))
    model = keras.Model(x, layers.Dense(2, name="head")(y))
    numbers = np.random.default_rng(0)
    model.set_weights([numbers.integers(-2, 3, weights.shape) for weights in model.get_weights()])
    return model


def exact_loop(model, elements, strategy):
    with model.distribute_strategy.scope():
        optimizer = keras.optimizers.SGD(0.5)
    numbers = np.random.default_rng(1)
    step = stepper(model, elements, strategy, optimizer)
    for _ in range(2):
        batch = numbers.integers(0, 3, (BATCH, 2)), numbers.integers(-2, 3, (BATCH, 2)).astype(np.float32)
        step(*(batch if strategy is None else [parts_of(strategy, array) for array in batch]))


def exact_patch(path, strategy=None):
    """Train the exact model, alone or under a strategy, and save its patch."""
    model = whole_numbers() if strategy is None else spread(strategy, whole_numbers)
    elements = eg.trainable(model, EXACT)
    exact_loop(model, elements, strategy)
    elements.save(path)
    return model, elements


def bytes_of(tensor):
    count = tensor.shape.num_elements()
    assert count is not None, f"{tensor} has no static shape"
    return count * tensor.dtype.size


def sent(strategy, step, batch):
    """Bytes that leave a replica in a step, as its graph says: to collectives, and by the way to other devices."""
    graph = step.get_concrete_function(*batch).graph
    assert not graph._functions  # all of it is here
    reduced, passed = {}, {}
    for op in graph.get_operations():
        if op.type.startswith("Collective"):
            reduced.setdefault(op.device, []).append(bytes_of(op.inputs[0]))
        for tensor in op.inputs:
            devices = {op.device, tensor.op.device}
            if len(devices) == 2 and "" not in devices and tensor.dtype != tf.resource:
                passed[tensor.name, op.device] = bytes_of(tensor)
    assert len(reduced) == len(strategy.extended.worker_devices)
    (each,) = {sum(given) for given in reduced.values()}
    return each, sum(passed.values())


class Head:
    """Return a layer that trains as a whole, to compare its elements with."""

    def __init__(self, model):
        self.variables = model.get_layer("head").trainable_variables


def wired(strategy, width):
    """A step that trains a large layer, and one that trains four elements of a table and of that layer."""

    def make():
        x = keras.Input((4,), dtype="int32")
        y = layers.Flatten()(layers.Embedding(width, 6, name="table")(x))
        return keras.Model(x, layers.Dense(width, name="head")(y))

    model = spread(strategy, make)
    batch = parts_of(strategy, TOKENS[:BATCH]), parts_of(strategy, np.zeros((BATCH, width), np.float32))
    for trained in (Head, lambda model: eg.trainable(model, ["table/embeddings[0, 5]", "head/kernel[3, :3]"])):
        with strategy.scope():
            optimizer = keras.optimizers.Adam(0.01)
        elements = trained(model)
        yield elements, stepper(model, elements, strategy, optimizer), batch


def wire(strategy, width):
    """Return what a step sends for a large layer, and for four elements of a table and of that layer."""
    return tuple(sent(strategy, step, batch) for _, step, batch in wired(strategy, width))


def run(checks, strategy, folder):
    """Every check, and what came of it: "ok", or where it failed."""
    outcome = {}
    for check in checks:
        try:
            check(strategy, folder)
            outcome[check.__name__] = "ok"
        except Exception:
            outcome[check.__name__] = traceback.format_exc()
    print(json.dumps(outcome), flush=True)
