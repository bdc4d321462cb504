"""Rules of elementwise operations, reductions, products and normalizations."""

from math import prod
from typing import Any

import tensorflow as tf

from elementgrad._backends.tensorflow.cone.rules import RULES, cut, known, rule
from elementgrad._backends.tensorflow.sparsity_rules import ELEMENTWISE, FOURIER, MATRICES, REDUCTIONS
from elementgrad._cone.boxes import Box, sizes
from elementgrad._cone.maps import (
    Along,
    AxisMap,
    Fixed,
    Link,
    Prefix,
    Relation,
    Whole,
    Window,
    broadcast_axes,
    mix_axes,
    reduce_axes,
)
from elementgrad._cone.plan import ProgramOp, ProgramValue, Rule
from elementgrad._cone.rules import CustomRule, PartRule

Tensor = Any
OTHER_ELEMENTWISE = "Mul MulNoNan ReluGrad SelectV2 ZerosLike OnesLike Bucketize Bitcast"


@rule(*ELEMENTWISE.split(), *OTHER_ELEMENTWISE.split(), "custom_gradient of one element")
def elementwise_rule(op: ProgramOp) -> Rule | None:
    result = op.shapes[0]
    if len(op.results) != 1 or any(not _broadcasts(value.shape, result) for value in op.operands):
        return None
    relations = [broadcast_axes(value.shape, result) for value in op.operands]
    if op.name == "EnsureShape":
        return CustomRule(op, relations, lambda regions, needs, box: tf.identity(regions[0]))
    return PartRule(op, relations)


def _broadcasts(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    lead = len(result) - len(shape)
    return lead >= 0 and all(size in (1, result[lead + axis]) for axis, size in enumerate(shape))


@rule("Select")
def select_rule(op: ProgramOp) -> Rule | None:
    same = all(value.shape == op.shapes[0] for value in op.operands)
    return RULES["SelectV2"](op) if same else None


@rule(*REDUCTIONS.split())
def reduction_rule(op: ProgramOp) -> Rule | None:
    x, axes = op.operands[0], known(op.operands[1])
    if axes is None or not x.shape:
        return None
    over = [int(axis) % len(x.shape) for axis in axes.reshape(-1)]
    relation = reduce_axes(x.shape, op.shapes[0], over, op.details.attribute("keep_dims"))
    return PartRule(op, [relation, None], float(prod([x.shape[axis] for axis in over])))


@rule("ArgMax", "ArgMin")
def argument_rule(op: ProgramOp) -> Rule | None:
    x, axis = op.operands[0], known(op.operands[1])
    if axis is None or not x.shape:
        return None
    return PartRule(op, [reduce_axes(x.shape, op.shapes[0], [int(axis) % len(x.shape)], False), None])


@rule("Softmax", "LogSoftmax")
def softmax_rule(op: ProgramOp) -> Rule | None:
    x = op.operands[0]
    return PartRule(op, [mix_axes(x.shape, [len(x.shape) - 1])], 4.0)


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def cumulative_rule(op: ProgramOp) -> Rule | None:
    x, axis = op.operands[0], known(op.operands[1])
    if axis is None or not x.shape:
        return None
    along = int(axis) % len(x.shape)
    prefix = Prefix(x.shape[along], bool(op.details.attribute("reverse")))
    links = [Link((i,), (i,), prefix if i == along else Along(n, n)) for i, n in enumerate(x.shape)]
    return PartRule(op, [Relation(x.shape, x.shape, tuple(links)), None])


def mix_last_rule(op: ProgramOp, count: int) -> Rule | None:
    """Return the rule of an operation on the last axes, in which all that is before them is apart."""
    result = op.shapes[0]
    lead = len(result) - count
    relations: list[Relation | None] = []
    for value in op.operands:
        if len(value.shape) != len(result) or value.shape[:lead] != result[:lead]:
            if known(value) is None:
                return None
            relations.append(None)
            continue
        last = tuple(range(lead, len(result)))
        links = [Link((i,), (i,), Along(n, n)) for i, n in enumerate(result[:lead])]
        links.append(Link(last, last, Whole(value.shape[lead:], result[lead:])))
        relations.append(Relation(value.shape, result, tuple(links)))
    # What mixes a whole axis is computed whole along it, and cut.
    return PartRule(op, relations) if any(relation is not None for relation in relations) else None


for _name, _count in {**FOURIER, **dict.fromkeys(MATRICES.split(), 2), "TopKV2": 1, "Cross": 1}.items():
    RULES[_name] = lambda op, count=_count: mix_last_rule(op, count)  # type: ignore[misc]


@rule("LRN")
def local_response_rule(op: ProgramOp) -> Rule | None:
    x, radius = op.operands[0], int(op.details.attribute("depth_radius"))
    last = len(x.shape) - 1
    window = Window(x.shape[last], x.shape[last], 2 * radius + 1, 1, radius)
    links = [Link((i,), (i,), window if i == last else Along(n, n)) for i, n in enumerate(x.shape)]

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        return cut(op.details.run(regions[0])[0], box, needs[0])

    return CustomRule(op, [Relation(x.shape, x.shape, tuple(links))], run, 2.0 * radius)


@rule("BiasAdd", "BiasAddV1")
def bias_rule(op: ProgramOp) -> Rule | None:
    x, bias = op.operands
    first = op.name == "BiasAdd" and op.details.attribute("data_format") == "NCHW"
    channel = 1 if first else len(x.shape) - 1
    relation = Relation(bias.shape, x.shape, (Link((0,), (channel,), Along(*bias.shape * 2)),))
    return PartRule(op, [broadcast_axes(x.shape, x.shape), relation])


# Products


def label_relation(shape: tuple[int, ...], labels: str, result: tuple[int, ...], result_labels: str) -> Relation:
    """Return the relation of a factor of a product whose axes have labels; those not in the result are summed over."""
    links = []
    for axis, (size, label) in enumerate(zip(shape, labels, strict=True)):
        at = result_labels.find(label)
        if at < 0:
            links.append(Link((axis,), (), Whole((size,), ())))
        else:
            axis_map: AxisMap = Fixed(0, (result[at],)) if size == 1 != result[at] else Along(size, result[at])
            links.append(Link((axis,), (at,), axis_map))
    return Relation(shape, result, tuple(links))


def _product(op: ProgramOp, labels: list[str], result_labels: str) -> Rule:
    extents = {
        label: size
        for value, own in zip(op.operands, labels, strict=True)
        for label, size in zip(own, value.shape, strict=True)
        if label not in result_labels
    }
    relations = [
        label_relation(value.shape, own, op.shapes[0], result_labels)
        for value, own in zip(op.operands, labels, strict=True)
    ]
    return PartRule(op, relations, float(prod(extents.values())))


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matmul_rule(op: ProgramOp) -> Rule | None:
    names = ("transpose_a", "transpose_b") if op.name == "MatMul" else ("adj_x", "adj_y")
    flips = [op.details.attribute(name) for name in names]
    rank = len(op.shapes[0])
    batch = "abcdefgh"[: rank - 2]
    ends = ["ji" if flips[0] else "ij", "kj" if flips[1] else "jk"]
    labels = [
        batch[rank - len(value.shape) :] + end if len(value.shape) > 2 else end
        for value, end in zip(op.operands, ends, strict=True)
    ]
    return _product(op, labels, batch + "ik")


@rule("Einsum")
def einsum_rule(op: ProgramOp) -> Rule | None:
    left, right = op.details.attribute("equation").replace(" ", "").split("->")
    labels = left.split(",")
    if "." in left or any(len(set(own)) < len(own) for own in (*labels, right)):
        return None
    return _product(op, labels, right)


# Normalization


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def batch_norm_rule(op: ProgramOp) -> Rule | None:
    x = op.operands[0]
    channel = 1 if op.details.attribute("data_format").startswith("NC") else len(x.shape) - 1
    training = op.details.attribute("is_training")

    def per_channel(value: ProgramValue) -> Relation | None:
        links = (Link((0,), (channel,), Along(*value.shape * 2)),)
        return Relation(value.shape, x.shape, links) if prod(value.shape) else None

    mixed = [axis for axis in range(len(x.shape)) if axis != channel]
    own = mix_axes(x.shape, mixed) if training else broadcast_axes(x.shape, x.shape)
    relations = [own, *[per_channel(value) for value in op.operands[1:]]]

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        filled = [tf.zeros([0], op.operands[1].dtype) if region is None else region for region in regions]
        made = op.details.run(*filled)[0]
        return cut(made, box, own.computed(box)) if sizes(box) != tuple(made.shape) else made

    return CustomRule(op, relations, run, 2.0)
