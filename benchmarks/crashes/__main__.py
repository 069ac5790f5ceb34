"""``python -m benchmarks.crashes``: kills, power cuts and flipped bytes; what is found goes to benchmarks/results.

It ends with an error at the first acknowledged row that is lost, the first change that is there by halves, the first
bank that is not what its changes lead to, and the first altered byte that nobody notices.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from adanpc.lab.environment import machine
from benchmarks.crashes.flips import flips_of_a_closed_bank, flips_of_a_crashed_bank
from benchmarks.crashes.kills import kills_before_lines, kills_under_load
from benchmarks.crashes.power import power_cuts

CUTS_OF_A_LIFE = 100  # the operations of one recorded life are cut at so many places


def main() -> None:
    """Runs what the arguments ask for, and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=700, help="under load, at random moments")
    parser.add_argument("--lines", type=int, default=400, help="kills before chosen lines")
    parser.add_argument("--cuts", type=int, default=500, help="power cuts")
    parser.add_argument("--step", type=int, default=1, help="every how many bytes one is altered")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/crashes.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Crashes of a durable bank",
        "",
        f"`python -m benchmarks.crashes` on {machine()}. It stops where anything is lost, so all of these held.",
        "",
    ]
    for part in (_kills, _lines, _cuts, _flips):
        with TemporaryDirectory() as folder:
            found = part(options, Path(folder))
        print(found, flush=True)
        lines += [f"* {found}"]
    options.out.write_text("\n".join(lines) + "\n")


def _kills(options: argparse.Namespace, place: Path) -> str:
    acknowledged = kills_under_load(options.kills, place)
    return (
        f"**{options.kills:,} kills under load** (SIGKILL at random moments; four threads that ask and judge, a "
        f"snapshot every 20 changes; each process goes on with what the last one left): {acknowledged:,} answers were "
        "acknowledged, 0 lost, 0 by halves, 0 twice; every bank had the digest of an independent replay."
    )


def _lines(options: argparse.Namespace, place: Path) -> str:
    names = kills_before_lines(options.lines, place)
    modules = Counter(name.partition(":")[0] for name in names)
    shown = ", ".join(f"{count} in {module}" for module, count in modules.most_common())
    return (
        f"**{len(names):,} kills before chosen lines** of a life with answers, judgments, snapshots, a rollback, a "
        f"compaction and a close, {len(set(names)):,} different lines, so before and after every write, sync and "
        f"rename ({shown}): nothing acknowledged was lost, and every bank opened, went on, and was the same after a "
        "restart."
    )


def _cuts(options: argparse.Namespace, place: Path) -> str:
    total: Counter[str] = Counter()
    for seed in range(-(-options.cuts // CUTS_OF_A_LIFE)):
        count = min(CUTS_OF_A_LIFE, options.cuts - seed * CUTS_OF_A_LIFE)
        total.update(power_cuts(count, place / str(seed), seed))
    return (
        f"**{options.cuts:,} power cuts** (what was not synced is lost, torn at sectors of 512 bytes, or there out of "
        f"order; names likewise, until their folder is synced): {total['acknowledged']:,} acknowledged answers were "
        f"looked for, 0 lost; every bank opened and had the digest of an independent replay at its position; "
        f"{total['leftovers']:,} times, half a snapshot was left behind."
    )


def _flips(options: argparse.Namespace, place: Path) -> str:
    closed = flips_of_a_closed_bank(place, options.step)
    crashed = flips_of_a_crashed_bank(place, 10 * options.step)
    sizes = ", ".join(f"{count:,} of {name}" for name, count in closed.items())
    after = "; ".join(f"{name}: {seen:,} noticed, {still:,} without effect" for name, (seen, still) in crashed.items())
    return (
        f"**{sum(closed.values()):,} altered bytes** of a bank that was closed ({sizes}): all noticed when it is "
        f"opened or verified. Of one that was not, every tenth byte ({after}; without effect means that SQLite reads "
        "the same rows, and the bank has the same digest)."
    )


if __name__ == "__main__":
    main()
