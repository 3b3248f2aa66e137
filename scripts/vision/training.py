"""One run: a network trained with an optimizer, and tested after every epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs import TrainConfig
from optim import build_optimizer, record_reference_gradient, set_learning_rate
from scripts.vision.batches import Normalizer, TrainingBatches
from scripts.vision.images import DataSet, Images, Split
from scripts.vision.network import ResNet, running_statistics_kept

BATCH_SIZE = 128
TEST_BATCH = 500
DROPS = (0.5, 0.75)  # of all epochs: the published 100 and 150 of 200
DROP = 0.1


@dataclass(frozen=True)
class Epoch:
    train_loss: float
    """mean over the epoch's batches, while the weights change"""
    test_loss: float
    accuracy: float
    """share of the test images"""
    seconds: float
    """of training"""


def learning_rate_of(epoch: int, epochs: int, peak: float) -> float:
    """Of an epoch, from 0: a tenth after each drop."""
    return peak * DROP ** sum(epoch >= share * epochs for share in DROPS)


def new_network(data: DataSet, split: Split) -> ResNet:
    return ResNet(split.train.channels, split.classes, data.widths, data.blocks)


def train(
    data: DataSet,
    split: Split,
    config: TrainConfig,
    epochs: int,
    seed: int,
    device: torch.device,
    after: Callable[[Epoch], None] = lambda epoch: None,
) -> list[Epoch]:
    """Trains with `config`'s optimizer. On a CPU the same arguments give the same numbers.

    Args:
        after: told each epoch's outcome.

    Raises:
        ValueError: settings that the optimizer does not have.
    """
    train_images, test_images = split.train.to(device), split.test.to(device)
    batches = TrainingBatches(train_images, BATCH_SIZE, seed, data.pad, data.flip)
    torch.manual_seed(seed)  # of the initial weights, the same for all optimizers
    model = new_network(data, split).to(device)
    optimizer = build_optimizer(model, replace(config, max_iters=epochs * len(batches)))

    outcomes = []
    for epoch in range(epochs):
        set_learning_rate(optimizer, learning_rate_of(epoch, epochs, config.learning_rate))
        model.train()
        start, total = time.perf_counter(), torch.zeros((), device=device)
        for update in range(epoch * len(batches), (epoch + 1) * len(batches)):
            if config.exact:
                with running_statistics_kept(model):
                    _backward(model, *batches(update + 1))
                record_reference_gradient(optimizer)
                optimizer.zero_grad()
            total += _backward(model, *batches(update))
            optimizer.step()
            optimizer.zero_grad()
        loss = total.item() / len(batches)  # waits for the device
        seconds = time.perf_counter() - start
        outcomes.append(Epoch(loss, *_test(model, test_images, batches.normalize), seconds))
        after(outcomes[-1])
    return outcomes


def _backward(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Leaves the gradient of the mean loss in the parameters. Returns the loss, 0-d."""
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss.detach()


@torch.no_grad()
def _test(model: nn.Module, images: Images, normalize: Normalizer) -> tuple[float, float]:
    """Mean loss, and the share of images whose most likely label is theirs."""
    model.eval()
    loss, right = 0.0, 0
    for pixels, labels in zip(images.pixels.split(TEST_BATCH), images.labels.split(TEST_BATCH), strict=True):
        logits = model(normalize(pixels))
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        right += int((logits.argmax(dim=1) == labels).sum())
    return loss / len(images), right / len(images)
