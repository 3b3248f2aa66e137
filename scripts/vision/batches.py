"""What an update sees, as a pure function of (seed, update), as in `data/batches.py`: all optimizers see the same
images, moved and mirrored in the same way, and exact MARS can ask for the next batch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.batches import window_offsets
from scripts.vision.images import Images

LEVELS = 256  # of a pixel


class Normalizer:
    """Pixels to numbers: each channel of the training images gets mean 0 and deviation 1."""

    def __init__(self, images: Images) -> None:
        counts = torch.stack(
            [torch.bincount(channel.flatten(), minlength=LEVELS) for channel in images.pixels.unbind(3)]
        )
        shares = counts.double() / counts.sum(dim=1, keepdim=True)
        levels = torch.arange(LEVELS, dtype=torch.float64, device=shares.device)
        mean = shares @ levels
        self.mean, self.deviation = mean.float(), (shares @ levels.square() - mean.square()).sqrt().float()

    def __call__(self, pixels: Tensor) -> Tensor:
        """(B, height, width, channels) uint8 to (B, channels, height, width) float32, channels last in memory."""
        return ((pixels - self.mean) / self.deviation).permute(0, 3, 1, 2)


class TrainingBatches:
    """Each epoch all images once, in a new order, padded with black, cropped and mirrored at random; the last batch of
    an epoch may be smaller.

    Args:
        images: on the device of the batches.
        batch_size: B.
        seed: of the run.
        pad, flip: as of `DataSet`.
    """

    def __init__(self, images: Images, batch_size: int, seed: int, pad: int, flip: bool) -> None:
        self.images, self.batch_size, self.seed, self.pad, self.flip = images, batch_size, seed, pad, flip
        self.normalize = Normalizer(images)
        self._draws = lru_cache(maxsize=2)(self._draw)  # an exact update at an epoch's end is of two epochs

    def __len__(self) -> int:
        """Of an epoch."""
        return -(-len(self.images) // self.batch_size)

    def __call__(self, update: int) -> tuple[Tensor, Tensor]:
        """Of an update, from 0: inputs (B, channels, height, width) and labels (B,)."""
        epoch, place = divmod(update, len(self))
        order, choices = self._draws(epoch)
        rows = slice(place * self.batch_size, (place + 1) * self.batch_size)
        chosen = order[rows].to(self.images.labels.device)
        pixels = _moved(self.images.pixels[chosen], choices[rows].to(chosen.device), self.pad, self.flip)
        return self.normalize(pixels), self.images.labels[chosen]

    def _draw(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The order of the images, and a number for each place in it that says what becomes of the image, both (n,)."""
        draws = window_offsets(self.seed, epoch, 2 * len(self.images), 2**62)
        order = np.argsort(draws[: len(self.images)], kind="stable")
        return torch.from_numpy(order), torch.from_numpy(draws[len(self.images) :])


def _moved(pixels: Tensor, choices: Tensor, pad: int, flip: bool) -> Tensor:
    """Images cut from their padded selves at places that `choices` (B,) tell, half of them mirrored if `flip`.

    Args:
        pixels: (B, height, width, channels); the result is of the same shape.
    """
    count, height, width, _ = pixels.shape
    places = 2 * pad + 1
    top, left, mirrored = choices % places, choices // places % places, choices // places**2 % 2 * int(flip)
    across = torch.arange(width, device=pixels.device)
    rows = top[:, None] + torch.arange(height, device=pixels.device)
    columns = left[:, None] + torch.where(mirrored[:, None] == 1, width - 1 - across, across)
    padded = F.pad(pixels, (0, 0, pad, pad, pad, pad))
    return padded[torch.arange(count, device=pixels.device)[:, None, None], rows[:, :, None], columns[:, None, :]]
