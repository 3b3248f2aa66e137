"""scripts/train_vision.py: networks, batches, the recipe, how optimizers step convolutions, and what is printed."""

import copy
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from configs import TrainConfig
from optim import MARS, build_optimizer
from scripts import train_vision as command
from scripts.vision.batches import TrainingBatches
from scripts.vision.images import DATA_SETS, Images, linear_accuracy
from scripts.vision.network import ResNet, running_statistics_kept
from scripts.vision.recipes import METHODS, RATES
from scripts.vision.training import learning_rate_of, new_network, train

CPU = torch.device("cpu")
DIGITS = DATA_SETS["digits"]
RECIPES = RATES["digits"].recipes()
CORRECTED = [name for name in METHODS if name.startswith("mars-")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More only slow so small networks down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_images(count: int, size: int = 8, channels: int = 3, seed: int = 0) -> Images:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(1, 256, (count, size, size, channels), generator=generator, dtype=torch.uint8)
    return Images(pixels, torch.randint(10, (count,), generator=generator))


# --- network ---


@pytest.mark.parametrize(("classes", "parameters"), [(10, 11_173_962), (100, 11_220_132)])
def test_resnet_18_for_small_images_has_its_known_size(classes: int, parameters: int) -> None:
    network = ResNet(3, classes)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert sum(isinstance(module, torch.nn.Conv2d | torch.nn.Linear) for module in network.modules()) == 18 + 3
    assert network.blocks(network.stem(torch.randn(2, 3, 32, 32))).shape == (2, 512, 4, 4)


def test_a_pass_that_leaves_no_trace_has_the_gradient_of_any_other() -> None:
    plain, kept = (ResNet(3, 10, (4, 8), 1) for _ in range(2))
    kept.load_state_dict(plain.state_dict())
    before = copy.deepcopy(dict(kept.named_buffers()))
    inputs = torch.randn(6, 3, 8, 8)
    plain(inputs).square().sum().backward()
    with running_statistics_kept(kept):
        kept(inputs).square().sum().backward()
    for one, other in zip(plain.parameters(), kept.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert all(torch.equal(value, before[name]) for name, value in kept.named_buffers())
    kept(inputs)
    for (name, one), other in zip(plain.named_buffers(), kept.buffers(), strict=True):
        assert torch.equal(one, other), name


# --- batches ---


def test_an_epoch_has_every_image_once_in_an_order_of_its_own() -> None:
    images = random_images(50)
    images = Images(images.pixels, torch.arange(50))
    batches = TrainingBatches(images, 16, seed=3, pad=0, flip=False)
    orders = [torch.cat([batches(4 * epoch + place)[1] for place in range(4)]) for epoch in range(2)]
    assert len(batches) == 4
    assert all(sorted(order.tolist()) == list(range(50)) for order in orders)
    assert orders[0].tolist() != orders[1].tolist() != list(range(50))
    assert TrainingBatches(images, 16, seed=4, pad=0, flip=False)(0)[1].tolist() != orders[0][:16].tolist()


def test_a_batch_does_not_depend_on_those_before_it() -> None:
    images = random_images(50)
    inputs, labels = TrainingBatches(images, 16, seed=3, pad=2, flip=True)(7)
    other = TrainingBatches(images, 16, seed=3, pad=2, flip=True)
    for update in (8, 0, 3):
        other(update)
    assert torch.equal(other(7)[0], inputs)
    assert torch.equal(other(7)[1], labels)


def test_images_are_cut_from_their_padded_selves_mirrored_or_not() -> None:
    images = random_images(40, size=6)
    images = Images(images.pixels, torch.arange(40))
    batches = TrainingBatches(images, 40, seed=1, pad=2, flip=True)
    mean, deviation = images.pixels.float().mean(dim=(0, 1, 2)), images.pixels.float().std(dim=(0, 1, 2), correction=0)
    seen = set()
    for inputs, label in zip(*batches(0), strict=True):
        pixels = (inputs.permute(1, 2, 0) * deviation + mean).round().to(torch.uint8)
        padded = F.pad(images.pixels[label], (0, 0, 2, 2, 2, 2))
        found = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if torch.equal(pixels.flip(1) if mirrored else pixels, padded[top : top + 6, left : left + 6])
        ]
        assert len(found) == 1
        seen |= set(found)
    for choice in range(3):
        assert len({place[choice] for place in seen}) == (2 if choice == 2 else 5)


def test_training_images_have_mean_0_and_deviation_1() -> None:
    images = random_images(64)
    inputs = TrainingBatches(images, 64, seed=1, pad=0, flip=False)(0)[0].double()
    torch.testing.assert_close(inputs.mean(dim=(0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.std(dim=(0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64))


# --- recipe and optimizers ---


def test_the_learning_rate_drops_by_ten_at_half_and_at_three_quarters() -> None:
    rates = [learning_rate_of(epoch, 200, 0.5) for epoch in range(200)]
    assert rates == pytest.approx([0.5] * 100 + [0.05] * 50 + [0.005] * 50)
    assert [learning_rate_of(epoch, 1, 0.5) for epoch in range(1)] == [0.5]


@pytest.mark.parametrize("name", CORRECTED)
def test_convolutions_are_stepped_by_mars_with_a_reference(name: str) -> None:
    """The published code gave them to AdamW."""
    network = ResNet(3, 10, (4, 8), 1)
    optimizer = build_optimizer(network, RECIPES[name].config)
    assert isinstance(optimizer, MARS)
    kernels = [parameter for parameter in network.parameters() if parameter.dim() == 4]
    assert len(kernels) == 6
    preconditioner = {"mars-adamw": "adamw", "mars-lion": "lion", "mars-shampoo": "shampoo"}[
        name.removesuffix("-exact")
    ]
    for group in optimizer.param_groups:
        if any(parameter.dim() == 4 for parameter in group["params"]):
            assert (group["preconditioner"], group["gamma"], group["clip"]) == (preconditioner, 0.025, "tensor")
    network(torch.randn(6, 3, 8, 8)).square().sum().backward()
    if optimizer.defaults["exact"]:
        optimizer.record_reference_gradient()
    optimizer.step()
    key = "reference_grad" if optimizer.defaults["exact"] else "last_grad"
    for kernel in kernels:
        assert torch.equal(optimizer.state[kernel][key], kernel.grad)


Seen = list[tuple[str, dict[str, torch.Tensor], list[torch.Tensor]]]


def test_exact_takes_the_gradient_of_the_present_weights_on_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And running statistics see each batch once."""
    split = DIGITS.load(None)(1)
    split = replace(split, train=Images(split.train.pixels[:300], split.train.labels[:300]))
    networks: list[torch.nn.Module] = []
    seen: Seen = []  # of each call of the optimizer: which, the network as it was, its gradients
    record, step = MARS.record_reference_gradient, MARS.step

    def built(network: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
        networks.append(network)
        return build_optimizer(network, config)

    def note(what: str) -> None:
        gradients = [parameter.grad.clone() for parameter in networks[0].parameters()]
        seen.append((what, copy.deepcopy(networks[0].state_dict()), gradients))

    def recorded(self: MARS) -> None:
        note("reference")
        record(self)

    def stepped(self: MARS) -> None:
        note("step")
        step(self)

    monkeypatch.setattr("scripts.vision.training.build_optimizer", built)
    monkeypatch.setattr(MARS, "record_reference_gradient", recorded)
    monkeypatch.setattr(MARS, "step", stepped)
    train(DIGITS, split, RECIPES["mars-adamw-exact"].config, 2, 1, CPU)

    assert [what for what, _, _ in seen] == ["reference", "step"] * 6
    batches = TrainingBatches(split.train, 128, 1, DIGITS.pad, DIGITS.flip)
    for number, (what, state, gradients) in enumerate(seen):
        update = number // 2
        network = new_network(DIGITS, split)
        network.load_state_dict(state)
        inputs, labels = batches(update + (what == "reference"))
        F.cross_entropy(network(inputs), labels).backward()
        expected = [parameter.grad for parameter in network.parameters()]
        torch.testing.assert_close(gradients, expected)
        assert state["stem_norm.num_batches_tracked"] == update + (what == "step")


# --- runs on digits ---


def test_the_same_seed_gives_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(name: str, *options: str) -> list[dict]:
        arguments = ["--data=digits", "--epochs=2", "--optimizers", "sgd", "mars-lion-exact", "--device=cpu", *options]
        assert command.main([*arguments, f"--json={tmp_path / name}"]) == 0
        found = json.loads((tmp_path / name).read_text())["rows"]
        for row in found:
            for run in row["runs"]:
                for epoch in run:
                    assert epoch.pop("seconds") > 0
        return found

    first = rows("a")
    printed = capsys.readouterr().out
    assert rows("b") == first
    assert rows("c", "--first_seed=2")[0]["runs"] != first[0]["runs"]
    assert [row["optimizer"] for row in first] == ["sgd", "mars-lion-exact"]
    for row in first:
        line = next(line.split() for line in printed.splitlines() if line.split()[:1] == [row["optimizer"]])
        assert f"{100 * row['runs'][0][-1]['accuracy']:.2f}" in line
        assert f"{row['runs'][0][-1]['test_loss']:.4f}" in line
    assert "linear classifier" in printed


def test_a_row_for_each_learning_rate() -> None:
    arguments = command.arguments(["--data=digits", "--optimizers", "lion", "sgd", "--lr", "lion=1e-3,2e-3"])
    found = [(recipe.name, recipe.learning_rate) for recipe in arguments.recipes]
    assert found == [("lion", 1e-3), ("lion", 2e-3), ("sgd", RECIPES["sgd"].learning_rate)]


@pytest.mark.slow
def test_every_optimizer_beats_a_linear_classifier_on_digits() -> None:
    seeds = (1, 2)
    splits = [DIGITS.load(None)(seed) for seed in seeds]
    linear = sum(linear_accuracy(split) for split in splits) / len(seeds)
    for name, recipe in RECIPES.items():
        runs = [train(DIGITS, split, recipe.config, 15, seed, CPU) for seed, split in zip(seeds, splits, strict=True)]
        accuracy = 100 * sum(run[-1].accuracy for run in runs) / len(seeds)
        assert accuracy > max(linear, 98.0), name


# --- CIFAR's files ---


def write_cifar(folder: Path, rows: int = 12, label: str = "label", size: int = 32, value: int | None = None) -> Images:
    """Parquet files as on the hub. Returns the training images."""
    folder.mkdir(exist_ok=True)
    found = []
    for split, seed in (("train", 1), ("test", 2)):
        images = random_images(rows, size, seed=seed)
        encoded = []
        for pixels in images.pixels:
            file = io.BytesIO()
            Image.fromarray(np.asarray(pixels)).save(file, "png")
            encoded.append({"bytes": file.getvalue(), "path": None})
        labels = images.labels.tolist() if value is None else [value] * rows
        table = pyarrow.table({"img": encoded, label: labels})
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
        found.append(images)
    return found[0]


@pytest.mark.parametrize(("data", "label", "classes"), [("cifar10", "label", 10), ("cifar100", "fine_label", 100)])
def test_cifar_is_read_as_it_was_written(tmp_path: Path, data: str, label: str, classes: int) -> None:
    written = write_cifar(tmp_path, label=label)
    split = DATA_SETS[data].load(tmp_path)(1)
    assert torch.equal(split.train.pixels, written.pixels)
    assert torch.equal(split.train.labels, written.labels)
    assert len(split.test) == 12
    assert split.classes == classes


def test_cifar_from_the_hub_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "datasets--uoft-cs--cifar10"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    written = write_cifar(repository / "snapshots" / ("0" * 40) / "plain_text")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert torch.equal(DATA_SETS["cifar10"].load(None)(1).train.pixels, written.pixels)


def test_the_paper_s_numbers_stand_beside_those_of_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(DATA_SETS["cifar100"], widths=(4, 4), blocks=1)
    monkeypatch.setitem(DATA_SETS, "cifar100", small)
    write_cifar(tmp_path, label="fine_label")
    printed: list[str] = []
    monkeypatch.setattr(command, "say", printed.append)
    options = ["--epochs=1", "--optimizers", "sgd", "mars-adamw-exact", "--device=cpu"]
    assert command.main(["--data=cifar100", f"--path={tmp_path}", *options]) == 0
    lines = printed[0].splitlines()
    assert next(line for line in lines if line.startswith("mars-adamw-exact")).split()[-1] == "77.38"
    assert "Table 9" in lines[-1]
    assert "linear" not in printed[0]


# --- errors ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data=mnist"], ["mnist", "digits", "cifar100"]),
        (["--data=digits", "--optimizers", "adam"], ["adam", "mars-adamw"]),
        (["--data=digits", "--lr", "adamw=fast"], ["adamw=fast", "numbers above 0"]),
        (["--data=digits", "--lr", "adamw=nan"], ["adamw=nan"]),
        (["--data=digits", "--optimizers", "sgd", "--lr", "lion=1e-3"], ["lion", "sgd"]),
        (["--data=digits", "--epochs=0"], ["--epochs", "0"]),
        (["--data=digits", "--path=x"], ["--path", "CIFAR"]),
        (["--data=digits", "--json=nowhere/x.json"], ["--json", "nowhere"]),
        (["--data=cifar10", "--path=nowhere"], ["nowhere", "train-*.parquet"]),
        (["--data=cifar10", "--path=."], ["train-*.parquet"]),
        (["--data=cifar10", "--path=labels"], ["labels", "row 1", "label=10", "0 to 9"]),
        (["--data=cifar10", "--path=size"], ["size", "row 1", "(16, 16, 3)", "(32, 32, 3)"]),
        (["--data=cifar100", "--path=labels"], ["labels", "fine_label", "img, label"]),
        (["--data=cifar10", "--path=damaged"], ["damaged", "cannot be read"]),
        (["--data=cifar10"], ["uoft-cs/cifar10", "--path FOLDER", "--data digits"]),
    ],
)
def test_errors_are_one_line(
    options: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("scripts.vision.images.find_shards", unreachable)
    if options[-1] == "--path=labels":
        write_cifar(tmp_path / "labels", value=10)
    if options[-1] == "--path=size":
        write_cifar(tmp_path / "size", size=16)
    if options[-1] == "--path=damaged":
        write_cifar(tmp_path / "damaged")
        (tmp_path / "damaged" / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    assert command.main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error


def unreachable(place: object) -> None:
    raise OSError("no network")
