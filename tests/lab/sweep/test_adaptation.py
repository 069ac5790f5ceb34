"""Methods on the stream of a trained run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt import ADAPTERS, Adapter
from adanpc.lab.data.domain import Domain
from adanpc.lab.data.streams import STREAMS, Iid, Recurring, Successive, fetch, labels_of
from adanpc.lab.networks import features as network_features
from adanpc.lab.networks.features import features
from adanpc.lab.sweep import adaptation
from adanpc.lab.sweep.adaptation import adapt, extra_bytes
from adanpc.lab.sweep.scene import Scene, scene_of
from adanpc.lab.train.assemble import start
from adanpc.lab.train.loop import train
from adanpc.lab.train.run import Run
from adanpc.lab.train.spec import Spec


@pytest.fixture(scope="module")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = Spec(
        "folder",
        ("plain", "bright"),
        "rotation",
        "convnet",
        steps=20,
        batch=8,
        every=10,
        hyper={"lr": 3e-3},
        augment=False,
    )
    run = start(settings, data_dir, tmp_path_factory.mktemp("runs") / "run")
    train(run, workers=0)
    return run


@pytest.fixture(scope="module")
def scene(trained: Run) -> Scene:
    return scene_of(trained)


def test_the_scene_has_source_training_rows_alone(scene: Scene, trained: Run) -> None:
    assert [domain.name for domain in scene.targets] == ["plain", "bright"]
    assert [len(domain) for domain in scene.targets] == [24, 24]
    assert [len(domain) for domain in scene.held] == [6, 6]
    assert (len(scene.source.labels), sum(map(len, scene.recalled))) == (24, 6)
    assert scene.source.rotation_head is not None
    assert scene.source.lr == 3e-3
    assert scene.source.images is not None
    known = scene.source.images(torch.arange(24))
    with torch.no_grad():
        made = scene.source.model.features(known)
    assert torch.allclose(made, scene.source.features, atol=1e-5)
    held_out = scene.recalled[0].take(range(6))
    assert not any(torch.equal(one, other) for one in held_out for other in known)
    assert [len(domain) for domain in scene_of(trained, images=7).targets] == [7, 7]


@pytest.fixture(scope="module")
def short(trained: Run) -> Scene:
    """A full batch of eight and a smaller one from each target."""
    return scene_of(trained, images=10)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_method_runs_from_end_to_end(short: Scene, name: str) -> None:
    if name == "bn-adapt":
        with pytest.raises(AdaNPCError, match="BatchNorm"):
            adapt(short, name, Successive(), 8)
        return
    settings = {}
    if "copies" in signature(ADAPTERS[name]).parameters:
        settings["copies"] = 2  # of each image, where the default is many
    if name == "ttt":
        settings["steps"] = 2  # of ten, for each image
    record = adapt(short, name, Successive(), 8, settings)
    assert set(record["domains"]) == {"plain", "bright"}
    assert all(0 <= value <= 100 for value in record["domains"].values())
    assert record["average"] == pytest.approx(sum(record["domains"].values()) / 2)
    assert record["ms"]["p99"] >= record["ms"]["p50"] > 0
    assert record["extra_bytes"] >= 0
    assert (record["encoder_ms"] > 0) == (ADAPTERS[name].sees == "features")


def test_the_record_counts_what_a_hand_would(scene: Scene) -> None:
    record = adapt(scene, "source", Successive(), 7)
    model = scene.source.model
    for domain in scene.targets:
        with torch.no_grad():
            right = model(domain.take(range(len(domain)))).argmax(1) == domain.labels
        assert record["domains"][domain.name] == pytest.approx(100 * right.float().mean().item())
    assert record["source"]["after"] == dict.fromkeys(("plain", "bright"), record["source"]["before"])
    assert record["samples"] == 48
    assert record["stream"] == Successive().describe()


@pytest.mark.parametrize("name", ["adanpc", "adanpc-safe"])
def test_rows_that_join_are_counted_with_their_labels(scene: Scene, name: str) -> None:
    record = adapt(scene, name, Successive(), 7)
    adapter = ADAPTERS[name](scene.source)
    targets = [scene.seen(domain, "features") for domain in scene.targets]
    rows = 0
    wrong = 0
    frozen = 0
    for arrival in Successive().batches(targets, 1):
        adapter.step(fetch(targets, arrival))
        truth = int(labels_of(targets, arrival))
        answer = adapter.latest
        assert answer is not None
        if answer.frozen is not None:
            frozen += int(answer.frozen.argmax()) == truth
        if int(answer.joined) >= 0:
            table = adapter.banks["bank"].table("id", "label")
            rows += 1
            wrong += int(table["label"][table["id"] == answer.joined]) != truth
    assert record["joined"] == {"rows": rows, "wrong": wrong}
    assert rows > 0
    if name == "adanpc":
        assert record["frozen"] is None
    else:
        assert record["frozen"] == pytest.approx(100 * frozen / 48)


def test_heads_have_no_rows_that_join(scene: Scene) -> None:
    record = adapt(scene, "source", Successive(), 7)
    assert record["joined"] is None
    assert record["frozen"] is None
    assert 0 <= record["calibration_error"] <= 100
    assert record["worst_tenth"] == pytest.approx(sum(record["domains"].values()) / 2)  # fewer than a hundred answers


def test_confidence_is_judged_by_shuffled_images(scene: Scene) -> None:
    """The areas of a method that never learns, counted here from its answers to the same images."""
    record = adapt(scene, "source", Successive(), 7)
    native = torch.cat([domain.take(range(6)) for domain in scene.held])
    assert scene.strangers is not None
    seen, shuffled = scene.strangers
    assert torch.equal(seen.take(range(12)), native)
    foreign = shuffled.take(range(12))
    for image, other in zip(native, foreign, strict=True):
        assert torch.equal(image.flatten().sort().values, other.flatten().sort().values)  # the same pixels
        assert not torch.equal(image, other)
    with torch.no_grad():
        ours = scene.source.model(native).softmax(1).amax(1)
        theirs = scene.source.model(foreign).softmax(1).amax(1)
    pairs = [float(one > other) + 0.5 * float(one == other) for one in ours for other in theirs]
    assert record["ood_auroc"] == pytest.approx(100 * sum(pairs) / len(pairs), abs=0.1)


def test_images_that_are_too_small_to_be_cut_have_no_strangers(scene: Scene) -> None:
    small = Domain("small", torch.zeros(6, 3, 3, 3), torch.zeros(6, dtype=torch.int64))
    assert replace(scene, held=(small,)).strangers is None
    assert replace(scene, held=()).strangers is None


def test_the_source_is_asked_again_once_a_domain_comes_no_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def recall(adapter: Adapter, domains: Sequence[Domain], size: int) -> float:
        asked.append(size)
        return 0.0

    monkeypatch.setattr(adaptation, "recall", recall)
    record = adapt(scene, "source", Recurring(visits=3), 4)
    assert list(record["source"]["after"]) == ["plain", "bright"]
    assert len(asked) == 1 + 2 + 1  # before the stream, after each domain, and to select by


def test_answers_of_adanpc_do_not_depend_on_the_batch_size(scene: Scene) -> None:
    records = [adapt(scene, "adanpc", Successive(), size) for size in (1, 7, 30)]
    assert len({str(record["domains"]) for record in records}) == 1


def test_iid_starts_afresh_at_each_domain(scene: Scene) -> None:
    settings = {"min_confidence": 0.0}
    alone = {
        domain.name: adapt(Scene(scene.source, (domain,), scene.recalled), "adanpc", Iid(), 5, settings)["average"]
        for domain in scene.targets
    }
    assert adapt(scene, "adanpc", Iid(), 5, settings)["domains"] == alone


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "gradual"])
def test_every_stream(scene: Scene, name: str) -> None:
    record = adapt(scene, "adanpc", STREAMS[name](), 4)
    assert record["stream"]["stream"] == name


def test_a_rest_that_is_too_small_stays_unanswered(scene: Scene) -> None:
    record = adapt(scene, "tent-prebn", Successive(), 23)
    assert record["samples"] == 46
    with pytest.raises(AdaNPCError, match="needs batches of at least 2 rows, got 1"):
        adapt(scene, "tent-prebn", Successive(), 1)


def test_the_bank_is_what_adanpc_holds_beyond_the_model(scene: Scene) -> None:
    for name in ("knn", "adanpc", "adanpc-bn"):
        assert extra_bytes(ADAPTERS[name](scene.source)) >= 24 * 128 * 4
    assert extra_bytes(ADAPTERS["source"](scene.source)) == 0


def test_one_computes_features_and_the_others_wait(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = network_features._encode
    computed = []

    def counted(*arguments: Any) -> Tensor:
        computed.append(1)
        return encode(*arguments)

    monkeypatch.setattr(network_features, "_encode", counted)
    with ThreadPoolExecutor(3) as pool:
        wanted = [pool.submit(features, scene.source.model, scene.targets[0], cache=tmp_path) for _ in range(3)]
        made = [future.result() for future in wanted]
    assert len(computed) == 1
    assert all(torch.equal(each, made[0]) for each in made)


def test_features_are_computed_once(scene: Scene, trained: Run, tmp_path: Path) -> None:
    domain = scene.targets[0]
    first = features(scene.source.model, domain, cache=tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    stamp = file.stat().st_mtime_ns
    assert torch.equal(features(scene.source.model, domain, cache=tmp_path), first)
    assert file.stat().st_mtime_ns == stamp
    features(scene.source.model, domain.subset(range(5)), cache=tmp_path)
    other = scene_of(trained).source.model
    with torch.no_grad():
        other.head.weight.add_(1)  # type: ignore[operator]
    assert torch.equal(features(other, domain, cache=tmp_path), first)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2  # the head makes no features
    with torch.no_grad():
        next(other.encoder.parameters()).add_(1)
    assert not torch.equal(features(other, domain, cache=tmp_path), first)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_unknown_methods_list_those_there_are(scene: Scene) -> None:
    with pytest.raises(AdaNPCError, match="unknown method 'magic'; available: source, knn, adanpc"):
        adapt(scene, "magic", Successive(), 1)
