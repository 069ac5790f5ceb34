"""Make a table from its name: choose its scale, run the tasks without a record, and show the results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adanpc import files, require
from adanpc.errors import AdaNPCError, UnavailableError
from adanpc.lab.adapt.registry import is_named
from adanpc.lab.data.domain import DataError
from adanpc.lab.data.loading import cores
from adanpc.lab.networks.encoders import check_named_encoder, find_encoder
from adanpc.lab.own import UntrustedCodeError
from adanpc.lab.show import report
from adanpc.lab.show.exhibit import Exhibit
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.forecast import Forecast
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.sweep import sweep
from adanpc.lab.tables.choice import (
    Choice,
    Estimate,
    MadeFrom,
    Request,
    available,
    check_algorithms,
    check_methods,
    check_rows,
    choices,
    choose,
    describe,
    note_choice,
)
from adanpc.lab.tables.registry import TABLES, table_of
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import Results, Table
from adanpc.lab.train.process_group import known_device
from adanpc.lab.train.registry import UntrustedAlgorithmError, known

SMALLEST = {"steps": 1, "images": 5, "trials": 1, "seeds": 1}  # 5 images, because one in five is held out


def make(
    name: str,
    *,
    data_dir: str | Path = "data",
    out: str | Path = "runs/tables",
    scale: str = "",
    budget: str = "",
    only: Sequence[str] = (),
    methods: Sequence[str] = (),
    algorithms: Sequence[str] = (),
    encoder: str = "",
    steps: int | None = None,
    images: int | None = None,
    trials: int | None = None,
    seeds: int | None = None,
    workers: int | None = None,
    device: str = "cpu",
    ray: str = "",
    notify: Callable[[str], None] = lambda message: None,
    consent: Callable[[Estimate], None] = lambda estimate: None,
) -> Exhibit:
    """A table or figure of the paper, with our numbers beside the paper's.

    Every finished task is recorded at once, so the same call continues after an interruption and runs nothing twice.
    ``adanpc.lab.show.report.write`` writes the result to files.

    Call it below ``if __name__ == "__main__":``. With several workers, each of them imports the program that calls it,
    and would otherwise run all of it.

    Args:
        name: one of ``TABLES``.
        data_dir: the folder of the data sets.
        out: where records and models are kept.
        scale: the name of a size, see ``SCALES``; by default the paper's, which takes weeks on two cores.
        budget: instead of a scale, a time such as 30m or 2h: the largest scale that fits is used.
        only: the rows to make; by default all.
        methods: your own methods, as further rows of a table that compares methods; their code is executed.
        algorithms: your own training algorithms, as further rows of a table that compares these, in the same way.
        encoder: an encoder to use for photos instead of the paper's.
        steps: training steps, instead of the scale's.
        images: the most images of each domain, instead of the scale's.
        trials: trials of settings to select from, instead of the scale's.
        seeds: repetitions, instead of the scale's.
        workers: processes; by default one per core.
        device: where models compute, such as cpu or cuda.
        ray: the address of a Ray cluster to run on, such as auto; by default this machine is used.
        notify: called with messages along the way: the estimate before the work begins, and what had to be left out.
        consent: called with the estimate before the work begins; if it raises, no work is done.
    """
    table = table_of(name)
    if encoder:
        find_encoder(encoder)
    check_rows(table, only, encoder)
    check_methods(table, methods)
    check_algorithms(table, algorithms)
    sizes = _checked_sizes(steps=steps, images=images, trials=trials, seeds=seeds)
    named = {"encoder": encoder, "only": tuple(only), "methods": tuple(methods), "algorithms": tuple(algorithms)}
    sizes |= {name: value for name, value in named.items() if value}
    request = Request(budget, scale, sizes)
    request.check()
    workspace = Workspace(Path(data_dir), Path(out), known_device(device))
    processes = cores() if workers is None else require.whole("workers", workers, least=1)
    if table.alone:  # it shows times, which other processes would lengthen
        processes = 1
        ray = ""
    absent = absent_data(table, workspace)
    if not available(table, request.sized("least"), workspace, absent):
        for data in absent:
            workspace.data(data, 0)  # raises the error that says where the data is published
    estimate = choose(table, request, workspace, processes, absent)
    notify(describe(table, estimate, budget, processes))
    consent(estimate)
    made_from = _made_from(table, workspace, absent)
    records = Records(workspace.folder)
    with records.writing():
        # Before the work begins, so that an interrupted table continues at the same scale.
        note_choice(workspace.folder, name, estimate.scale, budget, made_from)
        tasks = available(table, estimate.scale, workspace, absent)
        forecast = Forecast(tasks, records, CostModel(workspace))
        reasons = sweep(tasks, workspace, records, ray=ray, workers=processes, forecast=forecast)
        if reasons and not any(task in records for task in tasks):
            raise UnavailableError(f"nothing of {name} could be made: {'; '.join(reasons)}")
        for reason in reasons:
            notify(f"Left out: {reason}")
    return table.exhibit(Results(Records(workspace.folder), estimate.scale, workspace, absent))


def _checked_sizes(**sizes: int | None) -> dict[str, Any]:
    """The sizes that were given, each checked to be large enough."""
    checked = {}
    for name, size in sizes.items():
        if size is not None:
            checked[name] = require.whole(name, size, least=SMALLEST[name])
    return checked


def _made_from(table: Table, workspace: Workspace, absent: Collection[str]) -> MadeFrom:
    """A description of the data that a table is made from."""
    sets = {}
    for name in table.data:
        if name not in absent:
            sets[name] = {"images": workspace.count(name), "notice": workspace.data(name, 0).notice}
    return MadeFrom(str(workspace.data_dir.resolve()), sets)


def absent_data(table: Table, workspace: Workspace) -> tuple[str, ...]:
    """The table's data sets that are missing here."""
    return tuple(name for name in table.data if not _is_here(name, workspace))


def _is_here(name: str, workspace: Workspace) -> bool:
    try:
        workspace.data(name, 0)
    except DataError:
        return False
    return True


def exhibit(name: str, workspace: Workspace, scale: Scale) -> Exhibit:
    """A table as the records of a folder show it."""
    table = table_of(name)
    absent = absent_data(table, workspace)
    return table.exhibit(Results(Records(workspace.folder), scale, workspace, absent))


def exhibits(workspace: Workspace, *, where_made: bool = False) -> list[Exhibit]:
    """Every table that was made in a folder, at its latest scale.

    Args:
        workspace: the folder, and where the data is now, for tables that show images.
        where_made: look for the data of each table where it was when the table was made.
    """
    noted = choices(workspace.folder)
    if not noted:
        folder = workspace.folder
        raise AdaNPCError(f"{folder} holds no tables: make one with adanpc table NAME --out {folder}")
    for choice in noted.values():
        _check_trusted(choice, workspace.folder)
    return [_noted_exhibit(name, workspace, noted[name], where_made) for name in TABLES if name in noted]


def _check_trusted(choice: Choice, folder: Path) -> None:
    """Refuses code that only a file names and that is not part of adanpc: planning would execute it."""
    try:
        check_named_encoder(choice.scale.encoder)
    except UntrustedCodeError:
        raise _untrusted(folder, "encoder", choice.scale.encoder) from None
    for method in choice.scale.methods:
        if not is_named(method):
            raise _untrusted(folder, "method", method)
    for algorithm in choice.scale.algorithms:
        try:
            known(algorithm)
        except UntrustedAlgorithmError:
            raise _untrusted(folder, "algorithm", algorithm) from None


def _untrusted(folder: Path, what: str, name: str) -> AdaNPCError:
    return AdaNPCError(
        f"tables in {folder} were made with the {what} {name!r}, which is not part of adanpc, and code is never "
        f"executed because a file names it: if you trust that {what}, name it yourself as `{what}`"
    )


def _noted_exhibit(name: str, workspace: Workspace, choice: Choice, where_made: bool) -> Exhibit:
    """A table as the records show it, with the notices about its data that were recorded when it was made."""
    made_from = choice.data
    if made_from is None:
        return exhibit(name, workspace, choice.scale)
    table = table_of(name)
    records = Records(workspace.folder)
    if where_made:
        workspace = replace(workspace, data_dir=Path(made_from.folder))
    else:
        here = [data for data in table.data if _is_here(data, workspace)]
        records.check({data: workspace.count(data) for data in here})
    absent = tuple(data for data in table.data if data not in made_from.sets)
    notices = {data: about["notice"] for data, about in made_from.sets.items()}
    return table.exhibit(Results(records, choice.scale, workspace, absent, notices))


def measured_with(workspace: Workspace) -> dict[str, str]:
    """The data, machines, commits and versions with which the tables of a folder were made, each value once."""
    records = Records(workspace.folder)
    noted = choices(workspace.folder)
    # Dicts serve as ordered sets: each value once, in order of appearance.
    seen: dict[str, dict[str, None]] = {"data": {}, "machine": {}, "commit": {}, "versions": {}}
    for name in TABLES:
        if name not in noted:
            continue
        made_from = noted[name].data
        if made_from is not None:
            for data, about in made_from.sets.items():
                seen["data"][_provenance(data, about, made_from.folder)] = None
        for task in TABLES[name].plan(noted[name].scale):
            if task in records:
                environment = records.entries[task.id]["environment"]
                packages = [f"{package} {version}" for package, version in environment["versions"].items()]
                seen["machine"][environment["machine"] or "unknown"] = None
                seen["commit"][environment["commit"] or "unknown"] = None
                seen["versions"][", ".join(packages) or "unknown"] = None
    return {name: "; ".join(values) for name, values in seen.items() if values}


def _provenance(data: str, about: Mapping[str, Any], folder: str) -> str:
    """Where the images of a data set came from, in words."""
    images = f"{data}, {about['images']:,} images"
    # A data set with a notice did not simply come from the folder, so "from" would be wrong.
    if about["notice"]:
        return f"{images} with the data folder {folder} ({about['notice']})"
    return f"{images} from {folder}"


def write_report(workspace: Workspace, *, where_made: bool = False) -> Path:
    """Writes one page with every table of a folder, and returns its path. For the arguments see ``exhibits``."""
    path = workspace.folder / "report.html"
    shown = exhibits(workspace, where_made=where_made)
    text = report.page(shown, measured_with(workspace), "AdaNPC: tables and figures made again")

    def write(new: Path) -> None:
        new.write_text(text, encoding="utf-8")

    files.replace(path, write)
    return path
