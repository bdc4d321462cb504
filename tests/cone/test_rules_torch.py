"""Every rule on every box of small tensors: the part that comes of parts, and its gradient, are those of the whole."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from elementgrad._backends.torch.cone.program import TorchProgram, run_cone
from elementgrad._cone.boxes import Box, Interval, slices, whole
from elementgrad._cone.maps import Window
from elementgrad._cone.plan import plan_need
from elementgrad._names.call import BoundCall, PartialCall
from elementgrad._place.place import Place

Tensor = torch.Tensor
Function = Callable[..., Tensor]
MOST_BOXES = 60
INDEX = torch.tensor([[2, 0], [1, 1], [0, 3]])
MASK = torch.ones(5, 5, dtype=torch.bool).tril() & torch.ones(5, 5, dtype=torch.bool).triu(-2)


def _attention(**options: object) -> Function:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def _written(x: Tensor) -> Tensor:
    y = x * 2
    y[1:3, ::2] = x[:2, :2] ** 2
    y[:, 1] += x[:, 0]
    return y


CASES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "elementwise": (lambda x, y: torch.sin(x) * y + torch.where(x > 0, x, y), [(3, 4), (4,)]),
    "in place": (lambda x, y: (x * 1).mul_(y).add_(x).clamp_(-1, 1), [(3, 4), (3, 1)]),
    "sum": (lambda x: x.sum((0, 2)), [(3, 4, 2)]),
    "mean of all": (lambda x: x.mean() * x, [(3, 4)]),
    "amax": (lambda x: x.amax(1, keepdim=True), [(3, 4)]),
    "max with indices": (lambda x: x.max(0).values, [(3, 4)]),
    "var": (lambda x: torch.var(x, 1), [(3, 4)]),
    "softmax": (lambda x: x.softmax(0), [(3, 4)]),
    "sort": (lambda x: x.sort(1).values, [(3, 4)]),
    "topk": (lambda x: x.topk(2, 1).values, [(3, 4)]),
    "cumsum": (lambda x: x.cumsum(1), [(3, 4)]),
    "matmul": (lambda x, y: x @ y, [(3, 4), (4, 2)]),
    "batched matmul": (lambda x, y: x @ y, [(2, 3, 4), (2, 4, 2)]),
    "matrix and vector": (lambda x, y: x @ y, [(3, 4), (4,)]),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), [(2, 3, 4), (2, 2, 4)]),
    "linear": (F.linear, [(2, 3, 4), (5, 4), (5,)]),
    "cdist": (torch.cdist, [(3, 4), (5, 4)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [(2, 3, 4), (4,), (4,)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 6, 3), (6,), (6,)]),
    "batch norm": (lambda x, w: F.batch_norm(x, torch.arange(3.0), torch.ones(3) + 1, w), [(2, 3, 4), (3,)]),
    "batch norm in training": (lambda x, w: F.batch_norm(x, None, None, w, training=True), [(2, 3, 4), (3,)]),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(1, 2, 6), (3, 2, 3), (3,)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, padding=(2, 1), dilation=(2, 1)), [(1, 2, 7, 6), (2, 2, 3, 2)]),
    "grouped conv": (lambda x, w: F.conv1d(x, w, padding=1, groups=2), [(1, 4, 5), (4, 2, 3)]),
    "depthwise conv": (lambda x, w: F.conv1d(x, w, groups=3), [(2, 3, 5), (3, 1, 2)]),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), [(1, 1, 3, 3, 3), (2, 1, 2, 2, 2)]),
    "conv with padding alone": (lambda x, w: F.conv1d(x, w, padding=4), [(1, 1, 3), (1, 1, 2)]),
    "transposed conv": (lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 1), [(1, 2, 4), (2, 3, 4), (3,)]),
    "transposed grouped": (
        lambda x, w: F.conv_transpose1d(x, w, stride=3, groups=2, dilation=2),
        [(1, 4, 3), (4, 2, 2)],
    ),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), [(1, 2, 6, 5)]),
    "max pool, dilated, ceil": (lambda x: F.max_pool1d(x, 2, 2, 1, 2, ceil_mode=True), [(1, 2, 8)]),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False, ceil_mode=True), [(1, 1, 6, 5)]),
    "adaptive average pool": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), [(1, 2, 7, 5)]),
    "adaptive max pool": (lambda x: F.adaptive_max_pool2d(x, 2), [(2, 2, 5, 5)]),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), [(1, 1, 3, 2)]),
    "bilinear": (lambda x: F.interpolate(x, (5, 4), mode="bilinear"), [(1, 1, 3, 3)]),
    "bilinear, corners": (lambda x: F.interpolate(x, (5, 4), mode="bilinear", align_corners=True), [(1, 1, 3, 3)]),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"), [(1, 1, 5, 4)]),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), [(1, 4, 2, 3)]),
    "pixel unshuffle": (lambda x: F.pixel_unshuffle(x, 2), [(1, 1, 4, 2)]),
    "attention": (_attention(), [(1, 2, 4, 3), (1, 2, 5, 3), (1, 2, 5, 2)]),
    "causal attention": (_attention(is_causal=True), [(1, 2, 5, 3)] * 3),
    "masked attention": (_attention(attn_mask=MASK), [(1, 2, 5, 3)] * 3),
    "reshape": (lambda x: x.reshape(6, 4).T.reshape(3, 8), [(2, 3, 4)]),
    "permute": (lambda x: x.permute(2, 0, 1).squeeze().unsqueeze(1), [(2, 1, 4)]),
    "expand": (lambda x: x.expand(2, 3, 4), [(3, 1)]),
    "slice": (lambda x: x[1:, ::2][:, -2:], [(3, 7)]),
    "select": (lambda x: x[1] + x[-1], [(3, 4)]),
    "unbind": (lambda x: sum(x.unbind(1)[1:]), [(3, 4)]),
    "split": (lambda x: torch.cat(x.split([1, 3, 2], 1)[::-1], 1), [(2, 6)]),
    "cat": (lambda x, y: torch.cat([x, y, x], 0), [(2, 3), (1, 3)]),
    "stack": (lambda x, y: torch.stack([x, y], -1), [(2, 3), (2, 3)]),
    "constant padding": (lambda x: F.pad(x, (1, 2, 0, -1), value=3.0), [(3, 4)]),
    "reflection": (lambda x: F.pad(x, (2, 1), mode="reflect"), [(1, 2, 4)]),
    "replication": (lambda x: F.pad(x, (2, 1, 1, 0), mode="replicate"), [(1, 2, 3, 3)]),
    "circular padding": (lambda x: F.pad(x, (2, 1), mode="circular"), [(1, 2, 4)]),
    "roll": (lambda x: x.roll((1, -2), (0, 1)), [(3, 4)]),
    "flip": (lambda x: x.flip(1), [(3, 4)]),
    "repeat": (lambda x: x.repeat(2, 1, 2), [(2, 3)]),
    "triangle": (lambda x: x.tril(-1) + x.triu(1), [(4, 4)]),
    "diagonal": (lambda x: x.diagonal(1), [(4, 5)]),
    "unfold": (lambda x: x.unfold(1, 3, 2), [(2, 7)]),
    "embedding": (lambda w: F.embedding(INDEX, w, padding_idx=1), [(4, 3)]),
    "index": (lambda x: x[:, INDEX], [(2, 4)]),
    "gather": (lambda x: x.gather(1, INDEX), [(3, 4)]),
    "scatter": (lambda x, y: x.scatter_add(1, INDEX, y), [(3, 4), (3, 2)]),
    "index add": (lambda x, y: x.index_add(0, torch.tensor([2, 0]), y), [(3, 4), (2, 4)]),
    "grid sample": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), [(1, 2, 4, 4), (1, 3, 2, 2)]),
    "inverse": (lambda x: torch.linalg.inv(x @ x.mT + 3 * torch.eye(3)), [(2, 3, 3)]),
    "fourier": (lambda x: torch.fft.rfft(x, dim=1).abs(), [(3, 4)]),
    "written to views": (_written, [(4, 4)]),
    "dropout": (lambda x: F.dropout(F.dropout(x, 0.3) * x, 0.5), [(4, 5)]),
    "known indices of a computed mask": (lambda x: x[x > 0].cumsum(0), [(12,)]),
}


def record(f: Function, tensors: list[Tensor]) -> TorchProgram:
    call = BoundCall(f, tensors, {})
    sources = call.inputs
    return TorchProgram(PartialCall(call, sources, [call.find_target(Place())]), tensors)


def some_boxes(shape: tuple[int, ...]) -> list[Box]:
    axes = [[Interval(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    boxes = list(itertools.product(*axes))
    return boxes if len(boxes) <= MOST_BOXES else random.Random(0).sample(boxes, MOST_BOXES)


def check(f: Function, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    leaves = [x.clone().requires_grad_() for x in tensors]
    state = torch.get_rng_state()
    y = f(*leaves)
    torch.set_rng_state(state)
    program = record(f, tensors)
    (of,) = program.outputs
    for box in some_boxes(tuple(y.shape)):
        cone = plan_need(program.ops, of, box)
        part, ends = run_cone(cone, of, program.inputs)
        expected = y[slices(box, whole(y.shape))]
        torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-13)
        seed = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, leaves, seed, retain_graph=True, materialize_grads=True)
        # A part that sees padding alone depends on nothing.
        kept = list(ends) if part.requires_grad else []
        found = torch.autograd.grad(part, [ends[value] for value in kept], seed, materialize_grads=True) if kept else []
        for value, expected in zip(program.inputs, wanted, strict=True):
            full = torch.zeros(value.shape, dtype=torch.float64)
            for other, gradient in zip(kept, found, strict=True):
                if other is value:
                    full[slices(cone.needed[value], whole(value.shape))] = gradient
            torch.testing.assert_close(full, expected, rtol=1e-11, atol=1e-12)


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_parts_and_their_gradients_are_those_of_the_whole(name):
    check(*CASES[name])


def test_an_error_at_the_border_is_found(monkeypatch):
    right = Window._seen
    monkeypatch.setattr(Window, "_seen", lambda self, part: right(self, part).shift(part.start == 0))
    with pytest.raises(AssertionError, match="not close"):
        check(*CASES["conv1d"])


def test_most_operations_need_less_than_all_of_their_operands():
    """Each case whose mathematics allows it needs less than all of its first operand for its first element."""
    mixing = {"mean of all", "known indices of a computed mask", "embedding", "cat"}
    for name, (f, shapes) in CASES.items():
        if name in mixing:
            continue
        program = record(f, [torch.rand(shape) for shape in shapes])
        (of,), x = program.outputs, program.inputs[0]
        boxes = [tuple([Interval(p, p + 1) for p in place]) for place in itertools.product(*map(range, of.shape))]
        parts = [plan_need(program.ops, of, box).needed.get(x) for box in boxes]
        assert any(part != whole(x.shape) for part in parts), name
