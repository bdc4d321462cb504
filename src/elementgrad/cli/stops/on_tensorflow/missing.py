"""Gradients that are not there, on TensorFlow."""


def message_usually():
    """Train on. What TensorFlow says names no line, and no cause."""
    with tf.GradientTape() as tape:
        features = tf.stop_gradient(net(image))
        cost = tf.reduce_mean(features**2)
    slopes = tape.gradient(cost, net.trainable_variables)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.apply_gradients(zip(slopes, net.trainable_variables))
    return slopes


def message():
    """TensorFlow words it otherwise ("No gradients provided for any variable").
    Something cut the path, and `eg.explain` names the line."""
    optimizer = keras.optimizers.SGD(0.1)

    def step():
        with tf.GradientTape() as tape:
            features = tf.stop_gradient(net(image))
            cost = tf.reduce_mean(features**2)
        slopes = tape.gradient(cost, net.trainable_variables)
        optimizer.apply_gradients(zip(slopes, net.trainable_variables))

    told = eg.explain(step)
    return told.sentence, told.where, told.fix


def three_ways():
    """By index, by gather and by mask: the same gradient."""
    x = tf.Variable([3.0, 4.0, 5.0])
    with tf.GradientTape(persistent=True) as tape:
        index = x[0] ** 2
        gather = tf.reduce_sum(tf.gather(x, [0]) ** 2)
        mask = tf.reduce_sum(tf.boolean_mask(x, x < 4) ** 2)
        place = eg.at(x)[0].get() ** 2
    by_index, by_mask = tape.gradient(index, x), tape.gradient(mask, x)
    by_gather = tf.convert_to_tensor(tape.gradient(gather, x))
    by_place = tape.gradient(place, x)
    return by_index, by_gather, by_mask, by_place


def element_zero_usually():
    """Watch the element. But `x[0]` is a new tensor each time."""
    x = tf.constant([3.0, 4.0, 5.0])
    with tf.GradientTape() as tape:
        tape.watch(x[0])
        y = x[0] ** 2
    slope = tape.gradient(y, x)
    return slope


def element_zero():
    """`only` lets the gradient reach the element."""
    x = tf.Variable([3.0, 4.0, 5.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(eg.at(x)[0].only() ** 2)
    slope = tape.gradient(y, x)
    return slope


def choice_usually():
    """Take the element with the largest logit: nothing comes back from
    `argmax`."""
    x, logits = tf.constant([3.0, 1.0, 2.0]), tf.Variable([0.0, 0.0, 0.0])
    with tf.GradientTape() as tape:
        cost = (x[tf.argmax(logits)] - 1.0) ** 2
    slope = tape.gradient(cost, logits)
    return slope


def choice():
    """`choose` learns which element comes nearest to 1."""
    x, logits = tf.constant([3.0, 1.0, 2.0]), tf.Variable([0.0, 0.0, 0.0])
    for _ in range(200):
        with tf.GradientTape() as tape:
            cost = (eg.choose(x, logits) - 1.0) ** 2
        logits.assign_sub(tape.gradient(cost, logits))
    weights, chosen = tf.nn.softmax(logits), eg.choose(x, logits, hard=True)
    return weights, chosen
