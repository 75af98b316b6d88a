"""Read what a worker sends as data: plain values, made here, whatever the worker names.

``pickle.loads`` calls what a pickle names, sets attributes of what it made, asks the registry of ``copyreg``, and
believes counts and positions. This reader takes the same bytes and does none of that. It knows the instructions that
Python's pickler writes for plain values, and for each type that it allows a function that checks what it was given.

What it makes is bounded. Positions in the memo count up one by one, and lengths are those of the message. Nesting has
a limit, since Python has none when it computes the hash of a tuple in tuples. A message may refer to one list twice,
which refers to another one twice, and so on; so what it would be in full has a limit, too. Nothing holds itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from anyaccel.workers.plain_values import ALLOWED, Known, Name, Partial, Refused, restore

MOST_NESTED = 200
MOST_REPEATED = 1 << 22
"""Values in a message beyond its bytes, each as often as it occurs; as many may be in keys of dicts and sets."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_FILLED = frozenset({list, dict, set})
_UNFINISHED = frozenset({Name, Partial, memoryview})
_OPCODES = 256


def read_plain(data: bytes | memoryview, buffers: Sequence[memoryview] | None = None) -> Any:
    """Make a value of plain types again. Large arrays keep using the memory of ``buffers``.

    Args:
        data: The pickle.
        buffers: What it refers to.

    Raises:
        Refused: When it holds something else, or is damaged.
    """
    # A copy: its sender may still write to the memory that it is in.
    return _Reader(bytes(data), buffers or ()).read()


class _Reader:
    """A stack of values, as in ``pickle``, with what is known of containers among them."""

    def __init__(self, data: bytes, buffers: Sequence[memoryview]) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: list[Any] = []
        self.buffers = iter(buffers)
        self.known: dict[int, Known] = {}
        self.hashed = 0
        self.most = len(data) + MOST_REPEATED

    def read(self) -> Any:
        data, steps = self.data, _STEPS
        try:
            while (code := data[self.at]) != _STOP:
                self.at += 1
                steps[code](self)
            (value,) = self.stack
        except Refused:
            raise
        except (LookupError, ValueError, TypeError, OverflowError, StopIteration, struct.error) as error:
            raise Refused(f"it is damaged ({type(error).__name__})") from error
        if self.outer:
            raise Refused("it is damaged (it ends too early)")
        self.check_finished((value,))
        return value

    def take(self, size: int) -> bytes:
        """The next bytes."""
        end = self.at + size
        if size < 0 or end > len(self.data):
            raise Refused("it is damaged (it ends too early)")
        chunk = self.data[self.at : end]
        self.at = end
        return chunk

    def number(self, layout: struct.Struct) -> Any:
        """The next number of a fixed layout."""
        return layout.unpack(self.take(layout.size))[0]

    def since_mark(self) -> list[Any]:
        """The values since the last mark, which are taken from the stack."""
        items, self.stack = self.stack, self.outer.pop()
        return items

    def look(self, items: Sequence[Any]) -> tuple[int, int, bool]:
        """How deep a container of these is nested, how many values it holds in all, and whether some are no values."""
        if set(map(type, items)) <= _SCALARS:
            return 1, 1 + len(items), False
        depth, weight, raw = 0, 1 + len(items), False
        for item in items:
            known = self.known.get(id(item))
            if known is None and type(item) in _FILLED:
                known = self.known[id(item)] = Known(item)
            if known is not None:
                depth, weight, raw = max(depth, known.depth), weight + known.weight, raw or known.raw
                known.placed = True
            else:
                raw = raw or type(item) in _UNFINISHED
        if depth >= MOST_NESTED:
            raise Refused(f"it is nested more than {MOST_NESTED} levels deep")
        if weight > self.most:
            raise Refused("it holds the same values again and again")
        return depth + 1, weight, raw

    def check_finished(self, items: Sequence[Any]) -> None:
        """Refuse what is no value: a class or function itself, or one that was begun with."""
        if not self.look(items)[2]:
            return
        for item in items:
            if type(item) is Name:
                raise Refused(f"it holds {item} itself")
        raise Refused("it holds something that is no plain value")

    def fixed(self, value: Any, items: Sequence[Any]) -> Any:
        """A tuple or the like of some items; it may hold what is no value, for whoever makes something of it."""
        self.known[id(value)] = Known(value, *self.look(items))
        return value

    def fill(self, container: Any, items: Sequence[Any]) -> None:
        """Items have been put into a container."""
        known = self.known.setdefault(id(container), Known(container))
        self.check_finished(items)
        if known.placed:
            raise Refused("it holds itself")
        depth, weight, _ = self.look(items)
        known.depth = max(known.depth, depth)
        known.weight += weight

    def keys(self, keys: Sequence[Any]) -> None:
        """Allow some values to be hashed."""
        if set(map(type, keys)) <= _SCALARS:
            return
        for key in keys:
            known = self.known.get(id(key))
            self.hashed += known.weight if known is not None else 1
        if self.hashed > self.most:
            raise Refused("the keys of its dicts and sets hold too much")

    # The instructions of a pickle: see pickletools

    def skip_version(self) -> None:
        self.at += 1

    def skip_frame(self) -> None:
        self.at += 8

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def memoize(self) -> None:
        top = self.stack[-1]
        if type(top) is Partial:
            top.places.append(len(self.memo))
        self.memo.append(top)

    def buffer(self) -> None:
        self.stack.append(next(self.buffers))

    def buffer_readonly(self) -> None:
        self.stack[-1] = memoryview(self.stack[-1]).toreadonly()

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise Refused("it is damaged (it appends to what is no list)")
        self.fill(target, items)
        target.extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.update([key, value])

    def update(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        if type(target) is not dict:
            raise Refused("it is damaged (it sets an item of what is no dict)")
        self.fill(target, items)
        self.keys(keys)
        target.update(zip(keys, items[1::2], strict=True))

    def add_items(self) -> None:
        items = self.since_mark()
        target = self.stack[-1]
        if type(target) is not set:
            raise Refused("it is damaged (it adds to what is no set)")
        self.fill(target, items)
        self.keys(items)
        target.update(items)

    def frozen(self) -> None:
        items = self.since_mark()
        self.check_finished(items)
        self.keys(items)
        self.stack.append(self.fixed(frozenset(items), items))

    def tuple(self) -> None:
        items = self.since_mark()
        self.stack.append(self.fixed(tuple(items), items))

    def name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise Refused("it is damaged (a name is no text)")
        found = Name(module, name)
        if found.key not in ALLOWED:
            raise Refused(f"it holds {found}")
        self.stack.append(found)

    def reduce(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise Refused("it is damaged (it calls what is no class)")
        allowed = ALLOWED[name.key]
        if not allowed.raw:
            self.check_finished(arguments)
        try:
            value = allowed.make(*arguments)
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"its {name} cannot be made ({type(error).__name__})") from error
        # An array uses what is no value itself, and is one.
        self.stack.append(value if allowed.raw or type(value) is Partial else self.fixed(value, arguments))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        self.check_finished((state,))
        if type(target) is Partial:
            try:
                value = target.finish(state)
            except Refused:
                raise
            except Exception as error:
                raise Refused(f"its {target.name} cannot be made ({type(error).__name__})") from error
            self.stack[-1] = value
            for place in target.places:
                self.memo[place] = value
        elif isinstance(target, Exception):
            restore(target, state)
        else:
            raise Refused("it is damaged (it sets attributes of a plain value)")


def _unknown(code: int) -> Callable[[_Reader], None]:
    def refuse(_: _Reader) -> None:
        raise Refused(f"it uses the pickle instruction {code:#04x}, which no plain value needs")

    return refuse


def _constant(value: Any) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(value)


def _fresh(kind: Callable[[], Any]) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(kind())


def _number(layout: str) -> Callable[[_Reader], None]:
    packed = struct.Struct(layout)
    return lambda reader: reader.stack.append(reader.number(packed))


def _counted(layout: str, make: Callable[[bytes], Any]) -> Callable[[_Reader], None]:
    """What a length stands in front of."""
    packed = struct.Struct(layout)
    return lambda reader: reader.stack.append(make(reader.take(reader.number(packed))))


def _recalled(layout: str) -> Callable[[_Reader], None]:
    packed = struct.Struct(layout)
    return lambda reader: reader.stack.append(reader.memo[reader.number(packed)])


def _few(count: int) -> Callable[[_Reader], None]:
    def make(reader: _Reader) -> None:
        stack = reader.stack
        if len(stack) < count:
            raise Refused("it is damaged (a tuple is too short)")
        items = stack[-count:]
        stack[-count:] = [reader.fixed(tuple(items), items)]

    return make


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_STOP = ord(".")
_STEPS = [_unknown(code) for code in range(_OPCODES)]
for _code, _step in {
    b"\x80": _Reader.skip_version,
    b"\x95": _Reader.skip_frame,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"K": _number("<B"),
    b"M": _number("<H"),
    b"J": _number("<i"),
    b"\x8a": _counted("<B", _integer),
    b"\x8b": _counted("<i", _integer),
    b"G": _number(">d"),
    b"\x8c": _counted("<B", _text),
    b"X": _counted("<I", _text),
    b"\x8d": _counted("<Q", _text),
    b"C": _counted("<B", bytes),
    b"B": _counted("<I", bytes),
    b"\x8e": _counted("<Q", bytes),
    b"\x96": _counted("<Q", bytearray),
    b"(": _Reader.mark,
    b"\x94": _Reader.memoize,
    b"h": _recalled("<B"),
    b"j": _recalled("<I"),
    b"]": _fresh(list),
    b"a": lambda reader: reader.extend([reader.stack.pop()]),
    b"e": lambda reader: reader.extend(reader.since_mark()),
    b"}": _fresh(dict),
    b"s": _Reader.set_item,
    b"u": lambda reader: reader.update(reader.since_mark()),
    b"\x8f": _fresh(set),
    b"\x90": _Reader.add_items,
    b"\x91": _Reader.frozen,
    b")": _fresh(tuple),
    b"\x85": _few(1),
    b"\x86": _few(2),
    b"\x87": _few(3),
    b"t": _Reader.tuple,
    b"\x93": _Reader.name,
    b"R": _Reader.reduce,
    b"\x81": _Reader.reduce,
    b"b": _Reader.build,
    b"\x97": _Reader.buffer,
    b"\x98": _Reader.buffer_readonly,
}.items():
    _STEPS[_code[0]] = _step
