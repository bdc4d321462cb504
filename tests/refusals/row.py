"""Shared parts of the rows of the table of refusals."""

import pytest


def never(*_):
    """Stand for the code of a user in a call that must be refused before any work."""
    pytest.fail("the function ran")
