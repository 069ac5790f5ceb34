"""Find users' own classes and functions: ``my_module:MyClass``, ``path/to/file.py:MyClass``, or by entry point.

Finding a class or a function runs the code of its module. So only names that the user has typed may be looked up here,
never names that were read from a file. A name without a colon is looked up among the entry points of installed
packages. Such a name may come from a file, because the user has chosen to install the package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import Any

from adanpc.errors import AdaNPCError
from adanpc.require import did_you_mean

# The groups of entry points in which installed packages may register their own, in their pyproject.toml.
METHODS = "adanpc.methods"
ALGORITHMS = "adanpc.algorithms"
ENCODERS = "adanpc.encoders"
DATA_SETS = "adanpc.data"


class UntrustedCodeError(AdaNPCError):
    """A file names an encoder or data set of someone's own, which nobody has named in this process."""

    code = "untrusted-code"


_modules_of_files: dict[Path, ModuleType] = {}  # a file is executed only once, so that its classes stay the same


def is_own(name: str) -> bool:
    """Returns whether a name says where a class is defined; registered names have no colon."""
    return ":" in name


def split_name(name: str) -> tuple[str, str]:
    """Returns the two parts of a name: the module or file, and the class."""
    place, _, class_name = name.rpartition(":")  # the last colon: a path on Windows may have another
    return place, class_name


def absolute_name(name: str) -> str:
    """Returns the name with the absolute path of its file, so that it means the same in every working folder."""
    place, class_name = split_name(name)
    if place.endswith(".py"):
        # Unlike Path.resolve, this neither looks at the disk nor refuses any text: the name may come from a stranger.
        place = os.path.abspath(place)
    return f"{place}:{class_name}"


def own_class(name: str, base: type[Any], what: str, error: type[AdaNPCError]) -> type[Any]:
    """Returns the class of a name: a subclass of ``base`` that is not abstract.

    Args:
        name: ``my_module:MyClass`` from any module that Python can import from the current folder, or
            ``path/to/file.py:MyClass``. Its code is run.
        base: the class that it must be derived from.
        what: what such a class is called in messages, such as "test-time method".
        error: the class of the error that is raised if there is no such class.
    """
    place, class_name = split_name(name)
    if not place or not class_name:
        raise error(f"name a {what} of your own as module:Class or file.py:Class, got {name!r}")
    module = _module(place, error)
    kind: Any = getattr(module, class_name, None)
    if kind is None:
        usable = [key for key, value in vars(module).items() if _is_usable(value, base)]
        names = ", ".join(usable) or "none"
        hint = did_you_mean(class_name, usable)
        raise error(f"{place} has no class {class_name!r}; {what}s in it: {names}{hint}")
    return _checked_class(name, kind, base, what, error)


def registered_class(group: str, name: str, base: type[Any], what: str, error: type[AdaNPCError]) -> type[Any] | None:
    """Returns the class that an installed package has registered under a name, or None if there is none.

    Args:
        group: a group of entry points, such as ``METHODS``.
        name: the name that the package has chosen.
        base, what, error: see ``own_class``.
    """
    if name not in _registered(group):
        return None
    return _checked_class(name, _loaded(group, name, error), base, what, error)


def registered_names(group: str) -> tuple[str, ...]:
    """Returns the names that installed packages have registered in a group."""
    return tuple(_registered(group))


def _checked_class(name: str, kind: Any, base: type[Any], what: str, error: type[AdaNPCError]) -> type[Any]:
    """Returns the class if it can be used, or raises the error."""
    is_derived = isinstance(kind, type) and issubclass(kind, base)
    if not is_derived:
        raise error(f"{name} is not a {what}: make it a subclass of {base.__module__}.{base.__name__}")
    if isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise error(f"{name} is abstract: it must define {missing}")
    found: type[Any] = kind
    return found


class OwnFunctions:
    """Users' own functions of one kind: those that were named in this process, and those of installed packages.

    Args:
        group: a group of entry points.
        what: what such a function is called in messages, such as "encoder".
        error: the class of the error that is raised if there is no such function.
        finder: the function by which users name one in Python, for messages.
    """

    def __init__(self, group: str, what: str, error: type[AdaNPCError], finder: str) -> None:
        self.group = group
        self.what = what
        self.error = error
        self.finder = finder
        self.named: dict[str, Callable[..., Any]] = {}  # by absolute name

    def find(self, name: str) -> Callable[..., Any]:
        """Returns the function of a name, and executes its module; from then on the name is known in this process."""
        place, function_name = split_name(name)
        if not place or not function_name:
            raise self.error(f"name your own {self.what} as module:function or file.py:function, got {name!r}")
        module = _module(place, self.error)
        if not hasattr(module, function_name):
            usable = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise self.error(f"{place} has no {function_name!r}{did_you_mean(function_name, usable)}")
        function = self._checked(name, getattr(module, function_name))
        self.named[absolute_name(name)] = function
        return function

    def known(self, name: str) -> Callable[..., Any] | None:
        """Returns the function of a name that may come from a file; no code is executed only because a file names it.

        Returns None if the name does not say where a function is defined and no installed package has registered it.
        """
        if is_own(name):
            if absolute_name(name) not in self.named:
                raise UntrustedCodeError(
                    f"the {self.what} {name!r} is not part of adanpc, and code is never executed because a file names "
                    f"it: if you trust it, call {self.finder}({name!r}) first"
                )
            return self.named[absolute_name(name)]
        if name not in _registered(self.group):
            return None
        return self._checked(name, _loaded(self.group, name, self.error))

    def _checked(self, name: str, function: Any) -> Callable[..., Any]:
        if not callable(function):
            raise self.error(f"{name} cannot be called: name the function that makes the {self.what}")
        found: Callable[..., Any] = function
        return found


@cache
def _registered(group: str) -> dict[str, EntryPoint]:
    """Returns the entry points of installed packages in a group, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


def _loaded(group: str, name: str, error: type[AdaNPCError]) -> Any:
    """Returns the object of an entry point; whatever goes wrong while its module runs becomes one sentence."""
    entry = _registered(group)[name]
    try:
        return entry.load()
    except Exception as cause:  # the code of a package may raise anything
        reason = f"{type(cause).__name__}: {cause}"
        raise error(
            f"{name}, registered by an installed package as {entry.value}, cannot be loaded: {reason}"
        ) from cause


def _is_usable(value: object, base: type[Any]) -> bool:
    return isinstance(value, type) and issubclass(value, base) and not isabstract(value)


def _module(place: str, error: type[AdaNPCError]) -> ModuleType:
    """Returns the module with this name or in this file; whatever goes wrong while it runs becomes one sentence."""
    try:
        if place.endswith(".py"):
            return _module_of_file(Path(place).resolve(), error)
        _make_importable(Path.cwd())
        return import_module(place)
    except ModuleNotFoundError as cause:
        missing = cause.name or ""
        # It may be the module itself that is missing, or a package that it is in, or one that it imports.
        if place == missing or place.startswith(f"{missing}."):
            raise error(f"there is no module {place!r} in {Path.cwd()} or among installed packages") from cause
        raise error(f"{place} cannot be imported: {cause}") from cause
    except error:
        raise
    except Exception as cause:  # a user's module may raise anything
        raise error(f"{place} cannot be imported: {type(cause).__name__}: {cause}") from cause


def _module_of_file(path: Path, error: type[AdaNPCError]) -> ModuleType:
    """Returns the module in a file; a second call returns the same module."""
    if path in _modules_of_files:
        return _modules_of_files[path]
    if not path.is_file():
        raise error(f"there is no file {path}")
    spec = spec_from_file_location(f"adanpc_own_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise error(f"{path} cannot be imported as a Python module")
    _make_importable(path.parent)  # so that it finds the modules beside it, as a script does
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    _modules_of_files[path] = module
    return module


def _make_importable(folder: Path) -> None:
    """Lets Python import modules from a folder, as the last resort: a file random.py must not replace Python's own."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
