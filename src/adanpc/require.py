"""Checks of single values, each with a message that names the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from inspect import signature
from math import inf, isnan
from numbers import Integral, Real
from reprlib import repr as brief
from types import ModuleType
from typing import Any, TypeVar

from adanpc.errors import AdaNPCError, ArgumentError, UnavailableError

Name = TypeVar("Name", bound=str)
Called = TypeVar("Called", bound=Callable[..., Any])
LONGEST_NAME = 100  # characters of a name that anybody could have meant
MANY_NAMES = 20  # a message lists more names than these only in part
FIRST_NAMES = 8  # of many names, those that a message lists


def whole(name: str, value: Any, *, least: int | None = None, most: int | None = None) -> int:
    """The value as an int, or an error unless it is a whole number within the bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise AdaNPCError(f"{name} must be a whole number, got {value!r}")
    number = int(value)
    if least is not None and number < least:
        raise AdaNPCError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise AdaNPCError(f"{name} must be at most {most}, got {number}")
    return number


def number(name: str, value: Any) -> float:
    """The value as a float, or an error unless it is a number; infinities are numbers, NaN is not."""
    if not _is_number(value) or isnan(_as_float(value)):
        raise AdaNPCError(f"{name} must be a number, got {value!r}")
    return _as_float(value)


def positive(name: str, value: Any) -> float:
    """The value as a float, or an error unless it is a finite number greater than 0."""
    if not _is_number(value) or not 0 < _as_float(value) < inf:
        raise AdaNPCError(f"{name} must be a finite number greater than 0, got {value!r}")
    return float(value)


def between(name: str, value: Any, least: float, most: float) -> float:
    """The value as a float, or an error unless it is a number from least to most."""
    if not _is_number(value) or not least <= _as_float(value) <= most:
        raise AdaNPCError(f"{name} must be a number from {least:g} to {most:g}, got {value!r}")
    return float(value)


def text(name: str, value: Any) -> str:
    """The value, or an error unless it is a string."""
    if not isinstance(value, str):
        raise AdaNPCError(f"{name} must be a string, got {value!r}")
    return value


def one_of(name: str, value: Any, choices: Collection[Name]) -> Name:
    """The value, or an error that lists the choices and names the one that was probably meant."""
    for choice in choices:
        if value == choice:
            return choice
    raise AdaNPCError(f"{name} must be one of {', '.join(choices)}, got {brief(value)}{did_you_mean(value, choices)}")


def did_you_mean(value: Any, choices: Collection[str]) -> str:
    """The end of an error message: a hint at the closest choice, or nothing if none is close."""
    if not isinstance(value, str) or len(value) > LONGEST_NAME:
        return ""
    lower_case = {choice.lower(): choice for choice in choices}
    close = get_close_matches(value.lower(), lower_case, n=1)
    return f"; did you mean {lower_case[close[0]]!r}?" if close else ""


def unknown(what: str, name: Any, choices: Collection[str], also: str = "") -> str:
    """The error message for an unknown name: first the choice that was probably meant, then the choices.

    Args:
        what: what the name should be the name of, such as "method".
        name: the unknown name.
        choices: the names that are known.
        also: how else it can be named, such as "module:Class".
    """
    known = listed(choices)
    if also:
        known = f"{known}, or {also}"
    hint = did_you_mean(name, choices)
    if hint:
        return f"unknown {what} {name!r}{hint} Available: {known}"
    return f"unknown {what} {name!r}; available: {known}"


def listed(names: Collection[str]) -> str:
    """The names, separated by commas; if there are many, the first few and the number of the others."""
    if len(names) <= MANY_NAMES:
        return ", ".join(names)
    first = list(names)[:FIRST_NAMES]
    return f"{', '.join(first)} and {len(names) - FIRST_NAMES} more"


def known_arguments(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuses the name of an argument that is not known; lists those that are, and names the one that was meant."""
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ArgumentError(f"{what} has no argument {name!r}; it has: {', '.join(known)}{hint}")


def known_attribute(what: str, thing: Any, name: str, own: str, settings: Collection[str]) -> None:
    """Refuses to give a thing a public attribute that it does not have: it would be a misspelled setting.

    Args:
        what: the thing in words.
        thing: to which the attribute would be given.
        name: of the attribute.
        own: the one public attribute that it has.
        settings: one of which is probably meant.
    """
    if not name.startswith("_") and name != own and not hasattr(type(thing), name):
        raise ArgumentError(f"{what} has no setting {name!r}{did_you_mean(name, settings)}")


def names_its_arguments(called: Called) -> Called:
    """The class or function, which now answers an unknown argument as ``known_arguments`` does.

    Its signature stays what it is, for all who look at it: editors, ``help``, scikit-learn.
    """
    if isinstance(called, type):
        called.__init__ = _checking(called.__init__, called.__name__)  # type: ignore[misc]
        return called
    return _checking(called, called.__name__)


def _checking(function: Called, name: str) -> Called:
    """The function, called only with arguments that it has."""
    known = [parameter for parameter in signature(function).parameters if parameter not in ("self", "cls")]

    @wraps(function)
    def checked(*values: Any, **named: Any) -> Any:
        known_arguments(name, named, known)
        return function(*values, **named)

    return checked  # type: ignore[return-value]  # it has the same signature


def library(name: str, purpose: str, extra: str | None = None) -> ModuleType:
    """A library that most users do not need, or an error that says how to install it.

    Args:
        name: of the module.
        purpose: what needs it.
        extra: of adanpc, in which it is; without one, the package has the name of the module.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        install = package if extra is None else f"'adanpc[{extra}]'"
        raise UnavailableError(f"{purpose} needs {package}, which is not installed: pip install {install}") from None


def _as_float(value: Any) -> float:
    """The number as a float; a whole number beyond all floats is infinite."""
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf


def _is_number(value: Any) -> bool:
    """Whether the value is a number; True and False, which Python counts among them, are not meant as one."""
    return isinstance(value, Real) and not isinstance(value, bool)
