"""What a run reports of its course: rows in `metrics.jsonl` and wandb, lines on the console."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from configs import TrainConfig
from training.console import fail, say
from training.metrics import MetricsFile, TrainingClock, format_count, format_duration
from training.status import Status
from training.tracking import Tracker
from training.variance import ESTIMATES


class Reporter:
    """Of the main process, for all.

    Args:
        config: of the run.
        record: what `config.json` has.
        status: where the end is noted.
        update: updates done before.
        clock: seconds of training.
        flops_per_token: of a forward and backward pass.
        peak_flops: operations a second that all devices together could reach; None where that is not known.
    """

    def __init__(
        self,
        config: TrainConfig,
        record: dict[str, Any],
        status: Status,
        update: int,
        clock: TrainingClock,
        flops_per_token: float,
        peak_flops: float | None,
    ) -> None:
        folder = Path(config.out_dir)
        self.config, self.status, self.clock = config, status, clock
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.tokens_per_update = config.total_batch_size * config.block_size
        self._last_row = (update, clock.seconds())
        self._clipped = 0
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._tracker: Tracker | None = None
        if config.wandb_log:
            self._tracker = Tracker(record, folder)

    def count_clipped(self, grad_norm: float) -> None:
        """To be told of each update: whether its gradient was longer than `grad_clip`."""
        self._clipped += math.isfinite(grad_norm) and grad_norm > self.config.grad_clip

    def training(self, update: int, loss: float, lr: float, grad_norm: float, figures: dict[str, float]) -> None:
        """A training row, with the optimizer's `figures`. `clip_rate` is the share of the updates since the row before
        whose gradient was clipped."""
        seconds = self.clock.seconds()
        since_update, since_seconds = self._last_row
        self._last_row = (update, seconds)
        rate = (update - since_update) * self.tokens_per_update / max(seconds - since_seconds, 1e-9)
        row = {"train/loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens_per_sec": rate, **figures}
        if self.config.grad_clip > 0:
            row["clip_rate"] = self._clipped / max(update - since_update, 1)
        self._clipped = 0
        if self.peak_flops is not None:
            row["mfu"] = rate * self.flops_per_token / self.peak_flops
        self._write(update, row)
        last = self.config.max_iters
        say(
            f"update {update:>{len(str(last))}}/{last}  loss {loss:.4f}  lr {lr:.2e}  grad norm {grad_norm:.2f}  "
            f"{format_count(rate)} tokens/s  {format_duration((last - update) * self.tokens_per_update / rate)} left"
        )

    def evaluation(self, update: int, loss: float, improved: bool, seconds: float, figures: dict[str, float]) -> None:
        """An evaluation row, with the `figures` of the update before it. `seconds`: that training waited."""
        self._write(update, {"val/loss": loss, "eval_seconds": round(seconds, 3), **figures})
        best = " (best so far)" if improved else ""
        say(f"update {update}: validation loss {loss:.4f}{best}, training waited {seconds:.2f} s")

    def variance(self, update: int, figures: dict[str, float]) -> None:
        """A row of the gradients' noise, as `GradientNoise` measured it at the weights before the update."""
        self._write(update, figures)
        errors = [(name, figures.get(f"variance/{name}_error")) for name in ESTIMATES]
        shown = [f"{name} {error:.3g}" for name, error in errors if error is not None]
        say(
            f"update {update}: noise scale {figures['variance/noise_scale']:.3g} sequences, "
            f"errors {', '.join(shown) or 'unknown'}, training waited {figures['variance_seconds']:.2f} s"
        )

    def end(self, update: int, finished: bool, reason: str | None, unwritten: list[str]) -> bool:
        """Closes the files and says how the run ended.

        Args:
            finished: or else asked to stop, by `reason`.
            unwritten: a line for each checkpoint that could not be written.

        Returns:
            whether all that the run had to write is written.
        """
        problem = self._metrics.close()
        problems = [*unwritten, problem] if problem else unwritten
        for line in problems:
            fail(f"not written: {line}")
        if problems:
            self.status.write("failed", update, f"not written: {problems[-1]}")
        elif finished:
            self.status.write("finished", update)
        else:
            self.status.write("stopped", update, reason)
        if not finished:
            say(f"stopped after update {update}; --resume=auto goes on from there")
        return not problems

    def finish_tracking(self, code: int) -> None:
        """Ends the run in wandb, with the exit status. To be called last: its network may make it take 16 s."""
        if self._tracker is not None:
            self._tracker.finish(code)

    def _write(self, update: int, row: dict[str, Any]) -> None:
        place = {"iter": update, "tokens": update * self.tokens_per_update, "time": self.clock.seconds()}
        written = self._metrics.append(place | row)
        if written is not None and self._tracker is not None:
            self._tracker.log(written)
