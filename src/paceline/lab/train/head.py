"""`paceline train-head`: texts, states, training, and the folder with the head."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.config.engine import ModelConfig
from paceline.core.sampling import SamplingParams
from paceline.errors import InputError
from paceline.lab.train.corpus import Corpus, compute_states, cut, digest_of, open_corpus
from paceline.lab.train.train_options import TrainHeadOptions
from paceline.lab.train.training import Head, LargeModel, Progress, Training, TrainingLimits, first_weights
from paceline.llm.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.draft_head import EagleHead, MedusaHead
from paceline.models.files.fetch import resolve
from paceline.models.files.head_folder import HeadFiles, HeadSpec, new_head, write_head
from paceline.models.files.open import Checkpoint, open_checkpoint
from paceline.models.load import build_decoder, move_to
from paceline.runner.device import choose_device
from paceline.runner.torch_step import choose_storage
from paceline.text.tokenizer import Tokenizer

ANSWERING, COMPUTING = 0.4, 0.5  # shares of the time until which prompts are answered, and states computed
SHARE_OF_MEMORY = 0.4  # of a GPU, for the engine that answers prompts


class Sizes(NamedTuple):
    """What suits a device."""

    tokens: int  # to learn from, where it is not said
    prompts: int  # answered together
    states: int  # tokens whose states are computed together
    batch: int  # tokens of a step of training


SIZES = {"cpu": Sizes(200_000, 64, 2048, 512), "cuda": Sizes(4_000_000, 1024, 16_384, 8192)}
WORK = "training"  # folder beside the head, for a run that goes on

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHead:
    """What came of it."""

    path: Path
    steps: int
    num_tokens: int
    acceptance: tuple[float, ...]  # by depth, on held-out texts


def train_head(options: TrainHeadOptions, say: Say = print) -> TrainedHead:
    """Train a head for a model and write it."""
    out = _checked(options)
    began_s = time.monotonic()

    def share_of_time() -> float:
        return (time.monotonic() - began_s) / (options.minutes * 60.0)

    checkpoint = open_checkpoint(resolve(options.name))
    device = torch.device(choose_device(ModelConfig(device=options.device)))
    sizes = SIZES[device.type]
    options = replace(options, device=device.type, tokens=options.tokens or sizes.tokens)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    spec = checkpoint.spec
    draft_vocab = min(options.draft_vocab or spec.vocab_size, spec.vocab_size)
    head = new_head(options.kind, spec, draft_vocab, options.depth)
    digest = _digest(options, draft_vocab)
    corpus = open_corpus(out / WORK, digest)
    pieces = (
        [] if corpus is not None else cut(_texts(options, checkpoint, share_of_time, say), options.tokens)
    )
    storage = None if device.type == "cuda" else choose_storage(ModelConfig(), checkpoint)[0]
    decoder = build_decoder(checkpoint, spec.max_positions, storage)
    move_to(decoder, device)
    if corpus is None:
        if not pieces:
            raise InputError("there are no texts of at least 8 tokens to learn from")
        say(f"Computing hidden states of up to {sum(map(len, pieces)):,} tokens")
        corpus = compute_states(
            out / WORK, decoder, head.taps, pieces, digest, lambda: share_of_time() > COMPUTING, sizes.states
        )
    target = _target(checkpoint, decoder, corpus, head, device)
    weights = first_weights(head, target, options.seed)
    limits = TrainingLimits(
        seconds=max(60.0 * options.minutes - (time.monotonic() - began_s), 1.0),
        steps=options.steps,
        depth=options.depth,
        tokens_at_once=sizes.batch,
        seed=options.seed,
    )
    training = Training(_net(head, weights, decoder, target), weights, target, corpus, limits)
    if training.load(out / WORK):
        say(f"Going on after {training.progress.steps:,} steps")
    return _train(training, out, head, checkpoint, corpus, target, options, say)


def _train(
    training: Training,
    out: Path,
    head: HeadSpec,
    checkpoint: Checkpoint,
    corpus: Corpus,
    target: LargeModel,
    options: TrainHeadOptions,
    say: Say,
) -> TrainedHead:
    command = shlex.join(["paceline", *sys.argv[1:]])

    def report(progress: Progress) -> None:
        shares = " ".join(f"{share:.0%}" for share in progress.acceptance)
        say(
            f"{progress.seconds / 60:.1f} min, {progress.steps:,} steps, {progress.tokens:,} tokens: "
            f"held-out acceptance by depth {shares}"
        )
        training.save(out / WORK)
        tensors = {name: value.detach().cpu().numpy() for name, value in training.weights.items()}
        about = {
            "command": command,
            "data": corpus.digest,
            "data_tokens": len(corpus.tokens),
            "steps": progress.steps,
            "seconds": round(progress.seconds, 1),
            "acceptance": progress.acceptance,
        }
        files = HeadFiles(spec=head, tensors=tensors, to_target=target.to_target)
        write_head(out, files, checkpoint.spec, about)

    say(f"Training on {len(corpus.tokens):,} tokens in {len(corpus.ends):,} pieces")
    training.run(report)
    progress = training.progress
    return TrainedHead(
        path=out,
        steps=progress.steps,
        num_tokens=len(corpus.tokens),
        acceptance=tuple(progress.acceptance),
    )


def _checked(options: TrainHeadOptions) -> Path:
    if options.out is None:
        raise InputError("say where to write the head: --out FOLDER")
    if (options.prompts is None) == (options.text is None):
        raise InputError("give --prompts, which the model answers, or --text to learn from")
    out = Path(options.out)
    try:
        (out / WORK).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror or error}") from error
    return out


def _digest(options: TrainHeadOptions, draft_vocab: int) -> str:
    path = Path(options.prompts or options.text or "")
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    about = {name: getattr(options, name) for name in ("name", "kind", "depth", "tokens", "seed")}
    answers = {name: getattr(options, name) for name in ("answer_tokens", "temperature")}
    return digest_of(path, **about, draft_vocab=draft_vocab, answers=answers if options.prompts else None)


def _texts(
    options: TrainHeadOptions, checkpoint: Checkpoint, share_of_time: Callable[[], float], say: Say
) -> list[list[int]]:
    """Token ids to learn from."""
    has_tokenizer = bool(checkpoint.text.tokenizer_json or checkpoint.text.gguf_fields)
    tokenizer = Tokenizer.from_checkpoint(checkpoint) if has_tokenizer else None
    if options.text is not None:
        return [_ids(text, tokenizer, checkpoint) for text in read_texts(Path(options.text))]
    assert options.prompts is not None
    prompts = read_prompts(Path(options.prompts))
    return _answers(options, prompts, tokenizer, checkpoint, share_of_time, say)


def _ids(text: Text, tokenizer: Tokenizer | None, checkpoint: Checkpoint) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise InputError("this model has no tokenizer: give lists of token ids, in JSON")
        return list(tokenizer.encode(text))
    if max(text) >= checkpoint.spec.vocab_size:
        raise InputError(f"token id {max(text)} is not in the model's vocabulary")
    return text


def _answers(
    options: TrainHeadOptions,
    prompts: Sequence[Text],
    tokenizer: Tokenizer | None,
    checkpoint: Checkpoint,
    share_of_time: Callable[[], float],
    say: Say,
) -> list[list[int]]:
    """The prompts with the model's answers, until there are tokens enough or much of the time is over."""
    found: list[list[int]] = []
    total = 0
    is_chat = tokenizer is not None and checkpoint.text.chat_template is not None
    at_once = SIZES[options.device].prompts
    given: dict[str, Any] = {"device": options.device, "skip_tokenizer_init": tokenizer is None}
    if options.device == "cuda":
        given |= {"gpu_memory_utilization": SHARE_OF_MEMORY, "max_num_seqs": at_once}
    with LLM(options.name, **given) as llm:
        for start in range(0, len(prompts), at_once):
            if total >= options.tokens or (found and share_of_time() > ANSWERING):
                break
            asked = prompts[start : start + at_once]
            sampling = [
                SamplingParams(
                    max_tokens=options.answer_tokens,
                    temperature=options.temperature,
                    seed=options.seed + start + number,
                )
                for number in range(len(asked))
            ]
            if is_chat and all(isinstance(prompt, str) for prompt in asked):
                chats = [[{"role": "user", "content": prompt}] for prompt in asked]
                outputs = llm.chat(chats, sampling, use_tqdm=False)
            else:
                ids = [{"prompt_token_ids": _ids(prompt, tokenizer, checkpoint)} for prompt in asked]
                outputs = llm.generate(ids, sampling, use_tqdm=False)
            for output in outputs:
                found.append([*(output.prompt_token_ids or ()), *output.outputs[0].token_ids])
                total += len(found[-1])
            say(f"{len(found):,} prompts answered, {total:,} tokens")
    return found


def _target(
    checkpoint: Checkpoint, decoder: Decoder, corpus: Corpus, head: HeadSpec, device: torch.device
) -> LargeModel:
    """The most frequent tokens, and what the model makes of them."""
    counts = Counter(corpus.tokens.tolist())
    counts.update(corpus.likeliest.tolist())
    ranked = sorted(range(checkpoint.spec.vocab_size), key=lambda token: (-counts[token], token))
    to_target: NDArray[np.int64] = np.sort(np.array(ranked[: head.draft_vocab_size], np.int64))
    tied = checkpoint.spec.tied_embeddings
    matrix = checkpoint.tensor("model.embed_tokens.weight" if tied else "lm_head.weight").to_float32()
    return LargeModel(
        output=torch.from_numpy(matrix[to_target]).to(device),
        norm=decoder.parts.norm.weight,
        to_target=to_target,
    )


def _net(head: HeadSpec, weights: dict[str, torch.Tensor], decoder: Decoder, target: LargeModel) -> Head:
    if head.kind == "medusa":
        return MedusaHead(head, weights, target.to_target)
    net = EagleHead(head, weights, decoder.parts.embedding, target.to_target, decoder.spec.max_positions)
    move_to(net, target.output.device)
    return net


# Texts and prompts out of files: plain text, JSON, or JSON lines.
#
# An entry of JSON is a text, a list of token ids, or an object: a conversation (`messages`, `conversations`), or fields
# such as `prompt`, `question`, `turns` and `text`, `input`, `output`, `answer`.


CONVERSATION = ("messages", "conversations")
ASKED = ("prompt", "question", "instruction", "input", "text")
SAID = ("output", "answer", "response", "completion")

Text = str | list[int]


def read_texts(path: Path) -> list[Text]:
    """Texts to learn from, each whole."""
    return [text for entry in _entries(path) if (text := _text_of(entry))]


def read_prompts(path: Path) -> list[Text]:
    """What is asked first in each entry."""
    return [prompt for entry in _entries(path) if (prompt := _prompt_of(entry))]


def _entries(path: Path) -> list[Any]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    found = list(_parsed(path, content))
    if not found:
        raise InputError(f"{path}: there is no text in it")
    return found


def _parsed(path: Path, content: str) -> Iterator[Any]:
    if path.suffix == ".json":
        try:
            value = json.loads(content)
        except ValueError as error:
            raise InputError(f"{path}: is not JSON: {error}") from error
        yield from value if isinstance(value, list) else [value]
    elif path.suffix == ".jsonl":
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise InputError(f"{path}: line {number} is not JSON: {error}") from error
    else:  # paragraphs
        yield from (part.strip() for part in content.split("\n\n") if part.strip())


def _is_ids(entry: Any) -> bool:
    return isinstance(entry, list) and bool(entry) and all(type(item) is int and item >= 0 for item in entry)


def _said(entry: Any) -> list[str]:
    """The turns of a conversation."""
    if not isinstance(entry, dict):
        return []
    for name in CONVERSATION:
        if isinstance(entry.get(name), list):
            turns = [turn.get("content", turn.get("value")) for turn in entry[name] if isinstance(turn, dict)]
            return [turn for turn in turns if isinstance(turn, str)]
    asked = entry.get("turns")
    return [turn for turn in asked if isinstance(turn, str)] if isinstance(asked, list) else []


def _fields(entry: Any, names: tuple[str, ...]) -> list[str]:
    return (
        [entry[name] for name in names if isinstance(entry.get(name), str)] if isinstance(entry, dict) else []
    )


def _text_of(entry: Any) -> Text:
    if isinstance(entry, str) or _is_ids(entry):
        return entry  # type: ignore[no-any-return]
    return "\n".join(_said(entry) or _fields(entry, ASKED + SAID))


def _prompt_of(entry: Any) -> Text:
    if isinstance(entry, str) or _is_ids(entry):
        return entry  # type: ignore[no-any-return]
    return next(iter(_said(entry) or _fields(entry, ASKED)), "")
