"""An interrupt, such as Ctrl-C, at each place in turn where the interpreter looks for one.

In the short form of the tests, at every other one.
"""

import contextlib
import dis
import sys

from lengths import length

_CALLS = {dis.opmap[name] for name in ("PRECALL", "CALL", "CALL_KW", "CALL_FUNCTION_EX") if name in dis.opmap}
_LOOKS = {code for name, code in dis.opmap.items() if name == "RESUME" or "JUMP_BACKWARD" in name}
_CONSTRUCTORS = ("__init__", "__new__")


def interrupted(work, within):
    """Do something again and again, each time with an interrupt at the next place, and yield where that was.

    The interpreter looks for signals at the begin of a function, at the end of a round of a loop, and after a call of
    what is not a function of Python. So nothing comes between the return of such a function and what its caller does
    with that.

    Args:
        work: What is done; what it returns is thrown away.
        within: How the paths of the files begin that are meant; one, or a tuple of them.
    """
    # Once without an interrupt: 3.12 and 3.13 trace no opcodes of code that is traced for the first time.
    _interrupt(work, within, 0)
    position, where = 0, "somewhere"
    while where:
        position += length(2, 1)
        where = _interrupt(work, within, position)
        if where:
            yield where
    assert position > 20


def release(scheduler, allocation):
    """Release an allocation, also if an interrupt came during the first call."""
    try:
        scheduler.release(allocation)
    except KeyboardInterrupt:
        with contextlib.suppress(ValueError):  # the interrupt came after the release
            scheduler.release(allocation)
        raise


def _interrupt(work, within, position):
    before, passed, where = {}, 0, ""

    def step(frame, event, _):
        nonlocal passed, where
        if event == "opcode":
            operation = frame.f_code.co_code[frame.f_lasti]
            last, before[frame] = before.get(frame), operation
            if last in _LOOKS or (last in _CALLS and operation not in _CALLS):
                passed += 1
                if passed == position:
                    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    raise KeyboardInterrupt
        return step

    def enter(frame, *_):
        if frame.f_back in before and frame.f_code.co_name not in _CONSTRUCTORS:
            before[frame.f_back] = None
        if not frame.f_code.co_filename.startswith(within):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    sys.settrace(enter)
    try:
        work()
    except KeyboardInterrupt:
        assert where
    finally:
        sys.settrace(None)
        before.clear()
    return where
