"""What training some elements of a Keras model costs: against masked and sparse gradients, and against no training."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row

ROWS, WIDTH, NAMED, BATCH, LENGTH = 100_000, 256, 10, 64, 16
STEP_BOUND, FIT_BOUND = 0.01, 1.5  # a frozen table has no gradient at all to go back through


def tensorflow_rows() -> Iterator[Row]:
    tokens = np.random.default_rng(0).integers(0, ROWS, (BATCH, LENGTH))
    tokens[:, 0] = np.arange(BATCH) % NAMED
    ours = _trained_step(_model(), tokens)
    name = f"keras Adam step, {NAMED} rows of {ROWS}x{WIDTH}"
    yield Row(name, ours, _step(_model(), tokens, masked=True), "dense gradient with a mask", STEP_BOUND, repeats=5)
    yield Row(name, ours, _step(_model(), tokens, masked=False), "IndexedSlices, every row seen", STEP_BOUND, repeats=5)
    yield from fits(tokens)


def fits(tokens: np.ndarray) -> Iterator[Row]:
    """An epoch of `fit`, against that of a model whose table is frozen and whose head, of 10 numbers, trains."""
    many = np.tile(tokens, (50, 1))
    targets = np.zeros((len(many), 1), np.float32)

    def fit(model: Any) -> Callable[[], object]:
        model.compile("adam", "mse")
        return lambda: model.fit(many, targets, batch_size=BATCH, verbose=0)

    frozen, model = _model(), _model()
    frozen.layers[0].trainable = False
    _elements(model)
    name = f"keras fit of 50 batches, {NAMED} rows of {ROWS}x{WIDTH}"
    yield Row(name, fit(model), fit(frozen), "frozen table", FIT_BOUND)


def _model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(ROWS, WIDTH, name="table"), keras.layers.GlobalAveragePooling1D()]
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers, keras.layers.Dense(1, name="head")])


def _elements(model: Any) -> eg.Elements:
    return eg.trainable(model, f"table/embeddings[:{NAMED}]")


def _trained_step(model: Any, tokens: np.ndarray) -> Callable[[], object]:
    import keras
    import tensorflow as tf

    elements, optimizer, x = _elements(model), keras.optimizers.Adam(), tf.constant(tokens)
    optimizer.build(elements.variables)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, elements.variables), elements.variables)

    return step


def _step(model: Any, tokens: np.ndarray, masked: bool) -> Callable[[], object]:
    import keras
    import tensorflow as tf

    table, optimizer, x = model.layers[0].embeddings, keras.optimizers.Adam(), tf.constant(tokens)
    optimizer.build([table])
    mask = tf.constant((np.arange(ROWS) < NAMED).astype(np.float32)[:, None])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        gradient = tape.gradient(loss, table)
        optimizer.apply([tf.convert_to_tensor(gradient) * mask if masked else gradient], [table])

    return step


SUITES = {"training-tensorflow": tensorflow_rows}
