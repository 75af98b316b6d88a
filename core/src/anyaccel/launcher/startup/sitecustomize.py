"""Runs at the start of an interpreter, after ``anyaccel run --cap`` has put this directory in front of its path.

It applies the caps of :mod:`anyaccel.launcher.caps`, then runs the ``sitecustomize`` that this one hides.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _cap() -> None:
    """Install the caps of ``caps.py`` beside this directory, loaded by path: this interpreter may lack anyaccel.

    Exceptions pass through: the caller prints them.
    """
    path = os.path.join(os.path.dirname(_HERE), "caps.py")
    spec = importlib.util.spec_from_file_location("_anyaccel_caps", path)
    if spec is not None and spec.loader is not None:
        caps = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(caps)
        caps.install()


def _chain() -> None:
    """Take this directory off the module path, and run the next ``sitecustomize`` on the path, if any, in its place.

    Exceptions of that module pass through.
    """
    sys.path[:] = [path for path in sys.path if path != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _cap()
except Exception as _error:  # noqa: BLE001 - the program goes on in any interpreter
    sys.stderr.write(f"anyaccel: frameworks are not capped: {_error}\n")
_chain()
