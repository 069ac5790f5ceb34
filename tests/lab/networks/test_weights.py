"""Files of weights: every published wrapping, and nothing that would run code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from adanpc.lab.networks.weights import WeightsError, fill, read

TENSORS = {"a.weight": torch.randn(3, 2), "a.bias": torch.randn(3)}


def same(found: dict[str, Tensor]) -> bool:
    return list(found) == list(TENSORS) and all(map(torch.equal, found.values(), TENSORS.values()))


@pytest.mark.parametrize(
    "content",
    [
        TENSORS,
        {"state_dict": TENSORS, "epoch": 3},
        {"model": TENSORS, "optimizer": {"lr": 0.1}},
        {"state_dict": {f"module.{name}": value for name, value in TENSORS.items()}},
    ],
)
def test_tensors_are_found_in_their_wrapping(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "weights.pt")
    assert same(read(tmp_path / "weights.pt"))


def test_safetensors_are_read_too(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    assert same(dict(sorted(read(tmp_path / "weights.safetensors").items(), reverse=True)))


class Trap:
    """Runs code when it is unpickled by a careless reader."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (Path.touch, (self.place,))


def test_a_file_cannot_run_code(tmp_path: Path) -> None:
    torch.save({"state_dict": TENSORS, "trap": Trap(tmp_path / "sprung")}, tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match="cannot be read as weights without running code"):
        read(tmp_path / "weights.pt")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights", b"PK\x03\x04" + bytes(40)])
def test_a_broken_file_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError, match=name) as caught:
        read(tmp_path / name)
    assert len(str(caught.value)) < 500


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no file of weights at .*missing.pt"):
        read(tmp_path / "missing.pt")


@pytest.mark.parametrize("content", [torch.zeros(3), {}, {"epoch": 3}, [1, 2]])
def test_a_file_of_other_things_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match="does not hold tensors by name"):
        read(tmp_path / "weights.pt")


def test_weights_must_fit_in_names_and_shapes() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 3)})
    fill(module, TENSORS)
    assert same(dict(module.state_dict()))
    for wrong in ({}, {**TENSORS, "b": torch.zeros(1)}, {**TENSORS, "a.bias": torch.zeros(4)}):
        with pytest.raises(WeightsError, match="those of another network"):
            fill(module, wrong)
