"""Several threads that read one model at once get the right numbers, and leave it as it was."""

import sys
import threading
from types import ModuleType

import pytest
import torch

import elementgrad as eg

CASES = {
    "in training": (lambda: torch.nn.BatchNorm1d(8), torch.nn.Linear(4, 8), (16, 4), {}),
    "by cones": (lambda: torch.nn.BatchNorm2d(8).eval(), torch.nn.Conv2d(3, 8, 3), (1, 3, 40, 40), {"cone": True}),
    "as a whole": (lambda: torch.nn.BatchNorm2d(8).eval(), torch.nn.Conv2d(3, 8, 3), (1, 3, 40, 40), {"cone": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_threads_read_one_model_with_buffers(name):
    norm, first, shape, options = CASES[name]
    model = torch.nn.Sequential(first, norm(), torch.nn.ReLU())
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    place = "output[0, 1]" if len(shape) == 2 else "output[0, 1, 20, 20]"
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    expected = eg.grad(model, x, of=place, wrt="input", **options)
    found, errors = [], []

    def read():
        try:
            found.extend([eg.grad(model, x, of=place, wrt="input", **options) for _ in range(20)])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(found) == 60
    assert all(torch.equal(gradient, expected) for gradient in found)
    assert all(
        now is own and torch.equal(now, value) for now, (own, value) in zip(model.buffers(), before, strict=True)
    )


def test_reads_go_on_while_another_thread_imports_the_compiler(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", ModuleType("torch._dynamo.eval_frame"))
    model, x = torch.nn.Linear(2, 1), torch.ones(1, 2)
    assert torch.equal(eg.grad(model, x, wrt="weight"), x)
    assert eg.explain(model, x, wrt="weight").verdict == "flows"
