"""Elements of Keras models in use: the founding cases, routed losses, patches, what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import elementgrad as eg

TOKENS = np.array([[0, 3, 7], [1, 0, 2]])


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    x = keras.Input((3,), dtype="int32")
    y = layers.Embedding(50, 32, name="table")(x)
    return keras.Model(x, layers.Dense(10, name="head")(layers.GRU(64, name="gru")(y)))


def state(model):
    return {variable.path: variable.numpy() for variable in model.weights}


def moved(model, before):
    now = state(model)
    return {name: np.argwhere(now[name] != old).tolist() for name, old in before.items() if (now[name] != old).any()}


def losses_of(model, tokens=TOKENS):
    losses = -tf.nn.log_softmax(model(tokens)[0])
    return losses[2], losses[5]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5),
    ],
)
def test_one_entry_of_an_embedding_before_a_linear_head(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((2,)), layers.Embedding(100, 10, name="table"), layers.Flatten(), layers.Dense(1, name="head")]
    )
    before = state(model)
    eg.trainable(model, "table/embeddings[0, 5]")
    model.compile(optimizer(), "mse")
    model.fit(np.array([[0, 3], [5, 0]]), np.ones((2, 1)), epochs=3, verbose=0)
    (name, places), *others = moved(model, before).items()
    assert name.endswith("embeddings")
    assert (places, others) == ([[0, 5]], [])


def test_the_loss_of_one_token_in_a_recurrent_model(model):
    elements = eg.trainable(model, "table/embeddings[0, 12]")
    for tokens, hears in ((TOKENS, True), (TOKENS + 1, False)):
        with tf.GradientTape() as tape:
            loss = losses_of(model, tokens)[0]
        (gradient,) = tape.gradient(loss, elements.variables)
        assert bool(gradient[0] != 0) is hears  # where token 0 does not occur, nobody hears it


def test_each_entry_gets_the_gradient_of_its_own_token_alone(model):
    places = ["table/embeddings[0, 12]", "table/embeddings[3, 25]"]
    elements = eg.trainable(model, [*places, "head/bias"])

    def both():
        with tf.GradientTape(persistent=True) as tape:
            first, second = losses_of(model)
        routed = elements.gradients(tape, {places[0]: first, places[1]: second})
        return (
            routed[:2],
            routed[2],
            tape.gradient(first, elements.variables),
            tape.gradient(second, elements.variables),
        )

    for run in (both, tf.function(both)):
        routed, left_out, of_first, of_second = run()
        assert np.array_equal(routed[0], of_first[0])
        assert np.array_equal(routed[1], of_second[1])
        assert not np.array_equal(routed[0], of_second[0])
        assert left_out is None
    before = state(model)
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    optimizer.apply(routed, elements.variables[:2])
    assert moved(model, before) == {"table/embeddings": [[0, 12], [3, 25]]}


def test_several_places_of_one_loss_and_parts_of_a_place(model):
    elements = eg.trainable(model, ["head/bias", "table/embeddings[0]"])
    with tf.GradientTape(persistent=True) as tape:
        first, second = losses_of(model)
    whole = tape.gradient(first, elements.variables)
    other = tape.gradient(second, elements.variables)
    for found in (
        elements.gradients(tape, first),
        elements.gradients(tape, {("head/bias", "table/embeddings[0]"): first}),
    ):
        assert all(np.array_equal(one, two) for one, two in zip(found, whole, strict=True))
    bias, table = elements.gradients(tape, {"head/bias[2:4]": first, "head/bias[7]": second})
    assert table is None
    expected = np.zeros(10, np.float32)
    expected[2:4], expected[7] = whole[0][2:4], other[0][7]
    assert np.array_equal(bias, expected)


def trained(model, places, path):
    elements = eg.trainable(model, places)
    for variable in elements.variables:
        variable.assign_add(tf.ones_like(variable))
    elements.save(path)
    return elements


def test_patches_come_and_go(model, tmp_path):
    path = tmp_path / "patch.safetensors"
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    before = state(model)
    trained(model, ["table/embeddings[0, 12]", "head/kernel[3]"], path)
    assert path.stat().st_size < 3000
    assert [entry.place for entry in eg.inspect(path).entries] == ["table/embeddings[0, 12]", "head/kernel[3]"]
    applied = eg.apply(plain, path)
    assert not moved(plain, state(model))
    assert not applied.training
    with pytest.raises(eg.PatchError, match="changed before"):
        eg.apply(plain, path)
    applied.undo()
    assert not moved(plain, before)
    resumed = eg.trainable(plain, path)
    assert not moved(plain, state(model))
    plain.compile(keras.optimizers.Adam(0.1), "mse")
    plain.fit(TOKENS, np.zeros((2, 10)), verbose=0)
    resumed.undo()
    assert not moved(plain, before)
    other = keras.models.clone_model(model)
    other.set_weights([weights + 1 for weights in model.get_weights()])
    with pytest.raises(eg.PatchError, match="is not the tensor"):
        eg.apply(other, path)


def test_masters_are_in_the_file(tmp_path):
    path = tmp_path / "patch.safetensors"
    table = layers.Embedding(4, 3, name="table", dtype="bfloat16")
    table.build()
    values = np.float32([0.1, 0.2, 0.3])
    elements = eg.trainable(table, "embeddings[0]")
    elements["embeddings[0]"].assign(values)
    elements.save(path)
    elements.release(keep=False)
    resumed = eg.trainable(table, path)
    assert np.array_equal(resumed["embeddings[0]"], values)


def test_places_are_found_by_what_they_name(model):
    kernel = model.get_layer("head").kernel
    elements = eg.trainable(model, [eg.at(kernel)[0, :2], "head/kernel[-1, 0]"])
    assert [str(place) for place in elements] == ["head/kernel[0, :2]", "head/kernel[-1, 0]"]
    assert elements["head/kernel[0, 0:2]"] is elements.variables[0]
    assert "head/kernel[5]" not in elements


def test_derivatives_of_a_model_in_training(model):
    tokens = tf.constant(TOKENS)
    before = eg.grad(model, tokens, of="output[0, 1]", wrt="head/kernel")
    eg.trainable(model, ["head/kernel[0]", "table/embeddings[0, 1]"])
    assert np.allclose(eg.grad(model, tokens, of="output[0, 1]", wrt="head/kernel"), before)
    with tf.GradientTape() as tape:
        score = model(tokens)[0, 1]
    assert np.allclose(tape.gradient(score, model.get_layer("head").kernel), before)  # of the whole variable too


def test_regularizers_count_once_and_for_the_whole_variable():
    layer = layers.Dense(2, kernel_regularizer="l2", name="fc")
    model = keras.Sequential([keras.Input((3,)), layer])
    x = tf.ones([1, 3])

    def loss():
        return tf.reduce_sum(model(x)) + tf.add_n(model.losses)

    with tf.GradientTape() as tape:
        before = loss()
    expected = tape.gradient(before, layer.kernel).numpy()[0]
    elements = eg.trainable(model, ["fc/kernel[0, 0]", "fc/kernel[0, 1]"])
    with tf.GradientTape() as tape:
        after = loss()
    assert np.allclose(after, before)
    assert np.allclose(np.concatenate(tape.gradient(after, elements.variables)), expected)


REFUSED = {
    "no such name": ("head/kernl[0]", eg.PlaceError, "no trainable variable named 'head/kernl'; nearest: head/kernel"),
    "a layer": ("head", eg.PlaceError, "'head' is a layer and only trainable variables train; it has "),
    "out of range": ("head/bias[10]", eg.SelectionError, "out of range"),
    "twice": (["head/bias[1]", "head/bias"], eg.DuplicateError, "name each element once"),
    "no places": ([], eg.PlaceError, "no places are given"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_places_are_refused_before_anything_changes(model, case):
    places, error, message = REFUSED[case]
    before = [type(layer) for layer in model.layers]
    with pytest.raises(error, match=message.replace("[", r"\[")):
        eg.trainable(model, places)
    assert [type(layer) for layer in model.layers] == before
    assert len(model.trainable_variables) == len(model.weights)


def test_other_things_that_are_refused(model):
    eg.trainable(model, "head/bias[1]")
    with pytest.raises(eg.DuplicateError, match="trains already"):
        eg.trainable(model, "head/bias")
    with pytest.raises(eg.OptionError, match="not a floating dtype"):
        eg.trainable(model, "head/bias[2]", dtype=tf.int32)
    with pytest.raises(eg.FrameworkError, match="no variables yet"):
        eg.trainable(keras.Sequential([layers.Dense(2, name="fc")]), "fc/kernel")
    layer = layers.Dense(2, kernel_constraint="non_neg", name="fc")
    with pytest.raises(eg.FrameworkError, match="has a constraint"):
        eg.trainable(keras.Sequential([keras.Input((3,)), layer]), "fc/kernel[0]")
    with pytest.raises(eg.FrameworkError, match="give the model"):
        eg.trainable(model.call, "head/bias[3]")
    normed = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(name="bn")])
    with pytest.raises(eg.PlaceError, match="a variable that no optimizer updates"):
        eg.trainable(normed, "bn/moving_mean[0]")
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope(), pytest.raises(eg.FrameworkError, match="made outside"):
        eg.trainable(model, "head/bias[3]")


def test_statistics_move_as_if_the_rest_trained():
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(name="bn"), layers.Dense(1, name="fc")])
    eg.trainable(model, "fc/bias")
    model.compile("sgd", "mse")
    model.fit(np.full((8, 3), 5.0), np.zeros((8, 1)), verbose=0)
    assert model.get_layer("bn").moving_mean.numpy().all()
