"""The command line of rlm.py: one question about files.

    python rlm.py --demo
    python rlm.py --model DIR "QUESTION" FILE...
    python rlm.py --api URL --api-model NAME "QUESTION" FILE...

The answer is the last that goes to standard output, after the turns of --stream and the
tree of --trace. What ends without an answer goes to standard error, with a status that is
not 0. What a model wrote is printed with its control characters spelled out.
"""
import json
import math
import os
import random
import sys
from typing import Any

import rlm
import tasks
from lab import api, report
from runtime import console, flags
from runtime.files import write_text
from runtime.repl_server import REPOSITORY
from tasks import Task
from tree import Completion, Node, Rollout, printable, render

TINY = os.path.join(REPOSITORY, "assets", "tiny")
LOOK = """\
answer: {answer}
gold:   {gold}
score:  {score:.2f}

What to look at: the root finds the notes by their names, with code, and reads none of them.
Each child has a REPL of its own, prints its note and says what that is about: no text says
so, it knows it from its training. Only the answers of roots were rewarded; the children
learnt from that. The mean score is 0.92, so another --seed may show a mistake."""


def main() -> None:
    parser = flags.parser("Ask a recursive language model about files.",
                          epilog="The key of --api is read from OPENAI_API_KEY.")
    parser.add_argument("--demo", action="store_true", help="ask the trained model in "
                        "assets/tiny about notes that --seed generates, print the tree")
    parser.add_argument("--model", help="checkpoint directory (no default)")
    parser.add_argument("--api", metavar="URL", help="ask a server instead of --model, as "
                        "http://localhost:8000/v1")
    parser.add_argument("--api-model", metavar="NAME", help="its model")
    parser.add_argument("--temperature", type=float, default=1.0,
                        help="sampling temperature, 0 is greedy (default 1.0)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument("--sandbox", default="auto", choices=("require", "auto", "off"),
                        help="namespaces around the REPL (default auto: where possible)")
    parser.add_argument("--trace", action="store_true", help="print the tree (default off)")
    parser.add_argument("--stream", action="store_true",
                        help="print each turn as it ends (default off)")
    parser.add_argument("--html", metavar="FILE", help="write the tree as a page")
    parser.add_argument("question", nargs="?", help="what to ask")
    parser.add_argument("files", nargs="*", default=[],
                        help="the context (default standard input)")
    args = parser.parse_args()
    if args.demo and (args.model or args.api or args.question):
        parser.error("--demo has a model and a question of its own")
    if args.demo:
        task = tasks.make("notes", random.Random(f"demo {args.seed}"), heldout=True)
        args.model, args.question, args.trace = TINY, task.query, True
    if args.question is None:
        parser.error("a question is needed")
    if not (args.model or args.api):
        parser.error("--model DIR is needed, or --api URL with --api-model NAME")
    if args.api and (args.model or args.seed):
        parser.error("--api asks a server: it goes with neither --model nor --seed")
    if not (args.files or args.demo) and os.path.isfile(args.question):
        parser.error(f"a question is needed before the file {args.question}")
    try:
        if not args.question.strip():
            raise ValueError("the question is empty")
        context = task.context if args.demo else read_context(args.files)
        if not rlm.as_text(context).strip():
            raise ValueError("the context is empty")
        folder = os.path.dirname(args.html or "") or "."
        if args.html and (os.path.isdir(args.html) or not os.path.isdir(folder)):
            raise ValueError(f"--html {args.html}: no such folder, or it is one")
        if args.api:
            asked = rlm.RLM.from_api(
                args.api, args.api_model, args.temperature, args.sandbox)
        else:
            asked = rlm.RLM(args.model, args.temperature, args.seed, args.sandbox)
        if args.stream:
            asked.policy = streamed(asked.policy)
        answer = asked.completion(args.question, context)
    except BrokenPipeError:  # nobody reads the turns: see runtime/console.py
        raise
    except (OSError, ValueError, RuntimeError, api.Stop, api.APIError) as error:
        sys.exit(f"rlm.py: {console.line(error)}")
    except KeyboardInterrupt:
        sys.exit("rlm.py: interrupted")
    if args.trace:
        print(render(asked.trace) + "\n")
    problem = None
    if args.demo:
        score = tasks.reward(task, answer)
        print(LOOK.format(answer=printable(str(answer)), gold=task.answer, score=score))
    else:
        task, score = Task("question", "question", args.question, context), math.nan
        problem = say(answer, asked.trace.end)
    if args.html:
        write_page(args.html, Rollout(task, "", asked.trace, score), asked.tokenizer)
    if problem and not (args.trace or args.stream):
        problem += " (--trace shows the turns)"
    if problem:
        sys.exit(problem)


def write_page(path: str, tree: Rollout, tokenizer) -> None:
    try:
        write_text(path, report.page("One question", {"question": tree.task.query}, [],
                                     [("the tree", tree)], tokenizer))
    except OSError as error:
        sys.exit(f"rlm.py: --html: {error}")


def say(answer: Any, end: str) -> str | None:
    """Print the answer. Without one, returns what to exit with."""
    if end in rlm.ENDS and answer is None:
        return f"rlm.py: no answer: {rlm.ENDS[end]}"
    if end in rlm.ENDS:
        print(f"rlm.py: no FINAL ({rlm.ENDS[end]}); the variable `answer` held:",
              file=sys.stderr)
    print(printable(answer if isinstance(answer, str) else json.dumps(answer, indent=1)))
    return None


def streamed(policy):
    """The policy, which prints every turn as it ends, with the path of its node."""
    shown: dict[Node, int] = {}

    def show(node: Node, role: str, text: str) -> None:
        mark = "»" if role == "assistant" else "·"
        name = ".".join(map(str, node.path)) or "root"
        for line in printable(text).splitlines():
            print(f"{name} {mark} {line}", flush=True)

    async def told(node: Node, max_tokens: int, key: tuple) -> Completion:
        for turn in node.turns[shown.get(node, 1):]:  # without the system prompt
            show(node, turn.role, turn.text)
        completion = await policy(node, max_tokens, key)
        show(node, "assistant", completion.text)
        shown[node] = len(node.turns) + 1
        return completion

    return told


def read_context(files: list[str]) -> Any:
    """One file: its text. Several files: {name: text}. None: standard input."""
    if not files and sys.stdin.isatty():
        print("rlm.py: no file is named: type the context; Ctrl-D ends it", file=sys.stderr)
    if not files:
        return sys.stdin.buffer.read().decode("utf-8", "replace")  # as files are read
    texts = {}
    for name in files:
        with open(name, encoding="utf-8", errors="replace") as file:
            texts[name] = file.read()
    return texts if len(texts) > 1 else texts[files[0]]
