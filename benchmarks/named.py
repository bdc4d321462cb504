"""Cost follows what is named: an early layer, one element of a parameter, a block, a small read, a report."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row
from benchmarks.jacobians import agree, values

EARLY_BOUND, DEEP = 1.3, 20
TABLE, TABLE_BOUND, WEIGHT_BOUND = (30_522, 384), 0.8, 1.2
SMALL_BOUND, WRITE_BOUND, BLOCK_BOUND = 1.7, 2.0, 0.25
REPORT_BOUND, DENSE_BOUND = 1.5, 1.0


def torch_rows() -> Iterator[Row]:
    yield torch_early_layer()
    yield from torch_parameters()
    yield torch_report()


def torch_early_layer() -> Row:
    import torch

    torch.manual_seed(0)
    convolutions = [torch.nn.Conv2d(3 if not i else 16, 16, 3, padding=1) for i in range(DEEP + 1)]
    model, x = torch.nn.Sequential(*convolutions), torch.from_numpy(values(1, 3, 224, 224))
    cut = model[:1]

    def ours() -> Any:
        return eg.grad(model, x, of="0[0, 3, 100, 100]", cone=False)

    def by_hand() -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(cut(leaf)[0, 3, 100, 100], leaf)[0]

    ours()  # a complete run shows that the layer is called once
    return agree(Row(f"torch one convolution before {DEEP}", ours, by_hand, "a model cut by hand", EARLY_BOUND))


def torch_parameters() -> Iterator[Row]:
    import torch

    torch.manual_seed(0)
    table = torch.nn.Embedding(*TABLE)
    model = torch.nn.Sequential(table, torch.nn.Linear(TABLE[1], 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    tokens = torch.arange(512).reshape(4, 128) * 7
    layers = [torch.nn.Linear(512, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 512)]
    dense, x = torch.nn.Sequential(*layers), torch.from_numpy(values(64, 512))

    def entry() -> Any:
        return eg.grad(model, tokens, of="output[0, 1, 1]", wrt="0.weight[7, 3]")

    def whole_table() -> Any:
        return torch.autograd.grad(model(tokens)[0, 1, 1], table.weight)[0][7, 3]

    def weight() -> Any:
        return eg.grad(dense, x, of="output[0, 1]", wrt="0.weight[7, 3]")

    def whole_weight() -> Any:
        return torch.autograd.grad(dense(x)[0, 1], dense.get_parameter("0.weight"))[0][7, 3]

    one = x[:1]

    def weight_of_one() -> Any:
        return eg.grad(dense, one, of="output[0, 1]", wrt="0.weight[7, 3]")

    def whole_weight_of_one() -> Any:
        return torch.autograd.grad(dense(one)[0, 1], dense.get_parameter("0.weight"))[0][7, 3]

    rows, columns = TABLE
    name = f"torch one entry of a {rows} x {columns} embedding"
    yield agree(Row(name, entry, whole_table, "autograd.grad of the table", TABLE_BOUND))
    yield agree(Row("torch one weight of a dense layer", weight, whole_weight, "autograd.grad", WEIGHT_BOUND))
    name = "torch one weight of a dense layer, batch 1"
    yield agree(Row(name, weight_of_one, whole_weight_of_one, "autograd.grad", WEIGHT_BOUND))


def torch_report() -> Row:
    import torch

    torch.manual_seed(0)
    blocks = [torch.nn.TransformerEncoderLayer(512, 8, batch_first=True) for _ in range(6)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(512, 8)).eval()
    x, folder = torch.from_numpy(values(8, 128, 512)), Path(mkdtemp())

    def ours() -> Any:
        places = [f"output[0, 0, {i}]" for i in range(4)]
        return eg.report(folder / "four.html", model, x, of=places, wrt="input[0, 0, :4]")

    def one() -> Any:
        return eg.report(folder / "one.html", model, x, of="output[0, 0, 0]", wrt="input[0, 0, :4]")

    return Row("torch report of four places", ours, one, "of one place", REPORT_BOUND, repeats=4)


def tensorflow_rows() -> Iterator[Row]:
    import tensorflow as tf

    x = tf.constant(values(8))

    def f(x: Any) -> Any:
        return tf.reduce_sum(tf.sin(x) * x)

    def tape() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    yield agree(Row("tensorflow small eager grad", lambda: eg.grad(f, x), tape, "tf.GradientTape", SMALL_BOUND))

    def native() -> Any:
        return tf.tensor_scatter_nd_update(x, [[2]], [5.0])

    yield agree(Row("tensorflow set", lambda: eg.at(x)[2].set(5.0), native, "tensor_scatter_nd_update", WRITE_BOUND))

    weight, vector = tf.constant(values(256, 256) / 16), tf.constant(values(256))

    def g(x: Any) -> Any:
        return tf.tanh(tf.linalg.matvec(weight, x))

    np.testing.assert_allclose(eg.jacobian(g, vector)[:10, :10], eg.jacobian(g, vector).dense()[:10, :10], atol=1e-5)
    yield Row(
        "tensorflow a 10 x 10 block of a 256 x 256 Jacobian",
        lambda: eg.jacobian(g, vector)[:10, :10],
        lambda: eg.jacobian(g, vector).dense(),
        "the whole",
        BLOCK_BOUND,
    )


def jax_rows() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    x = jnp.asarray(values(8))

    def f(x: Any) -> Any:
        return jnp.sum(jnp.sin(x) * x)

    yield agree(Row("jax small eager grad", lambda: eg.grad(f, x), lambda: jax.grad(f)(x), "jax.grad", SMALL_BOUND))

    weight, vector = jnp.asarray(values(256, 256) / 16), jnp.asarray(values(256))

    def g(x: Any) -> Any:
        return jnp.tanh(weight @ x)

    whole = jax.jit(jax.jacrev(g))

    def twice_and_traced() -> Any:
        jax.make_jaxpr(lambda x: g(x))(vector)  # a new function, since JAX remembers traces of one that it knows
        jax.block_until_ready(whole(vector))
        return jax.block_until_ready(whole(vector))

    yield agree(
        Row(
            "jax a 256 x 256 Jacobian, made anew",
            lambda: jax.block_until_ready(eg.jacobian(g, vector).dense()),
            twice_and_traced,
            "two of jitted jacrev and a trace",
            DENSE_BOUND,
        )
    )


def keras_rows() -> Iterator[Row]:
    import keras
    import tensorflow as tf

    for name, make, layer in (
        ("EfficientNetB0", keras.applications.EfficientNetB0, "stem_conv"),
        ("MobileNetV2", keras.applications.MobileNetV2, "Conv1"),
    ):
        keras.utils.set_random_seed(0)
        model = make(weights=None, input_shape=(224, 224, 3))
        cut = keras.Model(model.inputs, model.get_layer(layer).output)
        x = tf.constant(values(1, 224, 224, 3))

        def ours(model: Any = model, x: Any = x, layer: str = layer) -> Any:
            return eg.grad(model, x, of=f"{layer}[0, 50, 50, 3]")

        def by_hand(cut: Any = cut, x: Any = x) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = cut(x)[0, 50, 50, 3]
            return tape.gradient(y, x)

        ours()
        yield agree(Row(f"keras {layer} of {name}", ours, by_hand, "a model cut by hand", EARLY_BOUND, repeats=8))


SUITES = {
    "named": torch_rows,
    "named-tensorflow": tensorflow_rows,
    "named-jax": jax_rows,
    "named-keras": keras_rows,
}
