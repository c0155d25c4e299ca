"""Why a mutant survives."""

from __future__ import annotations

import contextlib
import importlib
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


class Reason(NamedTuple):
    """Why a mutant whose name matches the pattern survives; it is given only where what it says holds when it runs."""

    pattern: str
    words: str
    holds: Callable[[], bool]


def heads_are_grouped_alike() -> bool:
    """Whether torch's attention gives the same bits when key heads are repeated first."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = [torch.randn(2, count, 37, 64, device=device).bfloat16() for count in (6, 2, 2)]
    return bool(torch.equal(torch_adapter.torch_attention(*heads), torch_adapter.attention_of_equal_heads(*heads)))


def last_of(dimensions: int, other: int, last: int) -> bool:
    """Whether two numbers name the same one of so many dimensions."""
    return range(dimensions)[other] == range(dimensions)[last]


def tables_grow_alike() -> bool:
    """Whether a table of transformers that starts with 7 or 9 positions is that which starts with 8, once it grew."""
    module = importlib.import_module("transformers.models.mistral.modeling_mistral")
    x = torch.randn(1, 1, 37, 24)
    grown = [module.MistralRotaryEmbedding(24, max_position_embeddings=n)(x, seq_len=37) for n in (7, 8, 9)]
    return all(torch.equal(*pair) for table in grown for pair in zip(table, grown[1]))


def table_is_replaced() -> bool:
    """Whether the table of a rotary embedding has the width of its angles after one call, whatever it had before."""
    rope = torch_adapter.TorchRope(24, 10000.0)
    rope.cosine = rope.sine = torch.empty(0, 7)
    rope(torch.randn(1, 1, 5, 24), 0)
    return bool(rope.cosine.shape == (5, 12))


def queries_turn_as_keys() -> bool:
    """Whether transformers turns queries and keys alike."""
    module = importlib.import_module("transformers.models.mistral.modeling_mistral")
    x, positions = torch.randn(1, 1, 37, 24), torch.arange(37)[None]
    tables = module.MistralRotaryEmbedding(24)(x, seq_len=37)
    return bool(torch.equal(*module.apply_rotary_pos_emb(x, x, *tables, positions)))


def sum_commutes(norm: Callable[..., torch.Tensor]) -> Callable[[], bool]:
    """Whether a norm of a sum has the same bits either way round when it is asked."""

    def commutes() -> bool:
        x, residual, weight = (torch.randn(*shape, 1024, device="cuda").bfloat16() for shape in ((5,), (5,), ()))
        return bool(torch.equal(norm(x, residual, weight, 1e-5), norm(residual, x, weight, 1e-5)))

    return commutes


def nothing_is_dropped_below_zero() -> bool:
    """Whether dropout_layer_norm's norm has the same bits with a probability of -1 as with 0."""
    normalize = importlib.import_module("flash_attn.ops.rms_norm").dropout_add_rms_norm
    x, residual, weight = (torch.randn(*shape, 1024, device="cuda").bfloat16() for shape in ((5,), (5,), ()))
    ways = [normalize(x, residual, weight, None, dropped, 1e-5, prenorm=True) for dropped in (0.0, -1.0)]
    return all(torch.equal(*pair) for pair in zip(*ways))


def mathematics_is_not_chosen() -> bool:
    """Whether torch's attention runs the same kernels where mathematics is allowed beside flash attention."""
    heads = [torch.randn(2, 6, 37, 40, device="cuda").bfloat16() for _ in range(3)]

    def kernels(mathematics: bool) -> Any:
        allowed = {"enable_flash": True, "enable_math": mathematics, "enable_mem_efficient": False}
        with torch.backends.cuda.sdp_kernel(**allowed):
            return gpu_kernels_run(lambda: F.scaled_dot_product_attention(*heads, is_causal=True))

    return bool(kernels(mathematics=True) == kernels(mathematics=False))


def flash_cannot_be_told() -> bool:
    """Whether flash-attn is there and has no deterministic backward to ask for."""
    attend = getattr(importlib.import_module("flash_attn"), "flash_attn_func", None)
    return attend is not None and "deterministic" not in inspect.signature(attend).parameters


def flash_repeats_untold() -> bool:
    """Whether FlashAttention 4's gradients of 2,051 tokens have the same bits twenty times without being asked to."""
    heads = [torch.randn(2, count, 2051, 64, device="cuda").bfloat16().requires_grad_() for count in (6, 2, 2)]
    gradient = torch.randn(2, 6, 2051, 64, device="cuda").bfloat16()

    def gradients() -> Any:
        return torch.autograd.grad(flash_attention(*heads, module="flash_attn.cute"), heads, gradient)  # type: ignore[misc]  # three heads

    first = gradients()
    return all(torch.equal(*pair) for _ in range(19) for pair in zip(first, gradients()))


def flash_gives_the_losses_alone() -> bool:
    """Whether flash-attn's cross entropy returns a tensor and not a tuple."""
    entropy = importlib.import_module("flash_attn.ops.triton.cross_entropy").cross_entropy_loss
    logits, labels = torch.randn(5, 83, device="cuda"), torch.arange(5, device="cuda")
    return isinstance(entropy(logits, labels), torch.Tensor)


def gradients_have_one_largest_value() -> bool:
    """Whether the gradient of MS-AMP's weight knows the largest value of one step alone."""
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False, device="cuda"))
    layer = importlib.import_module("msamp").initialize(plain)[0][0]
    x = torch.randn(32, 64, device="cuda").bfloat16()
    layer(x).backward(x)
    return len(layer.weight.grad.meta.amax) == 1


def sizes_of_a_square_are_one() -> bool:
    """Whether queries and the output of attention have as many rows as columns."""
    parts = hugging_face.parts_of(MODELS["tiny"])
    squares = [next(iter(parts[f"blocks.0.attention.{name}.weight"].values())) for name in ("qkv", "output")]
    return all(rows == columns for rows, columns in squares)


def flash_gives_a_tensor() -> bool:
    """Whether flash-attn returns the result alone."""
    heads = torch.randn(1, 5, 2, 64, device="cuda").bfloat16()
    return isinstance(importlib.import_module("flash_attn").flash_attn_func(heads, heads, heads), torch.Tensor)


def labels_are_flattened() -> bool:
    """Whether Transformer Engine takes labels [1, rows] as it takes [rows, 1]."""
    entropy = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    logits, labels = torch.randn(5, 1, 83, device="cuda"), torch.arange(5, device="cuda")
    ways = [entropy(logits.clone(), given, 0.0, True, None, -100) for given in (labels[:, None], labels[None])]
    return bool(torch.equal(*ways))


def base_is_its_own() -> bool:
    """Whether Transformer Engine's rotary embedding has the base 10000 by itself, or knows none."""
    attention = importlib.import_module("transformer_engine.pytorch.attention")
    make = getattr(attention, "rope", attention).RotaryPositionEmbedding.__init__
    named = inspect.signature(make).parameters.get("rotary_base")
    return named is None or named.default == 10000.0


def newer_than(major: int, minor: int) -> Callable[[], bool]:
    """Whether torch is newer than that when it is asked."""
    return lambda: torch_adapter.version_of_torch() > (major, minor)


def older_than(major: int, minor: int) -> Callable[[], bool]:
    """Whether torch is older than that when it is asked."""
    return lambda: torch_adapter.version_of_torch() < (major, minor)


def gpu_is_above() -> bool:
    """Whether there is no GPU to ask, or one above every capability that the rule makes of (8, 9) and that survives."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


def guarded_model() -> torch.nn.Module:
    """A layer that the guard takes for one in a cut mantissa."""
    layer = torch.nn.Linear(3, 2)
    compute_by([layer], plain)
    return torch.nn.Sequential(layer)


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


def lists_begin_empty() -> bool:
    """Whether the guard's batches, losses and votes are three empty lists behind a good window."""
    guard = Guard(lambda _: 1.0, guarded_model(), every=1, steps=1)
    guard(0)
    lists = guard._batches, guard._losses, guard._votes
    return all(each == [] for each in lists) and len({id(each) for each in lists}) == 3


def norms_take_more_dimensions() -> bool:
    """Whether the plain norm and torch's give the rows of [2, 3, 24] the bits that they give those of [6, 24]."""
    x, weight = torch.randn(2, 3, 24), torch.randn(24)
    norms = [references.rms_norm] + ([torch_adapter.torch_rms_norm] if newer_than(2, 3)() else [])
    return all(torch.equal(norm(x, weight, 1e-5).flatten(0, 1), norm(x.flatten(0, 1), weight, 1e-5)) for norm in norms)


def a_mask_of_each_head_is_the_same() -> bool:
    """Whether the upper triangle of [heads, rows, columns] is that of [rows, columns] for each head."""
    every, single = torch.ones(3, 4, 7, dtype=torch.bool).triu(4), torch.ones(4, 7, dtype=torch.bool).triu(4)
    return all(torch.equal(each, single) for each in every)


def keys_are_as_many_as_values() -> bool:
    """Whether a cache holds as many keys as values."""
    llama = Llama(MODELS["tiny"], dict.fromkeys((*NAIVE,), "naive"), torch.float32)
    cache = llama.empty_cache(1)
    llama(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    return all(keys.shape == values.shape and keys.shape[2] == 5 for keys, values in cache)


def mantissas_of_any_ending() -> bool:
    """Whether the order of the endings, or of a pair of equal numbers, changes no mantissas."""
    endings = ("rowwise", "blockwise", "gw_hp")
    names = ("torchao.rowwise", "transformer-engine.blockwise", "torchao.rowwise_with_gw_hp", "torchao.tensorwise")
    orders = list(itertools.permutations(endings))
    return all(
        mantissas(name) == ((3, 3)[::-1] if name.endswith(order) else (3, 2)) for name in names for order in orders
    )


def types_have_no_order() -> bool:
    """Whether an object is of one of several types, or is caught as one of them, in any order of them."""
    kinds = (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, int, float)
    objects = (OSError(), ValueError(), KeyError(), TypeError(), IndexError(), 1, 1.5, "1")
    return all(isinstance(each, kinds) == isinstance(each, kinds[::-1]) for each in objects)


def order_is_made_first() -> bool:
    """Whether the order of a text's windows does not depend on what stood there before the first was asked for."""
    first, second = (Text(torch.arange(500), 4, 0) for _ in range(2))
    second._epoch, second._order = -2, torch.empty(1)
    return [first._place(sample) for sample in range(300)] == [second._place(sample) for sample in range(300)]


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


def separators_are_alike() -> bool:
    """Whether a token is the separator if the separator is the token."""
    tokens = torch.randint(4, (2, 37))
    numbered: Any = document_masks.documents_of
    return bool(torch.equal(numbered(tokens, 3), numbered(3, tokens)))


def nothing_is_scaled_here() -> bool:
    """Whether a model in FP8 has no scales that a pass would change."""
    return not checkpoint.fp8_state_of(guarded_model())


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


def longer_lines_are_refused() -> bool:
    """Whether reading a character or two more of a line tells as well that it is longer than allowed."""
    lines = ["x" * size for size in range(103)]
    return all(
        (len(io.StringIO(line).readline(99 + more)) > 99) == (len(line) > 99) for line in lines for more in (1, 2)
    )


WHY = [
    Reason(
        r"^torch_attention .*: (version|\(2, |[25]:)",
        "either way of grouping heads gives the same bits",
        heads_are_grouped_alike,
    ),
    Reason(r"^only .*: (2: 2 becomes 1|3: 3 becomes)", "this torch is newer than both", newer_than(2, 4)),
    Reason(
        r"^only .*: (\(2, 3\): 1 swapped with 2|2: 2 becomes 3|3: 3 becomes)",
        "this torch is older than either",
        older_than(2, 2),
    ),
    Reason(
        r"^only .*: False: False becomes True",
        "where flash attention is allowed, mathematics is not chosen",
        mathematics_is_not_chosen,
    ),
    Reason(r"_add_rms_norm .*: -1: ", "of two dimensions the second is the last", lambda: last_of(2, 1, -1)),
    Reason(r"Rope .*: -2: ", "of four dimensions the third is the last but one", lambda: last_of(4, 2, -2)),
    Reason(
        r"^TorchRope .*: 2: 2 becomes", "the width of a table that is replaced before it is read", table_is_replaced
    ),
    Reason(
        r"^TransformersRope .*: 8: ",
        "the table starts a little longer or shorter, and still has to grow",
        tables_grow_alike,
    ),
    Reason(r"^TransformersRope .*: (self.apply|0: 0)", "queries and keys are the same there", queries_turn_as_keys),
    Reason(
        r"^torch_scaled_mm .*: 0: 0 becomes",
        "what it chooses from is a tuple before torch 2.5 only",
        newer_than(2, 4),
    ),
    Reason(
        r"^flash_attention .*: 0: 0 becomes",
        "what it chooses from is a tuple in FlashAttention 4 only",
        flash_gives_a_tensor,
    ),
    Reason(
        r"^(not deterministic though told so$|flash_attention .*: True: True becomes False)",
        "this release cannot be asked for a deterministic backward",
        flash_cannot_be_told,
    ),
    Reason(
        r"^flash_attention .*: True: True becomes False",
        "its backward gives the same bits again without being asked to",
        flash_repeats_untold,
    ),
    Reason(
        r"^flash_cross_entropy .*: 0: 0 becomes",
        "what it chooses from is a tuple after flash-attn 2.3.3 only",
        flash_gives_the_losses_alone,
    ),
    Reason(
        r"^dropout_add_rms_norm .* 1 swapped with 2",
        "a sum is the same either way round",
        sum_commutes(dropout_add_rms_norm),
    ),
    Reason(
        r"^dropout_add_rms_norm .*: 0\.0: 0\.0 becomes -1\.0",
        "a probability below zero drops nothing, as zero does",
        nothing_is_dropped_below_zero,
    ),
    Reason(
        r"^liger_add_rms_norm .* 1 swapped with 2",
        "a sum is the same either way round",
        sum_commutes(liger_add_rms_norm),
    ),
    Reason(r"^LigerRope .*: \[(\w+), \1\]: 1 swapped", "the two have one name", lambda: True),  # as the pattern sees
    Reason(r"^LigerRope .*: -1: ", "of two dimensions the second is the last", lambda: last_of(2, 1, -1)),
    Reason(
        r"^TransformerEngineRope .*: 10000.0: ",
        "the base it leaves out is its own, and one beside that is given as well",
        base_is_its_own,
    ),
    Reason(
        r"^te_cross_entropy .*: :, None: ",
        "labels of one row each or of one row: they are flattened",
        labels_are_flattened,
    ),
    Reason(
        r"^torchao_linear .*: (torch.cuda|\(8, 9\)|8:|9:)",
        "the capability is asked of a GPU alone, and one of 9.0 is above either bound",
        gpu_is_above,
    ),
    Reason(
        r"^infer\.generate .*: -1: USub turned", "of two dimensions the second is the last", lambda: last_of(2, 1, -1)
    ),
    Reason(r"^infer\.generate .*: 1: 1 becomes 0", "of one position the last is the first", lambda: last_of(1, 0, -1)),
    Reason(
        r"^guard\.distances .*(a, b|zip\(way\.losses, high\.losses\)): 1 swapped with 2",
        "a distance is the same either way round",
        lambda: abs(2.5 - 1.25) == abs(1.25 - 2.5),
    ),
    Reason(
        r"^(guard|schedule|trainer|text|parity)\..*(max|min)\(.*\): 1 swapped with 2$",
        "the larger of two numbers, and the smaller, is the same either way round",
        lambda: (max(2.5, 1.25), min(2.5, 1.25)) == (max(1.25, 2.5), min(1.25, 2.5)),
    ),
    Reason(
        r"^guard\.Guard\._keep .*: 1 swapped with 2$",
        "without a good state the next step keeps the state that it finds, which is this one",
        a_period_begins_at_the_good_state,
    ),
    Reason(
        r"^guard\.Guard\._keep .*: (3 swapped with [45]|4 swapped with 5)$",
        "each of these begins with an empty list of its own",
        lists_begin_empty,
    ),
    Reason(
        r"^llama\.RMSNorm\.forward .*: (0: 0 becomes 1|2: 2 becomes 3)$",
        "the norms that this target has normalize the last of any number of dimensions",
        norms_take_more_dimensions,
    ),
    Reason(
        r"^llama\.(Rotary\.forward|eager_attention) .*: -2: USub turned$",
        "of four dimensions the third is the last but one",
        lambda: last_of(4, 2, -2),
    ),
    Reason(
        r"^llama\.eager_attention .*: 2: 2 becomes 3$",
        "the mask has a dimension of heads as well, and is the same for each",
        a_mask_of_each_head_is_the_same,
    ),
    Reason(
        r"^llama\.Attention\.forward .*: 0: 0 becomes (1|-1)$",
        "the keys and the values of a cache are equally many",
        keys_are_as_many_as_values,
    ),
    Reason(
        r"^precision\.mantissas .*\): [12] swapped with [23]$",
        "a name may end in any of these, and both numbers are 3",
        mantissas_of_any_ending,
    ),
    Reason(r"^precision\.factors .*: (2: 2 becomes 1|4: 4 becomes [35])$", "this torch is newer", newer_than(2, 4)),
    Reason(
        r"^precision\.RoundedProduct\.backward .*: (0: 0 becomes -1|.*None, None: 3 swapped with 4)$",
        "it has one gradient, and None for both numbers of bits",
        lambda: last_of(1, 0, -1) and (None, None)[::-1] == (None, None),
    ),
    Reason(
        r"^checkpoint\.adamw_state .*: 1 swapped with 2$",
        "the moments are taken over by name",
        lambda: {"exp_avg": 1, "exp_avg_sq": 2} == {"exp_avg_sq": 2, "exp_avg": 1},
    ),
    Reason(
        r'^ms_amp\.scales_of .*"amax_counter"\): \d swapped with \d$',
        "the scales are taken over by name",
        lambda: {"scale": 1, "amax": 2} == {"amax": 2, "scale": 1},
    ),
    Reason(
        r"^ms_amp\.clip_grad_norm_ .*: 0: 0 becomes -1$",
        "of one largest value the first is the last",
        gradients_have_one_largest_value,
    ),
    Reason(
        r"^hugging_face\.parts_of .*\(width, width\): 1 swapped with 2$",
        "the sizes of a square matrix are the same in either order",
        sizes_of_a_square_are_one,
    ),
    Reason(
        r"^(documents\._json_lines|deepspeed_config\.(_changes|applied)) .*(Error|float)\): \d swapped with \d$",
        "an exception, or a number, may be of any of these types",
        types_have_no_order,
    ),
    Reason(
        r"^deepspeed_config\.(_changes|applied) .*(\[float, float\]|\(None, product\)): 1 swapped with 2$",
        "the two types are one, and a number may be any of the two",
        lambda: (
            [float, float] == [float, float][::-1] and all((n in (None, 3)) == (n in (3, None)) for n in (None, 3, 4))
        ),
    ),
    Reason(
        r"^text\.Text\.__init__ .*: (1: 1 becomes 2|0: 0 becomes 1)$",
        "no epoch is negative, so that the order is made before it is read",
        order_is_made_first,
    ),
    Reason(
        r"^llama\.Llama\.forward .*self\.separator\): 1 swapped with 2$",
        "equality is the same either way round",
        separators_are_alike,
    ),
    Reason(
        r"^llama\.Llama\.forward .*: 1: 1 becomes 0$",
        "a part has as many states as targets",
        lambda: [*map(len, torch.ones(7, 3).chunk(3))] == [*map(len, torch.ones(7).chunk(3))],
    ),
    Reason(
        r"^convert\.to_transformer_engine .*: Replaced\(\[\], \[\], \{\}\): 1 swapped with 2$",
        "each of these begins with an empty list of its own",
        lambda: ([], [])[::-1] == ([], []),
    ),
    Reason(
        r"^convert\.computes_the_same .*: 1: 1 becomes 0$",
        "of one dimension the first is the last",
        lambda: last_of(1, 0, -1),
    ),
    Reason(
        r"^convert\.(to_transformer_engine .*made\)|computes_the_same .*): "
        r"(1 swapped with 2|0: 0 becomes -?1|1\.0: 1\.0 becomes 2\.0|4: 4 becomes [35])$",
        "norms are told apart either way round, by any random rows, and by far more than rounding",
        norms_are_told_apart,
    ),
    Reason(
        r"^checkpoint\.restore_random_state .*: 1 swapped with 2$",
        "there is no GPU whose generator has a state",
        lambda: not torch.cuda.is_available(),
    ),
    Reason(
        r"^trainer\.Run\.gradients .*in_pass\(.*: [12] swapped with [23]$",
        "one process sends no gradients in any pass",
        lambda: isinstance(ALONE.in_pass(1, 0, None), contextlib.nullcontext),
    ),
    Reason(
        r"^guard\.Guard\._compare .*: 1: 1 becomes [02]$",
        "no layer here has scales that a pass would change",
        nothing_is_scaled_here,
    ),
    Reason(
        r"^guard\.Extremes\.note .*: 1 swapped with 2$",
        "both factors are noted, each under its name, and the larger of two numbers is the same either way round",
        factors_are_noted_by_name,
    ),
    Reason(
        r"^documents\._json_lines .*: 1: 1 becomes 2$",
        "a line that is too long is so by one character or by two",
        longer_lines_are_refused,
    ),
    Reason(
        r"^text\.Text\.read .*: 0: 0 becomes -1$",
        "of one folder of prepared tokens the first is the last",
        lambda: last_of(1, 0, -1),
    ),
    Reason(
        r"^distributed/sharded\.train .*(: 1: 1 becomes 2|, model\): 1 swapped with 2|Div turned)$",
        "one process alone has the whole model and the whole loss",
        lambda: not torch.distributed.is_initialized() and 3.5 / 1 == 3.5 * 1,
    ),
    Reason(
        r"^parity\.judged .*: low \* high: Mult turned$",
        "two numbers other than 0 have one sign if their product has it, or their quotient",
        lambda: all((a * b > 0) == (a / b > 0) for a in (-0.5, 0.25) for b in (-2.0, 3.0)),
    ),
    Reason(
        r"^parity\.on_held_out .*: \(\(.*\)\): 1 swapped with 2$",
        "a report is the same whichever of its entries was made first",
        lambda: {"arm": 1, "reference": 2} == {"reference": 2, "arm": 1},
    ),
    Reason(
        r"^_with_parameters .*: False: False becomes True$",
        "the layers and norms that it takes over have no layers in them",
        lambda: not any(list(layer.children()) for layer in (torch.nn.Linear(3, 2), torch.nn.LayerNorm(3))),
    ),
]
