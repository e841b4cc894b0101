//! Time of operations on the tree: `cargo bench -p mla-router --bench tree`.
//!
//! Prompts have 32 KiB, which are 512 blocks. The tree is full, so every insertion of a new prompt evicts.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use mla_router::{
    Config,
    key::RouteKey,
    names::WorkerId,
    policy::{self, Candidate, PolicyRequest},
    tree::PrefixTree,
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const WORKERS: u32 = 8;
const CAPACITY: u64 = 100_000;
const BLOCKS: u64 = 512;

/// A conversation: `shared` blocks of its group, then its own blocks.
fn prompt(group: u64, own: u64, shared: u64) -> RouteKey {
    let mut chain = group;
    let blocks = (0..BLOCKS).map(|block| {
        let part = if block < shared { block } else { own << 32 | block };
        chain = xxh3_64_with_seed(&part.to_le_bytes(), chain);
        chain
    });
    RouteKey { blocks: blocks.collect(), ..RouteKey::default() }
}

fn full_tree(shared: u64) -> PrefixTree {
    let tree = PrefixTree::new(1 << 18);
    for worker in 0..WORKERS {
        tree.set_capacity(WorkerId(worker), CAPACITY);
    }
    for own in 0..u64::from(WORKERS) * 2 * CAPACITY / (BLOCKS - shared) {
        tree.insert(&prompt(own % 64, own, shared), WorkerId((own % u64::from(WORKERS)) as u32));
    }
    tree
}

fn operations(c: &mut Criterion) {
    let mut found = Vec::new();
    let mut own = 1_000_000;
    for (name, shared) in [("cold", 0), ("half_shared", BLOCKS / 2)] {
        let tree = full_tree(shared);
        c.bench_function(&format!("lookup+insert 32 KiB, {name}"), |bencher| {
            let next = || {
                own += 1;
                prompt(own % 64, own, shared)
            };
            let run = |key: RouteKey| {
                tree.lookup(black_box(&key), &mut found);
                tree.insert(&key, WorkerId(key.blocks[0] as u32 % WORKERS));
                key
            };
            bencher.iter_batched(next, run, criterion::BatchSize::SmallInput);
        });
    }
    let tree = full_tree(0);
    let known = prompt(7, 7, 0);
    c.bench_function("lookup+insert 32 KiB, all known", |bencher| {
        bencher.iter(|| {
            tree.lookup(black_box(&known), &mut found);
            tree.insert(&known, WorkerId(1));
        });
    });
    c.bench_function("purge a worker of 100,000 blocks", |bencher| {
        let run = |tree: PrefixTree| {
            tree.purge_worker(WorkerId(3));
            tree
        };
        bencher.iter_batched(|| full_tree(0), run, criterion::BatchSize::PerIteration);
    });
}

/// Time of a choice among 64 workers that all hold the start of the prompt; eight of them hold more.
fn choice(c: &mut Criterion) {
    const MANY: u32 = 64;
    let tree = PrefixTree::new(CAPACITY);
    let key = RouteKey { prompt_tokens: BLOCKS * 16, ..prompt(7, 7, 0) };
    for worker in 0..MANY {
        let mut part = key.clone();
        part.blocks.truncate(if worker.is_multiple_of(8) { 64 + worker as usize } else { 32 });
        tree.insert(&part, WorkerId(worker));
    }
    let policy = policy::of(&Config::default());
    let request = PolicyRequest { key: Some(&key), owner_share: 0.0 };
    let (mut found, mut held) = (Vec::new(), [0; MANY as usize]);
    c.bench_function("lookup and choice among 64 workers", |bencher| {
        bencher.iter(|| {
            tree.lookup(black_box(&key), &mut found);
            for (worker, blocks) in &found {
                held[worker.0 as usize] = *blocks;
            }
            let candidate = |(worker, blocks): (usize, &u32)| Candidate {
                id: WorkerId(worker as u32),
                requests: 3,
                other_requests: 0,
                pending_tokens: 100 * worker as u64,
                matched_blocks: *blocks,
                hash_seed: worker as u64,
                token_seconds: None,
            };
            let candidates: Vec<Candidate> = held.iter().enumerate().map(candidate).collect();
            policy.choose(&request, &candidates)
        });
    });
}

criterion_group!(benches, operations, choice);
criterion_main!(benches);
