"""What can go wrong with a request about files and batches; each class carries its `code` of the error catalogue."""

from __future__ import annotations

from paceline.errors import InvalidRequest
from paceline.server.failures import TooBusy


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
