"""Folders of images: labels are the folders', nothing is passed over in silence, and wrong layouts are named."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adanpc.lab.data import DataError, DataSet, ImageFiles, read
from adanpc.lab.data.folders import DOMAIN_NET, OFFICE_HOME, PACS, TERRA_INCOGNITA, VLCS, Layout, published

LAYOUTS = {layout.name: layout for layout in (PACS, VLCS, TERRA_INCOGNITA, DOMAIN_NET, OFFICE_HOME)}


def lay(root: Path, *names: str) -> None:
    """Files to be listed; listing decodes nothing, so any content does."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def listed(data: DataSet) -> dict[str, list[tuple[str, str]]]:
    """For each domain the class and the name of each image."""
    found = {}
    for domain in data.domains:
        assert isinstance(domain.images, ImageFiles)
        labels = [data.classes[label] for label in domain.labels.tolist()]
        names = [Path(domain.images.file(row)).name for row in range(len(domain))]
        found[domain.name] = list(zip(labels, names, strict=True))
    return found


def test_any_folder_is_read_in_order(tmp_path: Path) -> None:
    lay(tmp_path, "b/dog/2.jpg", "b/dog/1.JPEG", "b/cat/x.png", "a/dog/3.jpg")
    data = read("folder", tmp_path)
    assert data.classes == ("cat", "dog")  # a domain without cats keeps the label of dogs
    assert listed(data) == {"a": [("dog", "3.jpg")], "b": [("cat", "x.png"), ("dog", "1.JPEG"), ("dog", "2.jpg")]}
    assert data["a"].labels.tolist() == [1]
    assert (data.name, data.notice) == ("folder", "")


NAMES = st.text("abcXYZ01 _-é", min_size=1, max_size=4).map(str.strip).filter(bool)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(NAMES, st.dictionaries(NAMES, st.sets(NAMES, min_size=1, max_size=4), min_size=1), min_size=1))
def test_every_image_has_the_label_of_its_folder(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, dict[str, set[str]]]
) -> None:
    root = tmp_path_factory.mktemp("tree")
    for domain, classes in tree.items():
        lay(root, *(f"{domain}/{label}/{name}.png" for label, names in classes.items() for name in names))
    data = read("folder", root)
    assert data.classes == tuple(sorted({label for classes in tree.values() for label in classes}))
    for domain, rows in listed(data).items():
        expected = [(label, f"{name}.png") for label, names in tree[domain].items() for name in names]
        assert sorted(rows) == sorted(expected)
    assert [domain.name for domain in data.domains] == sorted(tree)


def test_other_files_are_skipped_and_counted(tmp_path: Path) -> None:
    lay(tmp_path, "a/dog/1.jpg", "a/dog/._1.jpg", "a/dog/Thumbs.db", "a/notes.txt", "a/.git/dog.png", "readme.txt")
    lay(tmp_path, ".cache/x/1.png", "b/dog/1.jpg", "b/dog/.old/1.jpg")
    data = read("folder", tmp_path)
    assert listed(data) == {"a": [("dog", "1.jpg")], "b": [("dog", "1.jpg")]}
    assert data.notice == "files that are hidden or are not images were skipped: 5"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a/dog/1.jpg", "a/cat/notes.txt"), r"the class '.*a/cat' has no images: fill it, or remove the folder"),
        (
            ("a/dog/1.jpg", "a/2.jpg"),
            r"'.*a/2\.jpg' is not in the folder of a class: images are expected in a/<class>/<image>",
        ),
        (("a/dog/1.jpg", "a/dog/more/2.jpg"), r"'.*a/dog/more' is a folder: images are expected in a/<class>/<image>"),
        (("a/dog/1.jpg", "b/notes.txt"), r"'.*b' has no classes: images are expected in b/<class>/<image>"),
    ],
)
def test_wrong_layouts_are_named(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    lay(tmp_path, *names)
    with pytest.raises(DataError, match=message):
        read("folder", tmp_path)


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    lay(tmp_path, "a/dog/1.jpg")
    (tmp_path / "a/dog/2.jpg").symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(DataError, match=r"a/dog/2\.jpg' cannot be read \(No such file"):
        read("folder", tmp_path)


def test_links_are_followed(tmp_path: Path) -> None:
    lay(tmp_path / "elsewhere", "dog/1.jpg")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a").symlink_to(tmp_path / "elsewhere")
    assert listed(read("folder", tmp_path / "root")) == {"a": [("dog", "1.jpg")]}


def test_the_digest_changes_with_names_sizes_and_times(tmp_path: Path) -> None:
    lay(tmp_path, "a/dog/1.jpg", "a/dog/2.jpg", "b/dog/1.jpg")
    file = tmp_path / "a/dog/2.jpg"
    digests = [read("folder", tmp_path).digest()]
    status = file.stat()
    file.write_bytes(b"longer than before")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    digests.append(read("folder", tmp_path).digest())
    os.utime(file, ns=(1, 1))
    digests.append(read("folder", tmp_path).digest())
    file.rename(tmp_path / "a/dog/3.jpg")
    digests.append(read("folder", tmp_path).digest())
    assert len(set(digests)) == 4
    assert read("folder", tmp_path).digest() == digests[-1]


def test_a_copy_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    lay(tmp_path / "here", "a/dog/1.jpg", "b/dog/1.jpg")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert read("folder", tmp_path / "here").digest() == read("folder", tmp_path / "there").digest()


def fill(place: Path, layout: Layout, *labels: str) -> None:
    for names in layout.domains:
        lay(place, *(f"{names[0]}/{label}/1.jpg" for label in labels))


@pytest.mark.parametrize(
    ("name", "domains"),
    [
        ("pacs", ["art_painting", "cartoon", "photo", "sketch"]),
        ("vlcs", ["Caltech101", "LabelMe", "SUN09", "VOC2007"]),
        ("terra-incognita", ["location_100", "location_38", "location_43", "location_46"]),
        ("domain-net", ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"]),
        ("office-home", ["Art", "Clipart", "Product", "Real World"]),
    ],
)
def test_published_data_are_found_at_the_root_and_below(name: str, domains: list[str], tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    for number, folder in enumerate((".", *layout.folders)):
        root = tmp_path / str(number)
        fill(root / folder, layout, "x", "y")
        data = read(name, root)
        assert [domain.name for domain in data.domains] == domains
        assert listed(data) == {domain: [("x", "1.jpg"), ("y", "1.jpg")] for domain in domains}
        images = f"{2 * len(domains)} images where {layout.images:,} are published"
        assert data.notice == f"{images}; 2 classes where {layout.classes} are published"


def test_a_copy_of_the_published_size_needs_no_notice(tmp_path: Path) -> None:
    fill(tmp_path, PACS, "dog", "cat")
    data = published(replace(PACS, images=8, classes=2), tmp_path)
    assert data is not None
    assert data.notice == ""


def test_a_missing_domain_is_named(tmp_path: Path) -> None:
    fill(tmp_path / "PACS", PACS, "dog")
    shutil.rmtree(tmp_path / "PACS" / "photo")
    shutil.rmtree(tmp_path / "PACS" / "cartoon")
    with pytest.raises(DataError, match=r"pacs in '.*PACS' lacks the domains cartoon, photo: copy them there"):
        read("pacs", tmp_path)


def test_folders_of_other_data_do_not_hide_a_complete_copy(tmp_path: Path) -> None:
    lay(tmp_path, "sketch/unrelated/1.jpg")
    fill(tmp_path / "PACS", PACS, "dog")
    assert read("pacs", tmp_path).classes == ("dog",)


@pytest.mark.parametrize(
    ("layout", "usual", "other"), [(OFFICE_HOME, "Real World", "Real"), (DOMAIN_NET, "clipart", "clip")]
)
def test_folders_may_have_their_other_name(layout: Layout, usual: str, other: str, tmp_path: Path) -> None:
    fill(tmp_path, layout, "dog")
    (tmp_path / usual).rename(tmp_path / other)
    assert len(read(layout.name, tmp_path)[usual]) == 1


@pytest.mark.parametrize("name", ["duplicates.txt", "domain_net_duplicates.txt"])
def test_listed_duplicates_are_left_out_and_counted(name: str, tmp_path: Path) -> None:
    place = tmp_path / "domain_net"
    fill(place, DOMAIN_NET, "dog")
    lay(place, "real/dog/2.jpg", "real/dog/3.jpg", "sketch/dog/2.jpg")
    (place / name).write_text("real/dog/2.jpg\n./sketch/dog/2.jpg \n\nclipart/dog/gone.jpg\n")
    data = read("domain-net", tmp_path)
    assert listed(data)["real"] == [("dog", "1.jpg"), ("dog", "3.jpg")]
    assert listed(data)["sketch"] == [("dog", "1.jpg")]
    assert data.notice.startswith("2 of 3 listed duplicates were found and left out; 7 images where 586,575")
