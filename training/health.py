"""Updates that must not be made: their loss or gradient norm is not finite."""

from __future__ import annotations

import math

from training import RunError
from training.console import warn


class BadUpdates:
    """Counts them, and ends a run that has too many in a row.

    Args:
        limit: how many in a row end the run; 0: no number does.
        total, in_row: counted before, in all and since the last good one.
        speaks: whether this process prints a warning for each.
    """

    def __init__(self, limit: int, total: int, in_row: int, speaks: bool) -> None:
        self.limit, self.total, self.in_row, self.speaks = limit, total, in_row, speaks

    def note(self, update: int, loss: float, grad_norm: float, excused: bool) -> bool:
        """Takes note of an update before it is made. Returns whether it may be made.

        Args:
            loss, grad_norm: the same on every process.
            excused: a norm that is not finite has a harmless reason: a float16 scaler that is still looking for its
                factor. Such an update is skipped too, but does not count towards the limit.

        Raises:
            RunError: too many in a row.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_row = 0
            return True
        self.total += 1
        self.in_row += not excused
        if self.speaks:
            why = "the scaler's factor was too large" if excused else f"{self.in_row} in a row"
            warn(f"update {update}: loss {loss:g}, gradient norm {grad_norm:g}; skipped ({why}, {self.total} in all)")
        if self.in_row >= self.limit > 0:
            raise RunError(
                f"loss or gradient norm was not finite in {self.in_row} updates in a row, up to update {update}; none "
                "of them was made or saved; lower --learning_rate, raise --warmup_iters, or allow more with "
                "--max_bad_updates; if the newest checkpoint itself only leads here, delete it"
            )
        return False
