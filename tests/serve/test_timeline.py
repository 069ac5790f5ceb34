"""The timeline: bounded however long a stream is, and nothing is lost when points are merged."""

from __future__ import annotations

import pytest
import torch

from adanpc.core import Append, Change, Origin, Veto
from adanpc.serve.timeline import MOST, Timeline


def test_a_long_stream_is_told_in_a_bounded_number_of_points() -> None:
    timeline = Timeline(2)
    total = 5 * MOST
    for number in range(total):
        timeline.note(number + 1, float(number), [number % 2], [0.5 + 0.5 * (number % 2)], number % 4 == 0)
        if number % 250 == 0:
            assert len(timeline.documents(MOST)) <= MOST
    points = timeline.documents(MOST)
    assert sum(point["queries"] for point in points) == total
    assert sum(point["queries"] * point["joined"] for point in points) == total / 4
    assert points[-1]["position"] == total
    positions = [point["position"] for point in points]
    assert positions == sorted(positions)
    (one,) = timeline.documents(1)
    assert (one["queries"], one["confidence"], one["shares"]) == (total, 0.75, [0.5, 0.5])


def test_it_begins_with_what_joined_by_itself() -> None:
    features = torch.eye(2)
    labels = torch.tensor([0, 1])
    confidence = torch.tensor([0.5, 1.0])
    changes: list[Change] = [
        Append(features, labels),
        Append(features, labels, Origin.ADMITTED, confidence=confidence, when=7.0),
        Veto((0,)),
        Append(features, labels, Origin.ADMITTED),
    ]
    timeline = Timeline(2)
    timeline.seed(enumerate(changes, 1))
    points = timeline.documents(10)
    assert [(point["position"], point["queries"], point["joined"]) for point in points] == [(2, 2, 1), (4, 2, 1)]
    assert points[0]["confidence"] == pytest.approx(0.75)
    assert points[0]["time"] == 7.0
    assert points[0]["trust"] is None
