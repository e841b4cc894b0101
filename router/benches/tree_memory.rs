//! Memory of the tree, and the longest insertion while it grows: `cargo bench -p mla-router --bench tree_memory`.
//!
//! Fills the tree with ten million blocks in prompts of several lengths. Compares the size that the tree reports
//! with the allocated bytes and the growth of the process. Times each insertion in CPU time, so that other
//! processes do not count. Prints one JSON line.

#![allow(clippy::print_stdout)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    env::{args, current_exe},
    process::Command,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use mla_router::{key::RouteKey, names::WorkerId, tree::PrefixTree};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const BLOCKS: u64 = 10_000_000;
const LENGTHS: [u64; 6] = [1, 2, 8, 32, 128, 512];
const WORKERS: u32 = 8;

/// The system's allocator with a count of its bytes.
struct Counting;

static ALLOCATED: AtomicU64 = AtomicU64::new(0);

// SAFETY: all calls are forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size() as u64, Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split_whitespace().nth(1).expect("the second field is the resident set");
    pages.parse::<u64>().expect("a number of pages") * 4096
}

/// CPU time of this thread in nanoseconds.
fn cpu_time() -> i64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// A conversation of `length` blocks. It shares half of them with 15 others.
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

/// Measures a tree with prompts of `length` blocks.
fn measure(length: u64) -> Value {
    let (resident, allocated) = (resident_bytes(), ALLOCATED.load(Relaxed));
    let tree = PrefixTree::new(u64::MAX);
    let (mut index, mut total, mut slowest) = (0, 0, 0);
    while tree.owned_by(WorkerId(0)) < BLOCKS / u64::from(WORKERS) {
        let key = prompt(index, length);
        let begun = cpu_time();
        // A group stays on its worker, as with the cache-aware policy.
        tree.insert(&key, WorkerId((index / 16) as u32 % WORKERS));
        let time = cpu_time() - begun;
        total += time;
        slowest = slowest.max(time);
        index += 1;
    }
    let resident = resident_bytes().saturating_sub(resident);
    let allocated = ALLOCATED.load(Relaxed) - allocated;
    let stats = tree.stats();
    let per_block = |bytes: u64| (bytes as f64 / stats.blocks as f64 * 10.0).round() / 10.0;
    json!({
        "blocks_per_prompt": length,
        "blocks": stats.blocks,
        "nodes": stats.nodes,
        "bytes_per_block": per_block(stats.bytes),
        "allocated_bytes_per_block": per_block(allocated),
        "resident_bytes_per_block": per_block(resident),
        "insert_mean_us": total as f64 / index as f64 / 1e3,
        "insert_max_us": slowest as f64 / 1e3,
    })
}

/// Runs each row in its own process: memory freed by one tree would hide the growth by the next.
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
