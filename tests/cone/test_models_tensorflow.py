"""Cones of whole Keras models at corners, borders and centres, against the plain way, in float64; and how they read."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import elementgrad as eg
from elementgrad._read.cone import ConeLinearization
from tests.support.keras_models import computing_in
from tests.support.positions import typical_positions

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
layers = keras.layers
Shape = tuple[int, ...]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        yield


def sequential(shape: Shape, *parts: Any) -> Any:
    return keras.Sequential([layers.Input(shape[1:]), *parts])


def conv(filters: int, size: int = 3, **options: Any) -> Any:
    return layers.Conv2D(filters, size, **{"padding": "same", "activation": "elu", **options})


def residual(shape: Shape) -> Any:
    x = layers.Input(shape[1:])
    h = layers.MaxPool2D(3, 2, padding="same")(conv(6, 7, strides=2)(x))
    for stride in (1, 2):
        skip = conv(6, 1, strides=stride)(h) if stride > 1 else h
        h = layers.BatchNormalization()(conv(6, strides=stride, use_bias=False)(h))
        h = layers.Activation("elu")(layers.Add()([conv(6)(h), skip]))
    return keras.Model(x, h)


def u_net(shape: Shape, up: Any) -> Any:
    x = layers.Input(shape[1:])
    skip = conv(4, activation="gelu")(x)
    return keras.Model(
        x, conv(2)(layers.Concatenate()([skip, up(conv(5, activation="silu")(layers.MaxPool2D(2)(skip)))]))
    )


def squeeze_and_excite(shape: Shape) -> Any:
    x = layers.Input(shape[1:])
    h = layers.GroupNormalization(2)(conv(4)(x))
    gate = layers.Dense(4, activation="sigmoid")(layers.GlobalAveragePooling2D()(h))
    return keras.Model(x, layers.Multiply()([h, layers.Reshape((1, 1, 4))(gate)]))


def transformer(shape: Shape) -> Any:
    x = layers.Input(shape[1:])
    h = layers.LayerNormalization()(x)
    h = layers.Add()([x, layers.MultiHeadAttention(2, 4)(h, h, use_causal_mask=True)])
    return keras.Model(x, layers.Add()([h, layers.Dense(8, activation="gelu")(layers.LayerNormalization()(h))]))


@tf.custom_gradient
def tripled(x):
    """A rule that is no derivative."""
    return x * 2, lambda gradient: gradient * 3


@tf.function
def compiled(x):
    return tf.nn.elu(x) * x


def stencil(x: Any) -> Any:
    for _ in range(6):
        p = tf.pad(x, [(1, 1), (1, 1)], "SYMMETRIC")
        x = x + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4.0 * x)
    return x


MODELS: dict[str, tuple[Callable[[Shape], Any], Shape]] = {
    "six convolutions": (lambda s: sequential(s, *[conv(3) for _ in range(6)]), (1, 18, 18, 2)),
    "vgg": (lambda s: sequential(s, conv(4), conv(4), layers.MaxPool2D(2), conv(4)), (2, 14, 14, 3)),
    "resnet": (residual, (1, 41, 41, 2)),
    "u-net, nearest": (lambda s: u_net(s, layers.UpSampling2D(2)), (1, 16, 16, 2)),
    "u-net, transposed": (lambda s: u_net(s, layers.Conv2DTranspose(4, 3, 2, padding="same")), (1, 16, 16, 2)),
    "mobilenet": (
        lambda s: sequential(
            s,
            conv(4, strides=2),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.ReLU(6),
            layers.SeparableConv2D(5, 3),
        ),
        (1, 18, 18, 3),
    ),
    "squeeze and excite": (squeeze_and_excite, (1, 9, 9, 2)),
    "lstm": (lambda s: sequential(s, layers.LSTM(4, return_sequences=True)), (1, 8, 3)),
    "transformer": (transformer, (2, 9, 8)),
    "dilated, average": (
        lambda s: sequential(
            s, conv(4, dilation_rate=2), layers.AveragePooling2D(3, 2, padding="same"), layers.Conv2DTranspose(3, 4, 3)
        ),
        (1, 14, 14, 2),
    ),
    "causal, dilated": (
        lambda s: sequential(
            s, *[layers.Conv1D(3, 2, padding="causal", dilation_rate=2**i, activation="tanh") for i in range(4)]
        ),
        (1, 60, 3),
    ),
    "three dimensions": (
        lambda s: sequential(
            s,
            layers.Conv3D(3, 3, padding="same", activation="elu"),
            layers.Conv3D(3, 2, strides=2, activation="elu"),
            layers.Conv3DTranspose(2, 2, 2),
        ),
        (1, 6, 6, 6, 2),
    ),
    "stencil": (lambda s: stencil, (20, 20)),
    "a rule of its own": (lambda s: lambda x: tf.nn.avg_pool1d(tripled(x), 3, 1, "SAME"), (1, 12, 2)),
    "a compiled function": (lambda s: lambda x: compiled(x)[:, 1:] * compiled(x)[:, :-1], (4, 6)),
    "without gradients": (lambda s: lambda x: x * tf.stop_gradient(x * 2.0), (4, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_by_cones_are_those_of_the_plain_way(name):
    make, shape = MODELS[name]
    model, x = make(shape), tf.constant(np.random.default_rng(1).normal(size=shape))
    live = 0
    J = eg.jacobian(model, x, cone=True)
    for place in typical_positions(tuple(model(x).shape)):
        plain = eg.grad(model, x, of=eg.at("output")[place], cone=False).numpy()
        largest = np.abs(plain).max()
        live += largest > 0
        np.testing.assert_allclose(J[place, :].numpy(), plain, rtol=1e-10, atol=1e-12 * largest)
        np.testing.assert_allclose(
            eg.value(model, x, of=eg.at("output")[place], cone=True).numpy(), model(x).numpy()[place], rtol=1e-12
        )
    assert live >= 2


def image(size: int = 20) -> Any:
    return tf.constant(np.random.default_rng(1).normal(size=(1, size, size, 2)))


def convolutions(size: int = 20, filters: int = 3) -> Any:
    return sequential((1, size, size, 2), *[conv(filters, name=f"c{i}") for i in range(3)])


@pytest.mark.parametrize(
    ("of", "wrt"),
    [
        ("output[0, 4, 5, 1]", None),
        ("output[0, 4:6, [0, 7, 7], 1]", None),
        ("c1[0, 4, 5, 1]", "c0[0, 3:6]"),
        ("output[0, 4, 5, 1]", "c1/kernel[1, :, 0]"),
        ("output[0, 4, 5, 1]", ["c0/bias", "c1"]),
    ],
)
def test_reads_are_those_of_the_plain_way(of, wrt):
    model, x = convolutions(), image()
    read = eg.jacobian if ":" in str(of) else eg.grad
    plain, by_cone = (read(model, x, of=of, wrt=wrt, cone=cone) for cone in (False, True))
    if read is eg.jacobian:
        plain, by_cone = plain[:, :], by_cone[:, :]
    for one, other in zip(tf.nest.flatten(plain), tf.nest.flatten(by_cone), strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=1e-11, atol=1e-15)


def test_plans_and_fields():
    model, x = convolutions(40), image(40)
    assert "cone       7 x 7 of 40 x 40 of" in str(eg.jacobian(model, x, cone=True).plan((0, 20, 20, 1), ...))
    field = eg.field(model, x, of="output[0, 10, 0, 1]", wrt="inputs")
    assert field.select((1, 40, 40, 2)).size == 7 * 4 * 2
    reached = eg.field(model, x, of="c1", wrt="c0[0, 10, 0, 1]")
    assert str(reached) == "c1[0:1, 9:12, 0:2, 0:3] (activation)"


def test_it_is_automatic_where_it_pays_and_small_functions_run_once(monkeypatch):
    model, x, reads, runs = convolutions(256, 16), image(256), [], []
    read = ConeLinearization.read_block
    monkeypatch.setattr(ConeLinearization, "read_block", lambda self, *args: reads.append(1) or read(self, *args))
    by_cone = eg.grad(model, x, of="output[0, 100, 90, 1]")
    assert reads == [1]
    plain = eg.grad(model, x, of="output[0, 100, 90, 1]", cone=False)
    np.testing.assert_allclose(by_cone.numpy(), plain.numpy(), rtol=1e-10, atol=1e-15)
    eg.grad(lambda x: runs.append(1) or x**2, tf.ones(50), of="output[3]")
    assert (reads, runs) == ([1], [1])


def test_dropout_has_the_same_mask_and_no_state_changes():
    model = sequential((1, 12, 12, 2), conv(3), layers.Dropout(0.5), conv(3))
    f, x = lambda x: model(x, training=True), image(12)
    before = [variable.numpy().copy() for variable in model.variables]
    seeds = [layer.seed_generator.state.numpy().copy() for layer in model.layers if hasattr(layer, "seed_generator")]
    plain, by_cone = (eg.grad(f, x, of="output[0, 5, 5, 1]", cone=cone) for cone in (False, True))
    np.testing.assert_allclose(by_cone.numpy(), plain.numpy(), rtol=1e-10, atol=1e-15)
    after = [layer.seed_generator.state.numpy() for layer in model.layers if hasattr(layer, "seed_generator")]
    assert all(map(np.array_equal, seeds, after))
    assert all(map(np.array_equal, before, [variable.numpy() for variable in model.variables]))


COUNTER = tf.Variable(tf.ones([], tf.float64))


def _reads_what_it_wrote(x: Any) -> Any:
    COUNTER.assign_add(1.0)
    return x * COUNTER


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda x: x * x.numpy(), "traced"),
        (lambda x: x * tf.random.normal(x.shape, dtype=x.dtype), "random numbers"),
        (_reads_what_it_wrote, "read after it was written"),
        (lambda x: tf.py_function(lambda y: y * 2, [x], x.dtype), "shape|state"),
        (lambda x: tf.boolean_mask(x, x > 0), "depends on values"),
    ],
    ids=["numpy", "random", "written", "python", "shape"],
)
def test_what_has_no_cone_says_why_and_goes_the_plain_way_by_itself(f, text):
    x = tf.constant(np.abs(np.random.default_rng(0).normal(size=(400, 300))))
    with pytest.raises(eg.FrameworkError, match=text):
        eg.jacobian(f, x, cone=True)
    assert COUNTER.numpy() == 1
    if "boolean" not in text:
        eg.grad(f, x, of="output[0]" if text == "depends on values" else "output[0, 0]")
    assert COUNTER.numpy() == 1


def test_an_unconnected_tensor_is_an_error():
    with pytest.raises(eg.UnconnectedError):
        eg.grad(lambda x: tf.floor(x) * 2.0, tf.ones(3), of="output[0]", cone=True)


def test_changed_variables_do_not_change_what_was_recorded():
    weight = tf.Variable(tf.ones([], tf.float64) * 3)
    x = tf.constant([1.0, 2.0], tf.float64)
    J = eg.jacobian(lambda x: weight * x, x, cone=True)
    weight.assign(5.0)
    assert J[0, 0].numpy() == 3


def test_windows_that_are_infinite_all_over_have_their_maximum_inside():
    numbers = np.random.default_rng(0).normal(size=(1, 6, 7, 1))
    numbers[0, :2, :2] = -np.inf
    x = tf.constant(numbers)
    f = lambda x: tf.nn.max_pool2d(x, 3, 1, "SAME")  # noqa: E731
    for place in ((0, 0, 0, 0), (0, 5, 6, 0)):
        of = eg.at("output")[place]
        assert eg.value(f, x, of=of, cone=True) == f(x)[place]
        np.testing.assert_array_equal(eg.grad(f, x, of=of, cone=True), eg.grad(f, x, of=of, cone=False))


def test_layers_keep_nothing_of_a_recording():
    class Caching(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.masks, self.seen = layers.Conv2D(3, 3), {}, []

        def build(self, shape: Shape) -> None:
            self.conv.build(shape)

        def call(self, x: Any) -> Any:
            y = self.last = self.conv(x)
            self.seen.append(y)
            if "mask" not in self.masks:
                self.masks["mask"] = tf.cast(tf.range(3), y.dtype)
            return y * self.masks["mask"]

    model, x = Caching(), tf.ones((1, 9, 9, 3), tf.float64)
    model.build(x.shape)
    by_cone = eg.grad(model, x, of="output[0, 2, 2, 1]", cone=True)
    assert (not hasattr(model, "last"), list(model.seen), dict(model.masks)) == (True, [], {})
    model(x)
    plain = eg.grad(model, x, of="output[0, 2, 2, 1]", cone=False)
    np.testing.assert_allclose(by_cone, plain, rtol=1e-12)
    assert all(isinstance(y.numpy(), np.ndarray) for y in model.seen)


@pytest.mark.parametrize("kind", [tuple, list])
def test_models_get_the_variables_of_layers_in_a_tuple_or_list_by_a_read(kind: Any):
    class Stacked(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.parts = kind([layers.Conv2D(3, 3), layers.Conv2D(2, 3)])

        def call(self, x: Any) -> Any:
            for layer in self.parts:
                x = layer(x)
            return x

    model, x = Stacked(), image(9)
    by_cone, plain = (eg.grad(model, x, of="output[0, 2, 2, 1]", cone=cone) for cone in (True, False))
    np.testing.assert_allclose(by_cone, plain, rtol=1e-12)
    other = Stacked()
    large = eg.grad(other, image(200), of="output[0, 2, 2, 1]")
    np.testing.assert_allclose(large, eg.grad(other, image(200), of="output[0, 2, 2, 1]", cone=False), rtol=1e-12)
    assert Stacked()(x).shape == (1, 5, 5, 2)  # Keras can build the next model


def test_maps_over_rows_are_followed():
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 6)))
    f = lambda x: tf.map_fn(lambda row: tf.cumsum(row) * row, x)  # noqa: E731
    by_cone, plain = (eg.grad(f, x, of="output[1, 2]", cone=cone) for cone in (True, False))
    np.testing.assert_allclose(by_cone, plain, rtol=1e-12)


def test_loops_and_branches_may_use_tensors_around_the_function():
    numbers = np.random.default_rng(0)
    x, weight = tf.constant(numbers.normal(size=(3, 4))), tf.constant(numbers.normal(size=(4, 4)))

    def f(x: Any) -> Any:
        _, x = tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, tf.tanh(x @ weight)), (0, x * 2))
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x @ weight, lambda: weight[0] * x)

    by_cone, plain = (eg.grad(f, x, of="output[1, 2]", cone=cone) for cone in (True, False))
    np.testing.assert_allclose(by_cone, plain, rtol=1e-12)


def test_gradients_of_their_own_inside_a_loop_have_no_cone():
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 6)))
    f = lambda x: tf.nn.silu(x) * 3 + tf.scan(lambda a, b: tf.nn.silu(a) + b, x)  # noqa: E731
    with pytest.raises(eg.FrameworkError, match="inside a loop or a branch"):
        eg.grad(f, x, of="output[1, 2]", cone=True)


def test_a_variable_of_a_rule_of_its_own_must_not_change_between_reads():
    scale, weight = tf.Variable(2.0, dtype=tf.float64), tf.Variable(3.0, dtype=tf.float64)

    @tf.custom_gradient
    def scaled(x):
        return x * scale, lambda gradient, variables=None: (gradient * scale, [tf.reduce_sum(gradient)])

    J = eg.jacobian(lambda x: scaled(x * weight), tf.ones(3, tf.float64), cone=True)
    weight.assign(5.0)
    assert J[1, 1] == 6
    scale.assign(9.0)
    with pytest.raises(eg.FrameworkError, match="has changed since the function was recorded"):
        J[1, 1]
