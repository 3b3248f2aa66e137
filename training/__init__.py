"""What a training loop needs around it: processes and devices, evaluation, metrics, checkpoints."""

__version__ = "0.1.0"


class RunError(Exception):
    """A run that cannot start or go on. The message is one line that a user can act on."""
