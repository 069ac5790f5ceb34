"""Every test-time method by name, and methods of your own by where they are defined."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isabstract
from pathlib import Path
from types import ModuleType

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter
from adanpc.lab.adapt.bank import AdaNPC, AdaNPCPublished
from adanpc.lab.adapt.combined import AdaNPCETA, AdaNPCTent
from adanpc.lab.adapt.filtered import EATA, ETA
from adanpc.lab.adapt.fixed import LAME, FrozenKNN, Linear
from adanpc.lab.adapt.memory import NOTE, RoTTA
from adanpc.lab.adapt.prototypes import T3A, T3APublished
from adanpc.lab.adapt.pseudo import SHOT, SHOTIM, PLClf, PLFull
from adanpc.lab.adapt.reliable import SAR, DeYO
from adanpc.lab.adapt.retrained import AdaNPCBN, AdaNPCBNPublished
from adanpc.lab.adapt.roid import ROID
from adanpc.lab.adapt.rotation import TTT, TTTOnline
from adanpc.lab.adapt.statistics import NEO, BNAdapt
from adanpc.lab.adapt.tast import TAST
from adanpc.lab.adapt.teacher import CoTTA
from adanpc.lab.adapt.tent import Tent, TentClf, TentPreBN
from adanpc.lab.adapt.views import MEMO, TTAug
from adanpc.require import did_you_mean

ADAPTERS: dict[str, type[Adapter]] = {
    "source": Linear,
    "knn": FrozenKNN,
    "adanpc": AdaNPC,
    "adanpc-published": AdaNPCPublished,
    "adanpc-bn": AdaNPCBN,
    "adanpc-bn-published": AdaNPCBNPublished,
    "adanpc-tent": AdaNPCTent,
    "adanpc-eta": AdaNPCETA,
    "t3a": T3A,
    "t3a-published": T3APublished,
    "tast": TAST,
    "lame": LAME,
    "neo": NEO,
    "bn-adapt": BNAdapt,
    "tent": Tent,
    "tent-clf": TentClf,
    "tent-prebn": TentPreBN,
    "pl-clf": PLClf,
    "pl-full": PLFull,
    "shot": SHOT,
    "shot-im": SHOTIM,
    "eta": ETA,
    "eata": EATA,
    "sar": SAR,
    "deyo": DeYO,
    "cotta": CoTTA,
    "roid": ROID,
    "note": NOTE,
    "rotta": RoTTA,
    "ttaug": TTAug,
    "memo": MEMO,
    "ttt": TTT,
    "ttt-online": TTTOnline,
}


class MethodError(AdaNPCError):
    """The name of a test-time method that does not exist, or that leads to something else."""

    code = "unknown-method"


def find(name: str) -> type[Adapter]:
    """Returns the class of a test-time method.

    Args:
        name: one of ``ADAPTERS``, or a class of your own: ``my_module:MyMethod`` from any module that Python can import
            from the current folder, or ``path/to/file.py:MyMethod``.
    """
    if ":" in name:
        return _own_method(name)
    if name not in ADAPTERS:
        hint = did_you_mean(name, ADAPTERS)
        raise MethodError(f"there is no method {name!r}; there are: {', '.join(ADAPTERS)}, or module:Class{hint}")
    return ADAPTERS[name]


def _own_method(name: str) -> type[Adapter]:
    """Returns the class that ``module:Class`` or ``file.py:Class`` names."""
    place, _, class_name = name.rpartition(":")  # the last colon: a path on Windows may have another
    if not place or not class_name:
        raise MethodError(f"a method of your own is written module:Class or file.py:Class, got {name!r}")
    module = _module(place)
    kind = getattr(module, class_name, None)
    if kind is None:
        methods = [key for key, value in vars(module).items() if _is_method(value)]
        names = ", ".join(methods) or "none"
        hint = did_you_mean(class_name, methods)
        raise MethodError(f"{place} has no class {class_name!r}; methods in it: {names}{hint}")
    if not isinstance(kind, type) or not issubclass(kind, Adapter):
        raise MethodError(f"{name} is not a test-time method: make it a subclass of adanpc.lab.adapt.Adapter")
    if isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise MethodError(f"{name} is abstract: it must define {missing}")
    return kind


def _is_method(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Adapter) and not isabstract(value)


def _module(place: str) -> ModuleType:
    """Returns the module of a name or of a file; whatever goes wrong while it runs becomes one sentence."""
    try:
        if place.endswith(".py"):
            return _module_of_file(Path(place).resolve())
        _make_importable(Path.cwd())
        return import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if place == missing or place.startswith(f"{missing}."):
            raise MethodError(f"there is no module {place!r} in {Path.cwd()} or among installed packages") from error
        raise MethodError(f"{place} cannot be imported: {error}") from error
    except MethodError:
        raise
    except Exception as error:  # a module of one's own may raise anything
        raise MethodError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


@lru_cache
def _module_of_file(path: Path) -> ModuleType:
    """Returns the module in a file; a second call returns the same module, so that its classes stay the same."""
    if not path.is_file():
        raise MethodError(f"there is no file {path}")
    spec = spec_from_file_location(f"adanpc_own_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise MethodError(f"{path} cannot be imported as a Python module")
    _make_importable(path.parent)  # a script finds the modules beside it, and so does this one
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _make_importable(folder: Path) -> None:
    """Lets Python import modules from a folder, after all others: a file random.py must not replace Python's own."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
