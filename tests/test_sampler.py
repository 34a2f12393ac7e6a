"""The sampler: its tokens are those of a plain forward pass, whatever the schedule."""
import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

import engine.pages
import sampler as sampler_module
from engine.device import upcast
from engine.pages import token_bytes
from engine.prefix import PrefixCache
from engine.states import States, state_bytes
from model import OffsetNorm, Decoder, DecoderConfig
from sampler import Request, Sampler
from tree import Lost, Sampling

VOCAB, WINDOW = 29, 48
GREEDY = Sampling(0)


HYBRID = dict(
    model_type="qwen3_5_text", num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention"] * 2,
    partial_rotary_factor=0.5, linear_conv_kernel_dim=4, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)


def build(seed=0, tied=True, **changes):
    """A small decoder with distributions neither flat nor certain, and random norms."""
    shape = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, rope_theta=300.0,
        max_position_embeddings=64, tie_word_embeddings=tied)
    if changes.get("model_type") == "qwen3_5_text":
        changes = HYBRID | changes
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(**{**shape, **changes}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-3, 1)
            elif weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
            if isinstance(model.model["norm"], OffsetNorm) and name.endswith("norm.weight"):
                weight -= 1
    return model


MODEL = build().double()
HYBRID_MODEL = build(model_type="qwen3_5_text").double()


def make(model=MODEL, tokens=4096, window=WINDOW, page=4, batch=64, **options):
    """A sampler whose pool holds this many tokens, with the fewest slots for states."""
    itemsize = options.get("dtype", model.lm_head.weight.dtype).itemsize
    memory = tokens * token_bytes(model.config, itemsize)
    memory += (batch + 1) * state_bytes(model.config, itemsize)
    with patch.object(engine.pages, "States", lambda model, _: States(model, batch + 1)), \
            patch.object(engine.pages.GatheredPages, "page", page), \
            patch.object(engine.pages.FlashPages, "page", page):
        made = Sampler(model, memory, window=window, batch=batch, **options)
    if made.attention.states:
        made.attention.states.matrices[:, 0] = torch.nan  # padding may write anything
    return made


def check_at_rest(sampler):
    """No request is left, and every page and slot can be had again."""
    assert not sampler.running and not sampler.waiting
    assert sampler.cache.available() == sampler.cache.count
    if sampler.snapshots:
        free, kept = sampler.snapshots.free, sampler.snapshots.kept.values()
        assert sorted([*free, *kept]) == [*range(1, sampler.attention.states.count + 1)]


def row_logprobs(model, ids):
    """(T, V) log-probabilities of one row by one forward pass without any cache."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0].log_softmax(-1)


def naive_greedy(model, ids, max_tokens):
    """Greedy decoding that computes everything again for every token."""
    ids, new, logprobs = list(ids), [], []
    for _ in range(max_tokens):
        last = row_logprobs(model, ids)[-1]
        new.append(int(last.argmax()))
        logprobs.append(float(last[new[-1]]))
        ids.append(new[-1])
    return tuple(new), logprobs


def close(a, b, within=1e-9):
    return len(a) == len(b) and all(abs(x - y) < within for x, y in zip(a, b))


def alone(model, ids, max_tokens, **options):
    """The completion of a sampler that serves nobody else."""
    return asyncio.run(make(model, batch=1).generate(ids, max_tokens, **options))


def prompt(rng, low=1, high=12):
    return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]


async def gather(*coroutines):
    """Results in order, exceptions among them."""
    return await asyncio.gather(*coroutines, return_exceptions=True)


# --- the cache changes nothing ------------------------------------------------------------

def make_schedule(rng):
    """Random requests with common prefixes: (arrival, prompt, tokens to sample, when to
    cancel it or None, what to append for a second turn or None)."""
    stems = [prompt(rng, 2, 16) for _ in range(3)]
    schedule = []
    for _ in range(rng.randint(3, 7)):
        stem = rng.choice(stems)
        ids = stem[:rng.randint(1, len(stem))] + prompt(rng, 0, 6)
        kind = rng.random()
        cancel = rng.randrange(6) if kind < 0.3 else None
        then = prompt(rng, 1, 5) if kind > 0.6 else None
        schedule.append((rng.randrange(12), ids, rng.randint(8, 16), cancel, then))
    return schedule


async def play(sampler, schedule, **options):
    """Run a schedule: [(key, prompt, max_tokens, Completion)] of what was not cancelled."""
    done = []

    async def one(i, arrival, ids, n, cancel, then):
        for _ in range(arrival):
            await asyncio.sleep(0)
        question = asyncio.create_task(sampler.generate(ids, n, key=(i, 0), **options))
        if cancel is not None:
            for _ in range(cancel):
                await asyncio.sleep(0)
            question.cancel()
        try:
            first = await question
        except asyncio.CancelledError:
            return
        done.append(((i, 0), ids, n, first))
        if then is not None:
            ids = ids + list(first.ids) + then
            second = await sampler.generate(ids, n, key=(i, 1), **options)
            done.append(((i, 1), ids, n, second))

    await asyncio.gather(*(one(i, *request) for i, request in enumerate(schedule)))
    check_at_rest(sampler)
    return done


def slow_decode(q, keys, values, lengths, tables):
    """What the docstring of engine.decode.decode says, one request at a time."""
    assert lengths.dtype == tables.dtype == torch.int32 and tables.is_contiguous()
    assert len(q) == len(lengths) == len(tables) and lengths.min() > 0
    out = torch.empty_like(q)
    group = q.shape[1] // keys.shape[2]
    for b, n in enumerate(lengths.tolist()):
        assert n <= tables.shape[1] * keys.shape[1]
        rows = (upcast(x[tables[b].long()].flatten(0, 1)[:n]) for x in (keys, values))
        k, v = (x.repeat_interleave(group, 1) for x in rows)  # T H E
        scores = torch.einsum("he,the->ht", upcast(q[b]), k) * q.shape[2] ** -0.5
        out[b] = torch.einsum("ht,the->he", scores.softmax(-1), v).to(q.dtype)
    return out


@pytest.fixture(params=["rows", "flash"])
def attention(request, monkeypatch):
    """Both ways to attend; with a kernel written from its docstring."""
    if request.param != "rows":
        monkeypatch.setattr(engine.pages, "decode", slow_decode)
        monkeypatch.setattr(engine.pages, "can_flash", lambda *_: True)
        assert isinstance(make().attention, engine.pages.FlashPages)
    return request.param


IN_INTERPRETER = """
import random, torch
import engine.decode as kernels
from engine.delta import rule_step
from test_sampler import slow_decode

torch.manual_seed(0)
rng = random.Random(0)
kernels.BLOCK = 16
for case in range(25):
    kernels.SPAN, kernels.PROGRAMS = rng.choice([16, 32, 64]), rng.choice([1, 5, 2048])
    B, K, E = rng.randint(1, 4), rng.randint(1, 3), rng.choice([12, 16, 40])
    H, S, C = K * rng.choice([1, 2, 4]), rng.choice([1, 4, 16, 256]), rng.randint(1, 12)
    pages = 2 + B * C
    keys, values = torch.randn(2, pages, S, K, E)
    keys[0] = values[0] = float("nan")  # page 0 belongs to nobody
    tables = 1 + torch.randperm(pages - 1)[:B * C].view(B, C).int()
    lengths = torch.tensor([rng.randint(1, C * S) for _ in range(B)], dtype=torch.int32)
    for row, n in zip(tables, lengths.tolist()):
        row[-(-n // S):] = 0
    q = torch.randn(B, H, E)
    got = kernels.decode(q, keys, values, lengths, tables)
    want = slow_decode(q, keys.nan_to_num(), values.nan_to_num(), lengths, tables)
    assert (got - want).abs().max() < 1e-5, case
    # Neither the batch nor the number of programs changes a request's result.
    kernels.PROGRAMS = 2048
    alone = kernels.decode(q[-1:], keys, values, lengths[-1:], tables[-1:])
    assert torch.equal(alone[0], got[-1]), case

    kernels.COLUMNS, V, J = 16, rng.choice([12, 16, 40]), H // K
    matrices, slots = torch.randn(9, H, E, V), torch.randperm(9)[:B]
    q, k = torch.randn(2, B, J, E)
    v, decay, strength = torch.randn(B, H, V), -torch.rand(B, H), torch.rand(B, H)
    plain = matrices.clone()
    want = rule_step(plain, slots, q, k, v, decay, strength)
    got = kernels.rule_step(matrices, slots, q, k, v, decay, strength)
    assert (got - want).abs().max() < 1e-5, case
    assert (matrices - plain).abs().max() < 1e-5, case
"""


@pytest.mark.slow
def test_the_kernel_for_cuda_is_what_it_says_in_the_interpreter():
    pytest.importorskip("triton")
    in_a_process(IN_INTERPRETER, TRITON_INTERPRET="1")


def test_update_and_sampler_run_on_fake_tensors_of_a_gpu():
    in_a_process((Path(__file__).parent / "fake_cuda.py").read_text())


def test_a_kernel_that_is_wrong_or_fails_is_not_used(attention, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("out of registers")

    monkeypatch.setenv("RANK", "3")  # whose stdout nobody sees
    for broken in (lambda q, *_: torch.zeros_like(q), fails):
        monkeypatch.setattr(engine.pages, "decode", broken)
        assert isinstance(make().attention, engine.pages.GatheredPages)
        said = "rank 3: pages are not read in place, which is slower"
        assert (said in capsys.readouterr().err) == (attention != "rows")


def in_a_process(code, **environment):
    """Triton reads its variables once, and fake tensors need patches."""
    tests = Path(__file__).parent
    path = f"{tests.parent}{os.pathsep}{tests}"
    subprocess.run([sys.executable, "-c", code], cwd=tests.parent, check=True,
                   env={**os.environ, "PYTHONPATH": path, **environment})


def order(sampler, *requests):
    """The names of requests (name, ids, tokens), in the order in which they end."""
    ended = []

    async def ask(name, ids, tokens):
        await sampler.generate(ids, tokens, key=(name,))
        ended.append(name)

    asyncio.run(gather(*(ask(*request) for request in requests)))
    return ended


def test_who_decodes_waits_for_no_prompt(monkeypatch):
    """Two long prompts share what a step computes of prompts. Meanwhile a request whose
    prompt another one has computed is sampled to its end."""
    monkeypatch.setattr(sampler_module, "STEP_TOKENS", 4)
    sampler = Sampler(MODEL, memory=1 << 20, batch=4, window=WINDOW)
    assert order(sampler, ("first", [1] * 4, 2), ("long", [2] * 40, 1),
                 ("longer", [3] * 40, 1), ("sibling", [1] * 4, 2)) == [
        "first", "sibling", "long", "longer"]


def test_who_is_preempted_is_the_next_to_start():
    sampler = make(batch=2, tokens=WINDOW)
    assert order(sampler, ("old", [1] * 4, 40), ("young", [2] * 4, 30),
                 ("waits", [3] * 4, 1)) == ["old", "waits", "young"]


@pytest.mark.parametrize("model", [MODEL, HYBRID_MODEL])
def test_random_schedules_give_each_key_its_tokens_and_leave_no_page_behind(
        attention, model, monkeypatch):
    """With shared prefixes, cancellations, second turns, and pools so small that requests
    are preempted. What a key samples is what it samples alone in a pool that holds all, and
    the log-probabilities are those of a full forward pass."""
    compared = preempted = reused = 0
    dense, rows = model is MODEL, attention == "rows"
    count = 8 if dense and rows else 4
    for seed in range(count):
        rng = random.Random(seed)
        monkeypatch.setattr(sampler_module, "STEP_TOKENS", rng.choice([1, 5, 16, 2048]))
        monkeypatch.setattr(engine.delta, "CHUNK", rng.choice([3, 64]))
        page = rng.choice([1, 2, 4, 8])
        sampler = make(model, batch=rng.randint(2, 8), page=page,
                       tokens=-(-WINDOW // page) * page + rng.choice([0, 0, 0, 0, 500]))
        schedule = make_schedule(rng)
        crowded = asyncio.run(play(sampler, schedule, stop=(3,)))
        quiet = asyncio.run(play(make(model, batch=1), schedule, stop=(3,)))
        expected = {key: (ids, got.ids) for key, ids, _, got in quiet}
        for key, ids, n, got in crowded:
            assert 3 not in got.ids[:-1]
            assert len(got.ids) == min(n, WINDOW - len(ids)) or got.ids[-1] == 3
            if key in expected:  # it was not cancelled in time
                assert expected[key] == (ids, got.ids)
                compared += 1
            row = torch.tensor([*ids, *got.ids])
            plain = row_logprobs(model, row.tolist())[len(ids) - 1:-1]
            plain = plain.gather(1, row[len(ids):, None])[:, 0].tolist()
            assert close(got.logprobs, plain)
        preempted += sampler.stats["preemptions"]
        reused += sampler.stats["reused"]
    # A hybrid reuses less: only from where it kept a state.
    assert compared > 3 * count and reused > (50 if dense else 5 * count)
    assert preempted or not rows


def plain_request(*ids):
    return SimpleNamespace(ids=list(ids), computed=0, page_table=[], hashes=[0])


def test_the_end_of_a_prefix_is_evicted_first_and_last_what_was_matched_last():
    cache = PrefixCache(6, 1)

    def compute(*ids):
        request = plain_request(*ids)
        for _ in ids:
            cache.new(request)
        cache.advance(request, len(ids))
        cache.release(request)

    def cached(*ids):
        return cache.match(plain_request(*ids, 0))[1]

    compute(1, 2, 3)
    compute(4, 5, 6)
    compute(7)  # there are six pages: it takes that of the 3
    assert cached(1, 2, 3) == 2
    compute(8, 9, 10, 11)  # all but the two pages that were just found
    assert cached(1, 2, 3) == 2 and cached(4, 5, 6) == 0
    compute(12, 13, 14, 15, 16)
    assert cached(1, 2, 3) == 1


@pytest.mark.parametrize("page, model", [(1, MODEL), (64, MODEL), (4, HYBRID_MODEL)])
def test_on_pages_of_any_size_every_position_is_computed_once(attention, page, model):
    """Roots with one prompt, turns that append, children with their own system prompt."""
    async def node(sampler, row, turns, key, children=0):
        for turn in range(turns):
            got = await sampler.generate(row, 4, key=(key, turn))
            rows.append(row + list(got.ids)[:-1])
            row = row + list(got.ids) + [turn, key % VOCAB]
            if turn == 0:
                await asyncio.gather(*(node(sampler, [9] * 10, 2, 10 * key + i)
                                       for i in range(children)))

    async def main():
        sampler = make(model, page=page, batch=32)
        await asyncio.gather(*(node(sampler, [8] * 13, 3, i, children=2)
                               for i in range(1, 4)))
        return sampler.stats["computed"]

    rows = []
    computed = asyncio.run(main())
    distinct = len({tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)})
    assert distinct <= computed <= distinct * 1.1


# --- what is sampled ----------------------------------------------------------------------

@pytest.mark.parametrize("temperature, top_p, kept", [
    (0.5, 1.0, VOCAB), (1.0, 1.0, VOCAB), (2.0, 1.0, VOCAB), (1.0, 0.5, 0), (1.6, 0.9, 0),
    (0.0, 1.0, 1), (1.0, 0.0, 1)])
def test_tokens_come_as_often_as_their_sampling_says(temperature, top_p, kept):
    """Over an even grid of random numbers, up to the extremes; what has no probability
    never comes."""
    logits, n = row_logprobs(MODEL, [3, 1])[-1:].clone(), 2000
    logits[0, [0, 9, VOCAB - 1]] = -torch.inf
    grid = np.linspace(0, 1 - 2.0 ** -53, n)
    sampling = Sampling(temperature, top_p)
    requests = [Request([1], 1, sampling, frozenset(), bool, grid[i:], None)
                for i in range(n)]
    new, logprobs = sampler_module.sample(logits.expand(n, -1), requests)
    counts = torch.from_numpy(new).long().bincount(minlength=VOCAB)
    want = (logits[0] / max(temperature, 1e-9)).softmax(-1)
    order = want.argsort(descending=True)
    kept = kept or next(k for k in range(VOCAB) if want[order[:k]].sum() >= top_p)
    want[order[kept:]] = 0
    want /= want.sum()
    assert (counts - n * want).abs().max() < 2 and not counts[[0, 9, VOCAB - 1]].any()
    assert close(logprobs, logits[0].log_softmax(-1)[new].tolist())


@pytest.mark.parametrize("block", [16, 128])
def test_a_million_tokens_are_those_of_one_cumulative_sum(block, monkeypatch):
    """But where a random number is at an edge: each of two sums of 256 terms rounds 256
    times, each time by 2^-53 of at most 1."""
    monkeypatch.setattr(sampler_module, "CHUNK", block)
    torch.manual_seed(0)
    probs = (3 * torch.randn(500, 256)).softmax(-1)  # some of 1e-8
    probs[:, ::3] = probs[::5, 240:] = 0
    u = torch.rand(2000, 500, dtype=torch.float64)
    u[0], u[1] = 0, 1 - 2 ** -53
    total = probs.cumsum(-1, dtype=torch.float64)
    goal = u.T * total[:, -1:]
    want = torch.searchsorted(total, goal, right=True).T
    got = torch.stack([sampler_module.draw(probs, row) for row in u])
    assert probs.gather(1, got.T).min() > 0
    edges = total.gather(1, torch.minimum(got, want).T)
    assert ((got == want).T | ((edges - goal).abs() < 2 * 256 * 2 ** -53)).all()
    assert (got != want).float().mean() < 1e-5


def test_a_key_draws_the_same_in_each_process_and_anew_for_each_token():
    """The tokens of a model to which all are alike. Another process wrote them down."""
    flat = build().double()
    torch.nn.init.zeros_(flat.lm_head.weight)
    assert alone(flat, [1], 6, key=("a", 0)).ids == (27, 15, 1, 7, 26, 17)


def test_a_message_that_is_over_ends_there_and_is_the_beginning_of_the_unrestricted_one():
    def message(**more):
        return asyncio.run(make().generate([1, 2, 3], 30, key=(7,), **more))

    whole = message()
    assert whole.usage == {"prompt": 3, "sampled": 30}
    for n in (1, 4, 30):
        got = message(is_over=lambda ids: len(ids) == 3 + n)
        assert got.ids == whole.ids[:n]
        assert got.logprobs == whole.logprobs[:n]


# --- weights ---------------------------------------------------------------------------

@pytest.mark.parametrize("how", [
    {"copy": True}, {"copy": True, "dtype": torch.bfloat16},
    {"copy": True, "dtype": torch.float32}, {}])
def test_new_weights_reach_the_sampler_with_load(how, float64):
    """From the trainer to its own copy, or as it shares a model with adapters."""
    trained, copy = build(0), "copy" in how
    if not copy:
        trained.add_lora(2, 32.0)
    sampler = make(trained, batch=2, **how)
    assert (sampler.model is trained) == (not copy)

    def sample():
        return asyncio.run(sampler.generate([3, 1, 4, 1, 5], 12, key=(1,)))

    before = sample()
    with torch.no_grad():
        for weight in trained.parameters():
            if weight.requires_grad:
                weight += 0.1
    assert not copy or sample().ids == before.ids
    sampler.load(trained)
    plain = trained.merged_copy(how.get("dtype"))
    after, fresh = sample(), alone(plain, [3, 1, 4, 1, 5], 12, key=(1,))
    assert after.ids == fresh.ids != before.ids
    exact = how.get("dtype") != torch.float32
    assert close(after.logprobs, fresh.logprobs, 1e-9 if exact else 1e-5)


# --- failures -----------------------------------------------------------------------------

@pytest.mark.parametrize("pool, ids, max_tokens, message", [
    (4096, [VOCAB], 5, "vocabulary"),
    (4096, [1] * WINDOW, 5, f"window of {WINDOW}"),
    (24, [1] * 24, 1, "window of 24")])
def test_a_bad_request_fails_alone(pool, ids, max_tokens, message):
    async def main():
        sampler = make(batch=2, tokens=pool)
        good = [[1, 2], [7], [1, 2, 3]]
        done = await gather(sampler.generate(ids, max_tokens), *(
            sampler.generate(row, 6, sampling=GREEDY) for row in good))
        bad = done.pop(0)
        assert isinstance(bad, Lost) and message in str(bad)
        assert [got.ids for got in done] == [naive_greedy(MODEL, row, 6)[0] for row in good]
    asyncio.run(main())


async def works(sampler, model=MODEL):
    """Whether it serves requests as if nothing had happened."""
    rows = [[i, 2, 3] for i in range(5)]
    done = gather(*(sampler.generate(row, 5, sampling=GREEDY) for row in rows))
    return [got.ids for got in await asyncio.wait_for(done, 20)] == [
        naive_greedy(model, row, 5)[0] for row in rows]


def test_after_logits_that_are_not_finite_the_sampler_works_again():
    """Their keys and values do not reach the next requests through the pool."""
    poison, sick = 11, build(tied=False).double()
    with torch.no_grad():
        sick.model["embed_tokens"].weight[poison] = float("nan")

    async def main():
        sampler = make(sick, batch=2)
        for _ in range(3):  # some of the five wait, and end all the same
            bad = await gather(*(sampler.generate([i, 2, poison] * 5, 4, sampling=GREEDY)
                                 for i in range(5)))
            assert all("finite" in str(one) for one in bad)
            assert await works(sampler, sick)
    asyncio.run(main())


def test_a_loop_that_ends_under_running_requests_leaves_a_sampler_that_works():
    sampler = make(batch=2)

    async def abandoned():
        tasks = [asyncio.create_task(sampler.generate([i, 2], 40)) for i in range(5)]
        for _ in range(2):
            await asyncio.sleep(0)
        return tasks

    tasks = asyncio.run(abandoned())
    assert all(question.cancelled() for question in tasks)
    sampler.load(MODEL)  # which raises if a request counted as running
    assert asyncio.run(works(sampler))


COMPILED = """
import engine.decode as kernels
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

qwen3 = dict(H=32, K=8, E=128, S=256, HEADS=16, WIDE=128, SPAN=256, BLOCK=64)
qwen35 = qwen3 | dict(H=16, K=4, E=256, WIDE=256)
delta = dict(H=32, J=16, K=128, V=128, WIDE=128, COLUMNS=32)
types = {"scale": "fp32", "C": "i32", "spans": "i32", "lengths": "*i32", "tables": "*i32",
         "parts": "*fp32", "sums": "*fp32", "matrices": "*fp32", "slots": "*i64",
         "decay": "*fp32"}
for kernel, sizes in [(kernels.attend_spans, qwen3), (kernels.merge_spans, qwen3),
                      (kernels.attend_spans, qwen35), (kernels.rule_step_kernel, delta)]:
    names = kernel.arg_names
    constants = {(i,): sizes[name] for i, name in enumerate(names) if name in sizes}
    signature = {name: "constexpr" if name in sizes else types.get(name, "*bf16")
                 for name in names}
    for capability in (80, 90):
        source = ASTSource(kernel, signature, constants)
        made = compile(source, target=GPUTarget("cuda", capability, 32))
        assert made.asm["cubin"] and made.metadata.shared < 164 << 10
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu_without_one():
    """To machine code for an A100 and an H100, with the sizes of Qwen3-4B and Qwen3.5-4B,
    within the shared memory of an A100."""
    pytest.importorskip("triton")
    in_a_process(COMPILED)
