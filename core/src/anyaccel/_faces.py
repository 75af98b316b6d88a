"""Faces of packages: public names whose modules are imported at the first use."""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def face(
    package: str, homes: "Mapping[str, str]"
) -> "tuple[list[str], Callable[[str], object], Callable[[], list[str]]]":
    """Return the functions by which a package's ``__init__`` offers names of its modules.

    Type checkers read the names in ``__init__.pyi``; a test compares the two.

    Args:
        package: The package's ``__name__``.
        homes: Public names by module, with spaces between.

    Returns:
        The package's ``__all__``, ``__getattr__`` and ``__dir__``.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = home_of[name]
        __import__(module)  # importlib would have to be imported first
        value: object = getattr(sys.modules[module], name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return sorted(home_of), load, listed
