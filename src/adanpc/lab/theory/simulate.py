"""Votes on problems with known regression functions: excess errors beside the bounds, as plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil, log
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
)
from adanpc.lab.theory.bounds import radius as ball

Answers = npt.NDArray[np.bool_]
SHIFTS: dict[str, dict[str, float]] = {
    "none": {},
    "covariate": {"overlap": 0.1},
    "posterior": {"gap": 0.2},
    "both": {"overlap": 0.1, "gap": 0.2},
}
N_S, N_U, K = 2000, 500, 15  # what a sweep holds fixed; k is odd wherever it can be, so that few votes are tied


@dataclass(frozen=True)
class Size:
    """How much a plan asks for."""

    dims: tuple[int, ...]
    k: tuple[int, ...]
    n_s: tuple[int, ...]
    n_u: tuple[int, ...]
    queries: int
    seeds: int


SCALES = {
    "reduced": Size((2,), (1, 5, 15, 45, 135, 405, 1215), (125, 500, 2000, 8000), (0, 30, 125, 500, 2000), 400, 8),
    "full": Size(
        (2, 8),
        (1, 3, 5, 9, 15, 25, 45, 75, 135, 235, 405, 705, 1215),
        (125, 250, 500, 1000, 2000, 4000, 8000, 16000, 32000),
        (0, 30, 60, 125, 250, 500, 1000, 2000, 4000, 8000),
        2000,
        30,
    ),
}


def plan(scale: str) -> list[dict[str, Any]]:
    """The parameters of every simulation of a scale: sweeps over k, n_s and n_u under each shift, by seed.

    n_s is swept with k = ln n_s rounded up to an odd number, as Proposition 2 asks; the others with k or n_s fixed.
    """
    if scale not in SCALES:
        raise AdaNPCError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    size = SCALES[scale]
    sizes = [{"sweep": "k", "k": k, "n_s": N_S, "n_u": N_U} for k in size.k]
    sizes += [{"sweep": "n_s", "k": ceil(log(n_s)) | 1, "n_s": n_s, "n_u": N_U} for n_s in size.n_s]
    sizes += [{"sweep": "n_u", "k": K, "n_s": N_S, "n_u": n_u} for n_u in size.n_u]
    return [
        {**each, "problem": {"dim": dim, **shift}, "queries": size.queries, "seed": seed}
        for dim in size.dims
        for shift in SHIFTS.values()
        for each in sizes
        for seed in range(size.seeds)
    ]


def measure(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one entry of a plan: what ``simulate`` returns, and the sweep it belongs to."""
    own = {name: value for name, value in parameters.items() if name not in ("sweep", "problem")}
    return {"sweep": parameters["sweep"], **simulate(Problem(**parameters["problem"]), **own)}


def simulate(problem: Problem, k: int, n_s: int, n_u: int, queries: int, seed: int) -> dict[str, Any]:
    """One draw of rows and queries: the excess error of every vote and the value of every bound.

    Rows are in a ``MemoryBank`` and found by its search; every neighbor counts 1/k, and half of them make class 1.
    The same seed draws the same first rows and queries whatever their number, so that settings compare pairwise.

    The votes: ``source`` asks the k nearest source rows; ``joint`` the k nearest of all rows; ``split`` the k_s and k_u
    that Proposition 3 bounds best; ``half`` (k + 1) // 2 source rows and k // 2 target rows. Target labels are drawn
    from eta_U, which Proposition 3 assumes; a second time, as ``… pseudo``, they are what the source vote says, which
    is what the method stores (here for every row, confident or not). ``pseudo_bias`` is the mean distance of such
    labels from eta_U.

    Args:
        problem: the domains.
        k: neighbors.
        n_s: source rows.
        n_u: target rows.
        queries: fresh target points.
        seed: of all draws.
    """
    if not 1 <= k <= n_s:
        raise AdaNPCError(f"k must lie in 1 … {n_s}, the number of source rows, got {k}")
    scene, eta = _Scene(problem, n_s, n_u, queries, seed), problem.eta_target
    splits = {"split": best_split(k, n_s, n_u, problem.assumptions), "half": (k - min(k // 2, n_u), min(k // 2, n_u))}
    near, pseudo = scene.search(scene.asked, k, True), _majority(scene.search(scene.target, k, True).labels)
    answers = _answers(scene, near, pseudo, splits)
    excess = {name: problem.excess(scene.asked, answer) for name, answer in answers.items()}
    sizes = {"k": k, "n_s": n_s, "n_u": n_u, "k_s": splits["split"][0], "k_u": splits["split"][1]}
    return sizes | {
        "shift": problem.shift,
        "problem": asdict(problem),
        "queries": queries,
        "seed": seed,
        "excess": excess,
        "worst": float(np.mean(np.abs(2 * eta(scene.asked) - 1))),
        "bound": {
            "2": proposition_2(k, n_s, problem.assumptions),
            "3": proposition_3(*splits["split"], n_s, n_u, problem.assumptions),
            "3 half": proposition_3(*splits["half"], n_s, n_u, problem.assumptions),
        },
        "failure": failure(k),
        "divergence": _divergence(scene, near, excess["source"]),
        "pseudo_bias": float(np.mean(np.abs(pseudo - eta(scene.target)))) if n_u else None,
    }


def _answers(
    scene: _Scene, source: Neighbors, pseudo: Answers, splits: Mapping[str, tuple[int, int]]
) -> dict[str, Answers]:
    """What every vote says, (queries,) each."""
    k, answers = source.labels.shape[1], {"source": _majority(source.labels)}
    target = scene.search(scene.asked, k, False)
    for suffix, labels in (("", scene.labels), (" pseudo", pseudo)):
        found = _relabeled(target, labels, scene.n_s)
        answers["joint" + suffix] = _majority(_joint(source, found, k))
        for name, (k_s, k_u) in splits.items():
            answers[name + suffix] = _majority(torch.cat([source.labels[:, :k_s], found.labels[:, :k_u]], 1))
    return answers


def _divergence(scene: _Scene, near: Neighbors, excess: float) -> dict[str, float]:
    """What Proposition 1 speaks of.

    ``mean`` is the mean distance of a query to its k source neighbors, the cost of one transport from the target to
    Omega; ``within`` the share of queries whose k-th neighbor lies within ``radius``, r_0; ``error`` the target error
    of the source vote and ``bound`` the proposition's. Its kappa is the sum of both Bayes errors: exact without a gap,
    with one the least it can be, which makes the bound harder to keep. Its L is taken to be C.
    """
    known, k = scene.problem.assumptions, near.ids.shape[1]
    distance = (2 - 2 * near.similarity.numpy()).clip(min=0) ** 0.5  # (queries, k)
    radius = ball(k, scene.n_s, known.source_overlap, known.density, known.dim)
    bayes, (risk, bayes_omega) = _bayes(scene.problem.eta_target(scene.asked)), scene.omega(near)
    return {
        "mean": float(distance.mean()),
        "within": float(np.mean(distance[:, -1] <= radius)),
        "radius": radius,
        "wasserstein": scene.problem.wasserstein,
        "error": bayes + excess,
        "bound": proposition_1(k, scene.n_s, known, known.smoothness, bayes + bayes_omega, risk),
    }


class _Scene:
    """The rows, their labels and the queries of one draw."""

    def __init__(self, problem: Problem, n_s: int, n_u: int, queries: int, seed: int) -> None:
        def stream(what: int) -> np.random.Generator:
            return np.random.default_rng([seed, what])

        self.problem, self.n_s, self.seed = problem, n_s, seed
        rows = problem.source(n_s, stream(0))
        self.target, self.asked = problem.target(n_u, stream(1)), problem.target(queries, stream(2))
        source_labels = stream(3).uniform(size=n_s) < problem.eta_source(rows)
        self.labels = stream(4).uniform(size=n_u) < problem.eta_target(self.target)
        self.bank = MemoryBank(2 * problem.dim, 2)
        self.bank.apply(Append(torch.from_numpy(rows), torch.from_numpy(source_labels).long()))
        self.bank.apply(Append(torch.from_numpy(self.target), torch.from_numpy(self.labels).long(), Origin.ADMITTED))

    def search(self, points: Array, k: int, source: bool) -> Neighbors:
        return self.bank.search(torch.from_numpy(points), k, source=source)

    def omega(self, near: Neighbors) -> tuple[float, float]:
        """The error of the source vote on Omega and the Bayes error there: at one neighbor of each query, by chance."""
        draw, k = np.random.default_rng([self.seed, 5]), near.ids.shape[1]
        chosen = near.ids.gather(1, torch.from_numpy(draw.integers(0, k, (len(near.ids), 1))))[:, 0]
        points = self.bank.rows(chosen).double().numpy()
        eta, answer = self.problem.eta_source(points), _majority(self.search(points, k, True).labels)
        return float(np.mean(np.where(answer, 1 - eta, eta))), _bayes(eta)


def _bayes(eta: Array) -> float:
    return float(np.mean(np.minimum(eta, 1 - eta)))


def _majority(labels: Tensor) -> Answers:
    """Whether at least half of the neighbors (B, K) are of class 1, (B,)."""
    answer: Answers = (2 * labels.sum(1) >= labels.shape[1]).numpy()
    return answer


def _relabeled(near: Neighbors, labels: Answers, first: int) -> Neighbors:
    """The same neighbors with these labels, of the rows whose ids start at ``first``; -1 where there is no neighbor."""
    table = torch.cat([torch.from_numpy(labels).long(), torch.tensor([-1])])
    at = torch.where(near.ids < 0, -1, near.ids - first)
    return Neighbors(near.ids, near.similarity, table[at])


def _joint(source: Neighbors, target: Neighbors, k: int) -> Tensor:
    """The labels of the k nearest of both kinds, (B, k); ties to source rows, whose ids are lower."""
    similarity = torch.cat([source.similarity, target.similarity], 1)
    order = similarity.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.cat([source.labels, target.labels], 1).gather(1, order)
