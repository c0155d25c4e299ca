"""Convert a checkpoint to a Mistral of transformers, and back."""

from __future__ import annotations

from typing import Any, Dict

import torch

from smoke_tests.training.models import Model

# The joint products of the Llama, and their parts in a Mistral.
JOINT = {"attention.qkv": ("q_proj", "k_proj", "v_proj"), "feed_forward.gate_up": ("gate_proj", "up_proj")}
NAMES = {
    "attention.output": "self_attn.o_proj",
    "feed_forward.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
}
ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def mistral(model: Model) -> Any:
    """A MistralForCausalLM of that model, with fresh weights."""
    from transformers import MistralConfig, MistralForCausalLM

    shape = model.shape
    config = MistralConfig(
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.length,
        sliding_window=None,
        rms_norm_eps=model.eps,
        rope_theta=model.base,
        tie_word_embeddings=False,
    )
    return MistralForCausalLM(config)


def to_mistral(weights: Dict[str, torch.Tensor], model: Model) -> Any:
    """A MistralForCausalLM with the weights of a Llama of that model (checkpoint.weights_of or a checkpoint's)."""
    shape, made = model.shape, mistral(model)
    rows = rows_of(model)
    state = {f"{theirs}.weight": weights[f"{ours}.weight"] for ours, theirs in ENDS.items()}
    for layer in range(shape.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        for name, other in NAMES.items():
            state[f"{theirs}.{other}.weight"] = weights[f"{ours}.{name}.weight"]
        for name, parts in JOINT.items():
            group = "self_attn" if name.startswith("attention") else "mlp"
            for part, weight in zip(parts, weights[f"{ours}.{name}.weight"].split(rows[name])):
                state[f"{theirs}.{group}.{part}.weight"] = weight
    made.load_state_dict(state)
    return made


def from_mistral(mistral: Any) -> Dict[str, torch.Tensor]:
    """The weights of a Mistral or a Llama of transformers, by the names that llama.py gives them."""
    state = mistral.state_dict()
    weights = {f"{ours}.weight": state[f"{theirs}.weight"] for ours, theirs in ENDS.items()}
    for layer in range(mistral.config.num_hidden_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        for name, other in NAMES.items():
            weights[f"{ours}.{name}.weight"] = state[f"{theirs}.{other}.weight"]
        for name, parts in JOINT.items():
            group = "self_attn" if name.startswith("attention") else "mlp"
            weights[f"{ours}.{name}.weight"] = torch.cat([state[f"{theirs}.{group}.{part}.weight"] for part in parts])
    return weights


def rows_of(model: Model) -> Dict[str, Any]:
    """How many rows each part of a joint weight has."""
    shape = model.shape
    keys = shape.kv_heads * shape.head_size
    return {"attention.qkv": [shape.width, keys, keys], "feed_forward.gate_up": [shape.hidden, shape.hidden]}
