"""What the dial can be set to, and what it says of itself: values that scheduler, processes, server and client share.

A setting is a place between least latency (0) and most throughput (1), a time that the p99 of inter-token latency or
of time to first token should keep, or off. How a setting becomes limits of steps is the scheduler's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from paceline.config.engine import LEAST_TARGET_MS, MOST_TARGET_MS, SchedulerConfig
from paceline.errors import InvalidRequest


def format_time(seconds: float) -> str:
    """`250 ms`, `1.5 s`: three digits, or tenths of a second from one second on."""
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


class DialKind(Enum):
    OFF = "off"  # the limits of the config hold
    POSITION = "position"
    ITL = "itl_p99_ms"
    TTFT = "ttft_p99_ms"


class DialWord(Enum):
    """The state of the dial, in a word."""

    OFF = "off"
    FIXED = "fixed"  # at the place it was given
    STARTING = "starting"  # too little was observed to judge
    HOLDING = "holding"
    SLACK = "slack"  # the target is kept with room to spare, and no limit of the dial is in effect
    CORRECTING = "correcting"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class DialSetting:
    """What an operator asked for."""

    kind: DialKind = DialKind.OFF
    value: float = 0.0  # a place from 0 to 1, or milliseconds

    def __post_init__(self) -> None:
        name, value = self.kind.value, self.value
        if self.kind is DialKind.OFF:
            return
        low, high = (0.0, 1.0) if self.kind is DialKind.POSITION else (LEAST_TARGET_MS, MOST_TARGET_MS)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number, not {value!r}", param=name)
        if not low <= value <= high:
            raise InvalidRequest(f"{name} must lie between {low:g} and {high:,g}, not {value:g}", param=name)

    @property
    def target_s(self) -> float | None:
        """The time that should be kept; None where none is."""
        return self.value / 1e3 if self.kind in (DialKind.ITL, DialKind.TTFT) else None


OFF = DialSetting()


def chosen_setting(
    position: float | None, itl_p99_ms: float | None, ttft_p99_ms: float | None
) -> DialSetting | None:
    """The one setting that is given; None when none is. Raises InvalidRequest when there is more than one."""
    given = {DialKind.POSITION: position, DialKind.ITL: itl_p99_ms, DialKind.TTFT: ttft_p99_ms}
    chosen = [(kind, value) for kind, value in given.items() if value is not None]
    if len(chosen) > 1:
        names = " and ".join(kind.value for kind, _ in chosen)
        raise InvalidRequest(f"{names} exclude each other: give one of them", param=chosen[1][0].value)
    return DialSetting(kind=chosen[0][0], value=chosen[0][1]) if chosen else None


def setting_of(config: SchedulerConfig) -> DialSetting | None:
    """What the dial is set to from the start."""
    return chosen_setting(config.dial, config.target_itl_p99_ms, config.target_ttft_p99_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialStatus:
    """Where the dial stands at one moment."""

    setting: DialSetting = OFF
    word: DialWord = DialWord.OFF
    reason: str = ""  # why a target cannot be held
    position: float = 1.0  # where it stands between 0 and 1, set by hand or by the controller
    itl_p99_ms: float | None = None  # of the window it judges by; None while nothing was observed
    ttft_p99_ms: float | None = None
    # How long a step with prompts may take; None where no costs are known.
    step_target_ms: float | None = None
    max_step_tokens: int = 0  # most tokens of a step
    max_prompt_tokens: int = 0  # of a step in which no row decodes
    prompt_share: float = 1.0  # of a step's tokens that one prompt may take while others wait
    max_rows: int = 0
    moves: int = 0  # of the controller since the dial was set
    reversals: int = 0  # times it turned back


def status_sentences(status: DialStatus) -> list[str]:
    """The same in words."""
    setting, sentences = status.setting, []
    if setting.kind is DialKind.OFF:
        sentences.append("The dial is off: steps keep the limits the server was started with.")
    elif setting.kind is DialKind.POSITION:
        sentences.append(
            f"The dial stands at {setting.value:g} (0 is least latency between tokens, 1 is most throughput)."
        )
    else:
        what = "inter-token latency" if setting.kind is DialKind.ITL else "time to first token"
        stand = {
            DialWord.STARTING: "too little has been seen to judge",
            DialWord.HOLDING: "it is held",
            DialWord.SLACK: "it is kept with room to spare",
            DialWord.CORRECTING: "it is being corrected",
            DialWord.UNREACHABLE: f"it cannot be held: {status.reason}",
        }[status.word]
        times = "once" if status.moves == 1 else f"{status.moves} times"
        sentences.append(
            f"The target is a p99 {what} of {setting.value:g} ms; {stand}. The controller has moved {times} and "
            f"stands at {status.position:g}."
        )
    length = "" if status.step_target_ms is None else f"about {format_time(status.step_target_ms / 1e3)} and "
    alone = ""
    if status.max_prompt_tokens > status.max_step_tokens:
        alone = f" ({status.max_prompt_tokens:,} while no row decodes)"
    sentences.append(
        f"A step with prompts may take {length}at most {status.max_step_tokens:,} tokens{alone}, one prompt "
        f"{status.prompt_share:.0%} of them while others wait; {status.max_rows:,} rows at most."
    )
    seen = [
        f"{name} {format_time(value / 1e3)}"
        for name, value in (("ITL", status.itl_p99_ms), ("TTFT", status.ttft_p99_ms))
        if value is not None
    ]
    if seen:
        sentences.append(f"Seen lately, p99: {', '.join(seen)}.")
    return sentences
