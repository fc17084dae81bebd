"""Stream a chat from a server with OpenAI's own client, and read the receipt at its end.

make serve                                          # in another terminal
pip install openai
python examples/02_chat_stream.py [URL]
"""

import os
import sys

from openai import APIConnectionError, OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PACELINE_API_KEY", "none"))
try:
    model = client.models.list().data[0].id
except APIConnectionError:
    sys.exit(f"no server at {url}: start one with `make serve`, or name another: {sys.argv[0]} URL")

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Tell me about the sea in two sentences."}],
    max_tokens=60,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"ttft_slo_ms": 60_000},  # what OpenAI's API does not know goes here
    extra_headers={"x-paceline-receipt": "true"},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        used = chunk.usage.model_dump()["paceline"]
        print(f"\n{chunk.usage.completion_tokens} tokens; waited {used['queue_ms']} ms")
