"""Exhibits as files, and as one page that needs nothing but itself."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import count
from pathlib import Path
from urllib.parse import quote

from adanpc import files
from adanpc.lab.show import draw, render
from adanpc.lab.show.exhibit import Chart, Exhibit, Gallery, Sheet
from adanpc.lab.show.render import Shown, line, marked

Drawn = Chart | Gallery
NEEDS = "% needs \\usepackage{booktabs} and \\usepackage{xcolor}\n\n"
# Nothing is loaded and nothing is run, whatever a label may contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MEDIA_TYPES = {"png": "image/png", "jpg": "image/jpeg"}
CSS = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #595959; --page: #fff; --band: #f3f4f6; --rule: #d0d4da;
  --paper: #7a4a00; --caution: #fff6e0; --edge: #b97700; --link: #00568a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #b0b0b0; --page: #16181c; --band: #23262c;
  --rule: #444a54; --paper: #f0b860; --caution: #33290f; --edge: #d99a2b; --link: #7cc4f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.8rem; line-height: 1.2; } h2 { font-size: 1.35rem; } h3 { font-size: 1.05rem; }
section { border-top: 1px solid var(--rule); margin-top: 2.5rem; }
a { color: var(--link); }
p, li, dd { max-width: 46rem; } dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; }
dt, .soft { color: var(--soft); } .soft { font-size: .9rem; font-weight: 400; }
dd { margin: 0; } dd p { margin: 0 0 .4rem; } dd p:last-child { margin: 0; }
.scroll { overflow: auto; width: max-content; max-width: 100%; max-height: 85vh; border: 1px solid var(--rule);
  border-radius: 4px; overflow-wrap: normal; }
table { border-collapse: separate; border-spacing: 0; font-size: .94rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 0; }
thead > tr > * { position: sticky; top: 0; z-index: 1; background: var(--band); vertical-align: bottom; }
tbody th { position: sticky; left: 0; background: var(--page); font-weight: 500; }
thead > tr > :first-child { left: 0; z-index: 2; } .text *, tr > :first-child { text-align: left; }
tbody th, .text td { white-space: normal; min-width: 8rem; max-width: 20rem; }
.text td { max-width: none; overflow-wrap: anywhere; }
.paper { display: inline-block; min-width: 3.2em; margin-left: .2em; text-align: left; color: var(--paper);
  font-style: italic; font-size: .9em; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; margin-bottom: .4rem; }
.card { background: #fff; border: 1px solid var(--rule); border-radius: 4px; padding: .5rem; overflow-x: auto; }
.card svg, .card img { display: block; margin: 0 auto; max-width: 100%; height: auto; }
.card svg { min-width: 32rem; } .card img { min-width: 56rem; }
.caution { background: var(--caution); border-left: 4px solid var(--edge); padding: .1rem 1rem; margin: 1.5rem 0; }
@media (max-width: 40rem) {
  dl { display: block; } dd { margin-bottom: .5rem; } tbody th { min-width: 6rem; max-width: 9rem; } }
@media print { .scroll { max-height: none; overflow: visible; } figure { break-inside: avoid; } }
"""
READING = (
    ("96.4 ± 0.2", "our measurement: the mean and its standard error over several measurements; alone, there was one"),
    ("[98.5]", "what the paper prints in the same place"),
    ("dashed lines", "bounds, calculated and not measured"),
    ("bold", "the best of ours in its column, ties included; differences within ± may be chance"),
    ("–", "not measured, or not measurable; where there is a reason, it stands there instead"),
    ("caution", "a box in this color says what to know before believing the numbers above it"),
)


def write(exhibit: Exhibit, folder: Path) -> list[Path]:
    """Writes the exhibit's files, each whole or not at all, and returns their paths.

    Numbers come first, then pictures, last the Markdown that shows them. Without sheets there is no LaTeX and no CSV.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sheets = [part for part in exhibit.parts if isinstance(part, Sheet)]
    pictures = [part for part in exhibit.parts if not isinstance(part, Sheet)]
    texts = {"tex": NEEDS + "\n".join(map(render.latex, sheets)), "csv": _csv(sheets)} if sheets else {}
    paths = [_put(folder / f"{exhibit.name}.{form}", text) for form, text in texts.items()]
    for number, part in enumerate(pictures, 1):
        for form in draw.forms(part):
            path = folder / f"{exhibit.name}-{number}.{form}"
            draw.save(part, path)
            paths.append(path)
    return [*paths, _put(folder / f"{exhibit.name}.md", markdown(exhibit))]


def markdown(exhibit: Exhibit) -> str:
    """The exhibit as one document, with links to the pictures beside it."""
    blocks = [
        f"# {marked(exhibit.title)}",
        f"In the paper: {marked(exhibit.source)}",
        *map(marked, _split(exhibit.about)),
    ]
    numbers = count(1)
    for part in exhibit.parts:
        if isinstance(part, Sheet):
            blocks.append(render.markdown(part).rstrip("\n"))
        else:
            address = quote(f"{exhibit.name}-{next(numbers)}")
            shown, _ = draw.forms(part)
            blocks.append(f"![{marked(_described(part))}]({address}.{shown})\n\n[as SVG]({address}.svg)")
    notes = [f"- {marked(note)}" for note in exhibit.notes]
    return "\n\n".join([*blocks, *(["## Before believing it", "\n".join(notes)] if notes else [])]) + "\n"


def page(exhibits: Sequence[Exhibit], environment: Mapping[str, str], title: str) -> str:
    """One HTML page for a stranger: no script, no style, font or picture from elsewhere; equal values, equal bytes.

    Args:
        exhibits: in the order of the page.
        environment: what the numbers were measured with, by name.
        title: of the page.
    """
    names = {f"exhibit-{at}": exhibit for at, exhibit in enumerate(exhibits, 1)}
    contents = [f'<li><a href="#{at}">{_safe(each.title)}</a> {_soft(each.source)}</li>' for at, each in names.items()]
    reading = [f"<dt>{_safe(sign)}</dt><dd>{_safe(meaning)}</dd>" for sign, meaning in READING]
    noted = [(name, [_safe(said)]) for name, said in environment.items()]
    return _lines(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_safe(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<header>\n<h1>{_safe(title)}</h1>",
        f'<nav aria-label="Contents">\n<ol>{_lines(*contents)}</ol>\n</nav>' if contents else "",
        f"<h2>How to read this</h2>\n<dl>{_lines(*reading)}</dl>\n</header>\n<main>",
        *(_section(exhibit, name) for name, exhibit in names.items()),
        '<section aria-labelledby="environment">\n<h2 id="environment">What it was measured with</h2>',
        _table("environment", ("what", "value"), noted, "text") if noted else "",
        "</section>\n</main>\n</body>\n</html>",
    )


def _section(exhibit: Exhibit, name: str) -> str:
    """An exhibit: where it comes from, its parts, and what to beware of."""
    about = "".join(f"<p>{_safe(each)}</p>" for each in _split(exhibit.about))
    notes = "".join(f"<li>{_safe(note)}</li>" for note in exhibit.notes)
    return _lines(
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{_safe(exhibit.title)}</h2>',
        f"<dl><dt>In the paper</dt><dd>{_safe(exhibit.source)}</dd>",
        f"<dt>How it was run</dt><dd>{about}</dd>",
        f"<dt>Name</dt><dd><code>{_safe(exhibit.name)}</code></dd></dl>",
        *(_part(part, f"{name}-{at}") for at, part in enumerate(exhibit.parts, 1)),
        f'<aside class="caution">\n<h3>Before believing it</h3>\n<ul>{notes}</ul>\n</aside>' if notes else "",
        "</section>",
    )


def _part(part: Sheet | Drawn, name: str) -> str:
    """A figure under its caption; the drawing itself has no title, and its names start with this one."""
    unit = _soft(part.unit) if isinstance(part, Sheet) else ""
    caption = f'<figure>\n<figcaption id="{name}">{_safe(part.title)} {unit}</figcaption>'
    if isinstance(part, Sheet):
        labels, cells = [label for label, _ in part.rows], render.shown(part)
        aligned = any(cell.paper for row in cells for cell in row)
        rows = [(label, [_cell(cell, aligned) for cell in row]) for label, row in zip(labels, cells, strict=True)]
        return _lines(
            caption, _table(name, ("", *part.columns), rows), _soft("; ".join(render.legend(part))), "</figure>"
        )
    bare, alt = replace(part, title=""), _safe(_described(part))
    if isinstance(part, Chart):
        drawing = _inline(draw.image(bare, "svg").decode(), f"{name}-", alt)
    else:
        form, _ = draw.forms(part)
        content = b64encode(draw.image(bare, form)).decode()
        drawing = f'<img alt="{alt}" src="data:{MEDIA_TYPES[form]};base64,{content}">'
    card = f'<div class="card" role="region" tabindex="0" aria-labelledby="{name}">'
    return _lines(caption, card, drawing, "</div>\n</figure>")


def _table(name: str, columns: Iterable[str], rows: Iterable[tuple[str, Iterable[str]]], kind: str = "numbers") -> str:
    """A table that scrolls by itself, labeled by the element of that name; cells are HTML already."""
    first, *others = (_safe(column) for column in columns)
    heads = [f'<th scope="col">{column}</th>' for column in others]
    return _lines(
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}">',
        f'<table class="{kind}" aria-labelledby="{name}">\n<thead>',
        f'<tr>{f"""<th scope="col">{first}</th>""" if first else "<td></td>"}{"".join(heads)}</tr>\n</thead>\n<tbody>',
        *(
            f'<tr><th scope="row">{_safe(label)}</th>{"".join(f"<td>{cell}</td>" for cell in row)}</tr>'
            for label, row in rows
        ),
        "</tbody>\n</table>\n</div>",
    )


def _cell(cell: Shown, aligned: bool) -> str:
    """Ours and, in a box that is there even if it is empty where others of the table have one, the paper's."""
    ours = f"<strong>{_safe(cell.ours)}</strong>" if cell.best else _safe(cell.ours)
    return f'{ours} <span class="paper">{_safe(cell.paper)}</span>' if aligned else ours


def _inline(svg: str, prefix: str, alt: str) -> str:
    """An SVG as an element of a page: every name in it starts with the prefix, as names must differ in a page."""
    bare = re.sub(r"<!--.*?-->\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    named = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", bare)
    return named.replace("<svg", f'<svg role="img" aria-label="{alt}"', 1).rstrip()


def _described(part: Drawn) -> str:
    """What a picture shows, for those who do not see it."""
    if isinstance(part, Gallery):
        return f"{part.title}: {len(part.questions)} queries, each beside its neighbors"
    return f"{part.title}: {part.y_label} by {part.x_label} of {', '.join(map(draw.named, part.series))}"


def _csv(sheets: Iterable[Sheet]) -> str:
    lines = [(line(sheet.title), *record) for sheet in sheets for record in render.records(sheet)]
    return render.separated(("sheet", *render.COLUMNS), lines)


def _put(path: Path, text: str) -> Path:
    def write_text(new: Path) -> None:
        new.write_text(text, encoding="utf-8", newline="\n")

    files.replace(path, write_text)
    return path


def _safe(text: str) -> str:
    return escape(line(text))


def _soft(text: str) -> str:
    return f'<span class="soft">{_safe(text)}</span>' if text else ""


def _split(text: str) -> list[str]:
    """The paragraphs of a text: an empty line stands between two."""
    return [paragraph for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def _lines(*blocks: str) -> str:
    return "\n".join(filter(None, blocks)) + "\n"
