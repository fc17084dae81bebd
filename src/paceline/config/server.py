"""Every option of `paceline serve` beside those of the model and the engine, declared once.

`ServerConfig` is what listens, protects, logs and stops; `ApiConfig` is what a request may ask for and how long it
may wait. Flags, the keys of a config file, environment variables and validation are derived from the fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from paceline.config.options import CheckedOptions, check_options, option
from paceline.errors import ConfigError

LOG_FORMATS = ("auto", "text", "json")
SHOW_PROMPTS = ("auto", "always", "never")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MIB = 2**20
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)
_METRICS_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}:?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig(CheckedOptions):
    """What requests may ask for, and how many may wait how long."""

    PANEL: ClassVar = "Requests"

    served_model_name: str | None = option(None, "model name in requests; commas for several", basic=True)
    strict_fields: bool = option(
        False, "reject requests with unknown fields, instead of only reporting the fields"
    )
    max_logprobs: int = option(20, "most log probabilities per token", low=1, high=20)
    max_waiting_requests: int = option(
        256, "most waiting requests; others get a 429", low=1, high=100_000, basic=True
    )
    max_waiting_tokens: int | None = option(None, "most prompt tokens of waiting requests", low=1)
    queue_timeout_s: float = option(
        120.0, "longest wait for a first token, in seconds", low=0.05, flag="--queue-timeout", basic=True
    )
    request_timeout_s: float = option(
        600.0, "longest duration of a request, in seconds", low=0.05, flag="--request-timeout"
    )

    tool_call_parser: str = option(
        "auto", "how the model writes tool calls, by vLLM's names; auto: by its chat template; none: no tools"
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning, by vLLM's names; auto: by its chat template; none: as text",
    )
    max_thinking_tokens: int | None = option(
        None, "most tokens of reasoning in an answer; a request may ask for fewer", low=0
    )

    allowed_media_domains: str = option(
        "",
        "hosts from which pictures are fetched that requests link to; commas for several; none: links are refused",
        panel="Pictures",
        metavar="HOST",
    )
    max_media_body_bytes: int = option(
        32 * MIB,
        "largest request body where a model sees pictures",
        low=1024,
        high=1024 * MIB,
        panel="Pictures",
    )

    @property
    def media_domains(self) -> tuple[str, ...]:
        return split_list(self.allowed_media_domains)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names given for the model; empty when it keeps its own."""
        return split_list(self.served_model_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BillingConfig(CheckedOptions):
    """What requests cost, and where it is written down."""

    PANEL: ClassVar = "Billing"

    ledger: str | None = option(None, "SQLite file that gets an entry with usage and price for each request")
    price_factors: str = option(
        "interactive=1,standard=1,spot=0.25:1,batch=0.5",
        "factors on a key's prices by class; spot: a floor and a cap, between which the load decides; host, disk: on "
        "cached tokens loaded from there",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig(CheckedOptions):
    """Where files and batches are kept, and how much of them."""

    PANEL: ClassVar = "Files and batches"

    batch_dir: str | None = option(None, "store files and batches here; enables their API", basic=True)
    max_file_bytes: int = option(200 * MIB, "largest uploaded file", low=1024, high=16 * 1024 * MIB)
    max_stored_bytes: int = option(4 * 1024 * MIB, "most bytes stored for one key", low=1024, high=2**50)
    max_batch_lines: int = option(50_000, "most requests in a batch", low=1, high=1_000_000)
    max_batch_rows: int | None = option(
        None, "most requests of batches running at once; default: what other requests leave free", low=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig(CheckedOptions):
    """What the figures of a server are judged by, and where else they go."""

    PANEL: ClassVar = "Logs and metrics"

    slo_ttft_ms: float | None = option(
        None, "goodput: target time to the first token, in milliseconds", low=0.001
    )
    slo_itl_ms: float | None = option(
        None, "goodput: target mean time between tokens, in milliseconds", low=0.001
    )
    slo_e2e_ms: float | None = option(
        None, "goodput: target time to the last token, in milliseconds", low=0.001
    )
    cost_per_hour: float | None = option(
        None, "price of this server per hour, in any currency, for the cost of a million tokens", low=0.0
    )

    show_prompts: str = option(
        "auto",
        "show the first words of prompts on the live page; auto: on a loopback server without keys",
        choices=SHOW_PROMPTS,
    )
    otlp_endpoint: str | None = option(
        None, "send a span for each request to this OpenTelemetry collector, over HTTP; needs paceline[otel]"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, what it lets in, how it logs and how it stops."""

    PANEL: ClassVar = "Server"

    host: str = option("127.0.0.1", "address to listen on; all but loopback need a key", basic=True)
    port: int = option(8000, "port to listen on; 0: any free port", low=0, high=65535, basic=True)
    uds: str | None = option(None, "listen on this unix socket instead of a port")
    ssl_certfile: str | None = option(None, "certificate for HTTPS")
    ssl_keyfile: str | None = option(None, "private key of the certificate")
    allowed_hosts: str | None = option(None, "further host names of this server, separated by commas; *: any")
    allowed_origins: str | None = option(
        None, "origins whose web pages may use the server (CORS), separated by commas; *: any", metavar="URL"
    )
    api_keys_file: str | None = option(None, "file with API keys; see paceline keys", basic=True)
    metrics_host: str = option(
        "127.0.0.1", "address of the separate listener for metrics", panel="Logs and metrics"
    )
    metrics_port: int | None = option(
        None,
        "serve /metrics on this port instead of the main one",
        low=0,
        high=65535,
        panel="Logs and metrics",
    )
    metrics_without_key: bool = option(False, "serve /metrics without a key", panel="Logs and metrics")
    metrics_prefix: str = option(
        "paceline",
        "prefix of metric names; vllm suits vLLM's dashboards, paceline_ has no colon",
        panel="Logs and metrics",
    )

    max_connections: int = option(1024, "most open connections", low=1, high=1_000_000, panel="Connections")
    backlog: int = option(
        1024, "most connections that wait to be accepted", low=1, high=65535, panel="Connections"
    )
    max_body_bytes: int = option(
        2 * MIB, "largest request body", low=1024, high=64 * MIB, panel="Connections"
    )
    max_header_bytes: int = option(
        16_384, "largest header block of a request", low=1024, high=65_536, panel="Connections"
    )
    max_headers: int = option(100, "most headers of a request", low=8, high=1000, panel="Connections")
    max_line_bytes: int = option(8192, "longest request line", low=256, high=65_536, panel="Connections")
    header_timeout_s: float = option(
        10.0,
        "seconds for the headers of a request to arrive",
        low=0.05,
        flag="--header-timeout",
        panel="Connections",
    )
    body_timeout_s: float = option(
        30.0,
        "seconds for the body of a request to arrive",
        low=0.05,
        flag="--body-timeout",
        panel="Connections",
    )
    keep_alive_timeout_s: float = option(
        75.0,
        "seconds an idle connection stays open",
        low=0.05,
        flag="--keep-alive-timeout",
        panel="Connections",
    )
    stalled_client_timeout_s: float = option(
        30.0,
        "seconds after which a client that reads nothing is disconnected",
        low=0.05,
        flag="--stalled-client-timeout",
        panel="Connections",
    )
    stream_keep_alive_s: float = option(
        15.0,
        "seconds of silence after which a stream gets a comment line",
        low=0.05,
        flag="--stream-keep-alive",
        panel="Connections",
    )

    drain_delay_s: float = option(
        0.0,
        "seconds between failing readiness checks and closing the listener",
        low=0.0,
        flag="--drain-delay",
        panel="Stopping",
    )
    drain_timeout_s: float = option(
        30.0,
        "seconds for running requests to finish on shutdown",
        low=0.0,
        flag="--drain-timeout",
        panel="Stopping",
        also=("--shutdown-timeout",),
    )

    log_format: str = option(
        "auto", "auto: text; json: one object per line", choices=LOG_FORMATS, panel="Logs and metrics"
    )
    log_level: str = option(
        "info", "least severe messages to log", choices=LOG_LEVELS, basic=True, panel="Logs and metrics"
    )
    log_stats_interval_s: float = option(
        10.0,
        "seconds between two lines of statistics",
        low=0.1,
        flag="--log-stats-interval",
        panel="Logs and metrics",
    )
    disable_log_stats: bool = option(False, "do not log statistics", panel="Logs and metrics")
    disable_log_requests: bool = option(False, "do not log each request", panel="Logs and metrics")

    api: ApiConfig = field(default_factory=ApiConfig)
    billing: BillingConfig = field(default_factory=BillingConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def __post_init__(self) -> None:
        check_options(self)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together; give both or none")

        for origin in split_list(self.allowed_origins):
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origins {origin}: an origin is a scheme and a host, with a port if it has one and "
                    "no path, such as https://app.example or http://localhost:3000; * allows any"
                )
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                f"--metrics-prefix must be letters, digits and underscores, not {self.metrics_prefix!r}"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the API."""
        return self.uds is not None or self.host in LOOPBACK or self.host.startswith("127.")


def split_list(text: str | None) -> tuple[str, ...]:
    """The items of an option that is a list separated by commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


# Options of several engines of one model behind one server.


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig(CheckedOptions):
    """Several engines of one model: how many, which of them gets a request, and what happens when one is lost."""

    PANEL: ClassVar = "Several engines"

    replicas: int | None = option(
        None,
        "engines of the model on this machine, each in its own process; cores and GPUs are dealt out",
        low=1,
        high=64,
        default_text="1; none with --engines",
    )
    engines: str | None = option(
        None,
        "engines elsewhere, started by paceline engine: HOST:PORT, paths of sockets, or dns:NAME:PORT for every "
        "address of a name; commas for several",
        metavar="ADDRESS",
    )
    router: str = option(
        "soonest",
        "which engine gets a request: soonest, round-robin, least-loaded, prefix-aware, or your own as MODULE:CLASS",
    )
    max_failovers: int = option(
        2,
        "times that a request may go on in another engine because the one that had it was lost",
        low=0,
        high=16,
    )
    engine_wait_s: float = option(
        10.0, "seconds that a request waits for an engine when all are lost", low=0.0, high=3600.0
    )

    @property
    def num_local(self) -> int:
        if self.replicas is None:
            return 0 if self.engines else 1
        return self.replicas


# Options of the engine's process: heartbeats, restarts, and the bounds of what travels between the processes.
#
# Declared with `config.options.option`, as all options are; times are options so that tests can shorten them.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """How the engine's process is watched and talked to."""

    PANEL: ClassVar = "Engine process"

    heartbeat_s: float = option(0.5, "seconds between two heartbeats of the engine", low=0.01, high=60.0)
    stats_interval_s: float = option(0.25, "seconds between two updates of the gauges", low=0.01, high=60.0)
    stuck_after_s: float = option(
        5.0, "seconds without a heartbeat after which the engine counts as stuck", low=0.05
    )
    fail_when_stuck: bool = option(
        True, "fail all requests when the engine is stuck, instead of waiting for it"
    )
    restart_after_s: float = option(
        60.0, "seconds without a heartbeat after which the engine is restarted", low=0.1
    )
    ready_timeout_s: float = option(600.0, "longest time to load the model, in seconds", low=1.0)
    max_restarts: int = option(3, "most restarts within --restart-window-s; then the server ends", low=0)
    restart_window_s: float = option(600.0, "seconds after which a restart no longer counts", low=1.0)
    restart_backoff_s: float = option(
        1.0, "seconds to wait before a second restart; doubles with each further one", low=0.0
    )
    stop_timeout_s: float = option(1.0, "seconds an engine may take to stop", low=0.1)
    max_frame_bytes: int = option(
        4 << 20, "largest message between the processes", low=64 << 10, high=1 << 30
    )
    max_unsent_bytes: int = option(
        64 << 20, "most bytes that may wait for the engine to read them", low=1 << 16
    )
    kv_events: str | None = option(
        None,
        "publish which prefixes are cached, with their token ids, in vLLM's form at this ZeroMQ endpoint, such as "
        "tcp://*:5557; of several engines each has the next port",
    )
    kv_events_replay: str | None = option(
        None, "where subscribers ask for batches that they missed, such as tcp://*:5558"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.heartbeat_s * 2 <= self.stuck_after_s < self.restart_after_s:
            raise ConfigError(
                "--stuck-after-s must be at least twice --heartbeat-s and less than --restart-after-s, not "
                f"{self.stuck_after_s:g}, {self.heartbeat_s:g} and {self.restart_after_s:g}"
            )
