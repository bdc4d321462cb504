"""One element of a result, on TensorFlow."""


def itself_usually():
    """Take the element, and then open the tape; or forget to watch. Both give
    None, without a word."""
    X = tf.Variable([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    element = X[1, 2]
    with tf.GradientTape() as tape:
        result = element * 1.0
    sliced_outside = tape.gradient(result, X)

    plain = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    with tf.GradientTape() as tape:
        result = plain[1, 2]
    not_watched = tape.gradient(result, plain)
    return sliced_outside, not_watched


def itself():
    """Name the element. No tape, and nothing to watch."""
    X = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    one = eg.grad(lambda X: X, X, of="output[1, 2]")
    total = eg.grad(lambda X: tf.reduce_sum(X), X)
    return one, total


def product_usually():
    """Compute the whole Jacobian and throw most of it away: 16 numbers for
    these two, and 10^12 for matrices of 1000 x 1000."""
    X = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    Y = tf.constant([[5.0, 6.0], [7.0, 8.0]])
    with tf.GradientTape() as tape:
        product = X @ Y
    whole = tape.jacobian(product, X)
    return tf.size(whole), whole[0, 0]


def product():
    """A Jacobian that you index, and nothing else is computed."""
    X = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    Y = tf.constant([[5.0, 6.0], [7.0, 8.0]])
    J = eg.jacobian(lambda X, Y: X @ Y, X, Y, wrt="X")
    return J[(0, 0), :], J[(0, 0), (0, 1)]


def pixel_usually():
    """Build a model of the first layers and ask the tape. It sums over the
    whole feature map without a word: this is no single element's number."""
    first = keras.Model(net.inputs[0], net.get_layer("conv2").output)
    with tf.GradientTape() as tape:
        tape.watch(image)
        features = first(image)
    slope = tape.gradient(features, image)
    return slope[0, 3, 4, 0]


def pixel():
    """Name both. No second model and no tape. The whole receptive field costs
    the same one sweep."""
    field = eg.grad(net, image, of="conv2[0, 1, 2, 5]", wrt="input[0, :, :, 0]")
    number = eg.grad(
        net, image, of="conv2[0, 1, 2, 5]", wrt="input[0, 3, 4, 0]"
    )
    return number, field


def score():
    """Any tensor of the model has a name, and so has each of its elements."""
    places = {
        "pixels": "input[0, :, :, 0]",
        "maps": "tanh1",
        "weight": "conv1/kernel[1, 1, 0, 4]",
    }
    slopes = eg.grad(net, image, of="output[0, 3]", wrt=places)
    return slopes["pixels"], slopes["maps"].shape, slopes["weight"]


def words():
    """The embedding of each word is an activation like any other."""
    sentence = ["a", "brave", "cat", "sees", "the"]
    tokens = tf.constant([[1, 43, 2, 18, 0]])
    of_words = eg.grad(reader, tokens, of="output[0, -1, 2]", wrt="embedding")
    sizes = tf.norm(of_words, axis=-1)
    return sizes


def large():
    """A plan says what a read would cost, before anything is paid."""
    J = eg.jacobian(net, image, of="conv2", wrt="input")
    f = lambda x: tf.tanh(x) * tf.roll(x, 1, 0)
    big = eg.jacobian(f, tf.ones(100_000))
    return J.shape, big.plan(..., 7), big[6:10, 7]


def second():
    """A Hessian is indexed like a Jacobian."""
    x = tf.constant([2.0, 3.0])
    H = eg.hessian(lambda x: x[0] * x[1] ** 2 + tf.reduce_sum(x) ** 2, x)
    return H[0, 1]
