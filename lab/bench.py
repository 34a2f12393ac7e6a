"""Every speed claim as a figure: `python bench.py NAME [--json FILE]` prints a table and a header
that says what it was measured on, and writes the same figures as JSON.

One function a benchmark; its docstring says how each figure is measured. A figure is the median of
its samples, with their quartiles. Figures are compared within one run, never between two machines.
What the benchmarks need is imported inside them; what only a comparison needs is in
requirements-bench.txt.
"""
import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm


def repl(args: argparse.Namespace) -> tuple[dict[str, list[float]], str]:
    """The REPL, next to a fresh Python.

    start_ms             from REPL("").__aenter__() to its return: the worker is forked, isolated
                         and has answered. One at a time; closing is not in it. Server warm.
    exec_ms              one execute("x = 1"), round trip, in one REPL.
    context_40mb_s       the same as start_ms with a context of 40 MB of ASCII text.
    open_512_mib_each    512 REPLs open at once with an empty context, each after one block: PSS
                         of all processes below the server and of the server itself, less the
                         server's before, over 512. Not in it: what the kernel holds for them.
    fresh_python_ms      subprocess.run([python, "-I", "-c", "pass"]), for comparison.
    """
    from repl import REPL, Handle, Limits

    limits = Limits(sandbox=args.sandbox)
    samples: dict[str, list[float]] = {}
    rounds = {"start_ms": 300, "exec_ms": 2000, "context_40mb_s": 7, "open_512_mib_each": 3,
              "fresh_python_ms": 30}
    bar = tqdm(total=sum(rounds.values()), desc="repl", leave=False, disable=None)

    def timed(name: str, seconds: float, scale: float = 1e3) -> None:
        samples.setdefault(name, []).append(seconds * scale)
        bar.update()

    async def start(name: str, context: str, scale: float) -> None:
        began = time.perf_counter()
        async with REPL(context, limits=limits) as one:
            timed(name, time.perf_counter() - began, scale)
            assert (await one.execute("FINAL(len(context))")).final == len(context)

    async def memory() -> None:
        before = pss_mib(Handle.current.process.pid)
        opened = []
        try:
            for _ in range(512):
                opened.append(await REPL("", limits=limits).__aenter__())
                await opened[-1].execute("x = 1")
            timed("open_512_mib_each", (pss_mib(Handle.current.process.pid) - before) / 512, 1)
        finally:
            for one in opened:
                await one.aclose()
        await asyncio.sleep(1)  # for their processes to go

    async def measure() -> None:
        async with REPL("", limits=limits) as one:  # starts the server, too
            for _ in range(100):
                await one.execute("x = 1")
            for _ in range(rounds["exec_ms"]):
                began = time.perf_counter()
                await one.execute("x = 1")
                timed("exec_ms", time.perf_counter() - began)
        for _ in range(rounds["start_ms"]):
            await start("start_ms", "", 1e3)
        for _ in range(rounds["context_40mb_s"]):
            await start("context_40mb_s", "x" * (40 << 20), 1)
        for _ in range(rounds["open_512_mib_each"]):
            await memory()

    asyncio.run(measure())
    for _ in range(rounds["fresh_python_ms"]):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
        timed("fresh_python_ms", time.perf_counter() - began)
    bar.close()
    return {name: samples[name] for name in rounds}, f"sandbox {args.sandbox}"


def sampler(args: argparse.Namespace) -> tuple[dict[str, list[float]], str]:
    """The sampler, next to transformers and to the machine's limits. Random weights.

    The tree load: 8 roots share a prompt of 1,000 tokens and take 3 turns; after its first turn
    each waits for 4 children, which share a system prompt of 500 tokens and take 2 turns. A turn
    samples 64 tokens, and 200 of observation follow. Temperature 1, no truncation, no stop ids.

    tree_tokens_s, uniform_tokens_s      sampled tokens a second of the sampler: the tree load; 16
                         prompts of 512 tokens with 64 sampled each. The cache starts empty.
    hf_tree_tokens_s, hf_uniform_tokens_s   the same of transformers with the same weights: all
                         nodes at the same turn are a wave, padded on the left. CPU: `generate`
                         with SDPA; GPU: continuous batching, `generate_batch`.
    tree_vs_transformers, uniform_vs_transformers     their ratio; both ran one after the other.
    computed_tokens, minimum_tokens      positions computed on the tree load, and the distinct
                         ones among those whose keys are needed: each computed once.
    work_over_minimum    their ratio.

    On a GPU (shape of Qwen3-4B, bf16), as well:
    decode_roofline_share at B     tokens a second of decode steps around 1k tokens of context,
                         over B / (time to read weights and keys and values once at 4.3 TB/s).
    prefill_matmul_share     flops of a prompt of 8,192 tokens a second, over those of a square
                         matrix product of 8,192 in the same dtype.
    greedy_agreement, logprob_gap     128 tokens after each of 8 prompts of 1,000: share of greedy
                         tokens that a full forward pass ranks first, and the mean difference of
                         their log-probabilities.
    """
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM

    from model import Qwen3, Qwen3Config
    from sampler import Sampler

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    if gpu:
        config = Qwen3Config(vocab_size=151_936, hidden_size=2560, intermediate_size=9728,
                             num_hidden_layers=36, num_attention_heads=32,
                             num_key_value_heads=8, head_dim=128)
    else:
        config = Qwen3Config(vocab_size=32_000, hidden_size=512, intermediate_size=1536,
                             num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
                             head_dim=64)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3(config).to(dtype)
    ours = Sampler(model, memory=0.25 if gpu else 3 << 30, batch=64)
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        theirs = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa").to(device)
    samples: dict[str, list[float]] = {}

    def record(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)
        bar.update()

    def timed(load, run) -> float:
        """Tokens a second; all nodes of the load are new ones."""
        nodes = load(config.vocab_size)
        began = time.perf_counter()
        run(nodes)
        seconds = time.perf_counter() - began
        return sum(node.turns * 64 for node in nodes for node in (node, *node.children)) / seconds

    def sampled(nodes) -> None:
        ours.load(model)
        asyncio.run(converse(ours, nodes))

    repeats = 3
    bar = tqdm(total=8 * repeats, desc="sampler", leave=False, disable=None)
    for load, name in ((uniform, "uniform"), (tree, "tree")):
        if gpu:  # captures CUDA graphs
            timed(load, sampled)
        for _ in range(repeats):
            before = ours.stats["computed"]
            nodes = load(config.vocab_size)
            mine = timed(lambda _, nodes=nodes: nodes, sampled)
            computed = ours.stats["computed"] - before
            record(f"{name}_tokens_s", mine)
            peer = timed(load, lambda nodes: waves(theirs, nodes))
            record(f"hf_{name}_tokens_s", peer)
            record(f"{name}_vs_transformers", mine / peer)
    rows = [node.ids for root in nodes for node in (root, *root.children)]
    record("computed_tokens", computed)
    record("minimum_tokens", distinct_positions(rows))
    record("work_over_minimum", computed / distinct_positions(rows))
    if gpu:
        del theirs
        device_limits(ours, model, record)
    bar.close()
    threads = torch.get_num_threads()
    where = torch.cuda.get_device_name() if gpu else f"CPU with {threads} threads"
    return samples, (f"{sum(p.numel() for p in model.parameters()) / 1e6:,.0f} M parameters, "
                     f"{config.num_hidden_layers} layers, {dtype}, on {where}")


def train(args: argparse.Namespace) -> tuple[dict[str, list[float]], str]:
    """The update, next to a plain transformers training step. Random weights, all of them trained.

    An update is forward, loss, backward, clipping and AdamW (fused in both) over 8 rows; every
    other 64 tokens of a row are sampled ones. Equal rows have 256 tokens, mixed ones 32 to 512,
    spread evenly in the logarithm, in random order. Ours: packs of 2,048 tokens, log-probabilities
    of sampled tokens in chunks. transformers: 8 rows at a time, padded to the longest, the logits
    of all tokens at once. Counted are the rows' own tokens.

    equal_tokens_s, mixed_tokens_s       tokens a second of our update.
    hf_equal_tokens_s, hf_mixed_tokens_s   the same of transformers.
    update_vs_transformers, packed_vs_padded   their ratios on equal and on mixed rows; both ran
                         one after the other.

    On a GPU (shape of Qwen3-4B, rows of 4,096 tokens), as well; the figures above are a CPU's all
    the same:
    mfu                  flops of an update of all weights from 16 rows, over 989 TFLOP/s times its
                         seconds, the optimizer's among them. Counted: 6 a weight and token (the
                         head: a sampled token), and causal attention; not what is recomputed.
    update_tokens_s, lora_tokens_s    tokens a second of it, and with adapters of rank 16.
    peak_gib, lora_peak_gib   the most that was allocated; the latter with layers recomputed.
    plan_over_peak, lora_plan_over_peak   what plan.py says without a sampler, over it.
    step_sample_s, step_update_s, step_sync_s   a step of 128 trees with 4 children each (the load
                         of `sampler`) and adapters: all trees, without REPLs; the update from all
                         their nodes; the sampler's copy refreshed.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import grpo
    from model import Qwen3, Qwen3Config

    if torch.cuda.is_available():
        config = Qwen3Config(vocab_size=151_936, hidden_size=2560, intermediate_size=9728,
                             num_hidden_layers=36, num_attention_heads=32,
                             num_key_value_heads=8, head_dim=128)
        on_gpu = device_updates(config, "cuda", row=4096, roots=128)
    else:
        on_gpu = {}
    config = Qwen3Config(vocab_size=32_000, hidden_size=512, intermediate_size=1536,
                         num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
                         head_dim=64)
    torch.manual_seed(0)
    ours = Qwen3(config)
    raw = config.to_json(torch.float32)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(raw.pop("model_type"), **raw), attn_implementation="sdpa")
    theirs.load_state_dict(ours.state_dict())
    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=1e-6, fused=True) for m in (ours, theirs)}
    loss_config = grpo.GRPOConfig()

    def step(model) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers[model].step()
        optimizers[model].zero_grad(set_to_none=True)

    def packed(rows) -> None:
        for pack in grpo.micro_batches(rows, 2048):
            t = grpo.collate(pack, "cpu")
            new, entropies = ours.logprobs(t["ids"], t["mask"], t["lengths"])
            grpo.policy_loss(new, entropies, t, loss_config)[0].backward()
        step(ours)

    def padded(rows) -> None:
        for part in (rows[i:i + 8] for i in range(0, len(rows), 8)):
            width = max(len(row.ids) for row in part)
            ids, mask, real, old, weights = (
                torch.tensor([value(row) + [0] * (width - len(row.ids)) for row in part])
                for value in (lambda r: r.ids, lambda r: r.mask, lambda r: [1] * len(r.ids),
                              lambda r: r.logprobs,
                              lambda r: [r.weight * r.advantages[0]] * len(r.ids)))
            logits = theirs(input_ids=ids, attention_mask=real, use_cache=False).logits[:, :-1]
            new = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            trust = (new.detach() - old[:, 1:]).exp().clamp(max=loss_config.gap_max)
            ratio = (new - new.detach()).exp()
            (-(mask * weights)[:, 1:] * trust * ratio).sum().backward()
        step(theirs)

    samples: dict[str, list[float]] = {}
    rng = random.Random(0)
    mixed = [round(32 * 16 ** (i / 7)) for i in range(8)]
    rng.shuffle(mixed)
    repeats = 3
    bar = tqdm(total=4 * repeats, desc="train", leave=False, disable=None)
    for name, lengths, ratio in (("equal", [256] * 8, "update_vs_transformers"),
                                 ("mixed", mixed, "packed_vs_padded")):
        rows = []
        for n in lengths:
            mask = [i // 64 % 2 for i in range(n - 1)] + [1]
            rows.append(grpo.Row([rng.randrange(config.vocab_size) for _ in mask], mask,
                                 [-10.0 * m for m in mask],
                                 [rng.choice([-1.0, 1.0])] * sum(mask), 1e-3))
        for repeat in range(repeats + 1):  # the first is not counted
            rates = []
            for label, update in ((name, packed), (f"hf_{name}", padded)):
                began = time.perf_counter()
                update(rows)
                rates.append(sum(lengths) / (time.perf_counter() - began))
                if repeat:
                    samples.setdefault(f"{label}_tokens_s", []).append(rates[-1])
                    bar.update()
            if repeat:
                samples.setdefault(ratio, []).append(rates[0] / rates[1])
    bar.close()
    threads = torch.get_num_threads()
    samples |= on_gpu
    return samples, (f"{sum(p.numel() for p in ours.parameters()) / 1e6:,.0f} M parameters, "
                     f"{config.num_hidden_layers} layers, float32, on CPU with {threads} threads")


BENCHMARKS = {"repl": repl, "sampler": sampler, "train": train}


# --- loads for the sampler -------------------------------------------------------------------

class Talk:
    """A node of a load: what it starts with, how many turns it takes, who it waits for."""

    def __init__(self, ids: list[int], turns: int, seed: str, vocabulary: int, children=()):
        self.ids, self.turns, self.children = list(ids), turns, list(children)
        rng = random.Random(seed)
        self.observations = [[rng.randrange(vocabulary) for _ in range(200)]
                             for _ in range(turns - 1)]
        self.key = seed

    def add(self, turn: int, new: list[int]) -> None:
        self.ids += new
        if turn + 1 < self.turns:
            self.ids += self.observations[turn]


def tree(vocabulary: int) -> list[Talk]:
    rng = random.Random(0)
    prompt, system = ([rng.randrange(vocabulary) for _ in range(n)] for n in (1000, 500))
    return [Talk(prompt, 3, f"{i}", vocabulary,
                 [Talk(system, 2, f"{i}.{j}", vocabulary) for j in range(4)]) for i in range(8)]


def uniform(vocabulary: int) -> list[Talk]:
    rng = random.Random(1)
    return [Talk([rng.randrange(vocabulary) for _ in range(512)], 1, f"{i}", vocabulary)
            for i in range(16)]


async def converse(sampler, nodes: list[Talk]) -> None:
    """Every node a coroutine, as in a rollout."""
    async def run(node: Talk) -> None:
        for turn in range(node.turns):
            done = await sampler.generate(node.ids, 64, key=(node.key, turn))
            node.add(turn, list(done.ids))
            if turn == 0:
                await asyncio.gather(*(run(child) for child in node.children))

    await asyncio.gather(*(run(node) for node in nodes))


def waves(model, nodes: list[Talk]) -> None:
    """The same by transformers: first turns, then all children's, then what is left."""
    children = [child for node in nodes for child in node.children]
    wave(model, nodes, 0)
    for turn in range(2 if children else 0):
        wave(model, children, turn)
    for turn in range(1, nodes[0].turns):
        wave(model, nodes, turn)


def wave(model, nodes: list[Talk], turn: int) -> None:
    import torch
    from transformers import GenerationConfig

    how = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
                           max_new_tokens=64, min_new_tokens=64, eos_token_id=None)
    rows = [node.ids for node in nodes]
    if model.device.type == "cuda":
        done = model.generate_batch(rows, generation_config=how)
        order = sorted(done, key=lambda name: int(name.rpartition("_")[2]))
        new = [done[name].generated_tokens for name in order]
    else:
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, generation_config=how)
        new = out[:, width:].tolist()
    for node, ids in zip(nodes, new, strict=True):
        assert len(ids) == 64
        node.add(turn, ids)


def distinct_positions(rows: list[list[int]]) -> int:
    """Prefixes that have to be computed: the last token of a row is never fed."""
    seen = set()
    for row in rows:
        chain = 0
        for token in row[:-1]:
            chain = hash((chain, token))
            seen.add(chain)
    return len(seen)


def device_limits(sampler, model, record) -> None:
    """The figures of `sampler` that only a GPU has."""
    import torch

    c = model.config
    rng = random.Random(2)
    weights = sum(p.numel() for p in model.parameters())  # tied: the embedding is read as lm_head
    token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 2  # bytes

    def prompts(n: int, length: int) -> list[list[int]]:
        return [[rng.randrange(c.vocab_size) for _ in range(length)] for _ in range(n)]

    def generate(rows: list[list[int]], n: int, **options):
        async def all_rows():
            return await asyncio.gather(*(sampler.generate(row, n, key=(i,), **options)
                                          for i, row in enumerate(rows)))
        return asyncio.run(all_rows())

    for batch in (1, 16, 64):
        for repeat in range(4):
            sampler.load(model)
            rows = prompts(batch, 960)
            generate(rows, 1)  # so that what follows are decode steps
            before = dict(sampler.stats)
            generate(rows, 128)
            steps = sampler.stats["steps"] - before["steps"] - 1  # one has prompts' last tokens
            seconds = sampler.stats["decode"] - before["decode"]
            least = (2 * weights + batch * 1024 * token) / 4.3e12
            if repeat:  # the first captures the graph
                record(f"decode_roofline_share at {batch}", least * steps / seconds)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for repeat in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        rate = 20 * 2 * 8192 ** 3 / (time.perf_counter() - began)
        row = prompts(1, 8192)
        began = time.perf_counter()
        generate(row, 1)
        seconds = time.perf_counter() - began
        flops = 2 * (weights - c.vocab_size * c.hidden_size) * 8192  # logits for one token only
        flops += 2 * 8192 ** 2 * c.num_attention_heads * c.head_dim * c.num_hidden_layers
        if repeat:
            record("prefill_matmul_share", flops / seconds / rate)
    agree = gap = total = 0
    rows = prompts(8, 1000)
    for row, done in zip(rows, generate(rows, 128, temperature=0)):
        with torch.inference_mode():
            ids = torch.tensor([row + list(done.ids)], device="cuda")
            logits = model.lm_head(model.hidden(ids)[0, 999:-1]).float()
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1000:, None])[:, 0].tolist()
        agree += (logits.argmax(-1) == ids[0, 1000:]).sum().item()
        gap += sum(abs(x - y) for x, y in zip(logprobs, done.logprobs))
        total += len(logprobs)
    record("greedy_agreement", agree / total)
    record("logprob_gap", gap / total)


def device_updates(config, device: str, row: int, roots: int) -> dict[str, list[float]]:
    """The figures of `train` that only a GPU has."""
    import torch

    import grpo
    from runtime import parallel
    from model import Qwen3
    from runtime.plan import GIB, Plan
    from sampler import Sampler

    parallel.World()
    rng, samples = random.Random(0), {}
    loss_config = grpo.GRPOConfig()

    def record(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    def seconds(run) -> float:
        began = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def make_row(ids: list[int]) -> grpo.Row:
        mask = [i // 64 % 2 for i in range(len(ids) - 1)] + [1]
        return grpo.Row(ids, mask, [-12.0 * m for m in mask], [1.0] * sum(mask), 1e-4)

    def make(rank: int):
        with torch.device("meta"):
            model = Qwen3(config)
        model.to(torch.bfloat16 if rank else torch.float32)
        if not rank:  # frozen weights are bfloat16 as they are
            parallel.shard(model)
        model.to_empty(device=device)
        if config.tie_word_embeddings:
            model.lm_head.weight = model.model["embed_tokens"].weight
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(std=0.02) if weight.dim() == 2 else weight.fill_(1)
        if rank:
            model.add_lora(rank, 32.0)
        model.recompute = rank > 0
        return model, torch.optim.AdamW([w for w in model.parameters() if w.requires_grad],
                                        lr=1e-6, fused=True)

    def update(model, optimizer, rows) -> None:
        for pack in grpo.micro_batches(rows, row):
            t = grpo.collate(pack, device)
            new, entropies = model.logprobs(t["ids"], t["mask"], t["lengths"])
            grpo.policy_loss(new, entropies, t, loss_config)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    rows = [make_row([rng.randrange(config.vocab_size) for _ in range(row)]) for _ in range(16)]
    table = config.vocab_size * config.hidden_size
    flops = 0
    for rank, name, rate in ((0, "", "update_tokens_s"), (16, "lora_", "lora_tokens_s")):
        plan = Plan(config, row, row, rank, 2, rank > 0, 0, compute=2)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        model, optimizer = make(rank)
        flops = flops or sum(
            6 * len(r.ids) * (plan.parameters[0] - table) + 6 * sum(r.mask) * table
            + 6 * len(r.ids) ** 2 * config.num_hidden_layers * config.num_attention_heads
            * config.head_dim for r in rows)
        for repeat in range(4):
            took = seconds(lambda: update(model, optimizer, rows))
            if repeat:
                record(rate, 16 * row / took)
                if not rank:
                    record("mfu", flops / took / 989e12)
        peak = torch.cuda.max_memory_allocated()
        record(f"{name}peak_gib", peak / GIB)
        record(f"{name}plan_over_peak", sum(plan.need(sampling=False).values()) / max(1, peak))
        if not rank:
            del model, optimizer
    ours = Sampler(model, memory=0.5 if torch.cuda.is_available() else 1 << 30, batch=96)
    for repeat in range(4):
        prompts = [[rng.randrange(config.vocab_size) for _ in range(1000)]
                   for _ in range(-(-roots // 8))]
        nodes = [Talk(prompts[i // 8], 3, f"{repeat}.{i}", config.vocab_size,
                      [Talk(range(500), 2, f"{repeat}.{i}.{j}", config.vocab_size)
                       for j in range(4)]) for i in range(roots)]
        sync = seconds(lambda: ours.load(model))
        sample = seconds(lambda: asyncio.run(converse(ours, nodes)))
        grown = [make_row(node.ids) for root in nodes for node in (root, *root.children)]
        learn = seconds(lambda: update(model, optimizer, grown))
        if repeat:
            record("step_sample_s", sample)
            record("step_update_s", learn)
            record("step_sync_s", sync)
    return samples


# --- helpers ---------------------------------------------------------------------------------


def pss_mib(pid: int) -> float:
    """Memory of a process and all below it, pages that several share counted once."""
    parents = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            parents[int(process)] = int(stat[1])
        except OSError:  # it ended meanwhile
            pass
    family = {pid}
    while more := {p for p, parent in parents.items() if parent in family} - family:
        family |= more
    total = 0
    for member in family:
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def machine() -> str:
    """One line on what this runs on."""
    try:
        info = Path("/proc/cpuinfo").read_text()
        model = next(line.split(":", 1)[1].strip() for line in info.splitlines()
                     if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return (f"{model}, {cores} cores, {platform.system()} {platform.release()}, Python "
            f"{platform.python_version()}, load {load:.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, function in BENCHMARKS.items():
        first, _, more = function.__doc__.partition("\n\n")
        sub = names.add_parser(name, help=first, description=first, epilog=more,
                               formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.add_argument("--json", metavar="FILE", default=None,
                         help="write the figures there as well (default: not written)")
        if name == "repl":
            sub.add_argument("--sandbox", choices=("require", "auto", "off"), default="auto",
                             help="isolation of the REPLs (default: auto)")
    args = parser.parse_args()

    where = machine()
    samples, how = BENCHMARKS[args.name](args)
    print(f"{args.name}: {how}\non {where}\n\n{'':28}{'median':>10}{'quartiles':>20}{'n':>7}")
    report = {"benchmark": args.name, "how": how, "machine": where, "quartiles": {}, "n": {}}
    for name, values in samples.items():
        low, middle, high = (statistics.quantiles(values, n=4, method="inclusive")
                             if len(values) > 1 else values * 3)
        head, _, at = name.partition(" at ")
        if at:
            report.setdefault(head, {})[at] = middle
        else:
            report[name] = middle
        report["quartiles"][name] = [low, high]
        report["n"][name] = len(values)
        quartiles = f"{low:.3g} to {high:.3g}"
        print(f"{name:28}{middle:>10.3g}{quartiles:>20}{len(values):>7}")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
