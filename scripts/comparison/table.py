"""The table of a comparison: a row a group, aligned, narrow enough for a terminal."""

from scripts.comparison.analysis import bits_per_byte, short_names
from scripts.comparison.groups import Group
from scripts.comparison.milestones import reached
from scripts.comparison.runs import Run
from scripts.comparison.statistics import Spread
from scripts.comparison.wording import amount, duration, loss_text, names, rate, shortened, spread_text

TABLE_WIDTH = 120

Heads = list[tuple[str, list[str]]]  # a head over one column or several, and the columns under it
TEXT_COLUMNS = 2  # run and optimizer are set flush left, numbers flush right


def table(groups: list[Group]) -> list[str]:
    """The lines of the table: a row a group, with the rows of its seeds, then one for the unigram model of each data
    set. A star marks what is not finished.
    """
    heads, rows = cells(groups)
    columns = [name for _, names in heads for name in names]
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    _widen_for_heads(heads, widths)
    _shorten_names(rows, widths)
    lines = [_head_line(heads, widths), _line(columns, widths), "-" * (sum(widths) + 2 * len(widths) - 2)]
    return lines + [_line(row, widths) for row in rows]


def cells(groups: list[Group]) -> tuple[Heads, list[list[str]]]:
    """Heads and cells, as text."""
    milestones = reached(groups)
    heads: Heads = [
        ("", ["run"]),
        ("", ["optimizer"]),
        ("learning", ["rate"]),
        ("", ["params"]),
        ("", ["tokens"]),
        *([("validation loss at", list(milestones))] if milestones else []),
        ("validation loss", ["final", "best"]),
        ("bits per byte", ["final", "best"]),
        ("", ["tokens/s"]),
        ("training", ["time"]),
    ]
    runs = [run for group in groups for run in group.runs]
    folders = iter(short_names(runs))
    rows = []
    for group, name in zip(groups, names(groups).rows, strict=True):
        rows.append(_cells(group, name, milestones))
        seeds = [(Group((run,)), next(folders)) for run in group.runs]
        if len(seeds) > 1:
            rows += [_cells(seed, f"  {folder}", milestones) for seed, folder in seeds]
    for run, where, bits in _unigram_rows(runs):
        empty = [""] * len(milestones)
        row = ["unigram model" + where, "", "", "", "", *empty, loss_text(run.unigram_loss), "", bits, "", "", ""]
        rows.append(row)
    return heads, rows


def _cells(group: Group, name: str, milestones: dict[str, int]) -> list[str]:
    run, final, best = group.first, group.final, group.best
    return [
        name + ("" if group.finished else " *"),
        run.optimizer,
        rate(run.number("learning_rate")),
        amount(run.number("parameters")),
        amount(group.tokens),
        *(spread_text(group.loss_at(tokens)) for tokens in milestones.values()),
        spread_text(final),
        spread_text(best),
        _mean_bits(run, final),
        _mean_bits(run, best),
        _speed(group.throughput),
        duration(group.time),
    ]


def _mean_bits(run: Run, loss: Spread | None) -> str:
    return _bits(run, loss.mean if loss else None)


def _bits(run: Run, loss: float | None) -> str:
    return loss_text(bits_per_byte(loss, run.data.get("val_tokens"), run.data.get("val_bytes")))


def _speed(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:,.0f}"


def _unigram_rows(runs: list[Run]) -> list[tuple[Run, str, str]]:
    """One run of each data set that has a unigram loss, with the data set's name where there are several."""
    first = {f"{run.unigram_loss:.6f}": run for run in reversed(runs) if run.unigram_loss is not None}
    chosen = list(reversed(first.values()))
    return [(run, f" ({run.dataset})" if len(chosen) > 1 else "", _bits(run, run.unigram_loss)) for run in chosen]


def _widen_for_heads(heads: Heads, widths: list[int]) -> None:
    start = 0
    for head, columns in heads:
        room = sum(widths[start : start + len(columns)]) + 2 * (len(columns) - 1)
        widths[start] += max(0, len(head) - room)
        start += len(columns)


def _shorten_names(rows: list[list[str]], widths: list[int]) -> None:
    """Cuts the middle out of long names until the table fits, or as far as they stay different."""
    too_wide = sum(widths) + 2 * (len(widths) - 1) - TABLE_WIDTH
    room = max(24, widths[0] - max(0, too_wide))
    names = [row[0] for row in rows]
    if too_wide > 0 and room < widths[0]:
        for row, name in zip(rows, shortened(names, room), strict=True):
            row[0] = name
        widths[0] = max(len(row[0]) for row in rows)


def _head_line(heads: Heads, widths: list[int]) -> str:
    parts, start = [], 0
    for head, columns in heads:
        parts.append(head.rjust(sum(widths[start : start + len(columns)]) + 2 * (len(columns) - 1)))
        start += len(columns)
    return "  ".join(parts).rstrip()


def _line(cells: list[str], widths: list[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:TEXT_COLUMNS], widths, strict=False)]
    right = [c.rjust(w) for c, w in zip(cells[TEXT_COLUMNS:], widths[TEXT_COLUMNS:], strict=True)]
    return "  ".join(left + right).rstrip()
