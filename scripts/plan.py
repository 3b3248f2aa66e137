#!/usr/bin/env python3
"""What a run will need, before it is started: memory of a GPU, the largest micro-batch, hours, room on disk.

    python scripts/plan.py configs/gpt2_small_mars.py --gpu h100 --gpus 32 [--all] [--key=value ...]

Nothing is computed and nothing allocated: the model and the optimizers of this repository run on tensors that have a
shape and no memory, and what would be alive is counted. Keys of the config are set as for train.py. The parts are in
`scripts/planning/`; docs/planning.md says what is counted how, and how near it came to what was measured.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is nothing to share

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs import ConfigError, TrainConfig, load_config
from scripts.planning import report
from scripts.planning.machines import MACHINES
from scripts.planning.plan import Plan, Row, Settings, make_plan, make_rows
from training.console import fail


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (python scripts/plan.py --help lists what is allowed)")


def arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """What concerns the plan, and what concerns the config."""
    parser = Parser(
        prog="python scripts/plan.py",
        description="Memory of a GPU, largest micro-batch, hours and disk of a run.",
        epilog="Keys of the config can be set as for train.py: --batch_size=30 --optimizer=mars-lion",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="a config file, as for train.py")
    parser.add_argument("--gpu", metavar="NAME", default="h100", help=f"{', '.join(MACHINES)} (default: h100)")
    parser.add_argument("--gpus", metavar="N", type=int, default=1, help="one process each (default: 1)")
    parser.add_argument("--nodes", metavar="N", type=int, help="hosts that share the GPUs equally")
    parser.add_argument(
        "--utilisation", metavar="U", type=float, default=0.4, help="assumed share of the peak operations (0.4)"
    )
    parser.add_argument("--tokens-per-sec", metavar="X", type=float, help="measured, of one GPU; instead of U")
    parser.add_argument("--margin", metavar="M", type=float, default=0.1, help="share of memory left free (0.1)")
    parser.add_argument("--all", action="store_true", help="also a table of all optimizers")
    parser.add_argument("--json", action="store_true", help="print JSON (bytes, operations, hours)")
    args, overrides = parser.parse_known_args(argv)
    if args.gpu.lower() not in MACHINES:
        parser.error(f"argument --gpu: {args.gpu!r} is not known; known are {', '.join(MACHINES)}")
    for name, value in (("gpus", args.gpus), ("nodes", args.nodes)):
        if value is not None and not 1 <= value <= 2**20:
            parser.error(f"argument --{name}: {value} must be 1 or more, 1048576 at most")
    if args.nodes is not None and args.gpus % args.nodes:
        parser.error(f"argument --nodes: {args.gpus} GPUs cannot be shared equally by {args.nodes} hosts")
    for name, value, lowest, highest in (("utilisation", args.utilisation, 0, 1), ("margin", args.margin, -1e-9, 0.9)):
        if not lowest < value <= highest:
            parser.error(f"argument --{name}: {value:g} must be above {max(lowest, 0)} and at most {highest}")
    if args.tokens_per_sec is not None and not 0 < args.tokens_per_sec < float("inf"):
        parser.error(f"argument --tokens-per-sec: {args.tokens_per_sec:g} must be a number above 0")
    return args, overrides


def main(argv: list[str] | None = None) -> int:
    try:
        args, overrides = arguments(argv)
        config = load_config(args.config, overrides)
        settings = Settings(args.gpu.lower(), args.gpus, args.nodes, args.utilisation, args.tokens_per_sec, args.margin)
        plan = make_plan(config, settings)
        rows = list(make_rows(config, settings)) if args.all else []
    except ConfigError as error:
        fail(str(error))
        return 2
    if args.json:
        print(json.dumps(as_json(config, plan, rows), indent=2))
    else:
        print("\n".join(report.text(args.config, config, plan, rows)))
    return 0


def as_json(config: TrainConfig, plan: Plan, rows: list[Row]) -> dict[str, Any]:
    return {"config": asdict(config), **asdict(plan), "optimizers": [asdict(row) for row in rows]}


if __name__ == "__main__":
    sys.exit(main())
