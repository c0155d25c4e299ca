"""A model of transformers whose linear layers and norms become Transformer Engine's, and its own again."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds
from smoke_tests.operators.transformer_engine_adapter import te_autocast, te_recipe
from smoke_tests.training import convert, model_config
from smoke_tests.training.models import MODELS
from smoke_tests.training.small_runs import refusal_of, words

pytestmark = pytest.mark.usefixtures("one_thread")
# Multiples of 16, as FP8 needs, two query heads per key head, an unusual eps.
SIZES: Dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "vocab_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-4,
}  # fmt: skip


def model_of(family: str, tied: bool = False, **sizes: int) -> Any:
    """A model of transformers whose attention prefers and whose norms scale."""
    import transformers

    more = {"sliding_window": None} if family == "Mistral" else {}
    config = getattr(transformers, family + "Config")(**{**SIZES, **sizes}, **more, tie_word_embeddings=tied)
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5 if parameter.dim() == 1 else 0.1)
    return model


class OtherLinear(torch.nn.Module):  # type: ignore[misc]
    """Stands for Transformer Engine's linear layer on a CPU."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class OtherNorm(torch.nn.Module):  # type: ignore[misc]
    """Stands for Transformer Engine's RMSNorm on a CPU."""

    def __init__(self, norm: Any, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def other_norm(norm: Any, eps: float) -> torch.nn.Module:
    """Stands for Transformer Engine's norm on a CPU."""
    if not isinstance(norm, torch.nn.LayerNorm):
        return OtherNorm(norm, eps)
    made = torch.nn.LayerNorm(norm.weight.shape, eps)
    made.weight, made.bias = norm.weight, norm.bias
    return made


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other layers in place of Transformer Engine's, which compute the same on a CPU."""
    monkeypatch.setattr(convert, "DEVICE", "cpu")
    monkeypatch.setattr(convert, "te_linear_of", OtherLinear)
    monkeypatch.setattr(convert, "te_norm_of", other_norm)


def kinds_of(model: Any) -> Dict[str, Any]:
    """The class of each layer, by name."""
    return {name: type(layer) for name, layer in model.named_modules()}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@proves(
    "every linear layer and norm of a Llama, a Mistral and a Qwen2 but the head is replaced, or the head too if asked, "
    "with the same parameters under the same names; to_torch puts the same layers back, with what was trained since",
    package="transformers",
)
def test_layers(tied: bool) -> None:
    for family in ("Llama", "Mistral", "Qwen2"):
        for head in (False, True):
            model, tokens = model_of(family, tied), torch.randint(256, (2, 32))
            parameters, kinds = dict(model.named_parameters()), kinds_of(model)
            before = model(tokens).logits
            replaced = convert.to_transformer_engine(model.train(), head)
            assert len(replaced.linear) == 2 * 7 + head and len(replaced.norms) == 2 * 2 + 1
            assert replaced.stay == ({} if head else {"lm_head": "it is the head"})
            assert all(type(model.get_submodule(name)) is OtherLinear for name in replaced.linear)
            assert all(type(model.get_submodule(name)) is OtherNorm for name in replaced.norms)
            assert all(layer.training for layer in model.modules())
            now = dict(model.named_parameters())
            assert now.keys() == parameters.keys() and all(now[name] is parameters[name] for name in now)
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
            torch.testing.assert_close(model.eval()(tokens).logits, before, rtol=1e-4, atol=1e-4)
            assert convert.to_transformer_engine(model, head).linear == [], "none is left to replace"
            model.model.norm.weight = torch.nn.Parameter(2 * model.model.norm.weight.detach())
            trained = model(tokens).logits
            assert convert.to_torch(model) is model and kinds_of(model) == kinds
            assert not any(layer.training for layer in model.modules())
            torch.testing.assert_close(model(tokens).logits, trained, rtol=1e-4, atol=1e-4)
            assert not torch.equal(trained, before)


class MoreThanLinear(torch.nn.Linear):  # type: ignore[misc]
    """As the layers of adapters and of quantized weights are."""


class CenteredRMSNorm(torch.nn.Module):  # type: ignore[misc]
    """Scales by 1 + weight, as Gemma's does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps, self.weight = 1e-6, torch.nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class OwnRMSNorm(OtherNorm):
    """A norm of a model."""


class OtherEpsRMSNorm(OtherNorm):
    """Adds another number than its attribute says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 2 * self.eps) * self.weight


class ClippedRMSNorm(OtherNorm):
    """Computes the same only of small inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-1, 1))


@pytest.mark.usefixtures("on_cpu")
@proves(
    "a linear layer of a subclass, with hooks, on another device or of sizes that FP8 cannot multiply stays, and so "
    "does a norm that computes something else or with another eps, scales by 0, or has no bias or several sizes; each "
    "has its reason. The layers after it are replaced, one with two names at both, and put back",
    package="torch",
    since="2.1",
)
def test_layers_that_stay() -> None:
    weighted = torch.nn.Linear(16, 32)
    clipped, eps, silent, faint = (
        kind(weighted, 1e-4) for kind in (ClippedRMSNorm, OtherEpsRMSNorm, OwnRMSNorm, OwnRMSNorm)
    )
    for norm, scale in ((clipped, 1.0), (eps, 1.0), (silent, 0.0), (faint, 1e-3)):
        norm.weight = torch.nn.Parameter(torch.full((16,), scale))
    hooked, patched = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = hooked.forward
    cases: Dict[str, Any] = {
        "subclass": (MoreThanLinear(16, 16), "a MoreThanLinear is more than a linear layer"),
        "hooked": (hooked, "it has hooks"),
        "patched": (patched, "it has hooks"),
        "meta": (torch.nn.Linear(16, 16, device="meta"), "its weight is on meta"),
        "narrow": (torch.nn.Linear(16, 24), "its sizes (24, 16) are not multiples of 16"),
        "short": (torch.nn.Linear(8, 16), "its sizes (16, 8) are not multiples of 16"),
        "centered": (CenteredRMSNorm(16), "a CenteredRMSNorm computes something else"),
        "eps": (eps, "a OtherEpsRMSNorm computes something else"),
        "clipped": (clipped, "a ClippedRMSNorm computes something else"),
        "silent": (silent, "a OwnRMSNorm computes something else"),  # any norm does of zeros
        "sizes": (torch.nn.LayerNorm((4, 16)), "Transformer Engine's LayerNorm has a bias and one size"),
    }
    unbiased = torch.nn.LayerNorm(16)
    unbiased.bias = None
    cases["unbiased"] = (unbiased, "Transformer Engine's LayerNorm has a bias and one size")
    layers = {name: layer for name, (layer, _) in cases.items()}
    others = {"weighted": weighted, "again": weighted, "faint": faint, "normal": torch.nn.LayerNorm(16)}
    model = torch.nn.ModuleDict({**layers, "dropout": torch.nn.Dropout(), **others})
    replaced = convert.to_transformer_engine(model)
    reasons = {name: reason for name, (_, reason) in cases.items()}
    assert replaced == (["weighted", "again"], ["faint", "normal"], reasons)
    assert all(model[name] is layer for name, layer in layers.items())
    assert all(model[name] is not layer for name, layer in others.items())
    convert.to_torch(model)
    assert all(model[name] is layer for name, layer in others.items())


@proves(
    "the command refuses in one sentence lengths that FP8 cannot multiply, an environment without Transformer Engine, "
    "and one without a GPU for FP8",
    package="transformers",
)
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*flags: str) -> str:
        text = refusal_of(lambda: convert.main([str(tmp_path), *flags]))
        assert text.startswith("fusebox: ") and "\n" not in text
        return text

    assert "--length 24: FP8 needs" in refused("--length", "24")
    assert "--rows 0" in refused("--rows", "0")
    assert "--recipe" in refused("--recipe", "other")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    assert "needs transformers and Transformer Engine" in refused()
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", convert)
    monkeypatch.setitem(sys.modules, "transformer_engine", convert)
    assert "compute capability 8.9" in refused()


@needs(sm=(8, 9))
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2"])
@proves(
    "the logits of a Llama, a Mistral and a Qwen2 of transformers are as close to float32 with Transformer Engine's "
    "layers in bfloat16 as with their own, and in FP8 within the noise of its products; their own layers, put back, "
    "give the same bits",
    package="transformers",
)
def test_logits(family: str, device: str, measured: Dict[str, Any]) -> None:
    model, tokens = model_of(family).to(device), torch.randint(256, (4, 64), device=device)
    replaced, errors = convert.measured(model, tokens, "delayed", head=False)
    measured.update(errors._asdict())
    assert len(replaced.linear) == 14 and len(replaced.norms) == 5 and list(replaced.stay) == ["lm_head"]
    most = convert.limits(replaced, errors)
    assert bounds.rounding_noise(7)[0] <= errors.bfloat16 <= most.bfloat16
    assert max(bounds.rounding_noise(bounds.E4M3)[0], 2 * errors.bfloat16) <= errors.fp8 <= most.fp8


@needs(sm=(8, 9))
@proves(
    "a converted Mistral in FP8 has the gradients of its own layers in float32, up to the noise of FP8, and learns "
    "under the optimizer that it had before; its own layers, put back, are saved as a folder that plain transformers "
    "reads, every weight bit-equal",
    package="transformers",
)
def test_training(device: str, tmp_path: Path, measured: Dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model, tokens = model_of("Mistral").to(device).train(), torch.randint(256, (4, 64), device=device)
    exact = copy.deepcopy(model)
    exact(tokens, labels=tokens).loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    convert.to_transformer_engine(model)
    losses: List[float] = []
    for step in range(13):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16), te_autocast(te_recipe("delayed")):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:  # its scales are 1; those of the next are the ones that it measured
            continue
        if step == 1:
            assert_gradients(model, exact, measured)
        optimizer.step()
    measured["first"], measured["last"] = losses[0], losses[-1]
    assert losses[-1] < 0.7 * losses[0]
    convert.to_torch(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    state = model.state_dict()
    assert loaded.keys() == state.keys() and not any(name.endswith("_extra_state") for name in state)
    assert all(torch.equal(loaded[name].to(device), state[name]) for name in state)


def assert_gradients(model: Any, exact: Any, measured: Dict[str, Any]) -> None:
    """Assert that every gradient is the exact one up to FP8's noise, and more than none.

    The noise goes through 15 products; emulated, the worst gradient of three models had that of 13 to 15.3.
    """
    noise = bounds.rounding_noise(bounds.E4M3, bounds.E5M2)[1]
    pairs = zip(exact.named_parameters(), model.parameters())
    errors = {name: bounds.relative_error(now.grad, true.grad.double()) for (name, true), now in pairs}
    measured["gradient"] = max(errors.values())
    projections = [error for name, error in errors.items() if "proj" in name]
    assert len(projections) == 14 and min(projections) >= bounds.rounding_noise(bounds.E4M3)[0]
    assert max(errors.values()) <= noise * 20**0.5, f"{max(errors, key=errors.__getitem__)} is off"


@needs(sm=(8, 9))
@proves(
    "HARE 1.1B as transformers' Mistral has 155 linear layers and 45 norms to convert, and its logits are then within "
    "the limits",
    seed="A27",
    package="transformers",
)
def test_hare(device: str, measured: Dict[str, Any]) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = model_config.config_of(MODELS["hare-1.1b"], "float32", None)
    keys = sizes.keys() & {*model_config.SIZES, *model_config.OPTIONAL}
    with torch.device(device):
        model = MistralForCausalLM(MistralConfig(**{key: sizes[key] for key in keys}, sliding_window=None)).eval()
        tokens = torch.randint(32000, (2, 512))
    replaced, errors = convert.measured(model, tokens, "delayed", head=True)
    measured.update(errors._asdict())
    assert (len(replaced.linear), len(replaced.norms), replaced.stay) == (7 * 22 + 1, 2 * 22 + 1, {})
    most = convert.limits(replaced, errors)
    assert errors.bfloat16 <= most.bfloat16 and 2 * errors.bfloat16 <= errors.fp8 <= most.fp8


@needs(sm=(8, 9))
@proves(
    "the command converts the model of a folder, random tokens or a text read, and prints what is replaced and how "
    "far the logits move; they are within its limits",
    package="transformers",
)
def test_command(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    te_recipe("delayed")  # without Transformer Engine the command refuses; this leaves the claim unproven there
    folder, text = words(tmp_path / "model"), tmp_path / "text"
    model_of("Llama").save_pretrained(folder)
    text.write_text("nothing else / < >\n" * 200)
    sizes = ["--rows=2", "--length=64"]
    assert convert.main([folder, *sizes]) == 0
    printed = capsys.readouterr().out
    for part in ("14 linear layers and 5 norms", "lm_head stays: it is the head", "128 tokens", "the same bits"):
        assert part in printed
    assert convert.main([folder, *sizes, "--head", f"--data={text}"]) == 0
    assert "15 linear layers" in capsys.readouterr().out
