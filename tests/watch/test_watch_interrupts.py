"""Ctrl-C at any line of a watched run leaves no hooks, patches or changed numbers."""

import contextlib

import pytest
import torch

import elementgrad as eg
from tests.support.interrupts import interrupted, points, some, spelled
from tests.support.user_torch import described, surroundings

EVERY = 29
"""Of the points at which a run can be interrupted, one in so many is tried."""


@pytest.mark.parametrize("fault", [False, True])
def test_an_interrupted_watch_leaves_nothing_behind(fault):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run():
        for p in model.parameters():
            p.grad = None
        with (
            contextlib.suppress(eg.WatchError),
            eg.watch(model, optimizer, capture=None, when={"0.weight": lambda g: False}),
        ):
            x = torch.ones(2, 3)
            (model(x) * (float("inf") if fault else 1.0)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    run()
    every = points(run)
    around, hooks = surroundings(), len(optimizer._optimizer_step_pre_hooks)
    scale, norm = torch.amp.GradScaler.scale, torch.nn.utils.clip_grad._get_total_norm
    for p in model.parameters():
        p.grad = None
    before = described(model)
    raised = 0
    for stop in some(every, EVERY):
        raised += interrupted(run, stop)
        for p in model.parameters():
            p.grad = None
        assert described(model) == before, spelled(stop)
        assert surroundings() == around, spelled(stop)
        assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == hooks, spelled(
            stop
        )
        assert torch.amp.GradScaler.scale is scale, spelled(stop)
        assert torch.nn.utils.clip_grad._get_total_norm is norm, spelled(stop)
    assert raised > 0.5 * len(every) // EVERY
