"""What is known of a function without a run is what trying it out says."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import elementgrad as eg
from elementgrad._backends.torch.explain import TorchTrace
from elementgrad._backends.torch.names import TorchModel
from elementgrad._backends.torch.trace import TorchOpRecorder
from elementgrad._explain.dependence import dependent_outputs

X, WEIGHT, BIAS, SCALE = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5), torch.randn(4)
TURNED = X.transpose(1, 2).contiguous()
CALLS = {
    "the input of linear": (F.linear, (X, WEIGHT, BIAS), {}, [(X, (0, 1, 2))]),
    "the weight of linear": (F.linear, (X, WEIGHT, BIAS), {}, [(WEIGHT, (3, 1))]),
    "the bias of linear": (F.linear, (X, WEIGHT), {"bias": BIAS}, [(BIAS, 2)]),
    "both sides of matmul": (torch.matmul, (X, TURNED), {}, [(X, (0, 1, 2)), (TURNED, (1, 2, 0))]),
    "what addmm adds to": (torch.addmm, (BIAS, X[0], WEIGHT.T), {}, [(BIAS, 1)]),
    "an element of layer_norm": (F.layer_norm, (X, (4,), SCALE), {}, [(X, (0, 1, 2))]),
    "a whole row of layer_norm": (F.layer_norm, (X, (4,)), {}, [(X, (0, 1))]),
    "the weight of layer_norm": (F.layer_norm, (X, (4,), SCALE), {}, [(SCALE, 1)]),
    "a factor": (torch.Tensor.mul, (X, SCALE), {}, [(SCALE, 1)]),
    "a sum with a number": (torch.Tensor.add, (X, 2.0), {}, [(X, (0, 0, 0))]),
    "gelu": (F.gelu, (X,), {}, [(X, (1, 1, 1))]),
    "transpose": (torch.Tensor.transpose, (X, 0, 1), {}, [(X, (0, 1, 2))]),
    "split": (torch.Tensor.split, (X, 2, 2), {}, [(X, (0, 1, 2))]),
    "cat": (torch.cat, ([X, TURNED.reshape(2, 3, 4)], 1), {}, [(X, (1, 0, 0))]),
    "embedding": (F.embedding, (torch.tensor([[0, 2]]), WEIGHT), {}, [(WEIGHT, (2, 1))]),
    "indexing": (torch.Tensor.__getitem__, (X, (0, slice(None), torch.tensor([1, 3]))), {}, [(X, (0, 1, 3))]),
}


def recorded(function, args, kwargs):
    recorder = TorchOpRecorder(lambda x: False, TorchModel(None), keeps=True)
    with recorder.recording():
        function(*args, **kwargs)
    (op,) = recorder.recorded_ops()
    return op


@pytest.mark.parametrize("call", CALLS)
def test_a_kind_says_what_trying_says(call):
    function, args, kwargs, places = CALLS[call]
    op = recorded(function, args, kwargs)
    masks = [None] * len(op.operands)
    for x, index in places:
        position = next(n for n, y in enumerate(op.operands) if y.data_ptr() == x.data_ptr() and y.shape == x.shape)
        masks[position] = np.zeros(tuple(x.shape), bool)
        masks[position][index] = True
    found = dependent_outputs(op, masks, TorchTrace.numbers)
    op.kind = None
    expected = dependent_outputs(op, masks, TorchTrace.numbers)
    assert any(mask.any() for mask in expected)
    for mask, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mask, other)


def test_a_factor_of_zero_has_to_be_tried():
    op = recorded(torch.Tensor.mul, (X, 0.0), {})
    (mask,) = dependent_outputs(op, [np.ones(tuple(X.shape), bool)], TorchTrace.numbers)
    assert not mask.any()


def test_a_nan_is_explained_though_pytorch_is_to_raise_at_it():
    def f(x):
        return torch.where(x > 0, torch.sqrt(x), 0.0).sum()

    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert eg.explain(f, torch.tensor([0.0, 1.0]), wrt="x[0]").cause == "masked-branch"
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    with torch.autograd.set_detect_anomaly(True):
        assert eg.explain(f, torch.tensor([0.0, 1.0]), wrt="x[0]").cause == "masked-branch"
        assert torch.is_anomaly_check_nan_enabled()
