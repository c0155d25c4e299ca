"""A model with non-tensor extra state is saved with the patch, and not without it (A10)."""

from patches.proof import Proof
from patches.transformers.test_0001_skip_non_tensor_state_on_load import BESIDE  # noqa: F401

RUNS_IN = "cpu"

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
for form in ("safetensors", "bin"):
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder, safe_serialization=form == "safetensors")
            print(form, *(name for name in sorted(os.listdir(folder)) if name.startswith(("model", "pytorch"))))
        except AttributeError as error:
            print(form, "AttributeError:", error)
"""


def test_saving_fails_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(SAVE)
    symptom = "AttributeError: '_io.BytesIO' object has no attribute 'device'"
    assert pristine.stdout.splitlines() == [f"safetensors {symptom}", f"bin {symptom}"], pristine.stderr
    assert patched.stdout.splitlines() == ["safetensors model.safetensors", "bin pytorch_model.bin"], patched.stderr
