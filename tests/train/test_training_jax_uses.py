"""Elements of JAX parameters in use: a founding case, routed losses, patches, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import elementgrad as eg
from tests.support.jax_losses import SMALL, arrays, assert_only, assert_same, leaf, moved, numbers, small, small_loss


def test_one_entry_of_an_embedding_under_sgd():
    """The founding case: entry [0, 5] of a 100 x 10 embedding, in a model with a linear head."""
    params = arrays({"table": numbers(100, 10), "head": numbers(10, 2)}, jnp.float32)
    elements = eg.trainable(params, "table[0, 5]")
    gradient = elements.grad(lambda p: (p["table"][np.array([0, 3])] @ p["head"]).sum())
    np.testing.assert_allclose(gradient["table[0, 5]"], params["head"][5].sum()[None], rtol=1e-5)
    elements.values = {place: v - 0.1 * gradient[place] for place, v in elements.values.items()}
    merged = elements.merge()
    assert_only(elements, merged, params)
    assert np.argwhere(np.asarray(merged["table"] != params["table"])).tolist() == [[0, 5]]
    unseen = elements.grad(lambda p: (p["table"][np.array([1, 3])] @ p["head"]).sum())
    assert unseen["table[0, 5]"].tolist() == [0.0]


def test_each_place_gets_the_gradient_of_its_own_loss_alone():
    elements = eg.trainable(small(jnp.float64), SMALL)
    one, other = (lambda p: small_loss(p, 2)), (lambda p: small_loss(p, 0))
    routes = {("table[0, 2]", "head.bias[2]"): one, "table[3, 1:3]": other}
    first, second, found = jax.jit(lambda: [elements.grad(loss) for loss in (one, other, routes)])()
    assert found.keys() == set(SMALL)
    np.testing.assert_allclose(found["table[0, 2]"], first["table[0, 2]"], rtol=1e-12)
    np.testing.assert_allclose(found["head.bias[2]"], first["head.bias[2]"], rtol=1e-12)
    expected = np.array(second["table[3]"])
    expected[[0, 3]] = 0
    np.testing.assert_allclose(found["table[3]"], expected, rtol=1e-12)
    assert found["head.kernel[1, :2]"].tolist() == [0, 0]


def test_patches_go_to_and_come_from_pytorch(tmp_path):
    ours, theirs = tmp_path / "jax.safetensors", tmp_path / "torch.safetensors"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 3)).bfloat16()
    state = {name: x.detach().clone() for name, x in model.state_dict().items()}

    def to_jax(x):
        return jnp.array(x.float().numpy()).astype(jnp.bfloat16)

    params = [
        {"weight": to_jax(state["0.weight"])},
        {"weight": to_jax(state["1.weight"]), "bias": to_jax(state["1.bias"])},
    ]
    places = ["0.weight[3]", "1.weight[2, [0, 3]]", "1.bias"]
    elements = eg.trainable(params, places)
    elements.values = moved(elements.values, 0.1)
    elements.save(ours, full=True)
    applied = eg.apply(model, ours)
    for name, x in model.state_dict().items():
        assert_same(to_jax(x), leaf(elements.merge(), name))
    applied.undo()
    trained = eg.trainable(model, places)
    with torch.no_grad():
        for one in trained.parameters():
            one.add_(0.1)
    trained.save(theirs)
    assert [entry.values for entry in eg.inspect(ours).entries] == [
        entry.values for entry in eg.inspect(theirs).entries
    ]
    assert_same(eg.apply(params, theirs).merge(), elements.merge())
    on = eg.trainable(params, theirs)
    assert_same(on.values, elements.values)
    on.undo()
    assert_same(on.merge(), params)


def test_patches_compose_and_are_taken_back(tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    params = small()
    for path, place in ((first, "table[:5]"), (second, "table[7]")):
        elements = eg.trainable(params, place)
        elements.values = moved(elements.values)
        elements.save(path, full=True)
    ways = []
    for one, other in ((first, second), (second, first)):
        merged = eg.apply(params, one).merge()
        ways.append(eg.apply(merged, other).merge())
        with pytest.raises(eg.PatchError, match="which was changed before"):
            eg.apply(ways[-1], one)
        beside = eg.trainable(merged, "head.bias")
        beside.save(tmp_path / "beside.safetensors")
        eg.apply(params, tmp_path / "beside.safetensors")
    assert_same(*ways)
    applied = eg.apply(params, first)
    assert not applied.training
    applied.undo()
    assert_same(applied.merge(), params)
    with pytest.raises(eg.PatchError, match="has other values there"):
        eg.apply(small() | {"table": small()["table"] + 1}, first)


def test_values_are_assigned_all_or_none():
    elements = eg.trainable(small(), SMALL)
    first, *others = elements.values
    given = {first: elements.values[first] + 1} | {
        place: np.asarray(elements.values[place], np.float16) for place in others
    }
    before = elements.values
    with pytest.raises(eg.OptionError, match="would be rounded"):
        elements.values = given
    assert_same(elements.values, before)


def test_modules_of_pytorch_have_no_values():
    elements = eg.trainable(torch.nn.Linear(3, 2), "bias")
    for ask in (lambda: elements.values, elements.merge, lambda: elements.grad(abs), lambda: elements.plan(abs)):
        with pytest.raises(eg.FrameworkError, match="for parameters that are never written to"):
            ask()
