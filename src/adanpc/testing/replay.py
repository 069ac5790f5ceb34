"""check_replay: whether replaying a classifier's changes gives the same classifier."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adanpc.core import AdaNPC, Append, Change, Delete, Feedback, Origin, Relabel, Restore, Veto, replay
from adanpc.core.codec import decode, encode

QUERIES = 200  # how many queries the classifier and its replayed copies must answer alike in the end


def check_replay(make: Callable[[], AdaNPC], seed: int = 0) -> None:
    """Asserts that replaying a classifier's changes gives the same classifier.

    The classifier goes through everything that can happen: source rows in two domains, batches of queries, an expert's
    row, vetoes, restorations, corrections, deletions and a rollback. Then its changes are replayed on an empty
    classifier, as they are, decoded from bytes, and continuing from states that were saved after some of them. Digests,
    positions and 200 later answers must be the same to the bit.

    Args:
        make: returns an empty classifier, with the same settings each time (including a ``seed``, if rows are evicted
            at random).
        seed: seed of the features.
    """
    classifier = make()
    changes = _live(classifier, seed)
    assert classifier.position == len(changes), "every applied change must advance the position by one"
    queries = _features(torch.Generator().manual_seed(seed + 1), QUERIES, classifier)
    expected = _answers(classifier, queries)
    decoded = [decode(encode(change)) for change in changes]
    for name, replayed in (("changes", changes), ("bytes", decoded)):
        copy = replay(replayed, make())
        _check_same(f"replaying {name}", copy, classifier, queries, expected)
    for cut in sorted({0, 1, len(changes) // 3, len(changes) // 2, len(changes) - 1}):
        early = replay(changes[:cut], make())
        resumed = AdaNPC.load(early.state())
        assert resumed.digest() == early.digest(), f"the state after {cut} changes is not that of the classifier"
        copy = replay(changes[cut:], resumed)
        _check_same(f"continuing from the state after {cut} changes", copy, classifier, queries, expected)


def _live(classifier: AdaNPC, seed: int) -> list[Change]:
    """Puts a classifier through everything that can happen, and returns the changes."""
    generator = torch.Generator().manual_seed(seed)
    bank = classifier.bank
    changes: list[Change] = []

    def apply(change: Change | None) -> None:
        if change is not None:
            changes.append(change)
            classifier.apply(change)

    def answer(count: int) -> None:
        queries = _features(generator, count, classifier)
        _, change = classifier.propose(queries, domain=5)
        apply(change)

    labels = torch.arange(30) % bank.classes
    features = _features(generator, 30, classifier)
    apply(Append(features, labels, domain=torch.arange(30) % 2, keys=torch.arange(30)))
    answer(20)
    apply(Veto((0, 3), "Ada", "blurred", 1.5))
    answer(1)
    earlier = bank.contents
    apply(Append(_features(generator, 1, classifier), labels[:1], Origin.EXPERT, who="Ada", when=2.0))
    apply(Relabel((1,), bank.classes - 1, "Ada", "it is the other one", 3.0))
    answer(15)
    joined = _joined(classifier)
    apply(Veto(tuple(joined[:4]), "Ada", "all wrong"))
    answer(15)
    if classifier.preset == "safe":
        for _ in range(4):  # four labels decide which kind of answer is given
            apply(Feedback(0, frozen=1, adapted=0, who="Ada", why="a label", when=4.0))
    still_vetoed = [row for row in joined[:2] if row in bank.vetoes]
    apply(Restore(tuple(still_vetoed), "Bob", "they are right"))
    apply(Relabel(tuple(_joined(classifier)[:1]), 0, "Bob"))
    apply(Delete((2, *_joined(classifier)[-1:]), "Bob", "asked for by a patient"))
    answer(10)
    apply(classifier.rollback(earlier, who="guard", why="a test", when=9.0))
    answer(25)
    return changes


def _joined(classifier: AdaNPC) -> list[int]:
    """The ids of all admitted rows."""
    table = classifier.bank.table("id", "origin")
    admitted = table["origin"] == Origin.ADMITTED
    ids: list[int] = table["id"][admitted].tolist()
    return ids


def _features(generator: torch.Generator, count: int, classifier: AdaNPC) -> Tensor:
    """Features around one center for each class, so that some answers are confident and some are not."""
    bank = classifier.bank
    centers = torch.randn(bank.classes, bank.dim, generator=torch.Generator().manual_seed(17))
    labels = torch.randint(0, bank.classes, (count,), generator=generator)
    noise = torch.randn(count, bank.dim, generator=generator)
    return centers[labels] + 0.6 * noise


def _answers(classifier: AdaNPC, queries: Tensor) -> list[Tensor]:
    """Everything in the answers that a classifier would give to these queries next."""
    answer = classifier.predict(queries)
    near = answer.neighbors
    return [answer.probs, answer.weights, near.ids, near.similarity, near.labels]


def _check_same(how: str, copy: AdaNPC, original: AdaNPC, queries: Tensor, expected: list[Tensor]) -> None:
    """Asserts that a copy, made as ``how`` says, equals the original and gives the expected answers."""
    assert copy.digest() == original.digest(), f"{how} gives another digest"
    assert copy.position == original.position, f"{how} gives another position"
    for found, wanted in zip(_answers(copy, queries), expected, strict=True):
        assert torch.equal(found, wanted), f"{how} gives other answers"
