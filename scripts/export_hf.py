#!/usr/bin/env python3
"""Writes a trained model as transformers reads it: `GPT2LMHeadModel.from_pretrained(DIR)`.

    python scripts/export_hf.py runs/gpt2_small_mars exported/gpt2_small_mars [--checkpoint best]

The folder holds the weights (safetensors, float32), config.json, generation_config.json and the files of the tokenizer,
so that `AutoTokenizer.from_pretrained(DIR)` encodes as the training data was encoded. transformers itself is not
needed. docs/interchange.md says what is converted how.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from data import DataError
from data.tokenizers import END_OF_TEXT, read_bpe_files
from scripts.evaluation.command import Parser, load
from training import RunError
from training.console import fail
from training.interchange import to_transformers, transformers_config
from training.trained import BYTES, GPT2, TOKENS, TrainedModel

END_OF_TEXT_ID = {BYTES: 256, GPT2: 50256}
Files = dict[str, bytes]  # name: content


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python scripts/export_hf.py",
        description="Writes a trained model as a folder that transformers opens.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder (its out_dir), or a checkpoint (.pt)")
    parser.add_argument("out", metavar="DIR", type=Path, help="the folder to write; it must be new or empty")
    parser.add_argument("--checkpoint", metavar="WHICH", help="last (default), best, or a number of updates")
    parser.add_argument("--tokenizer", choices=sorted(TOKENS), help="of the run's tokens, where the run does not say")
    parser.add_argument(
        "--trim_vocabulary",
        action="store_true",
        help="leave out the rows of the vocabulary that stand for no token; probabilities then differ a little from "
        "those of the training loss",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for an error that the user can mend."""
    try:
        args = arguments(argv)
        check_new(args.out)
        trained = load(args, torch.device("cpu"))
        if args.trim_vocabulary and trained.tokenizer is None:
            raise RunError(f"--trim_vocabulary: {trained.path} does not say what its tokens are; --tokenizer names it")
        rows = trained.tokens if args.trim_vocabulary else trained.model.config.vocab_size
        write_whole(args.out, trained, rows)
        print("\n".join(summary(args.out, trained, rows)))
    except (RunError, DataError) as error:
        fail(str(error))
        return 2
    except OSError as error:
        # Not the name of a file on its way: the user does not know of it.
        place = args.out if error.filename is None or ".partial" in str(error.filename) else Path(error.filename)
        fail(f"{place.absolute()}: {error.strerror or error}; choose another DIR")
        return 2
    return 0


def check_new(out: Path) -> None:
    if out.resolve() == Path.cwd():
        raise RunError(f"{out.resolve()} is the folder you are in; name a new one")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise RunError(f"{out.absolute()} exists already; nothing is overwritten: choose another DIR")


def write_whole(out: Path, trained: TrainedModel, rows: int) -> None:
    """Writes the folder under another name first, so that it is whole or not there at all."""
    files = text_files(trained, rows)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.partial")
    temporary.mkdir()
    try:
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        write_weights(temporary / "model.safetensors", trained, rows)
        temporary.replace(out)
    except SafetensorError as error:
        raise RunError(f"{out} cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_weights(path: Path, trained: TrainedModel, rows: int) -> None:
    origin = {"update": str(trained.update), "optimizer": str(trained.settings.get("optimizer"))}
    save_file(to_transformers(trained.model.state_dict(), rows), path, metadata={"format": "pt", **origin})
    # safetensors keeps others from reading; what they may is what they may of the files beside it.
    path.chmod((path.parent / "config.json").stat().st_mode & 0o777)


def text_files(trained: TrainedModel, rows: int) -> Files:
    """All files but the weights."""
    tokenizer = usable_tokenizer(trained)
    end_of_text = END_OF_TEXT_ID[tokenizer] if tokenizer else None
    config = transformers_config(trained.model.config, rows, end_of_text)
    generation: dict[str, Any] = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    if rows > trained.tokens:  # so that no generated text has a token that stands for none
        generation["suppress_tokens"] = list(range(trained.tokens, rows))
    files = {"config.json": as_json(config), "generation_config.json": as_json(generation)}
    return files | (tokenizer_files(tokenizer, trained.model.config.block_size) if tokenizer else {})


def usable_tokenizer(trained: TrainedModel) -> str | None:
    """The run's tokenizer, where the model has a row for each of its tokens."""
    name = trained.tokenizer
    return name if name is not None and TOKENS[name] <= trained.model.config.vocab_size else None


def tokenizer_files(name: str, block_size: int) -> Files:
    """What AutoTokenizer needs.

    Raises:
        DataError: GPT-2's BPE files cannot be had.
    """
    settings: dict[str, Any] = {
        "model_max_length": block_size,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,  # decoding must give back the text, byte for byte
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    }
    if name == GPT2:
        bpe = read_bpe_files()
        files = {"vocab.json": bpe["encoder.json"], "merges.txt": bpe["vocab.bpe"]}
        return files | {"tokenizer_config.json": as_json({"tokenizer_class": "GPT2Tokenizer", **settings})}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    return {"tokenizer.json": as_json(byte_tokenizer()), "tokenizer_config.json": as_json(settings)}


def byte_tokenizer() -> dict[str, Any]:
    """Bytes as tokens 0 to 255 and end-of-text as 256, in the format of the library tokenizers: a byte-level BPE that
    merges nothing."""
    end_of_text = END_OF_TEXT_ID[BYTES]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": end_of_text, "content": END_OF_TEXT, **special}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary | {END_OF_TEXT: end_of_text},
            "merges": [],
        },
    }


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's convention): itself where it can be
    seen, else the next one from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


def as_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def summary(out: Path, trained: TrainedModel, rows: int) -> list[str]:
    padding = trained.model.config.vocab_size - trained.tokens
    vocabulary = f"{rows} rows"
    if padding:
        kept = "kept, never generated" if rows > trained.tokens else "left out"
        vocabulary += f" ({trained.tokens} tokens; {padding} rows of padding {kept})"
    lines = [
        f"model       {trained.path}, update {trained.update:,}",
        f"parameters  {trained.model.num_parameters():,}",
        f"vocabulary  {vocabulary}",
    ]
    if trained.tokenizer is None:
        lines.append("tokenizer   unknown, and no files of one are written; --tokenizer names it")
    elif usable_tokenizer(trained) is None:
        lines.append(f"tokenizer   {trained.tokenizer} has more tokens than the model has rows: no files are written")
    else:
        lines.append(f"tokenizer   {trained.tokenizer}")
    return [*lines, f"written     {out.absolute()}"]


if __name__ == "__main__":
    sys.exit(main())
