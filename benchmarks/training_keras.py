"""What training some elements of a Keras model costs: against masked and sparse gradients, and beside a frozen table.

A frozen model trains nothing and has no way back, so an epoch of `fit` is held against two models whose table is
frozen: one that trains as many numbers right behind it, a vector for each position, and so goes all the way back as
ours does; and one that trains its head alone, which goes back through nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row

ROWS, WIDTH, NAMED, BATCH, LENGTH = 100_000, 256, 10, 32, 10
STEP_BOUND, FIT_BOUND, HEAD_BOUND, DENSE_BOUND = 0.01, 1.1, 1.5, 1.0
INTO, OUT, EXAMPLES, COUNTS = 768, 3072, 1024, (1, 100, 1000)


def tensorflow_rows() -> Iterator[Row]:
    tokens = np.random.default_rng(0).integers(0, ROWS, (BATCH, LENGTH))
    tokens[:, 0] = np.arange(BATCH) % NAMED
    ours = _trained_step(_model(), tokens)
    name = f"keras Adam step, {NAMED} rows of {ROWS}x{WIDTH}, {BATCH}x{LENGTH} tokens"
    yield Row(name, ours, _step(_model(), tokens, masked=True), "dense gradient with a mask", STEP_BOUND, repeats=5)
    yield Row(name, ours, _step(_model(), tokens, masked=False), "IndexedSlices, every row seen", STEP_BOUND, repeats=5)
    yield from fits(tokens)
    yield from dense()


def dense() -> Iterator[Row]:
    """Forward and back through one dense layer, to its input and to some elements or all of its kernel."""
    import keras
    import tensorflow as tf

    x = tf.constant(np.random.default_rng(0).standard_normal((EXAMPLES, INTO)).astype(np.float32))

    def made() -> Any:
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((INTO,)), keras.layers.Dense(OUT, name="dense")])

    def back(model: Any, variables: Any) -> Callable[[], object]:
        @tf.function
        def step() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.square(model(x)))
            return tape.gradient(loss, [x, *variables])

        return step

    plain = made()
    for count in COUNTS:
        model, at = made(), np.sort(np.random.default_rng(0).choice(INTO * OUT, count, replace=False))
        elements = eg.trainable(model, eg.at("dense/kernel")[np.unravel_index(at, (INTO, OUT))])
        ours, all_ = back(model, elements.variables), back(plain, [plain.layers[0].kernel])
        np.testing.assert_allclose(ours()[1], np.reshape(all_()[1], -1)[at], rtol=1e-3, atol=1e-2)  # type: ignore[index]
        yield Row(f"keras dense {INTO}x{OUT}, k={count}", ours, all_, "dense gradient", DENSE_BOUND)


def fits(tokens: np.ndarray) -> Iterator[Row]:
    """An epoch of `fit`, against those of models whose table is frozen."""
    many = np.tile(tokens, (50, 1))
    targets = np.zeros((len(many), 1), np.float32)

    def fit(model: Any) -> Callable[[], object]:
        model.compile("adam", "mse")
        return lambda: model.fit(many, targets, batch_size=BATCH, verbose=0)

    model, behind, head = _model(), _model(positions=True), _model()
    _elements(model)
    for layer in behind.layers:
        layer.trainable = layer.name == "positions"
    head.layers[0].trainable = False
    name, ours = f"keras fit of 50 batches, {NAMED} rows of {ROWS}x{WIDTH}", fit(model)
    yield Row(name, ours, fit(behind), f"frozen table, {LENGTH} vectors behind it train", FIT_BOUND)
    yield Row(name, ours, fit(head), "frozen table, the head alone trains", HEAD_BOUND)


def _model(positions: bool = False) -> Any:
    """Tokens to a mean of rows to a number; with positions, a vector for each of them is added to its row."""
    import keras

    class Positions(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.vectors = self.add_weight(shape=(LENGTH, WIDTH), name="vectors")

        def call(self, x: Any) -> Any:
            return x + self.vectors

    keras.utils.set_random_seed(0)
    inputs = [keras.Input((LENGTH,), dtype="int32"), keras.layers.Embedding(ROWS, WIDTH, name="table")]
    added = [Positions(name="positions")] if positions else []
    outputs = [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1, name="head")]
    return keras.Sequential([*inputs, *added, *outputs])


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
