"""Log lines: text for people, JSON for machines, written by a separate thread.

Logging only puts a record into a bounded queue. When the output is blocked or gone, lines are dropped and
counted; serving never waits for a log. Control characters are escaped: a line is always one line.
"""

from __future__ import annotations

import logging
import queue
import re
import sys
import threading
import time
from typing import Any, TextIO

import msgspec

LOGGER = "paceline"
FACTS = "facts"  # the attribute of a record that holds its fields
QUEUE_LINES = 10_000
SHORT_ID = 8  # characters of a request's id in a line of text; a request can be looked up by them
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DIM, _YELLOW, _RED, _PLAIN = "\033[2m", "\033[33m", "\033[31m", "\033[0m"


class LogOutput(logging.Handler):
    """Queues records and writes them from its own thread."""

    def __init__(self, stream: TextIO, *, as_json: bool, uses_colour: bool = False) -> None:
        super().__init__()
        self.dropped = 0
        self._stream = stream
        self._format_line = _json_line if as_json else _text_line
        self._uses_colour = uses_colour
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def handle(self, record: logging.LogRecord) -> bool:
        # No lock and no formatting here: this runs on the event loop.
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
        return True

    def _write_all(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._stream.write(self._format_line(record, self._uses_colour) + "\n")
                if self._queue.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # closed, a full disk, a reader that left
                self.dropped += 1
            except Exception:  # a record that cannot be formatted costs itself only
                self.dropped += 1

    def finish(self, timeout_s: float = 0.5) -> None:
        """Write what is queued, as long as that does not take long."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout_s)


def set_up_logs(log_format: str, log_level: str, stream: TextIO | None = None) -> LogOutput:
    """Send the log of Paceline and of uvicorn to one output."""
    stream = sys.stderr if stream is None else stream
    as_json = log_format == "json"
    output = LogOutput(stream, as_json=as_json, uses_colour=not as_json and _is_terminal(stream))
    for name, level in ((LOGGER, log_level.upper()), ("uvicorn", "ERROR"), ("asyncio", "ERROR")):
        logger = logging.getLogger(name)
        logger.handlers = [output]
        logger.propagate = False
        logger.setLevel(level)
    return output


def log(message: str, *, level: int = logging.INFO, error: BaseException | None = None, **facts: Any) -> None:
    """One line with its fields."""
    logging.getLogger(LOGGER).log(level, message, exc_info=error, extra={FACTS: facts})


def escaped(text: str) -> str:
    """Text on one line, with nothing in it that could move a cursor."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", text)


def _text_line(record: logging.LogRecord, uses_colour: bool) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(record.created))
    facts = getattr(record, FACTS, {})
    fields = " ".join(
        f"{name}={_short(name, value)}" for name, value in facts.items() if value not in (None, "")
    )
    text = escaped(f"{record.getMessage()} {fields}".rstrip())
    level = "" if record.levelno <= logging.INFO else record.levelname + " "
    if uses_colour:
        colour = _RED if record.levelno >= logging.ERROR else _YELLOW if level else ""
        return f"{_DIM}{clock}{_PLAIN} {colour}{level}{text}{_PLAIN if colour else ''}{_traceback(record)}"
    return f"{clock} {level}{text}{_traceback(record)}"


def _json_line(record: logging.LogRecord, uses_colour: bool) -> str:
    line = {
        "time": round(record.created, 3),
        "level": record.levelname.lower(),
        "message": record.getMessage(),
        **getattr(record, FACTS, {}),
    }
    if trace := _traceback(record):
        line["traceback"] = trace.strip()
    encoded = msgspec.json.encode(line, enc_hook=str)
    return _CONTROL.sub(lambda found: f"\\u{ord(found.group()):04x}", encoded.decode())


def _traceback(record: logging.LogRecord) -> str:
    """Where an error came from, in this process or, as the record says, in the engine's."""
    text: str = getattr(record, "traceback", "")
    if record.exc_info:
        text = logging.Formatter().formatException(record.exc_info)
    return "".join(f"\n    {escaped(line)}" for line in text.splitlines())


def _short(name: str, value: Any) -> str:
    if name == "id":  # JSON lines have all of it
        return str(value)[:SHORT_ID]
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _is_terminal(stream: TextIO) -> bool:
    import os

    try:
        return stream.isatty() and "NO_COLOR" not in os.environ
    except ValueError:
        return False
