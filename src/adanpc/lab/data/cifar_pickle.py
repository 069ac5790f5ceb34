"""Reads the pickled batches of CIFAR-10 without unpickling them.

A pickle is a program for a small stack machine. The unpickler runs it: it imports what the file names and calls it.
Even if only names of NumPy are allowed, one wrong byte can make NumPy build an array around memory that does not
exist, and the process dies. So this module interprets the program itself and imports nothing. It knows the
instructions that Python 2 and 3 write for texts, whole numbers, tuples, lists, dicts and arrays of unsigned bytes. The
array is assembled here, from bytes whose number has been checked. Anything else in a file is refused.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from adanpc.lab.data.contents import ContentError

# A published batch has about 50,000 instructions. An instruction of one byte may create a list of 56 bytes, so limiting
# their number limits the memory.
MOST_INSTRUCTIONS = 1_000_000


class Batch(NamedTuple):
    """The contents of a batch.

    Args:
        pixels: (n, m) uint8, one image per row.
        labels: one label per row, as in the file.
    """

    pixels: NDArray[np.uint8]
    labels: list[int]


def parse_batch(content: bytes) -> Batch:
    """Returns the pixels and labels of a pickled batch; raises ``ContentError`` for anything else."""
    fields = _Parser(content).parse()
    if not isinstance(fields, dict):
        raise ContentError("it does not hold a dict")
    array = fields.get(b"data")
    labels = fields.get(b"labels")
    if not isinstance(array, _Array) or array.pixels is None:
        raise ContentError("it has no array under 'data'")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ContentError("it has no list of whole numbers under 'labels'")
    return Batch(array.pixels, labels)


class _Global(enum.Enum):
    """The functions and types that a batch may name. They only stand for themselves; nothing is imported."""

    RECONSTRUCT = enum.auto()
    NDARRAY = enum.auto()
    DTYPE = enum.auto()


# NumPy has moved its private modules once, and files with both names exist.
_GLOBALS = {
    (b"numpy.core.multiarray", b"_reconstruct"): _Global.RECONSTRUCT,
    (b"numpy._core.multiarray", b"_reconstruct"): _Global.RECONSTRUCT,
    (b"numpy", b"ndarray"): _Global.NDARRAY,
    (b"numpy", b"dtype"): _Global.DTYPE,
}


@dataclass(eq=False)
class _Array:
    """An array of unsigned bytes; a pickle creates it first and sets its values later."""

    pixels: NDArray[np.uint8] | None = None


@dataclass(eq=False)
class _ByteType:
    """The type ``uint8``."""


@final
class _Parser:
    """The stack machine, with plain values on its stack.

    Texts and bytes both become ``bytes``: Python 2, which wrote the published files, does not distinguish them.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []  # how high the stack was at each open mark
        self.memo: dict[int, Any] = {}

    def parse(self) -> Any:
        """Returns the value that the file holds."""
        for _ in range(MOST_INSTRUCTIONS):
            code = self._take(1)
            if code == b".":
                return self._result()
            instruction = self.INSTRUCTIONS.get(code)
            if instruction is None:
                raise ContentError(f"it has the instruction {code!r} at byte {self.position - 1:,}")
            instruction(self)
        raise ContentError(f"it has more than {MOST_INSTRUCTIONS:,} instructions")

    def _result(self) -> Any:
        """Returns the only value on the stack at the end of the program."""
        if self.position != len(self.content):
            raise ContentError(f"it has more bytes after its end at byte {self.position:,}")
        if self.marks or len(self.stack) != 1:
            raise ContentError("it ends too early")
        return self.stack[0]

    # Reading

    def _take(self, count: int) -> bytes:
        """Returns the next bytes; refuses a length beyond the end of the file before anything is allocated."""
        end = self.position + count
        if end > len(self.content):
            raise ContentError("it is cut off")
        taken = self.content[self.position : end]
        self.position = end
        return taken

    def _take_number(self, layout: str) -> int:
        """Returns the next number, in a layout of ``struct``."""
        number: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return number

    def _take_sized(self, layout: str) -> bytes:
        """Reads a length, and returns that many of the next bytes."""
        length = self._take_number(layout)
        if length < 0:
            raise ContentError(f"it has a text of length {length}")
        return self._take(length)

    def _take_line(self) -> bytes:
        """Returns the bytes up to the next newline."""
        end = self.content.find(b"\n", self.position)
        if end < 0:
            raise ContentError("it is cut off")
        return self._take(end + 1 - self.position)[:-1]

    # The stack

    def _pop(self) -> Any:
        """Removes and returns the top of the stack, but nothing below the last open mark."""
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) <= floor:
            raise ContentError("it takes a value from an empty stack")
        return self.stack.pop()

    def _peek(self) -> Any:
        """Returns the top of the stack."""
        value = self._pop()
        self.stack.append(value)
        return value

    def _pop_to_mark(self) -> list[Any]:
        """Closes the last mark, and removes and returns all values above it."""
        if not self.marks:
            raise ContentError("it closes a group that it did not open")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    # Instructions; the table INSTRUCTIONS below says which byte stands for which

    def _protocol(self) -> None:
        protocol = self._take_number("<B")
        if protocol > 5:
            raise ContentError(f"it is in version {protocol} of the pickle format")

    def _frame(self) -> None:
        self._take_number("<Q")  # how much to read ahead; ignored, since everything is in memory

    def _mark(self) -> None:
        self.marks.append(len(self.stack))

    def _remember(self, place: int) -> None:
        self.memo[place] = self._peek()

    def _recall(self, place: int) -> None:
        if place not in self.memo:
            raise ContentError("it recalls a value that it did not store")
        self.stack.append(self.memo[place])

    def _long(self) -> None:
        digits = self._take_sized("<B")
        if len(digits) > 8:
            raise ContentError("it has a number of more than 64 bits")
        self.stack.append(int.from_bytes(digits, "little", signed=True))

    def _tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self.stack.append(tuple(reversed(values)))

    def _append(self, values: list[Any]) -> None:
        target = self._peek()
        if not isinstance(target, list):
            raise ContentError("it appends to something that is not a list")
        target.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = self._peek()
        if not isinstance(target, dict) or len(values) % 2:
            raise ContentError("it adds fields to something that is not a dict")
        keys = values[::2]
        fields = values[1::2]
        for key, value in zip(keys, fields, strict=True):
            if not isinstance(key, bytes):
                raise ContentError("it has a field whose name is not a text")
            target[key] = value

    def _append_one(self) -> None:
        value = self._pop()
        self._append([value])

    def _set_item(self) -> None:
        value = self._pop()
        key = self._pop()
        self._set_items([key, value])

    def _global(self) -> None:
        module = self._take_line()
        name = self._take_line()
        self.stack.append(_allowed(module, name))

    def _stack_global(self) -> None:
        name = self._pop()
        module = self._pop()
        if not isinstance(module, bytes) or not isinstance(name, bytes):
            raise ContentError("it asks for something whose name is not a text")
        self.stack.append(_allowed(module, name))

    def _reduce(self) -> None:
        """Calls a function; only the two calls that create an array and its type are allowed."""
        arguments = self._pop()
        function = self._pop()
        if function is _Global.RECONSTRUCT and arguments == (_Global.NDARRAY, (0,), b"b"):
            self.stack.append(_Array())
        elif function is _Global.DTYPE and arguments == (b"u1", 0, 1):
            self.stack.append(_ByteType())
        else:
            raise ContentError("it holds an object that is not an array of unsigned bytes")

    def _build(self) -> None:
        """Sets the state of the last object: that of an array has its values; that of the type does not matter."""
        state = self._pop()
        target = self._peek()
        if isinstance(target, _Array):
            target.pixels = _pixels(state)
        elif not isinstance(target, _ByteType):
            raise ContentError("it sets the state of something that is not an array")

    INSTRUCTIONS: ClassVar[dict[bytes, Callable[[_Parser], None]]] = {
        b"\x80": _protocol,
        b"\x95": _frame,
        # Values
        b"N": lambda self: self.stack.append(None),
        b"\x88": lambda self: self.stack.append(True),
        b"\x89": lambda self: self.stack.append(False),
        b"K": lambda self: self.stack.append(self._take_number("<B")),
        b"M": lambda self: self.stack.append(self._take_number("<H")),
        b"J": lambda self: self.stack.append(self._take_number("<i")),
        b"\x8a": _long,
        # Texts of Python 2, texts of Python 3, bytes of Python 3
        b"U": lambda self: self.stack.append(self._take_sized("<B")),
        b"T": lambda self: self.stack.append(self._take_sized("<i")),
        b"\x8c": lambda self: self.stack.append(self._take_sized("<B")),
        b"X": lambda self: self.stack.append(self._take_sized("<I")),
        b"\x8d": lambda self: self.stack.append(self._take_sized("<Q")),
        b"C": lambda self: self.stack.append(self._take_sized("<B")),
        b"B": lambda self: self.stack.append(self._take_sized("<I")),
        b"\x8e": lambda self: self.stack.append(self._take_sized("<Q")),
        # Collections
        b"(": _mark,
        b")": lambda self: self._tuple(0),
        b"\x85": lambda self: self._tuple(1),
        b"\x86": lambda self: self._tuple(2),
        b"\x87": lambda self: self._tuple(3),
        b"t": lambda self: self.stack.append(tuple(self._pop_to_mark())),
        b"]": lambda self: self.stack.append([]),
        b"a": _append_one,
        b"e": lambda self: self._append(self._pop_to_mark()),
        b"}": lambda self: self.stack.append({}),
        b"s": _set_item,
        b"u": lambda self: self._set_items(self._pop_to_mark()),
        # Values that are used again
        b"q": lambda self: self._remember(self._take_number("<B")),
        b"r": lambda self: self._remember(self._take_number("<I")),
        b"\x94": lambda self: self._remember(len(self.memo)),
        b"h": lambda self: self._recall(self._take_number("<B")),
        b"j": lambda self: self._recall(self._take_number("<I")),
        # Objects
        b"c": _global,
        b"\x93": _stack_global,
        b"R": _reduce,
        b"b": _build,
    }


def _allowed(module: bytes, name: bytes) -> _Global:
    """Returns what has this name; refuses all names that batches do not need, which could be of any function."""
    allowed = _GLOBALS.get((module, name))
    if allowed is None:
        full_name = f"{module.decode('utf-8', 'replace')}.{name.decode('utf-8', 'replace')}"
        raise ContentError(f"it asks for {full_name[:80]}, as no batch of CIFAR-10 does")
    return allowed


def _pixels(state: Any) -> NDArray[np.uint8]:
    """Returns the array of a state as NumPy pickles it: version, shape, type, whether in Fortran order, and bytes."""
    if not isinstance(state, tuple) or len(state) != 5:
        raise ContentError("it has an array without values")
    _, shape, dtype, fortran, values = state
    if not isinstance(dtype, _ByteType) or not isinstance(values, bytes):
        raise ContentError("it has an array that is not of unsigned bytes")
    if not isinstance(shape, tuple) or len(shape) != 2 or not all(type(side) is int for side in shape):
        raise ContentError("it has an array that is not a matrix")
    if min(shape) < 0 or math.prod(shape) != len(values):
        raise ContentError(f"it has an array {shape} of {len(values):,} bytes")
    order: Any = "F" if fortran else "C"
    return np.frombuffer(values, dtype=np.uint8).reshape(shape, order=order)
