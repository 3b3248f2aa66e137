"""`CheckpointFolder`: written whole and behind the loop, the ones that are kept, and files that cannot be read."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model import GPT, GPTConfig
from training.checkpoint import KEYS, CheckpointFolder

LONG = 30  # seconds that nothing here takes unless something is wrong


def state(update: int, best: int = 0, model: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """What the loop saves, with a small model whose weights are the update's number."""
    weights = model or {"weight": torch.full((1000,), float(update))}
    return dict.fromkeys(KEYS) | {"model": weights, "optimizer": {}, "iter": update, "best_iter": best}


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def file_of(update: int) -> str:
    return f"iter-{update:08}.pt"


def save_all(folder: CheckpointFolder, *updates: int, best: int = 0) -> None:
    for update in updates:
        folder.save(state(update, best))
    folder.wait()


class Gate:
    """Holds `torch.save` in the middle of a file until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened, self.calls = threading.Event(), threading.Event(), 0
        self._save = torch.save

    def __call__(self, content: Any, file: Any) -> None:
        self.calls += 1
        file.write(b"the beginning of a checkpoint")
        file.flush()
        self.reached.set()
        assert self.opened.wait(LONG)
        file.seek(0)
        self._save(content, file)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(torch, "save", gate)
    yield gate
    gate.opened.set()  # so that a test that fails does not leave a thread that waits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "checkpoints"


def load(folder: CheckpointFolder) -> dict[str, Any]:
    loaded = folder.load_newest()
    assert loaded is not None
    return loaded


def test_save_returns_before_the_file_is_there_and_its_name_appears_when_it_is_whole(path: Path, gate: Gate) -> None:
    folder = CheckpointFolder(path, 2)
    folder.save(state(1))
    assert gate.reached.wait(LONG)
    assert names(path) == ["iter-00000001.tmp"]
    assert CheckpointFolder(path, 2).load_newest() is None, "nothing that a process could start from yet"
    gate.opened.set()
    folder.wait()
    assert names(path) == [file_of(1)]
    assert torch.load(path / file_of(1), weights_only=True)["iter"] == 1


def test_what_is_written_is_the_state_at_the_time_of_the_save(path: Path, gate: Gate) -> None:
    weight, moment, step = torch.ones(50), torch.full((50,), 2.0), torch.tensor(3.0)
    saved = state(1, model={"weight": weight}) | {
        "optimizer": {"state": {0: {"exp_avg": moment, "step": step}}, "param_groups": [{"params": [0], "lr": 0.1}]}
    }
    folder = CheckpointFolder(path, 2)
    folder.save(saved)
    assert gate.reached.wait(LONG)
    for tensor in (weight, moment, step):
        tensor.zero_()
    saved["optimizer"]["param_groups"][0]["lr"] = 9.0
    gate.opened.set()
    folder.wait()
    loaded = load(folder)
    assert loaded["model"]["weight"].eq(1).all()
    entry = loaded["optimizer"]["state"][0]
    assert entry["exp_avg"].eq(2).all()
    assert entry["step"] == 3
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.1


def test_tied_weights_are_stored_once(path: Path) -> None:
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=32, block_size=8, vocab_size=5000))
    weights = model.state_dict()
    assert weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr()
    folder = CheckpointFolder(path, 2)
    folder.save(state(1, model=weights))
    folder.wait()
    assert (path / file_of(1)).stat().st_size < 1.2 * 4 * model.num_parameters()
    loaded = load(folder)
    again = GPT(model.config)
    again.load_state_dict(loaded["model"])
    for name, weight in weights.items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_a_second_save_waits_for_the_first(path: Path, gate: Gate) -> None:
    folder = CheckpointFolder(path, 2)
    folder.save(state(1))
    assert gate.reached.wait(LONG)
    second = threading.Thread(target=folder.save, args=(state(2),))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    assert gate.calls == 1
    gate.opened.set()
    second.join(LONG)
    folder.wait()
    assert names(path) == [file_of(1), file_of(2)]


@pytest.mark.parametrize(
    ("keep", "best", "kept"), [(1, 7, [7]), (1, 3, [3, 7]), (2, 3, [3, 6, 7]), (9, 0, range(1, 8))]
)
def test_the_newest_and_the_best_are_kept(path: Path, keep: int, best: int, kept: list[int]) -> None:
    folder = CheckpointFolder(path, keep)
    for update in range(1, 8):
        save_all(folder, update, best=min(update, best))
    assert names(path) == [file_of(update) for update in kept]


def test_old_ones_go_only_when_the_new_one_is_complete(
    path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.opened.set()
    folder = CheckpointFolder(path, 1)
    save_all(folder, 1)

    def full(content: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        save_all(folder, 2)
        assert names(path) == [file_of(1)]
        save_all(folder, 3)
        assert names(path) == [file_of(1)]
    assert [line.split(": ")[-1] for line in folder.failures] == ["No space left on device"] * 2
    assert capsys.readouterr().err.count("warning: update") == 2

    gate.opened.clear()
    gate.reached.clear()
    folder.save(state(4))
    assert gate.reached.wait(LONG)
    assert names(path) == [file_of(1), "iter-00000004.tmp"]
    gate.opened.set()
    folder.wait()
    assert names(path) == [file_of(4)]


def test_the_order_is_that_of_the_numbers(path: Path) -> None:
    folder = CheckpointFolder(path, 2)
    save_all(folder, 99_999_998, 99_999_999, 100_000_000, 100_000_001)
    assert names(path) == ["iter-100000000.pt", "iter-100000001.pt"]
    assert load(CheckpointFolder(path, 2))["iter"] == 100_000_001


def cut(share: float, minus: int = 0) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * share) - minus])

    return damage


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": cut(0),
    "a single byte": lambda file: file.write_bytes(file.read_bytes()[:1]),
    "100 bytes": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "half": cut(0.5),
    "all but one byte": cut(1, minus=1),
    "another program's": lambda file: torch.save({"model": {}, "step": 9}, file),
    "a tensor": lambda file: torch.save(torch.ones(3), file),
    "text": lambda file: file.write_text("not a checkpoint\n"),
    "a folder": folder_instead,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_cannot_be_read_is_skipped_and_left_alone(
    path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], Any]
) -> None:
    save_all(CheckpointFolder(path, 9), 1, 2, 9)
    damage(path / file_of(9))
    before = None if (path / file_of(9)).is_dir() else (path / file_of(9)).read_bytes()
    capsys.readouterr()
    folder = CheckpointFolder(path, 2)
    assert load(folder)["iter"] == 2
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"warning: skipped: {path / file_of(9)} is not a checkpoint: ")

    save_all(folder, 3, 4)
    assert names(path) == [file_of(3), file_of(4), file_of(9)]
    save_all(folder, 10, 11, 12)
    assert names(path) == [file_of(9), file_of(11), file_of(12)], "it never counts among the newest"
    assert before is None or (path / file_of(9)).read_bytes() == before


def test_a_folder_of_that_name_does_not_keep_old_ones_from_going(path: Path) -> None:
    """In a process that did not have to look at it: a newer checkpoint could be read."""
    (path / file_of(1)).mkdir(parents=True)
    folder = CheckpointFolder(path, 2)
    save_all(folder, 2, 3, 4, 5, 6)
    assert names(path) == [file_of(1), file_of(5), file_of(6)]


def test_a_damaged_file_is_replaced_by_the_same_update(path: Path) -> None:
    save_all(CheckpointFolder(path, 9), 1, 2)
    cut(0.5)(path / file_of(2))
    folder = CheckpointFolder(path, 1)
    folder.load_newest()
    save_all(folder, 2)
    assert names(path) == [file_of(2)]
    save_all(folder, 3)
    assert names(path) == [file_of(3)], "and goes as any other then"


def test_newer_files_are_left_alone(path: Path) -> None:
    save_all(CheckpointFolder(path, 9), 1, 2, 8, 9)
    save_all(CheckpointFolder(path, 1), 3)
    assert names(path) == [file_of(3), file_of(8), file_of(9)]


def test_other_names_are_no_checkpoints(path: Path) -> None:
    assert CheckpointFolder(path, 1).load_newest() is None
    save_all(CheckpointFolder(path, 1), 1)
    others = ["iter-123.pt", "iter-0000000x.pt", "iter-00000005.pt.bak", "best.pt"]
    for name in others:
        (path / name).write_text("something else")
    folder = CheckpointFolder(path, 1)
    assert load(folder)["iter"] == 1
    save_all(folder, 2)
    assert names(path) == sorted([*others, file_of(2)])


def test_what_a_killed_process_left_is_deleted(path: Path) -> None:
    save_all(CheckpointFolder(path, 2), 1)
    for name in ("iter-00000002.tmp", "iter-100000002.tmp"):
        (path / name).write_bytes(b"half a checkpoint")
    (path / "notes.txt").write_text("somebody's")
    CheckpointFolder(path, 2).delete_leftovers()
    assert names(path) == [file_of(1), "notes.txt"]
    CheckpointFolder(path, 2).delete_leftovers()
    assert names(path) == [file_of(1), "notes.txt"]
