"""How large the parts are on a GPU, and on a CPU, where they only show that the script works."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True)
class Sizes:
    """Of data, models and runs."""

    train_tokens: int
    val_tokens: int
    model: tuple[str, ...]
    """settings of the pair's model; none: GPT-2 small"""
    block_size: int
    updates: int
    """of each run of the pair"""
    most_sequences: int
    """of one of its updates"""
    trial_updates: int
    """of the run that finds out how many sequences there is time for"""
    resume_model: tuple[str, ...]
    bench_training: tuple[str, ...]
    """options of scripts/bench_training.py, and of bench_optimizers.py"""
    bench_optimizers: tuple[str, ...]


METHODS = ("--optimizers", "mars-adamw", "mars-adamw-exact", "mars-lion", "mars-shampoo")
SMALL_MODEL = ("--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32")
SIZES = {
    "cuda": Sizes(
        train_tokens=20_000_000,
        val_tokens=200_000,
        model=(),
        block_size=1024,
        updates=200,
        most_sequences=64,
        trial_updates=15,
        # Compiles in seconds; its heads are GPT-2's, so that attention is the same kernel.
        resume_model=("--n_layer=2", "--n_head=4", "--n_embd=256", "--block_size=512"),
        # GPT-2 small with half its layers, since two of the three ways are compiled.
        bench_training=(
            *("--layers=6", "--heads=12", "--width=768", "--block=1024", "--batch=8"),
            *("--rounds=5", "--updates=4"),
        ),
        bench_optimizers=METHODS,
    ),
    "cpu": Sizes(
        train_tokens=20_000,
        val_tokens=1_000,
        model=SMALL_MODEL,
        block_size=32,
        updates=20,
        most_sequences=8,
        trial_updates=10,
        resume_model=SMALL_MODEL,
        bench_training=(
            *("--layers=1", "--heads=2", "--width=32", "--vocab=512", "--block=32", "--batch=2"),
            *("--rounds=2", "--updates=2", "--compile=false"),
        ),
        bench_optimizers=("--layers=1", "--width=32", "--vocab=64", "--repeat=2", "--no-compile", *METHODS),
    ),
}


def micro_batch(device: str, memory: int | None) -> int:
    """Sequences of the pair's micro-batch: what GPT-2 small needs for them fits in every GPU of the class."""
    if device == "cpu" or memory is None:
        return 2
    return 16 if memory > 38 * GB else 8 if memory > 22 * GB else 4
