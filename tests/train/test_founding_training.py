"""The questions the library exists for that are about training single elements, with their right answers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import elementgrad as eg

ENTRY = "embedding.weight[0, 5]"
TOKENS = torch.arange(100)


class Classifier(nn.Module):
    """A 100 x 10 embedding with a linear head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 10)
        self.head = nn.Linear(10, 2)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class Sequences(nn.Module):
    """A GRU that scores the next of 50 tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.gru = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, 50)

    def forward(self, tokens):
        return self.head(self.gru(self.embedding(tokens))[0])


def seeded(kind):
    torch.manual_seed(0)
    return kind()


def of_token(model, tokens, target):
    """The loss of one chosen output token after a sequence."""
    return functional.cross_entropy(model(tokens)[:, -1], torch.tensor([target]))


def moved(model, before):
    """Which elements of which parameters are not what they were, bit by bit."""
    now = model.state_dict()
    return [(name, *at) for name in before for at in (now[name] != before[name]).nonzero().tolist()]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "momentum and decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam and decay": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, weight_decay=0.5),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_entry_of_an_embedding_trains_and_nothing_else_moves(optimizer):
    model = seeded(Classifier)
    before = copy.deepcopy(model.state_dict())
    elements = eg.trainable(model, ENTRY)
    chosen = optimizer(elements.parameters())
    for _ in range(5):
        chosen.zero_grad()
        model(TOKENS).square().sum().backward()
        chosen.step()
    assert moved(model, before) == [("embedding.weight", 0, 5)]
    assert sum(state.numel() for state in chosen.state_dict()["state"].get(0, {}).values() if state is not None) <= 4


def test_one_step_of_descent_is_that_of_the_whole_gradient_at_the_entry():
    model = seeded(Classifier)
    old = model.embedding.weight[0, 5].item()
    (gradient,) = torch.autograd.grad(model(TOKENS).square().sum(), model.embedding.weight)
    elements = eg.trainable(model, ENTRY)
    optimizer = torch.optim.SGD(elements.parameters(), lr=0.1)
    model(TOKENS).square().sum().backward()
    optimizer.step()
    assert model.embedding.weight[0, 5].item() == pytest.approx(old - 0.1 * gradient[0, 5].item(), rel=1e-6)


def leaked(optimizer, begin=0):
    """Count the frozen entries that masking the gradient from step `begin` on moves."""
    model = seeded(Classifier)
    mask = torch.zeros(100, 10)
    mask[0, 5] = 1
    chosen = optimizer(model.embedding.parameters())
    for step in range(5):
        chosen.zero_grad()
        model(TOKENS).square().sum().backward()
        if step == begin:
            before = model.embedding.weight.detach().clone()
        if step >= begin:
            model.embedding.weight.grad *= mask
        chosen.step()
    return int((model.embedding.weight != before)[mask == 0].sum())


def test_the_usual_mask_on_the_gradient_lets_decay_and_momentum_move_every_frozen_entry():
    assert leaked(lambda p: torch.optim.AdamW(p, lr=0.1)) == 999  # its default decays
    assert leaked(lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01)) == 999
    assert leaked(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), begin=1) == 999
    assert leaked(lambda p: torch.optim.Adam(p, lr=0.1), begin=1) == 999
    assert leaked(lambda p: torch.optim.SGD(p, lr=0.1)) == 0  # where the answer was tried, it works


def test_the_usual_mask_makes_nan_of_an_infinite_gradient():
    assert (torch.tensor([1.0, float("inf")]) * torch.tensor([1.0, 0.0])).isnan().tolist() == [False, True]
    table = nn.Embedding(4, 2)
    before = table.weight.detach().clone()
    elements = eg.trainable(table, "weight[0, 1]")
    optimizer = torch.optim.SGD(elements.parameters(), lr=0.1)
    (table(torch.tensor([0, 3])) * torch.tensor([[1.0, 1.0], [float("inf"), 1.0]])).sum().backward()
    optimizer.step()
    assert (table.weight != before).nonzero().tolist() == [[0, 1]]


def test_one_entry_gets_the_gradient_of_one_output_token():
    model = seeded(Sequences)
    tokens = torch.tensor([[7, 0, 3]])
    (whole,) = torch.autograd.grad(of_token(model, tokens, 2), model.embedding.weight)
    before = copy.deepcopy(model.state_dict())
    elements = eg.trainable(model, "embedding.weight[0, 12]")
    optimizer = torch.optim.Adam(elements.parameters(), lr=0.1)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        loss = of_token(model, tokens, 2)
        loss.backward()
        if step == 0:
            gradient = elements["embedding.weight[0, 12]"].grad
            torch.testing.assert_close(gradient, whole[0, 12].reshape(1))
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert moved(model, before) == [("embedding.weight", 0, 12)]


def test_an_entry_whose_token_does_not_occur_has_a_gradient_of_zero_and_not_none():
    model = seeded(Sequences)
    elements = eg.trainable(model, "embedding.weight[0, 12]")
    of_token(model, torch.tensor([[7, 4, 3]]), 2).backward()
    assert elements["embedding.weight[0, 12]"].grad.tolist() == [0.0]


PAIR = "embedding.weight[0, 12]", "embedding.weight[1, 25]"


def test_each_entry_gets_the_gradient_of_its_own_loss_alone():
    model = seeded(Sequences)
    tokens = torch.tensor([[7, 0, 1]])
    (of_two,) = torch.autograd.grad(of_token(model, tokens, 2), model.embedding.weight)
    (of_five,) = torch.autograd.grad(of_token(model, tokens, 5), model.embedding.weight)
    before = copy.deepcopy(model.state_dict())
    elements = eg.trainable(model, PAIR)
    scores = model(tokens)[:, -1]
    losses = [functional.cross_entropy(scores, torch.tensor([target])) for target in (2, 5)]
    elements.backward(dict(zip(PAIR, losses, strict=True)))
    first, second = (elements[place].grad.clone() for place in PAIR)
    torch.testing.assert_close(first, of_two[0, 12].reshape(1))
    torch.testing.assert_close(second, of_five[1, 25].reshape(1))
    torch.optim.SGD(elements.parameters(), lr=0.1).step()
    assert moved(model, before) == [("embedding.weight", 0, 12), ("embedding.weight", 1, 25)]


def test_another_loss_for_the_other_entry_changes_nothing_for_the_first():
    heard = []
    for other in (5, 6):
        model = seeded(Sequences)
        elements = eg.trainable(model, PAIR)
        tokens = torch.tensor([[7, 0, 1]])
        elements.backward({PAIR[0]: of_token(model, tokens, 2), PAIR[1]: of_token(model, tokens, other)})
        heard.append([elements[place].grad.item() for place in PAIR])
    assert heard[0][0] == heard[1][0]
    assert heard[0][1] != heard[1][1]


def test_summed_losses_give_each_entry_both_gradients():
    model = seeded(Sequences)
    tokens = torch.tensor([[7, 0, 1]])
    (of_two,) = torch.autograd.grad(of_token(model, tokens, 2), model.embedding.weight)
    (of_five,) = torch.autograd.grad(of_token(model, tokens, 5), model.embedding.weight)
    elements = eg.trainable(model, PAIR)
    (of_token(model, tokens, 2) + of_token(model, tokens, 5)).backward()
    heard = elements[PAIR[0]].grad
    torch.testing.assert_close(heard, (of_two + of_five)[0, 12].reshape(1))
    assert not torch.isclose(heard, of_two[0, 12])


def test_the_published_ten_targets_do_not_fit_one_row_of_scores():
    scores = seeded(Sequences)(torch.tensor([[7, 0, 1]]))[:, -1]
    with pytest.raises(ValueError, match="batch_size"):
        functional.cross_entropy(scores, torch.arange(10))
