"""Check settings that users type against the signatures of the classes that take them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from inspect import signature
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from adanpc.errors import AdaNPCError
from adanpc.require import did_you_mean

DESCRIPTIONS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}


def check_settings(
    name: str, takers: Collection[Callable[..., Any]], given: Mapping[str, Any], ignored: Collection[str]
) -> None:
    """Refuses settings that no class takes, and values that do not have the annotated type.

    Args:
        name: the name of what the settings are for, for messages.
        takers: classes whose constructors take the settings; if several take one, the first decides its type.
        given: settings by name.
        ignored: parameters of the constructors that are not settings.
    """
    types = _annotated_types(takers, ignored)
    for setting, value in given.items():
        if setting not in types:
            choices = ", ".join(types) or "none"
            hint = did_you_mean(setting, types)
            raise AdaNPCError(f"{name} has no setting {setting!r}; it has: {choices}{hint}")
        allowed = _members(types[setting])
        if not allowed <= DESCRIPTIONS.keys():
            continue  # a type without a short description: the class itself must check the value
        if not any(_fits(value, kind) for kind in allowed):
            description = " or ".join(text for kind, text in DESCRIPTIONS.items() if kind in allowed)
            raise AdaNPCError(f"{setting} of {name} must be {description}, got {value!r}")


def _annotated_types(takers: Collection[Callable[..., Any]], ignored: Collection[str]) -> dict[str, Any]:
    """Returns the annotation of every setting; Any where there is none."""
    types: dict[str, Any] = {}
    for taker in takers:
        for parameter, annotation in _parameters(taker):
            if parameter not in ignored:
                types.setdefault(parameter, annotation)
    return types


@cache  # planning a table checks the settings of thousands of runs, but only a few classes take them
def _parameters(taker: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    """Returns every parameter of a constructor with its annotation."""
    try:
        hints = get_type_hints(getattr(taker, "__init__", taker))
    except NameError:  # an annotation that is only imported for type checkers
        hints = {}
    return tuple((name, hints.get(name, Any)) for name in signature(taker).parameters)


def _members(annotation: Any) -> set[Any]:
    """Returns the types that an annotation allows: those of a union, or the annotation itself."""
    if get_origin(annotation) in (Union, UnionType):
        return set(get_args(annotation))
    return {annotation}


def _fits(value: Any, kind: type) -> bool:
    """Returns whether a value has a type. True and false are not numbers here, and a whole number is also a float."""
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind)
