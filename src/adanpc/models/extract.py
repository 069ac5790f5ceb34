"""Runs a model and captures the features at one of its layers. Any number of threads may do so at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from threading import Lock, get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.models.inputs import ModelInputs, check_call, first_tensor, inputs_for, plain_dtype, token_mask
from adanpc.models.layers import INPUT_OF, module_at, name_of, plain_name, unwrapped, visible_modules
from adanpc.models.modes import evaluating
from adanpc.models.outputs import joined, possible_logits

M = TypeVar("M", bound=nn.Module)

_HOOKS = Lock()  # torch numbers hooks without a lock, so two threads could get the same number


def extract(model: nn.Module, layer: str, inputs: Any, size: int | None = None) -> tuple[Tensor, Any]:
    """The features (B, D) of a batch at a layer, and the model's own output, from one pass.

    Args:
        model: the model. It runs in evaluation mode and without gradients; afterward it has the mode it had before.
        layer: the name of the module whose output is the feature, or ``"input of NAME"``.
        inputs: a batch, see ``inputs_for``.
        size: if given, the model runs on batches of exactly this size; see ``encode_size`` of ``wrap``.
    """
    target = unwrapped(model)
    given = inputs_for(target, inputs)
    if size is None:
        return _one_pass(target, layer, given)
    size = require.whole("encode_size", size, least=1)
    count = given.count
    if count == 0:
        return _one_pass(target, layer, given)
    features = []
    outputs = []
    for batch in given.batches(size):
        feature, output = _one_pass(target, layer, batch)
        features.append(feature)
        outputs.append(output)
    return torch.cat(features)[:count], joined(outputs, size, count)


def run(model: nn.Module, inputs: Any) -> Any:
    """The model's output in evaluation mode and without gradients, on its own device."""
    target = unwrapped(model)
    return _call(target, inputs_for(target, inputs))


def find_head(model: nn.Module, inputs: Any, classes: int | None = None) -> tuple[str, int]:
    """The feature layer, ``"input of NAME"``, and the number of classes, found by running a batch.

    NAME is the linear layer that returns exactly what the model returns: its head.

    Args:
        model: the model to run.
        inputs: a batch, see ``inputs_for``.
        classes: the number of classes, if it is known; by default the width of the head.
    """
    target = unwrapped(model)
    linear = [module for module in visible_modules(target).values() if isinstance(module, nn.Linear)]
    returned: dict[nn.Linear, Any] = {}  # what each linear layer returned, in the order in which they ran
    with _watching(linear, returned.__setitem__):
        output = run(target, inputs)
    for logits in possible_logits(output):
        for module in reversed(returned):
            if _equal(returned[module], logits):
                layer = INPUT_OF + name_of(model, module)
                return layer, classes or module.out_features
    raise AdaNPCError(
        "no linear layer returns exactly what the model returns, so its features cannot be found: name a layer, "
        f"such as {_suggestion(target, inputs, output)}; model.named_modules() lists all"
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values.

    NaN equals NaN here: the head is then found even if its output is NaN, and a later check can say that the features
    hold NaN.
    """
    if one.shape != other.shape:
        return False
    both_nan = one.isnan() & other.isnan()
    return bool(((one == other) | both_nan).all())


def _suggestion(model: nn.Module, inputs: Any, output: Any) -> str:
    """A feature layer to try, found by running a batch.

    It is the input of the last linear layer that is as wide as the output. If there is none, it is the layer that runs
    before the last one with weights, since that one is likely to be the head.
    """
    names = {module: name for name, module in visible_modules(model).items() if name}
    ran: dict[nn.Module, None] = {}  # in this order
    with _watching(list(names), lambda module, _: ran.setdefault(module)):
        run(model, inputs)
    leaves = [module for module in ran if not any(part in ran for part in module.children())]
    if not leaves:
        return "layer='', the output of the model"
    widths = [logits.shape[-1] for logits in possible_logits(output)]
    heads = [module for module in leaves if isinstance(module, nn.Linear) and module.out_features in widths]
    if heads:
        return f"layer={INPUT_OF + plain_name(names[heads[-1]])!r}"
    suggested = leaves[-1]
    for before, layer in pairwise(leaves):
        if any(True for _ in layer.parameters()):
            suggested = before
    return f"layer={plain_name(names[suggested])!r}"


def _one_pass(model: nn.Module, layer: str, inputs: ModelInputs) -> tuple[Tensor, Any]:
    """The features (B, D) of all inputs and the model's output, from one call of the model."""
    before = layer.startswith(INPUT_OF)
    module = module_at(model, layer.removeprefix(INPUT_OF))
    captured: list[Tensor] = []

    def capture(module: nn.Module, value: Any) -> None:
        tensor = first_tensor(value)
        if tensor is not None:
            captured.append(tensor.clone())  # this module or the next one may modify it in place

    with _watching([module], capture, before=before):
        output = _call(model, inputs)
    if not captured:
        raise AdaNPCError(f"layer {layer!r} returned no tensor when the model ran; choose another one")
    features = captured[-1]
    mask = None
    if features.ndim == 3:
        mask = token_mask(model, inputs)
    return _pooled(features, mask), output


@contextmanager
def _watching(modules: Sequence[M], note: Callable[[M, Any], None], *, before: bool = False) -> Iterator[None]:
    """Calls ``note(module, value)`` whenever the calling thread runs one of the modules.

    Other threads may run the same model at the same time. torch calls a hook in all of them, so hooks ignore the runs
    of other threads.

    Args:
        modules: the modules to watch.
        note: called with the module and its output, or its inputs.
        before: True to pass the inputs, False to pass the output.
    """
    owner = get_ident()

    # ``named`` has a default because torch omits it if the hook is removed while another thread is about to call it.
    def on_input(module: Any, positional: Any, named: Any = None) -> None:
        if get_ident() == owner:
            note(module, [positional, named])

    def on_output(module: Any, positional: Any, output: Any) -> None:
        if get_ident() == owner:
            note(module, output)

    hooks = []
    try:
        for module in modules:
            with _HOOKS:
                if before:
                    hooks.append(module.register_forward_pre_hook(on_input, with_kwargs=True))
                else:
                    hooks.append(module.register_forward_hook(on_output))
        yield
    finally:
        for hook in hooks:
            with _HOOKS:
                hook.remove()


def _call(model: nn.Module, inputs: ModelInputs) -> Any:
    """The model's output; raises an InputError if it does not take these inputs."""
    call: Any = model
    if getattr(model, "_compiled_call_impl", None) is not None:  # after model.compile(), only this call runs hooks
        call = model._call_impl
    try:
        with evaluating(model), torch.no_grad():
            return call(*inputs.positional, **inputs.named)
    except Exception as error:
        if isinstance(error, TypeError):
            check_call(model, inputs)
        error.add_note(f"adanpc called {_described(model)}, with {inputs}")
        raise


def _described(model: nn.Module) -> str:
    """The class of a model, and the type and device of its weights."""
    kind = type(model).__name__
    for weights in model.parameters():
        if weights.is_floating_point():
            return f"{kind}, whose weights are {plain_dtype(weights.dtype)} on {weights.device}"
    return f"{kind}, which has no weights"


def _pooled(features: Tensor, mask: Tensor | None) -> Tensor:
    """Features as (B, D): those of shape (B, D, H, W) are averaged over space, those of (B, T, D) over tokens.

    Tokens that ``mask`` (B, T) marks as padding do not count.
    """
    if not 2 <= features.ndim <= 4:
        raise AdaNPCError(f"features must have shape (B, D), (B, T, D) or (B, D, H, W), got {tuple(features.shape)}")
    if features.ndim == 4:
        return features.mean((2, 3))
    if features.ndim == 2:
        return features
    if mask is None or mask.shape != features.shape[:2]:
        return features.mean(1)
    real = mask.to(features.device).bool()[:, :, None]  # (B, T, 1)
    total = features.masked_fill(~real, 0).sum(1)  # (B, D)
    return total / real.sum(1).clamp(min=1)
