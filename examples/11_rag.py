"""Find, rank and answer with one server: its model makes vectors of passages, ranks the nearest and answers from them.

paceline serve --pooling mean                       # in another terminal
pip install openai numpy
python examples/11_rag.py [URL]
"""

import os
import sys

import numpy as np
from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PACELINE_API_KEY", "none"))
model = client.models.list().data[0].id
PASSAGES = [
    "The lighthouse at Cape Sorrow was lit in 1871.",
    "Bread rises best at 27 degrees.",
    "A lighthouse keeper slept by day.",
    "The harbour freezes in February.",
]
QUESTION = "When was the lighthouse lit?"


def vectors(texts: list[str]) -> np.ndarray:
    answer = client.embeddings.create(model=model, input=texts)
    return np.array([entry.embedding for entry in answer.data])  # of length 1: products are cosines


near = np.argsort(-vectors(PASSAGES) @ vectors([QUESTION])[0])[:3]
found = [PASSAGES[place] for place in near]
asked = {"model": model, "query": QUESTION, "documents": found, "top_n": 1}
ranked: dict = client.post("/rerank", cast_to=object, body=asked)
best = ranked["results"][0]
print(f"{len(near)} near, the best ({best['relevance_score']:.2f}): {best['document']['text']}")
turns = [{"role": "user", "content": f"{best['document']['text']} In one sentence: {QUESTION}"}]
chat = client.chat.completions.create(model=model, messages=turns, max_tokens=40)
print("answer:", chat.choices[0].message.content)
