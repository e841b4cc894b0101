//! Memory of the tree: `cargo bench -p mla-router --bench tree_memory`.
//!
//! Fills the tree with prompts of several lengths and compares what the tree says that it takes
//! with what the process grew by. Ends in one JSON line.

#![allow(clippy::print_stdout)]

use mla_router::{key::RouteKey, tree::PrefixTree, worker_id::WorkerId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const BLOCKS: u64 = 4_000_000;
const WORKERS: u32 = 8;

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm
        .split_whitespace()
        .nth(1)
        .expect("the second field is the resident set");
    pages.parse::<u64>().expect("a number of pages") * 4096
}

/// One of many conversations of `length` blocks, half of which it shares with 15 others.
fn prompt(index: u64, length: u64) -> RouteKey {
    let mut chain = 0;
    let blocks = (0..length).map(|block| {
        let part = if block < length / 2 {
            (index / 16) << 24
        } else {
            1 << 63 | index << 24
        } | block;
        chain = xxh3_64_with_seed(&part.to_le_bytes(), chain);
        chain
    });
    RouteKey {
        blocks: blocks.collect(),
        ..RouteKey::default()
    }
}

fn main() {
    println!(
        "{:>14} {:>12} {:>10} {:>16} {:>16}",
        "blocks/prompt", "blocks", "nodes", "B/block (stats)", "B/block (RSS)"
    );
    let mut rows = Vec::new();
    for length in [2, 8, 32, 128, 512] {
        let before = resident_bytes();
        let tree = PrefixTree::new();
        for worker in 0..WORKERS {
            tree.set_capacity(WorkerId(worker), u64::MAX);
        }
        let mut index = 0;
        while tree.held_by(WorkerId(0)) < BLOCKS / u64::from(WORKERS) {
            // A group stays with its worker, as the cache-aware policy has it.
            tree.insert(
                &prompt(index, length),
                WorkerId((index / 16) as u32 % WORKERS),
            );
            index += 1;
        }
        let stats = tree.stats();
        let grown = resident_bytes().saturating_sub(before);
        let per_block = |bytes: u64| bytes as f64 / stats.blocks as f64;
        println!(
            "{length:>14} {:>12} {:>10} {:>16.1} {:>16.1}",
            stats.blocks,
            stats.nodes,
            per_block(stats.bytes),
            per_block(grown)
        );
        rows.push(serde_json::json!({
            "blocks_per_prompt": length,
            "blocks": stats.blocks,
            "bytes_per_block": per_block(stats.bytes),
            "resident_bytes_per_block": per_block(grown),
        }));
    }
    println!(
        "{}",
        serde_json::json!({"bench": "tree_memory", "rows": rows})
    );
}
