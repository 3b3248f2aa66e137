"""scripts/compare.py: configs and rows with values that no run writes."""

from pathlib import Path

import pytest

from scripts import compare
from scripts.comparison import metrics
from scripts.comparison.runs import read_run
from tests.scripts.written_runs import write_run


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "config",
    [
        *('{"learning_rate": %s}' % ("9" * 400), '{"max_iters": %s}' % ("9" * 400), '{"max_iters": 1e300}'),
        *('{"betas_1d": 0.9, "seed": [1]}', '{"optimizer": 5, "dataset": ["x"], "gamma": {}}'),
        '{"data": {"val_tokens": %s, "val_bytes": 1, "tokenizer": ["a"]}}' % ("9" * 400),
        '{"data": 5, "parameters": 1e300, "tokens_per_update": 1e300}',
    ],
)
def test_odd_values_in_a_config_are_unknown(tmp_path: Path, config: str) -> None:
    folder, other = write_run(tmp_path / "a", [(0, 5.0), (10, 2.5)]), write_run(tmp_path / "b", [(0, 5.0), (10, 2.5)])
    (folder / "config.json").write_text(config)
    assert compare.main([str(folder), str(other), "--paper", "small", "--csv"]) == 0


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, '{"seed": %s}' % ("9" * 5000)])
def test_a_config_that_python_cannot_read_is_damaged(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a", [(0, 5.0)])
    (folder / "config.json").write_text(content)
    assert compare.main([str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {folder / 'config.json'} is damaged")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "line",
    [
        *(
            '{"iter": 11, "tokens": 1e300, "time": 1, "val/loss": 2}',
            '{"iter": 11, "tokens": 1, "time": 1, "val/loss": 1e300}',
        ),
        *('{"iter": 11, "tokens": 1, "time": 1, "train/loss": 2, "tokens_per_sec": 1e300}', "[" * 100_000),
        '{"iter": 11, "tokens": %s, "time": 1, "val/loss": 2}' % ("9" * 400),
    ],
)
def test_numbers_that_no_run_writes_are_damaged_lines(tmp_path: Path, line: str) -> None:
    folder = write_run(tmp_path / "a", [(0, 5.0), (10, 2.5)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert compare.main([str(folder)]) == 0
    run = read_run(folder)
    assert run.damaged_lines == 1
    assert run.evals.loss.tolist() == [5.0, 2.5]
    content = (folder / "metrics.jsonl").read_bytes()
    assert metrics.by_arrow(content) is None


@pytest.mark.filterwarnings("error")
def test_the_highest_losses_can_be_drawn(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / str(i), [(0, 5.0), (10, 3e38), (20, end)], seed=i) for i, end in enumerate((2.0, 3e38))
    ]
    assert compare.main([*map(str, runs), "--html", str(tmp_path / "p.html")]) == 0
