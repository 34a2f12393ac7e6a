"""definitions: which words of a dictionary are of a class.

`List the words of class "animal".` The context is a list of pages of a few lines, like
"otter: freshwater carnivorous mammal". Words, definitions and classes are WordNet's
(data/wordnet.tsv): real text with labels by people. No definition names the class of its
word, so the pages have to be read.

Gold is a list of words. The score is the F1 over words. An echo of all words scores
2p/(1+p), where p is the share of gold words, about 0.07. A fifth of the words is held out:
held-out questions have only these, questions of training none of them.
"""
import re
import zlib
from dataclasses import replace
from itertools import islice
from pathlib import Path

from tasks.in_repl import block, word_of
from tasks.text import ALONE, Example, how_many, pick, strings_in

STRATEGY = """\
The context is a list of pages of a dictionary. No definition names its class: searching \
with code finds little. Give each page to a child, and answer with the list of their \
lists. The classes are act, animal, artifact, attribute, body, communication, food, \
group, person, plant, state and substance."""
READING = """\
The context is a page of a dictionary, with lines "word: definition". Print it. Then \
answer with the list of those words that have the class in question, [] if there are \
none. The classes are act, animal, artifact, attribute, body, communication, food, group, \
person, plant, state and substance."""
PEOPLE = """\
Ada: keeps bees on a farm near Oslo and sells honey
Tom: plays the violin at weddings and in a cafe
Rob: drives a bus through the hills from May to October
Eva: sings in the choir of a small church"""
EXAMPLE = Example(
    query="Which of these people make music? Read what they do. Answer with a list of the "
          "names.",
    context=[PEOPLE, "Max: mends roofs\nIda: sells fish at the market"],
    code=f'FINAL(rlm_query_batched(question + "{ALONE}", context))',
    part=PEOPLE,
    answer=["Tom", "Eva"])

DATA = Path(__file__).parent / "data" / "wordnet.tsv"
ROWS = [line.split("\t") for line in DATA.read_text("utf-8").splitlines()]
KIND = {word: kind for word, kind, _ in ROWS}
TEXT = {word: text for word, _, text in ROWS}

TOKENS = 437  # 5.5 pages
PAGE_TOKENS = 6 * 53.9 / 4  # on average
MOST = 2_500  # 31 pages: with the root, as many nodes as a tree may have by default

# A page is printed whole, and each page has a child.
TINY = {"max_nodes": 32, "turn_tokens": 128, "tree_tokens": 6_000,
        "limits": {"output_chars": 700}}


def is_heldout(word: str) -> bool:
    return zlib.crc32(word.encode()) % 5 == 0


def make(rng, tokens=None, heldout=False):
    pages = how_many(rng, 3, 9, tokens, PAGE_TOKENS)
    sizes = [rng.randint(4, 8) for _ in range(pages)]  # lines of each
    number = max(1, round(sum(sizes) * rng.uniform(0.04, 0.11)))  # of the class

    words = sorted((w for w in KIND if is_heldout(w) == heldout), key=KIND.get)
    asked = rng.choice(sorted(set(KIND.values())))
    others = [word for word in words if KIND[word] != asked]
    drawn = rng.sample([word for word in words if KIND[word] == asked], number)
    drawn += rng.sample(others, sum(sizes) - number)
    rng.shuffle(drawn)

    lines = iter([f"{word}: {TEXT[word]}" for word in drawn])
    context = ["\n".join(islice(lines, size)) for size in sizes]
    gold = [word for word in drawn if KIND[word] == asked]
    return f'List the words of class "{asked}".', context, gold


def in_words(query):
    kind = re.search('"(.*)"', query)[1]
    return (f'Which words of this dictionary mean something of the class "{kind}"? Read '
            "their definitions. Answer with a list of the words.")


def score(task, answer):
    """F1 over the different words of an answer: nested lists, or text with commas or line
    ends between the words."""
    text = "\n".join(strings_in(answer))
    words = {part.strip() for part in re.split("[,\n]", text)} - {""}
    both = len(words & set(task.answer))
    return 2 * both / (len(words) + len(task.answer)) if both else 0.0


def part_score(task, part, answer):
    """For a child that was given one page: its F1 there. If the page has no word of the
    class, an empty list scores 1."""
    if part not in task.context:
        return None
    gold = [word for word in words_on(part) if word in task.answer]
    return score(replace(task, answer=gold), answer) if gold else float(answer == [])


def words_on(text: str) -> list[str]:
    """The words at the beginnings of lines."""
    return re.findall("^([a-z]+): ", text, re.MULTILINE)


# Good and bad scripts with their shares. Only "all" with "read" is right. Most children
# read, because that takes long to learn. None echoes: that scores more than reading badly.
QUERY = """'List the words of class "CLASS".'"""
ROOT_SCRIPTS = {
    "all": (0.4, f"FINAL(rlm_query_batched({QUERY}, context))"),
    "one": (0.25, f"FINAL(rlm_query({QUERY}, context[0]))"),
    "some": (0.2, f"FINAL(rlm_query_batched({QUERY}, context[:2]))"),
    "forget": (0.15, "print(len(context))"),
}
CHILD_SCRIPTS = {
    "read": (0.75, "print(context)"),
    "first": (0.15, "print(context)"),  # and then it judges the first word alone
    "none": (0.1, "FINAL([])"),
}


def demonstrate(task, node, rng):
    name = pick(CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS, rng)
    return strategy_code(task, node, name)


def strategy_code(task, node, name: str) -> str:
    kind = word_of(task)
    if node.depth and node.written:
        words = [word for word in words_on(node.turns[-1].text) if word in KIND]
        return block(label_code(words[:1] if name == "first" else words, kind))
    _, code = (CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS)[name]
    return block(code.replace("CLASS", kind))


def label_code(words: list[str], kind: str) -> str:
    """A line "word class" for each word, so that reading is one small step per line, and an
    answer with the words of one class."""
    lines = "\n".join(f"{word} {KIND[word]}" for word in words)
    chosen = f's.split()[0] for s in kinds.split("\\n") if s.endswith(" {kind}")'
    return f'kinds = """\n{lines}\n"""\nFINAL([{chosen}])'


def oracle(task, node):
    return strategy_code(task, node, "read" if node.depth else "all")
