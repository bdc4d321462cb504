"""The two models of the tour on JAX."""


def net():
    """Two convolutions and a head, trained on the first 1500 digits."""

    @jax.jit
    def net(params, image):
        conv1 = jax.lax.conv(image, params["conv1"], (1, 1), "VALID")
        tanh1 = eg.tag(jnp.tanh(eg.tag(conv1, "conv1")), "tanh1")
        conv2 = jax.lax.conv(tanh1, params["conv2"], (1, 1), "VALID")
        tanh2 = jnp.tanh(eg.tag(conv2, "conv2")).reshape(-1, 256)
        return tanh2 @ params["head"] + params["bias"]

    def cost(params, x, y):
        chances = jax.nn.log_softmax(net(params, x))
        return -jnp.take_along_axis(chances, y[:, None], 1).mean()

    shapes = {"conv1": (6, 1, 3, 3), "conv2": (16, 6, 3, 3), "head": (256, 10)}
    starts, chance = (
        {"conv1": 0.3, "conv2": 0.1, "head": 0.05},
        np.random.default_rng(0),
    )
    params = {
        name: jnp.array(starts[name] * chance.normal(size=shape), "float32")
        for name, shape in shapes.items()
    } | {"bias": jnp.zeros(10)}

    x, y = images[:, None], labels
    optimizer = optax.adamw(0.01)
    state = optimizer.init(params)

    @jax.jit
    def train(params, state, x, y):
        gradient = jax.grad(cost)(params, x, y)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(6):
        for batch in chance.permutation(1500).reshape(15, 100):
            params, state = train(params, state, x[batch], y[batch])
    right = (net(params, x[1500:]).argmax(1) == y[1500:]).mean()
    image = jnp.array(x[1504:1505])  # a three that it has never seen
    return right


def reader():
    """An embedding of 50 x 32, a GRU of 64 and a head, trained on sentences."""

    @jax.jit
    def reader(words, tokens):
        def cell(state, word):
            new, old = word @ words["into"], state @ words["again"]
            gates = jax.nn.sigmoid(new[:, :128] + old[:, :128])
            reset, keep = jnp.split(gates, 2, axis=1)
            fresh = jnp.tanh(new[:, 128:] + reset * old[:, 128:])
            state = keep * state + (1 - keep) * fresh
            return state, state @ words["head"]

        embedded = eg.tag(words["embedding"][tokens], "embedded")
        start = jnp.zeros((len(tokens), 64))
        return jax.lax.scan(cell, start, embedded.swapaxes(0, 1))[1].swapaxes(
            0, 1
        )

    shapes = {"embedding": (50, 32), "into": (32, 192)}
    shapes |= {"again": (64, 192), "head": (64, 50)}
    chance = np.random.default_rng(0)
    words = {
        name: jnp.array(chance.normal(size=shape) / shape[0] ** 0.5, "float32")
        for name, shape in shapes.items()
    }

    def surprise(words, tokens):
        chances = jax.nn.log_softmax(reader(words, tokens[:, :-1]))
        return -jnp.take_along_axis(chances, tokens[:, 1:, None], 2).mean()

    optimizer = optax.adamw(0.01)
    state = optimizer.init(words)

    @jax.jit
    def learn(words, state, tokens):
        gradient = jax.grad(surprise)(words, tokens)
        updates, state = optimizer.update(gradient, state, words)
        return optax.apply_updates(words, updates), state

    for _ in range(5):
        for batch in chance.permutation(512).reshape(16, 32):
            words, state = learn(words, state, sentences[batch])

    def losses(words, *tokens):
        """The loss of every word that may come next."""
        return -jax.nn.log_softmax(reader(words, jnp.array([tokens]))[0, -1])

    likely = jnp.exp(-losses(words, 0, 43, 2, 18, 1))[2:6].sum()
    return likely
