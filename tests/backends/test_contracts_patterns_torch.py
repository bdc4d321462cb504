"""Contracts with PyTorch for sparsity patterns, which a new version could change."""

import pytest
import torch
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elementgrad._backends.torch.sparsity_rules import LINEAR, RULES

pytestmark = pytest.mark.contract

aten = torch.ops.aten
MADE_UP = {"pointwise", "reshape", "contiguous", "stack"}
"""Entries of the table of rules that are no operations of their own below autograd."""


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted({*RULES, *LINEAR} - MADE_UP))
def test_every_rule_is_about_an_operation_that_there_is(name):
    assert hasattr(aten, name) or hasattr(aten, f"{name}_")


def test_a_dispatch_mode_sees_a_backward_pass_and_its_custom_rules():
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.flip(0)

    x = torch.ones(3, requires_grad=True)
    y = torch.sin(Custom.apply(x))
    with Seen() as seen:
        torch.autograd.grad(y, x, torch.ones(3))
    assert "aten::flip" in seen.names
    assert "aten::mul" in seen.names


def test_tags_say_what_is_elementwise_random_or_goes_by_values():
    tags = torch.Tag
    assert tags.pointwise in aten.mul.Tensor.tags
    assert tags.pointwise in aten.threshold_backward.default.tags
    assert tags.pointwise not in aten.mm.default.tags
    assert tags.nondeterministic_seeded in aten.bernoulli.default.tags
    assert tags.nondeterministic_seeded in aten.native_dropout.default.tags
    for function in (aten._local_scalar_dense.default, aten.equal.default, aten.item.default):
        assert tags.data_dependent_output in function.tags
    for function in (aten.nonzero.default, aten.masked_select.default, aten.index.Tensor):
        assert tags.dynamic_output_shape in function.tags


def test_some_operations_come_with_simpler_ones_that_they_are_made_of():
    for function in (aten._softmax_backward_data, aten.native_layer_norm_backward, aten.col2im):
        assert function.default in decomposition_table
    parts = aten.pad.default.decompose(torch.ones(2), [1, 1])
    assert parts.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_a_mode_of_functions_is_off_inside_what_it_was_asked_about():
    """Which is why values that leave PyTorch are noticed in another way."""
    asked = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            asked.append(func)
            return func(*args, **(kwargs or {}))

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return torch.from_numpy(gradient.numpy())

    x = torch.ones(3, requires_grad=True)
    y = Custom.apply(x)
    with Mode():
        torch.autograd.grad(y, x, torch.ones(3))
    assert torch.Tensor.numpy not in asked


def test_a_write_to_a_view_changes_its_base():
    x = torch.zeros(2, 3, dtype=torch.complex64)
    assert torch.view_as_real(x).untyped_storage()._cdata == x.untyped_storage()._cdata
    assert x.t()[1].untyped_storage()._cdata == x.untyped_storage()._cdata
    assert x.real.element_size() * 2 == x.element_size()
