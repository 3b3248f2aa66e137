"""Pretrains GPT-2: `python train.py CONFIG.py [--key=value ...]`, or the same under torchrun on several processes.

The whole of a run can be read here from top to bottom: `main` reads the config, `Training` builds the parts, and
`Training.run` is the loop. Batches are a pure function of the seed and the update, so that runs with different
optimizers see the same ones.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training begins, Ctrl-C has nothing to save

from training.environment import set_defaults

set_defaults()

import torch
from torch import Tensor

from configs import ConfigError, TrainConfig, describe, load_config
from data.tokens import Dataset
from model import GPT, GPTConfig
from optim import (
    build_optimizer,
    describe_groups,
    learning_rate_at,
    load_optimizer_state,
    optimizer_metrics,
    set_learning_rate,
    step_if,
)
from training.ahead import open_batches
from training.checkpoint import CheckpointFolder
from training.console import prepare, say
from training.device import keep_freed_memory, peak_flops, resolve, set_determinism
from training.errors import report
from training.evaluation import validation_loss
from training.folder import FolderLock, check_folder
from training.health import BadUpdates
from training.hosts import open_data
from training.metrics import TrainingClock, abandon_rows
from training.outcomes import Outcomes, defers
from training.passes import Passes
from training.processes import Processes, leave
from training.ratios import update_ratios
from training.record import announce
from training.reporter import Reporter
from training.resume import Resume, load_for_resume
from training.status import Status
from training.stopping import STOPPED, UNSAVED, StopRequest, agreed_reason
from training.variance import GradientNoise
from training.weights import load_initial_weights

USAGE = "usage: python train.py CONFIG.py [--key=value ...] (--help lists the keys)"


def main(arguments: list[str]) -> int:
    """Trains as the command line says.

    Returns:
        the exit status: 0; 75 when the run was asked to stop and has to be started again to go on; 74 when it could not
        write all of its files; 2 for an error that the user can mend, 1 for others.
    """
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{USAGE}\n\nkeys and defaults:\n{describe()}")
        return 0
    prepare()
    processes = training = None
    try:
        if not arguments or arguments[0].startswith("--"):
            raise ConfigError(f"no config; {USAGE}")
        config = load_config(arguments[0], arguments[1:])
        processes = Processes.from_environment(config.device)
        config.accumulation_steps(processes.size)
        processes.connect()
        with closing(open_data(config, processes)) as data:
            check_folder(config)
            with FolderLock(Path(config.out_dir), processes):
                check_folder(config)  # again: another run may have been there until now
                with Status(Path(config.out_dir), config.max_iters, writes=processes.is_main) as status:
                    training = Training(resolve(config, processes.device), processes, data, status)
                    code = training.run()
    except (Exception, KeyboardInterrupt) as error:
        return report(error, processes, asked_to_stop=training is not None and training.stop.reason is not None)
    processes.close()
    return code


class Training:
    """The parts of a run, and its loop."""

    def __init__(self, config: TrainConfig, processes: Processes, data: Dataset, status: Status) -> None:
        self.config, self.processes, self.data, self.status = config, processes, data, status
        set_determinism(config.deterministic)
        if processes.device.type == "cpu":
            keep_freed_memory()
        if processes.device.type == "cuda" and config.dtype != "float32":
            torch.set_float32_matmul_precision("high")
        torch.manual_seed(config.seed)  # the same initial weights on every process

        sizes = {field.name: getattr(config, field.name) for field in fields(GPTConfig)}
        self.model = GPT(GPTConfig(**sizes), bool(config.chunked_loss)).to(processes.device)
        if config.compile:
            self.model.compile()
        parallel = processes.wrap(self.model)
        try:
            self.optimizer = build_optimizer(self.model, config)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=config.dtype == "float16")

        self.outcomes = Outcomes(processes, self._note, defers(processes.device, config.dtype))

        folder = Path(config.out_dir)
        self.checkpoints = CheckpointFolder(folder / "checkpoints", config.keep_checkpoints, speaks=processes.is_main)
        self.stop = StopRequest(config.stop_seconds, self._end_at_deadline, announce=processes.is_main)
        self.stopping: str | None = None  # why to stop, once all processes know
        self.code = STOPPED  # the exit status, until the end is known
        self.reporter: Reporter | None = None  # on the main process
        self.ratios: dict[str, float] = {}  # of the last update, if it was measured
        self._restore()
        self.batches, self.validation = open_batches(config, data, processes, self.update)
        self.passes = Passes(config, processes, parallel, self.optimizer, self.scaler, self.batches)

    def _restore(self) -> None:
        """Sets the run's position: that of its newest checkpoint, or the start."""
        config, self.resume = self.config, Resume(None, [], other_course=False)
        self.fingerprint = self.data.fingerprint()
        if config.resume == "auto":
            self.resume = load_for_resume(self.checkpoints, config, self.fingerprint, self.processes)
        saved = self.resume.saved
        start: dict[str, Any] = {"iter": 0, "evaluated": -1, "best_val_loss": math.inf, "best_iter": 0, "time": 0.0}
        position = saved or start | {"skipped": (0, 0)}
        self.update, self.evaluated = position["iter"], position["evaluated"]
        self.best_val_loss, self.best_iter = position["best_val_loss"], position["best_iter"]
        self.clock = TrainingClock(position["time"], self.processes.device)
        total, in_row = position["skipped"]
        self.bad_updates = BadUpdates(config.max_bad_updates, total, in_row, speaks=self.processes.is_main)
        self.status.update = self.update
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            load_optimizer_state(self.optimizer, saved["optimizer"])
            if saved["scaler"]:  # empty where the run was not in float16 until now
                self.scaler.load_state_dict(saved["scaler"])
            self.resume = replace(self.resume, saved=None)  # as large as the model and the optimizer's state
        elif config.init_from is not None:
            load_initial_weights(self.model, config.init_from, self.processes)

    def run(self) -> int:
        """Trains until `max_iters` updates are done, or until asked to stop. Returns the exit status."""
        if self.update >= self.config.max_iters and self.evaluated == self.update:
            self._say(f"nothing to do: {self.update} of {self.config.max_iters} updates are done")
            self.status.confirm_finished(self.update)
            return 0
        with self.stop, closing(self.checkpoints), self.batches:
            self._open_outputs()
            self._train()
            return self._end()

    def _train(self) -> None:
        config = self.config
        if self.evaluated < self.update and (self.update == 0 or self._due(config.eval_interval)):
            # The start, or where a run was stopped before this evaluation.
            self._evaluate()
            if self.update > 0 or config.max_iters == 0 or self.stopping:
                self._save()
        self.clock.start()
        while self.update < config.max_iters and not self.stopping:
            self.update += 1
            lr = self._schedule()
            log = self._due(config.log_interval) or self.update == 1
            evaluate, save = self._due(config.eval_interval), self._due(config.checkpoint_interval)
            self._train_once(read=log or evaluate or save)
            if log and self.reporter is not None:
                loss, grad_norm = self.outcomes.last
                self.reporter.training(self.update, loss, lr, grad_norm, self._figures())

            evaluate = evaluate and not self.stopping
            # Weights that only lead to bad updates must not take the place of good ones.
            save = save and (self.bad_updates.in_row == 0 or self.update == config.max_iters)
            if evaluate or save or self.stopping:
                self.clock.stop()
                improved = evaluate and self._evaluate()
                if save or improved or self.stopping:
                    self._save()
                self.clock.start()
        self.clock.stop()

    def _train_once(self, read: bool) -> None:
        """One update, unless loss or gradient are not finite. All processes learn here whether one was asked to stop.

        Args:
            read: whether its loss is wanted now; otherwise the host may run ahead of the device.
        """
        config, noise = self.config, self._measure_noise()
        loss, grad_norm = self.passes.gradient(self.update)
        self.stopping = agreed_reason(self.processes.sum(self.stop.votes()))
        allowed = self.outcomes.add(self.update, loss, grad_norm, read or self.stopping is not None)
        self.ratios = {}
        with noise.watch(self.optimizer, grad_norm, config.grad_clip, allowed) if noise else nullcontext():
            if isinstance(allowed, Tensor):
                step_if(self.optimizer, allowed)
            elif allowed:
                measure = self.reporter is not None and self._due(config.eval_interval) and not self.stopping
                with update_ratios(self.optimizer, measure) as self.ratios:
                    self.scaler.step(self.optimizer)
        if noise:
            figures = noise.figures(self.processes, config.total_batch_size)
            if self.reporter is not None:
                self.reporter.variance(self.update, figures)
        self.scaler.update()
        self.passes.clear()

    def _measure_noise(self) -> GradientNoise | None:
        """Where it is due, the noise of the gradient at the present weights, unless asked to stop meanwhile."""
        if not self.config.log_variance or self.update % self.config.log_variance:
            return None
        noise = GradientNoise(self.model.parameters(), self.clock)
        with noise.timed():
            for draw in range(1, self.config.variance_batches + 1):
                if self.processes.any(self.stop.reason is not None):
                    return None
                self.passes.draw(self.update, draw)
                noise.add(self.scaler.get_scale())
                self.passes.clear()
        return noise

    def _note(self, update: int, loss: float, grad_norm: float) -> bool:
        """Takes note of the outcome of each update, in order. Returns whether it may be made."""
        if self.reporter is not None:
            self.reporter.count_clipped(grad_norm)
        excused = self.scaler.is_enabled() and math.isfinite(loss) and self.scaler.get_scale() > 1
        return self.bad_updates.note(update, loss, grad_norm, excused)

    def _schedule(self) -> float:
        """Sets the learning rate of this update and returns it."""
        config = self.config
        peak, minimum, warmup = config.learning_rate, config.min_lr, config.warmup_iters
        lr = learning_rate_at(self.update, peak, minimum, warmup, config.decay_iters, config.first_lr_zero)
        set_learning_rate(self.optimizer, lr)
        return lr

    def _due(self, interval: int) -> bool:
        """Whether something with this interval is due after this update; everything is after the last."""
        return self.update >= self.config.max_iters or (interval > 0 and self.update % interval == 0)

    def _figures(self) -> dict[str, float]:
        """What else a training row has."""
        figures = {name: value.item() for name, value in optimizer_metrics(self.optimizer).items()}
        return figures | ({"skipped_updates": self.bad_updates.total} if self.bad_updates.total else {})

    def _evaluate(self) -> bool:
        """Evaluates, unless asked to stop meanwhile. Returns whether the loss is the best so far."""
        start = time.perf_counter()
        loss = validation_loss(
            self.model, self.validation, self.processes, self.config.dtype, lambda: self.stop.reason is not None
        )
        if loss is None:
            self.stopping = agreed_reason(self.processes.sum(self.stop.votes()))
            return False
        self.evaluated = self.update
        improved = loss < self.best_val_loss
        if improved:
            self.best_val_loss, self.best_iter = loss, self.update
        if self.reporter is not None:
            self.reporter.evaluation(self.update, loss, improved, time.perf_counter() - start, self.ratios)
        return improved

    def _save(self) -> None:
        """A checkpoint of the present state, written while training goes on."""
        optimizer_state = self.optimizer.state_dict()  # a sharded one gathers it from all processes
        if self.processes.is_main:
            self.checkpoints.save(
                {
                    "model": self.model.state_dict(),
                    "optimizer": optimizer_state,
                    "scaler": self.scaler.state_dict(),
                    "config": asdict(self.config),
                    "data": self.fingerprint,
                    "iter": self.update,
                    "evaluated": self.evaluated,
                    "best_val_loss": self.best_val_loss,
                    "best_iter": self.best_iter,
                    "time": self.clock.seconds(),
                    "skipped": (self.bad_updates.total, self.bad_updates.in_row),
                }
            )
        self.status.update = self.update

    def _open_outputs(self) -> None:
        config, processes, model = self.config, self.processes, self.model
        if not processes.is_main:
            return
        self.checkpoints.delete_leftovers()
        facts: dict[str, Any] = {"parameters": model.num_parameters(), "data": self.data.describe()}
        record = announce(
            config, processes, self.update, self.resume.changed, groups=describe_groups(self.optimizer), **facts
        )
        self.status.write("running", self.update)
        if self.resume.other_course:
            abandon_rows(Path(config.out_dir) / "metrics.jsonl", self.update, self.evaluated)
        peak = peak_flops(processes.device, config.dtype)
        peak = peak * processes.size if peak is not None else None
        self.reporter = Reporter(config, record, self.status, self.update, self.clock, model.flops_per_token(), peak)

    def _end(self) -> int:
        """Waits for the last checkpoint, says how the run ended, and returns the exit status, the same on all."""
        self.checkpoints.wait()
        finished = self.update >= self.config.max_iters and not self.stopping
        complete = True
        if self.reporter is not None:
            complete = self.reporter.end(self.update, finished, self.stopping, self.checkpoints.failures)
        complete = not self.processes.any(not complete)
        self.code = UNSAVED if not complete else 0 if finished else STOPPED
        if self.reporter is not None:
            self.reporter.finish_tracking(self.code)
        return self.code

    def _end_at_deadline(self, reason: str) -> int:
        """From another thread, when a request to stop could not be met in time. Returns the exit status."""
        if not self.processes.is_main or self.status.ended:
            return self.code
        # torchrun sends SIGTERM also when another process has failed.
        failed = reason == "SIGTERM" and self.processes.size > 1 and not self.stopping
        self.status.give_up(reason, self.config.stop_seconds, failed)
        return STOPPED

    def _say(self, line: str) -> None:
        if self.processes.is_main:
            say(line)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
