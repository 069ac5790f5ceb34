"""check_replay: whether changes are the whole truth about a classifier."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adanpc.core import AdaNPC, Append, Change, Delete, Feedback, Origin, Relabel, Restore, Veto, replay
from adanpc.core.codec import decode, encode

QUERIES = 200  # answered in the end, by the classifier and by what its changes were replayed to


def check_replay(make: Callable[[], AdaNPC], seed: int = 0) -> None:
    """Asserts that replaying a classifier's changes gives the same classifier.

    A stream with everything that can happen is met: source rows in two domains, batches of queries, an expert's row,
    vetoes, restorations, corrections, deletions and a rollback. Then all changes, and what is left of them after
    any of several cuts, are replayed on an empty classifier, as they are and through bytes. Digests, positions, and
    200 later answers must be the same to the bit.

    Args:
        make: gives an empty classifier, with the same settings each time (and so with a ``seed`` where rows are
            evicted at random).
        seed: of the features.
    """
    classifier = make()
    changes = _life(classifier, seed)
    assert classifier.position == len(changes), "every applied change must advance the position by one"
    queries = _features(torch.Generator().manual_seed(seed + 1), QUERIES, classifier)
    expected = _answers(classifier, queries)
    for name, replayed in (("changes", changes), ("bytes", [decode(encode(change)) for change in changes])):
        _check_same(f"replaying {name}", replay(replayed, make()), classifier, queries, expected)
    for cut in sorted({0, 1, len(changes) // 3, len(changes) // 2, len(changes) - 1}):
        early = replay(changes[:cut], make())
        resumed = AdaNPC.load(early.state())
        assert resumed.digest() == early.digest(), f"a state taken after {cut} changes is not that of the classifier"
        _check_same(
            f"going on from the state after {cut} changes",
            replay(changes[cut:], resumed),
            classifier,
            queries,
            expected,
        )


def _life(classifier: AdaNPC, seed: int) -> list[Change]:
    """Lets a classifier meet everything, and returns the changes that it went through."""
    generator = torch.Generator().manual_seed(seed)
    bank = classifier.bank
    changes: list[Change] = []

    def carry_out(change: Change | None) -> range:
        if change is None:
            return range(0)
        changes.append(change)
        return classifier.apply(change)

    def meet(count: int) -> None:
        _, change = classifier.propose(_features(generator, count, classifier), domain=5)
        carry_out(change)

    labels = torch.arange(30) % bank.classes
    carry_out(Append(_features(generator, 30, classifier), labels, domain=torch.arange(30) % 2, keys=torch.arange(30)))
    meet(20)
    carry_out(Veto((0, 3), "Ada", "blurred", 1.5))
    meet(1)
    earlier = bank.contents
    carry_out(Append(_features(generator, 1, classifier), labels[:1], Origin.EXPERT, who="Ada", when=2.0))
    carry_out(Relabel((1,), bank.classes - 1, "Ada", "it is the other one", 3.0))
    meet(15)
    joined = _joined(classifier)
    carry_out(Veto(tuple(joined[:4]), "Ada", "all wrong"))
    meet(15)
    if classifier.preset == "safe":
        for _ in range(4):  # as many labels as decide
            carry_out(Feedback(0, frozen=1, adapted=0, who="Ada", why="a label", when=4.0))
    carry_out(Restore(tuple(row for row in joined[:2] if row in bank.vetoes), "Bob", "they are right"))
    carry_out(Relabel(tuple(_joined(classifier)[:1]), 0, "Bob"))
    carry_out(Delete((2, *_joined(classifier)[-1:]), "Bob", "asked for by a patient"))
    meet(10)
    carry_out(classifier.rollback(earlier, who="guard", why="a test", when=9.0))
    meet(25)
    return changes


def _joined(classifier: AdaNPC) -> list[int]:
    """The ids of admitted rows that are held."""
    table = classifier.bank.table("id", "origin")
    ids: list[int] = table["id"][table["origin"] == Origin.ADMITTED].tolist()
    return ids


def _features(generator: torch.Generator, count: int, classifier: AdaNPC) -> Tensor:
    """Features around one center for each class, so that some answers are confident and some are not."""
    bank = classifier.bank
    centers = torch.randn(bank.classes, bank.dim, generator=torch.Generator().manual_seed(17))
    near = torch.randint(0, bank.classes, (count,), generator=generator)
    return centers[near] + 0.6 * torch.randn(count, bank.dim, generator=generator)


def _answers(classifier: AdaNPC, queries: Tensor) -> list[Tensor]:
    """All that a classifier says of queries as if each came next."""
    answer = classifier.predict(queries)
    return [answer.probs, answer.weights, answer.neighbors.ids, answer.neighbors.similarity, answer.neighbors.labels]


def _check_same(how: str, made: AdaNPC, wanted: AdaNPC, queries: Tensor, expected: list[Tensor]) -> None:
    assert made.digest() == wanted.digest(), f"{how} gives another digest"
    assert made.position == wanted.position, f"{how} gives another position"
    for ours, theirs in zip(_answers(made, queries), expected, strict=True):
        assert torch.equal(ours, theirs), f"{how} gives other answers"
