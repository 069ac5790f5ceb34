"""The paper's ablation of the training loss on Rotated MNIST, in as many steps as there is time for.

``python -m benchmarks.ablation --data-dir DIR`` trains ERM and the KNN loss with each angle as the target, and answers
the target by the linear head, by a frozen vote and by AdaNPC, with the library's defaults throughout: nothing is
selected on targets. Interrupted, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from adanpc.data.digits import ANGLES
from adanpc.data.streams import Iid
from adanpc.environment import machine
from adanpc.experiments.adaptation import adapt, scene_of
from adanpc.train.assemble import start
from adanpc.train.loop import train
from adanpc.train.run import Run
from adanpc.train.spec import Spec

PAPER = {  # Table "Ablation studies of training loss on Rotated MNIST"
    "ERM": (94.0, 98.1, 98.8, 99.1, 98.9, 96.4),
    "ERM + AdaNPC": (96.6, 98.7, 98.9, 99.1, 98.7, 96.7),
    "KNN loss": (96.1, 98.6, 98.9, 99.1, 98.8, 97.0),
    "KNN loss + AdaNPC": (96.9, 98.8, 99.1, 99.2, 98.9, 98.0),
}
LOSSES = {"erm": "ERM", "knn": "KNN loss"}
METHODS = {"source": " (head)", "knn": "", "adanpc": " + AdaNPC"}


def main() -> None:
    """Trains what is missing, then writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ablation.md"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rows", type=int, default=2000, help="of each source domain in the bank")
    parser.add_argument("--images", type=int, default=2000, help="of the target")
    options = parser.parse_args()
    results = {loss: {angle: measured(loss, str(angle), options) for angle in ANGLES} for loss in LOSSES}
    options.out.write_text(report(results, options))


def measured(loss: str, target: str, options: argparse.Namespace) -> dict[str, Any]:
    """The records of the three methods on one target, after training with one loss."""
    folder = options.runs / f"{loss}-{target}"
    if not (folder / "spec.json").exists():
        spec = Spec("rotated-mnist", (target,), loss, steps=options.steps, batch=options.batch, every=options.steps)
        start(spec, options.data_dir, folder)
    run, kept = Run(folder), folder / "ablation.json"
    if not kept.exists():
        train(run)
        scene = scene_of(run, which="last", images=options.images, rows=options.rows)
        records = {method: adapt(scene, method, Iid(), 64) for method in METHODS}
        kept.write_text(json.dumps({**records, "training": run.records()[-1]}))
        print(loss, target, {method: round(records[method]["average"], 1) for method in METHODS}, flush=True)
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def report(results: dict[str, dict[int, Any]], options: argparse.Namespace) -> str:
    """The table in Markdown, ours beside the paper's."""
    lines = [
        "# Training loss on Rotated MNIST, reduced",
        "",
        f"`python -m benchmarks.ablation` on {machine()}.",
        "",
        (
            f"Full MNIST. Ours: {options.steps} steps with {options.batch} images of each source domain (the paper: "
            "5,000 with 64), one seed, the last step's model, library defaults (k 10, temperature 0.1, confidence "
            f"0.9), at most {options.rows:,} bank rows of each source domain and {options.images:,} target images. "
            "Accuracy in %; nothing was selected on targets."
        ),
        "",
        "| | " + " | ".join(f"{angle}°" for angle in ANGLES) + " | mean |",
        "|---|" + "---|" * (len(ANGLES) + 1),
    ]
    for loss, title in LOSSES.items():
        for method, suffix in METHODS.items():
            values = [results[loss][angle][method]["average"] for angle in ANGLES]
            lines.append(_row(f"{title}{suffix}, ours", values))
            if title + suffix in PAPER:
                lines.append(_row(f"{title}{suffix}, paper", list(PAPER[title + suffix])))
    seconds = sum(results[loss][angle]["training"]["seconds"] for loss in LOSSES for angle in ANGLES)
    return "\n".join([*lines, "", f"Training took {seconds / 60:.0f} minutes in all.", ""])


def _row(name: str, values: list[float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.1f}" for value in [*values, sum(values) / len(values)]) + " |"


if __name__ == "__main__":
    main()
