"""All settings of a worker, written once. The command line (`flags.py`) and the docs are generated from them.

Names are those of SGLang's flags where it has one. This module checks each value alone; `config.py` checks what they mean
together. Limits that depend on the machine or the model (free memory, longest context) are checked where they are known.

Metadata of a field: `help`; `group`, the heading in `--help` of this field and the fields after it; `choices`, `low` and
`high`, the valid values; `also`, aliases of the flag; `spelled`, aliases of values; `elsewhere`, SGLang's values that
change no answer and do not exist here: the default replaces them; `variable`, the environment variable of a secret;
`hidden`, whether only a launcher sets the field.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any

MIN_DIST_KEY = 16  # characters
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
# Bytes that are not UTF-8, in the form that Python gives them in flags and the environment
NOT_UTF8 = re.compile(r"[\ud800-\udfff]")


def _flag(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


class ConfigError(ValueError):
    """An invalid setting. The message names the flag and the remedy."""


# Exit status of a process that a ConfigError has ended, the same as argparse's: a restart would not help
EXIT_BAD_SETTINGS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    model_path: str = _flag(
        "",
        "folder of the model in Hugging Face's format, or its name on the Hugging Face Hub, such as "
        "deepseek-ai/DeepSeek-V2-Lite; empty: the small model that the package ships",
        group="model",
        also=("--model",),
    )
    revision: str = _flag(
        "", "branch, tag or commit, if --model-path is a name on the hub; empty: main"
    )
    download_dir: str = _flag("", "folder for downloads; empty: Hugging Face's own cache (HF_HOME)")
    tokenizer_path: str = _flag("", "folder or hub name of the tokenizer; empty: the model's own")
    served_model_name: str = _flag(
        "", "name in /v1/models; empty: the name on the hub, or the folder's name"
    )
    load_format: str = _flag(
        "auto",
        "auto: load the folder's safetensors; dummy: random weights, without reading any file",
        choices=("auto", "dummy"),
        spelled={"safetensors": "auto"},
    )
    context_length: int = _flag(
        0, "longest prompt + output in tokens; 0: the model's own limit", low=0
    )
    dtype: str = _flag(
        "auto",
        "dtype of weights and activations; auto: float32 on a CPU; on a GPU the checkpoint's, or bfloat16 if that is float32: "
        "fast attention kernels need 16 bits",
        choices=("auto", "float32", "bfloat16", "float16"),
        spelled={"half": "float16", "float": "float32"},
    )
    quantization: str = _flag(
        "auto",
        "format of linear weights; auto: the checkpoint's. A plain checkpoint is quantized while it loads: fp8: FP8 "
        "with a scale for each block of 128 x 128; w8a8_fp8, w8a8_int8: FP8 or INT8 with a scale for each output. "
        "A value that contradicts a quantized checkpoint is refused",
        choices=("auto", "fp8", "w8a8_fp8", "w8a8_int8", "compressed-tensors"),
        spelled={"compressed_tensors": "compressed-tensors"},
    )
    chat_template: str = _flag(
        "",
        "file with the chat template in Jinja; empty: the tokenizer's own",
        group="answers (parsing of the model's text)",
    )
    tool_call_parser: str = _flag(
        "auto",
        "format of the model's tool calls; auto: from its chat template",
        choices=("auto", "deepseek_v3", "deepseek_v31", "llama3", "none"),
        spelled={"deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31"},
    )
    reasoning_parser: str = _flag(
        "auto",
        "format of the model's reasoning; auto: from its chat template",
        choices=("auto", "deepseek_r1", "none"),
        spelled={"deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_r1"},
    )
    grammar_backend: str = _flag(
        "xgrammar",
        "library for output by JSON schema, regex or EBNF; none: requests for such output are refused",
        choices=("xgrammar", "none"),
        elsewhere=("outlines", "llguidance"),
    )
    constrained_json_disable_any_whitespace: bool = _flag(
        False,
        "write JSON by schema with one space after each comma and colon and no other whitespace between values; "
        "jump-forward decoding then skips more tokens",
    )
    disable_jump_forward: bool = _flag(
        False,
        "sample every token, even where a grammar allows only one text; by default all tokens of such text are "
        "computed in one step",
    )
    stream_response_default_include_usage: bool = _flag(
        False,
        "end streams with the token counts, unless a request has `stream_options`",
    )
    enable_force_include_usage: bool = _flag(
        False,
        "send the token counts in each chunk of every stream, even if the request does not ask for them",
    )
    enable_per_request_metrics: bool = _flag(
        False,
        "send the times of a request (`metrics`) with answers of /v1/chat/completions and /v1/completions",
    )
    return_tokens_as_token_ids: bool = _flag(
        False,
        "write tokens in log-probabilities by id (`token_id:5`), unless a request says otherwise",
    )
    random_seed: int = _flag(
        0, "seed of requests without a seed; 0: a random seed for each request", low=0
    )
    stream_interval: int = _flag(
        1,
        "tokens of an answer that are sent together; the first and the last token are sent at once",
        low=1,
    )
    host: str = _flag("127.0.0.1", "address to listen on", group="address and keys")
    port: int = _flag(31000, "port to listen on", low=0, high=65535)
    worker_id: str = _flag("", "name in logs and in the x-mla-worker header; empty: HOST:PORT")
    api_key: str = _flag(
        "",
        "key that clients must send as `Authorization: Bearer`; prefer the environment variable MLA_ROUTER_API_KEY, "
        "which no other user can read; without both: no key",
        variable="MLA_ROUTER_API_KEY",
    )
    admin_api_key: str = _flag(
        "",
        "key for the paths that affect all clients, such as /flush_cache; prefer the environment variable "
        "MLA_ROUTER_ADMIN_API_KEY; without both: --api-key",
        variable="MLA_ROUTER_ADMIN_API_KEY",
    )
    replay_key: str = _flag(
        "",
        "secret shared with the router, which signs requests to continue broken streams of other workers; prefer the "
        "environment variable MLA_ROUTER_REPLAY_KEY; without both streams are not continued",
        variable="MLA_ROUTER_REPLAY_KEY",
    )
    max_payload_size: int = _flag(64 << 20, "largest request body in bytes", low=1024)
    allowed_media_domains: str = _flag(
        "",
        "domains, separated by commas, from which images and videos in requests are fetched by URL; a subdomain is another "
        "domain; private addresses are never fetched from; empty: no URLs but data:",
    )
    tokenizer_worker_num: int = _flag(
        0,
        "server processes (HTTP, tokenizer, detokenizer) on one port; 0: one on a CPU; one for each 4 cores, at most "
        "4, on a GPU",
        low=0,
        high=64,
    )
    device: str = _flag(
        "auto",
        "auto: a GPU if there is one",
        choices=("auto", "cpu", "cuda"),
        group="device and kernels",
    )
    base_gpu_id: int = _flag(0, "first GPU of this worker", low=0)
    tp_size: int = _flag(
        1,
        "ranks that share one copy of the model (tensor parallelism): each has a process, and a GPU from --base-gpu-id on",
        low=1,
        high=64,
        also=("--tensor-parallel-size", "--tp"),
    )
    attn_dp_size: int = _flag(1, "DP ranks of --enable-dp-attention, a worker each", hidden=True)
    attn_dp_rank: int = _flag(0, "number of the worker among them", hidden=True)
    ep_size: int = _flag(
        1,
        "ranks that share the routed experts of the model (expert parallelism), a divisor of --tp-size; 1: each rank has a "
        "part of every expert",
        low=1,
        also=("--expert-parallel-size", "--ep"),
    )
    moe_a2a_backend: str = _flag(
        "none",
        "exchange of rows between DP ranks with --ep-size; none: all rows are gathered on all ranks; direct: a row is sent "
        "only to the ranks that have its experts, by our own kernels for up to 256 rows a rank",
        choices=("none", "direct"),
        spelled=dict.fromkeys(("deepep", "mooncake", "nixl", "mori", "flashinfer"), "direct"),
    )
    init_expert_location: str = _flag(
        "trivial",
        "placement of the routed experts on the ranks of --ep-size; trivial: in order; else a JSON file with "
        "`logical_count` [layers][experts], by which the load of ranks is balanced (see "
        "/dump_expert_distribution_record), or with `physical_to_logical_map`",
    )
    ep_num_redundant_experts: int = _flag(
        0,
        "replicas of routed experts in each layer: of those with the largest load, or of the first ones if "
        "--init-expert-location is trivial; --ep-size must divide the number of experts and replicas",
        low=0,
        high=4096,
    )
    enable_expert_distribution_metrics: bool = _flag(
        False,
        "count the pairs of tokens and experts on the device, for /metrics and /dump_expert_distribution_record",
    )
    expert_distribution_recorder_dir: str = _flag(
        "",
        "folder for the files of /dump_expert_distribution_record; empty: they are refused",
    )
    nnodes: int = _flag(
        1,
        "machines (nodes) that share the ranks of the worker, a divisor of --tp-size, and with --enable-dp-attention of "
        "--dp-size; the same command runs on each, with another --node-rank",
        low=1,
        high=64,
    )
    node_rank: int = _flag(
        0,
        "number of this node; node 0 has the router, and the server and the scheduler of the worker, but with "
        "--enable-dp-attention each node has those of its DP ranks",
        low=0,
    )
    dist_init_addr: str = _flag(
        "",
        "HOST:PORT at which the nodes meet; HOST is the address of node 0 in the network of the nodes, and node 0 listens "
        "for them on this address alone",
        also=("--nccl-init-addr",),
    )
    dist_key: str = _flag(
        "",
        f"secret that the nodes share, of {MIN_DIST_KEY} characters or more; prefer the environment variable "
        "MLA_ROUTER_DIST_KEY",
        variable="MLA_ROUTER_DIST_KEY",
    )
    dist_timeout: float = _flag(
        600.0,
        "seconds that nodes and ranks wait for each other, at the start and in each exchange, before the worker ends",
        low=1.0,
    )
    disable_custom_all_reduce: bool = _flag(False, "sum rows of several GPUs by NCCL alone")
    cpu_threads: int = _flag(0, "torch's threads on a CPU; 0: torch's default", low=0, high=1024)
    attention_backend: str = _flag(
        "auto",
        "attention kernels; auto: triton for 16-bit models on a GPU, with FlashInfer's prefill if it is installed "
        "and the model has 64 heads or more; torch otherwise; flashinfer: triton with FlashInfer's prefill, for "
        "DeepSeek's heads on Hopper GPUs; torch: the reference",
        choices=("auto", "triton", "flashinfer", "torch"),
        spelled={"torch_native": "torch"},
        elsewhere=("fa3", "fa4", "flashmla", "cutlass_mla", "trtllm_mla", "flex_attention"),
    )
    enable_flashinfer_mla: bool = _flag(
        False,
        "use FlashInfer's kernel for MLA decode, on Hopper GPUs; --attention-backend then selects the prefill only",
    )
    disable_mla: bool = _flag(
        False,
        "keep keys and values of all heads in the KV cache instead of latents, for comparison with MLA",
    )
    mla_bmm_dtype: str = _flag(
        "auto",
        "form of MLA's two batched products of decode, with an FP8 checkpoint; auto: their weight is dequantized once, after "
        "loading, which is the fastest; cast: it stays FP8 and becomes 16-bit at each use, half the memory; fp8_e4m3, "
        "fp8_e5m2: it stays FP8, and activations are rounded to this dtype with a static scale",
        choices=("auto", "cast", "fp8_e4m3", "fp8_e5m2"),
    )
    disable_cuda_graph: bool = _flag(False, "launch all steps kernel by kernel")
    cuda_graph_max_bs: int = _flag(
        1024, "largest batch size of captured decode graphs", low=1, high=4096
    )
    piecewise_cuda_graph_max_tokens: int = _flag(
        8192,
        "maximum number of tokens of a step with prompt tokens that runs as captured graphs: piecewise around its "
        "attention, or as one graph if it is a single prompt without a cached prefix; 0: none",
        low=0,
        high=65536,
    )
    cuda_graph_bs: str = _flag(
        "",
        "batch sizes of the captured decode graphs, such as 1 2 4 8; empty: a selection up to --cuda-graph-max-bs",
        several=True,
    )
    enable_torch_compile: bool = _flag(
        False,
        "compile the projections and feed-forward layers of captured decode graphs with torch.compile; the start takes "
        "minutes longer; not for quantized weights",
    )
    torch_compile_max_bs: int = _flag(
        32, "largest batch size for --enable-torch-compile", low=1, high=4096
    )
    mem_fraction_static: float = _flag(
        0.85,
        "fraction of GPU memory for weights and KV cache together",
        low=0.05,
        high=0.98,
        group="memory (the KV cache)",
    )
    max_total_tokens: int = _flag(
        0, "KV cache size in tokens; 0: from --mem-fraction-static, or 65536 on a CPU", low=0
    )
    kv_cache_dtype: str = _flag(
        "auto",
        "dtype of the KV cache; auto: that of --dtype; fp8_e4m3 and fp8_e5m2 keep twice the tokens of 16 bits in the same "
        "memory, with the scales of the checkpoint or else 1; on a GPU fp8_e4m3 needs compute capability 8.9",
        choices=("auto", "fp8_e4m3", "fp8_e5m2"),
    )
    page_size: int = _flag(16, "tokens in a page of the KV cache", choices=(1, 16, 32, 64))
    max_running_requests: int = _flag(
        1024, "maximum number of requests in one batch", low=1, high=4096, group="scheduling"
    )
    max_queued_requests: int = _flag(
        0,
        "maximum number of waiting requests; further ones get a 429; 0: as many as --max-running-requests",
        low=0,
    )
    max_queued_seconds: float = _flag(
        0.0,
        "maximum seconds of prefill work that may wait, without cached tokens; further requests get a 429; 0: no limit",
        low=0.0,
    )
    max_prefill_tokens: int = _flag(
        8192,
        "maximum number of tokens of a step with prompts, of all requests together; decode rows count, but prompts have "
        "at least half; fewer prompt tokens if they would take longer than 0.4 s on this device",
        low=1,
    )
    chunked_prefill_size: int = _flag(
        8192,
        "maximum number of prompt tokens of one request in one step; longer prompts take several steps; -1: as many as "
        "--max-prefill-tokens",
        low=-1,
    )
    disable_mixed_chunk: bool = _flag(
        False, "compute prompt tokens and decode rows in separate steps, which alternate"
    )
    schedule_policy: str = _flag(
        "lpm",
        "order of requests: lpm, short prompts and long cached prefixes first, and half of each step for the oldest "
        "prompts, so that long prompts advance as well; fcfs, by arrival",
        choices=("lpm", "fcfs"),
        elsewhere=("dfs-weight", "lof", "random"),
    )
    schedule_conservativeness: float = _flag(
        1.0,
        "factor of the expected length of answers; raise it if requests are often retracted for memory, lower it if "
        "much memory stays unused",
        low=0.01,
        high=10.0,
    )
    enable_priority_scheduling: bool = _flag(
        False,
        "admit requests of higher `priority` first, and preempt running requests of lower priority",
    )
    disable_radix_cache: bool = _flag(False, "never reuse the KV cache of an earlier request")
    disable_overlap_schedule: bool = _flag(
        False, "finish each step before planning the next, for comparison with the overlap schedule"
    )
    speculative_algorithm: str = _flag(
        "none",
        "speculative decoding, which changes no token; NEXTN: the model's own layer for multi-token prediction drafts tokens, "
        "which the next step verifies; EAGLE: the same with a draft head, for Llama models; NGRAM: drafts are looked up in the "
        "request's own tokens, or in the `prediction` of the client",
        choices=("none", "NEXTN", "EAGLE", "NGRAM"),
        group="speculative decoding",
        also=("--speculative-algo",),
    )
    speculative_draft_model_path: str = _flag(
        "",
        "folder or Hugging Face name of EAGLE's draft head, or of a NextN layer in the layout of SGLang's "
        "export_deepseek_nextn.py",
        also=("--speculative-draft-model", "--speculative-draft"),
    )
    speculative_num_steps: int = _flag(
        0,
        "length of a chain of drafts, or depth of a tree of them; 0: 3 in steps of the batch sizes for which drafts save time, by "
        "measured times, and none in other steps",
        low=0,
        high=7,
    )
    speculative_num_draft_tokens: int = _flag(
        0,
        "rows of a request in each step: without trees one more than --speculative-num-steps, or 0; with trees the nodes that are "
        "verified, the last token included, or 0 for 8",
        low=0,
        high=64,
    )
    speculative_eagle_topk: int = _flag(
        1,
        "1: drafts are a chain; K above 1, with NEXTN and EAGLE: they are a tree (EAGLE-2), in which the best K nodes of "
        "each depth have K children each",
        low=1,
        high=16,
    )
    speculative_max_bs: int = _flag(
        128,
        "maximum number of requests of a step with drafts; in larger batches their rows cost more than they save",
        low=1,
        high=4096,
    )
    watchdog_timeout: float = _flag(
        30.0,
        "seconds without a scheduler heartbeat, in any server process, until /health returns 503; after four times as "
        "long the worker ends, and launch_server restarts it",
        low=1.0,
        group="operation (logs and timeouts)",
    )
    profile_dir: str = _flag(
        "", "folder for the traces of /start_profile; empty: /start_profile is refused"
    )
    log_level: str = _flag(
        "info", "least severe log lines to print", choices=("debug", "info", "warning", "error")
    )
    log_requests: bool = _flag(
        False, "log a line for each finished request: its id, path, status and seconds"
    )

    def check_values(self) -> None:
        """Raises ConfigError if a value is not among the valid ones of its field."""
        for spec in dataclasses.fields(self):
            value, meta = getattr(self, spec.name), spec.metadata
            flag = "--" + spec.name.replace("_", "-")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{flag} {value}: give a finite number")
            if isinstance(value, str) and _CONTROL_CHARACTER.search(value):
                # Names go into headers and log lines. The value may be a secret.
                raise ConfigError(f"{flag}: has a control character, such as a newline; remove it")
            if isinstance(value, str) and NOT_UTF8.search(value):
                raise ConfigError(f"{flag}: has bytes that are not UTF-8; give another name")
            if "choices" in meta and value not in meta["choices"]:
                choices = ", ".join(map(str, meta["choices"]))
                raise ConfigError(f"{flag} {value}: choose one of {choices}")
            if "low" in meta and value < meta["low"]:
                raise ConfigError(f"{flag} {value}: at least {meta['low']}")
            if "high" in meta and value > meta["high"]:
                raise ConfigError(f"{flag} {value}: at most {meta['high']}")
