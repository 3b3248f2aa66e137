"""Small images with labels: scikit-learn's digits, which are on every machine, and CIFAR-10/100 through `datasets`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data import DataError
from data.hub import Place, Unreachable, find_shards
from data.network import reason

TEST_SHARE = 0.2  # of the digits
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Images:
    pixels: Tensor
    """(n, height, width, channels) uint8"""
    labels: Tensor
    """(n,) int64"""

    def to(self, device: torch.device) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def channels(self) -> int:
        return self.pixels.shape[3]


@dataclass(frozen=True)
class Split:
    train: Images
    test: Images
    classes: int


@dataclass(frozen=True)
class DataSet:
    """A data set, and what belongs to it."""

    load: Callable[[Path | None], Callable[[int], Split]]
    """from a folder (None: its own place) to the split that a seed is given"""
    epochs: int
    widths: tuple[int, ...]
    """of the network's stages"""
    blocks: int
    pad: int
    """pixels by which a training image is moved at most, in each direction"""
    flip: bool
    """whether half of the training images are mirrored"""
    linear: bool
    """whether a linear classifier is worth a comparison"""


def _digits(folder: Path | None) -> Callable[[int], Split]:
    """1,797 images of 8x8, values from 0 to 16. Each seed has a split of its own, with every digit's share in both."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    if folder is not None:
        raise DataError("--path is for CIFAR; the digits come with scikit-learn")
    digits = load_digits()
    pixels, labels = digits.images.astype(np.uint8)[..., None], digits.target

    def split(seed: int) -> Split:
        parts = train_test_split(pixels, labels, test_size=TEST_SHARE, stratify=labels, random_state=seed)
        train_pixels, test_pixels, train_labels, test_labels = map(torch.from_numpy, parts)
        return Split(Images(train_pixels, train_labels), Images(test_pixels, test_labels), classes=10)

    return split


def linear_accuracy(split: Split) -> float:
    """Test accuracy, in percent, of logistic regression on the pixels, as scikit-learn has it by default."""
    from sklearn.linear_model import LogisticRegression

    scale = int(split.train.pixels.max())
    train, test = (images.pixels.flatten(1).numpy() / scale for images in (split.train, split.test))
    classifier = LogisticRegression(max_iter=10_000).fit(train, split.train.labels.numpy())
    return 100 * float(classifier.score(test, split.test.labels.numpy()))


@dataclass(frozen=True)
class Cifar:
    """50,000 training and 10,000 test images of 32x32 in colour, the same for all seeds."""

    place: Place
    label: str
    """column"""
    classes: int

    def __call__(self, folder: Path | None) -> Callable[[int], Split]:
        """Raises DataError: the files are not there and cannot be fetched, or are of another form."""
        files = _files(folder) if folder is not None else self._cached() or self._fetched()
        train, test = (self._read(files[name], name) for name in SPLITS)
        split = Split(train, test, self.classes)
        return lambda seed: split

    def _cached(self) -> dict[str, list[Path]] | None:
        """From the hub's cache, without asking the hub."""
        from huggingface_hub import snapshot_download

        try:
            return _files(Path(snapshot_download(**self._snapshot, local_files_only=True)))
        except Exception:
            return None

    def _fetched(self) -> dict[str, list[Path]]:
        from huggingface_hub import snapshot_download

        try:
            find_shards(self.place)  # within seconds, whether there is a network
            return _files(Path(snapshot_download(**self._snapshot)))
        except Exception as error:
            why = str(error) if isinstance(error, DataError | Unreachable) else reason(error, 100)
            raise DataError(
                f"{self.place} cannot be had ({why}): fetch its train-*.parquet and test-*.parquet on a machine with a "
                "network and give their folder with --path FOLDER, or use --data digits, which needs no network"
            ) from error

    @property
    def _snapshot(self) -> dict[str, Any]:
        patterns = f"{self.place.folder}/*.parquet"
        return {"repo_id": self.place.repo, "repo_type": "dataset", "allow_patterns": patterns}

    def _read(self, files: list[Path], split: str) -> Images:
        """Raises DataError: columns, images or labels that are not CIFAR's."""
        import datasets

        place = f"{files[0].parent.absolute()}, {split}"
        try:
            rows = datasets.load_dataset(
                "parquet", data_files=[str(file) for file in files], split="train", streaming=True
            )
            missing = [name for name in ("img", self.label) if name not in (rows.column_names or [])]
            if missing:
                raise DataError(f"{place}: no column {missing[0]!r}; its columns: {', '.join(rows.column_names or [])}")
            pairs = [(np.asarray(row["img"]), row[self.label]) for row in rows.cast_column("img", datasets.Image())]
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{place}: cannot be read ({reason(error, 100)}); fetch the files again") from error
        for number, (image, label) in enumerate(pairs, 1):
            if image.shape != (32, 32, 3) or image.dtype != np.uint8:
                raise DataError(
                    f"{place}, row {number}: an image of {image.shape} {image.dtype}, not (32, 32, 3) uint8"
                )
            if label not in range(self.classes):
                raise DataError(f"{place}, row {number}: {self.label}={label!r}, allowed: 0 to {self.classes - 1}")
        if not pairs:
            raise DataError(f"{place}: no rows")
        pixels, labels = zip(*pairs, strict=True)
        return Images(torch.from_numpy(np.stack(pixels)), torch.tensor(labels))


def _files(folder: Path) -> dict[str, list[Path]]:
    """Raises DataError: no folder, or one without the files of a split."""
    if not folder.is_dir():
        raise DataError(f"{folder.absolute()} is no folder; give the one with train-*.parquet and test-*.parquet")
    files = {split: sorted(folder.rglob(f"{split}-*.parquet")) for split in SPLITS}
    for split, found in files.items():
        if not found:
            raise DataError(f"{folder.absolute()} has no {split}-*.parquet")
    return files


DATA_SETS = {
    "digits": DataSet(_digits, epochs=15, widths=(16, 32), blocks=1, pad=1, flip=False, linear=True),
    "cifar10": DataSet(
        Cifar(Place("uoft-cs/cifar10", folder="plain_text"), "label", 10),
        epochs=200, widths=(64, 128, 256, 512), blocks=2, pad=4, flip=True, linear=False,
    ),
    "cifar100": DataSet(
        Cifar(Place("uoft-cs/cifar100", folder="cifar100"), "fine_label", 100),
        epochs=200, widths=(64, 128, 256, 512), blocks=2, pad=4, flip=True, linear=False,
    ),
}  # fmt: skip
