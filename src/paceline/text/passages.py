"""Passages and questions that show what blending keeps of a model's answers, and prompts made of them.

Each question is answered by one of the four passages before it. The facts are made up, so that a model has them from
the passages alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.blend_quality import PassagePrompt, PromptPart
from paceline.errors import InputError, InvalidRequest
from paceline.text.chat_template import ChatTemplate
from paceline.text.placed_texts import PlacedTexts, encode_placed, joined, mark_of, new_secret
from paceline.text.tokenizer import Tokenizer

BEFORE = "Answer the question from these passages."
MOST_PROMPTS, MOST_BYTES = 1000, 64 * 2**20


class PassageQuestion(NamedTuple):
    """A question, and passages that stand before it."""

    passages: tuple[str, ...]
    question: str


_PASSAGES = (
    "The lighthouse of Harrow Point was finished in the spring of 1874, after three winters of work. Its tower is "
    "forty-one metres high and was built from grey granite that ships brought from the quarries at Selm. The first "
    "keeper, Agnes Tollan, stayed for twenty-six years and wrote down the weather every evening. Her books fill "
    "eleven shelves in the town's library. Since 1968 the lamp has been lit by an electric clock, and the keeper's "
    "house is a small museum that opens on Sundays.",
    "The river Ondra rises from four springs in the Marl Hills and flows north for two hundred and twelve kilometres "
    "before it meets the sea near Castrel. Barges carried salt and timber on it until the railway came in 1891. "
    "Herons and otters live in its lower valley, which has been a reserve since 1977. Every May, children from the "
    "villages along its banks set paper boats with candles on the water, a custom that goes back to a flood in 1784.",
    "Brask cheese is made from the milk of goats that graze above the tree line. The curd is cut by hand, salted "
    "twice, and pressed under stones for a day and a night. Wheels of six kilograms then rest in caves at nine "
    "degrees for at least five months, and are turned every third day. A good wheel smells of hay and walnuts. Most of "
    "it is eaten in the valley itself, with dark bread and pickled onions, and less than a tenth is sold abroad.",
    "The Velden tramway opened in 1903 with seven cars and a single line from the harbour to the botanical garden. "
    "Its cars were painted yellow so that people could see them in the fog. A steep stretch behind the market needed a "
    "second motor, which was switched on by a lever at the conductor's feet. After the war the line was doubled, and "
    "today forty-two trams carry about ninety thousand passengers on a working day.",
    "Doctor Ilse Marbach studied how bees find their way home. In the summer of 1931 she marked nine hundred bees with "
    "dots of paint and let them go at places up to five kilometres from their hive. On clear days four of five were "
    "back within an hour; under thick clouds fewer than half of them returned. She concluded that bees use the sun "
    "and that they remember rows of trees as well. Her notes were printed only in 1952, by a former student.",
    "The bridge at Coll has nine arches and stands on oak piles that were driven into the mud in 1612. Masons from two "
    "guilds worked on it from opposite banks, and their marks can still be told apart. In 1745 soldiers blew up the "
    "middle arch, which was replaced by a wooden one for sixty years. The tolls paid for a school. Lorries have been "
    "kept off it since 1983, because their weight opened cracks in the third pier.",
    "The Tamsin apple is small, hard and nearly black when it is ripe in late November. It was found as a seedling "
    "beside a mill in 1809 by Robert Hale, who sold grafts of it for a shilling each. The fruit keeps until June in a "
    "cool cellar and is used for cider and for a dark jelly. Its trees dislike lime in the ground and bear only every "
    "second year. A collection of thirty old trees stands behind the parish church of Ennor.",
    "At the observatory of Mount Kelda the dome is opened two hours before sunset, so that the air inside becomes as "
    "cold as the air outside. Its main mirror is two metres wide and was ground in Utrecht over four years. The first "
    "picture was taken in March 1959 and shows a comet. Astronomers book nights a year ahead, and one night a month is "
    "kept for schools. Snow closes the road from December on, and supplies come up by cable car.",
)
_QUESTIONS = (
    (0, "Who was the first keeper of the lighthouse of Harrow Point, and how long did she stay?"),
    (2, "How long do wheels of Brask cheese rest in caves, and at what temperature?"),
    (4, "How many bees did Ilse Marbach mark, and how far from their hive were they let go?"),
    (6, "Who found the Tamsin apple, and where?"),
    (1, "When did the railway come to the river Ondra, and what had barges carried before?"),
    (3, "Why were the cars of the Velden tramway painted yellow?"),
    (5, "What happened to the middle arch of the bridge at Coll in 1745?"),
    (7, "Why is the dome of Mount Kelda opened two hours before sunset?"),
)
SMALL = 4  # questions at a server's start


def built_in(count: int = len(_QUESTIONS)) -> list[PassageQuestion]:
    """The passage with the answer stands in another place each time."""
    found = []
    for number, (answer, question) in enumerate(_QUESTIONS[:count]):
        first = answer - number % 4
        passages = tuple(_PASSAGES[(first + place) % len(_PASSAGES)] for place in range(4))
        found.append(PassageQuestion(passages, question))
    return found


def read_asked(path: Path) -> list[PassageQuestion]:
    """Lines of JSON, each with `passages`, a list of texts, and `question`. Raises InputError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) > MOST_BYTES:
        raise InputError(f"{path} has more than {MOST_BYTES >> 20} MiB")
    found = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
            passages, question = entry["passages"], entry["question"]
            is_right = isinstance(passages, list) and all(isinstance(each, str) and each for each in passages)
        except (ValueError, TypeError, KeyError):
            is_right, passages, question = False, [], ""
        if not is_right or not passages or not isinstance(question, str) or not question:
            raise InputError(
                f"{path}, line {number}: must be an object with passages, a list of texts, and question, a text"
            )
        found.append(PassageQuestion(tuple(passages), question))
    if not 0 < len(found) <= MOST_PROMPTS:
        raise InputError(f"{path} has {len(found)} prompts; 1 to {MOST_PROMPTS} are taken")
    return found


def passage_prompts(
    tokenizer: Tokenizer, asked: Sequence[PassageQuestion], longest: int, before: str = BEFORE
) -> list[PassagePrompt]:
    """As conversations where the model has a template for them; passages are cut so that each prompt fits `longest`."""
    template = ChatTemplate.for_tokenizer(tokenizer) if tokenizer.chat_template else None
    return [_prompt(tokenizer, template, each, longest, before) for each in asked]


def _prompt(
    tokenizer: Tokenizer, template: ChatTemplate | None, asked: PassageQuestion, longest: int, before: str
) -> PassagePrompt:
    passages = list(asked.passages)
    parts = _parts(tokenizer, template, passages, asked.question, before)
    rest = sum(len(part.tokens) for part in parts if not part.is_placed)
    most = (longest - rest) // len(passages)  # tokens of each
    if most < 1:
        raise InputError(f"a prompt has {rest} tokens beside its passages; at most {longest} fit")
    return tuple(part._replace(tokens=part.tokens[:most]) if part.is_placed else part for part in parts)


def _parts(
    tokenizer: Tokenizer, template: ChatTemplate | None, passages: Sequence[str], question: str, before: str
) -> list[PromptPart]:
    texts = [(before, False), *((passage, True) for passage in passages), (question, False)]
    if template is None:
        found = joined(tokenizer, texts, "\n")
    else:
        secret = new_secret()
        marks = [mark_of(secret, index) for index in range(len(passages))]
        content = "\n".join([before, *marks, question])
        try:
            shown = template.render([{"role": "user", "content": content}])
        except InvalidRequest as error:
            raise InputError(f"the model's chat template shows no passages: {error}") from error
        found = encode_placed(tokenizer, shown, PlacedTexts(secret=secret, texts=tuple(passages)))
    parts: list[PromptPart] = []
    done = 0
    for start, count, *_ in found.modules:
        parts.append(PromptPart(tuple(found.ids[done:start]), False))
        parts.append(PromptPart(tuple(found.ids[start : start + count]), True))
        done = start + count
    parts.append(PromptPart(tuple(found.ids[done:]), False))
    return parts
