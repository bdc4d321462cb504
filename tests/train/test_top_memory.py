"""Ranking holds one dense gradient at a time, in whichever thread, and tensors of others get none."""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import elementgrad as eg
from elementgrad._backends.torch import top as torch_scores
from elementgrad._train import top as ranking
from tests.support.ranked import HOW
from tests.support.ranked_torch import checkpointed, mlp


def test_recomputation_in_backward_changes_no_buffer():
    model, loss_fn = checkpointed(False)
    before = copy.deepcopy(model.state_dict())
    eg.top(model, loss_fn, 3, "fisher")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_other_tensors_that_require_gradients_get_none():
    model, loss_fn = mlp()
    other = torch.ones(6, requires_grad=True)
    eg.top(model, lambda model: loss_fn(model) * other.double(), 5, among="0.weight")
    assert other.grad is None
    assert all(p.grad is None for p in model.parameters())


def test_threads_may_rank_one_model():
    model, loss_fn = mlp()
    expected, given = eg.top(model, loss_fn, 5), []
    threads = [threading.Thread(target=lambda: given.append(eg.top(model, loss_fn, 5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert given == [expected] * 4


class Memory(TorchDispatchMode):
    """Counts the storages of at least so many bytes that operations make, as long as they live."""

    def __init__(self, size):
        super().__init__()
        self.size, self.live, self.peak = size, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided:
                storage = x.untyped_storage()
                key = storage._cdata
                if storage.nbytes() >= self.size and key not in given and key not in self.live:
                    self.live[key] = weakref.ref(storage, lambda _, key=key: self.live.pop(key, None))
        self.peak = max(self.peak, len(self.live))
        return result


def tower(width=64, layers=6):
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())])
    return model, torch.randn(3, width)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(torch_scores.TopBackend, "PIECE", 256)


def peak(model, loss_fn, by, k=20):
    """Return how many dense gradients, or tensors as large, live at once."""
    with Memory(64 * 64 * 4) as memory:
        eg.top(model, loss_fn, k, by)
    assert not memory.live
    return memory.peak


def test_the_meter_sees_gradients_that_pile_up():
    model, x = tower()
    with Memory(64 * 64 * 4) as memory:
        gradients = torch.autograd.grad(model(x).sum(), [layer.weight for layer in model[::2]])
        assert memory.peak == len(memory.live) == 6
        del gradients
    assert not memory.live


@pytest.mark.usefixtures("small_pieces")
def test_no_second_dense_gradient_lives():
    model, x = tower()
    assert peak(model, lambda model: model(x).sum(), "gradient") == 1
    assert peak(model, lambda model: model(x).sum(1), "gradient") == 1
    assert peak(model, lambda model: [model(row).sum() for row in x[:1]], "gradient") == 1
    assert peak(model, lambda model: model(x).sum(), "fisher") == 1


@pytest.mark.usefixtures("small_pieces")
def test_ranking_holds_at_most_one_sum_beside_a_gradient():
    model, x = tower()
    for by in HOW:
        assert peak(model, lambda model: (model(row).sum() for row in x), by) == 2
    assert peak(model, lambda model: model(x).sum(1), "fisher") == 2
    assert peak(model, None, "magnitude") == 0


def test_the_memory_of_elements_is_proportional_to_k(monkeypatch):
    monkeypatch.setattr(ranking, "ROOM", 0)
    most = []
    settle = ranking.TopElements._prune

    def watching(self):
        most.append(sum(len(scores) for scores, *_ in self._offers))
        settle(self)

    monkeypatch.setattr(ranking.TopElements, "_prune", watching)
    model, x = tower()
    eg.top(model, lambda model: model(x).sum(), 20)
    assert max(most) <= 3 * 20


def test_a_generator_has_one_graph_at_a_time_and_is_asked_for_each_group():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), torch.randn(512, 4)
    asked = []

    def one_by_one(model, count=6):
        asked.append(None)
        return (model(x).sum() for _ in range(count))

    def holding(model):
        for _ in range(6):
            loss = model(x).sum()
            yield loss

    def live(loss_fn, by):
        with Memory(512 * 4 * 4) as memory:
            eg.top(model, loss_fn, 5, by)
        return memory.peak

    for by in HOW:
        asked.clear()
        one = live(lambda model: one_by_one(model, 1), by)
        assert len(asked) == len(torch_scores._groups(dict(model.named_parameters()))) == 4
        assert live(one_by_one, by) == one
        assert live(holding, by) <= 2 * one
        assert live(lambda model: list(one_by_one(model)), by) > 3 * one


def test_small_parameters_go_together():
    leaves = {name: torch.ones(size) for name, size in {"a": 3, "b": 10, "c": 4, "d": 5, "e": 1, "f": 1}.items()}
    assert [list(group) for group in torch_scores._groups(leaves)] == [["a"], ["b"], ["c", "d", "e"], ["f"]]
