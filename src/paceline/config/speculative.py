"""Drafts: the methods there are, their sizes, and what --speculative-config says of them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from paceline.errors import ConfigError

HEAD_KINDS = ("eagle", "medusa")
MODEL_METHODS = (*HEAD_KINDS, "draft_model")  # that need a model
DRAFT_METHODS = ("off", "auto", "ngram", "history", *MODEL_METHODS)
# For tests and measurements, on a GPU: drafts are the request's prediction, some of them spoilt.
ORACLE = "oracle"
# Steps of a GPU with drafts: tokens of all rows together.
DRAFT_BUCKETS = (
    2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
    1280, 1536, 1792, 2048,
)  # fmt: skip
PROBE_EVERY = 32  # of its steps without drafts; then their first ones are compared with the tokens that come
USUAL_DRAFTS, MOST_DRAFTS = 7, 15  # of a row in a step
USUAL_GUESSES = 4  # the same where a model makes them, which takes time for each

# vLLM's words.
_OTHER_METHODS = {"suffix": "history", "eagle3": "eagle"}
_DRAFT_FIELDS = ("method", "model", "num_speculative_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Tokens that are guessed and verified in one step. Part of the config, so that a run log has it."""

    method: str = "ngram"
    model: str = ""  # folder or name of the head or model that guesses; empty: none does
    width: int = USUAL_DRAFTS  # most drafts of one row in a step
    # Seconds of a step as a line over its tokens, as far as known at the start.
    fixed_s: float = 0.0
    token_s: float = 0.0
    acceptance: float = 1.0  # of an oracle: share of its drafts that are right
    # Steps of a GPU: tokens of each size there is, ascending, and the seconds of such a step. A step is computed at the
    # next larger size, with all the drafts it has room for, and has none beside prompts. Empty: steps are as large as
    # what they compute.
    sizes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()


def read_speculative_config(text: str) -> DraftConfig | None:
    """What --speculative-config says: the name of a method, or vLLM's JSON object; None: off."""
    given: object = {"method": text}
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--speculative-config is not JSON: {error}") from None
    assert isinstance(given, dict)
    acceptance = given.pop("acceptance", 1.0) if given.get("method") == ORACLE else 1.0
    if not isinstance(acceptance, int | float) or not 0.0 <= acceptance <= 1.0:
        raise ConfigError(f"--speculative-config: acceptance must be 0 to 1, not {acceptance!r}")
    unknown = sorted(set(given) - set(_DRAFT_FIELDS))
    if unknown:
        raise ConfigError(
            f"--speculative-config: {unknown[0]} is not known; there are {', '.join(_DRAFT_FIELDS)}"
        )
    usual = USUAL_GUESSES if given.get("model") else USUAL_DRAFTS
    method, width = given.get("method", "auto"), given.get("num_speculative_tokens", usual)
    method = _OTHER_METHODS.get(method, method) if isinstance(method, str) else method
    if method not in (*DRAFT_METHODS, ORACLE):
        raise ConfigError(f"--speculative-config: method {method!r} is not {', '.join(DRAFT_METHODS)}")
    model = given.get("model", "")
    if not isinstance(model, str):
        raise ConfigError("--speculative-config: model must be the folder or the name of a model")
    if method in MODEL_METHODS and not model:
        raise ConfigError(
            f"--speculative-config: method {method} needs model, the folder of a head or a model: "
            f'{{"method": "{method}", "model": "FOLDER"}}'
        )
    if model and method in ("ngram", "history"):
        raise ConfigError(f"--speculative-config: method {method} takes no model")
    if not isinstance(width, int) or isinstance(width, bool) or not 0 <= width <= MOST_DRAFTS:
        raise ConfigError(
            f"--speculative-config: num_speculative_tokens must be 0 to {MOST_DRAFTS}, not {width!r}"
        )
    if method == "off" or not width:
        return None
    method = "history" if method == "auto" else method
    return DraftConfig(method=method, model=model, width=width, acceptance=float(acceptance))
