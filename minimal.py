"""A recursive language model, made from nothing and trained with GRPO, in one file.

The model answers a question about notes that it never reads as a whole. It writes Python,
in which the notes are the variable `context`, and its code calls the model again:

    root   reads   Sort the notes from "Kelso"
           writes  names = [n for n in context if "Kelso" in n]
                   kinds = await rlm_query_batched("Kind?", [context[n] for n in names])
                   FINAL(dict(zip(names, kinds)))
    child  reads   Kind?
           writes  print(context)
           reads   letter cloud otter evening corner
           writes  FINAL("animal")

Root and children are one model. Each is a conversation of its own, called a node: a child
reads its question and what its own code prints, and nothing of its parent. Only the root's
answer is scored, and every child inherits its advantage. Trees with better children score
higher, so these become more likely. --roots-only trains roots alone. One core, 40 seconds.
"""
import argparse, ast, copy, math, random, re, types, warnings  # noqa: E401
from functools import partial
import torch
import torch.nn.functional as F

# --- 1. The question, its score, and scripts ----------------------------------------------
# Code can find the notes from a place, as it is in their names. But no code here knows that
# an otter is an animal: that must be in the weights of a model which reads the note.
WORDS = {"animal": "otter heron badger falcon lizard beetle donkey turtle".split(),
         "plant": "fern clover nettle willow poplar daisy thistle cactus".split(),
         "tool": "hammer chisel pliers ladder shovel wrench anvil drill".split(),
         "food": "bread cheese soup noodle pancake sausage pudding omelet".split()}
KIND = {word: kind for kind, words in WORDS.items() for word in words}
OTHERS = "cloud window street letter number garden corner evening".split()
PLACES = "Alston Belper Camber Darley Epping Frome Garth Kelso".split()
HELDOUT = {(word, other) for i, word in enumerate(KIND) for j, other in enumerate(OTHERS)
           if (i + j) % 4 == 0}  # no note of the training has two such words

def kind_of(note):
    return next((KIND[word] for word in note.split() if word in KIND), "")

def make(heldout=False):
    """A question: its query, its context {name of a note: its words}, its right answer."""
    place, context = random.choice(PLACES), {}
    here = random.sample(range(8), random.randint(2, 3))
    for i in range(8):
        where = place if i in here else random.choice([p for p in PLACES if p != place])
        word, others = random.choice(list(KIND)), random.sample(OTHERS, 8)
        others.sort(key=lambda other: ((word, other) in HELDOUT) != heldout)
        words = random.sample([word, *others[:4]], 5)  # in any order
        context[f"{where} {i}"] = " ".join(words)
    gold = {name: kind_of(note) for name, note in context.items() if place in name}
    return f'Sort the notes from "{place}"', context, gold

def score(answer, gold):
    """The share of right kinds among all notes that answer or gold names: the reward."""
    answer = answer if isinstance(answer, dict) else {}
    right = sum(answer.get(name) == kind for name, kind in gold.items())
    return right / len(answer.keys() | gold.keys())

# Imitating scripts, good and bad, teaches the language. GRPO then chooses among them.
FIND = "names = [n for n in context if PLACE in n]\n"
ASK = 'kinds = await rlm_query_batched("Kind?", [context[n] for n in names])\n'
JOIN = "FINAL(dict(zip(names, kinds)))"
ROOT_SCRIPTS = [FIND + ASK + JOIN,  # the good one
                "names = list(context)\n" + ASK + JOIN,  # asks about all notes
                FIND + 'kinds = ["KIND" for n in names]\n' + JOIN]  # guesses
READ, ANSWER = "print(context)", 'FINAL("KIND")'

def demonstrate(nodes):
    """Scripts write a message into each node. Two of three children guess."""
    for node in nodes:
        text = random.choice([READ, ANSWER, ANSWER] if node.depth else ROOT_SCRIPTS)
        kind = random.choice(list(WORDS))
        if len(node.messages) > 1:  # a child that has read its note
            text, kind = ANSWER, kind_of(node.context)
        text = text.replace("KIND", kind).replace("PLACE", node.query.split()[-1])
        node.add(text, [*encode(text), END], 1)

# --- 2. A tokenizer, a decoder, a sampler -------------------------------------------------
# In comments: B rows, T tokens, D = WIDTH, H = HEADS, E = D / H, V = len(TOKENS).
TEXTS = [*ROOT_SCRIPTS, READ, ANSWER, 'Sort the notes from "Kind?"', "Kind?",
         *KIND, *OTHERS, *[f'"{word}"' for word in (*PLACES, *WORDS)]]

def split(text):
    return re.findall(r'"[^"]*"|\w+|\n|[^\w\s]', text)  # quoted, a word, or another sign

TOKENS = ["<unknown>", "<write>", "<end>", *sorted(set(split(" ".join(TEXTS))))]
WRITE, END = 1, 2  # the model writes after the one, and ends its message with the other

def encode(text):
    return [TOKENS.index(token) if token in TOKENS else 0 for token in split(text)]

def decode(ids):
    return " ".join(TOKENS[i] for i in ids if i != END).replace(" \n ", "\n")

WIDTH, HEADS, LAYERS, TURN_TOKENS, WINDOW = 64, 4, 2, 64, 192

def new_model():
    """The weights of a decoder by name."""
    shapes = {"embedding": (len(TOKENS), WIDTH), "position": (WINDOW, WIDTH)}
    for i in range(LAYERS):
        shapes |= {f"qkv{i}": (3 * WIDTH, WIDTH), f"out{i}": (WIDTH, WIDTH),
                   f"up{i}": (4 * WIDTH, WIDTH), f"down{i}": (WIDTH, 4 * WIDTH)}
    return {name: (torch.randn(shape) / math.sqrt(shape[1])).requires_grad_()
            for name, shape in shapes.items()}

def norm(x):
    return F.rms_norm(x, (WIDTH,))

def logits(model, ids, cache):
    """What may follow each token: ids (B, T) -> (B, T, V). Keys and values go into the
    cache, a dict, so that the next call needs only the one token that is new."""
    start = cache[0][0].shape[2] if cache else 0
    x = model["embedding"][ids] + model["position"][start:start + ids.shape[1]]  # B T D
    for i in range(LAYERS):
        qkv = F.linear(norm(x), model[f"qkv{i}"]).unflatten(2, (3, HEADS, -1))  # B T 3 H E
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # B H T E each
        if start:
            k, v = torch.cat((cache[i][0], k), 2), torch.cat((cache[i][1], v), 2)
        cache[i] = k, v
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=not start)  # B H T E
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), model[f"out{i}"])  # B T D
        hidden = F.linear(norm(x), model[f"up{i}"]).relu().square()  # B T 4D
        x = x + F.linear(hidden, model[f"down{i}"])  # B T D
    return F.linear(norm(x), model["embedding"])  # B T V

def batches(nodes):
    """Nodes of one length are a batch, so nothing is padded. Yields them and their ids."""
    for length in sorted({len(node.ids) for node in nodes}):
        batch = [node for node in nodes if len(node.ids) == length]
        yield batch, torch.tensor([node.ids for node in batch])  # B T

@torch.no_grad()
def sample(model, nodes):
    """The model writes a message into each node."""
    for batch, ids in batches(nodes):
        cache, drawn, ended = {}, [], torch.zeros(len(batch), 1, dtype=torch.bool)
        while len(drawn) < TURN_TOKENS and not ended.all():
            ids = torch.multinomial(logits(model, ids, cache)[:, -1].softmax(-1), 1)  # B 1
            drawn.append(ids)
            ended |= ids == END
        for node, message in zip(batch, torch.cat(drawn, 1).tolist()):
            if END in message:
                message = message[:message.index(END) + 1]
            node.add(decode(message), message, 1)

def log_probability(model, nodes):
    """{node: the log-probability of all that the model wrote in it}, with a gradient."""
    result = {}
    for batch, ids in batches(nodes):
        every = logits(model, ids[:, :-1], {}).log_softmax(-1)  # B T-1 V
        chosen = every.gather(2, ids[:, 1:, None])[:, :, 0]  # B T-1
        mask = torch.tensor([node.mask for node in batch])[:, 1:]
        result |= zip(batch, (chosen * mask).sum(1))
    return result

# --- 3. The recursion ---------------------------------------------------------------------
# A conversation is a coroutine. It yields a list of the nodes that need a message now: of
# itself, or of its children while its code awaits them. `collect` joins these lists over
# all trees, lets the model write for all, and resumes each.
CHILDREN = [8, 0]  # that a node at depth 0 and 1 can ask; more levels need more scripts
MAX_TURNS, SHOWN = 2, 8  # messages it writes; tokens that it reads: one note, not two

class Node:
    """One conversation. It grows only at its end, so it is one training sequence."""
    def __init__(self, query, context, depth=0):
        self.query, self.context, self.depth = query, context, depth
        self.messages = []  # (text, whether the model wrote it)
        self.ids, self.mask = [], []  # tokens; 1 for those that the model wrote, else 0
        self.children, self.answer = [], None

    def add(self, text, ids, written):
        self.messages.append((text, written))
        self.ids += ids
        self.mask += [written] * len(ids)

@types.coroutine  # so that code can `await` it; it is a generator still
def side_by_side(conversations):
    """All of them together. Yields the nodes that wait in any of them as one list."""
    while waiting := [node for one in conversations for node in next(one, [])]:
        yield waiting

async def ask(node, query, contexts):
    """What rlm_query_batched does in the code of a node: one child per context answers."""
    if not 1 <= len(contexts) <= CHILDREN[node.depth] - len(node.children):
        raise ValueError(f"{len(contexts)} children are refused")
    children = [Node(query, context, node.depth + 1) for context in contexts]
    node.children += children
    await side_by_side([converse(child) for child in children])
    return [child.answer for child in children]

def checked(code):
    """Nothing but the vocabulary guards this process. It has no dot, no colon, no operator,
    and of Python's functions list, dict and zip. Only loops in loops would be slow."""
    refused = [token for token in split(code) if token not in TOKENS]
    if refused or split(code).count("for") > 2:
        raise ValueError(f"{refused or 'many loops'} refused")
    return compile(code, "", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

def converse(node):
    """Up to its answer. Yields the nodes that wait for a message: it, or some below it."""
    printed, finals, text = [], [], node.query
    names = {"print": printed.append, "FINAL": finals.append,
             "rlm_query_batched": partial(ask, node),
             "context": copy.copy(node.context)}  # other trees have the same notes
    while not finals and len(node.messages) < 2 * MAX_TURNS:
        node.add(text, [*encode(text)[:SHOWN], WRITE], 0)
        yield [node]
        printed.clear()
        try:
            running = eval(checked(node.messages[-1][0]), names)
            if running:  # it has an `await`; other code has run to its end by now
                yield from running.__await__()
        except Exception as error:  # the model's mistakes are for the model to read
            printed.append(f"{type(error).__name__}: {error}")
        text = " ".join(part for part in printed if isinstance(part, str))
    node.answer = finals[0] if finals else None

def collect(questions, write):
    """One tree per question: roots, rewards. `write` adds a message to nodes that wait."""
    roots = [Node(query, context) for query, context, _ in questions]
    for waiting in side_by_side([converse(root) for root in roots]):
        write(waiting)
    rewards = [score(root.answer, gold) for root, (*_, gold) in zip(roots, questions)]
    return roots, torch.tensor(rewards, dtype=torch.float64)

# --- 4. The training ----------------------------------------------------------------------
WARMUP_STEPS, WARMUP_RATE, WARMUP_TREES = 600, 3e-3, 8  # per step
STEPS, RATE, QUESTIONS, GROUP = 80, 1e-3, 8, 8  # GROUP: trees of a question
EPSILON, LENGTH_CONSTANT, MAX_NORM = 1e-2, 64, 0.2  # at 1.0 a model forgot to ask

def advantages(rewards):
    """How many deviations each tree is better than the mean of its group."""
    groups = rewards.view(-1, GROUP)
    deviation = groups.std(1, correction=0, keepdim=True) + EPSILON
    return ((groups - groups.mean(1, keepdim=True)) / deviation).flatten().tolist()

def inherit(node, advantage, weight=1.0):
    """Yields each node of a tree, the advantage of its root, and its weight. k children
    share their parent's weight: otherwise trees that ask much would decide alone."""
    yield node, advantage, weight
    for child in node.children:
        yield from inherit(child, advantage, weight / len(node.children))

def policy_loss(model, roots, rewards, roots_only):
    """-J, where J is the mean of J(root, A) over all trees, and for k children y_i of y
    J(y, A) = c * A * log_probability(y) + (1 / k) * sum_i J(y_i, A).
    PPO has the ratio p / p_old of each token in place of log p. In the first update of a
    batch it is 1, with the gradient of log p. There is no second: so nothing is clipped."""
    credits = [given for root, advantage in zip(roots, advantages(rewards))
               for given in inherit(root, advantage) if root is given[0] or not roots_only]
    logprobs = log_probability(model, [node for node, _, _ in credits])
    J = sum(weight * advantage * logprobs[node] for node, advantage, weight in credits)
    return -J / (LENGTH_CONSTANT * len(roots))

def optimizer_step(optimizer, loss, rate):
    loss.backward()
    optimizer.param_groups[0]["lr"] = rate
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()

def show(node):
    """Prints a tree: · is what a node reads, » what it writes."""
    for text, written in node.messages:
        mark = "    " * node.depth + ("» " if written else "· ")
        print(mark + text.replace("\n", f"\n{mark}"))
    for child in node.children:
        show(child)

def evaluate(model, questions, when):
    """The mean reward of held-out questions. Prints the first tree."""
    roots, rewards = collect(questions, lambda nodes: sample(model, nodes))
    print(f"\nA tree {when} GRPO, with reward {rewards[0]:.2f}:")
    show(roots[0])
    right = [child.answer == kind_of(child.context) for root in roots
             for child in root.children if child.context in root.context.values()]
    print(f"Children that are right {when} GRPO: {sum(right) / max(1, len(right)):.2f}\n")
    return rewards.mean()

def main():
    parser = argparse.ArgumentParser(description="Train a recursive language model.")
    parser.add_argument("--roots-only", action="store_true", help="children do not learn")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    warnings.simplefilter("ignore")  # Python warns of code that the model writes
    model = new_model()
    optimizer = torch.optim.AdamW(model.values(), betas=(0.9, 0.95), weight_decay=0.0)
    heldout = [make(heldout=True) for _ in range(200)]

    for step in range(WARMUP_STEPS):
        roots, _ = collect([make() for _ in range(WARMUP_TREES)], demonstrate)
        nodes = [node for root in roots for node, _, _ in inherit(root, 0.0)]
        loss = -sum(log_probability(model, nodes).values()) / len(nodes) / LENGTH_CONSTANT
        optimizer_step(optimizer, loss, WARMUP_RATE * (1 - step / WARMUP_STEPS))
    before = evaluate(model, heldout, "before")
    for step in range(STEPS):
        questions = [question for _ in range(QUESTIONS) for question in [make()] * GROUP]
        roots, rewards = collect(questions, lambda nodes: sample(model, nodes))
        loss = policy_loss(model, roots, rewards, args.roots_only)
        optimizer_step(optimizer, loss, RATE * (1 - step / STEPS))
        if step % 10 == 9:
            print(f"GRPO, step {step + 1}: reward {rewards.mean():.2f}")
    after = evaluate(model, heldout, "after")
    print(f"held out: {before:.2f} before, {after:.2f} after")

if __name__ == "__main__":
    main()

# --- 5. What the real program does otherwise ----------------------------------------------
# tasks/     requests that people wrote; questions that need children of children
# repl.py    all of Python, in a process per node; FINAL ends the code, here it runs on
# rlm.py     coroutines; budgets; a node reads its question again below what it printed
# model.py   Llama and Qwen: rotary positions, grouped heads, a gated MLP; real checkpoints
# sampler.py continuous batching; pages of keys and values, shared between prefixes
# grpo.py    several updates per batch, so clipped ratios; a KL term; a weight for rounding
# training/  a step that makes the model forget is shortened; engine/: several GPUs
