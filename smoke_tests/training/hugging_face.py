"""The weights of a Hugging Face folder, by the names of transformers, as those of a Llama, and back.

LlamaForCausalLM and MistralForCausalLM have the same names (transformers, models/llama/modeling_llama.py). They pair
the two halves of a head in the rotary embedding, as llama.py does, so that rows keep their order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Tuple

import torch

from smoke_tests.operators.torch_adapter import version_of_torch
from smoke_tests.training.llama import Llama
from smoke_tests.training.models import Model
from smoke_tests.training.options import Refused

WHOLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TABLE = ".rotary_emb.inv_freq"  # a buffer that older versions saved, and that follows from the config.json
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Size = Tuple[int, ...]


def parts_of(model: Model) -> Dict[str, Dict[str, Size]]:
    """Each weight of a Llama -> the weights of transformers whose rows it has, in this order, and their shapes.

    A tied head has no weight of its own.
    """
    shape = model.shape
    width, hidden, keys, ids = shape.width, shape.hidden, shape.kv_heads * shape.head_size, shape.vocabulary
    of_a_layer: Dict[str, Dict[str, Size]] = {
        "attention_norm": {"input_layernorm": (width,)},
        "attention.qkv": {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
        },
        "attention.output": {"self_attn.o_proj": (width, width)},
        "feed_forward_norm": {"post_attention_layernorm": (width,)},
        "feed_forward.gate_up": {"mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width)},
        "feed_forward.down": {"mlp.down_proj": (width, hidden)},
    }
    table: Dict[str, Dict[str, Size]] = {"embedding.weight": {EMBEDDING: (ids, width)}}
    for layer in range(shape.layers):
        for ours, parts in of_a_layer.items():
            named = {f"model.layers.{layer}.{theirs}.weight": size for theirs, size in parts.items()}
            table[f"blocks.{layer}.{ours}.weight"] = named
    table["norm.weight"] = {"model.norm.weight": (width,)}
    return table if model.tied else {**table, "head.weight": {HEAD: (ids, width)}}


def split(weights: Dict[str, torch.Tensor], model: Model) -> Dict[str, torch.Tensor]:
    """The weights of a Llama (checkpoint.weights_of) by the names of transformers; views."""
    state: Dict[str, torch.Tensor] = {}
    for ours, parts in parts_of(model).items():
        state.update(zip(parts, weights[ours].split([size[0] for size in parts.values()])))
    return state


def load(folder: Path, llama: Llama, model: Model) -> None:
    """Copy the weights of a folder into a Llama, whose dtype and device they take; Refused if they are not its own."""
    weights = opened(folder)
    _compare(folder, weights, model)
    own = dict(llama.named_parameters())
    with torch.no_grad():
        for ours, parts in parts_of(model).items():
            own[ours].copy_(torch.cat([weights.read(theirs) for theirs in parts]))


class Weights(NamedTuple):
    """The weights in a folder: the shape of each by name, and the function that reads one."""

    sizes: Dict[str, Size]
    read: Callable[[str], torch.Tensor]


def opened(folder: Path) -> Weights:
    """The weights of a folder; Refused if a file is not whole. Of safetensors, only the headers are read."""
    if (folder / WHOLE).is_file():
        return _of_files(_file(folder / WHOLE))
    if (folder / INDEX).is_file():
        return _of_index(folder / INDEX)
    if (folder / PICKLED).is_file():
        return _of_pickle(folder / PICKLED)
    raise Refused(f"--from {folder} has no weights: it holds none of {WHOLE}, {INDEX} and {PICKLED}")


def package() -> Any:
    """safetensors; Refused where it is not installed."""
    try:
        import safetensors
    except ImportError:
        raise Refused("this needs the package safetensors, which this environment lacks: pip install it") from None
    return safetensors


def _file(path: Path) -> Dict[str, Any]:
    """The names in a file of safetensors, each with the open file, of which the header is read."""
    try:
        file = package().safe_open(str(path), framework="pt")
        return dict.fromkeys(file.keys(), file)
    except (OSError, package().SafetensorError) as error:
        raise Refused(f"--from: {path} is not a whole file of safetensors: {error}") from None


def _of_files(files: Dict[str, Any]) -> Weights:
    """The weights by the file that each is in."""
    sizes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
    return Weights(sizes, lambda name: _unscaled(name, files[name].get_tensor(name)))


def _of_index(path: Path) -> Weights:
    """The weights of an index, whose files have exactly the names that it lists."""
    try:
        listed = {str(name): str(file) for name, file in json.loads(path.read_text("utf-8"))["weight_map"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Refused(f"--from: {path} is not an index of safetensors: {error}") from None
    outside = [file for file in listed.values() if Path(file).name != file]
    if outside:
        raise Refused(f"--from: {path} names {outside[0]}, which is no file beside it")
    files = {file: _file(path.with_name(file)) for file in sorted(set(listed.values()))}
    there = {(name, file) for file, names in files.items() for name in names}
    for name, file in sorted(there ^ set(listed.items())):
        raise Refused(f"--from: {path} and its files differ: only one of them has {name} in {file}")
    return _of_files({name: files[file][name] for name, file in listed.items()})


def _of_pickle(path: Path) -> Weights:
    """The weights of a pickle, which may run any program unless torch loads it as tensors alone."""
    if version_of_torch() < (1, 13):
        raise Refused(f"--from: {path} is a pickle, which torch loads safely from 1.13 on: save it as safetensors")
    try:
        state = torch.load(str(path), map_location="cpu", weights_only=True)
        sizes = {str(name): tuple(tensor.shape) for name, tensor in state.items()}
    except Exception as error:  # torch raises many kinds of errors for other files
        why = str(error).splitlines()[0].split(". ")[0]
        raise Refused(f"--from: {path} is not a whole file of tensors alone: {why}") from None
    return Weights(sizes, lambda name: _unscaled(name, state[name]))


def _unscaled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in DTYPES:
        raise Refused(f"--from: {name} is of {tensor.dtype}, and only float32, bfloat16 and float16 can be read")
    return tensor


def _compare(folder: Path, weights: Weights, model: Model) -> None:
    """Refuse weights that are missing, that the model does not have, or of another shape, by name."""
    expected = {name: size for parts in parts_of(model).values() for name, size in parts.items()}
    sizes = {name: size for name, size in weights.sizes.items() if not name.endswith(TABLE)}
    tied_head = sizes.pop(HEAD, None) if model.tied else None
    for names, how in ((set(expected) - set(sizes), "lacks"), (set(sizes) - set(expected), "has, beyond that model,")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise Refused(
                f"--from {folder} is not the model of its config.json: it {how} {', '.join(sorted(names)[:3])}{more}"
            )
    for name, size in expected.items():
        if sizes[name] != size:
            raise Refused(f"--from {folder}: {name} is {sizes[name]}, and {size} in the model of its config.json")
    if tied_head and not torch.equal(weights.read(HEAD), weights.read(EMBEDDING)):
        raise Refused(f"--from {folder}: its config.json ties the embeddings, but {HEAD} is not {EMBEDDING}")
