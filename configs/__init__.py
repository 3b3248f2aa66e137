"""The typed configuration of a run: `schema.py` lists every key, `loader.py` reads config files and the command line.

The other files are configs, one short file a run, built on the shared parts in `base/`.
"""

from configs.loader import describe, load_config
from configs.schema import ConfigError, TrainConfig

__all__ = ["ConfigError", "TrainConfig", "describe", "load_config"]
