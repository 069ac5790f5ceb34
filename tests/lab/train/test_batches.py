"""Which samples a step sees."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.lab.data.domain import Domain
from adanpc.lab.data.loading import ahead
from adanpc.lab.train.batches import Steps


def noisy(images: Tensor) -> Tensor:
    return images + torch.rand_like(images)


def domains(*counts: int) -> list[Domain]:
    return [
        Domain(str(place), torch.arange(float(count)).reshape(count, 1, 1, 1), torch.arange(count))
        for place, count in enumerate(counts)
    ]


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 3))
def test_every_epoch_sees_every_sample_once(count: int, size: int, seed: int) -> None:
    steps = Steps(domains(count), size, seed)
    seen = torch.cat([steps[step][0].labels for step in range(3 * count)]).tolist()
    for epoch in range(3 * size):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_orders_differ_between_epochs_domains_and_seeds() -> None:
    steps = Steps(domains(50, 50), 50, 0)
    first, second = steps[0]
    assert not torch.equal(first.labels, second.labels)
    assert not torch.equal(first.labels, steps[1][0].labels)
    assert not torch.equal(first.labels, Steps(domains(50, 50), 50, 1)[0][0].labels)


def test_keys_name_samples_over_all_domains() -> None:
    keys = Counter(key for batch in Steps(domains(4, 6, 5), 30, 0)[0] for key in batch.keys.tolist())
    assert sorted(keys) == list(range(15))


def test_images_labels_and_keys_belong_together() -> None:
    for batch in Steps(domains(7, 7), 3, 0)[2]:
        assert batch.images.flatten().tolist() == batch.labels.tolist()
    assert (Steps(domains(7, 7), 3, 0)[2][1].keys - 7).tolist() == Steps(domains(7, 7), 3, 0)[2][1].labels.tolist()


def test_processes_deal_one_large_batch() -> None:
    whole = Steps(domains(20), 8, 0)
    parts = [Steps(domains(20), 4, 0, rank=rank, world=2) for rank in range(2)]
    for step in range(6):
        dealt = [part.rows(0, step) for part in parts]
        assert torch.stack(dealt, 1).flatten().tolist() == whole.rows(0, step).tolist()


def test_random_transforms_are_decided_by_seed_and_step_in_any_worker() -> None:
    noisy_domains = [domain.with_transform(noisy) for domain in domains(9)]
    steps = Steps(noisy_domains, 4, 0)
    here = [steps[step][0].images for step in range(3, 6)]
    there = [batches[0].images for batches in ahead(steps, range(3, 6), noisy_domains, workers=2)]
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
    assert not torch.equal(here[0], Steps(noisy_domains, 4, 1)[3][0].images)
    state = torch.get_rng_state()
    steps[0]
    assert torch.equal(state, torch.get_rng_state())


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(AdaNPCError, match="the batch size must be at least 1, got 0"):
        Steps(domains(3), 0, 0)
    with pytest.raises(AdaNPCError, match="domain '1' has no training samples"):
        Steps(domains(3, 0), 1, 0)
