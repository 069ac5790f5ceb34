"""The estimate of accuracy against labels that it does not see, and the alarm against its stated rate."""

from __future__ import annotations

import math
import random
from dataclasses import astuple
from itertools import pairwise

import numpy
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adanpc.core import estimate
from adanpc.core.estimate import Agreements, Alarm, Calibration, agreement, calibrate, comparable
from adanpc.index import unit

SHARES = st.floats(0, 1)


def made(count: int, noise: float, domains: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of four classes around four axes, each domain with a small offset of its own."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    belongs = torch.arange(count) * domains // count
    offsets = 0.2 * torch.randn(domains, 12, generator=generator)
    rows = torch.eye(4, 12)[labels] + offsets[belongs] + noise * torch.randn(count, 12, generator=generator)
    return unit(rows), labels, belongs


def calibrated(rows: Tensor, labels: Tensor, domains: Tensor) -> Calibration:
    return calibrate(rows, labels, domains, 4, voters=40, per_class=15, witnesses=10, temperature=0.1)


def by_loops(rows: Tensor, labels: Tensor, domains: Tensor) -> tuple[int, float]:
    """Errors and disagreement of all rows, one by one."""
    several = len(set(domains.tolist())) > 1
    similarity = (rows @ rows.T).tolist()
    answers = []
    for row in range(len(rows)):
        others = [other for other in range(len(rows)) if other != row]
        if several:
            others = [other for other in others if domains[other] != domains[row]]
        near = sorted(others, key=lambda other: -similarity[row][other])[:40]
        probs = oracles.vote([(similarity[row][other], int(labels[other])) for other in near], 4, "classwise", 0.1)
        answers.append(probs.index(max(probs)))
    disagreement = 0.0
    for row in range(len(rows)):
        others = [other for other in range(len(rows)) if other != row and domains[other] == domains[row]]
        near = sorted(others, key=lambda other: -similarity[row][other])[:10]
        votes = [math.exp(similarity[row][other] / 0.1) for other in near]
        same = [v for v, other in zip(votes, near, strict=True) if answers[other] == answers[row]]
        disagreement += 1 - sum(same) / sum(votes)
    return sum(answer != label for answer, label in zip(answers, labels.tolist(), strict=True)), disagreement


@pytest.mark.parametrize("domains", [1, 3])
def test_the_calibration_matches_loops(domains: int) -> None:
    source = made(150, 0.4, domains)
    errors, disagreement = by_loops(*source)
    found = calibrated(*source)
    assert (found.rows, found.errors) == (150, errors)
    assert found.disagreement == pytest.approx(disagreement, rel=1e-4)
    assert errors > 5


def test_the_source_is_sampled_always_in_the_same_way() -> None:
    rows, labels, domains = made(4 * estimate.SAMPLE, 0.4, 2)
    found = calibrated(rows, labels, domains)
    assert found.rows == estimate.SAMPLE
    assert found == calibrated(rows, labels, domains)


def test_all_classes_and_domains_are_sampled_though_they_come_in_turn() -> None:
    number = torch.arange(4 * estimate.SAMPLE)
    labels = number % 4
    domains = number // 4 % 2
    asked = estimate.rows_to_ask(labels, domains)
    assert asked.tolist() == sorted(set(asked.tolist()))
    for kinds in (labels, domains):
        counts = kinds[asked].bincount()
        even = estimate.SAMPLE / len(kinds.unique())
        assert counts.min() > 0.8 * even
        assert counts.max() < 1.2 * even


def test_rows_that_no_other_domain_could_answer_are_not_asked() -> None:
    rows, labels, domains = made(120, 0.1, 2)
    labels = torch.where((domains == 1) & (labels == 3), 2, labels)  # the fourth class is in the first domain alone
    assert calibrated(rows, labels, domains).rows == int((labels != 3).sum())


def test_rows_with_nothing_to_agree_with_are_not_asked() -> None:
    rows, labels, domains = made(41, 0.1)
    domains[-1] = 1
    assert calibrated(rows, labels, domains).rows == 11 - 1  # of the first class, the label of the last row


def test_a_source_that_says_nothing_leaves_disagreement_as_it_is() -> None:
    found = calibrated(*(part[:1] for part in made(8, 0.1)))
    assert found.rows == 0
    assert found.accuracy == 1
    assert found.exponent == 1
    assert found.chance(0.7) == 0.7


def met(rows: Tensor, labels: Tensor, noise: float, seed: int, *, ordered: bool = False) -> tuple[Agreements, float]:
    """What is known of a stream of 400 queries at its end, and the accuracy of its last answers."""
    queries, truth, _ = made(400, noise, seed=seed)
    if ordered:
        by_class = truth.argsort(stable=True)
        queries = queries[by_class]
        truth = truth[by_class]
    means = torch.zeros(400, 4)
    for label in range(4):
        means[:, label] = (queries @ rows[labels == label].T).topk(15).values.mean(1)
    answered = means.argmax(1)
    seen = Agreements()
    for query in range(20, 400):
        nearest, places = (queries[:query] @ queries[query]).topk(10)
        votes = (nearest.double() / 0.1).softmax(0)
        agreed = agreement(votes.numpy(), answered[places].numpy(), int(answered[query]), int(answered[query]))
        seen = seen.after(agreed, agreed)
    return seen, float((answered == truth)[-estimate.HORIZON :].double().mean())


@pytest.mark.parametrize("noise", [0.2, 0.35, 0.5, 0.7])
def test_the_estimate_follows_the_accuracy_of_streams_with_more_noise_than_the_source(noise: float) -> None:
    rows, labels, domains = made(900, 0.3, 3)
    calibration = calibrated(rows, labels, domains)
    seen, accuracy = met(rows, labels, noise, seed=1)
    found = calibration.interval(seen.adapted, seen.remembered, mixed=1.0)
    assert found.low <= accuracy <= found.high
    assert found.estimate == pytest.approx(accuracy, abs=0.1)


@pytest.mark.parametrize("domains", [1, 3])
def test_intervals_hold_on_made_streams_and_are_narrow_where_most_answers_are_right(domains: int) -> None:
    rows, labels, belongs = made(600, 0.3, domains)
    calibration = calibrated(rows, labels, belongs)
    held = []
    narrow = []
    for noise in (0.2, 0.3, 0.4, 0.55, 0.7):
        for ordered in (False, True):
            seen, accuracy = met(rows, labels, noise, seed=2, ordered=ordered)
            found = calibration.interval(seen.adapted, seen.remembered, mixed=1.0 - ordered)
            held.append(found.low <= accuracy <= found.high)
            if accuracy > 0.9:
                narrow.append(found.high - found.low)
    assert sum(held) >= 0.9 * len(held)
    assert narrow
    assert max(narrow) < 0.25


def test_agreement_is_the_share_of_votes_and_half_of_it_for_an_answer_that_moving_changed() -> None:
    votes = numpy.array([0.5, 0.25, 0.25])
    labels = numpy.array([2, 1, 2])
    assert agreement(votes, labels, 2, 2) == 0.75
    assert agreement(votes, labels, 1, 2) == 0.125
    assert agreement(votes, labels, 0, 2) == 0
    assert agreement(votes * (1 + 1e-15), numpy.array([1, 1, 1]), 1, 1) == 1


def test_a_query_far_from_the_stream_is_not_compared_with_it() -> None:
    assert comparable(0.1, 0.05)
    assert comparable(0.1, 0.29)
    assert not comparable(0.1, 0.31)


@given(SHARES, SHARES, st.integers(1, 1000), st.integers(0, 100), st.floats(0, 100))
def test_an_interval_holds_its_estimate_and_narrows_with_queries(
    mean: float, mixed: float, count: int, errors: int, disagreement: float
) -> None:
    calibration = Calibration(100, errors, disagreement, 0.1)
    found = calibration.interval(mean, count, mixed)
    later = calibration.interval(mean, 2 * count, mixed)
    assert 0 <= found.low <= later.low <= later.estimate <= later.high <= found.high <= 1
    assert later.estimate == found.estimate == calibration.estimate(mean)


def test_before_the_first_query_the_interval_says_nothing() -> None:
    assert Calibration(100, 20, 10, 0.1).interval(0.0, 0, 1.0) == (0.8, 0, 1)


def test_without_a_calibration_the_interval_says_nothing() -> None:
    found = Calibration(*estimate.UNKNOWN).interval(0.9, 500, 1.0)
    assert (found.low, found.high) == (0, 1)
    assert 0.9 < found.estimate < 1


def by_odds(chance: float) -> float:
    """The estimate that belongs to a chance, computed by odds."""
    odds = estimate.ODDS * math.pow(chance / (1 - chance), estimate.SPREAD)
    return odds / (1 + odds)


@pytest.mark.parametrize("mean", [0.1, 0.4, 0.68, 0.9, 0.99])
def test_the_estimate_stretches_the_odds_of_a_right_answer(mean: float) -> None:
    calibration = Calibration(1000, 90, 60, 0.1)
    assert calibration.estimate(mean) == pytest.approx(by_odds(calibration.chance(mean)))
    assert (calibration.estimate(0.0), calibration.estimate(1.0)) == (0, 1)


@pytest.mark.parametrize(("mixed", "scale"), [(1.0, 0.9), (0.5, 1.1), (0.0, 1.3)])
@pytest.mark.parametrize("mean", [0.2, 0.5, 0.8, 0.95])
def test_an_interval_is_made_of_the_error_of_the_estimate_and_of_chance(
    mean: float, mixed: float, scale: float
) -> None:
    calibration = Calibration(1000, 90, 60, 0.1)
    count = 50
    right = calibration.estimate(mean)
    below = scale * (0.04 + min(right / 2, (1 - right) ** 2))
    above = scale * (0.04 + 0.6 * (1 - right))
    smoothed = (mean * count + 0.5) / (count + 1)
    by_chance = 1.645 * math.sqrt(smoothed * (1 - smoothed) / count)
    fall = right - calibration.estimate(max(0, mean - by_chance))
    rise = calibration.estimate(min(1, mean + by_chance)) - right
    found = calibration.interval(mean, count, mixed)
    assert found.low == pytest.approx(max(0, right - math.sqrt(below**2 + fall**2)))
    assert found.high == pytest.approx(min(1, right + math.sqrt(above**2 + rise**2)))


def test_the_more_is_right_the_narrower_the_interval() -> None:
    calibration = Calibration(1000, 90, 60, 0.1)
    widths = []
    for mean in (0.5, 0.6, 0.7, 0.8, 0.9, 0.99):
        found = calibration.interval(mean, estimate.HORIZON, mixed=1.0)
        widths.append(found.high - found.low)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.1 < 0.5 < widths[0]


def test_a_few_queries_that_all_agree_prove_little() -> None:
    calibration = Calibration(1000, 90, 60, 0.1)
    assert calibration.interval(1.0, 2, mixed=1.0).low < 0.8
    assert calibration.interval(1.0, 200, mixed=1.0).low > 0.94


def test_the_margin_of_chance_holds_nine_times_out_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_ERROR", "RISE", "FALL"):
        monkeypatch.setattr(estimate, name, 0.0)
    exact = Calibration(1, 0, 0, 0.0)
    monkeypatch.setattr(estimate, "_stretched", lambda chance: chance)
    draw = random.Random(0)
    held = 0
    for _ in range(2000):
        mean = sum(draw.random() < 0.7 for _ in range(200)) / 200
        found = exact.interval(mean, 200, mixed=1.0)
        held += found.low <= 0.7 <= found.high
    assert 0.88 < held / 2000 < 0.92


def test_more_disagreement_never_means_more_accuracy() -> None:
    calibration = Calibration(1000, 90, 60, 0.1)
    chances = [calibration.chance(step / 100) for step in range(101)]
    assert all(lower < higher for lower, higher in pairwise(chances))
    assert (chances[0], chances[-1]) == (0, 1)


def test_on_the_source_the_estimate_is_the_accuracy() -> None:
    calibration = Calibration(10000, 300, 200, 0.1)
    assert calibration.chance(1 - 200 / 10000) == pytest.approx(calibration.accuracy, abs=0.002)


def test_the_alarm_level_stands_for_an_accuracy_below_that_on_the_source() -> None:
    calibration = Calibration(1000, 90, 60, 0.1)
    assert calibration.chance(calibration.alarm_level) == pytest.approx(0.91 - estimate.TOLERANCE)
    assert Calibration(10, 10, 5, 0.1).alarm_level == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(SHARES, SHARES), min_size=1, max_size=estimate.HORIZON))
def test_running_means_are_plain_means_until_the_horizon(pairs: list[tuple[float, float]]) -> None:
    seen = Agreements()
    for frozen, adapted in pairs:
        seen = seen.after(frozen, adapted)
        assert 0 <= seen.frozen <= 1
    assert seen.remembered == len(pairs)
    assert seen.frozen == pytest.approx(sum(frozen for frozen, _ in pairs) / len(pairs))
    assert seen.adapted == pytest.approx(sum(adapted for _, adapted in pairs) / len(pairs))


def test_running_means_forget_what_is_long_ago() -> None:
    seen = Agreements()
    for query in range(2000):
        seen = seen.after(float(query < 1000), 1.0)
    assert seen.remembered == estimate.HORIZON
    assert seen.frozen < 0.01
    assert seen.adapted == 1


def watched(agreements: list[float], level: float) -> Alarm:
    alarm = Alarm()
    for value in agreements:
        alarm = alarm.after(value, level)
    return alarm


@pytest.mark.parametrize("values", [(0.0, 1.0), (0.6, 1.0), (0.8, 0.8)])
def test_false_alarms_are_no_more_frequent_than_stated(values: tuple[float, float]) -> None:
    # Exactly at the level, where they are most frequent.
    draw = random.Random(1)
    level = 0.8
    low, high = values
    odds = 1.0 if low == high else (level - low) / (high - low)
    raised = {0.05: 0, 0.2: 0}
    streams = 500
    for _ in range(streams):
        alarm = watched([high if draw.random() < odds else low for _ in range(400)], level)
        for rate in raised:
            raised[rate] += alarm.raised(rate)
    for rate, count in raised.items():
        assert count / streams <= rate + 3 * math.sqrt(rate / streams)


def test_capital_is_not_expected_to_grow() -> None:
    # All streams of ten queries that agree or do not, with their probabilities: no simulation.
    level = 0.75
    expected = 0.0
    for pattern in range(1024):
        agreements = [float(pattern >> query & 1) for query in range(10)]
        alarm = watched(agreements, level)
        probability = math.prod(level if agreed else 1 - level for agreed in agreements)
        expected += probability * (alarm.capital + 1 / (alarm.count + 1))
    assert expected == pytest.approx(1)


@pytest.mark.parametrize("before", [0, 1000, 20000])
def test_a_fall_is_noticed_soon_after_however_long_all_was_well(before: int) -> None:
    draw = random.Random(2)
    well = watched([float(draw.random() < 0.95) for _ in range(before)], 0.85)
    assert not well.raised(0.01)
    alarm = well
    for _ in range(150):
        alarm = alarm.after(float(draw.random() < 0.5), 0.85)
    assert alarm.raised(0.01)


def test_an_alarm_stays_raised_and_its_numbers_finite() -> None:
    alarm = watched([0.0] * 3000, 0.9)
    assert alarm.capital == estimate.MOST_CAPITAL
    for _ in range(3000):
        alarm = alarm.after(1.0, 0.9)
    assert alarm.capital < 1
    assert alarm.raised(0.001)
    assert not Alarm().raised(0.5)


def test_the_state_is_plain_numbers_that_make_the_same_state() -> None:
    alarm = watched([0.3, 0.9, 0.1], 0.8)
    numbers = torch.tensor(astuple(alarm), dtype=torch.float64).tolist()
    assert Alarm(*numbers) == alarm
    assert Alarm(*numbers).after(0.2, 0.8) == alarm.after(0.2, 0.8)
    seen = Agreements().after(0.3, 0.7).after(0.1, 0.9)
    assert Agreements(*torch.tensor(astuple(seen), dtype=torch.float64).tolist()) == seen
