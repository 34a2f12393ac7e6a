"""Ask a trained recursive language model: as a class, and on the command line.

    RLM("runs/tiny/final").completion("Which flights?", {"letter": "..."}) -> answer
    python ask.py --model runs/tiny/final "Which flights?" letter.txt
    python ask.py --demo

No torch is loaded before a model is.
"""
import asyncio
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tasks
import util
from config import RLMConfig, load_config, trained_task
from repl import cut
from rlm import grow, local_policy
from sandbox.protocol import json_value
from tasks import Question
from tasks.common import as_text, estimated_tokens
from tree import ENDS, Completion, Node, Refused, Sampling, printable
from util import flag

SHOWN = 2000  # characters that a person is shown of what a node reads
TINY = Path(__file__).parent / "assets" / "tiny"


class RLM:
    """A trained model: RLM("runs/tiny/final").completion(question, context) -> answer.

    `trace` holds the root of the last tree. `rlm_file` is a file with fields of rlm.json;
    `task` is whose prompts and tools are used, by default the model's, if it is ours."""
    trace: Node | None = None

    def __init__(self, model_dir: str, sampling: Sampling = Sampling(), seed: int = 0,
                 sandbox: str = "auto", batch: int = 8, rlm_file: str = "", task: str = ""):
        import engine  # noqa: F401  before torch: it says how torch's threads wait
        from model import open_checkpoint
        from sampler import Sampler
        from tokenizer import Tokenizer

        model = open_checkpoint(model_dir)
        positions = model.config.max_position_embeddings
        config = load_config(model_dir, positions, sandbox, rlm_file)
        self.tokenizer = Tokenizer.from_pretrained(model_dir)
        self.sampler = Sampler(model, batch=batch, window=config.window)
        if self.sampler.window < config.window:
            print(f"memory for a window of {self.sampler.window} tokens, not of "
                  f"{config.window}", file=sys.stderr)
        self.config = replace(config, window=self.sampler.window)
        self.policy = local_policy(self.sampler, self.tokenizer, sampling)
        self.seed, self.task = seed, task
        self.lock = threading.Lock()  # the sampler serves one event loop at a time

    def completion(self, query: str, context: Any) -> Any:
        """The answer: any JSON value, or None. Threads take turns. Where an event loop
        runs, as in a notebook, await acompletion."""
        with self.lock:
            return asyncio.run(self.acompletion(query, context))

    async def acompletion(self, query: str, context: Any) -> Any:
        task = tasks.asked_as(trained_task(self.config, self.task))
        question = tasks.checked("question", task, (query, json_value(context), None))
        self.trace = await grow(
            question, self.policy, self.tokenizer, self.config, (self.seed,))
        return self.trace.answer


def aloud(policy: Callable) -> Callable:
    """The policy, which says on stderr what a node reads and then what it wrote. Children
    run side by side."""
    async def speaking(node: Node, max_tokens: int, key: tuple) -> Completion:
        size = len(node.ids)
        if not size:
            size = sum(estimated_tokens(message.text) for message in node.conversation)
        read = cut(printable(node.messages[-1].text), SHOWN)
        print(f"--- {node.name} reads {size:,} tokens, which end with\n{read}",
              file=sys.stderr)
        done = await policy(node, max_tokens, key)
        print(f"--- {node.name} wrote\n{printable(done.text)}", file=sys.stderr)
        return done
    return speaking


# ------------------------------------------------------------------------------------------
# Who answers: flags that eval.py has, too

@dataclass(frozen=True)
class Answering:
    """A model, or a server, and how it answers."""
    model: str = flag("", "checkpoint directory", common=True)
    api: str = flag("", "a server in place of --model, as http://localhost:8000/v1; its "
                        "key: OPENAI_API_KEY")
    api_model: str = flag("", "the server's model")
    rlm: str = flag("", "file with fields of rlm.json, in place of the model's")
    sandbox: str = flag("auto", "namespaces around the REPLs; auto: where possible",
                        choices=("require", "auto", "off"))
    seed: int = flag(0, "of the sampling, and of generated questions", common=True)
    temperature: float = flag(1.0, "0 is greedy", common=True)
    top_p: float = flag(1.0, "share to sample from; 1: all")

    def __post_init__(self) -> None:
        util.check(self)
        if self.model and self.api:
            raise ValueError("give --model or --api, not both")
        if self.api and not self.api_model:
            raise ValueError("--api needs --api-model")


def policy_of(flags: Answering, batch: int) -> tuple[Callable, Any, RLMConfig]:
    """The policy that the flags name, its tokenizer (None of a server), and its limits."""
    sampling = Sampling(flags.temperature, flags.top_p)
    if flags.api:
        from baselines.api import API
        config = load_config("", sandbox=flags.sandbox, rlm_file=flags.rlm)
        return API(flags.api, flags.api_model, sampling), None, config
    print(f"loading {flags.model}", file=sys.stderr)
    model = RLM(flags.model, sampling, flags.seed, flags.sandbox, batch, flags.rlm)
    return model.policy, model.tokenizer, model.config


# ------------------------------------------------------------------------------------------
# The command line

@dataclass(frozen=True)
class Asked:
    """What is asked."""
    demo: bool = flag(False, "ask a question of --task that --seed draws", common=True)
    task: str = flag(
        "", "whose prompts and tools are used: a name, or path/to/my_task.py; empty: that "
            "of the model's training, if it is ours; with --demo: requests", common=True)
    question: str = flag("", "what to ask", words="?")
    files: tuple = flag((), "the context; none: standard input", words="*")


@dataclass(frozen=True)
class AskConfig(Asked, Answering):
    """All flags in one flat object."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.question) == self.demo:
            raise ValueError("a question is needed, but --demo has one of its own")


def main() -> None:
    try:
        flags = util.read_flags(
            "Ask a recursive language model about files. Each turn goes to stderr, the "
            "answer to stdout. Without --model assets/tiny answers.", AskConfig,
            {"what is asked": Asked, "who answers": Answering})
        question = question_of(flags)
        root = ask(flags, question)
    except KeyboardInterrupt:
        sys.exit("ask.py: interrupted")
    except (OSError, ValueError, ImportError, RuntimeError, Refused) as error:
        if util.is_theirs(error):
            raise
        sys.exit(f"ask.py: {error}")
    if root.answer is None and ENDS[root.end]:
        sys.exit(f"no answer: {ENDS[root.end]}")
    print(printable(as_text(root.answer)))
    if flags.demo:
        score = tasks.score_of(question, root.answer)
        print(f"gold: {as_text(question.answer)}\nscore: {score:.2f}")


def question_of(flags: AskConfig) -> Question:
    """The demo's question, which has a gold, or the user's about files."""
    if flags.demo:
        rng = random.Random(f"demo {flags.seed}")
        return tasks.make(tasks.load(flags.task), rng, heldout=True)
    context = {name: Path(name).read_text("utf-8", "replace") for name in flags.files}
    if not context:
        context = sys.stdin.buffer.read().decode("utf-8", "replace")
    elif len(context) < 2:
        context = "".join(context.values())
    return Question("question", "", flags.question, context)


def ask(flags: AskConfig, question: Question) -> Node:
    """The tree that answers a question."""
    if not flags.api and not flags.model:
        flags = replace(flags, model=str(TINY))
    policy, tokenizer, config = policy_of(flags, batch=8)
    if not flags.api and not config.task:
        print("it was not trained for this (its rlm.json names no task), so its answer is "
              "a guess", file=sys.stderr)
    if not question.task:
        task = tasks.asked_as(trained_task(config, flags.task))
        question = replace(question, task=task)
    return asyncio.run(grow(question, aloud(policy), tokenizer, config, (flags.seed,)))


if __name__ == "__main__":
    main()
