"""AdaNPC: against a plain-Python oracle, and the same for every way of cutting a stream into batches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from presets import paper
from torch import Tensor

from adanpc.core import AdaNPC, Admission, MemoryBank, Veto, everyone, nobody
from adanpc.core import classifier as module
from adanpc.errors import AdaNPCError, EmptyBankError, FeatureError, LabelError
from adanpc.index import unit

ADMISSIONS = [
    everyone,
    nobody,
    Admission(min_confidence=0.6),
    Admission(min_margin=0.2) & Admission(class_quota=4),
    Admission(max_entropy=0.5),
    Admission(min_confidence=0.4, class_quota=2),
]


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> dict[str, Any]:
    """Everything that AdaNPC can be set to, and the sizes of the problem."""
    split = draw(st.booleans())
    return {
        "dim": draw(st.sampled_from([1, 2, 5, 33])),
        "classes": draw(st.sampled_from([1, 2, 6])),
        "rows": draw(st.sampled_from([1, 4, 70, 130])),
        "stream": draw(st.sampled_from([1, 6, 40, 90])),
        "seed": draw(st.integers(0, 10_000)),
        "coarse": draw(st.booleans()),  # few directions, many ties
        "bank": {
            "storage": draw(st.sampled_from(["float32", "float16", "int8"])),
            "capacity": draw(st.sampled_from([None, 1, 3, 20])),
            "evict": draw(st.sampled_from(["fifo", "balanced", "reservoir"])),
            "soft": draw(st.booleans()),
            "seed": 5,
        },
        "model": {
            "k": draw(st.sampled_from([1, 3, 10, 200])),
            "k_source": 2 if split else None,
            "k_target": draw(st.sampled_from([1, 4])) if split else None,
            "rule": draw(st.sampled_from(["share", "paper", "published", "uniform"])),
            "admission": draw(st.sampled_from(ADMISSIONS)),
            "centering": draw(st.sampled_from(["none", "source", "stream"])),
        },
        "vetoed": draw(st.booleans()),
    }


def data(run: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(run["seed"])

    def features(count: int) -> Tensor:
        if run["coarse"]:
            steps = torch.randint(-1, 2, (count, run["dim"]), generator=generator).float()
            steps[:, 0] += 0.5
            return steps
        return torch.randn(count, run["dim"], generator=generator)

    labels = torch.randint(0, run["classes"], (run["rows"],), generator=generator)
    domain = torch.randint(0, 3, (run["rows"],), generator=generator)
    return features(run["rows"]), labels, domain, features(run["stream"])


def model(run: dict[str, Any]) -> AdaNPC:
    features, labels, domain, _ = data(run)
    made = AdaNPC(MemoryBank(run["dim"], run["classes"], **run["bank"]), **run["model"])
    made.learn(features, labels, domain=domain)
    if run["vetoed"] and run["rows"] > 1:
        made.apply(Veto((0,)))
    return made


def play(made: AdaNPC, stream: Tensor, sizes: list[int]) -> dict[str, Tensor]:
    answers, start = [], 0
    for size in sizes:
        answers.append(made.step(stream[start : start + size], domain=7, keys=torch.arange(start, start + size)))
        start += size
    near = [answer.neighbors for answer in answers]
    return {
        "probs": torch.cat([answer.probs for answer in answers]),
        "weights": torch.cat([answer.weights for answer in answers]),
        "joined": torch.cat([answer.joined for answer in answers]),
        "ids": torch.cat([part.ids for part in near]),
        "similarity": torch.cat([part.similarity for part in near]),
        "labels": torch.cat([part.labels for part in near]),
    }


@pytest.mark.no_cover
@settings(max_examples=120, deadline=None)
@given(settings_of_a_run(), st.lists(st.integers(0, 30), max_size=12))
def test_batch_size_never_changes_an_answer(run: dict[str, Any], cuts: list[int]) -> None:
    stream = data(run)[3]
    cuts = [size for i, size in enumerate(cuts) if sum(cuts[: i + 1]) <= len(stream)]
    cuts.append(len(stream) - sum(cuts))
    one_by_one = model(run)
    expected = play(one_by_one, stream, [1] * len(stream))
    for sizes in (cuts, [len(stream)]):
        made = model(run)
        answers = play(made, stream, sizes)
        for name, value in expected.items():
            assert torch.equal(value, answers[name]), name
        assert made.digest() == one_by_one.digest()


def test_a_long_batch_is_cut_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    run: dict[str, Any] = {
        "dim": 8,
        "classes": 3,
        "rows": 50,
        "stream": 90,
        "seed": 1,
        "coarse": False,
        "vetoed": False,
    }
    run |= {"bank": {"capacity": 9}, "model": {"k": 5, "admission": everyone}}
    whole = play(model(run), data(run)[3], [90])
    monkeypatch.setattr(module, "CHUNK", 7)
    cut = play(model(run), data(run)[3], [90])
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@settings(max_examples=60, deadline=None)
@given(settings_of_a_run())
def test_answers_are_those_of_the_oracle(run: dict[str, Any]) -> None:
    run["bank"] |= {"soft": False, "evict": "balanced" if run["bank"]["evict"] == "balanced" else "fifo"}
    run["model"] |= {"centering": "none", "admission": Admission(min_confidence=0.55, class_quota=6)}
    run["vetoed"] = False
    features, labels, _, stream = data(run)
    made = model(run)
    oracle = oracles.Online(
        run["classes"],
        [(pool.k, pool.source) for pool in paper(made).pools],
        run["model"]["rule"],
        paper(made).temperature,
        min_confidence=0.55,
        quota=6,
        capacity=run["bank"]["capacity"],
        balanced=run["bank"]["evict"] == "balanced",
    )
    oracle.learn(made.bank.stored(unit(features)).double().numpy(), labels.tolist())
    answer = made.step(stream)
    queries, stored = unit(stream).double().numpy(), made.bank.stored(unit(stream)).double().numpy()
    for turn in range(len(stream)):
        near_a_threshold = abs(float(answer.confidence[turn]) - 0.55) < 1e-6
        close_race = run["classes"] > 1 and float(answer.margin[turn]) < 1e-6
        if near_a_threshold or close_race:
            return  # rounding may decide here; what follows depends on it
        probs, voters, joined = oracle.step(queries[turn], stored[turn])
        assert answer.probs[turn].tolist() == pytest.approx(probs, abs=2e-6)
        assert [row for row in answer.neighbors.ids[turn].tolist() if row >= 0] == voters
        assert int(answer.joined[turn]) == joined


@settings(max_examples=40, deadline=None)
@given(settings_of_a_run())
def test_predict_and_propose_change_nothing_and_agree_with_step(run: dict[str, Any]) -> None:
    made, stream = model(run), data(run)[3]
    made.step(stream[: len(stream) // 2])
    before, rest = made.bank.digest(), stream[len(stream) // 2 :]
    predicted = made.predict(rest)
    proposed, change = made.propose(rest)
    assert made.bank.digest() == before
    assert predicted.joined.tolist() == [-1] * len(rest)
    assert torch.equal(predicted.probs[:1], proposed.probs[:1])  # the next query is answered alike by all three
    other = copy.deepcopy(made)
    stepped = made.step(rest)
    assert torch.equal(proposed.probs, stepped.probs)
    if change is not None:
        other.apply(change)
    assert other.bank.digest() == made.bank.digest()


@settings(max_examples=30, deadline=None)
@given(settings_of_a_run())
def test_probabilities_and_weights_are_what_they_say(run: dict[str, Any]) -> None:
    answer = model(run).step(data(run)[3])
    torch.testing.assert_close(answer.probs.sum(1), torch.ones(run["stream"]), atol=1e-5, rtol=0)
    torch.testing.assert_close(answer.weights.abs().sum(1), torch.ones(run["stream"]), atol=1e-5, rtol=0)
    assert (answer.weights[answer.neighbors.ids < 0] == 0).all()
    assert (answer.neighbors.labels[answer.neighbors.ids < 0] == -1).all()


def small(**options: Any) -> AdaNPC:
    made = AdaNPC(MemoryBank(2, 2), k=1, **options)
    made.learn(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    return made


def test_a_query_votes_for_the_next_one_in_the_same_batch() -> None:
    # Along an arc from class 0 to class 1 every point's nearest neighbor is the point before it.
    angles = torch.linspace(0.1, 1.5, 30)
    arc = torch.stack([angles.cos(), angles.sin()], 1)
    assert small(admission=everyone).step(arc).labels.tolist() == [0] * 30
    assert small(admission=nobody).step(arc).labels.tolist() == [0] * 15 + [1] * 15


def test_joined_names_the_row_that_a_query_became() -> None:
    made = small(admission=Admission(min_confidence=0.9))
    answer = made.step(torch.tensor([[1.0, 0.1], [0.2, 1.0]]), domain=3, keys=torch.tensor([70, 71]))
    assert answer.joined.tolist() == [2, 3]
    table = made.bank.table()
    assert table["key"].tolist() == [-1, -1, 70, 71]
    assert table["domain"].tolist() == [-1, -1, 3, 3]
    assert table["origin"].tolist() == [0, 0, 1, 1]
    assert table["confidence"].tolist() == [1, 1, 1, 1]


def test_excluding_its_own_row_removes_the_self_match() -> None:
    made = small()
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert made.predict(rows).labels.tolist() == [0, 1]
    assert made.predict(rows, exclude=torch.tensor([[0], [1]])).labels.tolist() == [1, 0]


def test_one_query_does_not_change_the_rule_for_its_batch_mates() -> None:
    made = small()
    calm, wild = torch.tensor([[1.0, 0.05]]), torch.tensor([[-1.0, -1.0]])
    assert torch.equal(made.predict(torch.cat([calm, wild])).probs[:1], made.predict(calm).probs)


def test_keys_must_fit_the_queries() -> None:
    for verb in (small().step, small().propose):
        with pytest.raises(LabelError, match=r"keys must have shape \(3,\), one for each sample, got \(2,\)"):
            verb(torch.ones(3, 2), keys=torch.tensor([1, 2]))


@pytest.mark.parametrize("keys", [["a", "b", "c"], [0.5, 1.0, 2.0], object()])
def test_keys_must_be_whole_numbers(keys: Any) -> None:
    for verb in (small().step, small().propose):
        with pytest.raises(LabelError, match="keys must be whole numbers"):
            verb(torch.ones(3, 2), keys=keys)
    assert small(admission=everyone).step(torch.ones(3, 2), keys=[5, 6, 7]).joined.tolist() == [2, 3, 4]


def test_settings_are_fixed() -> None:
    made: Any = small()
    for change in ("settings", "position"):
        with pytest.raises(AttributeError):
            setattr(made, change, 2)
    with pytest.raises(AttributeError):
        made.settings.k = 2
    with pytest.raises(AdaNPCError, match="capacity of a bank cannot be changed to 2: adanpc.with_capacity"):
        made.bank.capacity = 2


def test_a_batch_of_zero_rows_gives_zero_answers() -> None:
    answer = small().step(torch.zeros(0, 2))
    assert answer.probs.shape == (0, 2)
    assert answer.neighbors.ids.shape == (0, 1)


def test_a_bad_row_anywhere_in_a_batch_leaves_the_bank_as_it_was() -> None:
    made = small(admission=everyone)
    before = made.bank.digest()
    stream = torch.rand(300, 2)
    stream[299, 0] = float("nan")
    with pytest.raises(FeatureError, match="row 299 holds NaN"):
        made.step(stream)
    assert made.bank.digest() == before


def test_an_empty_or_silenced_bank_says_so() -> None:
    made = AdaNPC(MemoryBank(2, 2))
    for verb in (made.predict, made.step):
        with pytest.raises(EmptyBankError, match="no row of the bank may vote"):
            verb(torch.ones(1, 2))
    made.learn(torch.ones(1, 2), torch.tensor([1]))
    made.apply(Veto((0,), "expert", "wrong label"))
    with pytest.raises(EmptyBankError):
        made.predict(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"k_source": 3}, "k_source and k_target go together"),
        ({"k_source": 3, "k_target": 0}, "k_target must be at least 1, got 0"),
        ({"rule": "loudest"}, "rule must be one of share, paper, published, uniform, classwise, rank, got 'loudest'"),
        ({"temperature": 0.0}, "temperature must be a finite number greater than 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be a finite number greater than 0, got nan"),
        ({"centering": "median"}, "centering must be one of none, source, stream, got 'median'"),
        ({"prior": 0}, "prior must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AdaNPCError, match=message):
        AdaNPC(MemoryBank(2, 2), **options)


def test_a_split_vote_asks_each_side_for_its_share() -> None:
    made = AdaNPC(MemoryBank(2, 2), k_source=1, k_target=2, admission=everyone)
    made.learn(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), torch.tensor([0, 0, 1]))
    first, second = made.step(torch.tensor([[1.0, 0.2]])), made.step(torch.tensor([[1.0, 0.1]]))
    assert first.neighbors.ids.tolist() == [[1, -1, -1]]
    assert second.neighbors.ids.tolist() == [[1, 3, -1]]


def test_soft_rows_keep_the_whole_answer() -> None:
    made = AdaNPC(MemoryBank(2, 2, soft=True), k=2, rule="uniform", admission=everyone)
    made.learn(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    made.step(torch.tensor([[1.0, 1.0]]))
    assert made.bank.table()["soft"].tolist() == [[1, 0], [0, 1], [0.5, 0.5]]
    answer = made.predict(torch.tensor([[1.0, 0.9]]))  # row 2 and row 0: (0.5 + 1) / 2 for class 0
    assert answer.probs.tolist() == [[0.75, 0.25]]


def test_a_classifier_needs_a_bank() -> None:
    with pytest.raises(AdaNPCError, match=r"bank must be a MemoryBank such as MemoryBank\(dim, classes\), got 64"):
        AdaNPC(64)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["k", "admission", "stream"])
def test_an_option_cannot_be_changed_afterward(name: str) -> None:
    made = AdaNPC(MemoryBank(2, 2))
    with pytest.raises(AdaNPCError, match=f"{name} of a classifier cannot be changed to 5: make another one over the"):
        setattr(made, name, 5)
    other = AdaNPC(made.bank, k=5)
    assert paper(other).k == 5


PREPARED: list[dict[str, Any]] = [{"preset": "safe"}, {"centering": "stream"}, {"centering": "none"}]


@pytest.mark.parametrize("options", PREPARED)
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int16, torch.int32])
def test_labels_and_domains_may_be_whole_numbers_of_any_type(options: dict[str, Any], kind: torch.dtype) -> None:
    features = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 2
    digests = set()
    for numbers in (labels, labels.to(kind), labels.to(kind).numpy()):
        made = AdaNPC(MemoryBank(3, 2, soft=True), **options)
        made.learn(features, numbers, domain=numbers)
        digests.add(made.digest())
    assert len(digests) == 1


@pytest.mark.parametrize("options", PREPARED)
@pytest.mark.parametrize(
    ("labels", "domain", "message"),
    [
        ([0, 1, 2], -1, "labels must be between 0 and 1, got 2"),
        ([0, 1, -1], -1, "labels must be between 0 and 1, got -1"),
        ([0.0, 1.0, 0.0], -1, "labels must be whole numbers, got torch.float32"),
        (["a", "b", "c"], -1, "labels must be numbers, .*: pass the position of each class in classes, not its name"),
        ([[1, 0], [0, 1], [1, 0]], -1, "pass labels.argmax\\(1\\) if they are one-hot"),
        ([0, 1, 0], "night", "domain must be numbers, one for each row, got 'night'"),
        ([0, 1, 0], [1, 2], "domain must have shape \\(60,\\), one for each row, got \\(2,\\)"),
    ],
)
def test_labels_and_domains_are_refused_in_the_same_words_by_every_preset(
    options: dict[str, Any], labels: Any, domain: Any, message: str
) -> None:
    made = AdaNPC(MemoryBank(3, 2, soft=True), **options)
    features = torch.eye(3).repeat(20, 1)
    with pytest.raises(LabelError, match=message):
        made.learn(features, labels * 20, domain=domain)
    assert len(made.bank) == 0


@pytest.mark.parametrize("exclude", ["a", [["a"]], object()])
def test_what_is_excluded_must_be_ids(exclude: Any) -> None:
    with pytest.raises(AdaNPCError, match="exclude must be whole numbers"):
        small().predict(torch.ones(1, 2), exclude=exclude)


def test_arrays_that_cannot_be_written_to_are_taken_without_a_warning() -> None:
    """As pandas and memory maps give them."""
    features = np.eye(2, dtype=np.float32)
    labels = np.array([0, 1])
    for array in (features, labels):
        array.flags.writeable = False
    made = AdaNPC(MemoryBank(2, 2))
    torch.set_warn_always(True)  # else it warns once in a process
    try:
        made.learn(features, labels, domain=labels, keys=labels)
        assert made.predict(features, exclude=labels[:, None]).labels.tolist() == [1, 0]
        assert made.step(features, keys=labels).labels.tolist() == [0, 1]
    finally:
        torch.set_warn_always(False)


def test_arrays_that_run_backward_are_taken() -> None:
    features = np.eye(3, dtype=np.float32)
    made = AdaNPC(MemoryBank(3, 3))
    made.learn(features[::-1], np.arange(3)[::-1])
    assert made.predict(features[:, ::-1][::-1]).labels.tolist() == [0, 1, 2]


def test_a_misspelled_setting_is_not_set_without_a_word() -> None:
    made = small()
    with pytest.raises(AdaNPCError, match="a classifier has no setting 'temprature'; did you mean 'temperature'?"):
        made.temprature = 0.2
    with pytest.raises(AdaNPCError, match="a bank has no setting 'capcity'; did you mean 'capacity'?"):
        made.bank.capcity = 3


@pytest.mark.parametrize("preset", ["safe", "paper"])
@pytest.mark.parametrize(
    ("domain", "message"),
    [
        ("a", "domain must be a whole number, got 'a'"),
        (2**70, "domain must be at most 9223372036854775807, got 1180591620717411303424"),
    ],
)
def test_a_domain_that_cannot_be_stored_is_refused_even_if_nothing_joins(
    preset: str, domain: Any, message: str
) -> None:
    classifier = AdaNPC(MemoryBank(2, 2, soft=True), preset=preset)
    classifier.learn(torch.eye(2), torch.tensor([0, 1]))
    with pytest.raises(AdaNPCError, match=message):
        classifier.step(torch.eye(2)[:0], domain=domain)
