"""Four tasks in the style of RULER: what a sample of each hides in its text, and asks.

The designs are those of Hsieh et al. 2024 (arXiv:2404.06654, section 3): single, multi-key and multi-value needles in
prose, and variable tracking over four hops. The wording is ours. In variable tracking so are the text, prose where
RULER repeats a few sentences, and the chains that distract, of which RULER's default has none; its worked example is
left out. So scores compare with each other, not with published ones.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from dustin_hf.eval.ruler.words import fresh

ADJECTIVES = (
    "blunt brittle chipped cracked crooked dented dusty faded foldable frosted gilded glossy hollow knotted lopsided "
    "oiled painted patched polished quilted rusty scratched slender spotted striped tarnished threadbare varnished "
    "velvet waxed woven wrinkled"
).split()
NOUNS = (
    "abacus accordion armchair bagpipe binoculars birdcage bobbin colander compass corkscrew doorbell easel flask "
    "funnel gramophone hammock hourglass kaleidoscope kite lampshade magnet mandolin metronome padlock parasol "
    "snowglobe sundial telescope thimble trombone typewriter wheelbarrow"
).split()
# Digits of a hidden number and of a variable's value, letters of a variable's name, as RULER has them.
TAG_DIGITS, VALUE_DIGITS, NAME_LETTERS = 7, 5, 5
# Variables of a chain: one that is assigned a number, and four hops. One chain is asked for, the others distract.
VARIABLES, CHAINS = 5, 3

TAGS = (
    "Somewhere in the following text, tag numbers of a few things are mentioned, each in a sentence of its own. Keep "
    "them in mind while you read: you will be asked about them.\n\n"
)
TAG = " One tag number of the {key} is {value}."
WHICH_TAG = "\n\nAccording to the text above, what is the tag number of the {key}?"
WHICH_TAGS = "\n\nAccording to the text above, what are all the tag numbers of the {key}?"
THE_TAG = "According to the text, the tag number of the {key} is"
THE_TAGS = "According to the text, the tag numbers of the {key} are"

ASSIGNMENTS = (
    "Assignments to variables are scattered through the following text. Some give a variable a number, others give it "
    "what another variable holds. Keep track of them while you read: you will be asked about them.\n\n"
)
ASSIGNMENT = " VAR {name} = {source}."
WHICH_VARIABLES = (
    "\n\nAccording to the assignments above, {count} variables hold {value}, directly or by way of other variables. "
    "Which ones are they?"
)
THE_VARIABLES = "According to the assignments, the {count} variables that hold {value} are"


@dataclass(frozen=True, slots=True)
class Facts:
    """What one sample hides in its text, and asks.

    Args:
        instruction: in front of the text.
        needles: sentences to hide in the text, in this order; a space in front, as in running text.
        question: behind the text.
        prefix: the start of the answer, for a model to go on with.
        answers: words or numbers, all of which are asked for.
    """

    instruction: str
    needles: tuple[str, ...]
    question: str
    prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Args:
        name: of RULER's task of that kind.
        draw: facts from a random generator and the words not to be used, as from `held_words`.
        max_new_tokens: the longest answer.
    """

    name: str
    draw: Callable[[random.Random, str], Facts]
    max_new_tokens: int


def task_of(name: str) -> Task:
    """The task of that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in TASKS:
        raise ValueError(f"there is no RULER task {name!r} here; expected one of {', '.join(TASKS)}")
    return TASKS[name]


def _retrieval(rng: random.Random, held: str, keys: int, values: int) -> Facts:
    """Numbers of things, `values` for each of `keys`; those of one thing are asked for."""
    things = fresh(lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", keys, held)
    numbers = fresh(partial(_number, rng, TAG_DIGITS), keys * values, held)
    needles = [TAG.format(key=key, value=value) for key, value in zip(things * values, numbers)]
    rng.shuffle(needles)
    question, prefix = (WHICH_TAG, THE_TAG) if values == 1 else (WHICH_TAGS, THE_TAGS)
    return Facts(
        instruction=TAGS,
        needles=tuple(needles),
        question=question.format(key=things[0]),
        prefix=prefix.format(key=things[0]),
        answers=tuple(numbers[::keys]),
    )


def _tracking(rng: random.Random, held: str) -> Facts:
    """Chains of assignments, mixed, each in its order; the variables of one are asked for."""
    names = fresh(lambda: "".join(rng.choices(string.ascii_uppercase, k=NAME_LETTERS)), CHAINS * VARIABLES, held)
    values = fresh(partial(_number, rng, VALUE_DIGITS), CHAINS, held)
    chains = [names[i::CHAINS] for i in range(CHAINS)]
    steps = [iter(pairwise([value, *chain])) for value, chain in zip(values, chains)]
    turns = list(range(CHAINS)) * VARIABLES
    rng.shuffle(turns)
    needles = [ASSIGNMENT.format(source=source, name=name) for source, name in (next(steps[turn]) for turn in turns)]
    asked = {"count": VARIABLES, "value": values[0]}
    return Facts(
        instruction=ASSIGNMENTS,
        needles=tuple(needles),
        question=WHICH_VARIABLES.format(**asked),
        prefix=THE_VARIABLES.format(**asked),
        answers=tuple(chains[0]),
    )


def _number(rng: random.Random, digits: int) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


WORDING = (TAGS, TAG, WHICH_TAG, WHICH_TAGS, THE_TAG, THE_TAGS, ASSIGNMENTS, ASSIGNMENT, WHICH_VARIABLES, THE_VARIABLES)
TASKS = {
    task.name: task
    for task in (
        Task("niah_single", partial(_retrieval, keys=1, values=1), max_new_tokens=128),
        Task("niah_multikey", partial(_retrieval, keys=4, values=1), max_new_tokens=128),
        Task("niah_multivalue", partial(_retrieval, keys=1, values=4), max_new_tokens=128),
        Task("vt", _tracking, max_new_tokens=64),
    )
}
