"""Codes of rows in a bank file: believed only if this account made them, and rows that stay in the file meanwhile."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import pickle
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from attacks.forging import forged, taken_apart, written
from safetensors.torch import load_file
from torch import Tensor

from adanpc.core import AdaNPC, Admission, Delete, MemoryBank, Veto
from adanpc.index import ExactIndex, ProgressiveIndex, blocks, codes, progressive, row_codes, unit
from adanpc.index.grid import Array
from adanpc.index.protocol import Kept
from adanpc.index.unread import scattered_memory
from adanpc.store import BankFileError, DurableBank, load, save
from adanpc.store import file as file_module
from adanpc.store.check import CODED_VERSION
from adanpc.store.file import write_state

DIM, CLASSES = 40, 4
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of few rows already, in several blocks and spans."""
    monkeypatch.setattr(row_codes, "ROWS_FOR_CODES", 24)
    monkeypatch.setattr(progressive, "ROWS_PER_WANTED", 1)
    monkeypatch.setattr(progressive, "LEAST_REREAD", 8)
    monkeypatch.setattr(row_codes, "SPAN", 32)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)


def features(seed: int, count: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    centers = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0))
    which = torch.randint(0, CLASSES, (count,), generator=random)
    return centers[which] + 0.7 * torch.randn(count, DIM, generator=random)


def classifier(rows: int = 300, *, gaps: bool = False, storage: str = "progressive", **options: Any) -> AdaNPC:
    """A classifier whose rows fill their slots, or leave some of them empty."""
    made = AdaNPC(MemoryBank(DIM, CLASSES, storage=storage, **options), k=5, admission=Admission(min_confidence=0.5))
    made.learn(features(1, rows), torch.arange(rows) % CLASSES)
    made.apply(Veto((5,), "Ann"))
    if gaps:
        made.apply(Delete((0, 3, 17, 34, 35, rows - 1)))
    return made


def assert_same(one: AdaNPC, two: AdaNPC) -> None:
    """They answer alike, one by one and in batches, and after the same changes still do."""
    for count in (1, 12):
        assert_same_answers(one.predict(features(2, count)), two.predict(features(2, count)))
    for each in (one, two):
        each.apply(Delete((9, 33)))
    assert_same_answers(one.step(features(3, 40)), two.step(features(3, 40)))
    assert_same_answers(one.predict(features(4, 12)), two.predict(features(4, 12)))
    assert one.digest() == two.digest()


def assert_same_answers(one: Any, two: Any) -> None:
    assert torch.equal(one.probs, two.probs)
    assert torch.equal(one.neighbors.ids, two.neighbors.ids)
    assert torch.equal(one.neighbors.similarity, two.neighbors.similarity)


def version_of(path: Path) -> int:
    document, _ = taken_apart(path.read_bytes())
    version: int = document["version"]
    return version


def no_codes_are_made(patch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("codes were made again")

    patch.setattr(codes.Coder, "encode", unexpected)
    patch.setattr(codes.Coder, "fitted", unexpected)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("lazy_rows", [False, True])
def test_what_is_opened_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gaps: bool, lazy_rows: bool
) -> None:
    original = classifier(gaps=gaps)
    save(original, tmp_path / "bank")
    assert version_of(tmp_path / "bank") == CODED_VERSION
    with monkeypatch.context() as patch:
        no_codes_are_made(patch)
        opened = load(tmp_path / "bank", lazy_rows=lazy_rows)
    assert isinstance(opened.bank.contents.index, ProgressiveIndex)
    assert opened.bank.contents.index.coded
    save(opened, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "bank").read_bytes()
    assert_same(load(tmp_path / "bank", lazy_rows=lazy_rows), original)


@pytest.mark.parametrize("lazy_rows", [False, True])
@pytest.mark.parametrize("spare", [False, True])
def test_rows_that_were_put_after_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lazy_rows: bool, spare: bool
) -> None:
    """Slots that are free get other rows, whether or not the rows that were there have been read."""
    if spare:  # columns are read with room behind them for more rows, as large ones are
        monkeypatch.setattr(file_module, "SMALL_BYTES", 1)
    original = classifier()
    save(original, tmp_path / "bank")
    opened = load(tmp_path / "bank", lazy_rows=lazy_rows)
    for each in (original, opened):
        each.apply(Delete(tuple(range(40, 80))))
        each.learn(features(7, 30), torch.arange(30) % CLASSES)
        each.learn(features(8, 300), torch.arange(300) % CLASSES)
    assert_same(opened, original)


def test_a_rows_worth_of_memory_for_a_row_that_was_needed(tmp_path: Path) -> None:
    save(classifier(2000), tmp_path / "bank")
    opened = load(tmp_path / "bank", lazy_rows=True)
    whole = load(tmp_path / "bank").bank.memory()
    before = opened.bank.memory()
    assert before["rows in a file"] == whole["rows"] == 2000 * DIM * 2
    assert before["rows"] == 0
    known = 2000 * (8 + 1 + 16)  # where each row is, whether it was read, and its seal
    assert before["what is known of them"] == known
    assert before["total"] == whole["total"] - whole["rows"] + known
    opened.predict(features(2, 1))
    between = opened.bank.memory()
    assert 0 < between["rows"] < whole["rows"] / 4
    assert between["rows"] + between["rows in a file"] == whole["rows"]
    opened.digest()
    read = {"rows in a file": 0, "what is known of them": known, "total": whole["total"] + known}
    assert opened.bank.memory() == whole | read


def test_threads_that_need_rows_at_the_same_time(tmp_path: Path) -> None:
    original = classifier(1000)
    save(original, tmp_path / "bank")
    opened = load(tmp_path / "bank", lazy_rows=True)
    queries = features(2, 64)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda query: opened.predict(query[None]), queries))
    for query, answer in zip(queries, answers, strict=True):
        assert_same_answers(answer, original.predict(query[None]))


def test_an_audit_reads_all_rows(tmp_path: Path) -> None:
    original = classifier()
    save(original, tmp_path / "bank")
    state = file_module._read(tmp_path / "bank", lazy_rows=True)
    index = ProgressiveIndex(DIM, sample=1.0)
    kept = state["kept"]
    group = torch.ones(300, dtype=torch.uint8)
    opened = index.put_kept(state["tensors"]["id"], state["tensors"], group, kept)
    found = opened.search(original.bank.rows(torch.arange(3)), 5)
    assert found.ids[:, 0].tolist() == [0, 1, 2]
    assert opened.audit == (3, 0)
    assert "rows in a file" in opened.memory(300)
    assert opened.memory(300)["rows in a file"] == 0


def test_an_audit_leaves_hidden_slots_alone_because_they_may_get_other_rows_meanwhile(tmp_path: Path) -> None:
    original = classifier()
    save(original, tmp_path / "bank")
    state = file_module._read(tmp_path / "bank", lazy_rows=True)
    stored = state["kept"].rows
    assert stored is not None
    read_stored = stored.read
    memory_for_reading = stored.nbytes
    slot = torch.tensor([7])
    new_row = original.bank.contents.index.encode(unit(features(9, 1)))
    changed = []

    class ChangedMeanwhile:
        """Puts another row into a slot while an audit, which alone needs so many, reads rows."""

        nbytes = memory_for_reading

        def read(self, places: Array) -> Mapping[str, Tensor]:
            rows = read_stored(places)
            if len(places) > 200:
                changed.append(hidden.put(slot, torch.tensor([300]), new_row, torch.ones(1, dtype=torch.uint8)))
            return rows

    group = torch.ones(300, dtype=torch.uint8)
    kept = Kept(state["kept"].codes, ChangedMeanwhile())
    index = ProgressiveIndex(DIM, sample=1.0)
    hidden = index.put_kept(state["tensors"]["id"], state["tensors"], group, kept).hide(slot)
    hidden.search(unit(features(2, 1)), 5)
    assert torch.equal(changed[0].state(slot)["row"], new_row["row"])


def test_more_neighbors_than_a_search_by_codes_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progressive, "ROWS_PER_WANTED", 8)
    original = classifier()
    save(original, tmp_path / "bank")
    opened = load(tmp_path / "bank", lazy_rows=True)
    ours = opened.bank.search(features(2, 3), 200)
    theirs = original.bank.search(features(2, 3), 200)
    assert torch.equal(ours.ids, theirs.ids)
    assert torch.equal(ours.similarity, theirs.similarity)


def test_rows_that_are_asked_for_by_id(tmp_path: Path) -> None:
    original = classifier(gaps=True)
    save(original, tmp_path / "bank")
    opened = load(tmp_path / "bank", lazy_rows=True)
    ids = torch.tensor([1, 5, 100, 298])
    assert torch.equal(opened.bank.rows(ids), original.bank.rows(ids))


def test_a_bank_that_was_opened_can_be_pickled_and_the_file_removed(tmp_path: Path) -> None:
    original = classifier()
    save(original, tmp_path / "bank")
    opened = load(tmp_path / "bank", lazy_rows=True)
    (tmp_path / "bank").unlink()
    assert pickle.loads(pickle.dumps(opened.bank)).digest() == original.bank.digest()


def test_what_is_opened_closes_the_file_when_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "bank"
    save(classifier(), path)
    opened = load(path, lazy_rows=True)
    assert times_open(path) == 1
    del opened
    assert times_open(path) == 0


def times_open(path: Path) -> int:
    """How many descriptors of this process are of a file. Those of others close at any moment, with the garbage."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one by which the folder is listed
            targets.append(descriptor.readlink())
    return targets.count(path)


def test_a_durable_bank_opens_with_the_codes_of_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = classifier()
    with DurableBank.create(tmp_path / "bank", original) as bank:
        bank.classify(features(2, 3))
        bank.snapshot()
        digest = bank.digest()
        bank.save(tmp_path / "file")
    assert version_of(tmp_path / "file") == CODED_VERSION
    no_codes_are_made(monkeypatch)
    with DurableBank.open(tmp_path / "bank") as bank:
        assert bank.digest() == digest


# What is not kept


def test_nothing_of_a_deleted_row_is_kept(tmp_path: Path) -> None:
    made = classifier()
    deleted = (0, 3, 17, 34, 35)
    made.apply(Delete(deleted))
    save(made, tmp_path / "bank")
    columns = load_file(tmp_path / "bank")
    slots = torch.tensor(deleted)
    assert not set(deleted) & set(columns["codes.slot"].tolist())
    for name in ("nibbles", "factors"):
        assert not columns[f"codes.{name}"][slots].any()
        assert columns[f"codes.{name}"][1].any()
    for name, size in (("head", 2), ("bits", 4), ("weights", 1)):
        lanes = columns[f"codes.{name}"].view(-1, columns[f"codes.{name}"].shape[1] // (16 * size), 16, size)
        assert not lanes[slots // 16, :, slots % 16].any()
        assert not lanes[300 // 16, :, 300 % 16 :].any(), "what was never written might be anything"
        assert lanes[0, :, 1].any()


@pytest.mark.parametrize("why", ["few rows", "another storage", "mostly empty", "all deleted", "no secret"])
def test_banks_that_are_saved_without_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    made = classifier()
    if why == "few rows":
        made = classifier(20)
    elif why == "another storage":
        made = classifier(storage="float32", index=ProgressiveIndex)
    elif why == "mostly empty":
        made.apply(Delete(tuple(range(10, 170))))
    elif why == "all deleted":
        made.apply(Delete(tuple(range(300))))
    else:
        monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    save(made, tmp_path / "bank")
    assert version_of(tmp_path / "bank") == 2
    opened = load(tmp_path / "bank", lazy_rows=True)
    assert opened.digest() == made.digest()
    if why != "all deleted":
        assert_same_answers(opened.predict(features(2, 12)), made.predict(features(2, 12)))


def test_a_state_has_codes_only_if_it_is_asked() -> None:
    made = classifier()
    assert "kept" not in made.state()
    assert made.state(codes=True)["kept"].codes
    assert "kept" not in classifier(storage="float32").state(codes=True)


def test_classifiers_of_the_same_state_share_no_memory() -> None:
    original = classifier()
    state = original.state(codes=True)
    first = AdaNPC.load(state)
    second = AdaNPC.load(state)
    first.apply(Delete(tuple(range(40, 80))))
    first.learn(features(7, 330), torch.arange(330) % CLASSES)
    assert_same(second, original)


def test_a_state_may_be_changed_by_whoever_asked_for_it() -> None:
    made = classifier()
    given = made.state(codes=True)["kept"].codes
    before = {name: column.clone() for name, column in given.items()}
    for column in given.values():
        column.zero_()
    again = made.state(codes=True)["kept"].codes
    for name, column in before.items():
        assert torch.equal(again[name], column), name


def test_an_audit_reads_no_row_that_cannot_be_found(tmp_path: Path) -> None:
    """The slot of such a row may be given to another row meanwhile."""
    save(classifier(), tmp_path / "bank")
    state = file_module._read(tmp_path / "bank", lazy_rows=True)
    bank = MemoryBank.load(state, index=lambda *about: ProgressiveIndex(*about, sample=1.0))
    bank.apply(Delete((9,)))
    bank.search(features(2, 1), 5)
    assert bank.memory()["rows in a file"] == 2 * DIM * 2  # the deleted one, and the one that is vetoed


def test_codes_are_no_part_of_another_index(tmp_path: Path) -> None:
    state = classifier(gaps=True).state(codes=True)
    state["document"]["bank"]["storage"] = "float16"
    assert len(MemoryBank.load(state)) == 294


def test_an_index_without_codes_gets_all_rows_at_once(tmp_path: Path) -> None:
    made = classifier(gaps=True)
    save(made, tmp_path / "bank")
    state = file_module._read(tmp_path / "bank", lazy_rows=True)
    bank = MemoryBank.load(state, index=ExactIndex)  # as on a device other than the CPU
    assert bank.digest() == made.bank.digest()
    assert torch.equal(bank.search(features(2, 9), 5).ids, made.bank.search(features(2, 9), 5).ids)


def test_rows_that_stayed_in_the_bank_file_go_to_the_folder_of_an_index(tmp_path: Path) -> None:
    made = classifier(gaps=True)
    save(made, tmp_path / "bank")
    state = file_module._read(tmp_path / "bank", lazy_rows=True)
    bank = MemoryBank.load(state, index=lambda *about: ProgressiveIndex(*about, folder=tmp_path))
    assert "rows" not in bank.memory()
    assert bank.digest() == made.bank.digest()


def test_rows_in_a_folder_stay_there(tmp_path: Path) -> None:
    made = classifier()
    state = made.state(codes=True)
    bank = MemoryBank.load(state, index=lambda *about: ProgressiveIndex(*about, folder=tmp_path))
    assert bank.memory()["rows in a file"]
    assert bank.digest() == made.bank.digest()
    assert torch.equal(bank.search(features(2, 9), 5).ids, made.bank.search(features(2, 9), 5).ids)


# What is not believed


@pytest.mark.parametrize("lazy_rows", [False, True])
def test_codes_that_another_account_made_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lazy_rows: bool
) -> None:
    original = classifier(gaps=True)
    save(original, tmp_path / "bank")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    opened = load(tmp_path / "bank", lazy_rows=lazy_rows)
    assert f"{tmp_path / 'bank'}: this account did not make the codes in it" in caplog.text
    assert "rows in a file" not in opened.bank.memory()
    assert_same(opened, original)


def test_codes_under_a_right_seal_that_would_hide_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A forger knows the format, but not the secret of the account."""
    original = classifier()
    save(original, tmp_path / "bank")
    document, columns = taken_apart((tmp_path / "bank").read_bytes())
    columns["codes.weights"][:] = 0
    columns["codes.factors"][:] = 0
    columns["codes.centers"][:] = -1
    opened = load(written(tmp_path / "bank", forged(document, columns)), lazy_rows=True)
    assert "did not make the codes" in caplog.text
    assert_same(opened, original)


def test_codes_of_another_rule_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(classifier(), tmp_path / "bank")
    monkeypatch.setattr(file_module, "RULE", codes.RULE + 1)
    load(tmp_path / "bank")
    assert "did not make the codes" in caplog.text


@pytest.mark.parametrize("lazy_rows", [False, True])
def test_a_changed_byte_anywhere(tmp_path: Path, lazy_rows: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It is noticed when the file is opened, or when the row is read that it belongs to, and never believed."""
    caplog.set_level(logging.ERROR)
    original = classifier(60, gaps=True)
    digest = original.digest()
    save(original, tmp_path / "bank")
    data = (tmp_path / "bank").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    rng = numpy.random.default_rng(0)
    refused = 0
    for place in rng.integers(0, len(data), 300).tolist():
        changed = bytearray(data)
        changed[place] ^= 1 << int(rng.integers(0, 8))
        written(tmp_path / "bank", bytes(changed))
        try:
            opened = load(tmp_path / "bank", lazy_rows=lazy_rows)
            assert opened.digest() == digest
        except BankFileError:
            refused += 1
        else:
            assert place < start, "a blank of the header, or the signature"
    assert refused > 250


def test_a_row_that_is_damaged_is_named_when_it_is_read(tmp_path: Path) -> None:
    original = classifier(2000)
    save(original, tmp_path / "bank")
    row = original.bank.state()["tensors"]["row"][1234].numpy().tobytes()
    data = (tmp_path / "bank").read_bytes()
    place = data.index(row)
    opened = load(tmp_path / "bank", lazy_rows=True)
    written(tmp_path / "bank", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    damaged = original.bank.rows(torch.tensor([1234]))
    with pytest.raises(BankFileError, match=r"bank was damaged or overwritten: row 1234 of it does not have its seal"):
        opened.predict(damaged)
    other = original.bank.rows(torch.tensor([77]))
    with pytest.raises(BankFileError, match="row 1234"):
        opened.digest()
    assert len(opened.bank) == 2000
    written(tmp_path / "bank", data)  # as long as it was not read, nothing is lost
    assert_same_answers(opened.predict(other), original.predict(other))
    assert opened.digest() == original.digest()


def test_a_file_that_is_cut_is_an_error_and_no_signal(tmp_path: Path) -> None:
    save(classifier(), tmp_path / "bank")
    opened = load(tmp_path / "bank", lazy_rows=True)
    os.truncate(tmp_path / "bank", 100)
    with pytest.raises(BankFileError, match="was damaged or overwritten"):
        opened.predict(features(2, 1))


def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(classifier(), tmp_path / "bank")
    opened = load(tmp_path / "bank", lazy_rows=True)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(BankFileError, match="bank cannot be read any more: Input/output error; check the disk"):
        opened.predict(features(2, 1))


def test_a_file_that_is_replaced_while_it_is_open(tmp_path: Path) -> None:
    original = classifier()
    save(original, tmp_path / "bank")
    opened = load(tmp_path / "bank", lazy_rows=True)
    save(classifier(100), tmp_path / "bank")
    assert_same(opened, original)


# Formats


def test_files_of_format_6_load_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an account whose secret is beside it, and of any other."""
    monkeypatch.setattr(row_codes, "SPAN", 4096)
    expected = load_file(GOLDEN / "format-6-answers.safetensors")
    path = GOLDEN / "format-6-progressive.safetensors"
    known = tmp_path / "adanpc" / "key"
    known.parent.mkdir()
    shutil.copy(GOLDEN / "format-6-key", known)
    known.chmod(0o600)
    for home in (tmp_path / "another", tmp_path):
        monkeypatch.setenv("XDG_STATE_HOME", str(home))
        for lazy_rows in (True, False):
            if home == tmp_path:
                no_codes_are_made(monkeypatch)
            opened = load(path, lazy_rows=lazy_rows)
            assert opened.digest() == "a3d41f47f29f6cafe800369778dab3a038918d71479b76e4c488e81c7689c3c7"
            answer = opened.predict(expected["queries"])
            assert torch.equal(answer.probs, expected["probs"])
            assert torch.equal(answer.neighbors.ids, expected["ids"])
            assert torch.equal(answer.neighbors.similarity, expected["similarity"])


def test_files_of_format_6_with_a_stream_load_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they know of it is completed, however they are opened."""
    monkeypatch.setattr(row_codes, "SPAN", 4096)
    expected = load_file(GOLDEN / "format-6-safe-answers.safetensors")
    path = GOLDEN / "format-6-safe.safetensors"
    known = tmp_path / "adanpc" / "key"
    known.parent.mkdir()
    shutil.copy(GOLDEN / "format-6-key", known)
    known.chmod(0o600)
    digests = set()
    for home in (tmp_path / "another", tmp_path):
        monkeypatch.setenv("XDG_STATE_HOME", str(home))
        for lazy_rows in (True, False):
            opened = load(path, lazy_rows=lazy_rows)
            answer = opened.predict(expected["queries"])
            assert torch.equal(answer.probs, expected["probs"])
            assert answer.trust is not None
            assert torch.equal(answer.trust, expected["trust"])
            save(opened, tmp_path / "again")
            assert version_of(tmp_path / "again") == CODED_VERSION
            digests |= {opened.digest(), load(tmp_path / "again").digest()}
    assert len(digests) == 1


def test_a_lack_of_memory_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    save(classifier(), tmp_path / "bank")
    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(BankFileError, match="there is not enough memory; free some and try again"):
        load(tmp_path / "bank", lazy_rows=True)


def test_a_state_with_codes_and_nothing_in_them_is_written_without(tmp_path: Path) -> None:
    state = classifier().state()
    state["kept"] = Kept({})
    write_state(state, {}, tmp_path / "bank")
    assert version_of(tmp_path / "bank") == 2


def test_memory_in_small_pages_on_systems_that_have_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_NOHUGEPAGE")
    assert scattered_memory(10).shape == (10,)
