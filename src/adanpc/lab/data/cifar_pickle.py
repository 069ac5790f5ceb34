"""Reads the pickled batches of CIFAR-10 without unpickling them.

A pickle is a program for a small stack machine, and the unpickler runs it: it imports what the file names and calls it.
Even if the names are restricted to NumPy's, one wrong byte can make NumPy build an array around memory that does not
exist, and the process dies. So this module reads the same program and runs none of it. It knows the instructions that
Python 2 and 3 write for texts, whole numbers, tuples, lists, dicts and one kind of array, unsigned bytes; the array is
assembled here, from bytes whose number has been checked. Whatever else a file asks for is refused.
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

# A published batch takes some 50,000 instructions. An instruction of one byte may ask for a list of 56, so it is their
# number that bounds the memory.
MOST_INSTRUCTIONS = 1_000_000


class Batch(NamedTuple):
    """What a batch holds.

    Args:
        pixels: (n, m) uint8, one image a row.
        labels: one a row, as they are in the file.
    """

    pixels: NDArray[np.uint8]
    labels: list[int]


def parse_batch(content: bytes) -> Batch:
    """The pixels and labels of a pickled batch; raises ``ContentError`` for anything else."""
    fields = _Parser(content).parse()
    if not isinstance(fields, dict):
        raise ContentError("it holds no dict")
    array = fields.get(b"data")
    labels = fields.get(b"labels")
    if not isinstance(array, _Array) or array.pixels is None:
        raise ContentError("it has no array under 'data'")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ContentError("it has no list of whole numbers under 'labels'")
    return Batch(array.pixels, labels)


class _Global(enum.Enum):
    """What a batch may name: only names, nothing is imported."""

    RECONSTRUCT = enum.auto()
    NDARRAY = enum.auto()
    DTYPE = enum.auto()


# NumPy has moved its private modules once; both names are in use.
_GLOBALS = {
    (b"numpy.core.multiarray", b"_reconstruct"): _Global.RECONSTRUCT,
    (b"numpy._core.multiarray", b"_reconstruct"): _Global.RECONSTRUCT,
    (b"numpy", b"ndarray"): _Global.NDARRAY,
    (b"numpy", b"dtype"): _Global.DTYPE,
}


@dataclass(eq=False)
class _Array:
    """An array of unsigned bytes; a pickle announces it first and fills it later."""

    pixels: NDArray[np.uint8] | None = None


@dataclass(eq=False)
class _ByteType:
    """The type ``uint8``."""


@final
class _Parser:
    """The stack machine, with plain values on its stack.

    Texts and bytes both become ``bytes``: Python 2, which wrote the published files, does not tell them apart.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []  # how high the stack was at each open mark
        self.memo: dict[int, Any] = {}

    def parse(self) -> Any:
        """What the file holds."""
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
        if self.position != len(self.content):
            raise ContentError(f"it has more bytes after its end at byte {self.position:,}")
        if self.marks or len(self.stack) != 1:
            raise ContentError("it ends too early")
        return self.stack[0]

    # Reading

    def _take(self, count: int) -> bytes:
        """The next bytes; a length that the file does not have is refused before anything is allocated."""
        end = self.position + count
        if end > len(self.content):
            raise ContentError("it is cut")
        taken = self.content[self.position : end]
        self.position = end
        return taken

    def _take_number(self, layout: str) -> int:
        """The next number, in a layout as ``struct`` writes it."""
        number: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return number

    def _take_sized(self, layout: str) -> bytes:
        """The next length, and as many bytes."""
        length = self._take_number(layout)
        if length < 0:
            raise ContentError(f"it has a text of length {length}")
        return self._take(length)

    def _take_line(self) -> bytes:
        end = self.content.find(b"\n", self.position)
        if end < 0:
            raise ContentError("it is cut")
        return self._take(end + 1 - self.position)[:-1]

    # The stack

    def _pop(self) -> Any:
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) <= floor:
            raise ContentError("it takes a value where there is none")
        return self.stack.pop()

    def _peek(self) -> Any:
        value = self._pop()
        self.stack.append(value)
        return value

    def _pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise ContentError("it closes a group that it did not open")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    # Instructions

    def _protocol(self) -> None:
        protocol = self._take_number("<B")
        if protocol > 5:
            raise ContentError(f"it is in version {protocol} of the pickle format")

    def _frame(self) -> None:
        self._take_number("<Q")  # how much to read ahead: of no interest, since all is in memory

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
            raise ContentError("it appends to what is no list")
        target.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = self._peek()
        if not isinstance(target, dict) or len(values) % 2:
            raise ContentError("it adds fields to what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, bytes):
                raise ContentError("it has a field whose name is no text")
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
        self.stack.append(_known(module, name))

    def _stack_global(self) -> None:
        name = self._pop()
        module = self._pop()
        if not isinstance(module, bytes) or not isinstance(name, bytes):
            raise ContentError("it asks for something whose name is no text")
        self.stack.append(_known(module, name))

    def _reduce(self) -> None:
        """The call of a function: the two that announce an array, and its type."""
        arguments = self._pop()
        function = self._pop()
        if function is _Global.RECONSTRUCT and arguments == (_Global.NDARRAY, (0,), b"b"):
            self.stack.append(_Array())
        elif function is _Global.DTYPE and arguments == (b"u1", 0, 1):
            self.stack.append(_ByteType())
        else:
            raise ContentError("it holds an object that is no array of unsigned bytes")

    def _build(self) -> None:
        """The state of the last object: a type has none that matters for single bytes, an array has its values."""
        state = self._pop()
        target = self._peek()
        if isinstance(target, _Array):
            target.pixels = _pixels(state)
        elif not isinstance(target, _ByteType):
            raise ContentError("it sets the state of what is no array")

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


def _known(module: bytes, name: bytes) -> _Global:
    """What has this name, if batches need it; otherwise it could be any function of any module."""
    known = _GLOBALS.get((module, name))
    if known is None:
        asked = f"{module.decode('utf-8', 'replace')}.{name.decode('utf-8', 'replace')}"
        raise ContentError(f"it asks for {asked[:80]}, as no batch of CIFAR-10 does")
    return known


def _pixels(state: Any) -> NDArray[np.uint8]:
    """The array of a state as NumPy pickles it: version, shape, type, whether in Fortran order, and the bytes."""
    if not isinstance(state, tuple) or len(state) != 5:
        raise ContentError("it has an array without values")
    _, shape, dtype, fortran, values = state
    if not isinstance(dtype, _ByteType) or not isinstance(values, bytes):
        raise ContentError("it has an array that is not of unsigned bytes")
    if not isinstance(shape, tuple) or len(shape) != 2 or not all(type(side) is int for side in shape):
        raise ContentError("it has an array that is no matrix")
    if min(shape) < 0 or math.prod(shape) != len(values):
        raise ContentError(f"it has an array {shape} of {len(values):,} bytes")
    order: Any = "F" if fortran else "C"
    return np.frombuffer(values, dtype=np.uint8).reshape(shape, order=order)
