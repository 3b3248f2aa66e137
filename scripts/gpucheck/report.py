"""What scripts/gpu_check.py prints: a line for a part when it has ended, and its figures at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.gpucheck.running import SUCCEEDED, Outcome


def part_line(outcome: Outcome) -> str:
    """How a part ended, and, where it did not succeed, why."""
    line = f"{outcome.name:12}{outcome.outcome:10}{outcome.seconds:7.1f} s of {outcome.limit:.0f} s"
    return line if outcome.outcome == SUCCEEDED else f"{line}: {outcome.message}"


def figure_lines(outcome: Outcome) -> Iterator[str]:
    """The figures that are worth a line; all of them are in the JSON."""
    figures = outcome.figures
    if outcome.name == "training":
        for name, value in figures.get("ratios", {}).items():
            if value is not None:
                yield f"{'training':12}{name:28}{value:.4g}"
    if outcome.name == "optimizers":
        for row in figures.get("rows", []):
            yield f"{'optimizers':12}{row['method']:18}{row['ratio']:6.2f} x fused AdamW, {1e3 * row['seconds']:.2f} ms"
    if outcome.name == "pair":
        yield from pair_lines(figures)
    if outcome.name == "resume":
        for mode, found in figures.items():
            equal = "the same bits" if found["equal"] else "not the same bits"
            yield (
                f"{'resume':12}{mode:18}{equal}; largest difference of losses "
                f"{found['largest_difference_of_losses']:.2g}, of weights {found['largest_difference_of_weights']:.2g}"
            )
    if outcome.name == "tests" and figures:
        yield f"{'tests':12}" + ", ".join(f"{figures[end]} {end}" for end in ("passed", "skipped", "failed", "errors"))


def pair_lines(figures: dict[str, Any]) -> Iterator[str]:
    for name in ("adamw", "mars-adamw"):
        if run := figures.get(name):
            mfu = "" if run["mfu"] is None else f", mfu {run['mfu']:.3f}"
            memory = ""
            if run["peak_allocated"]:
                memory = f", peak {run['peak_allocated'] / 1e9:.2f} GB (planned {run['planned'] / 1e9:.2f})"
            yield (
                f"{'pair':12}{name:18}{run['tokens_per_second']:,.0f} tokens/s{mfu}{memory}, first update after "
                f"{run['seconds_to_update_1']:.1f} s, validation loss {run['val_loss'][-1]:.3f}"
            )
    if "mars_time_to_adamw_time" in figures:
        yield f"{'pair':12}an update of MARS-AdamW takes {figures['mars_time_to_adamw_time']:.3f} times AdamW's"
