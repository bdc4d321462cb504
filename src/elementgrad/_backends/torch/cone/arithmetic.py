"""Rules of elementwise operations, reductions, normalizations, products, transforms and factorizations."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional

from elementgrad._backends.torch import _compat
from elementgrad._backends.torch.cone.rules import (
    RULES,
    Arguments,
    axes_of,
    result_shape,
    rule,
)
from elementgrad._cone.boxes import Box, join, sizes, slices, whole
from elementgrad._cone.maps import (
    Along,
    Group,
    Link,
    Prefix,
    Relation,
    Whole,
    broadcast_axes,
    mix_axes,
    reduce_axes,
    relate_all,
)
from elementgrad._cone.plan import ProgramOp, ProgramValue, Regions, Rule
from elementgrad._cone.rules import CustomRule, PartRule

Tensor = torch.Tensor

# Elementwise


@rule("clone", "_to_copy", "lift_fresh", "alias", "detach", "fill", "masked_fill", "where", "zeros_like")
@rule("ones_like", "full_like", "empty_like", "contiguous", "_conj", "_neg_view", "rsub", "_prelu_kernel")
@rule("log_sigmoid_forward", "hardswish", "index_fill_scalar", "isnan", "isfinite", "resolve_conj", "resolve_neg")
def elementwise_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    result = result_shape(op)
    if any(len(value.shape) > len(result) for value in op.operands):
        return None
    return PartRule(op, [broadcast_axes(value.shape, result) for value in op.operands])


@rule("copy")
def copy_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    """A write of all elements: nothing of what was there before is left."""
    target, source = op.operands
    relations = [None, broadcast_axes(source.shape, result_shape(op))]
    return CustomRule(op, relations, lambda regions, _, box: regions[1].to(target.dtype).expand(sizes(box)))


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def fill_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    """Results that have only the dtype and the device of the operand."""
    operand = op.operands[0]

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        return op.details(torch.empty(0, dtype=operand.dtype))[slices(box)]

    return CustomRule(op, [None], run) if len(op.operands) == 1 else None


# Reductions and normalizations


@rule("sum", "mean", "amax", "amin", "prod", "logsumexp", "var", "std", "var_mean", "std_mean", "nansum", "any", "all")
@rule("norm", "linalg_vector_norm", "argmax", "argmin", "max", "min", "median", "nanmedian", "mode", "count_nonzero")
@rule("aminmax", "kthvalue")
def reduction_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    x = arguments.get("self", arguments.get("input"))
    if len(op.operands) != 1 or not isinstance(x, ProgramValue):
        return elementwise_rule(op, arguments) if _compat.is_pointwise(op.details.func) else None
    axes = axes_of(arguments.get("dim"), len(x.shape))
    keepdim = bool(arguments.get("keepdim", False))
    work = float(prod([x.shape[axis] for axis in axes]))
    return PartRule(op, [reduce_axes(x.shape, result_shape(op), axes, keepdim)], work)


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "sort", "argsort", "_safe_softmax", "logit_softmax")
def softmax_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    x = arguments.get("self", arguments.get("input"))
    if len(op.operands) != 1 or not isinstance(x, ProgramValue):
        return None
    return PartRule(op, [mix_axes(x.shape, axes_of(arguments["dim"], len(x.shape)))])


@rule("huber_loss", "smooth_l1_loss", "mse_loss", "l1_loss", "binary_cross_entropy", "soft_margin_loss")
@rule("binary_cross_entropy_with_logits")
def loss_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    return elementwise_rule(op, arguments) if arguments["reduction"] == 0 else None


@rule("topk")
def topk_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    x = arguments["self"]
    axis = arguments["dim"] % max(1, len(x.shape))
    if not x.shape:
        return None
    links = [
        Link((a,), (a,), Whole((n,), (result_shape(op)[a],)) if a == axis else Along(n, n))
        for a, n in enumerate(x.shape)
    ]
    return PartRule(op, [Relation(x.shape, result_shape(op), tuple(links))])


@rule("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "_cummax_helper")
def cumulative_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    x = arguments["self"]
    if not x.shape or len(op.operands) != 1:
        return None
    axis = arguments["dim"] % len(x.shape)
    links = [Link((a,), (a,), Prefix(n) if a == axis else Along(n, n)) for a, n in enumerate(x.shape)]
    return PartRule(op, [Relation(x.shape, x.shape, tuple(links))])


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    x, inner = arguments["input"], len(arguments["normalized_shape"])
    outer = len(x.shape) - inner
    first = mix_axes(x.shape, range(outer, len(x.shape)))
    relations = [first if value is x else relate_all(value.shape, x.shape) for value in op.operands]

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        y = op.details.run(*regions)[0]
        return y[(..., *slices(box[outer:]))]

    return CustomRule(op, relations, run)


@rule("native_group_norm")
def group_norm_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    x, groups, channels = arguments["input"], arguments["group"], arguments["C"]
    by_group = Group(channels, channels, groups)
    space = [Link((a,), (a,), Whole((n,), (n,))) for a, n in enumerate(x.shape) if a > 1]
    relation = Relation(
        x.shape, x.shape, (Link((0,), (0,), Along(*x.shape[:1] * 2)), Link((1,), (1,), by_group), *space)
    )
    of_channel = Relation((channels,), x.shape, (Link((0,), (1,), by_group),))

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        region, given = regions[0], iter(regions[1:])
        weight, bias = (
            next(given) if isinstance(arguments[name], ProgramValue) else None for name in ("weight", "bias")
        )
        count = by_group.within(box[1]).size
        y = functional.group_norm(region, count, weight, bias, arguments["eps"])
        return y[(slice(None), *slices(box[1:], relation.computed(box)[1:]))]

    return CustomRule(op, [relation, *[of_channel] * (len(op.operands) - 1)], run)


@rule("native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit")
def batch_norm_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    """Statistics that are given leave all axes apart; those of the batch mix all but the channels."""
    x = arguments["input"]
    if len(x.shape) < 2:
        return None
    training = arguments.get("training", False)
    names = ("weight", "bias", "running_mean", "running_var")
    given = {name: arguments[name] for name in names if isinstance(arguments.get(name), ProgramValue)}
    order = [next((name for name, v in given.items() if v is value), None) for value in op.operands]
    axes = [axis for axis in range(len(x.shape)) if axis != 1] if training else []
    relation = mix_axes(x.shape, axes)
    channel = Relation((x.shape[1],), x.shape, (Link((0,), (1,), Along(x.shape[1], x.shape[1])),))

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        slots = [slot for slot, value in enumerate(op.operands) if value is not x]
        parts = {order[slot]: regions[slot] for slot in slots}
        region = regions[op.operands.index(x)]
        # Statistics that the run would update are not given: they do not enter the result.
        running = (None, None) if training else (parts.get("running_mean"), parts.get("running_var"))
        y = functional.batch_norm(
            region, *running, parts.get("weight"), parts.get("bias"), training, 0.0, arguments["eps"]
        )
        return y[slices(box, relation.computed(box))]

    return CustomRule(op, [relation if value is x else channel for value in op.operands], run)


# Products


def _product(op: ProgramOp, *operands: tuple[str, Sequence[int | None]]) -> Rule | None:
    """Return the rule of a product: for each operand by name, the axis of the result for each of its axes."""
    arguments, result = op.details.arguments, result_shape(op)
    relations: dict[int, Relation] = {}
    work = 1.0
    for name, axes in operands:
        value = arguments[name]
        links = []
        for axis, (size, at) in enumerate(zip(value.shape, axes, strict=True)):
            links.append(
                Link((axis,), () if at is None else (at,), Whole((size,), ()) if at is None else Along(size, size))
            )
            work = float(size) if at is None else work
        if id(value) in relations:
            return None
        relations[id(value)] = Relation(value.shape, result, tuple(links))
    row = [relations.get(id(value)) or broadcast_axes(value.shape, result) for value in op.operands]
    return PartRule(op, row, work)


RULES["mm"] = lambda op, _: _product(op, ("self", (0, None)), ("mat2", (None, 1)))
RULES["bmm"] = lambda op, _: _product(op, ("self", (0, 1, None)), ("mat2", (0, None, 2)))
RULES["addmm"] = lambda op, _: _product(op, ("mat1", (0, None)), ("mat2", (None, 1)))
RULES["baddbmm"] = lambda op, _: _product(op, ("batch1", (0, 1, None)), ("batch2", (0, None, 2)))
RULES["mv"] = lambda op, _: _product(op, ("self", (0, None)), ("vec", (None,)))
RULES["addmv"] = lambda op, _: _product(op, ("mat", (0, None)), ("vec", (None,)))
RULES["dot"] = lambda op, _: _product(op, ("self", (None,)), ("tensor", (None,)))
RULES["addr"] = lambda op, _: _product(op, ("vec1", (0,)), ("vec2", (1,)))
RULES["addbmm"] = lambda op, _: _product(op, ("batch1", (None, 0, None)), ("batch2", (None, None, 1)))
RULES["ger"] = lambda op, _: _product(op, ("self", (0,)), ("vec2", (1,)))


@rule("linear")
def linear_rule(op: ProgramOp, arguments: Arguments) -> Rule | None:
    rank = len(arguments["input"].shape)
    return _product(op, ("input", (*range(rank - 1), None)), ("weight", (rank - 1, None)))


# Operations that work on the last axes, on one axis or on all but one, of each example


def _inner(op: ProgramOp, *ranks: int) -> Rule | None:
    """Return the rule of an operation that mixes the last axes of its operands and leaves the others apart.

    Args:
        ranks: how many axes of each operand are mixed, and how many of each result come of it.
    """
    operands, results = ranks[: len(op.operands)], ranks[len(op.operands) :]
    shapes = op.shapes
    if len(operands) + len(results) != len(ranks) or len(results) != len(shapes) or not op.operands:
        return None
    if any(len(value.shape) < inner for value, inner in zip(op.operands, operands, strict=True)):
        return None
    batch = shapes[0][: len(shapes[0]) - results[0]]
    rows: list[list[Relation | None]] = []
    for shape, inner in zip(shapes, results, strict=True):
        if shape[: len(shape) - inner] != batch:
            return None
        row: list[Relation | None] = []
        for value, mixed_axes in zip(op.operands, operands, strict=True):
            outer = len(value.shape) - mixed_axes
            if value.shape[:outer] != batch:
                return None
            links = [Link((i,), (i,), Along(n, n)) for i, n in enumerate(batch)]
            at = tuple(range(outer, len(value.shape)))
            to = tuple(range(len(batch), len(shape)))
            links.append(Link(at, to, Whole(value.shape[outer:], shape[len(batch) :])))
            row.append(Relation(value.shape, shape, tuple(links)))
        rows.append(row)
    return BatchRule(op, rows, len(batch))


class BatchRule(Rule):
    """An operation that runs as it is on some examples of a batch."""

    def __init__(self, op: ProgramOp, relations: list[list[Relation | None]], batch: int):
        self._op = op
        self._batch = batch
        self.relations = relations

    def run(self, regions: Regions, needs: Sequence[Box | None], boxes: Sequence[Box | None]) -> list[Any]:
        results = self._op.details.run(*regions)
        outer: Box | None = None
        for box in boxes:
            outer = join(outer, None if box is None else box[: self._batch])
        return [
            None
            if box is None or result is None
            else y[slices(box, (*(outer or ()), *whole(result.shape[self._batch :])))]
            for y, box, result in zip(results, boxes, self._op.results, strict=True)
        ]


MATRICES: dict[str, tuple[int, ...]] = {
    "linalg_cholesky_ex": (2, 2, 0),
    "cholesky": (2, 2),
    "cholesky_inverse": (2, 2),
    "cholesky_solve": (2, 2, 2),
    "linalg_inv_ex": (2, 2, 0),
    "linalg_matrix_exp": (2, 2),
    "linalg_pinv": (2, 2),
    "linalg_qr": (2, 2, 2),
    "_linalg_svd": (2, 2, 1, 2),
    "_linalg_eigh": (2, 1, 2),
    "_linalg_det": (2, 0, 2, 1),
    "_linalg_slogdet": (2, 0, 0, 2, 1),
    "linalg_lu_factor_ex": (2, 2, 1, 0),
    "linalg_lu": (2, 2, 2, 2),
    "linalg_solve_triangular": (2, 2, 2),
    "linalg_householder_product": (2, 1, 2),
    "linalg_lu_solve": (2, 1, 2, 2),
    "triangular_solve": (2, 2, 2, 2),
    "_linalg_solve_ex": (2, 2, 2, 2, 1, 0),
    "adaptive_max_pool2d": (2, 2, 2),
    "adaptive_max_pool3d": (3, 3, 3),
    "max_unpool2d": (2, 2, 2),
    "max_unpool3d": (3, 3, 3),
    "_pdist_forward": (2, 1),
}
"""How many axes of each operand are mixed, and how many of each result come of it."""


def _matrices(op: ProgramOp, _: Arguments) -> Rule | None:
    return _inner(op, *MATRICES[op.name])


RULES.update(dict.fromkeys(MATRICES, _matrices))


@rule("_fft_c2c", "_fft_r2c", "_fft_c2r")
def fourier_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, result = a["self"], result_shape(op)
    axes = axes_of(a["dim"], len(x.shape))
    links = [Link((i,), (i,), Whole((n,), (result[i],)) if i in axes else Along(n, n)) for i, n in enumerate(x.shape)]
    return PartRule(op, [Relation(x.shape, result, tuple(links))], 20.0)


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_reduce", "index_fill")
def scatter_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x = a["self"]
    if not x.shape or len(set(op.operands)) < len(op.operands):
        return None
    axis = a["dim"] % len(x.shape)
    relations = []
    for value in op.operands:
        if len(value.shape) != len(x.shape):
            relations.append(relate_all(value.shape, x.shape))
            continue
        links = [
            Link((i,), (i,), Whole((n,), (x.shape[i],)) if i == axis else Along(n, x.shape[i]))
            for i, n in enumerate(value.shape)
        ]
        relations.append(Relation(value.shape, x.shape, tuple(links)))
    if any(len(value.shape) == len(x.shape) == 1 and value.shape[0] == 0 for value in op.operands):
        return None

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        if any(region is None for region in regions):  # nothing is written to this part
            return regions[0][_cut(box, x.shape, axis)]
        return op.details(*regions)[_cut(box, x.shape, axis)]

    return CustomRule(op, relations, run)


def _cut(box: Box, shape: tuple[int, ...], axis: int) -> tuple[Any, ...]:
    """Return the index of a part along one axis, of a tensor that is whole along it."""
    return (*[slice(None)] * axis, slice(*box[axis]))


@rule("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, grid, result = a["input"], a["grid"], result_shape(op)
    if x is grid:
        return None
    space = len(result) - 2
    first = [Link((0,), (0,), Along(result[0], result[0]))]
    links = [*first, Link((1,), (1,), Along(result[1], result[1]))]
    links += [Link((i + 2,), (), Whole((x.shape[i + 2],), ())) for i in range(space)]
    points = [*first, *[Link((i + 1,), (i + 2,), Along(result[i + 2], result[i + 2])) for i in range(space)]]
    points.append(Link((space + 1,), (), Whole((space,), ())))
    return PartRule(op, [Relation(x.shape, result, tuple(links)), Relation(grid.shape, result, tuple(points))])


@rule("_cdist_forward")
def distance_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    rank = len(result_shape(op))
    if len(a["x1"].shape) != rank or a["x1"].shape[:-2] != a["x2"].shape[:-2]:
        return None
    lead = range(rank - 2)
    return _product(op, ("x1", (*lead, rank - 2, None)), ("x2", (*lead, rank - 1, None)))


@rule("linalg_cross")
def cross_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x, other = a["self"], a["other"]
    if x.shape != other.shape:
        return None
    relation = mix_axes(x.shape, [a["dim"] % len(x.shape)])
    return PartRule(op, [relation, relation])


@rule("renorm")
def renorm_rule(op: ProgramOp, a: Arguments) -> Rule | None:
    x = a["self"]
    axis = a["dim"] % len(x.shape)
    return PartRule(op, [mix_axes(x.shape, [i for i in range(len(x.shape)) if i != axis])])
