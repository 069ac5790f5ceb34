"""Simulated votes on problems with known probabilities: excess errors and bounds, as plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil, log
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adanpc import require
from adanpc.core import Append, MemoryBank, Neighbors, Origin
from adanpc.errors import AdaNPCError
from adanpc.lab.theory.bounds import (
    Array,
    Problem,
    best_split,
    failure,
    proposition_1,
    proposition_2,
    proposition_3,
    radius,
)

Answers = npt.NDArray[np.bool_]
SHIFTS: dict[str, dict[str, float]] = {
    "none": {},
    "covariate": {"overlap": 0.1},
    "posterior": {"gap": 0.2},
    "both": {"overlap": 0.1, "gap": 0.2},
}

# The values that stay fixed in sweeps over another size. k is odd where possible, so that few votes are tied.
N_S = 2000
N_U = 500
K = 15

# Each seed has a separate stream of random numbers for each kind of draw. So the number of rows of one kind does not
# change what is drawn for the others.
SOURCE_POINTS = 0
TARGET_POINTS = 1
QUERY_POINTS = 2
SOURCE_LABELS = 3
TARGET_LABELS = 4
CHOSEN_NEIGHBORS = 5


@dataclass(frozen=True)
class Size:
    """The values that a plan sweeps over, and how often they are repeated."""

    dims: tuple[int, ...]
    k: tuple[int, ...]
    n_s: tuple[int, ...]
    n_u: tuple[int, ...]
    queries: int
    seeds: int


SCALES = {
    "reduced": Size(
        dims=(2,),
        k=(1, 5, 15, 45, 135, 405, 1215),
        n_s=(125, 500, 2000, 8000),
        n_u=(0, 30, 125, 500, 2000),
        queries=400,
        seeds=8,
    ),
    "full": Size(
        dims=(2, 8),
        k=(1, 3, 5, 9, 15, 25, 45, 75, 135, 235, 405, 705, 1215),
        n_s=(125, 250, 500, 1000, 2000, 4000, 8000, 16000, 32000),
        n_u=(0, 30, 60, 125, 250, 500, 1000, 2000, 4000, 8000),
        queries=2000,
        seeds=30,
    ),
}


def plan(scale: str) -> list[dict[str, Any]]:
    """Returns the parameters of every simulation of a scale: sweeps over k, n_s and n_u, for each shift and seed.

    In the sweep over n_s, k is ln n_s rounded up to an odd number, as Proposition 2 requires; in the others the values
    that are not swept are fixed.
    """
    size = SCALES[require.one_of("scale", scale, SCALES)]
    settings: list[dict[str, Any]] = []
    for k in size.k:
        settings.append({"sweep": "k", "k": k, "n_s": N_S, "n_u": N_U})
    for n_s in size.n_s:
        settings.append({"sweep": "n_s", "k": _odd_logarithm(n_s), "n_s": n_s, "n_u": N_U})
    for n_u in size.n_u:
        settings.append({"sweep": "n_u", "k": K, "n_s": N_S, "n_u": n_u})
    entries = []
    for dim in size.dims:
        for shift in SHIFTS.values():
            problem = {"dim": dim, **shift}
            for setting in settings:
                for seed in range(size.seeds):
                    entries.append({**setting, "problem": dict(problem), "queries": size.queries, "seed": seed})
    return entries


def _odd_logarithm(count: int) -> int:
    """Returns the natural logarithm, rounded up to an odd number."""
    rounded = ceil(log(count))
    return rounded if rounded % 2 == 1 else rounded + 1


def measure(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of one entry of a plan: the result of ``simulate``, and the sweep that it belongs to."""
    arguments = dict(parameters)
    sweep = arguments.pop("sweep")
    problem = Problem(**arguments.pop("problem"))
    return {"sweep": sweep, **simulate(problem, **arguments)}


def simulate(problem: Problem, k: int, n_s: int, n_u: int, queries: int, seed: int) -> dict[str, Any]:
    """Draws rows and queries once, and returns the excess error of every vote and the value of every bound.

    Rows are stored in a ``MemoryBank`` and found by its search. Every neighbor counts 1/k, and class 1 wins with half
    of the votes. The same seed draws the same first rows and queries, whatever their number, so settings can be
    compared pairwise.

    The votes are: ``source``, of the k nearest source rows; ``joint``, of the k nearest of all rows; ``split``, with
    the k_s and k_u that have the smallest bound of Proposition 3; and ``half``, of (k + 1) // 2 source rows and k // 2
    target rows. Target labels are drawn from eta_U, as Proposition 3 assumes. In the votes called ``… pseudo`` they are
    the answers of the source vote instead, which is what the method stores (here for every row, confident or not).
    ``pseudo_bias`` is the mean distance of such labels from eta_U.

    Args:
        problem: the two domains.
        k: how many neighbors vote.
        n_s: the number of source rows.
        n_u: the number of target rows.
        queries: the number of new target points to answer.
        seed: decides every random draw.
    """
    if not 1 <= k <= n_s:
        raise AdaNPCError(f"k must be from 1 to {n_s}, the number of source rows, got {k}")
    scene = _Scene(problem, n_s, n_u, queries, seed)
    known = problem.assumptions
    k_s, k_u = best_split(k, n_s, n_u, known)
    half_u = min(k // 2, n_u)
    half_s = k - half_u
    near = scene.search(scene.queries, k, source=True)
    pseudo_labels = _majority(scene.search(scene.target, k, source=True).labels)
    answers = _answers(scene, near, pseudo_labels, {"split": (k_s, k_u), "half": (half_s, half_u)})
    excess = {vote: problem.excess(scene.queries, answer) for vote, answer in answers.items()}
    margins = np.abs(2 * problem.target_probability(scene.queries) - 1)  # what a wrong answer adds to the error
    pseudo_bias = None
    if n_u > 0:
        pseudo_bias = float(np.mean(np.abs(pseudo_labels - problem.target_probability(scene.target))))
    return {
        "k": k,
        "n_s": n_s,
        "n_u": n_u,
        "k_s": k_s,
        "k_u": k_u,
        "shift": problem.shift,
        "problem": asdict(problem),
        "queries": queries,
        "seed": seed,
        "excess": excess,
        "worst": float(np.mean(margins)),
        "bound": {
            "2": proposition_2(k, n_s, known),
            "3": proposition_3(k_s, k_u, n_s, n_u, known),
            "3 half": proposition_3(half_s, half_u, n_s, n_u, known),
        },
        "failure": failure(k),
        "divergence": _divergence(scene, near, excess["source"]),
        "pseudo_bias": pseudo_bias,
    }


def _answers(
    scene: _Scene, source: Neighbors, pseudo_labels: Answers, splits: Mapping[str, tuple[int, int]]
) -> dict[str, Answers]:
    """Returns the answers (queries,) of every vote, by name.

    Args:
        scene: rows and queries.
        source: the k nearest source rows of each query.
        pseudo_labels: the answers of the source vote for the target rows.
        splits: k_s and k_u of the votes with a fixed split, by name.
    """
    k = source.labels.shape[1]
    answers = {"source": _majority(source.labels)}
    nearest_target = scene.search(scene.queries, k, source=False)  # once, since only the labels differ below
    for suffix, labels in (("", scene.target_labels), (" pseudo", pseudo_labels)):
        target = _relabeled(nearest_target, labels, first_id=scene.n_s)
        answers["joint" + suffix] = _majority(_joint_labels(source, target, k))
        for name, (k_s, k_u) in splits.items():
            labels_of_split = torch.cat([source.labels[:, :k_s], target.labels[:, :k_u]], 1)
            answers[name + suffix] = _majority(labels_of_split)
    return answers


def _divergence(scene: _Scene, near: Neighbors, excess: float) -> dict[str, float]:
    """Returns the quantities of Proposition 1.

    ``mean`` is the mean distance of a query to its k source neighbors, which is the cost of one transport from the
    target to Omega. ``within`` is the share of queries whose k-th neighbor lies within ``radius``, which is r_0.
    ``error`` is the target error of the source vote, and ``bound`` that of the proposition. Its kappa is the sum of
    both Bayes errors. That is exact without a gap; with a gap it is the smallest value possible, which makes the bound
    harder to satisfy. Its L is taken to be C.
    """
    known = scene.problem.assumptions
    k = near.ids.shape[1]
    distance = (2 - 2 * near.similarity.numpy()).clip(min=0) ** 0.5  # (queries, k)
    farthest_allowed = radius(k, scene.n_s, known.source_overlap, known.density, known.dim)
    bayes_error = _bayes_error(scene.problem.target_probability(scene.queries))
    risk, bayes_error_of_voters = scene.errors_at_voters(near)
    least_error = bayes_error + bayes_error_of_voters
    return {
        "mean": float(distance.mean()),
        "within": float(np.mean(distance[:, -1] <= farthest_allowed)),
        "radius": farthest_allowed,
        "wasserstein": scene.problem.wasserstein,
        "error": bayes_error + excess,
        "bound": proposition_1(k, scene.n_s, known, known.smoothness, least_error, risk),
    }


class _Scene:
    """The rows, labels and queries of one draw."""

    def __init__(self, problem: Problem, n_s: int, n_u: int, queries: int, seed: int) -> None:
        self.problem = problem
        self.n_s = n_s
        self.seed = seed
        source = problem.source(n_s, self._stream(SOURCE_POINTS))
        self.target = problem.target(n_u, self._stream(TARGET_POINTS))
        self.queries = problem.target(queries, self._stream(QUERY_POINTS))
        # A label is 1 if its draw is below the probability, so different problems share the draws of a seed.
        source_draws = self._stream(SOURCE_LABELS).uniform(size=n_s)
        source_labels = source_draws < problem.source_probability(source)
        target_draws = self._stream(TARGET_LABELS).uniform(size=n_u)
        self.target_labels = target_draws < problem.target_probability(self.target)
        self.bank = MemoryBank(2 * problem.dim, 2)
        self._append(source, source_labels, Origin.SOURCE)
        self._append(self.target, self.target_labels, Origin.ADMITTED)

    def _stream(self, number: int) -> np.random.Generator:
        """Returns one of this seed's streams of random numbers."""
        return np.random.default_rng([self.seed, number])

    def _append(self, points: Array, labels: Answers, origin: Origin) -> None:
        """Adds points and their labels to the bank."""
        self.bank.apply(Append(torch.from_numpy(points), torch.from_numpy(labels).long(), origin))

    def search(self, points: Array, k: int, *, source: bool) -> Neighbors:
        """Returns the k nearest rows of each point, among source rows or among target rows."""
        return self.bank.search(torch.from_numpy(points), k, source=source)

    def errors_at_voters(self, near: Neighbors) -> tuple[float, float]:
        """Returns the error of the source vote and the Bayes error on Omega: at a random neighbor of each query."""
        # Omega is the distribution of one of the k nearest source rows of a query; see proposition_1().
        k = near.ids.shape[1]
        place = self._stream(CHOSEN_NEIGHBORS).integers(0, k, (len(near.ids), 1))
        ids = near.ids.gather(1, torch.from_numpy(place))[:, 0]
        points = self.bank.rows(ids).double().numpy()
        probability = self.problem.source_probability(points)
        answers = _majority(self.search(points, k, source=True).labels)
        error = float(np.mean(np.where(answers, 1 - probability, probability)))
        return error, _bayes_error(probability)


def _bayes_error(probability: Array) -> float:
    """Returns the mean error of the best possible answers, given the probabilities of class 1."""
    return float(np.mean(np.minimum(probability, 1 - probability)))


def _majority(labels: Tensor) -> Answers:
    """Returns whether at least half of the neighbors, with labels (B, K), are of class 1 (B,)."""
    answers: Answers = (2 * labels.sum(1) >= labels.shape[1]).numpy()
    return answers


def _relabeled(near: Neighbors, labels: Answers, first_id: int) -> Neighbors:
    """Returns the same neighbors with other labels; -1 where there is no neighbor.

    Args:
        near: neighbors whose ids start at ``first_id``.
        labels: the label of each row, in order of ids.
        first_id: the id of the first row.
    """
    no_label = torch.tensor([-1])
    label_table = torch.cat([torch.from_numpy(labels).long(), no_label])  # index -1 reads the last entry
    index = torch.where(near.ids < 0, -1, near.ids - first_id)
    return Neighbors(near.ids, near.similarity, label_table[index])


def _joint_labels(source: Neighbors, target: Neighbors, k: int) -> Tensor:
    """Returns the labels (B, k) of the k nearest of both kinds; ties go to source rows, as in a search of the bank."""
    # Source rows have the lower ids, to which the bank gives ties; here they come first, and the sort is stable.
    similarity = torch.cat([source.similarity, target.similarity], 1)
    labels = torch.cat([source.labels, target.labels], 1)
    nearest = similarity.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return labels.gather(1, nearest)
