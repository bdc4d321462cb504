"""What names cost: neurons in the middle of a language model, and tags that nobody asks for."""

from collections.abc import Iterator
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row
from benchmarks.jacobians import agree, values

LAYERS, MIDDLE, NEURONS, NEURONS_BOUND = 12, 6, 50, 1.1
STEPS, TAG_BOUND = 200, 1.05


def torch_rows() -> Iterator[Row]:
    yield from torch_neurons()
    yield from torch_tags()


def torch_neurons() -> Iterator[Row]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=LAYERS, n_embd=192, n_head=6, vocab_size=500, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.arange(16)[None]
    of, wrt = f"transformer.h.{MIDDLE}", "transformer.wte"

    def ours() -> Any:
        return eg.grad(model, tokens, of=f"{of}[0, -1, :{NEURONS}]", wrt=wrt)

    def by_hand() -> Any:
        kept: dict[str, Any] = {}
        hooks = [
            model.get_submodule(name).register_forward_hook(lambda _, __, y, name=name: kept.update({name: y}))
            for name in (of, wrt)
        ]
        try:
            model(tokens)
        finally:
            for hook in hooks:
                hook.remove()
        seeds = torch.eye(NEURONS)
        return torch.autograd.grad(kept[of][0, -1, :NEURONS], kept[wrt], seeds, is_grads_batched=True)[0]

    name = f"torch {NEURONS} neurons of block {MIDDLE} of a GPT-2 of {LAYERS}"
    yield agree(Row(name, ours, by_hand, "hooks and batched autograd.grad", NEURONS_BOUND))


def torch_tags() -> Iterator[Row]:
    import torch

    weight = torch.from_numpy(values(64, 64))
    x = torch.from_numpy(values(64, 64))

    def plain() -> Any:
        y = x
        for _ in range(STEPS):
            y = torch.tanh(weight @ y)
        return y

    def tagged() -> Any:
        y = x
        for _ in range(STEPS):
            y = eg.tag(torch.tanh(weight @ y), "y")
        return y

    yield agree(Row(f"torch {STEPS} tags that nobody asks for", tagged, plain, "without tags", TAG_BOUND))


def jax_rows() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    weight, x = jnp.asarray(values(64, 64)), jnp.asarray(values(64, 64))

    def plain(y: Any) -> Any:
        for _ in range(20):
            y = jnp.tanh(weight @ y)
        return y

    def tagged(y: Any) -> Any:
        for _ in range(20):
            y = eg.tag(jnp.tanh(weight @ y), "y")
        return y

    compiled, without = jax.jit(tagged), jax.jit(plain)
    yield agree(
        Row(
            "jax 20 tags in compiled code",
            lambda: np.asarray(compiled(x)),
            lambda: np.asarray(without(x)),
            "without tags",
            TAG_BOUND,
        )
    )


SUITES = {"names-torch": torch_rows, "names-jax": jax_rows}
