"""Variables, seeds and closures are as they were after a read."""

import threading

import keras
import pytest
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

import elementgrad as eg
from tests.isolation.test_state import X
from tests.support.frameworks import TENSORFLOW

WRITES = {
    "assign": lambda v: v.assign(v * 2),
    "assign_add": lambda v: v.assign_add(v),
    "assign_sub": lambda v: v.assign_sub(v / 2),
    "assign a slice": lambda v: v[1].assign(5.0),
    "scatter_add": lambda v: v.scatter_add(tf.IndexedSlices(tf.constant([1.0], tf.float64), [0])),
    "scatter_update": lambda v: v.scatter_update(tf.IndexedSlices(tf.constant([1.0], tf.float64), [0])),
    "scatter_nd_add": lambda v: v.scatter_nd_add([[0]], tf.constant([1.0], tf.float64)),
    "scatter_nd_update": lambda v: v.scatter_nd_update([[0]], tf.constant([1.0], tf.float64)),
    "old style": lambda v: tf.compat.v1.assign_add(v, v),
    "map": lambda v: tf.map_fn(lambda i: v.assign_add(v), tf.range(2), fn_output_signature=tf.float64),
}


def methods():
    return [{n: m for n, m in vars(owner).items() if callable(m)} for owner in (BaseResourceVariable, ResourceVariable)]


@pytest.mark.parametrize("where", ["eager", "traced inside", "traced before", "inside a loop", "in a user's graph"])
@pytest.mark.parametrize("write", WRITES)
def test_tensorflow_variables_keep_their_values(write, where):
    v = tf.Variable(tf.constant([3.0, 4.0, 5.0], tf.float64))
    before = methods()

    def f(x):
        WRITES[write](v)
        return x * v

    if where == "inside a loop":
        f = tf.function(lambda x, f=f: tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, f(x)), (0, x))[1])
    elif where.startswith("traced"):
        f = tf.function(f)
    if where == "traced before":
        f(TENSORFLOW.tensor(X))
        v.assign([3.0, 4.0, 5.0])

    def read(x):
        J = eg.jacobian(f, x)
        return J[(0, 0), :], J[:, (0, 0)], J.dense()

    (tf.function(read) if where == "in a user's graph" else read)(TENSORFLOW.tensor(X))
    assert v.numpy().tolist() == [3, 4, 5]
    assert methods() == before


def test_layers_of_keras_keep_their_statistics_and_seeds():
    layers = [keras.layers.BatchNormalization(dtype="float64"), keras.layers.Dropout(0.5, seed=1, dtype="float64")]
    x = TENSORFLOW.tensor(X)

    def f(x):
        for layer in layers:
            x = layer(x, training=True)
        return x

    f(x)
    held = [variable.numpy().tolist() for layer in layers for variable in layer.variables]
    assert held
    for function in (f, tf.function(f)):
        J = eg.jacobian(function, x)
        J[(0, 0), :], J[:, (0, 0)], J.dense()
        assert [variable.numpy().tolist() for layer in layers for variable in layer.variables] == held


class Penalized(keras.layers.Layer):
    """A layer with another inside; both have losses, and so has the layer that holds them."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(2, activity_regularizer="l2", dtype="float64")
        self.plain = keras.layers.Dense(2, dtype="float64")

    def call(self, x):
        y = self.plain(self.inner(x))
        self.add_loss(tf.reduce_sum(y))
        return y


def test_losses_of_the_last_call_of_layers_stay_what_they_were():
    model = keras.Sequential([Penalized(), keras.layers.Dense(1, dtype="float64")])
    x = TENSORFLOW.tensor(X)
    model(x)
    model.layers[1].add_loss(tf.constant(4.0))  # of a layer behind the one that is read
    held = [*model.losses]
    assert len(held) == 3
    for read in (
        lambda: eg.grad(model, 2 * x, of=f"{model.layers[0].name}[0, 0]"),
        lambda: eg.grad(model, 2 * x, of="output[0, 0]"),
        lambda: eg.jacobian(model, 2 * x).dense(),
    ):
        read()
        assert [id(loss) for loss in model.losses] == [id(loss) for loss in held]


@pytest.mark.parametrize("draw", ["normal", "make_seeds", "split", "skip"])
def test_generators_of_tensorflow_stay_where_they_were(draw):
    generator = tf.random.Generator.from_seed(1)
    arguments = {"normal": ([3],), "make_seeds": (), "split": (), "skip": (2,)}[draw]
    before = generator.state.numpy().tolist()
    for wrap in (lambda f: f, tf.function)[: 1 if draw == "split" else 2]:  # a generator cannot be made in a graph
        eg.jacobian(wrap(lambda x: (getattr(generator, draw)(*arguments), x * 2)[1]), TENSORFLOW.tensor(X)).dense()
        assert generator.state.numpy().tolist() == before


def test_two_threads_read_at_once_and_a_third_writes_on():
    variables = [tf.Variable([float(i)]) for i in range(3)]
    before, inside, written = methods(), threading.Barrier(3), threading.Barrier(3)

    def reader(i):
        def f(x):
            variables[i].assign([-1.0])
            inside.wait(60)
            written.wait(60)
            return x * tf.cast(variables[i], tf.float64)

        assert eg.jacobian(f, TENSORFLOW.tensor([2.0]))[0, 0].numpy() == -1

    def writer():
        inside.wait(60)
        variables[2].assign([7.0])
        written.wait(60)

    failures = []

    def run(task, *arguments):
        try:
            task(*arguments)
        except BaseException as error:
            failures.append(error)

    tasks = [(reader, 0), (reader, 1), (writer,)]
    threads = [threading.Thread(target=run, args=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [v.numpy().tolist() for v in variables] == [[0], [1], [7]]
    assert methods() == before


def test_a_changed_closure_gives_a_fresh_answer(fw):
    scale = [2.0]

    def f(x):
        return x * scale[0]

    x = fw.tensor(X)
    first = eg.jacobian(f, x)
    assert fw.numpy(first[(0, 0), (0, 0)]) == 2
    scale[0] = 5.0
    assert fw.numpy(eg.jacobian(f, x)[(0, 0), (0, 0)]) == 5
    assert fw.numpy(first[(0, ...), (0, ...)])[0, 0] == 2
    assert fw.numpy(first[:, (0, 0)])[0, 0] == 2
    assert fw.numpy(eg.grad(f, x, of="output[0, 0]", wrt="x[0, 0]")) == 5
