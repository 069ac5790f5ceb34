"""The secret of an account: made once, private, and nothing is signed or believed without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adanpc.store import key


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the secret of an account is that has none yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "adanpc" / "key"


def test_an_account_knows_what_it_signed(home: Path) -> None:
    signature = key.signed("this")
    assert key.signed("this") == signature
    assert key.is_own(signature, "this")
    assert not key.is_own(signature, "that")
    assert not key.is_own("", "this")
    assert not key.is_own("é", "this")
    assert home.stat().st_mode & 0o777 == 0o600
    assert len(home.read_bytes()) == 32
    assert list(home.parent.iterdir()) == [home]


def test_another_account_signs_otherwise(home: Path) -> None:
    signature = key.signed("this")
    home.unlink()
    assert not key.is_own(signature, "this")


def test_the_home_of_an_account_is_used_where_nothing_else_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert key.signed("this")
    assert (tmp_path / ".local" / "state" / "adanpc" / "key").exists()


@pytest.mark.parametrize("flaw", ["others may read it", "too short", "too long", "a folder"])
def test_a_secret_that_is_none_is_not_used(home: Path, flaw: str) -> None:
    signature = key.signed("this")
    secret = home.read_bytes()
    if flaw == "others may read it":
        home.chmod(0o640)
    elif flaw == "too short":
        home.write_bytes(secret[:-1])
    elif flaw == "too long":
        home.write_bytes(secret + b"!")
    else:
        home.unlink()
        home.mkdir()
    assert key.signed("this") == ""
    assert not key.is_own(signature, "this")
    assert not key.is_own("", "this")


def test_a_pipe_is_no_secret(home: Path) -> None:
    home.parent.mkdir()
    os.mkfifo(home, 0o600)
    assert key.signed("this") == ""


def test_an_account_without_a_home_signs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    assert key.signed("this") == ""


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert key.signed("this") == ""


def test_of_two_processes_that_make_it_the_first_one_wins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def later(new: Path, path: Path) -> None:
        path.write_bytes(bytes(32))
        path.chmod(0o600)
        link(new, path)

    monkeypatch.setattr(os, "link", later)
    key.signed("this")
    assert home.read_bytes() == bytes(32)
    assert list(home.parent.iterdir()) == [home]
