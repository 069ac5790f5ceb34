"""Recipes: what must be the same when a bank meets its model again, and what need not be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import adanpc
from adanpc.errors import AdaNPCError
from adanpc.models.extract import extract, find_head
from adanpc.models.layers import plain_layer, plain_name, unwrapped
from adanpc.models.recipe import RecipeError, feature_fingerprint, fingerprint


def net(classes: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(body, nn.Linear(8, classes))


INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(12) % 3


def compiled_in_part(model: nn.Sequential) -> nn.Module:
    body: Any = torch.compile(model[0], backend="eager")
    model[0] = body
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


FORMS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": compiled_in_place,
    "compiled in part": compiled_in_part,
    "parallel": nn.DataParallel,
    "compiled and parallel": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("form", FORMS)
def test_compiled_and_parallel_models_have_the_features_and_the_recipe_of_the_model(form: str) -> None:
    plain = adanpc.wrap(net(), [(INPUTS, LABELS)])
    model = FORMS[form](net().eval())
    model(INPUTS)  # compiles it, before there is any hook
    name, classes = find_head(model, INPUTS)
    assert model.get_submodule(name.removeprefix("input of ")).out_features == classes == 3
    wrapped = adanpc.wrap(model, [(INPUTS, LABELS)])
    assert torch.equal(wrapped.features(INPUTS), plain.features(INPUTS))
    assert wrapped.layer == "input of 1"
    assert wrapped.recipe == plain.recipe


@pytest.mark.parametrize("form", ["compiled", "compiled in place", "parallel"])
def test_a_bank_moves_between_forms_of_a_model(form: str, tmp_path: Path) -> None:
    wrapped = adanpc.wrap(net(), [(INPUTS, LABELS)])
    adanpc.save(wrapped, tmp_path / "bank")
    model = FORMS[form](net())
    loaded = adanpc.load(tmp_path / "bank", model)
    assert torch.equal(loaded.step(INPUTS).probs, wrapped.step(INPUTS).probs)
    adanpc.save(loaded, tmp_path / "bank")
    assert adanpc.load(tmp_path / "bank", net()).recipe == wrapped.recipe


def test_layers_recorded_with_prefixes_are_found() -> None:
    wrapped = adanpc.Wrapped(net(), adanpc.wrap(net(), [(INPUTS, LABELS)]).classifier, "input of module.1")
    wrapped.check({**wrapped.recipe, "layer": "input of _orig_mod.1"})
    assert wrapped.features(INPUTS).shape == (12, 8)


def test_a_layer_inside_a_compiled_part_is_refused() -> None:
    model = compiled_in_part(net())
    with pytest.raises(AdaNPCError, match=r"the model has no layer '0\.1'.*it has: 0, 1$"):
        extract(model, "0.1", INPUTS)
    assert extract(model, "0", INPUTS)[0].shape == (12, 8)


def test_names_without_the_parts_of_wrappers() -> None:
    assert plain_name("module._orig_mod.body.module.0.weight") == "body.0.weight"
    assert plain_layer("input of module.fc") == "input of fc"
    assert plain_layer("module.fc") == "fc"
    assert plain_layer("input of ") == "input of "
    inner = net()
    assert unwrapped(nn.DataParallel(nn.DataParallel(inner))) is inner


def test_another_head_has_the_same_features() -> None:
    wrapped = adanpc.wrap(net(), [(INPUTS, LABELS)])
    other = net(classes=7)
    adanpc.Wrapped(other, wrapped.classifier, wrapped.layer).check(wrapped.recipe)
    with torch.no_grad():
        other[0][0].bias.add_(1)  # type: ignore[index]
    with pytest.raises(RecipeError, match="weights 'features:.*strict=False"):
        adanpc.Wrapped(other, wrapped.classifier, wrapped.layer).check(wrapped.recipe)


def test_buffers_decide_features_too() -> None:
    model = net()
    before = feature_fingerprint(model, "input of 1")
    model[0][1].running_mean.add_(1)  # type: ignore[index]
    assert feature_fingerprint(model, "input of 1") != before


def test_with_a_named_output_all_of_the_model_counts() -> None:
    model = net()
    before = feature_fingerprint(model, "0")
    with torch.no_grad():
        model[1].bias.add_(1)  # type: ignore[operator]
    assert feature_fingerprint(model, "0") != before


@pytest.mark.parametrize("form", ["plain", "compiled", "parallel"])
def test_hashes_of_whole_models_in_older_files_are_known(form: str) -> None:
    wrapped = adanpc.wrap(FORMS[form](net()), [(INPUTS, LABELS)])
    for same in (net(), nn.DataParallel(net())):
        wrapped.check({**wrapped.recipe, "weights": fingerprint(wrapped.model)})
        if form == "plain":
            old = {**wrapped.recipe, "weights": fingerprint(net())}
            adanpc.Wrapped(same, wrapped.classifier, wrapped.layer).check(old)
    with pytest.raises(RecipeError, match="built with weights '0123456789abcdef', this model has 'features:"):
        wrapped.check({**wrapped.recipe, "weights": "0123456789abcdef"})


def test_the_hash_of_a_whole_model_stays_what_it_was() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    assert fingerprint(model) == "631310110f2eaafe"


def test_half_precision_needs_strict_false_and_says_so() -> None:
    wrapped = adanpc.wrap(net(), [(INPUTS, LABELS)])
    half = adanpc.Wrapped(net().half(), wrapped.classifier, wrapped.layer)
    with pytest.raises(RecipeError, match=r"pass strict=False if you know that the features are the same.*\.half\(\)"):
        half.check(wrapped.recipe)
    half.check(wrapped.recipe, strict=False)
    answer = half.predict(INPUTS.half())
    assert torch.equal(answer.labels, wrapped.predict(INPUTS).labels)


def test_a_missing_preprocessing_is_asked_for_by_name() -> None:
    wrapped = adanpc.wrap(net(), [(INPUTS, LABELS)], preprocessing="ToTensor()")
    without = adanpc.Wrapped(net(), wrapped.classifier, wrapped.layer)
    with pytest.raises(RecipeError, match=r"prepared by 'ToTensor\(\)': pass preprocessing=transform"):
        without.check(wrapped.recipe)
    without.check(wrapped.recipe, strict=False)
    with pytest.raises(RecipeError, match=r"built without a preprocessing, got 'ToTensor\(\)': leave out preprocess"):
        wrapped.check(without.recipe)
    other = adanpc.Wrapped(net(), wrapped.classifier, wrapped.layer, "Resize()")
    with pytest.raises(
        RecipeError, match=r"'ToTensor\(\)', not by 'Resize\(\)': pass the former as preprocessing; or "
    ):
        other.check(wrapped.recipe)


def test_another_layer_is_refused_even_if_not_strict() -> None:
    wrapped = adanpc.wrap(net(), [(INPUTS, LABELS)])
    with pytest.raises(RecipeError, match="built with layer '0', this model has 'input of 1'; wrap it with layer='0'"):
        wrapped.check({**wrapped.recipe, "layer": "0"}, strict=False)
