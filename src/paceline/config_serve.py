"""Every option of `paceline serve` beside those of the model and the engine, declared once.

`ServerConfig` is what listens, protects, logs and stops; `ApiConfig` is what a request may ask for and how long it
may wait. Flags, the keys of a config file, environment variables and validation are derived from the fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from paceline.config import check_options, option
from paceline.errors import ConfigError

LOG_FORMATS = ("auto", "text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MIB = 2**20
_METRICS_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}:?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """What requests may ask for, and how many may wait how long."""

    served_model_name: str | None = option(
        None, "name of the model in requests; several are separated by commas", kind=str
    )
    strict_fields: bool = option(False, "refuse request fields that are not known instead of listing them")
    max_logprobs: int = option(20, "most log probabilities per token", low=1, high=20)
    max_waiting_requests: int = option(
        256, "requests that may wait; more are answered with 429 at once", low=1, high=100_000
    )
    max_waiting_tokens: int | None = option(None, "prompt tokens that may wait", low=1, kind=int)
    queue_timeout_s: float = option(
        120.0, "seconds a request may wait for its first token", low=0.05, flag="--queue-timeout"
    )
    request_timeout_s: float = option(
        600.0, "seconds a request may take in all", low=0.05, flag="--request-timeout"
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names given for the model; empty when it keeps its own."""
        return split_list(self.served_model_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BillingConfig:
    """What requests cost, and where it is written down."""

    ledger: str | None = option(
        None, "SQLite file that gets an entry for each request; without it, nothing is written down", kind=str
    )
    price_factors: str = option(
        "interactive=1,standard=1,spot=0.25:1,batch=0.5",
        "what a key's prices are multiplied with by class; spot has a floor and a cap, between them the load decides",
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Where files and batches are kept, and how much of them."""

    batch_dir: str | None = option(
        None, "folder for /v1/files and /v1/batches, which are off without", kind=str
    )
    max_file_bytes: int = option(200 * MIB, "largest file that is taken", low=1024, high=16 * 1024 * MIB)
    max_stored_bytes: int = option(
        4 * 1024 * MIB, "most bytes that the files of one key may take", low=1024, high=2**50
    )
    max_batch_lines: int = option(50_000, "most requests of a batch", low=1, high=1_000_000)
    max_batch_rows: int | None = option(
        None,
        "most requests of batches that run at once; default: as many as others leave free",
        low=1,
        kind=int,
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """What the figures of a server are judged by, and where else they go."""

    slo_ttft_ms: float | None = option(
        None, "milliseconds to the first token that a request should have: for goodput", low=0.001, kind=float
    )
    slo_itl_ms: float | None = option(
        None, "milliseconds between tokens, on average, that a request should have", low=0.001, kind=float
    )
    slo_e2e_ms: float | None = option(
        None, "milliseconds to the end that a request should have", low=0.001, kind=float
    )
    cost_per_hour: float | None = option(
        None,
        "what an hour of this server costs, in any currency: for the cost of a million tokens",
        low=0.0,
        kind=float,
    )

    otlp_endpoint: str | None = option(
        None,
        "send a span for each request to this OpenTelemetry collector, over HTTP; needs paceline[otel]",
        kind=str,
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, what it lets in, how it logs and how it stops."""

    host: str = option("127.0.0.1", "address to listen on; other than loopback needs a key")
    port: int = option(8000, "port to listen on; 0 takes a free one", low=0, high=65535)
    uds: str | None = option(None, "listen on this unix socket instead", kind=str)
    ssl_certfile: str | None = option(None, "certificate for HTTPS", kind=str)
    ssl_keyfile: str | None = option(None, "private key of the certificate", kind=str)
    allowed_hosts: str | None = option(
        None, "more names clients may use for this server, separated by commas; * takes any", kind=str
    )
    api_keys_file: str | None = option(None, "file with the keys that are let in (see SECURITY.md)", kind=str)
    metrics_host: str = option("127.0.0.1", "address of the listener for metrics")
    metrics_port: int | None = option(
        None, "serve /metrics on a port of its own, and not on the main one", low=0, high=65535, kind=int
    )
    metrics_without_key: bool = option(
        False, "let whoever reaches the listener of /metrics read it without a key"
    )
    metrics_prefix: str = option(
        "paceline", "what names of metrics begin with; vllm suits its dashboards, paceline_ has no colon"
    )

    max_connections: int = option(1024, "most open connections", low=1, high=1_000_000)
    backlog: int = option(1024, "connections the system holds until they are accepted", low=1, high=65535)
    max_body_bytes: int = option(2 * MIB, "largest request body", low=1024, high=64 * MIB)
    max_header_bytes: int = option(16_384, "largest header block", low=1024, high=65_536)
    max_headers: int = option(100, "most headers of a request", low=8, high=1000)
    max_line_bytes: int = option(8192, "longest request line", low=256, high=65_536)
    header_timeout_s: float = option(
        10.0, "seconds for a request's headers to arrive", low=0.05, flag="--header-timeout"
    )
    body_timeout_s: float = option(
        30.0, "seconds for a request's body to arrive", low=0.05, flag="--body-timeout"
    )
    keep_alive_timeout_s: float = option(
        75.0, "seconds an idle connection is kept", low=0.05, flag="--keep-alive-timeout"
    )
    stalled_client_timeout_s: float = option(
        30.0,
        "seconds after which a client that reads nothing is cut off",
        low=0.05,
        flag="--stalled-client-timeout",
    )
    stream_keep_alive_s: float = option(
        15.0, "silent seconds after which a stream gets a comment", low=0.05, flag="--stream-keep-alive"
    )

    drain_delay_s: float = option(
        0.0, "seconds between readiness going away and the listener closing", low=0.0, flag="--drain-delay"
    )
    drain_timeout_s: float = option(
        30.0, "seconds running requests get to finish when the server stops", low=0.0, flag="--drain-timeout"
    )

    log_format: str = option("auto", "auto is text; json is one object per line", choices=LOG_FORMATS)
    log_level: str = option("info", "least important messages shown", choices=LOG_LEVELS)
    log_stats_interval_s: float = option(
        10.0, "seconds between two lines of statistics", low=0.1, flag="--log-stats-interval"
    )
    disable_log_stats: bool = option(False, "no lines of statistics")
    disable_log_requests: bool = option(False, "no line for each request")

    api: ApiConfig = field(default_factory=ApiConfig)
    billing: BillingConfig = field(default_factory=BillingConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def __post_init__(self) -> None:
        check_options(self)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together; give both or none")

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
