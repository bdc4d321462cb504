"""Changes to a model in training: those that are refused, and those that are noticed."""

import copy
import pickle

import pytest
import torch
from torch import nn

import elementgrad as eg
from tests.support.tagger import PLACES, TOKENS, Tagger, assert_same, train


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tagger()


def test_values_written_to_the_parameter_are_saved_and_stepped_from(model, tmp_path):
    elements = eg.trainable(model, "head.bias[:3]")
    raw = dict(model.named_parameters())["head.bias"]
    with torch.no_grad():
        raw.fill_(5.0)
    elements.save(tmp_path / "patch.safetensors")
    assert eg.inspect(tmp_path / "patch.safetensors").entries[0].values.floats().tolist() == [5.0] * 3
    assert elements["head.bias[:3]"].tolist() == [5.0] * 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_with_their_elements_are_whole(model, copied, tmp_path):
    plain = copy.deepcopy(model)
    other, elements = copied((model, eg.trainable(model, PLACES)))
    train(other, elements)
    elements.save(tmp_path / "patch.safetensors")
    eg.apply(plain, tmp_path / "patch.safetensors")
    assert_same(plain.state_dict(), other.state_dict())
    elements.release()
    assert all(parameter.requires_grad for parameter in other.parameters())
    assert not dict(model.named_parameters())["norm.weight"].requires_grad


def test_a_class_that_allows_no_subclass_leaves_the_model_as_it_was(model):
    class Closed(type(nn.Module)):
        def __new__(cls, name, bases, members, *, allowed=False):
            if not allowed:
                raise TypeError("closed")
            return super().__new__(cls, name, bases, members)

    class Scale(nn.Module, metaclass=Closed, allowed=True):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.ones(12))

    whole = nn.Sequential(model, Scale())
    kinds, names = [type(part) for part in whole.modules()], [name for name, _ in whole.named_parameters()]
    with pytest.raises(TypeError, match="closed"):
        eg.trainable(whole, ["0.fold[0]", "1.by[0]"])
    assert [type(part) for part in whole.modules()] == kinds
    assert [name for name, parameter in whole.named_parameters() if parameter.requires_grad] == names


def test_subclass_registries_do_not_see_our_classes():
    registry = {}

    class Registered(nn.Module):
        def __init_subclass__(cls, *, kind, **options):
            super().__init_subclass__(**options)
            registry[kind] = cls

    class Scale(Registered, kind="scale"):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.ones(2))

    eg.trainable(Scale(), "by[0]")
    assert registry == {"scale": Scale}


def test_a_trained_parameter_cannot_be_taken_away(model):
    eg.trainable(model, "head.weight[0]")
    with pytest.raises(AttributeError, match="cannot be replaced"):
        del model.head.weight
    with pytest.raises(AttributeError, match="cannot be replaced"):
        model.head.register_parameter("weight", None)
    with pytest.raises(AttributeError, match="cannot be replaced"):
        nn.utils.parametrizations.weight_norm(model.head)
    assert model(TOKENS).shape == (2, 4, 12)


NUMBERS = torch.randn(4, 6)
SHARING = {
    "all of it": (NUMBERS, NUMBERS, True),
    "turned": (NUMBERS, NUMBERS.T, True),
    "some rows": (NUMBERS[:3], NUMBERS[2:], True),
    "a column in rows": (NUMBERS[:, 2], NUMBERS[1:], True),
    "rows apart": (NUMBERS[:2], NUMBERS[2:], False),
    "columns apart": (NUMBERS[:, ::2], NUMBERS[:, 1::2], False),
    "nothing": (NUMBERS[:0], NUMBERS, False),
}


@pytest.mark.parametrize("case", SHARING)
def test_parameters_that_share_memory_are_refused(case):
    one, other, shared = SHARING[case]
    model = nn.ParameterDict({"first": nn.Parameter(one), "second": nn.Parameter(other)})
    if shared:
        with pytest.raises(eg.FrameworkError, match=r"^second and first are two parameters that share memory"):
            eg.trainable(model, eg.at("second")[..., 0])
        assert model["second"].requires_grad
    else:
        eg.trainable(model, eg.at("second")[..., 0]).release()
