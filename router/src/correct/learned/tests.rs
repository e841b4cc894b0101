//! Tests of single reports; `tests/correction.rs` simulates whole caches.

use super::{
    super::capacity::{GROW, SHRINK},
    *,
};

const WORKER: WorkerId = WorkerId(0);

/// Inserts a request at `tick`. It finds a prefix last used at `last_used`, and nothing of it is cached.
fn miss(learned: &LearnedCache, tree: &PrefixTree, last_used: u32, tick: u32) -> Option<Finding> {
    let key = RouteKey { prompt_tokens: 1600, ..RouteKey::default() };
    let epoch = learned.begin();
    let last_used = Some(LruTick::at(last_used));
    let receipt = InsertReceipt { held: 100, last_used, tick: LruTick::at(tick) };
    let mut prediction = learned.predict(receipt);
    learned.end(&epoch);
    let usage = Usage { prompt_tokens: Some(1600), cached_tokens: Some(0) };
    learned.learn(tree, WORKER, &key, &mut prediction, usage).1
}

#[test]
fn a_worker_emptied_half_the_range_of_the_clock_ago_teaches_like_any_other() {
    let (learned, tree) = (LearnedCache::new(1 << 20), PrefixTree::new(1 << 20));
    for tick in 1..5 {
        miss(&learned, &tree, 0, tick);
    }
    learned.forget(&tree, WORKER);
    for now in [100, 1 << 31, (1 << 31) + 100, u32::MAX - 100] {
        for tick in now..now + 5 {
            miss(&learned, &tree, now, tick);
        }
        assert!(miss(&learned, &tree, now, now + 5).is_some(), "{now}");
    }
}

#[test]
fn a_request_in_flight_when_the_cache_was_emptied_teaches_nothing() {
    let (learned, tree) = (LearnedCache::new(1 << 20), PrefixTree::new(1 << 20));
    for tick in 1..5 {
        miss(&learned, &tree, 0, tick);
    }
    let key = RouteKey { prompt_tokens: 1600, ..RouteKey::default() };
    let receipt =
        InsertReceipt { held: 100, last_used: Some(LruTick::at(1)), tick: LruTick::at(6) };
    let mut prediction = learned.predict(receipt);
    learned.forget(&tree, WORKER);
    let usage = Usage { prompt_tokens: Some(1600), cached_tokens: Some(0) };
    assert_eq!(learned.learn(&tree, WORKER, &key, &mut prediction, usage).1, None);
}

#[test]
fn a_restart_restores_the_capacity_before_its_first_miss() {
    let (learned, tree) = (LearnedCache::new(1 << 20), PrefixTree::new(1 << 20));
    for tick in 1..5 {
        compute(&learned, InsertReceipt { held: 0, last_used: None, tick: LruTick::at(tick) });
    }
    for tick in 5..7 {
        assert_eq!(miss(&learned, &tree, 1, tick), Some(Finding::Evicted { blocks: 0 }));
    }
    assert!(learned.capacity() < 1 << 20);
    assert_eq!(miss(&learned, &tree, 1, 7), Some(Finding::NoCache));
    assert_eq!(learned.capacity(), 1 << 20);
}

/// Sends a prompt and has it computed.
fn compute(learned: &LearnedCache, receipt: InsertReceipt) -> Prediction {
    let epoch = learned.begin();
    let prediction = learned.predict(receipt);
    learned.end(&epoch);
    prediction
}

fn text() -> RouteKey {
    RouteKey { prompt_tokens: 1600, ..RouteKey::default() }
}

fn usage(cached_blocks: u64) -> Usage {
    Usage { prompt_tokens: Some(1600), cached_tokens: Some(16 * cached_blocks) }
}

/// A worker that is taken to hold `1 << 20` blocks reports `found` blocks of a prompt of 100, all of which
/// it should have.
fn report(key: &RouteKey, found: u64) -> (LearnedCache, Option<Finding>) {
    let (learned, tree) = (LearnedCache::new(1 << 20), PrefixTree::new(1 << 20));
    let receipt = |held, tick| InsertReceipt {
        held,
        last_used: (held > 0).then_some(LruTick::at(1)),
        tick: LruTick::at(tick),
    };
    for tick in 1..5 {
        compute(&learned, receipt(0, tick));
    }
    let mut prediction = compute(&learned, receipt(100, 5));
    let (_, finding) = learned.learn(&tree, WORKER, key, &mut prediction, usage(found));
    (learned, finding)
}

#[test]
fn an_eighth_and_six_blocks_may_be_missing() {
    assert_eq!(report(&text(), 82).1, None);
    let (learned, finding) = report(&text(), 81);
    assert_eq!(finding, Some(Finding::Evicted { blocks: 0 }));
    assert_eq!(learned.capacity(), whole(SHRINK * f64::from(1 << 20)), "one step");
}

#[test]
fn a_cached_prompt_that_the_tree_has_forgotten_makes_room() {
    let (learned, tree) = (report(&text(), 81).0, PrefixTree::new(1 << 20));
    for (found, growth) in [(6, 1.0), (7, GROW)] {
        let receipt = InsertReceipt { held: 0, last_used: None, tick: LruTick::at(6) };
        let mut prediction = compute(&learned, receipt);
        learned.learn(&tree, WORKER, &text(), &mut prediction, usage(found));
        assert_eq!(learned.capacity(), whole(SHRINK * growth * f64::from(1 << 20)), "{found}");
    }
}

#[test]
fn a_prompt_of_unknown_length_teaches_nothing() {
    let key = RouteKey { measure: Measure::Unknown, ..text() };
    let (learned, finding) = report(&key, 10);
    assert_eq!((finding, learned.capacity()), (None, 1 << 20));
    // The tokens per block are not learned either.
    let tree = PrefixTree::new(1 << 20);
    learned.set_capacity(&tree, WORKER, 16 << 10);
    let capacity = learned.capacity();
    let longer = Usage { prompt_tokens: Some(16_000), cached_tokens: None };
    learned.learn(&tree, WORKER, &key, &mut Prediction::default(), longer);
    assert_eq!(learned.capacity(), capacity);
}

#[test]
fn the_first_count_of_a_prompt_teaches_the_tokens_of_a_block() {
    let (learned, tree) = (LearnedCache::new(1 << 20), PrefixTree::new(1 << 20));
    learned.set_capacity(&tree, WORKER, 16 << 10);
    let mut prediction = Prediction::default();
    // A continued stream reports again.
    for tokens in [3200, 1600] {
        let usage = Usage { prompt_tokens: Some(tokens), cached_tokens: None };
        learned.learn(&tree, WORKER, &text(), &mut prediction, usage);
        assert_eq!(learned.capacity(), 512, "of 32 tokens");
    }
}

/// A worker that was sent `0..count` of these prompts of 100 blocks.
fn sent(count: u64) -> (LearnedCache, PrefixTree) {
    let (learned, tree) = (LearnedCache::new(1 << 20), PrefixTree::new(1 << 20));
    for number in 0..count {
        send(&learned, &tree, number);
    }
    (learned, tree)
}

fn prompt(number: u64) -> RouteKey {
    RouteKey { blocks: (0..100).map(|block| number << 32 | block).collect(), ..text() }
}

fn send(learned: &LearnedCache, tree: &PrefixTree, number: u64) -> Prediction {
    compute(learned, tree.insert(&prompt(number), WORKER))
}

#[test]
fn a_hit_of_long_ago_makes_room_only_in_a_share_that_is_full() {
    let (learned, tree) = sent(10);
    let mut missing = send(&learned, &tree, 0);
    let (_, finding) = learned.learn(&tree, WORKER, &prompt(0), &mut missing, usage(10));
    assert!(matches!(finding, Some(Finding::Evicted { .. })), "{finding:?}");
    let shrunk = learned.capacity();
    let mut there = send(&learned, &tree, 1);
    assert_eq!(there.receipt().expect("inserted").held, 100);
    learned.learn(&tree, WORKER, &prompt(1), &mut there, usage(100));
    assert_eq!(learned.capacity(), shrunk, "it holds a thousandth of that");
}

#[test]
fn three_prompts_of_the_newer_half_prove_a_restart_and_an_older_one_does_not_count() {
    let (learned, tree) = sent(12);
    for (number, is_proof) in [(1, false), (9, false), (10, false), (11, true)] {
        let mut prediction = send(&learned, &tree, number);
        let (_, finding) = learned.learn(&tree, WORKER, &prompt(number), &mut prediction, usage(0));
        assert_eq!(finding == Some(Finding::NoCache), is_proof, "{number}: {finding:?}");
    }
}
