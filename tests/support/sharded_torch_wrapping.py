"""Wrappers of models and their options; what is refused, in every process."""

import warnings

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import elementgrad as eg
from tests.support.sharded_torch import equal, loss_of, prepared, same_everywhere, spread, train, words, world
from tests.support.sharded_torch_models import ONE, OTHER, PLACES, SILENT, WIDTH, made

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
    assert same_everywhere(torch.cat(list(elements.parameters())))
    partly, elements = prepared("ddp", wrapped={"find_unused_parameters": True})
    partly.module.forward = lambda words: partly.module.table(words)  # nothing else is used
    for _ in range(2):
        elements.backward({ONE: partly(words(0)[0]).square().mean()})
    assert same_everywhere(elements[ONE].grad)
    assert elements[OTHER].grad is None


UNLIKE = (
    ", and another that trains the model has others, or other values for them; name the same ones in each, in the same "
    "order"
)


def _told(model):
    try:
        model(words(0)[0])
    except eg.FrameworkError as error:
        return str(error)


def unlike(folder):
    """Check the error about elements or weights that differ between processes."""
    rank, count = world()
    for places in (f"norm.weight[{rank}]", f"blocks.{rank % 2}.linear.bias[0]"):
        model = made()
        eg.trainable(model, places)
        wrapped = DistributedDataParallel(model)
        with torch.no_grad():
            wrapped(words(0)[0])  # of no gradients, which nobody would have to agree on
        told = [_told(wrapped), _told(wrapped)]
        every = [None] * count
        distributed.all_gather_object(every, (rank % 2 if "blocks" in places else rank, told))
        assert all(one == other for _, (one, other) in every)
        assert len({number for number, (error, _) in every if error is None}) == 1
        assert all(error.startswith("this process has ") for _, (error, _) in every if error is not None)
        assert {error[error.index(", and") :] for _, (error, _) in every if error is not None} == {UNLIKE}
    model = made()
    model.table.weight.data[3] += rank
    elements = eg.trainable(model, ONE)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        train("ddp", DistributedDataParallel(model), elements)
    told = ["before the wrapper gave all those of the first" in str(each.message) for each in heard]
    every = [None] * count
    distributed.all_gather_object(every, sum(told))
    assert sorted(every) == [0] + [1] * (count - 1)  # who comes first cannot know
    one, other = (DistributedDataParallel(prepared("single", places=f"norm.weight[{i}]")[0]) for i in range(2))
    if rank == 0:
        other(words(0)[0])  # of one process alone, as to log it
    for each in (one, other):
        loss_of(each, words(0)[0]).backward()
    model, elements = prepared("ddp", places="norm.weight[1]")  # other places than those before, and alike
    train("ddp", model, elements)


class Own(DistributedDataParallel):
    """Of a user's."""


def routed_apart(folder):
    """A loss for a place in some of the processes alone."""
    model, elements = prepared("ddp")
    rank = world()[0]
    for step in range(2):
        logits = model(words(0)[0])
        losses = {ONE: logits[:, 0].square().mean(), OTHER: logits[:, 1].square().mean()}
        if rank == 0 or not step:
            elements.backward(losses)
        else:
            with pytest.raises(eg.FrameworkError, match="give losses for the same places in each"):
                elements.backward({ONE: losses[ONE]})
        for leaf in elements.parameters():
            leaf.grad = None


def refused(folder):
    plain = made()
    with pytest.raises(eg.FrameworkError, match="wrapped in Own already"):
        eg.trainable(nn.Sequential(Own(made())), "0.module.norm.weight[0]")
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
    hook = elements[ONE].register_post_accumulate_grad_hook(lambda leaf: None)
    with pytest.raises(eg.FrameworkError, match="would get only that of this process; use the gradient after"):
        loss_of(model, words(0)[0]).backward()
    hook.remove()
    model, elements = prepared("fsdp")
    model.norm.bias.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(3.5)
    with pytest.raises(eg.FrameworkError, match="leave set_gradient_divide_factor out, and scale the loss"):
        loss_of(model, words(0)[0]).backward()
    model, elements = prepared("fsdp")
    for _ in range(2):  # sharded, and what is left gathered after a forward
        with pytest.raises(eg.FrameworkError, match=r"norm.weight is spread .* no derivatives are read"):
            eg.grad(model, words(0)[0], of="output[0, 0]", wrt="norm.weight[2]", unconnected="zero")
        model(words(0)[0])
    model, elements = prepared("fsdp")
    assert eg.at(model.norm.weight)[2] in elements
    with pytest.raises(eg.FrameworkError, match="a loss uses weight of a sharded model directly"):
        model.norm.weight.full_tensor().square().sum().backward()
    with pytest.raises(eg.FrameworkError, match="a sharded model cannot be moved or converted"):
        model.norm.double()
    with pytest.raises(AttributeError, match="cannot be replaced"):
        model.norm.weight = nn.Parameter(torch.zeros(WIDTH))


WRAPPINGS = [wrapped_in_other_ways, unlike, routed_apart, refused]
