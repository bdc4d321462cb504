"""Training steps of TensorFlow whose own tape gives None. The line at fault is marked."""

import keras
import tensorflow as tf
from keras import layers

import elementgrad as eg
from tests.support.programs_broken import Table

BROKEN = Table()
X = tf.constant([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]])
Y = tf.constant([[1.0], [0.0]])


def _model():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(1)])


@BROKEN.says("unconnected", "outside-tape")
def a_prediction_before_the_tape():
    model, optimizer = _model(), keras.optimizers.SGD(0.1)

    def step():
        predicted = model(X)  # <- here
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((predicted - Y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


@BROKEN.says("unconnected", "outside-tape")
def a_loss_after_the_tape():
    model = _model()

    def step():
        with tf.GradientTape() as tape:
            predicted = model(X)
        loss = tf.reduce_mean(tf.square(predicted - Y))  # <- here
        return tape.gradient(loss, model.trainable_variables)

    return step


@BROKEN.says("unconnected", "not-tracked")
def a_plain_tensor_that_nobody_watches():
    def step():
        with tf.GradientTape() as tape:
            y = X**2
        return tape.gradient(y, X)

    return step


@BROKEN.says("unconnected", "not-tracked")
def a_tensor_that_is_watched_too_late():
    def step():
        with tf.GradientTape() as tape:
            y = X * 3.0  # <- here
            tape.watch(X)
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, X)

    return step


@BROKEN.says("unconnected", "not-tracked")
def a_variable_that_is_no_weight():
    scale = tf.Variable(2.0, trainable=False)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(X * scale)
        scale.assign_sub(0.1 * tape.gradient(loss, scale))

    return step


@BROKEN.says("unconnected", "not-tracked", wrt="x")
def a_tape_in_a_function():
    def f(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(x**2)
        return tape.gradient(y, x)

    return f, X


@BROKEN.says("unconnected", "no-grad")
def a_pause_of_the_tape():
    weight = tf.Variable([1.0, 2.0, 3.0])

    def step():
        with tf.GradientTape() as tape:
            with tape.stop_recording():
                scores = tf.linalg.matvec(X, weight)  # <- here
            loss = tf.reduce_sum(scores)
        return tape.gradient(loss, weight)

    return step


@BROKEN.says("unconnected", "resliced")
def a_slice_that_is_taken_again():
    def step():
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = X[0, 1] ** 2
        return tape.gradient(y, X[0, 1])  # <- here

    return step


@BROKEN.says("unconnected", "resliced", fix="take the slice once")
def a_slice_that_is_taken_again_on_the_tape():
    table = tf.Variable(tf.zeros([4, 3]))

    def step():
        with tf.GradientTape() as tape:
            row = table[1]  # <- here
            y = tf.reduce_sum(table[1] ** 2)
        return tape.gradient(y, row)

    return step


@BROKEN.says("unconnected", "resliced", fix="take the slice once")
def a_lookup_that_is_made_again():
    table = tf.Variable(tf.ones([4, 3]))

    def step():
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [1])  # <- here
            y = tf.reduce_sum(tf.gather(table, [1]) ** 2)
        return tape.gradient(y, rows)

    return step


@BROKEN.says("unconnected", "unused")
def a_slice_of_what_does_not_count():
    table, other = tf.Variable(tf.ones([4, 3])), tf.Variable(1.0)

    def step():
        with tf.GradientTape() as tape:
            row = table[1]
            y = other**2
        return tape.gradient(y, row)

    return step


@BROKEN.says("unconnected", "inner-gradient")
def a_gradient_penalty_outside_the_tape():
    def step():
        with tf.GradientTape() as outer:
            outer.watch(X)
            with tf.GradientTape() as inner:
                inner.watch(X)
                y = tf.reduce_sum(X**3)
        slope = inner.gradient(y, X)  # <- here
        penalty = tf.reduce_sum(slope**2)
        return outer.gradient(penalty, X)

    return step


@BROKEN.says("unconnected", "freed-graph")
def a_tape_that_is_asked_twice():
    weight = tf.Variable([1.0, 2.0, 3.0])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(X * weight)
            other = tf.reduce_sum(weight)
        first = tape.gradient(loss, weight)
        return first + tape.gradient(other, weight)  # <- here

    return step


@BROKEN.says("unconnected", "discrete")
def accuracy_in_a_compiled_step():
    model, optimizer = _model(), keras.optimizers.Adam()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            right = tf.equal(model(X) > 0.5, Y > 0.5)  # <- here
            loss = -tf.reduce_mean(tf.cast(right, tf.float32))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


@BROKEN.says("unconnected", "left-framework")
def a_loss_of_numbers():
    model = _model()

    def step():
        with tf.GradientTape() as tape:
            errors = (model(X) - Y).numpy()  # <- here
            loss = tf.reduce_mean(tf.constant(errors) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    return step


@BROKEN.says("unconnected", "no-rule")
def an_operation_without_a_rule():
    weight = tf.Variable([1.0, 2.0, 3.0])

    def step():
        with tf.GradientTape() as tape:
            values, _ = tf.unique(weight * 2.0)  # <- here
            loss = tf.reduce_sum(values)
        return tape.gradient(loss, weight)

    return step


@BROKEN.says("unconnected", "integer")
def a_variable_of_whole_numbers():
    count = tf.Variable(3)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.cast(count, tf.float32) ** 2
        return tape.gradient(loss, count)

    return step


@BROKEN.says("unconnected", "no-grad")
def features_computed_while_the_tape_rests():
    model = _model()

    def step():
        with tf.GradientTape(persistent=True) as tape:
            with tape.stop_recording():
                features = model(X)  # <- here
            loss = tf.reduce_mean(features**2)
        return tape.gradient(loss, model.trainable_variables)

    return step


@BROKEN.says("unconnected", "detached")
def a_frozen_target_on_both_sides():
    model, optimizer = _model(), keras.optimizers.SGD(0.1)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            values = tf.stop_gradient(model(X))  # <- here
            loss = tf.reduce_mean((values - Y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


@BROKEN.says("unconnected", "unused")
def a_head_that_no_loss_uses():
    model, spare = _model(), layers.Dense(2)
    spare.build((None, 3))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X) - Y) ** 2)
        return tape.gradient(loss, spare.trainable_variables)

    return step


@BROKEN.says("unconnected", "detached")
def elements_whose_loss_is_stopped():
    model = _model()
    elements = eg.trainable(model, f"{model.layers[0].name}/kernel[0, 1]")

    def step():
        with tf.GradientTape() as tape:
            values = tf.stop_gradient(model(X))  # <- here
            loss = tf.reduce_mean((values - Y) ** 2)
        elements.gradients(tape, {f"{model.layers[0].name}/kernel[0, 1]": loss})

    return step


_leaf = tf.Variable([1.0, -2.0])
_rows = tf.Variable([[1.0], [2.0], [3.0]])
_normed = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.BatchNormalization()])
_blocked = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1, kernel_initializer="zeros")])


@BROKEN.says("zero", "dead-relu", wrt=eg.at(_leaf)[1])
def an_element_that_a_step_rectifies():
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.relu(_leaf))  # <- here
        return tape.gradient(loss, _leaf)

    return step


@BROKEN.says("zero", "row-not-used", wrt=eg.at(_rows)[0])
def a_step_without_a_row():
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(_rows, [1, 2]))  # <- here
        return tape.gradient(loss, _rows)

    return step


@BROKEN.says("zero", "masked", fix="initialised randomly", wrt=_blocked.layers[0].kernel)
def a_step_behind_weights_of_zero():
    kernel, optimizer = _blocked.layers[0].kernel, keras.optimizers.SGD(0.1)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(_blocked(X))  # <- here
        gradient = tape.gradient(loss, kernel)
        optimizer.apply_gradients([(gradient, kernel)])

    return step


@BROKEN.says("unconnected", "not-tracked", fix="training=True", wrt=_normed.layers[1].moving_mean)
def a_step_that_asks_for_a_statistic():
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(_normed(X, training=True) ** 2)
        return tape.gradient(loss, _normed.layers[1].moving_mean)

    return step
