"""What mkdocs does beyond its settings: pages may link to files that lie outside of docs/.

Measured tables, their pictures and the pages at the root of the repository become part of the site. A link to anything
else outside of docs/, such as a source file, loses its target and keeps its text: the site has no copy to show.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
RESULTS = ROOT / "benchmarks" / "results"
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """The files of docs/, with those outside that pages may link to."""
    outside = [ROOT / name for name in ROOT_PAGES]
    outside += sorted(path for path in RESULTS.rglob("*") if path.is_file())
    for path in outside:
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with links that lead to where the site has the files."""
    folder = Path(page.file.abs_src_path).parent

    def moved(link: re.Match[str]) -> str:
        target = link["target"]
        if ":" in target:  # https:, mailto:
            return link[0]
        path = (folder / target).resolve()
        uri = _site_uri(path)
        if files.get_file_from_path(uri) is None:
            return link[0] if path.is_relative_to(DOCS) else link["text"]  # mkdocs reports a missing page itself
        there = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{link['image']}[{link['text']}]({there}{link['anchor'] or ''})"

    return LINK.sub(moved, markdown)


def _site_uri(path: Path) -> str:
    """Where the site has a file of the repository: those of docs/ are at its top, all others keep their path."""
    for root in (DOCS, ROOT):
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return ""
