"""Text to tokens, and tokens to batches. `prepare.py` is the command; `tokens.py` and `batches.py` serve training."""


class DataError(Exception):
    """A data set that is missing, damaged or does not fit. The message is one line that a user can act on."""
