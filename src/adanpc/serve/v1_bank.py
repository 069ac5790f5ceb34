"""/v1 routes for looking: the bank, its rows, their map, the log, the timeline, and events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from adanpc.core import Origin
from adanpc.core.changes import LARGEST_ID
from adanpc.serve.errors import NotFoundError
from adanpc.serve.history import judgment_documents, log_documents
from adanpc.serve.images import small_jpeg
from adanpc.serve.security import caller_of
from adanpc.serve.service import Service, ServiceOfApp, signs_document

MOST_ON_MAP = 1_000_000
RowId = Annotated[int, Path(ge=0, le=LARGEST_ID)]


routes = APIRouter(prefix="/v1", tags=["look"])


@routes.get("/bank")
async def describe(service: ServiceOfApp, request: Request, digest: bool = False) -> dict[str, Any]:
    """What the bank holds, and who asks; its digest takes time, and is made if it is asked for."""
    contents = service.bank.contents
    origins = contents.table("origin")["origin"]
    source = int((origins == Origin.SOURCE).sum())
    signs = None
    seen = service.signs()
    if seen is not None:
        signs = signs_document(seen)
    caller = caller_of(request)
    document = {
        "position": contents.position,
        "log_start": service.bank.log.start,
        "rows": len(contents),
        "source_rows": source,
        "stream_rows": len(contents) - source,
        "vetoed_rows": len(contents.vetoed),
        "classes": list(service.names),
        "dim": contents.settings.dim,
        "preset": service.bank.preset,
        "encoder": service.encoder is not None,
        "thumbnails": service.thumbnails is not None,
        "bytes": contents.nbytes,
        "signs": signs,
        "notices": service.bank.notices,
        "role": caller.role,
        "who": caller.name,
    }
    if digest:
        document["digest"] = await run_in_threadpool(service.bank.digest)
    return document


@routes.get("/rows/{row}")
async def row(service: ServiceOfApp, row: RowId) -> dict[str, Any]:
    """What is known of a row."""
    contents = service.bank.contents
    slots = contents.slots_of(torch.tensor([row]))
    table = {name: column[0] for name, column in contents.table_of(slots, *contents.columns.kinds).items()}
    label = int(table["label"])
    origin = Origin(int(table["origin"])).name.lower()
    key = int(table["key"])
    domain = int(table["domain"])
    known_key = key if key >= 0 else None
    document = {
        "id": row,
        "label": label,
        "name": service.names[label],
        "origin": origin,
        "vetoed": row in contents.vetoed,
        "domain": domain if domain >= 0 else None,
        "key": known_key,
        "confidence": float(table["confidence"]),
        "history": judgment_documents(row, contents),
        "picture": service.picture_link(row, origin, known_key),
    }
    if "soft" in table:
        document["probs"] = table["soft"].tolist()
    return document


@routes.get("/rows/{row}/picture")
async def picture(service: ServiceOfApp, row: RowId) -> Response:
    """A small picture of a row."""
    found = await run_in_threadpool(_picture, service, row)
    if found is None:
        raise NotFoundError(f"there is no picture of row {row}")
    return Response(found, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})


@routes.get("/map")
async def map_of_rows(service: ServiceOfApp, limit: Annotated[int, Query(ge=1, le=MOST_ON_MAP)] = 100_000) -> Response:
    """All rows on a plane, as columns of numbers behind one line of JSON."""
    content = await run_in_threadpool(service.plane.map, service.bank.contents, limit)
    return Response(content, media_type="application/octet-stream")


@routes.get("/log")
async def log(
    service: ServiceOfApp,
    before: Annotated[int | None, Query(ge=0, le=LARGEST_ID)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    kind: Literal["all", "expert"] = "all",
) -> dict[str, Any]:
    """Who changed what, why and when, the newest first; all of it, or what people did.

    ``before`` in the answer is what to ask for next; null if there is nothing before it.
    """
    entries, next_before = await run_in_threadpool(log_documents, service.bank, before, limit, kind == "expert")
    return {"entries": entries, "before": next_before}


@routes.get("/timeline")
async def timeline(service: ServiceOfApp, points: Annotated[int, Query(ge=1, le=1000)] = 500) -> dict[str, Any]:
    """How the stream has gone."""
    return {"points": service.timeline.documents(points)}


@routes.get("/events")
async def events(service: ServiceOfApp) -> StreamingResponse:
    """What happens from now on."""
    return StreamingResponse(service.events.stream(), media_type="text/event-stream")


def _picture(service: Service, row: int) -> bytes | None:
    """Returns a small picture of a row: of the query that joined, or of the image of a source row; None without one."""
    if service.thumbnails is not None:
        found = service.thumbnails.find(row)
        if found is not None:
            return found
    if service.image_of_key is None:
        return None
    contents = service.bank.contents
    (fact,) = service.facts.of([row], contents)
    if fact.origin != "source" or fact.key is None:
        return None
    pixels = service.image_of_key(fact.key)
    if pixels is None:
        return None
    return small_jpeg(pixels)
