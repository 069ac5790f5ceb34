from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeping import Chore

from adanpc.errors import AdaNPCError
from adanpc.lab.sweep.records import FILE, Records
from adanpc.lab.sweep.subjects import Extent, Frozen, Trained
from adanpc.lab.sweep.task import Adapt, Train
from adanpc.lab.train.spec import Spec

SPEC = Spec("folder", ("bright",), encoder="convnet", steps=6, batch=4, every=3, hyper={"lr": 0.001})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3),
    max_leaves=8,
)


def add(folder: Path, name: str, record: dict[str, Any], seconds: float = 1.0) -> None:
    records = Records(folder)
    with records.writing():
        records.add(Chore(name), record, seconds)


def test_a_record_says_what_was_found_where_and_how(tmp_path: Path) -> None:
    add(tmp_path / "new", "a", {"accuracy": 0.5}, 1.23456)
    (entry,) = Records(tmp_path / "new").entries.values()
    assert entry["id"] == Chore("a").id
    assert (entry["kind"], entry["task"], entry["record"]) == ("chore", {"name": "a"}, {"accuracy": 0.5})
    assert entry["seconds"] == 1.235
    assert {"machine", "versions", "command", "commit"} <= entry["environment"].keys()
    assert entry["finished"].endswith("+00:00")


def test_only_what_was_added_is_there(tmp_path: Path) -> None:
    assert Records(tmp_path / "nothing").entries == {}
    add(tmp_path, "a", {"error": "refused"})
    records = Records(tmp_path)
    assert Chore("a") in records
    assert Chore("b") not in records
    assert records.of(Chore("a")) == {"error": "refused"}
    assert records.of(Chore("b")) is None


def test_what_is_added_is_read_again(tmp_path: Path) -> None:
    records = Records(tmp_path)

    @settings(max_examples=50, deadline=None)
    @given(st.dictionaries(st.text(), JSON, max_size=4), st.floats(0, 1e6))
    def check(record: dict[str, Any], seconds: float) -> None:
        task = Chore(f"{len(records.entries)}")
        records.add(task, record, seconds)
        again = Records(tmp_path)
        assert again.of(task) == record
        assert again.entries == records.entries
        assert len(records.path.read_text().splitlines()) == len(records.entries)

    check()


def test_a_line_that_a_crash_cut_off_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    add(tmp_path, "a", {"value": 1})
    add(tmp_path, "b", {"value": 2})
    whole = (tmp_path / FILE).read_bytes()
    start = whole.index(b"\n") + 1
    for end in (start + 1, (start + len(whole)) // 2, len(whole) - 2):
        (tmp_path / FILE).write_bytes(whole[:end])
        assert list(Records(tmp_path).entries) == [Chore("a").id]
        add(tmp_path, "c", {"value": 3})
        assert list(Records(tmp_path).entries) == [Chore("a").id, Chore("c").id]
        assert Records(tmp_path).of(Chore("c")) == {"value": 3}


def test_a_line_that_lost_only_its_end_counts(tmp_path: Path) -> None:
    add(tmp_path, "a", {"value": 1})
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    add(tmp_path, "b", {"value": 2})
    assert list(Records(tmp_path).entries) == [Chore("a").id, Chore("b").id]


def test_the_first_record_of_a_task_stays(tmp_path: Path) -> None:
    add(tmp_path, "a", {"value": 1})
    add(tmp_path, "a", {"value": 2})
    assert Records(tmp_path).of(Chore("a")) == {"value": 1}


def test_lines_of_something_else_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"id": "1"}\n[]\nnothing\n')
    assert Records(tmp_path).entries == {}
    add(tmp_path, "a", {})
    assert len((tmp_path / FILE).read_text().splitlines()) == 4


def test_records_have_one_writer_at_a_time(tmp_path: Path) -> None:
    one, two = Records(tmp_path), Records(tmp_path)
    with one.writing():
        with pytest.raises(AdaNPCError, match="another process is adding to"), two.writing():
            pass
        one.add(Chore("a"), {"value": 1}, 0)
    with two.writing():
        assert two.of(Chore("a")) == {"value": 1}


def test_ids_never_change() -> None:
    # Records that exist are found by these: a change here makes everybody begin anew.
    assert Train(Trained(SPEC)).id == "903a4bc6fa051761"
    task = Adapt(Trained(SPEC), "adanpc", batch=8, settings={"k": 3}, extent=Extent(images=50))
    assert task.id == "c0bce37b04efd63d"
    assert Adapt(Frozen("pacs", ("sketch",), "resnet18"), "t3a").id == "f005a7fae416e1de"


def test_ids_tell_apart_what_decides_the_record_and_nothing_else() -> None:
    base = Adapt(Trained(SPEC), "adanpc", settings={"k": 3, "confidence": 0.5})
    assert base.id == Adapt(Trained(SPEC), "adanpc", settings={"confidence": 0.5, "k": 3}).id
    assert Train(Trained(SPEC, "best")).id == Train(Trained(SPEC, "last")).id
    others = [
        Adapt(Trained(SPEC, "best"), "adanpc", settings=base.settings),
        Adapt(Trained(SPEC), "t3a", settings=base.settings),
        Adapt(Trained(SPEC), "adanpc"),
        Adapt(Trained(SPEC), "adanpc", settings=base.settings, batch=1),
        Adapt(Trained(SPEC), "adanpc", settings=base.settings, seed=1),
        Adapt(Trained(SPEC), "adanpc", settings=base.settings, stream="successive"),
        Adapt(Trained(SPEC), "adanpc", settings=base.settings, extent=Extent(rows=9)),
    ]
    assert len({base.id, *(task.id for task in others)}) == 1 + len(others)
