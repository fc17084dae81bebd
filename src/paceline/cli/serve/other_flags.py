"""Flags of other servers that `paceline serve` does not have, with what to do instead.

Owns words only: the flag is refused, and its error says what people who come from vLLM, SGLang or llama.cpp look for.
"""

from __future__ import annotations

from collections.abc import Mapping

_ONE_DEVICE = "a model runs on one device; start one server for each device"
_ALWAYS = "that is always done; leave it out"
_POOLING = "what the model offers follows from its files; --pooling makes vectors with any model"
_SAMPLING = "the model's generation_config.json decides; requests give what is to differ"

INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("--pipeline-parallel-size", "--data-parallel-size", "--dp-size"), _ONE_DEVICE),
    **dict.fromkeys(("--tp", "--tp-size"), "take --tensor-parallel-size"),
    **dict.fromkeys(("--api-server-count", "--distributed-executor-backend"), _ONE_DEVICE),
    **dict.fromkeys(("--enable-chunked-prefill", "--async-scheduling", "--enable-sleep-mode"), _ALWAYS),
    **dict.fromkeys(("--enable-auto-tool-choice", "--jinja", "--enable-metrics"), _ALWAYS),
    **dict.fromkeys(("--continuous-batching", "--cont-batching", "--enable-log-requests"), _ALWAYS),
    "--cors-allow-origins": "take --allowed-origins",
    "--allow-credentials": "keys come in headers and no cookie is used; leave it out",
    **dict.fromkeys(("--task", "--runner", "--convert", "--embedding", "--embeddings"), _POOLING),
    **dict.fromkeys(("--generation-config", "--override-generation-config"), _SAMPLING),
    "--no-enable-chunked-prefill": "prompts are always computed in chunks; see --max-num-batched-tokens",
    "--chunked-prefill-size": "take --max-num-prompt-tokens",
    "--chat-template": "the model's own is used; change chat_template in its tokenizer_config.json",
    "--swap-space": "take --num-host-blocks, in KV blocks",
    "--cpu-offload-gb": "weights stay on one device; take a smaller or quantised model",
    "--preemption-mode": "take --preemption",
    "--policy": "take --scheduling-policy",
    "--schedule-policy": "take --scheduling-policy",
    "--uvicorn-log-level": "take --log-level",
    "--mem-fraction-static": "take --gpu-memory-utilization",
    "--context-length": "take --max-model-len",
    "--ctx-size": "take --max-model-len",
    "--parallel": "take --max-num-seqs",
    "--max-running-requests": "take --max-num-seqs",
    "--max-batch-size": "take --max-num-seqs",
    "--threads": "take --cpu-threads",
    "--n-gpu-layers": "take --device; a model is on a GPU as a whole, or on the CPU",
    "--model-path": "take --model",
    "--hf-token": "set the environment variable HF_TOKEN",
    "--guided-decoding-backend": "there is one backend; leave it out",
    "--grammar-backend": "there is one backend; leave it out",
    "--root-path": "routes begin at /; let the proxy take the prefix away",
}
