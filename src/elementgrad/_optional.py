"""Optional dependencies."""

from importlib import import_module


def require(packages: str, what: str, extra: str) -> None:
    """Raise an error that says what to install, unless all of these packages can be imported.

    >>> from elementgrad._optional import require
    >>> require("numpy no_such_package", "eg.plot", "show")
    Traceback (most recent call last):
    ImportError: eg.plot needs no_such_package; pip install 'elementgrad[show]'
    """
    for package in packages.split():
        try:
            import_module(package)
        except ImportError:
            raise ImportError(f"{what} needs {package}; pip install 'elementgrad[{extra}]'") from None
