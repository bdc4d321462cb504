"""An element that makes another of the same tensor, on TensorFlow."""


def twice_usually():
    """Ask the tape, look, and ask it again."""
    x, w = tf.Variable([1.0, 2.0, 3.0]), tf.constant([4.0, 5.0, 6.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(x * w)
    first = tape.gradient(y, x)[2]
    again = tape.gradient(y, x)[2]
    return first, again


def twice():
    """Vectorised operations hide nothing: it is w[2]. And a question changes
    nothing, so that asking again gives the same."""
    x, w = tf.constant([1.0, 2.0, 3.0]), tf.constant([4.0, 5.0, 6.0])
    J = eg.jacobian(lambda x: tf.reduce_sum(x * w), x)
    first, again = J[..., 2], J[..., 2]
    return first, again


def uses():
    """One share for each use of the element; they add up to the derivative."""
    x = tf.constant([1.0, 2.0, 3.0])
    y = lambda x: 2 * x[2] + tf.reduce_sum(x)
    shares = eg.contributions(y, x, wrt="x[2]")
    direct, through_sum = (share.value for share in shares)
    return direct, through_sum, shares.total


def own_rule_usually():
    """Give one gradient for the tensor, and none for the index."""

    @tf.custom_gradient
    def weighted(x, i):
        def backward(g):
            ones = tf.ones_like(x)
            return g * tf.tensor_scatter_nd_add(ones, [[i]], [3.0])

        return 3 * x[i] + tf.reduce_sum(x), backward

    x = tf.Variable([1.0, 2.0, 3.0])
    with tf.GradientTape() as tape:
        y = weighted(x, 2)
    slope = tape.gradient(y, x)[2]
    return slope


def own_rule():
    """One gradient for each argument, and None for an index. `eg.check` holds
    the rule against differences."""

    @tf.custom_gradient
    def weighted(x, i):
        def backward(g):
            ones = tf.ones_like(x)
            return g * tf.tensor_scatter_nd_add(ones, [[i]], [3.0]), None

        return 3 * x[i] + tf.reduce_sum(x), backward

    x = tf.constant([1.0, 2.0, 3.0])
    slope = eg.grad(lambda x: weighted(x, 2), x, wrt="x[2]")
    verdict = eg.check(lambda x: weighted(x, 2), x).verdict
    return slope, verdict


def written_usually():
    """Write with scatter updates, and ask the tape for one by the other. But
    each `t[1]` is a new tensor."""
    t = tf.Variable([3.0, 0.0, 0.0, 0.0, 0.0])
    with tf.GradientTape() as tape:
        t = tf.tensor_scatter_nd_update(t, [[1]], [2 * t[0]])
        t = tf.tensor_scatter_nd_update(t, [[3]], [t[1] ** 2 + t[0]])
        t = tf.tensor_scatter_nd_update(t, [[4]], [t[3] * t[1]])
        last = t[4]
    slope = tape.gradient(last, t[1])
    return slope


def written():
    """Tag the versions, and ask for elements of them: t#0 is the first."""

    def program(t):
        t = eg.tag(eg.at(t)[1].set(2 * t[0]), "t")
        t = eg.tag(eg.at(t)[3].set(t[1] ** 2 + t[0]), "t")
        return eg.tag(eg.at(t)[4].set(t[3] * t[1]), "t")

    start = tf.constant([3.0, 0.0, 0.0, 0.0, 0.0])
    slope = eg.grad(program, start, of="t#2[4]", wrt="t#0[1]")
    return slope
