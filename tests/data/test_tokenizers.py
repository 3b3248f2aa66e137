"""Tokens back to text."""

import pytest

from data.tokenizers import ByteTokenizer, GPT2Tokenizer, Tokenizer

TEXTS = ["", "plain", "été, 漢字 and 😀\n", "  spaces  "]


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_decoding_undoes_encoding(gpt2: GPT2Tokenizer, name: str) -> None:
    tokenizer: Tokenizer = gpt2 if name == "gpt2" else ByteTokenizer()
    tokens = tokenizer.encode(TEXTS).tolist()
    assert tokenizer.decode(tokens) == "".join(TEXTS).encode()
    assert b"".join(tokenizer.decode([token]) for token in tokens) == "".join(TEXTS).encode()


def test_tokens_are_bytes_not_characters(gpt2: GPT2Tokenizer) -> None:
    assert ByteTokenizer().decode([0xF0, 256, 0x9F]) == b"\xf0\x9f"
    first, *_ = gpt2.encode(["漢"], complete=False).tolist()
    assert gpt2.decode([first]) == "漢".encode()[: len(gpt2.decode([first]))] != "漢".encode()
