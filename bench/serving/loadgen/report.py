"""Formats the results as a table with SGLang's labels."""

from __future__ import annotations

from typing import Any

WIDTH = 54
LABEL = 41

# Label, key of the result, format.
TOTALS = (
    ("Backend:", "backend", "{}"),
    ("Traffic request rate:", "request_rate", "{}"),
    ("Max request concurrency:", "max_concurrency", "{}"),
    ("Successful requests:", "completed", "{}"),
    ("Failed requests:", "failed", "{}"),
    ("Benchmark duration (s):", "duration", "{:.2f}"),
    ("Total input tokens:", "total_input_tokens", "{}"),
    ("Cached input tokens:", "cached_tokens", "{}"),
    ("Cached share of the input:", "cached_share", "{:.1%}"),
    ("Total generated tokens:", "total_output_tokens", "{}"),
    ("Total generated tokens (retokenized):", "total_output_tokens_retokenized", "{}"),
    ("Request throughput (req/s):", "request_throughput", "{:.2f}"),
    ("Input token throughput (tok/s):", "input_throughput", "{:.2f}"),
    ("Output token throughput (tok/s):", "output_throughput", "{:.2f}"),
    ("Total token throughput (tok/s):", "total_throughput", "{:.2f}"),
    ("Concurrency:", "concurrency", "{:.2f}"),
    ("Client's CPU (of one core):", "client_cpu_share", "{:.1%}"),
)
LATENCIES = (
    ("End-to-End Latency", "E2E Latency", "e2e_latency"),
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-Token Latency", "ITL", "itl"),
)
STATISTICS = ("mean", "median", "p90", "p95", "p99", "max")
# A client without a free part of its core adds its own delay to every latency.
BUSY = 0.9


def table(result: dict[str, Any]) -> str:
    lines = [_title(" Serving Benchmark Result ", "=")]
    lines += [_line(label, result[key], form) for label, key, form in TOTALS]
    for title, label, name in LATENCIES:
        if f"mean_{name}_ms" in result:
            lines.append(_title(title, "-"))
            lines += [
                _line(f"{_capital(statistic)} {label} (ms):", result[key], "{:.2f}")
                for statistic in STATISTICS
                for key in [f"{statistic}_{name}_ms"]
            ]
    if len(turns := result["turns"]) > 1:
        lines.append(_title("Turns", "-"))
        lines += [_turn(row) for row in turns]
    return "\n".join([*lines, "=" * WIDTH, *_remarks(result)])


def _remarks(result: dict[str, Any]) -> list[str]:
    remarks = [f"{count} x failed: {error}" for error, count in result["errors"].items()]
    if result["other_length_than_asked"]:
        remarks.append(
            f"{result['other_length_than_asked']} answers have another length than was asked for"
        )
    if not result["counted_by_server"]:
        remarks.append("The server did not count all its tokens: generated ones are retokenized")
    if result["client_cpu_share"] > BUSY:
        remarks.append("The client was busy all the time: latencies are its own, too")
    return remarks


def _turn(row: dict[str, Any]) -> str:
    ttft, share = row["median_ttft_ms"], row["cached_share"]
    figures = [
        f"{row['completed']} answered",
        "" if share is None else f"{share:.1%} cached",
        "" if ttft is None else f"median TTFT {ttft:.2f} ms",
    ]
    return f"{row['turn']:>4}: " + ", ".join(filter(None, figures))


def _title(text: str, fill: str) -> str:
    return f"{text:{fill}^{WIDTH}}"


def _line(label: str, value: Any, form: str) -> str:
    return f"{label:<{LABEL}}" + ("not known" if value is None else form.format(value))


def _capital(statistic: str) -> str:
    return statistic[0].upper() + statistic[1:]
