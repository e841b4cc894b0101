# /// script
# dependencies = ["aiperf==0.13.0"]
# ///
"""aiperf, streaming chats of synthetic text."""

from __future__ import annotations

import json

from checks import Server, command, main

REQUESTS = 24


def profile(server: Server) -> None:
    out = server.folder / "out"
    command(
        *("aiperf", "profile", "-m", server.model, "--url", server.url),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", server.tokenizer),
        *("--concurrency", "4", "--request-count", str(REQUESTS), "--random-seed", "1"),
        *("--synthetic-input-tokens-mean", "64", "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", "16", "--output-tokens-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", out),
        cwd=server.folder,
    )
    (export,) = out.rglob("profile_export_aiperf.json")
    result = json.loads(export.read_text())
    assert result["request_count"]["avg"] == REQUESTS, result["request_count"]
    assert not result.get("error_summary"), result["error_summary"]


main(profile)
