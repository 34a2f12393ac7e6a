"""notes: what each note from one place is about.

`Sort the notes from "Kelso".` Code can find the notes from the place. To sort them a model
has to read: one word of a note is an animal, a plant, a tool or a food, and the others are
none of these. A message prints at most the length of one note, so the good scripts use
children. There are ways without children, which no script shows.

Gold is {name: kind}. The score is the share of right kinds among all notes that the
answer or the gold names. So an echo scores 0, and a guess about a quarter. Some pairs of a
place and a word are held out: no note of training has such a pair, and in held-out
questions each note from the place has one.
"""
import re

from tasks.in_repl import block, word_of
from tasks.text import how_many, pick

STRATEGY = """\
The context is a dict {name of a note: its words}. Find the notes from the place with \
code: it is in their names. Let a child read each of them. Join names and answers."""

WORDS = {
    "animals": "otter heron badger falcon lizard beetle donkey turtle rabbit spider "
               "salmon weasel",
    "plants": "fern clover nettle willow poplar daisy thistle cactus orchid lily tulip "
              "juniper",
    "tools": "hammer chisel pliers ladder shovel wrench anvil drill sickle trowel "
             "hatchet mallet",
    "foods": "bread cheese soup noodle pancake sausage pudding omelet biscuit "
             "porridge waffle custard",
}
WORDS = {kind: words.split() for kind, words in WORDS.items()}
KIND = {word: kind for kind, words in WORDS.items() for word in words}

OTHERS = (
    "cloud window street letter number garden corner summer winter minute morning evening "
    "shadow silence story valley island harbor river ceiling chimney cellar attic fence "
    "bridge tunnel tower castle palace temple market museum library office factory "
    "station airport pocket medal poem thunder rainbow desert canyon glacier volcano "
    "ocean storm").split()
PLACES = (
    "Alston Barlow Belper Camber Clovelly Darley Dunster Elmsby Epping Fenton Frome "
    "Garth Glossop Hawes Hexley Ilkley Ironby Jarrow Kelso Keswick Ludlow Lydford Marlow "
    "Melton Newby Norby Oakham Otley Penrith Pickering Quorn Ripon Rugby Selby Stroud "
    "Thirsk Ulver Varley Whitby Yarm").split()

EVERY = [*KIND, *OTHERS]

TOKENS = 387  # 45 notes
NOTE_TOKENS = 34.4 / 4  # on average
NOTE_WORDS = 5
HERE = (2, 4)  # notes from the place: at least and at most

# The longest note can be printed whole; then one message is left, to answer.
TINY = {"max_turns": 2, "limits": {"output_chars": 42}}


def is_heldout(place: str, word: str) -> bool:
    return (PLACES.index(place) + 3 * EVERY.index(word)) % 5 == 0


# The words of notes from other places. How often a word occurs tells nothing.
ANY = {place: [word for word in EVERY if not is_heldout(place, word)] for place in PLACES}


def make(rng, tokens=None, heldout=False):
    number = how_many(rng, 6, 150, tokens, NOTE_TOKENS)
    place = rng.choice(PLACES)
    here = rng.sample(range(number), rng.randint(*HERE))

    context, gold = {}, {}
    for i in range(number):
        if i in here:
            where, words = place, rng.sample(OTHERS, NOTE_WORDS - 1)
            word = rng.choice([w for w in KIND if is_heldout(place, w) == heldout])
            words.insert(rng.randrange(NOTE_WORDS), word)
            gold[f"{place} {i}"] = KIND[word]
        else:
            where = rng.choice([other for other in PLACES if other != place])
            words = rng.sample(ANY[where], NOTE_WORDS)
        context[f"{where} {i}"] = " ".join(words)
    return f'Sort the notes from "{place}".', context, gold


def in_words(query):
    place = re.search('"(.*)"', query)[1]
    return (f'What are the notes from "{place}" about: animals, plants, tools or foods? '
            "One word of a note tells. Answer with a dict {name of the note: one of these "
            "four}.")


def score(task, answer):
    if not isinstance(answer, dict) or not answer:
        return 0.0
    right = sum(answer.get(name) == kind for name, kind in task.answer.items())
    return right / len(answer.keys() | task.answer.keys())


def part_score(task, part, answer):
    """For a child that was given one note: whether it says what the note is about."""
    if part not in task.context.values():
        return None
    return float(answer == kind_of(part))


def kind_of(text: str) -> str:
    words = re.findall(r"[a-z]+", text)
    return next((KIND[word] for word in words if word in KIND), "")


FIND = 'ids = [i for i in context if "PLACE" in i]\n'
ASK = "ks = rlm_query_batched('Kind?', [context[i] for i in ids])\n"
JOIN = "FINAL(dict(zip(ids, ks)))"

# Good and bad scripts with their shares. Only "filter" with "read" is right.
ROOT_SCRIPTS = {  # children read the notes from the place, or all, or one, or none
    "filter": (0.45, FIND + ASK + JOIN),
    "all": (0.15, "ids = list(context)\n" + ASK + JOIN),
    "one": (0.2, FIND + "ids = ids[:1]\n" + ASK + JOIN),
    "read": (0.12, FIND + 'print("\\n".join(context[i] for i in ids))'),
    "forget": (0.08, FIND + "print(len(ids))"),
}
CHILD_SCRIPTS = {  # it reads, it guesses, it reads and does not answer
    "read": (0.5, "print(context)"),
    "guess": (0.4, 'FINAL("GUESS")'),
    "look": (0.1, "print(context)"),
}


def demonstrate(task, node, rng):
    name = pick(CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS, rng)
    return strategy_code(task, node, name, rng.choice(list(WORDS)))


def strategy_code(task, node, name: str, guess: str = "") -> str:
    seen = node.turns[-1].text
    if name == "read" and node.written:
        if node.depth:
            return block(f'FINAL("{kind_of(seen)}")')
        kinds = [kind_of(line) for line in seen.split("\n")]
        return block(f"ks = {[kind for kind in kinds if kind]}\n{JOIN}")
    _, code = (CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS)[name]
    return block(code.replace("PLACE", word_of(task)).replace("GUESS", guess))


def oracle(task, node):
    return strategy_code(task, node, "read" if node.depth else "filter")
