"""How lines look, in the figure and in the page alike.

Colours are Okabe and Ito's, which the colour-blind can tell apart; line styles and markers say the same again for
black-and-white print. What is published is grey, thin and dashed.
"""

from dataclasses import dataclass
from typing import Any

# Okabe and Ito without yellow, which is hardly seen on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Solid, and dashes as matplotlib's (offset, (ink, gap, ...)); then the same as plotly's lengths in pixels.
LINE_STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
DASHES = ("solid", "9px,3px", "11px,3px,2px,3px", "6px,2px,2px,2px,2px,2px")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")

GREYS = ("#666666", "#8a8a8a", "#a6a6a6")
PUBLISHED_LINE_STYLES: tuple[Any, ...] = ((0, (4, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))
PUBLISHED_DASHES = ("7px,4px", "2px,3px", "8px,3px,2px,3px")
PUBLISHED_MARKERS = ("*", "x", "+")
PUBLISHED_SYMBOLS = ("star-open", "x-thin-open", "cross-thin-open")
UNIGRAM_GREY = "#555555"


@dataclass(frozen=True)
class Style:
    colour: str
    line: Any  # what matplotlib takes as a line style
    marker: str
    dash: str  # the same for plotly
    symbol: str


def style(number: int) -> Style:
    """The look of a group: the cycles of colours and lines meet after 28 groups, then each colour gets the next marker,
    so 196 groups differ in at least one.
    """
    colour, line = number % len(COLOURS), number % len(LINE_STYLES)
    marker = (number + number // (len(COLOURS) * len(LINE_STYLES))) % len(MARKERS)
    return Style(COLOURS[colour], LINE_STYLES[line], MARKERS[marker], DASHES[line], SYMBOLS[marker])
