"""The paper's own numbers."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

import pytest

from adanpc.errors import AdaNPCError
from adanpc.lab.show.exhibit import Value
from adanpc.lab.tables.paper import cell, columns, notes, rows, tables

GROUPS = [(table, group) for table, groups in tables().items() for group in groups]
FILE: dict[str, Any] = tomllib.loads(files("adanpc.lab.tables").joinpath("paper.toml").read_text(encoding="utf-8"))

READ_BY_EYE = [
    ("ood", "all", "ERM", "RMNIST", Value(97.8, 0.1)),
    ("ood", "all", "VREx", "DomainNet", Value(30.1, 3.7)),
    ("ood", "all", "AdaNPC", "VLCS", Value(79.5, 2.4)),
    ("ood", "all", "AdaNPC+BN", "TerraIncognita", Value(54.0, 0.1)),
    ("ood", "all", "AdaNPC+BN", "average", Value(72.9)),
    ("backbones", "ResNet18", "ResNet18", "A", Value(79.5)),
    ("backbones", "ResNet50", "AdaNPC", "average", Value(85.8)),
    ("backbones", "ViT-B16", "AdaNPC+BN", "P", Value(98.3)),
    ("imagenet-c", "all", "R-50 (GN)+JT", "Defoc", Value(88.9)),
    ("imagenet-c", "all", "Tent (episodic)", "Motion", Value(74.6)),
    ("imagenet-c", "all", "AdaNPC+ETA", "Zoom", Value(46.5)),
    ("imagenet-c-batch-1", "bn-retraining", "Tent", "Motion", Value(99.11)),
    ("imagenet-c-batch-1", "clf-retraining", "EATA", "Zoom", Value(0.84)),
    ("imagenet-c-batch-1", "clf-retraining", "AdaNPC", "Zoom", Value(60.57)),
    ("adaptation", "batch-32", "SHOT", "VLCS", Value(67.83)),
    ("adaptation", "batch-2", "PLFull", "DomainNet", Value(21.80)),
    ("adaptation", "batch-2", "T3A", "RMNIST", Value(97.10)),
    ("adaptation", "batch-32", "AdaNPC", "PACS", Value(88.93)),
    ("loss-pacs", "ERM", "Linear", "A", Value(82.7)),
    ("loss-pacs", "ERM", "k=150", "S", Value(80.4)),
    ("loss-pacs", "L_KNN", "k=50, M=1000", "average", Value(86.1)),
    ("loss-rotated-mnist", "all", "ERM", "d0", Value(94.0, 0.2)),
    ("loss-rotated-mnist", "all", "L_KNN", "d5", Value(97.0, 0.5)),
    ("loss-rotated-mnist", "all", "L_KNN + AdaNPC", "d0", Value(96.9, 0.3)),
    ("inference-time", "all", "PLFull", "PACS", Value(281.90)),
    ("inference-time", "all", "Tent-clf", "DomainNet", Value(92.37)),
    ("inference-time", "all", "AdaNPC", "ImageNet", Value(22.23)),
    ("reval-pacs", "all", "T3A", "S", Value(91.0)),
    ("reval-pacs", "all", "PLFull", "average", Value(93.0)),
    ("reval-pacs", "all", "AdaNPC", "C", Value(94.5)),
    ("reval-terra-incognita", "all", "PLFull", "L38", Value(81.22)),
    ("reval-terra-incognita", "all", "Tent", "L46", Value(82.3)),
    ("reval-terra-incognita", "all", "T3A", "average", Value(86.4)),
    ("reval-domain-net", "all", "T3A", "info", Value(37.7)),
    ("reval-domain-net", "all", "Tent", "sketch", Value(5.3)),
    ("reval-domain-net", "all", "PLFull", "average", Value(35.6)),
    ("reval-rotated-mnist", "all", "T3A", "75", Value(89.9)),
    ("reval-rotated-mnist", "all", "PLFull", "30", Value(87.5)),
    ("reval-rotated-mnist", "all", "AdaNPC", "average", Value(100.0)),
    ("rotated-mnist", "test-domain", "ERM", "0", Value(95.3, 0.2)),
    ("rotated-mnist", "test-domain", "AdaNPC+NP", "75", Value(97.3, 0.1)),
    ("rotated-mnist", "training-domain", "ARM", "75", Value(96.5, 0.4)),
    ("rotated-mnist", "training-domain", "AdaNPC+BN", "average", Value(98.8)),
    ("vlcs", "test-domain", "DANN", "V", Value(80.1, 0.5)),
    ("vlcs", "test-domain", "AdaNPC", "average", Value(79.9)),
    ("vlcs", "training-domain", "MMD", "V", Value(75.3, 3.3)),
    ("vlcs", "training-domain", "+BN retraining", "L", Value(65.2, 1.2)),
    ("pacs", "test-domain", "IRM", "S", Value(78.3, 2.1)),
    ("pacs", "test-domain", "AdaNPC", "C", Value(84.3, 0.1)),
    ("pacs", "training-domain", "Fisher", "A", Value(88.4, 0.2)),
    ("pacs", "training-domain", "AdaNPC+NP", "average", Value(86.7)),
    ("domain-net", "test-domain", "MMD", "clip", Value(32.1, 13.3)),
    ("domain-net", "test-domain", "AdaNPC", "average", Value(42.9)),
    ("domain-net", "training-domain", "IRM", "real", Value(37.7, 9.0)),
    ("domain-net", "training-domain", "AdaNPC", "quick", Value(14.3, 0.0)),
]

# All numbers of a table of the paper added up, errors too: taken from its LaTeX source, not from our file.
TOTALS = {
    "tab:ood": 5545.7,
    "tab:backbons": 3826.7,
    "tab:corr": 3733.8,
    "tab:corr_bsz1": 2467.94,
    "tab:adapt_comp": 4678.75,
    "tab:knn-training-pacs": 4674.5,
    "tab:knn-training": 2751.0,
    "tab:infernece_time": 1565.65,
    "reval-1": 3553.52,
    "reval-2": 3817.6,
    "tab:rotatedmnist": 23535.6,
    "tab:vlcs": 13504.4,
    "tab:pacs": 14872.8,
    "tab:domainnet": 8747.9,
}


def printed_row(table: str, group: str, row: str) -> list[Value | None]:
    return [cell(table, group, row, column) for column in columns(table)]


def mean(table: str, group: str, row: str, column: str = "average") -> float:
    found = cell(table, group, row, column)
    assert found is not None
    return found.mean


@pytest.mark.parametrize(("table", "group", "row", "column", "expected"), READ_BY_EYE)
def test_cells_are_those_of_the_paper(table: str, group: str, row: str, column: str, expected: Value) -> None:
    assert cell(table, group, row, column) == expected


def test_every_table_was_read_by_eye_in_three_places() -> None:
    read = [table for table, *_ in READ_BY_EYE]
    assert all(read.count(table) >= 3 for table in tables())


def test_all_cells_add_up_to_the_total_of_the_paper() -> None:
    totals = dict.fromkeys(TOTALS, 0.0)
    for table, group in GROUPS:
        values = [value for row in rows(table, group) for value in printed_row(table, group, row) if value]
        totals[FILE["table"][table]["label"]] += sum(value.mean + (value.error or 0.0) for value in values)
    assert totals == pytest.approx(TOTALS, abs=1e-6)


@pytest.mark.parametrize(("table", "group"), GROUPS)
def test_every_row_has_a_cell_for_each_column(table: str, group: str) -> None:
    assert len(set(columns(table))) == len(columns(table))
    printed = FILE["table"][table]["rows"][group]
    assert rows(table, group) == tuple(printed)
    assert {len(cells) for cells in printed.values()} == {len(columns(table))}


@pytest.mark.parametrize(("table", "group"), GROUPS)
def test_numbers_are_plausible(table: str, group: str) -> None:
    unit = FILE["table"][table]["unit"]
    highest = {"accuracy in %": 100.0, "error in %": 100.0, "milliseconds per image": 1000.0}[unit]
    values = [value for row in rows(table, group) for value in printed_row(table, group, row) if value]
    assert all(0 < value.mean <= highest for value in values)
    assert all(value.error is None or 0 <= value.error < 15 for value in values)


def test_of_fish_alone_the_domains_are_missing() -> None:
    gaps = {
        (table, group, row, column)
        for table, group in GROUPS
        for row in rows(table, group)
        for column in columns(table)
        if cell(table, group, row, column) is None
    }
    assert gaps == {
        (table, group, "Fish", domain)
        for table in ("rotated-mnist", "vlcs", "pacs", "domain-net")
        for group in ("test-domain", "training-domain")
        for domain in columns(table)[:-1]
    }


def off_average(table: str, group: str, row: str) -> str | None:
    *cells, average = printed_row(table, group, row)
    means = [value.mean for value in cells if value]
    if not means or average is None:
        return None
    recomputed = sum(means) / len(means)
    assert abs(recomputed - average.mean) < 0.1, (table, group, row)
    if abs(recomputed - average.mean) < 0.05 + 1e-9:
        return None
    where = row if group == "all" else f"{group}, {row}"
    return f"{where}: average printed {average.mean}, the printed cells give {recomputed:.3f}."


def test_averages_are_those_of_their_cells_but_for_the_noted() -> None:
    averaged = [(table, group) for table, group in GROUPS if columns(table)[-1] == "average"]
    found = {(t, note) for t, group in averaged for row in rows(t, group) if (note := off_average(t, group, row))}
    noted = {(table, note) for table in tables() for note in notes(table) if "average printed" in note}
    assert found == noted
    assert len(averaged) == 1 + 3 + 2 + 1 + 4 + 8
    assert len(found) == 4


def test_the_main_table_mixes_selection_rules_on_domain_net() -> None:
    for row in ("ERM", "IRM", "GDRO", "CORAL", "MTL", "SagNet", "ARM", "VREx"):
        main = mean("ood", "all", row, "DomainNet")
        assert main == mean("domain-net", "training-domain", row) != mean("domain-net", "test-domain", row)
    assert mean("ood", "all", "AdaNPC", "DomainNet") == mean("domain-net", "test-domain", "AdaNPC")


@pytest.mark.parametrize(("table", "column"), [("rotated-mnist", "RMNIST"), ("vlcs", "VLCS"), ("pacs", "PACS")])
def test_the_main_table_has_the_test_domain_averages_elsewhere(table: str, column: str) -> None:
    same = {"Fishr": "Fisher", "AdaNPC+BN": rows(table, "test-domain")[-1]}
    differ = [
        row
        for row in rows("ood", "all")
        if mean("ood", "all", row, column) != mean(table, "test-domain", same.get(row, row))
    ]
    assert differ == (["AdaNPC"] if table == "vlcs" else [])


def test_batch_one_heads_are_the_accuracies_of_batch_one_norms() -> None:
    for row in ("Tent", "ETA", "EATA"):
        for column in columns("imagenet-c-batch-1"):
            accuracy = mean("imagenet-c-batch-1", "clf-retraining", row, column)
            assert 100 - accuracy == pytest.approx(mean("imagenet-c-batch-1", "bn-retraining", row, column))


def test_gains_that_the_text_claims_follow_from_the_tables() -> None:
    gain = FILE["claims"]["average-gain"]["values"]
    for row in ("Fishr", "AdaNPC"):
        assert mean("ood", "all", row) - mean("ood", "all", "ERM") == pytest.approx(gain[f"{row} over ERM"])
    for encoder in tables()["backbones"]:
        gained = mean("backbones", encoder, "AdaNPC") - mean("backbones", encoder, encoder)
        assert gained == pytest.approx(FILE["claims"]["backbone-gain"]["values"][encoder])


def test_claims_have_a_line_and_numbers_and_figures_none() -> None:
    for claim in FILE["claims"].values():
        assert set(claim) - {"note"} == {"line", "about", "says", "values"}
        assert claim["line"] > 0
        assert all(isinstance(number, int | float) for number in claim["values"].values())
    for name, figure in FILE["figures"].items():
        assert set(figure) - {"note"} == {"label", "caption", "values"}
        assert (figure["label"], figure["values"]) == (f"fig:{name}", "not printed")


def test_unknown_names_are_answered_with_those_there_are() -> None:
    with pytest.raises(AdaNPCError, match="table must be one of ood, backbones, .*, domain-net; got office-home"):
        notes("office-home")
    with pytest.raises(AdaNPCError, match="table must be one of"):
        columns("office-home")
    with pytest.raises(AdaNPCError, match="group of vlcs must be one of test-domain, training-domain; got all"):
        rows("vlcs", "all")
    with pytest.raises(AdaNPCError, match=r"row of vlcs, test-domain must be one of ERM, .*retraining; got Fishr"):
        cell("vlcs", "test-domain", "Fishr", "C")
    with pytest.raises(AdaNPCError, match="column of vlcs must be one of C, L, S, V, average; got Avg"):
        cell("vlcs", "test-domain", "ERM", "Avg")
