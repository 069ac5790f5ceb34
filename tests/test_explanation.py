"""explain: who voted, with names, keys, files and shares, in a terminal and in a notebook."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import adanpc
from adanpc import AdaNPC, Admission, Delete, MemoryBank, Relabel, Veto, everyone, explain
from adanpc.errors import AdaNPCError, LabelError
from adanpc.explanation import Explanation, Witness
from adanpc.models.filenames import files_of

ROWS = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])


def classifier(**options: Any) -> AdaNPC:
    made = AdaNPC(MemoryBank(2, ["cat", "dog"]), k=3, admission=everyone, **options)
    made.learn(ROWS, torch.tensor([0, 0, 1]), keys=torch.tensor([10, 11, 2]))
    return made


def test_an_answer_names_its_witnesses() -> None:
    made = classifier()
    answer = made.step(torch.tensor([[1.0, 0.05], [0.2, 1.0]]))
    told = explain(answer, made.bank, 1, files={10: "a.png", 2: Path("c.png")})
    assert isinstance(told, adanpc.Explanation)
    assert told.answer == "dog"
    assert told.joined == 4
    assert told.confidence == pytest.approx(float(answer.confidence[1]))
    assert list(told.votes) == ["dog", "cat"]
    assert [witness.row for witness in told.witnesses] == [2, 1, 3]
    assert [witness.origin for witness in told.witnesses] == ["source", "source", "admitted"]
    assert [witness.key for witness in told.witnesses] == [2, 11, None]
    assert [witness.file for witness in told.witnesses] == ["c.png", None, None]
    assert sum(witness.share for witness in told.witnesses) == pytest.approx(1)


def test_files_may_be_a_list_in_the_order_of_keys() -> None:
    made = classifier()
    told = explain(made.predict(ROWS), made.bank, files=["a", "b", "c"])
    assert {witness.key: witness.file for witness in told.witnesses} == {10: None, 11: None, 2: "c"}


def test_what_happened_to_a_row_since_is_shown() -> None:
    made = classifier()
    answer = made.predict(ROWS)
    made.apply(Veto((0,)))
    made.apply(Delete((2,)))
    made.apply(Relabel((1,), 1))
    told = {witness.row: witness for witness in explain(answer, made.bank).witnesses}
    assert told[0].vetoed
    assert told[2].origin == "left"
    assert told[2].key is None
    assert told[1].name == "cat"  # as it voted
    assert "source, vetoed since" in str(explain(answer, made.bank))


def test_rows_of_a_proposal_are_not_in_the_bank_yet() -> None:
    made = classifier()
    answer, change = made.propose(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert change is not None
    origins = [witness.origin for witness in explain(answer, made.bank, 1).witnesses]
    assert "this batch" in origins
    first = made.apply(change).start
    settled = explain(answer.settled(first), made.bank, 1)
    assert "admitted" in [witness.origin for witness in settled.witnesses]


def test_classes_without_names_are_numbers() -> None:
    made = AdaNPC(MemoryBank(2, 2), k=5, admission=Admission(min_confidence=1))
    made.learn(ROWS, torch.tensor([0, 0, 1]))
    told = explain(made.step(torch.tensor([[0.7, 0.7]])), made.bank)
    assert told.answer == "0"
    assert told.joined is None
    assert len(told.witnesses) == 3  # there are no more rows


@pytest.mark.parametrize("query", [-1, 3, 0.5])
def test_a_query_that_was_not_asked_is_refused(query: Any) -> None:
    made = classifier()
    with pytest.raises(AdaNPCError, match="query must be"):
        explain(made.predict(ROWS), made.bank, query)


def test_what_cannot_be_explained_is_refused() -> None:
    made = classifier()
    answer = made.predict(ROWS)
    with pytest.raises(AdaNPCError, match=r"answer must be a Prediction, .*, got \["):
        explain([answer], made.bank)  # type: ignore[arg-type]
    with pytest.raises(AdaNPCError, match="such as classifier.bank, got <AdaNPC"):
        explain(answer, made)  # type: ignore[arg-type]
    with pytest.raises(AdaNPCError, match="the answer has 2 classes and the bank 3"):
        explain(answer, MemoryBank(2, 3))
    with pytest.raises(AdaNPCError, match="files must be a list of paths, or a mapping .*, got 'images'"):
        explain(answer, made.bank, files="images")


def test_an_answer_to_nothing_is_refused() -> None:
    made = classifier()
    with pytest.raises(AdaNPCError, match="there is no query to explain"):
        explain(made.predict(torch.zeros(0, 2)), made.bank)


def test_it_prints_as_a_table() -> None:
    made = classifier()
    told = explain(made.step(ROWS[:1]), made.bank, files={10: "red\x1b[31m.png"})
    lines = str(told).splitlines()
    assert lines[0] == "Query 0: cat, confidence 1.000; it joined the bank as row 3."
    assert lines[1].split() == ["share", "class", "similarity", "origin", "row", "key", "file"]
    assert lines[2].split()[1:] == ["cat", "1.0000", "source", "0", "10", r"red\x1b[31m.png"]
    assert lines[-1] == "… and 1 row with a smaller share. Votes: cat 1.000, dog 0.000"
    assert "\x1b" not in str(told)
    assert repr(told) == str(told)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(told)
    console.file.close()
    assert r"red\x1b[31m.png" in console.export_text()


def witness(row: int, share: float, name: str = "cat") -> Witness:
    return Witness(row, 0, name, share, 0.5, "source", None)


def test_columns_are_aligned_beside_a_name_that_is_spelled_out() -> None:
    told = Explanation(0, "cat", 1.0, None, {"cat": 1.0}, (witness(0, 0.6), witness(1, 0.4, "red\x1b[31m cat")))
    heading, *rows = str(told).splitlines()[1:-1]
    place = heading.index("origin")
    assert [row.index("source") for row in rows] == [place, place]


def test_rows_whose_share_would_be_shown_as_nothing_are_counted() -> None:
    witnesses = (witness(0, 0.9985), witness(1, 0.0006), witness(2, 0.0005), witness(3, 0.0004), witness(4, 1e-9))
    told = Explanation(0, "cat", 1.0, None, {"cat": 1.0}, witnesses)
    lines = str(told).splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == ["0.999", "0.001", "0.001"]
    assert lines[-1] == "… and 2 rows with smaller shares. Votes: cat 1.000"
    assert told._repr_html_().count("<tr>") == 4  # with the headings


class TestNotebook:
    def test_pictures_are_shown_where_there_are_any(self, tmp_path: Path) -> None:
        made = classifier()
        picture = tmp_path / "a.png"
        Image.new("RGB", (200, 100), "red").save(picture)
        damaged = tmp_path / "b.png"
        damaged.write_bytes(picture.read_bytes()[:60])
        files = {10: picture, 11: damaged, 2: tmp_path / "missing.png"}
        between = torch.tensor([[1.0, 1.0]])  # so that all rows have a share
        page = explain(made.predict(between), made.bank, files=files)._repr_html_()
        assert page.count("<img ") == 1
        assert page.count('src="data:image/png;base64,') == 1
        assert "missing.png" in page

    def test_names_are_not_markup(self) -> None:
        made = AdaNPC(MemoryBank(2, ["<script>", "dog"]), k=1)
        made.learn(ROWS, torch.tensor([0, 0, 1]))
        page = explain(made.predict(ROWS), made.bank)._repr_html_()
        assert "<script>" not in page
        assert "&lt;script&gt;" in page

    def test_without_pillow_there_are_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = classifier()
        picture = tmp_path / "a.png"
        Image.new("L", (8, 8)).save(picture)
        monkeypatch.setitem(sys.modules, "PIL.Image", None)
        page = explain(made.predict(ROWS), made.bank, files={10: picture})._repr_html_()
        assert "a.png" in page
        assert "<img" not in page


class Folder(Dataset[Any]):
    """What torchvision's ImageFolder is to others: samples with paths, and names of classes."""

    classes: list[str]

    def __init__(self) -> None:
        self.classes = ["cat", "dog"]
        self.samples = [(f"{self.classes[row % 2]}/{row}.png", row % 2) for row in range(8)]
        self.transform: str | None = None
        self.images = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.images[row], self.samples[row][1]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


class TestWrapped:
    def test_files_and_names_come_from_the_data_set(self) -> None:
        folder = Folder()
        wrapped = adanpc.wrap(model(), DataLoader(folder, batch_size=3, shuffle=True), preset="paper", k=8)
        assert wrapped.classifier.bank.names == ("cat", "dog")
        for witness in wrapped.explain(wrapped.predict(folder.images[:2]), 1).witnesses:
            assert witness.key is not None
            assert witness.file == folder.samples[witness.key][0]
            assert witness.name == witness.file[:3]

    def test_files_of_a_subset(self) -> None:
        folder = Folder()
        found = files_of(Subset(Subset(folder, [1, 3, 5]), [2, 0]))
        assert found is not None
        assert [found(key) for key in (0, 1, 2, -1)] == ["dog/5.png", "dog/1.png", None, None]
        assert files_of(Subset([1, 2], [0])) is None  # type: ignore[arg-type]

    def test_names_and_transform_of_a_part_are_those_of_the_whole(self) -> None:
        folder = Folder()
        folder.transform = "ToTensor()"
        part = Subset(Subset(folder, [0, 1, 2, 5]), [0, 1, 3])
        wrapped = adanpc.wrap(model(), DataLoader(part, batch_size=2))
        assert wrapped.classifier.bank.names == ("cat", "dog")
        assert wrapped.preprocessing == "ToTensor()"

    def test_a_wrapped_data_set_can_be_pickled(self) -> None:
        folder = Folder()
        for data in (folder, Subset(folder, range(8))):
            wrapped = adanpc.wrap(model(), DataLoader(data, batch_size=3))
            sent = pickle.loads(pickle.dumps(wrapped))
            answer = sent.predict(folder.images)
            assert torch.equal(answer.probs, wrapped.predict(folder.images).probs)
            assert str(sent.explain(answer)) == str(wrapped.explain(answer))

    def test_own_keys_are_not_row_numbers(self) -> None:
        folder = Folder()
        wrapped = adanpc.wrap(model(), DataLoader(folder, batch_size=3), keys=range(8), preset="paper", k=2)
        told = wrapped.explain(wrapped.predict(folder.images))
        assert [witness.file for witness in told.witnesses] == [None, None]
        told = wrapped.explain(wrapped.predict(folder.images), files=[f"{key}.jpg" for key in range(8)])
        assert [witness.file for witness in told.witnesses] == [f"{witness.key}.jpg" for witness in told.witnesses]

    def test_files_of_a_stream(self) -> None:
        folder = Folder()
        wrapped = adanpc.wrap(
            model(), DataLoader(folder, batch_size=3), preset="paper", k=1, capacity=2, admission=everyone
        )
        stream = torch.randn(30, 3)
        for row in range(30):
            wrapped.step(stream[row : row + 1], files=[f"{row}.jpg"])
        told = wrapped.explain(wrapped.predict(stream[29:]))
        assert told.witnesses[0].file == "29.jpg"
        assert len(wrapped._files) <= 2 * len(wrapped.classifier.bank)  # of those that left, not all are remembered

    def test_a_file_for_each_input(self) -> None:
        wrapped = adanpc.wrap(model(), DataLoader(Folder(), batch_size=3))
        before = wrapped.classifier.digest()
        with pytest.raises(LabelError, match="files must name one file for each of the 2 inputs, got 1"):
            wrapped.step(torch.randn(2, 3), files="a.png")
        assert wrapped.classifier.digest() == before

    def test_names_that_do_not_fit_are_not_taken(self) -> None:
        folder = Folder()
        for names in (["cat"], ["cat", "cat"], [1, 2], ("cat", "dog")):
            folder.classes = names  # type: ignore[assignment]
            assert adanpc.wrap(model(), DataLoader(folder, batch_size=3)).classifier.bank.names == ()

    def test_names_survive_a_file(self, tmp_path: Path) -> None:
        wrapped = adanpc.wrap(model(), DataLoader(Folder(), batch_size=3), classes=["Katze", "Hund"])
        adanpc.save(wrapped, tmp_path / "bank")
        loaded = adanpc.load(tmp_path / "bank", wrapped.model)
        assert loaded.classifier.bank.names == ("Katze", "Hund")
        answer = loaded.predict(torch.randn(1, 3))
        assert loaded.explain(answer).answer in ("Katze", "Hund")

    def test_it_says_what_it_is_in_a_line(self) -> None:
        wrapped = adanpc.wrap(model(), DataLoader(Folder(), batch_size=3))
        assert repr(wrapped).startswith("<Wrapped Sequential, features at 'input of 2': <AdaNPC")
        assert "\n" not in repr(wrapped)

    def test_a_misspelled_setting_is_named(self) -> None:
        with pytest.raises(AdaNPCError, match="wrap has no argument 'storge'; it has: .*; did you mean 'storage'?"):
            adanpc.wrap(model(), DataLoader(Folder()), storge="int8")
        with pytest.raises(AdaNPCError, match="wrap has no argument 'bank'"):
            adanpc.wrap(model(), DataLoader(Folder()), bank=None)


def test_classes_with_hardly_a_vote_are_summed_up() -> None:
    names = [f"class {number}" for number in range(40)]
    shares = [0.5, 0.25, 0.2498, 0.0001, 0.0001]
    votes = dict(zip(names, shares, strict=False))
    told = adanpc.Explanation(0, "class 0", 0.5, None, votes, ())
    assert told.summary == "Votes: class 0 0.500, class 1 0.250, class 2 0.250, 2 others 0.000"
    even = dict.fromkeys(names, 0.025)
    shown = adanpc.Explanation(0, "class 0", 0.025, None, even, ()).summary
    assert shown.endswith("class 8 0.025, class 9 0.025, 30 others 0.750")
    one_more = dict(zip(names, [0.9998, 0.0002], strict=False))
    assert adanpc.Explanation(0, "class 0", 0.9998, None, one_more, ()).summary.endswith("class 0 1.000, class 1 0.000")
