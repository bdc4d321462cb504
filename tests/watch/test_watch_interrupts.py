"""Ctrl-C in a watched run; `tests/isolation/test_interrupts.py` has the rows for all lines of it."""

import gc

import pytest
import torch

import elementgrad as eg
from tests.support import user_torch as fw
from tests.support.interrupts import interrupted, points, spelled


def test_an_interrupt_while_a_hit_is_recorded_leaves_nothing_behind():
    model, call = fw.model(), fw.READS["watch-fault"]
    call(model)
    before, around = fw.described(model), fw.surroundings()
    stops = [((file, line), 1) for (file, line), _ in points(lambda: call(model)) if file.endswith("watch_run.py")]
    assert len(stops) > 50
    for stop in dict.fromkeys(stops):
        interrupted(lambda: call(model), stop)
        assert fw.surroundings() == around, spelled(stop)
        assert fw.described(model) == before, spelled(stop)


@pytest.mark.parametrize("end", ["dies", "interrupted"])
def test_a_watch_whose_end_never_ran_ends_with_it_or_with_the_next_verb(monkeypatch, end):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, around = fw.described(model), fw.surroundings()
    watch = eg.watch(model, optimizer, capture=None, when={"weight": lambda g: False})
    watch.__enter__()
    model(torch.ones(1, 2))
    if end == "interrupted":  # Python reports an interrupt in `__del__` and goes on
        monkeypatch.delattr(type(watch), "__del__")
    gc.disable()  # it is in no cycle
    del watch
    gc.enable()
    assert (fw.described(model) == before) == (end == "dies")
    eg.grad(lambda x: x.sum(), torch.ones(2))
    assert fw.described(model) == before
    assert fw.surroundings() == around
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
