"""The table of a comparison: a row a run, aligned, narrow enough for a terminal."""

from scripts.comparison.analysis import best_loss, bits_per_byte, final_loss, short_names, throughput
from scripts.comparison.runs import Run
from scripts.comparison.wording import amount, duration, loss_text, rate

TABLE_WIDTH = 110

# A head over one column or several, and the columns under it.
HEADS: list[tuple[str, list[str]]] = [
    ("", ["run"]),
    ("", ["optimizer"]),
    ("learning", ["rate"]),
    ("", ["params"]),
    ("", ["tokens"]),
    ("validation loss", ["final", "best"]),
    ("bits per byte", ["final", "best"]),
    ("", ["tokens/s"]),
    ("training", ["time"]),
]
TEXT_COLUMNS = 2  # run and optimizer are set flush left, numbers flush right


def table(runs: list[Run]) -> list[str]:
    """The lines of the table: a row a run, then a row for the unigram model of each data set."""
    columns = [name for _, names in HEADS for name in names]
    rows = [_cells(run, name) for run, name in zip(runs, short_names(runs), strict=True)]
    rows += [
        ["unigram model" + where, "", "", "", "", loss_text(run.unigram_loss), "", bits, "", "", ""]
        for run, where, bits in _unigram_rows(runs)
    ]
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    _widen_for_heads(widths)
    _shorten_names(rows, widths)
    lines = [_head_line(widths), _line(columns, widths), "-" * (sum(widths) + 2 * len(widths) - 2)]
    return lines + [_line(row, widths) for row in rows]


def _cells(run: Run, name: str) -> list[str]:
    final, best = final_loss(run.evals), best_loss(run.evals)
    return [
        name,
        run.optimizer,
        rate(run.number("learning_rate")),
        amount(run.number("parameters")),
        amount(run.tokens),
        loss_text(final),
        loss_text(best),
        _bits(run, final),
        _bits(run, best),
        _speed(throughput(run.tokens_per_sec)),
        duration(run.time),
    ]


def _bits(run: Run, loss: float | None) -> str:
    return loss_text(bits_per_byte(loss, run.data.get("val_tokens"), run.data.get("val_bytes")))


def _speed(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:,.0f}"


def _unigram_rows(runs: list[Run]) -> list[tuple[Run, str, str]]:
    """One run of each data set that has a unigram loss, with the data set's name where there are several."""
    first = {f"{run.unigram_loss:.6f}": run for run in reversed(runs) if run.unigram_loss is not None}
    chosen = list(reversed(first.values()))
    return [(run, f" ({run.dataset})" if len(chosen) > 1 else "", _bits(run, run.unigram_loss)) for run in chosen]


def _widen_for_heads(widths: list[int]) -> None:
    start = 0
    for head, names in HEADS:
        room = sum(widths[start : start + len(names)]) + 2 * (len(names) - 1)
        widths[start] += max(0, len(head) - room)
        start += len(names)


def _shorten_names(rows: list[list[str]], widths: list[int]) -> None:
    """Cuts the middle out of long names until the table fits, unless two of them would look the same."""
    too_wide = sum(widths) + 2 * (len(widths) - 1) - TABLE_WIDTH
    room = max(16, widths[0] - max(0, too_wide))
    names = [row[0] for row in rows]
    short = [n if len(n) <= room else n[: room // 2 - 2] + "..." + n[len(n) - (room - room // 2 - 1) :] for n in names]
    if too_wide > 0 and room < widths[0] and len(set(short)) == len(set(names)):
        for row, name in zip(rows, short, strict=True):
            row[0] = name
        widths[0] = room


def _head_line(widths: list[int]) -> str:
    parts, start = [], 0
    for head, names in HEADS:
        parts.append(head.rjust(sum(widths[start : start + len(names)]) + 2 * (len(names) - 1)))
        start += len(names)
    return "  ".join(parts).rstrip()


def _line(cells: list[str], widths: list[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:TEXT_COLUMNS], widths, strict=False)]
    right = [c.rjust(w) for c, w in zip(cells[TEXT_COLUMNS:], widths[TEXT_COLUMNS:], strict=True)]
    return "  ".join(left + right).rstrip()
