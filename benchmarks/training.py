"""What it costs to train some elements: against masks, whole parameters, PEFT, and a model that does not train."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import elementgrad as eg
from benchmarks.harness import Row

VOCABULARY, WIDTH, BATCH = 50_257, 768, 64
MASK_GAIN, FROZEN_BOUND = 400, 2.0
TEXTS, TOKENS, MODEL_BOUND, MODEL_MB = 2, 64, 1.08, 0.1
HIDDEN, LONG, COUNTS, FEW = 3072, 1024, (1, 100, 1000, 10_000, 100_000), 100
CHANNELS, KERNEL, CONVOLUTION_COUNTS = 64, 3, (1, 100, 1000)
DENSE_BOUND, INPUT_BOUND = 1.05, 1.1
Step = Callable[[], object]


def torch_rows() -> Iterator[Row]:
    yield from torch_embedding()
    yield from torch_language_model()
    yield from torch_linear()
    yield from torch_convolution()


def allocated(function: Callable[[], object]) -> float:
    """The most megabytes that PyTorch holds at once during a call, beyond what it held before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    results: Any = profiled.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return float(max(0, held.max())) / 1e6


def random_places(name: str, shape: tuple[int, ...], count: int) -> Any:
    """As many elements of a parameter, anywhere."""
    size = int(np.prod(shape))
    flat = np.sort(np.random.default_rng(0).choice(size, count, replace=False))
    return eg.at(name)[np.unravel_index(flat, shape)]


def stepping(optimizer: Any, loss: Callable[[], Any], between: Callable[[], object] = lambda: None) -> Step:
    """One step of training, with something to do between the gradient and its use."""

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        between()
        optimizer.step()

    return step


def torch_embedding() -> Iterator[Row]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    ids, classes = torch.randint(VOCABULARY, (BATCH,)), torch.randint(10, (BATCH,))
    ids[0], head = 0, nn.Linear(WIDTH, 10).requires_grad_(False)
    values = torch.randn(VOCABULARY, WIDTH)

    def loss(table: Any, bias: Any = None) -> Any:
        rows = table(ids)
        return nn.functional.cross_entropy(head(rows if bias is None else rows + bias), classes)

    table = nn.Embedding.from_pretrained(values.clone())
    elements = eg.trainable(table, "weight[0, 5]")
    ours = stepping(torch.optim.Adam(elements.parameters()), lambda: loss(table))

    masked = nn.Embedding.from_pretrained(values.clone(), freeze=False)
    mask = torch.zeros_like(values)
    mask[0, 5] = 1

    def apply_mask() -> None:
        masked.weight.grad *= mask  # type: ignore[operator]

    by_mask = stepping(torch.optim.Adam(masked.parameters()), lambda: loss(masked), apply_mask)

    frozen, bias = nn.Embedding.from_pretrained(values.clone()), nn.Parameter(torch.zeros(WIDTH))
    by_bias = stepping(torch.optim.Adam([bias]), lambda: loss(frozen, bias))

    (gradient,) = torch.autograd.grad(loss(masked), [masked.weight])
    torch.testing.assert_close(torch.autograd.grad(loss(table), [*elements.parameters()])[0], gradient[0, 5:6])
    name = f"torch one of {VOCABULARY} x {WIDTH}, Adam"
    yield Row(name, ours, by_mask, "gradient mask", 1 / MASK_GAIN, repeats=7)
    yield Row(name, ours, by_bias, "frozen, bias vector trains", FROZEN_BOUND)


def torch_language_model() -> Iterator[Row]:
    """GPT-2 small, with its tied embedding: one row of it trains.

    The frozen model runs forward, and back to the output of the token embedding, as it must for the row to hear.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(VOCABULARY, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0))
    row = int(tokens[0, 0])

    def made(trains: bool = False) -> Any:
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config()).eval().requires_grad_(trains)

    def loss(model: Any) -> Any:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    model = made()
    elements = eg.trainable(model, f"transformer.wte.weight[{row}, :]")
    (leaf,) = elements.parameters()
    ours = stepping(torch.optim.Adam([leaf]), lambda: loss(model))

    def first() -> None:
        stepping(torch.optim.Adam([leaf]), lambda: loss(model))()
        leaf.grad = None

    def frozen() -> tuple[Step, Any]:
        other = made()
        other.transformer.wte.register_forward_hook(lambda _, __, output: output.requires_grad_())
        return lambda: loss(other).backward(), None

    def masked() -> tuple[Step, Any]:
        other = made()
        weight = other.transformer.wte.weight.requires_grad_()
        mask = torch.zeros_like(weight)
        mask[row] = 1

        def apply_mask() -> None:
            weight.grad *= mask

        return stepping(torch.optim.Adam([weight]), lambda: loss(other), apply_mask), weight

    def whole() -> tuple[Step, Any]:
        other = made(trains=True)
        return stepping(torch.optim.Adam(other.parameters()), lambda: loss(other)), other.transformer.wte.weight

    def peft() -> tuple[Step, Any]:
        from peft import (  # type: ignore[import-not-found, import-untyped]
            TrainableTokensConfig,
            get_peft_model,
        )

        config = TrainableTokensConfig(token_indices=[row], target_modules=["wte"], task_type="CAUSAL_LM")
        other = get_peft_model(made(), config)
        (delta,) = [parameter for parameter in other.parameters() if parameter.requires_grad]
        return stepping(torch.optim.Adam([delta]), lambda: loss(other)), delta

    name = f"torch GPT-2, one token row, {TEXTS} x {TOKENS}"
    step, _ = frozen()
    yield Row(name, ours, step, "frozen, forward and backward", MODEL_BOUND)
    yield Row(f"{name}, first step", first, step, "frozen, memory", most_mb_over=MODEL_MB, memory=allocated, repeats=3)
    elements.undo()
    (gradient,) = torch.autograd.grad(loss(model), [leaf])
    for baseline, what in ((peft, "PEFT TrainableTokens"), (masked, "gradient mask"), (whole, "full fine-tune")):
        step, weight = baseline()
        step()
        dense = weight.grad[0] if len(weight) == 1 else weight.grad[row]
        torch.testing.assert_close(gradient, dense, rtol=1e-3, atol=1e-6)
        yield Row(name, ours, step, what, repeats=5)


def torch_linear() -> Iterator[Row]:
    import torch

    shape = HIDDEN, WIDTH
    places = {f"{count} elements": random_places("weight", shape, count) for count in COUNTS}
    places |= {"10 rows": eg.at("weight")[:10], "all": eg.at("weight")}
    name = f"torch Linear {HIDDEN} x {WIDTH}, {LONG} tokens, {{}}"
    yield from torch_layer(torch.nn.Linear(WIDTH, HIDDEN), torch.randn(LONG, WIDTH), places, name)


def torch_convolution() -> Iterator[Row]:
    import torch

    layer, x = torch.nn.Conv2d(CHANNELS, CHANNELS, KERNEL), torch.randn(8, CHANNELS, 32, 32)
    places = {
        f"{count} elements": random_places("weight", tuple(layer.weight.shape), count) for count in CONVOLUTION_COUNTS
    }
    places |= {"one channel": eg.at("weight")[5]}
    yield from torch_layer(layer, x, places, f"torch Conv2d {CHANNELS} x {CHANNELS}, {{}}", bound_input=False)


def torch_layer(layer: Any, x: Any, places: dict[str, Any], name: str, bound_input: bool = True) -> Iterator[Row]:
    """Forward and backward of one layer: to its input, and besides to some elements, its whole weight, or nothing."""
    import copy

    import torch

    layer, x = layer.requires_grad_(False), x.requires_grad_()
    other, still = copy.deepcopy(layer), copy.deepcopy(layer)
    other.weight.requires_grad_()
    gradient = torch.randn_like(layer(x))

    def back(module: Any, *wanted: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(module(x), [x, *wanted], gradient)

    for what, place in places.items():
        elements = eg.trainable(layer, place)
        ours, dense, frozen = back(layer, *elements.parameters()), back(other, other.weight), back(still)
        (of_x, some), (dense_of_x, every) = ours(), dense()
        torch.testing.assert_close(of_x, dense_of_x)
        named = torch.tensor(place.select(tuple(every.shape)).flat()).reshape(-1)
        torch.testing.assert_close(some, every.reshape(-1)[named], rtol=1e-3, atol=1e-3)
        few = bound_input and len(some) <= FEW
        yield Row(name.format(what), ours, dense, "gradient of the weight", DENSE_BOUND)
        yield Row(name.format(what), ours, frozen, "no gradient of it", INPUT_BOUND if few else None)
        elements.release()


SUITES = {"training-torch": torch_rows}
