"""Kernels that nobody named are compiled without the patch only; unnamed, every one is on both."""

import json

from patches.architectures import CUDA
from patches.proof import Proof
from patches.scripts import SETUP
from recipes.catalogue.load import Catalogue

RUNS_IN = "cpu"
EMULATED = "nvcc is a script that prints a version, torch one for the CPU, and nothing is compiled"

SCRIPT = CUDA + SETUP + "import json; print(json.dumps(extensions[0].sources))"
SIZES = (256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


def sources(proof: Proof, **variables: str) -> tuple[list[str], list[str]]:
    """What is compiled of the pristine tree, and of the patched."""
    tried = proof.run(SCRIPT, FOLDER="csrc/layer_norm", NVCC="12.1", TORCH_CUDA="12.1", **variables)
    pristine, patched = (json.loads(done.stdout.splitlines()[-1]) for done in tried)
    return pristine, patched


def files(part: str, *sizes: int) -> list[str]:
    return [f"ln_{part}{way}_{size}.cu" for size in sizes for way in ("fwd", "bwd")]


EVERY = ["ln_api.cpp", *files("", *SIZES), *files("parallel_", *SIZES)]


def test_the_named_ones_are_compiled_with_the_patch_only(proof: Proof) -> None:
    assert sources(proof, DROPOUT_LAYER_NORM_KERNELS="256;8192;parallel_1024") == (
        EVERY,
        ["ln_api.cpp", *files("", 256, 8192), *files("parallel_", 1024)],
    )


def test_unnamed_every_one_is_on_both(proof: Proof) -> None:
    assert sources(proof) == (EVERY, EVERY)


def test_the_option_says_what_the_recipe_builds(proof: Proof) -> None:
    package = Catalogue().packages["dropout-layer-norm"]
    assert package.build
    named = package.build.env["DROPOUT_LAYER_NORM_KERNELS"]
    _, patched = sources(proof, DROPOUT_LAYER_NORM_KERNELS=named)
    assert patched == ["ln_api.cpp", *files("", 1024, 2048, 4096, 8192)]
    users = [target for target in Catalogue().targets.values() if target.packages.get(package.name) == proof.version]
    assert {target.options.get(package.name) for target in users} == {
        "hidden sizes 769 to 1024, 1537 to 2048, 3073 to 4096 and 7169 to 8192 only, without parallel residuals; "
        "another is refused"
    }
