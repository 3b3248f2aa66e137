"""Text to tokens: `python data/prepare.py SUBCOMMAND` makes a folder with train.bin, val.bin and meta.json.

Subcommands name the source: `stdlib` (the Python standard library on this machine, no download), `openwebtext`,
`fineweb_edu`, `hf` (any data set of the Hugging Face hub) and `text` (local files). `tokenizer` installs GPT-2's BPE
files, `hellaswag` fetches the questions for scripts/evaluate.py. The output depends on the source and on the arguments
alone: not on the number of workers, nor on the time, so a second run gives the same bytes. An error of the user is one
line on standard error, exit status 2.
"""

import argparse
import errno
import itertools
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # Python puts data/ itself on sys.path, where tokenizers.py would hide a package of that name that others import.
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(ROOT / "data"))]

from data import DataError, hub, items, sources, tokenizers, writer
from data.network import reason
from data.pipeline import tokenise

HINTS = {
    errno.ENOSPC: "; free some space, or choose another disk with --out",
    errno.EACCES: "; choose another folder with --out",
    errno.EROFS: "; choose another folder with --out",
}

OUTSIDE = ("command", "out", "name", "workers", "force")
"""Arguments that the contents of the output do not depend on (`command` is recorded apart)."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for an error that the user can mend, 130 when interrupted."""
    try:
        args = parser().parse_args(argv)
        if args.command == "tokenizer":
            install_tokenizer(args.source)
        elif args.command == "hellaswag":
            print(items.prepare(args.source, output_folder(args) / items.PREPARED.name))
        else:
            prepare(args)
    except DataError as error:
        return fail(str(error))
    except OSError as error:
        hint = HINTS.get(error.errno or 0, "")
        return fail(f"{error.strerror or reason(error)}: {error.filename}{hint}")
    except KeyboardInterrupt:
        print("interrupted; temporary files are removed", file=sys.stderr)
        return 130
    return 0


def fail(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def prepare(args: argparse.Namespace) -> None:
    out = output_folder(args)
    arguments = {"command": args.command} | {k: v for k, v in vars(args).items() if k not in OUTSIDE}
    if args.command == "stdlib":
        arguments["python"] = sources.python_version()  # another Python is another corpus
    if done_before(out, arguments, args.force):
        return
    tokenizer = tokenizers.make_tokenizer(args.tokenizer)  # first: it may need a download that fails
    source = make_source(args)
    with writer.partial_folder(out) as partial:
        warn_of_space(out, source.meter, tokenizer.name)
        documents, tokens = tokenise(
            itertools.islice(source.documents, args.max_documents),
            source.meter,
            tokenizer,
            partial,
            workers=args.workers,
            max_tokens=args.max_tokens,
        )
        if tokens > writer.SEGMENT:
            print(f"shuffling {documents:,} documents, {tokens:,} tokens", file=sys.stderr)
        result = writer.write_splits(
            partial, documents, tokens, tokenizer, fraction=args.val_fraction, seed=args.split_seed
        )
        meta = {
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text,
            "dtype": "uint16",
            **result,
            "source": source.description,
            "arguments": arguments,
        }
        writer.publish(partial, out, meta)
    if documents == 1:
        print("one document: its last part is the validation split")
    for name, split in meta["splits"].items():
        print(
            f"{name:>5}: {split['tokens']:>14,} tokens {split['documents']:>11,} documents {split['bytes']:>15,} bytes"
        )
    if meta["unigram_loss"] is not None:
        print(f"unigram loss: {meta['unigram_loss']:.4f} nats per token of val")
    print(f"written to {out}")


def output_folder(args: argparse.Namespace) -> Path:
    if args.out is not None:
        return Path(args.out).absolute()
    name = args.name if "name" in args else args.command
    if name is None:
        name = Path(args.dataset).name if args.command == "hf" else Path(args.paths[0]).name.split(".")[0]
        name = re.sub(r"[^\w.-]+", "-", name)
    if not re.fullmatch(r"\w[\w.-]*", name) or name == tokenizers.PROJECT_CACHE.name:
        raise DataError(f"{name!r} cannot be the name of a folder in {ROOT / 'data'}; choose with --name or --out")
    return ROOT / "data" / name


def done_before(out: Path, arguments: dict[str, Any], force: bool) -> bool:
    """True, after a line saying so, where `out` holds the result of the same arguments. DataError where it holds
    something else, unless `force`."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; choose a folder with --out")
    if (out / writer.PARTIAL).exists():
        with writer.partial_folder(out):  # removes what a killed run has left
            pass
    meta = writer.read_meta(out)
    if force or not any((out / name).exists() for name in ("train.bin", "val.bin", "meta.json")):
        return False
    if meta is None:
        raise DataError(
            f"{out} holds token files that are incomplete or not from here; --force replaces them, or choose --out"
        )
    if meta.get("arguments") == arguments:
        print(f"already prepared with the same arguments: {out} (--force makes it again, if the source has changed)")
        return True
    before = meta.get("arguments", {})
    changed = [
        f"{key} was {before.get(key)!r}, is {arguments.get(key)!r}"
        for key in sorted({*before, *arguments})
        if before.get(key) != arguments.get(key)
    ]
    raise DataError(
        f"{out} was prepared with other arguments ({'; '.join(changed)}); --force replaces it, or choose --out"
    )


def make_source(args: argparse.Namespace) -> sources.Source:
    if args.command == "stdlib":
        return sources.stdlib()
    if args.command == "openwebtext":
        return hub.openwebtext(args.source, args.allow_other_count)
    if args.command == "fineweb_edu":
        return hub.fineweb_edu(args.config)
    if args.command == "hf":
        return hub.any_dataset(args.dataset, args.config, args.split, args.text_field, args.revision)
    options = sources.TextOptions(args.text_field, args.encoding_errors)
    return sources.text([Path(path) for path in args.paths], options)


def warn_of_space(out: Path, meter: sources.Meter, tokenizer: str) -> None:
    """The tokens lie on the disk twice: in the order of the source, then shuffled. English: about 4 bytes a token."""
    if meter.unit == "B" and meter.total:
        needed = 2 * 2 * (meter.total if tokenizer == "bytes" else meter.total // 4)
        free = shutil.disk_usage(out).free
        if needed > free:
            print(f"warning: about {needed:,} bytes are needed in {out}, {free:,} are free", file=sys.stderr)


def install_tokenizer(source: str | None) -> None:
    files = " and ".join(tokenizers.BPE_FILES)
    if source is not None:
        print(f"installed {files} for tiktoken in {tokenizers.install_bpe_files(Path(source))}")
    elif folder := tokenizers.find_bpe_files():
        print(f"{files} are in {folder} already")
    else:
        print(f"downloaded {files} for tiktoken to {tokenizers.download_bpe_files()}")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DataError(f"{message}; see `python data/prepare.py --help`")


def cpus() -> int:
    """CPUs that this process may use; more than 32 are of no use, since one thread reads the source."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, 32)


def at_least(smallest: int) -> Any:
    def whole_number(text: str) -> int:
        value = int(text)
        if not value < 2**63:
            raise argparse.ArgumentTypeError(f"{value} is too large")
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is too small, allowed: {smallest} or more")
        return value

    return whole_number


def fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not allowed, only numbers between 0 and 1")
    return value


def existing(path: str) -> str:
    """A local path absolute (so that meta.json names it), anything else as it is."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def parser() -> argparse.ArgumentParser:
    main_parser = Parser(prog="prepare.py", description="Make train.bin, val.bin and meta.json from text.")
    commands = main_parser.add_subparsers(dest="command", metavar="SUBCOMMAND", required=True)

    def add(name: str, help: str, tokenizer: str = "gpt2", val_fraction: float = 0.0005) -> Parser:
        p = commands.add_parser(name, help=help, description=help)
        p.add_argument("--out", metavar="DIR", help="folder of the result (default: data/NAME in this repository)")
        p.add_argument("--tokenizer", choices=["gpt2", "bytes"], default=tokenizer, help="default: %(default)s")
        p.add_argument(
            "--workers", type=at_least(1), default=cpus(), metavar="N", help="threads (default: %(default)s, the CPUs)"
        )
        p.add_argument(
            "--val-fraction", type=fraction, default=val_fraction, metavar="F",
            help="part of the documents that is for validation (default: %(default)s)",
        )  # fmt: skip
        p.add_argument(
            "--split-seed",
            type=at_least(0),
            default=2357,
            metavar="N",
            help="seed of the shuffle (default: %(default)s)",
        )
        p.add_argument("--max-documents", type=at_least(1), metavar="N", help="take only the first N documents")
        p.add_argument(
            "--max-tokens", type=at_least(1), metavar="N",
            help="take only the first N tokens; the document in which that happens is cut",
        )  # fmt: skip
        p.add_argument("--force", action="store_true", help="make it again, replacing what is there")
        return p

    add("stdlib", "the Python standard library's source on this machine", "bytes", 0.005)

    p = add("openwebtext", "OpenWebText, split as in nanoGPT")
    p.add_argument(
        "--source", type=existing, metavar="REPO[@REVISION][/FOLDER]",
        help="take it from this place on the hub, or from this local folder of parquet files",
    )  # fmt: skip
    p.add_argument(
        "--allow-other-count", action="store_true", help=f"accept other than {hub.OPENWEBTEXT_DOCUMENTS} documents"
    )

    p = add("fineweb_edu", "FineWeb-Edu")
    p.add_argument(
        "--config", default="sample-100BT", help="default: %(default)s; also sample-10BT, default, CC-MAIN-…"
    )

    p = add("hf", "any data set that the `datasets` library can stream")
    p.add_argument("dataset", type=existing, metavar="NAME", help="on the hub, or a local folder")
    p.add_argument("--name", help="name of the result's folder in data/ (default: the data set's)")
    p.add_argument("--config", help="configuration of the data set")
    p.add_argument("--split", default="train", help="default: %(default)s")
    p.add_argument("--text-field", default="text", help="default: %(default)s")
    p.add_argument("--revision", help="branch, tag or commit")

    p = add("text", "local .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet files, or folders of them")
    p.add_argument("paths", nargs="+", type=lambda path: str(Path(path).absolute()), metavar="PATH")
    p.add_argument("--name", help="name of the result's folder in data/ (default: the first path's)")
    p.add_argument("--text-field", default="text", help="field or column with the text (default: %(default)s)")
    p.add_argument(
        "--encoding-errors", choices=["strict", "replace"], default="strict",
        help="what to do with bytes that are not UTF-8 (default: strict, an error)",
    )  # fmt: skip

    p = commands.add_parser("tokenizer", help="install GPT-2's BPE files (from a folder, or downloaded)")
    p.add_argument("--from", dest="source", metavar="DIR", help="folder with vocab.bpe and encoder.json")

    p = commands.add_parser("hellaswag", help="HellaSwag's validation split, for scripts/evaluate.py --hellaswag")
    p.add_argument("--from", dest="source", type=Path, metavar="FILE", help=".jsonl or .parquet (default: the hub's)")
    p.add_argument("--out", metavar="DIR", help="folder of the result (default: data/hellaswag in this repository)")
    return main_parser


if __name__ == "__main__":
    sys.exit(main())
