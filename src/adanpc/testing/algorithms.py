"""What every training algorithm promises."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch
from adanpc.lab.train.erm import ERM
from adanpc.lab.train.search import draw

CLASSES, DOMAINS, ROWS, SIDE = 3, 3, 8, 8

Maker = Callable[[], Algorithm]


def check_algorithm(kind: type[Algorithm], **settings: Any) -> None:
    """Runs every check on a training algorithm.

    Args:
        kind: the class.
        **settings: its hyper-parameters; by default its own defaults.
    """
    for check in ALGORITHM_CHECKS:
        check(kind, **settings)


def toy_model(seed: int = 0, classes: int = CLASSES) -> SourceModel:
    """A small convolutional model for images (B, 1, 8, 8)."""
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(128, 16))
    return SourceModel(encoder, 16, classes)


def toy_batches(step: int, domains: int = DOMAINS, rows: int = ROWS) -> list[Batch]:
    """Batches of a problem that can be learned: each class is a pattern, each domain a contrast, and there is noise."""
    patterns = torch.rand(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(1000 + step)
    made = []
    for domain in range(domains):
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        noise = 0.1 * torch.randn(rows, 1, SIDE, SIDE, generator=generator)
        keys = torch.arange(rows) + rows * (domain + domains * step)
        made.append(Batch((0.5 + 0.5 * domain) * patterns[labels] + noise, labels, keys))
    return made


def advance(algorithm: Algorithm, steps: Sequence[int]) -> list[float]:
    """Updates on the toy problem, each seeded by its number; the losses."""
    losses = []
    algorithm.train()
    for step in steps:
        torch.manual_seed(step)
        batches = toy_batches(step, algorithm.domains)

        def source(count: int | None, seen: list[Batch] = batches) -> tuple[Tensor, Tensor, Tensor]:
            images, labels, keys = (torch.cat([batch[column] for batch in seen]) for column in range(3))
            with torch.no_grad():
                return algorithm.model.features(images)[:count], labels[:count], keys[:count]

        algorithm.prepare(source)
        losses.append(algorithm.update(batches)["loss"])
    return losses


def weights(algorithm: Algorithm) -> dict[str, Tensor]:
    """A copy of the tensors of the product."""
    return {name: value.clone() for name, value in algorithm.model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], sentence: str, tolerance: float = 0.0) -> None:
    """Fails with the sentence, naming the tensors that differ."""
    bad = [name for name in one if not torch.allclose(one[name], other[name], rtol=tolerance, atol=tolerance)]
    assert not bad, f"{sentence}: {', '.join(bad)} differ"


def check_learns(kind: type[Algorithm], **settings: Any) -> None:
    """Updates report finite losses, and the product classifies fresh samples better than before."""
    algorithm = kind(toy_model(), DOMAINS, **{"lr": 5e-3, **settings})
    before, losses = _error(algorithm), advance(algorithm, range(60))
    after = _error(algorithm)
    assert all(abs(loss) < float("inf") for loss in losses), f"{kind.__name__}: a loss is not finite: {losses}"
    assert after < 0.7 * before, f"{kind.__name__} does not learn: cross-entropy {before:.3f} before, {after:.3f} after"


def _error(algorithm: Algorithm) -> float:
    algorithm.eval()
    with torch.no_grad():
        errors = [cross_entropy(algorithm(batch.images), batch.labels) for batch in toy_batches(-1, rows=64)]
    return torch.stack(errors).mean().item()


def check_equals_erm(kind: type[Algorithm], **settings: Any) -> None:
    """With the settings that its class declares, it makes the steps of ERM."""
    if kind.erm is None:
        return
    # One generator for both: what an algorithm draws beside must not change the steps.
    plain, special = ERM(toy_model(), DOMAINS), kind(toy_model(), DOMAINS, **{**settings, **kind.erm})
    for step in range(8):
        advance(plain, [step])
        advance(special, [step])
    assert_same(weights(plain), weights(special), f"{kind.__name__} with {kind.erm} is not ERM", 1e-5)


def check_no_penalty_if_aligned(kind: type[Algorithm], **settings: Any) -> None:
    """If all domains bring the same batch there is nothing to penalize, if the class says so."""
    if not kind.aligned:
        return
    algorithm = kind(toy_model(), DOMAINS, **settings)
    _, parts = algorithm.loss(toy_batches(0)[:1] * DOMAINS)
    assert abs(float(parts["penalty"])) < 1e-6, f"{kind.__name__}: penalty {parts['penalty']} on identical domains"
    _, parts = algorithm.loss(toy_batches(0))
    assert float(parts["penalty"]) > 0, f"{kind.__name__}: no penalty on different domains"


def check_resumes(kind: type[Algorithm], **settings: Any) -> None:
    """A checkpoint goes through a file without running code, and training continues as if never stopped."""
    whole, first = (kind(toy_model(), DOMAINS, **settings) for _ in range(2))
    advance(whole, range(8))
    advance(first, range(4))
    file = io.BytesIO()
    torch.save(first.checkpoint(), file)
    file.seek(0)
    second = kind(toy_model(seed=1), DOMAINS, **settings)
    second.restore(torch.load(file, weights_only=True))
    assert second.step == 4, f"{kind.__name__}: the step is {second.step} after restoring, not 4"
    advance(second, range(4, 8))
    assert_same(weights(whole), weights(second), f"{kind.__name__} does not resume as it would have gone on")


def check_is_deterministic(kind: type[Algorithm], **settings: Any) -> None:
    """The same seeds give the same weights."""
    one, other = (kind(toy_model(), DOMAINS, **settings) for _ in range(2))
    advance(one, range(4))
    advance(other, range(4))
    assert_same(weights(one), weights(other), f"{kind.__name__} is not decided by its seed")


def check_product(kind: type[Algorithm], **settings: Any) -> None:
    """The trained model gives features and logits, for one image too, and evaluating it changes nothing."""
    algorithm = kind(toy_model(), DOMAINS, **settings)
    advance(algorithm, range(2))
    model, before = algorithm.model.eval(), weights(algorithm)
    for rows in (1, 5):
        images = toy_batches(0, rows=rows)[0].images
        features, logits = model.features(images), model(images)
        assert features.shape == (rows, model.dim), f"{kind.__name__}: features of shape {tuple(features.shape)}"
        assert logits.shape == (rows, CLASSES), f"{kind.__name__}: logits of shape {tuple(logits.shape)}"
        assert bool(logits.isfinite().all()), f"{kind.__name__}: logits are not finite for {rows} images"
        assert torch.equal(model.head(features), logits), f"{kind.__name__}: logits are not the head of the features"
    assert_same(before, weights(algorithm), f"{kind.__name__}: evaluating the model changed it")


def check_search(kind: type[Algorithm], **settings: Any) -> None:
    """Whatever is drawn from its search space can be trained with."""
    for seed in range(1, 6):
        drawn = draw(kind.space, seed)
        losses = advance(kind(toy_model(), DOMAINS, **{**settings, **drawn}), range(3))
        assert all(abs(loss) < float("inf") for loss in losses), f"{kind.__name__} with {drawn}: losses {losses}"


def check_refuses(kind: type[Algorithm], **settings: Any) -> None:
    """Too few domains, a missing batch and an empty batch are refused by name; small and unequal ones are not."""
    algorithm = kind(toy_model(), DOMAINS, **settings)
    advance(algorithm, range(1))
    empty = Batch(torch.zeros(0, 1, SIDE, SIDE), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    for batches in (toy_batches(0)[:-1], [*toy_batches(0)[:-1], empty]):
        try:
            algorithm.update(batches)
        except AdaNPCError:
            continue
        raise AssertionError(f"{kind.__name__} takes batches of {[len(batch.labels) for batch in batches]} rows")
    unequal = [Batch(*(part[: 1 + 2 * number] for part in batch)) for number, batch in enumerate(toy_batches(0))]
    loss = algorithm.update(unequal)["loss"]
    assert abs(loss) < float("inf"), f"{kind.__name__}: the loss of batches of 1, 3 and 5 rows is {loss}"


ALGORITHM_CHECKS: tuple[Callable[..., None], ...] = (
    check_learns,
    check_equals_erm,
    check_no_penalty_if_aligned,
    check_resumes,
    check_is_deterministic,
    check_product,
    check_search,
    check_refuses,
)
