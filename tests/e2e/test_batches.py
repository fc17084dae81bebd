"""Files and batches with the official `openai` client against a real server: from upload to results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.batch_client import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    begin,
    jsonl,
    num_completed,
    request,
    results,
    wait,
)
from tests.e2e.catalogue.structures import schema_format
from tests.e2e.client_server import (
    DISABLED_KEY,
    ENDLESS,
    KEY,
    NARROW_KEY,
    ClientServer,
    client_server,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("batches")
    with client_server(folder, "--batch-dir", str(folder / "kept"), "--max-file-bytes", "8M") as running:
        running.wait_for(200)
        yield running
        assert running.process.poll() is None
        running.wait_until(running.is_idle)
        assert "Traceback" not in running.log()


@pytest.fixture
def client(server: ClientServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as one:
        yield one


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, RESPONSES])
def test_a_batch_from_upload_to_results(client: OpenAI, url: str) -> None:
    batch = begin(client, jsonl(*(request(f"r{i}", url) for i in range(20))), url, metadata={"who": "me"})
    assert batch.object == "batch" and batch.status == "validating"
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = wait(client, batch.id)
    assert batch.status == "completed" and batch.metadata == {"who": "me"}
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        20,
        20,
        0,
    )
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.error_file_id is None and batch.errors is None
    found = results(client, batch.output_file_id)
    assert list(found) == [f"r{i}" for i in range(20)]
    for line in found.values():
        assert line["error"] is None and line["response"]["status_code"] == 200
        assert line["response"]["request_id"]
        usage = line["response"]["body"]["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 3
    assert batch.usage.output_tokens == 60
    file = client.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output" and file.bytes == len(client.files.content(file.id).content)


def test_a_line_is_answered_as_its_request_is(client: OpenAI) -> None:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    batch = wait(client, begin(client, jsonl(request("same", **body))).id)
    line = results(client, batch.output_file_id)["same"]
    asked = request("same", **body)["body"]
    answer = client.post("/chat/completions", body=asked, cast_to=object)
    told: Any = answer
    assert line["response"]["body"]["choices"] == told["choices"]


def test_a_line_may_ask_for_a_form(client: OpenAI) -> None:
    forms: list[dict[str, Any]] = [
        {"response_format": schema_format({"enum": ["yes", "no"]})},
        {"guided_regex": "["},
    ]
    lines = [request(str(n), max_tokens=9, ignore_eos=False, **form) for n, form in enumerate(forms)]
    batch = wait(client, begin(client, jsonl(*lines)).id)
    good = results(client, batch.output_file_id)["0"]["response"]["body"]["choices"][0]
    assert (good["message"]["content"], good["finish_reason"]) in (('"yes"', "stop"), ('"no"', "stop"))
    bad = results(client, batch.error_file_id)["1"]
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "guided_regex"


def test_bad_requests_get_error_lines_and_good_ones_results(client: OpenAI) -> None:
    lines = [request("good"), request("hot", temperature=9), request("tools", tools=[{"x": 1}])]
    batch = wait(client, begin(client, jsonl(*lines)).id)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
    assert list(results(client, batch.output_file_id)) == ["good"]
    errors = results(client, batch.error_file_id)
    assert list(errors) == ["hot", "tools"]
    assert errors["hot"]["response"]["status_code"] == 400
    assert errors["hot"]["response"]["body"]["error"]["param"] == "temperature"


def test_an_input_with_mistakes_runs_nothing_and_names_each(client: OpenAI) -> None:
    lines = jsonl(
        request("a"),
        request("a"),
        {**request("b"), "url": COMPLETIONS},
        {**request("c"), "method": "GET"},
        request("d", model="other"),
        {key: value for key, value in request("e").items() if key != "body"},
    )
    batch = wait(client, begin(client, b"{not json\n\n" + lines).id)
    assert batch.status == "failed" and batch.failed_at and batch.in_progress_at is None
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (1, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "mismatched_url"),
        (6, "invalid_method"),
        (7, "model_not_found"),
        (8, "missing_required_parameter"),
    ]
    assert batch.request_counts.total == 0 and batch.output_file_id is None


def test_cancelling_ends_what_runs_and_keeps_what_is_done(client: OpenAI, server: ClientServer) -> None:
    lines = [request("short"), request("long", max_tokens=ENDLESS)]
    batch = begin(client, jsonl(*lines))
    server.wait_until(lambda: num_completed(client, batch.id) == 1)
    server.wait_until(server.is_running)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    server.wait_until(server.is_idle)
    batch = wait(client, batch.id)
    assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
    assert list(results(client, batch.output_file_id)) == ["short"]
    errors = results(client, batch.error_file_id)
    assert errors["long"]["error"]["code"] == "batch_cancelled" and errors["long"]["response"] is None
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_what_is_over_cannot_be_cancelled(client: OpenAI) -> None:
    batch = wait(client, begin(client, jsonl(request("x"))).id)
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)


def test_a_key_sees_its_own_only(client: OpenAI, server: ClientServer) -> None:
    batch = wait(client, begin(client, jsonl(request("x"))).id)
    with OpenAI(base_url=f"{server.url}/v1", api_key=NARROW_KEY, max_retries=0) as other:
        calls: tuple[Callable[[], object], ...] = (
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.output_file_id),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.files.list(after=batch.input_file_id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        )
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call()
        assert list(other.files.list()) == [] and list(other.batches.list()) == []
        # Its limit of one request at a time does not count for lines, and lines do not count for it.
        own = begin(other, jsonl(request("endless", max_tokens=ENDLESS), request("short")))
        server.wait_until(lambda: num_completed(other, own.id) == 1)
        body = request("now")["body"]
        other.post("/chat/completions", body=body, cast_to=object)
        other.batches.cancel(own.id)
        wait(other, own.id, "cancelled")
    disabled = OpenAI(base_url=f"{server.url}/v1", api_key=DISABLED_KEY, max_retries=0)
    with disabled, pytest.raises(openai.PermissionDeniedError):
        disabled.files.list()


def test_lists_have_pages(client: OpenAI) -> None:
    made = [client.files.create(file=(f"{i}.jsonl", b"{}"), purpose="batch").id for i in range(5)]
    newest = client.files.list(limit=2)
    assert [file.id for file in newest.data] == made[:-3:-1] and newest.has_more
    following = client.files.list(limit=2, after=newest.data[-1].id)
    assert [file.id for file in following.data] == made[2:0:-1]
    assert [file.id for file in client.files.list(after=made[2], order="asc")] == made[3:]
    assert all(file.purpose == "batch_output" for file in client.files.list(purpose="batch_output"))
    assert set(made) <= {file.id for file in client.files.list()}  # the client walks all pages
    for file_id in made:
        assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[0])
    begun = begin(client, jsonl(request("listed")))
    assert [batch.id for batch in client.batches.list(limit=1).data] == [begun.id]
    wait(client, begun.id)
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"purpose": "fine-tune"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.files.list(**wrong)
        assert refused.value.param in wrong


def test_a_file_in_use_is_kept(client: OpenAI) -> None:
    batch = begin(client, jsonl(request("long", max_tokens=ENDLESS)))
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.delete(batch.input_file_id)
    assert refused.value.code == "file_in_use"
    client.batches.cancel(batch.id)
    wait(client, batch.id)
    assert client.files.delete(batch.input_file_id).deleted


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "/v1/models"},
        {"completion_window": "1h"},
        {"metadata": {"a": 1}},
        {"input_file_id": 3},
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
    ],
)
def test_a_batch_that_cannot_be_is_refused_by_the_field(client: OpenAI, wrong: dict[str, Any]) -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **wrong}
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/batches", body=body, cast_to=object)
    assert refused.value.param == next(iter(wrong))


def test_a_large_file_goes_to_disk_and_back(client: OpenAI, server: ClientServer, tmp_path: Path) -> None:
    before = memory_bytes(server.process.pid)
    path = tmp_path / "large.jsonl"
    with path.open("wb") as large:
        for number in range(7):
            large.write(bytes([65 + number]) * 2**20)
    file = client.files.create(file=path, purpose="batch")
    assert file.bytes == 7 * 2**20
    assert client.files.content(file.id).content == path.read_bytes()
    assert memory_bytes(server.process.pid) - before < 4 * 2**20
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("larger", b"x" * (8 * 2**20 + 1)), purpose="batch")
    assert refused.value.status_code == 413
    client.files.delete(file.id)


def memory_bytes(pid: int) -> int:
    """The most a process had in memory so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def test_the_log_and_the_metrics_know_of_batches(client: OpenAI, server: ClientServer) -> None:
    batch = wait(client, begin(client, jsonl(request("seen"))).id)
    server.wait_until(lambda: f"batch={batch.id} line=1 status=200" in server.log())
    server.wait_until(lambda: server.metric("batches") >= 1 and server.metric("batch_lines") == 0)
