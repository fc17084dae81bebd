"""What --speculative-config says: the name of a method, or vLLM's JSON object."""

from __future__ import annotations

import json

from paceline.config.engine import (
    DRAFT_METHODS,
    MODEL_METHODS,
    MOST_DRAFTS,
    ORACLE,
    USUAL_DRAFTS,
    USUAL_GUESSES,
    DraftConfig,
)
from paceline.errors import ConfigError

# vLLM's words.
_OTHER_METHODS = {"suffix": "history", "eagle3": "eagle"}
_DRAFT_FIELDS = ("method", "model", "num_speculative_tokens")


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
