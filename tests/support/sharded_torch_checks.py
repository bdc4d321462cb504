"""Checks of models under `fully_shard` alone; each asserts in every process."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

import elementgrad as eg
from tests.support.sharded_torch import (
    equal,
    full,
    loss_of,
    prepared,
    same_everywhere,
    spread,
    told,
    train,
    words,
    world,
)
from tests.support.sharded_torch_models import ONE, OTHER, PLACES, Layers, made


def undoing_and_releasing(folder):
    model, elements = prepared("fsdp")
    wanted = {name: parameter.requires_grad for name, parameter in made().named_parameters()}
    train("fsdp", model, elements)
    assert not equal(model, made())
    elements.undo()
    assert equal(model, made())
    train("fsdp", model, elements)
    after = full(model)
    elements.release()
    assert {name: each.requires_grad for name, each in model.named_parameters()} == wanted
    assert all(isinstance(each, DTensor) for each in model.parameters())
    assert all(torch.equal(after[name], each) for name, each in full(model).items())
    assert all(isinstance(module, FSDPModule) for module in (model, *model.blocks))
    loss_of(model, words(0)[0]).backward()  # a sharded model as ever
    assert all(each.grad is not None for each in model.parameters())
    model, elements = prepared("fsdp")
    train("fsdp", model, elements)
    elements.release(keep=False)
    assert equal(model, made())


def states(folder):
    model, elements = prepared("fsdp")
    train("fsdp", model, elements)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    assert list(state) == list(made().state_dict())
    assert all(isinstance(each, DTensor) for each in state.values())
    other, others = prepared("fsdp")
    other.load_state_dict(state)
    for one, another in zip(elements.parameters(), others.parameters(), strict=True):
        assert torch.equal(one, another)
    assert equal(model, other)
    others.undo()  # what was loaded was the same model with other elements
    assert equal(other, made())
    (batch,) = words(3)
    assert torch.equal(other(batch), spread(made())(batch))


def written_values_are_used(folder):
    """By the leaf, by its data and by the parameter; between forwards that leave the root gathered."""
    for options in [{}, {"reshard_after_forward": 2}] if world()[1] > 2 else [{}]:
        _write_and_use(spread(made(), **options))


def _write_and_use(model):
    plain, (batch,) = made(), words(0)
    single, elements = eg.trainable(plain, PLACES), eg.trainable(model, PLACES)
    with torch.no_grad():
        assert torch.allclose(model(batch), plain(batch))
        for each in (single, elements):
            each[ONE].fill_(0.5)
        assert torch.allclose(model(batch), plain(batch))
        for each in (single, elements):
            each[PLACES[5]].fill_(-1.0)
            each[OTHER].data.mul_(2.0)
        assert torch.allclose(model(batch), plain(batch))
    assert torch.allclose(loss_of(model, batch), loss_of(plain, batch))
    loss_of(model, batch).backward()
    model.reshard()
    with torch.no_grad():
        for block in (model.blocks[0], plain.blocks[0]):
            block.linear.weight.mul_(2.0)
    assert torch.allclose(model(batch), plain(batch))
    assert torch.equal(elements[OTHER], single[OTHER])
    for name, each in full(model).items():
        assert torch.equal(each, plain.state_dict()[name]), name


def two_sets(folder):
    """Elements of a second call, and a parameter that trains whole beside them."""
    model, elements = prepared("fsdp", places=PLACES[:2])
    others = eg.trainable(model, PLACES[2:])
    plain = made()
    single, singles = eg.trainable(plain, PLACES[:2]), eg.trainable(plain, PLACES[2:])
    model.norm.bias.requires_grad_(True)
    plain.norm.bias.requires_grad_(True)
    count = world()[1]
    loss_of(model, words(0)[0]).backward()
    every = torch.cat(_every_batch(0, count))
    loss_of(plain, every).backward()
    for mine, own in ((elements, single), (others, singles)):
        for one, another in zip(mine.parameters(), own.parameters(), strict=True):
            assert torch.allclose(one.grad, another.grad, atol=1e-6)
    assert torch.allclose(model.norm.bias.grad.full_tensor(), plain.norm.bias.grad, atol=1e-6)
    others.release()
    loss_of(model, words(0)[0]).backward()
    loss_of(plain, every).backward()
    for one, another in zip(elements.parameters(), single.parameters(), strict=True):
        assert torch.allclose(one.grad, another.grad, atol=1e-6)


def _every_batch(step, count):
    gathered = [torch.empty_like(words(step)[0]) for _ in range(count)]
    distributed.all_gather(gathered, words(step)[0])
    return gathered


def compiled(folder):
    """The graph breaks where elements are written: each of the places has its own in every later forward."""
    model, elements = prepared("fsdp")
    norms = train("fsdp", torch.compile(model, backend="aot_eager"), elements)
    other, others = prepared("fsdp")
    assert norms == pytest.approx(train("fsdp", other, others))
    for leaf, expected in zip(elements.parameters(), others.parameters(), strict=True):
        torch.testing.assert_close(leaf, expected)
    elements.release(keep=False)
    assert equal(model, made())


def some_processes_hear_nothing(folder):
    """A loss of one process alone, while the others add none of theirs."""
    model, elements = prepared("fsdp")
    rank, _ = world()
    output = model(words(0)[0])
    alone = output[:, 0].sum() if rank == 0 else output[:, 0].sum() * 0 + elements[ONE].sum() * 0
    alone.backward()
    assert all(leaf.grad is not None for leaf in elements.parameters())
    grads = torch.cat([leaf.grad for leaf in elements.parameters()])
    assert same_everywhere(grads)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both):
        a, b = self.a(x), self.b(x)
        return b + 10 * (a if both else a.detach())


def some_processes_hear_of_one_set_alone(folder):
    """Elements of two calls, on a whole model or on parts of it, the first of which one process alone reaches."""
    rank, count = world()
    for inside in (False, True):
        model = Branches()
        if inside:
            for branch in (model.a, model.b):
                fully_shard(branch, reshard_after_forward=False)  # or who goes back alone waits to gather it
        fully_shard(model)
        elements = [
            eg.trainable(getattr(model, name), "weight[0]") if inside else eg.trainable(model, f"{name}.weight[0]")
            for name in "ab"
        ]
        leaves = [leaf for each in elements for leaf in each.parameters()]
        for step in (1, 2):
            model(torch.ones(2, 4) * (1 + rank), both=rank == 0).sum().backward()
            for leaf, total in zip(leaves, (20, count * (count + 1)), strict=True):
                assert torch.allclose(leaf.grad, torch.full((4,), step * total / count))


def _refused(optimizer):
    try:
        optimizer.step()
    except eg.FrameworkError as error:
        return str(error)


def checkpoints(folder):
    """Check loading of PyTorch's own checkpoints by `load_state_dict`; values loaded in place alone would be lost."""
    model, elements = prepared("fsdp")
    train("fsdp", model, elements)
    path, whole = folder / f"checkpoint-{world()[1]}", full(model)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=path)
    for load in ("state", "set", "full"):
        other, others = prepared("fsdp")
        optimizer = torch.optim.AdamW(others.parameters(), lr=0)
        state = {"model": other.state_dict()}
        checkpoint.load(state, checkpoint_id=path)
        if load == "state":
            every = [None] * world()[1]
            distributed.all_gather_object(every, _refused(optimizer))
            assert any(every)  # by who has elements in its shards
            assert all("call model.load_state_dict with what was loaded" in error for error in every if error)
            other.load_state_dict(state["model"])
        elif load == "set":
            set_model_state_dict(other, state["model"])
        else:
            set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True))
        for leaf in others.parameters():
            leaf.grad = torch.ones_like(leaf)
        optimizer.step()
        assert equal(other, model)
        for one, another in zip(elements.parameters(), others.parameters(), strict=True):
            assert torch.equal(one, another)


def sharded_along_another_axis(folder):
    class Even(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 5)

        def forward(self, x):
            return self.linear(x)

    def place(parameter):
        return Shard(1) if parameter.ndim == 2 else None

    torch.manual_seed(0)
    plain, model = Even(), Even()
    model.load_state_dict(plain.state_dict())
    fully_shard(model, shard_placement_fn=place)
    places = ["linear.weight[[0, 3, 4], [7, 0, 4]]", "linear.bias[4]"]
    elements, single = eg.trainable(model, places), eg.trainable(plain, places)
    assert all(torch.equal(elements[each], single[each]) for each in places)
    x = torch.arange(16.0).reshape(2, 8) / 16
    for each, mine in ((model, elements), (plain, single)):
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
        each(x).square().sum().backward()
        optimizer.step()
    for name, each in full(model).items():
        assert torch.allclose(each, plain.state_dict()[name]), name
    assert model.linear.weight.placements == (Shard(1),)


def other_layers(folder):
    """The same data in all processes is one process's training, to the bit."""
    places = [
        "conv.weight[5, 0, 2]",
        "attention.in_proj_weight[[1, 17], [0, 5]]",
        "attention.out_proj.weight[2]",
        "again.weight[:, 3]",
        "norm.weight[4]",
    ]
    images = torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    for gathered in (True, False):
        torch.manual_seed(0)
        plain, model = Layers(), Layers()
        model.load_state_dict(plain.state_dict())
        for part in (model.conv, model.again, model):
            fully_shard(part, reshard_after_forward=not gathered)
        elements, single = eg.trainable(model, places), eg.trainable(plain, places)
        for each, mine in ((model, elements), (plain, single)):
            optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
            for _ in range(2):
                optimizer.zero_grad()
                each(images).square().mul(images.mean() + 1).sum().backward()
                optimizer.step()
        for name, each in full(model).items():
            torch.testing.assert_close(each, plain.state_dict()[name], rtol=0, atol=1e-6)


def patches(folder):
    """Applied to a sharded model, taken back, refused; written once, and not by halves."""
    count = world()[1]
    path = folder / f"fsdp-{count}.safetensors"
    trained, _ = prepared("fsdp", places=path)
    model = spread(made())
    applied = eg.apply(model, path)
    assert equal(model, trained)
    (batch,) = words(0)
    with torch.no_grad():
        logits = model(batch)
    applied.undo()
    assert equal(model, made())
    with torch.no_grad():
        assert torch.allclose(model(batch), spread(made())(batch))
        assert not torch.allclose(model(batch), logits)
    other = made()
    with torch.no_grad():
        other.norm.weight.add_(1.0)
    with pytest.raises(eg.PatchError, match=r"norm.weight is not the tensor that the patch was made for"):
        eg.apply(spread(other), path)
    full_path = folder / f"full-{count}.safetensors"
    model, elements = prepared("fsdp")
    elements.save(full_path, full=True)
    eg.apply(spread(made()), full_path)
    assert len(list(folder.glob(f"full-{count}*"))) == 1
    with pytest.raises((OSError, eg.ElementgradError)):  # everywhere, though one process alone tried
        elements.save(folder / "no such folder" / "patch.safetensors")


def resumed(folder):
    """From what half as many processes left, with their optimizer's state: the rest of the same training."""
    count = world()[1]
    patch, state = folder / "resume-{}.safetensors", folder / "resume-{}.pt"
    before = count // 2
    if before > 1:
        model, elements = prepared("fsdp", places=str(patch).format(before))
    else:
        model, elements = prepared("fsdp")
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.05, weight_decay=0.1)
    if before > 1:
        optimizer.load_state_dict(torch.load(str(state).format(before)))
    norms = train("fsdp", model, elements, steps=[2, 3] if before > 1 else [0, 1], optimizer=optimizer)
    elements.save(str(patch).format(count))
    if world()[0] == 0:
        torch.save(optimizer.state_dict(), str(state).format(count))
    distributed.barrier()
    return told("fsdp", model, elements, norms)


CHECKS = [
    undoing_and_releasing,
    states,
    written_values_are_used,
    two_sets,
    compiled,
    some_processes_hear_nothing,
    some_processes_hear_of_one_set_alone,
    checkpoints,
    sharded_along_another_axis,
    other_layers,
    patches,
    resumed,
]
