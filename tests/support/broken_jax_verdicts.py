"""JAX programs in which another cause lies near: ties, masks, indices out of range. The line at fault is marked."""

import jax
import jax.numpy as jnp

from tests.support.programs_broken import Table

BROKEN = Table()
IMAGE = jnp.array([[1.0, 2.0, 2.0, 9.0], [0.0, 0.0, 0.0, 3.0], [5.0, 5.0, 2.0, 1.0], [0.0, 1.0, 1.0, 1.0]])
ROWS = jnp.array([[1.0, 2.0], [2.0, 3.0]])
X = jnp.array([1.5, 2.5])
THREE = jnp.array([1.0, 2.0, 3.0])
IDS = jnp.array([0, 1, 5])
C = jnp.array([-1.0, 2.0])


def _pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID").sum()


@BROKEN.says("zero", "not-selected", wrt="x[0, 2]")
def as_large_as_the_maximum_of_another_window():
    return _pool, IMAGE


@BROKEN.says("zero", "tie", fix="equal elements are interchangeable", wrt="x[2, 1]")
def a_tie_in_its_own_window():
    return _pool, IMAGE


@BROKEN.says("zero", "not-selected", wrt="x[1, 0]")
def as_large_as_the_maximum_of_another_row():
    return lambda x: x.max(1).sum(), ROWS  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[1, 0]")
def the_largest_of_another_row():
    return lambda x: jax.lax.top_k(x, 1)[0].sum(), ROWS  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0]")
def a_segment():
    return lambda x: jax.ops.segment_max(x, jnp.array([0, 0, 1]), num_segments=2).sum(), THREE  # <- here


@BROKEN.says("zero", "out-of-range", wrt="x[2]")
def a_segment_that_is_not_there():
    return lambda x: jax.ops.segment_sum(x, IDS, num_segments=3).sum(), THREE  # <- here


@BROKEN.says("zero", "out-of-range", of="output[1]", wrt="x[2]")
def a_compiled_segment_that_is_not_there():
    return jax.jit(lambda x: jax.ops.segment_max(x, IDS, num_segments=3)), THREE  # <- here


@BROKEN.says("zero", "not-selected", wrt="x[0]")
def beside_a_segment_that_is_not_there():
    return lambda x: jax.ops.segment_max(x, jnp.array([0, 0, 5]), num_segments=3)[0], THREE  # <- here


@BROKEN.says("zero", "out-of-range", wrt="x[2]")
def written_to_no_place():
    return lambda x: jnp.zeros(3).at[IDS].set(x).sum(), THREE  # <- here


@BROKEN.says("zero", "overwritten", wrt="x[0]")
def written_over_beside_no_place():
    return lambda x: x.at[jnp.array([0, 7])].set(0.0).sum(), THREE  # <- here


@BROKEN.says("zero", "out-of-range", wrt="x")
def taken_from_no_place():
    return lambda x: jnp.take(x, 5), THREE  # <- here


@BROKEN.says("nonfinite", "masked-branch", fix="log(jnp.where(ok, x, 1.0))", wrt="x[0]")
def a_constant_that_is_no_number():
    def f(x):
        c = jnp.log(C)  # <- here
        return jnp.where(C < 0, 0.0, x * c).sum()

    return f, X


@BROKEN.says("nonfinite", "masked-branch", wrt="x")
def one_factor_of_constants_that_are_no_numbers():
    def f(x):
        c = jnp.sqrt(C)  # <- here
        return jnp.where(C < 0, 0.0, x * c).sum()

    return f, jnp.array(2.0)


@BROKEN.says("nonfinite", "masked-branch", fix="nan_to_num", wrt="x[0]")
def data_with_gaps():
    data = jnp.array([jnp.nan, 2.0])
    return lambda x: jnp.nansum(x * data), X  # <- here


@BROKEN.says("nonfinite", "singular", fix="sum of squares", wrt="x[0]")
def the_square_of_a_norm():
    return lambda x: jnp.linalg.norm(x) ** 2, jnp.zeros(2)  # <- here


@BROKEN.says("nonfinite", "singular", fix="above zero", wrt="f[0]")
def a_direction_at_zero():
    return lambda f: (f / (jnp.linalg.norm(f) + 1e-8))[0], jnp.zeros(2)  # <- here


@BROKEN.says("nonfinite", "masked-branch", wrt="x[0]")
def a_norm_that_is_masked():
    def f(x):
        size = jnp.linalg.norm(x)  # <- here
        return jnp.where(size > 0, size, x[0])

    return f, jnp.zeros(2)


@BROKEN.says("zero", "masked", fix="glorot_uniform", of="output[0]", wrt="one[0, 0]")
def weights_that_are_all_zero():
    return lambda one, two, x: jnp.tanh(x @ one) @ two, jnp.zeros((2, 3)), jnp.zeros((3, 1)), X  # <- here


@BROKEN.says("zero", "masked", fix="change the mask to keep", wrt="x[1]")
def a_mask_that_is_added():
    return lambda x: jax.nn.softmax(x + jnp.array([0.0, -jnp.inf]))[0], X  # <- here


@BROKEN.says("zero", "clamped", wrt="x")
def beyond_what_is_interpolated():
    return lambda x: jnp.interp(x, jnp.array([0.0, 1.0]), jnp.array([0.0, 2.0])).sum(), X  # <- here


@BROKEN.says("nonfinite", "masked-branch", wrt="x[0, 0]")
def a_size_of_each_row_that_is_masked():
    def f(x):
        size = (x**2).sum(-1, keepdims=True)
        return jnp.where(size > 0, x / size, 0.0).sum()  # <- here

    return f, jnp.array([[0.0, 0.0], [1.0, 2.0]])
