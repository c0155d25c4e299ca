"""A model with non-tensor extra state loads with the patch, and not without it (A09)."""

from patches.proof import Proof
from patches.transformers.test_0001_skip_non_tensor_state_on_load import LOAD

RUNS_IN = "cpu"
BESIDE = {  # of 0004 too
    "==5.24.0": [
        (
            "tokenizers",
            "0.23.3",
            "tokenizers-0.23.3-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
            "376851d22bcf9d650a5c3090bb83e6cf9e895fbf0595369fa4cd43c1f69b5f87",
        ),
        (
            "huggingface-hub",
            "1.33.0",
            "huggingface_hub-1.33.0-py3-none-any.whl",
            "04e434b06e100eddbce9a6e817d72693a7884b10a79bd67ab48080d5c07eb899",
        ),
        (
            "httpx",
            "0.28.1",
            "httpx-0.28.1-py3-none-any.whl",
            "d909fcccc110f8c7faf814ca82a9a4d816bc5a6dbfea25d6591d6985b8ba59ad",
        ),
        (
            "httpcore",
            "1.0.9",
            "httpcore-1.0.9-py3-none-any.whl",
            "2d400746a40668fc9dec9810239072b40b4484b640a8c38fd654a024c7a1bf55",
        ),
        (
            "h11",
            "0.16.0",
            "h11-0.16.0-py3-none-any.whl",
            "63cf8bbe7522de3bf65932fda1d9c2772064ffb3dae62d55932da54b31cb6c86",
        ),
    ],
}


def test_loading_fails_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(LOAD)
    assert "TypeError: empty_like(): argument 'input' (position 1) must be Tensor, not _io.BytesIO" in pristine.stderr
    assert patched.stdout.strip() == "loaded", patched.stderr
