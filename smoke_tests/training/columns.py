"""Which implementation of each operator a run uses, and which options exclude each other."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from typing import Dict, NamedTuple, Tuple

import torch

from smoke_tests.claims import holds
from smoke_tests.operators import table
from smoke_tests.operators.table import OPERATORS
from smoke_tests.training import ms_amp
from smoke_tests.training.llama import MASKED, NAIVE
from smoke_tests.training.options import Options, Refused
from smoke_tests.training.precision import CUT, column_of

# The implementations of each operator that "fused" means, the fastest on a GPU first (bench/operators.py), except that
# Transformer Engine's attention, which makes its module at each call, comes later. A run takes the first that the
# target has; without a GPU that is torch's. None waits for the host, because a CUDA graph could not hold that.
FUSED = {
    "attention": ("torch.cudnn", "flash-attn", "transformer-engine", "torch.flash", "torch"),
    "rms_norm": ("flash-attn", "liger-kernel", "apex", "torch", "transformer-engine"),
    "rope": ("flash-attn", "liger-kernel", "torch"),
    "swiglu": ("flash-attn", "liger-kernel", "torch"),
    "cross_entropy": ("flash-attn", "xentropy-cuda-lib", "torch"),
    "adamw": ("apex", "torch"),
}
# The AdamW that keeps the 16 bits by which bfloat16 weights fall short of float32.
ADAMW = "transformer-engine"


def _installed(name: str, column: str) -> bool:
    """Whether an implementation of an operator is installed, in a version that has it."""
    try:
        version = metadata.version(column.partition(".")[0])
    except metadata.PackageNotFoundError:
        return False
    entry = OPERATORS[name][column]
    return holds(version, entry.since, entry.until)


def _dtypes(name: str, column: str, cuda: bool) -> Tuple[str, ...]:
    """The dtypes that an implementation is proved with on this device; none if it is not installed."""
    entry = OPERATORS[name][column]
    return (entry.cuda if cuda else entry.cpu) if _installed(name, column) else ()


def repeats(name: str, column: str) -> bool:
    """Whether an installed implementation gives the same bits every time once torch uses deterministic algorithms.

    flash-attn tunes its norm by time, so that another process may add in another order.
    """
    return table.repeats(column) if name == "attention" else (name, column) != ("rms_norm", "flash-attn")


class Needs(NamedTuple):
    """What a run needs of its implementations: for which device, head size and inputs, with masks, and repeatable."""

    cuda: bool
    head_size: int
    half: bool
    masked: bool
    exact: bool

    def dtype(self, name: str) -> str:
        """The dtype of an operator's input: AdamW's is always float32."""
        return "bfloat16" if self.half and name != "adamw" else "float32"

    def met_by(self, name: str, column: str) -> bool:
        """Whether an implementation can be chosen for an operator."""
        # A target may contain flash-attn's kernels for two head sizes only.
        if column == "flash-attn" and name == "attention" and self.head_size not in (64, 128):
            return False
        if column == "torch.cudnn" and self.head_size > 128:
            return False
        if self.masked and name == "attention" and column not in MASKED:
            return False
        # Its weight is a parameter; the gradient of a parameter's cast to bfloat16 would be lost.
        if (name, column) == ("rms_norm", "transformer-engine") and self.half:
            return False
        return self.dtype(name) in _dtypes(name, column, self.cuda) and (repeats(name, column) or not self.exact)

    def refuse(self, name: str, column: str) -> None:
        """Refused if an implementation that --ops names for an operator cannot be taken."""
        if name not in FUSED:
            raise Refused(f"--ops: {name!r} is not an operator; use naive, fused, or pairs for {', '.join(FUSED)}")
        known = [*OPERATORS[name], *(["naive"] if name in NAIVE else [])]
        if column not in known:
            raise Refused(f"--ops: {name} has no implementation {column!r}; choose one of {', '.join(known)}")
        if column != "naive":
            self._refuse_unproved(name, column)
        if self.masked and name == "attention" and column not in MASKED:
            masked = " or attention=".join(MASKED)
            raise Refused(f"--ops: {name}={column} takes no --document-masks: use attention={masked}")

    def _refuse_unproved(self, name: str, column: str) -> None:
        """Refused if an implementation is not installed, not proved with this input, or not repeatable as asked."""
        pair, dtype = f"{name}={column}", self.dtype(name)
        if not _installed(name, column):
            raise Refused(f"--ops: {pair} is not installed here in a version that has it")
        if dtype not in (proved := _dtypes(name, column, self.cuda)):
            others = f", but in {', '.join(proved)}" if proved else " or any other dtype"
            raise Refused(f"--ops: {pair} is not proved on a {'GPU' if self.cuda else 'CPU'} in {dtype}{others}")
        if self.exact and not repeats(name, column):
            raise Refused(f"--ops: {pair} and --deterministic cannot be combined: it may differ from run to run")


def columns_of(ops: str, cuda: bool, head_size: int, half: bool, masked: bool = False) -> Dict[str, str]:
    """Operator -> implementation for --ops, each proved in the dtype of its input: bfloat16 if `half`, else float32.

    AdamW always gets float32. masked: attention keeps to documents. Refused names the first pair of --ops that cannot
    be followed.
    """
    if ops == "naive":
        return {name: "naive" if name in NAIVE else "torch" for name in FUSED}
    needs = Needs(cuda, head_size, half, masked, torch.are_deterministic_algorithms_enabled())
    chosen = {
        name: next((column for column in columns if needs.met_by(name, column)), "naive")
        for name, columns in FUSED.items()
    }
    for pair in ops.split(",") if ops != "fused" else ():
        name, _, column = pair.partition("=")
        needs.refuse(name, column)
        chosen[name] = column
    if chosen["adamw"] == "naive":
        raise Refused("--ops: no fused AdamW is installed for this device")
    return chosen


def refuse(options: Options, on_gpu: bool) -> None:
    """Refuse a run that is not possible, for the first reason that applies."""
    if on_gpu and not torch.cuda.is_available():
        raise Refused("--device cuda: torch finds no GPU here")
    if options.precision in ms_amp.PRECISIONS:
        refuse_with_ms_amp(options, on_gpu)
    if options.weights == "bfloat16":
        refuse_bfloat16_weights(options, on_gpu)
    if options.te_modules:
        refuse_te_modules(options, on_gpu)
    if "rms_norm=transformer-engine" in options.ops.split(","):
        refuse_norm(options)
    if column_of(options.precision).startswith("transformer-engine") and not on_gpu:
        raise Refused(f"--precision {options.precision} needs a GPU; torchao.tensorwise is emulated on a CPU")
    if options.guard and options.skip_spikes:
        raise Refused("--guard and --skip-spikes cannot be combined: steps that the guard repeats would be judged anew")
    if options.graphs and (not on_gpu or options.precision in CUT):
        raise Refused("--graphs needs a GPU, and a precision that is not emulated")
    if options.graphs and options.document_masks:
        raise Refused("--document-masks and --graphs cannot be combined: a graph replays one number of documents")
    if options.graphs and (options.recompute or options.loss_chunks > 1):
        flag = "--recompute" if options.recompute else "--loss-chunks"
        raise Refused(f"{flag} and --graphs cannot be combined: a graph does not hold what is computed again")


def refuse_norm(options: Options) -> None:
    """Refuse Transformer Engine's norm where its weight, which is a parameter, would be a cast of the model's."""
    if options.precision != "float32" and options.weights == "float32":
        raise Refused(
            f"--ops {options.ops}: rms_norm=transformer-engine does not train weights in float32 with --precision "
            f"{options.precision}; use --weights bfloat16 or another implementation"
        )


def refuse_with_ms_amp(options: Options, on_gpu: bool) -> None:
    """Refuse a run that MS-AMP does not support."""
    asked = f"--precision {options.precision}"
    for name, why in ms_amp.WITHOUT.items():
        if getattr(options, name):
            raise Refused(f"--{name} and {asked} cannot be combined: {why}")
    if options.gradient_accumulation_steps > 1:
        raise Refused(f"--gradient-accumulation-steps: {asked} would round the sum of the gradients again at each pass")
    if "adamw=" in options.ops:
        raise Refused(f"--ops: {asked} brings its own AdamW: remove adamw= from --ops")
    if importlib.util.find_spec("msamp") is None:
        raise Refused(f"{asked} needs the package ms-amp, which is not installed here")
    if not on_gpu or torch.cuda.get_device_capability() < (8, 9):  # on an older GPU MS-AMP computes without FP8
        raise Refused(f"{asked} needs a GPU with FP8")


def refuse_bfloat16_weights(options: Options, on_gpu: bool) -> None:
    """Refuse options that cannot be combined with bfloat16 weights."""
    asked, either = "--weights bfloat16", "remove one of them"
    if options.precision in (*ms_amp.PRECISIONS, "float32"):
        raise Refused(f"{asked} and --precision {options.precision}, which sets the dtype of weights itself: {either}")
    if options.guard:
        raise Refused(f"--guard and {asked}, whose last bit is larger than the change of a few steps: {either}")
    named = dict(pair.partition("=")[::2] for pair in options.ops.split(","))
    if named.get("adamw", ADAMW) != ADAMW or options.ops == "naive":
        raise Refused(f"--ops {options.ops} and {asked}, whose remaining bits only {ADAMW}'s AdamW keeps: {either}")
    if not on_gpu or not _dtypes("adamw", ADAMW, on_gpu):
        raise Refused(f"{asked} needs a GPU and {ADAMW} 2, whose AdamW keeps the other bits: use float32")


def refuse_te_modules(options: Options, on_gpu: bool) -> None:
    """Refuse options that cannot be combined with Transformer Engine's modules."""
    asked, either = "--te-modules", "remove one of them"
    if options.precision != "bf16" and not column_of(options.precision).startswith("transformer-engine"):
        raise Refused(f"{asked} and --precision {options.precision}, which has other layers: {either}")
    if options.guard:
        raise Refused(f"--guard and {asked}, which the guard cannot compute in high precision: {either}")
    if options.ops == "naive" or "swiglu=" in options.ops:
        raise Refused(f"--ops {options.ops} and {asked}, which bring their own SwiGLU: {either}")
    # Before 2.4 LayerNormMLP keeps the scales of its gradients in another order (checkpoint.products_of).
    if not on_gpu or not _dtypes("swiglu", ADAMW, on_gpu) or not holds(metadata.version(ADAMW), "2.4", ""):
        raise Refused(f"{asked} needs a GPU and transformer-engine 2.4")
