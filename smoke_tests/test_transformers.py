"""A model whose layers carry state that is no tensor, as Transformer Engine's FP8 layers do, is saved and loaded."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from safetensors.torch import load_file
from transformers import MistralConfig, MistralForCausalLM

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds, references
from smoke_tests.operators.table import operator
from smoke_tests.operators.transformer_engine_adapter import te_autocast, te_recipe


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


def assert_bit_equal(actual: Dict[str, torch.Tensor], expected: Dict[str, torch.Tensor]) -> None:
    """Same names, same dtypes, same bits."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("safetensors", [True, False], ids=["safetensors", "bin"])
@proves(
    "a model with non-tensor extra state is saved with all its tensors and without that state", seed="A10", until="5"
)
def test_extra_state_is_left_out_on_save(model: MistralWithState, safetensors: bool, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, safe_serialization=safetensors)
    if safetensors:
        saved = load_file(tmp_path / "model.safetensors")
    else:
        saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert_bit_equal(saved, tensors_of(model))


@proves(
    "a model with non-tensor extra state is saved as safetensors, the only form since 5, with all its tensors and "
    "without that state",
    seed="A10",
    since="5",
)
def test_extra_state_is_left_out_of_safetensors(model: MistralWithState, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert_bit_equal(load_file(tmp_path / "model.safetensors"), tensors_of(model))


@pytest.mark.parametrize("safetensors", [True, False], ids=["safetensors", "bin"])
@proves("a model with non-tensor extra state is loaded from its checkpoint, every weight bit-equal", seed="A09")
def test_extra_state_is_skipped_on_load(model: MistralWithState, safetensors: bool, tmp_path: Path) -> None:
    # Written here, not by save_pretrained, so that a fault of saving does not refute loading.
    model.config.save_pretrained(tmp_path)
    write_checkpoint(tensors_of(model), tmp_path, safetensors)
    loaded = MistralWithState.from_pretrained(tmp_path)
    assert_bit_equal(tensors_of(loaded), tensors_of(model))


IGNORED = -100


def loss_by_hand(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The mean of the float64 cross entropy of each token's logits [b, l, v] and the next label that counts [b, l]."""
    logits, after = logits.detach().cpu().double()[:, :-1], labels.cpu()[:, 1:]
    return float(references.cross_entropy(logits.flatten(0, 1), after.flatten(), IGNORED))


@proves("a model's loss is the mean cross entropy of its logits and the next tokens, ignored ones left out")
def test_loss_is_of_the_next_token(model: MistralWithState, measured: Dict[str, Any]) -> None:
    tokens = torch.randint(48, (3, 17))
    labels = torch.where(torch.rand(tokens.shape) < 0.3, IGNORED, tokens)
    labels[:, 1], labels[:, 2] = tokens[:, 1], IGNORED  # some count and some do not, whatever the seed
    output = model(tokens, labels=labels)
    expected = loss_by_hand(output.logits, labels)
    measured["off"] = abs(float(output.loss.detach()) / expected - 1)
    # float32: a log-sum-exp of 48 terms and a mean of up to 48 rows, one rounding each at worst.
    assert measured["off"] <= (48 + 48) * 2.0**-24


class MistralOfTransformerEngine(MistralForCausalLM):  # type: ignore[misc]
    """A one-layer Mistral, every projection Transformer Engine's; its sizes are multiples of 16."""

    def __init__(self, config: MistralConfig) -> None:
        super().__init__(config)
        operator("linear", "transformer-engine.delayed")(self, lambda name: False)


def step_in_fp8(model: torch.nn.Module, tokens: torch.Tensor) -> Any:
    """What the model gives for tokens [b, l], which are their own labels, in FP8, its gradients computed."""
    with te_autocast(te_recipe("delayed")):
        output = model(tokens, labels=tokens)
    output.loss.backward()
    return output


@needs(sm=(8, 9))
@pytest.mark.parametrize("safetensors", [True, False], ids=["safetensors", "bin"])
@proves(
    "a model of Transformer Engine's layers that trained in FP8 is saved and loaded, every weight bit-equal, and goes "
    "on in FP8, its scales measured anew",
    seed=("A09", "A10"),
    until="5",
)
def test_a_model_in_fp8_is_saved_and_loaded(
    safetensors: bool, device: str, tmp_path: Path, measured: Dict[str, Any]
) -> None:
    shape = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = MistralConfig(num_attention_heads=4, num_key_value_heads=2, **shape)
    model = MistralOfTransformerEngine(config).to(device)
    tokens = torch.randint(48, (2, 16), device=device)
    for _ in range(2):
        step_in_fp8(model, tokens)
    state = model.state_dict()
    kinds = sorted({type(state[name]).__name__ for name in state if name.endswith("_extra_state")})
    measured["extra state"] = ", ".join(kinds)
    model.save_pretrained(tmp_path, safe_serialization=safetensors)
    loaded = MistralOfTransformerEngine.from_pretrained(tmp_path).to(device)
    assert_bit_equal(tensors_of(loaded), tensors_of(model))
    loaded.train()  # in training mode, like the trained model
    for _ in range(2):  # the first step after loading has scales of 1, and measures those of the next
        step_in_fp8(loaded, tokens)
    trained, resumed = (step_in_fp8(network, tokens) for network in (model, loaded))
    measured["loss"], measured["loaded"] = (float(output.loss.detach()) for output in (trained, resumed))
    for output in (trained, resumed):
        assert float(output.loss.detach()) == pytest.approx(loss_by_hand(output.logits, tokens), rel=96 * 2.0**-24)
    # With the same weights and scales, a product has the same codes; only float32 arithmetic may differ.
    apart = bounds.relative_error(resumed.logits.detach().cpu(), trained.logits.detach().cpu().double())
    assert apart <= bounds.rounding_noise(bounds.E4M3)[0] / 8, f"logits are {apart:.3g} apart"
    with torch.no_grad():  # the contrast, so that this could fail: in high precision they are farther off
        plain = model(tokens).logits.cpu().double()
    noise = bounds.relative_error(trained.logits.detach().cpu(), plain)
    assert noise >= bounds.rounding_noise(bounds.E4M3)[0], f"FP8 moves the logits by {noise:.3g} only"


class MistralMadeInFp8(MistralForCausalLM):  # type: ignore[misc]
    """The same, its layers made without their weights: since 5, transformers makes a model before it reads numbers."""

    def __init__(self, config: MistralConfig) -> None:
        from transformer_engine.pytorch import Linear

        super().__init__(config)
        for name, layer in list(self.named_modules()):
            if type(layer) is torch.nn.Linear:
                parent, _, leaf = name.rpartition(".")
                sizes = layer.in_features, layer.out_features
                made = Linear(*sizes, bias=False, params_dtype=torch.float32, device="cuda")
                setattr(self.get_submodule(parent), leaf, made)


@needs(sm=(8, 9))
@proves(
    "a model of Transformer Engine's layers that trained in FP8 is saved with its FP8 state and refused when it is "
    "loaded; once the checkpoint is declared trusted it is loaded, every weight bit-equal, and its next step in FP8 "
    "has the loss of the one that was saved",
    seed=("A09", "A10"),
    since="5",
)
def test_a_model_in_fp8_is_loaded_with_its_scales(
    device: str, tmp_path: Path, measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    model = MistralMadeInFp8(MistralConfig(num_attention_heads=4, num_key_value_heads=2, **shape)).to(device)
    tokens = torch.randint(48, (2, 16), device=device)
    for _ in range(2):
        step_in_fp8(model, tokens)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    states = {name: value for name, value in saved.items() if name.endswith("_extra_state")}
    measured["states"] = len(states)
    assert states and all(value.dtype == torch.uint8 and len(value) for value in states.values())
    monkeypatch.delenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", raising=False)
    with pytest.raises(RuntimeError, match="NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1"):
        MistralMadeInFp8.from_pretrained(tmp_path)
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    loaded = MistralMadeInFp8.from_pretrained(tmp_path).to(device)
    assert_bit_equal(dict(loaded.named_parameters()), dict(model.named_parameters()))
    loaded.train()  # in training mode, like the trained model
    trained, resumed = (step_in_fp8(network, tokens) for network in (model, loaded))
    measured["loss"], measured["loaded"] = (float(output.loss.detach()) for output in (trained, resumed))
    # With the same weights and scales, a product has the same codes; only float32 arithmetic may differ.
    apart = bounds.relative_error(resumed.logits.detach().cpu(), trained.logits.detach().cpu().double())
    assert apart <= bounds.rounding_noise(bounds.E4M3)[0] / 8, f"logits are {apart:.3g} apart"
    with torch.no_grad():  # the contrast, so that this could fail: in high precision they are farther off
        plain = model(tokens).logits.cpu().double()
    noise = bounds.relative_error(trained.logits.detach().cpu(), plain)
    assert noise >= bounds.rounding_noise(bounds.E4M3)[0], f"FP8 moves the logits by {noise:.3g} only"


def write_checkpoint(tensors: Dict[str, torch.Tensor], folder: Path, safetensors: bool) -> None:
    """Write tensors as the one file that from_pretrained looks for."""
    if safetensors:
        from safetensors.torch import save_file

        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
