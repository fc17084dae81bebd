"""Options of the server from the command line, the environment and a file, in this order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.serve.flags import SERVE, merged
from paceline.config.engine import ModelConfig
from paceline.config.options import check_options, options_of
from paceline.config.server import ApiConfig, ProcessConfig, ServerConfig
from paceline.errors import ConfigError
from paceline.server.access.keys_file import Key, Keyring
from paceline.server.app import check_exposure
from paceline.server.open_api import model_names


def test_every_option_has_a_flag_and_flags_are_unique() -> None:
    flags = [name for each in SERVE.options for name in each.names]
    assert len(set(flags)) == len(flags)
    shown = {each.name for each in SERVE.options}
    for config in (ServerConfig, ApiConfig, ProcessConfig):
        assert {spec.name for spec in options_of(config)} <= shown


def test_the_first_place_that_says_something_counts(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "port: 1\nqueue-timeout: 5\nmax_model_len: 64\nserved-model-name: [a, b]\nstrict-fields: true\n"
    )
    environment = {
        "PACELINE_PORT": "2",
        "PACELINE_CONFIG": str(path),
        "PACELINE_STRICT_FIELDS": "no",
        "PACELINE_X": "y",
    }
    assert merged({"port": None}, SERVE.options, environment) == {
        "config": str(path),
        "port": 2,
        "queue_timeout_s": 5.0,
        "max_model_len": 64,
        "served_model_name": "a,b",
        "strict_fields": False,
    }
    assert merged({"port": 3}, SERVE.options, environment)["port"] == 3


def test_numbers_in_a_file_are_read_as_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "max-file-bytes: 200m\nmax-model-len: 4K\nmax-body-bytes: '1_000_000'\nqueue-timeout: 1e2\n"
    )
    assert merged({"config": str(path)}, SERVE.options, {}) == {
        "config": str(path),
        "max_file_bytes": 200_000_000,
        "max_model_len": 4096,
        "max_body_bytes": 1_000_000,
        "queue_timeout_s": 100.0,
    }


@pytest.mark.parametrize(
    "text, part",
    [
        ("max-file-bytes: 200x", "max-file-bytes must be a whole number, not '200x'"),
        ("port: [8000]", "port must be a whole number"),
        ("prot: 1", "'prot'; did you mean port"),
        ("port: [", "not a YAML file"),
        ("port: eight", "port must be a whole number"),
        ("port: true", "port must be a whole number"),
        ("- a", "name: value"),
        ("config: other.yaml", "'config'"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        merged({"config": str(path)}, SERVE.options, {})


def test_mistakes_in_the_environment_name_the_variable() -> None:
    for variable, value in (("PACELINE_PORT", "tcp://10.0.0.1:80"), ("PACELINE_STRICT_FIELDS", "maybe")):
        with pytest.raises(ConfigError, match=variable):
            merged({}, SERVE.options, {variable: value})
    with pytest.raises(ConfigError, match="cannot be read"):
        merged({"config": "/nowhere/x.yaml"}, SERVE.options, {})


@pytest.mark.parametrize(
    "given",
    [
        {"port": 70_000},
        {"max_body_bytes": 1},
        {"ssl_certfile": "x"},
        {"log_format": "xml"},
        {"metrics_prefix": "a b"},
        {"allowed_origins": "https://app.example/page"},
        {"allowed_origins": "app.example"},
        {"drain_timeout_s": -1.0},
    ],
)
def test_values_out_of_range_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**given)


def test_other_machines_are_accepted_only_with_a_key() -> None:
    ring = Keyring([Key(tenant="a", sha256=b"\x00" * 32)])
    for config in (ServerConfig(host="0.0.0.0"), ServerConfig(metrics_host="10.0.0.1", metrics_port=1)):
        with pytest.raises(ConfigError, match="--api-keys-file"):
            check_exposure(config, Keyring([]))
        check_exposure(config, ring)
    for config in (ServerConfig(), ServerConfig(host="::1"), ServerConfig(host="0.0.0.0", uds="/tmp/x")):
        check_exposure(config, Keyring([]))
        check_options(config)


def test_metrics_may_be_opened_without_a_key_but_not_the_api() -> None:
    check_exposure(
        ServerConfig(metrics_host="10.0.0.1", metrics_port=1, metrics_without_key=True), Keyring([])
    )
    exposed = ServerConfig(host="0.0.0.0", metrics_without_key=True)
    with pytest.raises(ConfigError, match="--api-keys-file"):
        check_exposure(exposed, Keyring([]))


# ----------------------------------------------------------------
# What a model is called in requests: a path of the machine is not shown unless the operator says so.


def names(model: str | None, served: str | None = None) -> tuple[str, ...]:
    return model_names(ModelConfig(model=model), ApiConfig(served_model_name=served))


def test_a_local_model_is_called_by_the_last_part_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "secret" / "Tiny-1.5B"
    folder.mkdir(parents=True)
    file = tmp_path / "secret" / "tiny.q8.gguf"
    file.touch()
    assert names(str(folder)) == names(f"{folder}/") == ("Tiny-1.5B",)
    assert names(str(file)) == ("tiny.q8.gguf", "tiny.q8")
    monkeypatch.chdir(folder)
    assert names(".") == names("../Tiny-1.5B") == ("Tiny-1.5B",)


def test_a_model_of_the_hub_keeps_its_name() -> None:
    assert names("org/Model-1.5B") == ("org/Model-1.5B", "Model-1.5B")


def test_an_operator_may_call_it_anything(tmp_path: Path) -> None:
    assert names(str(tmp_path), f"{tmp_path}, b") == (str(tmp_path), "b")
