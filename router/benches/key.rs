//! Time to read the routing key of a body: `cargo bench -p mla-router --bench key`.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use mla_router::key::{Route, RouteKey};
use serde_json::{Value, json};

/// A conversation of about `bytes`, with the line breaks of real prompts.
fn chat(bytes: usize, line: &str) -> Value {
    let text = line.repeat(bytes / 8 / line.len());
    let message =
        |turn| json!({"role": if turn % 2 == 0 { "user" } else { "assistant" }, "content": text});
    json!({"model": "m", "messages": (0..8).map(message).collect::<Vec<_>>(), "stream": true})
}

/// ASCII only, the default of Python's json module.
fn ascii(body: &Value) -> String {
    let escape = |c: char| {
        if c.is_ascii() { c.to_string() } else { format!("\\u{:04x}", c as u32) }
    };
    body.to_string().chars().map(escape).collect()
}

fn extraction(c: &mut Criterion) {
    let prose =
        "The quick brown fox jumps over the lazy dog, as it has done for a hundred years.\n";
    let quoted = "    \"fox\": {\"speed\": \"quick\", \"colour\": \"brown\"},\n";
    let chinese = "敏捷的棕色狐狸跳过了懒狗。";
    let ids: Vec<u32> = (0..8192_u32).map(|id| id.wrapping_mul(7919) % 128_000).collect();
    let chats = [
        ("chat 2 KiB", chat(2 << 10, prose).to_string()),
        ("chat 32 KiB", chat(32 << 10, prose).to_string()),
        ("chat 32 KiB, JSON in JSON", chat(32 << 10, quoted).to_string()),
        ("chat 32 KiB, escaped Chinese", ascii(&chat(16 << 10, chinese))),
    ];
    let chats = chats.map(|(name, body)| (name, Route::ChatCompletions, body));
    let ids = ("8192 token ids", Route::Generate, json!({ "input_ids": ids }).to_string());
    let mut group = c.benchmark_group("key");
    for (name, route, body) in chats.iter().chain([&ids]) {
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(*name, |bencher| {
            bencher.iter(|| RouteKey::extract(*route, body.as_bytes()).expect("a key"));
        });
    }
    group.finish();
}

criterion_group!(benches, extraction);
criterion_main!(benches);
