"""Training states in files: nested values, exact to the bit, without pickle.

A state consists of dicts, lists, tuples, tensors, numbers, strings, True, False and None. In the file (see
``adanpc.lab.networks.sealed``) each tensor has a name made of the keys that lead to it; everything else is in one JSON
document. Strings, whole numbers, True, False, None and lists are stored as they are. A value that JSON cannot hold
exactly, or cannot tell apart from another type, is stored as an object with one entry, named after its type:

* ``{"dict": [[key, value], …]}``, in order, with keys of any type: those of an optimizer are whole numbers;
* ``{"tuple": [value, …]}``;
* ``{"float": "0x1.8p+1"}``, hexadecimal and therefore exact, including infinity and NaN;
* ``{"tensor": name}``.

The document itself is ``{"format": "adanpc-checkpoint", "version": 1, "state": …}``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.sealed import SealError, read_sealed, write_sealed

FORMAT = "adanpc-checkpoint"
VERSION = 1
ROOT = "state"


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a state to a file, completely or not at all."""
    tensors: dict[str, Tensor] = {}
    document = {"format": FORMAT, "version": VERSION, "state": _encode(state, ROOT, tensors)}
    write_sealed(path, tensors, document)


def read(path: Path) -> dict[str, Any]:
    """Returns the state that ``write`` wrote, with tensors on the CPU; raises SealError for any other file."""
    tensors, document = read_sealed(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SealError(f"{path} is not a checkpoint of adanpc train")
    if document.get("version") != VERSION:
        version = document.get("version")
        raise SealError(f"{path} is a checkpoint of version {version!r}, this adanpc reads version {VERSION}")
    try:  # a seal proves that a file is undamaged, not that its contents make sense
        state = _decode(document["state"], tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise SealError(f"{path} holds a state that adanpc did not write ({type(error).__name__})") from None
    if not isinstance(state, dict):
        raise SealError(f"{path} holds a state that adanpc did not write (not a dict)")
    return state


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns a value as JSON can hold it, and adds its tensors to ``tensors`` under names that start with ``name``."""
    kind = type(value)  # exactly, since subclasses, such as the numbers of NumPy, would come back as another type
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind is list:
        return [_encode(item, f"{name}/{place}", tensors) for place, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": [_encode(item, f"{name}/{place}", tensors) for place, item in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            pairs.append([_encode(key, name, tensors), _encode(item, f"{name}/{key}", tensors)])
        return {"dict": pairs}
    if isinstance(value, Tensor):
        while name in tensors:  # the keys 1 and "1", for instance, give the same name
            name += "'"
        tensors[name] = value
        return {"tensor": name}
    raise AdaNPCError(
        f"a checkpoint cannot hold {name}, a {kind.__name__}: use tensors, numbers, strings, lists, dicts"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value that ``_encode`` was given.

    Raises KeyError, TypeError or ValueError if ``_encode`` cannot have written it.
    """
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return float.fromhex(content)
    if kind == "tuple":
        return tuple([_decode(item, tensors) for item in content])
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return _decode_dict(content, tensors)
    raise ValueError(f"unknown kind {kind}")


def _decode_dict(pairs: Any, tensors: Mapping[str, Tensor]) -> dict[Hashable, Any]:
    """Returns the dict with these encoded keys and values."""
    decoded: dict[Hashable, Any] = {}
    for encoded_key, encoded_value in pairs:
        key = _decode(encoded_key, tensors)
        decoded[key] = _decode(encoded_value, tensors)
    return decoded
