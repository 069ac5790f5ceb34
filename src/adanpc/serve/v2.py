"""/v2: the Open Inference Protocol, for clients such as tritonclient."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from starlette.types import Scope

from adanpc.errors import UnavailableError
from adanpc.serve.bodies import as_features
from adanpc.serve.errors import NotFoundError, RequestError
from adanpc.serve.security import RawHeaders, header
from adanpc.serve.service import Service, ServiceOfApp
from adanpc.serve.tensors import TYPES, describe_binary, parameters_of, read_tensor, split_body, write_tensor
from adanpc.serve.tokens import LONGEST_ID, Caller
from adanpc.store.durable import Part
from adanpc.version import __version__

MODEL = "adanpc"
VERSION = "1"
INPUT = "features"
LENGTH = b"inference-header-content-length"
JSON = (b"content-type", b"application/json")
BYTES = (b"content-type", b"application/octet-stream")
GIVEN = ("labels", "probs", "joined")  # the outputs unless a request names others
EXTRA = ("neighbor_ids", "neighbor_labels", "neighbor_origins", "neighbor_similarities", "neighbor_shares")
KINDS = {
    "labels": "INT64", "probs": "FP32", "joined": "INT64", "neighbor_ids": "INT64", "neighbor_labels": "INT64",
    "neighbor_origins": "INT8", "neighbor_similarities": "FP64", "neighbor_shares": "FP32",
}  # fmt: skip
ORIGINS = {"source": 0, "admitted": 1, "expert": 2, "left": -1}

INPUT_SCHEMA = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"const": INPUT},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2},
        "datatype": {"enum": list(TYPES)},
        "data": {"type": "array"},
        "parameters": {"type": "object"},
    },
}
OUTPUT_SCHEMA = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"enum": list(KINDS)}, "parameters": {"type": "object"}},
}
INFER_BODY = {  # parsed by hand, because binary data may follow the JSON; described here for authors of clients
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["inputs"],
                    "properties": {
                        "id": {"type": "string", "maxLength": LONGEST_ID},
                        "parameters": {"type": "object"},
                        "inputs": {"type": "array", "minItems": 1, "maxItems": 1, "items": INPUT_SCHEMA},
                        "outputs": {"type": "array", "items": OUTPUT_SCHEMA},
                    },
                }
            }
        },
    }
}

routes = APIRouter(prefix="/v2", tags=["inference"])


@routes.get("")
async def server() -> dict[str, Any]:
    """What answers here."""
    return {"name": "adanpc", "version": __version__, "extensions": ["binary_tensor_data"]}


@routes.get("/health/live")
async def live() -> Response:
    """Nothing, if the service answers."""
    return Response()


@routes.get("/health/ready")
async def ready(service: ServiceOfApp) -> Response:
    """Nothing, if the bank can learn and answer."""
    _check_ready(service)
    return Response()


@routes.get("/models/{model}/ready")
@routes.get("/models/{model}/versions/{version}/ready")
async def model_ready(service: ServiceOfApp, model: str, version: str = VERSION) -> Response:
    """Nothing, if there is such a model and it can answer."""
    _check_model(model, version)
    _check_ready(service)
    return Response()


@routes.get("/models/{model}")
@routes.get("/models/{model}/versions/{version}")
async def describe_model(service: ServiceOfApp, model: str, version: str = VERSION) -> dict[str, Any]:
    """What the model takes and gives."""
    _check_model(model, version)
    known = service.bank.contents.settings
    outputs = []
    for name in (*GIVEN, *EXTRA):
        shape = [-1, -1]
        if name in ("labels", "joined"):
            shape = [-1]
        if name == "probs":
            shape = [-1, known.classes]
        outputs.append({"name": name, "datatype": KINDS[name], "shape": shape})
    inputs = [{"name": INPUT, "datatype": "FP32", "shape": [-1, known.dim]}]
    return {"name": MODEL, "versions": [VERSION], "platform": "adanpc", "inputs": inputs, "outputs": outputs}


@routes.post("/models/{model}/infer", openapi_extra=INFER_BODY)
@routes.post("/models/{model}/versions/{version}/infer", openapi_extra=INFER_BODY)
async def infer(service: ServiceOfApp, request: Request, model: str, version: str = VERSION) -> Response:
    """Answers features and learns from them; the id of a request makes it count once, however often it is sent."""
    _check_model(model, version)
    body, headers = await inferred(service, await request.body(), request.scope)
    response = Response(body)
    response.raw_headers += headers
    return response


class Inference(NamedTuple):
    """A parsed inference request."""

    request: str  # its id
    features: NDArray[np.float32]  # (B, D)
    wanted: dict[str, bool]  # the names of the requested outputs, and whether each should be binary


def _read(content: bytes, headers: RawHeaders) -> Inference:
    """Returns the parsed request, so that nothing else of its body stays in memory while it waits for the answer."""
    document, binary = split_body(content, header(headers, LENGTH))
    given = document.get("inputs")
    if not isinstance(given, list) or len(given) != 1:
        raise RequestError(f"inputs must be a list of one tensor, {INPUT}")
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise RequestError("id must be a text")
    wanted = _wanted(document)
    return Inference(request_id, as_features(read_tensor(given[0], binary, INPUT)), wanted)


async def inferred(service: Service, content: bytes, scope: Scope) -> tuple[bytes, Sequence[tuple[bytes, bytes]]]:
    """Answers a request with this body; returns the body and the headers of the response."""
    request_id, features, wanted = _read(content, scope["headers"])
    caller: Caller = scope["state"]["caller"]
    answer = await service.classify(features, request=caller.own_id(request_id))
    described = []
    data = []
    for name, as_bytes in wanted.items():
        values = _values(service, answer.part, name)
        if as_bytes:
            described.append(describe_binary(name, values.shape, values.dtype))
            data.append(values.tobytes())
        else:
            described.append(write_tensor(name, values))
    text = f'{{"model_name": "{MODEL}", "model_version": "{VERSION}", "outputs": [{", ".join(described)}]'
    if request_id:
        text += f', "id": {json.dumps(request_id)}'
    head = f"{text}}}".encode()
    if not any(wanted.values()):
        return head, [JSON]
    data.insert(0, head)
    return b"".join(data), [BYTES, (LENGTH, str(len(head)).encode())]


def _check_model(name: str, version: str) -> None:
    if name != MODEL or version != VERSION:
        raise NotFoundError(f"there is no model {name[:50]!r}, version {version[:50]!r}: it is {MODEL!r}, {VERSION!r}")


def _check_ready(service: Service) -> None:
    if not service.bank.ready:
        raise UnavailableError("the bank can learn nothing more until the service has started again: see its log")


def _wanted(document: dict[str, Any]) -> dict[str, bool]:
    """Returns the names of the requested outputs, and whether each should be binary."""
    by_default = parameters_of(document).get("binary_data_output") is True
    asked = document.get("outputs")
    if not asked:
        return dict.fromkeys(GIVEN, by_default)
    if not isinstance(asked, list):
        raise RequestError("outputs must be a list")
    wanted = {}
    for output in asked:
        if not isinstance(output, dict) or not isinstance(output.get("name"), str) or output["name"] not in KINDS:
            raise RequestError(f"an output must have one of the names {', '.join(KINDS)}")
        wanted[output["name"]] = parameters_of(output).get("binary_data", by_default) is True
    return wanted


def _values(service: Service, part: Part, name: str) -> Any:
    """Returns an output as an array; absent neighbors have id, label and origin -1, similarity -2 and share 0."""
    prediction = part.together
    near = prediction.neighbors
    these = slice(part.begin, part.end)
    if name in GIVEN:
        return getattr(prediction, name).numpy()[these]
    if name == "neighbor_ids":
        return near.ids.numpy()[these]
    if name == "neighbor_labels":
        return near.labels.numpy()[these]
    if name == "neighbor_similarities":
        return near.similarity[these].clamp(min=-2).numpy()  # JSON has no infinity
    if name == "neighbor_shares":
        return prediction.weights.numpy()[these]
    ids = near.ids[these]
    facts = service.facts.of(ids.flatten().tolist(), service.bank.contents)
    origins = [ORIGINS[fact.origin] for fact in facts]
    return np.array(origins, np.int8).reshape(tuple(ids.shape))
