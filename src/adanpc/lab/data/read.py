"""All data sets by name, and data sets of your own by module or file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adanpc.lab.data.cifar import cifar10
from adanpc.lab.data.cifar_c import cifar10_c
from adanpc.lab.data.domain import AbsentError, DataError, DataSet
from adanpc.lab.data.folders import DOMAIN_NET, OFFICE_HOME, PACS, TERRA_INCOGNITA, VLCS, Layout, any_folder, published
from adanpc.lab.data.imagenet import imagenet, imagenet_c
from adanpc.lab.data.images import UNREADABLE, unreadable, without
from adanpc.lab.data.manifest import SUFFIXES as MANIFEST_SUFFIXES
from adanpc.lab.data.manifest import manifest, refuse_missing
from adanpc.lab.data.mnist import rotated_mnist
from adanpc.lab.own import DATA_SETS as ENTRY_POINTS
from adanpc.lab.own import OwnFunctions, is_own, registered_names
from adanpc.require import unknown

DOMAIN_BED = "DomainBed's download script (https://github.com/facebookresearch/DomainBed) arranges it this way"


@dataclass(frozen=True)
class Reader:
    """How to read a data set, and what to say if it is missing.

    Args:
        read: returns the data set at or below a root, given a seed for what is random in it; None if it is not there.
        remedy: part of a sentence: where it is published, and which layout is expected in which folder.
        check: refuses data with missing files, if ``read`` itself does not look for them.
    """

    read: Callable[[Path, int], DataSet | None]
    remedy: str
    check: Callable[[DataSet], None] = lambda data: None


def _published_reader(layout: Layout, page: str) -> Reader:
    """Returns the reader of a data set that is published at a web page, as folders of images."""
    domains = ", ".join(names[0] for names in layout.domains)
    folders = f"{layout.folders[0]}/<domain>/<class>/<image> with the domains {domains}"
    remedy = f"it is published at {page} and expected as {folders}; {DOMAIN_BED}"
    return Reader(lambda root, seed: published(layout, root), remedy)


READERS: dict[str, Reader] = {
    "rotated-mnist": Reader(
        rotated_mnist,
        "MNIST is published at http://yann.lecun.com/exdb/mnist/ and its four idx files, gzipped or not, are expected "
        "in MNIST or MNIST/raw; 5,000 of its digits come with pip install 'adanpc[demo]'",
    ),
    "pacs": _published_reader(PACS, "http://www.eecs.qmul.ac.uk/~dl307/project_iccv2017"),
    "vlcs": _published_reader(VLCS, "http://www.eecs.qmul.ac.uk/~dl307/project_iccv2017"),
    "terra-incognita": _published_reader(TERRA_INCOGNITA, "https://beerys.github.io/CaltechCameraTraps/"),
    "domain-net": _published_reader(DOMAIN_NET, "http://ai.bu.edu/M3SDA/"),
    "office-home": _published_reader(OFFICE_HOME, "https://www.hemanthdv.org/officeHomeDataset.html"),
    "folder": Reader(
        lambda root, seed: any_folder(root),
        "give a folder of images that are arranged as <domain>/<class>/<image>, or as <class>/<image>",
    ),
    "manifest": Reader(
        lambda root, seed: manifest(root),
        "give the path of a CSV or Parquet file with the columns path, label and, if there are several, domain",
        refuse_missing,
    ),
    "cifar-10": Reader(
        lambda root, seed: cifar10(root),
        "it is published at https://www.cs.toronto.edu/~kriz/cifar.html (python version) and expected unpacked as "
        "cifar-10-batches-py/data_batch_1 … test_batch, or as CIFAR-10/<train or test>/<class>/<image>, also in a zip "
        "file",
    ),
    "cifar-10-c": Reader(
        cifar10_c,
        "it is published at https://doi.org/10.5281/zenodo.2535967 and expected unpacked as "
        "CIFAR-10-C/<corruption>.npy and CIFAR-10-C/labels.npy; without these files it is made from cifar-10, which is "
        "not there either",
    ),
    "imagenet": Reader(
        lambda root, seed: imagenet(root),
        "it is published at https://image-net.org/ and expected as ImageNet/val/<wnid>/<image>.JPEG, and the same for "
        "train",
    ),
    "imagenet-c": Reader(
        imagenet_c,
        "it is published at https://doi.org/10.5281/zenodo.2235448 and expected unpacked as "
        "ImageNet-C/<corruption>/<severity>/<wnid>/<image>.JPEG; without these files it is made from imagenet, which "
        "is not there either",
    ),
}


OWN = OwnFunctions(ENTRY_POINTS, "data set", DataError, "adanpc.lab.data.find_data")
OWN_REMEDY = "its reader has found nothing there"


def find_data(name: str) -> None:
    """Refuses a name that no data set has; loads the reader of a data set of your own, so that this process can use it.

    Args:
        name: see ``read``. The code of a module or file in the name is executed, so do not take the name from a file
            that you do not trust.
    """
    if is_own(name):
        OWN.find(name)
    else:
        _reader(name)


def check_named_data(name: str) -> None:
    """Refuses a data set of your own that this process has not loaded by ``find_data``; runs no code."""
    if is_own(name):
        OWN.known(name)


def read(name: str, root: str | Path, *, seed: int = 0, missing_ok: bool = False) -> DataSet:
    """Returns the data set of this name, at the root or in its usual folder below.

    Args:
        name: one of ``READERS``; a name that an installed package registers as an entry point ``adanpc.data``; or a
            function or class of your own that ``find_data`` has loaded, as ``my_module:MyData`` or
            ``path/to/file.py:MyData``. It is called with the root and the seed, and returns a ``DataSet``, or None if
            the data are not at the root.
        root: the folder of all data, or of the data set itself.
        seed: decides what is random in the data: which digit is rotated by which angle, and corruptions that are
            generated.
        missing_ok: whether to include files that a manifest lists but that do not exist, for ``unreadable`` to find.
    """
    reader = _reader(name)
    data = reader.read(Path(root), seed)
    if data is None:
        raise AbsentError(f"{name} is not at {str(root)!r}: {reader.remedy}")
    if not isinstance(data, DataSet):
        raise DataError(f"{name} must return a DataSet, got a {type(data).__name__}")
    if not missing_ok:
        reader.check(data)
    return data


def _reader(name: str) -> Reader:
    """Returns the reader of a data set by name."""
    if name in READERS:
        return READERS[name]
    read_own = OWN.known(name)
    if read_own is None:
        names = (*READERS, *registered_names(ENTRY_POINTS))
        raise DataError(unknown("data set", name, names, also="module:function"))
    return Reader(read_own, OWN_REMEDY)


def read_images(path: str | Path, *, skip_unreadable: bool = False) -> DataSet:
    """Returns the images of a folder, or those that a CSV or Parquet file lists.

    Args:
        path: as for the data sets ``folder`` and ``manifest``.
        skip_unreadable: whether to decode every image first and leave out those that cannot be decoded; the notice
            counts them.
    """
    path = Path(path)
    name = "folder"
    if path.suffix.lower() in MANIFEST_SUFFIXES:
        name = "manifest"
    try:
        data = read(name, path, missing_ok=skip_unreadable)
    except AbsentError:
        raise AbsentError(
            f"there are no images at {str(path)!r}: give a folder <class>/<image> or <domain>/<class>/<image>, or a "
            "CSV or Parquet file with the columns path, label and perhaps domain"
        ) from None
    if skip_unreadable:
        data = without(data, unreadable(data), UNREADABLE)
    return data
