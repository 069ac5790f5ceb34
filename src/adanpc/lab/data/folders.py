"""Data sets that are folders of images: any folder of your own, and published data sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from adanpc.lab.data.contents import blaming, read_contents
from adanpc.lab.data.domain import DataError, DataSet
from adanpc.lab.data.scan import (
    are_classes,
    build_data_set,
    candidate_folders,
    class_names,
    is_folder,
    list_folder,
    scan_folder,
    size_difference,
)

DUPLICATES = ("duplicates.txt", "domain_net_duplicates.txt")


@dataclass(frozen=True)
class Layout:
    """A published data set laid out as ``<folder>/<domain>/<class>/<image>``.

    Args:
        name: the name in the registry.
        folders: the usual names of its folder.
        domains: in the published order; for each, the names that its folder may have, starting with the domain's own.
        classes: the number of published classes.
        images: the number of published images, as counted by DomainBed.
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
    """Returns the data set ``root/<domain>/<class>/<image>``, or ``root/<class>/<image>`` as a single domain.

    Domains and classes are sorted; a single domain has the name of the root. Returns None if there are no folders.
    """
    if not root.is_dir():
        return None
    folders = [entry for entry in list_folder(root) if is_folder(entry)]
    if not folders:
        return None
    if are_classes(folders):
        name = root.resolve().name or "images"
        _check_name(name, root)
        return build_data_set("folder", {name: scan_folder(root, "")})
    scans = {}
    for entry in folders:
        _check_name(entry.name, entry.path)
        scans[entry.name] = scan_folder(root, entry.name)
    return build_data_set("folder", scans)


def published(layout: Layout, root: Path) -> DataSet | None:
    """Returns the published data set at the root or in its usual folder below; None if no domain of it exists.

    Images listed in ``duplicates.txt``, a file next to the domains with one path per line, are left out.
    """
    place = root
    folders: dict[str, str] = {}
    # Take the most complete place: by chance, a folder of other data may have the name of a domain.
    for candidate in candidate_folders(root, layout.folders):
        candidate_domains = _domain_folders(layout, candidate)
        if len(candidate_domains) > len(folders):
            place = candidate
            folders = candidate_domains
    if not folders:
        return None
    missing = [names[0] for names in layout.domains if names[0] not in folders]
    if missing:
        raise DataError(f"{layout.name} in {str(place)!r} lacks the domains {', '.join(missing)}: copy them there")
    duplicates = _read_duplicates(place)
    scans = {name: scan_folder(place, folder, duplicates) for name, folder in folders.items()}
    left_out = sum(scan.left_out for scan in scans.values())
    images = sum(len(scan.images) for scan in scans.values())
    duplicates_clause = ""
    if duplicates:
        duplicates_clause = f"{left_out:,} of {len(duplicates):,} listed duplicates were found and left out"
    return build_data_set(
        layout.name,
        scans,
        duplicates_clause,
        size_difference("images", images, layout.images),
        size_difference("classes", len(class_names(scans)), layout.classes),
    )


def _check_name(name: str, folder: Path | str) -> None:
    """Refuses the name of a domain's folder if it is not valid text, since results are filed under it."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the folder {str(folder)!r} has a name that is not UTF-8: rename it") from error


def _domain_folders(layout: Layout, place: Path) -> dict[str, str]:
    """Returns the folder of each domain that exists, by the name of the domain."""
    folders = {}
    for names in layout.domains:
        for name in names:
            if (place / name).is_dir():
                folders[names[0]] = name
                break
    return folders


def _read_duplicates(place: Path) -> frozenset[str]:
    """Returns the images listed as duplicates, by their paths below the place."""
    duplicates = set()
    for name in DUPLICATES:
        path = place / name
        if not path.is_file():
            continue
        with blaming(path, "cannot be read", "copy it again, or remove it"):
            content = read_contents(path)
        # Decode as Python decodes file names, so that names which are not UTF-8 can be compared.
        for line in content.decode("utf-8", "surrogateescape").splitlines():
            if line.strip():
                duplicates.add(PurePosixPath(line.strip()).as_posix())
    return frozenset(duplicates)
