"""Contracts with TensorFlow for sparsity patterns: operations by name, run again on other numbers."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from elementgrad._backends.tensorflow.graph_ops import rerun
from elementgrad._backends.tensorflow.sparsity import GraphPropagator
from elementgrad._backends.tensorflow.sparsity_rules import MOVES as MOVE_OPS
from elementgrad._backends.tensorflow.sparsity_rules import RULES
from elementgrad._sparsity.index_sets import IndexSets
from elementgrad._sparsity.rules import DependentValue

pytestmark = pytest.mark.contract

X = np.arange(1, 25).reshape(4, 6)
MOVES = {
    "reshape": lambda x: tf.reshape(x, (3, 8)),
    "transpose": lambda x: tf.transpose(x),
    "slice": lambda x: x[1:, ::2],
    "slice of one": lambda x: tf.slice(x, [1, 0], [2, 3]),
    "squeeze": lambda x: tf.squeeze(x[:1], 0),
    "expand": lambda x: tf.expand_dims(x, 1),
    "reverse": lambda x: tf.reverse(x, [1]),
    "roll": lambda x: tf.roll(x, 1, 0),
    "concat": lambda x: tf.concat([x, x[:2]], 0),
    "split": lambda x: tf.concat(tf.split(x, [2, 1, 3], 1)[::-1], 1),
    "stack": lambda x: tf.stack([x[0], x[2]], 1),
    "unstack": lambda x: tf.stack(tf.unstack(x)[::-1]),
    "tile": lambda x: tf.tile(x, (2, 1)),
    "broadcast": lambda x: tf.broadcast_to(x, (2, 4, 6)),
    "pad": lambda x: tf.pad(x, [[1, 0], [0, 2]]),
    "mirrored": lambda x: tf.pad(x, [[1, 0], [0, 2]], "REFLECT"),
    "gather": lambda x: tf.gather(x, [3, 0, 0], axis=1),
    "gather of rows": lambda x: tf.gather(x, [[1], [0], [5], [2]], axis=1, batch_dims=1),
    "gather at": lambda x: tf.gather_nd(x, [[3, 1], [0, 5]]),
    "write": lambda x: tf.tensor_scatter_nd_update(x, [[1], [3]], x[:2]),
    "diagonal": lambda x: tf.linalg.diag_part(x),
    "triangle": lambda x: tf.linalg.band_part(x, -1, 0),
    "where": lambda x: tf.where(X % 2 == 0, x, x[::-1]),
}


def followed(f, x):
    """Return the result of the rules for a function of set numbers."""
    graph = tf.function(f).get_concrete_function(tf.TensorSpec(x.shape, tf.float64)).graph
    rest = [external for external, _ in graph.captures]
    return GraphPropagator(IndexSets(x.size)).run(graph, [DependentValue(x), *rest], graph.outputs)[0].ids


@pytest.mark.parametrize("name", MOVES)
def test_moving_operations_move_numbers_of_sets_as_they_move_numbers(name):
    np.testing.assert_array_equal(followed(MOVES[name], X), np.asarray(MOVES[name](tf.constant(X, tf.float64))))


def test_operations_go_by_the_names_that_the_rules_have():
    assert [kind for kind in RULES if not hasattr(tf.raw_ops, kind)] == []


def test_the_data_of_a_moving_operation_is_known_by_its_type():
    for kind in MOVE_OPS.split():
        assert {"T", "Tparams"} & {argument.type_attr for argument in op_def_registry.get(kind).input_arg}, kind


def test_an_operation_whose_arguments_have_other_names_runs_again():
    """`ExpandDims` calls its axis `dim`, and the function of the same name `axis`."""
    graph = tf.function(lambda x: tf.expand_dims(x, 1)).get_concrete_function(tf.TensorSpec([3])).graph
    (operation,) = [operation for operation in graph.get_operations() if operation.type == "ExpandDims"]
    (result,) = rerun(operation, [tf.constant([1, 2]), tf.constant(0)])
    assert result.shape == (1, 2)
