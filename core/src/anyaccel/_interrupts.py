"""Steps that must not stay half done when an interrupt, such as Ctrl-C, comes."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")


def finish_step(step: Callable[[], T]) -> T:
    """Call a function, and again after each interrupt of it, until it has come to its end; then raise the interrupt.

    Args:
        step: A function that does what an interrupted call has left undone. After an ordinary exception, which may be
            that of a signal's handler, it is called only once more.

    Returns:
        The result of a call that was not interrupted.
    """
    try:
        return step()
    except Exception:
        step()
        raise
    except BaseException:
        finish_step(step)
        raise
