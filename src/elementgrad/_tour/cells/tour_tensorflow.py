"""The tour on TensorFlow, in cells.

The runner executes `setup`, `net` and `reader` first. Other cells start
with the names that these have left, and `folder`, a temporary directory.
The tour shows the comment at the head of a cell, its code, and the values
of its last line.
"""

# %% setup
import time

import keras
import numpy as np
import tensorflow as tf

import elementgrad as eg
from elementgrad._tour.data import load_digits, make_photo, make_sentences

images, labels = load_digits()
sentences = make_sentences()

# %% net
# Two convolutions and a head, trained on the first 1500 digits.
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
right

# %% reader
# An embedding of 50 x 32, a GRU of 64 and a head, trained on sentences.
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
likely

# %% replaced: usual
# Assign to it.
v = tf.constant([1.0, 2.0, 3.0, 4.0])
v[2] = 10.0
v

# %% replaced
# `set` gives a new tensor. The gradient of the old element is 0, and the
# value has its own.
v = tf.Variable([1.0, 2.0, 3.0, 4.0])
ten, seven = tf.Variable(10.0), tf.Variable(7.0)

with tf.GradientTape(persistent=True) as tape:
    new = eg.at(v)[2].set(ten)
    total = tf.reduce_sum(new)
    loss = tf.reduce_sum(eg.at(v)[0].set(seven) ** 2)
of_sum = tape.gradient(total, [v, ten])
of_loss = tape.gradient(loss, [v, seven])
new, of_sum, loss, of_loss

# %% alone: usual
# Multiply by a mask. A NaN somewhere else comes through all the same.
v = tf.Variable([1.0, 2.0, 3.0, float("nan")])
mask = tf.constant([0.0, 0.0, 1.0, 0.0])
with tf.GradientTape() as tape:
    loss = tf.reduce_sum((v * mask) ** 2)
slope = tape.gradient(loss, v)
slope

# %% alone
# `only` has all values of v, and the gradient of the element you name.
v = tf.Variable([1.0, 2.0, 3.0, 4.0])
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(eg.at(v)[2].only() ** 2)
slope = tape.gradient(loss, v)
slope

# %% stepped: usual
# Replace the element first. Then its own gradient is 0, and every other
# element moves: the wrong way round.
v = tf.Variable([1.0, 2.0, 3.0, 4.0])
with tf.GradientTape() as tape:
    replaced = tf.tensor_scatter_nd_update(v, [[1]], [2.0])
    loss = tf.reduce_sum(replaced**2)
keras.optimizers.SGD(0.1).apply_gradients([(tape.gradient(loss, v), v)])
v

# %% stepped
# Keep the vector as it is and let the gradient reach element 1 alone.
v = tf.Variable([1.0, 2.0, 3.0, 4.0])
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(eg.at(v)[1].only() ** 2)
keras.optimizers.SGD(0.1).apply_gradients([(tape.gradient(loss, v), v)])
v

# %% itself: usual
# Take the element, and then open the tape; or forget to watch. Both give
# None silently.
X = tf.Variable([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
element = X[1, 2]
with tf.GradientTape() as tape:
    result = element * 1.0
sliced_outside = tape.gradient(result, X)

plain = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
with tf.GradientTape() as tape:
    result = plain[1, 2]
not_watched = tape.gradient(result, plain)
sliced_outside, not_watched

# %% itself
# Name the element. No tape, and nothing to watch.
X = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
one = eg.grad(lambda X: X, X, of="output[1, 2]")
total = eg.grad(lambda X: tf.reduce_sum(X), X)
one, total

# %% product: usual
# Compute the whole Jacobian and throw most of it away: 16 numbers for these
# two, and 10^12 for matrices of 1000 x 1000.
X = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
Y = tf.constant([[5.0, 6.0], [7.0, 8.0]])
with tf.GradientTape() as tape:
    product = X @ Y
whole = tape.jacobian(product, X)
tf.size(whole), whole[0, 0]

# %% product
# A Jacobian that you index, and nothing else is computed.
X = tf.constant([[1.0, 2.0], [3.0, 4.0]])
Y = tf.constant([[5.0, 6.0], [7.0, 8.0]])
J = eg.jacobian(lambda X, Y: X @ Y, X, Y, wrt="X")
J[(0, 0), :], J[(0, 0), (0, 1)]

# %% pixel: usual
# Build a model of the first layers and ask the tape. It sums over the whole
# feature map silently: this is not the number of one element.
first = keras.Model(net.inputs[0], net.get_layer("conv2").output)
with tf.GradientTape() as tape:
    tape.watch(image)
    features = first(image)
slope = tape.gradient(features, image)
slope[0, 3, 4, 0]

# %% pixel
# Name both. No second model and no tape. The whole receptive field costs
# the same one sweep.
field = eg.grad(net, image, of="conv2[0, 1, 2, 5]", wrt="input[0, :, :, 0]")
number = eg.grad(
    net, image, of="conv2[0, 1, 2, 5]", wrt="input[0, 3, 4, 0]"
)
number, field

# %% photo: usual
# Run the whole picture, 512 x 512 x 3, through all layers and back again
# for one element, which sees 13 x 13 pixels.
keras.utils.set_random_seed(0)
tower = keras.Sequential([keras.Input((512, 512, 3), name="input")])
for width in 6 * [16]:
    tower.add(keras.layers.Conv2D(width, 3, 1, "same", activation="tanh"))
photo = tf.constant(make_photo()[None])

start = time.perf_counter()
with tf.GradientTape() as tape:
    tape.watch(photo)
    value = tower(photo)[0, 200, 300, 5]
gradient = tape.gradient(value, photo)
milliseconds = 1000 * (time.perf_counter() - start)
milliseconds, value, gradient[0, 200, 300]

# %% photo
# `eg.grad` runs what the element depends on, its cone. `eg.field` says
# which pixels these are, and `eg.value` evaluates the element alone.
keras.utils.set_random_seed(0)
tower = keras.Sequential([keras.Input((512, 512, 3), name="input")])
for width in 6 * [16]:
    tower.add(keras.layers.Conv2D(width, 3, 1, "same", activation="tanh"))
photo = tf.constant(make_photo()[None])

element = "output[0, 200, 300, 5]"
field = eg.field(tower, photo, of=element, wrt="input")
value = eg.value(tower, photo, of=element)
start = time.perf_counter()
gradient = eg.grad(tower, photo, of=element)
milliseconds = 1000 * (time.perf_counter() - start)
milliseconds, value, gradient[0, 200, 300], field

# %% score
# Any tensor of the model has a name, and so has each of its elements.
places = {
    "pixels": "input[0, :, :, 0]",
    "maps": "tanh1",
    "weight": "conv1/kernel[1, 1, 0, 4]",
}
slopes = eg.grad(net, image, of="output[0, 3]", wrt=places)
slopes["pixels"], slopes["maps"].shape, slopes["weight"]

# %% words
# The embedding of each word is an activation like any other.
sentence = ["a", "brave", "cat", "sees", "the"]
tokens = tf.constant([[1, 43, 2, 18, 0]])
of_words = eg.grad(reader, tokens, of="output[0, -1, 2]", wrt="embedding")
sizes = tf.norm(of_words, axis=-1)
sizes

# %% large
# A plan says what a read would cost, before anything is paid.
J = eg.jacobian(net, image, of="conv2", wrt="input")
f = lambda x: tf.tanh(x) * tf.roll(x, 1, 0)
big = eg.jacobian(f, tf.ones(100_000))
J.shape, big.plan(..., 7), big[6:10, 7]

# %% second
# A Hessian is indexed like a Jacobian.
x = tf.constant([2.0, 3.0])
H = eg.hessian(lambda x: x[0] * x[1] ** 2 + tf.reduce_sum(x) ** 2, x)
H[0, 1]

# %% uses
# One share for each use of the element; they add up to the derivative.
x = tf.constant([1.0, 2.0, 3.0])
y = lambda x: 2 * x[2] + tf.reduce_sum(x)
shares = eg.contributions(y, x, wrt="x[2]")
direct, through_sum = (share.value for share in shares)
direct, through_sum, shares.total

# %% twice: usual
# Ask the tape, look, and ask it again.
x, w = tf.Variable([1.0, 2.0, 3.0]), tf.constant([4.0, 5.0, 6.0])
with tf.GradientTape() as tape:
    y = tf.reduce_sum(x * w)
first = tape.gradient(y, x)[2]
again = tape.gradient(y, x)[2]
first, again

# %% twice
# Vectorised operations hide nothing: it is w[2]. And a question changes
# nothing, so that asking again gives the same.
x, w = tf.constant([1.0, 2.0, 3.0]), tf.constant([4.0, 5.0, 6.0])
J = eg.jacobian(lambda x: tf.reduce_sum(x * w), x)
first, again = J[..., 2], J[..., 2]
first, again


# %% own_rule: usual
# Give one gradient for the tensor, and none for the index.
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
slope


# %% own_rule
# One gradient for each argument, and None for an index. `eg.check` holds
# the rule against differences.
@tf.custom_gradient
def weighted(x, i):
    def backward(g):
        ones = tf.ones_like(x)
        return g * tf.tensor_scatter_nd_add(ones, [[i]], [3.0]), None

    return 3 * x[i] + tf.reduce_sum(x), backward


x = tf.constant([1.0, 2.0, 3.0])
slope = eg.grad(lambda x: weighted(x, 2), x, wrt="x[2]")
verdict = eg.check(lambda x: weighted(x, 2), x).verdict
slope, verdict

# %% written: usual
# Write with scatter updates, and ask the tape for one by the other. But
# each `t[1]` is a new tensor.
t = tf.Variable([3.0, 0.0, 0.0, 0.0, 0.0])
with tf.GradientTape() as tape:
    t = tf.tensor_scatter_nd_update(t, [[1]], [2 * t[0]])
    t = tf.tensor_scatter_nd_update(t, [[3]], [t[1] ** 2 + t[0]])
    t = tf.tensor_scatter_nd_update(t, [[4]], [t[3] * t[1]])
    last = t[4]
slope = tape.gradient(last, t[1])
slope


# %% written
# Tag the versions, and ask for elements of them: t#0 is the first.
def program(t):
    t = eg.tag(eg.at(t)[1].set(2 * t[0]), "t")
    t = eg.tag(eg.at(t)[3].set(t[1] ** 2 + t[0]), "t")
    return eg.tag(eg.at(t)[4].set(t[3] * t[1]), "t")


start = tf.constant([3.0, 0.0, 0.0, 0.0, 0.0])
slope = eg.grad(program, start, of="t#2[4]", wrt="t#0[1]")
slope

# %% message: usual
# Train on. What TensorFlow says names no line, and no cause.
with tf.GradientTape() as tape:
    features = tf.stop_gradient(net(image))
    cost = tf.reduce_mean(features**2)
slopes = tape.gradient(cost, net.trainable_variables)
optimizer = keras.optimizers.SGD(0.1)
optimizer.apply_gradients(zip(slopes, net.trainable_variables))
slopes

# %% message
# TensorFlow words it otherwise ("No gradients provided for any variable").
# Something cut the path, and `eg.explain` names the line.
optimizer = keras.optimizers.SGD(0.1)


def step():
    with tf.GradientTape() as tape:
        features = tf.stop_gradient(net(image))
        cost = tf.reduce_mean(features**2)
    slopes = tape.gradient(cost, net.trainable_variables)
    optimizer.apply_gradients(zip(slopes, net.trainable_variables))


diagnosis = eg.explain(step)
diagnosis.sentence, diagnosis.where, diagnosis.fix

# %% three_ways
# By index, by gather and by mask: the same gradient.
x = tf.Variable([3.0, 4.0, 5.0])
with tf.GradientTape(persistent=True) as tape:
    index = x[0] ** 2
    gather = tf.reduce_sum(tf.gather(x, [0]) ** 2)
    mask = tf.reduce_sum(tf.boolean_mask(x, x < 4) ** 2)
    place = eg.at(x)[0].get() ** 2
by_index, by_mask = tape.gradient(index, x), tape.gradient(mask, x)
by_gather = tf.convert_to_tensor(tape.gradient(gather, x))
by_place = tape.gradient(place, x)
by_index, by_gather, by_mask, by_place

# %% element_zero: usual
# Watch the element. But `x[0]` is a new tensor each time.
x = tf.constant([3.0, 4.0, 5.0])
with tf.GradientTape() as tape:
    tape.watch(x[0])
    y = x[0] ** 2
slope = tape.gradient(y, x)
slope

# %% element_zero
# `only` lets the gradient reach the element.
x = tf.Variable([3.0, 4.0, 5.0])
with tf.GradientTape() as tape:
    y = tf.reduce_sum(eg.at(x)[0].only() ** 2)
slope = tape.gradient(y, x)
slope

# %% choice: usual
# Take the element with the largest logit: nothing comes back from `argmax`.
x, logits = tf.constant([3.0, 1.0, 2.0]), tf.Variable([0.0, 0.0, 0.0])
with tf.GradientTape() as tape:
    cost = (x[tf.argmax(logits)] - 1.0) ** 2
slope = tape.gradient(cost, logits)
slope

# %% choice
# `choose` learns which element comes nearest to 1.
x, logits = tf.constant([3.0, 1.0, 2.0]), tf.Variable([0.0, 0.0, 0.0])
for _ in range(200):
    with tf.GradientTape() as tape:
        cost = (eg.choose(x, logits) - 1.0) ** 2
    logits.assign_sub(tape.gradient(cost, logits))
weights, chosen = tf.nn.softmax(logits), eg.choose(x, logits, hard=True)
weights, chosen

# %% entry: usual
# Multiply the gradient by a mask. Weight decay and earlier momentum do not
# ask the gradient: they move the other 999 entries as well.
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
sgd, momentum, adam, adamw

# %% entry
# The optimizer is given the one entry and nothing else that it could move:
# not by a bit, whichever optimizer it is.
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
sgd, momentum, adam, adamw

# %% token: usual
# Ask the tape for the entry. But an entry is a new tensor each time, and no
# variable that an optimizer could take.
table = reader.get_layer("embedding").embeddings
with tf.GradientTape() as tape:
    cost = losses(1, 43, 2, 18, 0)[2]
slope = tape.gradient(cost, table[0, 12])
slope

# %% token
# Of the whole model, only number 12 of "the" is trained further:
# "cat" is to come next.
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
chances[0], chances[-1]

# %% unseen
# Its word does not occur. The gradient is 0 and not None, and `eg.explain`
# says why.
tokens = tf.constant([[1, 43, 2, 18, 1]])  # a brave cat sees a
diagnosis = eg.explain(
    reader, tokens, of="output[0, -1, 2]", wrt="embedding/embeddings[0, 12]"
)
diagnosis.value, diagnosis.sentence, diagnosis.fix

# %% routed: usual
# Add the losses up. Each entry gets both gradients. (The same answer scores
# ten targets against one row, and raises.)
table = reader.get_layer("embedding").embeddings
with tf.GradientTape() as tape:
    each = losses(1, 43, 2, 18, 0)
    both = each[2] + each[5]
slope = tf.convert_to_tensor(tape.gradient(both, table))
the, a = slope[0, 12], slope[1, 25]
try:
    scores = reader(tf.constant([[1, 43, 2, 18, 0]]))[:, -1]
    keras.losses.sparse_categorical_crossentropy(tf.range(10), scores, True)
except ValueError as error:
    ten_targets = str(error)
the, a, ten_targets

# %% routed
# Each place is given its own loss: "cat" for "the", "fish" for "a".
places = "embedding/embeddings[0, 12]", "embedding/embeddings[1, 25]"
elements = eg.trainable(reader, places)
with tf.GradientTape(persistent=True) as tape:
    each = losses(1, 43, 2, 18, 0)
    routed = {places[0]: each[2], places[1]: each[5]}
the, a = elements.gradients(tape, routed)
elements.release()
the, a


# %% shipped
# Teach the net a digit that it misreads, by one row of the head. A patch is
# as large as what was trained, and can be undone to the bit.
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
truth[0], read_as, now_read_as, right_now, patch.size, undone
