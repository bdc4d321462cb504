"""Training single elements, on JAX."""


def entry_usually():
    """Multiply the gradient by a mask. Weight decay and earlier momentum do not
    ask the gradient: they move the other 999 entries as well."""
    chance = np.random.default_rng(0)
    start = {
        "table": jnp.array(chance.normal(size=(100, 10)), "float32"),
        "head": jnp.array(chance.normal(size=(10, 2)), "float32"),
    }
    mask = jnp.zeros((100, 10)).at[0, 5].set(1.0)
    slope = jax.jit(jax.grad(lambda p: ((p["table"] @ p["head"]) ** 2).sum()))

    def leaked(optimizer, masked_from=0):
        params, state = start, optimizer.init(start)
        for step in range(5):
            gradient = slope(params)
            if step == masked_from:
                before = params["table"]
            if step >= masked_from:
                gradient["table"] *= mask
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return int(((params["table"] != before) & (mask == 0)).sum())

    sgd = leaked(optax.sgd(1e-3))
    momentum = leaked(optax.sgd(1e-3, momentum=0.9), masked_from=1)
    adam = leaked(optax.adam(0.1), masked_from=1)
    adamw = leaked(optax.adamw(0.1, weight_decay=0.1))
    return sgd, momentum, adam, adamw


def entry():
    """The optimizer is given the one entry and nothing else that it could move:
    not by a bit, whichever optimizer it is."""
    chance = np.random.default_rng(0)
    start = {
        "table": jnp.array(chance.normal(size=(100, 10)), "float32"),
        "head": jnp.array(chance.normal(size=(10, 2)), "float32"),
    }
    loss = lambda params: ((params["table"] @ params["head"]) ** 2).sum()
    elements = eg.trainable(start, "table[0, 5]")
    slope = jax.jit(lambda values: elements.grad(loss, values))

    def moved(optimizer):
        values, state = elements.values, optimizer.init(elements.values)
        for _ in range(5):
            updates, state = optimizer.update(slope(values), state, values)
            values = optax.apply_updates(values, updates)
        return [
            f"{name}{where.tolist()}"
            for name, new in elements.merge(values).items()
            for where in jnp.argwhere(new != start[name])
        ]

    sgd = moved(optax.sgd(1e-3))
    momentum = moved(optax.sgd(1e-3, momentum=0.9))
    adam = moved(optax.adam(0.1))
    adamw = moved(optax.adamw(0.1, weight_decay=0.1))
    return sgd, momentum, adam, adamw


def token_usually():
    """Mask the optimizer, down to the entry."""
    mask = jax.tree.map(lambda p: jnp.zeros_like(p, bool), words)
    mask["embedding"] = mask["embedding"].at[0, 12].set(True)
    optimizer = optax.masked(optax.adam(0.1), mask)
    state = optimizer.init(words)
    return state


def token():
    """Of all that the model has learned, number 12 of "the" alone goes on
    learning: "cat" is to come next."""
    elements = eg.trainable(words, "embedding[0, 12]")
    optimizer, values = optax.adam(0.1), elements.values
    state, steps, chances = optimizer.init(values), [], []
    sentence = 1, 43, 2, 18, 0  # a brave cat sees the
    loss = lambda words: losses(words, *sentence)[2]  # cat
    slope = jax.jit(lambda values: elements.value_and_grad(loss, values))
    for _ in range(12):
        cost, gradient = slope(values)
        updates, state = optimizer.update(gradient, state, values)
        values = optax.apply_updates(values, updates)
        steps.append(values)
        chances.append(float(jnp.exp(-cost)))
    return chances[0], chances[-1]


def unseen():
    """Its word does not occur. The gradient is 0, and `eg.explain` says why."""
    tokens = jnp.array([[1, 43, 2, 18, 1]])  # a brave cat sees a
    told = eg.explain(
        reader,
        words,
        tokens,
        of="output[0, -1, 2]",
        wrt="words.embedding[0, 12]",
    )
    return told.value, told.sentence, told.fix


def routed_usually():
    """Add the losses up. Each entry hears both. (The same answer scores ten
    targets against one row.)"""

    @jax.jit
    @jax.grad
    def both(words):
        heard = losses(words, 1, 43, 2, 18, 0)
        return heard[2] + heard[5]

    slope = both(words)["embedding"]
    the, a = slope[0, 12], slope[1, 25]
    try:
        scores = reader(words, jnp.array([[1, 43, 2, 18, 0]]))[:, -1]
        ten_targets = optax.softmax_cross_entropy_with_integer_labels(
            scores, jnp.arange(10)
        )
    except Exception as error:
        ten_targets = str(error)
    return the, a, ten_targets


def routed():
    """Each place is given its own loss: "the" hears of "cat", and "a" of
    "fish"."""
    places = "embedding[0, 12]", "embedding[1, 25]"
    elements = eg.trainable(words, places)
    each = {
        places[0]: lambda words: losses(words, 1, 43, 2, 18, 0)[2],
        places[1]: lambda words: losses(words, 1, 43, 2, 18, 0)[5],
    }
    heard = jax.jit(lambda values: elements.grad(each, values))(elements.values)
    the, a = (heard[place] for place in places)
    return the, a


def shipped():
    """Teach the net a digit that it misreads, by one row of the head. A patch
    is as large as what was trained, and is taken back to the bit."""
    guessed = np.array(net(params, x[1500:])).argmax(1)
    wrong = 1500 + int((guessed != y[1500:]).argmax())
    digit, truth = x[wrong : wrong + 1], y[wrong : wrong + 1]
    read_as = net(params, digit).argmax()

    elements = eg.trainable(params, f"head[:, {truth[0]}]")
    optimizer, state = (
        optax.adamw(0.01),
        optax.adamw(0.01).init(elements.values),
    )
    loss = lambda params: cost(params, digit, truth)
    slope = jax.jit(lambda values: elements.grad(loss, values))
    while net(elements.merge(), digit).argmax() != truth:
        gradient = slope(elements.values)
        updates, state = optimizer.update(gradient, state, elements.values)
        elements.values = optax.apply_updates(elements.values, updates)
    elements.save(folder / "digit.safetensors")

    patch = eg.inspect(folder / "digit.safetensors")
    applied = eg.apply(params, folder / "digit.safetensors")
    now_read_as = net(applied.merge(), digit).argmax()
    right_now = (net(applied.merge(), x[1500:]).argmax(1) == y[1500:]).mean()
    applied.undo()
    undone = jax.tree.all(
        jax.tree.map(jnp.array_equal, applied.merge(), params)
    )
    return truth[0], read_as, now_read_as, right_now, patch.size, undone
