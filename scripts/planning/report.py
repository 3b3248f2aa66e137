"""A plan in words and tables."""

from __future__ import annotations

from pathlib import Path

from configs import TrainConfig
from scripts.planning.budget import Disk
from scripts.planning.machines import GB, MB
from scripts.planning.plan import Plan, Row
from training.passes import passes_an_update

NAMES = {
    "overhead": "before the first tensor (assumed)",
    "weights": "weights, float32",
    "optimizer state": "optimizer state",
    "buckets": "gradients in DDP's buckets, float32",
    "gradients": "gradients of parameters, float32",
    "weight copies": "copies of the weights, {dtype}",
    "activations": "activations, kept for the backward pass",
    "logits and loss": "logits and loss",
    "backward": "working memory of the backward pass",
    "optimizer temporaries": "working memory of the step",
    "copy of the weights": "weights before the step, float32, where an evaluation is due",
    "sum of gradients": "sum of gradients, float32, where log_variance measures",
    "checkpoint copy": "checkpoint on its way to the disk",
}


def text(path: str, config: TrainConfig, plan: Plan, rows: list[Row]) -> list[str]:
    """Everything that is printed, with an empty line between blocks."""
    blocks = [_head(path, config, plan), _memory(config, plan), _batches(config, plan), _budget(config, plan)]
    blocks += [_table(config, plan, rows)] if rows else []
    blocks.append(_assumptions(config, plan))
    lines: list[str] = []
    for block in blocks:
        lines += ([""] if lines else []) + block
    return lines


def _head(path: str, config: TrainConfig, plan: Plan) -> list[str]:
    settings, form = plan.settings, ", exact" if config.exact else ""
    form = f", {config.estimator}" if config.estimator != "recursive" else form
    on = f"{settings.gpus} x {settings.machine.title}"
    if settings.nodes is not None:
        on += f", {settings.gpus // settings.nodes} on each of {settings.nodes} hosts"
    tokens = config.total_batch_size * config.block_size
    shape = f"{config.n_layer} layers, width {config.n_embd}, vocabulary {config.vocab_size:,}"
    return [
        f"{Path(path).name} on {on}",
        f"model      {plan.parameters:,} parameters: {shape}; {config.optimizer}{form}, {plan.dtype}",
        f"update     {config.total_batch_size:,} sequences of {config.block_size:,} = {tokens:,} tokens",
    ]


def _memory(config: TrainConfig, plan: Plan) -> list[str]:
    what = "GPU" if plan.settings.machine.on_gpu else "process"
    unit, name = (GB, "GB (1e9 bytes)") if plan.memory.total >= GB else (MB, "MB (1e6 bytes)")
    head = f"memory of a {what} when it is highest, {name}"
    lines = [f"{head:<60}{'backward pass':>14}{'step':>10}"]
    backward, step = plan.memory.backward, plan.memory.step
    for key, text in NAMES.items():
        cells = [f"{value / unit:,.2f}" for value in (backward.get(key, 0), step.get(key, 0))]
        cells = ["-" if cell == "0.00" else cell for cell in cells]
        if set(cells) != {"-"}:
            lines.append(f"  {text.format(dtype=plan.dtype):<58}{cells[0]:>14}{cells[1]:>10}")
    totals = [sum(moment.values()) / unit for moment in (backward, step)]
    lines.append(f"  {'total':<58}{totals[0]:>14,.2f}{totals[1]:>10,.2f}")
    state = f"optimizer state: {_size(plan.state)}"
    if plan.settings.gpus > 1:
        how = "as here" if config.shard_optimizer else "--shard_optimizer=true"
        state += f"; shared by {plan.settings.gpus} GPUs (ZeRO-1, {how}) at most {_size(plan.state_sharded)} each"
    return [*lines, state]


def _batches(config: TrainConfig, plan: Plan) -> list[str]:
    settings, usable = plan.settings, plan.settings.usable
    given = f"batch_size={config.batch_size}"
    line = f"{given:<15}{plan.accumulation} micro-batch(es) an update on each, {_size(plan.memory.total)}"
    if usable is None or settings.machine.memory is None:
        return [line]
    limit = f"{_size(usable)} ({_size(settings.machine.memory)} less {settings.margin:.0%})"
    lines = [f"{line}: {'fits' if plan.fits else 'does not fit'} into {limit}"]
    if plan.largest_batch is None or plan.largest_total is None:
        return [*lines, "largest        none: not even one sequence fits"]
    steps = config.total_batch_size // (plan.largest_batch * settings.gpus)
    largest = f"--batch_size={plan.largest_batch}, {steps} micro-batch(es) an update, {_size(plan.largest_total)}"
    return [*lines, f"{'largest':<15}{largest}"]


def _budget(config: TrainConfig, plan: Plan) -> list[str]:
    cost, disk = plan.compute, plan.disk
    gradients = passes_an_update(config)
    passes = f", {'two' if gradients == 2 else f'{gradients:.2f}'} gradients an update" if gradients != 1 else ""
    work = f"{cost.updates:,} updates, {cost.tokens:,} tokens, {cost.flops:.3g} operations{passes}"
    if cost.hours is None or cost.gpu_hours is None:
        time = "not known; --tokens-per-sec=X gives it (measured, of one process)"
    else:
        time = f"{cost.hours:,.1f} hours, {cost.gpu_hours:,.0f} GPU hours ({_speed(plan)})"
    return [
        f"work           {work}",
        f"time           {time}",
        f"data set       {config.dataset}: {'size not known' if disk.dataset is None else _size(disk.dataset)}"
        f" ({disk.dataset_source})",
        f"checkpoints    {_size(disk.checkpoint)} each, {_kept(config, disk)}",
        f"disk           {_size(disk.total)} in all{'' if disk.dataset is not None else ' without the data set'}",
        f"host memory    {_size(plan.host_copy)} on the first host while a checkpoint is written",
    ]


def _speed(plan: Plan) -> str:
    settings = plan.settings
    if settings.tokens_per_second is not None:
        return f"{settings.tokens_per_second:,.0f} tokens/s a GPU, as given"
    return f"assumed: {settings.utilisation:.0%} of the peak"


def _kept(config: TrainConfig, disk: Disk) -> str:
    return f"{disk.checkpoints} at most: newest {config.keep_checkpoints}, the best, one being written"


def _table(config: TrainConfig, plan: Plan, rows: list[Row]) -> list[str]:
    shared = plan.settings.gpus > 1
    width = 12
    heads = ["state", "total", "largest"] + (["state", "total", "largest"] if shared else [])
    above = f"{'plain':>{3 * width}}" + (f"{'ZeRO-1':>{3 * width}}" if shared else "")
    lines = [
        f"GB of a GPU with batch_size={config.batch_size}, and the largest batch_size that fits",
        " " * 22 + above,
        f"{'optimizer':<22}" + "".join(f"{head:>{width}}" for head in heads),
    ]
    for row in rows:
        if row.problem is not None:
            lines.append(f"{row.optimizer:<22}  {_short(row.problem)}")
            continue
        cells = [_cell(row.state), _cell(row.total), _batch(row.largest_batch, plan)]
        if shared:
            cells += [_cell(row.state_sharded), _cell(row.total_sharded), _batch(row.largest_batch_sharded, plan)]
        lines.append(f"{row.optimizer:<22}" + "".join(f"{cell:>{width}}" for cell in cells))
    return lines


def _assumptions(config: TrainConfig, plan: Plan) -> list[str]:
    machine, settings = plan.settings.machine, plan.settings
    lines = [
        f"{_size(machine.overhead)} are taken before the first tensor "
        + ("(CUDA, cuBLAS, NCCL): a guess." if machine.on_gpu else "(Python, torch and what they import)."),
        "Activations are those of an eager forward pass; torch.compile, the default on CUDA, should keep less.",
        "Kernels of torch.compile and torch's fused optimizers need no room of their own.",
        "What CUDA's allocator loses between tensors is left to the margin."
        if machine.on_gpu
        else "What malloc loses between tensors is not counted; it was 10 to 20 % (docs/planning.md).",
    ]
    if machine.on_gpu:
        lines += [
            "Memory and peak operations of a GPU are those of the data sheet. Not yet measured on a GPU.",
            "Attention is FlashAttention's: no matrix of scores is kept.",
        ]
    if plan.compute.hours is not None and settings.tokens_per_second is None:
        lines.append(
            f"{settings.utilisation:.0%} of the peak is an assumption; it counts no optimizer, network or disk."
        )
    if config.compile_optimizer is False and plan.settings.machine.on_gpu:
        lines.append("compile_optimizer=False: what MARS's eager kernels need for a moment is counted.")
    return ["assumptions", *(f"  {line}" for line in lines)]


def _size(size: int) -> str:
    return f"{size / GB:,.2f} GB" if size >= GB // 10 else f"{size / MB:,.2f} MB"


def _cell(size: int) -> str:
    return f"{size / GB:,.2f}"


def _batch(batch: int | None, plan: Plan) -> str:
    return "-" if plan.settings.usable is None else "none" if batch is None else str(batch)


def _short(problem: str) -> str:
    return problem if len(problem) <= 84 else problem[:83] + "…"
