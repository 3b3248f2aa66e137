"""Residual networks for small images (He et al. 2016, arXiv 1512.03385), and their batch normalization in a pass that
is not to leave a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional as F


class ResNet(nn.Module):
    """A residual network without the reductions that large images need: a 3x3 convolution first, no pooling after it.

    Args:
        channels: of an image.
        classes: K.
        widths: channels of each stage; each but the first halves height and width.
        blocks: of two convolutions, in a stage. The defaults make ResNet-18.
    """

    def __init__(
        self, channels: int, classes: int, widths: Sequence[int] = (64, 128, 256, 512), blocks: int = 2
    ) -> None:
        super().__init__()
        self.stem = _convolution(channels, widths[0], size=3)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        stages: list[nn.Module] = []
        before = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                stages.append(Block(before, width, stride=2 if stage > 0 and block == 0 else 1))
                before = width
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, height, width) to logits (B, K)."""
        x = F.relu(self.stem_norm(self.stem(images)))
        return self.head(self.blocks(x).mean(dim=(2, 3)))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = _convolution(before, width, size=3, stride=stride), nn.BatchNorm2d(width)
        self.second, self.second_norm = _convolution(width, width, size=3), nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(_convolution(before, width, size=1, stride=stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, h, w) to (B, width, h / stride, w / stride)."""
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def _convolution(before: int, width: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, width, size, stride, padding=size // 2, bias=False)  # a normalization follows


@contextmanager
def running_statistics_kept(model: nn.Module) -> Iterator[None]:
    """Batch normalization goes on with the statistics of the batch, and leaves the running ones as they are.

    The reference gradient of exact MARS is of the same function as the gradient it is compared with, so it needs batch
    statistics. But the running ones, which tests use, are to see each batch once, as with every other optimizer: a
    second pass would make their average shorter and mix in batches that the weights have not been trained on.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    try:
        for norm in norms:
            norm.track_running_stats = False
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
