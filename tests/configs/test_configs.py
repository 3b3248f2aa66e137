"""Configs: each loads, and no mistake passes in silence."""

import math
from pathlib import Path

import pytest

from configs import ConfigError, TrainConfig, describe, load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def message(*overrides: str, path: Path = CONFIGS / "gpt2_small_mars.py") -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_config_loads_and_writes_into_a_folder_of_its_own() -> None:
    paths = [path for path in CONFIGS.glob("*_*.py") if not path.name.startswith("__")]
    assert len(paths) == 50
    assert len({load_config(path).out_dir for path in paths}) == len(paths)


def test_the_stdlib_pair_differs_only_in_the_optimizer() -> None:
    from dataclasses import asdict

    adamw, mars = (asdict(load_config(CONFIGS / f"stdlib_{name}.py")) for name in ("adamw", "mars"))
    different = {key for key in adamw if adamw[key] != mars[key]}
    assert different <= {
        *("optimizer", "learning_rate", "min_lr", "beta1", "beta2", "weight_decay"),
        *("weight_decay_1d", "betas_1d", "lr_1d", "out_dir"),
    }


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("--learning_rate=1", "learning_rate", 1.0),
        ("--learning_rate=2e-3", "learning_rate", 2e-3),
        ("--wandb_run_name=2024", "wandb_run_name", "2024"),
        ("--wandb_run_name=none", "wandb_run_name", None),
        ("--out_dir=a=b", "out_dir", "a=b"),
        ("--bias=true", "bias", True),
        ("--bias=False", "bias", False),
        ("--compile=auto", "compile", "auto"),
        ("--compile=false", "compile", False),
        ("--betas_1d=0.8,0.9", "betas_1d", (0.8, 0.9)),
        ("--betas_1d=(0.8, 0.9)", "betas_1d", (0.8, 0.9)),
        ("--wandb_tags=a, exp (1)", "wandb_tags", ("a", "exp (1)")),
        ("--lr_1d=none", "lr_1d", None),
        ("--lr_embedding=6e-3", "lr_embedding", 6e-3),
        ("--betas_embedding=0.9,0.95", "betas_embedding", (0.9, 0.95)),
        ("--mars_kinds=matrices, vectors", "mars_kinds", ("matrices", "vectors")),
        ("--preconditioner_embeddings=lion", "preconditioner_embeddings", "lion"),
        ("--preconditioner_matrices=none", "preconditioner_matrices", None),
        ("--gamma=0.5", "gamma", 0.5),
        ("--gamma=cosine:0.1:0", "gamma", "cosine:0.1:0"),
        ("--gamma=adaptive", "gamma", "adaptive"),
        ("--gamma=adaptive:2:0.1:0.5:0.3:0.2", "gamma", "adaptive:2:0.1:0.5:0.3:0.2"),
        ("--lr_decay_iters=50", "lr_decay_iters", 50),
        ("--device=cuda:1", "device", "cuda:1"),
    ],
)
def test_command_line_values_take_the_type_of_their_key(argument: str, key: str, value: object) -> None:
    got = getattr(load_config(CONFIGS / "gpt2_small_mars.py", [argument]), key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--learning_rte=1", ["--learning_rte=1", "unknown key", "did you mean learning_rate?"]),
        ("--zzzz=1", ["unknown key", "--help"]),
        ("--learning_rate=abc", ["--learning_rate=abc", "number"]),
        ("--learning_rate=nan", ["finite"]),
        ("--learning_rate=0", ["greater than 0"]),
        ("--learning_rate=", ["number"]),
        ("--max_iters=1.5", ["--max_iters=1.5", "integer"]),
        ("--n_layer=0", ["--n_layer=0", "1"]),
        ("--dropout=1", ["less than 1"]),
        ("--beta1=1", ["less than 1"]),
        ("--optimizer=mars", ["'adamw'", "'mars-adamw'"]),
        ("--gamma=step:1:0", ["gamma", "linear:START:END", "cosine:START:END", "adaptive"]),
        ("--gamma=adaptive:1", ["gamma", "adaptive:ABOVE:GAMMA:BELOW:GAMMA:ELSE"]),
        ("--preconditioner_vectors=shampoo", ["preconditioner_vectors", "'adamw', 'lion' or 'sgd'"]),
        ("--preconditioner_matrices=muon", ["preconditioner_matrices", "'shampoo', 'kronecker' or 'sgd'"]),
        ("--mars_kinds=matrix", ["mars_kinds", "'matrices', 'convolutions', 'embeddings' or 'vectors'"]),
        ("--mars_clip=norm", ["'tensor'", "'global'", "'none'"]),
        ("--dtype=fp16", ["'float16'"]),
        ("--device=tpu", ["cuda"]),
        ("--bias=maybe", ["boolean"]),
        ("--betas_1d=0.9", ["two numbers"]),
        ("--betas_1d=0.9,0.95,0.99", ["2"]),
        ("--out_dir=", ["1 character"]),
        ("--n_head=5", ["n_embd=768", "n_head=5", "12"]),
        ("--min_lr=1", ["min_lr=1", "learning_rate=0.006"]),
        ("max_iters=3", ["--key=value"]),
        ("--max_iters", ["--key=value"]),
        ("--resume", ["--key=value"]),
        ("--wandb_project=a/b", ["--wandb_project=a/b"]),
        ("--out_dir=a\nb", ["--out_dir=a\\nb"]),
        ("--max_iters=1\n2", ["integer"]),
    ],
)
def test_mistakes_on_the_command_line(argument: str, parts: list[str]) -> None:
    text = message(argument)
    assert all(part in text for part in parts), text


def test_a_batch_that_does_not_divide_names_what_does() -> None:
    config = load_config(CONFIGS / "gpt2_small_mars.py", ["--batch_size=7"])
    with pytest.raises(ConfigError, match=r"batch_size=7 x 8 .* total_batch_size=480; .* 1, 2, 3, 4, 5, 6, 10"):
        config.accumulation_steps(8)
    with pytest.raises(ConfigError, match=r"480 cannot be shared equally by 7 processes; .* 1, 2, 3"):
        config.accumulation_steps(7)


def test_a_config_builds_on_others_and_sees_their_values(tmp_path: Path) -> None:
    (tmp_path / "sizes.py").write_text("n_layer = 3\nlearning_rate = 1e-3\n")
    (tmp_path / "more.py").write_text("base = 'sizes.py'\nn_layer = 4\nseed = 1\n")
    (tmp_path / "run.py").write_text(
        '"""A docstring."""\nbase = ("sizes.py", "more.py")\nmin_lr = learning_rate / 10\nseed = 2\n'
    )
    config = load_config(tmp_path / "run.py", ["--seed=3"])
    assert (config.n_layer, config.learning_rate, config.seed) == (4, 1e-3, 3)
    assert math.isclose(config.min_lr, 1e-4)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("n_layr = 3", ["run.py", "n_layr", "n_layer"]),
        ("n_layer = '3'", ["run.py", "n_layer = '3'", "integer"]),
        ("n_layer = True", ["n_layer = True", "integer"]),
        ("wandb_run_name = 2024", ["wandb_run_name = 2024", "string"]),
        ("n_layer = (", ["run.py", "line 1"]),
        ("n_layer = depth", ["run.py", "NameError", "depth"]),
        ("import os", ["os", "unknown key"]),
        ("base = 'gone.py'", ["gone.py", "No such file"]),
        ("base = 'run.py'", ["run.py", "leads back"]),
        ("base = 3", ["line 1", "base"]),
        ("base: str = 'a.py'", ["run.py", "base", "plain assignment"]),
        ("if True:\n    base = 'a.py'", ["run.py", "base", "plain assignment"]),
        ("exit(3)", ["run.py", "SystemExit"]),
        ("raise ValueError('one\\ntwo')", ["run.py", "one two"]),
        ("n_layer = list(range(10**5))", ["n_layer = [0, 1, 2", "…", "integer"]),
        ("n_layer = 3\0", ["run.py"]),
        ("out_dir = 'a\\0b'", ["out_dir"]),
        ("base = 'a' + '.py'", ["line 1", "base"]),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "run.py"
    path.write_text(text)
    complaint = message(path=path)
    assert all(part in complaint for part in parts), complaint


def test_a_missing_or_binary_config(tmp_path: Path) -> None:
    assert str(tmp_path / "gone.py") in message(path=tmp_path / "gone.py")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    assert "binary.py" in message(path=tmp_path / "binary.py")
    assert str(tmp_path) in message(path=tmp_path)


def test_help_explains_every_key() -> None:
    text = describe()
    for key in TrainConfig.__dataclass_fields__:
        line = next(line for line in text.split("\n  --") if line.removeprefix("  --").startswith(f"{key}="))
        assert len(line.splitlines()[1].strip()) > 10, f"{key} has no docstring"
