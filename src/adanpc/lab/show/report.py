"""Write exhibits as files, and as one web page that needs no other file."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from urllib.parse import quote

from adanpc import files
from adanpc.lab.show import draw, render
from adanpc.lab.show.exhibit import Chart, Exhibit, Gallery, Sheet
from adanpc.lab.show.render import Shown, marked
from adanpc.printable import on_one_line

LATEX_PREAMBLE = "% needs \\usepackage{booktabs} and \\usepackage{xcolor}\n\n"
CAUTION = "What to keep in mind"
MEDIA_TYPES = {"png": "image/png", "jpg": "image/jpeg"}
# Nothing is loaded and nothing is run, whatever a label may contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
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
    ("96.4 ± 0.2", "our mean and its standard error over several measurements; without ± there was only one"),
    ("[98.5]", "what the paper prints in the same place"),
    ("dashed lines", "bounds, which are calculated and not measured"),
    ("bold", "the best of ours in its column, ties included; differences within ± may be chance"),
    ("–", "not measured, or not measurable; if there is a reason, it is shown instead"),
    ("caution", "a box in this color says what to keep in mind about the numbers above it"),
)


def write(exhibit: Exhibit, folder: Path) -> list[Path]:
    """Writes the exhibit's files and returns their paths; each file is complete or not there at all.

    Numbers are written first, then pictures, then the Markdown that shows them, so that the numbers are there even if
    nothing can be drawn. Without sheets there is no LaTeX and no CSV.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    sheets = [part for part in exhibit.parts if isinstance(part, Sheet)]
    if sheets:
        tables = "\n".join(render.latex(sheet) for sheet in sheets)
        paths.append(_write_text(folder / f"{exhibit.name}.tex", LATEX_PREAMBLE + tables))
        paths.append(_write_text(folder / f"{exhibit.name}.csv", _csv(sheets)))
    for number, part in enumerate(_drawn_parts(exhibit), 1):
        for form in draw.forms(part):
            path = folder / f"{exhibit.name}-{number}.{form}"
            draw.save(part, path)
            paths.append(path)
    paths.append(_write_text(folder / f"{exhibit.name}.md", markdown(exhibit)))
    return paths


def markdown(exhibit: Exhibit) -> str:
    """The exhibit as one document, with links to the pictures beside it."""
    blocks = [f"# {marked(exhibit.title)}", f"In the paper: {marked(exhibit.paper_place)}"]
    blocks += [marked(paragraph) for paragraph in _paragraphs(exhibit.about)]
    pictures = 0
    for part in exhibit.parts:
        if isinstance(part, Sheet):
            blocks.append(render.markdown(part).rstrip("\n"))
        else:
            pictures += 1
            address = quote(f"{exhibit.name}-{pictures}")
            form, _ = draw.forms(part)
            blocks.append(f"![{marked(_described(part))}]({address}.{form})")
            blocks.append(f"[as SVG]({address}.svg)")
    if exhibit.notes:
        blocks.append(f"## {CAUTION}")
        blocks.append("\n".join(f"- {marked(note)}" for note in exhibit.notes))
    return "\n\n".join(blocks) + "\n"


def page(exhibits: Sequence[Exhibit], environment: Mapping[str, str], title: str) -> str:
    """One HTML page for a newcomer; equal exhibits give equal bytes.

    The page has no script, and no style, font or picture is loaded from elsewhere.

    Args:
        exhibits: in the order in which they are shown.
        environment: what the numbers were measured with, such as the machine and the versions, by name.
        title: the title of the page.
    """
    return _joined(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_html(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<header>\n<h1>{_html(title)}</h1>",
        _contents(exhibits),
        _reading_guide(),
        "</header>\n<main>",
        *(_section(exhibit, _section_id(number)) for number, exhibit in enumerate(exhibits, 1)),
        _environment(environment),
        "</main>\n</body>\n</html>",
    )


def _section_id(number: int) -> str:
    return f"exhibit-{number}"


def _contents(exhibits: Sequence[Exhibit]) -> str:
    """Links to all exhibits; empty if there are none."""
    if not exhibits:
        return ""
    entries = [
        f'<li><a href="#{_section_id(number)}">{_html(exhibit.title)}</a> {_soft(exhibit.paper_place)}</li>'
        for number, exhibit in enumerate(exhibits, 1)
    ]
    return f'<nav aria-label="Contents">\n<ol>{_joined(*entries)}</ol>\n</nav>'


def _reading_guide() -> str:
    entries = [f"<dt>{_html(sign)}</dt><dd>{_html(meaning)}</dd>" for sign, meaning in READING]
    return f"<h2>How to read this</h2>\n<dl>{_joined(*entries)}</dl>"


def _environment(environment: Mapping[str, str]) -> str:
    """The last section: what the numbers were measured with."""
    table = ""
    if environment:
        rows = [(name, [_html(value)]) for name, value in environment.items()]
        table = _table("environment", ("what", "value"), rows, "text")
    return _joined(
        '<section aria-labelledby="environment">\n<h2 id="environment">What it was measured with</h2>',
        table,
        "</section>",
    ).rstrip("\n")


def _section(exhibit: Exhibit, name: str) -> str:
    """The section of an exhibit: where it is in the paper, how it was run, its parts, and its notes."""
    about = "".join(f"<p>{_html(paragraph)}</p>" for paragraph in _paragraphs(exhibit.about))
    caution = ""
    if exhibit.notes:
        notes = "".join(f"<li>{_html(note)}</li>" for note in exhibit.notes)
        caution = f'<aside class="caution">\n<h3>{CAUTION}</h3>\n<ul>{notes}</ul>\n</aside>'
    return _joined(
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{_html(exhibit.title)}</h2>',
        f"<dl><dt>In the paper</dt><dd>{_html(exhibit.paper_place)}</dd>",
        f"<dt>How it was run</dt><dd>{about}</dd>",
        f"<dt>Name</dt><dd><code>{_html(exhibit.name)}</code></dd></dl>",
        *(_part(part, f"{name}-{number}") for number, part in enumerate(exhibit.parts, 1)),
        caution,
        "</section>",
    )


def _part(part: Sheet | Chart | Gallery, name: str) -> str:
    """A figure under its caption, whose id labels the table or the picture."""
    if isinstance(part, Sheet):
        unit = _soft(part.unit)
        content = _sheet(part, name)
    else:
        unit = ""
        content = _picture(part, name)
    caption = f'<figure>\n<figcaption id="{name}">{_html(part.title)} {unit}</figcaption>'
    return _joined(caption, content, "</figure>")


def _sheet(sheet: Sheet, name: str) -> str:
    """The table of a sheet with its legend."""
    cells = render.shown(sheet)
    has_paper = any(cell.paper for row in cells for cell in row)
    rows = []
    for (label, _), row in zip(sheet.rows, cells, strict=True):
        rows.append((label, [_cell(cell, has_paper) for cell in row]))
    table = _table(name, ("", *sheet.columns), rows)
    return _joined(table, _soft("; ".join(render.legend(sheet)))).rstrip("\n")


def _picture(part: Chart | Gallery, name: str) -> str:
    """A chart as SVG, or a gallery as an image, without its title, which is in the caption."""
    untitled = replace(part, title="")
    description = _html(_described(part))
    if isinstance(untitled, Chart):
        picture = _inline(draw.image(untitled, "svg").decode(), f"{name}-", description)
    else:
        form, _ = draw.forms(untitled)
        content = b64encode(draw.image(untitled, form)).decode()
        picture = f'<img alt="{description}" src="data:{MEDIA_TYPES[form]};base64,{content}">'
    card = f'<div class="card" role="region" tabindex="0" aria-labelledby="{name}">'
    return _joined(card, picture, "</div>").rstrip("\n")


def _table(name: str, columns: Iterable[str], rows: Iterable[tuple[str, Iterable[str]]], kind: str = "numbers") -> str:
    """A table that scrolls separately from the page.

    Args:
        name: the id of the element that labels the table.
        columns: the headings, beginning with that of the labels.
        rows: labels as plain text, each with its cells in HTML.
        kind: the class of the table, ``numbers`` or ``text``.
    """
    corner, *headings = (_html(column) for column in columns)
    head = f'<th scope="col">{corner}</th>' if corner else "<td></td>"
    head += "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    body = []
    for label, cells in rows:
        data = "".join(f"<td>{cell}</td>" for cell in cells)
        body.append(f'<tr><th scope="row">{_html(label)}</th>{data}</tr>')
    return _joined(
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}">',
        f'<table class="{kind}" aria-labelledby="{name}">\n<thead>',
        f"<tr>{head}</tr>\n</thead>\n<tbody>",
        *body,
        "</tbody>\n</table>\n</div>",
    )


def _cell(cell: Shown, has_paper: bool) -> str:
    """Our number and the paper's. If the table has any of the paper's, every cell has a box for it, to align them."""
    ours = _html(cell.ours)
    if cell.best:
        ours = f"<strong>{ours}</strong>"
    if has_paper:
        return f'{ours} <span class="paper">{_html(cell.paper)}</span>'
    return ours


def _inline(svg: str, prefix: str, description: str) -> str:
    """An SVG as an element of a page; every id in it gets the prefix, because ids must be unique on a page."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<!--.*?-->\s*", "", element, flags=re.DOTALL)
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", element)
    return element.replace("<svg", f'<svg role="img" aria-label="{description}"', 1).rstrip()


def _described(part: Chart | Gallery) -> str:
    """A description of a picture for readers who cannot see it."""
    if isinstance(part, Gallery):
        return f"{part.title}: {len(part.questions)} queries, each beside its neighbors"
    labels = ", ".join(draw.named(series) for series in part.series)
    return f"{part.title}: {part.y_label} by {part.x_label} of {labels}"


def _drawn_parts(exhibit: Exhibit) -> list[Chart | Gallery]:
    return [part for part in exhibit.parts if not isinstance(part, Sheet)]


def _csv(sheets: Iterable[Sheet]) -> str:
    """All sheets in one table, whose first column is the title of the sheet."""
    lines = [(on_one_line(sheet.title), *record) for sheet in sheets for record in render.records(sheet)]
    return render.separated(("sheet", *render.COLUMNS), lines)


def _write_text(path: Path, text: str) -> Path:
    def write_new(new: Path) -> None:
        new.write_text(text, encoding="utf-8", newline="\n")

    files.replace(path, write_new)
    return path


def _html(text: str) -> str:
    """The text on one line, escaped so that HTML shows it literally."""
    return escape(on_one_line(text))


def _soft(text: str) -> str:
    return f'<span class="soft">{_html(text)}</span>' if text else ""


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, which are separated by empty lines."""
    return [paragraph for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def _joined(*blocks: str) -> str:
    """The blocks one below another, without empty ones."""
    return "\n".join(block for block in blocks if block) + "\n"
