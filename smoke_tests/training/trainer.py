"""A model in training: its steps, its checkpoints, and the loop over all steps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch

from smoke_tests.operators.table import operator
from smoke_tests.training import (
    checkpoint,
    hugging_face,
    ms_amp,
    parallel,
    schedule,
    sharded_checkpoint,
    validation,
)
from smoke_tests.training.columns import ADAMW, columns_of, refuse
from smoke_tests.training.guard import Guard
from smoke_tests.training.llama import Llama, take_te_modules
from smoke_tests.training.logs import Journal, Log, printed
from smoke_tests.training.observers import observers, profiled
from smoke_tests.training.options import FREE, Options, Refused, flag_name, model_of
from smoke_tests.training.parallel import ALONE, Ranks, whole
from smoke_tests.training.precision import CUT, column_of, convert, inner, is_computed_otherwise, mantissas
from smoke_tests.training.text import Text

WRITER = ThreadPoolExecutor(1)  # of checkpoints, one at a time


class NotFinite(ArithmeticError):
    """A step whose loss or gradient is infinite or NaN: which step, and in which module that began."""


def clip_in_float32(parameters: Iterable[torch.nn.Parameter], most: float) -> torch.Tensor:
    """Clip gradients in bfloat16 in place, as torch's clip_grad_norm_ does; their norm, summed in float32."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]).norm()
    share = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch's
    for gradient in gradients:
        gradient.mul_(share)
    return norm


class Run:
    """A model in training at one step: its weights, its optimizer and its text."""

    def __init__(self, options: Options, ranks: Ranks = ALONE) -> None:
        """Make all as before the first step, for share(); Refused or TextError says what cannot be combined."""
        self.options, self.ranks = options, ranks
        self.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.on_gpu = self.device == "cuda"
        self.in_ms_amp = options.precision in ms_amp.PRECISIONS
        refuse(options, self.on_gpu)
        parallel.refuse(options, ranks)
        if options.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            if not self.on_gpu:
                torch.set_num_threads(1)
        self.data = model_of(options)
        shape = self.data.shape
        self.text = Text.read(options.data, options.tokenizer, shape.vocabulary, shape.length, options.seed)
        self.half = options.precision != "float32" and (
            self.on_gpu or options.precision == "bf16" or options.precision in CUT
        )
        self.columns = columns_of(options.ops, self.on_gpu, shape.head_size, self.half, options.document_masks)
        if ranks.way == "fsdp2":
            self.columns["adamw"] = "torch"
        random.seed(options.seed)
        torch.manual_seed(options.seed)
        llama = self._llama()
        self.model = llama if self.in_ms_amp else convert(llama, options.precision)
        if options.compile:
            for block in inner(self.model).blocks:
                block.forward = torch.compile(block.forward)
        self.clip_grad_norm: Callable[..., Any] = torch.nn.utils.clip_grad_norm_
        self.optimizer = self._optimizer()
        self.forward: Callable[..., Any] = self.model  # tokens, targets -> loss
        self.step = 0  # the number of steps done
        self.skipped = 0  # how many of them left the weights as they were
        self.losses: List[float] = []  # of the steps before, as the log has them
        self.lock: Optional[IO[str]] = None  # of its folder
        self.guard: Optional[Guard] = None
        self.guarded: Dict[str, Any] = {}  # the guard's state in the checkpoint from which the run goes on
        self.writing: Optional[Tuple[int, Future[Path]]] = None  # the step whose checkpoint a thread writes
        self._graph: Any = None

    def share(self) -> None:
        """Share the model among the ranks; every rank calls it."""
        if self.ranks.way:
            self.forward = self.ranks.shared(self.model, torch.bfloat16 if self.half else torch.float32)
            self.optimizer = self._optimizer()  # of the parameters as they are now

    @property
    def windows(self) -> int:
        """How many windows a step takes, on all ranks."""
        return self.options.batch_size * self.options.gradient_accumulation_steps * self.ranks.world

    def _llama(self) -> Llama:
        """The model with fresh weights in their dtype, before its linear layers are converted."""
        options = self.options
        with torch.device(self.device):
            llama = Llama(self.data, self.columns, torch.bfloat16 if self.half else torch.float32)
        if options.from_:
            hugging_face.load(Path(options.from_), llama, self.data)
        if options.weights == "bfloat16":
            for parameter in llama.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        if options.te_modules:
            take_te_modules(llama)
            self.columns["swiglu"] = "transformer-engine"
        llama.loss_chunks = options.loss_chunks
        llama.separator = self.text.separator if options.document_masks else None
        if options.recompute:
            llama.recompute = _recomputing(options.precision)
        return llama

    def _optimizer(self) -> torch.optim.Optimizer:
        """AdamW of the model's parameters; matrices decay, and vectors do not. MS-AMP replaces the model, too."""
        options = self.options
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.dim() == 1]
        settings: Dict[str, Any] = {"lr": options.learning_rate, "betas": (options.beta1, options.beta2)}
        settings.update(eps=options.eps, weight_decay=options.weight_decay)
        groups: List[Dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        if self.in_ms_amp:
            self.columns["adamw"], self.clip_grad_norm = options.precision, ms_amp.clip_grad_norm_
            self.model, optimizer = ms_amp.prepared(self.model, groups, options.precision, **settings)
            return optimizer
        if options.weights == "bfloat16":
            self.columns["adamw"], self.clip_grad_norm = ADAMW, clip_in_float32
            settings.update(master_weights=True, store_param_remainders=True)
        optimizer = operator("adamw", self.columns["adamw"])(groups, **settings)
        return optimizer

    # --- a step ---

    def update(self, step: int) -> Dict[str, float]:
        """Do one step: its loss (nats per token), the gradient's norm, the learning rate.

        NotFinite is raised before the weights change. With --skip-spikes a loss that jumps leaves them as they are, and
        the result has "skipped".
        """
        rate = schedule.rate_at(step, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        of_loss = self.ranks.mean(self.gradients(step))
        of_norm = whole(self.clip_grad_norm(self.model.parameters(), self.options.clip or math.inf))
        loss, norm = float(of_loss), float(of_norm)  # waits for the GPU, once
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(
                f"step {step}: the loss is {loss:.4g}, the gradient's norm {norm:.4g}; {self.culprit(step)}"
            )
        self.step = step + 1
        if self.options.skip_spikes and schedule.spikes([*self.losses[-32:], loss]):
            self.skipped += 1
            return {"loss": loss, "norm": norm, "lr": rate, "skipped": 1}
        self.optimizer.step()
        return {"loss": loss, "norm": norm, "lr": rate}

    def gradients(self, step: int, launched: bool = False) -> torch.Tensor:
        """Compute the gradients of a step, which replace the earlier gradients; the loss of this rank's windows, [].

        A step's windows are the same on any number of ranks: they come in order, a pass of every rank, then the next.

        launched: launch each kernel by itself, even if the options ask for graphs.
        """
        parts = self.options.gradient_accumulation_steps
        replayed = self.options.graphs and not launched and not is_computed_otherwise(self.model)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if self._graph is not None:
                    parameter.grad.zero_()  # the graph adds to this very memory
                else:
                    parameter.grad = None
        losses = []
        for part in range(parts):
            first = self.ranks.own(step * parts + part) * self.options.batch_size
            windows = self.text.windows(first, self.options.batch_size)
            with self.ranks.in_pass(part, parts, self.forward):
                losses.append(
                    self._replay(*windows) if replayed else self._micro(*(each.to(self.device) for each in windows))
                )
        return torch.stack(losses).sum()

    def _micro(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward of one pass; its share of the step's loss."""
        # A graph may not hold the copy of a weight that autocast made before it.
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half, cache_enabled=not self.options.graphs):
            loss = self.forward(tokens, targets) / self.options.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    def _replay(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._graph is None:
            held = tokens.to(self.device), targets.to(self.device)
            scales = {name: values.clone() for name, values in checkpoint.fp8_state_of(self.model).items()}
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # kernels are chosen and memory is allocated before the capture
                for _ in range(3):
                    self._micro(*held)
            torch.cuda.current_stream().wait_stream(stream)
            now = checkpoint.fp8_state_of(self.model)
            for name, values in scales.items():  # restore a checkpoint's scales, which these passes changed
                now[name].copy_(values)
            for parameter in self.model.parameters():
                parameter.grad.zero_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = self._micro(*held)
            self._graph = graph, held, loss
        graph, held, loss = self._graph
        for memory, windows in zip(held, (tokens, targets)):
            memory.copy_(windows.pin_memory(), non_blocking=True)  # the host cuts the next windows meanwhile
        graph.replay()
        return loss.clone()

    def culprit(self, step: int) -> str:
        """Compute a step again, and name the first module whose output or gradient is not finite."""
        reports: List[str] = []

        def watch(name: str) -> Callable[..., None]:
            def forward(_: torch.nn.Module, __: Any, output: Any) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                if not bool(torch.isfinite(tensor).all()):
                    reports.append(f"the first output that is not finite is that of {name}")
                elif tensor.requires_grad:
                    tensor.register_hook(lambda gradient: backward(gradient))

            def backward(gradient: torch.Tensor) -> None:
                if not bool(torch.isfinite(gradient).all()):
                    reports.append(f"the first gradient that is not finite is that of the output of {name}")

            return forward

        leaves = [(name, part) for name, part in inner(self.model).named_modules() if not list(part.children())]
        hooks = [part.register_forward_hook(watch(name)) for name, part in leaves]
        try:
            self.gradients(step, launched=True)
        finally:
            for hook in hooks:
                hook.remove()
        for rank, others in enumerate(self.ranks.gathered(reports[:1])):
            if others:
                return f"{others[0]} on rank {rank}" if self.ranks.world > 1 else str(others[0])
        for name, parameter in inner(self.model).named_parameters():
            if parameter.grad is not None and not bool(torch.isfinite(whole(ms_amp.plain(parameter.grad))).all()):
                return f"the first gradient that is not finite is that of {name}"
        return "computed again, everything is finite"

    def loudest(self) -> str:
        """The parameter with the largest share of the gradient's norm; every rank calls it."""
        named = ((name, parameter.grad) for name, parameter in inner(self.model).named_parameters())
        norms = {name: float(whole(ms_amp.plain(grad).norm())) ** 2 for name, grad in named if grad is not None}
        name = max(norms, key=lambda name: norms[name])
        return "{}, {:.0%} of the gradient's square".format(name, norms[name] / max(sum(norms.values()), 1e-30))

    # --- to and from a file ---

    def release(self) -> None:
        """Let another run have the folder."""
        if self.lock is not None:
            self.lock.close()

    def save(self) -> Path:
        """Write a checkpoint of the last step; with --async-checkpoint, let a thread write a copy, as `writing`.

        Every rank calls it; the parts of a sharded run are gathered nowhere, and any other file is rank 0's.
        """
        options = self.options
        content = {
            **checkpoint.state_of(self.model),
            "optimizer": ms_amp.packed(self.optimizer) if self.in_ms_amp else self.optimizer.state_dict(),
            "random": checkpoint.random_state(),
            "options": {**dataclasses.asdict(options), "data": list(options.data)},
            "text": self.text.identity(),
            "skipped": self.skipped,
            "windows": self.windows,
            "guard": self.guard.state_dict() if self.guard else {},
        }
        out, few = Path(options.out), (options.keep, options.keep_every)
        if self.ranks.way == "fsdp2":
            return sharded_checkpoint.save(out, self.step, content, self.ranks, *few)
        with self.ranks.together(checkpoint.CheckpointError):
            if self.ranks.first and options.async_checkpoint:
                job = WRITER.submit(checkpoint.save, out, self.step, checkpoint.on_host(content), *few)
                self.writing = self.step, job
            elif self.ranks.first:
                checkpoint.save(out, self.step, content, *few)
        return checkpoint.path_of(out, self.step)

    def load(self, path: Path) -> str:
        """Continue from a checkpoint; a note if the scales of FP8 start again. Every rank calls it."""
        shards = self.ranks.way == "fsdp2"
        with self.ranks.together(checkpoint.CheckpointError):
            content = sharded_checkpoint.rest(path, mmap=shards)
        self._refuse_other(path, content)
        template = sharded_checkpoint.template(self.model, self.optimizer) if shards else None
        content = sharded_checkpoint.placed(content, path, template)
        anew = checkpoint.restore(self.model, content)
        moments = content["optimizer"]
        if self.in_ms_amp:
            moments = ms_amp.unpacked(moments)
        elif self.options.weights == "float32":  # with bfloat16 weights, it is always the same AdamW
            updates = content["step"] - content.get("skipped", 0)
            moments = checkpoint.adamw_state(moments, self.optimizer, self.columns["adamw"], updates)
        self.optimizer.load_state_dict(moments)
        checkpoint.restore_random_state(content["random"])
        self.step, self.skipped = content["step"], content.get("skipped", 0)
        self.guarded = content.get("guard", {})
        return "its FP8 scales start anew" if anew else ""

    def _refuse_other(self, path: Path, content: Dict[str, Any]) -> None:
        """Refuse a checkpoint of a run that this one does not continue."""
        saved = content["options"]
        for field in dataclasses.fields(Options):
            now = getattr(self.options, field.name)
            before = saved.get(field.name, field.default)
            fixed = field.name == "precision" and {before, now} & set(ms_amp.PRECISIONS)  # MS-AMP has another optimizer
            if (fixed or field.name not in FREE) and before != now:
                raise Refused(f"--resume: {path} was made with {flag_name(field)} {before}, and this run has {now}")
        if content["text"] != self.text.identity():
            raise Refused(f"--resume: {path} was made with another text")
        windows = content.get("windows", saved["batch_size"] * saved["gradient_accumulation_steps"])
        if windows != self.windows:
            raise Refused(
                f"--resume: a step of {path} took {windows} windows, and now takes {self.windows}, which is "
                "--batch-size x --gradient-accumulation-steps x processes: change one of them"
            )
        if content["step"] > self.options.steps:
            raise Refused(f"--steps {self.options.steps}: {path} is already beyond that step: name a higher number")
        self._same_rates(path, content)

    def _same_rates(self, path: Path, content: Dict[str, Any]) -> None:
        """Refuse another number of steps if the steps that are done would have had other rates by it."""
        saved = {name: value for name, value in content["options"].items() if hasattr(self.options, name)}
        before, now = dataclasses.replace(self.options, **saved), self.options
        if any(schedule.rate_at(step, before) != schedule.rate_at(step, now) for step in range(content["step"])):
            end = before.decay_steps or before.steps
            raise Refused(
                f"--resume: the schedule of {path} ends at step {end}, and these flags would stretch it from the first "
                f"step on: add --decay-steps {end} --decay-ratio {before.decay_ratio:g}"
            )


def _recomputing(precision: str) -> Callable[..., torch.Tensor]:
    """The function that runs a block so that its activations are recomputed in the backward pass."""
    if column_of(precision).startswith("transformer-engine"):  # torch's function would recompute them outside FP8
        from transformer_engine.pytorch import checkpoint as te_checkpoint

        return lambda block, *given: te_checkpoint(block, *given, use_reentrant=False)
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    return lambda block, *given: torch_checkpoint(block, *given, use_reentrant=False)


# --- all steps ---


class Signals(NamedTuple):
    """The signals that a run has received: those that end it, and those that ask for a checkpoint."""

    stop: List[int]
    save: List[int]


@contextlib.contextmanager
def noted_signals() -> Iterator[Signals]:
    """A context in which SIGINT, SIGTERM and SIGUSR1 do not end the process, but are noted."""
    noted = Signals([], [])
    lists = {signal.SIGINT: noted.stop, signal.SIGTERM: noted.stop, signal.SIGUSR1: noted.save}
    before = {number: signal.getsignal(number) for number in lists}
    for number in before:
        signal.signal(number, lambda received, _: lists[signal.Signals(received)].append(received))
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(run: Run, say: Callable[[str], None] = printed, until: Optional[float] = None) -> int:
    """Train to the last step, to a signal, or to a moment (of time.monotonic()), and release the run's folder.

    Returns the exit code: 0 at the last step; 1 if a step was not finite or the last checkpoint or a log could not be
    written; 128 + number after a signal, SIGPIPE if nobody reads the output; 75 (try again) if the moment came first.
    """
    options = run.options
    try:
        with noted_signals() as signals, contextlib.ExitStack() as stack:
            watching = observers(options, run.step, stack) if run.ranks.first else []
            journal = Journal(run, say, signals.stop, watching)
            if not steps(run, journal, signals, until):
                return 1
            saved = written(run, journal.events, journal.tell) and settled(run, journal.events, journal.tell)
        saved = journal.finish() and saved
        if run.step == options.steps or not saved:
            return 0 if saved else 1
        journal.tell(f"stopped after step {run.step} of {options.steps}; --resume goes on")
        return 128 + signals.stop[0] if signals.stop else 75
    finally:
        run.release()


def steps(run: Run, journal: Journal, signals: Signals, until: Optional[float]) -> bool:
    """Do the steps of train(); whether each was finite, and no thread failed to write a checkpoint.

    All ranks stop and save after the same step, whichever of them got the signal.
    """
    options, ranks, events, tell, late = run.options, run.ranks, journal.events, journal.tell, False
    step_of = guarded(run, events, tell) if options.guard else run.update
    while run.step < options.steps and not ranks.any(bool(signals.stop) or late, run.device):
        step, before = run.step, time.perf_counter()
        try:
            with profiled(options, step) if ranks.first else contextlib.nullcontext():
                row = step_of(step)
        except ArithmeticError as error:
            events.write(event="not finite", step=step, text=str(error))
            settled(run, events, tell)
            last = checkpoint.newest(Path(options.out))
            tell(f"fusebox: {error}; " + (f"{last} is the last checkpoint" if last else "there is no checkpoint yet"))
            return False
        seconds = time.perf_counter() - before
        validation.noted(run, row, events.write, tell)
        journal.note(step, seconds, row)
        late = until is not None and time.monotonic() > until
        due = bool(options.checkpoint_every) and run.step % options.checkpoint_every == 0
        sound = settled(run, events, tell, wait=False)
        asked = ranks.any(bool(signals.save), run.device)
        if sound and (due or asked) and run.step < options.steps:
            signals.save.clear()
            sound = written(run, events, tell) or not options.async_checkpoint
        if not sound:
            return False
    return True


def guarded(run: Run, events: Log, say: Callable[[str], None]) -> Callable[[int], Dict[str, float]]:
    """The function that does a step of a run under the guard."""
    options = run.options
    guard = run.guard = Guard(
        run.update,
        run.model,
        run.optimizer,
        every=options.guard,
        steps=options.guard_steps,
        seed=options.seed,
        begun=run.step,
        mantissas=mantissas(options.precision),
        loss_of=lambda row: float(row["loss"]),
        agreed=run.ranks.agreed,
        memory=options.guard_memory,
    )
    guard.load_state_dict(run.guarded)

    def update(step: int) -> Dict[str, float]:
        row: Dict[str, float] = guard(step)
        run.step = step + 1  # a repeated step that is not finite leaves it behind
        for event in guard.news():
            events.write(event="guard", step=step, seconds=guard.seconds, **event)
            if event["kind"] != "good":
                say("fusebox: step {}: {}".format(step, event["text"]))
        return row

    return update


def written(run: Run, events: Log, say: Callable[[str], None]) -> bool:
    """Write a checkpoint, or let a thread begin to; whether that succeeded. Training continues without it."""
    if not settled(run, events, say):
        return False
    verified = {"verified": run.guard.verified} if run.guard else {}
    events.write(event="checkpoint begins", step=run.step, time=time.time(), **verified)
    try:
        run.save()
    except checkpoint.CheckpointError as error:
        events.write(event="checkpoint failed", step=run.step, text=str(error))
        say(f"fusebox: {error}")
        return False
    if not run.options.async_checkpoint:
        events.write(event="checkpoint ends", step=run.step, time=time.time())
    return True


def settled(run: Run, events: Log, say: Callable[[str], None], wait: bool = True) -> bool:
    """Whether the checkpoint that a thread writes, if one does, is whole; or, if not to wait, may still become so.

    Every rank calls it, and learns what rank 0, whose thread writes, knows.
    """
    if not run.options.async_checkpoint:
        return True
    failed = False
    if run.writing is not None and (wait or run.writing[1].done()):
        (step, writing), run.writing = run.writing, None
        try:
            writing.result()
            events.write(event="checkpoint ends", step=step, time=time.time())
        except checkpoint.CheckpointError as error:
            failed = True
            events.write(event="checkpoint failed", step=step, text=str(error))
            say(f"fusebox: {error}")
    return not run.ranks.any(failed, run.device)
