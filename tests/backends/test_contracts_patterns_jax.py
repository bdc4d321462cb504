"""Contracts with JAX for sparsity patterns: the names and meanings of operations that move elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from elementgrad._backends.jax.sparsity import MOVES as MOVE_OPS
from elementgrad._backends.jax.sparsity import RULES, JaxprPropagator
from elementgrad._sparsity.index_sets import IndexSets
from elementgrad._sparsity.rules import DependentValue

pytestmark = pytest.mark.contract

X = np.arange(1, 25).reshape(4, 6)
MOVES = {
    "reshape": lambda x: lax.reshape(x, (3, 8)),
    "reshape by columns": lambda x: lax.reshape(x, (3, 8), dimensions=(1, 0)),
    "transpose": lambda x: lax.transpose(x, (1, 0)),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (4, 2, 6), (0, 2)),
    "slice": lambda x: lax.slice(x, (1, 0), (4, 5), (2, 3)),
    "squeeze": lambda x: lax.squeeze(x[:1], (0,)),
    "rev": lambda x: lax.rev(x, (1,)),
    "concatenate": lambda x: lax.concatenate([x, x[:2]], 0),
    "pad": lambda x: lax.pad(x, jnp.asarray(0, x.dtype), ((1, 2, 0), (0, 1, 2))),
    "negative pad": lambda x: lax.pad(x, jnp.asarray(0, x.dtype), ((-1, 2, 1), (1, -3, 0))),
    "split": lambda x: jnp.concatenate(jnp.split(x, [2, 3], 1)[::-1], 1),
    "stack": lambda x: jnp.stack([x[0], x[2]], 1),
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "gather": lambda x: x[np.array([3, 0, 0]), np.array([1, 5, 2])],
    "gather beyond": lambda x: x.at[np.array([3, 9])].get(mode="fill", fill_value=0),
    "dynamic slice beyond": lambda x: lax.dynamic_slice(x, (3, 1), (2, 2)),
    "dynamic update": lambda x: lax.dynamic_update_slice(x, x[:2, :2], (3, 1)),
    "scatter": lambda x: x.at[np.array([1, 3])].set(x[:2], unique_indices=True),
    "select": lambda x: jnp.where(X % 2 == 0, x, x[::-1]),
}


def followed(f, x):
    """Return the result of the rules for a function of set numbers."""
    program = jax.make_jaxpr(f)(x)
    (result,) = JaxprPropagator(IndexSets(x.size)).run(program, [DependentValue(x)])
    return result.ids


@pytest.mark.parametrize("name", MOVES)
def test_moving_operations_move_numbers_of_sets_as_they_move_numbers(name):
    np.testing.assert_array_equal(followed(MOVES[name], X), np.asarray(MOVES[name](jnp.asarray(X))))


def test_a_rule_for_reverse_sweeps_alone_stands_in_a_linear_program():
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, gradient: (gradient,))
    program = jax.make_jaxpr(jax.linearize(f, jnp.ones(2))[1])(jnp.ones(2))
    assert [equation.primitive.name for equation in program.eqns] == ["custom_lin"]


def test_operations_go_by_the_names_that_the_rules_have():
    """Those of JAX of whatever version: a name that it does not know stands for one that it had or will have."""
    found = {equation.primitive.name for f in MOVES.values() for equation in jax.make_jaxpr(f)(X).eqns}
    assert {"reshape", "transpose", "broadcast_in_dim", "slice", "rev", "concatenate", "pad"} <= found & set(MOVE_OPS)
    assert {"gather", "dynamic_slice", "dynamic_update_slice", "scatter"} <= found & set(RULES)
