"""definitions: which words of a dictionary are of a class.

`List the words of class "animal".` The context is a list of pages, each of a few lines like
"otter: freshwater carnivorous mammal". Words, definitions and classes are WordNet's
(data/wordnet.tsv, made by lab/wordnet.py): real text with labels by people. No definition
names the class of its word, so what a search finds is little; it has to be read.

Gold is a list of words. The score is the F1 over words: an echo of all of them scores
2p/(1+p), p being their share, about 0.07. A fifth of the words is held out: held-out
questions consist of these alone, and no question of training has one of them.

A child that reads copies each word and writes its class after it. Code then picks the words
of the class in question. So reading is one small step per line, and a script that is learnt
from tells something about each line, not only about the few that are wanted.
"""
import functools
import os
import re
import zlib

from tasks.in_repl import TOOLS, block, script, word_of
from tasks.text import characters, how_many, pick, strings_in

__all__ = ["TOOLS"]

STRATEGY = """\
The context is a list of pages of a dictionary, with lines "word: definition". Return a \
list of the words of the class in question. The classes are act, animal, artifact, \
attribute, body, communication, food, group, person, plant, state and substance. No \
definition names its class: searching with code finds little, read instead.
1. Give each page to a child: rlm_query_batched(question, context), and call FINAL with \
the list of their lists.
2. A child has one page as its context (a str). It prints the page. In its next message it \
writes each word with its class behind it, then gives FINAL the list of those words that \
have the class in question, [] if there are none."""

DATA = os.path.join(os.path.dirname(__file__), "data", "wordnet.tsv")

PAGES = (3, 9)  # of a question of the usual length
LINES = (4, 8)  # of a page
SHARE = (0.04, 0.11)  # of the words are of the class in question
PAGE_CHARS = 6 * 53.9  # on average
TOKENS = 437  # 5.5 pages
MOST = 2_500  # 31 pages: with the root, as many nodes as a tree may have by default

# A page is printed whole, and each page has a child.
TINY = {"max_nodes": 32, "turn_tokens": 128, "tree_tokens": 6_000,
        "limits": {"output_chars": 700}}


@functools.cache
def dictionary() -> dict[str, tuple[str, str]]:
    """{word: (class, definition)}, read once."""
    with open(DATA, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return {word: (kind, text) for word, kind, text in rows}


@functools.cache
def words_of(heldout: bool) -> dict[str, list[str]]:
    """{class: its words} of the words that are held out, or of the others."""
    found = {}
    for word, (kind, _) in dictionary().items():
        if is_heldout(word) == heldout:
            found.setdefault(kind, []).append(word)
    return dict(sorted(found.items()))


def is_heldout(word: str) -> bool:
    return zlib.crc32(word.encode()) % 5 == 0


def make(rng, tokens=None, heldout=False):
    pages = how_many(rng, *PAGES)
    if tokens is not None:
        pages = round(characters(tokens, TOKENS, MOST) / PAGE_CHARS)
    sizes = [rng.randint(*LINES) for _ in range(pages)]
    number = max(1, round(sum(sizes) * rng.uniform(*SHARE)))

    words = words_of(heldout)
    asked = rng.choice(list(words))
    others = [word for kind in words if kind != asked for word in words[kind]]
    drawn = rng.sample(words[asked], number)
    drawn += rng.sample(others, sum(sizes) - number)
    rng.shuffle(drawn)

    lines = [f"{word}: {dictionary()[word][1]}" for word in drawn]
    ends = [sum(sizes[:i + 1]) for i in range(pages)]
    context = ["\n".join(lines[end - size:end]) for size, end in zip(sizes, ends)]
    gold = [word for word in drawn if dictionary()[word][0] == asked]
    return f'List the words of class "{asked}".', context, gold


def score(task, answer):
    return f1(answer, task.answer)


def part_score(task, part, answer):
    """For a child that was given one page: its F1 there. If the page has no word of the
    class, an empty list scores 1."""
    if not isinstance(part, str) or part not in task.context:
        return None
    gold = set(task.answer) & set(words_on(part))
    return f1(answer, gold) if gold else float(answer == [])


def f1(answer, gold) -> float:
    """Over the different words of an answer: nested lists of them, or text with commas or
    line ends between them. What is no word of the context counts as a wrong one."""
    text = "\n".join(strings_in(answer))
    words = {part.strip() for part in re.split("[,\n]", text)} - {""}
    both = len(words & set(gold))
    return 2 * both / (len(words) + len(gold)) if both else 0.0


def words_on(text: str) -> list[str]:
    """The words at the beginnings of lines. What a REPL says besides has none."""
    return re.findall("^([a-z]+): ", text, re.MULTILINE)


# Shares of good and bad strategies. Only all with read is right: which is which is for the
# reinforcement to find out. Most children read, as reading takes long to learn. None echoes
# its words: that pays 0.13 without reading, more than a policy that reads badly gets, and a
# pretrained model that had seen it ended there (docs/results.md).
ROOT_SCRIPTS = {"all": 0.4, "one": 0.25, "some": 0.2, "forget": 0.15}
CHILD_SCRIPTS = {"read": 0.75, "first": 0.15, "none": 0.1}


def demonstrate(task, node, rng):
    scripts = CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS
    return strategy_code(task, node, pick(scripts, rng))


def strategy_code(task, node, name: str) -> str:
    asked = word_of(task)
    ask = f"""'List the words of class "{asked}".'"""
    if node.depth and any(turn.role == "assistant" for turn in node.turns):
        words = words_on(node.turns[-1].text)
        kinds = {word: dictionary()[word][0] for word in words if word in dictionary()}
        if name == "first":
            kinds = dict(list(kinds.items())[:1])
        return block(label_code(kinds, asked))
    return block({
        # a root: children read all pages, or one, or two
        "all": f"FINAL(rlm_query_batched({ask}, context))",
        "one": f"FINAL(rlm_query({ask}, context[0]))",
        "some": f"FINAL(rlm_query_batched({ask}, context[:2]))",
        "forget": "print(len(context))",
        # a child: it reads all, or the first line; it does not look
        "read": "print(context)",
        "first": "print(context)",
        "none": "FINAL([])",
    }[name])


def label_code(kinds: dict[str, str], asked: str) -> str:
    """A line "word class" for each word, and an answer with those of the class asked for.

    In a text, not in a dict: half of the tokens of a dict are quotes and commas."""
    lines = "\n".join(f"{word} {kind}" for word, kind in kinds.items())
    chosen = f's.split()[0] for s in kinds.split("\\n") if s.endswith(" {asked}")'
    return f'kinds = """\n{lines}\n"""\nFINAL([{chosen}])'


def oracle(task, node):
    return strategy_code(task, node, "read" if node.depth else "all")


def words_with(context, kind):
    lines = [line for page in context for line in page.split("\n")]
    return [line.split(":")[0] for line in lines if kind in line]


def keyword(task, node):
    return script(words_with, word_of(task))
