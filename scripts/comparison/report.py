"""What a comparison says beside its table: notes, warnings, and who reached whose loss.

Every sentence has to stay true for the odd cases too: runs still going, runs that diverged, runs that end level, runs
whose data differ. Where a comparison would not be fair it says so, or says nothing.
"""

import json
import math
from collections.abc import Callable

from scripts.comparison.analysis import (
    WARMUP_ROWS,
    one_seed_each,
    same_speed_conditions,
    same_validation_data,
    short_names,
    throughput,
    tokens_to_loss,
)
from scripts.comparison.runs import Run
from scripts.comparison.wording import amount, exact, sentence_names

# Losses that print the same are level: 1.9721 against 1.9724 is nothing to speak of.
LEVEL = 0.0005


def notes(runs: list[Run]) -> list[str]:
    lines = [
        "Loss in nats per token. final: the last evaluation; best: the lowest one. '-': unknown.",
        f"tokens/s: median of the training rows after the first {WARMUP_ROWS} (short runs: of the later half).",
    ]
    for run, name in zip(runs, short_names(runs), strict=True):
        if not run.finished:
            done = f"update {run.updates:.0f} of {run.max_iters:.0f}"
            lines.append(f"{name}: stopped or still going at {done}; its last evaluation stands as the final one.")
        if not run.evaluated:
            what = "only the evaluation before training" if len(run.evals) else "no evaluation"
            lines.append(f"{name}: {what} so far, so there is nothing to set against other runs.")
        elif not math.isfinite(run.evals.loss[-1]):
            lines.append(f"{name}: diverged: the loss of its last evaluation is not a number.")
    return lines


def warnings(runs: list[Run]) -> list[str]:
    """One line where the runs differ in more than the optimizer, one where their times cannot be compared."""
    names = short_names(runs)
    training: list[tuple[str, Callable[[Run], str]]] = [
        ("data sets", _data_text),
        ("tokens an update", lambda run: exact(run.number("tokens_per_update"))),
        ("context lengths", lambda run: exact(run.number("block_size"))),
        ("parameter counts", lambda run: exact(run.number("parameters"))),
        ("planned updates", lambda run: exact(run.max_iters)),
    ]
    lines = []
    if reasons := _differences(runs, names, training):
        lines.append(f"warning: not like for like: {'; '.join(reasons)}.")
    if not all(same_validation_data(runs[0], run) for run in runs):
        lines.append("warning: validation losses are compared only between runs with equal validation data.")
    speed: list[tuple[str, Callable[[Run], str]]] = [
        ("devices", lambda run: str(run.config.get("device_name", "-"))),
        ("numbers of processes", lambda run: str(run.config.get("processes", "-"))),
    ]
    if reasons := _differences(runs, names, speed):
        lines.append(f"warning: times and tokens/s are not comparable: {'; '.join(reasons)}.")
    return lines


def _data_text(run: Run) -> str:
    tokenizer = run.data.get("tokenizer")
    kind = tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer) if tokenizer else "unnamed"
    train, val = exact(run.number_of_tokens("train")), exact(run.number_of_tokens("val"))
    return f"{run.dataset or 'unknown'}: {train} + {val} tokens, tokenizer {kind}"


def _differences(runs: list[Run], names: list[str], facts: list[tuple[str, Callable[[Run], str]]]) -> list[str]:
    reasons = []
    for what, fact in facts:
        holders: dict[str, list[str]] = {}
        for run, name in zip(runs, names, strict=True):
            holders.setdefault(fact(run), []).append(name)
        if len(holders) > 1:
            each = ", ".join(f"{value} ({', '.join(owners)})" for value, owners in holders.items())
            reasons.append(f"different {what}: {each}")
    return reasons


def sentences(runs: list[Run]) -> list[str]:
    """Who reaches whose final loss, and when: each pair both ways, or of many runs each against the first."""
    names = sentence_names(runs)
    usable = [i for i, run in enumerate(runs) if run.evaluated]
    if len(usable) <= 3:
        pairs = [(i, j) for i in usable for j in usable if i != j]
    else:
        pairs = [(i, usable[0]) for i in usable[1:]]
    lines = []
    for i, j in pairs:
        if not same_validation_data(runs[i], runs[j]):
            continue
        if _level(runs[i], runs[j]):
            # Said once, not from both sides.
            if i < j or (j, i) not in pairs:
                lines.append(_level_sentence(runs[i], names[i], runs[j], names[j]))
        elif sentence := _reach_sentence(runs[i], names[i], runs[j], names[j]):
            lines.append(sentence)
    if lines and one_seed_each([runs[i] for i in usable]):
        lines.append("One seed each: differences of a few hundredths can be noise.")
    return lines


def _level(a: Run, b: Run) -> bool:
    return bool(abs(a.evals.loss[-1] - b.evals.loss[-1]) < LEVEL)


def _level_sentence(a: Run, name_a: str, b: Run, name_b: str) -> str:
    at_a, at_b = amount(a.evals.tokens[-1]), amount(b.evals.tokens[-1])
    after = f"{at_a} tokens each" if at_a == at_b else f"{at_a} and {at_b} tokens"
    return f"{name_a} and {name_b} end level at {a.evals.loss[-1]:.3f}, after {after}."


def _reach_sentence(run: Run, name: str, other: Run, other_name: str) -> str | None:
    """Whether and when `run` reaches the loss at which `other` ended; None where that loss is not a number."""
    goal = float(other.evals.loss[-1])
    if not math.isfinite(goal):
        return None
    kind = "final" if other.finished else "latest"
    goal_text = f"{other_name}'s {kind} loss ({goal:.3f})"
    tokens, end = tokens_to_loss(run.evals, goal), float(run.evals.loss[-1])
    ends = "ends" if run.finished else "now stands"
    above = f"{ends} {end - goal:.3f} above" if math.isfinite(end) else f"{ends} at a loss that is not a number"
    if tokens is None:
        spent = amount(run.evals.tokens[-1]) + " tokens" + ("" if run.finished else " so far")
        return f"{name} does not reach {goal_text} within its {spent} (it {above})."
    if tokens <= 0:
        return f"{name} is at or below {goal_text} from the start."
    budget = float(other.evals.tokens[-1])
    share = f"{100 * tokens / budget:.0f} % of {other_name}'s {amount(budget)}"
    text = f"{name} reaches {goal_text} after {amount(tokens)} tokens, {share}"
    text += _time_share(run, tokens, other, budget)
    return text + ("." if end <= goal + LEVEL else f"; but it {above}.")


def _time_share(run: Run, tokens: float, other: Run, budget: float) -> str:
    """The same in time, at the median speeds: the clock alone would count what else the machine had to do."""
    speed, other_speed = throughput(run.tokens_per_sec), throughput(other.tokens_per_sec)
    if not speed or not other_speed or not same_speed_conditions(run, other):
        return ""
    return f" (at the runs' median speeds, {100 * (tokens / speed) / (budget / other_speed):.0f} % of its time)"
