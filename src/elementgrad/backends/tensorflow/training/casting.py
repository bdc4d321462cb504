"""Casts of tensors that keep the bits of a NaN."""

from typing import Any

import tensorflow as tf

from elementgrad.backends.casting import LAYOUTS, nan_bits, together

Tensor = Any
INTEGERS = {8 * dtype.size: dtype for dtype in (tf.int16, tf.int32, tf.int64)}
REAL = {tf.complex64: tf.float32, tf.complex128: tf.float64}


def cast(values: Tensor, dtype: Any) -> Tensor:
    """Return values in another dtype; themselves if they are of it."""
    values, dtype = tf.convert_to_tensor(values), tf.as_dtype(dtype)
    if values.dtype == dtype:
        return values
    if values.dtype.is_complex and dtype.is_complex:
        return tf.bitcast(cast(tf.bitcast(values, REAL[values.dtype]), REAL[dtype]), dtype)
    plain = tf.cast(values, dtype)
    before, after = values.dtype.name, dtype.name
    if not {before, after} <= LAYOUTS.keys():
        return plain
    bits = tf.cast(as_integers(values), INTEGERS[together(before, after)])
    found = tf.cast(nan_bits(bits, before, after, tf.where), INTEGERS[LAYOUTS[after].bits])
    exact = tf.where(tf.math.is_nan(plain), found, as_integers(plain))
    if tf.float64 in (values.dtype, dtype) and tf.float16 not in (values.dtype, dtype):
        exact = _subnormal(values, bits, exact, dtype)
    return tf.bitcast(exact, dtype)


def _subnormal(values: Tensor, bits: Tensor, plain: Tensor, dtype: Any) -> Tensor:
    """Return the bits of a cast from or to float64 with those numbers in it that TensorFlow takes for zero.

    In float32 and bfloat16, the bits of a number below the normal ones count how many of the smallest number it is.
    """
    narrow = values.dtype if dtype == tf.float64 else dtype
    mantissa = LAYOUTS[narrow.name].mantissa
    smallest, normal = 2.0 ** -(126 + mantissa), 2.0**-126
    if dtype == tf.float64:
        count = bits & ((1 << (LAYOUTS[narrow.name].bits - 1)) - 1)
        size = tf.cast(count, tf.float64) * smallest
        return tf.where(count < 1 << mantissa, as_integers(tf.where(bits < 0, -size, size)), plain)
    size = tf.abs(values)
    count = tf.cast(tf.round(size / smallest), plain.dtype)
    return tf.where(size < normal, tf.where(bits < 0, count + plain.dtype.min, count), plain)


def as_integers(values: Tensor) -> Tensor:
    """Return the bits of real floats as integers, of which two are equal only if the floats are the same number."""
    return tf.bitcast(values, INTEGERS[8 * values.dtype.size])


def same(one: Tensor, other: Tensor) -> Tensor:
    """Return where values of one dtype are the same to the bit: -0.0 is not 0.0, and a NaN is itself."""
    if one.dtype.is_complex:
        pairs = (tf.bitcast(each, REAL[each.dtype]) for each in (one, other))
        return tf.reduce_all(same(*pairs), -1)
    if 8 * one.dtype.size not in INTEGERS:
        return one == other
    return as_integers(one) == as_integers(other)
