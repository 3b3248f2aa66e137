"""train.py on CUDA: the losses of a CPU in every number format, exact resume, checkpoints that open anywhere, memory as
planned, FlashAttention, NCCL."""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.distributed import HashStore
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from configs import load_config
from model import GPT, GPTConfig
from scripts import evaluate, export_hf
from scripts.planning.machines import MACHINES
from scripts.planning.memory import MemoryPlanner
from tests.conftest import Outcome, Train
from tests.helpers import write_tokens
from training.trained import load_trained

pytestmark = pytest.mark.gpu

ON_GPU = ("--device=cuda", "--optimizer=mars-adamw")
EAGER = ("--compile=False", "--compile_optimizer=False")


@pytest.fixture
def on_cpu(run_train: Train) -> Outcome:
    """Six updates in float32 on the CPU."""
    done = run_train("--optimizer=mars-adamw", out="cpu")
    assert done.status == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("dtype", "compiled", "tolerance"),
    [("float32", False, 1e-3), ("bfloat16", False, 2e-2), ("bfloat16", True, 2e-2), ("float16", False, 2e-2)],
)
def test_losses_are_those_of_a_cpu(
    run_train: Train, on_cpu: Outcome, dtype: str, compiled: bool, tolerance: float
) -> None:
    how = (f"--dtype={dtype}", f"--compile={compiled}", f"--compile_optimizer={compiled}")
    done = run_train(*ON_GPU, *how, out="gpu")
    assert done.status == 0, done.stderr
    for key in ("train/loss", "val/loss"):
        assert done.series(key) == pytest.approx(on_cpu.series(key), abs=tolerance)


def test_auto_picks_the_gpu_its_numbers_and_the_compiler(run_train: Train) -> None:
    done = run_train("--device=auto", "--compile=auto", "--dtype=auto", "--max_iters=0")
    used = json.loads((done.folder / "config.json").read_text())
    assert (used["device"], used["compile"]) == ("cuda", True)
    assert used["dtype"] == ("bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16")
    assert used["device_name"] == torch.cuda.get_device_name()


def test_float16_goes_on_after_an_overflow(run_train: Train) -> None:
    """The scaler's first factor is too large for this multiplier."""
    done = run_train(*ON_GPU, *EAGER, "--dtype=float16", "--gradient_multiplier=20000", "--max_iters=12")
    assert done.status == 0, done.stderr
    rows = [row for row in done.rows if "train/loss" in row]
    assert 0 < rows[-1]["skipped_updates"] < 12
    assert done.series("val/loss")[-1] < done.series("val/loss")[0]


def test_a_deterministic_resume_is_exact_to_the_last_bit(run_train: Train) -> None:
    how = (*ON_GPU, *EAGER, "--dtype=bfloat16", "--deterministic=True", "--dropout=0.1", "--lr_decay_iters=6")
    straight = run_train.fresh(*how, "--max_iters=6", out="straight")
    for updates in (3, 6):
        resumed = run_train.fresh(*how, f"--max_iters={updates}", "--resume=auto", out="resumed")
        assert resumed.status == 0, resumed.stderr
    assert straight.status == 0, straight.stderr
    assert resumed.series("train/loss") == straight.series("train/loss")
    one, other = (weights(outcome.folder, 6) for outcome in (straight, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


def weights(folder: Path, update: int) -> dict[str, Tensor]:
    """Of a checkpoint, wherever they lie when it is opened as any program would."""
    model: dict[str, Tensor] = torch.load(folder / f"checkpoints/iter-{update:08}.pt", weights_only=True)["model"]
    return model


def test_a_checkpoint_needs_no_gpu(run_train: Train, tmp_path: Path) -> None:
    """It opens, goes on, is scored and exported on a CPU."""
    done = run_train(*ON_GPU, *EAGER, "--dtype=bfloat16", "--lr_decay_iters=9")
    saved = weights(done.folder, 6)
    assert {tensor.device.type for tensor in saved.values()} == {"cpu"}

    scores = {}
    for device in ("cpu", "cuda"):
        file = tmp_path / f"{device}.json"
        assert evaluate.main([str(done.folder), f"--device={device}", f"--json={file}"]) == 0
        (scores[device],) = (entry["loss"] for entry in json.loads(file.read_text())["data"])
    assert scores["cuda"] == pytest.approx(scores["cpu"], abs=1e-2)
    assert scores["cpu"] == pytest.approx(done.series("val/loss")[-1], abs=1e-2)

    assert export_hf.main([str(done.folder), str(tmp_path / "exported")]) == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    name = next(name for name in exported if name.endswith("wte.weight"))
    assert torch.equal(exported[name], load_trained(done.folder).model.transformer.wte.weight)

    on = run_train("--device=cpu", "--optimizer=mars-adamw", "--lr_decay_iters=9", "--max_iters=9", "--resume=auto")
    assert on.status == 0, on.stderr
    assert len(on.series("train/loss")) == 9


# --- memory ---

SHAPE = {"n_layer": 4, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "batch_size": 4}


@pytest.mark.parametrize(("optimizer", "chunked"), [("adamw", False), ("mars-adamw", False), ("mars-adamw", True)])
def test_the_peak_of_memory_is_as_planned(run_train: Train, tmp_path: Path, optimizer: str, chunked: bool) -> None:
    data = write_tokens(tmp_path / "tokens", np.arange(50_000) % 64, np.arange(9_000) % 64)
    sizes = [f"--{key}={value}" for key, value in SHAPE.items()]
    settings = [*sizes, f"--optimizer={optimizer}", f"--dataset={data}", "--total_batch_size=8", "--max_iters=2"]
    settings += ["--device=cuda", "--dtype=bfloat16", f"--chunked_loss={chunked}", "--eval_interval=0", *EAGER]
    config = load_config(run_train.config, settings)
    planner = MemoryPlanner(config, MACHINES["h100"], 1)
    planned = planner.memory(config.batch_size, planner.optimizer(config, False)).total - MACHINES["h100"].overhead
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert run_train(*settings).status == 0
    assert planned == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.15)


# --- what torch chooses ---


@pytest.mark.parametrize("scaled", [False, True])
def test_attention_is_flash_attention(scaled: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("FlashAttention needs an Ampere GPU or a newer one")
    shape = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, scale_attn_by_inverse_layer_idx=scaled)
    model = GPT(shape).to("cuda")
    tokens = torch.randint(50257, (2, 128), device="cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cuda", torch.bfloat16):
        hidden = model.transformer(tokens)
        hidden.float().square().mean().backward()  # no other kernel is allowed: an error otherwise
    assert hidden.isfinite().all()


# --- processes ---


def test_torchrun_with_one_process(run_train: Train, on_cpu: Outcome) -> None:
    done = run_train(*ON_GPU, *EAGER, "--dtype=float32", out="gpu", processes=1)
    assert done.status == 0, done.stderr
    assert done.series("train/loss") == pytest.approx(on_cpu.series("train/loss"), abs=1e-3)


def test_nccl_averages_gradients_in_buckets() -> None:
    """One process, of which the average is its own gradient."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, device="cuda")
    inputs = torch.randn(8, 64, device="cuda")
    model(inputs).square().mean().backward()
    assert model.weight.grad is not None
    expected = model.weight.grad.clone()
    model.zero_grad()
    device = torch.device("cuda", 0)
    distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=device)
    try:
        parallel = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)
        parallel(inputs).square().mean().backward()
        torch.testing.assert_close(model.weight.grad, expected)
    finally:
        distributed.destroy_process_group()
