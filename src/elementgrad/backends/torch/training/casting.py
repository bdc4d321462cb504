"""Casts of tensors that keep the bits of a NaN."""

import torch

from elementgrad.backends.casting import LAYOUTS, nan_bits, together

Tensor = torch.Tensor
INTEGERS = {8 * dtype.itemsize: dtype for dtype in (torch.int16, torch.int32, torch.int64)}


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in another dtype; themselves if they are of it."""
    if values.dtype is dtype:
        return values
    if values.is_complex() and dtype.is_complex:
        return torch.view_as_complex(cast(torch.view_as_real(values.resolve_conj()), dtype.to_real()))
    plain = values.to(dtype)
    before, after = (str(each).removeprefix("torch.") for each in (values.dtype, dtype))
    if not {before, after} <= LAYOUTS.keys():
        return plain
    bits = as_integers(values).to(INTEGERS[together(before, after)])
    found = nan_bits(bits, before, after, torch.where).to(INTEGERS[LAYOUTS[after].bits])
    return torch.where(values.isnan(), found, as_integers(plain)).view(dtype)


def as_integers(values: Tensor) -> Tensor:
    """Return the bits of real floats as integers, of which two are equal only if the floats are the same number."""
    return values.view(INTEGERS[8 * values.dtype.itemsize])


def same(one: Tensor, other: Tensor) -> Tensor:
    """Return where values of one dtype are the same to the bit: -0.0 is not 0.0, and a NaN is itself."""
    if one.is_complex():
        pairs = (torch.view_as_real(each.resolve_conj()) for each in (one, other))
        return same(*pairs).all(-1)
    if 8 * one.dtype.itemsize not in INTEGERS:
        return one == other
    return as_integers(one) == as_integers(other)
