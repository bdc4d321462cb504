"""What it costs to explain a gradient of a language model, against one forward and backward of it."""

from collections.abc import Callable, Iterator
from typing import Any

import elementgrad as eg
from benchmarks.harness import Row
from benchmarks.training import allocated

TEXTS, TOKENS, VOCABULARY = 2, 64, 50_257
TIME_BOUND, MEMORY_BOUND = 8.0, 2.0
USED, UNUSED = "transformer.wpe.weight[0, 0]", "transformer.wpe.weight[900, 0]"
"""A position that the texts have, and one that they do not."""
FAULTS: dict[str, tuple[str, str | None, Callable[[Any], object]]] = {
    "nothing wrong": (USED, None, lambda blocks: None),
    "a row not used": (UNUSED, "row-not-used", lambda blocks: None),
    "a detach in block 7": (
        USED,
        "detached",
        lambda blocks: blocks[7].register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:])),
    ),
    "an overflow in block 3": (
        USED,
        "overflow",
        lambda blocks: blocks[3].mlp.register_forward_hook(lambda _, __, out: (out.half() * 1e9).float()),
    ),
    "a dead rectifier in block 1": (
        USED,
        "dead-relu",
        lambda blocks: blocks[1].register_forward_hook(lambda _, __, out: (out - 1e4).relu()),
    ),
    "a root of zero in block 7": (
        USED,
        "singular",
        lambda blocks: blocks[7].register_forward_hook(lambda _, __, out: out + (out * 0).sqrt()),
    ),
    "a write through .data in block 3": (
        USED,
        "modified-through-data",
        lambda blocks: blocks[3].ln_2.register_forward_hook(lambda _, __, out: out.data.mul_(3.0) * 0 + out),
    ),
}


def torch_rows() -> Iterator[Row]:
    """GPT-2 small with one fault each."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(VOCABULARY, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0))
    of = "output.logits[0, -1, 2]"

    def made() -> Any:
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config()).eval()

    plain = made()

    def own() -> None:
        plain(tokens).logits[0, -1, 2].backward()
        plain.zero_grad()

    own()
    most = MEMORY_BOUND * allocated(own)
    for name, (wrt, cause, fault) in FAULTS.items():
        model = made()
        fault(model.transformer.h)

        def ours(model: Any = model, wrt: str = wrt) -> Any:
            return eg.explain(model, tokens, of=of, wrt=wrt)

        found = ours()
        assert found.cause == cause, found
        title = f"torch explain GPT-2, {name}"
        yield Row(title, ours, own, "forward and backward", TIME_BOUND, repeats=5)
        yield Row(f"{title}, memory", ours, own, "its memory", most_mb=most, memory=allocated, repeats=1)


SUITES = {"explaining": torch_rows}
