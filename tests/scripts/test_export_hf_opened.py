"""Exported models as transformers and lm-evaluation-harness open them, and transformers' own as init_from does."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data import tokenizers
from scripts import evaluate
from scripts.evaluation.scoring import encode_pair, loglikelihoods
from tests.conftest import Train
from tests.data.conftest import bpe_cache, bpe_files  # noqa: F401 (fixtures)
from tests.scripts.test_export_hf import TEXT, export, run_of, run_with
from tests.training.gpt2_weights import SHAPE
from training.trained import load_trained

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow  # transformers and the harness take seconds to import

ROWS = {"bytes": 320, "gpt2": 50304}
INPUT = torch.arange(48).view(3, 16) * 5 % 61


def their_logits(folder: Path, attention: str) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.dtype == torch.float32
    with torch.no_grad():
        return model.eval()(INPUT).logits


def our_logits(run: Path) -> Tensor:
    with torch.no_grad():
        return load_trained(run).model(INPUT)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("biases", "scaled"), [(True, False), (False, True)])
def test_transformers_computes_our_logits(
    run_train: Train, tmp_path: Path, biases: bool, scaled: bool, attention: str
) -> None:
    run = run_of(run_train, biases=biases, scaled=scaled)
    export(run, tmp_path / "out")
    torch.testing.assert_close(their_logits(tmp_path / "out", attention), our_logits(run), rtol=0, atol=1e-4)


@pytest.mark.parametrize("biases", [True, False])
def test_from_transformers_and_back(run_train: Train, tmp_path: Path, biases: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_head": 3, "n_embd": 24, "n_positions": 16, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) * (biases or not name.endswith(".bias")))
    model.save_pretrained(tmp_path / "theirs")
    settings = (*SHAPE, f"--bias={biases}", "--scale_attn_by_inverse_layer_idx=false", "--max_iters=0")
    run = run_train(f"--init_from=hf:{tmp_path / 'theirs'}", *settings)
    assert run.status == 0, run.stderr
    with torch.no_grad():
        torch.testing.assert_close(our_logits(run.folder), model(INPUT).logits, rtol=0, atol=1e-4)
    export(run.folder, tmp_path / "back")
    back = GPT2LMHeadModel.from_pretrained(tmp_path / "back").state_dict()
    before = model.state_dict()
    assert before.keys() == back.keys()
    assert all(torch.equal(before[name], back[name]) for name in before)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_tokenizer_and_generated_text(
    run_train: Train,
    dataset: Path,
    tmp_path: Path,
    bpe_cache: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(bpe_cache))
    run = run_with(run_train, dataset, name, ROWS[name])
    export(run, tmp_path / "out")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "out"), tokenizers.make_tokenizer(name)
    rng = random.Random(0)
    texts = ["".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xD800)])) for _ in range(200))]
    for text in [TEXT, *texts]:
        assert theirs(text)["input_ids"] == ours.encode([text], complete=False).tolist()
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.end_of_text, ours.end_of_text)
    assert theirs.model_max_length == 16

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():  # now padding is what the model likes most
        model.transformer.wte.weight[ours.vocab_size :] += 10 * model.transformer.ln_f.weight
        model.transformer.ln_f.bias += 1
    assert model(torch.tensor([[1, 2]])).logits[0, -1].argmax() >= ours.vocab_size
    generated = model.generate(torch.tensor([[1, 2]]), max_new_tokens=10, do_sample=True)
    assert generated.max() < ours.vocab_size


def test_the_export_needs_no_transformers(run_train: Train, tmp_path: Path) -> None:
    run = run_train("--max_iters=0").folder
    code = "import sys; sys.modules['transformers'] = None; from scripts import export_hf; sys.exit(export_hf.main())"
    command = [sys.executable, "-c", code, str(run), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert their_logits(tmp_path / "out", "sdpa").shape == (3, 16, 64)


@pytest.fixture(params=["gpt2", "bytes"])
def lively(
    request: pytest.FixtureRequest,
    run_train: Train,
    dataset: Path,
    bpe_cache: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A run whose model has opinions: its matrices are ten times those it started with."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(bpe_cache))
    run = run_with(run_train, dataset, request.param, ROWS[request.param], "--block_size=48")
    path = run / "checkpoints/iter-00000000.pt"
    checkpoint = torch.load(path, weights_only=True)
    for name, tensor in checkpoint["model"].items():
        if tensor.dim() == 2 and name != "lm_head.weight":  # which is the same as the embedding
            tensor.mul_(10)
    torch.save(checkpoint, path)
    return run


def harness(folder: Path, **settings: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2, **settings)


def test_log_likelihoods_are_the_harness_s(lively: Path, tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance

    export(lively, tmp_path / "out")
    pairs = [
        ("The quick brown fox", " jumps over the lazy dog."),
        ("", "A text without a context"),
        ("Once upon a time there was ", "a wörld"),  # white space at the end of the context
        ("Far too long for the model. " * 12, " The end, though, is counted in full."),
    ]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    theirs = harness(tmp_path / "out").loglikelihood(requests, disable_tqdm=True)
    trained = load_trained(lively)
    assert trained.tokenizer is not None
    model, tokenizer = trained.model, tokenizers.make_tokenizer(trained.tokenizer)
    encoded = [encode_pair(tokenizer, *pair) for pair in pairs]
    assert len(encoded[-1][0]) > model.config.block_size
    ours = loglikelihoods(model, encoded, batch_size=2)
    assert [total for total, _ in ours] == pytest.approx([total for total, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


@pytest.mark.parametrize("lively", ["gpt2"], indirect=True)
def test_hellaswag_s_accuracy_is_the_harness_s(lively: Path, tmp_path: Path) -> None:
    """With the harness's own task, on made-up items."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    words = random.Random(0)
    vocabulary = ["the", "cat", "[step]", "sat", "", "on", "a", "wörld", "apart,", "[title]", "then", "it's", "42"]

    def sentence(least: int, most: int) -> str:
        return " ".join(words.choices(vocabulary, k=words.randint(least, most)))

    items = [
        {
            "activity_label": "Cats",
            "ctx_a": sentence(3, 9),
            "ctx_b": sentence(0, 4),
            "endings": [sentence(2, 12) for _ in range(4)],
            "label": str(words.randrange(4)),
        }
        for _ in range(24)
    ]
    file = tmp_path / "validation.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    export(lively, tmp_path / "out")

    task = Path(lm_eval.__file__).parent / "tasks/hellaswag/hellaswag.yaml"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/local.yaml").write_text(
        f"include: {task}\ntask: hellaswag_local\ntag: null\ndataset_path: json\ntraining_split: null\n"
        f"dataset_kwargs:\n  data_files:\n    validation: {file}\n"
    )
    results = lm_eval.simple_evaluate(
        model=harness(tmp_path / "out"),
        tasks=["hellaswag_local"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
        log_samples=False,
    )
    theirs = results["results"]["hellaswag_local"]
    arguments = [lively, "--hellaswag", file, "--json", tmp_path / "ours.json", "--device", "cpu", "--dtype", "float32"]
    assert evaluate.main([str(argument) for argument in arguments]) == 0
    ours = json.loads((tmp_path / "ours.json").read_text())["hellaswag"]
    assert 0 < ours["acc"] < 1
    assert ours["acc"] != ours["acc_norm"]
    for metric in ("acc", "acc_norm"):
        assert ours[metric] == pytest.approx(theirs[f"{metric},none"], abs=1e-9)
        assert ours[f"{metric}_stderr"] == pytest.approx(theirs[f"{metric}_stderr,none"], abs=1e-6)
