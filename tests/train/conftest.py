"""Fixtures for tests of training."""

import pytest


@pytest.fixture(scope="module")
def products_by_parts():
    """Compute small products of JAX as large ones are."""
    from elementgrad._backends.jax.train import products

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "SMALL", 0)
        yield


@pytest.fixture(scope="module", params=["whole", "parts"])
def small_products(request):
    """Compute small products of JAX as they are by default, and as large ones are."""
    if request.param == "parts":
        request.getfixturevalue("products_by_parts")
