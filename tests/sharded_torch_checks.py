"""What holds in a model under `fully_shard` and in no other: each check asserts, in every process."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import elementgrad as eg
from tests.sharded_torch import (
    ONE,
    OTHER,
    PLACES,
    SILENT,
    WIDTH,
    full,
    loss_of,
    made,
    prepared,
    spread,
    told,
    train,
    words,
    world,
)


def equal(model, other):
    one, another = full(model), full(other)
    return list(one) == list(another) and all(torch.equal(one[name], another[name]) for name in one)


WRAPPED = [
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1e-6},
]


def wrapped_in_other_ways(folder):
    """Routed losses under the options of `DistributedDataParallel`; a leaf of no loss; a hook of a leaf, once."""
    rates = []
    for options in WRAPPED:
        model, elements = prepared("ddp", wrapped=options)
        heard = []
        elements[ONE].register_hook(lambda gradient, heard=heard: heard.append(1))
        norms = train("ddp", model, elements, routed=True)
        assert len(heard) == 3
        assert elements[SILENT].grad is None
        rates.append([norms, [leaf.tolist() for leaf in elements.parameters()]])
    assert all(rate == rates[0] for rate in rates)
    model, elements = prepared("ddp", wrapped={"static_graph": True})
    with pytest.raises(eg.FrameworkError, match="leave static_graph out"):
        train("ddp", model, elements, routed=True)
    model, elements = prepared("ddp", wrapped={"static_graph": True})
    train("ddp", model, elements)
    train("ddp", model, elements, routed=True)
    assert _same_everywhere(torch.cat(list(elements.parameters())))
    partly, elements = prepared("ddp", wrapped={"find_unused_parameters": True})
    partly.module.forward = lambda words: partly.module.table(words)  # nothing else is used
    for _ in range(2):
        elements.backward({ONE: partly(words(0)[0]).square().mean()})
    assert _same_everywhere(elements[ONE].grad)
    assert elements[OTHER].grad is None


def _same_everywhere(numbers):
    first = numbers.detach().clone()
    distributed.broadcast(first, 0)
    return torch.equal(numbers, first) and bool(numbers.any())


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
    assert _same_everywhere(grads)


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


class Layers(nn.Module):
    """Layers with kernels of their own, one of them computed again going back."""

    def __init__(self):
        super().__init__()
        self.conv, self.attention = nn.Conv2d(1, WIDTH, 3, padding=1), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.again, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, images):
        x = self.conv(images).flatten(2).mT
        x = x + self.attention(x, x, x)[0]
        return self.norm(checkpoint(self.again, x, use_reentrant=False))


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


def refused(folder):
    plain = made()
    with pytest.raises(eg.FrameworkError, match="wrapped in DistributedDataParallel already"):
        eg.trainable(DistributedDataParallel(made()), ONE)
    with pytest.raises(eg.FrameworkError, match="wrapped in FullyShardedDataParallel, which flattens"):
        eg.trainable(FullyShardedDataParallel(made(), device_id=torch.device("cpu")), ONE)
    eg.trainable(plain, PLACES)
    with pytest.raises(eg.FrameworkError, match=r"call fully_shard on the plain model first, and eg.trainable then"):
        spread(plain)
    mesh = init_device_mesh("cpu", (world()[1],))
    parallel = made()
    parallel.norm.weight = nn.Parameter(distribute_tensor(parallel.norm.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(eg.FrameworkError, match=r"norm.weight is spread over processes as .* and not by fully_shard"):
        eg.trainable(parallel, "norm.weight[0]")
    partly = made()
    fully_shard(partly.blocks[0])
    with pytest.raises(eg.FrameworkError, match=r"norm.weight is not sharded as other parameters of the model are"):
        eg.trainable(partly, "norm.weight[0]")
    both = made()
    fully_shard(both, mesh=init_device_mesh("cpu", (2, world()[1] // 2), mesh_dim_names=("copies", "shards")))
    with pytest.raises(eg.FrameworkError, match="over a mesh of 2 axes; elements train in models that"):
        eg.trainable(both, "norm.weight[0]")
    recurrent = nn.LSTM(WIDTH, WIDTH)
    fully_shard(recurrent)
    with pytest.raises(eg.FrameworkError, match="keeps its parameters in _flat_weights too"):
        eg.trainable(recurrent, "weight_hh_l0[0, 0]")
    model, rank = spread(made()), world()[0]
    for places in (f"norm.weight[{rank}]", PLACES[: 1 + rank]):  # as many elements, or not even that
        with pytest.raises(eg.FrameworkError, match="name the same ones in each, in the same order"):
            eg.trainable(model, places)
    eg.trainable(model, PLACES).release()
    assert equal(model, made())
    model, elements = prepared("fsdp")
    with pytest.raises(eg.FrameworkError, match="leave out create_graph"):
        loss_of(model, words(0)[0]).backward(create_graph=True)
    for _ in range(2):  # sharded, and what is left gathered after a forward
        with pytest.raises(eg.FrameworkError, match=r"norm.weight is spread .* no derivatives are read"):
            eg.grad(model, words(0)[0], of="output[0, 0]", wrt="norm.weight[2]", unconnected="zero")
        model(words(0)[0])
    model, elements = prepared("fsdp")
    assert eg.at(model.norm.weight)[2] in elements
    with pytest.raises(eg.FrameworkError, match="a loss uses weight of a sharded model itself"):
        model.norm.weight.full_tensor().square().sum().backward()
    with pytest.raises(eg.FrameworkError, match="a sharded model cannot be moved or converted"):
        model.norm.double()
    with pytest.raises(AttributeError, match="cannot be replaced"):
        model.norm.weight = nn.Parameter(torch.zeros(WIDTH))


CHECKS = [
    wrapped_in_other_ways,
    undoing_and_releasing,
    states,
    written_values_are_used,
    two_sets,
    compiled,
    some_processes_hear_nothing,
    sharded_along_another_axis,
    other_layers,
    patches,
    resumed,
    refused,
]
