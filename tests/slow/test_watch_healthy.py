"""A healthy run that is watched: the same bits as without, and no memory that grows with the steps."""

import gc
import os

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import elementgrad as eg

STEPS = int(os.environ.get("WATCHED_STEPS", "200"))
KEPT = 20
"""So many tensors and other objects more than after a tenth of the run are no growth."""


def run(watched, scaled):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    counts = []

    def loop():
        for step in range(STEPS):
            tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            scaler.scale(model(tokens, labels=tokens).loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if step in (STEPS // 10, STEPS - 1):
                gc.collect()
                counts.append(len(gc.get_objects()))

    if watched:
        with eg.watch(model, optimizer, capture=None if scaled else "nan.capture"):
            loop()
    else:
        loop()
    return list(model.state_dict().values()), counts


@pytest.mark.parametrize("scaled", [False, True])
def test_a_healthy_run_has_the_same_bits_and_does_not_grow(scaled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, _ = run(False, scaled)
    watched, (early, late) = run(True, scaled)
    assert all(torch.equal(x, y) for x, y in zip(plain, watched, strict=True))
    assert late - early <= KEPT
    assert not list(tmp_path.iterdir())
