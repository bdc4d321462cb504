"""Every number that a parameter can hold comes back as it was, to the bit: NaNs of all kinds, zeros of both signs."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import elementgrad as eg
from elementgrad._backends.torch.train.parameter import cast
from elementgrad._train.bits import BitArray, cast_array
from elementgrad._train.match import reverse_patch
from elementgrad._train.weights import FileTensor, Weights
from tests.support.frameworks import JAX, TENSORFLOW, TORCH

PATTERNS = {
    "float16": (np.uint16, [0x7E00, 0x7C01, 0xFC55, 0xFE01, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x3C01]),
    "bfloat16": (np.uint16, [0x7FC0, 0x7F81, 0xFF95, 0xFFC1, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x3F81]),
    "float32": (np.uint32, [0x7FC00000, 0x7F800001, 0xFF812345, 0x80000000, 0x00000001, 0x807FFFFF, 0xFF800000, 7]),
    "float64": (np.uint64, [0x7FF8 << 48, (0x7FF0 << 48) + 1, (0xFFF0 << 48) + 5, 1 << 63, 1, (0xFFF0 << 48), 7, 9]),
}
"""Quiet and signalling NaNs of both signs with payloads, minus zero, subnormal numbers, infinities."""
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
CASES = [
    *[(fw, name, None) for fw in (TORCH, TENSORFLOW, JAX) for name in PATTERNS],
    *[(fw, name, "float64") for fw in (TORCH, TENSORFLOW, JAX) for name in ("float16", "bfloat16", "float32")],
    *[(fw, "complex64", dtype) for fw in (TORCH, JAX) for dtype in (None, "complex128")],
]


class Row(keras.layers.Layer):
    """A layer that holds one variable."""

    def __init__(self, values):
        super().__init__(dtype=values.dtype.name)
        self.w = self.add_weight(name="w", shape=values.shape, dtype=values.dtype.name)
        self.w.assign(tf.constant(values))


def drawn(name):
    """Two rows of the same patterns."""
    if name == "complex64":
        return np.stack([drawn("float32").reshape(2, -1, 2).view(np.complex64)[..., 0]] * 2)[:, 0]
    kind, patterns = PATTERNS[name]
    return np.array([patterns, patterns], kind).view(DTYPES[name])


def made(fw, values):
    if fw is TORCH:
        flat = torch.from_numpy(values.view(np.uint8).copy()).view(getattr(torch, values.dtype.name))
        return nn.ParameterDict({"w": nn.Parameter(flat)})
    return Row(values) if fw is TENSORFLOW else {"w": fw.tensor(values, dtype=values.dtype)}


def held(model):
    """The bytes of what a model holds."""
    if isinstance(model, nn.Module):
        return model["w"].detach().contiguous().view(torch.uint8).numpy().tobytes()
    return np.asarray(model["w"] if isinstance(model, dict) else model.w._value.read_value()).tobytes()


@pytest.mark.parametrize(("fw", "name", "dtype"), CASES, ids=[f"{fw.name}-{name}-{dtype}" for fw, name, dtype in CASES])
def test_unmoved_elements_are_bit_identical(fw, name, dtype, tmp_path):
    values = drawn(name)
    model = made(fw, values)
    assert held(model) == values.tobytes()
    elements = eg.trainable(model, "w[0]", dtype=dtype)
    elements.save(tmp_path / "patch.safetensors")
    if fw is JAX:
        assert held(elements.merge()) == values.tobytes()
        elements.values = {"w[0]": 0 * elements.values["w[0]"] + 1}
        elements.undo()
        assert held(elements.merge()) == values.tobytes()
    else:
        assert held(model) == values.tobytes()
        leaf = elements["w[0]"]
        if fw is TORCH:
            leaf.data.fill_(1.0)
        else:
            leaf.assign(tf.ones_like(leaf))
        elements.undo()
        assert held(model) == values.tobytes()
        elements.release()
        assert held(model) == values.tobytes()
    other = made(fw, values)
    applied = eg.apply(other, tmp_path / "patch.safetensors")
    assert held(applied.merge() if fw is JAX else other) == values.tobytes()
    applied.undo()
    assert held(applied.merge() if fw is JAX else other) == values.tobytes()
    weights = Weights({"w": FileTensor.of(values)})
    patch = eg.inspect(tmp_path / "patch.safetensors")
    eg.apply(weights, patch)
    assert weights.tensors["w"].bits.tobytes() == values.tobytes()
    eg.apply(weights, reverse_patch(weights, [patch]), overwrite=True)
    assert weights.tensors["w"].bits.tobytes() == values.tobytes()


@pytest.mark.parametrize("fw", [TORCH, TENSORFLOW], ids=["torch", "tensorflow"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_elements_continue_from_values_written_to_the_parameter(fw, name, tmp_path):
    values = drawn(name)
    before = np.stack([np.zeros_like(values[0]), values[1]])
    model, other = made(fw, before), made(fw, before)
    elements = eg.trainable(model, "w[0]")
    if fw is TORCH:
        with torch.no_grad():
            model["w"][0].copy_(made(fw, values)["w"][0])
    else:
        model.w.assign(tf.constant(values))
    elements.parameters() if fw is TORCH else elements.variables
    assert held(model) == values.tobytes()
    elements.save(tmp_path / "patch.safetensors")
    eg.apply(other, tmp_path / "patch.safetensors")
    assert held(other) == values.tobytes()


@pytest.mark.parametrize(
    ("before", "after"), [("float16", "float32"), ("bfloat16", "float32"), ("bfloat16", "float64")]
)
def test_every_number_of_half_precision_comes_back_from_a_wider_dtype(before, after):
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[before])
    wide = cast_array(every, DTYPES[after])
    assert cast_array(wide, DTYPES[before]).tobytes() == every.tobytes()
    numbers = BitArray.of(every)
    assert numbers.round_to(after).bits.tobytes() == wide.tobytes()
    assert numbers.round_to(after).round_to(before) == numbers
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    tensor = bits.view(getattr(torch, before))
    assert torch.equal(cast(cast(tensor, getattr(torch, after)), tensor.dtype).view(torch.int16), bits)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_elements_beside_are_bit_identical_in_a_compiled_merge(dtype):
    import jax
    import jax.numpy as jnp

    bits = jnp.array([[0x7FC1, 0x3F80, 0x7F81], [0x7E01, 0xFE01, 0x7C01]], jnp.uint16)
    cast = jax.lax.bitcast_convert_type
    params = {"w": cast(bits, dtype)}

    def write(value, array):
        new = cast(array, jnp.int16).at[jnp.array([0]), jnp.array([1])].set(cast(value.astype(dtype), jnp.int16))
        return cast(new, dtype)

    expected = bits
    if dtype == "bfloat16":  # the compiler of JAX 0.12 may itself quiet a NaN beside an integer that it writes
        expected = cast(jax.jit(write)(jnp.ones(1, jnp.float32), params["w"]), jnp.uint16)
        assert not ((expected ^ bits) & ~jnp.uint16(0x40)).any()
    elements = eg.trainable(params, ["w[0, 1]"])
    for merge in (lambda values, params: elements.merge(values), lambda v, p: elements.merge(v, params=p)):
        merged = jax.jit(merge)(elements.values, params)["w"]
        assert cast(merged, jnp.uint16).tolist() == expected.tolist()
    plain = {"w": jnp.arange(6.0, dtype=dtype).reshape(2, 3)}
    elements = eg.trainable(plain, ["w[0, 1]", "w[1]"])

    def loss(values, params):
        return (elements.merge(values, params=params)["w"].astype(jnp.float32) ** 2).sum()

    trained, others = jax.jit(jax.grad(loss, argnums=(0, 1)))(elements.values, plain)
    assert [g.tolist() for g in trained.values()] == [[2.0], [6.0, 8.0, 10.0]]
    assert others["w"].tolist() == [[0.0, 0.0, 4.0], [0.0, 0.0, 0.0]]
