"""What it costs to train some elements of a GPT-2 that processes share by `fully_shard`: against the same, frozen.

The frozen model runs forward, and back to the output of its token embedding, as it must for the elements to hear.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import Row
from benchmarks.training import TEXTS, TOKENS, VOCABULARY, allocated

COUNT, MEMORY_BOUND = 4, 1.05
MEGABYTE = 1e6


class Processes:
    """Processes over gloo, each with the model that trains and the frozen one, which do as they are told."""

    def __init__(self, count: int):
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        path = str(Path(self._folder.name) / "store")
        pairs = [context.Pipe() for _ in range(count)]
        self._ends = [own for own, _ in pairs]
        self._others = [other for _, other in pairs]
        self._running = [
            context.Process(target=_serve, args=(rank, count, path, other)) for rank, (_, other) in enumerate(pairs)
        ]

    def __enter__(self) -> "Processes":
        for process in self._running:
            process.start()
        for other in self._others:
            other.close()  # so that the end of a process ends the wait for its answer
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        for end, process in zip(self._ends, self._running, strict=True):
            if raised is None:
                end.send(None)
            else:
                process.terminate()
            process.join()
        self._folder.cleanup()

    def ask(self, *question: str) -> list[Any]:
        """What each of them answers."""
        for end in self._ends:
            end.send(question)
        return [end.recv() for end in self._ends]


def rows() -> Iterator[Row]:
    with Processes(COUNT) as processes:
        for word in ("elements", "frozen"):
            processes.ask("step", word)
        frozen = max(processes.ask("memory", "frozen"))
        name = f"torch fully_shard, {COUNT} processes, GPT-2: a row and 100 entries"
        yield Row(
            f"{name}, MB of each in all",
            partial(processes.ask, "step", "elements"),
            partial(processes.ask, "step", "frozen"),
            "frozen",
            most_mb=MEMORY_BOUND * frozen,
            memory=lambda step: max(processes.ask("memory", *step.args[1:])),  # type: ignore[attr-defined]
            repeats=3,
        )


def _serve(rank: int, count: int, path: str, end: Connection) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=count)
    held, steps = _elements(rank)
    made = {"elements": (held, steps), "frozen": _frozen(rank)}
    while question := end.recv():
        verb, word = question
        held, step = made[word]
        if verb == "step":
            step()
            end.send(None)
        elif verb == "memory":
            end.send(held() + allocated(step))
        else:
            end.send(_sent(step))
    distributed.destroy_process_group()


def _sharded() -> Any:
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval().requires_grad_(False)
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


def _loss(model: Any, rank: int) -> Any:
    import torch

    tokens = torch.randint(VOCABULARY, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(rank))
    tokens[:, 0] = 5
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _elements(rank: int) -> tuple[Callable[[], float], Callable[[], None]]:
    import torch

    import elementgrad as eg

    model = _sharded()
    elements = eg.trainable(model, ["transformer.wte.weight[5]", "transformer.h.6.mlp.c_fc.weight[:100, 7]"])
    optimizer = torch.optim.AdamW(elements.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model, rank).backward()
        optimizer.step()

    return lambda: _held(model) + 2 * _bytes(elements.parameters()), step


def _frozen(rank: int) -> tuple[Callable[[], float], Callable[[], None]]:
    model = _sharded()
    model.transformer.wte.register_forward_hook(lambda module, args, output: output.requires_grad_())
    return lambda: _held(model), lambda: _loss(model, rank).backward()


def _held(model: Any) -> float:
    from torch.distributed.tensor import DTensor

    return _bytes([each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()])


def _bytes(tensors: Any) -> float:
    return sum(each.nbytes for each in tensors) / MEGABYTE


def _sent(step: Callable[[], None]) -> dict[str, int]:
    """The bytes that a step gives to collectives, by their names."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[str, int] = {}

    class Wire(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function._schema.name
            if name.startswith("c10d::"):
                tensors = [each for each in torch.utils._pytree.tree_leaves(args[0]) if isinstance(each, torch.Tensor)]
                found[name] = found.get(name, 0) + sum(each.nbytes for each in tensors)
            return function(*args, **(kwargs or {}))

    with Wire():
        step()
    return found


SUITES = {"sharded-torch": rows}
