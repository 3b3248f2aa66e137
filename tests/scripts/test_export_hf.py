"""scripts/export_hf.py: the files, held against GPT-2's definition and the library tokenizers; what is told to a user
who errs. What transformers and lm-evaluation-harness make of them: test_export_hf_opened.py."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from data import tokenizers as project
from scripts import export_hf
from tests.conftest import Train
from tests.data.conftest import bpe_cache, bpe_files  # noqa: F401 (fixtures)
from tests.training.gpt2_weights import SHAPE, as_nanogpt, logits_of, random_gpt2
from training.trained import load_trained

TEXT = "Hello  wörld!\n\t 日本語 🎉é ́  don't 12345   \r\n x\xa0y \u3000 z \x00\x7f\x85\u2028 end  "


def run_of(run_train: Train, *, biases: bool = True, scaled: bool = True) -> Path:
    """A run whose weights are nowhere zero or one, as they would be at the start of training."""
    saved = run_train.root / "ckpt.pt"
    torch.save(as_nanogpt(random_gpt2(biases), scale_attn_by_inverse_layer_idx=scaled), saved)
    settings = (f"--bias={biases}", f"--scale_attn_by_inverse_layer_idx={scaled}", "--max_iters=0")
    done = run_train(f"--init_from=nanogpt:{saved}", *SHAPE, *settings)
    assert done.status == 0, done.stderr
    return done.folder


def run_with(
    run_train: Train, dataset: Path, tokenizer: str, vocab_size: int, *settings: str, out: str = "run"
) -> Path:
    """A run on data of a tokenizer."""
    (dataset / "meta.json").write_text(json.dumps({"tokenizer": tokenizer}))
    done = run_train(f"--vocab_size={vocab_size}", "--max_iters=0", *settings, out=out)
    assert done.status == 0, done.stderr
    return done.folder


def export(*arguments: object) -> None:
    assert export_hf.main([str(argument) for argument in arguments]) == 0


def opened(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """config.json, generation_config.json, and the weights with the names of the hub's gpt2."""
    config, generation = (json.loads((folder / f"{name}config.json").read_text()) for name in ("", "generation_"))
    state = load_file(folder / "model.safetensors")
    return config, generation, {name.removeprefix("transformer."): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(("biases", "scaled"), [(True, False), (False, True)])
def test_the_files_compute_what_the_model_does(run_train: Train, tmp_path: Path, biases: bool, scaled: bool) -> None:
    run = run_of(run_train, biases=biases, scaled=scaled)
    export(run, tmp_path / "out")
    config, _, state = opened(tmp_path / "out")
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        logits = load_trained(run).model(tokens)
    torch.testing.assert_close(logits_of(state, tokens, inverse_layer=scaled), logits, rtol=1e-5, atol=1e-5)
    assert config["scale_attn_by_inverse_layer_idx"] is scaled
    shape = {"n_layer": 3, "n_head": 3, "n_embd": 24, "n_positions": 16, "vocab_size": 64}
    assert {key: config[key] for key in shape} == shape
    assert config["model_type"] == "gpt2"
    assert (config["activation_function"], config["layer_norm_epsilon"]) == ("gelu_new", 1e-5)


def test_there_and_back_is_bit_for_bit_the_same(run_train: Train, tmp_path: Path) -> None:
    run = run_of(run_train, biases=False)
    export(run, tmp_path / "out")
    again = run_train(f"--init_from=hf:{tmp_path / 'out'}", *SHAPE, "--max_iters=0", out="again")
    assert again.status == 0, again.stderr
    before, after = (load_trained(folder).model.state_dict() for folder in (run, again.folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_which_checkpoint(run_train: Train, tmp_path: Path) -> None:
    run = run_train("--eval_interval=1", "--checkpoint_interval=1", "--keep_checkpoints=9", "--dropout=0.1").folder
    checkpoints = {"last": 6, "2": 2}
    for which, update in checkpoints.items():
        export(run, tmp_path / which, "--checkpoint", which)
        with safe_open(tmp_path / which / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "update": str(update), "optimizer": "adamw"}
            assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118
        wanted = load_trained(run, which).model.transformer.wte.weight
        assert torch.equal(opened(tmp_path / which)[2]["wte.weight"], wanted)
    assert opened(tmp_path / "2")[0]["attn_pdrop"] == 0.1


def test_padding_is_kept_and_never_generated(run_train: Train, dataset: Path, tmp_path: Path) -> None:
    run = run_with(run_train, dataset, "bytes", 260)
    export(run, tmp_path / "all")
    config, generation, state = opened(tmp_path / "all")
    assert (config["vocab_size"], len(state["wte.weight"])) == (260, 260)
    assert generation == {"bos_token_id": 256, "eos_token_id": 256, "suppress_tokens": [257, 258, 259]}
    export(run, tmp_path / "trimmed", "--trim_vocabulary")
    config, generation, trimmed = opened(tmp_path / "trimmed")
    assert config["vocab_size"] == 257
    assert generation == {"bos_token_id": 256, "eos_token_id": 256}
    assert torch.equal(trimmed["wte.weight"], state["wte.weight"][:257])


def test_bytes_are_the_tokens_of_a_byte_run(run_train: Train, dataset: Path, tmp_path: Path) -> None:
    import tokenizers

    export(run_with(run_train, dataset, "bytes", 257), tmp_path / "out")
    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")), project.ByteTokenizer()
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x3000), 0xFFFF, 0x10FFFF]))
    for text in ("", TEXT, every):
        assert theirs.encode(text).ids == ours.encode([text], complete=False).tolist()
        assert theirs.decode(theirs.encode(text).ids) == text
    assert [theirs.decode([byte]) for byte in (10, 97)] == ["\n", "a"]
    assert theirs.encode("a<|endoftext|>").ids == [97, 256]


def test_the_bpe_files_of_a_gpt2_run(
    run_train: Train,
    tmp_path: Path,
    bpe_files: Path,  # noqa: F811
    bpe_cache: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(bpe_cache))
    run = run_train("--vocab_size=50304", "--max_iters=0").folder
    capsys.readouterr()
    export(run, tmp_path / "out")
    assert "vocabulary  50304 rows (50257 tokens; 47 rows of padding kept, never generated)" in capsys.readouterr().out
    for theirs, own in {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}.items():
        assert (tmp_path / "out" / theirs).read_bytes() == (bpe_files / own).read_bytes()
    config, generation, _ = opened(tmp_path / "out")
    assert (config["bos_token_id"], config["eos_token_id"]) == (50256, 50256)
    assert generation["suppress_tokens"] == list(range(50257, 50304))
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert (settings["model_max_length"], settings["eos_token"]) == (16, "<|endoftext|>")


def test_a_run_whose_tokens_are_not_known(
    run_train: Train, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_train("--max_iters=0", "--vocab_size=300").folder
    export(run, tmp_path / "out")
    assert "tokenizer   unknown, and no files of one are written; --tokenizer names it" in capsys.readouterr().out
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files
    config, generation, _ = opened(tmp_path / "out")
    assert config["eos_token_id"] is None
    assert "suppress_tokens" not in generation
    export(run, tmp_path / "named", "--tokenizer", "bytes")
    assert (tmp_path / "named/tokenizer.json").exists()
    export(run_with(run_train, dataset, "gpt2", 64, out="small"), tmp_path / "few")
    assert "gpt2 has more tokens than the model has rows: no files are written" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "few").iterdir()) == files


def test_others_may_read_all_files_or_none(run_train: Train, tmp_path: Path) -> None:
    run = run_train("--max_iters=0").folder
    umask = os.umask(0o027)
    try:
        export(run, tmp_path / "new/folder")
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new/folder").iterdir()} == {0o640}


def test_mistakes(
    run_train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_train("--max_iters=0").folder
    capsys.readouterr()

    def refused(*arguments: object) -> str:
        assert export_hf.main([str(argument) for argument in arguments]) == 2
        line, *more = capsys.readouterr().err.splitlines()
        assert not more
        return line

    out = tmp_path / "out"
    assert "the following arguments are required: DIR (python scripts/export_hf.py --help" in refused(run)
    assert f"{tmp_path / 'gone'} holds no run" in refused(tmp_path / "gone", out)
    assert "iter-00000007.pt is missing; checkpoints there: 0" in refused(run, out, "--checkpoint", "7")
    assert "does not say what its tokens are; --tokenizer names it" in refused(run, out, "--trim_vocabulary")
    assert "its vocabulary has 64 rows" in refused(run, out, "--tokenizer", "gpt2")
    assert f"error: {run} exists already; nothing is overwritten: choose another DIR" == refused(run, run)
    assert "exists already" in refused(run, run / "config.json")
    assert f"error: {run}/config.json: File exists; choose another DIR" == refused(run, run / "config.json/x")

    (tmp_path / "link").symlink_to(tmp_path / "linked")
    monkeypatch.chdir(tmp_path / "data")
    assert f"error: {tmp_path}/data is the folder you are in; name a new one" == refused(run, ".")
    long = tmp_path / ("x" * 300)
    assert f"error: {long}: File name too long; choose another DIR" == refused(run, long)
    assert export_hf.main([str(run), str(tmp_path / "link")]) == 0
    assert (tmp_path / "linked" / "model.safetensors").exists()

    def full_disk(*_: object, **__: object) -> None:
        raise export_hf.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export_hf, "save_file", full_disk)
    assert f"error: {out} cannot be written: I/O error: No space left on device" in refused(run, out)
    monkeypatch.undo()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(project, "BPE_URL", "http://127.0.0.1:9/")
    large = run_train("--vocab_size=50304", "--max_iters=0", out="large").folder
    assert "GPT-2's BPE files are not in" in refused(large, out)
    left = {path.name for path in tmp_path.iterdir()}
    assert not {name for name in left if "out" in name}


def test_an_empty_folder_may_be_there(run_train: Train, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(run_train("--max_iters=0").folder, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").exists()
