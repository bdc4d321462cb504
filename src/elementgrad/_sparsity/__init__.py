"""Sparsity: the entries of a Jacobian that can be nonzero (`Pattern`), and few sweeps that read them (`coloring.py`).

A backend finds a pattern by following a derivative program op by op: one reverse or forward sweep, which is linear in a
seed. Beside each tensor that depends on the seed it keeps **ids**: for each element the index of a set of seed elements
in `IndexSets` (`index_sets.py`); 0 is the empty set. A tensor that does not depend on the seed is a constant. Its
values count only if they are known, that is if they are the same at every point of the derivative.

Rules say how ids go through an op. `rules.py` has those that the frameworks share; the tables from ops to rules are
`RULES` in `sparsity_rules.py` of `_backends/torch` and `_backends/tensorflow`, and in `_backends/jax/sparsity.py`:

- elementwise (add, tanh, ...): `sets.union` of the operands' ids; empty where a known factor is zero.
- moves (reshape, slice, transpose, gather at known indices, pad, ...): the op itself is run on the ids.
- reductions (sum, max): `sets.reduce`; cumulative ones: `sets.cumulative`; pools, convolutions: `sets.windows`.
- products: `sets.matmul`, which skips the known zeros of the other factor.
- scatters (adding at known indices): `sets.union_by_owner`.
- whatever has no rule: `sets.union_all`; each output element depends on all that any operand does.

Composite functions have no rules. The derivative of softmax, for one, is mul, sum and sub in the programs of JAX and
TensorFlow, and PyTorch decomposes its backward op into the same.

At the end `sets.pattern(ids)` has a row for each element of the result and a column for each of the seed; a reverse
sweep gives the transpose of the Jacobian's pattern.
"""
