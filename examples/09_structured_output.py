"""Answers with a form: JSON by a schema, one of a few words, a pattern.

Tokens that do not fit the form are never drawn, so that what comes back parses whatever the model is.

    python examples/09_structured_output.py [MODEL]
"""

import json
import sys

from paceline import LLM, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "languages": {"type": "array", "items": {"enum": ["en", "de", "fr"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
FORMS = [
    ("Invent a person, as JSON.", {"json": PERSON}),
    ("Is the sea blue? Answer yes or no.", {"choice": ["yes", "no"]}),
    ("Write a date like 2024-12-31.", {"regex": r"20\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d)"}),
]

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
chats = [[{"role": "user", "content": question}] for question, _ in FORMS]
params = [SamplingParams(seed=1, max_tokens=300, structured_outputs=form) for _, form in FORMS]
person, word, date = (output.outputs[0].text for output in llm.chat(chats, params))

print(person)
print(f"{word}; {date}")
print("fields:", ", ".join(json.loads(person)))
