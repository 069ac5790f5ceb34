"""Successive adaptation and forgetting on Rotated MNIST: every method, after training on upright digits alone.

``python -m benchmarks.successive --data-dir DIR`` trains once, then leads every method through 15° … 75°. Finished
methods are kept, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adanpc.adapt import ADAPTERS
from adanpc.data.streams import Successive
from adanpc.environment import machine
from adanpc.errors import AdaNPCError
from adanpc.experiments.adaptation import Scene, adapt, scene_of
from adanpc.train.assemble import start
from adanpc.train.loop import train
from adanpc.train.run import Run
from adanpc.train.spec import Spec

TARGETS = ("15", "30", "45", "60", "75")
ONE_BY_ONE = ("ttaug", "memo", "ttt", "ttt-online")  # each image by itself, with many copies: slow
PAPER = {  # Table "Successive adaptation results on the DomainNet and RMNIST datasets": the source, after each domain
    "t3a": (96.1, 96.1, 93.2, 90.3, 89.9),
    "tent": (99.5, 96.5, 92.5, 89.3, 89.4),
    "pl-full": (98.3, 87.5, 79.2, 67.9, 63.5),
    "adanpc": (100.0, 100.0, 100.0, 100.0, 100.0),
}


def main() -> None:
    """Measures what is missing, then writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/successive"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/successive.md"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--images", type=int, default=200, help="of each target")
    parser.add_argument(
        "--few", type=int, default=10, help="of each target, for methods that take copies of each image"
    )
    parser.add_argument("--many", type=int, default=2000, help="of each target, for methods that see features")
    options = parser.parse_args()
    run = trained(options)
    by_features = [name for name in ADAPTERS if ADAPTERS[name].sees == "features"]
    tables = {
        "all": measured(run, options.images, [name for name in ADAPTERS if name not in ONE_BY_ONE], (1, 2, 32)),
        "slow": measured(run, options.few, ONE_BY_ONE, (1,)),
        "features": measured(run, options.many, by_features, (1, 32)),
    }
    options.out.write_text(report(tables, run, options))


def trained(options: argparse.Namespace) -> Run:
    """A model trained on upright digits, with the rotation task beside so that test-time training has its head."""
    folder = options.runs / "source"
    if not (folder / "spec.json").exists():
        spec = Spec("rotated-mnist", TARGETS, "rotation", steps=options.steps, every=options.steps)
        start(spec, options.data_dir, folder)
    run = Run(folder)
    train(run)
    return run


def measured(run: Run, images: int, methods: Sequence[str], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The records of these methods, from the file where they are kept if they are.

    As many held-out source digits are answered after each domain as there are digits in it, at most 200.
    """
    scene: Scene | None = None
    records = []
    for size in sizes:
        for method in methods:
            kept = run.folder / f"{method}-{size}-{images}.json"
            if not kept.exists():
                scene = scene or scene_of(run, which="last", images=images, rows=5000, recalled=min(200, images))
                settings = {"mirror": False} if method in ONE_BY_ONE else {}  # mirrored digits are other digits
                try:
                    record = adapt(scene, method, Successive(), size, settings)
                except AdaNPCError as error:
                    record = {"method": method, "batch_size": size, "error": str(error)}
                kept.write_text(json.dumps(record))
                print(method, size, images, record.get("average", record.get("error")), flush=True)
            records.append(json.loads(kept.read_text()))
    return records


def report(tables: dict[str, list[dict[str, Any]]], run: Run, options: argparse.Namespace) -> str:
    """The tables in Markdown."""
    held_out = run.records()[-1]["source"]
    lines = [
        "# Successive adaptation on Rotated MNIST, reduced",
        "",
        f"`python -m benchmarks.successive` on {machine()}.",
        "",
        (
            f"The ConvNet, trained on upright digits of the full MNIST for {options.steps} steps of 64 (held-out "
            f"digits: {held_out:.1f} %), with the rotation task beside so that test-time training has its head. Every "
            "method meets "
            "15° to 75° in this order and is never reset; library defaults, one seed, nothing selected on targets. "
            "Source: as many held-out upright digits as there are of each angle, at most 200, answered after each "
            "domain and not learnt from. Times: this machine, "
            "a sample's share of its batch, without the encoder's for methods that see features."
        ),
        "",
        f"## All methods, {options.images} digits of each angle",
        "",
        *table(tables["all"]),
        "",
        f"## Methods that take copies of each image, {options.few} digits of each angle",
        "",
        *table(tables["slow"]),
        "",
        f"## Methods that see features, {options.many:,} digits of each angle",
        "",
        *table(tables["features"]),
        "",
        "## The paper's forgetting table",
        "",
        "Accuracy on the source after each domain, 11,667 digits of each angle; ours above are held-out digits.",
        "",
        "| | " + " | ".join(f"after {name}°" for name in TARGETS) + " |",
        "|---|" + "---|" * len(TARGETS),
        *(f"| {name} | " + " | ".join(map(str, values)) + " |" for name, values in PAPER.items()),
        "",
    ]
    return "\n".join(lines)


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """One row for each record: accuracy as met, the source after each domain, time and memory."""
    after = [f"source after {name}°" for name in TARGETS]
    headings = ["method", "batch", *(f"{name}°" for name in TARGETS), "mean", "source before", *after, "ms p50", "MB"]
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---|" * (len(headings) - 1)]
    for record in records:
        first = [record["method"], str(record["batch_size"])]
        if "error" in record:
            lines.append("| " + " | ".join([*first, record["error"], *[""] * (len(headings) - 3)]) + " |")
            continue
        values = [*(record["domains"][name] for name in TARGETS), record["average"], record["source"]["before"]]
        values += [record["source"]["after"][name] for name in TARGETS]
        cells = [f"{value:.1f}" for value in values]
        cells += [f"{record['ms']['p50']:.2f}", f"{record['extra_bytes'] / 1e6:.1f}"]
        lines.append("| " + " | ".join([*first, *cells]) + " |")
    return lines


if __name__ == "__main__":
    main()
