"""The memory plan: its sums by hand, and against the model itself."""
import math
from dataclasses import replace

import pytest
import torch

from engine import attention, delta, plan
from engine.attention import PackedLayout
from engine.hf import FAMILIES
from engine.packing import divided
from engine.plan import GIB, SHORT, Plan, Sizes
from grpo import Sequence
from model import Decoder, DecoderConfig

QWEN3_4B = DecoderConfig(151_936, 2560, 9728, 36, 32, 8, 128, 40_960)
SMALL = DecoderConfig(50, 32, 80, 3, 4, 2, 12, tie_word_embeddings=False)
GB = 10 ** 9


def of_family(family, **changes):
    """The small model as one of this family."""
    config = replace(SMALL, model_type=family, **changes)
    if family != "qwen3_5_text":
        return config
    kinds = ["linear_attention", "full_attention"]
    return replace(
        config, layer_types=(2 * kinds)[:config.num_hidden_layers],
        linear_conv_kernel_dim=4, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=12)


def of(config=QWEN3_4B, **changes):
    fields = {"config": config, "sizes": Sizes.of(Decoder.on_meta(config)),
              "window": 8192, "lora_rank": 0, "dtype": torch.bfloat16, "recompute_above": 0,
              "have": 141 * GB}
    return Plan(**fields | changes)


def test_the_rows_for_qwen3_4b_on_a_card_by_hand():
    """GB of all weights, rows and a window of 8,192 tokens: within 5 %."""
    P, T, layers = 4.022, 8192e-9, 36
    layer = 129_320 * T  # what autograd saves on fake CUDA tensors
    gathered = (0.389 + 2 * 0.101) * 2 + (0.389 + 0.101) * 6  # table and layers, in G
    head = 2 * 1.074 + 3 * T * 2560 * 2  # two chunks of float32 logits, and states
    gradient = 151_936e-9 * 2560 * 4  # of the head
    mlp = 3 * T * 9728 * 2
    for above, activations in (
            (math.inf, layers * layer + head + gradient),
            (0, layers * T * 2560 * 2 + max(head, layer + mlp) + gradient)):
        need = of(device="cuda", recompute_above=above, have=79 * GIB).need()
        by_hand = {"weights": 4 * P, "gradients": 4 * P, "optimizer": 8 * P,
                   "gathered": gathered, "sampler copy": 2 * P, "activations": activations,
                   "KV cache": 4 * T * 147_456}
        for part, size in by_hand.items():
            assert need.pop(part) == pytest.approx(size * GB, rel=0.05), part
        assert not any(need.values())
    alone = of(device="cuda", have=79 * GIB).fitted()
    assert not alone.fits(1)
    _, adapters = of(device="cuda", lora_rank=16).kept_bytes
    assert adapters == pytest.approx(133_128, rel=0.05)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank, tied", [(0, False), (16, True)])
def test_it_counts_the_parameters_that_there_are(rank, tied, family):
    config = of_family(family, tie_word_embeddings=tied)
    model, need = Decoder(config), of(config, lora_rank=rank, dtype=torch.float32).need()
    if rank:
        model.add_lora(rank, 32.0)
    assert need["weights"] == 4 * sum(w.numel() for w in model.parameters())
    trained = [w.numel() for w in model.parameters() if w.requires_grad]
    assert need["gradients"] == 4 * sum(trained) and need["optimizer"] == 8 * sum(trained)


def saved_by_autograd(config, dtype, rank, rows, monkeypatch):
    """Bytes that a forward pass keeps of these rows, without the weights."""
    torch.manual_seed(0)
    model = Decoder(config).to(dtype)
    if rank:
        model.add_lora(rank, 32.0)
    weights = {w.untyped_storage().data_ptr() for w in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def again(function, *inputs):  # which keeps its inputs alive
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor):
                pack(tensor)
        with torch.no_grad():
            out = function(*inputs)
        return out.requires_grad_() if function is delta.convolve else (
            out[0].requires_grad_(), None)

    monkeypatch.setattr(attention, "recomputed", again)
    packed = PackedLayout(sum(rows, []), list(map(len, rows)), "cpu")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.hidden(packed.computed[None] % 50, packed.positions[None], packed)
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank, dtype", [
    (0, torch.float32), (2, torch.float32), (2, torch.bfloat16)])
@pytest.mark.parametrize("shared", [0, 80])
def test_what_a_forward_pass_keeps_is_what_autograd_saves(
        shared, rank, dtype, family, monkeypatch):
    """The bytes of two layers: the difference between models of three layers and of one.
    The rows are 512 tokens, or share so many that they count as that."""
    monkeypatch.setattr(plan, "LEAST_PACK", 512)
    two = of_family(family, num_hidden_layers=2)
    keeps = {"lora_rank": rank, "dtype": dtype, "recompute_above": math.inf}
    cost = of(two, **keeps).copy_cost * (shared > 0)
    number = int((512 - shared) / (16 + cost * (shared + 16)))
    rows = [[0] * shared + [1 + i] * 16 for i in range(number)]
    saved, planned = [], []
    for layers in (1, 3):  # of a hybrid one more of each kind
        config = of_family(family, num_hidden_layers=layers)
        saved.append(saved_by_autograd(config, dtype, rank, rows, monkeypatch))
        without_head = replace(config, vocab_size=1)
        planned.append(of(without_head, window=512, **keeps).activations())
    assert planned[1] - planned[0] == pytest.approx(saved[1] - saved[0], rel=0.08)


def test_packs_that_share_a_prefix_on_a_card_are_within_the_plan():
    """64 rows after 4,000 tokens of Qwen3-4B. In a layer each row has 4 KiB per token, its
    keys and values, and for a moment gradients: 4 KiB of these, 16 of each query head's,
    and 8 in float32."""
    plan = of(device="cuda", window=32_768)
    rows = [Sequence([0] * 4000 + [1 + i] * 160, [], [], [], 1.0) for i in range(64)]
    packs = divided(rows, plan.pack_size)
    assert sum(map(len, packs)) == 64
    for pack in packs:
        computed, seen = 4000 + 160 * len(pack), 4160 * len(pack)
        token = 36 * 5120 + 129_192  # that is computed
        assert computed * token + seen * 32 * 1024 <= plan.pack_tokens * token


def test_only_rows_longer_than_a_short_pack_are_computed_again():
    plan = of(window=32_768, lora_rank=16, device="cuda", recompute_above=SHORT)
    rows = [Sequence([1 + i] * (6000 if i == 7 else 500), [], [], [], 1.0)
            for i in range(20)]
    short = plan.for_packs
    packs = divided(rows, short.pack_size)
    sizes = [sum(len(row.ids) for row in pack) for pack in packs]
    assert max(sizes) == 6000 and sorted(sizes)[-2] <= SHORT < 8192 < sum(sizes)
    # Each of the two kinds fits into what is planned.
    kept, again = (replace(plan, **change).activations() for change in (
        {"window": SHORT, "recompute_above": math.inf}, {"recompute_above": 0}))
    assert kept > again and plan.activations() == kept


def test_ranks_share_what_is_trained_and_each_has_a_sampler():
    one, eight = of().need(), of().need(8)
    for part in ("weights", "gradients", "optimizer"):
        assert eight[part] == one[part] // 8
    # A frozen reference for a KL term: 2 bytes of each weight.
    assert one["reference"] == 0 and of(reference=True).need(8)["reference"] == 1005617024
    assert eight["sampler copy"] == one["sampler copy"]
    assert eight["activations"] == one["activations"]
    assert eight["KV cache"] > one["KV cache"]  # takes what the others leave
    # Whole pages, one in reserve, and no more windows than trees can fill.
    few = of(SMALL, device="cuda", window=384, most_windows=7)
    assert few.need()["KV cache"] == 7 * 3 * 256 * (3 * 2 * 24 * 2)


@pytest.mark.parametrize("config, most", [(QWEN3_4B, 200 * GB), (SMALL, GB // 2)])
@pytest.mark.parametrize("rank, ranks, changes", [(16, 1, 4), (16, 4, 3), (0, 1, 3)])
def test_the_longest_window_that_fits_with_the_least_change(
        rank, ranks, changes, config, most):
    """Recomputing costs less than no copy, and several ranks each need a copy. The wanted
    window is no multiple of a step."""
    every = [(math.inf, False), (SHORT, False), (0, False), (0, True)]

    def fitting(window):
        plans = [replace(wanted, window=window, recompute_above=above, unmerged=apart)
                 for above, apart in every]
        return [plan for plan in plans[:changes] if plan.fits(ranks)]

    wants = of(config, window=30_000, lora_rank=rank, recompute_above=math.inf,
               device="cuda")
    seen = set()
    for part in range(1, 400):
        wanted = replace(wants, have=part * most // 400)
        plan = wanted.fitted(ranks)
        assert fitting(plan.window)[:1] == [plan] * plan.fits(ranks)
        assert plan.fits(ranks) or (plan.window, plan.unmerged) == (4096, changes == 4)
        assert plan.window == 30_000 or not fitting(min(plan.window + 1024, 30_000))
        seen.add((plan.window < 30_000, plan.recompute_above, plan.unmerged))
    assert (True, 0, changes == 4) in seen  # (shorter, recompute_above, apart)
