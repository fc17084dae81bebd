"""Options of the engine's process: heartbeats, restarts, and the bounds of what travels between the processes.

Declared with `config.options.option`, as all options are; times are options so that tests can shorten them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.config.options import check_options, option
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """How the engine's process is watched and talked to."""

    PANEL: ClassVar = "Engine process"

    heartbeat_s: float = option(0.5, "seconds between two heartbeats of the engine", low=0.01, high=60.0)
    stats_interval_s: float = option(0.25, "seconds between two updates of the gauges", low=0.01, high=60.0)
    stuck_after_s: float = option(
        5.0, "seconds without a heartbeat after which the engine counts as stuck", low=0.05
    )
    fail_when_stuck: bool = option(
        True, "fail all requests when the engine is stuck, instead of waiting for it"
    )
    restart_after_s: float = option(
        60.0, "seconds without a heartbeat after which the engine is restarted", low=0.1
    )
    ready_timeout_s: float = option(600.0, "longest time to load the model, in seconds", low=1.0)
    max_restarts: int = option(3, "most restarts within --restart-window-s; then the server ends", low=0)
    restart_window_s: float = option(600.0, "seconds after which a restart no longer counts", low=1.0)
    restart_backoff_s: float = option(
        1.0, "seconds to wait before a second restart; doubles with each further one", low=0.0
    )
    stop_timeout_s: float = option(1.0, "seconds an engine may take to stop", low=0.1)
    max_frame_bytes: int = option(
        4 << 20, "largest message between the processes", low=64 << 10, high=1 << 30
    )
    max_unsent_bytes: int = option(
        64 << 20, "most bytes that may wait for the engine to read them", low=1 << 16
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.heartbeat_s * 2 <= self.stuck_after_s < self.restart_after_s:
            raise ConfigError(
                "--stuck-after-s must be at least twice --heartbeat-s and less than --restart-after-s, not "
                f"{self.stuck_after_s:g}, {self.heartbeat_s:g} and {self.restart_after_s:g}"
            )
