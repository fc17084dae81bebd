"""Training a head: it learns, goes on where it was stopped, and what it guesses is taken by its model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.cli.main import run
from paceline.errors import InputError
from paceline.lab.train.head import train_head
from paceline.lab.train.train_options import TrainHeadOptions
from paceline.models.files.head_folder import open_head
from paceline.models.files.open import open_checkpoint
from paceline.runner.drafts import OF_HISTORY, OF_MODEL
from tests.bits import always_draft
from tests.model_folder import write_model, write_weights
from tests.stories import FILE, START, write_stories

LONG = 10_000.0  # minutes: steps are what ends these trainings


def ids_file(folder: Path, count: int = 24) -> Path:
    """Texts in which each token follows from the one before."""
    rng = random.Random(1)
    texts = [[(start + 7 * place) % 90 + 5 for place in range(40)] for start in rng.sample(range(90), count)]
    path = folder / "texts.json"
    path.write_text(json.dumps(texts))
    return path


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_training_goes_on_where_it_was_stopped(tmp_path: Path, kind: str) -> None:
    model = write_weights(write_model(tmp_path / "model"))
    given = {
        "name": str(model),
        "out": str(tmp_path / "head"),
        "kind": kind,
        "text": str(ids_file(tmp_path)),
        "minutes": LONG,
        "depth": 2,
        "draft_vocab": 96,
    }
    said: list[str] = []
    first = train_head(TrainHeadOptions(steps=3, **given), said.append)  # type: ignore[arg-type]
    assert first.steps == 3 and first.num_tokens == 24 * 40 and len(first.acceptance) == 2
    assert any("Computing hidden states" in line for line in said)
    said.clear()
    more = train_head(TrainHeadOptions(steps=90, **given), said.append)  # type: ignore[arg-type]
    assert said[0] == "Going on after 3 steps" and more.steps == 90
    assert more.acceptance[0] > first.acceptance[0] and more.acceptance[0] > 0.1
    head = open_head(tmp_path / "head", open_checkpoint(model).spec)
    assert head.spec.kind == kind and len(head.to_target) == 96
    about = json.loads((tmp_path / "head" / "config.json").read_text())["paceline"]
    assert (
        about["steps"] == 90 and about["data_tokens"] == 960 and about["acceptance"] == list(more.acceptance)
    )
    assert about["command"].startswith("paceline") and len(about["data"]) == 32


def test_other_texts_begin_anew(tmp_path: Path) -> None:
    model = write_weights(write_model(tmp_path / "model"))
    said: list[str] = []
    for count in (10, 12):
        said.clear()
        options = TrainHeadOptions(
            name=str(model),
            out=str(tmp_path / "head"),
            text=str(ids_file(tmp_path, count)),
            steps=2,
            minutes=LONG,
            draft_vocab=0,
        )
        found = train_head(options, said.append)
        assert found.steps == 2 and found.num_tokens == count * 40
        assert not any("Going on" in line for line in said)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--out FOLDER"),
        (["--out", "{0}/head"], "give --prompts"),
        (["--out", "{0}/head", "--text", "x", "--prompts", "y"], "give --prompts"),
        (["--out", "{0}/head", "--text", "{0}/none.json"], "there is no such file"),
        (["--out", "{0}/head", "--text", "{0}/large.json"], "token id 5000 is not in the model's vocabulary"),
        (["--out", "{0}/head", "--text", "{0}/short.json"], "no texts of at least 8 tokens"),
        (["--out", "{0}/file/head", "--text", "{0}/short.json"], "cannot be written"),
        (["--out", "{0}/head", "--kind", "mtp"], "mtp"),
    ],
)
def test_what_cannot_be_trained_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    model = write_weights(write_model(tmp_path / "model"))
    (tmp_path / "large.json").write_text(json.dumps([[5000] * 20]))
    (tmp_path / "short.json").write_text(json.dumps([[5] * 4]))
    (tmp_path / "file").write_text("")
    assert run(["train-head", str(model), *(word.format(tmp_path) for word in words)]) == InputError.exit_code
    assert says in capsys.readouterr().err


@pytest.mark.skipif(not FILE.is_file(), reason="stories260K.bin is not on this machine")
@pytest.mark.parametrize(
    ("tokens", "steps", "least"),
    [(6_000, 150, 0.2), pytest.param(24_000, 700, 0.4, marks=pytest.mark.campaign)],
)
def test_a_model_of_stories_takes_what_its_head_guesses(
    tmp_path: Path, tokens: int, steps: int, least: float
) -> None:
    """Four in ten first drafts on held-out stories of its own, two after a short training; the same tokens with the
    head and without."""
    model = write_stories(tmp_path / "model")
    (tmp_path / "prompts.json").write_text(json.dumps([[START]] * (30 + tokens // 300)))
    options = TrainHeadOptions(
        name=str(model),
        out=str(tmp_path / "head"),
        prompts=str(tmp_path / "prompts.json"),
        temperature=1.0,
        tokens=tokens,
        steps=steps,
        depth=2,
        minutes=LONG,
        draft_vocab=0,
    )
    trained = train_head(options, lambda line: None)
    assert trained.acceptance[0] >= least
    drafts = json.dumps({"method": "eagle", "model": str(trained.path), "num_speculative_tokens": 3})
    stories = []
    for config in ("off", drafts):
        with LLM(str(model), skip_tokenizer_init=True, speculative_config=config, max_num_seqs=8) as llm:
            engine = llm._front.engine
            always_draft(engine)
            compared = _listen(llm)
            sampling = [
                SamplingParams(temperature=temperature, seed=1000 + seed, max_tokens=100)
                for temperature in (0.0, 1.0)
                for seed in range(4)
            ]
            outputs = llm.generate([{"prompt_token_ids": [START]}] * 8, sampling, use_tqdm=False)
            stories.append([output.outputs[0].token_ids for output in outputs])
    assert stories[0] == stories[1]
    verified, accepted = compared
    assert verified > 200 and accepted > 0.75 * least * verified, compared


def _listen(llm: LLM) -> list[int]:
    """Drafts of the head that were compared with what came, and those that were right."""
    found = [0, 0]
    scheduler = llm._front.engine.scheduler
    update = scheduler.update

    def listen(result: object, *given: object, **named: object) -> object:
        tally = getattr(result, "drafts", None)
        if tally is not None:
            kinds = slice(OF_MODEL, OF_MODEL + 8)
            found[0] += int(tally.compared[kinds].sum())
            found[1] += int(tally.equal[kinds].sum())
        return update(result, *given, **named)  # type: ignore[arg-type]

    scheduler.update = listen  # type: ignore[assignment,method-assign]
    assert OF_MODEL > OF_HISTORY
    return found
