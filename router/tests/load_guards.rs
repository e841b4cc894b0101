//! The reserved load of workers returns to zero, however requests end.

#![forbid(unsafe_code)]

use std::{collections::VecDeque, sync::Arc, thread, time::Duration};

use mla_router::{
    Config,
    correct::Usage,
    fleet::{LoadGuard, Outcome, Replica},
    key::RouteKey,
    metrics::Label,
    policy::Reason,
    router::Router,
};

const THREADS: u64 = 4;
const REQUESTS: usize = 25_000;

/// A router and four workers without a server: load is reserved, and nothing is sent.
fn router() -> Arc<Router> {
    let urls = (1..=4).map(|port| format!("http://127.0.0.1:{port}").parse().expect("a URL"));
    let config = Config { worker_urls: urls.collect(), ..Config::default() };
    Router::new(config).expect("a router")
}

/// Applies a random event to a request on a worker.
fn befall(guard: &mut LoadGuard, router: &Router, key: &RouteKey, dice: &mut fastrand::Rng) {
    match dice.u8(..9) {
        // A second call has no effect.
        0..=2 => guard.prefill_done(dice.bool()),
        3 => guard.record(Outcome::Answered),
        4 => guard.record(Outcome::Failed),
        5 => guard.record(Outcome::Busy),
        6 => guard.record(Outcome::Late(Duration::from_secs(1))),
        7 => router.retract_insertion(key, guard),
        _ => {
            let usage = Usage { prompt_tokens: Some(100), cached_tokens: Some(dice.u64(..100)) };
            router.learn(key, guard, usage);
        }
    }
}

/// Runs some of the requests: several are open at a time, and they end in any order.
fn serve(router: &Router, workers: &[Arc<Replica>], seed: u64) {
    let mut dice = fastrand::Rng::with_seed(seed);
    let mut open: VecDeque<LoadGuard> = VecDeque::new();
    for _ in 0..REQUESTS {
        let worker = &workers[dice.usize(..workers.len())];
        let reason = Reason::ALL[dice.usize(..Reason::ALL.len())];
        let mut guard = worker.reserve(dice.u64(..10_000), reason);
        let key = RouteKey { blocks: vec![dice.u64(..64); 1], ..RouteKey::default() };
        guard.add_answers(dice.u32(..64));
        guard.prediction = worker.learned.predict(router.tree.insert(&key, worker.id));
        for _ in 0..dice.usize(..4) {
            befall(&mut guard, router, &key, &mut dice);
        }
        open.push_back(guard);
        if dice.u8(..) == 0 {
            worker.backend.suspect();
            router.tree.purge_worker(worker.id);
        }
        while open.len() > dice.usize(..32) {
            let any = dice.usize(..open.len());
            drop(open.swap_remove_back(any));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hundred_thousand_outcomes_release_all_load() {
    let router = router();
    let workers = router.registry.replicas().to_vec();
    thread::scope(|scope| {
        for seed in 0..THREADS {
            let (router, workers) = (&router, &workers);
            scope.spawn(move || serve(router, workers, seed));
        }
    });
    for worker in &workers {
        assert_eq!((worker.requests(), worker.pending_tokens()), (0, 0), "{}", worker.name());
    }
    // The epochs have drained as well: an insertion now is settled for the next request.
    let worker = &workers[0];
    let key = RouteKey { blocks: (0..64).collect(), prompt_tokens: 1024, ..RouteKey::default() };
    for cached_tokens in [0, 1000, 0] {
        let mut guard = worker.reserve(1, Reason::Cold);
        guard.prediction = worker.learned.predict(router.tree.insert(&key, worker.id));
        guard.prefill_done(true);
        let usage = Usage { prompt_tokens: Some(1024), cached_tokens: Some(cached_tokens) };
        router.learn(&key, &mut guard, usage);
    }
    assert!(worker.counters.evicted_blocks.get() + worker.counters.emptied.get() > 0);
}
