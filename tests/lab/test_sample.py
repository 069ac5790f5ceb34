"""The sample to look at: made once, whole or made again, and different for nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from adanpc.errors import AdaNPCError
from adanpc.lab import sample
from adanpc.lab.data.drawn import THINGS
from adanpc.lab.sample import LATER, STATE, UNFINISHED
from adanpc.store import DurableBank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sample") / "here"
    sample.make(made, count=2, steps=1)
    return made


def test_a_sample_has_a_bank_of_three_styles_and_a_stream_of_the_fourth(folder: Path) -> None:
    made = sample.make(folder, count=99, steps=99)  # it is there already: these have no say
    assert len(made.stream) == 2 * len(THINGS)
    assert len(made.later) == LATER * len(THINGS)
    assert not {path.name for path in made.stream} & {path.name for path in made.later}
    assert all("cartoon" in path.parts for path in made.stream)
    assert [path.parent.name for path in made.stream] != sorted(path.parent.name for path in made.stream)
    with DurableBank.open(made.bank) as bank:
        assert bank.contents.settings.names == tuple(THINGS)
        assert len(bank.contents) == made.source_rows
        assert bank.preset == "safe"


def test_what_was_interrupted_is_made_again_and_other_files_are_left_alone(folder: Path, tmp_path: Path) -> None:
    (folder / STATE).write_text(UNFINISHED)
    (folder / "run" / "half").touch()
    made = sample.make(folder, count=2, steps=1)
    assert not (made.run / "half").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(AdaNPCError, match="holds something else: choose another folder"):
        sample.make(mine)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]


def test_asking_a_service_that_has_ended_is_no_error(folder: Path) -> None:
    sample.ask("http://127.0.0.1:9", sample.make(folder), is_new=True)
