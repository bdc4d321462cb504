"""The two models of the tour on TensorFlow, with Keras."""


def net():
    """Two convolutions and a head, trained on the first 1500 digits."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="input"),
            keras.layers.Conv2D(6, 3, name="conv1"),
            keras.layers.Activation("tanh", name="tanh1"),
            keras.layers.Conv2D(16, 3, name="conv2"),
            keras.layers.Activation("tanh", name="tanh2"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(10, name="head"),
        ]
    )

    x, y = tf.constant(images)[..., None], tf.constant(labels)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.AdamW(0.01), loss, jit_compile=False)
    net.fit(x[:1500], y[:1500], batch_size=100, epochs=6, verbose=0)
    guessed = tf.argmax(net(x[1500:]), 1, output_type=y.dtype)
    right = tf.reduce_mean(tf.cast(guessed == y[1500:], "float32"))
    image = x[1504:1505]  # a three that it has never seen
    return right


def reader():
    """An embedding of 50 x 32, a GRU of 64 and a head, trained on sentences."""
    keras.utils.set_random_seed(0)
    reader = keras.Sequential(
        [
            keras.Input((None,), dtype="int32", name="tokens"),
            keras.layers.Embedding(50, 32, name="embedding"),
            keras.layers.GRU(64, return_sequences=True, name="gru"),
            keras.layers.Dense(50, name="head"),
        ]
    )
    reader.compile(keras.optimizers.AdamW(0.01), loss, jit_compile=False)
    reader.fit(sentences[:, :-1], sentences[:, 1:], epochs=5, verbose=0)

    def losses(*tokens):
        """The loss of every word that may come next."""
        return -tf.nn.log_softmax(reader(tf.constant([tokens]))[0, -1])

    likely = tf.reduce_sum(tf.exp(-losses(0, 43, 2, 18, 1))[2:6])
    return likely
