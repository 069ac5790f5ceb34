"""What the paper's theory claims, held against records of simulations: a sentence for each claim."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, hypot
from typing import Any

from adanpc.lab.show.exhibit import value
from adanpc.lab.theory.readings import Group, Reading, Record, bound, by, divergence, excess, mean

SHOWN = 3  # contradictions that a sentence names
SURE = 3.0  # standard errors; with eight seeds, chance alone goes beyond in one of 50 comparisons


@dataclass(frozen=True)
class Claim:
    """A statement that groups of records can contradict.

    Args:
        source: where the paper makes it.
        says: the statement.
        judge: 1 where a group supports it, -1 where it contradicts it, 0 where it decides nothing.
        applies: which records speak of it.
        sweep: the sweep whose records, all sizes together, are one group; by default a group is one setting, all its
            seeds together.
        vote: whose mean excess error over all records is told beside that of the source vote, if any.
    """

    source: str
    says: str
    judge: Callable[[Group], int]
    applies: Callable[[Record], bool] = lambda record: True
    sweep: str = ""
    vote: str = ""


def never_above(lower: Reading, upper: Reading) -> Callable[[Group], int]:
    """Judges by every record alone."""
    return lambda group: 1 if all(lower(record) <= upper(record) for record in group) else -1


def lowered(less: Reading, more: Reading) -> Callable[[Group], int]:
    """Judges by the mean difference over seeds, if it is sure; a single seed never is."""

    def judge(group: Group) -> int:
        found = mean(group, lambda record: more(record) - less(record))
        return _sign(found.mean, found.error)

    return judge


def _sign(difference: float, error: float | None) -> int:
    sure = error is not None and abs(difference) > SURE * error
    return (difference > 0) - (difference < 0) if sure else 0


def _tighter(group: Group) -> int:
    """Whether the bound with target rows is below that without; both are the same for every seed."""
    return _sign(bound("2")(group[0]) - bound("3 half")(group[0]), 0.0)


def _tradeoff(group: Group) -> int:
    """Whether the least mean excess error is neither at the smallest nor at the largest k."""
    errors = by(group, lambda record: int(record["k"]))
    if len(errors) < 3:
        return 0
    best = min(errors, key=lambda k: mean(errors[k], excess("source")).mean)
    return 1 if min(errors) < best < max(errors) else -1


def _vanishes(group: Group) -> int:
    """Whether the excess error at the largest n_s is below that at the smallest, if the difference is sure."""
    sizes = by(group, lambda record: int(record["n_s"]))
    first, last = (mean(sizes[pick(sizes)], excess("source")) for pick in (min, max))
    alone = first.error is None or last.error is None
    return _sign(first.mean - last.mean, None if alone else hypot(first.error or 0.0, last.error or 0.0))


def _posterior(record: Record) -> bool:
    return bool(record["problem"]["gap"] > 0)


def _covariate(record: Record) -> bool:
    return bool(record["problem"]["overlap"] < 1)


def _source_alone(record: Record) -> bool:
    """What does not ask target rows is the same all along a sweep over them."""
    return bool(record["sweep"] != "n_u")


def _helps(vote: str, words: str) -> tuple[Claim, ...]:
    """That target rows lower the excess error of a vote, without and with posterior shift."""
    judge = lowered(excess(vote), excess("source"))

    def claim(posterior: bool, setting: str) -> Claim:
        def applies(record: Record) -> bool:
            return record["n_u"] > 0 and _posterior(record) == posterior

        says = f"target rows lower the excess error ({words}), {setting}"
        return Claim("Proposition 3", says, judge, applies, vote=vote)

    return claim(False, "same eta"), claim(True, "posterior shift")


CLAIMS = (
    Claim(
        "Proposition 1",
        "the k-th source neighbor lies within r_0, for a share of queries of at least 1 - exp(-k/4)",
        never_above(lambda record: 1 - exp(-record["k"] / 4), divergence("within")),
        _source_alone,
    ),
    Claim(
        "Proposition 1",
        "the target error is at most kappa + error on Omega + 2 L r_0",
        never_above(divergence("error"), divergence("bound")),
        _source_alone,
    ),
    Claim(
        "Proposition 1",
        "r_0 improves on the Wasserstein distance W(D_S, D_U) that it replaces, covariate shift",
        never_above(divergence("radius"), divergence("wasserstein")),
        lambda record: _source_alone(record) and _covariate(record),
    ),
    Claim(
        "Proposition 1",
        "r_0 improves on the Wasserstein distance W(D_S, D_U) that it replaces, no covariate shift (W = 0)",
        never_above(divergence("radius"), divergence("wasserstein")),
        lambda record: _source_alone(record) and not _covariate(record),
    ),
    Claim(
        "Proposition 2",
        "the excess error is at most the bound",
        never_above(excess("source"), bound("2")),
        _source_alone,
    ),
    Claim(
        "Proposition 2, does it say anything",
        "the bound is below the error of answering every query wrongly",
        never_above(bound("2"), lambda record: float(record["worst"])),
        _source_alone,
    ),
    Claim("Proposition 2, remark 2", "neither the smallest nor the largest k is best", _tradeoff, sweep="k"),
    Claim(
        "Proposition 2, remark 1",
        "with k = O(log n_s) and the same eta, more source rows lower the excess error",
        _vanishes,
        lambda record: not _posterior(record),
        sweep="n_s",
    ),
    Claim("Proposition 3", "the excess error is at most the bound", never_above(excess("split"), bound("3"))),
    Claim(
        "Proposition 3",
        "the bound is tighter than without target rows where c_mu* > c_mu (half of the neighbors from each)",
        _tighter,
        lambda record: record["n_u"] > 0 and _covariate(record),
    ),
    Claim(
        "Proposition 3",
        "the bound is tighter than without target rows where c_mu* = c_mu (half of the neighbors from each)",
        _tighter,
        lambda record: record["n_u"] > 0 and not _covariate(record),
    ),
    *_helps("joint", "the k nearest of all rows, labels drawn from eta_U"),
    *_helps("split", "the best split, labels drawn from eta_U"),
    *_helps("half", "half of the neighbors from each, labels drawn from eta_U"),
    *_helps("joint pseudo", "the k nearest of all rows, labels by the source vote"),
    *_helps("split pseudo", "the best split, labels by the source vote"),
    *_helps("half pseudo", "half of the neighbors from each, labels by the source vote"),
)


def findings(records: Iterable[Record]) -> tuple[str, ...]:
    """A sentence for every claim that the records speak of, the best k, and the labels that Proposition 3 assumes.

    A setting that several sweeps share is counted once.
    """
    records = list(records)
    told = [_told(claim, groups) for claim in CLAIMS if (groups := _groups(claim, records))]
    sweeps = by((record for record in records if record["sweep"] == "k"), _problem).values()
    told += [_best_k(group) for group in sweeps]
    if (bias := value([each["pseudo_bias"] for each in records if each["pseudo_bias"] is not None])) is not None:
        told.append(
            "Proposition 3 assumes that the label of a target row has mean eta_U; given the bank, the source vote's "
            f"label differs from eta_U by {bias.mean:.2f} on average over {bias.count} runs."
        )
    return tuple(told)


def _best_k(group: Group) -> str:
    sizes = by(group, lambda record: record["k"])
    best, least = (min(sizes, key=lambda k: mean(sizes[k], read).mean) for read in (excess("source"), bound("2")))
    where = _name(group[0], "k")
    return f"Proposition 2: of all k, {best} had the least excess error and {least} the least bound ({where})."


def _told(claim: Claim, groups: Sequence[Group]) -> str:
    verdicts = [claim.judge(group) for group in groups]
    unit = f"sweeps over {claim.sweep}" if claim.sweep else "settings"
    text = f"{claim.source}: “{claim.says}” held in {verdicts.count(1)} of {len(groups)} {unit}"
    if verdicts.count(0):
        text += f", undecided in {verdicts.count(0)}"
    against = [_name(group[0], claim.sweep) for group, verdict in zip(groups, verdicts, strict=True) if verdict < 0]
    if against:
        more = ["…"] if len(against) > SHOWN else []
        text += f", CONTRADICTED in {len(against)} ({'; '.join(against[:SHOWN] + more)})"
    if claim.vote:
        after, before = (mean(list(chain(*groups)), excess(vote)).mean for vote in (claim.vote, "source"))
        text += f"; over all, it was {after:.4f} with them and {before:.4f} without"
    return text + "."


def _name(record: Record, sweep: str) -> str:
    sizes = [f"{name} = {record[name]}" for name in ("k", "n_s", "n_u") if not sweep]
    return ", ".join([f"shift: {record['shift']}", f"d = {record['problem']['dim']}", *sizes])


def _groups(claim: Claim, records: Group) -> list[Group]:
    apt = [each for each in records if claim.applies(each) and claim.sweep in ("", each["sweep"])]
    if claim.sweep:
        return list(by(apt, _problem).values())
    once = {(*_setting(record), record["seed"]): record for record in apt}
    return list(by(once.values(), _setting).values())


def _problem(record: Record) -> tuple[Any, ...]:
    return tuple(record["problem"].values())


def _setting(record: Record) -> tuple[Any, ...]:
    return (*_problem(record), record["k"], record["n_s"], record["n_u"], record["queries"])
