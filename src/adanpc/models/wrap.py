"""Any trained model as the encoder of a bank: ``wrap(model, loader)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adanpc.core import AdaNPC, Append, Change, MemoryBank, Prediction
from adanpc.errors import AdaNPCError
from adanpc.models.recipe import RecipeError, describe, fingerprint
from adanpc.progress import track

INPUT_OF = "input of "


class Wrapped:
    """A model whose features are answered by a bank. The model itself is never changed.

    Args:
        model: any module that takes a batch of inputs.
        classifier: the bank and how it votes.
        layer: the module whose output is the feature, or ``"input of NAME"``.
        preprocessing: what turns raw data into inputs, see ``describe``.
    """

    def __init__(self, model: nn.Module, classifier: AdaNPC, layer: str, preprocessing: Any = None) -> None:
        self.model, self.classifier, self.layer = model, classifier, layer
        self.preprocessing = describe(preprocessing)

    def features(self, inputs: Any) -> Tensor:
        """The features (B, D) of a batch of inputs."""
        return extract(self.model, self.layer, inputs)[0]

    def predict(self, inputs: Any) -> Prediction:
        """What each input would be answered if it came next; changes nothing."""
        return self.classifier.predict(self.features(inputs))

    def propose(self, inputs: Any) -> tuple[Prediction, Append | None]:
        """The answers to inputs that arrive in this order, and the change by which the confident ones join.

        The change is not applied, so that it can be written to a log first; see ``AdaNPC.propose``.
        """
        return self.classifier.propose(self.features(inputs))

    def apply(self, change: Change) -> range:
        """Carries out one change, see ``AdaNPC.apply``."""
        return self.classifier.apply(change)

    def step(self, inputs: Any) -> Prediction:
        """Answers the inputs in order and lets confident answers join the bank."""
        return self.classifier.step(self.features(inputs))

    @property
    def recipe(self) -> dict[str, str]:
        """How features are made: what a saved bank must meet again."""
        return {"layer": self.layer, "preprocessing": self.preprocessing, "weights": fingerprint(self.model)}

    def check(self, recipe: dict[str, str]) -> None:
        """Refuses a bank whose recipe differs from this model's."""
        for name, ours in self.recipe.items():
            theirs = recipe.get(name, "")
            if ours != theirs:
                raise RecipeError(f"the bank was built with {name} {theirs or 'unknown'!r}, this model has {ours!r}")


def wrap(
    model: nn.Module,
    loader: Iterable[Sequence[Any]],
    *,
    layer: str | None = None,
    classes: int | None = None,
    preprocessing: Any = None,
    storage: str = "float32",
    capacity: int | None = None,
    evict: str = "fifo",
    soft: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Wrapped:
    """The model with a bank of the features and labels of all samples of ``loader``.

    Args:
        model: a trained classifier.
        loader: batches (inputs, labels) or (inputs, labels, domains) of source data, already preprocessed.
        layer: the feature layer by its name in ``model.named_modules()``: its output, or with ``"input of NAME"`` its
            input, averaged over space or tokens if there are any. By default the input of the model's last linear
            layer, found by running one batch.
        classes: how many; by default the width of that linear layer, or with ``layer`` as many as the labels name.
        preprocessing: what made the inputs, recorded with the bank and checked when it is loaded; by default the
            ``transform`` of the loader's data set, if it has one.
        storage, capacity, evict, soft, device: of the ``MemoryBank``.
        **options: of ``AdaNPC``: k, rule, temperature, admission, centering, …
    """
    if preprocessing is None:
        preprocessing = getattr(getattr(loader, "dataset", None), "transform", None)
    features, labels, domains = [], [], []
    for batch in track(loader, "Building the bank"):
        if not isinstance(batch, Sequence) or len(batch) < 2:
            raise AdaNPCError(f"the loader must give batches (inputs, labels), got {type(batch).__name__}")
        if layer is None:
            layer, classes = find_head(model, batch[0], classes)
        features.append(extract(model, layer, batch[0])[0].to(device))
        labels.append(_numbers("labels", batch[1]))
        domains.append(_numbers("domains", batch[2]) if len(batch) > 2 else torch.full_like(labels[-1], -1))
    if layer is None or not features:
        raise AdaNPCError("the loader gave no batch: a bank needs labeled source data")
    bank = MemoryBank(
        features[0].shape[1],
        classes or 1 + max((int(label.max()) for label in labels if len(label)), default=0),
        storage=storage,
        capacity=capacity,
        evict=evict,
        soft=soft,
        device=device,
    )
    classifier = AdaNPC(bank, **options)
    if classifier.settings.centering.mode != "none":  # a mean needs all of them at once
        features, labels, domains = [torch.cat(features)], [torch.cat(labels)], [torch.cat(domains)]
    while features:  # let go of each batch as it is stored
        keys = torch.arange(bank.next_id, bank.next_id + len(features[0]))
        classifier.learn(features.pop(0), labels.pop(0), domain=domains.pop(0), keys=keys)
    return Wrapped(model, classifier, layer, preprocessing)


def _numbers(name: str, values: Any) -> Tensor:
    """A copy of a loader's whole numbers (B,): loaders may use their arrays again."""
    try:
        return torch.as_tensor(values).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise AdaNPCError(f"the loader's {name} must be whole numbers, got {type(values).__name__}: {error}") from None


def find_head(model: nn.Module, inputs: Any, classes: int | None = None) -> tuple[str, int]:
    """``"input of NAME"`` and the width of the linear layer whose output is the model's, found by running a batch."""
    outputs: dict[str, Tensor] = {}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}

    def remember(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, given, made: outputs.__setitem__(name, made)

    hooks = [module.register_forward_hook(remember(name)) for name, module in linear.items()]
    try:
        result = _run(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for name, made in reversed(outputs.items()):
        if isinstance(result, Tensor) and made.shape == result.shape and torch.equal(made, result):
            return INPUT_OF + name, classes or linear[name].out_features
    names = ", ".join(name for name, _ in model.named_modules() if name)
    raise AdaNPCError(f"no linear layer makes the model's output; name the feature layer with layer=…, one of: {names}")


def extract(model: nn.Module, layer: str, inputs: Any) -> tuple[Tensor, Any]:
    """The features (B, D) of a batch at a layer, and the model's own output."""
    modules = dict(model.named_modules())
    name, before = layer.removeprefix(INPUT_OF), layer.startswith(INPUT_OF)
    if name not in modules:
        raise AdaNPCError(f"the model has no layer {name!r}; it has: {', '.join(filter(None, modules))}")
    caught: list[Any] = []
    # Copies, taken before the module or the next one can work in place on them.
    if before:
        hook = modules[name].register_forward_pre_hook(
            lambda module, given, named: caught.append(_copy([*given, *named.values()][0])), with_kwargs=True
        )
    else:
        hook = modules[name].register_forward_hook(lambda module, given, made: caught.append(_copy(made)))
    try:
        result = _run(model, inputs)
    finally:
        hook.remove()
    if not caught or not isinstance(caught[-1], Tensor):
        raise AdaNPCError(f"layer {layer!r} gave no tensor when the model ran; name another one")
    return _pooled(caught[-1]), result


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _run(model: nn.Module, inputs: Any) -> Any:
    """The model's output in evaluation mode, without gradients, on its own device; its mode is put back."""
    place = next(model.parameters(), torch.zeros(0)).device
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return model(inputs.to(place) if isinstance(inputs, Tensor) else inputs)
    finally:
        if model.training is not modes[0][1]:
            model.train(modes[0][1])  # some modules do more than note their mode
        for module, training in modes:
            module.training = training


def _pooled(features: Tensor) -> Tensor:
    """(B, D) from (B, D), from (B, D, H, W) by the mean over space, from (B, T, D) by the mean over tokens."""
    if not 2 <= features.ndim <= 4:
        raise AdaNPCError(f"features must have shape (B, D), (B, T, D) or (B, D, H, W), got {tuple(features.shape)}")
    if features.ndim == 4:
        return features.mean((2, 3))
    return features.mean(1) if features.ndim == 3 else features
