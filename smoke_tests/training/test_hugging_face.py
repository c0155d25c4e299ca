"""A run that begins with a Hugging Face folder, and the folder that is made of its checkpoint."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple
from unittest import mock

import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.operators import bounds
from smoke_tests.training import checkpoint, export, prepare_data, pretrain
from smoke_tests.training.model_config import model_of, text_of
from smoke_tests.training.options import parse
from smoke_tests.training.small_runs import begun, last_of, refusal_of, small, words
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")
# No two sizes are equal, two query heads per key head, an unusual base and eps.
SIZES: Dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "vocab_size": 256, "max_position_embeddings": 64, "rope_theta": 500.0,
    "rms_norm_eps": 1e-4,
}  # fmt: skip
MODELS = [(family, tied) for family in ("Llama", "Mistral") for tied in (False, True)]
# Each of the 16 products of both models sums up to 112 terms in float32, and transformers' angles, of up to 64 radians,
# are float32 as well; a score of 20 or so makes an error 20 times larger before the exponential.
CLOSE = 20 * (bounds.ceiling(torch.float32, 16, terms=112) + 64 * 2.0**-24)


def saved(folder: Path, family: str = "Llama", tied: bool = False, **how: Any) -> Any:
    """A model of transformers whose attention prefers and whose norms scale, and that is saved in a folder."""
    import transformers

    more = {"sliding_window": None} if family == "Mistral" else {}
    config = getattr(transformers, family + "Config")(**SIZES, **more, tie_word_embeddings=tied)
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5 if parameter.dim() == 1 else 0.15)
    model.save_pretrained(str(folder), **how)
    return model


def flags(folder: Path, *more: str) -> List[str]:
    """The flags of a run that begins with a folder, to folder/out unless another one is named."""
    text = folder.parent / "text"
    text.write_text("a few lines of text, seen again and again\n" * 60)
    arguments = ["--precision=float32", "--ops=naive", "--device=cpu", "--batch-size=2", f"--data={text}"]
    return [f"--from={folder}", f"--out={folder}/out", *arguments, *more]


def exported(out: Path, into: Path, *more: str) -> Path:
    """The folder that export makes of a run."""
    assert export.main([str(out), "--into", str(into), *more]) == 0
    assert not list(into.parent.glob(into.name + ".*")), "the folder that became it is still there"
    return into


def loaded(folder: Path) -> Any:
    """The model that transformers reads from a folder, all of whose weights it takes."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(str(folder), output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def difference(theirs: Any, run: Run) -> float:
    """How far the logits of a model of transformers are from those of a run, as a share of their size."""
    tokens = torch.randint(256, (2, 64))
    with torch.no_grad():
        return bounds.relative_error(run.model(tokens), theirs(tokens).logits.double())


@pytest.mark.parametrize(("family", "tied"), MODELS)
@proves(
    "a run that begins with the folder of a Llama or a Mistral of transformers, its embeddings tied or not, has its "
    "logits in float32, and its checkpoint is exported as the same weights, bit for bit, and the same model",
    package="transformers",
)
def test_from(family: str, tied: bool, tmp_path: Path, measured: Dict[str, Any]) -> None:
    folder = tmp_path / "theirs"
    model, options = saved(folder, family, tied), parse(flags(folder))
    begun(options, 0)
    run = Run(options)
    measured["difference"] = difference(model, run)
    assert measured["difference"] <= CLOSE
    counts = {sum(each.numel() for each in made.parameters()) for made in (model, run.model)}
    assert counts == {run.data.parameters}
    into = exported(folder / "out", tmp_path / "ours")
    weights, back = model.state_dict(), loaded(into).state_dict()
    assert set(back) == set(weights) and all(torch.equal(back[name], weights[name]) for name in weights)
    ours, theirs = (model_of(text_of(str(each / "config.json"))) for each in (into, folder))
    assert ours == theirs == run.data


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@proves(
    "after some steps from such a folder, transformers computes the run's logits from the exported one, also of shards",
    package="transformers",
)
def test_export(tied: bool, tmp_path: Path, measured: Dict[str, Any]) -> None:
    folder = tmp_path / "theirs"
    before = saved(folder, tied=tied)
    options = parse(flags(folder, "--steps=3", "--warmup=0", "--learning-rate=0.01"))
    begun(options, 3)
    run = Run(options)
    checkpoint.restore(run.model, checkpoint.load(last_of(folder / "out")))
    into = exported(folder / "out", tmp_path / "ours", "--shard-size=300KB")
    index = json.loads((into / "model.safetensors.index.json").read_text())
    sizes = [(into / file).stat().st_size for file in set(index["weight_map"].values())]
    assert len(sizes) > 1 and max(sizes) < 300_000 + 5_000, "each has a header as well"
    measured["difference"] = difference(loaded(into), run)
    assert measured["difference"] <= CLOSE
    measured["trained"] = difference(before, run)
    assert measured["trained"] > 1000 * CLOSE


@proves(
    "a run begins with the same weights from one file, from shards with an index and from a pickle, as it does from "
    "the file of a tied model that has the head as well",
    package="transformers",
)
def test_forms(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folders = [tmp_path / name for name in ("whole", "shards", "pickle", "tied")]
    model = saved(folders[0])
    for folder in folders[1:]:
        model.save_pretrained(str(folder), **({"max_shard_size": "100KB"} if folder.name == "shards" else {}))
    assert not (folders[1] / "model.safetensors").exists()
    (folders[2] / "model.safetensors").unlink()
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}  # as older versions of transformers saved
    torch.save({**model.state_dict(), **table}, str(folders[2] / "pytorch_model.bin"))
    states = [checkpoint.weights_of(Run(parse(flags(folder))).model) for folder in folders[:3]]
    assert all(torch.equal(states[0][name], state[name]) for state in states[1:] for name in states[0])
    config = folders[3] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    tied = {**model.state_dict(), "lm_head.weight": model.state_dict()["model.embed_tokens.weight"].clone()}
    save_file(tied, str(folders[3] / "model.safetensors"))
    head = checkpoint.weights_of(Run(parse(flags(folders[3]))).model)["head.weight"]
    assert torch.equal(head, states[0]["embedding.weight"])


@proves(
    "an exported folder has the files of the tokenizer that the run's data was prepared with, the id that ended its "
    "documents, and weights rounded to --dtype",
    package="transformers",
)
def test_exported_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder, data = tmp_path / "theirs", tmp_path / "data"
    model = saved(folder)
    tokenizer = words(tmp_path / "words")
    text = tmp_path / "lines.jsonl"
    text.write_text('{"text": "nothing else / < >"}\n' * 40)
    assert prepare_data.main([str(text), f"--out={data}", f"--tokenizer={tokenizer}", "--eos=<s>"]) == 0
    given = [each for each in flags(folder, "--length=16", f"--data={data}") if each != f"--data={tmp_path}/text"]
    begun(parse(given), 0)
    into = exported(folder / "out", tmp_path / "ours", "--dtype=bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (into / name).read_bytes() == Path(tokenizer, name).read_bytes()
    config = json.loads((into / "config.json").read_text())
    assert (config["eos_token_id"], config["torch_dtype"], config["max_position_embeddings"]) == (7, "bfloat16", 16)
    weights = load_file(str(into / "model.safetensors"))
    assert all(torch.equal(weights[name], each.bfloat16()) for name, each in model.state_dict().items())
    assert {path.suffix for path in into.iterdir()} == {".json", ".safetensors"}


class Program:
    """A pickled object that runs a program when it is loaded."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path(PLANTED[0]),)


PLANTED: List[str] = []  # the file that the program makes


def broken(folder: Path, change: Callable[[Dict[str, Any]], Any]) -> None:
    """Change the weights in a folder."""
    from safetensors.torch import load_file, save_file

    weights = load_file(str(folder / "model.safetensors"))
    change(weights)
    save_file(weights, str(folder / "model.safetensors"))


@proves(
    "a run does not begin with weights that are missing, unknown, of another shape, integers, cut short or a program, "
    "and names them",
    package="transformers",
)
def test_refused_weights(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "theirs"
    saved(whole)
    gate, size = "model.layers.1.mlp.gate_proj.weight", (whole / "model.safetensors").stat().st_size
    (whole / "generation_config.json").unlink()

    def refused(*parts: str) -> None:
        text = refusal_of(lambda: pretrain.main(flags(folder, "--steps=1")))
        assert all(part in text for part in parts) and not (folder / "out").exists(), text
        shutil.rmtree(str(folder))
        shutil.copytree(str(whole), str(folder))

    shutil.copytree(str(whole), str(folder))
    changes: List[Tuple[Callable[[Dict[str, Any]], Any], str]] = [
        (lambda weights: weights.pop(gate), f"lacks {gate}"),
        (lambda weights: weights.update(other=torch.ones(1)), "beyond that model, other"),
        (lambda weights: weights.update({gate: weights[gate].t().contiguous()}), f"{gate} is (96, 112), and (112, 96)"),
        (lambda weights: weights.update({gate: weights[gate].to(torch.int8)}), f"{gate} is of torch.int8"),
    ]
    for change, part in changes:
        broken(folder, change)
        refused(part)
    for cut in (size - 4, size // 2, 20, 0):
        with open(folder / "model.safetensors", "r+b") as file:
            file.truncate(cut)
        refused("model.safetensors is not a whole file")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    refused("lm_head.weight is not model.embed_tokens.weight")
    assert_files_refused(folder, gate, refused)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        refused("needs the package safetensors")


def assert_files_refused(folder: Path, gate: str, refused: Callable[..., None]) -> None:
    """Assert that no file of weights, an index that leads elsewhere and a pickled program are refused."""
    (folder / "model.safetensors").unlink()
    refused("has no weights")
    index = folder / "model.safetensors.index.json"
    for weights, part in (
        ({gate: "../whole/model.safetensors"}, "../whole"),
        ({gate: "one"}, "one is not a whole file"),
        ({gate: "two"}, "only one of them has"),
        ([], "is not an index"),
    ):
        (folder / "model.safetensors").rename(folder / "two")
        index.write_text(json.dumps({"weight_map": weights}))
        refused(part)
    (folder / "model.safetensors").unlink()
    planted = folder.with_name("planted")
    PLANTED[:] = [str(planted)]
    torch.save({gate: Program()}, str(folder / "pytorch_model.bin"))
    refused("pytorch_model.bin is not a whole file of tensors alone")
    assert not planted.exists()


@proves(
    "--from is refused beside --resume, --config and --layers, and for text where the folder's tokenizer is not named; "
    "its run is resumed with its config.json",
    package="transformers",
)
def test_flags_beside_from(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    saved(folder)
    given = flags(folder, "--steps=2", "--warmup=0")
    config = f"--config={folder}/config.json"
    for flag, part in (
        ("--resume", "in place of --from"),
        ("--layers=1", "remove --layers"),
        (config, "remove --config"),
    ):
        assert part in refusal_of(lambda flag=flag: pretrain.main([*given, flag]))  # type: ignore[misc]
    (folder / "tokenizer.json").write_text("{}")
    assert f"add --tokenizer {folder}" in refusal_of(lambda: pretrain.main(given))
    (folder / "tokenizer.json").unlink()
    assert "config.json cannot be read" in refusal_of(lambda: pretrain.main(flags(tmp_path / "none")))
    begun(parse(given), 1)
    assert pretrain.main([config, *given[1:], "--resume"]) == 0
    assert last_of(folder / "out").name == "step-00000002.pt"


@proves(
    "an export appears under its name when it is whole, and is refused for a folder that is not empty, a checkpoint "
    "that is not whole, and a full disk",
    package="transformers",
)
def test_refused_exports(tmp_path: Path) -> None:
    out, into = tmp_path / "out", tmp_path / "ours"
    begun(small(ops="naive", out=str(out)), 0)

    def refused(named: Path, *parts: str) -> None:
        text = refusal_of(lambda: export.main([str(named), "--into", str(into)]))
        assert all(part in text for part in parts), text
        assert sorted(path.name for path in tmp_path.glob("ours*")) == before

    def full(*_: Any, **__: Any) -> None:
        (tmp_path / "ours.partial" / "begun").touch()
        assert not into.exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    before: List[str] = []
    refused(tmp_path, "holds no checkpoint")
    with mock.patch("safetensors.torch.save_file", full):
        refused(out, f"--into {into} cannot be written: No space left on device")
    assert "5XB" in refusal_of(lambda: export.main([str(out), "--into", str(into), "--shard-size=5XB"]))
    (into / "other").mkdir(parents=True)
    before = ["ours"]
    refused(out, "is not an empty folder")
    (into / "other").rmdir()
    exported(out, into)
    assert loaded(into).config.tie_word_embeddings is False
    shutil.rmtree(str(into))
    (tmp_path / "ours.partial").mkdir()
    before = ["ours.partial"]
    refused(out, "ours.partial is there already")
    (tmp_path / "ours.partial").rmdir()
    with open(last_of(out), "r+b") as file:
        file.truncate(1000)
    before = []
    refused(out, "is not a whole checkpoint")
