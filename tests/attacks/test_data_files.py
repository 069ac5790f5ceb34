"""Damaged and forged data files: read right, or refused in one sentence that names the file; nothing else happens.

Every reader is fuzzed, too. ``ADANPC_FUZZ=100`` multiplies the number of damaged files by a hundred.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import socket
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from pictures import idx, noise, paint, plant
from PIL import EpsImagePlugin, Image
from typer.testing import CliRunner

from adanpc.cli import app
from adanpc.lab.data import DataError, ImageFiles, read, unreadable
from adanpc.lab.data.cifar import BATCHES, CLASSES, read_batch
from adanpc.lab.data.imagenet import Cropped
from adanpc.lab.data.mnist import read_idx

FUZZ = int(os.environ.get("ADANPC_FUZZ", "1"))
LIMIT = "more than 256 MiB"
ESCAPE = "\x1b[2J\x1b[31m"  # clears the screen and turns the text red

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not allow such names")


def refusal(attempt: Callable[[], object]) -> str:
    """The one sentence by which something is refused."""
    with pytest.raises(DataError) as caught:
        attempt()
    sentence = str(caught.value)
    assert sentence.isprintable()
    assert len(sentence) < 1_000
    return sentence


# CIFAR-10 batches


def old_string(content: bytes) -> bytes:
    """A text as Python 2 pickled it."""
    if len(content) < 256:
        return b"U" + bytes([len(content)]) + content
    return b"T" + struct.pack("<i", len(content)) + content


def published_batch(count: int = 3) -> bytes:
    """A batch byte by byte as the published files are, which Python 2 wrote in protocol 2."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3072), dtype=np.uint8)
    labels = b"".join(b"K" + bytes([row % 10]) for row in range(count))
    names = b"".join(old_string(b"image_s_%06d.png" % row) + b"q" + bytes([24 + row]) for row in range(count))
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            old_string(b"batch_label") + b"q\x02" + old_string(b"training batch 1 of 5") + b"q\x03",
            old_string(b"labels") + b"q\x04]q\x05(" + labels + b"e",
            old_string(b"data") + b"q\x06",
            b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\x09",
            old_string(b"b") + b"q\x0a\x87q\x0bRq\x0c",
            b"(K\x01M" + struct.pack("<H", count) + b"M\x00\x0c\x86q\x0d",
            b"cnumpy\ndtype\nq\x0e" + old_string(b"u1") + b"q\x0fK\x00K\x01\x87q\x10Rq\x11",
            b"(K\x03" + old_string(b"|") + b"q\x12NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x13b\x89",
            old_string(pixels.tobytes()) + b"q\x14tq\x15b",
            old_string(b"filenames") + b"q\x16]q\x17(" + names + b"e",
            b"u.",
        ]
    )


def modern_batch(protocol: int) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    return pickle.dumps({b"data": pixels, b"labels": [0, 1, 2], b"batch_label": b"x"}, protocol=protocol)


def test_the_published_batches_are_those_of_python_2() -> None:
    fields = pickle.loads(published_batch(), encoding="bytes")
    assert set(fields) == {b"batch_label", b"labels", b"data", b"filenames"}


@pytest.mark.parametrize("content", [published_batch(), modern_batch(3), modern_batch(4)])
def test_a_batch_is_read_as_pickle_reads_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "batch").write_bytes(content)
    expected = pickle.loads(content, encoding="bytes")
    images, labels = read_batch(tmp_path / "batch")
    assert np.array_equal(images.reshape(3, 3072).numpy(), expected[b"data"])
    assert labels.tolist() == expected[b"labels"]


def test_a_batch_in_fortran_order_is_read_as_pickle_reads_it(tmp_path: Path) -> None:
    pixels = np.asfortranarray(np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8))
    (tmp_path / "batch").write_bytes(pickle.dumps({b"data": pixels, b"labels": [0, 1, 2]}, protocol=4))
    images, _ = read_batch(tmp_path / "batch")
    assert np.array_equal(images.reshape(3, 3072).numpy(), pixels)


def test_an_empty_batch_holds_nothing(tmp_path: Path) -> None:
    empty = {b"data": np.zeros((0, 3072), dtype=np.uint8), b"labels": []}
    (tmp_path / "batch").write_bytes(pickle.dumps(empty, protocol=4))
    images, labels = read_batch(tmp_path / "batch")
    assert images.shape == (0, 3, 32, 32)
    assert len(labels) == 0


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
BYTES = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
FORGED_BATCHES = {
    # An array of objects is made of pointers, which the file would choose.
    "objects": b"\x80\x02" + ARRAY + b"(K\x01K\x01\x85cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R\x89U\x08AAAAAAAAtb.",
    "array of no type": b"\x80\x02" + ARRAY + b"(K\x01K\x01\x85K\x00\x89U\x01Atb.",
    "shape beyond the bytes": b"\x80\x02"
    + ARRAY
    + b"(K\x01J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"
    + BYTES
    + b"\x89U\x01Atb.",
    "negative shape": b"\x80\x02" + ARRAY + b"(K\x01J\xff\xff\xff\xffJ\xff\xff\xff\xff\x86" + BYTES + b"\x89U\x01Atb.",
    "text beyond the file": b"\x80\x02T\xff\xff\xff\x7fA.",
    "text of negative length": b"\x80\x02T\xff\xff\xff\xffA.",
    "bytes beyond the file": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fA.",
    "number of many digits": b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
    "unknown instruction": b"\x80\x02\xfe.",
    "later version": b"\x80\x06].",
    "nothing": b".",
    "two values": b"\x80\x02]].",
    "open group": b"\x80\x02(].",
    "closed group": b"\x80\x02]e.",
    "value under a mark": b"\x80\x02](a.",
    "value of no memory": b"\x80\x02h\x07.",
    "more after the end": b"\x80\x02}.}",
    "list in itself": b"\x80\x02]q\x00h\x00a.",
    "field named by a list": b"\x80\x02}(]Ku.",
    "field without value": b"\x80\x02}(U\x01au.",
    "append to a text": b"\x80\x02U\x01aK\x01a.",
    "fields of a text": b"\x80\x02U\x01aU\x01bK\x01s.",
    "state of a list": b"\x80\x02]K\x01b.",
    "array without state": b"\x80\x02}(U\x04data" + ARRAY + b"U\x06labels]u.",
    "call of a list": b"\x80\x02])R.",
    "name that is no text": b"\x80\x04K\x01K\x01\x93.",
    "name on half a line": b"\x80\x02cnumpy\nnd",
    "labels of labels": b"\x80\x02}(U\x06labels]q\x00h\x00au.",
    "deep nesting": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 100_000 + b".",
    "deep arguments": b"\x80\x02cnumpy\ndtype\n)" + b"\x85" * 100_000 + b"R.",
}


@pytest.mark.parametrize("content", FORGED_BATCHES.values(), ids=FORGED_BATCHES.keys())
def test_forged_batches(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "batch").write_bytes(content)
    assert "batch' is not a batch of CIFAR-10" in refusal(lambda: read_batch(tmp_path / "batch"))


@pytest.mark.no_cover
def test_a_batch_of_many_instructions_ends(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(b"\x80\x02" + b"]" * 1_000_001)
    assert "more than 1,000,000 instructions" in refusal(lambda: read_batch(tmp_path / "batch"))


def test_a_name_in_a_batch_is_shown_as_text(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(b"\x80\x02cos\nsys" + ESCAPE.encode() + b"\n)R.")
    assert r"it asks for os.sys\x1b[2J\x1b[31m" in refusal(lambda: read_batch(tmp_path / "batch"))


# Files that are no files, and files that are too large


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def make_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD_FILES = {"pipe": make_pipe, "socket": make_socket, "device": make_device_link, "folder": Path.mkdir}
odd_files = pytest.mark.parametrize("make", ODD_FILES.values(), ids=ODD_FILES.keys())


@odd_files
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.png")
    attempts: list[Callable[[], object]] = [
        lambda: read_batch(tmp_path / "x.png"),
        lambda: read_idx(tmp_path / "x.png", 3),
        lambda: ImageFiles(tmp_path, ["x.png"])[0],
    ]
    for attempt in attempts:
        sentence = refusal(attempt)
        assert "x.png' " in sentence
        assert "it is not a regular file" in sentence


@pytest.mark.parametrize("make", [make_pipe, make_socket, make_device_link])
def test_an_image_that_is_no_file_is_named_when_it_is_listed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    plant(tmp_path, {"a/dog": 1})
    make(tmp_path / "a/dog/x.png")
    assert "a/dog/x.png' is not a regular file" in refusal(lambda: read("folder", tmp_path))


@pytest.mark.parametrize("make", [make_pipe, make_device_link])
def test_a_zip_file_must_be_a_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "cifar.zip")
    sentence = refusal(lambda: read("cifar-10", tmp_path))
    assert "cifar.zip' cannot be read (it is not a regular file): copy it again" in sentence


def test_a_list_of_duplicates_may_hold_any_bytes(tmp_path: Path) -> None:
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        plant(tmp_path, {f"{domain}/dog": 2})
    (tmp_path / "duplicates.txt").write_bytes(b"\xff\xfe\x00\nphoto/dog/001.png\n")
    assert len(read("pacs", tmp_path)["photo"]) == 1


def grow(path: Path, size: int) -> Path:
    """A file of holes: it takes no room on the disk."""
    with path.open("ab") as file:
        file.truncate(size)
    return path


def test_files_beyond_the_limit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = grow(tmp_path / "x.png", 2**40)
    for attempt in (
        lambda: read_batch(path),
        lambda: read_idx(path, 3),
        lambda: ImageFiles(tmp_path, ["x.png"])[0],
    ):
        assert f"(it holds {LIMIT}, the most that is read)" in refusal(attempt)


def zeros_gzipped(count: int) -> bytes:
    """The gzip file of so many mebibytes of zeros; a member takes a kilobyte, and members may follow each other."""
    return gzip.compress(bytes(2**20)) * count


def test_a_gzip_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(zeros_gzipped(2**10))
    sentence = refusal(lambda: read_idx(tmp_path / "images", 3))
    assert f"images' cannot be unpacked (it unpacks to {LIMIT}, the most that is read)" in sentence


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a/x.png", "w", force_zip64=True) as member,
    ):
        for _ in range(257):
            member.write(bytes(2**20))
    sentence = refusal(lambda: ImageFiles(tmp_path / "all.zip", ["a/x.png"])[0])
    assert f"all.zip/a/x.png' cannot be read (it unpacks to {LIMIT}, the most that is read)" in sentence


def zip_of(path: Path, names: list[str], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name in names:
            archive.writestr(name, b"x")
    return path


def test_a_zip_file_by_a_rare_method_is_refused(tmp_path: Path) -> None:
    zip_of(tmp_path / "cifar.zip", ["train/cat/1.png"], zipfile.ZIP_LZMA)
    sentence = refusal(lambda: read("cifar-10", tmp_path))
    assert "cifar.zip' cannot be read (it is packed by method 14 instead of deflate)" in sentence


def test_a_long_name_in_a_zip_file_is_refused(tmp_path: Path) -> None:
    zip_of(tmp_path / "cifar.zip", [f"train/cat/{'x' * 60_000}.png"])
    sentence = refusal(lambda: read("cifar-10", tmp_path))
    assert "cifar.zip' cannot be read (it has a file name of more than 1,024 bytes)" in sentence


def test_a_zip_file_may_have_names_without_folders(tmp_path: Path) -> None:
    zip_of(tmp_path / "cifar.zip", ["./x.png", "/x.png", "x.png"])
    assert "cifar-10 is not at" in refusal(lambda: read("cifar-10", tmp_path))


def test_a_zip_file_may_have_a_name_of_nothing(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "cifar.zip", ["name"])
    path.write_bytes(path.read_bytes().replace(b"name", b"\0ame"))  # a name ends at its first zero byte
    assert "cifar-10 is not at" in refusal(lambda: read("cifar-10", tmp_path))


# Images


def test_postscript_never_reaches_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments, **options: started.append(arguments))
    (tmp_path / "x.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(/etc/passwd) (r) file\n%%EOF\n"
    )
    sentence = refusal(lambda: ImageFiles(tmp_path, ["x.png"])[0])
    assert "x.png' cannot be read (it is none of JPEG, PNG, BMP, GIF, PPM, TIFF, WEBP)" in sentence
    assert not started


def png(width: int, height: int, pixels: bytes) -> bytes:
    """A gray PNG with a false size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("width", "height"), [(10_000, 9_000), (2**31 - 1, 2**31 - 1)])
def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path: Path, width: int, height: int) -> None:
    (tmp_path / "x.png").write_bytes(png(width, height, bytes(100)))
    sentence = refusal(lambda: ImageFiles(tmp_path, ["x.png"])[0])
    assert "x.png' cannot be read (" in sentence
    assert "pixels" in sentence


def test_an_image_of_one_line_is_not_blown_up(tmp_path: Path) -> None:
    Image.new("RGB", (60_000, 1)).save(tmp_path / "x.png")
    images = ImageFiles(tmp_path, ["x.png"])
    assert "x.png' has 1 x 60000 pixels, too narrow" in refusal(lambda: Cropped(images)[0])
    assert "image 0 has 1 x 60000 pixels" in refusal(
        lambda: Cropped(torch.zeros(1, 3, 1, 60_000, dtype=torch.uint8))[0]
    )


@pytest.mark.parametrize("suffix", [".bmp", ".ppm", ".tif", ".png", ".jpg", ".webp"])
def test_no_decoder_gets_the_file_itself(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some map it, and die if it is cut meanwhile; a decoder that got bytes has no name to map."""
    paint(tmp_path / f"x{suffix}")
    opened: list[object] = []
    open_image = Image.open

    def noted(file: Any, *arguments: Any, **options: Any) -> Image.Image:
        opened.append(file)
        return open_image(file, *arguments, **options)

    monkeypatch.setattr(Image, "open", noted)
    ImageFiles(tmp_path, [f"x{suffix}"])[0]
    assert [type(file) for file in opened] == [io.BytesIO]


# Arrays


def lay_arrays(folder: Path, header: str | None = None) -> None:
    """One corruption of CIFAR-10-C, ten images of 32 x 32; with another header if one is given."""
    np.save(folder / "labels.npy", np.arange(10, dtype=np.uint8))
    np.save(folder / "fog.npy", np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), dtype=np.uint8))
    if header is not None:
        content = header.encode("latin-1")
        (folder / "fog.npy").write_bytes(
            b"\x93NUMPY\x01\x00" + struct.pack("<H", len(content)) + content + bytes(30_720)
        )


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (999999999999, 32, 32, 3), }\n",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (999999999999, 999999999999, 999999999999, 0), }\n",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (" + "1, " * 70 + "), }\n",
        "{'descr': '|u1', 'fortran_order': True, 'shape': (10, 32, 32, 3), }\n",
        "{'descr': '|O', 'fortran_order': False, 'shape': (3840,), }\n",
        "{'descr': '|V1', 'fortran_order': False, 'shape': (10, 32, 32, 3), }\n",
        "{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (10, 32, 32, 3), }\n",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (10, -32, -32, 3), }\n",
        "{'descr': '|u1', 'fortran_order': False, 'shape': __import__('os').getcwd(), }\n",
        "-" * 9_000 + "1",
        "(" * 9_000,
        "",
    ],
)
def test_forged_headers_of_arrays(tmp_path: Path, header: str) -> None:
    lay_arrays(tmp_path, header)
    assert "fog.npy' is not an array (" in refusal(lambda: read("cifar-10-c", tmp_path))


def test_a_header_of_python_2_is_read(tmp_path: Path) -> None:
    lay_arrays(tmp_path, "{'descr': '|u1', 'fortran_order': False, 'shape': (10L, 32L, 32L, 3L), }\n")
    assert read("cifar-10-c", tmp_path)["fog-1"].take([0]).shape == (1, 3, 32, 32)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format_is_read(tmp_path: Path, version: tuple[int, int]) -> None:
    lay_arrays(tmp_path)
    expected = np.load(tmp_path / "fog.npy")
    with (tmp_path / "fog.npy").open("wb") as file:
        np.lib.format.write_array(file, expected, version)
    image = read("cifar-10-c", tmp_path)["fog-5"].images[1]
    assert np.array_equal(image.permute(1, 2, 0).numpy(), expected[9])


def test_an_array_that_is_cut_after_it_was_listed_is_refused(tmp_path: Path) -> None:
    """Mapped into memory, it would kill the process."""
    lay_arrays(tmp_path)
    images = read("cifar-10-c", tmp_path)["fog-5"].images
    assert images[1].shape == (3, 32, 32)
    os.truncate(tmp_path / "fog.npy", 128)
    assert "fog.npy' is not an array (it has been cut or replaced" in refusal(lambda: images[1])


def test_huge_arrays_are_refused(tmp_path: Path) -> None:
    shape = (10, 40_000, 10_000, 3)
    lay_arrays(tmp_path, f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n")
    start = (tmp_path / "fog.npy").stat().st_size - 30_720
    grow(tmp_path / "fog.npy", start + int(np.prod(shape)))
    images = read("cifar-10-c", tmp_path)["fog-1"].images
    assert f"fog.npy' is not an array (it holds {LIMIT}" in refusal(lambda: images[0])


# Names


def test_names_of_folders_are_shown_as_text(tmp_path: Path) -> None:
    plant(tmp_path, {f"{ESCAPE}/dog": 1, "[bold]b/dog": 1})
    shown = r"\x1b[2J\x1b[31m"
    data = read("folder", tmp_path)
    assert shown in refusal(lambda: data["cat"])
    done = CliRunner().invoke(app, ["data", "folder", "--data-dir", str(tmp_path)])
    assert done.exit_code == 0
    assert shown in done.output
    assert "[bold]b" in done.output
    assert "\x1b" not in done.output


def test_names_of_files_are_shown_as_text(tmp_path: Path) -> None:
    plant(tmp_path, {"a/dog": 1})
    (tmp_path / f"a/dog/{ESCAPE}.png").write_bytes(b"no image")
    data = read("folder", tmp_path)
    assert unreadable(data) == (f"{tmp_path}/a/dog/{ESCAPE}.png",)
    refusal(lambda: data["a"].take([0, 1]))
    done = CliRunner().invoke(app, ["data", "folder", "--data-dir", str(tmp_path), "--check"])
    assert done.exit_code == 2
    assert r"a/dog/\x1b[2J\x1b[31m.png" in done.output
    assert "\x1b" not in done.output


@pytest.mark.parametrize("name", ["x.png", "dog/more/x.png", "notes.txt"])
def test_a_wrong_layout_is_shown_as_text(tmp_path: Path, name: str) -> None:
    plant(tmp_path, {"a/dog": 1})
    path = tmp_path / ESCAPE / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    assert r"images are expected in \x1b[2J\x1b[31m/<class>/<image>" in refusal(lambda: read("folder", tmp_path))


def test_the_words_of_a_decoder_are_shown_as_text(tmp_path: Path) -> None:
    (tmp_path / "x.ppm").write_bytes(b"P6\n" + ESCAPE.encode() * 9 + b"\n")
    assert r"\x1b[2J" in refusal(lambda: ImageFiles(tmp_path, ["x.ppm"])[0])


@on_linux
def test_a_domain_must_have_a_name_in_utf_8(tmp_path: Path) -> None:
    """Seeds and digests are made of it."""
    plant(tmp_path, {"a/dog": 1})
    os.rename(tmp_path / "a", os.fsencode(tmp_path) + b"/\xe9")
    assert r"\udce9' has a name that is not UTF-8: rename it" in refusal(lambda: read("folder", tmp_path))


@pytest.mark.parametrize("name", ["__MACOSX", ".cache"])
def test_folders_that_systems_leave_behind_are_no_data(tmp_path: Path, name: str) -> None:
    plant(tmp_path, {"a/dog": 2, f"{name}/a/dog": 2, f"a/{name}/dog": 1, f"a/dog/{name}": 1})
    data = read("folder", tmp_path)
    assert [domain.name for domain in data.domains] == ["a"]
    assert data.classes == ("dog",)
    assert len(data["a"]) == 2
    assert data.notice == "files that are hidden or are not images were skipped: 2"


@pytest.mark.parametrize("name", ["__MACOSX/", "._", ".Spotlight-V100/", "__MACOSX/._"])
def test_what_macos_adds_to_a_zip_file_is_no_data(tmp_path: Path, name: str) -> None:
    names = [f"{domain}/{label}/1.png" for domain in BATCHES for label in CLASSES]
    zip_of(tmp_path / "cifar.zip", [*names, *(f"train/{label}/{name}1.png" for label in CLASSES)])
    data = read("cifar-10", tmp_path)
    assert len(data["train"]) == 10


def test_a_link_to_itself_is_named(tmp_path: Path) -> None:
    plant(tmp_path, {"a/dog": 1})
    (tmp_path / "a/dog/x.png").symlink_to(tmp_path / "a/dog/x.png")
    assert "a/dog/x.png' cannot be read (Too many levels of symbolic links)" in refusal(
        lambda: read("folder", tmp_path)
    )


# Fuzzing


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The bytes with a few of them changed, cut, inserted, repeated, or taken from elsewhere."""
    made = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        # Most of a file is pixels, where nothing can go wrong: the beginning and the end are hit more often.
        place = chance.choice([chance.randrange(len(made) + 1), chance.randrange(min(300, len(made)) + 1)])
        if chance.random() < 0.2:
            place = len(made) - min(len(made), chance.randrange(100))
        kind = chance.randrange(5)
        if kind == 0 and place < len(made):
            made[place] ^= 1 << chance.randrange(8)
        elif kind == 1 and place < len(made):
            made[place] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        elif kind == 2:
            del made[place:]
        elif kind == 3:
            made[place:place] = chance.randbytes(chance.choice([1, 1, 2, 4, 8]))
        else:
            start = chance.randrange(len(made) + 1)
            made[place : place + chance.randrange(9)] = made[start : start + chance.randrange(9)]
    return bytes(made)


def fuzz(name: str, content: bytes, count: int, attempt: Callable[[bytes], None]) -> None:
    """Runs the attempt on damaged contents; it may end, or be refused in a sentence."""
    for number in range(count * FUZZ):
        made = damaged(content, random.Random(f"{name} {number}"))
        sentence = ""
        try:
            attempt(made)
        except DataError as error:
            sentence = str(error)
        except BaseException as error:
            raise AssertionError(f"{name} {number}: {type(error).__name__}") from error
        assert sentence == "" or sentence.isprintable(), (name, number)


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", ["published", "protocol 3", "protocol 4"])
def test_fuzzed_batches(tmp_path: Path, kind: str) -> None:
    contents = {"published": published_batch(), "protocol 3": modern_batch(3), "protocol 4": modern_batch(4)}
    path = tmp_path / "batch"

    def attempt(content: bytes) -> None:
        path.write_bytes(content)
        images, labels = read_batch(path)
        assert images.dtype == torch.uint8
        assert images.shape == (len(labels), 3, 32, 32)
        assert all(0 <= label < 10 for label in labels.tolist())

    fuzz(f"batch {kind}", contents[kind], 1_000, attempt)


@pytest.mark.no_cover
@pytest.mark.parametrize("packed", [False, True])
def test_fuzzed_idx_files(tmp_path: Path, packed: bool) -> None:
    content = idx(torch.arange(60).reshape(3, 4, 5))
    path = tmp_path / "images"

    def attempt(content: bytes) -> None:
        path.write_bytes(content)
        assert read_idx(path, 3).dtype == torch.uint8

    fuzz(f"idx {packed}", gzip.compress(content, mtime=0) if packed else content, 1_000, attempt)


@pytest.mark.no_cover
@pytest.mark.parametrize("file", ["fog.npy", "labels.npy"])
def test_fuzzed_arrays(tmp_path: Path, file: str) -> None:
    lay_arrays(tmp_path)

    def attempt(content: bytes) -> None:
        (tmp_path / file).write_bytes(content)
        data = read("cifar-10-c", tmp_path)
        for domain in data.domains:
            assert domain.take(range(len(domain))).shape[:2] == (len(domain), 3)
            assert all(0 <= label < 10 for label in domain.labels.tolist())

    fuzz(file, (tmp_path / file).read_bytes(), 300, attempt)


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("suffix", [".bmp", ".gif", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".webp"])
def test_fuzzed_images(tmp_path: Path, suffix: str) -> None:
    picture = Image.fromarray(noise(1).permute(1, 2, 0).contiguous().numpy())
    if suffix == ".pgm":
        picture = picture.convert("L")
    picture.save(tmp_path / f"x{suffix}")
    content = (tmp_path / f"x{suffix}").read_bytes()
    files = ImageFiles(tmp_path, ["x.png"])

    def attempt(content: bytes) -> None:
        (tmp_path / "x.png").write_bytes(content)
        image = files[0]
        assert image.dtype == torch.uint8
        assert image.shape[0] == 3

    fuzz(f"image {suffix}", content, 150, attempt)


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fuzzed_zip_files(tmp_path: Path) -> None:
    images = {f"{domain}/{label}/1.png": noise(1, 4, 4) for domain in BATCHES for label in CLASSES}
    with zipfile.ZipFile(tmp_path / "good.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, image in images.items():
            content = io.BytesIO()
            Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(content, "PNG")
            archive.writestr(zipfile.ZipInfo(name), content.getvalue())
    good = (tmp_path / "good.zip").read_bytes()
    (tmp_path / "good.zip").unlink()

    def attempt(content: bytes) -> None:
        (tmp_path / "cifar.zip").write_bytes(content)
        data = read("cifar-10", tmp_path)
        for path in unreadable(data):
            assert path.startswith(f"{tmp_path}/cifar.zip/")

    fuzz("zip", good, 200, attempt)


@pytest.mark.no_cover
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_fuzzed_manifests(tmp_path: Path, suffix: str) -> None:
    """A list that somebody else wrote names images below its own folder, or is refused."""
    paths = plant(tmp_path, {"a/cat": 2, "a/dog": 2, "b/cat": 2, "b/dog": 2})
    rows = []
    for path in paths:
        domain, label, _ = path.relative_to(tmp_path).parts
        rows.append((str(path.relative_to(tmp_path)), label, domain))
    table = pandas.DataFrame(rows, columns=["path", "label", "domain"])
    listed = tmp_path / f"list{suffix}"
    if suffix == ".csv":
        table.to_csv(listed, index=False)
    else:
        table.to_parquet(listed)

    def attempt(content: bytes) -> None:
        listed.write_bytes(content)
        data = read("manifest", listed, missing_ok=True)
        for path in unreadable(data):
            assert path.startswith(f"{tmp_path}/")

    fuzz(f"manifest {suffix}", listed.read_bytes(), 200, attempt)


def plant_odd_entry(folder: Path, chance: random.Random) -> None:
    """Something in a folder that may be an image, or anything else that a file system can hold."""
    stem = chance.choice(["x", "ü", ESCAPE, ".hidden", "__MACOSX", "\n", "[red]", "-", "'\"", "\udce9"])
    path = folder / (
        stem + str(chance.randrange(4)) * chance.randrange(2) + chance.choice([".png", ".jpg", ".txt", ""])
    )
    if os.path.lexists(path):
        return
    makers: list[Callable[[Path], object]] = [
        lambda path: Image.new("RGB", (2, 2)).save(path, "PNG"),
        lambda path: path.write_bytes(chance.randbytes(20)),
        lambda path: path.write_bytes(b""),
        make_pipe,
        make_device_link,
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("gone"),
        lambda path: path.symlink_to(folder),
    ]
    weights = [12, 1, 1, 1, 1, 2, 1, 1, 1]
    chance.choices(makers, weights)[0](path)


@pytest.mark.no_cover
@on_linux
def test_fuzzed_folders(tmp_path: Path) -> None:
    whole = 0
    for number in range(150 * FUZZ):
        chance = random.Random(f"folders {number}")
        root = tmp_path / str(number)
        plant(root, {"a/dog": 1, "b/cat": 1, "b/dog": 1})
        for _ in range(chance.randrange(4)):
            plant_odd_entry(chance.choice([root, root / "a", root / "a/dog", root / "b/cat"]), chance)
        sentence = ""
        try:
            data = read("folder", root)
        except DataError as error:
            sentence = str(error)
        else:
            whole += unreadable(data) == ()
            assert data.digest()
        assert sentence == "" or sentence.isprintable(), number
    assert whole > 0
