"""One of two processes that train a model with DDP, of which the second gets a bad batch; prints its error."""

import json
import os
import sys

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import elementgrad as eg


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)

    def forward(self, x, sqrt=False):
        h = self.inner(x)
        return torch.sqrt(h - h.detach()) if sqrt else h


def main(folder: str, fault: str) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=fault == "scaled parameter")
    error, step = None, 0
    try:
        with eg.watch(model, optimizer, capture=os.path.join(folder, f"rank{rank}.capture")):
            for step in range(4):
                x = torch.randn(4, 3)
                bad = step == 2 and rank == 1
                if bad and fault == "batch":
                    x[1, 2] = float("nan")
                if bad and fault == "scaled parameter":
                    model.module.inner.weight.data[0, 1] = float("nan")
                optimizer.zero_grad()
                scaler.scale(model(x, bad and fault == "gradient").square().sum()).backward()
                scaler.step(optimizer)
                scaler.update()
    except eg.WatchError as caught:
        error = caught
    fields = ("step", "place", "cause", "rank", "capture", "where")
    found = None if error is None else {name: getattr(error, name) for name in fields} | {"ran": step}
    print(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
