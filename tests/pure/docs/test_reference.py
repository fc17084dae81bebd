"""The generated pages are what the code would write now."""

from __future__ import annotations

from tools import api_pages


def test_the_generated_pages_are_up_to_date() -> None:
    for path, text in api_pages.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make options`"


def test_the_pages_have_what_they_are_for() -> None:
    http, python = api_pages.http_page(), api_pages.python_page()
    assert "| `POST /v1/chat/completions` |" in http and "\n## POST /v1/chat/completions\n" in http
    assert "| `POST /v1/batches` |" in http and "| `GET /health/ready` |" in http
    assert "async def abort(request_id: str) -> None" in python
    assert "| `max_tokens` | int | `16` |" in python
