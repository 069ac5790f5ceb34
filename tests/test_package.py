"""The package as it is installed: what it asks for, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from torch import nn

import adanpc
from adanpc.errors import AdaNPCError, ArgumentError

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def name_of(requirement: str) -> str:
    """The name of a package, as registries spell it, without its extras."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0].lower().replace("_", "-").replace(".", "-")


def asks_for_torch(requirement: str, seen: set[str]) -> bool:
    """Whether a package, or one that it needs, asks for torch; those that are not installed here are not followed."""
    name = name_of(requirement)
    if name in ("adanpc", "torch") or name in seen:
        return name == "torch"
    seen.add(name)
    try:
        needed = requires(name) or []
    except PackageNotFoundError:
        return False
    return any(asks_for_torch(other, seen) for other in needed if "extra ==" not in other)


def test_packages_that_ask_for_torch_are_noticed() -> None:
    assert asks_for_torch("timm>=1", set())
    assert asks_for_torch("torchvision", set())


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_extra_can_replace_the_torch_that_is_there(extra: str) -> None:
    assert [wanted for wanted in EXTRAS[extra] if asks_for_torch(wanted, set())] == []


def test_every_extra_that_is_named_exists() -> None:
    texts = [path.read_text() for folder in ("src", "docs") for path in (ROOT / folder).rglob("*.[pm][yd]")]
    texts += [(ROOT / name).read_text() for name in ("README.md", "Makefile")]
    named = set()
    for text in texts:
        for extras in re.findall(r"(?:adanpc|'\.)\[([a-z,]+)\]", text):
            named |= set(extras.split(","))
    assert {"demo", "vision", "cluster", "fast"} <= named <= set(EXTRAS)


def test_torch_may_be_any_that_is_new_enough() -> None:
    (torch_requirement,) = [wanted for wanted in PROJECT["dependencies"] if name_of(wanted) == "torch"]
    assert re.fullmatch(r"torch>=[\d.]+", torch_requirement)


def test_importing_the_package_imports_nothing_large() -> None:
    large = "torch numpy sklearn scipy pandas matplotlib mlxtend torchvision timm faiss typer rich PIL"
    code = (
        f"import sys, adanpc; adanpc.__version__, adanpc.AdaNPCError; print({{*'{large}'.split()}} & {{*sys.modules}})"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"


def test_scikit_learn_is_imported_by_its_estimator_alone() -> None:
    code = (
        "import sys, adanpc; adanpc.wrap, adanpc.load, adanpc.KNNLoss, adanpc.explain; print('sklearn' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "False"


def test_every_public_name_is_there() -> None:
    for name in adanpc.__all__:
        assert getattr(adanpc, name) is not None
        assert name in dir(adanpc)
    assert adanpc.estimator.AdaNPCClassifier is adanpc.AdaNPCClassifier


def test_a_misspelled_name_comes_with_the_right_one() -> None:
    with pytest.raises(AttributeError, match="module 'adanpc' has no attribute 'warp'; did you mean 'wrap'?"):
        adanpc.warp  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(adanpc, "something_else")


# A name that nobody has -----------------------------------------------------------------------------------------------


def callables() -> list[str]:
    """What a user calls: every public function, and every public class but errors, results and plain numbers."""
    others = ("Explanation", "Prediction", "AdaNPCTransformer")  # two results, and one that takes no arguments
    found = []
    for name in adanpc.__all__:
        value = getattr(adanpc, name)
        if not callable(value) or isinstance(value, adanpc.Admission) or name in others:
            continue
        if not isinstance(value, type) or not issubclass(value, Exception | int):
            found.append(name)
    return found


@pytest.mark.parametrize("name", callables())
def test_a_misspelled_argument_gets_the_library_s_own_error(name: str) -> None:
    call = getattr(adanpc, name)
    parameters = [parameter for parameter in signature(call).parameters if parameter != "options"]
    misspelled = parameters[-1] + "s"
    needed: dict[str, Any] = {}
    if name == "AdaNPC":
        needed = {"bank": adanpc.MemoryBank(2, 2)}
    if name == "wrap":
        needed = {"model": nn.Identity(), "loader": []}
    with pytest.raises(ArgumentError) as caught:
        call(**needed, **{misspelled: 1})
    message = str(caught.value)
    assert f"has no {'option' if name == 'AdaNPC' else 'argument'} {misspelled!r}" in message
    assert message.endswith(f"; did you mean {parameters[-1]!r}?")
    assert isinstance(caught.value, TypeError)  # as Python's own is
    assert isinstance(caught.value, AdaNPCError)
    assert caught.value.code == "unknown-argument"


def test_an_argument_like_no_other_lists_those_that_there_are() -> None:
    with pytest.raises(ArgumentError, match="^Veto has no argument 'xyz'; it has: ids, who, why, when$"):
        adanpc.Veto((1,), xyz=2)  # type: ignore[call-arg]


def test_signatures_are_those_that_were_written() -> None:
    assert list(signature(adanpc.MemoryBank).parameters)[:3] == ["dim", "classes", "storage"]
    assert list(signature(adanpc.load).parameters) == [
        "path",
        "model",
        "preprocessing",
        "strict",
        "device",
        "lazy_rows",
    ]
    assert adanpc.load.__name__ == "load"
    assert "AdaNPC" in str(get_type_hints(adanpc.load)["return"])
    assert set(adanpc.AdaNPCClassifier().get_params()) == set(signature(adanpc.AdaNPCClassifier).parameters)
