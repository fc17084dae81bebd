"""Every option of the engine, declared once.

An option is a dataclass field made with `option(...)`: default, help text, bounds and choices live there, and
validation, command-line flags and the reference page are derived from it. A config is frozen: capacities that
follow from it are separate values (see `Capacity`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from paceline.config.encoder import ENCODE_PARTS, EncoderWork, MediaOptions
from paceline.config.options import OWN_CLASS, CheckedOptions, check_options, option
from paceline.config.speculative import DraftConfig
from paceline.errors import ConfigError

MODES = ("continuous", "dynamic", "static")
# The files of this folder; listed, not imported: the scheduler stands above the config, help pages load no numpy.
_POLICY_FILES = Path(__file__).parents[1].joinpath("scheduler", "policy").glob("[a-z]*.py")
POLICIES = tuple(sorted((path.stem for path in _POLICY_FILES), key=lambda name: (name != "fcfs", name)))
EVICTIONS = ("reuse", "lru")
PREEMPTION_KINDS = ("auto", "recompute", "swap")
STATIC_ORDERS = ("fifo", "sorted")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
REUSE = ("exact", "blend")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8")  # the two of fp8 are one type
QUANTIZATIONS = ("auto", "none", "fp8", "int8", "int4")
MADE_ON_LOADING = ("fp8", "int8", "int4")  # of weights that are not quantised yet
CPU_BACKENDS = ("auto", "native", "torch")
DIAL_OPTIONS = ("dial", "target_itl_p99_ms", "target_ttft_p99_ms")  # one of them at most
MOST_STEPS_AHEAD = 8  # of the device
LEAST_TARGET_MS, MOST_TARGET_MS = 0.1, 600_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One group of layers that share a block table: full attention, or a sliding window of `window` tokens."""

    window: int | None = None
    num_blocks: int | None = None  # None: as many as KVConfig.num_blocks

    def __post_init__(self) -> None:
        for name in ("window", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"a layer group's {name} must be at least 1, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """Size and shape of the paged KV cache."""

    PANEL: ClassVar = "KV cache"

    block_size: int = option(16, "tokens per KV block; 16 suits a CPU, 64 a GPU", low=1, high=1024)
    num_blocks: int = option(
        4096,
        "number of KV blocks on the device",
        low=2,
        flag="--num-gpu-blocks-override",
        default_text="what fits into --kv-cache-memory-bytes",
    )
    num_host_blocks: int = option(
        0,
        "KV blocks in host memory, for requests that are swapped out",
        low=0,
        panel="Queue and preemption",
        also=("--host-blocks",),
    )
    enable_prefix_caching: bool = option(True, "reuse the KV of prompts that begin alike", basic=True)
    eviction: str = option(
        "reuse",
        "which cached prefix goes first: the least likely to be used again soon, or the least recently used",
        choices=EVICTIONS,
    )
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    cache_on_host: bool = False  # prefixes that the device evicts are kept in the blocks of host memory
    num_disk_blocks: int = 0  # and those that the host evicts, on a disk
    num_staging_blocks: int = 0  # of the host's, those on the way to the disk; 0: it keeps prefixes
    # Where models share memory: blocks that come and go together, and how few there are at least while it computes.
    slab_blocks: int = 0  # 0: all blocks are there for good
    least_blocks: int = 0
    most_slabs: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        if not self.groups:
            raise ConfigError("groups must name at least one layer group")
        if self.cache_on_host and (not self.num_host_blocks or any(group.window for group in self.groups)):
            raise ConfigError("cache_on_host needs num_host_blocks, and no layer group with a sliding window")
        if self.num_disk_blocks < 0 or (self.num_disk_blocks and not self.cache_on_host):
            raise ConfigError("num_disk_blocks must not be negative and needs cache_on_host")
        if not 0 <= self.num_staging_blocks <= (self.num_host_blocks if self.num_disk_blocks else 0):
            raise ConfigError("num_staging_blocks are some of num_host_blocks and need num_disk_blocks")
        if self.slab_blocks and (
            self.num_blocks % self.slab_blocks or not 0 < self.least_blocks < self.num_blocks
        ):
            raise ConfigError("num_blocks must be whole slabs, of which least_blocks are some")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """How long a step takes, as plain numbers: what a pace is kept by. Part of the config, so that a run log has it.

    A step runs as long as one of the next larger size, and longer for what its rows read.
    """

    LONG: ClassVar = 32  # tokens of every step that are for long prompts
    sizes: tuple[int, ...]  # tokens of a step, ascending; other prompts get no fewer than the first
    seconds: tuple[float, ...]  # of a step of each size, attention left out
    context_s: float = 0.0  # more, for each token of context that decoding rows read
    product_s: float = 0.0  # more, for each pair of a prompt token and a token before it
    row_s: float = 0.0  # more, for each decoding row

    def __post_init__(self) -> None:
        sizes, seconds = self.sizes, self.seconds
        if not sizes or len(sizes) != len(seconds) or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ConfigError("the sizes of steps must ascend, and each needs its seconds")
        numbers = (*seconds, self.context_s, self.product_s, self.row_s)
        if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
            raise ConfigError("what a step costs must be finite numbers that are not negative")
        if list(seconds) != sorted(seconds):
            raise ConfigError("a larger step cannot take less time than a smaller one")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedSteps:
    """Sizes of steps follow from how long steps take while serving. Part of the config, so that a run log has it.

    The sizes of the config are those of the start. A step was measured to take `fixed_s`, and `token_s` for each token.
    """

    fixed_s: float
    token_s: float
    beside_s: float  # what a step beside decoding rows should take
    alone_s: float  # and one in which no row decodes
    least: int = 16  # tokens for prompts, however slow steps are
    most: int = 512  # tokens of a step, however quick
    most_alone: int = 512
    product_s: float = 0.0  # about what each pair of a prompt token and one before it takes; 0: nothing

    def __post_init__(self) -> None:
        numbers = (self.fixed_s, self.token_s, self.beside_s, self.alone_s, self.product_s)
        if not all(math.isfinite(number) and number >= 0.0 for number in numbers) or self.token_s <= 0.0:
            raise ConfigError("what a step takes must be finite numbers that are not negative")
        if self.least < 1 or self.most < 1 or self.most_alone < 1:
            raise ConfigError("a step has at least one token")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCosts:
    """What it takes to resume a preempted request, as measured on this machine when it was started."""

    token_s: float  # to compute a token of a prompt again, in a large step
    product_s: float = 0.0  # more, for each pair of a token and one before it
    block_s: float = math.inf  # to copy a block to host memory, or back
    step_s: float = 0.02  # a step in which every row gets a token
    disk_block_s: float = 0.0  # to read a block from the disk; 0: there is none
    disk_write_s: float = 0.0  # from one block that is written to the disk to the next: a budget

    def __post_init__(self) -> None:
        finite = (self.token_s, self.product_s, self.step_s, self.disk_block_s, self.disk_write_s)
        if not all(math.isfinite(number) and number >= 0.0 for number in finite) or not self.block_s >= 0.0:
            raise ConfigError("what preemption costs must be numbers that are not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How steps are composed and which request goes first."""

    PANEL: ClassVar = "Scheduling policy"

    max_num_seqs: int = option(
        256,
        "most sequences in one step",
        low=1,
        high=65536,
        basic=True,
        panel="Step size",
        default_text="128",
    )
    max_num_batched_tokens: int = option(
        2048,
        "most tokens in one step",
        low=1,
        basic=True,
        panel="Step size",
        default_text="measured at start",
    )
    max_num_prompt_tokens: int = option(
        0,
        "most tokens in a step without decoding requests; 0: as --max-num-batched-tokens",
        low=0,
        panel="Step size",
        default_text="measured on a CPU",
    )
    max_pinned_fraction: float = option(
        0.25, "most of the KV cache that contexts and prompts pin", low=0.0, high=1.0, panel="KV cache"
    )
    max_pinned_fraction_per_key: float = option(
        0.1, "most of the KV cache that those of one key pin", low=0.0, high=1.0, panel="KV cache"
    )
    step_target_ms: float | None = option(
        None,
        "target duration of steps with prompts, in milliseconds; 0: no target",
        low=0.0,
        high=60_000.0,
        panel="Batching",
        default_text="automatic on a GPU, off on a CPU",
    )
    step_stretch: float = option(
        1.6,
        "factor by which steps may exceed their target while requests wait for a first token",
        low=1.0,
        panel="Step timing",
    )
    step_patience_s: float = option(
        0.35,
        "seconds of waiting for a first token after which steps are stretched; fully at twice that",
        low=1e-3,
        panel="Step timing",
    )
    dial: float | None = option(
        None,
        "0: least latency, 1: most throughput; can be changed while serving",
        low=0.0,
        high=1.0,
        basic=True,
        panel="Tuning",
        default_text="off",
    )
    target_itl_p99_ms: float | None = option(
        None,
        "p99 between tokens to hold, in milliseconds, by moving the dial",
        low=LEAST_TARGET_MS,
        high=MOST_TARGET_MS,
        basic=True,
        panel="Tuning",
        default_text="none",
    )
    target_ttft_p99_ms: float | None = option(
        None,
        "p99 to the first token to hold, in milliseconds, by moving the dial",
        low=LEAST_TARGET_MS,
        high=MOST_TARGET_MS,
        panel="Tuning",
        default_text="none",
    )
    max_model_len: int = option(
        4096,
        "most tokens of a sequence, prompt and output",
        low=2,
        basic=True,
        panel="KV cache",
        default_text="what model and KV cache allow",
    )
    scheduling_policy: str = option("fcfs", "order of requests", choices=(*POLICIES, OWN_CLASS), basic=True)
    ageing_s: float = option(
        30.0,
        "seconds; priority: waiting that counts as one level; shortest: longest delay of a long request; "
        "deadline: time by which a request without one starts",
        low=1e-6,
    )
    prompt_handicap_ms: float = option(
        0.7, "shortest: milliseconds of waiting that one prompt token counts for", low=0.0, high=1e3
    )
    output_handicap_ms: float = option(
        2.0, "shortest: milliseconds of waiting that one token of max_tokens counts for", low=0.0, high=1e4
    )
    first_token_s: float | None = option(
        None,
        "deadline: seconds after arrival by which a request should have its first token",
        low=1e-3,
        default_text="any time before the deadline",
    )
    tenant_weights: str = option("", "fair: shares of tenants, such as alice=2,bob=0.5; other tenants have 1")
    output_token_cost: float = option(
        2.0, "fair: prompt tokens that one generated token counts for", low=0.0, high=1e3
    )
    flood_tokens: int = option(
        8192, "fair: tokens served without a pause after which a tenant leaves room for others", low=1
    )
    mode: str = option("continuous", "how batches are formed", choices=MODES, panel="Batching")
    batch_size: int = option(32, "static and dynamic mode: requests in a batch", low=1, panel="Batching")
    batch_timeout_s: float = option(
        0.1,
        "dynamic mode: longest wait for a full batch, in seconds",
        low=0.0,
        panel="Batching",
        also=("--batch-timeout",),
    )
    static_flush_s: float = option(
        5.0, "static mode: seconds after which a partly filled batch starts", low=0.0, panel="Batching"
    )
    static_order: str = option(
        "fifo",
        "static mode: order in which requests are picked for a batch",
        choices=STATIC_ORDERS,
        panel="Batching",
    )
    max_loras: int = option(
        0,
        "most adapters in memory; others are read when they are needed",
        low=0,
        panel="Queue and preemption",
        default_text="all there are; on a GPU 16",
    )
    long_prefill_share: float = option(
        0.5, "share of a step's tokens that one prompt may take while others wait", low=1e-6, high=1.0
    )
    watermark: float = option(
        0.01, "keep this share of KV blocks free when admitting", low=0.0, high=0.9, panel="Tuning"
    )
    preemption: str = option(
        "auto",
        "what to do with the KV of a preempted request: recompute it, swap it to host memory, or the cheaper of both",
        choices=PREEMPTION_KINDS,
        panel="Queue and preemption",
    )
    max_preemptions: int = option(
        4, "preemptions after which a request is not preempted again", low=0, panel="Queue and preemption"
    )
    encode: str = option(
        "pieces",
        "how a picture is encoded: in pieces, as much as the share of its request in each step pays for, or whole in "
        "one step, as other engines do",
        choices=ENCODE_PARTS,
        panel="Batching",
    )
    max_queue: int = option(10_000, "most waiting requests", low=1, panel="Queue and preemption")
    max_queue_tokens: int = option(
        100_000_000, "most prompt tokens of waiting requests", low=1, panel="Queue and preemption"
    )
    defer_shared_prefix: bool = option(
        True, "wait for a prefix that another request is computing", panel="Queue and preemption"
    )
    step_costs: StepCosts | None = None  # of the machine; None: nothing is known, and no pace can be kept
    preemption_costs: PreemptionCosts | None = None  # of the machine; None: nothing is known
    learned_steps: LearnedSteps | None = None  # None: sizes of steps are constants, or follow from a pace
    drafts: DraftConfig | None = None  # None: one token per row and step
    pools: tuple[str, ...] = ()  # kinds of vectors that the runner makes; see core.parameters
    only_pools: bool = False  # and nothing else
    encoder: EncoderWork | None = None  # None: there are no pictures

    def __post_init__(self) -> None:
        check_options(self)
        given = [name for name in DIAL_OPTIONS if getattr(self, name) is not None]
        flags = [f"--{name.replace('_', '-')}" for name in given]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(flags)} exclude each other: give one of them")
        if self.max_loras and self.mode != "continuous":
            raise ConfigError(
                "--max-loras needs --mode continuous: a padded batch has all its adapters at once"
            )
        if given and self.mode != "continuous":
            raise ConfigError(f"{flags[0]} needs --mode continuous: padded batches are not cut by time")

    @property
    def has_dial(self) -> bool:
        """Whether the dial is set from the start."""
        return any(getattr(self, name) is not None for name in DIAL_OPTIONS)

    @property
    def keeps_pace(self) -> bool:
        """Whether the number of tokens of a step follows from its duration. Padded batches have no use for it."""
        return bool(self.step_target_ms) and self.step_costs is not None and self.mode == "continuous"

    @property
    def largest_step(self) -> int:
        """Most tokens of any step."""
        learned = self.learned_steps
        more = (0, 0) if learned is None else (learned.most, learned.most_alone)
        return max(self.max_num_batched_tokens, self.max_num_prompt_tokens, *more)

    def step_tokens(self, decoding: int) -> int:
        """Most tokens of a step with this number of decoding rows, where its duration does not decide."""
        alone = 0 if decoding else self.max_num_prompt_tokens
        return max(self.max_num_batched_tokens, alone)

    def most_step_tokens(self, decoding: int) -> int:
        """The same, whatever is learnt while serving."""
        return self.step_tokens(decoding) if self.learned_steps is None else self.largest_step

    @property
    def fewest_step_tokens(self) -> int:
        """Tokens of prompts that every step may carry, whatever its rows read."""
        if self.learned_steps is not None:
            return min(self.learned_steps.least, self.max_num_batched_tokens)
        if not self.keeps_pace or self.step_costs is None:
            return self.max_num_batched_tokens
        return min(self.step_costs.sizes[0], StepCosts.LONG, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(MediaOptions):
    """Which model runs, and how much memory it gets. What is None follows from the model and the machine."""

    PANEL: ClassVar = "Model"

    tensor_parallel_size: int = option(
        1, "ranks: processes of this machine that hold a part of each layer; on a CPU so far", low=1, high=64
    )
    model: str | None = option(
        None,
        "folder, GGUF file or name on the Hugging Face hub",
        basic=True,
        also=("-m",),
        metavar="MODEL",
        default_text="SmolLM2-135M-Instruct",
    )
    tokenizer: str | None = option(
        None, "folder with a tokenizer to use instead of the model's", metavar="FOLDER"
    )
    revision: str | None = option(None, "branch, tag or commit of a model on the hub", metavar="NAME")
    download_dir: str | None = option(None, "folder for models from the hub", metavar="FOLDER")
    load_format: str = option("auto", "format of the weights; dummy: random weights", choices=LOAD_FORMATS)
    device: str = option("auto", "where to compute; auto: a GPU if any", choices=DEVICES, basic=True)
    dtype: str = option(
        "auto", "type to compute in; auto: float32 on a CPU, the type of the weights on a GPU", choices=DTYPES
    )
    cpu_backend: str = option(
        "auto",
        "what computes steps on a CPU; auto: the native kernels where they cover the model, else torch",
        choices=CPU_BACKENDS,
    )
    cpu_threads: int | None = option(
        None, "threads that compute a step on a CPU", low=1, default_text="as many as cores may be used"
    )
    enforce_eager: bool = option(False, "launch each kernel separately instead of replaying CUDA graphs")
    quantization: str = option(
        "auto",
        "weights; auto: as in the file; none: unpacked; int8, int4, fp8 (on a GPU): quantise them while loading",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of the KV cache; auto: the type to compute in; on a GPU fp8 (e4m3): half of it; on a CPU int8: a quarter",
        choices=KV_CACHE_DTYPES,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "memory for the KV cache",
        low=1,
        basic=True,
        default_text="2G, at most a quarter of free memory; on a GPU the rest",
    )
    kv_offloading_size: float = option(
        0.0, "GiB of host memory for prefixes that leave a GPU's KV cache", low=0.0, panel="KV cache"
    )
    kv_disk_dir: str | None = option(
        None,
        "folder for the KV of prompts, kept over restarts; one server each",
        panel="KV cache",
        metavar="FOLDER",
    )
    kv_disk_size: int | None = option(
        None, "most bytes in --kv-disk-dir", low=1, panel="KV cache", metavar="BYTES", default_text="16G"
    )
    kv_disk_write_rate: int | None = option(
        None,
        "most bytes a second written to --kv-disk-dir or --kv-store",
        low=1,
        panel="KV cache",
        metavar="BYTES",
        default_text="half of what it showed at start-up",
    )
    kv_store: str | None = option(
        None,
        "redis that keeps the KV of prompts for several servers, instead of a disk; needs paceline[redis]",
        panel="KV cache",
        metavar="redis://HOST:PORT/DB",
    )
    kv_store_key: str | None = option(
        None, "key that the servers of --kv-store share; made if missing", panel="KV cache", metavar="FILE"
    )
    kv_memory_part: float = option(1.0, "its part of the KV memory that follows from the machine", panel=None)
    gpu_memory_utilization: float = option(
        0.92, "share of the GPU's memory to use", low=0.01, high=1.0, basic=True
    )
    speculative_config: str = option(
        "off",
        "speculative decoding: off, auto, ngram, history, or a JSON object with method (also eagle, medusa, "
        "draft_model), model and num_speculative_tokens",
        metavar="METHOD|JSON",
    )
    enable_lora: bool = option(False, "compute adapters (PEFT LoRA) that requests name", panel="Adapters")
    lora_modules: str = option(
        "",
        "adapters to load at the start, each under the name of its model; commas for several",
        panel="Adapters",
        metavar="NAME=FOLDER",
    )
    lora_dir: str | None = option(
        None, "folder below which adapters may be loaded while serving", panel="Adapters", metavar="FOLDER"
    )
    max_lora_rank: int = option(16, "largest rank of an adapter", low=1, high=512, panel="Adapters")
    encoder_cache_tokens: int | None = option(
        None,
        "most vectors of pictures in memory, those that requests wait for included",
        low=1,
        panel="KV cache",
        default_text="8192, or the longest sequence if that is more",
    )
    context_reuse: str = option(
        "exact", "how contexts may be used; blend: offered if a check at the start keeps 85 %", choices=REUSE
    )
    pooling: str = option(
        "auto",
        "what the vector of a text is; auto: what the model's files say; last or mean: of any model, which then "
        "answers /v1/embeddings beside chat; choice: no vectors, /v1/rerank asks yes or no (Qwen3-Reranker)",
        choices=("auto", "last", "mean", "cls", "choice"),
    )
    seed: int = option(0, "seed of requests that have none", panel="Sampling")
    skip_tokenizer_init: bool = option(False, "token ids in and out, without a tokenizer", panel=None)

    def __post_init__(self) -> None:
        check_options(self)
        self._check_kept()
        assert isinstance(self.first_adapters, dict)  # raises for names that are none

    def _check_kept(self) -> None:
        """Which options for KV that outlives a server go together."""
        if self.kv_disk_dir is not None and self.kv_store is not None:
            raise ConfigError("--kv-disk-dir and --kv-store are the same level: give one of them")
        if self.kv_disk_dir is None and self.kv_disk_size:
            raise ConfigError(
                "--kv-disk-size needs --kv-disk-dir; the size of --kv-store is the maxmemory of redis"
            )
        if self.kv_disk_write_rate and self.kv_disk_dir is None and self.kv_store is None:
            raise ConfigError("--kv-disk-write-rate needs --kv-disk-dir or --kv-store")
        if (self.kv_store is None) != (self.kv_store_key is None):
            raise ConfigError(
                "--kv-store and --kv-store-key go together: servers that share a store share the file of its key"
            )

    @property
    def cpu_kv_dtype(self) -> str:
        return "int8" if self.kv_cache_dtype == "int8" else "float32"

    @property
    def has_adapters(self) -> bool:
        """Whether requests may name adapters."""
        return self.enable_lora or bool(self.lora_modules) or self.lora_dir is not None

    @property
    def first_adapters(self) -> dict[str, str]:
        """The folders of --lora-modules by name."""
        found: dict[str, str] = {}
        for part in filter(None, (each.strip() for each in self.lora_modules.split(","))):
            name, equals, folder = (each.strip() for each in part.partition("="))
            if not (name and equals and folder):
                raise ConfigError(f"--lora-modules must be NAME=FOLDER, not {part!r:.100}")
            if name in found:
                raise ConfigError(f"--lora-modules names {name!r:.100} twice")
            found[name] = folder
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(CheckedOptions):
    """Everything `factory` needs to build an engine around a runner."""

    PANEL: ClassVar = "Records to keep"

    kv: KVConfig = field(default_factory=KVConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    depth: int = option(
        1,
        "steps planned ahead of the device; 0: wait for each step",
        low=0,
        high=MOST_STEPS_AHEAD,
        panel="Step timing",
    )
    check_every: int = option(256, "steps between two checks of the invariants; 0: never", low=0, panel=None)
    decision_ring: int = option(
        32_768,
        "newest decisions kept in memory to explain requests, about 300 bytes each",
        low=0,
        high=1 << 24,
    )
    decision_log: str = option(
        "", "folder for a log of all decisions in which changes can be detected", metavar="DIR"
    )
    decision_log_bytes: int = option(64 << 20, "size at which a new file begins", low=1 << 16)
    decision_log_files: int = option(16, "most files to keep; the oldest are deleted", low=2)
    decision_log_days: float = option(30.0, "age in days at which a file is deleted", low=0.001)
    run_log: str = option(
        "", "record the run, for replay; .gz: compressed", basic=True, panel="Recording", metavar="FILE"
    )
    run_log_bytes: int = option(1 << 30, "size at which the run log ends", low=1 << 16)
    run_log_files: int = option(8, "logs of earlier runs to keep", low=0)


# The configs whose options `LLM`, `AsyncLLM` and the commands take by name.
ENGINE_CONFIGS = (ModelConfig, KVConfig, SchedulerConfig, EngineConfig)
