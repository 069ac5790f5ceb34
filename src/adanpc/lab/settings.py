"""Settings that come from outside, against what takes them: names and types."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import signature
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from adanpc.errors import AdaNPCError

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}


def check_settings(
    name: str, takers: Collection[Callable[..., Any]], given: Mapping[str, Any], own: Collection[str]
) -> None:
    """Refuses settings that no taker has, and values that are not what is annotated there.

    Args:
        name: of what is set, for the message.
        takers: classes that take the settings, the most special first.
        given: names and values.
        own: parameters that are no settings.
    """
    known: dict[str, Any] = {}
    for taker in takers:
        hints = get_type_hints(getattr(taker, "__init__", taker))
        for key in signature(taker).parameters:
            if key not in own:
                known.setdefault(key, hints.get(key, Any))
    for key, value in given.items():
        if key not in known:
            raise AdaNPCError(f"{name} has no setting {key!r}; it has: {', '.join(known) or 'none'}")
        kinds = _kinds(known[key])
        if kinds <= WORDS.keys() and not any(_fits(value, kind) for kind in kinds):
            said = " or ".join(words for kind, words in WORDS.items() if kind in kinds)
            raise AdaNPCError(f"{key} of {name} must be {said}, got {value!r}")


def _kinds(hint: Any) -> set[Any]:
    """The types that an annotation names."""
    return set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}


def _fits(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
