"""A Llama for the ablation: each operator is naive, as in the article on fused operators, or any of the table's.

Shapes: b batch, l length, w width, h heads, k key/value heads, d head size, n tokens, v vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from functools import lru_cache, partial
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F

from smoke_tests.operators.table import operator, rows
from smoke_tests.operators.torch_adapter import rotate_halves
from smoke_tests.operators.transformer_engine_adapter import te_autocast, te_recipe
from smoke_tests.training.columns import FUSED
from smoke_tests.training.models import Shape, operations_per_token

NAIVE = {name: "naive" for name in FUSED if name != "adamw"}


class Config(NamedTuple):
    """One way to train the model.

    ops: operator -> "naive", "plain" (a formula for torch.compile to fuse), "chunked" (the loss, without all logits at
    once), or a column of the table. layers: "torch" (the classes below) or "transformer-engine" (te.TransformerLayer).
    linear: the table's column for the projections, with head = the head's too. weights: "float32" (the products are
    autocast), "exact" (they are not) or "bfloat16". merged: query, key and value, and gate and up, are one projection
    each. compile: "", "blocks" (each block by itself, compiled once). graph: forward and backward are one CUDA graph.
    sequence_first: te.TransformerLayer gets [l, b, f], in place of [b, l, f]. base: the arm that it is compared with,
    else the first.
    """

    ops: Dict[str, str]
    layers: str = "torch"
    linear: str = "torch"
    head: bool = False
    weights: str = "bfloat16"
    merged: bool = True
    compile: str = ""
    graph: bool = False
    sequence_first: bool = False
    base: str = ""


def fused(releases: Dict[str, str], cuda: bool, head_size: int = 64) -> Dict[str, str]:
    """Operator -> the column that stands for it fused in this environment."""
    dtype = torch.bfloat16
    available = {name: [row.column for row in rows(name, releases, cuda) if row.dtype is dtype] for name in NAIVE}
    if head_size > 128 and "torch.flash" in available["attention"]:  # the others stop there, at least backward
        available["attention"] = ["torch.flash"]
    return {name: next(column for column in FUSED[name] if column in available[name]) for name in NAIVE}


# --- naive operators, as models had them before anything was fused ---


def naive_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Scores and probabilities in memory, the softmax in float32."""
    group, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    mask = torch.full((length, length), -math.inf, device=query.device, dtype=query.dtype).triu(1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + mask
    return torch.softmax(scores.float(), dim=-1).to(query.dtype) @ value


def naive_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def naive_rope(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * torch.cat([cosine, cosine], dim=-1) + turned * torch.cat([sine, sine], dim=-1)


def naive_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def naive_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=ignore_index)


PLAIN: Dict[str, Callable[..., torch.Tensor]] = {
    "attention": naive_attention,
    "rope": rotate_halves,
    "rms_norm": naive_rms_norm,
    "swiglu": naive_swiglu,
    "cross_entropy": naive_cross_entropy,
}
NAIVE_OPS = {**PLAIN, "rope": naive_rope}


@lru_cache(maxsize=None)  # one object for all blocks, so that a compiler sees them alike
def chosen(name: str, column: str, head_size: int) -> Callable[..., torch.Tensor]:
    """The operator that a configuration names; rope is rotate(x [b, h, l, d], tables) whatever it is."""
    if column == "naive":
        return NAIVE_OPS[name]
    if column == "plain":
        return PLAIN[name]
    if name != "rope":
        return operator(name, column)
    rope = operator(name, column)(head_size, 10000.0)
    return rope.rotate if hasattr(rope, "rotate") else lambda x, *tables: rope(x, 0)


CHUNK = 512  # tokens whose logits are held at a time: the fewest at which a product runs at full speed


class ChunkedLoss(torch.autograd.Function):  # type: ignore[misc]
    """Cross entropy of x weight^T that holds the logits of `size` tokens at a time; forward makes the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, size: int) -> torch.Tensor:
        loss = torch.zeros((), device=x.device)
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        for start in range(0, len(x), size):
            part, targets = x[start : start + size], labels[start : start + size]
            lost, of_logits = LossOfLogits.call(part @ weight.t(), targets, 1.0 / len(x))
            loss += lost
            torch.mm(of_logits, weight, out=of_x[start : start + size])
            of_weight.addmm_(of_logits.t(), part)
        ctx.save_for_backward(of_x, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, None, None]:
        of_x, of_weight = ctx.saved_tensors
        return of_x.mul_(gradients[0]), of_weight.mul_(gradients[0]), None, None


def loss_of_logits(logits: torch.Tensor, labels: torch.Tensor, scale: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """The scaled sum of cross entropies of logits [n, v], and its gradient in their dtype."""
    wide = logits.float()
    total = torch.logsumexp(wide, dim=-1, keepdim=True)
    taken = wide.gather(1, labels[:, None])
    hit = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    gradient = ((wide - total).exp() - hit.float()) * scale
    return (total - taken).sum() * scale, gradient.to(logits.dtype)


class LossOfLogits:
    """`loss_of_logits` behind torch.compile on a GPU, where it is two passes over the logits."""

    compiled: Optional[Callable[..., Any]] = None

    @classmethod
    def call(cls, logits: torch.Tensor, labels: torch.Tensor, scale: float) -> Any:
        if not logits.is_cuda:
            return loss_of_logits(logits, labels, scale)
        cls.compiled = cls.compiled or torch.compile(loss_of_logits, dynamic=False)
        return cls.compiled(logits, labels, scale)


# --- the model ---


class Norm(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.call = torch.nn.Parameter(torch.ones(width)), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x.flatten(0, -2), self.weight, 1e-5).view_as(x)


class AblatedBlock(torch.nn.Module):  # type: ignore[misc]
    """x [b, l, w] -> the same shape; the projections are one each or merged."""

    def __init__(self, shape: Shape, config: Config) -> None:
        super().__init__()
        self.size, self.hidden = shape.head_size, shape.hidden
        self.widths = [shape.width, shape.kv_heads * shape.head_size, shape.kv_heads * shape.head_size]
        linear = partial(torch.nn.Linear, bias=False)
        names = ("rope", "attention", "swiglu", "rms_norm")
        ops = {name: chosen(name, config.ops[name], self.size) for name in names}
        self.rotate, self.attend, self.multiply = ops["rope"], ops["attention"], ops["swiglu"]
        self.attention_norm = Norm(shape.width, ops["rms_norm"])
        self.feed_forward_norm = Norm(shape.width, ops["rms_norm"])
        inputs, hidden = (
            ([sum(self.widths)], [2 * shape.hidden]) if config.merged else (self.widths, [shape.hidden] * 2)
        )
        self.qkv = torch.nn.ModuleList([linear(shape.width, width) for width in inputs])
        self.gate_up = torch.nn.ModuleList([linear(shape.width, width) for width in hidden])
        self.output, self.down = linear(shape.width, shape.width), linear(shape.hidden, shape.width)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        query, key, value = (
            each.unflatten(-1, (-1, self.size)).transpose(1, 2) for each in projected(self.qkv, normed, self.widths)
        )
        attended = self.attend(self.rotate(query, cosine, sine), self.rotate(key, cosine, sine), value)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        gate, up = projected(self.gate_up, self.feed_forward_norm(x), [self.hidden] * 2)
        fed: torch.Tensor = x + self.down(self.multiply(gate, up))
        return fed


def projected(layers: torch.nn.ModuleList, x: torch.Tensor, widths: List[int]) -> List[torch.Tensor]:
    """x through each layer, or through the merged one and split into these widths."""
    return [layer(x) for layer in layers] if len(layers) > 1 else list(layers[0](x).split(widths, dim=-1))


class AblatedLlama(torch.nn.Module):  # type: ignore[misc]
    """Tokens and labels [b, l] -> the loss.

    Not training.llama.Llama, whose projections, residuals, formulas and layers no run of pretrain needs in other forms.
    """

    def __init__(self, shape: Shape, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = torch.nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = torch.nn.ModuleList([self.block(shape, config) for _ in range(shape.layers)])
        norm = "naive" if config.layers != "torch" and config.ops["rms_norm"] == "plain" else config.ops["rms_norm"]
        self.norm = Norm(shape.width, chosen("rms_norm", norm, 0))
        self.head = torch.nn.Linear(shape.width, shape.vocabulary, bias=False)
        loss = config.ops["cross_entropy"]
        self.loss = None if loss == "chunked" else chosen("cross_entropy", loss, 0)
        self.recipe: Any = None

    @staticmethod
    def block(shape: Shape, config: Config) -> torch.nn.Module:
        if config.layers == "torch":
            return AblatedBlock(shape, config)
        import transformer_engine.pytorch as te

        layer: torch.nn.Module = te.TransformerLayer(
            shape.width, shape.hidden, shape.heads, num_gqa_groups=shape.kv_heads, hidden_dropout=0.0, bias=False,
            attention_dropout=0.0, fuse_qkv_params=True, self_attn_mask_type="causal", normalization="RMSNorm",
            activation="swiglu", attn_input_format="sbhd" if config.sequence_first else "bshd",
            kv_channels=shape.head_size, params_dtype=torch.bfloat16,
        )  # fmt: skip
        return layer

    def prepare(self, shape: Shape) -> None:
        """Tables of cosines and sines, as the blocks take them, where the weights are."""
        frequency = 10000.0 ** (-torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size)
        angle = torch.arange(shape.length, dtype=torch.float64)[:, None] * frequency
        at = partial(torch.Tensor.to, device=self.embedding.weight.device)
        if self.config.layers == "torch":
            self.tables: Tuple[torch.Tensor, ...] = tuple(at(each).bfloat16() for each in (angle.cos(), angle.sin()))
        else:
            self.tables = (at(torch.cat([angle, angle], dim=-1)).float()[:, None, None],)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.config.sequence_first:
            tokens, labels = tokens.t(), labels.t()
        with self.precision():
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, *self.tables) if self.config.layers == "torch" else block(x, rotary_pos_emb=self.tables[0])
            x = self.norm(x).flatten(0, 1)
            if self.loss is None:
                lost: torch.Tensor = ChunkedLoss.apply(x, self.head.weight, labels.flatten(), CHUNK)
                return lost
            logits = self.head(x)
        loss: torch.Tensor = self.loss(logits, labels.flatten(), -100)
        return loss

    def precision(self) -> ContextManager[Any]:
        """The context of the forward pass: autocast for float32 weights, or Transformer Engine's."""
        if self.config.weights == "float32":
            autocast: ContextManager[Any] = torch.autocast(self.embedding.weight.device.type, dtype=torch.bfloat16)
            return autocast
        if self.config.layers == "transformer-engine" or self.recipe is not None:
            context: ContextManager[Any] = te_autocast(self.recipe)
            return context
        return contextlib.nullcontext()


def build(shape: Shape, config: Config, weights: Dict[str, torch.Tensor], device: str) -> AblatedLlama:
    """The model of a configuration with these weights, on a device; gradients are there, and zero."""
    dtype = getattr(torch, config.weights)
    with torch.device(device):
        model: AblatedLlama = AblatedLlama(shape, config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight_for(name, parameter.shape, weights, shape))
    model.prepare(shape)
    kind, _, recipe = config.linear.partition(".")
    keep = (lambda name: False) if config.head else (lambda name: name == "head")
    if kind != "torch":
        operator("linear", config.linear)(model, keep)  # in place
    if kind == "transformer-engine":
        model.recipe = te_recipe(recipe)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if config.compile == "blocks":
        setattr(torch._dynamo.config, "recompile_limit", 64)  # as many configurations of one class  # noqa: B010
        for block in model.blocks:
            block.compile(dynamic=False)
        if model.loss is not None and config.ops["cross_entropy"] in ("plain", "naive"):
            model.loss = torch.compile(model.loss, dynamic=False)
        model.norm.compile(dynamic=False)
    return model


def draw(shape: Shape, device: str) -> Dict[str, torch.Tensor]:
    """Random weights by the names of a model with separate projections, normal with 0.02, norms 1.

    Those of a model wider than 2048 are smaller, so that attention's scores scatter by no more than there, 0.8. By 3.3,
    at 8192, it is saturated, and what rounding leaves of a gradient checks nothing.
    """
    std = 0.02 * min(1.0, (2048 / shape.width) ** 0.5)
    with torch.device(device), torch.no_grad():
        model = AblatedLlama(shape, Config(NAIVE, merged=False))
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=std)
    weights: Dict[str, torch.Tensor] = model.state_dict()
    return weights


# Transformer Engine's name of a weight -> ours.
TE = {
    "self_attention.layernorm_qkv.layer_norm_weight": "attention_norm.weight",
    "self_attention.layernorm_qkv.weight": "qkv.weight",
    "self_attention.proj.weight": "output.weight",
    "layernorm_mlp.layer_norm_weight": "feed_forward_norm.weight",
    "layernorm_mlp.fc1_weight": "gate_up.weight",
    "layernorm_mlp.fc2_weight": "down.weight",
}


def weight_for(name: str, size: Any, weights: Dict[str, torch.Tensor], shape: Shape) -> torch.Tensor:
    """The weight of that name for a model with merged projections, or Transformer Engine's layers, or neither."""
    if name in weights and weights[name].shape == size:
        return weights[name]
    block, place = ".".join(name.split(".")[:2]), ".".join(name.split(".")[2:])
    ours = TE.get(place, place)
    if ours.startswith("gate_up"):
        return torch.cat([weights[f"{block}.gate_up.{index}.weight"] for index in range(2)])
    if ours.startswith("qkv"):
        parts = [weights[f"{block}.qkv.{index}.weight"] for index in range(3)]
        if place == ours or place.startswith("qkv."):
            return torch.cat(parts)
        # Its rows are those of each key/value head together with the query heads that share it.
        grouped = [part.view(shape.kv_heads, -1, part.shape[1]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    return weights[f"{block}.{ours}"]


def flops(shape: Shape) -> Dict[str, float]:
    """FLOP per token of forward and backward, by convention.

    without input embedding: training.models' count, torchtitan's. nanogpt: that and six per parameter of the input
    embedding (nanoGPT's, and the article's). causal, products only: without the norms, and with the half of attention
    that the mask leaves.
    """
    norms = (2 * shape.layers + 1) * shape.width
    embedding = shape.vocabulary * shape.width
    counted = operations_per_token(shape)
    return {
        "nanogpt": counted + 6.0 * embedding,
        "without input embedding": counted,
        "causal, products only": counted - 6.0 * norms - 6.0 * shape.layers * shape.width * shape.length,
    }
