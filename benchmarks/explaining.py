"""What it costs to explain a gradient of a transformer, against one forward and backward of it."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row
from benchmarks.training import allocated

TEXTS, TOKENS, VOCABULARY = 2, 64, 50_257
MEMORY_BOUND = 1.7
BOUNDS = {
    "nothing wrong": 2.5,
    "a row not used": 4.0,
    "a cut path": 1.5,
    "an overflow": 2.5,
    "a dead rectifier": 2.5,
    "a root of zero": 2.5,
    "a write through .data": 8.0,
    "four places": 5.0,
}
"""The largest ratio for each fault, in every framework."""
CAUSES = {
    "a row not used": "row-not-used",
    "a cut path": "detached",
    "an overflow": "overflow",
    "a dead rectifier": "dead-relu",
    "a root of zero": "singular",
    "a write through .data": "modified-through-data",
}
FAULTS: dict[str, Callable[[Any], Any]] = {
    "a cut path": lambda x: x.detach(),
    "an overflow": lambda x: (x.half() * 1e9).float(),
    "a dead rectifier": lambda x: (x - 1e4).relu(),
    "a root of zero": lambda x: x + (x * 0).sqrt(),
    "a write through .data": lambda x: x.data.mul_(3.0) * 0 + x,
}
"""What happens to the states after a block of PyTorch."""
LAYERS, WIDTH, HEADS, WORDS, POSITIONS = 6, 384, 6, 8_000, 256
"""The transformers of Keras and JAX."""


def rows_of(
    framework: str, explain: Callable[[str, Any], Any], own: Callable[[], object], positions: str, others: list[str]
) -> Iterator[Row]:
    """Explain the table of positions, `positions`, under each fault, and together with `others`."""
    names = [name for name in BOUNDS if framework == "torch" or name not in ("an overflow", "a write through .data")]
    for name in names:
        used = f"{positions}[0, 0]"
        wrt: Any = f"{positions}[200, 0]" if name == "a row not used" else used
        wrt = [used, f"{positions}[5, 3]", *others] if name == "four places" else wrt

        def ours(name: str = name, wrt: Any = wrt) -> Any:
            return explain(name, wrt)

        found = ours()
        causes = [each.cause for each in found] if name == "four places" else found.cause
        if causes != ([None] * 4 if name == "four places" else CAUSES.get(name)):
            raise AssertionError(str(found))
        title = f"{framework} explain, {name}"
        yield Row(title, ours, own, "forward and backward", BOUNDS[name], repeats=5)
        if framework == "torch":
            most = MEMORY_BOUND * (allocated(own) or 0.0)
            yield Row(f"{title}, memory", ours, own, "its memory", most_mb=most, memory=allocated, repeats=1)


def torch_rows() -> Iterator[Row]:
    """GPT-2 small with one fault each."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_positions=1024)).eval()
    tokens = torch.randint(VOCABULARY, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0))

    def own() -> None:
        model(tokens).logits[0, -1, 2].backward()
        model.zero_grad()

    def explain(name: str, wrt: Any) -> Any:
        fault = FAULTS.get(name)
        block = model.transformer.h[7].mlp if name == "an overflow" else model.transformer.h[3]
        handle = block.register_forward_hook(lambda _, __, out: fault(out)) if fault is not None else None
        try:
            return eg.explain(model, tokens, of="output.logits[0, -1, 2]", wrt=wrt)
        finally:
            if handle is not None:
                handle.remove()

    own()
    others = ["transformer.h.3.mlp.c_fc.weight[0, 0]", "transformer.h.11.ln_2.bias[1]"]
    yield from rows_of("torch", explain, own, "transformer.wpe.weight", others)


def keras_rows() -> Iterator[Row]:
    """A transformer of six layers, in eager mode."""
    import keras
    import tensorflow as tf

    faults: dict[str, Callable[[Any], Any]] = {
        "a cut path": tf.stop_gradient,
        "a dead rectifier": lambda x: tf.nn.relu(x - 1e4),
        "a root of zero": lambda x: x + tf.sqrt(x * 0),
    }

    class Block(keras.layers.Layer):
        def __init__(self, name: str):
            super().__init__(name=name)
            self.first, self.second = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
            self.attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
            self.up = keras.layers.Dense(4 * WIDTH, activation="gelu", name="up")
            self.down = keras.layers.Dense(WIDTH, name="down")
            self.fault: Callable[[Any], Any] | None = None

        def call(self, x: Any) -> Any:
            y = self.first(x)
            x = x + self.attention(y, y, use_causal_mask=True)
            x = x + self.down(self.up(self.second(x)))
            return x if self.fault is None else self.fault(x)

    class Transformer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.words = keras.layers.Embedding(WORDS, WIDTH, name="words")
            self.positions = keras.layers.Embedding(POSITIONS, WIDTH, name="positions")
            self.blocks = [Block(f"block{number}") for number in range(LAYERS)]
            self.head = keras.layers.Dense(WORDS, name="head")

        def call(self, ids: Any) -> Any:
            x = self.words(ids) + self.positions(tf.range(TOKENS))
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    keras.utils.set_random_seed(0)
    model = Transformer()
    ids = tf.constant(np.random.default_rng(0).integers(0, WORDS, (TEXTS, TOKENS)))

    def own() -> Any:
        with tf.GradientTape() as tape:
            value = model(ids)[0, -1, 2]
        return tape.gradient(value, model.trainable_variables)

    def explain(name: str, wrt: Any) -> Any:
        model.blocks[3].fault = faults.get(name)
        try:
            return eg.explain(model, ids, of="output[0, -1, 2]", wrt=wrt)
        finally:
            model.blocks[3].fault = None

    own()
    others = ["block3/up/kernel[0, 0]", "block5/down/kernel[1, 1]"]
    yield from rows_of("tensorflow", explain, own, "positions/embeddings", others)


def jax_rows() -> Iterator[Row]:
    """A transformer of six layers, without `jax.jit`."""
    import jax
    import jax.numpy as jnp

    faults: dict[str, Callable[[Any], Any]] = {
        "a cut path": jax.lax.stop_gradient,
        "a dead rectifier": lambda x: jax.nn.relu(x - 1e4),
        "a root of zero": lambda x: x + jnp.sqrt(x * 0),
    }
    random = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return jnp.asarray(0.02 * random.normal(size=shape), "float32")

    params = {"words": draw(WORDS, WIDTH), "positions": draw(POSITIONS, WIDTH), "head": draw(WIDTH, WORDS)}
    for number in range(LAYERS):
        sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        params |= {f"{name}{number}": draw(*shape) for name, shape in sizes.items()}
    ids, mask = jnp.asarray(random.integers(0, WORDS, (TEXTS, TOKENS))), jnp.tril(jnp.ones((TOKENS, TOKENS), bool))

    def norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def value(params: Any, fault: Callable[[Any], Any] | None = None) -> Any:
        x = params["words"][ids] + jnp.take(params["positions"], jnp.arange(TOKENS), axis=0)
        for number in range(LAYERS):
            parts = jnp.split(norm(x) @ params[f"qkv{number}"], 3, -1)
            q, k, v = [part.reshape(TEXTS, TOKENS, HEADS, -1).transpose(0, 2, 1, 3) for part in parts]
            scores = jnp.where(mask, q @ k.transpose(0, 1, 3, 2) / (WIDTH // HEADS) ** 0.5, -1e9)
            mixed = (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(TEXTS, TOKENS, WIDTH)
            x = x + mixed @ params[f"out{number}"]
            x = x + jax.nn.gelu(norm(x) @ params[f"up{number}"]) @ params[f"down{number}"]
            x = fault(x) if fault is not None and number == 3 else x
        return (x @ params["head"])[0, -1, 2]

    def own() -> Any:
        return jax.block_until_ready(jax.grad(value)(params))

    def explain(name: str, wrt: Any) -> Any:
        fault = faults.get(name)
        return eg.explain(lambda params: value(params, fault), params, wrt=wrt)

    own()
    yield from rows_of("jax", explain, own, "params.positions", ["params.up3[0, 0]", "params.down5[1, 1]"])


SUITES = {"explaining": torch_rows, "explaining-keras": keras_rows, "explaining-jax": jax_rows}
