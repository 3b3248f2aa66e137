"""Tokens like those of a text, for benchmarks on machines that have no data set: words of Python's standard library."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np

WORD = re.compile(r"\w+|[^\w\s]|\s+")
ENOUGH = 1_000_000  # words


def write_words(path: Path, vocab_size: int) -> Path:
    """Writes a token file of words, numbered by how often they occur; rare ones share the numbers of a vocabulary that
    is too small for all. Their frequencies are a text's, so that there is something to learn."""
    words: list[str] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        words += WORD.findall(file.read_text(encoding="utf-8", errors="replace"))
        if len(words) >= ENOUGH:
            break
    ranks = {word: rank % vocab_size for rank, (word, _) in enumerate(Counter(words).most_common())}
    np.array([ranks[word] for word in words], dtype="<u2").tofile(path)
    return path
