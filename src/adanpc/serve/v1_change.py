"""/v1 routes for experts: vetoes, corrections, rollbacks, and labels that decide whether to adapt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from adanpc.core import Delete, Relabel, Restore, Veto
from adanpc.errors import LabelError
from adanpc.serve.bodies import DeleteBody, FeedbackBody, RelabelBody, RollbackBody, RowsBody, UndoBody
from adanpc.serve.errors import ConflictError
from adanpc.serve.history import change_at, check_position, undoing
from adanpc.serve.security import Admin, Expert
from adanpc.serve.service import Service, ServiceOfApp

MOST_QUESTIONS = 20


routes = APIRouter(prefix="/v1", tags=["change"])


@routes.post("/veto")
async def veto(service: ServiceOfApp, body: RowsBody, expert: Expert) -> dict[str, Any]:
    """Silences rows: they may no longer vote."""
    return {"position": await service.apply(Veto(tuple(body.rows), expert.name, body.why))}


@routes.post("/restore")
async def restore(service: ServiceOfApp, body: RowsBody, expert: Expert) -> dict[str, Any]:
    """Lets rows that were vetoed vote again."""
    return {"position": await service.apply(Restore(tuple(body.rows), expert.name, body.why))}


@routes.post("/relabel")
async def relabel(service: ServiceOfApp, body: RelabelBody, expert: Expert) -> dict[str, Any]:
    """Corrects the label of rows."""
    label = label_of(body.label, service.names)
    return {"position": await service.apply(Relabel(tuple(body.rows), label, expert.name, body.why))}


@routes.post("/delete")
async def delete(service: ServiceOfApp, body: DeleteBody, admin: Admin) -> dict[str, Any]:
    """Removes rows, their pictures and the queries that they were for good: no rollback brings them back."""
    position = await service.apply(Delete(tuple(body.rows), admin.name, body.why))
    await run_in_threadpool(service.forget, body.rows)
    return {"position": position}


@routes.post("/rollback")
async def rollback(service: ServiceOfApp, body: RollbackBody, expert: Expert) -> dict[str, Any]:
    """Returns to an earlier position, or tells what that would change."""
    check_position(service.bank, body.to)
    if body.preview:
        effect: dict[str, Any] = await service.look_back(_preview_of_rollback, service, body.to)
        return effect
    return {"position": await service.rollback(body.to, who=expert.name, why=body.why)}


@routes.post("/undo")
async def undo(service: ServiceOfApp, body: UndoBody, expert: Expert) -> dict[str, Any]:
    """Takes one expert's change back."""
    change = await run_in_threadpool(change_at, service.bank, body.position)
    why = body.why or f"Undo of the change at position {body.position}"
    return {"position": await service.decide(lambda contents: undoing(change, contents, who=expert.name, why=why))}


@routes.get("/ask")
async def ask(service: ServiceOfApp) -> dict[str, Any]:
    """The kept queries whose labels would say most about whether to adapt."""
    return {"questions": await service.run_prediction(_questions, service)}


@routes.post("/feedback")
async def feedback(service: ServiceOfApp, body: FeedbackBody, expert: Expert) -> dict[str, Any]:
    """Takes an expert's label of a query to which the frozen and the adapted answer differ."""
    label = label_of(body.label, service.names)
    features = service.queries.find(body.query).features[None]
    questions = await run_in_threadpool(service.bank.ask, features, most=1)
    if not questions:
        raise ConflictError("the frozen and the adapted answer to this query agree by now: a label decides nothing")
    return {"position": await service.apply(questions[0].answered(label, who=expert.name, why=body.why))}


def label_of(given: int | str, names: Sequence[str]) -> int:
    """Returns the number of a class, given its number or its name."""
    if isinstance(given, str):
        if given not in names:
            raise LabelError(f"label must be one of {', '.join(names[:20])}, got {given[:50]!r}")
        return names.index(given)
    if not 0 <= given < len(names):
        raise LabelError(f"label must be from 0 to {len(names) - 1}, got {given}")
    return given


def _questions(service: Service) -> list[dict[str, Any]]:
    queries = list(service.queries)
    if not queries:
        return []
    features = torch.stack([query.features for query in queries])
    documents = []
    for question in service.bank.ask(features, most=MOST_QUESTIONS):
        document = service.document(queries[question.query], with_neighbors=False)
        kept = {name: document[name] for name in ("query", "probs", "frozen", "joined", "picture")}
        documents.append({**kept, "frozen_label": question.frozen, "adapted_label": question.adapted})
    return documents


def _preview_of_rollback(service: Service, to: int) -> dict[str, Any]:
    """Returns what a rollback to an earlier position would change."""
    bank = service.bank
    now = bank.contents
    earlier = bank.at(to)
    before = earlier.bank.contents.table("id", "label")
    present = now.table("id", "label")
    deleted = torch.tensor(sorted(now.deleted), dtype=torch.int64)
    returning = ~torch.isin(before["id"], present["id"]) & ~torch.isin(before["id"], deleted)
    staying = torch.isin(present["id"], before["id"])
    places = torch.searchsorted(before["id"], present["id"][staying])
    relabeled = before["label"][places] != present["label"][staying]
    judged = set(now.vetoed) ^ set(earlier.bank.contents.vetoed)
    judged &= set(present["id"][staying].tolist())
    changed = []
    queries = list(service.queries)
    if queries:
        features = torch.stack([query.features for query in queries])
        labels = bank.predict(features).labels.tolist()
        earlier_labels = earlier.predict(features).labels.tolist()
        for query, label, earlier_label in zip(queries, labels, earlier_labels, strict=True):
            if label != earlier_label:
                changed.append({"query": query.name, "before": label, "after": earlier_label})
    return {
        "to": to,
        "changes": now.position - to,
        "rows_leaving": int((~staying).sum()),
        "rows_returning": int(returning.sum()),
        "labels_changing": int(relabeled.sum()),
        "vetoes_changing": len(judged),
        "queries": changed,
    }
