"""Training states in files: every value comes back as it was, to the bit."""

from __future__ import annotations

from collections import OrderedDict
from math import copysign, inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.sealed import SealError, read_sealed, write_sealed
from adanpc.lab.train.checkpoint import read, write

STATE = {
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)}, 1: {}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "amsgrad": False, "params": [0, 1]}],
    },
    "rng": torch.get_rng_state(),
    "empty": torch.zeros(0, 4, dtype=torch.float64),
    "flags": torch.tensor([True, False]),
    "half": torch.tensor([1.5, inf, nan], dtype=torch.bfloat16),
    "one": {1: torch.zeros(1), "1": torch.ones(1)},
    "document": torch.ones(2),
}


def assert_equal(one: Any, other: Any) -> None:
    """Equal in type and to the bit; NaN equals NaN, and -0.0 does not equal 0.0."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        assert [type(key) for key in one] == [type(key) for key in other]
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    elif isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.flatten().view(torch.uint8).tolist() == other.flatten().view(torch.uint8).tolist()
    elif isinstance(one, float):
        assert one == other or (one != one and other != other)
        assert copysign(1, one) == copysign(1, other) or one != one
    else:
        assert one == other


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "state", STATE)
    assert_equal(read(tmp_path / "state"), STATE)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
nested = st.recursive(
    plain, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=20
)


@given(state=st.dictionaries(st.text(), nested))
def test_any_nested_values_come_back(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "nested"
    write(path, state)
    assert_equal(read(path), state)


def test_tensors_that_share_memory_and_views_are_kept(tmp_path: Path) -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    state = {"all": rows, "again": rows, "row": rows[1], "turned": rows.T}
    write(tmp_path / "state", state)
    found = read(tmp_path / "state")
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_ordered_dicts_come_back_as_dicts(tmp_path: Path) -> None:
    write(tmp_path / "state", OrderedDict(b=1, a=2))
    assert_equal(read(tmp_path / "state"), {"b": 1, "a": 2})


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdaNPCError, match="a checkpoint cannot hold state/model/0, a set: use tensors"):
        write(tmp_path / "state", {"model": [{1}]})
    assert not (tmp_path / "state").exists()


def test_the_same_state_makes_the_same_file(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write(tmp_path / name, STATE)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "is not a checkpoint"),
        ({"format": "adanpc-features", "version": 1}, "is not a checkpoint"),
        ({"format": "adanpc-checkpoint", "version": 2, "state": {}}, "of version 2, this adanpc reads version 1"),
        ({"format": "adanpc-checkpoint", "version": 1}, "did not write"),
        ({"format": "adanpc-checkpoint", "version": 1, "state": 3}, "not a dict"),
        ({"format": "adanpc-checkpoint", "version": 1, "state": {"tensor": "none"}}, "did not write"),
        ({"format": "adanpc-checkpoint", "version": 1, "state": {"float": "many"}}, "did not write"),
        ({"format": "adanpc-checkpoint", "version": 1, "state": {"dict": [[[], 1]]}}, "did not write"),
        ({"format": "adanpc-checkpoint", "version": 1, "state": {"dict": 1}}, "did not write"),
        ({"format": "adanpc-checkpoint", "version": 1, "state": {"list": [], "dict": []}}, "did not write"),
    ],
)
def test_other_documents_are_refused_though_sealed(tmp_path: Path, document: Any, words: str) -> None:
    write_sealed(tmp_path / "file", {}, document)
    assert read_sealed(tmp_path / "file") == ({}, document)
    with pytest.raises(SealError, match=words):
        read(tmp_path / "file")
