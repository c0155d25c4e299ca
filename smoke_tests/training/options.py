"""The options of a training run: one field per command line flag, and the parser that fills them in."""

from __future__ import annotations

import dataclasses
import operator as operators
from pathlib import Path
from typing import Any, Callable, Dict, Sequence, Tuple

from smoke_tests.training import model_config, ms_amp, shards
from smoke_tests.training.command import Parser
from smoke_tests.training.models import MODELS, Model, parameters_of
from smoke_tests.training.precision import PRECISIONS, column_of


class Refused(ValueError):
    """A run is not possible; the message is one sentence that says why."""


def flag(default: Any, text: str, **named: Any) -> Any:
    """A field that becomes a command line flag with this help; least, most, above and below bound its value."""
    return dataclasses.field(default=default, metadata={"help": text, **named})


@dataclasses.dataclass
class Options:
    """The options of a run; each field is a flag."""

    model: str = flag("tiny", "name of the model", choices=list(MODELS))
    config: str = flag("", "config.json of a Hugging Face Llama or Mistral, in place of --model")
    from_: str = flag("", "folder of a Hugging Face Llama or Mistral, whose shape and weights a run begins with")
    precision: str = flag(
        "bf16",
        "precision of the linear layers; fp8 means transformer-engine.delayed",
        choices=(*PRECISIONS, *ms_amp.PRECISIONS),
    )
    weights: str = flag(
        "float32",
        "dtype of weights and gradients; with bfloat16, AdamW keeps the remaining 16 bits of float32",
        choices=("float32", "bfloat16"),
    )
    ops: str = flag("fused", "naive, fused, or pairs such as attention=flash-attn,rope=torch (the rest stays fused)")
    te_modules: bool = flag(False, "compute the norms, gate and products of a block in Transformer Engine's modules")
    batch_size: int = flag(8, "windows per forward pass", least=1)
    gradient_accumulation_steps: int = flag(1, "forward passes per step", least=1)
    length: int = flag(0, "tokens per window; 0: as the model has", least=0)
    layers: int = flag(0, "number of layers, to try a part of a model; 0: as the model has", least=0)
    steps: int = flag(200, "steps of the whole run", least=1)
    seed: int = flag(0, "seed of the weights and of the order of windows", least=0)
    data: Tuple[str, ...] = flag(
        (), "a folder of prepare_data, or text files; by default the sources of the standard library"
    )
    tokenizer: str = flag("", "folder of a Hugging Face tokenizer; by default tokens are bytes")
    document_masks: bool = flag(False, "let a token attend to its own document alone")
    learning_rate: float = flag(6e-4, "highest learning rate", above=0.0)
    schedule: str = flag(
        "cosine",
        "after the warm-up: cosine, wsd (constant, then falls in a line) or constant",
        choices=("cosine", "wsd", "constant"),
    )
    warmup: int = flag(20, "steps until the highest learning rate", least=0)
    min_lr_factor: float = flag(0.1, "lowest learning rate, as a share of the highest", least=0.0, most=1.0)
    decay_steps: int = flag(0, "step at which the schedule reaches the lowest rate; 0: the last, --steps", least=0)
    decay_ratio: float = flag(0.1, "share of the schedule over which wsd falls", above=0.0, most=1.0)
    weight_decay: float = flag(0.1, "weight decay of matrices", least=0.0)
    beta1: float = flag(0.9, "first beta of AdamW", least=0.0, below=1.0)
    beta2: float = flag(0.95, "second beta of AdamW", least=0.0, below=1.0)
    eps: float = flag(1e-8, "epsilon of AdamW", above=0.0)
    clip: float = flag(1.0, "largest norm of the gradient; 0: none", least=0.0)
    recompute: bool = flag(False, "recompute the activations of each block in the backward pass")
    loss_chunks: int = flag(1, "compute head and loss in so many parts, whose logits are not kept", least=1)
    compile: bool = flag(False, "compile each block with torch.compile")
    graphs: bool = flag(False, "replay forward and backward as a CUDA graph")
    deterministic: bool = flag(False, "use only algorithms that repeat to the last bit; one thread on a CPU")
    guard: int = flag(0, "every N steps, compare FP8 with high precision and fall back if they differ; 0: off", least=0)
    guard_steps: int = flag(4, "steps per comparison", least=1)
    guard_memory: str = flag(
        "device", "where the guard keeps its copies of the weights and the optimizer", choices=("device", "host")
    )
    deepspeed: str = flag("", "DeepSpeed configuration file, which overrides flags")
    eval_every: int = flag(0, "steps between losses on held-out text; 0: none", least=0)
    eval_windows: int = flag(64, "windows of held-out text, at most", least=1)
    parallel: str = flag(
        "", "how the processes that torchrun starts share the model; by default ddp", choices=("", "ddp", "fsdp2")
    )
    out: str = flag("", "output folder; by default runs/MODEL-PRECISION-SEED")
    resume: bool = flag(False, "continue from the newest checkpoint in --out")
    checkpoint_every: int = flag(100, "steps between checkpoints; 0: only at the end", least=0)
    keep: int = flag(2, "number of checkpoints to keep", least=1)
    keep_every: int = flag(0, "also keep the checkpoints of every N-th step; 0: none", least=0)
    async_checkpoint: bool = flag(False, "write checkpoints from a copy in the host's memory while training goes on")
    skip_spikes: bool = flag(False, "leave out the update of a step whose loss jumps six deviations above the last 32")
    tensorboard: bool = flag(False, "also write the log for TensorBoard, to --out/tensorboard")
    wandb: str = flag("", "project of Weights & Biases that gets the log, too")
    profile: int = flag(0, "write a Chrome trace of the N-th step to --out/trace-N.json; 0: of none", least=0)
    log_every: int = flag(10, "steps between lines if the output is not a terminal", least=1)
    device: str = flag("", "cuda or cpu; by default cuda if there is a GPU", choices=("", "cuda", "cpu"))


# The options that a resumed run may change.
FREE = {
    "precision",
    "ops",
    "te_modules",
    "steps",
    "decay_steps",
    "decay_ratio",
    "recompute",
    "loss_chunks",
    "compile",
    "graphs",
    "skip_spikes",
    "guard",
    "guard_steps",
    "guard_memory",
    "deepspeed",
    "parallel",
    "out",
    "resume",
    "checkpoint_every",
    "keep",
    "keep_every",
    "async_checkpoint",
    "tensorboard",
    "wandb",
    "profile",
    "log_every",
    "device",
    "data",  # the text is compared by its hash
    "from_",  # the weights are those of the checkpoint
    "tokenizer",
    "eval_every",
    "eval_windows",
    "batch_size",  # the windows of a step are compared
    "gradient_accumulation_steps",
}


def model_name(options: Options) -> str:
    """What the output calls the model of a run."""
    return options.from_ or ("config.json" if options.config else options.model)


def model_of(options: Options) -> Model:
    """The model of a run: the named model, or that of its config.json, or a part of it."""
    model = model_config.model_of(options.config) if options.config else MODELS[options.model]
    shape = model.shape._replace(
        length=options.length or model.shape.length, layers=options.layers or model.shape.layers
    )
    return model._replace(shape=shape, parameters=parameters_of(shape, model.tied))


def flag_name(field: Any) -> str:
    """The command line flag of a field of Options."""
    return "--" + str(field.name).rstrip("_").replace("_", "-")


def parse(arguments: Sequence[str]) -> Options:
    """Parse flags into options; exits with one sentence if a flag is wrong."""
    parser = Parser(prog="pretrain", description="Pre-train a Llama.", allow_abbrev=False)
    for field in dataclasses.fields(Options):
        more = {"choices": field.metadata["choices"]} if "choices" in field.metadata else {}
        text, default = field.metadata["help"], field.default
        if isinstance(default, bool):
            parser.add_argument(flag_name(field), action="store_true", help=text)
        elif isinstance(default, tuple):
            parser.add_argument(flag_name(field), nargs="+", action="extend", default=[], help=text, metavar="FILE")
        else:
            shown = text + ("" if default in ("", 0) else f" ({default})")
            parser.add_argument(flag_name(field), type=type(default), default=default, help=shown, **more)
    values = vars(parser.parse_args(arguments))
    options = recalled({field.name: values[field.name.rstrip("_")] for field in dataclasses.fields(Options)})
    if wrong := beside_from(options):
        parser.error(wrong)
    config = str(Path(options.from_, "config.json")) if options.from_ else options.config
    if config:
        try:
            options.config = model_config.text_of(config, options.length)  # the file may change later
        except model_config.ConfigError as error:
            parser.error(str(error))
    if wrong := out_of_bounds(options):
        parser.error(wrong)
    if options.guard and options.guard_steps > options.guard:
        parser.error(f"--guard-steps is {options.guard_steps}, which is more than --guard {options.guard}")
    if options.guard and column_of(options.precision) == "torch":
        parser.error(f"--guard compares FP8, and --precision {options.precision} computes none")
    return options


def recalled(fields: Dict[str, Any]) -> Options:
    """The options of these fields, of which a file has lists in place of tuples."""
    return Options(**{**fields, "data": tuple(fields["data"])})


def beside_from(options: Options) -> str:
    """A sentence about the first option that contradicts --from; empty if there is none."""
    folder = options.from_
    if not folder:
        return ""
    if options.resume:
        return f"--resume goes on with the weights of the run: name --config {folder}/config.json in place of --from"
    if options.config or options.layers:
        flag = "--config" if options.config else "--layers"
        return f"--from {folder} has a config.json of its own: remove {flag}"
    text = not any(shards.is_prepared(file) for file in options.data)
    if text and not options.tokenizer and Path(folder, "tokenizer.json").exists():
        return f"--from {folder} has a tokenizer, without which text would be read as bytes: add --tokenizer {folder}"
    return ""


def out_of_bounds(options: Options) -> str:
    """A sentence about the first option that is out of its bounds; empty if there is none."""
    bounds: Dict[str, Tuple[str, Callable[[Any, Any], bool]]] = {
        "least": ("at least", operators.ge),
        "most": ("at most", operators.le),
        "above": ("more than", operators.gt),
        "below": ("less than", operators.lt),
    }
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        for name, (words, holds_for) in bounds.items():
            bound = field.metadata.get(name)
            if bound is not None and not holds_for(value, bound):
                return f"{flag_name(field)} is {value}, but must be {words} {bound}"
    return ""
