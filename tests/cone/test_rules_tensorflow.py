"""Every rule on every box of small tensors: the part that comes of parts, and its gradient, are those of the whole."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from elementgrad._cone.boxes import Box, Interval, whole
from elementgrad._cone.maps import Spread, Window, run_reshape
from elementgrad._cone.plan import plan_need
from elementgrad._names.call import BoundCall, PartialCall
from elementgrad._place.place import Place

tf = pytest.importorskip("tensorflow")
Tensor = Any
Function = Callable[..., Tensor]
MOST_BOXES = 30
INDEX = np.array([[2, 0], [1, 1], [0, 3]])


def _conv(**options: Any) -> Function:
    return lambda x, w: tf.nn.conv2d(x, w, **{"strides": 1, "padding": "SAME", **options})


def _transposed(shape: list[int], **options: Any) -> Function:
    return lambda x, w: tf.nn.conv2d_transpose(x, w, shape, **{"strides": 2, "padding": "SAME", **options})


EXPLICIT = [[0, 0], [2, 1], [0, 3], [0, 0]]
CASES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "elementwise": (lambda x, y: tf.sin(x) * y + tf.where(x > 0, x, y), [(3, 4), (4,)]),
    "swish": (lambda x: tf.nn.silu(x) * tf.nn.leaky_relu(x), [(3, 4)]),
    "sum": (lambda x: tf.reduce_sum(x, (0, 2)), [(3, 4, 2)]),
    "mean, kept": (lambda x: tf.reduce_mean(x, 1, keepdims=True) * x, [(3, 4)]),
    "largest": (lambda x: tf.reduce_max(x, -1), [(3, 4)]),
    "softmax": (tf.nn.softmax, [(3, 4)]),
    "log softmax": (tf.nn.log_softmax, [(3, 4)]),
    "softmax of another axis": (lambda x: tf.nn.softmax(x, 0), [(3, 4)]),
    "top": (lambda x: tf.math.top_k(x, 2).values, [(3, 4)]),
    "cumsum": (lambda x: tf.cumsum(x, 1), [(3, 4)]),
    "cumsum, exclusive, reverse": (lambda x: tf.cumsum(x, 0, exclusive=True, reverse=True), [(4, 3)]),
    "bias": (tf.nn.bias_add, [(2, 3, 4), (4,)]),
    "matmul": (lambda x, y: tf.matmul(x, y, transpose_a=True), [(4, 3), (4, 2)]),
    "matmul, other transposed": (lambda x, y: tf.matmul(x, y, transpose_b=True), [(3, 4), (2, 4)]),
    "batched matmul": (tf.matmul, [(2, 3, 4), (2, 4, 2)]),
    "broadcast matmul": (lambda x, y: tf.matmul(x, y, adjoint_b=True), [(2, 3, 4), (5, 4)]),
    "einsum": (lambda x, y: tf.einsum("bij,bkj->ibk", x, y), [(2, 3, 4), (2, 2, 4)]),
    "inverse": (lambda x: tf.linalg.inv(x + 3.0 * tf.eye(3, dtype=x.dtype)), [(2, 3, 3)]),
    "conv": (_conv(), [(1, 5, 6, 2), (3, 2, 2, 3)]),
    "strided conv": (_conv(strides=[2, 3]), [(1, 7, 6, 2), (3, 2, 2, 2)]),
    "valid conv": (_conv(padding="VALID", strides=2), [(2, 7, 6, 1), (3, 2, 1, 2)]),
    "explicit conv": (_conv(padding=EXPLICIT, strides=2), [(1, 5, 4, 1), (2, 3, 1, 2)]),
    "atrous conv": (lambda x, w: tf.nn.atrous_conv2d(x, w, 2, "SAME"), [(1, 8, 7, 1), (3, 2, 1, 2)]),
    "padding alone": (_conv(padding=[[0, 0], [4, 4], [0, 0], [0, 0]]), [(1, 3, 2, 1), (2, 1, 1, 1)]),
    "conv1d": (lambda x, w: tf.nn.conv1d(x, w, 2, "SAME"), [(1, 7, 2), (3, 2, 2)]),
    "dilated conv1d": (lambda x, w: tf.nn.convolution(x, w, 1, "SAME", dilations=3), [(2, 8, 1), (3, 1, 2)]),
    "space to batch": (lambda x: tf.space_to_batch(x, [2, 3], [[1, 0], [0, 2]]), [(2, 5, 4, 1)]),
    "batch to space": (lambda x: tf.batch_to_space(x, [2, 2], [[1, 0], [0, 1]]), [(8, 3, 2, 1)]),
    "depthwise conv": (
        lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 2, 2, 1], "SAME"),
        [(1, 5, 4, 3), (3, 3, 3, 2)],
    ),
    "conv3d": (lambda x, w: tf.nn.conv3d(x, w, [1, 2, 1, 1, 1], "SAME"), [(1, 4, 3, 3, 1), (2, 3, 2, 1, 2)]),
    "transposed conv": (_transposed([1, 8, 6, 2]), [(1, 4, 3, 3), (3, 4, 2, 3)]),
    "transposed, valid": (_transposed([1, 9, 10, 1], padding="VALID", strides=[3, 4]), [(1, 3, 3, 2), (2, 2, 1, 2)]),
    "transposed 3d": (
        lambda x, w: tf.nn.conv3d_transpose(x, w, [1, 4, 2, 4, 1], [1, 2, 1, 2, 1], "SAME"),
        [(1, 2, 2, 2, 2), (3, 2, 2, 1, 2)],
    ),
    "max pool": (lambda x: tf.nn.max_pool2d(x, 3, 2, "SAME"), [(1, 6, 5, 2)]),
    "explicit max pool": (lambda x: tf.nn.max_pool2d(x, 3, 2, [[0, 0], [2, 1], [0, 2], [0, 0]]), [(1, 6, 5, 1)]),
    "average pool": (lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME"), [(1, 6, 5, 2)]),
    "valid average pool": (lambda x: tf.nn.avg_pool2d(x, [2, 3], [2, 1], "VALID"), [(1, 6, 5, 1)]),
    "nearest": (lambda x: tf.image.resize(x, (7, 4), "nearest"), [(1, 3, 5, 2)]),
    "space to depth": (lambda x: tf.nn.space_to_depth(x, 2), [(1, 4, 6, 2)]),
    "depth to space": (lambda x: tf.nn.depth_to_space(x, 2), [(1, 3, 2, 8)]),
    "reshape": (lambda x: tf.reshape(tf.transpose(tf.reshape(x, (6, 4))), (3, 8)), [(2, 3, 4)]),
    "transpose": (lambda x: tf.transpose(x, (2, 0, 1))[:, tf.newaxis], [(2, 3, 4)]),
    "squeeze": (lambda x: tf.expand_dims(tf.squeeze(x, 1), 0), [(2, 1, 4)]),
    "broadcast": (lambda x: tf.broadcast_to(x, (2, 3, 4)), [(3, 1)]),
    "tile": (lambda x: tf.tile(x, (2, 3)), [(2, 3)]),
    "repeat": (lambda x: tf.repeat(x, 2, 1), [(2, 3)]),
    "pad": (lambda x: tf.pad(x, [(1, 2), (0, 1)]), [(3, 4)]),
    "pad with a number": (lambda x: tf.pad(x, [(1, 2), (0, 1)], constant_values=3.0), [(3, 4)]),
    "reflect": (lambda x: tf.pad(x, [(2, 1), (0, 3)], "REFLECT"), [(3, 4)]),
    "symmetric": (lambda x: tf.pad(x, [(2, 1), (0, 3)], "SYMMETRIC"), [(3, 4)]),
    "slice": (lambda x: tf.slice(x, [1, 2], [2, -1]), [(3, 5)]),
    "strided slice": (lambda x: x[1:, ::2][..., -2:], [(3, 7)]),
    "backwards": (lambda x: x[::-1, 5:0:-2], [(3, 7)]),
    "select": (lambda x: x[1] + x[-1], [(3, 4)]),
    "ellipsis": (lambda x: x[..., 1, tf.newaxis], [(2, 3, 4)]),
    "reverse": (lambda x: tf.reverse(x, [1]), [(3, 4)]),
    "roll": (lambda x: tf.roll(x, (1, -2), (0, 1)), [(3, 4)]),
    "concat": (lambda x, y: tf.concat([x, y, x], 0), [(2, 3), (1, 3)]),
    "stack": (lambda x, y: tf.stack([x, y], -1), [(2, 3), (2, 3)]),
    "unstack": (lambda x: sum(tf.unstack(x, axis=1)[1:]), [(3, 4)]),
    "split": (lambda x: tf.concat(tf.split(x, [1, 3, 2], 1)[::-1], 1), [(2, 6)]),
    "equal split": (lambda x: tf.split(x, 3, 1)[1], [(2, 6)]),
    "gather": (lambda x: tf.gather(x, INDEX, axis=1), [(2, 4)]),
    "computed gather": (lambda x: tf.gather(x, tf.cast(x[:, 0] > 0, tf.int32), axis=1), [(3, 4)]),
    "no rule": (lambda x: tf.linalg.diag(x) + tf.gather_nd(x, [[0], [1]])[0], [(4, 4)]),
    "loop": (lambda x: tf.scan(lambda a, b: a * b + b, x), [(4, 2)]),
    "branch": (lambda x: tf.cond(x[0, 0] > 0, lambda: x * 2, lambda: x * x), [(3, 2)]),
}
WHOLE = {"mean, kept", "computed gather", "no rule", "loop", "branch"}


def record(f: Function, tensors: list[Tensor]) -> Any:
    from elementgrad._backends.tensorflow.cone.program import TensorflowProgram

    call = BoundCall(f, tensors, {})
    return TensorflowProgram(PartialCall(call, call.inputs, [call.find_target(Place())]), tensors, None)


def some_boxes(shape: tuple[int, ...]) -> list[Box]:
    axes = [[Interval(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    boxes = list(itertools.product(*axes))
    return boxes if len(boxes) <= MOST_BOXES else random.Random(0).sample(boxes, MOST_BOXES)


def check(f: Function, shapes: list[tuple[int, ...]]) -> None:
    from elementgrad._backends.tensorflow.cone.program import run_cone

    rng = np.random.default_rng(0)
    tensors = [tf.constant(rng.normal(size=shape)) for shape in shapes]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(tensors)
        y = f(*tensors)
    program = record(f, tensors)
    (of,) = program.outputs
    for box in some_boxes(tuple(y.shape)):
        index = tuple([slice(*interval) for interval in box])
        cone = plan_need(program.ops, of, box)
        np.testing.assert_allclose(run_cone(cone, of, (), None)[0].numpy(), y.numpy()[index], rtol=1e-12, atol=1e-13)
        seed = rng.normal(size=y.numpy()[index].shape)
        full_seed = np.zeros(y.shape)
        full_seed[index] = seed
        wanted = tape.gradient(y, tensors, tf.constant(full_seed), unconnected_gradients="zero")
        parts = program.gradients(cone, of, program.inputs, tf.constant(seed)[None])
        for value, part, expected in zip(program.inputs, parts, wanted, strict=True):
            found = np.zeros(value.shape)
            if part is not None:
                found[tuple([slice(*interval) for interval in cone.needed[value]])] = part[0].numpy()
            np.testing.assert_allclose(found, tf.convert_to_tensor(expected).numpy(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_parts_and_their_gradients_are_those_of_the_whole(name):
    check(*CASES[name])


@pytest.mark.parametrize("case", ["conv", "strided conv", "max pool", "average pool", "depthwise conv"])
def test_an_error_at_the_border_is_found(monkeypatch, case):
    right = Window._seen
    monkeypatch.setattr(Window, "_seen", lambda self, part: right(self, part).shift(part.start == 0))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(*CASES[case])


def test_an_error_in_what_is_written_is_found(monkeypatch):
    right = Spread.overhang

    def wrong(self, result, operand):
        before, behind = right(self, result, operand)
        return (before + 1, behind - 1) if result.start == 0 else (before, behind)

    monkeypatch.setattr(Spread, "overhang", wrong)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(*CASES["transposed conv"])


def test_an_error_in_the_order_of_axes_is_found(monkeypatch):
    monkeypatch.setattr(
        "elementgrad._backends.tensorflow.cone.moves.run_reshape",
        lambda x, relation, box: (
            run_reshape(x, relation, box)
            .reshape([b.size for b in box][::-1])
            .reshape([b.size for b in box])[tuple([slice(None)] * len(box))]
            if box[0].start == 0
            else type(x)(tf.reverse(run_reshape(x, relation, box).x, [0]))
        ),
    )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(*CASES["reshape"])


def test_the_values_of_a_dilated_convolution():
    """TensorFlow has no gradient of it on a CPU."""
    f, rng = _conv(dilations=[2, 3]), np.random.default_rng(0)
    x, w = (tf.constant(rng.normal(size=shape)) for shape in ((1, 8, 7, 1), (3, 2, 1, 2)))
    program, y = record(f, [x, w]), f(x, w).numpy()
    (of,) = program.outputs
    for box in some_boxes(y.shape):
        part = program.evaluate(plan_need(program.ops, of, box), of).numpy()
        np.testing.assert_allclose(part, y[tuple([slice(*interval) for interval in box])], rtol=1e-12, atol=1e-13)


def test_most_operations_need_less_than_all_of_their_operands():
    for name, (f, shapes) in CASES.items():
        if name in WHOLE:
            continue
        program = record(f, [tf.constant(np.random.default_rng(0).normal(size=shape)) for shape in shapes])
        (of,), x = program.outputs, program.inputs[0]
        boxes = [tuple([Interval(p, p + 1) for p in place]) for place in itertools.product(*map(range, of.shape))]
        parts = [plan_need(program.ops, of, box).needed.get(x) for box in boxes]
        assert any(part != whole(x.shape) for part in parts), name


def test_resized_images_are_those_of_the_whole_up_to_float32():
    x = tf.constant(np.random.default_rng(0).normal(size=(1, 4, 5, 2)), tf.float32)
    for method in ("bilinear", "bicubic"):
        f = lambda x, method=method: tf.image.resize(x, (7, 8), method)  # noqa: E731
        y, program = f(x), record(f, [x])
        (of,) = program.outputs
        for place in [(0, 0, 0, 0), (0, 6, 7, 1), (0, 3, 2, 0)]:
            box = tuple([Interval(p, p + 1) for p in place])
            cone = plan_need(program.ops, of, box)
            assert cone.needed[program.inputs[0]] != whole(x.shape)
            np.testing.assert_allclose(
                program.evaluate(cone, of).numpy().item(), y.numpy()[place], rtol=1e-5, atol=1e-6
            )


def test_fused_batch_norm_is_that_of_the_whole():
    rng = np.random.default_rng(0)
    x, scale = (tf.constant(rng.normal(size=shape), tf.float32) for shape in ((2, 3, 3, 4), (4,)))
    for training in (False, True):

        def f(x, scale, training=training):
            given = {} if training else {"mean": np.arange(4.0, dtype="f"), "variance": np.ones(4, "f") * 2}
            return tf.compat.v1.nn.fused_batch_norm(x, scale, np.ones(4, "f"), is_training=training, **given)[0]

        program, y = record(f, [x, scale]), f(x, scale)
        (of,) = program.outputs
        box = (Interval(1, 2), Interval(0, 2), Interval(2, 3), Interval(1, 3))
        part = program.evaluate(plan_need(program.ops, of, box), of)
        np.testing.assert_allclose(part.numpy(), y.numpy()[1:2, 0:2, 2:3, 1:3], rtol=1e-5, atol=1e-6)
