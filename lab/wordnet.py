"""The words of the task `definitions`: `python -m lab.wordnet DICT FILE`.

DICT is the directory of WordNet 3.0's files (data.noun and so on), for example from the
Debian package `wordnet-base`. FILE gets a line "word TAB class TAB definition" for
each noun that is kept, and the licence is written beside it. Kept are the common nouns of
CLASSES whose usual senses are all of one class. Left out is what makes the class
trivial (a definition that names it) or the words unfit to be shown (slurs).
"""
import os
import re
import sys
from collections import Counter

from runtime import console
from runtime.files import write_text

CLASSES = {  # WordNet's numbers and names of the lexicographer files
    "04": "act", "05": "animal", "06": "artifact", "07": "attribute", "08": "body",
    "10": "communication", "13": "food", "14": "group", "18": "person", "20": "plant",
    "26": "state", "27": "substance"}
MOST = 300  # words of a class: the most common ones
LEAST = 1  # uses of a word, in tagged texts or in other words' definitions
LENGTH = (15, 70)  # characters of a definition
OTHER = 5  # senses of other classes have at most a fifth of the uses
HEADER = 29  # lines at the top of each file: the licence, with numbers
GIVEAWAYS = {"person": {"someone"}}  # besides the name of a class and its plural
RUDE = re.compile("offens|slur|obscen|disparag|vulgar|derogat|sexual|copulat|prostitut")
TECHNICAL = re.compile(r"\b(genus|family|order|class|phylum) [A-Z]")


def rows_of(path: str) -> list[str]:
    with open(path, encoding="latin-1") as file:
        return [line.rstrip() for line in file if not line.startswith(" ")]


def read_senses(folder: str) -> dict:
    """{number of a synset: (class or its number, its spellings, whole gloss)}."""
    senses = {}
    for row in rows_of(f"{folder}/data.noun"):
        head, gloss = row.split(" | ", 1)
        offset, number, _, size, *rest = head.split()
        words = rest[:2 * int(size, 16):2]
        senses[offset] = (CLASSES.get(number, number), words, gloss)
    return senses


def uses_in_texts(folder: str) -> Counter:
    """{(noun, number of its sense): how often texts were tagged with it}."""
    uses = Counter()
    for row in rows_of(f"{folder}/cntlist.rev"):
        key, sense, count = row.split()
        word, _, rest = key.partition("%")
        if rest.startswith("1:"):  # a noun
            uses[word, int(sense)] = int(count)
    return uses


def uses_in_glosses(folder: str) -> Counter:
    """{word: how often definitions and examples use it}. Few animals and plants occur in
    the tagged texts, but an otter that is mentioned elsewhere is a common one."""
    uses = Counter()
    for part in ("noun", "verb", "adj", "adv"):
        for row in rows_of(f"{folder}/data.{part}"):
            uses.update(re.findall("[a-z]+", row.split(" | ", 1)[1]))
    return uses


def definition(gloss: str) -> str:
    """The gloss up to its first part, without remarks in brackets."""
    first = re.split("[;:]", re.sub(r"\([^)]*\)", "", gloss))[0]
    return " ".join(first.split()).rstrip(".,")


def fits(gloss: str, kind: str) -> bool:
    text = definition(gloss)
    told = {kind, f"{kind}s", *GIVEAWAYS.get(kind, ())}
    return (LENGTH[0] <= len(text) <= LENGTH[1] and not set("\"`'_/") & set(text)
            and not told & set(re.findall("[a-z]+", text.lower()))
            and not RUDE.search(gloss.lower()) and not TECHNICAL.search(text))


def choose(folder: str) -> list[tuple[str, str, str]]:
    """(word, class, definition), by word."""
    senses = read_senses(folder)
    tagged = uses_in_texts(folder)
    mentioned = uses_in_glosses(folder)
    adjectives = {row.split()[0] for row in rows_of(f"{folder}/index.adj")}
    found = {kind: [] for kind in CLASSES.values()}

    for row in rows_of(f"{folder}/index.noun"):
        word, _, number, *rest = row.split()
        offsets = rest[-int(number):]
        kind, spellings, gloss = senses[offsets[0]]
        if not re.fullmatch("[a-z]{3,12}", word) or word not in spellings:
            continue  # several words, or a name
        if kind not in found or word in adjectives or not fits(gloss, kind):
            continue

        of_class = Counter()
        for i, offset in enumerate(offsets, 1):
            of_class[senses[offset][0]] += tagged[word, i] + 1  # most are tagged nowhere
        uses = of_class.total()
        common = uses - len(offsets) + mentioned[word]
        if OTHER * (uses - of_class[kind]) <= uses and common >= LEAST:
            found[kind].append((-common, word, offsets[0]))

    chosen = []
    for kind, words in found.items():
        by_sense = {}  # synonyms have one definition, which is used once
        for _, word, offset in sorted(words):
            by_sense.setdefault(offset, word)
        for offset, word in list(by_sense.items())[:MOST]:
            chosen.append((word, kind, definition(senses[offset][2])))
    return sorted(chosen)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("lab.wordnet: give WordNet's directory and the file to write")
    folder, path = sys.argv[1:]
    try:
        rows = choose(folder)
        with open(f"{folder}/data.noun", encoding="latin-1") as file:
            header = [next(file).strip() for _ in range(HEADER)]
    except OSError as error:
        sys.exit(f"lab.wordnet: {error}")
    write_text(path, "".join("\t".join(row) + "\n" for row in rows))
    beside = os.path.join(os.path.dirname(path), "WORDNET_LICENCE")
    licence = [re.sub(r"^\d+ *", "", line) for line in header]
    write_text(beside, "\n".join(licence) + "\n")
    print(f"{path}: {len(rows)} words;", dict(Counter(kind for _, kind, _ in rows)))


if __name__ == "__main__":
    console.start(main)
