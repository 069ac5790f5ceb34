"""check_algorithm: whether a training algorithm keeps the promises of ``Algorithm``, tested on a toy problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train import checkpoint
from adanpc.lab.train.algorithm import Algorithm, Batch
from adanpc.lab.train.erm import ERM
from adanpc.lab.train.search import draw

# The toy problem:
CLASSES = 3
DOMAINS = 3
ROWS = 8  # samples of each domain in a batch
SIDE = 8  # width and height of an image in pixels


def check_algorithm(kind: type[Algorithm], **settings: Any) -> None:
    """Runs every check on a training algorithm; the first that fails raises an AssertionError.

    Args:
        kind: the class of the algorithm.
        **settings: its hyper-parameters; those that are not given have the defaults of the class.
    """
    for check in ALGORITHM_CHECKS:
        check(kind, **settings)


def toy_model(seed: int = 0, classes: int = CLASSES) -> SourceModel:
    """A small convolutional model for images (B, 1, 8, 8)."""
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(128, 16))
    return SourceModel(encoder, 16, classes)


def toy_batches(step: int, domains: int = DOMAINS, rows: int = ROWS) -> list[Batch]:
    """One batch from each domain of a problem that can be learned: classes differ in pattern, domains in contrast."""
    patterns = torch.rand(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(1000 + step)
    batches = []
    for domain in range(domains):
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        noise = 0.1 * torch.randn(rows, 1, SIDE, SIDE, generator=generator)
        contrast = 0.5 + 0.5 * domain
        images = contrast * patterns[labels] + noise
        earlier_batches = domain + domains * step
        keys = rows * earlier_batches + torch.arange(rows)
        batches.append(Batch(images, labels, keys))
    return batches


def advance(algorithm: Algorithm, steps: Sequence[int]) -> list[float]:
    """Makes updates on the toy problem, with the step number as their random seed, and returns their losses."""
    losses = []
    algorithm.train()
    for step in steps:
        torch.manual_seed(step)
        batches = toy_batches(step, algorithm.domains)

        # The default argument binds the batches of this step, not those of the last one.
        def sampler(count: int | None, seen: list[Batch] = batches) -> tuple[Tensor, Tensor, Tensor]:
            images = torch.cat([batch.images for batch in seen])
            labels = torch.cat([batch.labels for batch in seen])
            keys = torch.cat([batch.keys for batch in seen])
            with torch.no_grad():
                features = algorithm.model.features(images)
            return features[:count], labels[:count], keys[:count]

        algorithm.prepare(sampler)
        losses.append(algorithm.update(batches)["loss"])
    return losses


def weights(algorithm: Algorithm) -> dict[str, Tensor]:
    """A copy of the tensors of the trained model."""
    return {name: value.clone() for name, value in algorithm.model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], sentence: str, tolerance: float = 0.0) -> None:
    """Asserts that tensors are equal, or close within a tolerance; the message names those that differ."""
    different = []
    for name, value in one.items():
        if not torch.allclose(value, other[name], rtol=tolerance, atol=tolerance):
            different.append(name)
    assert not different, f"{sentence}: {', '.join(different)} differ"


def check_learns(kind: type[Algorithm], **settings: Any) -> None:
    """Losses are finite, and the trained model classifies new samples better than before."""
    algorithm = kind(toy_model(), DOMAINS, **{"lr": 5e-3, **settings})
    before = _error(algorithm)
    losses = advance(algorithm, range(60))
    after = _error(algorithm)
    assert all(abs(loss) < float("inf") for loss in losses), f"{kind.__name__}: a loss is not finite: {losses}"
    assert after < 0.7 * before, f"{kind.__name__} does not learn: cross-entropy {before:.3f} before, {after:.3f} after"


def _error(algorithm: Algorithm) -> float:
    """The mean cross-entropy on samples that no update sees."""
    algorithm.eval()
    errors = []
    with torch.no_grad():
        for batch in toy_batches(-1, rows=64):
            errors.append(cross_entropy(algorithm(batch.images), batch.labels))
    return torch.stack(errors).mean().item()


def check_equals_erm(kind: type[Algorithm], **settings: Any) -> None:
    """With the settings in ``kind.erm``, the algorithm makes the same steps as ERM."""
    if kind.erm is None:
        return
    plain = ERM(toy_model(), DOMAINS)
    special = kind(toy_model(), DOMAINS, **{**settings, **kind.erm})
    # Step by step, so that both begin each step with the same seed, whatever else one of them draws.
    for step in range(8):
        advance(plain, [step])
        advance(special, [step])
    assert_same(weights(plain), weights(special), f"{kind.__name__} with {kind.erm} is not ERM", 1e-5)


def check_no_penalty_if_aligned(kind: type[Algorithm], **settings: Any) -> None:
    """If ``kind.aligned`` is true, there is no penalty as long as the batches of all domains are the same."""
    if not kind.aligned:
        return
    algorithm = kind(toy_model(), DOMAINS, **settings)
    batches = toy_batches(0)
    identical = [batches[0]] * DOMAINS
    _, parts = algorithm.loss(identical)
    assert abs(float(parts["penalty"])) < 1e-6, f"{kind.__name__}: penalty {parts['penalty']} on identical domains"
    _, parts = algorithm.loss(batches)
    assert float(parts["penalty"]) > 0, f"{kind.__name__}: no penalty on different domains"


def check_resumes(kind: type[Algorithm], **settings: Any) -> None:
    """A checkpoint can be saved to a file, and training continues from it as if it had never stopped."""
    uninterrupted = kind(toy_model(), DOMAINS, **settings)
    advance(uninterrupted, range(8))
    stopped = kind(toy_model(), DOMAINS, **settings)
    advance(stopped, range(4))
    resumed = kind(toy_model(seed=1), DOMAINS, **settings)  # other weights, which restoring must replace
    with TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        checkpoint.write(path, stopped.checkpoint())
        resumed.restore(checkpoint.read(path))
    assert resumed.step == 4, f"{kind.__name__}: the step is {resumed.step} after restoring, not 4"
    advance(resumed, range(4, 8))
    sentence = f"{kind.__name__} does not resume as it would have continued"
    assert_same(weights(uninterrupted), weights(resumed), sentence)


def check_is_deterministic(kind: type[Algorithm], **settings: Any) -> None:
    """The same seeds give the same weights."""
    one = kind(toy_model(), DOMAINS, **settings)
    advance(one, range(4))
    other = kind(toy_model(), DOMAINS, **settings)
    advance(other, range(4))
    assert_same(weights(one), weights(other), f"{kind.__name__} trains differently with the same seeds")


def check_product(kind: type[Algorithm], **settings: Any) -> None:
    """The trained model returns features and logits, even for a single image, and evaluating it changes nothing."""
    algorithm = kind(toy_model(), DOMAINS, **settings)
    advance(algorithm, range(2))
    model = algorithm.model.eval()
    before = weights(algorithm)
    for rows in (1, 5):
        images = toy_batches(0, rows=rows)[0].images
        features = model.features(images)
        logits = model(images)
        assert features.shape == (rows, model.dim), f"{kind.__name__}: features of shape {tuple(features.shape)}"
        assert logits.shape == (rows, CLASSES), f"{kind.__name__}: logits of shape {tuple(logits.shape)}"
        assert bool(logits.isfinite().all()), f"{kind.__name__}: logits are not finite for {rows} images"
        assert torch.equal(model.head(features), logits), f"{kind.__name__}: logits are not the head of the features"
    assert_same(before, weights(algorithm), f"{kind.__name__}: evaluating the model changed it")


def check_search(kind: type[Algorithm], **settings: Any) -> None:
    """Training works with any settings from the search space."""
    for seed in range(1, 6):
        drawn = draw(kind.space, seed)
        algorithm = kind(toy_model(), DOMAINS, **{**settings, **drawn})
        losses = advance(algorithm, range(3))
        assert all(abs(loss) < float("inf") for loss in losses), f"{kind.__name__} with {drawn}: losses {losses}"


def check_refuses(kind: type[Algorithm], **settings: Any) -> None:
    """A missing batch and an empty batch are refused; small batches and batches of different sizes are not."""
    algorithm = kind(toy_model(), DOMAINS, **settings)
    advance(algorithm, range(1))
    too_few = toy_batches(0)[:-1]
    none = torch.zeros(0, dtype=torch.int64)
    empty = Batch(torch.zeros(0, 1, SIDE, SIDE), none, none)
    for batches in (too_few, [*too_few, empty]):
        try:
            algorithm.update(batches)
        except AdaNPCError:
            continue
        sizes = [len(batch.labels) for batch in batches]
        raise AssertionError(f"{kind.__name__} accepts batches of {sizes} rows")
    unequal = []
    for domain, batch in enumerate(toy_batches(0)):
        rows = 1 + 2 * domain
        unequal.append(Batch(batch.images[:rows], batch.labels[:rows], batch.keys[:rows]))
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
