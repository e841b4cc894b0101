//! Memory of the tree: `cargo bench -p mla-router --bench tree_memory`.
//!
//! Fills the tree with prompts of several lengths and compares what the tree says that it takes
//! with what the process grew by. Ends in one JSON line.

#![allow(clippy::print_stdout)]

use std::{
    env::{args, current_exe},
    process::Command,
};

use mla_router::{fleet::worker_id::WorkerId, key::RouteKey, tree::PrefixTree};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const BLOCKS: u64 = 4_000_000;
const LENGTHS: [u64; 5] = [2, 8, 32, 128, 512];
const WORKERS: u32 = 8;

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split_whitespace().nth(1).expect("the second field is the resident set");
    pages.parse::<u64>().expect("a number of pages") * 4096
}

/// One of many conversations of `length` blocks, half of which it shares with 15 others.
fn prompt(index: u64, length: u64) -> RouteKey {
    let mut chain = 0;
    let blocks = (0..length).map(|block| {
        let part =
            if block < length / 2 { (index / 16) << 24 } else { 1 << 63 | index << 24 } | block;
        chain = xxh3_64_with_seed(&part.to_le_bytes(), chain);
        chain
    });
    RouteKey { blocks: blocks.collect(), ..RouteKey::default() }
}

/// What one tree of prompts of `length` blocks takes.
fn measure(length: u64) -> Value {
    let before = resident_bytes();
    let tree = PrefixTree::new(1 << 18);
    for worker in 0..WORKERS {
        tree.set_capacity(WorkerId(worker), u64::MAX);
    }
    let mut index = 0;
    while tree.held_by(WorkerId(0)) < BLOCKS / u64::from(WORKERS) {
        // A group stays with its worker, as the cache-aware policy has it.
        tree.insert(&prompt(index, length), WorkerId((index / 16) as u32 % WORKERS));
        index += 1;
    }
    let grown = resident_bytes().saturating_sub(before);
    let stats = tree.stats();
    let per_block = |bytes: u64| (bytes as f64 / stats.blocks as f64 * 10.0).round() / 10.0;
    json!({
        "blocks_per_prompt": length,
        "blocks": stats.blocks,
        "nodes": stats.nodes,
        "bytes_per_block": per_block(stats.bytes),
        "resident_bytes_per_block": per_block(grown),
    })
}

/// Each row in a process of its own: memory that a tree gave back would hide what the next takes.
fn main() {
    if let Some(Ok(length)) = args().nth(1).map(|length| length.parse()) {
        println!("{}", measure(length));
        return;
    }
    let this = current_exe().expect("Linux");
    let rows: Vec<Value> = LENGTHS
        .map(|length| {
            let row = Command::new(&this).arg(length.to_string()).output().expect("it runs");
            let row = serde_json::from_slice(&row.stdout).expect("a row is a JSON line");
            println!("{row}");
            row
        })
        .into();
    println!("{}", json!({"bench": "tree_memory", "rows": rows}));
}
