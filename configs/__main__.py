"""What a config comes to: `python -m configs CONFIG.py [--key=value ...] [KEY]` prints all values, or that of one."""

from __future__ import annotations

import sys
from dataclasses import asdict

from configs import ConfigError, load_config


def main(arguments: list[str]) -> int:
    """Prints the values and returns the exit status."""
    try:
        if not arguments or arguments[0].startswith("-"):
            raise ConfigError("usage: python -m configs CONFIG.py [--key=value ...] [KEY]")
        path, *rest = arguments
        wanted = rest.pop() if rest and not rest[-1].startswith("--") else None
        values = asdict(load_config(path, rest))
        if wanted is not None and wanted not in values:
            raise ConfigError(f"{wanted}: unknown key; train.py --help lists the keys")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for key in [wanted] if wanted is not None else values:
        print(values[key] if wanted is not None else f"{key} = {values[key]!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
