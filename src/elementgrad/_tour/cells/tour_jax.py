"""The tour on JAX, in cells.

The runner executes `setup`, `net` and `reader` first. Other cells start
with the names that these have left, and `folder`, a temporary directory.
The tour shows the comment at the head of a cell, its code, and the values
of its last line.
"""

# %% setup
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import elementgrad as eg
from elementgrad._tour.data import load_digits, make_photo, make_sentences

images, labels = load_digits()
sentences = make_sentences()


# %% net
# Two convolutions and a head, trained on the first 1500 digits.
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
right


# %% reader
# An embedding of 50 x 32, a GRU of 64 and a head, trained on sentences.
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
likely

# %% replaced: usual
# Assign to it.
v = jnp.array([1.0, 2.0, 3.0, 4.0])
v[2] = 10.0
v

# %% replaced
# `set` gives a new array, as `v.at[2].set` does. The gradient of the old
# element is 0, and the value has its own.
v = jnp.array([1.0, 2.0, 3.0, 4.0])

new = eg.at(v)[2].set(10.0)
total = lambda v, value: eg.at(v)[2].set(value).sum()
of_sum = jax.grad(total, (0, 1))(v, 10.0)

squares = lambda v, value: (eg.at(v)[0].set(value) ** 2).sum()
loss, of_loss = jax.value_and_grad(squares, (0, 1))(v, 7.0)
new, of_sum, loss, of_loss

# %% alone: usual
# Multiply by a mask. A NaN somewhere else comes through all the same.
v = jnp.array([1.0, 2.0, 3.0, jnp.nan])
mask = jnp.array([0.0, 0.0, 1.0, 0.0])
slope = jax.grad(lambda v: ((v * mask) ** 2).sum())(v)
slope

# %% alone
# `only` has all values of v, and the gradient of the element you name.
v = jnp.array([1.0, 2.0, 3.0, 4.0])
slope = jax.grad(lambda v: (eg.at(v)[2].only() ** 2).sum())(v)
slope

# %% stepped: usual
# Replace the element first. Then its own gradient is 0, and every other
# element moves: the wrong way round.
v = jnp.array([1.0, 2.0, 3.0, 4.0])
slope = jax.grad(lambda v: (v.at[1].set(2.0) ** 2).sum())(v)
v - 0.1 * slope

# %% stepped
# Keep the vector as it is and let the gradient reach element 1 alone.
v = jnp.array([1.0, 2.0, 3.0, 4.0])
slope = jax.grad(lambda v: (eg.at(v)[1].only() ** 2).sum())(v)
v - 0.1 * slope

# %% itself: usual
# Ask for the gradient of all.
X = jnp.arange(1.0, 10.0).reshape(3, 3)
slope = jax.grad(lambda X: X)(X)
slope

# %% itself
# Name the element.
X = jnp.arange(1.0, 10.0).reshape(3, 3)
one = eg.grad(lambda X: X, X, of="output[1, 2]")
total = eg.grad(lambda X: X.sum(), X)
one, total

# %% product: usual
# Compute the whole Jacobian and throw most of it away: 16 numbers for these
# two, and 10^12 for matrices of 1000 x 1000.
X = jnp.array([[1.0, 2.0], [3.0, 4.0]])
Y = jnp.array([[5.0, 6.0], [7.0, 8.0]])
whole = jax.jacobian(jnp.matmul)(X, Y)
whole.size, whole[0, 0]

# %% product
# A Jacobian that you index, and nothing else is computed.
X = jnp.array([[1.0, 2.0], [3.0, 4.0]])
Y = jnp.array([[5.0, 6.0], [7.0, 8.0]])
J = eg.jacobian(lambda X, Y: X @ Y, X, Y, wrt="X")
J[(0, 0), :], J[(0, 0), (0, 1)]


# %% pixel: usual
# Cut the model open: write the first half again, to get at its inside. It
# is right as long as the model does not change.
def half(image):
    tanh1 = jnp.tanh(jax.lax.conv(image, params["conv1"], (1, 1), "VALID"))
    return jax.lax.conv(tanh1, params["conv2"], (1, 1), "VALID")[0, 5, 1, 2]


slope = jax.grad(half)(image)
slope[0, 0, 3, 4]

# %% pixel
# Name both: what the model tagged has a name. The whole receptive field
# costs the same one sweep.
field = eg.grad(
    net, params, image, of="conv2[0, 5, 1, 2]", wrt="image[0, 0]"
)
number = eg.grad(
    net, params, image, of="conv2[0, 5, 1, 2]", wrt="image[0, 0, 3, 4]"
)
number, field

# %% photo: usual
# Run the whole picture, 512 x 512 x 3, through all layers and back again
# for one element, which sees 13 x 13 pixels. It is compiled before the
# clock starts.
chance = np.random.default_rng(0)
weights = [
    jnp.array(chance.normal(0, 0.1, (16, before, 3, 3)), "float32")
    for before in (3, 16, 16, 16, 16, 16)
]
photo = jnp.array(make_photo().transpose(2, 0, 1)[None])


def tower(pixels):
    for weight in weights:
        pixels = jnp.tanh(jax.lax.conv(pixels, weight, (1, 1), "SAME"))
    return pixels


one = jax.value_and_grad(lambda pixels: tower(pixels)[0, 5, 200, 300])
compiled = jax.jit(one).lower(photo).compile()
start = time.perf_counter()
value, gradient = jax.block_until_ready(compiled(photo))
milliseconds = 1000 * (time.perf_counter() - start)
milliseconds, value, gradient[0, :, 200, 300]

# %% photo
# `eg.grad` runs what the element depends on, its cone; it is compiled by
# the first element, for all. `eg.field` says which pixels these are, and
# `eg.value` evaluates the element alone.
chance = np.random.default_rng(0)
weights = [
    jnp.array(chance.normal(0, 0.1, (16, before, 3, 3)), "float32")
    for before in (3, 16, 16, 16, 16, 16)
]
photo = jnp.array(make_photo().transpose(2, 0, 1)[None])


def tower(pixels):
    for weight in weights:
        pixels = jnp.tanh(jax.lax.conv(pixels, weight, (1, 1), "SAME"))
    return pixels


element = "output[0, 5, 200, 300]"
field = eg.field(tower, photo, of=element, wrt="pixels")
value = eg.value(tower, photo, of=element)
eg.grad(tower, photo, of="output[0, 5, 100, 100]")
start = time.perf_counter()
gradient = eg.grad(tower, photo, of=element).block_until_ready()
milliseconds = 1000 * (time.perf_counter() - start)
milliseconds, value, gradient[0, :, 200, 300], field

# %% score
# Any tensor of the model has a name, and so has each of its elements.
places = {
    "pixels": "image[0, 0]",
    "maps": "tanh1",
    "weight": "params.conv1[4, 0, 1, 1]",
}
slopes = eg.grad(net, params, image, of="output[0, 3]", wrt=places)
slopes["pixels"], slopes["maps"].shape, slopes["weight"]

# %% words
# The embedding of each word is tagged, and so it has a name.
sentence = ["a", "brave", "cat", "sees", "the"]
tokens = jnp.array([[1, 43, 2, 18, 0]])
asked = {"of": "output[0, -1, 2]", "wrt": "embedded"}
of_words = eg.grad(reader, words, tokens, **asked)
sizes = jnp.linalg.norm(of_words, axis=-1)
sizes

# %% large
# A plan says what a read would cost, before anything is paid.
J = eg.jacobian(net, params, image, of="conv2", wrt="image")
f = lambda x: jnp.tanh(x) * jnp.roll(x, 1)
big = eg.jacobian(f, jnp.ones(100_000))
J.shape, big.plan(..., 7), big[6:10, 7]

# %% second
# A Hessian is indexed like a Jacobian.
x = jnp.array([2.0, 3.0])
H = eg.hessian(lambda x: x[0] * x[1] ** 2 + x.sum() ** 2, x)
H[0, 1]

# %% uses
# One share for each use of the element; they add up to the derivative.
x = jnp.array([1.0, 2.0, 3.0])
shares = eg.contributions(lambda x: 2 * x[2] + x.sum(), x, wrt="x[2]")
direct, through_sum = (share.value for share in shares)
direct, through_sum, shares.total

# %% twice
# Vectorised operations hide nothing: it is w[2]. And a question changes
# nothing, so that asking again gives the same.
x, w = jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 5.0, 6.0])
J = eg.jacobian(lambda x: (x * w).sum(), x)
first, again = J[..., 2], J[..., 2]
first, again


# %% own_rule: usual
# Give one gradient for the array, and none for the index.
@jax.custom_vjp
def weighted(x, i):
    return 3 * x[i] + x.sum()


def forward(x, i):
    return weighted(x, i), (x, i)


def backward(saved, g):
    x, i = saved
    return g * jnp.ones_like(x).at[i].add(3.0)


weighted.defvjp(forward, backward)
slope = jax.grad(weighted)(jnp.array([1.0, 2.0, 3.0]), 2)
slope[2]


# %% own_rule
# One gradient for each argument, and None for an index. `eg.check` holds
# the rule against differences.
@jax.custom_vjp
def weighted(x, i):
    return 3 * x[i] + x.sum()


def forward(x, i):
    return weighted(x, i), (x, i)


def backward(saved, g):
    x, i = saved
    return g * jnp.ones_like(x).at[i].add(3.0), None


weighted.defvjp(forward, backward)
x = jnp.array([1.0, 2.0, 3.0])
slope = eg.grad(lambda x: weighted(x, 2), x, wrt="x[2]")
verdict = eg.check(lambda x: weighted(x, 2), x).verdict
slope, verdict


# %% written: usual
# Differentiate by t and look at element 1. But that is the t[1] of the
# start, which is written over.
def program(t):
    t = t.at[1].set(2 * t[0])
    t = t.at[3].set(t[1] ** 2 + t[0])
    return t.at[4].set(t[3] * t[1])


start = jnp.array([3.0, 0.0, 0.0, 0.0, 0.0])
slope = jax.grad(lambda t: program(t)[4])(start)
slope[1]


# %% written
# Tag the versions, and ask for elements of them: t#0 is the first.
def program(t):
    t = eg.tag(t.at[1].set(2 * t[0]), "t")
    t = eg.tag(t.at[3].set(t[1] ** 2 + t[0]), "t")
    return eg.tag(t.at[4].set(t[3] * t[1]), "t")


start = jnp.array([3.0, 0.0, 0.0, 0.0, 0.0])
slope = eg.grad(program, start, of="t#2[4]", wrt="t#0[1]")
slope


# %% message: usual
# Look at the gradient. JAX gives zeros where there is no path at all, and
# says nothing.
def loss(conv1):
    features = net(params | {"conv1": conv1}, image)
    return (jax.lax.stop_gradient(features) ** 2).mean()


slope = jax.grad(loss)(params["conv1"])
jnp.abs(slope).max()


# %% message
# JAX has no such message: it gives zeros where something cut the path.
# `eg.explain` tells that from a zero, and names the line.
def loss(conv1):
    features = net(params | {"conv1": conv1}, image)
    features = jax.lax.stop_gradient(features)
    return (features**2).mean()


diagnosis = eg.explain(loss, params["conv1"])
diagnosis.sentence, diagnosis.where, diagnosis.fix

# %% three_ways
# By index, by gather and by mask: the same gradient.
x = jnp.array([3.0, 4.0, 5.0])
by_index = jax.grad(lambda x: x[0] ** 2)(x)
by_gather = jax.grad(lambda x: (x[jnp.array([0])] ** 2).sum())(x)
by_mask = jax.grad(
    lambda x: (x[np.array([True, False, False])] ** 2).sum()
)(x)
by_place = jax.grad(lambda x: eg.at(x)[0].get() ** 2)(x)
by_index, by_gather, by_mask, by_place

# %% element_zero
# `only` lets the gradient reach the element.
x = jnp.array([3.0, 4.0, 5.0])
slope = jax.grad(lambda x: (eg.at(x)[0].only() ** 2).sum())(x)
slope

# %% choice: usual
# Take the element with the largest logit: nothing comes back from `argmax`,
# and so nothing is learned.
x, logits = jnp.array([3.0, 1.0, 2.0]), jnp.zeros(3)
slope = jax.grad(lambda logits: (x[logits.argmax()] - 1.0) ** 2)(logits)
slope

# %% choice
# `choose` learns which element comes nearest to 1.
x, logits = jnp.array([3.0, 1.0, 2.0]), jnp.zeros(3)
slope = jax.jit(jax.grad(lambda logits: (eg.choose(x, logits) - 1.0) ** 2))
for _ in range(200):
    logits -= slope(logits)
weights, chosen = jax.nn.softmax(logits), eg.choose(x, logits, hard=True)
weights, chosen

# %% entry: usual
# Multiply the gradient by a mask. Weight decay and earlier momentum do not
# ask the gradient: they move the other 999 entries as well.
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
sgd, momentum, adam, adamw

# %% entry
# The optimizer is given the one entry and nothing else that it could move:
# not by a bit, whichever optimizer it is.
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
sgd, momentum, adam, adamw

# %% token: usual
# Mask the optimizer, down to the entry.
mask = jax.tree.map(lambda p: jnp.zeros_like(p, bool), words)
mask["embedding"] = mask["embedding"].at[0, 12].set(True)
optimizer = optax.masked(optax.adam(0.1), mask)
state = optimizer.init(words)
state

# %% token
# Of the whole model, only number 12 of "the" is trained further:
# "cat" is to come next.
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
chances[0], chances[-1]

# %% unseen
# Its word does not occur. The gradient is 0, and `eg.explain` says why.
tokens = jnp.array([[1, 43, 2, 18, 1]])  # a brave cat sees a
diagnosis = eg.explain(
    reader,
    words,
    tokens,
    of="output[0, -1, 2]",
    wrt="words.embedding[0, 12]",
)
diagnosis.value, diagnosis.sentence, diagnosis.fix


# %% routed: usual
# Add the losses up. Each entry gets both gradients. (The same answer scores
# ten targets against one row.)
@jax.jit
@jax.grad
def both(words):
    each = losses(words, 1, 43, 2, 18, 0)
    return each[2] + each[5]


slope = both(words)["embedding"]
the, a = slope[0, 12], slope[1, 25]
try:
    scores = reader(words, jnp.array([[1, 43, 2, 18, 0]]))[:, -1]
    ten_targets = optax.softmax_cross_entropy_with_integer_labels(
        scores, jnp.arange(10)
    )
except Exception as error:
    ten_targets = str(error)
the, a, ten_targets

# %% routed
# Each place is given its own loss: "cat" for "the", "fish" for "a".
places = "embedding[0, 12]", "embedding[1, 25]"
elements = eg.trainable(words, places)
each = {
    places[0]: lambda words: losses(words, 1, 43, 2, 18, 0)[2],
    places[1]: lambda words: losses(words, 1, 43, 2, 18, 0)[5],
}
slope = jax.jit(lambda values: elements.grad(each, values))(elements.values)
the, a = (slope[place] for place in places)
the, a

# %% shipped
# Teach the net a digit that it misreads, by one row of the head. A patch is
# as large as what was trained, and can be undone to the bit.
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
truth[0], read_as, now_read_as, right_now, patch.size, undone
