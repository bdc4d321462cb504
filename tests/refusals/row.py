"""What rows of the table of refusals share."""

import pytest


def never(*_):
    """Stand for the code of a user in a call that must be refused before any work."""
    pytest.fail("the function ran")
