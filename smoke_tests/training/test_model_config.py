"""A model that a Hugging Face config.json describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smoke_tests.claims import proves
from smoke_tests.training import checkpoint
from smoke_tests.training.model_config import ConfigError, model_of, text_of
from smoke_tests.training.options import model_of as model_of_run
from smoke_tests.training.options import parse
from smoke_tests.training.small_runs import refusal_of, small, trained

pytestmark = pytest.mark.usefixtures("one_thread")
# As TinyLlama 1.1B's, with the keys that transformers writes.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
    "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22,
    "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.35.0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip


def described(folder: Path, **changes: Any) -> str:
    """What text_of() makes of that config.json with some changes; None removes a key."""
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**LLAMA, **changes}.items() if value != "removed"}))
    return text_of(str(path))


@proves(
    "a config.json gives the sizes, the rotary base and the epsilon of a Llama or a Mistral, with the defaults of "
    "transformers for what is absent",
    package="torch",
    since="2.1",
)
def test_config(tmp_path: Path) -> None:
    made = model_of(described(tmp_path))
    assert made.shape == (22, 32, 4, 64, 5632, 32000, 2048) and made.parameters == 1_100_048_384
    assert (made.base, made.eps) == (10000.0, 1e-5)
    assert model_of(described(tmp_path, rope_theta=5e5, rms_norm_eps="removed"))[3:] == (5e5, 1e-6, False)
    assert model_of(described(tmp_path, rope_parameters={"rope_theta": 7, "rope_type": "default"})).base == 7
    assert model_of(described(tmp_path, num_key_value_heads="removed")).shape.kv_heads == 32
    mistral = {"model_type": "mistral", "num_key_value_heads": "removed"}
    assert model_of(described(tmp_path, **mistral)).shape.kv_heads == 8
    tied = model_of(described(tmp_path, tie_word_embeddings=True))
    assert tied == made._replace(tied=True, parameters=made.parameters - 32000 * 2048)
    long = {"model_type": "mistral", "max_position_embeddings": 8192}
    with pytest.raises(ConfigError, match="shorter than the context of 8192"):
        described(tmp_path, **long)
    assert model_of(text_of(str(tmp_path / "config.json"), 4096)).shape.length == 8192
    assert model_of(described(tmp_path, head_dim=32, hidden_size=1024)).shape.head_size == 32


@proves(
    "what a config.json asks for that is not computed here is refused by its key, and so is a key that is not known",
    package="torch",
    since="2.1",
)
def test_refused_configs(tmp_path: Path) -> None:
    for changes in (
        {"tie_word_embeddings": "no"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_dropout": 0.1},
        {"hidden_act": "gelu"},
        {"sliding_window": 1024},
        {"model_type": "qwen2"},
        {"head_dim": 63},
        {"hidden_size": 2049},
        {"hidden_size": "removed"},
        {"num_key_value_heads": 5},
        {"vocab_size": 0},
        {"num_hidden_layers": "two"},
        {"rms_norm_eps": -1e-5},
        {"num_local_experts": 8},
    ):
        with pytest.raises(ConfigError) as caught:
            described(tmp_path, **changes)
        assert next(iter(changes)) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="sliding_window is 4096, shorter"):
        described(tmp_path, model_type="mistral", max_position_embeddings=8192)
    assert "none.json" in refusal_of(lambda: parse(["--config", str(tmp_path / "none.json")]))


@proves(
    "a run of a config.json trains that model and resumes although the file has changed, but not with another model",
    package="torch",
    since="2.1",
)
def test_run_of_a_config(tmp_path: Path) -> None:
    tiny = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny.update(max_position_embeddings=16, num_hidden_layers=1, vocab_size=256)
    described(tmp_path, **tiny)
    options = parse(["--config", str(tmp_path / "config.json")])
    described(tmp_path)
    assert model_of_run(options).shape == (1, 2, 1, 16, 48, 256, 16)
    run = {"config": options.config, "out": str(tmp_path / "out")}
    first = trained(small(steps=2, **run))
    last = checkpoint.load(checkpoint.newest(tmp_path / "out"))  # type: ignore[arg-type]
    assert last["model"]["embedding.weight"].shape == (256, 32)
    assert trained(small(steps=3, resume=True, **run))[:2] == first
    other = small(steps=4, resume=True, **{**run, "config": described(tmp_path, **{**tiny, "rope_theta": 7})})
    assert "--config" in refusal_of(lambda: trained(other))


@proves(
    "the config.json that transformers writes of a Mistral gives the model that it was made of",
    package="transformers",
)
def test_config_of_transformers(tmp_path: Path) -> None:
    from transformers import MistralConfig

    MistralConfig(
        vocab_size=250, hidden_size=96, intermediate_size=112, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-4, rope_theta=500.0,
    ).save_pretrained(str(tmp_path))  # fmt: skip
    model = model_of(text_of(str(tmp_path / "config.json")))
    assert model.shape == (3, 6, 2, 16, 112, 250, 64) and model[3:] == (500.0, 1e-4, False)
