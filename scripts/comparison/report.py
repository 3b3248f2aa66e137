"""What a comparison says beside its table: notes, warnings, and who reached whose loss.

Every sentence has to stay true for the odd cases too: runs still going, runs that diverged, runs that end level, runs
whose data differ. Where a comparison would not be fair it says so, or says nothing.
"""

import json
import math
from collections.abc import Callable

from scripts.comparison.analysis import WARMUP_ROWS, same_validation_data, short_names
from scripts.comparison.curves import DIVERGED
from scripts.comparison.groups import Group, difference
from scripts.comparison.milestones import MILESTONES, TOKENS_PER_UPDATE, race, reached
from scripts.comparison.runs import Run, printable
from scripts.comparison.wording import amount, duration, exact, loss_name, loss_text, names, times

# Losses that print the same are level: 1.9721 against 1.9724 is nothing to speak of.
LEVEL = 0.0005


def notes(groups: list[Group]) -> list[str]:
    lines = [
        "Loss in nats per token. final: the last evaluation; best: the lowest one. '-': unknown.",
        f"tokens/s: median of the training rows after the first {WARMUP_ROWS} (short runs: of the later half).",
    ]
    if any(len(group.runs) > 1 for group in groups):
        lines.append(
            "Several seeds: mean ± sample standard deviation over the seeds, at evaluations that all of them have."
        )
    if milestones := reached(groups):
        at = [
            f"{name} is {MILESTONES[name] / 1e9:.2f}B ({MILESTONES[name] // TOKENS_PER_UPDATE:,})"
            for name in milestones
        ]
        lines.append(f"Tokens, and updates of the published recipe: {', '.join(at)}; between evaluations by a line.")
    runs = [run for group in groups for run in group.runs]
    for run, name in zip(runs, short_names(runs), strict=True):
        if not run.finished:
            done = f"update {_count(run.updates)} of {_count(run.max_iters or 0)}"
            lines.append(f"* {name}: stopped or still going at {done}; its last evaluation stands as the final one.")
        if not run.evaluated:
            what = "only the evaluation before training" if len(run.evals) else "no evaluation"
            lines.append(f"{name}: {what} so far, so there is nothing to set against other runs.")
        elif not math.isfinite(run.evals.loss[-1]):
            lines.append(f"{name}: diverged: the loss of its last evaluation is not a number.")
        elif run.evals.loss[-1] >= DIVERGED:
            lines.append(f"{name}: diverged: the loss of its last evaluation is {loss_text(run.evals.loss[-1])}.")
    called = names(groups).rows
    for group, name in zip(groups, called, strict=True):
        if group.apart:
            lines.append(f"{name}: not in the mean of its setting's seeds, nor in a paired difference: {group.apart}.")
    return lines


def _count(number: float) -> str:
    return exact(number).replace(",", "")


def warnings(groups: list[Group]) -> list[str]:
    """One line where the runs differ in more than the optimizer, one where their times cannot be compared."""
    runs = [run for group in groups for run in group.runs]
    run_names = short_names(runs)
    # The same data may lie in folders of several names.
    same: dict[object, str | None] = {}
    folders = {id(run): same.setdefault(str(run.data.get("fingerprint") or run.dataset), run.dataset) for run in runs}
    training: list[tuple[str, Callable[[Run], str]]] = [
        ("data sets", lambda run: _data_text(run, folders[id(run)])),
        ("tokens an update", lambda run: exact(run.number("tokens_per_update"))),
        ("context lengths", lambda run: exact(run.number("block_size"))),
        ("parameter counts", lambda run: exact(run.number("parameters"))),
        ("planned updates", lambda run: exact(run.max_iters)),
    ]
    lines = []
    if reasons := _differences(runs, run_names, training):
        lines.append(f"warning: not like for like: {'; '.join(reasons)}.")
    if not all(same_validation_data(runs[0], run) for run in runs):
        lines.append("warning: validation losses are compared only between runs with equal validation data.")
    speed: list[tuple[str, Callable[[Run], str]]] = [
        ("devices", lambda run: printable(str(run.config.get("device_name", "-")))),
        ("numbers of processes", lambda run: printable(str(run.config.get("processes", "-")))),
    ]
    if reasons := _differences(runs, run_names, speed):
        lines.append(f"warning: times and tokens/s are not comparable: {'; '.join(reasons)}.")
    return lines


def _data_text(run: Run, dataset: str | None) -> str:
    tokenizer = run.data.get("tokenizer")
    kind = tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer) if tokenizer else "unnamed"
    train, val = exact(run.number_of_tokens("train")), exact(run.number_of_tokens("val"))
    return f"{dataset or 'unknown'}: {train} + {val} tokens, tokenizer {printable(kind)}"


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


def sentences(groups: list[Group]) -> list[str]:
    """Who reaches whose final loss, and when, and what the seeds say of the difference: each pair both ways, or of
    many groups each against the first.
    """
    called = names(groups).sentences
    usable = [i for i, group in enumerate(groups) if group.evaluated]
    if len(usable) <= 3:
        pairs = [(i, j) for i in usable for j in usable if i != j]
    else:
        pairs = [(i, usable[0]) for i in usable[1:]]
    lines = []
    for i, j in pairs:
        if not same_validation_data(groups[i].first, groups[j].first):
            continue
        if _level(groups[i], groups[j]):
            # Said once, not from both sides.
            if i < j or (j, i) not in pairs:
                lines.append(_level_sentence(groups[i], called[i], groups[j], called[j]))
        elif sentence := _reach_sentence(groups[i], called[i], groups[j], called[j]):
            lines.append(sentence)
    # The later one against the earlier one, the baseline.
    paired = [_paired_sentence(groups[i], called[i], groups[j], called[j]) for i, j in pairs if i > j]
    single = [called[i] for i in usable if len(groups[i].runs) == 1]
    if lines and single:
        whose = "One seed each" if len(single) == len(usable) else f"One seed only of {', '.join(single)}"
        lines.append(f"{whose}: differences of a few hundredths can be noise.")
    return lines + [sentence for sentence in paired if sentence]


def _level(a: Group, b: Group) -> bool:
    ends = a.evals.loss[-1], b.evals.loss[-1]
    return bool(abs(ends[0] - ends[1]) < LEVEL and max(ends) < DIVERGED)


def _level_sentence(a: Group, name_a: str, b: Group, name_b: str) -> str:
    at_a, at_b = amount(a.evals.tokens[-1]), amount(b.evals.tokens[-1])
    after = f"{at_a} tokens each" if at_a == at_b else f"{at_a} and {at_b} tokens"
    return f"{name_a} and {name_b} end level at {loss_text(a.evals.loss[-1])}, after {after}."


def _reach_sentence(group: Group, name: str, other: Group, other_name: str) -> str | None:
    """Whether and when `group` reaches the loss at which `other` ended; None where the other diverged."""
    goal, budget = float(other.evals.loss[-1]), float(other.evals.tokens[-1])
    if not abs(goal) < DIVERGED:
        return None
    kind = ("mean " if len(other.runs) > 1 else "") + ("final" if other.finished else "latest")
    goal_text = f"{other_name}'s {kind} loss ({loss_text(goal)})"
    end, ends = float(group.evals.loss[-1]), "ends" if group.finished else "now stands"
    above = f"{ends} {loss_text(end - goal)} above" if math.isfinite(end) else f"{ends} at a loss that is not a number"
    result = race(group, other, goal, budget)
    if result.tokens is None:
        spent = amount(group.evals.tokens[-1]) + " tokens" + ("" if group.finished else " so far")
        return f"{name} does not reach {goal_text} within its {spent} (it {above})."
    if result.speed_up is None:
        return f"{name} is at or below {goal_text} from the start" + (
            "." if end < DIVERGED else f", but it diverged: it {above}."
        )
    share = f"{100 / result.speed_up:.0f} % of {other_name}'s {amount(budget)}"
    text = f"{name} reaches {goal_text} after {amount(result.tokens)} tokens, {share}: {times(result.speed_up)} as fast"
    if result.time_speed_up:
        share = f"{100 / result.time_speed_up:.0f} % of its time: {times(result.time_speed_up)}"
        text += f" (at the runs' median speeds, {share})"
    return text + ("." if end <= goal + LEVEL else f"; but it {above}.")


def _paired_sentence(group: Group, name: str, other: Group, other_name: str) -> str | None:
    """The difference over the seeds that both have, and whether it is more than chance."""
    found = difference(group, other)
    if found is None:
        if len([seed for seed in group.seeds if seed in other.seeds]) < 2 or not same_validation_data(
            group.first, other.first
        ):
            return None
        return f"No paired difference of {name} and {other_name}: a seed diverged, or they share no evaluation."
    result, seeds, tokens = found
    verdict = "more than chance between seeds" if result.more_than_chance else "0 lies within it, so it may be chance"
    return (
        f"{name} minus {other_name} after {amount(tokens)} tokens, paired over {len(seeds)} seeds: {result.mean:+.4f}"
        f" (sd {result.sd:.4f}); 95 % t-interval {result.low:+.4f} to {result.high:+.4f}: {verdict}."
    )


def losses_table(groups: list[Group], losses: list[float]) -> list[str]:
    """What each group needs to reach given losses, and how many times faster it is than the baseline: the first one
    that was evaluated.
    """
    called = names(groups).sentences
    evaluated = [i for i, group in enumerate(groups) if group.evaluated]
    if not losses or not evaluated:
        return losses and ["no evaluation so far, so no tokens to a loss."]
    baseline = groups[evaluated[0]]
    lines = []
    for loss in losses:
        lines.append(
            f"to a validation loss of {loss_name(loss)}".ljust(32) + "    tokens      time   speed-up   in time"
        )
        lines += [
            f"  {name:<30}{_race_text(group, baseline, loss)}" for group, name in zip(groups, called, strict=True)
        ]
    return [*lines, f"Time: at the median speed. Speed-ups: against {called[evaluated[0]]}."]


def _race_text(group: Group, baseline: Group, loss: float) -> str:
    if not group.evaluated:
        return "  not evaluated"
    if not same_validation_data(group.first, baseline.first):
        return "  other validation data"
    result = race(group, baseline, loss)
    if result.tokens is None:
        return f"  not reached (lowest {loss_text(group.best.mean if group.best else math.nan)})"
    cells = (amount(result.tokens), duration(result.seconds), times(result.speed_up), times(result.time_speed_up))
    return "".join(cell.rjust(10) for cell in cells)
