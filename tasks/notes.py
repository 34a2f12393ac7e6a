"""notes: what each note from one place is about.

`Sort the notes from "Kelso".` Which notes are from the place can be searched for. Whether
one is about an animal, a plant, a tool or a food has to be read: no note says so, and the
words are too many to be written as code. The scripts of the warm-up print whole notes, and
a print shows one or two, so the good ones ask children. Not to print more than the fifth
word of each note is a way without children that no script shows.

Gold is {note id: kind}. The score is the share of right kinds among all notes that the
answer or the gold names, so an echo scores 0 and a guess about a quarter. The words are
English: a pretrained model knows them, one made from nothing learns them from the scripts.
Each place has words that no note from there holds in training. In held-out questions all
notes from the place hold one of these.
"""
from tasks.in_repl import TOOLS, block, script, word_of
from tasks.text import characters, how_many

__all__ = ["TOOLS"]

STRATEGY = """\
The context is a dict {note id: text}. Return a dict {note id: kind} of the notes from the \
place in question, and no others; a kind is animals, plants, tools or foods.
1. Find the notes from the place with code: each names its place in its first line.
2. Let a child read each of them: rlm_query_batched("Kind? Answer with animals, plants, \
tools or foods.", [context[i] for i in ids]).
3. Join ids and answers, and call FINAL with the dict."""

WORDS = {
    "animals": "otter heron badger falcon lizard beetle donkey turtle rabbit spider salmon "
               "weasel magpie hamster walrus ferret pigeon jackal monkey goose sparrow "
               "tiger camel moose raven squirrel penguin dolphin",
    "plants": "fern clover nettle willow poplar daisy thistle cactus orchid lily tulip "
              "juniper heather ivy moss birch maple cedar poppy lavender reed bamboo hazel "
              "laurel bracken jasmine lotus spruce",
    "tools": "hammer chisel pliers ladder shovel wrench anvil drill sickle trowel hatchet "
             "mallet tongs crowbar lathe rasp rake pulley scissors compass bellows gimlet "
             "plough clamp winch caliper spade pickaxe",
    "foods": "bread cheese soup noodle pancake sausage pudding omelet biscuit porridge "
             "waffle custard muffin pretzel dumpling butter yogurt salad pastry toffee "
             "bacon risotto sorbet burger goulash chutney gravy fudge",
}
WORDS = {kind: words.split() for kind, words in WORDS.items()}
KIND = {word: kind for kind, words in WORDS.items() for word in words}

ADJECTIVES = "Old New Small Large Red Grey Plain Broken".split()
WHEN = ("by the gate", "by the river", "on the roof", "in the yard", "at noon",
        "in the rain", "last week", "in the hall")
PLACES = (
    "Alston Barlow Belper Camber Clovelly Darley Dunster Elmsby Epping Fenton Frome "
    "Garth Glossop Hawes Hexley Ilkley Ironby Jarrow Kelso Keswick Ludlow Lydford Marlow "
    "Melton Newby Norby Oakham Otley Penrith Pickering Quorn Ripon Rugby Selby Stroud "
    "Thirsk Ulver Varley Whitby Yarm").split()

TOKENS = 608  # 45 notes
NOTES = (6, 150)  # of a question of the usual length
NOTE_CHARS = 54  # on average
HERE = (2, 5)  # notes from the place

# All but the longest notes can be printed whole. Then one message is left, to answer.
TINY = {"max_turns": 2, "limits": {"output_chars": 78}}


def make(rng, tokens=None, heldout=False):
    number = how_many(rng, *NOTES)
    if tokens is not None:
        number = round(characters(tokens, TOKENS) / NOTE_CHARS)
    place = rng.choice(PLACES)
    here = rng.sample(range(number), min(number, rng.randint(*HERE)))

    context, gold = {}, {}
    for i in range(number):
        where = place
        while i not in here and where == place:
            where = rng.choice(PLACES)
        word = rng.choice(list(KIND))
        while is_heldout(where, word) != (heldout and i in here):
            word = rng.choice(list(KIND))
        text = " ".join(f"{rng.choice(ADJECTIVES)} {word} {rng.choice(WHEN)}."
                        for _ in range(rng.randint(1, 2)))
        context[f"n{i}"] = f"Notes from {where}.\n{text}"
        if i in here:
            gold[f"n{i}"] = KIND[word]
    return f'Sort the notes from "{place}".', context, gold


def is_heldout(place: str, word: str) -> bool:
    return (PLACES.index(place) + 3 * list(KIND).index(word)) % 5 == 0


def score(task, answer):
    if not isinstance(answer, dict) or not answer:
        return 0.0
    right = sum(answer.get(name) == kind for name, kind in task.answer.items())
    return right / len(answer.keys() | task.answer.keys())


def part_score(task, part, answer):
    """For a child that was given one note: whether it says what that one is about."""
    if not isinstance(part, str) or part not in task.context.values():
        return None
    return float(answer == kind_of(part))


def kind_of(text: str) -> str:
    return next((kind for word, kind in KIND.items() if f" {word} " in text), "")


# Shares of good and bad strategies. Only filter with read is right: which is which is for
# the reinforcement to find out.
ROOT_SCRIPTS = {"filter": 0.4, "all": 0.15, "one": 0.15, "read": 0.2, "forget": 0.1}
CHILD_SCRIPTS = {"read": 0.4, "guess": 0.45, "look": 0.15}


def demonstrate(task, node, rng):
    scripts = CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS
    name = rng.choices(list(scripts), scripts.values())[0]
    return strategy_code(task, node, name, rng.choice(list(WORDS)))


def strategy_code(task, node, name: str, guess: str = "") -> str:
    find = f'ids = [i for i, p in context.items() if "{word_of(task)}" in p]\n'
    ask = "ks = rlm_query_batched('Kind?', [context[i] for i in ids])\n"
    join = "FINAL(dict(zip(ids, ks)))"
    looked = any(turn.role == "assistant" for turn in node.turns)
    if name == "read" and looked and node.depth:
        return block(f'FINAL("{kind_of(node.turns[-1].text)}")')
    if name == "read" and looked:
        notes = node.turns[-1].text.split("Notes from ")[1:]
        return block(f"ks = {[kind_of(note) for note in notes]}\n{join}")
    if name == "read" and not node.depth:
        return block(f"{find}print([context[i] for i in ids])")
    return block({
        # a root: children read the notes from the place, or all, or one, or none
        "filter": find + ask + join,
        "all": "ids = list(context)\n" + ask + join,
        "one": find + "ids = ids[:1]\n" + ask + join,
        "forget": find + "print(len(ids))",
        # a child: it reads, it does not, it reads and does not answer
        "read": "print(context)",
        "guess": f'FINAL("{guess}")',
        "look": "print(context)",
    }[name])


def oracle(task, node):
    return strategy_code(task, node, "read" if node.depth else "filter")


def first_kind(context, word):
    return {name: "animals" for name, text in context.items() if word in text}


def keyword(task, node):
    return script(first_kind, word_of(task))
