"""Requests drawn from a server's own description of itself, most of them wrong in some small way.

Request number N of a seed is always the same, whatever came before it, so that one that fails can be sent again.
"""

from __future__ import annotations

import json
import random
from typing import Any

from tests.e2e.catalogue.served import KEYS, NAME
from tests.e2e.http_server import request_bytes

Schema = dict[str, Any]
TEXTS = (
    *(
        "",
        "a",
        "hi there",
        "\0",
        "\ufffe",
        "\u202egnp",
        "a\u0301\u0301",
        "\U0001f600",
        "\ufeff",
        "\x7f\x80",
        "\u2028",
    ),
    *(
        "<|end|>",
        "<|start|>",
        "</s>",
        "{{ 7*7 }}",
        "../../x",
        "'; --",
        "%00",
        "\\ud800",
        "x" * 257,
        "\u00e9" * 200,
    ),
    *("NaN", "null", "0", "1e999", "tiny", "text", "user", "\r\nX: y", "data: [DONE]\n\n", "a" * 3_000),
)
NUMBERS = (
    *(
        0,
        1,
        -1,
        2,
        3,
        99,
        100,
        255,
        256,
        2**31 - 1,
        2**31,
        2**32,
        2**53,
        2**63 - 1,
        2**63,
        -(2**63),
        2**64,
        10**30,
    ),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 1e-300, 1e-9, 1e308, 2.0000001, True, False),
)
ODD: tuple[Any, ...] = (
    None,
    True,
    [],
    {},
    "",
    0,
    [[]],
    [{}],
    [None],
    {"": 1},
    {"type": "text"},
    [["a"]],
    {"a": {"b": [1]}},
)
PARTS = ("input_text", "image_url", "tool_use", "", 5)
ROLES = ("system", "developer", "tool", "function", "boss", "", 5)
NEEDED = ("model", "messages", "prompt", "input", "tokens")
HEADERS = (
    "Content-Type: text/plain",
    "Content-Type: application/json; charset=latin-1",
    "Content-Encoding: gzip",
    "X-Request-Id: " + "x" * 200,
    "Expect: 100-continue",
    "Accept: text/event-stream",
    "Authorization: Bearer nobody",
)
# Answers are to be short: what is about their length is drawn among small numbers most of the time.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
# Nor are they to depend on how fast the machine is: a good objective is one that will be kept.
OBJECTIVES, AN_HOUR_MS = ("deadline_ms", "ttft_slo_ms", "itl_slo_ms"), 3_600_000
RAW_BYTES = (b"\0", b"\xff", b'"', b"{", b"]", b",", b"\\", b"1e999", b"NaN", b"\\ud800", b"\r\n")


class Fuzz:
    """All requests of one seed against one description."""

    def __init__(self, seed: int, document: Schema) -> None:
        self._seed = seed
        self._bodies: list[tuple[str, Schema]] = []
        self._others: list[tuple[str, str]] = []
        for path, operations in sorted(document["paths"].items()):
            for method, operation in sorted(operations.items()):
                if "requestBody" in operation:
                    content = operation["requestBody"]["content"]["application/json"]
                    # Routes that make tokens are what most of this is about.
                    self._bodies += [(path, content["schema"])] * (
                        3 if "stream" in content["schema"]["properties"] else 1
                    )
                else:
                    self._others.append((method.upper(), path))

    def request(self, number: int) -> bytes:
        return _Draw(random.Random(f"{self._seed}:{number}")).request(self._bodies, self._others)


class _Draw:
    """One request."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _some(self, names: Schema, most: int) -> list[str]:
        return self._rng.sample(sorted(names), self._rng.randint(0, min(most, len(names))))

    def request(self, bodies: list[tuple[str, Schema]], others: list[tuple[str, str]]) -> bytes:
        headers = [f"Authorization: Bearer {KEYS['alpha']}"]
        if self.chance(0.03):
            headers.append(self._rng.choice(HEADERS))
        if self.chance(0.05):
            method, path = self._rng.choice(others)
            name = self._rng.choice((NAME, "x", "%00", "..", "a/b", "\u00e9".encode().hex()))
            path = path.replace("{id}", name).replace("{rest}", name)
            return request_bytes(method, path, headers=tuple(headers), close=False)
        path, schema = self._rng.choice(bodies)
        data = json.dumps(self.body(schema), ensure_ascii=self.chance(0.5)).encode("utf-8", "surrogatepass")
        if self.chance(0.06):
            data = self.damaged(data)
        return request_bytes("POST", path, data, headers=tuple(headers), close=False)

    def body(self, schema: Schema) -> Any:
        properties: Schema = schema["properties"]
        chosen = set(schema["required"]) | set(self._some(properties, 5))
        chosen |= set(properties) & {"max_tokens", "max_output_tokens"}
        body = {name: self.field(name, properties[name]) for name in sorted(chosen)}
        if {"prompt", "messages"} <= set(body) and self.chance(0.9):
            del body["prompt"]
        if self.chance(0.5):
            for _ in range(self._rng.randint(1, 2)):
                self.spoil(body, properties)
        for name in OBJECTIVES:
            if type(body.get(name)) is int and 0 < body[name] < AN_HOUR_MS:
                body[name] = AN_HOUR_MS
        return body if not self.chance(0.01) else self._rng.choice(ODD)

    def field(self, name: str, schema: Schema) -> Any:
        if name == "model":
            return NAME
        if name in LENGTHS and not self.chance(0.02):
            return self._rng.randint(1, 4) if name != "min_tokens" else self._rng.randint(0, 2)
        if name in ("messages", "input") and not self.chance(0.05):
            return [self.message() for _ in range(self._rng.randint(1, 3))]
        return self.value(schema)

    def message(self) -> Any:
        content: Any = self.text()
        if self.chance(0.3):
            content = [
                {"type": self._rng.choice(PARTS) if self.chance(0.1) else "text", "text": self.text()}
                for _ in range(self._rng.randint(1, 2))
            ]
        role = self._rng.choice(ROLES if self.chance(0.1) else ("user", "assistant"))
        message = {"role": role, "content": content}
        if self.chance(0.1):
            arguments = self._rng.choice(('{"a": 1}', '{"a": "\\ud800"}', "{", {"b": "</s>"}, None))
            message["tool_calls"] = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
        if self.chance(0.1):
            message[self._rng.choice(("name", "tool_call_id", "reasoning_content", "x"))] = self.text()
        return message

    def value(self, schema: Schema) -> Any:
        """Something the schema allows, or nearly."""
        if "anyOf" in schema:
            return self.value(self._rng.choice(schema["anyOf"]))
        if "enum" in schema:
            return self._rng.choice(schema["enum"])
        kind = schema.get("type")
        if kind in ("integer", "number"):
            return self.number(schema, kind)
        if kind == "string":
            return self._rng.choice(("a", "hi", "x y", "The"))
        if kind == "boolean":
            return self.chance(0.5)
        if kind == "array":
            return [self.value(schema.get("items", {})) for _ in range(self._rng.randint(0, 3))]
        if kind == "object":
            part = schema.get("additionalProperties", {})
            keys = self._rng.sample(("5", "70", "99", "include_usage", "x"), self._rng.randint(0, 2))
            return {key: self.value(part) for key in keys}
        return self._rng.choice(ODD) if kind is None else None

    def number(self, schema: Schema, kind: str) -> Any:
        low: Any = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        high: Any = schema.get("maximum", 100)
        if kind == "integer":
            return self._rng.randint(max(low, -1), min(high, 99))
        return round(self._rng.uniform(low, high), 3)

    def text(self) -> str:
        return self._rng.choice(TEXTS) if self.chance(0.3) else self._rng.choice(("hi", "a b c", "Tell me"))

    # -------------------------------------------------------------- what goes wrong

    def spoil(self, body: dict[str, Any], properties: Schema) -> None:
        """Change one field: another type, one off, a limit, something odd, or nothing at all."""
        names = set(body) | set(self._rng.sample(sorted(properties), min(2, len(properties))))
        if self.chance(0.7):  # most requests get past what every request needs
            names -= set(NEEDED)
        name = self._rng.choice(sorted(names) or ["x"])
        ways = (self._swapped, self._beside, self._odd, self._text_of, self._too_many)
        if self.chance(0.1):
            body.pop(name, None)
        elif self.chance(0.1):
            body[self._rng.choice((name.upper(), name + "s", "x", "\u00e9", "", "k" * 300))] = self._odd(
                {}, None
            )
        else:
            body[name] = self._rng.choice(ways)(properties.get(name, {}), body.get(name))

    def _swapped(self, schema: Schema, value: Any) -> Any:
        if isinstance(value, bool | int | float):
            return self._rng.choice((str(value), [value], {"value": value}, not value, float(value) + 0.5))
        if isinstance(value, str):
            return self._rng.choice(([value], {"text": value}, 5, True, [[value]]))
        return json.dumps(value)

    def _beside(self, schema: Schema, value: Any) -> Any:
        """The ends of a range, and one step beyond them."""
        kinds = [schema, *schema.get("anyOf", ())]
        ends = [
            kind[key] for kind in kinds for key in ("minimum", "maximum", "exclusiveMinimum") if key in kind
        ]
        if not ends:
            return self._rng.choice(NUMBERS)
        return self._rng.choice(ends) + self._rng.choice((-1, 0, 1, 0.001, -0.001))

    def _odd(self, schema: Schema, value: Any) -> Any:
        return self._rng.choice(self._rng.choice((ODD, NUMBERS, TEXTS)))

    def _text_of(self, schema: Schema, value: Any) -> Any:
        longest = [kind["maxLength"] for kind in (schema, *schema.get("anyOf", ())) if "maxLength" in kind]
        if longest and self.chance(0.5):
            return "x" * (self._rng.choice(longest) + self._rng.choice((0, 1)))
        return self._rng.choice(TEXTS)

    def _too_many(self, schema: Schema, value: Any) -> Any:
        counts = [kind["maxItems"] for kind in (schema, *schema.get("anyOf", ())) if "maxItems" in kind]
        count = min(self._rng.choice(counts or [5]), 2_000) + self._rng.choice((0, 1))
        part = value[0] if isinstance(value, list) and value else self._rng.choice(("a", 5, [5], None))
        return [part] * count

    def damaged(self, data: bytes) -> bytes:
        at = self._rng.randrange(len(data))
        way = self._rng.randrange(4)
        if way == 0:
            return data[:at]
        if way == 1:
            return data[:at] + self._rng.choice(RAW_BYTES) + data[at:]
        if way == 2:
            return data[:at] + bytes([data[at] ^ (1 << self._rng.randrange(8))]) + data[at + 1 :]
        return data[:-1] + b"," + data[1:]
