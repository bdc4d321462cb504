"""Comparison of gradients of elements with those of the whole model."""

import copy
from itertools import product

import numpy as np
import torch
from torch import nn

import elementgrad as eg
from elementgrad._backends.torch.train.kernels import TorchProduct
from tests.support.training_models import differing

CLOSE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.complex64: 1e-6, torch.complex128: 1e-12}


HOW = ("one", "row", "scattered", "all")


def chosen(shape, how, rng):
    """Positions in a tensor of a shape, in no order."""
    size = int(np.prod(shape))
    if how == "one":
        return rng.integers(size, size=1)
    if how == "row":
        return np.arange(size).reshape(shape)[int(rng.integers(shape[0]))].reshape(-1)
    if how == "all":
        return np.arange(size)
    return rng.permutation(size)[: max(1, size // 2)]


def places_of(model, how, seed=0):
    """A place in every parameter, each parameter once."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if parameter.numel():
            found[name] = eg.at(name).coords(np.stack(np.unravel_index(chosen(shape, how, rng), shape), 1))
    return list(found.values())


def assert_entries(found, dense, place, close):
    """Entries of a gradient, up to a fraction of its largest."""
    at = torch.from_numpy(place.select(tuple(dense.shape)).flat().reshape(-1).copy())
    expected = dense.reshape(-1)[at]
    largest = float(dense.abs().max()) if dense.numel() else 0.0
    difference = float((found.to(expected.dtype) - expected).abs().max())
    assert difference <= close * largest + SMALLEST[dense.dtype], (
        f"{place}: {difference / max(largest, 1e-300):.2e} of the largest gradient"
    )


SMALLEST = {dtype: 4 * torch.finfo(dtype).eps for dtype in (*CLOSE, torch.bfloat16, torch.float16)}
"""What a gradient may differ by that is zero but for rounding."""


def flat(output):
    if isinstance(output, torch.Tensor):
        return [output]
    return [tensor for part in output for tensor in flat(part)] if isinstance(output, tuple | list) else []


def differentiable(inputs):
    return [
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
        else x
        for x in inputs
    ]


def backward(outputs):
    torch.manual_seed(1)
    outputs = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])


def limit(close, dtype):
    """The tolerance of gradients; wider for float32 and less, where the order of sums shows."""
    return CLOSE[dtype] if close is None or dtype == torch.float64 else close


def assert_gradients(model, places, *inputs, close=None, call=None, scaled=None, like_frozen=True, of_input=True):
    """Output, gradients of the elements and of the inputs, against the plain model's.

    The output has the bits of the frozen model's. Where PyTorch itself computes with other functions, or multiplies in
    another order, once a weight requires a gradient (`like_frozen=False`), a frozen model cannot have the bits of any
    that trains. They are then those of the model in which just the parameters with elements require gradients. A model
    with layers of both kinds (`like_frozen=None`) has the bits of neither.
    """
    call = call or (lambda model, *inputs: model(*inputs))
    plain, frozen = copy.deepcopy(model).requires_grad_(True), copy.deepcopy(model).requires_grad_(False)
    if scaled:
        plain.scale_grad_by_freq = False
    elements = eg.trainable(model, places)
    if like_frozen is False:
        for place in elements:
            frozen.get_parameter(place.name).requires_grad_()
    given, expected, alone = [differentiable(inputs) if of_input else inputs for _ in range(3)]
    outputs, dense = flat(call(model, *given)), flat(call(plain, *expected))
    for output, same in zip(outputs, flat(call(frozen, *alone)), strict=True):
        assert output.dtype == same.dtype
        if like_frozen is None:
            assert (output - same).abs().max() <= 10 * limit(close, same.dtype) * same.abs().max()
        else:
            assert output.stride() == same.stride()
            assert not differing(output, same).any(), "the output is not the frozen model's"
    backward(outputs)
    backward(dense)
    gradients = {name: tensor.grad for name, tensor in plain.named_parameters(remove_duplicate=False)}
    for place in elements:
        gradient = gradients[place.name]
        gradient = torch.zeros_like(plain.get_parameter(place.name)) if gradient is None else gradient
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        gradient = scaled(plain, gradient, inputs[0]) if scaled else gradient
        leaf = elements[place]
        found = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert_entries(found, gradient, place, limit(close, gradient.dtype))
    for x, same in zip(given, expected, strict=True):
        if isinstance(x, torch.Tensor) and x.requires_grad and same.grad is not None:
            largest = float(same.grad.abs().max()) if same.grad.numel() else 0.0
            assert x.grad is not None, "the input hears nothing"
            if x.numel():
                assert (
                    float((x.grad - same.grad).abs().max()) <= limit(close, same.dtype) * largest + SMALLEST[same.dtype]
                )
    held = dict(frozen.named_parameters(remove_duplicate=False))
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name in held)
    return elements


WAYS = {
    "as chosen": lambda patch: None,
    "gather": lambda patch: only(patch, "gather"),
    "block": lambda patch: only(patch, "block"),
    "sample": lambda patch: only(patch, "sample"),
}


def only(patch, way):
    def cheapest(self, *ways):
        return getattr(self, f"_{way if way in ways else ways[0]}")

    patch.setattr(TorchProduct, "_cheapest", cheapest)


def numbers(*shape):
    return lambda dtype: torch.randn(shape, dtype=dtype)


def tokens_below(rows, *shape):
    return lambda dtype: torch.randint(rows, shape)


def assert_layer(build, inputs, every_way=HOW, **options):
    """A layer with each choice of elements, in both precisions."""
    for how, dtype in product(every_way, (torch.float32, torch.float64)):
        torch.manual_seed(0)
        model = build().to(dtype)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        xs = [make(dtype) for make in inputs]
        assert_gradients(copy.deepcopy(model), places_of(model, how), *xs, **options)
        if how == "scattered":  # and the inputs ask for nothing
            assert_gradients(model, places_of(model, how), *xs, of_input=False, **options)
