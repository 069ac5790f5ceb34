"""Bodies of requests: features as a .npy file or as JSON, read without trusting what they claim."""

from __future__ import annotations

from io import BytesIO
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi.exceptions import RequestValidationError
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from adanpc.core.changes import LARGEST_ID
from adanpc.serve.errors import RequestError
from adanpc.serve.tensors import shaped
from adanpc.serve.tokens import LONGEST_ID

LONGEST_REASON = 2000  # characters
MOST_ROWS = 100_000  # in one change
NUMBERS = "fiu"  # the kinds of NumPy types that features may have

# Lists fail at their first wrong item, since an error for each of millions would take gigabytes.
Position = Annotated[int, Field(strict=True, ge=0, le=LARGEST_ID)]
RowIds = Annotated[list[Position], Field(min_length=1, max_length=MOST_ROWS, fail_fast=True)]
Reason = Annotated[str, Field(max_length=LONGEST_REASON)]
Label = Annotated[int, Field(strict=True)] | str  # of a class: its number or its name
Vector = Annotated[list[float], Field(min_length=1, fail_fast=True)]
Vectors = Annotated[list[Vector], Field(min_length=1, fail_fast=True)]

Document = TypeVar("Document", bound=BaseModel)


class Body(BaseModel):
    """A JSON object with the fields that are named, and no others."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_count(cls, given: Any) -> Any:
        """Refuses an object with too many fields as a whole, since each unknown field would be an error of its own."""
        if isinstance(given, dict) and len(given) > len(cls.model_fields):
            known = ", ".join(cls.model_fields)
            raise PydanticCustomError("unknown_fields", "The fields are {known}, and no others", {"known": known})
        return given


class PredictBody(Body):
    """Queries, and perhaps an id of the request, so that it can be sent twice and counts once."""

    features: Vectors | Vector
    request: Annotated[str, Field(max_length=LONGEST_ID)] = ""


class PreviewBody(Body):
    """A query that was answered, or its features; and the rows that are left out."""

    query: str = ""
    features: Vector | None = None
    without: Annotated[list[Position], Field(max_length=MOST_ROWS, fail_fast=True)] = []


class RowsBody(Body):
    """Rows, and for what reason something happens to them."""

    rows: RowIds
    why: Reason = ""


class DeleteBody(Body):
    """Rows that are to be gone for good, and the reason, which cannot be left out."""

    rows: RowIds
    why: Annotated[str, Field(min_length=1, max_length=LONGEST_REASON)]


class RelabelBody(RowsBody):
    """Rows that get another label."""

    label: Label


class RollbackBody(Body):
    """A position to return to, or to look at what that would change."""

    to: Position
    why: Reason = ""
    preview: bool = False


class UndoBody(Body):
    """The position of a change that is taken back."""

    position: Position
    why: Reason = ""


class FeedbackBody(Body):
    """The true class of a query that was answered."""

    query: str
    label: Label
    why: Reason = ""


def read_json(content: bytes, kind: type[Document]) -> Document:
    """Returns a parsed and validated JSON body."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None


def read_npy(content: bytes) -> NDArray[np.float32]:
    """Returns the features (B, D) in a .npy file; a single vector is a batch of one."""
    file = BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read_header: Any = np.lib.format.read_array_header_2_0
        if version == (1, 0):
            read_header = np.lib.format.read_array_header_1_0
        shape, fortran_order, dtype = read_header(file)
    except Exception:  # NumPy evaluates the header as text, so a malformed one can raise almost anything
        raise RequestError("the body is not a .npy file: write it by numpy.save") from None
    if dtype.kind not in NUMBERS:
        raise RequestError(f"features must be real numbers, and the .npy file holds {dtype}")
    stated = dtype.itemsize
    for side in shape:
        stated *= side
    numbers = content[file.tell() :]
    if stated != len(numbers):
        raise RequestError(f"the header of the .npy file announces {stated} bytes, and there are {len(numbers)}")
    order: Literal["C", "F"] = "C"
    if fortran_order:
        order = "F"
    return as_features(shaped(np.frombuffer(numbers, dtype), shape, order))


def as_features(values: Any) -> NDArray[np.float32]:
    """Returns numbers (B, D) or one vector (D,) as features (B, D) float32; too large a number becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        features: NDArray[np.float32] = np.asarray(values, dtype=np.float32)  # in this machine's byte order
    if features.ndim == 1:
        features = features[None]
    return features
