"""Every claim of speed as a figure: `python -m lab.bench repl|sampler|train|step|gpu`.

Prints a table below a line that says what it was measured on; --json FILE writes it there,
too. The docstring of each benchmark says how its figures are measured. A figure is the
median of its samples, with their quartiles beside it. Compare figures of one run only,
never of two machines.
"""
import argparse
import asyncio
import contextlib
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

import grpo
from lab.kills import family
from model import Qwen3, Qwen3Config
from repl import REPL, Limits
from rlm import RLMConfig
from runtime import console, parallel
from runtime.device import TYPES
from runtime.files import read_json, write_json
from runtime.plan import GIB, memory, of_run
from runtime.repl_server import Handle
from sampler import Sampler
from train import PRETRAINED, Config, Trainer
from tree import Node, Rollout, Turn

GPU = torch.cuda.is_available()
SMALL = Qwen3Config(
    vocab_size=32_000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64)
QWEN3_4B = Qwen3Config(
    vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128)
REPEATS = 3  # samples of what takes long
UPDATE_TOKENS = 8192  # of a micro-batch
LAST_LINES = 12  # of a traceback: an error may have some of advice
ANSWER, OBSERVATION = 64, 200  # tokens of a sampled turn, and of what follows it


class Samples(dict):
    """Name of a figure -> its samples; counts them on the terminal as they come."""

    def __init__(self, title: str):
        super().__init__()
        self.failed = []  # names of parts
        self.bar = tqdm(desc=title, unit=" samples", leave=False, disable=None)

    def add(self, name: str, value: float) -> None:
        self.setdefault(name, []).append(value)
        self.bar.update()


def seconds_of(run) -> float:
    """Wall clock of `run()`, the work of a GPU included."""
    began = time.perf_counter()
    run()
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


# --- the REPL ---

def repl(args: argparse.Namespace) -> tuple[Samples, str]:
    """The REPL, beside a fresh Python.

    start_ms: REPL("").__aenter__(); the worker is forked and isolated, and has answered.
        One at a time; the server runs already; closing does not count.
    exec_ms: one execute("x = 1") in an open REPL, there and back.
    context_40mb_s: as start_ms, with a context of 40 MB of ASCII text.
    open_512_mib_each: with 512 open REPLs, each with an empty context and after one block,
        the memory (PSS) of the server and all processes below it, less the server's before,
        over 512. Memory of the kernel does not count.
    fresh_python_ms: subprocess.run([python, "-I", "-c", "pass"]), to compare.
    """
    limits = Limits(sandbox=args.sandbox)
    samples = Samples("repl")

    async def start(name: str, context: str, scale: float) -> None:
        began = time.perf_counter()
        async with REPL(context, limits=limits) as one:
            samples.add(name, (time.perf_counter() - began) * scale)
            assert (await one.execute("FINAL(len(context))")).final == len(context)

    async def open_many(count: int) -> None:
        before = pss_mib(Handle.current.process.pid)
        async with contextlib.AsyncExitStack() as opened:
            for _ in range(count):
                one = await opened.enter_async_context(REPL("", limits=limits))
                await one.execute("x = 1")
            taken = pss_mib(Handle.current.process.pid) - before
            samples.add("open_512_mib_each", taken / count)
        await asyncio.sleep(1)  # until their processes are gone

    async def measure() -> None:
        async with REPL("", limits=limits) as one:  # this starts the server, too
            for _ in range(100):
                await one.execute("x = 1")
            for _ in range(2000):
                began = time.perf_counter()
                await one.execute("x = 1")
                samples.add("exec_ms", (time.perf_counter() - began) * 1e3)
        for _ in range(300):
            await start("start_ms", "", 1e3)
        for _ in range(7):
            await start("context_40mb_s", "x" * (40 << 20), 1)
        for _ in range(REPEATS):
            await open_many(512)

    asyncio.run(measure())
    for _ in range(30):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
        samples.add("fresh_python_ms", (time.perf_counter() - began) * 1e3)
    return samples, f"sandbox {args.sandbox}"


def pss_mib(pid: int) -> float:
    """Memory of a process and all below it. Pages that several share count once."""
    total = 0
    for member in family(pid):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


# --- the sampler ---

def sampler(args: argparse.Namespace) -> tuple[Samples, str]:
    """The sampler, beside transformers and the limits of the machine. Random weights.

    The tree load: 8 roots with the same prompt of 1,000 tokens take 3 turns each. After its
    first turn a root waits for 4 children of 2 turns, all with the same prompt of 500
    tokens. A turn is 64 sampled tokens, and 200 of observation follow. The uniform load: 16
    prompts of 512 tokens, one turn each. Temperature 1, no truncation, no stop ids.

    tree_tokens_s, uniform_tokens_s: sampled tokens per second; the cache starts empty.
    hf_tree_tokens_s, hf_uniform_tokens_s: the same of transformers with the same weights.
        All nodes at the same turn are a batch. CPU: `generate` with SDPA, padded on the
        left; GPU: `generate_batch`, continuous batching.
    tree_vs_transformers, uniform_vs_transformers: their ratio; they run in turn.
    computed_tokens: positions that the sampler computed on the tree load.
    minimum_tokens: the least, each prefix whose keys are needed once.
    work_over_minimum: their ratio.
    """
    from transformers import AutoModelForCausalLM

    device, dtype, config = "cpu", torch.float32, SMALL
    if GPU:
        device, dtype, config = "cuda", torch.bfloat16, QWEN3_4B
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3(config).to(dtype)
    ours = Sampler(model, memory=0.25 if GPU else 3 << 30, batch=64)
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        theirs = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa").to(device)
    samples = Samples("sampler")

    def tokens_per_second(run, nodes: list[Talk]) -> float:
        seconds = seconds_of(lambda: run(nodes))
        return sum(node.turns * ANSWER for node in with_children(nodes)) / seconds

    def sample(nodes: list[Talk]) -> None:
        ours.load(model)
        asyncio.run(converse(ours, nodes))

    def sample_theirs(nodes: list[Talk]) -> None:
        converse_with_transformers(theirs, nodes)

    for load, name in ((uniform_load, "uniform"), (tree_load, "tree")):
        if GPU:  # the first time compiles kernels
            sample(load(config))
        for _ in range(REPEATS):
            before = ours.stats["computed"]
            nodes = load(config)
            rate = tokens_per_second(sample, nodes)
            computed = ours.stats["computed"] - before
            peer = tokens_per_second(sample_theirs, load(config))
            samples.add(f"{name}_tokens_s", rate)
            samples.add(f"hf_{name}_tokens_s", peer)
            samples.add(f"{name}_vs_transformers", rate / peer)

    least = distinct_prefixes([node.ids for node in with_children(nodes)])
    samples.add("computed_tokens", computed)
    samples.add("minimum_tokens", least)
    samples.add("work_over_minimum", computed / least)
    return samples, described(model)


class Talk:
    """A node of a load: its tokens so far, how many turns it takes, who it waits for."""

    def __init__(self, ids: list[int], turns: int, key: str, config: Qwen3Config):
        self.ids, self.turns, self.key, self.children = list(ids), turns, key, []
        rng = random.Random(key)
        self.observations = [random_ids(rng, OBSERVATION, config) for _ in range(turns)]

    def add(self, turn: int, sampled: list[int]) -> None:
        assert len(sampled) == ANSWER
        self.ids += sampled
        if turn + 1 < self.turns:
            self.ids += self.observations[turn]


def random_ids(rng: random.Random, count: int, config: Qwen3Config) -> list[int]:
    return [rng.randrange(config.vocab_size) for _ in range(count)]


def tree_load(config: Qwen3Config, roots: int = 8, seed: int = 0) -> list[Talk]:
    """8 roots per prompt."""
    rng, nodes = random.Random(seed), []
    system = random_ids(rng, 500, config)
    for i in range(roots):
        if i % 8 == 0:
            prompt = random_ids(rng, 1000, config)
        nodes.append(Talk(prompt, 3, f"{seed}.{i}", config))
        nodes[-1].children = [Talk(system, 2, f"{seed}.{i}.{j}", config) for j in range(4)]
    return nodes


def uniform_load(config: Qwen3Config) -> list[Talk]:
    rng = random.Random(1)
    return [Talk(random_ids(rng, 512, config), 1, str(i), config) for i in range(16)]


def with_children(nodes: list[Talk]) -> list[Talk]:
    return [node for root in nodes for node in (root, *root.children)]


async def converse(sampler, nodes: list[Talk]) -> None:
    """Every node is a coroutine, as in a rollout."""
    async def run(node: Talk) -> None:
        for turn in range(node.turns):
            done = await sampler.generate(node.ids, ANSWER, key=(node.key, turn))
            node.add(turn, list(done.ids))
            if turn == 0:
                await asyncio.gather(*(run(child) for child in node.children))

    await asyncio.gather(*(run(node) for node in nodes))


def converse_with_transformers(model, nodes: list[Talk]) -> None:
    """The same in batches: first turns, then those of all children, then the others."""
    children = [child for node in nodes for child in node.children]
    batches = [(nodes, 0)]
    if children:
        batches += [(children, 0), (children, 1)]
    batches += [(nodes, turn) for turn in range(1, nodes[0].turns)]
    for batch, turn in batches:
        sampled = generate_with_transformers(model, [node.ids for node in batch])
        for node, ids in zip(batch, sampled, strict=True):
            node.add(turn, ids)


def generate_with_transformers(model, rows: list[list[int]]) -> list[list[int]]:
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
        max_new_tokens=ANSWER, min_new_tokens=ANSWER, eos_token_id=None)
    if model.device.type == "cuda":
        done = model.generate_batch(rows, generation_config=config)
        in_order = sorted(done, key=lambda name: int(name.rpartition("_")[2]))
        return [done[name].generated_tokens for name in in_order]

    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])  # B T
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])  # B T
    with torch.inference_mode():
        done = model.generate(ids, attention_mask=mask, generation_config=config)
    return done[:, width:].tolist()


def distinct_prefixes(rows: list[list[int]]) -> int:
    """Prefixes that have to be computed. The last token of a row is never an input."""
    seen = set()
    for row in rows:
        prefix = 0
        for token in row[:-1]:
            prefix = hash((prefix, token))
            seen.add(prefix)
    return len(seen)


def generate_all(sampler: Sampler, rows: list[list[int]], tokens: int, **options) -> list:
    async def gather():
        calls = [sampler.generate(row, tokens, key=(i,), **options)
                 for i, row in enumerate(rows)]
        return await asyncio.gather(*calls)

    return asyncio.run(gather())


# --- the update ---

def train(args: argparse.Namespace) -> tuple[Samples, str]:
    """The update, beside a plain transformers training step. Random weights, all trained.

    An update is forward, loss, backward, clipping and AdamW (fused in both). Every other 64
    tokens of a row are sampled ones. Equal rows are 8 of 256 tokens; mixed ones 8 of 32 to
    512, evenly in the logarithm, in random order; shared ones those of a question, 8 trees
    of 5 nodes, with the same 600 tokens first and 150 of their own.
    Ours: packs of 8,192 tokens, logits of sampled tokens only, in chunks. transformers: 8
    rows at a time, padded to the longest, logits of all tokens at once. All tokens of the
    rows count, but no padding. On the CPU, even where there is a GPU.

    equal_tokens_s, mixed_tokens_s, shared_tokens_s: tokens per second of our update.
    hf_equal_tokens_s, hf_mixed_tokens_s, hf_shared_tokens_s: the same of transformers.
    update_vs_transformers, packed_vs_padded, shared_vs_transformers: their ratio on equal,
        mixed and shared rows; they run one by one, in turn.
    computed_share: tokens that we compute on shared rows, over their distinct tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    samples, config = Samples("train"), SMALL
    torch.manual_seed(0)
    ours = Qwen3(config)
    raw = config.to_json(torch.float32)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(raw.pop("model_type"), **raw), attn_implementation="sdpa")
    theirs.load_state_dict(ours.state_dict())
    our_optimizer, their_optimizer = adamw(ours), adamw(theirs)

    def padded(rows: list[grpo.Row]) -> None:
        """The same loss of one update, 8 padded rows at a time."""
        for first in range(0, len(rows), 8):
            backward_padded(rows[first:first + 8])
        optimizer_step(theirs, their_optimizer)

    def backward_padded(rows: list[grpo.Row]) -> None:
        width = max(len(row.ids) for row in rows)

        def batch(values) -> torch.Tensor:  # B T
            padding = [[0] * (width - len(row.ids)) for row in rows]
            return torch.tensor([values(row) + zeros for row, zeros in zip(rows, padding)])

        ids, mask = batch(lambda row: row.ids), batch(lambda row: row.mask)
        real = batch(lambda row: [1] * len(row.ids))
        old = batch(lambda row: row.logprobs)
        weights = batch(lambda row: [row.weight * row.advantages[0]] * len(row.ids))

        logits = theirs(input_ids=ids, attention_mask=real, use_cache=False).logits[:, :-1]
        new = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # B T-1
        trust = (new.detach() - old[:, 1:]).exp().clamp(max=grpo.TRUST_MAX)
        ratio = (new - new.detach()).exp()
        (-(mask * weights)[:, 1:] * trust * ratio).sum().backward()

    rng = random.Random(0)
    mixed = [round(32 * 16 ** (i / 7)) for i in range(8)]
    rng.shuffle(mixed)
    prompt = random_ids(rng, 600, config)
    loads = {"equal": [random_ids(rng, 256, config) for _ in range(8)],
             "mixed": [random_ids(rng, n, config) for n in mixed],
             "shared": [prompt + random_ids(rng, 150, config) for _ in range(40)]}
    ratios = {"equal": "update_vs_transformers", "mixed": "packed_vs_padded",
              "shared": "shared_vs_transformers"}
    for name, ids in loads.items():
        given = len(prompt) if name == "shared" else 0
        rows = [make_row(each, rng.choice([-1, 1]), given) for each in ids]
        packs = grpo.micro_batches(rows, UPDATE_TOKENS)
        tokens = sum(map(len, ids))
        repeats = REPEATS if tokens > 10_000 else 3 * REPEATS  # short ones vary more
        for repeat in range(repeats + 1):
            seconds = seconds_of(lambda: update(ours, our_optimizer, rows, UPDATE_TOKENS))
            peer = seconds_of(lambda: padded(rows))
            if repeat:  # the first does not count
                samples.add(f"{name}_tokens_s", tokens / seconds)
                samples.add(f"hf_{name}_tokens_s", tokens / peer)
                samples.add(ratios[name], peer / seconds)
    computed = sum(grpo.distinct_tokens(pack) for pack in packs)
    samples.add("computed_share", computed / grpo.distinct_tokens(rows))
    return samples, described(ours)


def make_row(ids: list[int], advantage: float = 1.0, prompt: int = 0) -> grpo.Row:
    mask = [int(i >= prompt) * (i // 64 % 2) for i in range(len(ids) - 1)] + [1]
    logprobs = [-10.0 * sampled for sampled in mask]
    return grpo.Row(ids, mask, logprobs, [advantage] * sum(mask), 1e-3)


def adamw(model):
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-6, fused=True)


def optimizer_step(model, optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def update(model, optimizer, rows: list, max_tokens: int) -> None:
    config = grpo.GRPOConfig()
    for rows_of_pack in grpo.micro_batches(rows, max_tokens):
        pack = grpo.collate(rows_of_pack, model.device)
        logprobs, entropies = model.logprobs(pack["ids"], pack["mask"], pack["lengths"])
        grpo.policy_loss(logprobs, entropies, pack, config)[0].backward()
    optimizer_step(model, optimizer)


def step(args: argparse.Namespace) -> tuple[Samples, str]:
    """A step of GRPO, beside one of TRL's GRPOTrainer. The same weights, all trained.

    Flat rollouts, without REPLs: for each of some random prompts a group of completions of
    equal length, whichever tokens they sample. Temperature 1, no truncation; half of a
    group has reward 1, the others 0. One update: fused AdamW, clipping, no KL term, no
    activation checkpointing. float32 on a CPU; on a GPU bfloat16, and float32 weights. Both
    sides have the same threads and run in turn; the first step of each does not count.
    Ours: Trainer.reinforce of train.py. TRL: all completions at once from transformers'
    `generate` with SDPA, and the update in micro-batches.

    step_s, trl_step_s: seconds of a step, which are the sum of
    sample_s, trl_sample_s: until all completions are there;
    score_s, trl_score_s: rewards, advantages, our packs; and log-probabilities before the
        update, which neither side computes, because there is one update only;
    update_s, trl_update_s: forward and backward passes, clipping, AdamW.
    step_vs_trl, sample_vs_trl, update_vs_trl: TRL's seconds over ours.
    """
    try:
        import trl
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: pip install -r requirements-lab.txt")
    if args.questions * args.group % args.trl_batch:
        sys.exit(f"{args.questions} x {args.group} completions are not micro-batches of "
                 f"{args.trl_batch}")

    samples = Samples("step")
    with tempfile.TemporaryDirectory() as path:
        if not args.model:
            torch.manual_seed(0)
            Qwen3(SMALL).save_pretrained(path)
        config = Qwen3Config.read(os.path.join(args.model or path, "config.json"))
        rng = random.Random(0)
        prompts = [random_ids(rng, args.prompt, config) for _ in range(args.questions)]
        ours = FlatTrainer(args.model or path, prompts, args.group, args.tokens)
        train_in_turn(ours, args, path, samples)
    return samples, (
        f"{described(ours.model)}; {args.questions} prompts of {args.prompt} tokens, "
        f"{args.group} completions of {args.tokens} for each; TRL {trl.__version__} in "
        f"micro-batches of {args.trl_batch}")


class FlatTrainer(Trainer):
    """The steps of train.py, without trees and without the directory of a run."""

    def __init__(self, path: str, prompts: list[list[int]], group: int, tokens: int):
        self.prompts, self.tokens = prompts, tokens
        self.config = Config(
            model=path, questions=len(prompts), group=group, steps=1, lr=1e-6,
            warmup_steps=0, dtype="bfloat16" if GPU else "float32")
        self.world, self.suits = parallel.World(), PRETRAINED
        self.dtype = TYPES[self.config.dtype]
        self.objective, self.tokenizer = grpo.credit, None
        self.rlm = RLMConfig(window=len(prompts[0]) + tokens)
        shape = Qwen3Config.read(os.path.join(path, "config.json"))
        self.plan = of_run(self.config, shape, self.rlm.window, memory(self.world))
        self.reported = math.inf  # no report is due
        self.run = SimpleNamespace(maybe_save=lambda every: None)
        self.load(path, adapters=False)
        self.make_sampler()

    def step(self) -> dict[str, float]:
        """One step of GRPO: the seconds of its parts."""
        self.run.state = {"step": 0, "sampled": 0, "skipped": 0, "scale": 1.0}
        began = time.perf_counter()
        self.reinforce()
        if GPU:
            torch.cuda.synchronize()
        return parts_of_step(began, self.sampled, self.scored, time.perf_counter())

    def collect(self, step: int) -> list[Rollout]:
        prompts = [ids for ids in self.prompts for _ in range(self.config.group)]
        rollouts = []
        for i, done in enumerate(generate_all(self.sampler, prompts, self.tokens)):
            assert len(done.ids) == self.tokens
            root = Node(kind="llm")
            root.add(Turn("user", "", tuple(prompts[i])))
            root.add(Turn("assistant", "", done.ids, done.logprobs))
            rollouts.append(Rollout(None, str(i // self.config.group), root, i % 2))
        self.sampled = time.perf_counter()
        return rollouts

    def add_log_probabilities(self, packs: list[dict]) -> None:
        super().add_log_probabilities(packs)
        self.scored = time.perf_counter()

    def show(self, rollouts: list[Rollout], update: dict) -> None:
        pass


def train_in_turn(ours: FlatTrainer, args: argparse.Namespace, out: str,
                  samples: Samples) -> None:
    """Steps of TRL's trainer with the same weights and prompts, one of ours before each."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class TimedTrainer(GRPOTrainer):
        def _generate(self, prompts: list) -> tuple:
            generated = super()._generate(prompts)
            self.sampled = time.perf_counter()
            return generated

        def _generate_and_score_completions(self, inputs: list) -> dict:
            batch = super()._generate_and_score_completions(inputs)
            assert batch["completion_mask"].sum() == len(inputs) * args.tokens
            self.scored = time.perf_counter()
            return batch

    class InTurn(TrainerCallback):
        def on_step_begin(self, *_, **__) -> None:
            self.ours = ours.step()
            self.began = time.perf_counter()

        def on_step_end(self, _, state, *__, **___) -> None:
            if GPU:
                torch.cuda.synchronize()
            parts = parts_of_step(
                self.began, theirs.sampled, theirs.scored, time.perf_counter())
            if state.global_step == 1:  # the first does not count
                return
            for name, seconds in self.ours.items():
                samples.add(name, seconds)
                samples.add(f"trl_{name}", parts[name])
            for name in ("sample", "update", "step"):
                ratio = parts[f"{name}_s"] / self.ours[f"{name}_s"]
                samples.add(f"{name}_vs_trl", ratio)

    def rewards(prompts: list, **_) -> list[float]:
        return [float(i % 2) for i in range(len(prompts))]

    # TRL takes texts. Here a token is written as its number.
    vocabulary = {f"<{i}>": i for i in range(ours.model.config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    texts = [{"prompt": " ".join(f"<{i}>" for i in ids)} for ids in ours.prompts]
    options = GRPOConfig(
        out, max_steps=REPEATS + 1, num_generations=args.group,
        per_device_train_batch_size=args.trl_batch,
        gradient_accumulation_steps=args.questions * args.group // args.trl_batch,
        max_completion_length=args.tokens,
        generation_kwargs={"min_new_tokens": args.tokens},
        model_init_kwargs={"dtype": "float32"}, bf16=GPU, use_cpu=not GPU,
        gradient_checkpointing=False, beta=0.0, optim="adamw_torch_fused", adam_beta2=0.95,
        max_grad_norm=PRETRAINED.max_norm, shuffle_dataset=False, report_to="none",
        logging_strategy="no", save_strategy="no", disable_tqdm=True)
    theirs = TimedTrainer(
        ours.config.model, rewards, options, Dataset.from_list(texts),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<0>", eos_token="<0>"),
        callbacks=[InTurn()])
    theirs.remove_callback(PrinterCallback)
    theirs.train()


def parts_of_step(began: float, sampled: float, scored: float, ended: float) -> dict:
    return {"sample_s": sampled - began, "score_s": scored - sampled,
            "update_s": ended - scored, "step_s": ended - began}


# --- a GPU ---

def gpu(args: argparse.Namespace) -> tuple[Samples, str]:
    """All that only a GPU can measure, in less than ten minutes. Random weights.

    The shape of Qwen3-4B, in bfloat16. Each part is a process of its own with a time limit;
    if one fails, its last lines are printed, the others go on, and the exit status is 1.
    With --json FILE what was measured is written after each part. lab/gpu.py has the parts.

    packs_gap: largest difference of attention over packs that share prefixes, in bfloat16,
        to that of single rows, in float32; a value is of the order of 1.
    pages_in_place: 1 if the sampler has its path for GPUs.
    greedy_agreement: of 128 greedy tokens after each of 8 prompts of 1,000, the share that
        a plain forward pass ranks first, too.
    logprob_gap: the mean difference between the two log-probabilities of these tokens.
    read_gb_s: GB that the card reads in a second, of 2 GiB that are summed.
    make_s: seconds in which a sampler is made: its pool, its kernels, its CUDA graphs.
    decode_roofline_share at B x T: the time in which the card reads the weights and the
        cache of B requests of T tokens once, over that of a decode step.
    decode_tokens_s at B x T: tokens per second of all B together, in the steps alone.
    prefill_tokens_s: of a prompt of 8,192 tokens.
    prefill_matmul_share: its operations per second, over those of the product of two square
        matrices of 8,192.
    update_tokens_s, lora_update_tokens_s: of an update from 16 rows of 4,096 tokens, of all
        weights and of adapters of rank 16, clipping and AdamW included.
    mfu: operations of an update of all weights, over 989 TFLOP/s times its seconds. Counted
        are 6 per weight and token (of the head: per sampled token) and causal attention,
        but nothing that is computed again.
    recomputed, lora_recomputed: 1 if layers are computed again in the backward pass, which
        is when the plan has no room for their activations; with adapters always.
    peak_gib, lora_peak_gib: the most memory allocated.
    plan_over_peak, lora_plan_over_peak: what runtime/plan.py says, without a sampler, over
        it.
    refresh_s: the sampler's copy of all weights.
    step_sample_s, step_update_s: a step with adapters from 64 trees of the load of
        `sampler`: sampling without REPLs, and an update from all their nodes.
    """
    from lab.gpu import PARTS

    if not GPU:
        sys.exit("lab.bench gpu needs a CUDA GPU, and there is none")
    samples = Samples("gpu")
    for part, limit in PARTS.items():
        run_part(part.__name__, limit, samples)
        if args.json:
            write_json(args.json, samples)
    total = torch.cuda.get_device_properties(0).total_memory
    return samples, (f"{torch.cuda.get_device_name()}, {total / GIB:.0f} GiB, torch "
                     f"{torch.__version__}")


def run_part(name: str, limit: int, samples: Samples) -> None:
    """Run a part of lab/gpu.py for at most so many seconds, and collect what it measured.
    If it fails, say how."""
    with tempfile.TemporaryDirectory() as path:
        file, errors = Path(path, "samples.json"), Path(path, "stderr")
        with open(errors, "w", encoding="utf-8") as stderr:
            command = [sys.executable, "-m", "lab.gpu", name, str(file)]
            try:
                status = subprocess.run(command, stderr=stderr, timeout=limit).returncode
                how = f"exit status {status}"
            except subprocess.TimeoutExpired:
                status, how = 1, f"not done after {limit} s"
        if status:
            samples.failed.append(name)
            print(f"{name} failed: {how}", flush=True)
            for line in errors.read_text(encoding="utf-8").splitlines()[-LAST_LINES:]:
                print(f"    {line}", flush=True)
        if file.exists():
            for figure, values in read_json(file).items():
                for value in values:
                    samples.add(figure, value)


# --- the table ---

def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def described(model: Qwen3) -> str:
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    where = f"CPU with {torch.get_num_threads()} threads"
    if model.device.type == "cuda":
        where = torch.cuda.get_device_name()
    return (f"{millions:,.0f} M parameters, {model.config.num_hidden_layers} layers, "
            f"{model.lm_head.weight.dtype}, on {where}")


def machine() -> str:
    """One line on what this runs on."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
    return (f"{name}, {len(os.sched_getaffinity(0))} cores, {platform.system()} "
            f"{platform.release()}, Python {platform.python_version()}, load "
            f"{os.getloadavg()[0]:.1f}")


BENCHMARKS = {"repl": repl, "sampler": sampler, "train": train, "step": step, "gpu": gpu}


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The flags of `step`."""
    parser.add_argument("--model", metavar="DIR", help="weights (default random ones)")
    for name, value, text in (
            ("questions", 2, "prompts"),
            ("group", 8, "completions of each prompt"),
            ("prompt", 600, "tokens of a prompt"),
            ("tokens", 150, "tokens of a completion"),
            ("trl-batch", 4, "completions in a micro-batch of TRL's update")):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N",
                            help=f"{text} (default {value})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, function in BENCHMARKS.items():
        first, _, more = function.__doc__.partition("\n\n")
        sub = names.add_parser(name, help=first, description=first, epilog=more,
                               formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.add_argument("--json", metavar="FILE", help="write the figures there, too")
        if name == "repl":
            sub.add_argument("--sandbox", choices=["auto", "require", "off"],
                             default="auto", help="isolation of the REPLs (default auto)")
        if name == "step":
            add_sizes(sub)
    args = parser.parse_args()

    where = machine()
    samples, how = BENCHMARKS[args.name](args)
    samples.bar.close()
    print(f"{args.name}: {how}\non {where}\n")
    width = max(map(len, samples), default=0)
    print(f"{'':{width}}{'median':>10}{'quartiles':>22}{'n':>5}")
    report = {"benchmark": args.name, "how": how, "machine": where}
    report |= {"quartiles": {}, "n": {}}
    for name, values in samples.items():
        low = middle = high = values[0]
        if len(values) > 1:
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        figure, _, at = name.partition(" at ")
        if at:
            report.setdefault(figure, {})[at] = middle
        else:
            report[figure] = middle
        report["quartiles"][name] = [low, high]
        report["n"][name] = len(values)
        spread = f"{short(low)} to {short(high)}"
        print(f"{name:{width}}{short(middle):>10}{spread:>22}{len(values):>5}")
    if args.json:
        write_json(args.json, report)
    return 1 if samples.failed else 0


if __name__ == "__main__":
    console.start(main)
