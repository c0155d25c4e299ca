"""What is installed in the environment that runs this, whoever built it; nothing is imported to see it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, Dict, List, Tuple

FOREIGN, UNPINNED = "foreign", "unpinned"
SBOM = "sboms/fusebox.cdx.json"  # in the .dist-info folder of a wheel that Fusebox collected
# Distribution -> the module that stands for it: every package that a claim can be about, except torch's own parts.
MODULES = {
    "torch": "torch",
    "accelerate": "accelerate",
    "apex": "apex",
    "deepspeed": "deepspeed",
    "dropout-layer-norm": "dropout_layer_norm",
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_3",
    "flash-attn-4": "flash_attn.cute",
    "liger-kernel": "liger_kernel",
    "ms-amp": "msamp",
    "msamp-adamw": "msamp_adamw",
    "msamp-arithmetic": "msamp_arithmetic",
    "quack-kernels": "quack",
    "rotary-emb": "rotary_emb",
    "torchao": "torchao",
    "torchtitan": "torchtitan",
    "transformer-engine": "transformer_engine",
    "transformer-engine-cu13": "transformer_engine.common",
    "transformer-engine-torch": "transformer_engine_torch",
    "transformers": "transformers",
    "xentropy-cuda-lib": "xentropy_cuda_lib",
    "xformers": "xformers",
}


def canonical(name: str) -> str:
    """A distribution's name as the package index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def release(version: str) -> Tuple[int, ...]:
    """The release numbers of a version: "2.13.0+cpu" -> (2, 13, 0); claims.py has the same, and needs pytest."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match.group().split(".")) if match else ()


def installed() -> Dict[str, Distribution]:
    """The packages installed here that claims can be about, by name; no package is imported."""
    first: Dict[str, Distribution] = {}
    for distribution in importlib.metadata.distributions():
        name = canonical(str(distribution.metadata["Name"] or ""))
        if name in MODULES:  # the first one on the path is the one that an import finds
            first.setdefault(name, distribution)
    return {name: first[name] for name in MODULES if name in first}


def patches_of(name: str, distribution: Distribution) -> List[Dict[str, Any]]:
    """The patches in a wheel that Fusebox collected, as its SBOM names them; none in another wheel.

    The SBOM holds no hash of a patched file. ValueError if it cannot be read.
    """
    text = distribution.read_text(SBOM)
    if text is None:
        return []
    try:
        patches = json.loads(text)["metadata"]["component"].get("pedigree", {}).get("patches", [])
        return [{"file": issue["id"], "installed": {}} for patch in patches for issue in patch["resolves"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("{}: its {} is not Fusebox's list of patches: install it again.".format(name, SBOM)) from None


def cuda_of_torch() -> str:
    """The CUDA that the installed torch was built for, such as "13.0"; "none" if it was built for none.

    It is read and not imported, because an import may fail or take long.
    """
    specification = importlib.util.find_spec("torch")
    file = Path(str(specification.origin)).parent / "version.py" if specification and specification.origin else None
    if file is None or not file.is_file():
        return "none"
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return match.group(1) if match else "none"


def description() -> Dict[str, Any]:
    """This environment in the form of a manifest, without a pin or declared hardware."""
    packages = {
        name: {
            "version": str(distribution.version),
            "release": str(distribution.version),
            "module": MODULES[name],
            "kind": FOREIGN,
            "record_sha256": UNPINNED,
            "built_with": {},
            "patches": patches_of(name, distribution),
        }
        for name, distribution in installed().items()
    }
    return {"target": FOREIGN, "stack": UNPINNED, "cuda": cuda_of_torch(), "proves_on": [], "packages": packages}
