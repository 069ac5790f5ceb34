"""Source models as values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from adanpc.lab.adapt.prototypes import head_rows
from adanpc.lab.data.streams import Iid
from adanpc.lab.networks import build
from adanpc.lab.sweep import subjects
from adanpc.lab.sweep.adaptation import adapt
from adanpc.lab.sweep.subjects import Extent, Frozen, Trained, Workspace, fitted, subject_of
from adanpc.lab.train.process_group import ProcessGroup
from adanpc.lab.train.run import Run
from adanpc.lab.train.spec import Spec

SPEC = Spec("folder", ("bright",), "erm", "convnet", steps=6, batch=4, every=3, augment=False)


@pytest.fixture
def workspace(data_dir: Path, tmp_path: Path) -> Workspace:
    weights = tmp_path / "convnet.pt"
    torch.manual_seed(0)
    torch.save(build("convnet", 3).state_dict(), weights)
    return Workspace(data_dir, tmp_path / "out")


def frozen(tmp_path: Path, **settings: object) -> Frozen:
    file = str(tmp_path / "convnet.pt")
    return Frozen("folder", ("bright",), "convnet", file, **settings)  # type: ignore[arg-type]


def test_a_model_is_trained_once(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Trained(SPEC).run(workspace)
    stamp = (first.folder / "checkpoint.safetensors").stat().st_mtime_ns

    def never(run: Run, group: ProcessGroup, prepared: object = None) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(subjects, "train", never)
    assert Trained(SPEC, "best").run(workspace).folder == first.folder  # best and last are of the same run
    assert Trained(SPEC.complete()).run(workspace).folder == first.folder
    assert (first.folder / "checkpoint.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(AssertionError, match="trained again"):
        Trained(replace(SPEC, seed=1)).run(workspace)


@pytest.mark.parametrize("every", [3, 6])
def test_a_run_that_was_killed_before_its_last_save_goes_on(
    workspace: Workspace, tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, every=every)
    whole = Trained(spec).run(Workspace(workspace.data_dir, tmp_path / "whole")).state("checkpoint.safetensors")
    save = Run.save

    def killed(run: Run, name: str, state: dict[str, Any]) -> None:
        if name == "checkpoint.safetensors" and state["algorithm"]["step"] == 6:
            raise SystemExit
        save(run, name, state)

    monkeypatch.setattr(Run, "save", killed)
    with pytest.raises(SystemExit):
        Trained(spec).run(workspace)
    monkeypatch.undo()
    run = Trained(spec).run(workspace)
    assert run.finished()
    found = run.state("checkpoint.safetensors")
    assert found is not None
    assert whole is not None
    pairs = zip(found["algorithm"]["weights"].values(), whole["algorithm"]["weights"].values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert [entry["step"] for entry in run.records()] == list(range(every, 7, every))


@pytest.mark.parametrize(
    "subject",
    [
        Trained(SPEC.complete(), "best"),
        Frozen("pacs", ("photo",), "resnet-18", head="mlp", share=0.5, seed=3),
        Frozen("cifar-10-c", ("fog-5",), "cifar-resnet-56", "w.th", "own", known=("cifar-10", "train")),
    ],
)
def test_a_subject_is_what_its_document_says(subject: Trained | Frozen) -> None:
    assert subject_of(subject.document()) == subject


def test_source_rows_come_from_the_training_part_of_source_domains_alone(workspace: Workspace, tmp_path: Path) -> None:
    scene = frozen(tmp_path).scene(workspace, Extent())
    assert (len(scene.source.labels), sum(map(len, scene.recalled))) == (48, 12)
    assert [len(domain) for domain in (*scene.targets, *scene.held)] == [24, 6]
    assert scene.source.domains is not None
    assert scene.source.domains.tolist() == [0] * 24 + [1] * 24
    assert scene.source.images is not None
    known, held = scene.source.images(torch.arange(48)), torch.cat([part.take(range(6)) for part in scene.recalled])
    assert not any(torch.equal(one, other) for one in held for other in known)
    again = frozen(tmp_path).scene(workspace, Extent())
    assert torch.equal(again.source.features, scene.source.features)


def test_a_whole_target_is_met_with_features_that_other_scenes_share(workspace: Workspace, tmp_path: Path) -> None:
    subject = frozen(tmp_path, head="untrained")
    scene = subject.scene(workspace, Extent(whole=True))
    (target,) = scene.targets
    everything = workspace.data("folder", 0)["bright"]
    assert len(target) == len(everything)
    assert target.labels.bincount().equal(everything.labels.bincount())
    assert scene.held == ()
    seen = scene.seen(target, "features")
    with torch.no_grad():
        made = scene.source.model.features(target.take(range(len(target))))
    assert torch.allclose(torch.as_tensor(seen.images), made, atol=1e-5)
    files = set((workspace.folder / "features").iterdir())
    other = subject.scene(workspace, Extent())
    for domain in (*other.targets, *other.held):
        other.seen(domain, "features")
    assert set((workspace.folder / "features").iterdir()) == files
    few = subject.scene(workspace, Extent(images=5, whole=True))
    assert len(few.seen(few.targets[0], "features")) == 5


def test_extents_without_a_whole_target_are_written_as_before_there_were_any() -> None:
    assert Extent(5).document() == {"images": 5, "rows": None, "recalled": 1000}
    assert Extent(5, whole=True).document()["whole"] is True


def test_without_the_source_the_rows_of_the_head_are_known(workspace: Workspace, tmp_path: Path) -> None:
    subject = frozen(tmp_path, head="own", known=("folder", "train"))
    scene = subject.scene(workspace, Extent(images=5, recalled=3))
    assert scene.source.prototypes
    assert torch.equal(scene.source.features, head_rows(scene.source.model))
    assert scene.source.labels.tolist() == [0, 1, 2]
    assert scene.source.images is None
    assert sum(map(len, scene.recalled)) >= 3  # of the other domains there
    record = adapt(scene, "adanpc", Iid(seed=0), 5)
    assert record["prototypes"] is True
    assert subject.missing(workspace) == []


def test_classes_of_imagenet_that_are_here_have_their_own_rows_of_the_published_head(tmp_path: Path) -> None:
    classes = ("n01440764", "n02123045", "n07745940")
    for name in classes:
        folder = tmp_path / "ImageNet" / "val" / name
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32), (number, 2, 3)).save(folder / f"{number}.jpg")
    subject = Frozen("imagenet-c", ("fog-5",), "efficientnet-lite0", head="own", known=("imagenet", "train"))
    scene = subject.scene(Workspace(tmp_path, tmp_path / "out"), Extent(images=3, recalled=1))
    published = build("efficientnet-lite0", 1000, pretrained=True)
    assert torch.equal(scene.source.features, head_rows(published)[[0, 281, 949]])
    assert not scene.source.model.training


def test_domains_that_a_copy_of_the_data_lacks_are_named(workspace: Workspace, tmp_path: Path) -> None:
    subject = replace(frozen(tmp_path, known=("folder", "train")), targets=("bright", "fog-5"))
    assert subject.missing(workspace) == ["fog-5 of folder", "train of folder"]


def test_a_share_of_the_source(workspace: Workspace, tmp_path: Path) -> None:
    scene = frozen(tmp_path, share=0.25).scene(workspace, Extent(images=5, rows=20, recalled=3))
    assert (len(scene.source.labels), len(scene.targets[0]), len(scene.held[0])) == (10, 5, 2)
    assert list(map(len, scene.recalled)) == [2, 2]  # as many of each domain


@pytest.mark.parametrize("head", ["own", "untrained", "linear", "mlp"])
def test_heads(workspace: Workspace, tmp_path: Path, head: str) -> None:
    model = frozen(tmp_path, head=head).scene(workspace, Extent()).source.model
    own = build("convnet", 3, weights=tmp_path / "convnet.pt")
    kept = model.head.state_dict().keys() == own.head.state_dict().keys() and torch.equal(
        next(iter(model.head.parameters())), next(iter(own.head.parameters()))
    )
    assert kept == (head == "own")
    assert all(torch.equal(a, b) for a, b in zip(model.encoder.parameters(), own.encoder.parameters(), strict=True))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("head", [nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))])
def test_a_fitted_head_learns_whatever_the_scale_of_features(head: nn.Module, scale: float) -> None:
    torch.manual_seed(0)
    labels = torch.arange(3).repeat(100)
    rows = scale * (3 * torch.eye(6)[labels] + torch.rand(300, 6))
    made = fitted(head, rows, labels, 0)
    assert (made(rows).argmax(1) == labels).float().mean() > 0.97
