"""The typed configuration of a run.

`TrainConfig` lists every key with its type, its range and its meaning; `loader.py` reads config files and the command
line into it. What is wrong ends in a `ConfigError`, one line that names the place, the value and what is allowed: a
typo must not become a week of GPU time with a default value.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, FiniteFloat
from pydantic.dataclasses import dataclass

MANY = 2**31 - 1
GAMMA_SCHEDULE = r"^((linear|cosine):[^:]+:[^:]+|adaptive(:[^:]+){5,6}|adaptive)$"
PROJECT = r"^[^/\\#?%:\x00-\x1f]+$"  # what wandb allows
INIT_FROM = r"^(hf|nanogpt|run):[^\x00-\x1f]+$"
Count = Annotated[int, Field(ge=1, le=MANY)]
CountOrZero = Annotated[int, Field(ge=0, le=MANY)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
NonNegative = Annotated[FiniteFloat, Field(ge=0)]
BelowOne = Annotated[FiniteFloat, Field(ge=0, lt=1)]
Kind = Literal["matrices", "convolutions", "embeddings", "vectors"]
Preconditioner = Literal["adamw", "lion", "shampoo", "kronecker", "sgd"]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f]+$")]


class ConfigError(Exception):
    """A config that cannot be used. The message is one line that a user can act on."""

    def __init__(self, message: str) -> None:
        super().__init__(message.replace("\n", "\\n"))  # a value or a path may have line breaks in it


CHECKS = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True, config=CHECKS)
class TrainConfig:
    """Every value of a run. The defaults are GPT-2 small with AdamW as published (arXiv 2411.10438, Tables 10-12).

    Raises:
        pydantic.ValidationError: a value of the wrong type or out of range, an unknown key.
        ConfigError: values that exclude each other.
    """

    # --- model ---
    n_layer: Count = 12
    """transformer blocks"""
    n_head: Count = 12
    """attention heads; must divide n_embd"""
    n_embd: Count = 768
    """width of the residual stream"""
    block_size: Count = 1024
    """context length in tokens"""
    vocab_size: Annotated[int, Field(ge=2, le=65536)] = 50304
    """rows of the token embedding: GPT-2's 50257 padded to a multiple of 64"""
    dropout: BelowOne = 0.0
    """dropout probability of embeddings, attention and residual branches"""
    bias: bool = False
    """biases in linear layers and layer norms"""
    scale_attn_by_inverse_layer_idx: bool = True
    """divide the attention scores of layer i (from 1) by i as well; True in every published run"""
    init_from: Annotated[str, Field(pattern=INIT_FROM)] | None = None
    """weights to start from: hf:FOLDER or hf:NAME (transformers), nanogpt:FILE (its ckpt.pt), run:FOLDER or
    run:FILE.pt (a run of this project); none: random ones"""

    # --- data ---
    dataset: Text = "openwebtext"
    """a folder of data/ (data/openwebtext), or a path to a folder with train.bin and val.bin"""
    batch_size: Count = 15
    """micro-batch: sequences that one process computes at a time"""
    total_batch_size: Count = 480
    """sequences in one update, all processes together; batch_size x processes must divide it, the rest is
    gradient accumulation"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 5000
    """seed of initial weights, batches and dropout"""

    # --- optimizer ---
    optimizer: Literal[
        "adamw", "mars-adamw", "mars-lion", "mars-shampoo", "lion", "muon", "shampoo", "sgd", "nadamw"
    ] = "adamw"
    """which optimizer steps the matrices (see optim/)"""
    learning_rate: Positive = 6e-4
    """peak learning rate, reached at the end of the warm-up"""
    min_lr: NonNegative = 3e-5
    """learning rate at and after lr_decay_iters"""
    warmup_iters: CountOrZero = 2000
    """updates of linear warm-up; the first one already has learning_rate / warmup_iters"""
    lr_decay_iters: Count | None = None
    """update at which the cosine reaches min_lr; none: max_iters"""
    first_lr_zero: bool = False
    """the published loop's schedule: update k has the learning rate of update k - 1, so that the first one has 0"""
    weight_decay: NonNegative = 0.1
    """decoupled weight decay of hidden matrices and, unless set apart, of embeddings"""
    weight_decay_embedding: NonNegative | None = None
    """decoupled weight decay of token and position embeddings; none: weight_decay"""
    weight_decay_1d: NonNegative = 0.0
    """decoupled weight decay of vectors (layer norms, biases)"""
    beta1: BelowOne = 0.9
    """decay of the first moment"""
    beta2: BelowOne = 0.95
    """decay of the second moment"""
    eps: Positive = 1e-8
    """added to the root of the second moment"""
    lr_1d: Positive | None = None
    """peak learning rate of vectors, scheduled in proportion to learning_rate; none: learning_rate"""
    betas_1d: tuple[BelowOne, BelowOne] | None = None
    """betas of vectors; none: (beta1, beta2)"""
    lr_embedding: Positive | None = None
    """peak learning rate of embeddings, scheduled in proportion to learning_rate; none: that of matrices, or with
    embedding_adamw that of vectors"""
    betas_embedding: tuple[BelowOne, BelowOne] | None = None
    """betas of embeddings; none: those of matrices, or with embedding_adamw those of vectors"""
    grad_clip: NonNegative = 1.0
    """global norm to which the gradient is clipped before the optimizer sees it; 0: no clipping"""
    gradient_multiplier: Positive = 1.0
    """factor on the averaged gradient before clipping; the published code amounts to 4.0 (small, medium) or
    12.0 (large)"""
    embedding_adamw: bool | None = None
    """step embeddings as vectors are, by plain AdamW with lr_1d and betas_1d; none: with muon and shampoo. False with
    muon is the published comparison's way"""
    shampoo_factors: Literal["averaged", "accumulated"] = "averaged"
    """shampoo: statistics averaged with beta2, or accumulated over all updates"""
    shampoo_interval: Count = 10
    """shampoo: updates between new inverse roots of the statistics; before that at updates 1, 2, 4, 8 and so on"""
    shard_optimizer: bool = False
    """share the optimizer's state and work between the processes (ZeRO-1), with the same results"""
    compile_optimizer: bool | Literal["auto"] = "auto"
    """torch.compile the steps of the MARS family, lion, muon and shampoo; auto: on CUDA, and on a CPU from 8 million
    parameters"""
    gamma: FiniteFloat | Annotated[str, Field(pattern=GAMMA_SCHEDULE)] = 0.025
    """MARS: scale of the gradient correction: a number; linear:START:END or cosine:START:END over max_iters updates;
    adaptive, by the ratio of the gradient's norm to its running norm, in full adaptive:ABOVE:GAMMA:BELOW:GAMMA:ELSE or
    adaptive:ABOVE:GAMMA:BELOW:GAMMA:ELSE:DECAY"""
    estimator: Literal["recursive", "reference", "svrg", "none"] = "recursive"
    """MARS: what the gradient is corrected with: the last gradient (the paper's), the mean of earlier ones (reference),
    gradients at a snapshot of the weights (svrg), or nothing"""
    reference_interval: Count = 10
    """MARS, estimator=reference: every so many updates the mean of their gradients becomes the reference"""
    snapshot_interval: Count = 100
    """MARS, estimator=svrg: updates between snapshots; each update takes a second gradient, at the snapshot"""
    snapshot_batches: Count = 16
    """MARS, estimator=svrg: batches of an update's size over which the mean gradient at a snapshot is taken"""
    exact: bool = False
    """MARS, estimator=recursive: the exact form: two gradients an update, the second one on the next update's batch"""
    mars_clip: Literal["tensor", "global", "none"] = "tensor"
    """MARS: clip the corrected gradient to norm 1 tensor by tensor (published code), as one vector (paper) or not"""
    mars_first_step: Literal["paper", "official"] = "paper"
    """MARS: the first reference gradient: the gradient itself (paper, no correction) or zero (published code)"""
    mars_last_grad: Literal["full", "bfloat16", "folded"] = "full"
    """MARS: how the last gradient is kept: full, in half the memory, or folded into the moment (mars-lion and
    mars-shampoo with mars_clip=none)"""
    mars_kinds: tuple[Kind, ...] | None = None
    """MARS: the kinds of parameters whose gradient is corrected and clipped, such as matrices,embeddings; others are
    stepped plainly, with gamma 0. none: all but vectors, and but embeddings with embedding_adamw"""
    preconditioner_matrices: Preconditioner | None = None
    """MARS: what steps hidden matrices; none: what the optimizer is named after"""
    preconditioner_convolutions: Preconditioner | None = None
    """MARS: what steps parameters of 3 or more dimensions, as matrices of out x rest; none: what the optimizer is named
    after"""
    preconditioner_embeddings: Preconditioner | None = None
    """MARS: what steps embeddings; none: what the optimizer is named after, or adamw with embedding_adamw"""
    preconditioner_vectors: Literal["adamw", "lion", "sgd"] | None = None
    """MARS: what steps vectors; none: adamw"""

    # --- loop ---
    max_iters: CountOrZero = 100_000
    """updates, exactly"""
    eval_interval: CountOrZero = 1000
    """updates between evaluations on the whole validation file; 0: only before the first and after the last"""
    log_interval: Count = 10
    """updates between rows of training loss"""
    log_variance: CountOrZero = 0
    """updates between measurements of the noise of gradients and of the optimizer's estimates (docs/variance.md); 0:
    none. Training is the same with and without them"""
    variance_batches: Annotated[int, Field(ge=2, le=MANY)] = 8
    """gradients of a measurement, each on a batch of the update's size"""
    checkpoint_interval: CountOrZero = 1000
    """updates between checkpoints; 0: only after the last update"""
    keep_checkpoints: Count = 2
    """how many of the newest checkpoints to keep, beside the best one"""
    max_bad_updates: CountOrZero = 5
    """an update whose loss or gradient norm is not finite is skipped; so many in a row end the run; 0: never"""
    stop_seconds: Annotated[FiniteFloat, Field(gt=0, le=86400)] = 20.0
    """seconds from a signal (SIGTERM, SIGINT, SIGUSR1, SIGHUP) to the end at the latest: time to finish the update and
    save. torchrun waits for 30"""
    out_dir: Text = "runs/gpt2"
    """the run's folder: config.json, metrics.jsonl, checkpoints/"""
    resume: Literal["auto", "never"] | None = None
    """auto: go on with the run in out_dir, start it where there is none; never, none: refuse a folder that has one"""

    # --- machine ---
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d{1,3})?)$")] = "auto"
    """auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """numbers of the forward and backward pass; weights stay float32. auto: bfloat16 where the GPU or the CPU computes
    in it, else float16 on CUDA and float32 elsewhere"""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile the model; auto: on CUDA"""
    chunked_loss: bool | Literal["auto"] = "auto"
    """find the loss from blocks of the vocabulary, so that the logits of a micro-batch are never all in memory, for a
    third more operations of the output head; auto: on a CPU, where it is faster too"""
    deterministic: bool = False
    """ask torch for algorithms that give the same bits each time, so that a resume on CUDA is exact to the last one;
    slower there, and no different on a CPU"""

    # --- wandb ---
    wandb_log: bool = False
    """log to Weights & Biases too; offline where there is no network or no login"""
    wandb_project: Annotated[str, Field(pattern=PROJECT, max_length=128)] = "mars-gpt2"
    """project in Weights & Biases, of the entity that WANDB_ENTITY names"""
    wandb_run_name: Annotated[Text, Field(max_length=128)] | None = None
    """name of the run there; none: the last part of out_dir"""
    wandb_group: Text | None = None
    """runs of a group overlay in one chart; none: model and data set, as in gpt2-124M openwebtext"""
    wandb_job_type: Text | None = None
    """what tells the runs of a group apart; none: the optimizer"""
    wandb_tags: tuple[Annotated[Text, Field(max_length=64)], ...] | None = None
    """tags of the run; none: optimizer, model's size, data set, seed, and exact or the estimator where it is not
    recursive"""
    wandb_x_axis: Literal["iter", "tokens", "time"] = "iter"
    """what the charts there are drawn against"""

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}; n_head can be {_divisors(self.n_embd)}"
            )
        if self.min_lr > self.learning_rate:
            raise ConfigError(
                f"min_lr={self.min_lr:g} is above learning_rate={self.learning_rate:g}; lower --min_lr as well"
            )

    @property
    def decay_iters(self) -> int:
        """The update at which the learning rate reaches its minimum."""
        return self.max_iters if self.lr_decay_iters is None else self.lr_decay_iters

    def accumulation_steps(self, processes: int) -> int:
        """Micro-batches that each of `processes` processes computes for one update.

        Raises:
            ConfigError: batch_size x processes does not divide total_batch_size.
        """
        total = self.total_batch_size
        if total % (self.batch_size * processes) == 0:
            return total // (self.batch_size * processes)
        if total % processes:
            raise ConfigError(
                f"total_batch_size={total} cannot be shared equally by {processes} processes; "
                f"numbers of processes that divide it: {_divisors(total)}"
            )
        raise ConfigError(
            f"batch_size={self.batch_size} x {processes} process(es) does not divide total_batch_size={total}; "
            f"batch_size can be {_divisors(total // processes)}"
        )


def _divisors(number: int) -> str:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return ", ".join(map(str, sorted({*small, *(number // divisor for divisor in small)})))
