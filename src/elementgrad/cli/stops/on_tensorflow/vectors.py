"""One element of a vector, on TensorFlow."""


def replaced_usually():
    """Assign to it."""
    v = tf.constant([1.0, 2.0, 3.0, 4.0])
    v[2] = 10.0
    return v


def replaced():
    """`set` gives a new tensor. The gradient of the old element is 0, and the
    value has its own."""
    v = tf.Variable([1.0, 2.0, 3.0, 4.0])
    ten, seven = tf.Variable(10.0), tf.Variable(7.0)

    with tf.GradientTape(persistent=True) as tape:
        new = eg.at(v)[2].set(ten)
        total = tf.reduce_sum(new)
        loss = tf.reduce_sum(eg.at(v)[0].set(seven) ** 2)
    of_sum = tape.gradient(total, [v, ten])
    of_loss = tape.gradient(loss, [v, seven])
    return new, of_sum, loss, of_loss


def alone_usually():
    """Multiply by a mask. A NaN somewhere else comes through all the same."""
    v = tf.Variable([1.0, 2.0, 3.0, float("nan")])
    mask = tf.constant([0.0, 0.0, 1.0, 0.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((v * mask) ** 2)
    slope = tape.gradient(loss, v)
    return slope


def alone():
    """`only` has all values of v, and the gradient of the element you name."""
    v = tf.Variable([1.0, 2.0, 3.0, 4.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(eg.at(v)[2].only() ** 2)
    slope = tape.gradient(loss, v)
    return slope


def stepped_usually():
    """Replace the element first. Then its own gradient is 0, and every other
    element moves: the wrong way round."""
    v = tf.Variable([1.0, 2.0, 3.0, 4.0])
    with tf.GradientTape() as tape:
        replaced = tf.tensor_scatter_nd_update(v, [[1]], [2.0])
        loss = tf.reduce_sum(replaced**2)
    keras.optimizers.SGD(0.1).apply_gradients([(tape.gradient(loss, v), v)])
    return v


def stepped():
    """Keep the vector as it is and let the gradient reach element 1 alone."""
    v = tf.Variable([1.0, 2.0, 3.0, 4.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(eg.at(v)[1].only() ** 2)
    keras.optimizers.SGD(0.1).apply_gradients([(tape.gradient(loss, v), v)])
    return v
