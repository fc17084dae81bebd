"""Log records of the engine's process on their way to the HTTP process, which writes all logs in one format.

Records wait in a bounded queue until the channel takes them; the newest are dropped first when the reader is slow.
What is left when the process ends goes to standard error.
"""

from __future__ import annotations

import logging
import sys
from collections import deque

from paceline.process import frames
from paceline.process.channel import Channel

MOST_RECORDS = 256
MAX_CHARS = 8000


class LogQueue(logging.Handler):
    """Keeps records as frames. Any thread may log; one at a time may send."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[frames.Log] = deque()
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._waiting) >= MOST_RECORDS:
            self._num_dropped += 1
            return
        try:
            text = record.getMessage()
        except Exception:  # a message that does not fit its arguments
            text = str(record.msg)
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        self._waiting.append(frames.Log(record.levelno, text[:MAX_CHARS], trace[-MAX_CHARS:]))

    def send(self, channel: Channel) -> None:
        """As much as the socket takes now."""
        while self._waiting and channel.is_free:
            channel.send(frames.encode(self._waiting.popleft()))
        if self._num_dropped and not self._waiting:
            dropped, self._num_dropped = self._num_dropped, 0
            self._waiting.append(frames.Log(logging.WARNING, f"{dropped} log records were dropped"))

    def spill(self) -> None:
        """No reader will take the rest: show it."""
        while self._waiting:
            left = self._waiting.popleft()
            print("\n".join(filter(None, (left.message, left.traceback))), file=sys.stderr, flush=True)


def set_up_logs() -> LogQueue:
    """Everything that is logged or warned of in this process goes to the queue."""
    queue = LogQueue()
    logging.basicConfig(level=logging.WARNING, handlers=[queue], force=True)
    logging.getLogger("paceline").setLevel(logging.INFO)
    logging.captureWarnings(True)
    return queue
