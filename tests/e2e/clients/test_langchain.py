"""LangChain against a live server: `with_structured_output` and a loop of tools, by a random model and, where it is on
this machine, by SmolLM2. What either says has little meaning, but every answer and every call has its form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from tests.e2e.client_server import KEY, MODEL, ClientServer, client_server
from tests.torch.gguf_reference import smollm2_path

if TYPE_CHECKING:  # reading it takes seconds, also where all tests are only collected
    from langchain_openai import ChatOpenAI

SMOLLM2 = smollm2_path()
QUESTION: Any = ("user", "What is the weather in Oslo?")


class Weather(BaseModel):
    """What the weather is like."""

    sky: Literal["clear", "grey"]
    degrees: int = Field(ge=-40, le=50)


def weather(city: Literal["Paris", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """The weather of the coming days."""
    return f"{days} days of sun in {city}"


@pytest.fixture(scope="module")
def weather_tool() -> Any:
    from langchain_core.tools import tool

    return tool(weather)


class RealModel(ClientServer):
    """SmolLM2 in the place of the random model."""

    def _model_flags(self) -> list[str]:
        _, *flags = super()._model_flags()
        kept = flags[flags.index("--served-model-name") :]
        return [str(SMOLLM2), *kept, "--max-model-len", "2048"]


@pytest.fixture(
    scope="module",
    params=[
        ClientServer,
        pytest.param(
            RealModel,
            marks=pytest.mark.skipif(
                SMOLLM2 is None or not SMOLLM2.exists(), reason="SmolLM2 is not on this machine"
            ),
        ),
    ],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("langchain"), kind=request.param) as running:
        running.wait_for(200)
        yield running


@pytest.fixture
def chat(server: ClientServer) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key=SecretStr(KEY),
        model=MODEL,
        max_retries=0,
        seed=1,
        max_tokens=200,
    )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: Any) -> None:
    asked = chat.with_structured_output(Weather, method=method)
    assert isinstance(asked.invoke([QUESTION]), Weather)
    raw = chat.with_structured_output(Weather, method=method, include_raw=True).invoke([QUESTION])
    assert isinstance(raw, dict) and isinstance(raw["parsed"], Weather) and raw["parsing_error"] is None
    *_, last = asked.stream([QUESTION])
    assert isinstance(last, Weather)


def test_a_loop_of_tools_that_ends_in_a_structure(chat: ChatOpenAI, weather_tool: Any) -> None:
    called = chat.bind_tools([weather_tool], tool_choice="required", parallel_tool_calls=False)
    answer: Any = called.invoke([QUESTION])
    assert answer.type == "ai"
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and not answer.invalid_tool_calls
    result = weather_tool.invoke(call)
    assert result.type == "tool" and "days of sun" in str(result.content)
    told = chat.with_structured_output(Weather).invoke([QUESTION, answer, result])
    assert isinstance(told, Weather)


def test_streamed_calls_add_up(chat: ChatOpenAI, weather_tool: Any) -> None:
    called = chat.bind_tools([weather_tool], tool_choice="weather")
    first, *rest = called.stream([QUESTION])
    whole: Any = first
    for chunk in rest:
        whole += chunk
    (call,) = whole.tool_calls
    assert weather_tool.invoke(call).type == "tool"
