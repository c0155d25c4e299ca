"""The table of fused operators: operator x implementation -> callable.

A column is a distribution, with a variant after a dot where it has several. Each distribution has an adapter module,
which handles the differences between its versions. An adapter imports its package when it is called, so that a broken
package refutes only the claims about itself. It may add its rows itself, by the decorator of implements.py.

Shapes: b batch, h heads, k key/value heads, l length, d head size; n rows, f features, v vocabulary.
"""

from __future__ import annotations

import importlib
import inspect
import os
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch

from smoke_tests.claims import holds
from smoke_tests.operators.apex_adapter import apex_mixed_rms_norm, apex_rms_norm, fused_adamw
from smoke_tests.operators.deepspeed_adapter import deepspeed_cpu_adamw
from smoke_tests.operators.dropout_layer_norm_adapter import dropout_add_rms_norm, dropout_rms_norm
from smoke_tests.operators.flash_attn_adapter import (
    FlashRope,
    flash_add_rms_norm,
    flash_attention,
    flash_cross_entropy,
    flash_rms_norm,
    flash_swiglu,
)
from smoke_tests.operators.liger_kernel_adapter import (
    LigerRope,
    liger_add_rms_norm,
    liger_cross_entropy,
    liger_linear_cross_entropy,
    liger_rms_norm,
    liger_swiglu,
)
from smoke_tests.operators.rotary_emb_adapter import RotaryEmbRope
from smoke_tests.operators.torch_adapter import (
    CompiledRope,
    TorchRope,
    compiled,
    sdpa,
    torch_adamw,
    torch_add_rms_norm,
    torch_attention,
    torch_cross_entropy,
    torch_linear,
    torch_linear_cross_entropy,
    torch_mlp,
    torch_rms_norm,
    torch_scaled_mm,
    torch_swiglu,
    version_of_torch,
)
from smoke_tests.operators.torchao_adapter import torchao_linear
from smoke_tests.operators.transformer_engine_adapter import (
    TransformerEngineRope,
    te_attention,
    te_cross_entropy,
    te_linear,
    te_rms_norm,
    te_swiglu,
)
from smoke_tests.operators.transformers_adapter import TransformersRope
from smoke_tests.operators.xentropy_adapter import xentropy_cross_entropy
from smoke_tests.operators.xformers_adapter import xformers_attention, xformers_mlp

SINGLE = ("float32",)
BRAIN = ("bfloat16",)
HALF = ("bfloat16", "float16")
MIXED = ("float32", "bfloat16")  # the dtypes claimed on a CPU
ALL = ("float32", "bfloat16", "float16")

if version_of_torch() < (2, 2):
    # With its own cuDNN (8.9.2.26), Transformer Engine's fused attention finds no plan to execute.
    os.environ.setdefault("NVTE_FUSED_ATTN", "0")


class Entry(NamedTuple):
    """One implementation of an operator.

    cpu, cuda: the dtypes that it is proved with on a CPU and on a GPU; empty where it does not run.
    forward, backward: regular expressions of a GPU kernel that only it runs; empty where no kernel identifies it, or
    where the gradient is computed forward.
    limits: input that it is known to refuse ("one row", "no rows", "head size 40", "another base"), or to overwrite
    with its gradient ("own input").
    since, until: the first version of its distribution that has it, and the first that lacks it; "" is no end.
    size: the length of a row or of a head that it is tried with, where it does not take every length.
    isa: a CPU feature that it needs.
    early: it rounds a normalized row to the dtype both before and after it multiplies it by the weight, like Llama.
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

# A limit of Transformer Engine before 2.0, the only version that targets combine with so old a torch.
OLD_ROPE = ("another base",) if version_of_torch() < (2, 2) else ()

OPERATORS: Dict[str, Dict[str, Entry]] = {
    # attention(query [b, h, l, d], key [b, k, l, d], value [b, k, l, d]) -> [b, h, l, d], causal
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
    # rms_norm(x [n, f], weight [f], eps) -> [n, f]
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
    # add_rms_norm(x [n, f], residual [n, f], weight [f], eps) -> [n, 2f]: the normalized sum, and the sum
    "add_rms_norm": {
        "torch": Entry(torch_add_rms_norm, MIXED, ALL, "LayerNormForward", "layer_norm_grad_input", "2.4"),
        "torch.compile": Entry(compiled(torch_add_rms_norm), (), HALF, "^triton_", "^triton_", "2.4"),
        "flash-attn": Entry(flash_add_rms_norm, (), HALF, "_layer_norm_fwd_1pass", "_layer_norm_bwd", "2.5"),
        "dropout-layer-norm": Entry(dropout_add_rms_norm, (), ALL, "ln_fwd_kernel", "ln_bwd_kernel", size=1024),
        "liger-kernel": Entry(liger_add_rms_norm, (), HALF, "fused_add_rms_norm_forw", "fused_add_rms_norm_back"),
    },
    # cross_entropy(logits [n, v], labels [n], ignore_index) -> scalar, the mean over rows that count
    "cross_entropy": {
        "torch": Entry(torch_cross_entropy, MIXED, ALL, "softmax_warp_forward", "softmax_warp_backward"),
        "torch.compile": Entry(compiled(torch_cross_entropy), (), HALF, "^triton_", "^triton_", "2.0"),
        # Its documentation excludes float16.
        "transformer-engine": Entry(te_cross_entropy, (), MIXED, "cross_entropy_kernel", "", "2.0"),
        "flash-attn": Entry(flash_cross_entropy, (), HALF, "cross_entropy_fwd_kernel", "cross_entropy_bwd_kernel"),
        "xentropy-cuda-lib": Entry(xentropy_cross_entropy, (), ALL, "SoftMaxXEntropyForw", "SoftMaxXEntropyBackw"),
        "liger-kernel": Entry(liger_cross_entropy, (), HALF, "liger_cross_entropy_kernel", limits=("own input",)),
    },
    # linear_cross_entropy(x [n, f], weight [v, f], labels [n], ignore_index) -> scalar, of the logits x weight^T
    "linear_cross_entropy": {
        "torch": Entry(torch_linear_cross_entropy, MIXED, ALL, "softmax_warp_forward", "softmax_warp_backward"),
        "torch.compile": Entry(compiled(torch_linear_cross_entropy), (), HALF, "^triton_", "^triton_", "2.0"),
        "liger-kernel": Entry(liger_linear_cross_entropy, (), HALF, "liger_cross_entropy_kernel"),
    },
    # swiglu(gate, up) -> silu(gate) * up, any equal shapes
    "swiglu": {
        "torch": Entry(torch_swiglu, MIXED, ALL, "silu", "silu_backward"),
        "torch.compile": Entry(compiled(torch_swiglu), (), HALF, "^triton_", "^triton_", "2.0"),
        "transformer-engine": Entry(te_swiglu, (), ALL, "gated", "gated", "2.0"),
        "flash-attn": Entry(flash_swiglu, (), HALF, "swiglu_fwd", "swiglu_bwd"),
        "liger-kernel": Entry(
            liger_swiglu, (), HALF, "_swiglu_forward_kernel", "_swiglu_backward_kernel", limits=("own input",)
        ),
    },
    # mlp(x [n, f], gate and up [h, f], down [f, h], biases [h], [h], [f]) -> [n, f]: SwiGLU and its projections
    "mlp": {
        "torch": Entry(torch_mlp, MIXED, ALL, "silu", "silu_backward"),
        "xformers.packed": Entry(partial(xformers_mlp, kind="packed"), (), HALF, "DualGemm", "silu_bw_fused"),
        "xformers.fused": Entry(partial(xformers_mlp, kind="fused"), (), HALF, "DualGemm", "silu_bw_fused"),
        "xformers.decomposed": Entry(partial(xformers_mlp, kind="decomposed"), (), HALF),
    },
    # rope(head size, base) -> rotate(x [b, h, l, d], start) -> the same shape, halves paired
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
    # adamw(parameters, lr, betas, eps, weight_decay) -> optimizer with step()
    "adamw": {
        "torch": Entry(torch_adamw, SINGLE, SINGLE, "FusedAdamMathFunctor", since="2.0"),  # fused on a CPU since 2.4
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
    # scaled_mm(a [m, k] fp8, b [n, k] fp8, scale_a, scale_b, dtype) -> (a scale_a) (b scale_b)^T [m, n] in dtype
    "scaled_mm": {"torch": Entry(torch_scaled_mm, MIXED, BRAIN, since="2.5")},
    # linear(model, keep) -> the model, its torch.nn.Linear layers replaced except those that keep(name) names
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


# Adapters that add rows to the table with `implements`, so the table must exist first.
from smoke_tests.operators import flash_attn_3_adapter, newer_versions_adapter, quack_adapter  # noqa: E402, F401


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


def repeats(column: str) -> bool:
    """Whether backward adds in one order where deterministic algorithms are asked for.

    xformers' kernels have no such order, flash-attn's have had it since 2.4.1, and torch refuses to run cuDNN's.
    """
    if column in ("flash-attn", "transformer-engine.flash"):
        attend = importlib.import_module("flash_attn").flash_attn_func
        return "deterministic" in inspect.signature(attend).parameters
    return not column.startswith("xformers.") and column != "torch.cudnn"


def te_recipes(version: str) -> List[str]:
    """The names of the recipes that this version of Transformer Engine has."""
    columns = (row.column.partition(".") for row in rows("linear", {"transformer-engine": version}, cuda=True))
    return list(dict.fromkeys(variant for _, _, variant in columns))
