"""How often an engine may be restarted: so many times in a window, with growing pauses."""

from __future__ import annotations

from collections import deque

from paceline.config_process import ProcessConfig

LONGEST_PAUSE_S = 60.0


class RestartBudget:
    """Counts restarts. Time is passed in."""

    def __init__(self, config: ProcessConfig) -> None:
        self._config = config
        self._times_s: deque[float] = deque()

    def spend(self, now_s: float) -> float | None:
        """Seconds to pause before the restart; None when there may be no further one."""
        while self._times_s and now_s - self._times_s[0] > self._config.restart_window_s:
            self._times_s.popleft()
        if len(self._times_s) >= self._config.max_restarts:
            return None
        before = len(self._times_s)
        self._times_s.append(now_s)
        if not before:
            return 0.0
        return float(min(self._config.restart_backoff_s * 2.0 ** (before - 1), LONGEST_PAUSE_S))
