"""A wrapped model in a stream: cut anywhere, reset, with keys of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset

import adanpc
from adanpc import Admission, Delete, Relabel, Restore, Rollback, Veto
from adanpc.errors import AdaNPCError, LabelError
from adanpc.models import Wrapped


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 40, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(40, 4),
    )


def images(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 9, 9, generator=torch.Generator().manual_seed(seed))


def source(count: int = 24) -> TensorDataset:
    return TensorDataset(images(count), torch.arange(count) % 4)


def wrapped_net(loader: Any = None, **options: Any) -> Wrapped:
    if loader is None:
        loader = DataLoader(source(), batch_size=7)
    return adanpc.wrap(net(), loader, **{"preset": "paper", "k": 3, "admission": adanpc.everyone, **options})


# However a stream is cut


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With several, a library may divide the rows of a batch among them and round those of each in its own way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.usefixtures("one_thread")
def test_with_an_encode_size_the_answers_are_the_same_to_the_bit_however_a_stream_is_cut(size: int) -> None:
    stream = images(37, seed=2)
    whole = wrapped_net(encode_size=size, centering="stream")
    expected = whole.step(stream)
    for cut in (1, 2, 5, 8, 16, 36):
        parts = wrapped_net(DataLoader(source(), batch_size=cut), encode_size=size, centering="stream")
        answers = [parts.step(part) for part in stream.split(cut)]
        assert torch.equal(torch.cat([answer.probs for answer in answers]), expected.probs)
        assert torch.equal(torch.cat([answer.joined for answer in answers]), expected.joined)
        similarity = torch.cat([answer.neighbors.similarity for answer in answers])
        assert torch.equal(similarity, expected.neighbors.similarity)
        assert torch.equal(parts.classifier.bank.table()["id"], whole.classifier.bank.table()["id"])
        ids = whole.classifier.bank.table()["id"]
        assert torch.equal(parts.classifier.bank.rows(ids), whole.classifier.bank.rows(ids))


def test_the_model_is_given_batches_of_exactly_the_encode_size() -> None:
    sizes = []

    class Counting(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            sizes.append(len(inputs))
            return super().forward(inputs)

    torch.manual_seed(0)
    model = nn.Sequential(Counting(3, 2))
    inputs = torch.randn(7, 3)
    features, output = adanpc.models.wrap(model, [(inputs, torch.arange(7) % 2)], layer="0").features_and_output(inputs)
    wrapped = adanpc.models.wrap(model, [(inputs, torch.arange(7) % 2)], layer="0", encode_size=4)
    sizes.clear()
    same_features, same_output = wrapped.features_and_output(inputs)
    assert sizes == [4, 4]
    torch.testing.assert_close(same_features, features)
    torch.testing.assert_close(same_output, output)
    assert wrapped.features(inputs[:0]).shape == (0, 2)


def test_an_encode_size_is_a_whole_number_from_one() -> None:
    for bad in (0, -1, 2.5):
        with pytest.raises(AdaNPCError, match="encode_size must be"):
            wrapped_net(encode_size=bad)
    assert wrapped_net().encode_size is None
    assert wrapped_net(encode_size=3).encode_size == 3


# Forgetting


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"centering": "stream"},
        {"capacity": 5, "evict": "balanced", "storage": "int8", "soft": True, "centering": "source"},
    ],
)
def test_a_reset_forgets_the_stream(options: dict[str, Any]) -> None:
    wrapped = wrapped_net(**options)
    bank = wrapped.classifier.bank
    ids = bank.table()["id"]
    expected = wrapped.predict(images(10, seed=3))
    for _ in range(2):
        wrapped.step(images(20, seed=4))
        assert len(bank) > 24
        change = wrapped.reset(who="Ada")
        assert isinstance(change, Rollback)
        assert change.who == "Ada"
        assert torch.equal(bank.table()["id"], ids)
        assert bank.contents.statistics.stream_count == 0
        answer = wrapped.predict(images(10, seed=3))
        assert torch.equal(answer.probs, expected.probs)
    assert wrapped.step(images(1, seed=5)).joined.item() >= 24 + 40  # ids are never given twice


def test_after_a_load_a_reset_goes_back_to_the_file(tmp_path: Path) -> None:
    wrapped = wrapped_net(capacity=6, centering="stream")
    wrapped.step(images(9, seed=2))
    wrapped.apply(Veto((int(wrapped.classifier.bank.next_id) - 1,), "Ada", "blurred"))
    adanpc.save(wrapped, tmp_path / "bank")
    loaded = adanpc.load(tmp_path / "bank", net())
    bank = loaded.classifier.bank
    before = bank.table()
    expected = loaded.predict(images(10, seed=3))
    history = bank.contents.judgments
    loaded.step(images(30, seed=4))  # drives out all that was admitted before
    loaded.reset()
    after = bank.table()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert bank.contents.judgments == history
    assert torch.equal(loaded.predict(images(10, seed=3)).probs, expected.probs)
    loaded.step(images(30, seed=4))
    assert int(bank.admitted.sum()) == 6


def test_what_people_decided_outlives_a_reset() -> None:
    wrapped = wrapped_net()
    bank = wrapped.classifier.bank
    first = int(wrapped.step(images(6, seed=2)).joined[0])
    wrapped.apply(Veto((3,), "Ada"))
    wrapped.apply(Delete((4,), "a patient"))
    wrapped.apply(Relabel((first,), 2, "Ada"))  # now an expert's
    wrapped.apply(Veto((first + 1,), "Ada"))
    wrapped.reset()
    assert bank.table()["id"].tolist() == [*range(4), *range(5, 24), first]
    assert list(bank.vetoes) == [3]


def test_deleted_rows_do_not_come_back() -> None:
    first = wrapped_net(capacity=4)
    ids = first.step(images(4, seed=2)).joined.tolist()
    wrapped = Wrapped(first.model, first.classifier, first.layer)
    wrapped.apply(Delete((ids[1],), "a patient"))
    wrapped.step(images(9, seed=4))
    wrapped.reset()
    assert wrapped.classifier.bank.table()["id"].tolist() == [*range(24), ids[0], ids[2], ids[3]]


def test_a_reset_keeps_within_the_capacity() -> None:
    first = wrapped_net(capacity=3)
    ids = first.step(images(3, seed=2)).joined.tolist()
    first.apply(Veto((ids[0],)))
    more = first.step(images(1, seed=3)).joined.tolist()
    wrapped = Wrapped(first.model, first.classifier, first.layer)
    wrapped.apply(Restore((ids[0],)))
    wrapped.step(images(8, seed=4))
    wrapped.reset()
    bank = wrapped.classifier.bank
    assert int(bank.admitted.sum()) <= 3
    assert more[0] in bank.table()["id"].tolist()


def test_a_bounded_bank_does_not_grow_behind_a_wrapped_model() -> None:
    wrapped = wrapped_net(capacity=4)
    wrapped.step(images(40, seed=2))
    slots = wrapped.classifier.bank.contents.index.slots
    for seed in range(10):
        wrapped.step(images(20, seed=seed))
    assert wrapped.classifier.bank.contents.index.slots <= slots + 20


# Keys


def test_keys_go_with_the_rows_that_join() -> None:
    wrapped = wrapped_net(admission=Admission())
    answer = wrapped.step(images(3, seed=2), keys=[70, 71, 72], domain=5)
    assert (answer.joined >= 0).all()
    table = wrapped.classifier.bank.table()
    assert table["key"][24:].tolist() == [70, 71, 72]
    assert table["domain"][24:].tolist() == [5, 5, 5]
    _, change = wrapped.propose(images(2, seed=3), keys=torch.tensor([80, 81]), domain=6)
    assert change is not None
    wrapped.apply(change)
    assert wrapped.classifier.bank.table()["key"][27:].tolist() == [80, 81]
    with pytest.raises(LabelError, match=r"keys must have shape \(2,\)"):
        wrapped.step(images(2), keys=[1])


def test_a_row_may_be_left_out_of_its_own_vote() -> None:
    wrapped = wrapped_net(k=1)
    own = torch.arange(24)[:, None]
    assert torch.equal(wrapped.predict(images(24)).neighbors.ids, own)
    assert not (wrapped.predict(images(24), exclude=own).neighbors.ids == own).any()


@pytest.mark.parametrize("workers", [0, 1])
def test_keys_of_a_shuffling_loader_are_rows_of_its_data_set(workers: int) -> None:
    data = source()
    options: dict[str, Any] = {"batch_size": 5, "shuffle": True, "num_workers": workers}
    if workers:
        options["persistent_workers"] = True
        options["multiprocessing_context"] = "spawn"
    loader = DataLoader(data, **options)
    assert len(list(loader)) == 5  # its workers persist, and must not be disturbed
    assert_keys_are_rows(wrapped_net(loader), data.tensors[1])
    assert len(list(loader)) == 5


def assert_keys_are_rows(wrapped: Wrapped, labels: Tensor) -> None:
    table = wrapped.classifier.bank.table()
    keys = table["key"]
    assert keys.tolist() != sorted(keys.tolist())
    assert torch.equal(table["label"], labels[keys])
    expected = torch.nn.functional.normalize(wrapped.features(images(24)))
    torch.testing.assert_close(wrapped.classifier.bank.rows(table["id"]), expected[keys])


def test_samplers_of_ones_own_and_parts_of_data_sets() -> None:
    data = source()
    assert_keys_are_rows(
        wrapped_net(DataLoader(data, batch_size=6, sampler=RandomSampler(data, generator=torch.Generator()))),
        data.tensors[1],
    )
    batches = [[3, 1], [20, 4, 0]]
    wrapped = wrapped_net(DataLoader(data, batch_sampler=batches))
    assert wrapped.classifier.bank.table()["key"].tolist() == [3, 1, 20, 4, 0]
    part = Subset(data, [9, 8, 7])
    wrapped = wrapped_net(DataLoader(part, batch_size=2))
    assert wrapped.classifier.bank.table()["key"].tolist() == [0, 1, 2]


def test_drawing_keys_draws_no_other_samples() -> None:
    torch.manual_seed(3)
    expected = [int(label) for _, labels in DataLoader(source(), batch_size=5, shuffle=True) for label in labels]
    torch.manual_seed(3)
    loader = DataLoader(source(), batch_size=5, shuffle=True)
    model = net()
    torch.manual_seed(3)
    bank = adanpc.wrap(model, loader).classifier.bank
    assert bank.table()["label"].tolist() == expected


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(image, row % 4) for row, image in enumerate(images(10))])


def only_even(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate([sample for sample in samples if sample[1] % 2 == 0])


@pytest.mark.parametrize(
    ("loader", "keys"),
    [
        (DataLoader(Stream(), batch_size=4), [-1] * 10),
        (DataLoader(source(10), batch_size=4, collate_fn=only_even), [-1] * 5),
        (DataLoader(source(3), batch_size=None, sampler=[[2, 1], [0]]), [-1] * 3),
        ([(images(3), [0, 1, 2]), (images(2), [0, 1])], [0, 1, 2, 3, 4]),
    ],
)
def test_keys_without_row_numbers(loader: Any, keys: list[int]) -> None:
    assert wrapped_net(loader).classifier.bank.table()["key"].tolist() == keys


def test_keys_may_be_given() -> None:
    given = torch.arange(10) * 7
    bank = wrapped_net(DataLoader(Stream(), batch_size=4), keys=given).classifier.bank
    assert torch.equal(bank.table()["key"], given)
    with pytest.raises(LabelError, match=r"keys must have shape \(10,\), one for each sample, got \(3,\)"):
        wrapped_net(DataLoader(Stream(), batch_size=4), keys=[1, 2, 3])


def test_classes_may_be_names() -> None:
    assert wrapped_net(layer="6", classes=["ant", "bee", "cat", "dog", "emu"]).classifier.bank.classes == 5
    with pytest.raises(AdaNPCError, match="classes must be a whole number or a list of names, got 'ant'"):
        wrapped_net(layer="6", classes="ant")
