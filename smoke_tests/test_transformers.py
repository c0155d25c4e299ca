"""A model whose layers carry state that is no tensor, as Transformer Engine's FP8 layers do, is saved and loaded."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from safetensors.torch import load_file
from transformers import MistralConfig, MistralForCausalLM

from claims import needs, proves
from fused_ops import operator, te_autocast, te_recipe


class LinearWithState(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer whose extra state is a byte stream; Transformer Engine 1.1 to 1.13 keeps its scales like this."""

    def get_extra_state(self) -> io.BytesIO:
        return io.BytesIO(b"amax history and scales")

    def set_extra_state(self, state: Any) -> None:
        del state


class MistralWithState(MistralForCausalLM):  # type: ignore[misc]
    """A one-layer Mistral, every projection of its MLP with extra state."""

    def __init__(self, config: MistralConfig) -> None:
        super().__init__(config)
        mlp = self.model.layers[0].mlp
        for name in ("gate_proj", "up_proj", "down_proj"):
            plain = getattr(mlp, name)
            setattr(mlp, name, LinearWithState(plain.in_features, plain.out_features, bias=False))


@pytest.fixture
def model() -> MistralWithState:
    """A tiny model with fresh random weights and extra state in three of its layers."""
    shape = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 1}
    built = MistralWithState(MistralConfig(num_attention_heads=4, num_key_value_heads=2, **shape))
    assert sum(key.endswith("_extra_state") for key in built.state_dict()) == 3
    return built


def tensors_of(model: torch.nn.Module) -> Dict[str, torch.Tensor]:
    """The tensors of a state dict, without extra state."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def assert_bit_equal(found: Dict[str, torch.Tensor], expected: Dict[str, torch.Tensor]) -> None:
    """Same names, same dtypes, same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("safetensors", [True, False], ids=["safetensors", "bin"])
@proves("a model with non-tensor extra state is saved with all its tensors and without that state", seed="A10")
def test_extra_state_is_left_out_on_save(model: MistralWithState, safetensors: bool, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, safe_serialization=safetensors)
    if safetensors:
        saved = load_file(tmp_path / "model.safetensors")
    else:
        saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert_bit_equal(saved, tensors_of(model))


@pytest.mark.parametrize("safetensors", [True, False], ids=["safetensors", "bin"])
@proves("a model with non-tensor extra state is loaded from its checkpoint, every weight bit-equal", seed="A09")
def test_extra_state_is_skipped_on_load(model: MistralWithState, safetensors: bool, tmp_path: Path) -> None:
    # Written here, not by save_pretrained, so that a fault of saving does not refute loading.
    model.config.save_pretrained(tmp_path)
    write_checkpoint(tensors_of(model), tmp_path, safetensors)
    loaded = MistralWithState.from_pretrained(tmp_path)
    assert_bit_equal(tensors_of(loaded), tensors_of(model))


class MistralOfTransformerEngine(MistralForCausalLM):  # type: ignore[misc]
    """A one-layer Mistral, every projection Transformer Engine's; its sizes are multiples of 16."""

    def __init__(self, config: MistralConfig) -> None:
        super().__init__(config)
        operator("linear", "transformer-engine.delayed")(self, lambda name: False)


def in_fp8(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of tokens [b, l] on their own, in FP8."""
    with te_autocast(te_recipe("delayed")):
        loss: torch.Tensor = model(tokens, labels=tokens).loss
    return loss


@needs(sm=(8, 9))
@pytest.mark.parametrize("safetensors", [True, False], ids=["safetensors", "bin"])
@proves(
    "a model of Transformer Engine's layers that trained in FP8 is saved and loaded, every weight bit-equal, and goes "
    "on in FP8, its scales measured anew",
    seed=("A09", "A10"),
)
def test_a_model_in_fp8_is_saved_and_loaded(
    safetensors: bool, device: str, tmp_path: Path, measured: Dict[str, Any]
) -> None:
    shape = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = MistralConfig(num_attention_heads=4, num_key_value_heads=2, **shape)
    model = MistralOfTransformerEngine(config).to(device)
    tokens = torch.randint(48, (2, 16), device=device)
    for _ in range(2):
        in_fp8(model, tokens).backward()
    state = model.state_dict()
    kinds = sorted({type(state[name]).__name__ for name in state if name.endswith("_extra_state")})
    measured["extra state"] = ", ".join(kinds)
    model.save_pretrained(tmp_path, safe_serialization=safetensors)
    loaded = MistralOfTransformerEngine.from_pretrained(tmp_path).to(device)
    assert_bit_equal(tensors_of(loaded), tensors_of(model))
    losses = [in_fp8(one, tokens) for one in (model, loaded)]
    losses[1].backward()
    # The first step after loading has scales of 1, and values near those that e4m3 then holds.
    measured["loss"], measured["loaded"] = (float(loss.detach()) for loss in losses)
    assert measured["loaded"] == pytest.approx(measured["loss"], rel=0.05)


def write_checkpoint(tensors: Dict[str, torch.Tensor], folder: Path, safetensors: bool) -> None:
    """Write tensors as the one file that from_pretrained looks for."""
    if safetensors:
        from safetensors.torch import save_file

        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
