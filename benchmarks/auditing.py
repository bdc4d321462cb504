"""What it costs to audit a healthy language model, against one forward and backward of it."""

from collections.abc import Iterator
from typing import Any

import elementgrad as eg
from benchmarks.harness import Row
from benchmarks.training import allocated

TEXTS, TOKENS, VOCABULARY = 2, 64, 50_257
TIME_BOUND, MEMORY_BOUND = 1.3, 1.2


def torch_rows() -> Iterator[Row]:
    """GPT-2 small in training mode, with all of its parameters fine."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config())
    tokens = torch.randint(VOCABULARY, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0))

    def loss(model: Any) -> Any:
        return model(tokens, labels=tokens).loss

    def own() -> None:
        loss(model).backward()
        model.zero_grad()

    def ours() -> None:
        audit = eg.audit(model, loss)
        if not audit.ok:
            raise AssertionError(str(audit))

    most = MEMORY_BOUND * (allocated(own) or 0.0)
    yield Row("torch audit of GPT-2 small", ours, own, "forward and backward", most=TIME_BOUND, repeats=3)
    yield Row("torch audit of GPT-2 small, memory", ours, own, "its memory", most_mb=most, memory=allocated, repeats=1)


SUITES = {"auditing": torch_rows}
