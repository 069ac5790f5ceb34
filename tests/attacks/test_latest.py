"""The latest answers of a service are believed no more than any other file: a forged one is not read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from math import inf, nan
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from services import CLASSES, filled, queries
from torch import Tensor

from adanpc.store.answers import part_of
from adanpc.store.latest import FILE, SEAL, Latest, latest_of, read_latest, write_latest

SETTINGS = filled().bank.contents.settings
COUNT = 3


def saved(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a file as a service writes it, and those of the answers in it."""
    features = torch.from_numpy(queries(COUNT))
    answers = filled().step(features)
    parts = [part_of(answers, slice(place, place + 1)) for place in range(COUNT)]
    latest = latest_of([1, 2, 3], list(features), [1.5, 2.5, 3.5], parts, [b"picture", None, b""], 4, ended=True)
    write_latest(folder, latest)
    tensors = load((folder / FILE).read_bytes()[SEAL:])
    return tensors, load(tensors.pop("answers").numpy().tobytes())


def read_forged(folder: Path, tensors: Mapping[str, Tensor], answers: Mapping[str, Tensor]) -> Latest | None:
    """What is read of a file with these tensors under a true seal, which anybody can make."""
    written = save({name: tensor.contiguous() for name, tensor in answers.items()})
    together = {**tensors, "answers": torch.tensor(list(written), dtype=torch.uint8)}
    data = save({name: tensor.contiguous() for name, tensor in together.items()})
    (folder / FILE).write_bytes(hashlib.sha256(data).digest() + data)
    return read_latest(folder, SETTINGS)


def with_first(value: float) -> Callable[[Tensor], Tensor]:
    """Puts a value in place of the first ones."""

    def forge(column: Tensor) -> Tensor:
        forged = column.clone()
        forged[0] = value
        return forged

    return forge


@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize("name", ["probs", "weights", "trust", "frozen", "novelty", "neighbors.similarity"])
def test_answers_that_are_no_numbers(tmp_path: Path, name: str, value: float) -> None:
    tensors, answers = saved(tmp_path)
    assert read_forged(tmp_path, tensors, answers) is not None
    assert read_forged(tmp_path, tensors, {**answers, name: with_first(value)(answers[name])}) is None


@pytest.mark.parametrize("label", [len(CLASSES), 99, -2, 2**62, -(2**62)])
def test_neighbors_of_classes_that_do_not_exist(tmp_path: Path, label: int) -> None:
    tensors, answers = saved(tmp_path)
    forged = with_first(label)(answers["neighbors.labels"])
    assert read_forged(tmp_path, tensors, {**answers, "neighbors.labels": forged}) is None


@pytest.mark.parametrize(
    "name", ["probs", "weights", "joined", "trust", "frozen", "novelty", "neighbors.ids", "neighbors.similarity"]
)
def test_answers_to_fewer_queries_or_of_another_shape(tmp_path: Path, name: str) -> None:
    tensors, answers = saved(tmp_path)
    column = answers[name]
    for forged in (column[:2], column[0], column[..., None], column.to(torch.float16), column.to(torch.complex64)):
        assert read_forged(tmp_path, tensors, {**answers, name: forged}) is None


@pytest.mark.parametrize("name", ["provisional", "neighbors.soft", "neighbors.color", "labels"])
def test_answers_with_more_than_was_written(tmp_path: Path, name: str) -> None:
    tensors, answers = saved(tmp_path)
    assert read_forged(tmp_path, tensors, {**answers, name: torch.tensor([1, 2, 3])}) is None


@pytest.mark.parametrize(
    "following",
    [
        torch.tensor([1.5, 1.0]),
        torch.tensor([nan, 1.0]),
        torch.tensor([-1, 1]),
        torch.tensor([3, 1]),  # has been given
        torch.tensor([2**63 - 1, 0]),  # the one after it would not fit
    ],
    ids=str,
)
def test_numbers_from_which_a_service_could_not_go_on(tmp_path: Path, following: Tensor) -> None:
    tensors, answers = saved(tmp_path)
    assert read_forged(tmp_path, {**tensors, "next": following}, answers) is None


@pytest.mark.parametrize("numbers", [[3, 2, 1], [1, 1, 1], [0, 1, 2], [-5, -4, -3]])
def test_names_that_were_given_twice_or_never(tmp_path: Path, numbers: list[int]) -> None:
    tensors, answers = saved(tmp_path)
    assert read_forged(tmp_path, {**tensors, "numbers": torch.tensor(numbers)}, answers) is None


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("name", ["times", "features"])
def test_queries_that_are_no_numbers(tmp_path: Path, name: str, value: float) -> None:
    tensors, answers = saved(tmp_path)
    assert read_forged(tmp_path, {**tensors, name: with_first(value)(tensors[name])}, answers) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in folders")
def test_a_pipe_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / FILE)

    def opened(path: Path) -> bytes:
        raise AssertionError(f"{path} would be waited for")

    monkeypatch.setattr(Path, "read_bytes", opened)
    assert read_latest(tmp_path, SETTINGS) is None
