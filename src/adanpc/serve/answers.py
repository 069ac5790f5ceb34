"""Answers as JSON documents: what was predicted, and which rows voted for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from adanpc.core import Contents, Prediction
from adanpc.core.contents import BankSettings
from adanpc.serve.facts import RowFacts


def names_of(settings: BankSettings) -> Sequence[str]:
    """Returns the names of all classes, or their numbers as strings if they have no names."""
    return settings.names or [str(label) for label in range(settings.classes)]


def answer_document(prediction: Prediction, place: int, names: Sequence[str]) -> dict[str, Any]:
    """Returns the answer to one query of a prediction, without the rows that voted."""
    label = int(prediction.labels[place])
    joined = int(prediction.joined[place])
    return {
        "label": label,
        "name": names[label],
        "probs": prediction.probs[place].tolist(),
        "confidence": float(prediction.confidence[place]),
        "trust": _at(prediction.trust, place),
        "novelty": _at(prediction.novelty, place),
        "frozen": _at(prediction.frozen, place),
        "joined": joined if joined >= 0 else None,
    }


def neighbor_documents(prediction: Prediction, place: int, contents: Contents, facts: RowFacts) -> list[dict[str, Any]]:
    """Returns the rows that voted on one query, largest share first."""
    near = prediction.neighbors
    voted = (near.ids[place] >= 0) & (prediction.weights[place] != 0)
    ids = near.ids[place][voted].tolist()
    labels = near.labels[place][voted].tolist()
    similarities = near.similarity[place][voted].tolist()
    shares = prediction.weights[place][voted].tolist()
    names = names_of(contents.settings)
    documents = []
    for number, fact in enumerate(facts.of(ids, contents)):
        row = ids[number]
        documents.append(
            {
                "id": row,
                "label": labels[number],
                "name": names[labels[number]],
                "origin": fact.origin,
                "similarity": similarities[number],
                "share": shares[number],
                "key": fact.key,
                "vetoed": row in contents.vetoed,
            }
        )
    return sorted(documents, key=lambda document: -document["share"])


def _at(values: Tensor | None, place: int) -> Any:
    """Returns the value of a prediction's tensor for one query; None if the preset does not provide the tensor."""
    if values is None:
        return None
    return values[place].tolist()
