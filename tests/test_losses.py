"""KNNLoss against loops, by gradcheck, and over its life."""

from __future__ import annotations

import io

import oracles
import pytest
import torch
from torch import nn

from adanpc.errors import AdaNPCError, EmptyBankError, FeatureError
from adanpc.losses import KNNLoss


def samples(count: int, dim: int = 6, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    return torch.randn(count, dim, generator=generator) + nn.functional.one_hot(labels, dim), labels


@pytest.mark.parametrize("k", [1, 4, 50])
@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_queue_loss_is_that_of_the_loops(k: int, temperature: float) -> None:
    keys, key_labels = samples(30, seed=1)
    features, labels = samples(8, seed=2)
    loss = KNNLoss(6, 3, k=k, temperature=temperature, size=30)
    loss.start(keys, key_labels)
    expected = oracles.knn_loss(features.numpy(), labels.tolist(), keys.numpy(), key_labels.tolist(), k, temperature)
    assert float(loss(features, labels)) == pytest.approx(expected, rel=2e-5)


def test_live_keys_are_the_other_rows_of_the_batch() -> None:
    features, labels = samples(9, seed=3)
    loss = KNNLoss(6, 3, k=4, size=100, live_keys=True)
    total = 0.0
    for i in range(9):
        rest = [j for j in range(9) if j != i]
        kept, kept_labels = features[rest].numpy(), labels[rest].tolist()
        total += oracles.knn_loss(features[i : i + 1].numpy(), [int(labels[i])], kept, kept_labels, 4, 0.1)
    assert float(loss(features, labels)) == pytest.approx(total / 9, rel=2e-5)


@pytest.mark.parametrize("live_keys", [False, True])
@pytest.mark.parametrize("refresh", [None, 5])
def test_gradients_are_right(live_keys: bool, refresh: int | None) -> None:
    features, labels = samples(6, seed=4)
    keys = torch.arange(6)

    def compute(batch: torch.Tensor) -> torch.Tensor:
        loss = KNNLoss(6, 3, k=3, temperature=0.5, refresh=refresh, live_keys=live_keys)
        if refresh is None:
            loss.start(*samples(20, seed=5))
        else:
            loss.refresh_neighbors(features, labels, keys)
        value: torch.Tensor = loss(batch, labels, keys)
        return value

    assert torch.autograd.gradcheck(compute, features.double().requires_grad_(), eps=1e-7, atol=1e-5)


def test_only_live_keys_pass_gradients_to_neighbors() -> None:
    features, labels = samples(2, classes=1, seed=6)
    for live_keys in (False, True):
        loss = KNNLoss(6, 2, k=1, temperature=0.5, refresh=3, live_keys=live_keys)
        loss.refresh_neighbors(features, labels, torch.arange(2))
        batch = features.clone().requires_grad_()
        near = loss._as_fixed(torch.arange(2))[1]
        assert batch.requires_grad
        assert near.tolist() == [[1], [0]]
    # With one sample's own loss only, its neighbor gets a gradient if and only if keys are live.
    for live_keys, reached in ((False, False), (True, True)):
        loss = KNNLoss(6, 2, k=2, temperature=0.5, refresh=3, live_keys=live_keys)
        more, more_labels = torch.cat([features, samples(1, seed=7)[0]]), torch.tensor([0, 0, 1])
        loss.refresh_neighbors(more, more_labels, torch.arange(3))
        batch = more.clone().requires_grad_()
        own = nn.functional.normalize(batch, dim=1)
        value = loss(
            torch.cat([batch[:1], batch[1:].detach() if not reached else batch[1:]]), more_labels, torch.arange(3)
        )
        gradient = torch.autograd.grad(value, batch)[0]
        assert own.shape == (3, 6)
        assert bool(gradient[1:].abs().sum() > 0) is reached


def test_the_queue_is_first_in_first_out_and_starts_from_real_samples() -> None:
    loss = KNNLoss(6, 3, k=2, size=5)
    with pytest.raises(EmptyBankError, match=r"no neighbors: call start\(features, labels\)"):
        loss(*samples(3))
    loss.start(*samples(4, seed=1))
    loss(*samples(3, seed=2))
    assert loss.bank.table()["id"].tolist() == [2, 3, 4, 5, 6]
    loss.eval()
    loss(*samples(3, seed=3))
    assert loss.bank.next_id == 7  # evaluation leaves the queue alone


def test_a_batch_larger_than_the_queue_is_defined() -> None:
    loss = KNNLoss(6, 3, k=2, size=4)
    loss.start(*samples(9, seed=1))
    assert torch.isfinite(loss(*samples(11, seed=2)))
    assert loss.bank.table()["id"].tolist() == [16, 17, 18, 19]


def test_no_neighbor_of_the_own_class_gives_a_finite_loss() -> None:
    loss = KNNLoss(2, 3, k=1)
    loss.start(torch.ones(1, 2), torch.tensor([0]))
    assert float(loss(torch.ones(1, 2), torch.tensor([2]))) == pytest.approx(11.51, abs=0.01)


def test_em_neighbors_stand_still_until_refreshed() -> None:
    features, labels = samples(12, seed=8)
    keys = torch.arange(100, 112)
    loss = KNNLoss(6, 3, k=3, refresh=2)
    assert loss.due
    with pytest.raises(EmptyBankError, match="no neighbors are known for sample 100"):
        loss(features, labels, keys)
    with pytest.raises(AdaNPCError, match="EM mode needs keys"):
        loss(features, labels)
    loss.refresh_neighbors(features, labels, keys)
    fixed = dict(loss.fixed)
    assert all(int(key) - 100 not in fixed[int(key)] for key in keys)  # nobody is its own neighbor
    moved = features.flip(0)
    expected = loss.fixed
    for steps in (1, 2):
        assert not loss.due
        loss(moved, labels, keys)
        assert loss.fixed is expected
        assert loss.steps == steps
    assert loss.due
    loss.refresh_neighbors(moved, labels, keys)
    assert loss.fixed != fixed
    assert not loss.due


def test_em_loss_with_fewer_rows_than_k() -> None:
    loss = KNNLoss(6, 3, k=10, refresh=2)
    loss.refresh_neighbors(*samples(4), torch.arange(4))
    assert torch.isfinite(loss(*samples(4), torch.arange(4)))


def test_training_pulls_classes_apart() -> None:
    torch.manual_seed(0)
    inputs, labels = samples(120, dim=10, classes=3)
    inputs += 2 * nn.functional.one_hot(labels, 10)
    net = nn.Linear(10, 4)
    loss = KNNLoss(4, 3, k=10, temperature=0.2, size=60)
    loss.start(net(inputs[:60]), labels[:60])
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    values = []
    for step in range(60):
        batch = torch.arange(step * 20, step * 20 + 20) % 120
        optimizer.zero_grad()
        value = loss(net(inputs[batch]), labels[batch])
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert sum(values[-10:]) < 0.6 * sum(values[:10])


@pytest.mark.parametrize("refresh", [None, 3])
def test_saved_state_resumes_exactly(refresh: int | None) -> None:
    def fresh() -> KNNLoss:
        return KNNLoss(6, 3, k=3, size=8, refresh=refresh)

    loss = fresh()
    if refresh is None:
        loss.start(*samples(10, seed=1))
    else:
        loss.refresh_neighbors(*samples(10, seed=1), torch.arange(10))
    loss(*samples(5, seed=2), torch.arange(5))
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    other = fresh()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.bank.digest() == loss.bank.digest()
    assert (other.steps, other.due) == (loss.steps, loss.due)
    for seed in (3, 4):
        batch = (*samples(5, seed=seed), torch.arange(5))
        assert torch.equal(loss(*batch), other(*batch))


def test_bad_settings_and_batches_are_refused() -> None:
    with pytest.raises(AdaNPCError, match="k must be at least 1, got 0"):
        KNNLoss(6, 3, k=0)
    with pytest.raises(AdaNPCError, match="temperature must be a finite number greater than 0, got 'hot'"):
        KNNLoss(6, 3, temperature="hot")  # type: ignore[arg-type]
    with pytest.raises(AdaNPCError, match="refresh must be at least 1, got 0"):
        KNNLoss(6, 3, refresh=0)
    loss = KNNLoss(6, 3)
    loss.start(*samples(4))
    with pytest.raises(FeatureError, match="the batch is empty: a loss needs at least one row"):
        loss(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    loss.temperature = -0.1  # a schedule that went too far
    with pytest.raises(AdaNPCError, match="temperature must be a finite number greater than 0, got -0.1"):
        loss(*samples(4))


@pytest.mark.parametrize("scale", [1e-30, 1e-13, 1.0, 1e19, 1e30])
def test_the_loss_does_not_depend_on_the_length_of_features(scale: float) -> None:
    loss = KNNLoss(6, 3, k=3)
    loss.start(*samples(20, seed=1))
    loss.eval()
    features, labels = samples(5, seed=2)
    assert float(loss(features * scale, labels)) == pytest.approx(float(loss(features, labels)), rel=1e-5)


def test_half_precision_features_are_widened() -> None:
    loss = KNNLoss(6, 3, k=3)
    loss.start(*samples(20, seed=1))
    loss.eval()
    features, labels = samples(5, seed=2)
    assert float(loss(20_000 * features.half().clamp(-3, 3), labels)) == pytest.approx(
        float(loss(features.clamp(-3, 3), labels)), rel=5e-3
    )


@pytest.mark.parametrize("refresh", [None, 3])
@pytest.mark.parametrize(
    ("features", "labels", "keys", "message"),
    [
        (torch.ones(4, 6), torch.zeros(2).long(), torch.arange(4), r"labels must be whole numbers of shape \(4,\)"),
        (torch.ones(4, 6), torch.zeros(4), torch.arange(4), "labels must be whole numbers"),
        (torch.ones(4, 6), torch.full((4,), 3), torch.arange(4), "labels must be between 0 and 2"),
        (torch.ones(4, 6), torch.zeros(4).long(), torch.arange(1), r"keys must be whole numbers of shape \(4,\)"),
        (torch.full((4, 6), torch.nan), torch.zeros(4).long(), torch.arange(4), "NaN"),
        (torch.ones(4, 5), torch.zeros(4).long(), torch.arange(4), r"shape \(B, 6\), got \(4, 5\)"),
        (torch.ones(4, 6).long(), torch.zeros(4).long(), torch.arange(4), "floating-point"),
    ],
)
def test_bad_batches_are_refused_and_change_nothing(
    refresh: int | None, features: torch.Tensor, labels: torch.Tensor, keys: torch.Tensor, message: str
) -> None:
    loss = KNNLoss(6, 3, k=2, refresh=refresh)
    if refresh is None:
        loss.start(*samples(6))
    else:
        loss.refresh_neighbors(*samples(6), torch.arange(6))
    before = loss.bank.digest()
    with pytest.raises(AdaNPCError, match=message):
        loss(features, labels, keys)
    assert loss.bank.digest() == before


def test_evaluation_leaves_the_queue_alone_with_live_keys_too() -> None:
    loss = KNNLoss(6, 3, k=3, live_keys=True)
    loss.start(*samples(20, seed=1))
    loss.eval()
    batch = samples(5, seed=2)
    assert float(loss(*batch)) == float(loss(*batch))
    assert loss.bank.next_id == 20


def test_a_refused_refresh_changes_nothing() -> None:
    loss = KNNLoss(6, 3, k=2, refresh=3)
    loss.refresh_neighbors(*samples(6), torch.arange(6))
    before, fixed = loss.bank.digest(), dict(loss.fixed)
    with pytest.raises(FeatureError):
        loss.refresh_neighbors(torch.full((2, 6), torch.nan), torch.tensor([0, 1]), torch.arange(2))
    with pytest.raises(AdaNPCError, match="keys must differ"):
        loss.refresh_neighbors(*samples(3), torch.tensor([1, 1, 2]))
    assert (loss.bank.digest(), loss.fixed) == (before, fixed)


def test_it_says_what_it_is() -> None:
    assert repr(KNNLoss(4, 3, size=50)).startswith("KNNLoss(dim=4, classes=3, k=10, temperature=0.1, size=50, ")
