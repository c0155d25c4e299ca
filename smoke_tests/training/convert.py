"""Put Transformer Engine's linear layers and norms in place of those of a transformers model, and back.

    from smoke_tests.training.convert import to_torch, to_transformer_engine

    replaced = to_transformer_engine(model)        # same parameters; replaced.stay says what is not replaced, and why
    with te_autocast(te_recipe("delayed")):        # smoke_tests/operators/transformer_engine_adapter.py
        loss = model(tokens, labels=tokens).loss   # FP8 needs a number of tokens that is a multiple of 16
    to_torch(model).save_pretrained(folder)        # what plain transformers reads

    python -m smoke_tests.training.convert FOLDER [--data FILE]

The command does this to the model of a folder and prints how far that moves its logits, in bfloat16 and in FP8.

accelerate's convert_model (accelerate/utils/transformer_engine.py, 1.15.0) replaces no RMSNorm, skips the layers after
one whose sizes FP8 cannot multiply, and does not get back to torch: it passes params_dtype to torch.nn.Linear.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch

from smoke_tests.operators import bounds
from smoke_tests.operators.transformer_engine_adapter import te_autocast, te_linear_of, te_norm_of, te_recipe
from smoke_tests.training.command import Parser
from smoke_tests.training.documents import TextError
from smoke_tests.training.options import Refused
from smoke_tests.training.text import Text

DEVICE = "cuda"  # where Transformer Engine computes
MULTIPLE = 16  # FP8 products need both sizes of a weight to be multiples of it
REPLACED = "replaced_by_transformer_engine"  # the attribute of a layer that holds the original one


class Replaced(NamedTuple):
    """The names of the layers that are Transformer Engine's now, and those that stay, each with the reason."""

    linear: List[str]
    norms: List[str]
    stay: Dict[str, str]


def to_transformer_engine(model: torch.nn.Module, head: bool = False) -> Replaced:
    """Replace the linear layers and norms of a model on a GPU in place; parameters stay the same objects.

    head: also the layer that get_output_embeddings() returns, which is otherwise left in high precision. A tied weight
    stays tied. A layer of a subclass, with hooks, on another device or of sizes that FP8 cannot multiply stays, and so
    does a norm that computes something else than Transformer Engine's, such as Gemma's.
    """
    replaced = Replaced([], [], {})
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        linear = isinstance(layer, torch.nn.Linear)
        if not linear and not is_norm(layer):
            continue
        reason = "it is the head" if layer is outputs and not head else reason_to_stay(layer)
        if not reason and linear:
            made = te_linear_of(layer)
        elif not reason:
            made = te_norm_of(layer, epsilon(layer))
            reason = "" if computes_the_same(layer, made) else f"a {type(layer).__name__} computes something else"
        if reason:
            replaced.stay[name] = reason
            continue
        made.train(layer.training)
        made.__dict__[REPLACED] = layer  # not a submodule: its parameters are the new layer's
        _put(model, name, made)
        (replaced.linear if linear else replaced.norms).append(name)
    return replaced


def to_torch(model: torch.nn.Module) -> torch.nn.Module:
    """The same model, each replaced layer in its place again, with the parameters that Transformer Engine's has."""
    for name, layer in list(model.named_modules()):
        before = layer.__dict__.get(REPLACED)
        if before is not None:
            for parameter, _ in list(before.named_parameters()):
                setattr(before, parameter, getattr(layer, parameter))
            _put(model, name, before.train(layer.training))
    return model


def _put(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


def is_norm(layer: torch.nn.Module) -> bool:
    """Whether a layer is a LayerNorm or an RMSNorm, by name: transformers has one RMSNorm per family of models."""
    named = isinstance(layer, torch.nn.LayerNorm) or type(layer).__name__.endswith("RMSNorm")
    return named and isinstance(getattr(layer, "weight", None), torch.nn.Parameter)


def epsilon(norm: torch.nn.Module) -> float:
    """What a norm adds to the variance."""
    value = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return torch.finfo(norm.weight.dtype).eps if value is None else float(value)  # torch.nn.RMSNorm's default


def reason_to_stay(layer: torch.nn.Module) -> str:
    """Why a linear layer or a norm cannot be Transformer Engine's, or ""."""
    linear, sizes = isinstance(layer, torch.nn.Linear), tuple(layer.weight.shape)
    if linear and type(layer) is not torch.nn.Linear:
        return f"a {type(layer).__name__} is more than a linear layer"
    own = layer.__dict__
    if "forward" in own or any(own[name] for name in own if name.endswith("_hooks")):
        return "it has hooks"
    if layer.weight.device.type != DEVICE:
        return f"its weight is on {layer.weight.device}"
    if linear and any(size % MULTIPLE for size in sizes):
        return f"its sizes {sizes} are not multiples of {MULTIPLE}"
    if isinstance(layer, torch.nn.LayerNorm) and (layer.bias is None or len(sizes) != 1):
        return "Transformer Engine's LayerNorm has a bias and one size"
    return ""


@torch.no_grad()  # type: ignore[untyped-decorator]
def computes_the_same(norm: torch.nn.Module, made: torch.nn.Module) -> bool:
    """Whether two norms agree up to rounding on rows whose variance is large, and as small as what is added to it."""
    weight = norm.weight
    rows = torch.randn(MULTIPLE, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight)
    scales = torch.tensor([1.0, math.sqrt(epsilon(norm))]).to(weight).repeat(MULTIPLE // 2)[:, None]
    theirs, ours = norm(rows * scales).double(), made(rows * scales)
    # Each rounds twice at most: what it scales, and what it returns.
    return bool(theirs.norm() > 0) and bounds.relative_error(ours, theirs) <= bounds.ceiling(weight.dtype, 4)


# --- the command ---


class Logits(NamedTuple):
    """How far logits in bfloat16 or FP8 are from those in float32 (root mean square over root mean square)."""

    own: float
    bfloat16: float
    fp8: float


def measured(model: Any, tokens: torch.Tensor, recipe: str, head: bool) -> Tuple[Replaced, Logits]:
    """Replace a model's layers, compare its logits of tokens [b, l] on the way, and put its own layers back.

    Refused if they then are not the same bits as before.
    """

    def logits(half: bool = True, scaling: Any = None) -> torch.Tensor:
        # Transformer Engine takes new scales where its context ends, and only if gradients are enabled there.
        with te_autocast(scaling), torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=half):
            computed: torch.Tensor = model(tokens).logits
        return computed

    exact, own = logits(half=False).double(), logits()
    replaced = to_transformer_engine(model, head)
    converted, scaling = logits(), te_recipe(recipe)
    logits(scaling=scaling)  # with delayed scaling, a pass takes the scales that the one before it measured
    fp8 = logits(scaling=scaling)
    to_torch(model)
    if not torch.equal(logits(), own):
        raise Refused("the model's own layers, put back, give other logits than before")
    return replaced, Logits(*(bounds.relative_error(each, exact) for each in (own, converted, fp8)))


def limits(replaced: Replaced, errors: Logits) -> Logits:
    """What the errors may be: in bfloat16 half as much again as with the model's own layers, in FP8 its noise as well.

    The noise is that of both factors of up to 32 products: what a block adds drowns the noise of those far before it.
    Emulated with 2 to 22 blocks, fresh or with sharp attention, it was that of 1 to 25 products. Scales of 1, as before
    the first pass, gave fresh weights of HARE 1.1B that of 36 on an H200.
    """
    noise = bounds.rounding_noise(bounds.E4M3, bounds.E4M3)[1] * math.sqrt(min(len(replaced.linear), 32))
    return Logits(errors.own, 1.5 * errors.own, 1.5 * errors.own + noise)


def opened(folder: Path) -> Any:
    """The model of a folder in float32 on the GPU; Refused if that is not possible."""
    try:
        import transformer_engine.pytorch  # noqa: F401
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise Refused(f"this needs transformers and Transformer Engine: {error}; take a target with both") from None
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        raise Refused("FP8 needs a GPU of compute capability 8.9 or newer, which is not here")
    try:
        return AutoModelForCausalLM.from_pretrained(str(folder)).float().cuda().eval()
    except (OSError, ValueError) as error:
        raise Refused(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from None


def tokens_of(asked: Any, vocabulary: int) -> torch.Tensor:
    """The tokens [rows, length] of a text, or random ones."""
    if not asked.data:
        return torch.randint(vocabulary, (asked.rows, asked.length), generator=torch.Generator().manual_seed(0))
    text = Text.read([str(asked.data)], str(asked.folder), vocabulary, asked.length, seed=0)
    return text.windows(0, asked.rows)[0]


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code, 1 if the logits are farther off than the limit."""
    parser = Parser(prog="convert", description="Put Transformer Engine's layers into a model, and back.")
    parser.add_argument("folder", type=Path, help="of a causal language model of transformers")
    parser.add_argument("--data", type=Path, help="text to read, by the folder's tokenizer; by default random tokens")
    parser.add_argument("--recipe", choices=("delayed", "current", "blockwise"), default="delayed", help="FP8 scaling")
    parser.add_argument("--head", action="store_true", help="replace the head, too")
    parser.add_argument("--rows", type=int, default=4, help="texts at a time (4)")
    parser.add_argument("--length", type=int, default=512, help="tokens of each; a multiple of 16 (512)")
    asked = parser.parse_args(arguments)
    try:
        if asked.rows < 1 or asked.length < 1 or asked.length % MULTIPLE:
            raise Refused(f"--rows {asked.rows} --length {asked.length}: FP8 needs lengths that are multiples of 16")
        model = opened(asked.folder)
        tokens = tokens_of(asked, model.config.vocab_size).to("cuda", torch.long)
        replaced, errors = measured(model, tokens, asked.recipe, asked.head)
    except (Refused, TextError) as error:
        sys.exit(f"fusebox: {error}")
    print(f"{len(replaced.linear)} linear layers and {len(replaced.norms)} norms become Transformer Engine's")
    for name, reason in replaced.stay.items():
        print(f"{name} stays: {reason}")
    most = limits(replaced, errors)
    print(f"logits of {tokens.numel():,} tokens, relative error to float32:")
    print(f"  bfloat16, the model's own layers     {errors.own:.2e}")
    print(f"  bfloat16, Transformer Engine's       {errors.bfloat16:.2e}  (limit {most.bfloat16:.2e})")
    print(f"  FP8 with {asked.recipe} scaling".ljust(37), f"{errors.fp8:.2e}  (limit {most.fp8:.2e})")
    print("the model's own layers, put back: the same bits")
    return 0 if errors.bfloat16 <= most.bfloat16 and errors.fp8 <= most.fp8 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
