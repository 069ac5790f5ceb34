"""Features that are kept belong to one model: to its weights, its layers, and its code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from adanpc.lab.data.domain import Domain
from adanpc.lab.networks.features import features
from adanpc.lab.networks.source import SourceModel

CODE = """
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(48, 3)

    def forward(self, images):
        return {expression}
"""


def some_domain() -> Domain:
    images = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    return Domain("images", images, torch.arange(6) % 2)


def model_of(encoder: nn.Module) -> SourceModel:
    return SourceModel(encoder, 3, 2)


def test_layers_without_weights_count(tmp_path: Path) -> None:
    linear = nn.Linear(48, 3)
    rectified = model_of(nn.Sequential(nn.Flatten(), linear, nn.ReLU()))
    bent = model_of(nn.Sequential(nn.Flatten(), linear, nn.Tanh()))
    domain = some_domain()
    first = features(rectified, domain, cache=tmp_path)
    assert not torch.equal(features(bent, domain, cache=tmp_path), first)
    assert torch.equal(features(rectified, domain, cache=tmp_path), first)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_code_of_ones_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    weights = nn.Linear(48, 3).state_dict()
    domain = some_domain()
    made = []
    for expression in ("self.layer(images.flatten(1))", "self.layer(images.flatten(1)).relu()"):
        file.write_text(CODE.format(expression=expression))
        spec = importlib.util.spec_from_file_location("mine_for_a_test", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        code = compile(file.read_text(), str(file), "exec")  # not a cached version of the same second
        exec(code, module.__dict__)
        encoder = module.Mine()
        encoder.layer.load_state_dict(weights)
        made.append(features(model_of(encoder), domain, cache=tmp_path / "cache"))
    assert torch.equal(made[0].relu(), made[1])
    assert not torch.equal(made[0], made[1])


def test_a_class_that_was_typed_at_a_prompt_has_no_file(tmp_path: Path) -> None:
    kind = type("Typed", (nn.Sequential,), {"__module__": "typed"})
    encoder = kind(nn.Flatten(), nn.Linear(48, 3))
    assert features(model_of(encoder), some_domain(), cache=tmp_path).shape == (6, 3)
