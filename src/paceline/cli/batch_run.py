"""A batch of requests through one engine: every line gets exactly one result, whatever is wrong with it.

Lines are read as the engine drains, so that neither the requests nor the results are ever all in memory.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.cli.batch_files import DUPLICATE, OK, DuplicateId, InputLine, ResultFile, result_id
from paceline.errors import InvalidRequest
from paceline.llm.batch import Submission, run_requests
from paceline.llm.frontend import Frontend
from paceline.llm.outputs import RequestOutput
from paceline.llm.prompts import PreparedRequest
from paceline.server.api.openai_fields import CHAT, COMPLETIONS
from paceline.server.api.openai_requests import ModelFacts, ParsedBody, parse_body
from paceline.server.api.openai_responses import chat_body, completion_body, error_body
from paceline.server.failures import UnknownModel

BAD_REQUEST, NOT_FOUND, INTERNAL_ERROR = 400, 404, 500


class Watcher(Protocol):
    """Gets the progress of a batch."""

    def on_result(self, number: int, status: int, num_input: int, num_output: int) -> None: ...

    def on_skipped(self, line: InputLine) -> None: ...


@dataclass(slots=True, eq=False)
class Line:
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
        self, front: Frontend, names: tuple[str, ...], results: ResultFile, watcher: Watcher
    ) -> None:
        self._front = front
        self._facts = ModelFacts(
            names=names,
            max_model_len=front.max_model_len,
            generation=front.loaded.checkpoint.generation,
        )
        self._results = results
        self._watcher = watcher
        self._open: dict[int, Line] = {}

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
                self._watcher.on_skipped(given)
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
    ) -> tuple[Line, list[PreparedRequest]]:
        url, content = _target(envelope)
        body = parse_body(url, content, self._facts)
        if body.messages is not None:
            options = body.template
            chat = self._front.read_chat(
                body.messages,
                body.sampling,
                switches=options.switches,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
            )
            prepared = [chat]
        else:
            prepared = [self._front.read(prompt, body.sampling) for prompt in body.prompts]
        line = Line(number=number, custom_id=custom_id, url=url, body=body, num_prompts=len(prepared))
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

    def _body(self, line: Line, outputs: list[RequestOutput]) -> dict[str, Any]:
        tokenizer = self._front.tokenizer
        assert tokenizer is not None
        if line.url == COMPLETIONS:
            return completion_body(line.body, outputs, tokenizer)
        return chat_body(line.body, outputs[0], tokenizer)

    def _refuse(self, number: int, custom_id: str | None, error: Exception) -> None:
        if not isinstance(error, InvalidRequest):
            message = f"line {number} could not be read: {type(error).__name__}"
            body = error_body(message, kind="server_error", code="internal_error")
            self._write(number, custom_id, INTERNAL_ERROR, body)
            return
        status, code = BAD_REQUEST, None
        if isinstance(error, UnknownModel):
            status, code = NOT_FOUND, "model_not_found"
        elif isinstance(error, DuplicateId):
            code = DUPLICATE
        body = error_body(
            f"line {number}: {error}", kind="invalid_request_error", param=error.param, code=code
        )
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
        self._watcher.on_result(number, status, num_input, num_output)


def _target(envelope: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    method, url, body = (envelope.get(name) for name in ("method", "url", "body"))
    if method != "POST":
        raise InvalidRequest(f"method must be POST, not {method!r:.100}", param="method")
    if url not in (CHAT, COMPLETIONS):
        raise InvalidRequest(f"url must be {CHAT} or {COMPLETIONS}, not {url!r:.200}", param="url")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object", param="body")
    return url, body
