"""One of several processes that train elements together: started by `torchrun`, or alone."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import elementgrad as eg
from tests.support.sharded_torch_models import BATCH, ONE, OTHER, PLACES, SILENT, WIDTH, WORDS, Model, Whole, made


class Wire(TorchDispatchMode):
    """Counts the bytes that collectives are given, by their names."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name.startswith("c10d::"):
            tensors = [each for each in torch.utils._pytree.tree_leaves(args[0]) if isinstance(each, torch.Tensor)]
            self.bytes[name] = self.bytes.get(name, 0) + sum(each.nbytes for each in tensors)
        return function(*args, **(kwargs or {}))


def world():
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def words(step, micro=1):
    """Return the part of a batch that this process gets, in so many pieces."""
    every = torch.randint(WORDS, (BATCH, 4), generator=torch.Generator().manual_seed(step))
    every[:, 0] = torch.arange(BATCH) % 4
    rank, count = world()
    return every[rank::count].chunk(micro)


def spread(model, **options):
    for block in getattr(model, "blocks", ()):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def prepared(engine, kind=Model, places=PLACES, dtype=torch.float32, policy=None, wrapped=None):
    """The model that is called, and its elements."""
    model = made(kind, dtype)
    if engine == "fsdp":
        spread(model, **({"mp_policy": policy} if policy else {}))
    elements = eg.trainable(model, places)
    return (DistributedDataParallel(model, **(wrapped or {})) if engine == "ddp" else model), elements


def loss_of(model, batch):
    logits = model(batch)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.roll(1, 1).flatten())


def synchronise(engine, model, wanted):
    if engine == "fsdp":
        model.set_requires_gradient_sync(wanted)
    if engine == "ddp":
        model.require_backward_grad_sync = wanted  # as no_sync does


def train(engine, model, elements, steps=(0, 1, 2), micro=1, synced=False, routed=False, optimizer=None, loss=loss_of):
    """Steps of AdamW with clipping; returns the norms that were clipped."""
    optimizer = optimizer or torch.optim.AdamW(elements.parameters(), lr=0.05, weight_decay=0.1)
    norms = []
    for step in steps:
        optimizer.zero_grad()
        pieces = words(step, micro)
        for number, piece in enumerate(pieces):
            synchronise(engine, model, synced or number == len(pieces) - 1)
            if routed:
                logits = model(piece)
                one, other = logits[:, 0].square().mean(), logits[:, 1].square().mean()
                elements.backward({ONE: one / micro, (OTHER, PLACES[1]): other / micro})
            else:
                (loss(model, piece) / micro).backward()
        norms.append(float(nn.utils.clip_grad_norm_(elements.parameters(), 0.05)))
        optimizer.step()
    return norms


def full(model):
    """All parameters as they are in one process."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    state = model.state_dict()
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}


def equal(model, other):
    one, another = full(model), full(other)
    return list(one) == list(another) and all(torch.equal(one[name], another[name]) for name in one)


def same_everywhere(numbers):
    first = numbers.detach().clone()
    distributed.broadcast(first, 0)
    return torch.equal(numbers, first) and bool(numbers.any())


def outside_is_as_before(model, kind=Model, places=PLACES, dtype=torch.float32):
    before, after = made(kind, dtype).state_dict(), full(model)
    assert list(before) == list(after), list(after)
    moved = {name: before[name].ne(after[name]) for name in before}
    for place in places:
        parsed = eg.Place.parse(place)
        tied = [parsed.name, "head.weight"] if parsed.name == "table.weight" else [parsed.name]
        for name in tied:
            moved[name] = eg.at(moved[name])[parsed.index].set(False)
    return not any(bool(each.any()) for each in moved.values())


def digest(tensors):
    content = b"".join(each.detach().contiguous().view(torch.uint8).numpy().tobytes() for each in tensors)
    return hashlib.sha256(content).hexdigest()


def told(engine, model, elements, norms, kind=Model, places=PLACES, dtype=torch.float32):
    """Return the values, whether all else is as it was, and a digest by which ranks are compared."""
    return {
        "values": [leaf.detach().double().tolist() for leaf in elements.parameters()],
        "norms": norms,
        "outside": outside_is_as_before(model, kind, places, dtype),
        "digest": digest(full(model).values()),
        "leaves": digest(elements.parameters()),
    }


def plainly(engine, folder):
    model, elements = prepared(engine)
    norms = train(engine, model, elements)
    save(elements, folder / f"{engine}-{world()[1]}.safetensors", engine)
    return told(engine, model, elements, norms)


def save(elements, path, engine):
    if engine != "ddp" or world()[0] == 0:
        elements.save(path)


def accumulating(engine, folder):
    model, elements = prepared(engine)
    return told(engine, model, elements, train(engine, model, elements, micro=2))


def accumulating_synced(engine, folder):
    model, elements = prepared(engine)
    return told(engine, model, elements, train(engine, model, elements, micro=2, synced=True))


def routing(engine, folder):
    model, elements = prepared(engine)
    norms = train(engine, model, elements, routed=True)
    assert elements[SILENT].grad is None
    return told(engine, model, elements, norms)


def routing_accumulated(engine, folder):
    model, elements = prepared(engine)
    return told(engine, model, elements, train(engine, model, elements, micro=2, routed=True))


def in_bfloat16(engine, folder):
    """Autocast; under `fully_shard` the policy that gathers parameters in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, elements = prepared(engine, policy=policy)

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=engine != "fsdp"):
            return loss_of(model, batch)

    facts = told(engine, model, elements, train(engine, model, elements, loss=loss))
    assert all(leaf.dtype is torch.float32 for leaf in elements.parameters())
    return facts


def of_bfloat16(engine, folder):
    model, elements = prepared(engine, dtype=torch.bfloat16)
    norms = train(engine, model, elements)
    assert all(leaf.dtype is torch.float32 for leaf in elements.parameters())
    return told(engine, model, elements, norms, dtype=torch.bfloat16)


def exactly(engine, folder):
    """Arithmetic without rounding, so that the patches of any number of processes are one file."""
    places = ["table.weight[[1, 8], 2:4]", "head.bias[[0, 9]]"]
    model, elements = prepared(engine, Whole, places)
    optimizer = torch.optim.SGD(elements.parameters(), lr=2.0**-6)
    for step in range(2):
        optimizer.zero_grad()
        (batch,) = words(step)
        model(batch).sum((1, 2)).mean().backward()
        optimizer.step()
    path = folder / f"exact-{engine}-{world()[1]}.safetensors"
    save(elements, path, engine)
    if distributed.is_initialized():
        distributed.barrier()
    facts = told(engine, model, elements, [], Whole, places)
    return facts | {"patch": hashlib.sha256(path.read_bytes()).hexdigest()}


def counting(engine, folder):
    """Return what a step sends, with the elements and without."""
    model, elements = prepared(engine)
    (batch,) = words(0)
    if engine == "ddp":
        heard = []

        def hook(state, bucket):
            heard.append(bucket.buffer().nbytes)
            work = distributed.all_reduce(bucket.buffer().div_(distributed.get_world_size()), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        model.register_comm_hook(None, hook)
        loss_of(model, batch).backward()
        return {"gradients": sum(heard)}
    train(engine, model, elements, steps=[0])
    with Wire() as wire:
        train(engine, model, elements, steps=[1])
    frozen = spread(made().requires_grad_(False))
    probe = torch.zeros(WIDTH, requires_grad=True)
    frozen.table.register_forward_hook(lambda module, args, output: output + probe)
    loss_of(frozen, batch).backward()
    with Wire() as other:
        loss_of(frozen, batch).backward()
    gradients = wire.bytes.pop("c10d::allreduce_")
    assert "c10d::allreduce_" not in other.bytes
    return {"gradients": gradients, "gathered": wire.bytes, "frozen": other.bytes}


EVERYWHERE = [
    plainly,
    accumulating,
    accumulating_synced,
    routing,
    routing_accumulated,
    in_bfloat16,
    of_bfloat16,
    exactly,
]


def engines(folder):
    from tests.support.sharded_torch_checks import CHECKS, compiled, other_layers
    from tests.support.sharded_torch_wrapping import WRAPPINGS

    facts = {
        f"{engine} {check.__name__}": check(engine, folder)
        for engine in ("ddp", "fsdp")
        for check in [*EVERYWHERE, counting]
    }
    slow = [compiled, other_layers, *WRAPPINGS]  # which two processes tell as much about as four
    for check in [check for check in [*CHECKS, *WRAPPINGS] if world()[1] == 2 or check not in slow]:
        facts[check.__name__] = check(folder)
    return facts


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    folder = Path(sys.argv[1])
    try:
        found = engines(folder)
    finally:
        distributed.destroy_process_group()
    rank, count = os.environ["RANK"], os.environ["WORLD_SIZE"]
    (folder / f"facts-{count}-{rank}.json").write_text(json.dumps(found))
