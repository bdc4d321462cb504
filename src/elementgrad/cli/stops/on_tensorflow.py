"""The stops of the tour on TensorFlow and Keras."""

from collections.abc import Callable
from typing import Any

import elementgrad as eg

tf: Any = None  # imported when the tour starts
keras: Any = None


def replace_an_element() -> dict[str, Any]:
    """Replace element 2 by a value and differentiate the sum."""
    v, value = tf.constant([1.0, 2.0, 3.0, 4.0]), tf.constant(10.0)
    new = eg.at(v)[2].set(value)
    slopes = eg.grad(lambda v, value: tf.reduce_sum(eg.at(v)[2].set(value)), v, value, wrt=["v", "value"])
    return {"new": new, "slopes[0]": slopes[0], "slopes[1]": slopes[1]}


def replace_and_square() -> dict[str, Any]:
    """Replace element 0 by a value and differentiate the sum of squares."""
    v, value = tf.Variable([1.0, 2.0, 3.0, 4.0]), tf.Variable(7.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(eg.at(v)[0].set(value) ** 2)
    slopes = tape.gradient(loss, [v, value])
    return {"loss": loss, "slopes[0]": slopes[0], "slopes[1]": slopes[1]}


def one_element_alone() -> dict[str, Any]:
    """Get the gradient of one element alone, all others zero."""
    v = tf.constant([1.0, 2.0, 3.0, 4.0])
    slope = eg.grad(lambda v: tf.reduce_sum(eg.at(v)[2].only() ** 2), v)
    return {"slope": slope}


def one_step_on_one_element() -> dict[str, Any]:
    """Take one gradient step (learning rate 0.1) on element 1 and move nothing else."""
    v = tf.Variable([1.0, 2.0, 3.0, 4.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(eg.at(v)[1].only() ** 2)
    keras.optimizers.SGD(0.1).apply_gradients([(tape.gradient(loss, v), v)])
    return {"v": v}


def the_published_answer() -> dict[str, Any]:
    """Beware the usual answer: replace the element first, and every *other* element moves."""
    v = tf.Variable([1.0, 2.0, 3.0, 4.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.tensor_scatter_nd_update(v, [[1]], [2.0]) ** 2)
    keras.optimizers.SGD(0.1).apply_gradients([(tape.gradient(loss, v), v)])
    return {"v": v}


def element_of_a_product() -> dict[str, Any]:
    """Differentiate one element of a matrix product: no tape, and nothing to watch."""
    X, Y = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[5.0, 6.0], [7.0, 8.0]])
    J = eg.jacobian(lambda X, Y: X @ Y, X, Y, wrt="X")
    return {"J[(0, 0), :]": J[(0, 0), :], "J[(0, 0), (0, 1)]": J[(0, 0), (0, 1)]}


def train_one_entry() -> dict[str, Any]:
    """Train one entry of a 100 x 10 embedding by `fit`, under AdamW with weight decay: nothing else moves by a bit."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((1,)), keras.layers.Embedding(100, 10, name="table"), keras.layers.Dense(2, name="head")]
    model = keras.Sequential(layers)
    table, head = model.get_weights()[:2]
    eg.trainable(model, "table/embeddings[0, 5]")
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.1), "mse")
    model.fit(tf.range(100)[:, None], tf.ones([100, 1, 2]), epochs=5, verbose=0)
    moved, others = tf.where(model.get_weights()[0] != table), tf.math.count_nonzero(model.get_weights()[1] != head)
    return {"moved": moved, "others": others}


def the_usual_mask() -> dict[str, Any]:
    """Beware the usual answer, a mask on the gradient: weight decay moves the other 999 as well."""
    keras.utils.set_random_seed(0)
    table, mask = tf.Variable(tf.random.normal([100, 10])), eg.at(tf.zeros([100, 10]))[0, 5].set(1.0)
    before, optimizer = tf.identity(table), keras.optimizers.AdamW(0.1, weight_decay=0.1)
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, tf.range(100)) ** 2)
        optimizer.apply_gradients([(tf.convert_to_tensor(tape.gradient(loss, table)) * mask, table)])
    leaked = tf.math.count_nonzero((table != before) & (mask == 0))
    return {"leaked": leaked}


def an_entry_of_a_sequence_model() -> dict[str, Any]:
    """Train entry [0, 12] of a GRU model's embedding for one output token; unseen, its gradient is 0 and not None."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(50, 32, name="table"), keras.layers.GRU(64), keras.layers.Dense(50)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    elements = eg.trainable(model, "table/embeddings[0, 12]")

    def gradient(*tokens: int) -> Any:
        with tf.GradientTape() as tape:
            loss = -tf.nn.log_softmax(model(tf.constant([tokens]))[0])[2]
        return tape.gradient(loss, elements.variables)[0]

    return {"gradient(7, 0, 3)": gradient(7, 0, 3), "gradient(7, 4, 3)": gradient(7, 4, 3)}


def each_entry_its_loss() -> dict[str, Any]:
    """Two entries, each with its own target token: neither hears the loss of the other, as it would of their sum."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(50, 32, name="table"), keras.layers.GRU(64), keras.layers.Dense(50)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    elements = eg.trainable(model, ["table/embeddings[0, 12]", "table/embeddings[1, 25]"])
    with tf.GradientTape(persistent=True) as tape:
        losses = -tf.nn.log_softmax(model(tf.constant([[7, 0, 1]]))[0])
        each = {"table/embeddings[0, 12]": losses[2], "table/embeddings[1, 25]": losses[5]}
        both = losses[2] + losses[5]
    routed = tf.concat(elements.gradients(tape, each), 0)
    summed = tf.concat(tape.gradient(both, elements.variables), 0)
    return {"routed": routed, "summed": summed}


STOPS: tuple[Callable[[], dict[str, Any]], ...] = (
    replace_an_element,
    replace_and_square,
    one_element_alone,
    one_step_on_one_element,
    the_published_answer,
    element_of_a_product,
    train_one_entry,
    the_usual_mask,
    an_entry_of_a_sequence_model,
    each_entry_its_loss,
)
