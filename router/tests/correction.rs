//! Tests the correction of the tree against workers with simulated caches: the pages of the mock engine, smaller than
//! reported, emptied now and then, or evicting in another order.

#![forbid(unsafe_code)]

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use mla_mock_worker::cache::{Cache, Lease, PageHash};
use mla_router::{
    correct::{Epoch, Finding, LearnedCache, Prediction, Usage},
    key::{Measure, RouteKey},
    names::WorkerId,
    tree::PrefixTree,
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const WORKER: WorkerId = WorkerId(0);

/// Blocks in a page: 64 tokens.
const PAGE: usize = 4;

/// Requests that are computed at the same time.
const CONCURRENT: usize = 6;

const REQUESTS: usize = 3000;

/// The prompt of conversation `id` at `turn`: a system prompt shared by ten conversations, then its own growing text.
fn prompt(id: u64, turn: u64) -> RouteKey {
    let mut chain = 0;
    let blocks: Vec<u64> = (0..40 + 20 * (turn + 1))
        .map(|block| {
            let part = if block < 40 { id / 10 } else { 1 << 40 | id };
            chain = xxh3_64_with_seed(&(part << 16 | block).to_le_bytes(), chain);
            chain
        })
        .collect();
    let prompt_tokens = blocks.len() as u64 * 16;
    RouteKey { blocks, prompt_tokens, measure: Measure::Text, ..RouteKey::default() }
}

/// The differences between a simulated worker and its reports.
#[derive(Clone, Copy)]
struct World {
    /// Reported and actual size of its cache in tokens.
    told: u64,
    real: u64,
    /// Tokens in a block of text. The router assumes 16.
    tokens_per_block: u64,
    /// Requests after which it loses its cache, repeatedly.
    restart_every: Option<usize>,
    /// Requests after which it evicts some conversation, recent or not.
    whim_every: Option<usize>,
    /// Whether it also serves another router with as many requests.
    shared: bool,
    reports: bool,
}

impl World {
    fn cache(&self) -> Cache {
        Cache::new((self.real / (PAGE as u64 * self.tokens_per_block)) as usize)
    }
}

const SMALL: World = World {
    told: 200_000,
    real: 50_000,
    tokens_per_block: 16,
    restart_every: None,
    whim_every: None,
    shared: false,
    reports: true,
};

struct InFlight {
    key: RouteKey,
    prediction: Prediction,
    epoch: Epoch,
    lease: Option<Lease>,
    path: Vec<PageHash>,
    usage: Usage,
}

struct Outcome {
    /// Sum of the differences between predicted and cached tokens, and all tokens, in the second half.
    error: u64,
    prompt: u64,
    emptied: usize,
    capacity: u64,
}

/// A router's tree, and the worker whose cache it predicts.
struct Simulation {
    world: World,
    dice: fastrand::Rng,
    tree: PrefixTree,
    learned: LearnedCache,
    cache: Cache,
    /// Of each conversation: its turn, and the id under which its text is cached.
    turns: [u64; 200],
    salts: [u64; 200],
    open: VecDeque<InFlight>,
    outcome: Outcome,
}

impl Simulation {
    fn new(world: World, seed: u64) -> Self {
        let tree = PrefixTree::new(1 << 18);
        let learned = LearnedCache::new(1 << 18);
        learned.set_capacity(&tree, WORKER, world.told);
        Self {
            world,
            dice: fastrand::Rng::with_seed(seed),
            tree,
            learned,
            cache: world.cache(),
            turns: [0; 200],
            salts: [0; 200],
            open: VecDeque::new(),
            outcome: Outcome { error: 0, prompt: 0, emptied: 0, capacity: 0 },
        }
    }

    /// Requests in flight at the restart get no response.
    fn restart(&mut self) {
        for lost in self.open.drain(..) {
            self.tree.retract(&lost.key, WORKER, &lost.prediction.receipt().expect("noted"));
            self.learned.end(&lost.epoch);
        }
        self.cache = self.world.cache();
    }

    fn send(&mut self, has_whim: bool) {
        let Self { world, dice, cache, turns, salts, .. } = self;
        // Some conversations have more requests than others.
        let busiest = 1 + dice.usize(..turns.len());
        let id = dice.usize(..busiest);
        turns[id] = (turns[id] + 1) % 12;
        let key = prompt(id as u64, turns[id]);
        let epoch = self.learned.begin();
        let prediction = self.learned.predict(self.tree.insert(&key, WORKER));
        if has_whim {
            // Under another id the conversation is not found again, and ages.
            salts[dice.usize(..turns.len())] += 1;
        }
        let own = |(number, page): (usize, &[u64])| {
            page[PAGE - 1] ^ if number < 10 { 0 } else { salts[id] }
        };
        let path: Vec<PageHash> = key.blocks.chunks_exact(PAGE).enumerate().map(own).collect();
        if world.shared {
            let strange: Vec<PageHash> = (0..path.len()).map(|_| dice.u64(..)).collect();
            if let Some(mut lease) = cache.reserve(&strange, strange.len()) {
                cache.publish(&mut lease, &strange);
                cache.release(lease);
            }
        }
        // Half a page for the template, and an answer that stays in the cache.
        let tokens = key.blocks.len() as u64 * world.tokens_per_block + 30;
        let page_tokens = PAGE as u64 * world.tokens_per_block;
        let cached = (cache.matched(&path) as u64).min((tokens - 1) / page_tokens);
        let lease = cache.reserve(&path, path.len() + 8);
        let usage = Usage {
            prompt_tokens: Some(tokens),
            cached_tokens: world.reports.then_some(cached * page_tokens),
        };
        self.open.push_back(InFlight { key, prediction, epoch, lease, path, usage });
    }

    fn complete(&mut self, mut done: InFlight, counts: bool, learning: bool) {
        if let Some(mut lease) = done.lease {
            self.cache.publish(&mut lease, &done.path);
            self.cache.release(lease);
        }
        self.learned.end(&done.epoch);
        let held = done.prediction.receipt().expect("noted").held;
        if counts {
            let predicted = u64::from(held) * self.world.tokens_per_block;
            self.outcome.error += predicted.abs_diff(done.usage.cached_tokens.unwrap_or(0));
            self.outcome.prompt += done.usage.prompt_tokens.expect("told");
        }
        if learning {
            let (key, prediction) = (&done.key, &mut done.prediction);
            let (_, found) = self.learned.learn(&self.tree, WORKER, key, prediction, done.usage);
            let is_empty = matches!(found, Some(Finding::Emptied | Finding::NoCache));
            self.outcome.emptied += usize::from(is_empty);
        }
    }
}

fn run(world: World, seed: u64, learning: bool) -> Outcome {
    let mut simulation = Simulation::new(world, seed);
    for request in 0..REQUESTS {
        if world.restart_every.is_some_and(|every| request % every == every - 1) {
            simulation.restart();
        }
        simulation.send(world.whim_every.is_some_and(|every| request % every == 0));
        if simulation.open.len() == CONCURRENT {
            let oldest = simulation.open.pop_front().expect("some are open");
            simulation.complete(oldest, request > REQUESTS / 2, learning);
        }
    }
    simulation.outcome.capacity = simulation.learned.capacity();
    simulation.outcome
}

/// The factor by which learning reduces the error of the predictions.
fn gain(world: World) -> (f64, Outcome) {
    let (with, without) = (run(world, 7, true), run(world, 7, false));
    let error = |outcome: &Outcome| outcome.error as f64 / outcome.prompt as f64;
    (error(&without) / error(&with), with)
}

#[test]
fn smaller_cache_than_reported_is_detected() {
    for world in
        [SMALL, World { tokens_per_block: 10, ..SMALL }, World { tokens_per_block: 28, ..SMALL }]
    {
        let (gain, outcome) = gain(world);
        assert!(gain > 2.5, "{gain:.1}");
        // Answers and running requests use a part of the cache.
        let real = world.real / world.tokens_per_block;
        assert!((real / 2..real * 2).contains(&outcome.capacity), "{} of {real}", outcome.capacity);
    }
}

#[test]
fn prediction_survives_other_eviction_order_and_other_routers() {
    for world in [World { whim_every: Some(10), ..SMALL }, World { shared: true, ..SMALL }] {
        let (gain, _) = gain(world);
        assert!(gain > 2.5, "{gain:.1}");
    }
}

#[test]
fn restart_is_detected_without_loss_of_capacity() {
    let world = World { restart_every: Some(500), real: SMALL.told, ..SMALL };
    let (gain, outcome) = gain(world);
    assert!(gain > 1.5, "{gain:.1}");
    assert!((1..=6).contains(&outcome.emptied), "{} of 6", outcome.emptied);
    let told = world.told / world.tokens_per_block;
    assert!(outcome.capacity > told * 9 / 10, "{} of {told}", outcome.capacity);
}

#[test]
fn correct_or_absent_reports_change_nothing() {
    for world in [World { told: SMALL.real, ..SMALL }, World { reports: false, ..SMALL }] {
        let (gain, outcome) = gain(world);
        assert!(gain > 0.99, "{gain:.2}");
        assert_eq!(outcome.emptied, 0);
        let told = world.told / world.tokens_per_block;
        assert!(outcome.capacity > told * 9 / 10, "{} of {told}", outcome.capacity);
    }
}

#[test]
fn flush_does_not_change_the_learned_capacity() {
    let tree = PrefixTree::new(1 << 18);
    let learned = LearnedCache::new(1 << 18);
    learned.set_capacity(&tree, WORKER, SMALL.told);
    let capacity = learned.capacity();
    let send = || {
        let epoch = learned.begin();
        (epoch, learned.predict(tree.insert(&prompt(1, 5), WORKER)))
    };
    for _ in 0..3 {
        learned.end(&send().0);
    }
    // In flight when the cache is emptied: each would be evidence of a restart, or of a small cache.
    let mut open: Vec<_> = (0..4).map(|_| send()).collect();
    assert!(open[0].1.receipt().expect("noted").held > 100);
    learned.forget(&tree, WORKER);
    let usage = Usage { prompt_tokens: Some(2560), cached_tokens: Some(0) };
    for (epoch, prediction) in &mut open {
        learned.end(epoch);
        let (_, finding) = learned.learn(&tree, WORKER, &prompt(1, 5), prediction, usage);
        assert_eq!(finding, None);
    }
    assert_eq!(learned.capacity(), capacity);
}

/// Inserts prompts while a cache is evicted to a part of it. Returns how many were inserted in the course of it.
fn insertions_during_an_eviction() -> usize {
    let tree = PrefixTree::new(1 << 20);
    let learned = LearnedCache::new(1 << 20);
    for number in 0..1 << 15 {
        tree.insert(&prompt(number << 20, 0), WORKER);
    }
    let (done, mut inserted) = (AtomicBool::new(false), 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            learned.set_capacity(&tree, WORKER, 16 << 10);
            done.store(true, Ordering::SeqCst);
        });
        while !done.load(Ordering::SeqCst) {
            let epoch = learned.begin();
            // The eviction has started and is far from its end.
            let is_under_way = (1 << 18..1 << 19).contains(&tree.owned_by(WORKER));
            learned.predict(tree.insert(&prompt(1 << 40, 0), WORKER));
            inserted += usize::from(is_under_way);
            learned.end(&epoch);
        }
    });
    assert!(tree.owned_by(WORKER) <= 1 << 10);
    inserted
}

/// A busy machine may run the eviction alone, so there are several.
#[test]
fn insertions_proceed_during_eviction() {
    assert!((0..20).any(|_| insertions_during_an_eviction() > 3));
}
