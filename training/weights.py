"""Weights to start a run from (`init_from`): those of transformers, of nanoGPT, or of a run of this project.

Only the weights are taken: the optimizer and the count of updates start anew, and a run that goes on from its own
checkpoint does not read them again. `training/interchange.py` turns them into those of `model.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from data.network import LIMIT, reason, within
from model import GPT
from training import RunError
from training.console import say
from training.folder import read_json
from training.interchange import State, Weights, fit, from_model, from_nanogpt, from_transformers
from training.processes import Processes
from training.trained import load_trained

SINGLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
HUB_WEIGHTS = ["model*.safetensors", INDEX], [PICKLED]
HUB_NAME = re.compile(r"([\w-][\w.-]*(?:/[\w.-]+)?)(?:@([\w./-]+))?")  # [OWNER/]NAME[@REVISION]


def load_initial_weights(model: GPT, init_from: str, processes: Processes) -> None:
    """Gives `model` the weights that `init_from` names. Each process reads them.

    Raises:
        RunError: they cannot be read, do not fit the model, or are others on another host.
    """
    problem = ""
    try:
        state, notes = fit(read_weights(init_from), model)
    except ValueError as error:
        problem = f"init_from={init_from}: {error}"
    except RunError as error:
        problem = str(error)
    said = processes.gather(problem or (_digest(state) if processes.size > 1 else ""))
    if problem:
        raise RunError(problem)
    if len(set(said)) > 1:
        raise RunError(f"init_from={init_from} holds other weights, or none, on another host; copy the same to all")
    model.load_state_dict(state)
    if processes.is_main:
        say("\n".join([f"weights     from {init_from}", *notes]))


def read_weights(init_from: str) -> Weights:
    """The weights at hf:, nanogpt: or run:.

    Raises:
        RunError: they cannot be read.
        ValueError: they are those of another model than GPT-2.
    """
    kind, _, place = init_from.partition(":")
    readers: dict[str, Callable[[str], Weights]] = {
        "hf": _read_transformers,
        "nanogpt": _read_nanogpt,
        "run": lambda place: from_model(load_trained(Path(place)).model),
    }
    return readers[kind](place)


def _digest(state: State) -> str:
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _read_nanogpt(place: str) -> Weights:
    path = Path(place).absolute()
    checkpoint = _read(path, _unpickle)
    content = checkpoint if isinstance(checkpoint, dict) else {}
    state, arguments = content.get("model"), content.get("model_args")
    if not _is_state(state) or not isinstance(arguments, dict):
        raise RunError(f"{path} is not a checkpoint of nanoGPT: it lacks model or model_args")
    return from_nanogpt(state, arguments)


def _read_transformers(place: str) -> Weights:
    folder = Path(place).absolute()
    if not folder.is_dir():
        folder = _from_hub(place)
    config = read_json(folder / "config.json")
    if not config:
        raise RunError(f"{folder / 'config.json'} is missing, or not a JSON object: not a folder of transformers")
    return from_transformers(_read_tensors(folder), config)


def _read_tensors(folder: Path) -> State:
    """All tensors of a folder that transformers wrote."""
    from safetensors.torch import load_file

    files = _weight_files(folder)
    if not files:
        raise RunError(f"{folder} has no weights: expected {SINGLE}, {INDEX} or {PICKLED}")
    parts = [_read(file, load_file if file.suffix == ".safetensors" else _unpickle) for file in files]
    if not all(map(_is_state, parts)):
        raise RunError(f"{files[0]} is not a state dict: expected tensors by their names")
    return {name: tensor for part in parts for name, tensor in part.items()}


def _is_state(content: Any) -> TypeGuard[State]:
    return isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    )


def _weight_files(folder: Path) -> list[Path]:
    """The file that holds a model's weights, or the several of its index; none where there is neither."""
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        names = _read(folder / INDEX, lambda path: set(json.loads(path.read_text("utf-8"))["weight_map"].values()))
        return [folder / name for name in sorted(names)]
    return [folder / name for name in (SINGLE, PICKLED) if (folder / name).is_file()][:1]


def _unpickle(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read(path: Path, reader: Callable[[Path], Any]) -> Any:
    try:
        return reader(path)
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged file makes of its reader
        raise RunError(f"{path} cannot be read: {reason(error)}") from error


def _from_hub(place: str) -> Path:
    """The folder of a model of the Hugging Face hub: of its cache where all is there already, else downloaded."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    here = f"init_from=hf:{place} is no folder here ({Path(place).absolute()})"
    match = HUB_NAME.fullmatch(place)
    if match is None:
        raise RunError(f"{here}, and no name on the hub, such as hf:gpt2 or hf:OWNER/NAME@REVISION")
    name, revision = match.groups()
    try:
        from huggingface_hub import HfApi, snapshot_download

        def folder(weights: list[str], cached: bool) -> Path:
            patterns = ["config.json", *weights]
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=cached))

        for weights in HUB_WEIGHTS:
            with suppress(Exception):  # not in the cache, or not all of it
                found = folder(weights, cached=True)
                files = _weight_files(found)
                if files and all(file.is_file() for file in (found / "config.json", *files)):
                    return found
        info = within(LIMIT, lambda: HfApi().model_info(name, revision=revision, timeout=10))
        there = {file.rfilename for file in info.siblings or []}
        return folder(HUB_WEIGHTS[0] if there & {SINGLE, INDEX} else HUB_WEIGHTS[1], cached=False)
    except Exception as error:
        raise RunError(
            f"{here}, and cannot be had from the hub ({reason(error, 100)}): run `hf download {name}` on a machine "
            "with a network and the same HF_HOME, or copy the files into a folder and give hf:FOLDER"
        ) from error
