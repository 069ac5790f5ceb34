"""The claims of the paper's theory, each checked against simulation records and summed up in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, hypot
from typing import Any

from adanpc.lab.show.exhibit import value
from adanpc.lab.theory.readings import Group, Reading, Record, bound, by, divergence, excess, mean

NAMED_AT_MOST = 3  # contradictions that a sentence lists
# Standard errors beyond which a difference counts. With eight seeds, chance exceeds this in one of 50 comparisons.
SURE = 3.0

SUPPORTED = 1
UNDECIDED = 0
CONTRADICTED = -1

Judge = Callable[[Group], int]


@dataclass(frozen=True)
class Claim:
    """A statement that groups of records can contradict.

    Args:
        reference: where the paper makes the claim.
        statement: what the paper says.
        judge: decides whether a group of records supports the claim, contradicts it, or leaves it undecided.
        applies: selects the records that the claim is about.
        sweep: the sweep whose records, of all sizes, form one group; by default a group is one setting with all its
            seeds.
        vote: the vote whose mean excess error is quoted in addition to that of the source vote, if any.
    """

    reference: str
    statement: str
    judge: Judge
    applies: Callable[[Record], bool] = lambda record: True
    sweep: str = ""
    vote: str = ""


def never_above(lower: Reading, upper: Reading) -> Judge:
    """Returns a judge: a group supports if one reading is at most the other in every record, else it contradicts."""

    def judge(group: Group) -> int:
        if all(lower(record) <= upper(record) for record in group):
            return SUPPORTED
        return CONTRADICTED

    return judge


def lowered(less: Reading, more: Reading) -> Judge:
    """Returns a judge: a group supports if one reading is clearly below the other on average."""

    def judge(group: Group) -> int:
        difference = mean(group, lambda record: more(record) - less(record))
        return _judge_difference(difference.mean, difference.error)

    return judge


def _judge_difference(difference: float, error: float | None) -> int:
    """Returns the verdict on a difference: supported if it is positive, undecided if it may be due to chance.

    Args:
        difference: the measured difference.
        error: its standard error; None if it is unknown, which leaves every difference undecided.
    """
    is_sure = error is not None and abs(difference) > SURE * error
    if not is_sure:
        return UNDECIDED
    return SUPPORTED if difference > 0 else CONTRADICTED


def _judge_tighter(group: Group) -> int:
    """Judges whether the bound with target rows is below the one without; both are the same for every seed."""
    first = group[0]
    # An error of 0: the bounds are exact, so that every difference counts.
    return _judge_difference(bound("2")(first) - bound("3 half")(first), error=0.0)


def _judge_tradeoff(group: Group) -> int:
    """Judges whether the smallest mean excess error is neither at the smallest nor at the largest k."""
    by_k = by(group, lambda record: int(record["k"]))
    if len(by_k) < 3:
        return UNDECIDED
    best = _least(by_k, excess("source"))
    return SUPPORTED if min(by_k) < best < max(by_k) else CONTRADICTED


def _judge_vanishing(group: Group) -> int:
    """Judges whether the excess error at the largest n_s is below that at the smallest."""
    by_n_s = by(group, lambda record: int(record["n_s"]))
    few_rows = mean(by_n_s[min(by_n_s)], excess("source"))
    many_rows = mean(by_n_s[max(by_n_s)], excess("source"))
    error = None
    if few_rows.error is not None and many_rows.error is not None:
        error = hypot(few_rows.error, many_rows.error)
    return _judge_difference(few_rows.mean - many_rows.mean, error)


def _least(groups: dict[int, list[Record]], read: Reading) -> int:
    """Returns the key of the group with the smallest mean."""
    return min(groups, key=lambda key: mean(groups[key], read).mean)


def _has_posterior_shift(record: Record) -> bool:
    """Returns whether eta differs between source and target."""
    return bool(record["problem"]["gap"] > 0)


def _has_covariate_shift(record: Record) -> bool:
    """Returns whether source and target have different densities."""
    return bool(record["problem"]["overlap"] < 1)


def _is_about_source_rows(record: Record) -> bool:
    """Returns whether a record is not of the sweep over target rows, in which readings of source rows would repeat."""
    return bool(record["sweep"] != "n_u")


def _helps(vote: str, words: str) -> tuple[Claim, ...]:
    """Returns the claims that target rows lower the excess error of a vote, without and with posterior shift."""
    judge = lowered(excess(vote), excess("source"))

    def claim(posterior_shift: bool, setting: str) -> Claim:
        def applies(record: Record) -> bool:
            return record["n_u"] > 0 and _has_posterior_shift(record) == posterior_shift

        statement = f"target rows lower the excess error ({words}), {setting}"
        return Claim("Proposition 3", statement, judge, applies, vote=vote)

    return claim(False, "same eta"), claim(True, "posterior shift")


CLAIMS = (
    Claim(
        "Proposition 1",
        "the k-th source neighbor lies within r_0, for a share of queries of at least 1 - exp(-k/4)",
        never_above(lambda record: 1 - exp(-record["k"] / 4), divergence("within")),
        _is_about_source_rows,
    ),
    Claim(
        "Proposition 1",
        "the target error is at most kappa + error on Omega + 2 L r_0",
        never_above(divergence("error"), divergence("bound")),
        _is_about_source_rows,
    ),
    Claim(
        "Proposition 1",
        "r_0 improves on the Wasserstein distance W(D_S, D_U) that it replaces, covariate shift",
        never_above(divergence("radius"), divergence("wasserstein")),
        lambda record: _is_about_source_rows(record) and _has_covariate_shift(record),
    ),
    Claim(
        "Proposition 1",
        "r_0 improves on the Wasserstein distance W(D_S, D_U) that it replaces, no covariate shift (W = 0)",
        never_above(divergence("radius"), divergence("wasserstein")),
        lambda record: _is_about_source_rows(record) and not _has_covariate_shift(record),
    ),
    Claim(
        "Proposition 2",
        "the excess error is at most the bound",
        never_above(excess("source"), bound("2")),
        _is_about_source_rows,
    ),
    Claim(
        "Proposition 2, does it say anything",
        "the bound is below the error of answering every query wrongly",
        never_above(bound("2"), lambda record: float(record["worst"])),
        _is_about_source_rows,
    ),
    Claim(
        "Proposition 2, remark 2",
        "neither the smallest nor the largest k is best",
        _judge_tradeoff,
        sweep="k",
    ),
    Claim(
        "Proposition 2, remark 1",
        "with k = O(log n_s) and the same eta, more source rows lower the excess error",
        _judge_vanishing,
        lambda record: not _has_posterior_shift(record),
        sweep="n_s",
    ),
    Claim(
        "Proposition 3",
        "the excess error is at most the bound",
        never_above(excess("split"), bound("3")),
    ),
    Claim(
        "Proposition 3",
        "the bound is tighter than without target rows where c_mu* > c_mu (half of the neighbors from each)",
        _judge_tighter,
        lambda record: record["n_u"] > 0 and _has_covariate_shift(record),
    ),
    Claim(
        "Proposition 3",
        "the bound is tighter than without target rows where c_mu* = c_mu (half of the neighbors from each)",
        _judge_tighter,
        lambda record: record["n_u"] > 0 and not _has_covariate_shift(record),
    ),
    *_helps("joint", "the k nearest of all rows, labels drawn from eta_U"),
    *_helps("split", "the best split, labels drawn from eta_U"),
    *_helps("half", "half of the neighbors from each, labels drawn from eta_U"),
    *_helps("joint pseudo", "the k nearest of all rows, labels by the source vote"),
    *_helps("split pseudo", "the best split, labels by the source vote"),
    *_helps("half pseudo", "half of the neighbors from each, labels by the source vote"),
)


def findings(records: Iterable[Record]) -> tuple[str, ...]:
    """Returns a sentence for every claim that the records are about, for the best k, and on a premise of Proposition 3.

    A setting that occurs in several sweeps is counted once.
    """
    records = list(records)
    sentences: list[str] = []
    for claim in CLAIMS:
        groups = _groups(claim, records)
        if groups:
            sentences.append(_verdict(claim, groups))
    over_k = [record for record in records if record["sweep"] == "k"]
    sentences += [_best_k(group) for group in by(over_k, _problem).values()]
    bias = value([record["pseudo_bias"] for record in records if record["pseudo_bias"] is not None])
    if bias is not None:
        sentences.append(
            "Proposition 3 assumes that the label of a target row has mean eta_U; given the bank, the source vote's "
            f"label differs from eta_U by {bias.mean:.2f} on average over {bias.count} runs."
        )
    return tuple(sentences)


def _best_k(group: Group) -> str:
    """Returns a sentence about the k with the smallest error and the k with the smallest bound."""
    by_k = by(group, lambda record: int(record["k"]))
    least_error = _least(by_k, excess("source"))
    least_bound = _least(by_k, bound("2"))
    return (
        f"Proposition 2: of all k, {least_error} had the least excess error and {least_bound} the least bound "
        f"({_setting_name(group[0], with_sizes=False)})."
    )


def _verdict(claim: Claim, groups: Sequence[Group]) -> str:
    """Returns a sentence about how many groups support a claim and which contradict it."""
    verdicts = [claim.judge(group) for group in groups]
    unit = f"sweeps over {claim.sweep}" if claim.sweep else "settings"
    text = f"{claim.reference}: “{claim.statement}” held in {verdicts.count(SUPPORTED)} of {len(groups)} {unit}"
    undecided = verdicts.count(UNDECIDED)
    if undecided:
        text += f", undecided in {undecided}"
    contradicting = [group for group, verdict in zip(groups, verdicts, strict=True) if verdict == CONTRADICTED]
    if contradicting:
        names = [_setting_name(group[0], with_sizes=not claim.sweep) for group in contradicting[:NAMED_AT_MOST]]
        if len(contradicting) > NAMED_AT_MOST:
            names.append("…")
        text += f", CONTRADICTED in {len(contradicting)} ({'; '.join(names)})"
    if claim.vote:
        every_record = list(chain.from_iterable(groups))
        with_rows = mean(every_record, excess(claim.vote)).mean
        without_rows = mean(every_record, excess("source")).mean
        text += f"; over all, it was {with_rows:.4f} with them and {without_rows:.4f} without"
    return text + "."


def _setting_name(record: Record, with_sizes: bool) -> str:
    """Returns the shift and the dimension of a record and, unless a sweep varies them, its sizes."""
    parts = [f"shift: {record['shift']}", f"d = {record['problem']['dim']}"]
    if with_sizes:
        parts += [f"{name} = {record[name]}" for name in ("k", "n_s", "n_u")]
    return ", ".join(parts)


def _groups(claim: Claim, records: Group) -> list[Group]:
    """Returns the records that a claim is about, in groups that each give one verdict."""
    relevant = [record for record in records if claim.applies(record)]
    if claim.sweep:
        swept = [record for record in relevant if record["sweep"] == claim.sweep]
        return list(by(swept, _problem).values())
    # Sweeps share settings, so the same draw may be recorded several times: keep one of each.
    unique = {(*_setting(record), record["seed"]): record for record in relevant}
    return list(by(unique.values(), _setting).values())


def _problem(record: Record) -> tuple[Any, ...]:
    """Returns the parameters of a record's problem."""
    return tuple(record["problem"].values())


def _setting(record: Record) -> tuple[Any, ...]:
    """Returns all that decides a record but its seed."""
    return (*_problem(record), record["k"], record["n_s"], record["n_u"], record["queries"])
