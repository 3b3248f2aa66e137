"""Pretrains GPT-2: `python train.py CONFIG.py [--key=value ...]`, or the same under torchrun on several processes.

The whole of a run can be read here from top to bottom: `main` reads the config, `Training` builds the parts, and
`Training.run` is the loop. Batches are a pure function of the seed and the update, so that runs with different
optimizers see the same ones.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

# On a CPU, a thread that waits for the others spins before it sleeps: by OpenMP's default so long that a run slows
# tenfold when another program uses one of the cores. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from configs import ConfigError, TrainConfig, describe, load_config
from data.batches import EvaluationBatches, TrainingBatches, dropout_seed
from data.tokens import Dataset, open_dataset
from model import GPT, GPTConfig
from optim import (
    build_optimizer,
    describe_groups,
    learning_rate_at,
    load_optimizer_state,
    optimizer_metrics,
    record_reference_gradient,
    set_learning_rate,
)
from training import RunError
from training.checkpoint import CheckpointFolder
from training.device import autocast, peak_flops, pick_dtype, to_device
from training.errors import explain
from training.evaluation import validation_loss
from training.metrics import MetricsFile, TrainingClock, format_count, format_duration
from training.processes import Processes, leave, local_rank_from_environment
from training.record import changed_settings, check_folder, check_resume, config_of_run, start_lines, write_config
from training.tracking import Tracker

USAGE = "usage: python train.py CONFIG.py [--key=value ...] (--help lists the keys)"


def main(arguments: list[str]) -> int:
    """Trains as the command line says. Returns the exit status: 0, 2 for an error that the user can mend, 130 if
    interrupted."""
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{USAGE}\n\nkeys and defaults:\n{describe()}")
        return 0
    processes = None
    try:
        if not arguments or arguments[0].startswith("--"):
            raise ConfigError(f"no config; {USAGE}")
        config = load_config(arguments[0], arguments[1:])
        processes = Processes.from_environment(config.device)
        config.accumulation_steps(processes.size)
        with closing(open_dataset(config.dataset, config.block_size, config.vocab_size)) as data:
            check_folder(config)
            processes.connect()
            Training(resolve(config, processes), processes, data).run()
    except (Exception, KeyboardInterrupt) as error:
        message, status = explain(error)
        if message is None:
            raise
        # What is wrong for all processes is said once on each host; what befell one midway, by that process.
        midway = processes is not None and processes.is_connected and not isinstance(error, ConfigError | RunError)
        if not midway and local_rank_from_environment() > 0:
            # torchrun ends all processes when the first one goes: that must be the one that speaks. If it has not gone
            # after this time, it does not share the error.
            time.sleep(10)
        print(message, file=sys.stderr, flush=True)
        return status
    processes.close()
    return 0


def resolve(config: TrainConfig, processes: Processes) -> TrainConfig:
    """The config with every `auto` replaced by what it stands for here."""
    device = processes.device
    return replace(
        config,
        device=device.type,
        dtype=pick_dtype(config.dtype, device),
        compile=device.type == "cuda" if config.compile == "auto" else config.compile,
    )


class Training:
    """The parts of a run, and its loop."""

    def __init__(self, config: TrainConfig, processes: Processes, data: Dataset) -> None:
        self.config, self.processes = config, processes
        if processes.device.type == "cuda" and config.dtype != "float32":
            torch.set_float32_matmul_precision("high")
        torch.manual_seed(config.seed)  # the same initial weights on every process

        sizes = {field.name: getattr(config, field.name) for field in fields(GPTConfig)}
        self.model = GPT(GPTConfig(**sizes)).to(processes.device)
        if config.compile:
            self.model.compile()
        self.parallel = processes.wrap(self.model)
        try:
            self.optimizer = build_optimizer(self.model, config)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        # The scaler unscales gradients once for each optimizer. This one stands for an update's second gradient.
        self.reference_pass = SGD(self.model.parameters(), lr=0.0)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=config.dtype == "float16")

        shares: dict[str, Any] = {
            "block_size": config.block_size,
            "batch_size": config.batch_size,
            "rank": processes.rank,
            "processes": processes.size,
            "vocab_size": config.vocab_size,
        }
        accumulation = config.accumulation_steps(processes.size)
        self.batches = TrainingBatches(data.train, accumulation=accumulation, seed=config.seed, **shares)
        self.validation = EvaluationBatches(data.val, **shares)
        self.checkpoints = CheckpointFolder(Path(config.out_dir) / "checkpoints", config.keep_checkpoints)

        self.update, self.best_val_loss, self.best_iter, seconds = self._restore()
        self.clock = TrainingClock(seconds, processes.device)
        self.tokens_per_update = config.total_batch_size * config.block_size
        self._last_row = (self.update, seconds)
        self.tracker: Tracker | None = None
        self.data = data

    def run(self) -> None:
        """Trains until `max_iters` updates are done."""
        config = self.config
        if self.update >= config.max_iters > 0:
            self._say(f"nothing to do: {self.update} of {config.max_iters} updates are done")
            return
        if self.processes.is_main:
            self._open_outputs()
        if self.update == 0:
            self._evaluate()
            if config.max_iters == 0:
                self._save()
        self.clock.start()
        while self.update < config.max_iters:
            self.update += 1
            lr = self._schedule()
            loss, grad_norm = self._train_once()
            if self._due(config.log_interval) or self.update == 1:
                self._log(loss, grad_norm, lr)

            evaluate = self._due(config.eval_interval)
            save = self._due(config.checkpoint_interval)
            if evaluate or save:
                self.clock.stop()
                improved = evaluate and self._evaluate()
                if save or improved:
                    self._save()
                self.clock.start()
        self._close_outputs()

    def _train_once(self) -> tuple[Tensor, Tensor]:
        """One update. Returns this process's mean loss and the norm of the whole gradient before clipping."""
        if self.config.exact:
            self._backward(self.update + 1)
            self._unscale_and_clip(self.reference_pass)
            record_reference_gradient(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(self.update)
        grad_norm = self._unscale_and_clip(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm

    def _backward(self, update: int) -> Tensor:
        """The gradient of the present weights on an update's batch, averaged over micro-batches and processes. Returns
        this process's mean loss."""
        config, device = self.config, self.processes.device
        if config.dropout > 0:
            torch.manual_seed(dropout_seed(config.seed, update, self.processes.rank))
        steps = self.batches.accumulation
        total = torch.zeros((), device=device)
        for step in range(steps):
            inputs, targets = (to_device(part, device) for part in self.batches.micro_batch(update, step))
            with self.processes.accumulate(self.parallel, last=step == steps - 1):
                with autocast(device, config.dtype):
                    _, loss = self.parallel(inputs, targets)
                loss = loss / steps
                self.scaler.scale(loss * config.gradient_multiplier).backward()
            total += loss.detach()
        self.processes.average_gradients(self.model)
        return total

    def _unscale_and_clip(self, optimizer: Optimizer) -> Tensor:
        """Takes the scaler's factor out of the gradients and clips them. Returns their norm before clipping."""
        self.scaler.unscale_(optimizer)
        if self.config.grad_clip > 0:
            return nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        return nn.utils.get_total_norm(p.grad for p in self.model.parameters() if p.grad is not None)

    def _schedule(self) -> float:
        """Sets the learning rate of this update and returns it."""
        config = self.config
        lr = learning_rate_at(self.update, config.learning_rate, config.min_lr, config.warmup_iters, config.decay_iters)
        set_learning_rate(self.optimizer, lr)
        return lr

    def _due(self, interval: int) -> bool:
        """Whether something with this interval is due after this update; everything is after the last."""
        return self.update == self.config.max_iters or (interval > 0 and self.update % interval == 0)

    def _log(self, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        """A training row. Reading the loss waits for the device, so that the time is that of finished work."""
        mean_loss = self.processes.mean(loss)
        if not self.processes.is_main:
            return
        seconds = self.clock.seconds()
        since_update, since_seconds = self._last_row
        self._last_row = (self.update, seconds)
        rate = (self.update - since_update) * self.tokens_per_update / max(seconds - since_seconds, 1e-9)
        row = {
            "train/loss": mean_loss,
            "lr": lr,
            "grad_norm": grad_norm.item(),
            "tokens_per_sec": rate,
            **{name: value.item() for name, value in optimizer_metrics(self.optimizer).items()},
        }
        peak = peak_flops(self.processes.device, self.config.dtype)
        if peak is not None:
            row["mfu"] = rate * self.model.flops_per_token() / (peak * self.processes.size)
        self._write(row)
        left = (self.config.max_iters - self.update) * self.tokens_per_update / rate
        self._say(
            f"update {self.update:>{len(str(self.config.max_iters))}}/{self.config.max_iters}  loss {mean_loss:.4f}  "
            f"lr {lr:.2e}  grad norm {row['grad_norm']:.2f}  {format_count(rate)} tokens/s  "
            f"{format_duration(left)} left"
        )

    def _evaluate(self) -> bool:
        """An evaluation row. Returns whether the loss is the best so far."""
        loss = validation_loss(self.model, self.validation, self.processes, self.config.dtype)
        improved = loss < self.best_val_loss
        if improved:
            self.best_val_loss, self.best_iter = loss, self.update
        if self.processes.is_main:
            self._write({"val/loss": loss})
            self._say(f"update {self.update}: validation loss {loss:.4f}{' (best so far)' if improved else ''}")
        return improved

    def _write(self, row: dict[str, Any]) -> None:
        """A row to metrics.jsonl and wandb."""
        place = {"iter": self.update, "tokens": self.update * self.tokens_per_update, "time": self.clock.seconds()}
        if self.metrics.append(place | row) and self.tracker is not None:
            self.tracker.log(place | row)

    def _save(self) -> None:
        optimizer_state = self.optimizer.state_dict()  # a sharded one gathers it from all processes
        if self.processes.is_main:
            path = self.checkpoints.save(
                {
                    "model": self.model.state_dict(),
                    "optimizer": optimizer_state,
                    "scaler": self.scaler.state_dict(),
                    "config": asdict(self.config),
                    "iter": self.update,
                    "best_val_loss": self.best_val_loss,
                    "best_iter": self.best_iter,
                    "time": self.clock.seconds(),
                }
            )
            self._say(f"update {self.update}: saved {path}")

    def _restore(self) -> tuple[int, float, int, float]:
        """Loads the newest checkpoint where there is one: updates done, best loss, its update, seconds of training."""
        if self.config.resume != "auto":
            return 0, float("inf"), 0, 0.0
        folder = Path(self.config.out_dir)
        saved = self.checkpoints.load_newest()
        done = saved["iter"] if saved else 0
        if self.processes.sum([float(done)]) != [float(done * self.processes.size)]:
            raise RunError(
                f"{folder.absolute()} holds other checkpoints on other hosts; all hosts must share the folder"
            )
        check_resume(saved["config"] if saved else config_of_run(folder), self.config, folder)
        if saved is None:
            return 0, float("inf"), 0, 0.0
        self.model.load_state_dict(saved["model"])
        load_optimizer_state(self.optimizer, saved["optimizer"])
        if saved["scaler"]:  # empty where the run was not in float16 until now
            self.scaler.load_state_dict(saved["scaler"])
        self._say("\n".join([f"going on after update {done}", *changed_settings(saved["config"], self.config)]))
        return done, saved["best_val_loss"], saved["best_iter"], saved["time"]

    def _open_outputs(self) -> None:
        config, folder = self.config, Path(self.config.out_dir)
        record = write_config(config, self.processes, self.model.num_parameters(), self.data.describe())
        print("\n".join(start_lines(config, self.processes, record, describe_groups(self.optimizer))), flush=True)
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        if config.wandb_log:
            self.tracker = Tracker(
                project=config.wandb_project,
                name=config.wandb_run_name or folder.absolute().name,
                x_axis=config.wandb_x_axis,
                folder=folder,
                settings=record,
            )

    def _close_outputs(self) -> None:
        if self.processes.is_main:
            self.metrics.close()
        if self.tracker is not None:
            self.tracker.finish()

    def _say(self, line: str) -> None:
        if self.processes.is_main:
            print(line, flush=True)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
