"""A model with non-tensor extra state loads with the patch, and not without it (A09)."""

from patches.proof import Proof

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
