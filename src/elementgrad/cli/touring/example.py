"""The smallest stop, for the docstring of `run`."""


def squares(numbers):  # type: ignore[no-untyped-def]
    """Square some numbers."""
    squared = [number**2 for number in numbers]
    return squared, sum(squared)
