"""The public surface: names, signatures and homes, as `public_surface.txt` beside this file lists them.

A change of the list is a change of the contract with users: additions are fine, anything else needs a reason.
`python -m tests.package.test_public_surface` writes the list anew.
"""

import inspect
import re
from pathlib import Path

import elementgrad as eg

LIST = Path(__file__).with_name("public_surface.txt")


def signature(function: object) -> str:
    """Return the parameters of a function: their names, kinds and defaults, without annotations."""
    bare = inspect.Parameter.empty
    found = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [parameter.replace(annotation=bare) for parameter in found.parameters.values()]
    return re.sub(r"<[^>]*>", "...", str(inspect.Signature(parameters)))


def surface() -> list[str]:
    """List the public names with their signatures, and the public methods and properties of each type."""
    lines = []
    for name in sorted(eg.__all__):
        value = getattr(eg, name)
        if not inspect.isclass(value):
            lines.append(f"{name}{signature(value) if inspect.isfunction(value) else ''}")
            continue
        bases = [base.__name__ for base in value.__mro__[1:] if base.__module__ == "builtins" and base is not object]
        lines.append(f"class {name}({', '.join(bases)})")
        ours = [base for base in value.__mro__ if base.__module__.startswith("elementgrad")]
        for key in sorted({key for base in ours for key in (*vars(base), *inspect.get_annotations(base))}):
            if key.startswith("_"):
                continue
            member = inspect.getattr_static(value, key, None)
            plain = getattr(member, "__func__", member)
            lines.append(f"    {name}.{key}{signature(plain) if inspect.isfunction(plain) else ''}")
    return lines


def test_public_names_and_signatures_are_those_listed():
    assert surface() == LIST.read_text().splitlines()


def test_public_types_live_in_the_package_itself():
    for name in eg.__all__:
        value = getattr(eg, name)
        if inspect.isclass(value):
            assert value.__module__ == "elementgrad", name


if __name__ == "__main__":
    LIST.write_text("\n".join(surface()) + "\n")
