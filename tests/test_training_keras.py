"""Elements of Keras models that train: gradients are those of the dense computation, nothing else moves."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import elementgrad as eg
from tests import keras_models

RNG = np.random.default_rng(0)


class Scaled(layers.Layer):
    """A layer of a user's own, which uses its variable twice and looks up rows of it."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1], shape[-1]), name="scale")

    def call(self, x):
        return x @ self.scale + tf.reduce_sum(self.scale * self.scale, 0) + tf.gather(self.scale, [1])


def dense(**options):
    return layers.Dense(4, "tanh", name="layer", **options), RNG.normal(size=(6, 5)), "kernel"


def convolution(rank, **options):
    kind = {1: layers.Conv1D, 2: layers.Conv2D, 3: layers.Conv3D}[rank]
    shape = (2, *(7, 6, 5)[:rank], 3)
    return kind(4, (3, 2, 2)[:rank], activation="tanh", name="layer", **options), RNG.normal(size=shape), "kernel"


def tokens():
    return RNG.integers(-3, 12, (4, 5))


LAYERS = {
    "dense": lambda: dense(),
    "dense of sequences": lambda: (layers.Dense(4, name="layer"), RNG.normal(size=(2, 3, 5)), "kernel"),
    "bias": lambda: (*dense()[:2], "bias"),
    "embedding": lambda: (layers.Embedding(12, 6, name="layer"), tokens(), "embeddings"),
    "conv1d": lambda: convolution(1),
    "conv1d causal": lambda: convolution(1, padding="causal", dilation_rate=2),
    "conv2d": lambda: convolution(2),
    "conv2d same": lambda: convolution(2, padding="same", strides=2),
    "conv2d dilated": lambda: convolution(2, padding="same", dilation_rate=2),
    "conv2d no bias": lambda: convolution(2, use_bias=False, strides=(2, 1)),
    "conv3d": lambda: convolution(3, padding="same"),
    "conv2d of groups": lambda: (layers.Conv2D(4, 3, groups=2, name="layer"), RNG.normal(size=(2, 5, 5, 4)), "kernel"),
    "depthwise": lambda: (layers.DepthwiseConv2D(3, name="layer"), RNG.normal(size=(2, 5, 5, 4)), "kernel"),
    "transposed": lambda: (layers.Conv2DTranspose(3, 3, name="layer"), RNG.normal(size=(2, 5, 5, 4)), "kernel"),
    "lstm": lambda: (layers.LSTM(4, name="layer"), RNG.normal(size=(2, 3, 5)), "lstm_cell/recurrent_kernel"),
    "gru": lambda: (layers.GRU(4, name="layer"), RNG.normal(size=(2, 3, 5)), "gru_cell/kernel"),
    "layer norm": lambda: (layers.LayerNormalization(name="layer"), RNG.normal(size=(6, 5)), "gamma"),
    "batch norm": lambda: (layers.BatchNormalization(name="layer"), RNG.normal(size=(6, 5)), "beta"),
    "einsum": lambda: (layers.EinsumDense("abc,cd->abd", (2, 4), name="layer"), RNG.normal(size=(3, 2, 5)), "kernel"),
    "user's": lambda: (Scaled(name="layer"), RNG.normal(size=(6, 5)), "scale"),
}
DTYPES = {"float32": 1e-6, "float64": 1e-12}


def built(case, dtype):
    layer, x, name = LAYERS[case]()
    config = layer.get_config() | {"dtype": dtype}
    layer = type(layer).from_config(config)
    x = tf.constant(x, tf.int32 if x.dtype.kind == "i" else dtype)
    inputs = keras.Input(x.shape[1:], dtype=x.dtype.name)
    model = keras_models.drawn(keras.Model(inputs, layer(inputs)))
    return model, x, f"layer/{name}"


def loss_of(model, x):
    y = model(x, training=True)
    ramp = tf.reshape(tf.range(tf.size(y), delta=1), tf.shape(y))
    return tf.reduce_mean((y - tf.cast(ramp, y.dtype) / 20) ** 2)


def variable_of(model, name):
    return next(variable for variable in model.variables if variable.path.endswith(name))


def chosen(shape, size):
    """Elements here and there, in no order, and a whole slice, apart."""
    flat = RNG.permutation(np.arange(np.prod(shape))[: -shape[-1]])[:size]
    return np.stack(np.unravel_index(flat, shape), -1)


@pytest.mark.parametrize("case", LAYERS)
def test_gradients_are_entries_of_the_dense_gradient(case):
    for dtype, tolerance in DTYPES.items():
        model, x, name = built(case, dtype)
        variable = variable_of(model, name)
        with tf.GradientTape() as tape:
            loss = loss_of(model, x)
        expected = tf.convert_to_tensor(tape.gradient(loss, variable)).numpy()
        last = (-1,) * (expected.ndim - 1)
        some = eg.at(name).coords(chosen(expected.shape, 5)) if expected.ndim > 1 else eg.at(name)[[2, 0]]
        places = [some, eg.at(name)[last]] if expected.ndim > 1 else [some]
        elements = eg.trainable(model, places)

        def gradients(model=model, x=x, elements=elements):
            with tf.GradientTape() as tape:
                loss = loss_of(model, x)
            return [loss, *tape.gradient(loss, elements.variables)]

        for run in (gradients, tf.function(gradients, autograph=False)):
            again, *found = run()
            np.testing.assert_allclose(again, loss, rtol=1e-5)
            for place, gradient in zip(elements, found, strict=True):
                wanted = expected.reshape(-1)[place.select(expected.shape).flat().reshape(-1)]
                assert np.abs(gradient - wanted).max() <= tolerance * max(1.0, np.abs(expected).max()), dtype


def optimizers():
    plain = {
        name: getattr(keras.optimizers, name)
        for name in dir(keras.optimizers)
        if name[0].isupper() and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
    }
    for name, kind in plain.items():
        yield name, lambda kind=kind: kind(0.01, weight_decay=0.1, clipnorm=0.5)
    momentum = keras.optimizers.SGD
    yield "momentum", lambda: momentum(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, clipvalue=0.1)
    yield "global", lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3)
    yield "average", lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)
    yield "accumulated", lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, gradient_accumulation_steps=3)
    yield "scaled", lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.01, weight_decay=0.1))


OPTIMIZERS = dict(optimizers())


def tagger(dtype=None, walk=True):
    """Tokens to scores, by layers of many kinds."""
    keras.utils.set_random_seed(0)
    x = keras.Input((4,), dtype="int32", name="tokens")
    y = layers.Embedding(20, 6, name="table", dtype=dtype)(x)
    full = "float32" if dtype and "bfloat16" in dtype else dtype  # some CPUs have no products in bfloat16
    y = layers.Conv1D(6, 3, padding="same", activation="relu", name="mix", dtype=full)(y)
    y = layers.LayerNormalization(name="norm", dtype=dtype)(y)
    y = layers.GRU(5, name="walk", dtype=dtype)(y) if walk else y[:, 0, :5]
    return keras.Model(x, layers.Dense(3, name="head", dtype=full)(y))


PLACES = [
    "table/embeddings[0, 5]",
    "table/embeddings[2]",
    "mix/kernel[1, 2]",
    "mix/bias[3]",
    "norm/gamma[::2]",
    "walk/gru_cell/kernel[3, 4]",
    "head/kernel[:, 1]",
]
MOVED = {"embeddings": 7, "mix/kernel": 6, "mix/bias": 1, "gamma": 3, "gru_cell/kernel": 1, "head/kernel": 5}
TOKENS = np.random.default_rng(1).integers(0, 5, (24, 4))
TARGETS = np.random.default_rng(2).normal(size=(24, 3)).astype(np.float32)


def state(model):
    return {variable.path: variable.numpy() for variable in model.weights}


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def moved(model, before):
    now = state(model)
    return {name: int((bits(now[name]) != bits(old)).any(-1).sum()) for name, old in before.items()}


def assert_only_places_moved(model, before, places=MOVED):
    counts = moved(model, before)
    for name, count in counts.items():
        allowed = next((most for end, most in places.items() if name.endswith(end)), 0)
        assert count == allowed if not allowed else 0 < count <= allowed, (name, count)


def test_nothing_else_moves_under_any_optimizer():
    model = tagger(walk=False)
    before = state(model)
    elements = eg.trainable(model, ["table/embeddings[2, 3:]", "mix/kernel[1, 2]", "head/kernel[:, 1]"])
    x, y = tf.constant(TOKENS), tf.constant(TARGETS)

    @tf.function(autograph=False)
    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        return tape.gradient(loss, elements.variables)

    for name, make in OPTIMIZERS.items():
        optimizer = make()
        optimizer.build(elements.variables)

        def step(count, optimizer=optimizer):
            optimizer.apply(gradients(), elements.variables)
            return count + 1

        @tf.function(autograph=False)
        def steps(step=step):
            tf.while_loop(lambda count: count < 21, step, [tf.constant(0)])

        steps()
        assert_only_places_moved(model, before, {"embeddings": 3, "mix/kernel": 6, "head/kernel": 5})
        for variable, place in zip(elements.variables, elements, strict=True):
            held = variable_of(model, place.name).numpy().reshape(-1)
            assert np.array_equal(
                variable.numpy(), held[place.select(variable_of(model, place.name).shape).flat().ravel()]
            )
        elements.undo()
        assert not any(moved(model, before).values()), name


@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"jit_compile": True}, {"jit_compile": False, "steps_per_execution": 3}],
    ids=lambda options: "+".join(options),
)
def test_fit_in_every_mode(options):
    walk = not options.get("jit_compile")  # which takes long to compile
    model = tagger(walk=walk)
    before = state(model)
    elements = eg.trainable(model, [place for place in PLACES if walk or "walk" not in place])
    assert {id(v) for v in model.trainable_variables} == {id(v) for v in elements.variables}
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), "mse", **options)
    losses = model.fit(TOKENS, TARGETS, batch_size=8, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]
    assert_only_places_moved(model, before)
    row = elements["table/embeddings[2]"].numpy()
    assert np.array_equal(row, variable_of(model, "embeddings").numpy()[2])
    plain = tagger(walk=walk)
    plain.set_weights(model.get_weights())
    plain.compile(loss="mse")
    np.testing.assert_allclose(
        plain.evaluate(TOKENS, TARGETS, verbose=0), model.evaluate(TOKENS, TARGETS, verbose=0), rtol=1e-5
    )


def test_training_is_that_of_the_whole_variable():
    """A place that is the whole variable trains as the variable itself would."""
    plain, model = tagger(), tagger()
    for layer in plain.layers:
        layer.trainable = layer.name in ("table", "head")
    eg.trainable(model, ["table/embeddings", "head/kernel", "head/bias"])
    for one in (plain, model):
        one.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")  # Adam would see sparse gradients of the one
        one.fit(TOKENS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for name, values in state(plain).items():
        np.testing.assert_allclose(state(model)[name], values, rtol=1e-4, atol=1e-5)


def test_weight_files_load_both_ways(tmp_path):
    model, plain = tagger(), tagger()
    elements = eg.trainable(model, PLACES)
    for variable in elements.variables:
        variable.assign_add(tf.ones_like(variable))
    model.save_weights(tmp_path / "trained.weights.h5")
    plain.load_weights(tmp_path / "trained.weights.h5")
    assert not any(moved(plain, state(model)).values())
    other = keras_models.drawn(tagger(), seed=5)
    other.save_weights(tmp_path / "other.weights.h5")
    model.load_weights(tmp_path / "other.weights.h5")
    assert not any(moved(model, state(other)).values())
    assert np.array_equal(elements["table/embeddings[2]"], variable_of(other, "embeddings").numpy()[2])
    elements["head/kernel[:, 1]"].assign(np.zeros(5))
    elements.undo()  # another model was loaded: what its elements were is what was loaded
    assert not any(moved(model, state(other)).values())


def test_a_checkpoint_of_the_same_training_keeps_the_originals(tmp_path):
    model = tagger()
    before = state(model)
    elements = eg.trainable(model, PLACES)
    elements["norm/gamma[::2]"].assign([5.0, 6.0, 7.0])
    model.save_weights(tmp_path / "trained.weights.h5")
    saved = state(model)
    elements["norm/gamma[::2]"].assign([0.0, 0.0, 0.0])
    model.load_weights(tmp_path / "trained.weights.h5")
    assert not any(moved(model, saved).values())
    assert elements["norm/gamma[::2]"].numpy().tolist() == [5.0, 6.0, 7.0]
    elements.undo()
    assert not any(moved(model, before).values())


def test_whole_models_are_saved_and_copied_as_plain_ones(tmp_path):
    model = tagger()
    elements = eg.trainable(model, PLACES)
    elements["head/kernel[:, 1]"].assign(np.ones(5))
    model.save(tmp_path / "model.keras")
    checkpoint = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    restored = tagger()
    tf.train.Checkpoint(model=restored).restore(checkpoint).expect_partial()
    for other in (keras.models.load_model(tmp_path / "model.keras"), copy.deepcopy(model), restored):
        assert [type(layer) for layer in other.layers] == [type(layer) for layer in tagger().layers]
        assert not any(moved(other, state(model)).values())
        assert len(other.trainable_variables) == len(tagger().trainable_variables)
    assert len(keras.models.clone_model(model).trainable_variables) == len(tagger().trainable_variables)


def test_values_written_by_hand_count():
    model = tagger()
    elements = eg.trainable(model, ["head/kernel[:, 1]", "head/bias[0]"])
    kernel = variable_of(model, "head/kernel")
    kernel.assign(np.full((5, 3), 2.0))
    assert elements["head/kernel[:, 1]"].numpy().tolist() == [2.0] * 5
    elements["head/kernel[:, 1]"].assign_sub([1.0, 0, 0, 0, 0])
    assert kernel.numpy()[0].tolist() == [2.0, 1.0, 2.0]
    model.set_weights([np.zeros(w.shape) for w in model.get_weights()])
    assert elements["head/bias[0]"].numpy().tolist() == [0.0]


def test_release_gives_the_plain_model_back():
    model = tagger()
    model.get_layer("mix").trainable = False
    plain = [(type(layer), layer.trainable) for layer in model.layers]
    flags = [variable.trainable for variable in model.weights]
    kinds = [(type(variable), type(variable._value)) for variable in model.weights]
    elements = eg.trainable(model, PLACES)
    assert not any(variable.trainable for variable in model.weights)
    assert isinstance(model.get_layer("head"), layers.Dense)
    assert "Dense" in repr(model.get_layer("head"))
    elements["head/kernel[:, 1]"].assign(np.ones(5))
    after = state(model)
    leaf = elements["head/kernel[:, 1]"]
    elements.release()
    assert [(type(layer), layer.trainable) for layer in model.layers] == plain
    assert [variable.trainable for variable in model.weights] == flags
    assert [(type(variable), type(variable._value)) for variable in model.weights] == kinds
    assert all("_elementgrad" not in vars(layer) for layer in model.layers)
    leaf.assign(np.zeros(5))
    assert not any(moved(model, after).values())
    model.compile("adam", "mse")
    model.fit(TOKENS, TARGETS, verbose=0)
    assert all(count for name, count in moved(model, after).items() if "mix" not in name)
    with pytest.raises(eg.PlaceError, match="do not train"):
        elements.variables  # noqa: B018
    with pytest.raises(eg.PatchError, match="was written over or taken back since; there is nothing to undo"):
        elements.undo()


@pytest.mark.parametrize("keep", [False, True])
def test_release_without_the_values_at_once_or_later(keep):
    model = tagger()
    before = state(model)
    elements = eg.trainable(model, PLACES)
    elements["head/kernel[:, 1]"].assign(np.ones(5))
    elements.release(keep=keep)
    assert any(moved(model, before).values()) is keep
    elements.undo()
    assert not any(moved(model, before).values())


def test_a_second_call_adds_places_and_others_train_beside():
    model = tagger()
    before = state(model)
    first = eg.trainable(model, "head/kernel[:, 1]")
    model.get_layer("head").trainable = True
    second = eg.trainable(model, ["head/kernel[0, 0]", "norm/gamma"])
    expected = {variable.path for variable in [*first.variables, *second.variables]} | {"head/bias"}
    assert {variable.path for variable in model.trainable_variables} == expected
    model.compile("adam", "mse")
    model.fit(TOKENS, TARGETS, verbose=0)
    assert_only_places_moved(model, before, {"head/kernel": 6, "head/bias": 3, "gamma": 6})
    first.release(keep=False)
    assert {variable.path for variable in model.trainable_variables} == {v.path for v in second.variables} | {
        "head/bias"
    }
    second.release()
    assert all(variable.trainable for variable in model.weights)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_its_values_in_float32(dtype):
    model = tagger(dtype, walk=False)
    before = state(model)
    elements = eg.trainable(model, [place for place in PLACES if "walk" not in place])
    assert {variable.dtype for variable in elements.variables} == {"float32"}
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    model.fit(TOKENS, TARGETS, verbose=0)
    kept = elements["table/embeddings[2]"].numpy()
    assert not np.array_equal(kept, before["table/embeddings"][2].astype(np.float32))
    assert np.array_equal(kept.astype(before["table/embeddings"].dtype), state(model)["table/embeddings"][2])
    elements.undo()
    assert not any(moved(model, before).values())


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    model = tagger(policy, walk=False)
    before = state(model)
    eg.trainable(model, [place for place in PLACES if "walk" not in place])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.01, weight_decay=0.1), initial_scale=8.0)
    model.compile(optimizer, "mse")
    model.fit(TOKENS, TARGETS, batch_size=8, verbose=0)
    assert_only_places_moved(model, before)


@pytest.mark.parametrize("name", keras_models.MODELS)
def test_models_of_every_form(name):
    """Functional, Sequential and subclassed, with nested and shared layers."""
    model = keras_models.MODELS[name]()
    x = keras_models.input_of(model)
    names = [name for name, variable in zip(_paths(model), model.weights, strict=True) if variable.trainable]
    places = [eg.at(name)[(0,) * len(variable_at(model, name).shape)] for name in names]
    with tf.GradientTape() as tape:
        loss = loss_of(model, x)
    variables = [variable_at(model, name) for name in names]
    wanted = [gradient.numpy().reshape(-1)[:1] for gradient in tape.gradient(loss, variables)]
    elements = eg.trainable(model, places)
    with tf.GradientTape() as tape:
        loss = loss_of(model, x)
    found = tape.gradient(loss, elements.variables)
    largest = max(np.abs(gradient).max() for gradient in wanted)
    for name, gradient, dense in zip(names, found, wanted, strict=True):
        np.testing.assert_allclose(gradient, dense, atol=2e-5 * largest, err_msg=name)
    before = model.get_weights()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.apply(found, elements.variables)
    for old, new in zip(before, model.get_weights(), strict=True):
        assert not (bits(old) != bits(new)).any(-1).reshape(-1)[1:].any()


def _paths(model):
    by_id = {id(tensor): name for name, kind, tensor in _held(model)}
    return [by_id[id(variable._value)] for variable in model.weights]


def variable_at(model, name):
    found = {other: tensor for other, _, tensor in _held(model)}[name]
    return next(variable for variable in model.weights if variable._value is found)


def _held(model):
    from elementgrad.backends.tensorflow.model import KerasModel

    return list(KerasModel(model).held())
