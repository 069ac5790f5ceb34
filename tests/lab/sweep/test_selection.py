"""What settings are selected by, against loops."""

from __future__ import annotations

from math import exp, log, nan, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adanpc.lab.sweep.selection import RULES, best, density, diversity


def answers(seed: int, count: int, classes: int) -> torch.Tensor:
    return torch.randn(count, classes, generator=torch.Generator().manual_seed(seed)).mul(2).softmax(1)


@given(seed=st.integers(0, 99), count=st.integers(2, 12), classes=st.integers(2, 5))
def test_density_is_the_mean_entropy_of_likeness_to_all_others(seed: int, count: int, classes: int) -> None:
    probs = answers(seed, count, classes).double()
    entropies = []
    for i in range(count):
        likeness = []
        for j in range(count):
            if i != j:
                lengths = sqrt(sum(p * p for p in probs[i].tolist())) * sqrt(sum(p * p for p in probs[j].tolist()))
                dot = sum(a * b for a, b in zip(probs[i].tolist(), probs[j].tolist(), strict=True))
                likeness.append(exp((dot / lengths - 1) / 0.05))
        shares = [each / sum(likeness) for each in likeness]
        entropies.append(-sum(share * log(share) for share in shares if share))
    assert density(probs) == pytest.approx(sum(entropies) / count, abs=1e-6)


@given(seed=st.integers(0, 99), count=st.integers(1, 12), classes=st.integers(2, 5))
def test_diversity_is_the_mutual_information_of_query_and_answer(seed: int, count: int, classes: int) -> None:
    probs = answers(seed, count, classes).tolist()
    means = [sum(row[c] for row in probs) / count for c in range(classes)]
    expected = sum(p * log(p / means[c]) for row in probs for c, p in enumerate(row)) / count
    assert diversity(torch.tensor(probs)) == pytest.approx(expected, abs=1e-5)


def test_kept_together_is_denser_than_scattered() -> None:
    grouped = torch.eye(3).repeat_interleave(20, 0)
    assert density(grouped) > density(answers(0, 60, 3))
    assert density(torch.ones(1, 3) / 3) == 0.0
    assert diversity(torch.zeros(0, 3)) == 0.0
    assert diversity(torch.eye(4)) == pytest.approx(log(4))
    assert diversity(torch.ones(5, 4) / 4) == pytest.approx(0.0)


@pytest.mark.parametrize("rule", RULES)
def test_the_best_by_a_rule_ignores_all_other_scores(rule: str) -> None:
    records = [
        {"name": name, "scores": dict.fromkeys(RULES, float(-place)) | {rule: score}}
        for place, (name, score) in enumerate({"none": nan, "low": 1.0, "high": 3.0, "also high": 3.0}.items())
    ]
    assert best(records, rule)["name"] == "high"
