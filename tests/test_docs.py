"""The documentation: links lead somewhere, names are explained, spelling is American, and the site has every page."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import pytest

import adanpc
from adanpc.core import Admission
from adanpc.core.centering import MODES
from adanpc.core.eviction import POLICIES
from adanpc.core.vote import RULES
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt import ADAPTERS
from adanpc.lab.data import READERS
from adanpc.lab.data.streams import STREAMS
from adanpc.lab.networks.encoders import ENCODERS
from adanpc.lab.tables import TABLES
from adanpc.lab.train import ALGORITHMS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
PROSE = (".cff", ".md", ".py", ".toml", ".yaml", ".yml")  # the files that people read


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Links --------------------------------------------------------------------------------------------------------------


def prose(page: Path) -> str:
    """The page without blocks of code, in which brackets are no links and hashes no headings."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as web sites make them: lower case, hyphens for spaces, no punctuation."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(kept.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):  # https:, mailto:
            continue
        target, _, anchor = link.partition("#")
        there = page.parent / target if target else page
        assert there.exists(), f"{name_of(page)} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors(there), f"{name_of(page)} links to {link}, a heading that does not exist"


def test_a_missing_heading_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Vote rules\n\n```\n# not a heading\n```\n\n## What a `Spec` is, in 2 words\n")
    assert anchors(page) == {"vote-rules", "what-a-spec-is-in-2-words"}


# The site and the commands ------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation_once_and_nothing_else_is() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- (\S+\.md)$", settings[settings.index("\nnav:") :], re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    at_the_root = {name for name in listed if (ROOT / name).is_file()}
    assert set(listed) - at_the_root == pages


def test_the_site_uses_no_web_fonts() -> None:
    assert re.search(r"^  font: false\b", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def recipe(target: str) -> list[str]:
    """The commands of a target of the Makefile, with the folder of tools filled in."""
    makefile = (ROOT / "Makefile").read_text()
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert found is not None
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in found[1].splitlines()]


def test_the_hooks_before_a_commit_are_make_check() -> None:
    hooks = re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert hooks == recipe("check")


def test_every_command_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony is not None
    targets = set(phony[1].split()) - {"help"}
    assert set(re.findall(r"^#   make ([\w-]+) ", makefile, re.MULTILINE)) == targets
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for target in targets - {"clean", "demo"}:
        assert f"`make {target}`" in contributing, target


def test_the_tests_that_test_fast_leaves_out_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    names = re.findall(r"(tests/\S+\.py)::(\w+)", makefile)
    assert names
    for path, test in names:
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path} has no {test}"
    fast = re.search(r"^FAST := ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert fast is not None
    for path in fast[1].replace("\\\n", " ").split():
        assert (ROOT / path).exists(), path


# Names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("methods", ADAPTERS),
        ("training", ALGORITHMS),
        ("encoders", ENCODERS),
        ("data", READERS),
        ("data", STREAMS),
        ("protocol", TABLES),
        ("method", dict.fromkeys(RULES)),
        ("method", dict.fromkeys(POLICIES)),
        ("method", dict.fromkeys(MODES)),
        ("method", Admission.__dataclass_fields__),
        ("api/index", dict.fromkeys(adanpc.__all__)),
    ],
    ids=[
        "methods", "algorithms", "encoders", "data sets", "streams", "tables",
        "vote rules", "eviction policies", "centering", "admission", "public names",
    ],
)  # fmt: skip
def test_everything_that_has_a_name_is_documented(page: str, names: Mapping[str, object]) -> None:
    text = (DOCS / f"{page}.md").read_text()
    missing = [name for name in names if f"`{name}`" not in text]
    assert not missing, f"docs/{page}.md does not name {', '.join(missing)}"


def test_the_table_of_methods_is_what_the_classes_say() -> None:
    script = DOCS / "methods_table.py"
    namespace: dict[str, Any] = runpy.run_path(str(script))
    page = (DOCS / "methods.md").read_text()
    assert page == namespace["with_table"](page), f"run python {name_of(script)}"
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \|", namespace["table"](), re.MULTILINE)
    assert [name for name, _ in rows] == list(ADAPTERS)
    without_paper = {name for name, paper in rows if not re.search(r"\b(19|20)\d\d$", paper)}
    assert without_paper == {"source", "knn", "ttaug"}  # older than any paper


def errors() -> list[type[AdaNPCError]]:
    """Every error class of the package."""
    for module in walk_packages(adanpc.__path__, "adanpc."):
        if module.name != "adanpc.__main__":
            import_module(module.name)
    found = [AdaNPCError]
    for kind in found:  # grows on the way
        found.extend(kind.__subclasses__())
    return [kind for kind in found if kind.__module__.startswith("adanpc.")]


def test_every_error_code_is_documented_and_belongs_to_one_class() -> None:
    page = (DOCS / "method.md").read_text()
    table = page[page.index("## Error codes") :]
    owners: dict[str, str] = {}
    for kind in errors():
        if "code" not in vars(kind):
            continue  # it has the code of the class that it is derived from
        other = owners.setdefault(kind.code, kind.__name__)
        assert other == kind.__name__, f"{other} and {kind.__name__} have the same code, {kind.code}"
        row = rf"^\| `{kind.code}` \| `{kind.__name__}` \|"
        message = f"docs/method.md has no row `{kind.code}` | `{kind.__name__}` among its error codes"
        assert re.search(row, table, re.MULTILINE), message


# Words --------------------------------------------------------------------------------------------------------------

# British forms that Americans spell otherwise; this file, which lists them, is the only one that may have them.
ANYWHERE = """
    armour behaviour calibre catalogue colour endeavour favour flavour harbour honour humour labour neighbour rumour
"""
VERBS = """
    categor emphas equal final general harmon initial maxim memor minim normal optim organ parametr penal quant random
    real recogn regular serial special standard summar synchron token util vector visual
"""  # normalise, normalised, normalisation, …
DOUBLED = """
    cancel channel equal label level marshal model signal total travel
"""  # labelled, labelling, …
WHOLE = """
    acknowledgement ageing amongst analogue analyse analysed analyser analysing artefact artefacts burnt centre centred
    centres centring defence dialogue fibre fibres fulfil grey greyscale judgement learnt licence licences litre metre
    metres offence practise practised programme programmes sceptical skilful spelt whilst
"""


def any_of(words: str) -> str:
    return f"(?:{'|'.join(words.split())})"


BRITISH = re.compile(
    rf"[a-z]*{any_of(ANYWHERE)}[a-z]*"
    rf"|[a-z]*{any_of(VERBS)}is(?:e|ed|er|ers|es|ing|ation|ations)"
    rf"|[a-z]*{any_of(DOUBLED)}l(?:ed|er|ers|ing)"
    rf"|{any_of(WHOLE)}",
    re.IGNORECASE,
)
WORD = re.compile(r"[a-zA-Z]+")

# Spellings that are fixed elsewhere, by the start of the files that have them; "" is for all files.
FIXED = [
    ("", "aria-labelledby"),  # an attribute of HTML
    ("mkdocs.yml", "blue grey"),  # a color of the theme
    ("src/adanpc/store/", "centring"),  # a field of bank files of format 1
    ("docs/bank-format.md", "centring"),
    ("tests/store/", "centring"),
    ("tests/attacks/", "centring"),
]


def texts() -> Iterator[Path]:
    """Everything that is written for people, but for this file: code, tests, pages and settings."""
    for path in sorted(ROOT.iterdir()):
        if path.is_file() and (path.suffix in PROSE or path.name == "Makefile"):
            yield path
    for folder in ("src", "docs", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in PROSE and path != Path(__file__):
                yield path


@cache
def is_british(word: str) -> bool:
    return BRITISH.fullmatch(word) is not None


def british(path: Path, text: str) -> list[str]:
    """The British words of a text, other than those that are fixed elsewhere."""
    for start, spelling in FIXED:
        if name_of(path).startswith(start):
            text = text.replace(spelling, "")
    words = WORD.findall(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text))  # a name like BankFile is two words
    return [word for word in words if is_british(word)]


def test_spelling_is_american() -> None:
    found = {}
    for path in texts():
        words = british(path, path.read_text())
        if words:
            found[name_of(path)] = sorted(set(words))
    assert not found


def test_british_forms_are_noticed_and_words_like_them_are_not() -> None:
    page = ROOT / "README.md"
    assert british(page, "The discoloured Neighbours") == ["discoloured", "Neighbours"]
    assert british(page, "renormalised by OPTIMISERS") == ["renormalised", "OPTIMISERS"]
    assert british(page, "an unlabelled centre, a ModelledThing") == ["unlabelled", "centre", "Modelled"]
    assert british(page, "raise noise; promises a laboratory; analyses, parameters; called, filled, otherwise") == []
    assert british(page, "centring") == ["centring"]
    assert british(ROOT / "src/adanpc/store/file.py", "centring") == []


def test_the_readme_counts_what_there_is() -> None:
    readme = (ROOT / "README.md").read_text()
    published = set(READERS) - {"folder", "manifest"}  # the others are for images of one's own
    for count, what in (
        (len(ALGORITHMS), "training algorithms"),
        (len(ADAPTERS), "test-time methods"),
        (len(published), "data sets"),
        (len(STREAMS), "orders"),
    ):
        assert f"{count} {what}" in readme


def test_nothing_mentions_the_machine_that_it_was_written_on() -> None:
    places = re.compile(r"(?<![\w.])/(?:Users|home|mnt|opt|root|work)/\w")
    for path in texts():
        found = places.search(path.read_text())
        assert found is None, f"{name_of(path)} has a path of somebody's machine: {found and found[0]}"
