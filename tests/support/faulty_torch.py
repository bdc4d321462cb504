"""The runs of `faulty_runs.py` on PyTorch."""

import torch

import elementgrad as eg
from tests.support.faulty_runs import BLOCKS, WIDTH, Case, batch_at, weights


class Block(torch.nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.weight = torch.nn.Parameter(torch.from_numpy(weights()[number].copy()))
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, h, batch):
        a, b, c, d, e = [batch[name][:, self.number] for name in "abcde"]
        h = self.dropout(h @ self.weight)
        h = torch.sqrt(torch.nn.functional.softplus(h) * a)  # sqrt
        h = (h * b) / c  # divide
        h = torch.exp(d - h)  # exp
        return torch.log(h + e)  # log


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(number) for number in range(BLOCKS)])
        self.norm = torch.nn.BatchNorm1d(WIDTH)

    def forward(self, batch):
        h = self.norm(batch["x"])
        for block in self.blocks:
            h = block(h, batch)
        return h


def run(
    case: Case, capture: str, wrap=lambda model: model, micro_batches: int = 1, clip: bool = False, amp: bool = False
):
    torch.manual_seed(0)
    net = Net()
    model = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=2.0**8)
    weight = net.blocks[case.block].weight
    name = f"blocks.{case.block}.weight[{case.index[0]}]"
    rules = {name: lambda g: abs(g).max() > 1e5} if case.fault == "exploding" else "nonfinite"
    try:
        with eg.watch(model, optimizer, capture=capture, when=rules) as watch:
            for step in range(case.steps):
                if step == case.step and case.fault == "inf in a parameter":
                    with torch.no_grad():
                        weight[case.index] = float("inf")
                if step == case.step and case.fault == "optimizer":
                    optimizer.state[weight]["exp_avg_sq"][case.index] = -1.0
                optimizer.zero_grad()
                for part in range(micro_batches):
                    batch = {
                        key: torch.from_numpy(x)
                        for key, x in batch_at(case, step if part == 0 else 1000 + step).items()
                    }
                    out = model(batch)
                    loss = out.square().mean()
                    if step == case.step and case.fault == "exploding":
                        loss = loss + 1e9 * weight[case.index]
                    scaler.scale(loss).backward()
                if clip:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
    except eg.WatchError as error:
        return error, watch.replay()
    return None, None
