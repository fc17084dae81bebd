"""A stored file, a batch and one line of its input: what is kept of them, and what a client is shown.

Plain values in the shapes of the OpenAI API. Knows neither the database nor HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.errors import InvalidRequest
from paceline.server.errors import TooBusy

Json = dict[str, Any]

INPUT_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
PICTURE_PURPOSES = ("vision", "user_data")
PURPOSES = (INPUT_PURPOSE, OUTPUT_PURPOSE, *PICTURE_PURPOSES)
WINDOW, WINDOW_S = "24h", 24 * 3600
VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, EXPIRED, CANCELLED = "completed", "failed", "expired", "cancelled"
OPEN_STATES = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
STATES = (*OPEN_STATES, COMPLETED, FAILED, EXPIRED, CANCELLED)
TIMES = tuple(f"{state}_at" for state in STATES if state != VALIDATING)


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def new_batch_id() -> str:
    return f"batch_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a tenant. Where its bytes are follows from its id."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970, as all times here
    expires_at: int | None = None

    def shown(self) -> Json:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """What is wrong with a batch as a whole, or with one line of its input."""

    code: str
    line: int | None = None
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch as it stands. The fields are the columns of its table."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    model: str
    metadata: str  # JSON
    status: str
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    errors: str = "[]"  # JSON
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_expires_s: int | None = None  # how long after their making its files are kept
    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_STATES

    def shown(self) -> Json:
        errors = msgspec.json.decode(self.errors)
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: getattr(self, name) for name in TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": self.prompt_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.prompt_tokens + self.output_tokens,
            },
            "metadata": msgspec.json.decode(self.metadata),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """Where one request is in the input file."""

    number: int  # from 1, blank lines counted
    offset: int
    length: int
    custom_id: str
    losses: int = 0  # how often the engine was lost while it worked on this


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """What became of one line."""

    batch_id: str
    number: int
    is_ok: bool
    data: bytes  # the line of the output or error file, with its end
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def errors_json(errors: Sequence[LineError]) -> str:
    return msgspec.json.encode(errors).decode()


def shown_list(items: Sequence[StoredFile] | Sequence[Batch], *, has_more: bool) -> Json:
    """One page of a list."""
    return {
        "object": "list",
        "data": [item.shown() for item in items],
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": has_more,
    }


# What can go wrong with a request about files and batches; each class carries its `code` of the error
# catalogue.


class UnknownFile(InvalidRequest):
    """This key has no such file (404)."""

    code = "file_not_found"

    def __init__(self, *, param: str | None = None) -> None:
        super().__init__("this key has no file of that id; GET /v1/files lists what there is", param=param)


class UnknownBatch(InvalidRequest):
    """This key has no such batch (404)."""

    code = "batch_not_found"

    def __init__(self, *, param: str | None = None) -> None:
        super().__init__("this key has no batch of that id; GET /v1/batches lists what there is", param=param)


class FileInUse(InvalidRequest):
    """A batch that is not over reads this file (400)."""

    code = "file_in_use"

    def __init__(self) -> None:
        super().__init__("a batch that is not over reads this file; cancel it first, or wait for its end")


class FileTooLarge(InvalidRequest):
    """The file is larger than one may be (413)."""

    code = "body_too_large"

    def __init__(self, most: int) -> None:
        super().__init__(f"a file may have {most} bytes; cut it into several", param="file")


class QuotaExceeded(InvalidRequest):
    """The files of this key take as much as they may (413)."""

    code = "storage_quota_exceeded"

    def __init__(self, most: int) -> None:
        super().__init__(f"the files of this key may take {most} bytes together; delete some first")


class TooManyFiles(InvalidRequest):
    """This key has as many files as it may have (413)."""

    code = "storage_quota_exceeded"

    def __init__(self, most: int) -> None:
        super().__init__(f"this key may have {most} files; delete some first")


class TooManyBatches(TooBusy):
    """This key has as many batches that are not over as it may have (429)."""

    code = "too_many_batches"
    retry_after_s = 60
