"""The memory plan: its sums by hand, against the model itself, and its advice."""
import os
import re
from dataclasses import fields, replace

import pytest
import torch

import train
from model import Qwen3, Qwen3Config
from runtime import plan
from runtime.attention import PackedRows
from runtime.hf import FAMILIES
from runtime.plan import Plan

QWEN3_4B = Qwen3Config(151_936, 2560, 9728, 36, 32, 8, 128, 40_960)
SMALL = Qwen3Config(50, 32, 80, 3, 4, 2, 12, tie_word_embeddings=False)
GB = 10 ** 9


def of(config=QWEN3_4B, **changes):
    fields = {"config": config, "window": 8192, "row": 8192, "rank": 0, "element": 2,
              "recompute": True, "have": 141 * GB}
    return Plan(**fields | changes)


def test_the_disk_of_a_run_holds_checkpoints_and_models():
    P = 4_022_468_096
    assert of().checkpoint_bytes == 12 * P and of(moment=2).checkpoint_bytes == 8 * P
    assert of().disk_bytes(3, False, False) == (3 * 12 + 2 * 4) * P
    assert of().disk_bytes(3, True, True) == (3 * 12 + 4 * 4) * P
    lora = of(rank=16)
    adapters = lora.parameters[1]
    models = 2 * (2 * P + 4 * adapters)
    assert lora.disk_bytes(3, False, False) == 3 * 12 * adapters + models
    assert lora.disk_bytes(3, True, False) == 3 * 12 * P + models  # it trains all weights


def test_qwen3_4b_by_hand():
    need = of().need()
    P = 4_022_468_096
    assert of().parameters == (P, 0)
    assert (need["weights"], need["gradients"], need["optimizer"]) == (4 * P, 4 * P, 8 * P)
    assert need["sampler copy"] == 2 * P and of().token_bytes == 147_456
    assert of(element=4).need()["sampler copy"] == 0  # it computes with the trainer's
    assert of(rank=16, apart=True).need()["sampler copy"] == 0
    assert of(rank=16, apart=True).need(2)["sampler copy"] == 2 * P
    lora = of(rank=16)
    attention = 2 * (2560 + 4096) + 2 * (2560 + 1024)
    adapters = 36 * 16 * (attention + 3 * (2560 + 9728))
    need = lora.need()
    assert lora.parameters == (P, adapters)
    assert need["weights"] == 2 * P + 4 * adapters and need["sampler copy"] == 2 * P
    assert (need["gradients"], need["optimizer"]) == (4 * adapters, 8 * adapters)
    assert lora.token_bytes == 147_456


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 16])
def test_it_counts_the_parameters_that_there_are(rank, tied, family):
    config = replace(SMALL, tie_word_embeddings=tied, model_type=family)
    model = Qwen3(config)
    if rank:
        model.add_lora(rank, 32.0)
    want = (sum(w.numel() for w in model.weights().values()),
            sum(w.numel() for w in model.adapters().values()))
    assert of(config, rank=rank).parameters == want


def saved_by_autograd(config, dtype, rank, rows):
    """Bytes that a forward pass keeps of these rows, without the weights."""
    torch.manual_seed(0)
    model = Qwen3(config).to(dtype)
    if rank:
        model.add_lora(rank, 32.0)
    weights = {w.untyped_storage().data_ptr() for w in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    packed = PackedRows(sum(rows, []), list(map(len, rows)), "cpu")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.hidden(packed.computed[None] % 50, packed.positions[None], packed.attend)
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank, dtype", [
    (0, torch.float32), (2, torch.float32), (2, torch.bfloat16)])
@pytest.mark.parametrize("shared", [0, 80])
def test_what_a_forward_pass_keeps_is_what_autograd_saves(shared, rank, dtype, family):
    """The bytes of two layers: the difference between models of three layers and of one.
    The rows are 512 tokens, or share so many that they count as that."""
    cost = of(SMALL, rank=rank, element=dtype.itemsize).seen_cost * (shared > 0)
    number = int((512 - shared) / (16 + cost * (shared + 16)))
    rows = [[0] * shared + [1 + i] * 16 for i in range(number)]
    saved, planned = [], []
    for layers in (1, 3):
        config = replace(SMALL, num_hidden_layers=layers, model_type=family)
        saved.append(saved_by_autograd(config, dtype, rank, rows))
        without_head = replace(config, vocab_size=1)
        planned.append(of(without_head, rank=rank, element=dtype.itemsize, row=512,
                          recompute=False).activations())
    assert planned[1] - planned[0] == pytest.approx(saved[1] - saved[0], rel=0.08)


def test_recomputing_keeps_one_number_per_token_and_channel_of_each_layer():
    deep, deeper = of(), of(replace(QWEN3_4B, num_hidden_layers=37))
    assert deeper.activations() - deep.activations() == 8192 * 2560 * 2
    assert of(recompute=False).activations() > 10 * deep.activations()


def test_ranks_share_what_is_trained_and_each_has_a_sampler():
    one, eight = of().need(), of().need(8)
    for part in ("weights", "gradients", "optimizer"):
        assert eight[part] == one[part] // 8
    assert eight["sampler copy"] == one["sampler copy"]
    assert eight["activations"] == one["activations"]
    assert eight["KV cache"] > one["KV cache"]  # takes what the others leave
    assert of(SMALL).need(8)["KV cache"] == 96 * 8192 * of(SMALL).token_bytes  # and no more


@pytest.mark.parametrize("have", [1 * GB, 30 * GB, 90 * GB, 141 * GB, 500 * GB])
@pytest.mark.parametrize("rank", [0, 16])
def test_the_cache_takes_full_windows_of_what_is_left(have, rank):
    p = of(rank=rank, have=have)
    need = p.need()
    tokens = need["KV cache"] / p.token_bytes
    assert tokens % p.window == 0 and 1 <= tokens / p.window <= plan.MOST_WINDOWS
    assert sum(need.values()) <= plan.DEVICE_SHARE * have or tokens == p.window


def test_a_plan_is_changed_as_little_as_makes_it_fit():
    """In the order of what each change costs."""
    roomy = of(recompute=False, have=10_000 * GB)
    assert roomy.fitted() == roomy
    assert of(recompute=False, have=90 * GB).fitted() == of(have=90 * GB)
    lora = of(rank=16, recompute=False)
    seen = []
    for half in range(400, 16, -1):
        have = half * GB // 2
        fitted = replace(lora, have=have).fitted(least=2048)
        if fitted.total() <= have:
            seen.append((fitted.recompute, fitted.apart, fitted.window))
    assert sorted(set(seen), key=seen.index) == [
        (False, False, 8192), (True, False, 8192), (True, True, 8192),
        (True, True, 4096), (True, True, 2048)]
    several = replace(lora, have=14 * GB).fitted(4)
    assert not several.apart  # each rank has a share of the weights, and needs a copy
    assert of(have=1 * GB).fitted(least=8192).window == 8192  # as rlm.json says


def test_a_run_that_does_not_fit_says_what_would():
    assert of(have=141 * GB).problem() is None
    line = of(have=60 * GB).problem()
    assert "the device has 55.9" in line and "--lora-rank 16" in line
    assert "\n" not in line and of(rank=16, have=60 * GB).problem() is None
    assert "smaller model" in of(have=1 * GB).problem()
    # a warm-up from nothing trains all weights, whatever comes after it
    assert "warm-up" in of(rank=16, have=60 * GB).problem(all_weights=True)


def test_advice_names_flags_that_exist():
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(train.Config)}
    lines = [of(**changes, have=have * GB).problem(ranks, all_weights) or ""
             for have in (1, 10, 40, 60, 80, 120)
             for all_weights in (False, True)
             for ranks in (1, 2)
             for changes in ({}, {"rank": 16}, {"recompute": False})]
    named = {word for line in lines for word in re.findall(r"--[a-z0-9-]+", line)}
    assert len(named) >= 2 and named <= flags


def test_what_fits_is_what_fits():
    lines = of().what_fits().splitlines()
    assert len(lines) == 2 + len(plan.CARDS)
    for card, line in zip(plan.CARDS, lines[2:]):
        cells = line.split()[2:]
        assert len(cells) == 8
        for rank, n, cell in zip([0] * 4 + [16] * 4, [1, 2, 4, 8] * 2, cells):
            here = of(rank=rank, have=(card - 1) * plan.GIB, recompute=True, apart=n == 1)
            smallest = replace(here, window=4096, row=4096)
            assert (cell == "-") == (smallest.total(n) > here.have)


def test_the_table_has_a_line_for_each_part_and_adds_up():
    lines = of().table().splitlines()
    assert "4,022,468,096 parameters" in lines[0] and "8,192 tokens" in lines[0]
    rows = {line[:13].strip(): [float(x.replace(",", "")) for x in line[13:].split()]
            for line in lines[2:-1]}
    assert set(rows) == {*plan.PARTS, "sum", "cache tokens"}
    for i in range(4):
        parts = sum(rows[part][i] for part in plan.PARTS)
        assert rows["sum"][i] == pytest.approx(parts, abs=0.05)
    assert "the device has 131.32 GiB" in lines[-1]
    assert all(len(line) <= 100 for line in lines[1:])


def test_the_device_has_memory():
    have = plan.device_bytes("cpu")
    assert 0 < have <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
