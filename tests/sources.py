"""Small source models with one kind of normalization each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adanpc.lab.adapt.adapter import Source
from adanpc.lab.networks.source import SourceModel

NORMS = ("batch2d", "batch1d", "layer", "group")


def encoder(norm: str, channels: int = 1) -> nn.Module:
    """Images (B, channels, 8, 8) to 6 features, through a layer of one kind of normalization, or none."""
    norms = {
        "batch2d": nn.Sequential(nn.BatchNorm2d(6), nn.AvgPool2d(4), nn.Flatten()),
        "batch1d": nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.BatchNorm1d(6)),
        "layer": nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.LayerNorm(6)),
        "group": nn.Sequential(nn.GroupNorm(2, 6), nn.AvgPool2d(4), nn.Flatten()),
        "none": nn.Sequential(nn.AvgPool2d(4), nn.Flatten()),
    }
    return nn.Sequential(nn.Conv2d(channels, 6, 3, stride=2, padding=1), nn.Tanh(), norms[norm])


def source(norm: str, *, channels: int = 1, classes: int = 3, spread: float = 2.0, lr: float = 1e-2) -> Source:
    """A model with random weights, and the features of 30 random images; its logits of them have this spread."""
    torch.manual_seed(4)
    model = SourceModel(encoder(norm, channels), 6, classes).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():  # away from the zeros and ones that new layers have
                value += 0.6 * torch.rand(value.shape, generator=generator) - 0.3
        features = model.features(images(30, channels=channels, seed=6))
        logits = model.head(features)
        head = model.head.state_dict()
        head["bias"] -= logits.mean(0)
        for value in head.values():
            value *= spread / (logits - logits.mean(0)).std()
    return Source(model, features, torch.arange(30) % classes, lr=lr)


def images(count: int, *, channels: int = 1, seed: int = 0) -> Tensor:
    """Random images (n, channels, 8, 8)."""
    return torch.randn(count, channels, 8, 8, generator=torch.Generator().manual_seed(seed))
