"""Methods on class prototypes answer as the code of their authors does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adanpc.lab.adapt import Source, find
from adanpc.lab.adapt.caches import BoostAdapter
from adanpc.lab.networks.source import SourceModel

BATCH = 12
# By the name of the peer's answers: our method, and the settings that the peer had.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tda": ("tda", {}),
    "tda-published": ("tda-published", {}),
    "oga": ("oga", {}),
    "oga-published": ("oga-published", {}),
    "stat-a": ("stat-a", {}),
    "dmn-zs": ("dmn-zs", {}),
    "dmn-zs-small": ("dmn-zs", {"keep": 3}),
    "boost-adapter": ("boost-adapter", {"views": 20}),
    "boost-adapter-published": ("boost-adapter-published", {"views": 20}),
}


def source_of(features: dict[str, Tensor]) -> Source:
    """A model whose features are its inputs, with the rows of the head as prototypes."""
    rows = features["head"]
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    head.weight.data.copy_(rows)
    return Source(SourceModel(nn.Identity(), rows.shape[1], rows.shape[0], head=head))


def nearby(adapter: BoostAdapter, row: Tensor) -> Tensor:
    """The row (1, D) and others around it: what stands for random views of an image on both sides."""
    view = torch.arange(1, adapter.views)[:, None]
    place = torch.arange(row.shape[1])
    return torch.cat([row, row + 0.04 * torch.sin(3.0 * place + 1.7 * view)])


@pytest.mark.no_cover
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_the_peer(name: str, features: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoostAdapter, "_views", nearby)
    method, settings = CASES[name]
    adapter = find(method)(source_of(features), **settings)
    answers = torch.cat([adapter.step(batch) for batch in features["features"].split(BATCH)])
    torch.testing.assert_close(answers, features[name], atol=2e-7, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_the_peer_has_learned(name: str, features: dict[str, Tensor]) -> None:
    """A golden vector that equals the answers of the prototypes alone would prove nothing."""
    unchanged = find("zero-shot")(source_of(features)).step(features["features"])
    assert (features[name] - unchanged).abs().max() > 0.05
