"""Why a mutant survives."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import itertools
from typing import Any, Callable, ContextManager, List, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from smoke_tests.operators import bounds, references, torch_adapter
from smoke_tests.operators.dropout_layer_norm_adapter import dropout_add_rms_norm
from smoke_tests.operators.flash_attn_adapter import flash_attention
from smoke_tests.operators.kernels import gpu_kernels_run
from smoke_tests.operators.liger_kernel_adapter import liger_add_rms_norm
from smoke_tests.training import checkpoint, convert, document_masks, hugging_face
from smoke_tests.training.guard import Extremes, Guard
from smoke_tests.training.llama import NAIVE, Llama
from smoke_tests.training.models import MODELS
from smoke_tests.training.parallel import ALONE
from smoke_tests.training.precision import compute_by, mantissas, plain
from smoke_tests.training.text import Text

Condition = Callable[[], bool]


class Reason(NamedTuple):
    """Why a mutant whose name matches the pattern survives; it is given only where what it says holds when it runs."""

    pattern: str
    words: str
    holds: Condition


WHY: List[Reason] = []  # of those that match, the first that holds


def explains(pattern: str, words: str) -> Callable[[Condition], Condition]:
    """Makes a condition a reason; the outcomes that show its words depend on it, and on no other reason."""

    def listed(condition: Condition) -> Condition:
        WHY.append(Reason(pattern, words, condition))
        return condition

    return listed


def last_of(dimensions: int, other: int, last: int) -> bool:
    """Whether two numbers name the same one of so many dimensions."""
    return range(dimensions)[other] == range(dimensions)[last]


def sum_commutes(norm: Callable[..., torch.Tensor]) -> bool:
    """Whether a norm of a sum has the same bits either way round."""
    x, residual, weight = (torch.randn(*shape, 1024, device="cuda").bfloat16() for shape in ((5,), (5,), ()))
    return bool(torch.equal(norm(x, residual, weight, 1e-5), norm(residual, x, weight, 1e-5)))


def guarded_model() -> torch.nn.Module:
    """A layer that the guard takes for one in a cut mantissa."""
    layer = torch.nn.Linear(3, 2)
    compute_by([layer], plain)
    return torch.nn.Sequential(layer)


@explains(r"^torch_attention .*: (version|\(2, |[25]:)", "either way of grouping heads gives the same bits")
def heads_are_grouped_alike() -> bool:
    """Whether torch's attention gives the same bits when key heads are repeated first."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = [torch.randn(2, count, 37, 64, device=device).bfloat16() for count in (6, 2, 2)]
    return bool(torch.equal(torch_adapter.torch_attention(*heads), torch_adapter.attention_of_equal_heads(*heads)))


@explains(r"^only .*: (2: 2 becomes 1|3: 3 becomes)", "this torch is newer than both")
@explains(r"^torch_scaled_mm .*: 0: 0 becomes", "what it chooses from is a tuple before torch 2.5 only")
@explains(r"^precision\.factors .*: (2: 2 becomes 1|4: 4 becomes [35])$", "this torch is newer")
@explains(r"^torch_adamw .*: (2: 2 becomes 1|4: 4 becomes [35])$", "this torch is newer than any of these")
def torch_is_newer_than_2_4() -> bool:
    """Whether torch is newer than 2.4."""
    return torch_adapter.version_of_torch() > (2, 4)


@explains(r"^only .*: (\(2, 3\): 1 swapped with 2|2: 2 becomes 3|3: 3 becomes)", "this torch is older than either")
@explains(
    r"^precision\.factors .*: (\(2, 4\): 1 swapped with 2|2: 2 becomes 3|4: 4 becomes [35])$",
    "this torch is older than any of these",
)
def torch_is_older_than_2_2() -> bool:
    """Whether torch is older than 2.2."""
    return torch_adapter.version_of_torch() < (2, 2)


@explains(r"^only .*: False: False becomes True", "where flash attention is allowed, mathematics is not chosen")
def mathematics_is_not_chosen() -> bool:
    """Whether torch's attention runs the same kernels where mathematics is allowed beside flash attention."""
    heads = [torch.randn(2, 6, 37, 40, device="cuda").bfloat16() for _ in range(3)]

    def kernels(mathematics: bool) -> Any:
        allowed = {"enable_flash": True, "enable_math": mathematics, "enable_mem_efficient": False}
        with torch.backends.cuda.sdp_kernel(**allowed):
            return gpu_kernels_run(lambda: F.scaled_dot_product_attention(*heads, is_causal=True))

    return bool(kernels(mathematics=True) == kernels(mathematics=False))


@explains(
    r"(_add_rms_norm .*: -1: |^LigerRope .*: -1: |^infer\.generate .*: -1: USub turned)",
    "of two dimensions the second is the last",
)
def the_second_of_two_is_the_last() -> bool:
    """Whether the second of two dimensions is the last."""
    return last_of(2, 1, -1)


@explains(
    r"(Rope .*: -2: |^llama\.(Rotary\.forward|eager_attention) .*: -2: USub turned$)",
    "of four dimensions the third is the last but one",
)
def the_third_of_four_is_the_last_but_one() -> bool:
    """Whether the third of four dimensions is the last but one."""
    return last_of(4, 2, -2)


@explains(r"^TorchRope .*: 2: 2 becomes", "the width of a table that is replaced before it is read")
def table_is_replaced() -> bool:
    """Whether the table of a rotary embedding has the width of its angles after one call, whatever it had before."""
    rope = torch_adapter.TorchRope(24, 10000.0)
    rope.cosine = rope.sine = torch.empty(0, 7)
    rope(torch.randn(1, 1, 5, 24), 0)
    return bool(rope.cosine.shape == (5, 12))


@explains(r"^TransformersRope .*: 8: ", "the table starts a little longer or shorter, and still has to grow")
def tables_grow_alike() -> bool:
    """Whether a table of transformers that starts with 7 or 9 positions is that which starts with 8, once it grew."""
    module = importlib.import_module("transformers.models.mistral.modeling_mistral")
    x = torch.randn(1, 1, 37, 24)
    grown = [module.MistralRotaryEmbedding(24, max_position_embeddings=n)(x, seq_len=37) for n in (7, 8, 9)]
    return all(torch.equal(*pair) for table in grown for pair in zip(table, grown[1]))


@explains(r"^TransformersRope .*: (self.apply|0: 0)", "queries and keys are the same there")
def queries_turn_as_keys() -> bool:
    """Whether transformers turns queries and keys alike."""
    module = importlib.import_module("transformers.models.mistral.modeling_mistral")
    x, positions = torch.randn(1, 1, 37, 24), torch.arange(37)[None]
    tables = module.MistralRotaryEmbedding(24)(x, seq_len=37)
    return bool(torch.equal(*module.apply_rotary_pos_emb(x, x, *tables, positions)))


@explains(r"^flash_attention .*: 0: 0 becomes", "what it chooses from is a tuple in FlashAttention 4 only")
def flash_gives_a_tensor() -> bool:
    """Whether flash-attn returns the result alone."""
    heads = torch.randn(1, 5, 2, 64, device="cuda").bfloat16()
    return isinstance(importlib.import_module("flash_attn").flash_attn_func(heads, heads, heads), torch.Tensor)


@explains(
    r"^(not deterministic though told so$|flash_attention .*: True: True becomes False)",
    "this release cannot be asked for a deterministic backward",
)
def flash_cannot_be_told() -> bool:
    """Whether flash-attn is there and has no deterministic backward to ask for."""
    attend = getattr(importlib.import_module("flash_attn"), "flash_attn_func", None)
    return attend is not None and "deterministic" not in inspect.signature(attend).parameters


@explains(
    r"^flash_attention .*: True: True becomes False", "its backward gives the same bits again without being asked to"
)
def flash_repeats_untold() -> bool:
    """Whether FlashAttention 4's gradients of 2,051 tokens have the same bits twenty times without being asked to."""
    heads = [torch.randn(2, count, 2051, 64, device="cuda").bfloat16().requires_grad_() for count in (6, 2, 2)]
    gradient = torch.randn(2, 6, 2051, 64, device="cuda").bfloat16()

    def gradients() -> Any:
        return torch.autograd.grad(flash_attention(*heads, module="flash_attn.cute"), heads, gradient)  # type: ignore[misc]  # three heads

    first = gradients()
    return all(torch.equal(*pair) for _ in range(19) for pair in zip(first, gradients()))


@explains(r"^flash_cross_entropy .*: 0: 0 becomes", "what it chooses from is a tuple after flash-attn 2.3.3 only")
def flash_gives_the_losses_alone() -> bool:
    """Whether flash-attn's cross entropy returns a tensor and not a tuple."""
    entropy = importlib.import_module("flash_attn.ops.triton.cross_entropy").cross_entropy_loss
    logits, labels = torch.randn(5, 83, device="cuda"), torch.arange(5, device="cuda")
    return isinstance(entropy(logits, labels), torch.Tensor)


@explains(r"^dropout_add_rms_norm .* 1 swapped with 2", "a sum is the same either way round")
def dropout_layer_norm_sums_alike() -> bool:
    """Whether the norm of a sum in dropout_layer_norm has the same bits either way round."""
    return sum_commutes(dropout_add_rms_norm)


@explains(r"^dropout_add_rms_norm .*: 0\.0: 0\.0 becomes -1\.0", "a probability below zero drops nothing, as zero does")
def nothing_is_dropped_below_zero() -> bool:
    """Whether dropout_layer_norm's norm has the same bits with a probability of -1 as with 0."""
    normalize = importlib.import_module("flash_attn.ops.rms_norm").dropout_add_rms_norm
    x, residual, weight = (torch.randn(*shape, 1024, device="cuda").bfloat16() for shape in ((5,), (5,), ()))
    ways = [normalize(x, residual, weight, None, dropped, 1e-5, prenorm=True) for dropped in (0.0, -1.0)]
    return all(torch.equal(*pair) for pair in zip(*ways))


@explains(r"^liger_add_rms_norm .* 1 swapped with 2", "a sum is the same either way round")
def liger_kernel_sums_alike() -> bool:
    """Whether Liger Kernel's norm of a sum has the same bits either way round."""
    return sum_commutes(liger_add_rms_norm)


@explains(r"^LigerRope .*: \[(\w+), \1\]: 1 swapped", "the two have one name")
def a_name_is_itself() -> bool:
    """Always: the pattern shows that both have one name."""
    return True


@explains(
    r"^TransformerEngineRope .*: 10000.0: ", "the base it leaves out is its own, and one beside that is given as well"
)
def base_is_its_own() -> bool:
    """Whether Transformer Engine's rotary embedding has the base 10000 by itself, or knows none."""
    attention = importlib.import_module("transformer_engine.pytorch.attention")
    make = getattr(attention, "rope", attention).RotaryPositionEmbedding.__init__
    named = inspect.signature(make).parameters.get("rotary_base")
    return named is None or named.default == 10000.0


@explains(r"^te_cross_entropy .*: :, None: ", "labels of one row each or of one row: they are flattened")
def labels_are_flattened() -> bool:
    """Whether Transformer Engine takes labels [1, rows] as it takes [rows, 1]."""
    entropy = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    logits, labels = torch.randn(5, 1, 83, device="cuda"), torch.arange(5, device="cuda")
    ways = [entropy(logits.clone(), given, 0.0, True, None, -100) for given in (labels[:, None], labels[None])]
    return bool(torch.equal(*ways))


@explains(
    r"^torchao_linear .*: (torch.cuda|\(8, 9\)|8:|9:)",
    "the capability is asked of a GPU alone, and one of 9.0 is above either bound",
)
def gpu_is_above() -> bool:
    """Whether there is no GPU to ask, or one above every capability that the rule makes of (8, 9) and that survives."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


@explains(r"^infer\.generate .*: 1: 1 becomes 0", "of one position the last is the first")
def the_first_position_is_the_last() -> bool:
    """Whether the first of one position is the last."""
    return last_of(1, 0, -1)


@explains(
    r"^guard\.distances .*(a, b|zip\(way\.losses, high\.losses\)): 1 swapped with 2",
    "a distance is the same either way round",
)
def distances_have_no_direction() -> bool:
    """Whether the distance of two numbers is the same either way round."""
    return abs(2.5 - 1.25) == abs(1.25 - 2.5)


@explains(
    r"^(guard|schedule|trainer|text|parity)\..*(max|min)\(.*\): 1 swapped with 2$",
    "the larger of two numbers, and the smaller, is the same either way round",
)
def extremes_have_no_order() -> bool:
    """Whether the larger of two numbers, and the smaller, is the same either way round."""
    return (max(2.5, 1.25), min(2.5, 1.25)) == (max(1.25, 2.5), min(1.25, 2.5))


@explains(
    r"^guard\.Guard\._keep .*: 1 swapped with 2$",
    "without a good state the next step keeps the state that it finds, which is this one",
)
def a_period_begins_at_the_good_state() -> bool:
    """Whether the guard begins a period in the state that it keeps as the last good one."""
    model = guarded_model()
    guard = Guard(lambda _: 1.0, model, every=2, steps=1)
    guard(0)
    guard(1)
    kept, found = guard._good, guard._snapshot()
    weights = [checkpoint.state_of(model), kept[0][0], found[0][0]]
    flat = [
        [tensor for tensor in torch.utils._pytree.tree_flatten(each)[0] if torch.is_tensor(tensor)] for each in weights
    ]
    return bool(flat[0]) and all(torch.equal(*pair) for each in flat[1:] for pair in zip(flat[0], each))


@explains(
    r"^guard\.Guard\._keep .*: (3 swapped with [45]|4 swapped with 5)$",
    "each of these begins with an empty list of its own",
)
def lists_begin_empty() -> bool:
    """Whether the guard's batches, losses and votes are three empty lists behind a good window."""
    guard = Guard(lambda _: 1.0, guarded_model(), every=1, steps=1)
    guard(0)
    lists = guard._batches, guard._losses, guard._votes
    return all(each == [] for each in lists) and len({id(each) for each in lists}) == 3


@explains(
    r"^llama\.RMSNorm\.forward .*: (0: 0 becomes 1|2: 2 becomes 3)$",
    "the norms that this target has normalize the last of any number of dimensions",
)
def norms_take_more_dimensions() -> bool:
    """Whether the plain norm and torch's give the rows of [2, 3, 24] the bits that they give those of [6, 24]."""
    x, weight = torch.randn(2, 3, 24), torch.randn(24)
    norms = [references.rms_norm] + (
        [torch_adapter.torch_rms_norm] if torch_adapter.version_of_torch() > (2, 3) else []
    )
    return all(torch.equal(norm(x, weight, 1e-5).flatten(0, 1), norm(x.flatten(0, 1), weight, 1e-5)) for norm in norms)


@explains(
    r"^llama\.eager_attention .*: 2: 2 becomes 3$",
    "the mask has a dimension of heads as well, and is the same for each",
)
def a_mask_of_each_head_is_the_same() -> bool:
    """Whether the upper triangle of [heads, rows, columns] is that of [rows, columns] for each head."""
    every, single = torch.ones(3, 4, 7, dtype=torch.bool).triu(4), torch.ones(4, 7, dtype=torch.bool).triu(4)
    return all(torch.equal(each, single) for each in every)


@explains(r"^llama\.Attention\.forward .*: 0: 0 becomes (1|-1)$", "the keys and the values of a cache are equally many")
def keys_are_as_many_as_values() -> bool:
    """Whether a cache holds as many keys as values."""
    llama = Llama(MODELS["tiny"], dict.fromkeys((*NAIVE,), "naive"), torch.float32)
    cache = llama.empty_cache(1)
    llama(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    return all(keys.shape == values.shape and keys.shape[2] == 5 for keys, values in cache)


@explains(
    r"^precision\.mantissas .*\): [12] swapped with [23]$", "a name may end in any of these, and both numbers are 3"
)
def mantissas_of_any_ending() -> bool:
    """Whether the order of the endings, or of a pair of equal numbers, changes no mantissas."""
    endings = ("rowwise", "blockwise", "gw_hp")
    names = ("torchao.rowwise", "transformer-engine.blockwise", "torchao.rowwise_with_gw_hp", "torchao.tensorwise")
    orders = list(itertools.permutations(endings))
    return all(
        mantissas(name) == ((3, 3)[::-1] if name.endswith(order) else (3, 2)) for name in names for order in orders
    )


@explains(
    r"^precision\.RoundedProduct\.backward .*: (0: 0 becomes -1|.*None, None: 3 swapped with 4)$",
    "it has one gradient, and None for both numbers of bits",
)
def one_gradient_and_two_nones() -> bool:
    """Whether the first of one gradient is the last, and None twice is the same either way round."""
    return last_of(1, 0, -1) and (None, None)[::-1] == (None, None)


@explains(r"^checkpoint\.adamw_state .*: 1 swapped with 2$", "the moments are taken over by name")
def moments_have_names() -> bool:
    """Whether moments by name are the same in any order."""
    return {"exp_avg": 1, "exp_avg_sq": 2} == {"exp_avg_sq": 2, "exp_avg": 1}


@explains(r'^ms_amp\.scales_of .*"amax_counter"\): \d swapped with \d$', "the scales are taken over by name")
def scales_have_names() -> bool:
    """Whether scales by name are the same in any order."""
    return {"scale": 1, "amax": 2} == {"amax": 2, "scale": 1}


@explains(r"^ms_amp\.clip_grad_norm_ .*: 0: 0 becomes -1$", "of one largest value the first is the last")
def gradients_have_one_largest_value() -> bool:
    """Whether the gradient of MS-AMP's weight knows the largest value of one step alone."""
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False, device="cuda"))
    layer = importlib.import_module("msamp").initialize(plain)[0][0]
    x = torch.randn(32, 64, device="cuda").bfloat16()
    layer(x).backward(x)
    return len(layer.weight.grad.meta.amax) == 1


@explains(
    r"^hugging_face\.parts_of .*\(width, width\): 1 swapped with 2$",
    "the sizes of a square matrix are the same in either order",
)
def sizes_of_a_square_are_one() -> bool:
    """Whether queries and the output of attention have as many rows as columns."""
    parts = hugging_face.parts_of(MODELS["tiny"])
    squares = [next(iter(parts[f"blocks.0.attention.{name}.weight"].values())) for name in ("qkv", "output")]
    return all(rows == columns for rows, columns in squares)


@explains(
    r"^(documents\._json_lines|deepspeed_config\.(_changes|applied)) .*(Error|float)\): \d swapped with \d$",
    "an exception, or a number, may be of any of these types",
)
def types_have_no_order() -> bool:
    """Whether an object is of one of several types, or is caught as one of them, in any order of them."""
    kinds = (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, int, float)
    objects = (OSError(), ValueError(), KeyError(), TypeError(), IndexError(), 1, 1.5, "1")
    return all(isinstance(each, kinds) == isinstance(each, kinds[::-1]) for each in objects)


@explains(
    r"^deepspeed_config\.(_changes|applied) .*(\[float, float\]|\(None, product\)): 1 swapped with 2$",
    "the two types are one, and a number may be any of the two",
)
def both_types_are_float() -> bool:
    """Whether two equal types, and the two values that a number may have, are the same either way round."""
    either = all((value in (None, 3)) == (value in (3, None)) for value in (None, 3, 4))
    return either and [float, float] == [float, float][::-1]


@explains(
    r"^text\.Text\.__init__ .*: (1: 1 becomes 2|0: 0 becomes 1)$",
    "no epoch is negative, so that the order is made before it is read",
)
def order_is_made_first() -> bool:
    """Whether the order of a text's windows does not depend on what stood there before the first was asked for."""
    first, second = (Text(torch.arange(500), 4, 0) for _ in range(2))
    second._epoch, second._order = -2, torch.empty(1)
    return [first._place(sample) for sample in range(300)] == [second._place(sample) for sample in range(300)]


@explains(r"^llama\.Llama\.forward .*self\.separator\): 1 swapped with 2$", "equality is the same either way round")
def separators_are_alike() -> bool:
    """Whether a token is the separator if the separator is the token."""
    tokens = torch.randint(4, (2, 37))
    numbered: Any = document_masks.documents_of
    return bool(torch.equal(numbered(tokens, 3), numbered(3, tokens)))


@explains(r"^llama\.Llama\.forward .*: 1: 1 becomes 0$", "a part has as many states as targets")
def states_and_targets_divide_alike() -> bool:
    """Whether parts of so many rows have as many states as targets."""
    return [*map(len, torch.ones(7, 3).chunk(3))] == [*map(len, torch.ones(7).chunk(3))]


@explains(
    r"^convert\.to_transformer_engine .*: Replaced\(\[\], \[\], \{\}\): 1 swapped with 2$",
    "each of these begins with an empty list of its own",
)
def empty_lists_are_alike() -> bool:
    """Whether two empty lists are the same either way round."""
    return ([], [])[::-1] == ([], [])


@explains(r"^convert\.computes_the_same .*: 1: 1 becomes 0$", "of one dimension the first is the last")
def the_only_dimension_is_the_last() -> bool:
    """Whether the first of one dimension is the last."""
    return last_of(1, 0, -1)


@explains(
    r"^convert\.(to_transformer_engine .*made\)|computes_the_same .*): "
    r"(1 swapped with 2|0: 0 becomes -?1|1\.0: 1\.0 becomes 2\.0|4: 4 becomes [35])$",
    "norms are told apart either way round, by any random rows, and by far more than rounding",
)
def norms_are_told_apart() -> bool:
    """Whether convert tells norms apart either way round, by other rows, twice as large ones, and other bounds."""
    norms = [torch.nn.LayerNorm(32, eps) for eps in (1e-4, 1e-4, 2e-4)]
    tensor, ceiling, of_seed_1 = torch.tensor, bounds.ceiling, torch.Generator().manual_seed(1)
    changes: List[ContextManager[Any]] = [
        contextlib.nullcontext(),
        mock.patch.object(torch, "Generator", lambda: mock.Mock(manual_seed=lambda _: of_seed_1)),
        mock.patch.object(torch, "tensor", lambda scales: tensor([2 * scales[0], *scales[1:]])),
        *(mock.patch.object(bounds, "ceiling", lambda dtype, _, ulps=ulps: ceiling(dtype, ulps)) for ulps in (3, 5)),
    ]
    for change in changes:
        for order in (1, -1):
            with change:
                alike = [convert.computes_the_same(*(norms[0], other)[::order]) for other in norms[1:]]
            if alike != [True, False]:
                return False
    return True


@explains(r"^checkpoint\.restore_random_state .*: 1 swapped with 2$", "there is no GPU whose generator has a state")
def no_generator_is_on_a_gpu() -> bool:
    """Whether there is no GPU whose generator has a state."""
    return not torch.cuda.is_available()


@explains(
    r"^torch_adamw .*: (version_of_torch.* turned|\(2, 4\): 1 swapped with 2|[24]: [24] becomes [1-5])$",
    "AdamW of parameters on a GPU is fused with any torch",
)
def adamw_is_fused_on_a_gpu() -> bool:
    """Whether there is a GPU, and torch's AdamW of a parameter on it is fused."""
    if not torch.cuda.is_available():
        return False
    optimizer = torch_adapter.torch_adamw([torch.nn.Parameter(torch.ones(3, device="cuda"))], lr=1e-3)
    return bool(optimizer.defaults["fused"])


@explains(
    r"^torch_adamw .*: 0: 0 becomes (-1|1)$",
    "the parameters of an optimizer are all on one device, and all in groups or none",
)
def adamw_may_ask_any_parameter() -> bool:
    """Whether torch's AdamW is the same if another parameter, or another group, is asked first."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups = [{"params": [parameter]} for parameter in parameters]
    pairs = [[torch_adapter.torch_adamw(given, lr=1e-3) for given in (way, way[::-1])] for way in (parameters, groups)]
    return all(first.defaults == second.defaults for first, second in pairs)


@explains(
    r"^trainer\.Run\.gradients .*in_pass\(.*: [12] swapped with [23]$", "one process sends no gradients in any pass"
)
def a_lone_process_sends_nothing() -> bool:
    """Whether a process that is alone does nothing more in any pass."""
    return isinstance(ALONE.in_pass(1, 0, None), contextlib.nullcontext)


@explains(r"^guard\.Guard\.", "the claims that catch it are about torchao, which is not here")
def torchao_is_not_here() -> bool:
    """Whether torchao is not installed."""
    return importlib.util.find_spec("torchao") is None


@explains(r"^guard\.Guard\._compare .*: 1: 1 becomes [02]$", "no layer here has scales that a pass would change")
def nothing_is_scaled_here() -> bool:
    """Whether a model in FP8 has no scales that a pass would change."""
    return not checkpoint.fp8_state_of(guarded_model())


@explains(
    r"^guard\.Extremes\.note .*: 1 swapped with 2$",
    "both factors are noted, each under its name, and the larger of two numbers is the same either way round",
)
def factors_are_noted_by_name() -> bool:
    """Whether what Extremes notes of the factors of a product does not depend on their order."""
    layer = torch.nn.Linear(3, 2)
    ways = [Extremes({"layer": layer}), Extremes({"layer": layer})]
    factors = torch.randn(5, 3), torch.randn(2, 3)
    for way, given in zip(ways, (factors, factors[::-1])):
        for _ in range(2):
            way.note(layer, *given)
    other = {"input": "weight", "weight": "input"}
    turned = {f"{other[name.split()[0]]} {name.split()[1]}": worst for name, worst in ways[1].worst().items()}
    return ways[0].worst() == turned


@explains(r"^documents\._json_lines .*: 1: 1 becomes 2$", "a line that is too long is so by one character or by two")
def longer_lines_are_refused() -> bool:
    """Whether reading a character or two more of a line tells as well that it is longer than allowed."""
    lines = ["x" * size for size in range(103)]
    return all(
        (len(io.StringIO(line).readline(99 + more)) > 99) == (len(line) > 99) for line in lines for more in (1, 2)
    )


@explains(r"^text\.Text\.read .*: 0: 0 becomes -1$", "of one folder of prepared tokens the first is the last")
def the_only_folder_is_the_last() -> bool:
    """Whether the first of one folder is the last."""
    return last_of(1, 0, -1)


@explains(
    r"^distributed/sharded\.train .*(: 1: 1 becomes 2|, model\): 1 swapped with 2|Div turned)$",
    "one process alone has the whole model and the whole loss",
)
def a_lone_process_has_everything() -> bool:
    """Whether this process is alone, and dividing by one is multiplying by it."""
    return not torch.distributed.is_initialized() and 3.5 / 1 == 3.5 * 1


@explains(
    r"^parity\.judged .*: low \* high: Mult turned$",
    "two numbers other than 0 have one sign if their product has it, or their quotient",
)
def signs_of_products_are_those_of_quotients() -> bool:
    """Whether two numbers have one sign if their product has it, or their quotient."""
    return all((a * b > 0) == (a / b > 0) for a in (-0.5, 0.25) for b in (-2.0, 3.0))


@explains(
    r"^parity\.on_held_out .*: \(\(.*\)\): 1 swapped with 2$",
    "a report is the same whichever of its entries was made first",
)
def entries_have_names() -> bool:
    """Whether a report is the same whichever of its entries was made first."""
    return {"arm": 1, "reference": 2} == {"reference": 2, "arm": 1}


@explains(
    r"^_with_parameters .*: False: False becomes True$",
    "the layers and norms that it takes over have no layers in them",
)
def layers_and_norms_have_no_layers() -> bool:
    """Whether a linear layer and a norm have no layers in them."""
    return not any(list(layer.children()) for layer in (torch.nn.Linear(3, 2), torch.nn.LayerNorm(3)))
