"""Tensors of the Open Inference Protocol: numbers in JSON, or bytes that follow it (Triton's binary extension)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Literal

import numpy as np
from pydantic_core import from_json

from adanpc.serve.errors import RequestError

TYPES = {
    "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "INT8": "<i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "UINT8": "<u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
}  # fmt: skip
NOT_SUPPORTED = {  # parameters of Triton's extensions that would change the answer, and what to do without them
    "shared_memory_region": "send tensors in the request, and read them from the answer",
    "classification": "read the labels, and the probabilities of all classes",
}
LENGTH = re.compile(r"[0-9]{1,15}")
NAMES = {np.dtype(code): name for name, code in TYPES.items()}


def split_body(content: bytes, stated: str | None) -> tuple[dict[str, Any], bytes]:
    """Returns the JSON object of a request, and the bytes that follow it.

    Args:
        content: the body of the request.
        stated: the length of the JSON object according to a header; None if it is the whole body.
    """
    length = len(content)
    if stated is not None:
        if not LENGTH.fullmatch(stated) or int(stated) > length:
            raise RequestError("the header Inference-Header-Content-Length must be at most the length of the body")
        length = int(stated)
    try:
        document = from_json(content[:length])  # several times as fast as json.loads for many numbers
    except ValueError:
        raise RequestError("the body does not begin with a JSON object") from None
    if not isinstance(document, dict):
        raise RequestError("the body must be a JSON object")
    return document, content[length:]


def read_tensor(described: Any, binary: bytes, name: str) -> Any:
    """Returns the only input of a request as an array; its binary data, if any, is everything that follows the JSON."""
    if not isinstance(described, dict):
        raise RequestError("an input must be a JSON object with name, shape, datatype and data")
    if described.get("name") != name:
        raise RequestError(f"the name of the input must be {name}")
    kind = described.get("datatype")
    shape: Any = described.get("shape")
    if not isinstance(kind, str) or kind not in TYPES:
        raise RequestError(f"datatype must be one of {', '.join(TYPES)}")
    sides = isinstance(shape, list) and all(type(side) is int and 0 <= side < 2**31 for side in shape)
    if not sides or len(shape) > 8:
        raise RequestError("shape must be a list of at most 8 sizes")
    dtype = np.dtype(TYPES[kind])
    size = parameters_of(described).get("binary_data_size")
    if size is None:
        values = _from_json(described.get("data"), dtype)
    else:
        if type(size) is not int or size != len(binary) or size != prod(shape) * dtype.itemsize:
            raise RequestError(f"{len(binary)} bytes of binary data do not fit shape {shape} and binary_data_size")
        values = np.frombuffer(binary, dtype)
    if values.size != prod(shape):
        raise RequestError(f"data has {values.size} numbers, and shape {shape} takes {prod(shape)}")
    return shaped(values, shape)


def shaped(values: Any, shape: Sequence[int], order: Literal["C", "F"] = "C") -> Any:
    """Returns numbers in the shape that a request stated; even the shape of an empty array may be too large."""
    try:
        return values.reshape(shape, order=order)
    except (TypeError, ValueError, OverflowError):
        raise RequestError("the shape is none that an array can have") from None


def parameters_of(described: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a request or a tensor."""
    parameters = described.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError("parameters must be a JSON object")
    for name, remedy in NOT_SUPPORTED.items():
        if name in parameters:
            raise RequestError(f"the parameter {name} is not supported: {remedy}")
    return parameters


def write_tensor(name: str, values: Any) -> str:
    """Returns an output as JSON."""
    described = {"name": name, "shape": list(values.shape), "datatype": NAMES[values.dtype]}
    return json.dumps({**described, "data": values.ravel().tolist()})


@lru_cache(maxsize=1000)  # the responses in a stream differ only in their numbers
def describe_binary(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    """Returns the JSON description of an output whose bytes follow the JSON."""
    described = {"name": name, "shape": list(shape), "datatype": NAMES[dtype]}
    return json.dumps({**described, "parameters": {"binary_data_size": prod(shape) * dtype.itemsize}})


def _from_json(data: Any, dtype: np.dtype[Any]) -> Any:
    """Returns numbers from a list, which may be flat or nested like the tensor."""
    if not isinstance(data, list):
        raise RequestError("data must be a list of numbers")
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.array(data, dtype)
    except (TypeError, ValueError, OverflowError):
        raise RequestError("data must be a list of numbers") from None
    return values
