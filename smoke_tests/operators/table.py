"""The one table of fused operators: operator x implementation -> callable. Differences between versions live only here.

A column is a distribution, with a variant after a dot where it has several. Packages are imported when an entry is
called, so that a broken package refutes only the claims about itself.

Shapes: b batch, h heads, k key/value heads, l length, d head size; n rows, f features, v vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import os
from functools import lru_cache, partial
from typing import Any, Callable, ContextManager, Dict, Iterable, Iterator, List, NamedTuple, Tuple
from unittest import mock

import torch
import torch.nn.functional as F

from smoke_tests.claims import holds

Parameters = Iterable[torch.nn.Parameter]

SINGLE = ("float32",)
BRAIN = ("bfloat16",)
HALF = ("bfloat16", "float16")
MIXED = ("float32", "bfloat16")  # what a CPU is asked for
ALL = ("float32", "bfloat16", "float16")


def version_of_torch() -> Tuple[int, int]:
    """(2, 13) for 2.13.0+cpu."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if version_of_torch() < (2, 2):
    # With the cuDNN that it brings (8.9.2.26) Transformer Engine's fused attention finds no plan to execute.
    os.environ.setdefault("NVTE_FUSED_ATTN", "0")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind torch.compile, compiled once for all shapes when it is first called."""
    make = lru_cache(maxsize=None)(lambda: torch.compile(function, dynamic=True))
    return lambda *arguments, **named: make()(*arguments, **named)


# --- attention(query [b, h, l, d], key [b, k, l, d], value [b, k, l, d]) -> [b, h, l, d], causal ---


def torch_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if version_of_torch() >= (2, 5):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attention_of_equal_heads(query, key, value)


def attention_of_equal_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def only(backend: str) -> ContextManager[Any]:
    """The context in which torch's attention takes this backend or none."""
    context: ContextManager[Any]
    if version_of_torch() >= (2, 3):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        context = sdpa_kernel(SDPBackend.__members__[backend])
        return context
    flash = backend == "FLASH_ATTENTION"
    context = torch.backends.cuda.sdp_kernel(enable_flash=flash, enable_math=False, enable_mem_efficient=not flash)
    return context


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: str) -> torch.Tensor:
    """torch's attention by this backend or not at all; the memory-efficient one knows no grouped heads."""
    with only(backend):
        attend = attention_of_equal_heads if backend == "EFFICIENT_ATTENTION" else torch_attention
        return attend(query, key, value)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, module: str = "flash_attn"
) -> torch.Tensor:
    attend = importlib.import_module(module).flash_attn_func
    # By default its backward sums in the order in which blocks end.
    exact = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
    attended = attend(*[tensor.transpose(1, 2) for tensor in (query, key, value)], causal=True, **exact)
    result: torch.Tensor = attended[0] if isinstance(attended, tuple) else attended  # FlashAttention 4's logsumexp
    return result.transpose(1, 2)


def te_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    from transformer_engine.pytorch import DotProductAttention

    heads, groups, size = query.shape[1], key.shape[1], query.shape[-1]
    attend = DotProductAttention(
        heads, size, num_gqa_groups=groups, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0
    )
    attended: torch.Tensor = attend(*[tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)])
    return attended.unflatten(-1, (heads, size)).transpose(1, 2)


def xformers_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: str) -> torch.Tensor:
    """xformers' attention by this module of its fmha; with a gradient it takes grouped heads only as equal ones."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    module = importlib.import_module("xformers.ops.fmha." + backend)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    attended: torch.Tensor = memory_efficient_attention(
        *heads, attn_bias=LowerTriangularMask(), op=(module.FwOp, module.BwOp)
    )
    return attended.transpose(1, 2)


def repeats(column: str) -> bool:
    """Whether backward adds in one order where deterministic algorithms are asked for.

    xformers' kernels know no such order, flash-attn's none before 2.4.1, and torch then refuses to run cuDNN's.
    """
    if column in ("flash-attn", "transformer-engine.flash"):
        attend = importlib.import_module("flash_attn").flash_attn_func
        return "deterministic" in inspect.signature(attend).parameters
    return not column.startswith("xformers.") and column != "torch.cudnn"


# --- rms_norm(x [n, f], weight [f], eps) -> [n, f] ---


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def te_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from transformer_engine.pytorch import RMSNorm

    module = RMSNorm(weight.shape, eps=eps, params_dtype=weight.dtype)
    module.weight = weight if isinstance(weight, torch.nn.Parameter) else torch.nn.Parameter(weight)
    normalized: torch.Tensor = module(x)
    return normalized


def apex_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    normalized: torch.Tensor = fused_rms_norm_affine(x, weight, weight.shape, eps)
    return normalized


def apex_mixed_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What apex's MixedFusedRMSNorm calls: the result has the weight's dtype."""
    from apex.normalization.fused_layer_norm import mixed_dtype_fused_rms_norm_affine

    normalized: torch.Tensor = mixed_dtype_fused_rms_norm_affine(x, weight, weight.shape, eps)
    return normalized


def liger_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm as normalize

    normalized: torch.Tensor = normalize(x, weight, eps, in_place=False)
    return normalized


def flash_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    normalized: torch.Tensor = rms_norm_fn(x, weight, None, eps=eps)
    return normalized


def dropout_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from flash_attn.ops.rms_norm import rms_norm

    normalized: torch.Tensor = rms_norm(x, weight, eps)
    return normalized


# --- add_rms_norm(x [n, f], residual [n, f], weight [f], eps) -> [n, 2f]: the normalized sum, and the sum ---


def torch_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    total = x + residual
    return torch.cat([torch_rms_norm(total, weight, eps), total], dim=-1)


def liger_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return torch.cat(liger_fused_add_rms_norm(x, residual, weight, eps, in_place=False), dim=-1)


def flash_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    return torch.cat(rms_norm_fn(x, weight, None, residual=residual, eps=eps, prenorm=True), dim=-1)


def dropout_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from flash_attn.ops.rms_norm import dropout_add_rms_norm as normalize

    return torch.cat(normalize(x, residual, weight, None, 0.0, eps, prenorm=True), dim=-1)


# --- cross_entropy(logits [n, v], labels [n], ignore_index) -> scalar, the mean over rows that count ---


def torch_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    return F.cross_entropy(logits, labels, ignore_index=ignore_index)


def te_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    # [rows, 1, v]: batch and length. It returns the mean as [1].
    loss: torch.Tensor = parallel_cross_entropy(logits[:, None], labels[:, None], 0.0, True, None, ignore_index)
    return loss.sum()


def liger_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy as entropy

    loss: torch.Tensor = entropy(logits, labels, ignore_index=ignore_index)
    return loss


def flash_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    new = "ignore_index" in inspect.signature(cross_entropy_loss).parameters
    name = "ignore_index" if new else "ignored_index"  # 2.3.3
    found = cross_entropy_loss(logits, labels, **{name: ignore_index})
    losses: torch.Tensor = found[0] if isinstance(found, tuple) else found  # 2.3.3 returns them alone
    return losses.sum() / (labels != ignore_index).sum()


class Xentropy(torch.autograd.Function):  # type: ignore[misc]
    """The loss of each row by xentropy_cuda_lib alone; flash-attn's own layer is Triton's from 2.4 on."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
        import xentropy_cuda_lib

        losses, logsumexp = xentropy_cuda_lib.forward(logits, labels, 0.0)
        ctx.save_for_backward(logits, logsumexp, labels)
        ctx.ignore_index = ignore_index
        counted: torch.Tensor = losses.masked_fill(labels == ignore_index, 0)
        return counted

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None]:
        import xentropy_cuda_lib

        logits, logsumexp, labels = ctx.saved_tensors
        counted = gradients[0].masked_fill(labels == ctx.ignore_index, 0)
        return xentropy_cuda_lib.backward(counted, logits, logsumexp, labels, 0.0, False), None, None


def xentropy_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    losses: torch.Tensor = Xentropy.apply(logits, labels, ignore_index)
    return losses.sum() / (labels != ignore_index).sum()


# --- linear_cross_entropy(x [n, f], weight [v, f], labels [n], ignore_index) -> scalar, of the logits x weight^T ---


def torch_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    return F.cross_entropy(x @ weight.t(), labels, ignore_index=ignore_index)


def liger_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: torch.Tensor = liger_fused_linear_cross_entropy(x, weight, labels, ignore_index=ignore_index)
    return loss


# --- swiglu(gate, up) -> silu(gate) * up, any equal shapes ---


def torch_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def te_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from transformer_engine.pytorch.ops import SwiGLU

    product: torch.Tensor = SwiGLU()(torch.cat([gate, up], dim=-1))
    return product


def liger_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_swiglu as multiply

    product: torch.Tensor = multiply(gate, up)
    return product


def flash_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from flash_attn.ops.activations import swiglu

    product: torch.Tensor = swiglu(gate, up)
    return product


# --- mlp(x [n, f], gate and up [h, f], down [f, h], biases [h], [h], [f]) -> [n, f]: SwiGLU and its projections ---


def torch_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *biases: torch.Tensor) -> Any:
    return F.linear(F.silu(F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1]), down, biases[2])


def xformers_mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *biases: torch.Tensor, kind: str
) -> torch.Tensor:
    """xformers' SwiGLU by this operator; the packed one wants gate and up side by side in memory."""
    from xformers.ops import swiglu, swiglu_op, unbind

    first, second, last = biases
    if kind == "packed":
        (gate, up), (first, second) = (unbind(torch.stack(pair), 0) for pair in ((gate, up), (first, second)))
    kinds = {
        "packed": swiglu_op.SwiGLUPackedFusedOp,
        "fused": swiglu_op.SwiGLUFusedOp,
        "decomposed": swiglu_op._SwiGLUDecomposedOp,
    }
    projected: torch.Tensor = swiglu(x, gate, first, up, second, down, last, op=kinds[kind])
    return projected


# --- rope(head size, base) -> rotate(x [b, h, l, d], start) -> the same shape, halves paired ---


def rotate_halves(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """x [b, h, l, d], cosine and sine [l, d / 2] -> [b, h, l, d]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class TorchRope:
    """Rotary embedding with a table of cosines and sines that grows with the longest position asked for."""

    angles = torch.float64  # in which it computes them

    def __init__(self, head_size: int, base: float) -> None:
        self.frequency = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        self.cosine = self.sine = torch.empty(0, head_size // 2, dtype=torch.float64)

    def __call__(self, x: torch.Tensor, start: int) -> torch.Tensor:
        stop = start + x.shape[-2]
        if stop > len(self.cosine):
            angle = torch.arange(stop, dtype=torch.float64)[:, None] * self.frequency
            # On the device, because no CUDA graph can hold a copy from the host.
            self.cosine, self.sine = angle.cos().to(x.device), angle.sin().to(x.device)
        return self.rotate(x, self.cosine[start:stop].to(x), self.sine[start:stop].to(x))

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        return rotate_halves(x, cosine, sine)


rotate_halves_compiled = compiled(rotate_halves)


class CompiledRope(TorchRope):
    """The same behind torch.compile."""

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = rotate_halves_compiled(x, cosine, sine)
        return turned


class LigerRope(TorchRope):
    """Liger's kernel, which turns queries and keys at once and wants each cosine twice."""

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        from liger_kernel.transformers.functional import liger_rope

        turned: torch.Tensor = liger_rope(
            x, x.detach().clone(), *[torch.cat([t, t], -1)[None] for t in (cosine, sine)]
        )[0]
        return turned


class FlashRope(TorchRope):
    """The Triton kernel of flash-attn's layers."""

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        from flash_attn.layers.rotary import apply_rotary_emb

        turned: torch.Tensor = apply_rotary_emb(x.transpose(1, 2), cosine, sine)
        return turned.transpose(1, 2)


class RotaryEmb(torch.autograd.Function):  # type: ignore[misc]
    """Queries or keys turned by rotary_emb alone; flash-attn's own layer is Triton's from 2.1.2 on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return RotaryEmb.turn(x, cosine, sine, back=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return RotaryEmb.turn(gradients[0], cosine, sine, back=True), None, None

    @staticmethod
    def turn(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, back: bool) -> torch.Tensor:
        import rotary_emb

        turned = torch.empty_like(x)
        rotary_emb.apply_rotary(*x.chunk(2, dim=-1), cosine, sine, *turned.chunk(2, dim=-1), back)
        return turned


class RotaryEmbRope(TorchRope):
    """The CUDA kernel that flash-attn's layers had before Triton's."""

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = RotaryEmb.apply(x, cosine, sine)
        return turned


class TransformerEngineRope:
    """Transformer Engine's fused kernel, which takes the angles. Until 2.0 it knows no base but 10000."""

    angles = torch.float32

    def __init__(self, head_size: int, base: float) -> None:
        attention = importlib.import_module("transformer_engine.pytorch.attention")
        self.module = getattr(attention, "rope", attention)  # a module of its own from 2.0 on
        others = {} if base == 10000.0 else {"rotary_base": base}
        self.embedding = self.module.RotaryPositionEmbedding(head_size, **others)

    def __call__(self, x: torch.Tensor, start: int) -> torch.Tensor:
        angles = self.embedding(start + x.shape[-2])[start:].to(x.device)
        turned: torch.Tensor = self.module.apply_rotary_pos_emb(
            x.transpose(1, 2), angles, tensor_format="bshd", fused=True
        )
        return turned.transpose(1, 2)


class TransformersRope:
    """The rotary embedding of transformers' Mistral, built for few positions so that its table has to grow."""

    angles = torch.float32

    def __init__(self, head_size: int, base: float) -> None:
        from transformers.models.mistral import modeling_mistral

        self.embedding = modeling_mistral.MistralRotaryEmbedding(head_size, max_position_embeddings=8, base=base)
        self.apply = modeling_mistral.apply_rotary_pos_emb

    def __call__(self, x: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + x.shape[-2])[None]
        cosine, sine = self.embedding(x, seq_len=start + x.shape[-2])
        turned: torch.Tensor = self.apply(x, x, cosine, sine, positions)[0]
        return turned


# --- adamw(parameters, lr, betas, eps, weight_decay) -> optimizer with step() ---


def torch_adamw(parameters: Parameters, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **settings)


def fused_adamw(parameters: Parameters, module: str, **settings: Any) -> torch.optim.Optimizer:
    """The FusedAdam of apex, which Transformer Engine and DeepSpeed took over with its arguments."""
    make = importlib.import_module(module).FusedAdam
    optimizer: torch.optim.Optimizer = make(list(parameters), adam_w_mode=True, **settings)
    return optimizer


def deepspeed_cpu_adamw(parameters: Parameters, **settings: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(list(parameters), adamw_mode=True, **settings)
    return optimizer


# --- scaled_mm(a [m, k] fp8, b [n, k] fp8, scale_a, scale_b, dtype) -> (a scale_a) (b scale_b)^T [m, n] in dtype ---


def torch_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype, **more: Any
) -> torch.Tensor:
    product = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, **more)
    # Until 2.5 it returned the product's largest magnitude as well.
    return product[0] if isinstance(product, tuple) else product


# --- linear(model, keep) -> the model, its torch.nn.Linear layers replaced except those that keep(name) names ---


def torch_linear(model: torch.nn.Module, keep: Callable[[str], bool]) -> torch.nn.Module:
    return model


def torchao_linear(model: torch.nn.Module, keep: Callable[[str], bool], recipe: str) -> torch.nn.Module:
    """torchao's float8 training layers; where the model is on no FP8 GPU their products are emulated in float32."""
    import dataclasses

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Where the model is, not what else the machine has: on a CPU _scaled_mm knows no rowwise scales.
    emulate = not next(model.parameters()).is_cuda or torch.cuda.get_device_capability() < (8, 9)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: not keep(name))


class InFp8(torch.nn.Module):  # type: ignore[misc]
    """A model whose layers of Transformer Engine compute in FP8."""

    def __init__(self, model: torch.nn.Module, recipe: Any) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(self, *inputs: torch.Tensor, **named: Any) -> torch.Tensor:
        with te_autocast(self.recipe):
            output: torch.Tensor = self.model(*inputs, **named)
        return output


def te_autocast(recipe: Any) -> Any:
    """The context in which layers of Transformer Engine compute in FP8; in that of None they do not."""
    import transformer_engine.pytorch as te

    if hasattr(te, "autocast"):  # from 2.9 on
        return te.autocast(enabled=recipe is not None, recipe=recipe)
    return te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe)


def te_recipe(name: str) -> Any:
    """Transformer Engine's scaling recipe of that name: e4m3 forward, e5m2 backward, but blockwise e4m3 for both."""
    from transformer_engine.common import recipe

    if name == "delayed":
        return recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16)
    return {"current": recipe.Float8CurrentScaling, "blockwise": recipe.Float8BlockScaling}[name]()


def te_recipes(version: str) -> List[str]:
    """The names of the recipes that this version of Transformer Engine has."""
    columns = (row.column.partition(".") for row in rows("linear", {"transformer-engine": version}, cuda=True))
    return list(dict.fromkeys(variant for _, _, variant in columns))


@contextlib.contextmanager
def te_without_fp8() -> Iterator[None]:
    """Transformer Engine as it is on a GPU of compute capability 8.0, which has no FP8."""
    package = "transformer_engine.pytorch"
    if importlib.util.find_spec(package + ".quantization"):  # from 2.9 on
        module = importlib.import_module(package + ".quantization")
        unasked = mock.patch.object(module, "_FP8_SUPPORT", None)
    else:
        module = importlib.import_module(package + ".fp8")
        # A refusal leaves it as if inside the context, and then no later step would update its scales.
        state: Dict[str, Any] = {"fp8_available": None, "FP8_AUTOCAST_DEPTH": 0, "FP8_ENABLED": False}
        unasked = mock.patch.multiple(module.FP8GlobalStateManager, **state)
    with unasked, mock.patch.object(module, "get_device_compute_capability", lambda: (8, 0)):
        yield


def te_linear(model: torch.nn.Module, keep: Callable[[str], bool], recipe: str) -> torch.nn.Module:
    """Transformer Engine's linear layers in place of torch's, with their weights."""
    from transformer_engine.pytorch import Linear

    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and not keep(name):
            weight, bias = layer.weight, layer.bias
            ours = Linear(
                layer.in_features, layer.out_features, bias=bias is not None, params_dtype=weight.dtype, device="cuda"
            )
            with torch.no_grad():
                ours.weight.copy_(weight)
                if bias is not None:
                    ours.bias.copy_(bias)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, ours)
    return InFp8(model, te_recipe(recipe))


class Entry(NamedTuple):
    """One implementation of an operator.

    cpu, cuda: the dtypes that it is proved with on a CPU and on a GPU; none where it does not run there.
    forward, backward: regular expressions of a GPU kernel that it alone runs; none where it is not known by one, or
    where the gradient is computed forward.
    limits: input that it is known not to take ("one row", "no rows", "head size 40", "another base"), or to write its
    gradient over ("own input").
    since, until: the first version of its distribution that has it, and the first that does not; "" is no end.
    size: the length of a row, or of a head, that it is tried with where it does not take every one.
    isa: a CPU feature without which it cannot run.
    early: it rounds a normalized row to the dtype before it multiplies it by the weight as well as after, like Llama.
    """

    call: Callable[..., Any]
    cpu: Tuple[str, ...] = ()
    cuda: Tuple[str, ...] = ()
    forward: str = ""
    backward: str = ""
    since: str = "0"
    isa: str = ""
    limits: Tuple[str, ...] = ()
    until: str = ""
    size: int = 0
    early: bool = False


# flash-attn's kernels; before 2.6, and in xformers' copy of it, outside any namespace.
FLASH_FORWARD, FLASH_BACKWARD = (rf"(\bflash::|^void )flash_{way}" for way in ("fwd", "bwd"))

# A guess: 2.1.2 fails without rows and 2.11 does not, and nothing between them was tried.
OLD_TORCH = ("no rows",) if version_of_torch() < (2, 2) else ()

# Transformer Engine before 2.0, which is what such a torch comes with.
OLD_ROPE = ("another base",) if version_of_torch() < (2, 2) else ()

OPERATORS: Dict[str, Dict[str, Entry]] = {
    "attention": {
        "torch": Entry(torch_attention, MIXED, since="2.0"),
        "torch.flash": Entry(
            partial(sdpa, backend="FLASH_ATTENTION"),
            (),
            HALF,
            "pytorch_flash::flash_fwd|pytorch_fmha::fmha_fwd",  # FlashAttention 2; before torch 2.2 the first one
            "pytorch_flash::flash_bwd|pytorch_fmha::fmha_bwd",
            "2.0",
            limits=OLD_TORCH,
        ),
        "torch.cudnn": Entry(
            partial(sdpa, backend="CUDNN_ATTENTION"),
            (),
            HALF,
            "cudnn.*sdpa.*fprop",
            "cudnn.*sdpa.*bprop",
            "2.5",
            limits=("one row", "no rows"),
        ),
        "torch.efficient": Entry(
            partial(sdpa, backend="EFFICIENT_ATTENTION"),
            (),
            HALF,
            "fmha_cutlassF",
            "fmha_cutlassB",
            "2.0",
            limits=OLD_TORCH,
        ),
        "flash-attn": Entry(flash_attention, (), HALF, FLASH_FORWARD, FLASH_BACKWARD, limits=("no rows",)),
        "flash-attn-4": Entry(
            partial(flash_attention, module="flash_attn.cute"),
            (),
            HALF,
            "FlashAttentionForward",
            "FlashAttentionBackward",
        ),
        "transformer-engine": Entry(
            te_attention, (), HALF, "cudnn.*sdpa.*fprop", "cudnn.*sdpa.*bprop", "2.0", limits=("one row", "no rows")
        ),
        "transformer-engine.flash": Entry(
            te_attention, (), HALF, FLASH_FORWARD, FLASH_BACKWARD, limits=("no rows",), until="2.0"
        ),
        "xformers.flash": Entry(
            partial(xformers_attention, backend="flash"),
            (),
            HALF,
            FLASH_FORWARD,
            FLASH_BACKWARD,
            limits=("head size 40",),  # backward it takes powers of two from 8 to 256
            size=64,
        ),
        "xformers.cutlass": Entry(
            partial(xformers_attention, backend="cutlass"), (), HALF, "fmha_cutlassF", "fmha_cutlassB"
        ),
    },
    "rms_norm": {
        "torch": Entry(torch_rms_norm, MIXED, ALL, "LayerNormForward", "layer_norm_grad_input", "2.4"),
        "torch.compile": Entry(compiled(torch_rms_norm), (), HALF, "^triton_", "^triton_", "2.4"),
        "transformer-engine": Entry(te_rms_norm, (), ALL, "rmsnorm_fwd", "rmsnorm_bwd", limits=("no rows",)),
        "flash-attn": Entry(flash_rms_norm, (), HALF, "_layer_norm_fwd_1pass", "_layer_norm_bwd", "2.5"),
        "apex": Entry(apex_rms_norm, (), ALL, "cuApplyRMSNorm", "cuComputeGradInput", limits=("no rows",), early=True),
        "apex.mixed": Entry(
            apex_mixed_rms_norm, (), ALL, "cuApplyRMSNorm", "cuComputeGradInput", limits=("no rows",), early=True
        ),
        "dropout-layer-norm": Entry(dropout_rms_norm, (), ALL, "ln_fwd_kernel", "ln_bwd_kernel", size=1024),
        "liger-kernel": Entry(
            liger_rms_norm, (), HALF, "_rms_norm_forward_kernel", "_rms_norm_backward_kernel", early=True
        ),
    },
    "add_rms_norm": {
        "torch": Entry(torch_add_rms_norm, MIXED, ALL, "LayerNormForward", "layer_norm_grad_input", "2.4"),
        "torch.compile": Entry(compiled(torch_add_rms_norm), (), HALF, "^triton_", "^triton_", "2.4"),
        "flash-attn": Entry(flash_add_rms_norm, (), HALF, "_layer_norm_fwd_1pass", "_layer_norm_bwd", "2.5"),
        "dropout-layer-norm": Entry(dropout_add_rms_norm, (), ALL, "ln_fwd_kernel", "ln_bwd_kernel", size=1024),
        "liger-kernel": Entry(liger_add_rms_norm, (), HALF, "fused_add_rms_norm_forw", "fused_add_rms_norm_back"),
    },
    "cross_entropy": {
        "torch": Entry(torch_cross_entropy, MIXED, ALL, "softmax_warp_forward", "softmax_warp_backward"),
        "torch.compile": Entry(compiled(torch_cross_entropy), (), HALF, "^triton_", "^triton_", "2.0"),
        # By its documentation not for float16.
        "transformer-engine": Entry(te_cross_entropy, (), MIXED, "cross_entropy_kernel", "", "2.0"),
        "flash-attn": Entry(flash_cross_entropy, (), HALF, "cross_entropy_fwd_kernel", "cross_entropy_bwd_kernel"),
        "xentropy-cuda-lib": Entry(xentropy_cross_entropy, (), ALL, "SoftMaxXEntropyForw", "SoftMaxXEntropyBackw"),
        "liger-kernel": Entry(liger_cross_entropy, (), HALF, "liger_cross_entropy_kernel", limits=("own input",)),
    },
    "linear_cross_entropy": {
        "torch": Entry(torch_linear_cross_entropy, MIXED, ALL, "softmax_warp_forward", "softmax_warp_backward"),
        "torch.compile": Entry(compiled(torch_linear_cross_entropy), (), HALF, "^triton_", "^triton_", "2.0"),
        "liger-kernel": Entry(liger_linear_cross_entropy, (), HALF, "liger_cross_entropy_kernel"),
    },
    "swiglu": {
        "torch": Entry(torch_swiglu, MIXED, ALL, "silu", "silu_backward"),
        "torch.compile": Entry(compiled(torch_swiglu), (), HALF, "^triton_", "^triton_", "2.0"),
        "transformer-engine": Entry(te_swiglu, (), ALL, "gated", "gated", "2.0"),
        "flash-attn": Entry(flash_swiglu, (), HALF, "swiglu_fwd", "swiglu_bwd"),
        "liger-kernel": Entry(
            liger_swiglu, (), HALF, "_swiglu_forward_kernel", "_swiglu_backward_kernel", limits=("own input",)
        ),
    },
    "mlp": {
        "torch": Entry(torch_mlp, MIXED, ALL, "silu", "silu_backward"),
        "xformers.packed": Entry(partial(xformers_mlp, kind="packed"), (), HALF, "DualGemm", "silu_bw_fused"),
        "xformers.fused": Entry(partial(xformers_mlp, kind="fused"), (), HALF, "DualGemm", "silu_bw_fused"),
        "xformers.decomposed": Entry(partial(xformers_mlp, kind="decomposed"), (), HALF),
    },
    "rope": {
        "torch": Entry(TorchRope, MIXED, ALL),
        "torch.compile": Entry(CompiledRope, (), HALF, "^triton_", "^triton_", "2.0"),
        "transformers": Entry(TransformersRope, SINGLE),
        "transformer-engine": Entry(
            TransformerEngineRope, (), ALL, "fused_rope_forward", "fused_rope_backward", "1.3", limits=OLD_ROPE
        ),
        "flash-attn": Entry(FlashRope, (), HALF, "rotary_kernel", "rotary_kernel"),
        "rotary-emb": Entry(RotaryEmbRope, (), ALL),
        "liger-kernel": Entry(LigerRope, (), HALF, "_triton_rope", "_triton_rope"),
    },
    "adamw": {
        "torch": Entry(torch_adamw, SINGLE, SINGLE, "FusedAdamMathFunctor", since="2.0"),  # on a CPU since 2.4
        "transformer-engine": Entry(
            partial(fused_adamw, module="transformer_engine.pytorch.optimizers"),
            (),
            SINGLE,
            "AdamFunctor",
            since="2.0",
        ),
        "apex": Entry(partial(fused_adamw, module="apex.optimizers"), (), SINGLE, "AdamFunctor<float, float(, int)?>"),
        "deepspeed.cpu": Entry(deepspeed_cpu_adamw, SINGLE, isa="avx2"),
        "deepspeed.fused": Entry(
            partial(fused_adamw, module="deepspeed.ops.adam"), SINGLE, SINGLE, "AdamFunctor<float(, int)?>", isa="avx2"
        ),
    },
    "scaled_mm": {"torch": Entry(torch_scaled_mm, MIXED, BRAIN, since="2.5")},
    "linear": {
        "torch": Entry(torch_linear),
        "transformer-engine.delayed": Entry(partial(te_linear, recipe="delayed"), (), BRAIN),
        "transformer-engine.current": Entry(partial(te_linear, recipe="current"), (), BRAIN, since="2.0"),
        "transformer-engine.blockwise": Entry(partial(te_linear, recipe="blockwise"), (), BRAIN, since="2.3"),
        "torchao.tensorwise": Entry(partial(torchao_linear, recipe="tensorwise"), SINGLE, BRAIN),
        "torchao.rowwise": Entry(partial(torchao_linear, recipe="rowwise"), SINGLE, BRAIN),
        "torchao.rowwise_with_gw_hp": Entry(partial(torchao_linear, recipe="rowwise_with_gw_hp"), SINGLE, BRAIN),
    },
}


def operator(name: str, column: str) -> Callable[..., Any]:
    """The entry of the table, e.g. operator("adamw", "deepspeed.cpu"); KeyError if there is none."""
    return OPERATORS[name][column].call


class Row(NamedTuple):
    """One implementation of an operator, with one dtype that it is proved with."""

    name: str
    column: str
    dtype: torch.dtype


def rows(name: str, packages: Dict[str, str], cuda: bool) -> Iterator[Row]:
    """The implementations of an operator that these packages (name -> version) have for a GPU or for a CPU."""
    for column, entry in OPERATORS[name].items():
        version = packages.get(column.partition(".")[0])
        if version is not None and holds(version, entry.since, entry.until):
            yield from (Row(name, column, getattr(torch, dtype)) for dtype in (entry.cuda if cuda else entry.cpu))


def float8_overflow(dtype: torch.dtype) -> float:
    """What torch casts values beyond the largest of a float8 format to (infinity included)."""
    if dtype is torch.float8_e5m2:
        return math.inf
    return torch.finfo(dtype).max if version_of_torch() >= (2, 12) else math.nan
