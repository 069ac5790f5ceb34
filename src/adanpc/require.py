"""Checks of single values. Each returns the value, or raises an error that names it and says what was expected."""

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
LONGEST_NAME = 100  # longer strings are not compared with names: that would be slow, and nobody mistyped them
MANY_NAMES = 20  # a message lists more names than these only in part
FIRST_NAMES = 8  # of many names, those that a message lists


def whole(name: str, value: Any, *, least: int | None = None, most: int | None = None) -> int:
    """The value as an int; raises an error unless it is a whole number within the bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise AdaNPCError(f"{name} must be a whole number, got {value!r}")
    number = int(value)
    if least is not None and number < least:
        raise AdaNPCError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise AdaNPCError(f"{name} must be at most {most}, got {number}")
    return number


def number(name: str, value: Any) -> float:
    """The value as a float; raises an error unless it is a number. Infinity counts as a number, NaN does not."""
    if not _is_number(value) or isnan(_as_float(value)):
        raise AdaNPCError(f"{name} must be a number, got {value!r}")
    return _as_float(value)


def positive(name: str, value: Any) -> float:
    """The value as a float; raises an error unless it is a finite number greater than 0."""
    if not _is_number(value) or not 0 < _as_float(value) < inf:
        raise AdaNPCError(f"{name} must be a finite number greater than 0, got {value!r}")
    return float(value)


def between(name: str, value: Any, least: float, most: float) -> float:
    """The value as a float; raises an error unless it is a number from ``least`` to ``most``."""
    if not _is_number(value) or not least <= _as_float(value) <= most:
        raise AdaNPCError(f"{name} must be a number from {least:g} to {most:g}, got {value!r}")
    return float(value)


def text(name: str, value: Any) -> str:
    """The value; raises an error unless it is a string."""
    if not isinstance(value, str):
        raise AdaNPCError(f"{name} must be a string, got {value!r}")
    return value


def one_of(name: str, value: Any, choices: Collection[Name]) -> Name:
    """The value; raises an error that lists the choices, and the one that was probably meant, unless it is a choice."""
    for choice in choices:
        if value == choice:
            return choice
    listed = ", ".join(choices)
    raise AdaNPCError(f"{name} must be one of {listed}, got {brief(value)}{did_you_mean(value, choices)}")


def did_you_mean(value: Any, choices: Collection[str]) -> str:
    """The end of an error message that suggests the closest choice; empty if none is close."""
    if not isinstance(value, str) or len(value) > LONGEST_NAME or value.isdigit():
        return ""  # whoever gives the wrong number has not mistyped another one
    by_lower_case = {choice.lower(): choice for choice in choices}
    close = get_close_matches(value.lower(), by_lower_case, n=1)
    if not close:
        return ""
    return f"; did you mean {by_lower_case[close[0]]!r}?"


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
    """Raises an error for an argument that is not known; it lists the known ones and suggests the closest.

    Args:
        what: the name of the function or class that is called.
        given: the names of the arguments that it is called with.
        known: the names of all its arguments.
    """
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ArgumentError(f"{what} has no argument {name!r}; it has: {', '.join(known)}{hint}")


def known_attribute(what: str, thing: Any, name: str, own: Collection[str], settings: Collection[str]) -> None:
    """Raises an error if a public attribute that an object does not have is about to be set: it may be misspelled.

    Args:
        what: the object in words, such as "a bank".
        thing: the object itself.
        name: the name of the attribute.
        own: the names of the public attributes that are set on objects of this class.
        settings: names of settings, one of which was probably meant.
    """
    if not name.startswith("_") and name not in own and not hasattr(type(thing), name):
        raise ArgumentError(f"{what} has no setting {name!r}{did_you_mean(name, settings)}")


def names_its_arguments(called: Called) -> Called:
    """A decorator for a class or function: an unknown argument raises the error of ``known_arguments``.

    The signature stays the same for editors, ``help`` and scikit-learn.
    """
    if isinstance(called, type):
        called.__init__ = _checking(called.__init__, called.__name__)  # type: ignore[misc]
        return called
    return _checking(called, called.__name__)


def _checking(function: Called, name: str) -> Called:
    """The function, with named arguments checked before it is called."""
    known = [parameter for parameter in signature(function).parameters if parameter not in ("self", "cls")]

    @wraps(function)
    def checked(*values: Any, **named: Any) -> Any:
        known_arguments(name, named, known)
        return function(*values, **named)

    return checked  # type: ignore[return-value]  # it has the same signature


def library(name: str, purpose: str, extra: str | None = None) -> ModuleType:
    """The module of an optional library; raises an error that says how to install it if it is missing.

    Args:
        name: the name of the module.
        purpose: what needs it, for the message.
        extra: the extra of adanpc that installs it; by default the package of that name is to be installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        install = package
        if extra is not None:
            install = f"'adanpc[{extra}]'"
        raise UnavailableError(f"{purpose} needs {package}, which is not installed: pip install {install}") from None


def _as_float(value: Any) -> float:
    """The number as a float; a whole number that is too large for one becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        if value > 0:
            return inf
        return -inf


def _is_number(value: Any) -> bool:
    """Whether the value is a number; True and False, which are numbers to Python, do not count."""
    return isinstance(value, Real) and not isinstance(value, bool)
