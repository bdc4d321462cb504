"""The packages that showing needs and the library does not."""

from importlib import import_module


def require(packages: str, what: str) -> None:
    """Raise an error that says what to install, unless all of these packages are there."""
    for package in packages.split():
        try:
            import_module(package)
        except ImportError:
            raise ImportError(f"{what} needs {package}; pip install 'elementgrad[show]'") from None
