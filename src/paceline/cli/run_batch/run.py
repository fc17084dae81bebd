"""A batch of requests through one engine: every line gets exactly one result, whatever is wrong with it.

Lines are read as the engine drains, so that neither the requests nor the results are ever all in memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from paceline.cli.terminal import RequestBar
from paceline.errors import InputError, InvalidRequest
from paceline.llm.frontend import Frontend
from paceline.llm.offline import Submission, run_requests
from paceline.llm.outputs import RequestOutput
from paceline.llm.pairs import TextPair
from paceline.llm.prompts import PreparedRequest
from paceline.server.api.openai_fields import CHAT, COMPLETIONS
from paceline.server.api.openai_requests import ModelFacts, ParsedBody, parse_body
from paceline.server.api.openai_responses import chat_body, completion_body, error_body
from paceline.server.api.pooled_forms import IN_BATCHES, pooled_forms
from paceline.server.api.route import OWN_LIMITS
from paceline.server.errors import UnknownModel, UnsupportedRoute
from paceline.server.generate.generation import Usage
from paceline.server.generate.pooled import prepare_inputs
from paceline.text.guide.check import check

# The two files of a batch: requests line by line, and results that survive a crash.
#
# A result is one line, written at once and never changed. Opening the file again reads which lines are done; a last
# line that is incomplete is dropped. Knows the envelope of a line, not the request inside.


DUPLICATE = "duplicate_custom_id"
OK = 200


class DuplicateId(InvalidRequest):
    """A custom id that an earlier line has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLine:
    """A line of the input: what its envelope says, or what is wrong with it, and whether it has a result."""

    number: int
    custom_id: str | None
    envelope: Mapping[str, Any] = field(default_factory=dict)
    error: InvalidRequest | None = None
    earlier_status: int | None = None  # of its result; None: it has none yet


def result_id(number: int) -> str:
    """The id of the result of an input line."""
    return f"batch_req_{number}"


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


class ResultFile:
    """Results, appended and flushed one by one. Only one process at a time writes to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
        try:
            self._lock()
            self._by_custom_id: dict[str, int] = {}  # status of a result
            self._by_id: dict[str, int] = {}  # of results whose line had no custom id
            self._scan()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def match(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[InputLine]:
        """The lines of an input, each with its result in this file. A repeated custom id is an error."""
        seen: set[str] = set()
        for number, raw in lines:
            custom_id: str | None = None
            try:
                envelope = _envelope(raw)
                custom_id = _custom_id(envelope)
                if custom_id in seen:
                    raise DuplicateId(
                        f"custom_id {custom_id!r:.200} is used by an earlier line", param="custom_id"
                    )
            except InvalidRequest as error:
                status = self._by_id.get(result_id(number))
                yield InputLine(number=number, custom_id=custom_id, error=error, earlier_status=status)
                continue
            seen.add(custom_id)
            status = self._by_custom_id.get(custom_id)
            yield InputLine(number=number, custom_id=custom_id, envelope=envelope, earlier_status=status)

    def write(self, result: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(result).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written: {error.strerror or error}") from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{self._path}: another process is writing to it") from error

    def _scan(self) -> None:
        """Take in what is done, and drop a last line that is not complete."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            self._take(number, line)
            end += len(line)
        os.truncate(self._file.fileno(), end)

    def _take(self, number: int, line: bytes) -> None:
        try:
            result = json.loads(line)
            name, own, response = result["custom_id"], result["id"], result["response"]
            status, error = int(response["status_code"]), response["body"].get("error") or {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as wrong:
            message = (
                f"{self._path}: line {number} is not a result of a batch; give another file for the results"
            )
            raise InputError(message) from wrong
        if isinstance(name, str) and error.get("code") != DUPLICATE:
            self._by_custom_id[name] = status
        else:
            self._by_id[str(own)] = status


def _envelope(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("it is not JSON") from error
    if not isinstance(value, dict):
        raise InvalidRequest("it is not a JSON object")
    return value


def _custom_id(envelope: Mapping[str, Any]) -> str:
    custom_id = envelope.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequest("custom_id must be a text that is not empty", param="custom_id")
    return custom_id


URLS = (CHAT, COMPLETIONS, *IN_BATCHES)
BAD_REQUEST, NOT_FOUND, INTERNAL_ERROR = 400, 404, 500


class BatchProgress:
    """Counts results, and shows the progress on a terminal."""

    def __init__(self, total: int) -> None:
        self.failed: list[int] = []  # input lines whose result is an error, of this run or an earlier one
        self._total = total
        self._num_answered = self._num_failed = self._num_skipped = 0
        self._num_input = self._num_output = 0
        self._started_s = time.perf_counter()
        self._bar: RequestBar | None = None

    def start(self) -> None:
        """Begin to measure: the model is loaded."""
        self._started_s = time.perf_counter()
        self._bar = RequestBar("Requests", self._total)

    def on_result(self, number: int, status: int, num_input: int, num_output: int) -> None:
        if status == 200:
            self._num_answered += 1
        else:
            self._num_failed += 1
            self.failed.append(number)
        self._num_input += num_input
        self._num_output += num_output
        self._advance()

    def on_skipped(self, line: InputLine) -> None:
        self._num_skipped += 1
        if line.earlier_status != 200:
            self.failed.append(line.number)
        self._advance()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def summary(self) -> str:
        if self._num_skipped == self._total:
            return f"Nothing to do: all {self._total:,} requests have a result"
        skipped = f", {self._num_skipped} done before" if self._num_skipped else ""
        return f"{self._num_answered} answered, {self._num_failed} failed{skipped}; {self._rates()}"

    def _advance(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._rates())

    def _rates(self) -> str:
        seconds = max(time.perf_counter() - self._started_s, 1e-9)
        return f"{self._num_input / seconds:.1f} tokens/s in, {self._num_output / seconds:.1f} tokens/s out"


@dataclass(slots=True, eq=False)
class OpenLine:
    """One line of the input under way."""

    number: int
    custom_id: str
    url: str
    body: ParsedBody
    num_prompts: int
    outputs: dict[int, RequestOutput] = field(default_factory=dict)  # by the number of the prompt


class BatchRun:
    """Runs the lines that have no result yet."""

    def __init__(
        self, front: Frontend, names: tuple[str, ...], results: ResultFile, progress: BatchProgress
    ) -> None:
        self._front = front
        self._facts = ModelFacts(
            names=names,
            max_model_len=front.max_model_len,
            generation=front.loaded.checkpoint.generation,
        )
        self._forms = pooled_forms(front.pooled, OWN_LIMITS)
        self._results = results
        self._progress = progress
        self._open: dict[int, OpenLine] = {}

    def run(self, lines: Iterable[InputLine]) -> None:
        # A row's worth of requests waits behind every row, so that a leaving one is followed at once.
        max_open = 2 * self._front.loaded.config.scheduler.max_num_seqs
        submissions = self._submissions(lines)
        with closing(run_requests(self._front, submissions, max_open=max_open)) as outputs:
            for output in outputs:
                self._take(output)

    def _submissions(self, lines: Iterable[InputLine]) -> Iterator[Submission]:
        for given in lines:
            number, custom_id = given.number, given.custom_id
            if given.earlier_status is not None:
                self._progress.on_skipped(given)
                continue
            try:
                if given.error is not None or custom_id is None:
                    raise given.error or InvalidRequest("it has no custom_id")
                line, prepared = self._read(number, custom_id, given.envelope)
            except Exception as error:  # a line can be wrong in any way, and none of them stops the others
                self._refuse(number, custom_id, error)
                continue
            self._open[number] = line
            for index, request in enumerate(prepared):
                yield Submission(name=f"{number}.{index}", request=request)

    def _read(
        self, number: int, custom_id: str, envelope: Mapping[str, Any]
    ) -> tuple[OpenLine, list[PreparedRequest]]:
        url, content = _target(envelope)
        if url in IN_BATCHES:
            body = self._forms[url].parse(content, self._facts, strict=True)
            prepared = prepare_inputs(body, self._front.inputs)
            line = OpenLine(number=number, custom_id=custom_id, url=url, body=body, num_prompts=len(prepared))
            return line, prepared
        body = parse_body(url, content, self._facts)
        if body.sampling.structured_outputs is not None:
            check(body.sampling.structured_outputs, body.structure_field)
        if body.messages is not None:
            prepared = [self._front.read_chat(body.messages, body.sampling, is_local=False, **body.template)]
        else:
            prompts = (prompt for prompt in body.prompts if not isinstance(prompt, TextPair))
            prepared = [self._front.read(prompt, body.sampling) for prompt in prompts]
        line = OpenLine(number=number, custom_id=custom_id, url=url, body=body, num_prompts=len(prepared))
        return line, prepared

    # -- results -------------------------------------------------------------------------------------------

    def _take(self, output: RequestOutput) -> None:
        number, index = map(int, output.request_id.split("."))
        line = self._open[number]
        line.outputs[index] = output
        if len(line.outputs) < line.num_prompts:
            return
        del self._open[number]
        outputs = [line.outputs[index] for index in range(line.num_prompts)]
        parts = [part for output in outputs for part in output.outputs]
        errors = [
            part.error or "it was aborted" for part in parts if part.finish_reason in ("error", "abort")
        ]
        if errors:
            failure = error_body(
                f"the request failed: {errors[0]}", kind="server_error", code="internal_error"
            )
            self._write(number, line.custom_id, INTERNAL_ERROR, failure)
            return
        num_input = sum(len(output.prompt_token_ids) for output in outputs)
        num_output = sum(len(part.token_ids) for part in parts)
        self._write(number, line.custom_id, OK, self._body(line, outputs), num_input, num_output)

    def _body(self, line: OpenLine, outputs: list[RequestOutput]) -> dict[str, Any]:
        tokenizer = self._front.tokenizer
        assert tokenizer is not None
        if line.url == COMPLETIONS:
            return completion_body(line.body, outputs, tokenizer)
        if line.url in IN_BATCHES:
            num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
            num_cached = sum(output.num_cached_tokens for output in outputs)
            usage = Usage(num_prompt=num_prompt, num_output=0, num_cached=num_cached)
            found: dict[str, Any] = self._forms[line.url].shape(line.body, outputs, usage)
            return found
        return chat_body(line.body, outputs[0], tokenizer)

    def _refuse(self, number: int, custom_id: str | None, error: Exception) -> None:
        if not isinstance(error, InvalidRequest | UnsupportedRoute):
            message = f"line {number} could not be read: {type(error).__name__}"
            body = error_body(message, kind="server_error", code="internal_error")
            self._write(number, custom_id, INTERNAL_ERROR, body)
            return
        status, code = BAD_REQUEST, None
        if isinstance(error, UnknownModel):
            status, code = NOT_FOUND, "model_not_found"
        elif isinstance(error, UnsupportedRoute):
            status, code = NOT_FOUND, error.code
        elif isinstance(error, DuplicateId):
            code = DUPLICATE
        param = None if isinstance(error, UnsupportedRoute) else error.param
        body = error_body(f"line {number}: {error}", kind="invalid_request_error", param=param, code=code)
        self._write(number, custom_id, status, body)

    def _write(
        self,
        number: int,
        custom_id: str | None,
        status: int,
        body: dict[str, Any],
        num_input: int = 0,
        num_output: int = 0,
    ) -> None:
        response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
        result = {"id": result_id(number), "custom_id": custom_id, "response": response, "error": None}
        self._results.write(result)
        self._progress.on_result(number, status, num_input, num_output)


def _target(envelope: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    method, url, body = (envelope.get(name) for name in ("method", "url", "body"))
    if method != "POST":
        raise InvalidRequest(f"method must be POST, not {method!r:.100}", param="method")
    if url not in URLS:
        raise InvalidRequest(f"url must be one of {', '.join(URLS)}, not {url!r:.200}", param="url")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object", param="body")
    return url, body
