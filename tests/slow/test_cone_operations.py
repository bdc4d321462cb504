"""Every operation of PyTorch, by the samples that it is tested with: parts and gradients are those of the whole."""

import sys
import unittest
import warnings
from types import ModuleType

import pytest
import torch

from elementgrad._backends.torch.cone.program import run_cone
from elementgrad._cone.boxes import Box, Interval, slices, whole
from elementgrad._cone.plan import NoConeError, plan_need
from tests.cone.test_rules_torch import record

Tensor = torch.Tensor
MOST_SAMPLES = 6
LEFT_OUT = ("empty", "new_empty", "jiterator")
"""Operations whose results are whatever is in memory, and those for GPUs, by how their names begin."""


@pytest.fixture(scope="module")
def operations():
    """PyTorch's table of operations, which imports a package that only its own tests use."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stand_in: object = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        patch.setitem(sys.modules, "expecttest", stand_in)
        from torch.testing._internal.common_methods_invocations import op_db
    return [
        operation
        for operation in op_db
        if torch.float64 in operation.dtypes and not operation.name.startswith(LEFT_OUT)
    ]


def elements(shape: tuple[int, ...]) -> list[Box]:
    corners = [0] * len(shape), [n - 1 for n in shape], [n // 2 for n in shape]
    return [tuple([Interval(p, p + 1) for p in place]) for place in dict.fromkeys(map(tuple, corners))]


def compare(f, x: Tensor) -> bool | None:
    """Compare some elements; return True if one needs less than all of `x`, and None for what has no cone."""
    leaf = x.clone().requires_grad_()
    torch.manual_seed(0)
    try:
        y = f(leaf)
        if not isinstance(y, Tensor) or not y.is_floating_point() or not y.numel():
            return None
    except (RuntimeError, TypeError):  # samples of other dtypes, which fail without us too
        return None
    torch.manual_seed(0)
    try:
        program = record(f, [x.clone()])
    except NoConeError:
        return None
    (of,), value, small = program.outputs, program.inputs[0], False
    for box in elements(tuple(y.shape)):
        cone = plan_need(program.ops, of, box)
        part, ends = run_cone(cone, of, program.inputs)
        expected = y[slices(box, whole(y.shape))]
        torch.testing.assert_close(part, expected, rtol=1e-10, atol=1e-11, equal_nan=True)
        small |= cone.needed.get(value) != whole(x.shape)
        if not y.requires_grad:
            continue
        try:
            (plain,) = torch.autograd.grad(expected.sum(), leaf, retain_graph=True, materialize_grads=True)
        except (RuntimeError, NotImplementedError):  # PyTorch has no derivative of it
            continue
        found = torch.zeros_like(plain)
        if part.requires_grad and value in ends:
            (gradient,) = torch.autograd.grad(part.sum(), ends[value], materialize_grads=True)
            found[slices(cone.needed[value], whole(x.shape))] = gradient
        # The whole has NaN, of zero times infinity, at elements that the part does not depend on, or not at all.
        both = ~plain.isnan()
        torch.testing.assert_close(found[both], plain[both], rtol=1e-9, atol=1e-10, equal_nan=True)
    return small


@pytest.mark.filterwarnings("ignore")
def test_operations_are_right_and_most_need_less_than_all(operations):
    narrow, wide = set(), set()
    for operation in operations:
        name = f"{operation.name} {operation.variant_test_name}".strip()
        samples = [
            sample
            for sample in operation.sample_inputs("cpu", torch.float64, requires_grad=False)
            if isinstance(sample.input, Tensor) and sample.input.ndim >= 2 and sample.input.dtype == torch.float64
        ]
        for sample in [sample for sample in samples if 0 not in sample.input.shape][:MOST_SAMPLES]:

            def f(x, operation=operation, sample=sample):
                y = operation(x, *sample.args, **sample.kwargs)
                return y[0] if isinstance(y, tuple | list) else y

            try:
                small = compare(f, sample.input)
            except AssertionError as error:
                raise AssertionError(f"{name} of {sample}") from error
            if small is not None:
                (narrow if small else wide).add(name)
    assert len(narrow) > 350
    assert len(narrow) >= 0.8 * len(narrow | wide)
