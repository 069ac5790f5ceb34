"""Data sets that are folders of images: any, and the published ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from adanpc.lab.data.domain import DataError, DataSet
from adanpc.lab.data.scan import assemble, class_names, compared, places, scan

DUPLICATES = ("duplicates.txt", "domain_net_duplicates.txt")


@dataclass(frozen=True)
class Layout:
    """A published data set laid out as ``<folder>/<domain>/<class>/<image>``.

    Args:
        name: as in the registry.
        folders: the usual names of its folder.
        domains: in the published order; for each the names that its folder may have, the domain's own first.
        classes: how many were published.
        images: how many were published, as counted by DomainBed.
    """

    name: str
    folders: tuple[str, ...]
    domains: tuple[tuple[str, ...], ...]
    classes: int
    images: int


PACS = Layout("pacs", ("PACS", "pacs", "kfold"), (("art_painting",), ("cartoon",), ("photo",), ("sketch",)), 7, 9_991)
VLCS = Layout("vlcs", ("VLCS", "vlcs"), (("Caltech101",), ("LabelMe",), ("SUN09",), ("VOC2007",)), 5, 10_729)
TERRA_INCOGNITA = Layout(
    "terra-incognita",
    ("terra_incognita", "TerraIncognita"),
    (("location_100",), ("location_38",), ("location_43",), ("location_46",)),
    10,
    24_788,
)
DOMAIN_NET = Layout(
    "domain-net",
    ("domain_net", "DomainNet"),
    (
        ("clipart", "clip"),
        ("infograph", "info"),
        ("painting", "paint"),
        ("quickdraw", "quick"),
        ("real",),
        ("sketch",),
    ),
    345,
    586_575,
)
OFFICE_HOME = Layout(
    "office-home",
    ("office_home", "OfficeHome", "OfficeHomeDataset_10072016"),
    (("Art",), ("Clipart",), ("Product",), ("Real World", "Real", "RealWorld")),
    65,
    15_588,
)


def any_folder(root: Path) -> DataSet | None:
    """The data set ``root/<domain>/<class>/<image>``, domains and classes sorted; None if there are no folders."""
    names = sorted(path.name for path in places(root, ()) for path in path.iterdir() if path.is_dir())
    folders = [name for name in names if not name.startswith(".")]
    return assemble("folder", {name: scan(root, name) for name in folders}) if folders else None


def published(layout: Layout, root: Path) -> DataSet | None:
    """The published data set at the root or in its usual folder below; None if there is nothing of it.

    Images listed in ``duplicates.txt`` beside the domains, one path a line, are left out.
    """
    where = [(place, _domains(layout, place)) for place in places(root, layout.folders)]
    place, folders = max(where, key=lambda found: len(found[1]), default=(root, {}))
    if not folders:
        return None
    if missing := [names[0] for names in layout.domains if names[0] not in folders]:
        raise DataError(f"{layout.name} in {str(place)!r} lacks the domains {', '.join(missing)}: copy them there")
    duplicates = _duplicates(place)
    scans = {name: scan(place, folder, duplicates) for name, folder in folders.items()}
    dropped = sum(found.dropped for found in scans.values())
    images = sum(len(found.images) for found in scans.values())
    return assemble(
        layout.name,
        scans,
        f"{dropped:,} of {len(duplicates):,} listed duplicates were found and left out" if duplicates else "",
        compared("images", images, layout.images),
        compared("classes", len(class_names(scans)), layout.classes),
    )


def _domains(layout: Layout, place: Path) -> dict[str, str]:
    """The folder of each domain that is there, by the domain's name."""
    there = {names[0]: [name for name in names if (place / name).is_dir()] for names in layout.domains}
    return {name: folders[0] for name, folders in there.items() if folders}


def _duplicates(place: Path) -> frozenset[str]:
    """The images that are listed as duplicates, by their paths below the place."""
    lists = [place / name for name in DUPLICATES if (place / name).is_file()]
    lines = [line.strip() for path in lists for line in path.read_text(encoding="utf-8").splitlines()]
    return frozenset(PurePosixPath(line).as_posix() for line in lines if line)
