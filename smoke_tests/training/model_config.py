"""The model of a Hugging Face config.json, and back: a Llama or a Mistral whose every key is followed, or refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

from smoke_tests.training.models import Model, Shape, parameters_of

FAMILIES = ("llama", "mistral")
SIZES = (
    "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "vocab_size",
)  # fmt: skip
OPTIONAL = (
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters", "sliding_window",
    "tie_word_embeddings",
)  # fmt: skip
# Keys that do not affect pre-training: names, dtypes of files, settings of generation and initialization.
WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype",
    "transformers_version", "use_cache", "initializer_range", "output_attentions", "output_hidden_states",
    "return_dict", "model_type",
}  # fmt: skip
# Keys with the one value that llama.py computes; a family's default is taken where the key is absent.
FIXED: Dict[str, Tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "rope_scaling": (None,),
}


class ConfigError(ValueError):
    """A config.json cannot be followed; the message is one sentence that names the key."""


def text_of(path: str, length: int = 0) -> str:
    """The keys of a config.json that decide the model, as one line of JSON. ConfigError names what it cannot follow.

    length: of the windows that the model will see, at most max_position_embeddings if 0.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{path}: model_type is {json.dumps(family)}, but must be {' or '.join(FAMILIES)}")
    for key, value in config.items():
        if key in FIXED and value not in FIXED[key]:
            raise ConfigError(f"{path}: {key} is {json.dumps(value)}, which cannot be trained here")
        if key not in (*SIZES, *OPTIONAL, *FIXED, *WITHOUT_EFFECT):
            raise ConfigError(f"{path}: {key} is not known, and could change the model")
    chosen = {key: config[key] for key in (*SIZES, *OPTIONAL) if config.get(key) is not None}
    if family == "mistral":  # transformers' defaults for a Mistral
        chosen.setdefault("num_key_value_heads", 8)
        chosen.setdefault("sliding_window", None if "sliding_window" in config else 4096)
    made = _model(chosen, lambda key, why: ConfigError(f"{path}: {key} {why}"))
    width = chosen["hidden_size"]
    if made.shape.width != width:
        raise ConfigError(
            f"{path}: hidden_size is {width}, but must be num_attention_heads x head_dim, {made.shape.width}"
        )
    window, context = chosen.get("sliding_window"), length or made.shape.length
    if window is not None and window < context:
        raise ConfigError(f"{path}: sliding_window is {window}, shorter than the context of {context}: see --length")
    if not made.tied:
        chosen.pop("tie_word_embeddings", None)
    return json.dumps(chosen, sort_keys=True)


def model_of(text: str) -> Model:
    """The model of what text_of() returned."""
    return _model(json.loads(text), lambda key, why: ConfigError(f"--config: {key} {why}"))


def _model(config: Dict[str, Any], wrong: Callable[[str, str], ConfigError]) -> Model:
    number = functools.partial(_number, config, wrong)
    heads, width = number("num_attention_heads"), number("hidden_size")
    kv_heads, head_size = number("num_key_value_heads", heads), number("head_dim", width // heads or 1)
    if heads % kv_heads:
        raise wrong("num_key_value_heads", f"is {kv_heads}, which does not divide the {heads} heads")
    if head_size % 2:
        raise wrong("head_dim", f"is {head_size}, but must be even")
    length = number("max_position_embeddings")
    if config.get("sliding_window") is not None:
        number("sliding_window")
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise wrong("tie_word_embeddings", f"is {json.dumps(tied)}, but must be true or false")
    rope = config.get("rope_parameters", {})
    if (
        not isinstance(rope, dict)
        or set(rope) - {"rope_theta", "rope_type"}
        or rope.get("rope_type") not in (None, "default")
    ):
        raise wrong("rope_parameters", f"is {json.dumps(rope)}, and only rope_theta can be followed")
    base = number("rope_theta", rope.get("rope_theta", 10000.0), whole=False)
    shape = Shape(
        number("num_hidden_layers"),
        heads,
        kv_heads,
        head_size,
        number("intermediate_size"),
        number("vocab_size"),
        length,
    )
    eps = number("rms_norm_eps", 1e-6, whole=False)
    return Model(shape, parameters_of(shape, tied), "a config.json", float(base), float(eps), tied)


def _number(
    config: Dict[str, Any],
    wrong: Callable[[str, str], ConfigError],
    key: str,
    default: Optional[float] = None,
    whole: bool = True,
) -> Any:
    """The number above 0 that a key of a config.json, or its default, is."""
    value = config.get(key, default)
    kind = int if whole else (int, float)
    if value is None:
        raise wrong(key, "is missing")
    if not isinstance(value, kind) or isinstance(value, bool) or not value > 0:
        raise wrong(key, f"is {json.dumps(value)}, but must be a {'whole ' if whole else ''}number above 0")
    return value


def config_of(model: Model, dtype: str, end: Optional[int]) -> Dict[str, Any]:
    """The config.json of a model, as a Llama, which text_of() reads again; the context is that of the training.

    dtype: of the weights beside it. end: the id of the token that ends a text, or None.
    """
    shape = model.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "max_position_embeddings": shape.length,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": model.eps,
        "rope_theta": model.base,
        "tie_word_embeddings": model.tied,
        "torch_dtype": dtype,
        "vocab_size": shape.vocabulary,
    }
