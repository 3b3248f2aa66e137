"""Losses at the tokens of the published tables, tokens and time to a loss, and the speed-ups that follow."""

from dataclasses import dataclass

from scripts.comparison.analysis import same_speed_conditions
from scripts.comparison.curves import tokens_to_loss
from scripts.comparison.groups import Group

TOKENS_PER_UPDATE = 480 * 1024  # of every published run
# The columns of the published tables stand for 10,000, 40,000 and all 100,000 updates: 4.92B, 19.66B and 49.15B tokens.
MILESTONES = {"5B": 10_000 * TOKENS_PER_UPDATE, "20B": 40_000 * TOKENS_PER_UPDATE, "50B": 100_000 * TOKENS_PER_UPDATE}


def reached(groups: list[Group]) -> dict[str, int]:
    """The milestones up to which some run was evaluated."""
    far = max((float(run.evals.tokens[-1]) for group in groups for run in group.runs if len(run.evals)), default=0.0)
    return {name: tokens for name, tokens in MILESTONES.items() if tokens <= far}


@dataclass(frozen=True)
class Race:
    """What `group` and `other` need to reach a loss: tokens, and seconds at their median speeds.

    The clock alone would count what else a machine had to do. None where the loss is not reached or a speed unknown.
    """

    loss: float
    tokens: float | None
    other_tokens: float | None
    seconds: float | None
    other_seconds: float | None
    same_machines: bool

    @property
    def speed_up(self) -> float | None:
        """How many times fewer tokens `group` needs: above 1 it is the faster one."""
        return _ratio(self.other_tokens, self.tokens)

    @property
    def time_speed_up(self) -> float | None:
        return _ratio(self.other_seconds, self.seconds) if self.same_machines else None


def race(group: Group, other: Group, loss: float, other_tokens: float | None = None) -> Race:
    """What the two need to reach a loss.

    Args:
        group: whose speed-up is asked for.
        other: what it is set against.
        loss: validation loss in nats per token.
        other_tokens: what the other had spent where that is known, as with its own final loss; None: read off its
            curve.
    """
    tokens = tokens_to_loss(group.evals, loss)
    if other_tokens is None:
        other_tokens = tokens_to_loss(other.evals, loss)
    same = all(same_speed_conditions(a, b) for a in group.runs for b in other.runs)
    return Race(loss, tokens, other_tokens, seconds(group, tokens), seconds(other, other_tokens), same)


def seconds(group: Group, tokens: float | None) -> float | None:
    """Seconds of training for so many tokens."""
    return None if tokens is None or not group.throughput else tokens / group.throughput


def _ratio(slow: float | None, fast: float | None) -> float | None:
    return slow / fast if slow is not None and fast else None
