"""The runs of `faulty_runs.py` on Keras."""

import keras
import numpy as np
import tensorflow as tf

import elementgrad as eg
from elementgrad.callbacks import KerasWatch
from tests.support.faulty_runs import BLOCKS, WIDTH, Case, batch_at, weights


class Block(keras.layers.Layer):
    def __init__(self, number: int):
        super().__init__(name=f"block{number}")
        self.number = number
        initial = keras.initializers.Constant(weights()[number])
        self.weight = self.add_weight(shape=(WIDTH, WIDTH), initializer=initial, name="weight")

    def call(self, inputs):
        h, batch = inputs
        a, b, c, d, e = [batch[name][:, self.number] for name in "abcde"]
        h = h @ self.weight
        h = tf.sqrt(tf.nn.softplus(h) * a)  # sqrt
        h = (h * b) / c  # divide
        h = tf.exp(d - h)  # exp
        return tf.math.log(h + e)  # log


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [Block(number) for number in range(BLOCKS)]
        self.dropout = keras.layers.Dropout(0.1, seed=3)

    def call(self, batch, training=False):
        h = self.dropout(batch["x"], training=training)
        for block in self.blocks:
            h = block((h, batch))
        return h


class Injection(keras.callbacks.Callback):
    def __init__(self, case: Case):
        super().__init__()
        self.case = case

    def on_train_batch_begin(self, number, logs=None):
        case = self.case
        if number != case.step or case.fault not in ("inf in a parameter", "optimizer", "exploding"):
            return
        target, value = self.model.blocks[case.block].weight, np.inf
        if case.fault == "optimizer":
            slots = [v for v in self.model.optimizer.variables if tuple(v.shape) == (WIDTH, WIDTH)]
            target, value = [v for v in slots if "velocity" in v.path][case.block], -1.0
        if case.fault == "exploding":
            value = 1e4
        array = target.numpy()
        array[case.index] = value
        target.assign(array)


def run(case: Case, capture: str):
    keras.utils.set_random_seed(0)
    model = Net()
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    batches = [batch_at(case, step) for step in range(case.steps)]
    x = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    y = np.zeros((len(x["x"]), WIDTH), "f")
    size = len(batches[0]["x"])
    model({name: array[:size] for name, array in x.items()})
    name = f"block{case.block}/weight[{case.index[0]}]"
    rules = {name: lambda g: tf.reduce_max(abs(g)) > 1e-12} if case.fault == "exploding" else "nonfinite"
    if case.fault == "exploding":  # nothing is learned until then
        x["a"][: case.step * size] = 1.0
    watch = KerasWatch(capture=capture, when=rules)
    try:
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0, callbacks=[watch, Injection(case)])
    except eg.WatchError as error:
        return error, watch.replay()
    return None, None
