"""The parts together: a small Llama trained in FP8 follows the same Llama in high precision."""

from __future__ import annotations

import math
import socket
from typing import Any, Callable, Dict, Iterator, List

import pytest
import torch

from smoke_tests.claims import every, long, needs, proves
from smoke_tests.operators.kernels import assert_float8_products
from smoke_tests.operators.table import operator
from smoke_tests.operators.transformer_engine_adapter import te_autocast, te_recipe
from smoke_tests.training.comparison import FALL, ShortRun, assert_follows, fall_of, plain_losses, same_run, spread
from smoke_tests.training.short_training import batches, standard_library_text

__all__ = ["same_run"]  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread")


class FrozenScales:
    """Computes the scales of the first step and hands out the same ones in every later step."""

    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        self.compute = compute
        self.scales: List[torch.Tensor] = []
        self.used = 0

    def restart(self) -> None:
        """Begin a step."""
        self.used = 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.used == len(self.scales):
            self.scales.append(self.compute(*args, **kwargs))
        self.used += 1
        return self.scales[self.used - 1]


@long
@every("linear")
@proves(
    "a 2-layer Llama in FP8, its other operators fused, learns real text, its loss falling by 2.5 nats per byte or "
    "more and staying within a fifth of what two seeds are apart of the run without FP8, without being the same",
    seed="A26",
    package="torch",
)
def test_llama_follows_high_precision(column: str, same_run: ShortRun, measured: Dict[str, Any]) -> None:
    losses = same_run.losses(column)
    measured["loss"], measured["plain"] = losses[-1], plain_losses(same_run)[-1]
    measured["seeds"] = spread(same_run)
    measured["gap"] = assert_follows(losses, same_run)


@long
@proves(
    "the same check catches scales frozen at the first step, although the loss still falls by 2.5 nats per byte",
    package="torchao",
)
def test_frozen_scale_is_caught(same_run: ShortRun, measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.float8 import float8_scaling_utils

    frozen = FrozenScales(float8_scaling_utils.tensor_to_scale)
    monkeypatch.setattr(float8_scaling_utils, "tensor_to_scale", frozen)
    losses = same_run.losses("torchao.tensorwise", each_step=frozen.restart)
    measured["loss"] = losses[-1]
    assert fall_of(losses) >= FALL, "frozen scales ruined the run: anybody would have noticed"
    with pytest.raises(AssertionError, match=r"apart, more than") as caught:
        assert_follows(losses, same_run)
    measured["caught"] = str(caught.value).splitlines()[0]


# --- as HARE trains: transformers' Mistral with Transformer Engine's layers, under DeepSpeed ---

HARE = {
    **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "vocab_size": 32000},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": 4096},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "use_cache": False},
}
HARE_ON_DEEPSPEED = {
    **{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0},
    **{"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "fp16": {"enabled": False}},
}
STEPS = 8


def hare(attention: str) -> torch.nn.Module:
    """HARE's 1.1B Mistral with fresh weights, every linear layer and every norm Transformer Engine's, on the GPU."""
    import transformer_engine.pytorch as te
    from transformers import MistralConfig, MistralForCausalLM

    with torch.device("cuda"):
        model: torch.nn.Module = MistralForCausalLM(MistralConfig(**HARE, attn_implementation=attention))
    operator("linear", "transformer-engine.delayed")(model, lambda name: False)
    for name, norm in list(model.named_modules()):
        if type(norm).__name__ == "MistralRMSNorm":
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, te.RMSNorm(HARE["hidden_size"], eps=HARE["rms_norm_eps"]))
    return model


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a launcher tells the only process of a job; afterwards the job is over."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@needs(sm=(8, 9))
@long
@proves(
    "HARE's 1.1B model with 155 FP8 linear layers trains under DeepSpeed with its bfloat16 configuration: the loss of "
    "a batch that is repeated falls by 2 nats per token or more, and a step has three products of each in FP8 kernels, "
    "and no other",
    seed=("A05", "A07", "A08", "A11", "A27"),
    package="transformers",
)
def test_hare(device: str, one_process: None, measured: Dict[str, Any]) -> None:
    import deepspeed
    import transformer_engine.pytorch as te

    model = hare("flash_attention_2")
    layers = sum(isinstance(layer, te.Linear) for layer in model.modules())
    measured["layers"], measured["parameters"] = layers, sum(parameter.numel() for parameter in model.parameters())
    assert layers == 22 * 7 + 1
    assert measured["parameters"] == 1_123_117_056
    settings = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = operator("adamw", "deepspeed.fused")(model.parameters(), **settings)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=HARE_ON_DEEPSPEED)[0]
    assert engine.bfloat16_enabled()
    assert not engine.fp16_enabled()
    ((tokens, targets),) = batches(standard_library_text(400_000), 512, 1, 0)
    tokens, targets = tokens[:2].to(device), targets[:2].to(device)
    recipe = te_recipe("delayed")

    def step(in_fp8: bool) -> float:
        with te_autocast(recipe if in_fp8 else None):  # around all three, as HARE has it
            logits = engine(tokens).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits.float(), targets.flatten())
            engine.backward(loss)
            engine.step()
        return float(loss.detach())

    losses = [step(in_fp8=True) for _ in range(STEPS)]
    measured["first"], measured["last"] = losses[0], losses[-1]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] - losses[-1] >= 2, f"the loss went from {losses[0]:.2f} to {losses[-1]:.2f}"
    measured.update(assert_float8_products(step, exactly=3 * layers))
