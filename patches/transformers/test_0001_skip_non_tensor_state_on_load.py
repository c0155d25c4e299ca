"""A model with non-tensor extra state loads with the patch, and not without it (A09)."""

from patches.proof import Proof

RUNS_IN = "cpu"
BESIDE = {  # of 0002 too
    ">=4.36,<4.40": [
        (
            "tokenizers",
            "0.15.2",
            "tokenizers-0.15.2-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
            "ccd73a82751c523b3fc31ff8194702e4af4db21dc20e55b30ecc2079c5d43cb7",
        ),
    ],
    "==4.42.*": [
        (
            "numpy",
            "1.26.4",
            "numpy-1.26.4-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
            "666dbfb6ec68962c033a450943ded891bed2d54e6755e35e5835d63f4f6931d5",
        ),
    ],
    ">=4.45,<4.47": [
        (
            "tokenizers",
            "0.20.3",
            "tokenizers-0.20.3-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
            "453c7769d22231960ee0e883d1005c93c68015025a5e4ae56275406d94a3c907",
        ),
    ],
    ">=4.47,<4.51": [
        (
            "tokenizers",
            "0.21.4",
            "tokenizers-0.21.4-cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
            "51b7eabb104f46c1c50b486520555715457ae833d5aee9ff6ae853d1130506ff",
        ),
    ],
}

LOAD = """
import io, os, tempfile, torch, transformers
from transformers import MistralConfig, MistralForCausalLM

class WithState(torch.nn.Linear):
    def get_extra_state(self):
        return io.BytesIO(b"amax history")
    def set_extra_state(self, state):
        pass

class Model(MistralForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = WithState(config.hidden_size, config.vocab_size, bias=False)

assert transformers.__file__.startswith(os.getcwd()), transformers.__file__
shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
model = Model(MistralConfig(vocab_size=64, **shape))
with tempfile.TemporaryDirectory() as folder:
    model.config.save_pretrained(folder)
    tensors = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    torch.save(tensors, folder + "/pytorch_model.bin")
    loaded = Model.from_pretrained(folder)
assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
print("loaded")
"""


def test_loading_fails_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(LOAD)
    assert "AttributeError: '_io.BytesIO' object has no attribute 'device'" in pristine.stderr
    assert patched.stdout.strip() == "loaded", patched.stderr
