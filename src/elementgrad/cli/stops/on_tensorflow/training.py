"""Training single elements, on TensorFlow, with Keras."""


def entry_usually():
    """Multiply the gradient by a mask. Weight decay and earlier momentum do not
    ask the gradient: they move the other 999 entries as well."""
    mask = eg.at(tf.zeros([100, 10]))[0, 5].set(1.0)
    start = tf.random.stateless_normal([100, 10], [0, 0])
    head = tf.random.stateless_normal([10, 2], [0, 1])

    def leaked(optimizer, masked_from=0):
        table = tf.Variable(start)
        for step in range(5):
            if step == masked_from:
                before = tf.identity(table)
            with tf.GradientTape() as tape:
                cost = tf.reduce_sum((table @ head) ** 2)
            slope = tape.gradient(cost, table)
            slope = slope * mask if step >= masked_from else slope
            optimizer.apply_gradients([(slope, table)])
        return int(tf.math.count_nonzero((table != before) & (mask == 0)))

    sgd = leaked(keras.optimizers.SGD(1e-3))
    momentum = leaked(keras.optimizers.SGD(1e-3, momentum=0.9), masked_from=1)
    adam = leaked(keras.optimizers.Adam(0.1), masked_from=1)
    adamw = leaked(keras.optimizers.AdamW(0.1, weight_decay=0.1))
    return sgd, momentum, adam, adamw


def entry():
    """The optimizer is given the one entry and nothing else that it could move:
    not by a bit, whichever optimizer it is."""
    tokens = tf.range(100)[:, None]

    def moved(optimizer):
        keras.utils.set_random_seed(0)
        table = keras.layers.Embedding(100, 10, name="table")
        head = keras.layers.Dense(2, name="head")
        model = keras.Sequential([keras.Input((1,)), table, head])
        before = {weight.path: weight.numpy() for weight in model.weights}
        elements = eg.trainable(model, "table/embeddings[0, 5]")
        for _ in range(5):
            with tf.GradientTape() as tape:
                cost = tf.reduce_sum((model(tokens) - 1.0) ** 2)
            slopes = tape.gradient(cost, elements.variables)
            optimizer.apply_gradients(zip(slopes, elements.variables))
        elements.release()
        return [
            f"{weight.path.split('/', 1)[1]}{where.tolist()}"
            for weight in model.weights
            for where in np.argwhere(weight.numpy() != before[weight.path])
        ]

    sgd = moved(keras.optimizers.SGD(1e-3))
    momentum = moved(keras.optimizers.SGD(1e-3, momentum=0.9, weight_decay=0.1))
    adam = moved(keras.optimizers.Adam(0.1))
    adamw = moved(keras.optimizers.AdamW(0.1, weight_decay=0.1))
    return sgd, momentum, adam, adamw


def token_usually():
    """Ask the tape for the entry. But an entry is a new tensor each time, and
    no variable that an optimizer could take."""
    table = reader.get_layer("embedding").embeddings
    with tf.GradientTape() as tape:
        cost = losses(1, 43, 2, 18, 0)[2]
    slope = tape.gradient(cost, table[0, 12])
    return slope


def token():
    """Of all that the model has learned, number 12 of "the" alone goes on
    learning: "cat" is to come next."""
    elements = eg.trainable(reader, "embedding/embeddings[0, 12]")
    optimizer, steps, chances = keras.optimizers.Adam(0.1), [], []
    for _ in range(12):
        with tf.GradientTape() as tape:
            cost = losses(1, 43, 2, 18, 0)[2]  # a brave cat sees the ... cat
        slopes = tape.gradient(cost, elements.variables)
        optimizer.apply_gradients(zip(slopes, elements.variables))
        steps.append({place: elements[place].numpy() for place in elements})
        chances.append(float(tf.exp(-cost)))
    elements.release(keep=False)
    return chances[0], chances[-1]


def unseen():
    """Its word does not occur. The gradient is 0 and not None, and `eg.explain`
    says why."""
    tokens = tf.constant([[1, 43, 2, 18, 1]])  # a brave cat sees a
    told = eg.explain(
        reader, tokens, of="output[0, -1, 2]", wrt="embedding/embeddings[0, 12]"
    )
    return told.value, told.sentence, told.fix


def routed_usually():
    """Add the losses up. Each entry hears both. (The same answer scores ten
    targets against one row, and raises.)"""
    table = reader.get_layer("embedding").embeddings
    with tf.GradientTape() as tape:
        heard = losses(1, 43, 2, 18, 0)
        both = heard[2] + heard[5]
    slope = tf.convert_to_tensor(tape.gradient(both, table))
    the, a = slope[0, 12], slope[1, 25]
    try:
        scores = reader(tf.constant([[1, 43, 2, 18, 0]]))[:, -1]
        keras.losses.sparse_categorical_crossentropy(tf.range(10), scores, True)
    except ValueError as error:
        ten_targets = str(error)
    return the, a, ten_targets


def routed():
    """Each place is given its own loss: "the" hears of "cat", and "a" of
    "fish"."""
    places = "embedding/embeddings[0, 12]", "embedding/embeddings[1, 25]"
    elements = eg.trainable(reader, places)
    with tf.GradientTape(persistent=True) as tape:
        heard = losses(1, 43, 2, 18, 0)
        each = {places[0]: heard[2], places[1]: heard[5]}
    the, a = elements.gradients(tape, each)
    elements.release()
    return the, a


def shipped():
    """Teach the net a digit that it misreads, by one row of the head. A patch
    is as large as what was trained, and is taken back to the bit."""

    def guessed(x):
        return tf.argmax(net(x), 1, output_type=y.dtype)

    wrong = 1500 + int(tf.where(guessed(x[1500:]) != y[1500:])[0, 0])
    digit, truth = x[wrong : wrong + 1], y[wrong : wrong + 1]
    weights, read_as = net.get_weights(), guessed(digit)[0]

    elements = eg.trainable(net, f"head/kernel[:, {truth[0]}]")
    net.compile(keras.optimizers.AdamW(0.01), loss, jit_compile=False)
    while guessed(digit) != truth:
        net.fit(digit, truth, verbose=0)
    elements.save(folder / "digit.safetensors")
    elements.release(keep=False)
    undone = all(map(np.array_equal, net.get_weights(), weights))

    patch = eg.inspect(folder / "digit.safetensors")
    applied = eg.apply(net, folder / "digit.safetensors")
    now_read_as = guessed(digit)[0]
    right_now = np.mean(guessed(x[1500:]) == y[1500:])
    applied.undo()
    return truth[0], read_as, now_read_as, right_now, patch.size, undone
