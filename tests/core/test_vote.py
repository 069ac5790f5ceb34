"""The vote rules against loops, by hand, and by gradient."""

from __future__ import annotations

import math

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adanpc.core import Neighbors, vote
from adanpc.core.vote import RULES
from adanpc.errors import AdaNPCError


def neighbors(similarity: list[list[float]], labels: list[list[int]]) -> Neighbors:
    label = torch.tensor(labels)
    values = torch.tensor(similarity, dtype=torch.float64).masked_fill(label < 0, -torch.inf)
    return Neighbors(torch.where(label < 0, -1, torch.arange(label.shape[1])), values, label)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(RULES),
    st.lists(st.tuples(st.floats(-1, 1), st.integers(0, 3)), min_size=1, max_size=12),
    st.sampled_from([0.01, 0.1, 1.0]),
    st.integers(0, 3),
)
def test_rules_match_the_loops(rule: str, near: list[tuple[float, int]], temperature: float, absent: int) -> None:
    padded = [*near, *[(0.0, -1)] * absent]
    given_ = neighbors([[s for s, _ in padded]], [[label for _, label in padded]])
    probs, weights = vote(given_, 4, rule, temperature)
    assert probs[0].tolist() == pytest.approx(oracles.vote(near, 4, rule, temperature), abs=1e-12)
    assert weights[0, len(near) :].tolist() == [0.0] * absent


def test_the_paper_rule_saturates_with_k_and_the_share_does_not() -> None:
    # 60 / 40 votes at similarity 0.9: the cautionary example for eq. 4.
    for k, paper in ((10, 0.8581), (100, 1 - 1.5e-8)):
        near = neighbors([[0.9] * k], [[0] * (6 * k // 10) + [1] * (4 * k // 10)])
        assert float(vote(near, 2, "paper")[0][0, 0]) == pytest.approx(paper, abs=1e-4)
        assert float(vote(near, 2, "share")[0][0, 0]) == pytest.approx(0.6)


def test_published_adds_its_floor() -> None:
    probs, _ = vote(neighbors([[0.5]], [[1]]), 3, "published")
    assert probs[0].tolist() == pytest.approx([1e-5 / 1.00003, 1.00001 / 1.00003, 1e-5 / 1.00003], rel=1e-9)


def test_temperature_sharpens() -> None:
    near = neighbors([[0.9, 0.8]], [[0, 1]])
    assert float(vote(near, 2, "share", 0.1)[0][0, 0]) == pytest.approx(1 / (1 + math.exp(-1)))
    assert float(vote(near, 2, "share", 0.01)[0][0, 0]) == pytest.approx(1 / (1 + math.exp(-10)))


def test_ranks_alone_decide() -> None:
    near = neighbors([[0.9, 0.1, 0.8]], [[0, 1, 1]])
    probs, weights = vote(near, 2, "rank")
    total = 1 / 2 + 1 / 3 + 1 / 4
    assert weights[0].tolist() == pytest.approx([1 / 2 / total, 1 / 4 / total, 1 / 3 / total])
    assert probs[0].tolist() == pytest.approx([1 / 2 / total, (1 / 4 + 1 / 3) / total])
    spread = neighbors([[0.9, -0.9, 0.89]], [[0, 1, 1]])
    assert torch.equal(vote(spread, 2, "rank")[0], probs)


def test_soft_labels_share_a_vote_out() -> None:
    near = neighbors([[0.9, 0.9]], [[0, 1]])
    soft = Neighbors(near.ids, near.similarity, near.labels, torch.tensor([[[0.7, 0.3], [0.1, 0.9]]]))
    assert vote(soft, 2, "share")[0][0].tolist() == pytest.approx([0.4, 0.6], abs=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_votes_are_differentiable(rule: str) -> None:
    labels = torch.tensor([[0, 1, 1], [2, 0, 2]])
    depends = rule not in ("uniform", "rank")  # whose weights do not depend on similarity
    similarity = torch.rand(2, 3, dtype=torch.float64, requires_grad=depends)
    if depends:
        assert torch.autograd.gradcheck(lambda s: vote(Neighbors(labels, s, labels), 3, rule, 0.3)[0], similarity)
    assert not vote(Neighbors(labels, similarity.detach(), labels), 3, rule)[0].requires_grad


def test_bad_rules_and_temperatures_are_refused() -> None:
    near = neighbors([[0.5]], [[0]])
    with pytest.raises(AdaNPCError, match="got 'best'"):
        vote(near, 2, "best")
    for temperature in (-1.0, 0.0, math.nan, math.inf):
        with pytest.raises(AdaNPCError, match=f"temperature must be a finite number greater than 0, got {temperature}"):
            vote(near, 2, "share", temperature)
    with pytest.raises(AdaNPCError, match="temperature 1e-320 is too small to divide by"):
        vote(near, 2, "share", 1e-320)
