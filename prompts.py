"""What a node reads: system message, example, question, and what its code printed.

Full prompts are for pretrained models: they explain, and show an example conversation that
nobody sampled. Brief ones are for models made from nothing, which know from a warm-up what
to do. `config` is a config.RLMConfig. A task adds its own pieces (docs/extending.md).
"""
import json
import re
from types import ModuleType
from typing import Any

from tasks.common import ALONE, LETTERS, Example, as_text, block, describe, help_of
from tree import Node

FENCE = re.compile(r"(?<!`)(`{3,})repl[ \t]*\r?\n")
REPEATED = 400  # characters of the question that each observation repeats
FULL_WINDOW = ": the window is full"
NO_BLOCK = {
    "brief": "No complete ```repl block in this message, so nothing ran.",
    "full": "Nothing ran: your message has no complete block. A block looks like this:\n"
            "```repl\nprint(context)\n```"}


def parse(text: str) -> tuple[str, str | None]:
    """A message up to the end of its first complete block, and that block's code. Without
    one: the whole message, and None.

    A block opens with three or more backticks and "repl", anywhere in a line that ends
    there. It ends where a line begins with as many backticks."""
    opened = FENCE.search(text, len(text) - len(spoken(text)))
    if not opened:
        return text, None
    closed = re.compile("^" + opened[1], re.M).search(text, opened.end())
    if not closed:
        return text, None
    return text[:closed.end()], text[opened.end():closed.start()]


def spoken(text: str) -> str:
    """A message without the thought (<think>...</think>) that it begins with; "" if the
    thought does not end."""
    if text.lstrip().startswith("<think>"):
        return text.partition("</think>")[2].lstrip()
    return text


FULL = """\
You answer a question about a context, which may be too long to read. Both are variables \
in a Python REPL: `question` and `context`. Each of your messages is one block of code:

```repl
print(context)
```

It runs, and you see what it prints, at most {output} characters. Variables persist. You \
have {turns} messages of at most {tokens} tokens. In the REPL you also have:
- FINAL(value): gives your answer and ends at once.
{calls}{tools}
{strategy}

The conversation begins with an example, about another context. Then comes your question."""

CALLS = """\
- rlm_query_batched(prompts, contexts) -> a list of answers, each of a child with a REPL \
of its own, working like you. One string as prompts is used for every context. \
rlm_query(prompt, context): one such call.
- llm_query_batched(prompts), llm_query(prompt) -> str: a model without a REPL, for short \
texts.
A call that fails gives a string that begins with "Error". At most {nodes} calls in all.
"""
LEAF = "Answer the question briefly and exactly, with nothing else."
BRIEF = "Write ```repl blocks: context, {tools}rlm_query, FINAL."
GO_ON = "Write the next block. If you can answer now, call FINAL(value) in it."
LAST = "This is your last message: call FINAL in its block."

EXAMPLE = Example(
    query="What are the letters from Rome about: weather, money or family? Answer with a "
          "dict {name of the letter: subject}.",
    context=LETTERS,
    code=f"""\
names = [name for name in context if "Rome" in name]
parts = [context[name] for name in names]
answers = rlm_query_batched(question + "{ALONE}", parts)
FINAL(dict(zip(names, answers)))""",
    part=LETTERS["Rome 2"], answer="weather")


def messages_of(example: Example, delegates: bool) -> list[str]:
    """The conversation of an example's root, which delegates, or that of its child, which
    reads: texts of user and assistant in turn."""
    if delegates:
        user = f"{example.query}\n{describe(example.context, 'full')}"
        return [user, block(example.code)]
    query = example.query + ALONE
    return [f"{query}\n{describe(example.part, 'full')}", block("print(context)"),
            f"{example.part}\n\nThe question: {query}\n{GO_ON}",
            block(f"FINAL({json.dumps(example.answer)})")]


def opening(node: Node, query: str, context: Any, task: ModuleType,
            config) -> tuple[str, list[str], str]:
    """What opens a node: the system message, the example conversation (texts of user and
    assistant in turn), and the user's message; `task` is the question's."""
    if node.kind == "llm":
        return LEAF, [], query if context is None else f"{query}\n\n{as_text(context)}"
    tools = getattr(task, "TOOLS", ())
    user = f"{query}\n{describe(context, config.style)}"
    if config.style == "brief":
        names = "".join(f"{tool.__name__}, " for tool in tools)
        return BRIEF.format(tools=names), [], user

    # A child that could only ask models without a REPL is told to read.
    asks = config.max_nodes > 1 and node.depth < config.max_depth
    calls, strategy = "", getattr(task, "READING", "") if node.path else ""
    if asks:
        calls = CALLS.format(nodes=config.max_nodes - 1)
        strategy = getattr(task, "STRATEGY", "")
    system = getattr(task, "PROMPT", FULL).format(
        output=config.limits.output_chars, turns=config.max_turns,
        tokens=config.turn_tokens, calls=calls, tools=help_of(tools), strategy=strategy)
    return system, messages_of(getattr(task, "EXAMPLE", EXAMPLE), asks), user


def observation(seen: str, node: Node, query: str, config) -> str:
    """What follows a message: its output, the question once more, and what to do."""
    turn, turns = node.written + 1, config.max_turns
    short = query if len(query) <= REPEATED else query[:REPEATED] + " …"
    if config.style == "brief":
        return f"{seen}\n{turn}/{turns} {short}"
    shown = seen or "The block printed nothing."
    return f"{shown}\n\nThe question: {short}\n{LAST if turn == turns else GO_ON}"
