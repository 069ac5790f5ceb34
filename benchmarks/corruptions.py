"""CIFAR-10-C, made here from CIFAR-10: the paper's figures as a table.

``python -m benchmarks.corruptions --data-dir DIR --weights FILE`` meets all fifteen corruptions at severities 1 and 5
with a published ResNet, each from a fresh start. Finished methods are kept; an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from adanpc.adapt import Source
from adanpc.data import read
from adanpc.data.corruptions import CORRUPTIONS
from adanpc.data.streams import Iid
from adanpc.environment import machine
from adanpc.experiments.adaptation import Scene, adapt, some
from adanpc.features import features
from adanpc.models import build

METHODS = (
    "source",
    "knn",
    "bn-adapt",
    "tent",
    "eta",
    "eata",
    "t3a",
    "adanpc",
    "adanpc-bn",
    "adanpc-tent",
    "adanpc-eta",
)
SETTINGS: dict[str, dict[str, Any]] = {
    "eata": {"weight": 1.0},  # as published for CIFAR-10
    "adanpc-tent": {"refresh": 100},  # source rows are made anew once, with batch statistics as the queries are
    "adanpc-eta": {"refresh": 100},
}
SEVERITIES = (1, 5)


def main() -> None:
    """Measures what is missing, then writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/corruptions"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/corruptions.md"))
    parser.add_argument("--images", type=int, default=192, help="of each corruption")
    parser.add_argument("--rows", type=int, default=2000, help="of the bank")
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    results = {severity: measured(severity, options) for severity in SEVERITIES}
    options.out.write_text(report(results, options))


def scene_at(severity: int, options: argparse.Namespace) -> Scene:
    """The published network, rows of CIFAR-10's training images, and every corruption at one severity."""
    model = build("cifar-resnet-56", 10, weights=options.weights).eval()
    cache = options.runs / "features"
    clean, corrupted = read("cifar-10", options.data_dir), read("cifar-10-c", options.data_dir)
    known = some(clean["train"].with_transform(model.preprocessing), options.rows, 0)
    source = Source(model, features(model, known, cache=cache), known.labels, None, known.take, 1e-3)
    names = [f"{corruption}-{severity}" for corruption in CORRUPTIONS]
    targets = [some(corrupted[name].with_transform(model.preprocessing), options.images, 0) for name in names]
    recalled = some(clean["test"].with_transform(model.preprocessing), options.images, 0)
    return Scene(source, tuple(targets), recalled, cache)


def measured(severity: int, options: argparse.Namespace) -> dict[str, Any]:
    """The record of each method at one severity."""
    scene: Scene | None = None
    records = {}
    for method in METHODS:
        kept = options.runs / f"{method}-{severity}-{options.images}.json"
        if not kept.exists():
            scene = scene or scene_at(severity, options)
            torch.manual_seed(0)
            record = adapt(scene, method, Iid(), options.batch, SETTINGS.get(method))
            kept.write_text(json.dumps(record))
            print(method, severity, round(record["average"], 1), flush=True)
        records[method] = json.loads(kept.read_text())
    return records


def report(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> str:
    """The tables in Markdown, error in percent as in the paper's figures."""
    lines = [
        "# CIFAR-10-C made from CIFAR-10, reduced",
        "",
        f"`python -m benchmarks.corruptions` on {machine()}.",
        "",
        (
            f"ResNet-56 with published weights. {options.images} test images of each corruption in batches of "
            f"{options.batch}, a bank of {options.rows:,} training images, each corruption from a fresh start; library "
            f"defaults but for {SETTINGS}; one seed, nothing selected on targets. The images are a JPEG copy of "
            "CIFAR-10, on which the network is far from its published accuracy before any corruption: see clean. "
            "Error in %."
        ),
    ]
    for severity, records in results.items():
        lines += [
            "",
            f"## Severity {severity}",
            "",
            "| | " + " | ".join(records) + " |",
            "|---|" + "---|" * len(records),
        ]
        for corruption in CORRUPTIONS:
            cells = [100 - record["domains"][f"{corruption}-{severity}"] for record in records.values()]
            lines.append(f"| {corruption} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
        means = [100 - record["average"] for record in records.values()]
        lines.append("| **mean** | " + " | ".join(f"**{mean:.1f}**" for mean in means) + " |")
        clean = [100 - record["source"]["before"] for record in records.values()]
        lines.append("| clean | " + " | ".join(f"{cell:.1f}" for cell in clean) + " |")
        times = [record["ms"]["p50"] + record["encoder_ms"] for record in records.values()]
        lines.append("| ms a sample | " + " | ".join(f"{cell:.1f}" for cell in times) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
