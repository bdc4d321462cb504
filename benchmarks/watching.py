"""What it costs to watch a training step of GPT-2 small, beside PyTorch's own detection of anomalies.

`python -m benchmarks watching` compares whole steps. `python -m benchmarks.watching` measures the time inside of the
watch's own hooks, which is exact where the noise of a step is larger than what is looked for.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from statistics import median
from typing import Any

import elementgrad as eg
from benchmarks.harness import Row

BATCHES = {"2 x 64 tokens": ((2, 64), 1.05), "4 x 256 tokens": ((4, 256), 1.02)}
"""The shape of the tokens, and the most that a watched step may take of a plain one."""


HOOKS = ("_look", "_read_later", "_begin", "_see_outputs", "_see_gradient", "_before_step", "_after_step", "see_norm")
"""The methods of the watch that run in a step."""


def make_steps() -> Iterator[tuple[str, float, Any, Any, Callable[[], None]]]:
    """Yield a label, a bound, the model, its optimizer and a training step."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for label, (shape, bound) in BATCHES.items():
        tokens = torch.randint(50_257, shape)

        def step(tokens: Any = tokens) -> None:
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        yield label, bound, model, optimizer, step


def torch_rows() -> Iterator[Row]:
    """Yield steps that are watched, and steps under `detect_anomaly`, each against the plain step."""
    import torch

    for label, bound, model, optimizer, step in make_steps():

        def several(step: Any = step) -> None:
            for _ in range(2):
                step()

        def watched(several: Any = several, model: Any = model, optimizer: Any = optimizer) -> None:
            with eg.watch(model, optimizer, capture=None):
                several()

        def anomalies(several: Any = several) -> None:
            with torch.autograd.detect_anomaly():
                several()

        title = f"torch steps of GPT-2, {label}"
        yield Row(f"{title}, watched", watched, several, "the plain steps", bound, repeats=3)
        yield Row(f"{title}, detect_anomaly", anomalies, several, "the plain steps", repeats=3)


def measure_hooks(steps: int = 3) -> None:
    """Print the share of a watched step that is spent in the watch's hooks, and the step under `detect_anomaly`.

    It is processor time on one thread, which other programs do not change.
    """
    import torch

    torch.set_num_threads(1)

    from elementgrad._backends.torch.watch import TorchWatcher

    spent, depth = [0.0], [0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:  # one hook may call another
                    spent[0] += time.process_time() - start

        return run

    def run_steps(step: Callable[[], None], around: Any) -> tuple[float, float]:
        times, shares = [], []
        with around:
            for _ in range(steps):
                spent[0], start = 0.0, time.process_time()
                step()
                times.append(time.process_time() - start)
                shares.append(spent[0] / times[-1])
        return median(times), median(shares)

    for name in HOOKS:
        setattr(TorchWatcher, name, timed(getattr(TorchWatcher, name)))
    for label, bound, model, optimizer, step in make_steps():
        step()
        plain, _ = run_steps(step, nullcontext())
        watched, share = run_steps(step, eg.watch(model, optimizer, capture=None))
        anomaly, _ = run_steps(step, torch.autograd.detect_anomaly())
        again, _ = run_steps(step, nullcontext())
        print(
            f"{label}: {share:.2%} of a watched step is in hooks (bound {bound - 1:.0%}); a plain step {plain:.2f} s "
            f"and again {again:.2f} s, watched {watched:.2f} s, under detect_anomaly {anomaly:.2f} s"
        )


SUITES = {"watching": torch_rows}


if __name__ == "__main__":
    measure_hooks()
