"""A folder that sentence-transformers has saved is served with the vectors that it makes itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.e2e.client_server import MODEL, ClientServer, client_server
from tests.model_folder import write_encoder

TEXTS = [f"{'the quick brown fox ' * (number % 5)}jumps {number} times" for number in range(200)]
LONG = "a text that is longer than the model reads " * 4
PROMPTS = {"query": "search: ", "document": ""}


@pytest.fixture(scope="module")
def library() -> Any:
    if find_spec("sentence_transformers") is None:
        if os.environ.get("PACELINE_REQUIRE_SENTENCE_TRANSFORMERS") == "1":
            pytest.fail("sentence-transformers is not installed: see .ci/run")
        pytest.skip("sentence-transformers is not installed")
    return import_module("sentence_transformers")


class SavedServer(ClientServer):
    """Serves a folder that is there already."""

    def _model_flags(self) -> list[str]:
        flags = super()._model_flags()
        return [
            str(self.folder / "saved"),
            "--served-model-name",
            MODEL,
            *flags[flags.index("--api-keys-file") :],
        ]


@pytest.fixture(scope="module", params=["mean", "cls"])
def saved(
    library: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, ClientServer]]:
    """The library's model, and a server of the folder it has saved."""
    folder = tmp_path_factory.mktemp("saved")
    plain = write_encoder(folder / "plain")
    torch.manual_seed(4)
    config = transformers.BertConfig(**json.loads((plain / "config.json").read_text()), initializer_range=0.2)
    transformers.BertModel(config).save_pretrained(plain)
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # not BERT's, which splits words
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    modules = import_module("sentence_transformers.sentence_transformer.modules")
    base = import_module("sentence_transformers.base.modules")
    transformer = base.Transformer(str(plain), max_seq_length=64)
    pooling = modules.Pooling(config.hidden_size, pooling_mode=request.param)
    model = library.SentenceTransformer(
        modules=[transformer, pooling, modules.Normalize()], prompts=PROMPTS, device="cpu"
    )
    model.save(str(folder / "saved"))
    with client_server(folder, kind=SavedServer) as server:
        server.wait_for(200)
        yield model, server


def embedded(server: ClientServer, texts: list[str], **more: Any) -> np.ndarray:
    reply = server.ask("POST", "/v1/embeddings", {"model": MODEL, "input": texts, "truncate": True, **more})
    assert reply.status == 200, reply.body
    return np.array([entry["embedding"] for entry in reply.json["data"]], np.float32)


def test_vectors_are_those_of_the_library(saved: tuple[Any, ClientServer]) -> None:
    model, server = saved
    assert np.abs(embedded(server, TEXTS) - model.encode(TEXTS)).max() < 2e-5
    asked = model.encode(TEXTS[:20], prompt_name="query")
    assert np.abs(embedded(server, TEXTS[:20], prompt_name="query") - asked).max() < 2e-5
    assert np.abs(asked - model.encode(TEXTS[:20])).max() > 1e-3
    assert np.abs(embedded(server, [LONG]) - model.encode([LONG])).max() < 2e-5
