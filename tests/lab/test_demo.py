"""The demo in a small setting, against the same steps taken by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread as read_png

from adanpc import AdaNPC, Admission, MemoryBank
from adanpc.errors import AdaNPCError
from adanpc.lab import demo
from adanpc.lab.data import Domain, rotated_digits, split
from adanpc.lab.demo import (
    ADAPTED,
    FROZEN,
    HEAD,
    METHODS,
    PAPER,
    Result,
    Settings,
    draw,
    encode,
    fit,
    successive,
)

# With few steps confidence is low: at 0.6 some digits join and some do not, and that is what is to be tested.
SMALL = Settings(seed=1, epochs=3, batch=8, min_confidence=0.6)


@pytest.fixture(scope="module")
def domains() -> tuple[Domain, ...]:
    return tuple(d.subset(range(100)) for d in rotated_digits(angles=(0, 20, 40)))


@pytest.fixture(scope="module")
def result(domains: tuple[Domain, ...]) -> Result:
    return successive(domains, SMALL)


def percent(answers: torch.Tensor, labels: torch.Tensor) -> float:
    return 100 * sum(int(a == b) for a, b in zip(answers, labels, strict=True)) / len(labels)


def test_every_number_is_that_of_the_steps_taken_by_hand(domains: tuple[Domain, ...], result: Result) -> None:
    training, held_out = split(domains[0], SMALL.seed)
    encoder, head = fit(training, SMALL)
    features = encode(encoder, training)
    fresh = encode(encoder, held_out)
    models = {
        PAPER: AdaNPC(MemoryBank(128, 10), k=10, temperature=0.1, admission=Admission(min_confidence=0.6)),
        ADAPTED: AdaNPC(MemoryBank(128, 10, soft=True), preset="safe"),
    }
    for model in models.values():
        model.learn(features, training.labels)
    targets = [encode(encoder, domain) for domain in domains[1:]]
    frozen = [models[PAPER].predict(target).labels for target in targets]  # before anything joined
    own = torch.arange(80)[:, None]
    for stage, domain, target, before in zip(result.stages[1:], domains[1:], targets, frozen, strict=True):
        assert stage.domain == domain.name
        assert stage.accuracy[FROZEN] == pytest.approx(percent(before, domain.labels))
        assert stage.accuracy[HEAD] == pytest.approx(percent(head(target).argmax(1), domain.labels))
        for name, model in models.items():
            one_by_one = torch.cat([model.step(row[None]).labels for row in target])
            assert stage.accuracy[name] == pytest.approx(percent(one_by_one, domain.labels))
            assert stage.rows[name] == len(model.bank)
            after = stage.on_source[name]
            without = model.predict(features, exclude=own).labels
            assert after.training == pytest.approx(percent(model.predict(features).labels, training.labels))
            assert after.without_own_row == pytest.approx(percent(without, training.labels))
            assert after.held_out == pytest.approx(percent(model.predict(fresh).labels, held_out.labels))


def test_the_small_setting_exercises_admission(result: Result) -> None:
    rows = [stage.rows[PAPER] for stage in result.stages]
    assert rows[0] == 80
    assert rows[0] < rows[1] < rows[2] < 280


def test_the_source_stage_is_before_adaptation(result: Result) -> None:
    first = result.stages[0]
    assert first.accuracy[PAPER] == first.accuracy[FROZEN] == first.on_source[PAPER].held_out
    assert first.on_source[PAPER] == first.on_source[FROZEN]
    assert first.accuracy[ADAPTED] == first.on_source[ADAPTED].held_out


def test_heads_and_frozen_votes_do_not_change(result: Result) -> None:
    for method in (HEAD, FROZEN):
        assert len({stage.on_source[method] for stage in result.stages}) == 1


def test_own_rows_help(result: Result) -> None:
    frozen = result.stages[0].on_source[FROZEN]
    assert frozen.training > frozen.without_own_row


def test_training_learns(domains: tuple[Domain, ...]) -> None:
    training, _ = split(domains[0], 0)
    encoder, head = fit(training, replace(SMALL, epochs=12))
    assert percent(head(encode(encoder, training)).argmax(1), training.labels) > 30  # an untrained one: 10


def test_the_average_is_over_targets(result: Result) -> None:
    for method in METHODS:
        expected = (result.stages[1].accuracy[method] + result.stages[2].accuracy[method]) / 2
        assert result.average(method) == pytest.approx(expected)


def test_the_same_seed_gives_the_same_result_and_leaves_global_randomness_alone(
    domains: tuple[Domain, ...], result: Result
) -> None:
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert successive(domains, SMALL) == result
    assert torch.equal(torch.get_rng_state(), state)


def test_the_number_of_threads_does_not_matter_and_is_restored(domains: tuple[Domain, ...]) -> None:
    threads = torch.get_num_threads()
    quick = replace(SMALL, epochs=1)
    try:
        weights = []
        for count in (1, 3):
            torch.set_num_threads(count)
            weights.append(fit(domains[0], quick)[1].weight)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(weights[0], weights[1])


def test_another_seed_trains_another_network(domains: tuple[Domain, ...]) -> None:
    quick = replace(SMALL, epochs=1)
    one, other = (fit(domains[0], replace(quick, seed=seed))[1].weight for seed in (1, 2))
    assert not torch.equal(one, other)


def test_labels_of_targets_only_count(domains: tuple[Domain, ...], result: Result) -> None:
    wrong = tuple(replace(domain, labels=(domain.labels + 1) % 10) for domain in domains[1:])
    other = successive((domains[0], *wrong), SMALL)
    assert [stage.rows for stage in other.stages] == [stage.rows for stage in result.stages]
    assert [stage.on_source for stage in other.stages] == [stage.on_source for stage in result.stages]
    assert other.stages[1].accuracy != result.stages[1].accuracy


def test_settings_and_domains_are_checked(domains: tuple[Domain, ...]) -> None:
    with pytest.raises(AdaNPCError, match="epochs must be at least 1, got 0"):
        Settings(epochs=0)
    with pytest.raises(AdaNPCError, match="batch must be at least 1, got 0"):
        Settings(batch=0)
    with pytest.raises(AdaNPCError, match="at least 2 domains are needed, .* got 1"):
        successive(domains[:1])


def test_the_figure_shows_something(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "demo.png"
    draw(result, path)
    pixels = torch.tensor(read_png(path))
    assert pixels.shape[:2] == (420, 1000)
    for half in (pixels[:, :500], pixels[:, 500:]):
        assert (half[..., :3] < 0.9).any(-1).float().mean() > 0.02  # ink
    for color in ("#0072B2", "#E69F00", "#009E73"):
        wanted = torch.tensor([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
        assert ((pixels[..., :3] - wanted).abs().amax(-1) < 0.02).sum() > 100


def test_the_figure_depends_on_the_result(result: Result, tmp_path: Path) -> None:
    stages = tuple(replace(stage, accuracy=dict.fromkeys(METHODS, 50.0)) for stage in result.stages)
    draw(result, tmp_path / "one.png")
    draw(replace(result, stages=stages), tmp_path / "other.png")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "other.png").read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/demo.png", "folder .*missing' does not exist"),
        ("demo.xyz", r"must end in one of \.png, \.pdf, \.svg, got '.*demo\.xyz'"),
        ("demo", r"must end in one of \.png"),
        ("folder.png", "cannot be written"),
    ],
)
def test_a_figure_that_cannot_be_written_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(AdaNPCError, match=message):
        demo.check_plot(tmp_path / name)


def test_without_write_access_the_figure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo.check_plot(tmp_path / "demo.png")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere, so chmod proves nothing
    with pytest.raises(AdaNPCError, match="cannot be written"):
        demo.check_plot(tmp_path / "demo.png")


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "Figure", None)
    with pytest.raises(AdaNPCError, match=r"matplotlib.*pip install 'adanpc\[demo\]'"):
        demo.check_plot(tmp_path / "demo.png")
