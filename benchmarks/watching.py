"""What it costs to watch a training step of GPT-2 small, beside PyTorch's own detection of anomalies."""

from collections.abc import Iterator
from typing import Any

import elementgrad as eg
from benchmarks.harness import Row

BATCHES = {"2 x 64 tokens": ((2, 64), 1.05), "4 x 256 tokens": ((4, 256), 1.02)}
"""The shape of the tokens, and the most that a watched step may take of a plain one."""


def torch_rows() -> Iterator[Row]:
    """Yield steps that are watched, and steps under `detect_anomaly`, each against the plain step."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for label, (shape, bound) in BATCHES.items():
        tokens = torch.randint(50_257, shape)

        def step(tokens: Any = tokens) -> None:
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        def several(step: Any = step) -> None:
            for _ in range(4):
                step()

        def watched(several: Any = several) -> None:
            with eg.watch(model, optimizer, capture=None):
                several()

        def anomalies(several: Any = several) -> None:
            with torch.autograd.detect_anomaly():
                several()

        title = f"torch steps of GPT-2, {label}"
        yield Row(f"{title}, watched", watched, several, "the plain steps", bound, repeats=5)
        yield Row(f"{title}, detect_anomaly", anomalies, several, "the plain steps", repeats=5)


SUITES = {"watching": torch_rows}
