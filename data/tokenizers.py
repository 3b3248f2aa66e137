"""Text to token numbers: raw bytes, or GPT-2's byte-pair encoding.

Both take a batch of documents at once and return one array in which every document is followed by its end-of-text
token, since a call for each short document would cost more than its encoding. Both release Python's lock while they
work, so threads run them in parallel and no text is copied between processes.

GPT-2's encoding comes from tiktoken, which downloads two files on first use and caches them. Its download has no time
limit and ends in a long traceback, so this file looks for them, downloads them and installs them itself.
"""

import hashlib
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.network import LIMIT, reason, within

if TYPE_CHECKING:
    import tiktoken

BPE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
BPE_FILES = {  # name: SHA-256, as tiktoken_ext.openai_public has them
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
PROJECT_CACHE = Path(__file__).resolve().parent / "tokenizer_cache"
END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    name: str
    vocab_size: int
    end_of_text: int
    """Token that follows each document; no text encodes to it."""
    token_bytes: NDArray[np.int64]
    """(vocab_size,) length of each token's text in UTF-8 bytes, 0 for end-of-text."""

    def encode(self, texts: Sequence[str | bytes], complete: bool = True) -> NDArray[np.uint16]:
        """Tokens of all `texts`, each followed by `end_of_text`; the last one only where it is `complete`.

        `bytes` are taken as UTF-8. What is not Unicode text, such as a lone surrogate, becomes U+FFFD.
        """

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text's bytes. End-of-text has none; tokens may begin or end within a character."""


class ByteTokenizer:
    """Token = byte of the document, 0 to 255; end-of-text is 256. `bytes` stay as they are, valid UTF-8 or not."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256
    token_bytes = np.array([1] * 256 + [0], dtype=np.int64)

    def encode(self, texts: Sequence[str | bytes], complete: bool = True) -> NDArray[np.uint16]:
        raw = [text if isinstance(text, bytes) else _utf8(text) for text in texts]
        tokens = np.frombuffer(b"\0".join([*raw, b""]), dtype=np.uint8).astype(np.uint16)
        tokens[np.cumsum([len(text) + 1 for text in raw], dtype=np.int64) - 1] = self.end_of_text
        return tokens if complete else tokens[:-1]

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(token for token in tokens if token != self.end_of_text)


class GPT2Tokenizer:
    """GPT-2's 50257 tokens by tiktoken; end-of-text is 50256. Raises DataError where its BPE files cannot be had."""

    name = "gpt2"
    vocab_size = 50257
    end_of_text = 50256

    def __init__(self) -> None:
        os.environ["TIKTOKEN_CACHE_DIR"] = str(find_bpe_files() or download_bpe_files())
        from tiktoken_ext.openai_public import gpt2  # type: ignore[import-untyped]

        self._definition = gpt2()
        self._of_thread = threading.local()
        ranks = self._definition["mergeable_ranks"]
        self.token_bytes = np.array([*map(len, sorted(ranks, key=ranks.__getitem__)), 0], dtype=np.int64)

    @property
    def encoding(self) -> "tiktoken.Encoding":
        """tiktoken's encoding, one for each thread (11 MB, 20 ms): two threads that share one slow each other down by
        a third, since its regular expression keeps a pool of caches, fastest for the thread that used it first."""
        if not hasattr(self._of_thread, "encoding"):
            import tiktoken

            self._of_thread.encoding = tiktoken.Encoding(**self._definition)
        return cast("tiktoken.Encoding", self._of_thread.encoding)

    def encode(self, texts: Sequence[str | bytes], complete: bool = True) -> NDArray[np.uint16]:
        clean = [text if isinstance(text, str) else text.decode("utf-8", "replace") for text in texts]
        joined = END_OF_TEXT.join([*clean, ""] if complete else clean)
        # tiktoken turns the separators into end-of-text tokens, and encodes what is between them as if it were alone.
        # That holds only while no document spells a separator itself.
        if joined.count(END_OF_TEXT) > len(clean) - (not complete):
            return self._encode_one_by_one(clean, complete)
        try:
            tokens = self.encoding.encode_to_numpy(joined, allowed_special={END_OF_TEXT}, disallowed_special=())
        except UnicodeEncodeError:
            return self.encode([_utf8(text) for text in clean], complete)
        return tokens.astype(np.uint16)

    def _encode_one_by_one(self, texts: list[str], complete: bool) -> NDArray[np.uint16]:
        parts: list[Any] = []
        for text in texts:
            valid = _utf8(text).decode()
            parts += [self.encoding.encode_to_numpy(valid, disallowed_special=()), [self.end_of_text]]
        return np.concatenate(parts if complete else parts[:-1]).astype(np.uint16)

    def decode(self, tokens: Sequence[int]) -> bytes:
        return self.encoding.decode_bytes([token for token in tokens if token != self.end_of_text])


def make_tokenizer(name: str) -> Tokenizer:
    return GPT2Tokenizer() if name == "gpt2" else ByteTokenizer()


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # surrogates: pairs become the character they mean, others U+FFFD
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _cache_name(name: str) -> str:
    """tiktoken's own file name in its cache."""
    return hashlib.sha1((BPE_URL + name).encode()).hexdigest()


def _install_folder() -> Path:
    return Path(os.environ.get("TIKTOKEN_CACHE_DIR") or PROJECT_CACHE).absolute()


def find_bpe_files() -> Path | None:
    """A cache folder that holds both files undamaged: `TIKTOKEN_CACHE_DIR` alone where it is set, else the project's
    own or tiktoken's usual one."""
    usual = os.environ.get("DATA_GYM_CACHE_DIR") or str(Path(tempfile.gettempdir()) / "data-gym-cache")
    own = os.environ.get("TIKTOKEN_CACHE_DIR")
    for folder in [Path(own)] if own else [PROJECT_CACHE, Path(usual)]:
        try:
            for name, digest in BPE_FILES.items():
                _check((folder / _cache_name(name)).read_bytes(), digest, folder / name)
        except (OSError, DataError):
            continue
        return folder.absolute()
    return None


def read_bpe_files() -> dict[str, bytes]:
    """The contents of `vocab.bpe` and `encoder.json`; downloads them where there are none. Raises DataError."""
    folder = find_bpe_files() or download_bpe_files()
    return {name: (folder / _cache_name(name)).read_bytes() for name in BPE_FILES}


def _check(content: bytes, digest: str, where: Path | str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise DataError(f"{where} is not GPT-2's file: SHA-256 {found}, expected {digest}; fetch it again")


def _install(contents: dict[str, bytes]) -> Path:
    folder = _install_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        temporary = folder / f"{name}.{os.getpid()}.partial"
        temporary.write_bytes(content)
        temporary.replace(folder / _cache_name(name))
    return folder


def install_bpe_files(source: Path) -> Path:
    """Copies `vocab.bpe` and `encoder.json` from the folder `source` to where tiktoken finds them; returns that folder.

    Raises DataError where one of them is missing or is not GPT-2's.
    """
    contents = {}
    for name, digest in BPE_FILES.items():
        path = source.absolute() / name
        if not path.is_file():
            raise DataError(f"no file {path}: --from needs a folder with {' and '.join(BPE_FILES)}, from {BPE_URL}")
        contents[name] = path.read_bytes()
        _check(contents[name], digest, path)
    return _install(contents)


def download_bpe_files() -> Path:
    """Downloads both files to where tiktoken finds them; returns that folder. Raises DataError within 30 seconds."""

    def download() -> dict[str, bytes]:
        import requests  # tiktoken's own means; it has certificates and heeds proxies

        contents = {}
        for name, digest in BPE_FILES.items():
            response = requests.get(BPE_URL + name, timeout=10)
            response.raise_for_status()
            _check(response.content, digest, BPE_URL + name)
            contents[name] = response.content
        return contents

    try:
        return _install(within(LIMIT, download))
    except ImportError as error:
        raise DataError(f"{reason(error)}; run: pip install -r requirements.txt") from error
    except Exception as error:
        urls = " and ".join(BPE_URL + name for name in BPE_FILES)
        raise DataError(
            f"GPT-2's BPE files are not in {_install_folder()} and cannot be downloaded ({reason(error, 80)}): fetch "
            f"{urls} into one folder on a machine with a network, then run `python data/prepare.py tokenizer --from "
            "FOLDER`, or set TIKTOKEN_CACHE_DIR to a folder in which tiktoken has cached them"
        ) from error
