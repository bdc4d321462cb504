"""What the backend takes for granted of PyTorch: a new version that breaks one of these breaks it."""

import numpy as np
import pytest
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import cached_backends


def test_pytorch_runs_an_allowed_function_in_the_graph_with_plain_python_inside():
    seen = []

    @torch.compiler.allow_in_graph
    def step(x, index):
        seen.append((torch.compiler.is_compiling(), torch.compiler.is_dynamo_compiling(), index))
        return x[np.asarray([1]).tolist()]

    def outer(x):
        assert torch.compiler.is_dynamo_compiling()
        return step(x, (slice(0, 2), ...)) * 2

    assert torch.compile(outer, fullgraph=True, backend="aot_eager")(torch.ones(3)).tolist() == [2]
    assert all(entry == (True, False, (slice(0, 2), ...)) for entry in seen)
    assert seen


def test_pytorch_knows_whether_anything_was_compiled():
    torch.compiler.reset()
    assert not any(cached_backends.values())
    torch.compile(lambda x: x + 1, backend="aot_eager")
    assert any(cached_backends.values())


def test_pytorch_vmap_refuses_to_write_a_mapped_value_into_a_shared_tensor():
    def write(v):
        y = torch.zeros(3)
        y[0] = v
        return y

    with pytest.raises(RuntimeError, match="vmap: inplace"):
        torch.func.vmap(write)(torch.ones(2))
    assert torch.func.vmap(lambda v: torch.zeros(3).index_put((torch.tensor(0),), v))(torch.ones(2)).shape == (2, 3)


def test_pytorch_cannot_read_a_mapped_tensor():
    with pytest.raises((RuntimeError, TypeError)):
        torch.func.vmap(lambda i: torch.tensor(i.numpy(force=True)))(torch.tensor([0, 1]))


def test_pytorch_indexes_with_a_traced_scalar_only_through_aten():
    x, i = torch.arange(3.0), torch.tensor(1)
    read = torch.compile(lambda x, i: torch.ops.aten.index.Tensor(x, (i,)), fullgraph=True, backend="aot_eager")
    assert read(x, i) == 1


def test_pytorch_symbolic_sizes_become_ints_when_asked():
    seen = []

    @torch.compiler.allow_in_graph
    def look(x):
        seen.append((type(x.shape[0]), int(x.shape[0])))
        return x * 2

    torch.compile(lambda x: look(x), fullgraph=True, dynamic=True, backend="aot_eager")(torch.ones(3))
    assert (torch.SymInt, 3) in seen


def test_pytorch_functional_tensors_are_known_as_such():
    seen = []
    torch.func.functionalize(lambda x: seen.append(torch._is_functional_tensor(x)) or x * 1)(torch.ones(2))
    assert seen == [True]


def test_pytorch_reads_what_a_gradient_wraps_as_a_list_only():
    def look(x):
        mask = x > 1
        with pytest.raises((RuntimeError, TypeError)):
            mask.numpy(force=True)
        assert mask.tolist() == [False, True]
        return x.sum()

    torch.func.grad(look)(torch.tensor([1.0, 2.0]))


def test_pytorch_nodes_say_what_derivatives_they_take():
    node = torch.ones(3, 2, requires_grad=True).double().sum(0).grad_fn
    assert [(list(made.shape), made.dtype) for made in node._input_metadata] == [([2], torch.float64)]
    assert [following.name() for following, _ in node.next_functions] == ["ToCopyBackward0"]


def test_pytorch_maps_over_a_reverse_sweep():
    x = torch.arange(3.0, requires_grad=True)
    y = x**2
    rows = torch.func.vmap(lambda seed: torch.autograd.grad(y, x, seed, retain_graph=True)[0])(torch.eye(3))
    assert rows.diagonal().tolist() == [0, 2, 4]


def test_pytorch_draws_the_same_mask_alone_and_in_a_stack():
    state = torch.get_rng_state()
    alone = torch.dropout(torch.ones(64), 0.5, train=True)
    torch.set_rng_state(state)
    pushed = torch.func.vmap(
        lambda seed: torch.func.jvp(lambda x: torch.dropout(x, 0.5, train=True), (torch.ones(64),), (seed,))[1],
        randomness="same",
    )(torch.eye(64))
    assert pushed.diagonal().tolist() == alone.tolist()


def test_pytorch_tells_a_compiled_region_by_its_frame_callback():
    seen = []

    @torch.compiler.disable
    def look():
        seen.append(get_eval_frame_callback())

    def outer(x):
        look()
        return x + 1

    look()
    torch.compile(outer, backend="aot_eager")(torch.ones(2))
    assert seen == [None, None]
    assert get_eval_frame_callback() is None


def test_pytorch_finds_the_apply_of_a_function_in_its_base_class_even_if_it_was_bound_before():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    from torch.autograd.function import _SingleLevelFunction

    bound, seen = Twice.apply, []

    def apply(cls, *args):
        seen.append(cls)
        return super(_SingleLevelFunction, cls).apply(*args)

    _SingleLevelFunction.apply = classmethod(apply)
    try:
        assert bound(torch.ones(1)).item() == 2
    finally:
        del _SingleLevelFunction.apply
    assert seen == [Twice]
    assert bound(torch.ones(1)).item() == 2


def test_pytorch_lets_a_function_return_an_alias_that_may_be_written_to():
    class Alias(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, x):
            return x.detach()

        @staticmethod
        def backward(ctx, upstream):
            return None, None

    x = torch.tensor([1.0, 2.0])
    alias = Alias.apply(torch.zeros((), requires_grad=True), x)
    edge = torch.autograd.graph.get_gradient_edge(alias)
    alias[0] = alias[1] * 3
    assert x.tolist() == [6, 2]
    assert alias._version == x._version == 1
    after = torch.autograd.graph.get_gradient_edge(alias)
    (gradient,) = torch.autograd.grad([after], [edge], [torch.ones(2)])
    assert gradient.tolist() == [0, 4]


def test_pytorch_counts_operations_and_nodes_keep_notes():
    x = torch.ones(2, requires_grad=True)
    start = torch.autograd._get_sequence_nr()
    y = x * 2
    assert start <= y.grad_fn._sequence_nr() < torch.autograd._get_sequence_nr()
    y.grad_fn.metadata["note"] = 1
    assert y.grad_fn.metadata["note"] == 1
    assert (y[-1].grad_fn._saved_index, y[:-1].grad_fn._saved_end) == (2**64 - 1, 2**64 - 1)
