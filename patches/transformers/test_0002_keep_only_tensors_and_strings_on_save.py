"""A model with non-tensor extra state is saved with the patch, and not without it (A10)."""

import pytest

from patches.proof import Proof

SAVE = """
import io, os, tempfile, torch, transformers
from transformers import MistralConfig, MistralForCausalLM

class WithState(torch.nn.Linear):
    def get_extra_state(self):
        return io.BytesIO(b"amax history")

assert transformers.__file__.startswith(os.getcwd()), transformers.__file__
shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
model = MistralForCausalLM(MistralConfig(vocab_size=64, **shape))
model.lm_head = WithState(32, 64, bias=False)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder, safe_serialization=os.environ["FORMAT"] == "safetensors")
    print("saved", *(name for name in sorted(os.listdir(folder)) if name.startswith(("model", "pytorch"))))
"""


@pytest.mark.parametrize(("form", "file"), [("safetensors", "model.safetensors"), ("bin", "pytorch_model.bin")])
def test_saving_fails_without_the_patch_only(proof: Proof, form: str, file: str) -> None:
    pristine, patched = proof.run(SAVE, FORMAT=form)
    assert "AttributeError: '_io.BytesIO' object has no attribute 'device'" in pristine.stderr
    assert patched.stdout.strip() == f"saved {file}", patched.stderr
