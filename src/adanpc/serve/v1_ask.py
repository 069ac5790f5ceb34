"""/v1 routes for asking: predictions, the latest queries, previews, and pictures of queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from fastapi import APIRouter, Query, Request, Response

from adanpc.serve.batcher import Features
from adanpc.serve.bodies import PredictBody, PreviewBody, as_features, read_json, read_npy
from adanpc.serve.errors import MediaTypeError, NotFoundError, RequestError
from adanpc.serve.security import caller_of
from adanpc.serve.service import Service, ServiceOfApp
from adanpc.serve.tokens import LONGEST_ID

NPY = "application/x-npy"
JSON = "application/json"
ARRAY_BODY = {"schema": {"type": "string", "format": "binary"}}
PREDICT_BODIES = {
    "requestBody": {
        "required": True,
        "content": {
            "image/*": ARRAY_BODY,
            NPY: ARRAY_BODY,
            JSON: {"schema": PredictBody.model_json_schema()},
        },
    }
}


RequestId = Annotated[str, Query(alias="request", max_length=LONGEST_ID)]


class QueriesSent(NamedTuple):
    """The queries in the body of a request."""

    features: Features  # (B, D)
    request: str = ""  # the id of the request
    pictures: Sequence[bytes | None] = ()  # of the queries, if they are images


routes = APIRouter(prefix="/v1", tags=["ask"])


@routes.post("/predict", openapi_extra=PREDICT_BODIES)
async def predict(
    service: ServiceOfApp, request: Request, adapt: bool = True, request_id: RequestId = ""
) -> dict[str, Any]:
    """Answers an image or features; unless adapt is false, the bank learns from them.

    The id of a request makes it count once, however often it is sent: in JSON as ``request``, otherwise as a parameter.
    """
    sent = await _read(service, request, request_id)
    if adapt:
        own_id = caller_of(request).own_id(sent.request)
        answer = await service.classify(sent.features, request=own_id, pictures=sent.pictures)
    else:
        answer = await service.predict(sent.features, pictures=sent.pictures)
    answers = [service.document(query) for query in answer.queries]
    return {"position": service.bank.position, "answers": answers}


@routes.get("/queries")
async def queries(
    service: ServiceOfApp,
    order: Literal["latest", "uncertain"] = "latest",
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> dict[str, Any]:
    """The latest queries, or the least certain of them."""
    listed = service.queries.listed(order, limit)
    return {"queries": [service.document(query, with_neighbors=False) for query in listed]}


@routes.get("/queries/{name}")
async def query(service: ServiceOfApp, name: str) -> dict[str, Any]:
    """A query with the answer that it got, and the rows that voted."""
    return service.document(service.queries.find(name))


@routes.get("/queries/{name}/picture")
async def picture(service: ServiceOfApp, name: str) -> Response:
    """A small picture of a query that was an image."""
    found = service.queries.find(name).picture
    if found is None:
        raise NotFoundError("the query was not an image")
    return Response(found, media_type="image/jpeg")


@routes.post("/preview")
async def preview(service: ServiceOfApp, body: PreviewBody) -> dict[str, Any]:
    """The answer as it would be now without some rows; nothing changes. A query that joined has no vote on itself."""
    if bool(body.query) == (body.features is not None):
        raise RequestError("give either a query or features")
    without = list(body.without)
    if body.query:
        found = service.queries.find(body.query)
        features = found.features[None]
        without += found.own_rows
    else:
        features = torch.from_numpy(as_features(body.features))
    prediction = await service.preview(features, without)
    return {"query": body.query or None, **service.answer(prediction, 0)}


async def _read(service: Service, request: Request, request_id: str) -> QueriesSent:
    """Returns the queries in the body of a request."""
    content = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("image/"):
        features, picture = await service.encode(content)
        return QueriesSent(features, request_id, [picture])
    if kind == NPY:
        return QueriesSent(read_npy(content), request_id)
    if kind == JSON:
        body = read_json(content, PredictBody)
        return QueriesSent(_from_lists(body.features), body.request or request_id)
    raise MediaTypeError(f"the body must be an image, {NPY} or {JSON}, got {kind[:50]!r}")


def _from_lists(given: list[list[float]] | list[float]) -> Features:
    """Returns features from lists of numbers, which must have the same length."""
    if isinstance(given[0], list):
        lengths = {len(row) for row in given if isinstance(row, list)}
        if len(lengths) > 1:
            raise RequestError(f"features must be lists of one length, got lengths {sorted(lengths)[:5]}")
    return as_features(given)
