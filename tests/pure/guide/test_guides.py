"""Guides of real grammars, over a vocabulary of single characters and a few longer tokens."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from paceline.core.guide import Guide, masks_along
from paceline.core.structure import Structure
from paceline.errors import InvalidRequest
from paceline.text.guide.compiler import GuideCompiler
from paceline.text.guide.matcher import FEWEST, GuideBatch, Matcher, Vocabulary

TEXTS = [*map(chr, range(32, 127)), "\n", '{"', '":', "name", "</th", "ink>", "true", "</think>x"]
CONTROL = {"<end>": len(TEXTS), "<stop>": len(TEXTS) + 1}
END, STOP = CONTROL["<end>"], CONTROL["<stop>"]


def encode(text: str) -> list[int]:
    """Longest tokens first."""
    found, known = [], sorted(range(len(TEXTS)), key=lambda token: -len(TEXTS[token]))
    while text:
        token = next(token for token in known if text.startswith(TEXTS[token]))
        found.append(token)
        text = text[len(TEXTS[token]) :]
    return found


VOCABULARY = Vocabulary(
    bytes_of=[text.encode() for text in TEXTS] + [name.encode() for name in CONTROL],
    control=CONTROL,
    special_ids=frozenset(CONTROL.values()),
    eos_token_ids=(STOP,),
    encode=encode,
)


@pytest.fixture(scope="module")
def compiler() -> GuideCompiler:
    return GuideCompiler(lambda: VOCABULARY)


def take(compiler: GuideCompiler, structure: Structure) -> Guide:
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        guide = compiler.take(structure)
        if guide is not None:
            return guide
        time.sleep(0.001)
    raise AssertionError("never compiled")


def allowed(guide: Guide) -> set[int]:
    mask = guide.mask()
    if mask is None:
        return set(range(len(VOCABULARY.bytes_of)))
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(VOCABULARY.bytes_of)]
    return set(np.flatnonzero(bits).tolist())


def text_of(tokens: list[int]) -> str:
    return b"".join(VOCABULARY.bytes_of[token] for token in tokens).decode()


def drawn(guide: Guide, rng: random.Random, most: int = 400) -> Iterator[int]:
    """Random tokens of those that are allowed, until the guide is over."""
    for _ in range(most):
        if guide.is_over:
            return
        assert not guide.error
        token = rng.choice(sorted(allowed(guide) - {STOP}) or [STOP])
        guide.consume((token,))
        yield token


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "true": {"type": "boolean"},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "true", "sizes"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_make_what_the_schema_says(compiler: GuideCompiler, seed: int) -> None:
    import jsonschema

    guide = take(compiler, Structure.of({"json": SCHEMA}))
    answer = json.loads(text_of(list(drawn(guide, random.Random(seed)))))
    jsonschema.validate(answer, SCHEMA)
    assert guide.is_over and not guide.error


def test_what_was_compiled_is_counted_once() -> None:
    compiler = GuideCompiler(lambda: VOCABULARY)
    assert compiler.compiled == (0, 0.0)
    for _ in range(3):
        take(compiler, Structure.of({"regex": "a+"}))
    with pytest.raises(InvalidRequest):
        take(compiler, Structure.of({"regex": "("}))
    number, seconds = compiler.compiled
    assert number == 2 and seconds > 0


def test_an_answer_that_may_end_may_be_stopped(compiler: GuideCompiler) -> None:
    guide = take(compiler, Structure.of({"regex": "a+"}))
    assert allowed(guide) == {encode("a")[0]}
    guide.consume(encode("a"))
    assert allowed(guide) == {encode("a")[0], STOP} and not guide.is_over
    guide.consume((STOP,))
    assert guide.is_over and not guide.error
    guide.consume(encode("b"))  # was on its way
    assert guide.is_over and not guide.error


def test_a_rule_that_turns_out_endless_is_too_complex(compiler: GuideCompiler) -> None:
    guide = take(compiler, Structure.of({"grammar": 'start: ("b" | "c") a\na: "a" a'}))
    guide.consume(encode("b"))
    guide.consume(guide.forced()[:1])
    guide.mask()
    assert guide.error == "grammar_too_complex"


def test_what_is_certain_is_known(compiler: GuideCompiler) -> None:
    guide = take(compiler, Structure.of({"regex": r"\{\"name\":(true|1)"}))
    assert text_of(guide.forced()) == '{"name":'
    guide.consume(guide.forced())
    assert not guide.forced() and guide.accepts(encode("true")) == 1 and guide.accepts(encode("x")) == 0


def test_a_wrong_token_breaks_the_guide(compiler: GuideCompiler) -> None:
    guide = take(compiler, Structure.of({"choice": ["yes", "no"]}))
    guide.consume(encode("x"))
    assert guide.error == "grammar_error" and not guide.is_over
    assert not allowed(guide) and not guide.forced() and not guide.accepts(encode("y"))
    masks = np.ones((1, VOCABULARY.num_words), np.uint32)
    GuideBatch([guide]).fill_masks(masks)
    assert not masks.any()


def test_a_copy_goes_its_own_way(compiler: GuideCompiler) -> None:
    guide = take(compiler, Structure.of({"choice": ["yes", "no"]}))
    other = guide.copy()
    guide.consume(encode("y"))
    assert text_of(sorted(allowed(guide))) == "e" and text_of(sorted(allowed(other))) == "ny"


def test_masks_behind_drafts_are_those_of_their_places(compiler: GuideCompiler) -> None:
    guide = take(compiler, Structure.of({"json": SCHEMA}))
    drafts = encode('{"name":"ab')
    masks = masks_along(guide, drafts)
    assert len(masks) == len(drafts) + 1
    for draft, mask in zip(drafts, masks, strict=False):
        own = guide.mask()
        assert own is not None and mask is not None and (own == mask).all()
        guide.consume((draft,))


def test_masks_of_several_guides_at_once(compiler: GuideCompiler) -> None:
    guides = [
        take(compiler, Structure.of({"choice": ["yes", "no"]})),
        take(compiler, Structure(kind="text", after="</think>")),
        take(compiler, Structure.of({"regex": "[0-9]+"})),
    ]
    assert isinstance(guides[0], Matcher)
    masks = np.zeros((3, VOCABULARY.num_words), np.uint32)
    GuideBatch(guides).fill_masks(masks)
    for guide, mask in zip(guides, masks, strict=True):
        own = guide.mask()
        assert (mask == (0xFFFFFFFF if own is None else own)).all()


def test_guides_that_move_on_together_do_as_each_alone(compiler: GuideCompiler) -> None:
    """Copies of two originals in turns, a guide that is no grammar, one that breaks, and one that is complete."""
    forms = [Structure.of({"choice": ["yes", "no"]}), Structure.of({"regex": "[a-z]{4}"})]
    guides = [take(compiler, forms[number % 2]) for number in range(2 * FEWEST)]
    guides[5] = take(compiler, Structure(kind="text", after="</think>"))
    alone, batch = [guide.copy() for guide in guides], GuideBatch(guides)
    masks = np.zeros((len(guides), VOCABULARY.num_words), np.uint32)
    for number, letter in enumerate(("n", "o")):
        tokens = np.array(encode(letter) * len(guides), np.int32)
        if number == 1:
            tokens[7] = encode("!")[0]
        ends = batch.consume(tokens)
        batch.fill_masks(masks)
        for guide, other, token, mask in zip(guides, alone, tokens.tolist(), masks, strict=True):
            other.consume((token,))
            own = other.mask()
            assert (guide.is_over, guide.error) == (other.is_over, other.error)
            assert (mask == (0xFFFFFFFF if own is None else own)).all() or guide.is_over
        assert ends == (number == 1), "those of a choice are complete, and one has failed"
    assert guides[0].is_over and guides[7].error and not guides[1].is_over
    free = GuideBatch(guides[1:2])
    assert not free.consume(np.array(encode("o"), np.int32)) and free.consume(np.array(encode("o"), np.int32))


# -- reasoning ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["", "so it is", "a </thi nk> b"])
def test_a_structure_begins_behind_reasoning(compiler: GuideCompiler, said: str) -> None:
    guide = take(compiler, Structure(kind="choice", source='["yes"]', after="</think>"))
    for token in [*encode(said), *encode("</th"), *encode("ink>")]:
        assert token in allowed(guide)
        guide.consume((token,))
    tokens = list(drawn(guide, random.Random(0)))
    assert text_of(tokens).strip() == "yes" and guide.is_over


def test_a_marker_may_end_inside_a_token_only_where_the_structure_goes_on(compiler: GuideCompiler) -> None:
    """One token is the end of the marker and a letter: it is allowed exactly if that letter may begin the answer."""
    across = TEXTS.index("</think>x")
    for choice, is_allowed in (("xyz", True), ("yes", False)):
        guide = take(compiler, Structure(kind="choice", source=json.dumps([choice]), after="</think>"))
        assert (across in allowed(guide)) == is_allowed


@pytest.mark.parametrize("kind", ["text", "choice"])
@pytest.mark.parametrize("within", [0, 1, 5])
def test_a_budget_of_reasoning_is_kept_to_the_token(compiler: GuideCompiler, kind: str, within: int) -> None:
    source = '["yes"]' if kind == "choice" else ""
    guide = take(compiler, Structure(kind=kind, source=source, after="</think>", within=within))
    tokens: list[int] = []
    while text_of(tokens).count("</think>") == 0:
        token = encode("a")[0] if encode("a")[0] in allowed(guide) else min(allowed(guide))
        guide.consume((token,))
        tokens.append(token)
    assert text_of(tokens) == "a" * within + "</think>"
    if kind == "text":
        assert guide.mask() is None and not guide.is_over
    else:
        assert text_of(list(drawn(guide, random.Random(1)))).strip() == "yes" and guide.is_over


def test_drafts_do_not_cross_a_budget(compiler: GuideCompiler) -> None:
    guide = take(compiler, Structure(kind="text", after="</think>", within=3))
    assert guide.accepts(encode("abcdef")) == 3
    masks = masks_along(guide, encode("abc"))
    assert masks[:3] == [None] * 3 and masks[3] is not None


def test_reasoning_ends_when_it_is_asked_to(compiler: GuideCompiler) -> None:
    guide = take(compiler, Structure(kind="choice", source='["yes"]', after="</think>"))
    guide.consume(encode("a"))
    assert guide.end_reasoning()
    guide.consume(encode("b"))  # was on its way
    assert text_of(guide.forced()) == "</think>"
    other = guide.copy()
    for one in (guide, other):
        tokens = list(drawn(one, random.Random(2)))
        assert text_of(tokens) == "</think>yes" and one.is_over
    assert not guide.end_reasoning()


def test_a_marker_on_its_way_counts_when_the_end_is_asked_for(compiler: GuideCompiler) -> None:
    guide = take(compiler, Structure(kind="text", after="</think>"))
    guide.consume(encode("</th"))
    assert guide.end_reasoning()
    guide.consume(encode("ink>"))
    assert guide.mask() is None and not guide.forced()


def test_a_control_token_may_be_the_marker(compiler: GuideCompiler) -> None:
    guide = take(compiler, Structure(kind="choice", source='["yes"]', after="<end>", within=4))
    assert END in allowed(guide)
    guide.consume((*encode("abcd"),))
    assert allowed(guide) == {END}
    guide.consume((END,))
    assert text_of(list(drawn(guide, random.Random(3)))).strip() == "yes"


# -- compiling ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_compiled_is_refused_with_the_reason(compiler: GuideCompiler) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs") as refused:
        take(compiler, Structure.of({"grammar": "start: nothing_here"}))
    assert "nothing_here" in str(refused.value) and len(str(refused.value)) < 400


def test_the_same_structure_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, made = GuideCompiler(lambda: VOCABULARY), []
    compile_one = GuideCompiler._compile

    def counted(self: GuideCompiler, structure: Structure, vocabulary: Vocabulary) -> Guide:
        made.append(structure)
        return compile_one(self, structure, vocabulary)

    monkeypatch.setattr(GuideCompiler, "_compile", counted)
    for _ in range(3):
        take(compiler, Structure.of({"regex": "abc"}))
    assert len(made) == 1


def test_without_the_package_structures_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.text.guide.matcher.is_installed", lambda: False)
    with pytest.raises(InvalidRequest, match="pip install llguidance"):
        GuideCompiler(lambda: VOCABULARY).take(Structure.of({"regex": "a"}))
