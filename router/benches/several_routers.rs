//! What is left of cache-aware routing when several routers share the workers and do not talk:
//! `cargo bench -p mla-router --bench several_routers`.
//!
//! A simulation in virtual time, the same at each run. Real are the policies, the trees and what is
//! learned from the workers' reports; each router knows only what it has sent itself. The workers are
//! the mock engine's page cache (64 tokens a page, least recently used leaves evicted first), a queue
//! of prompts computed one after the other, and a fixed time for each answer. Each request arrives at
//! a random router. Ends in one JSON line.

#![allow(clippy::print_stdout)]

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use mla_mock_worker::cache::{Cache, Lease, PageHash};
use mla_router::{
    Config,
    config::PolicyName,
    correct::{Epoch, HomeShare, Learned, Prediction, Usage},
    key::{Measure, RouteKey},
    names::WorkerId,
    policy::{self, Candidate, Policy, PolicyRequest, Reason},
    tree::PrefixTree,
};
use serde_json::json;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const WORKERS: usize = 8;
const CACHE_TOKENS: u64 = 1 << 16;
const PAGE_BLOCKS: usize = 4;
const BLOCK_TOKENS: u64 = 16;
/// Of a prompt.
const TOKENS_PER_SECOND: f64 = 16_000.0;
const ANSWER_BLOCKS: u64 = 16;
const ANSWER_SECONDS: f64 = 3.0;
const ROUTERS: [usize; 4] = [1, 2, 4, 8];
const POLICIES: [PolicyName; 4] = [
    PolicyName::CacheAware,
    PolicyName::CacheAwareThreshold,
    PolicyName::PrefixHash,
    PolicyName::RoundRobin,
];

/// One request to come.
struct Script {
    /// Blocks of the prompt, and of prompt and answer, which the engine keeps.
    prompt: Vec<u64>,
    whole: Vec<u64>,
    /// When it comes: seconds after the end of the request before it, or from the beginning.
    delay: f64,
    follows: bool,
}

impl Script {
    /// A prompt of so many blocks, of which the first `shared` belong to a group, and an answer.
    fn new(group: u64, shared: u64, own: u64, prompt: u64, delay: f64, follows: bool) -> Self {
        let mut chain = 1;
        let block = |block: u64| {
            let part = if block < shared { group } else { 1 << 40 | own };
            chain = xxh3_64_with_seed(&(part << 16 | block).to_le_bytes(), chain);
            chain
        };
        let whole: Vec<u64> = (0..prompt + ANSWER_BLOCKS).map(block).collect();
        Self { prompt: whole[..prompt as usize].to_vec(), whole, delay, follows }
    }

    fn tokens(&self) -> u64 {
        self.prompt.len() as u64 * BLOCK_TOKENS
    }
}

/// SGLang's generated-shared-prefix: 64 groups of 16 prompts, a system prompt of 2048 tokens, a
/// question of 128, in random order, 40 a second.
fn shared_prefix(dice: &mut fastrand::Rng) -> Vec<Script> {
    let mut order: Vec<u64> = (0..64 * 16).collect();
    dice.shuffle(&mut order);
    let mut time = 0.0;
    let script = |number: u64| {
        time += exponential(dice, 1.0 / 40.0);
        Script::new(number / 16, 128, number, 136, time, false)
    };
    order.into_iter().map(script).collect()
}

/// 256 conversations of 8 turns, each with a system prompt of its own of 480 tokens and questions of
/// 160; a user thinks for ten seconds.
fn conversations(dice: &mut fastrand::Rng) -> Vec<Script> {
    let mut scripts = Vec::new();
    for conversation in 0..256 {
        let start = dice.f64() * 120.0;
        for turn in 0..8 {
            let prompt = 40 + turn * (10 + ANSWER_BLOCKS);
            let delay = if turn == 0 { start } else { exponential(dice, 10.0) };
            scripts.push(Script::new(0, 0, conversation, prompt, delay, turn > 0));
        }
    }
    scripts
}

fn exponential(dice: &mut fastrand::Rng, mean: f64) -> f64 {
    -mean * (1.0 - dice.f64()).ln()
}

/// A router: what it knows is what it has sent.
struct Router {
    policy: Box<dyn Policy>,
    tree: PrefixTree,
    learned: Vec<Learned>,
    home: HomeShare,
    requests: Vec<u32>,
    pending: Vec<u64>,
}

/// A request in flight.
struct Sent {
    router: usize,
    worker: usize,
    key: RouteKey,
    reason: Reason,
    pending: u64,
    prediction: Prediction,
    epoch: Option<Epoch>,
    begun: f64,
    cached_tokens: u64,
    lease: Option<Lease>,
}

impl Router {
    fn new(policy: PolicyName) -> Self {
        let router = Self {
            policy: policy::of(&Config { policy, ..Config::default() }),
            tree: PrefixTree::new(CACHE_TOKENS / BLOCK_TOKENS),
            learned: (0..WORKERS).map(|_| Learned::new(CACHE_TOKENS / BLOCK_TOKENS)).collect(),
            home: HomeShare::default(),
            requests: vec![0; WORKERS],
            pending: vec![0; WORKERS],
        };
        for (worker, learned) in router.learned.iter().enumerate() {
            learned.set_capacity(&router.tree, WorkerId(worker as u32), CACHE_TOKENS);
        }
        router
    }

    fn candidates(&self, key: &RouteKey) -> Vec<Candidate> {
        let mut matches = Vec::new();
        if self.policy.uses_tree() {
            self.tree.lookup(key, &mut matches);
        }
        let candidate = |worker: usize| {
            let id = WorkerId(worker as u32);
            let held = matches.iter().find(|(holder, _)| *holder == id);
            Candidate {
                id,
                requests: self.requests[worker],
                pending_tokens: self.pending[worker],
                matched_blocks: held.map_or(0, |(_, blocks)| *blocks),
                hash_seed: xxh3_64_with_seed(b"worker", worker as u64),
            }
        };
        (0..WORKERS).map(candidate).collect()
    }

    /// As the library's `Router::select`.
    fn send(&mut self, router: usize, script: &Script, begun: f64) -> Sent {
        let key = RouteKey {
            blocks: script.prompt.clone(),
            prompt_tokens: script.tokens(),
            measure: Measure::Ids,
            ..RouteKey::default()
        };
        let request = PolicyRequest { key: Some(&key), home_share: self.home.share() };
        let choice = self.policy.choose(&request, &self.candidates(&key)).expect("eight workers");
        let (worker, reason) = (choice.index, choice.reason);
        let pending = u64::from(choice.uncached_tokens);
        self.requests[worker] += 1;
        self.pending[worker] += pending;
        let epoch = Some(self.learned[worker].begin());
        let mut prediction = Prediction::default();
        if self.policy.uses_tree() {
            let note = self.tree.insert(&key, WorkerId(worker as u32));
            prediction = self.learned[worker].predict(note);
        }
        let (cached_tokens, lease) = (0, None);
        Sent {
            router,
            worker,
            key,
            reason,
            pending,
            prediction,
            epoch,
            begun,
            cached_tokens,
            lease,
        }
    }

    fn first_byte(&mut self, sent: &mut Sent) {
        let learned = &self.learned[sent.worker];
        self.pending[sent.worker] -= std::mem::take(&mut sent.pending);
        if let Some(epoch) = sent.epoch.take() {
            learned.end(&epoch);
        }
        let usage = Usage {
            prompt_tokens: Some(sent.key.prompt_tokens),
            cached_tokens: Some(sent.cached_tokens),
        };
        let worker = WorkerId(sent.worker as u32);
        if let Reason::Home | Reason::Cold = sent.reason {
            let at_home = sent.reason == Reason::Home;
            self.home.observe(at_home, sent.key.prompt_tokens, sent.cached_tokens);
        }
        learned.learn(&self.tree, worker, &sent.key, &mut sent.prediction, usage);
    }
}

struct Worker {
    cache: Cache,
    queue: VecDeque<usize>,
    busy: bool,
    taken: u64,
}

impl Worker {
    fn new(pages: usize) -> Self {
        Self { cache: Cache::new(pages), queue: VecDeque::new(), busy: false, taken: 0 }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival(usize),
    FirstByte(usize),
    End(usize),
}

fn pages(blocks: &[u64]) -> Vec<PageHash> {
    blocks.chunks_exact(PAGE_BLOCKS).map(|page| page[PAGE_BLOCKS - 1]).collect()
}

struct Simulation<'a> {
    scripts: &'a [Script],
    dice: fastrand::Rng,
    routers: Vec<Router>,
    workers: Vec<Worker>,
    sent: Vec<Option<Sent>>,
    /// By time in nanoseconds.
    events: BinaryHeap<Reverse<(u64, Event)>>,
    now: f64,
    cached: u64,
    waits: Vec<f64>,
}

impl Simulation<'_> {
    fn at(&mut self, delay: f64, event: Event) {
        #[expect(clippy::cast_sign_loss, reason = "time does not run backwards")]
        let time = ((self.now + delay) * 1e9) as u64;
        self.events.push(Reverse((time, event)));
    }

    fn run(&mut self) {
        for (number, script) in self.scripts.iter().enumerate().filter(|(_, it)| !it.follows) {
            self.at(script.delay, Event::Arrival(number));
        }
        while let Some(Reverse((time, event))) = self.events.pop() {
            self.now = time as f64 / 1e9;
            match event {
                Event::Arrival(number) => self.arrive(number),
                Event::FirstByte(number) => self.first_byte(number),
                Event::End(number) => self.end(number),
            }
        }
    }

    fn arrive(&mut self, number: usize) {
        let router = self.dice.usize(..self.routers.len());
        let script = &self.scripts[number];
        let sent = self.routers[router].send(router, script, self.now);
        let worker = sent.worker;
        self.sent[number] = Some(sent);
        self.workers[worker].taken += script.tokens();
        self.workers[worker].queue.push_back(number);
        self.start(worker);
    }

    /// Begins the next prompt, if none is being computed and there is room.
    fn start(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        let Some(number) = worker.queue.front().copied().filter(|_| !worker.busy) else {
            return;
        };
        let script = &self.scripts[number];
        let path = pages(&script.prompt);
        // The last token is always computed.
        let most = (script.prompt.len() - 1) / PAGE_BLOCKS;
        let cached = worker.cache.matched(&path).min(most) * PAGE_BLOCKS;
        let Some(lease) = worker.cache.reserve(&path, script.whole.len().div_ceil(PAGE_BLOCKS))
        else {
            return;
        };
        worker.queue.pop_front();
        worker.busy = true;
        let cached_tokens = cached as u64 * BLOCK_TOKENS;
        self.cached += cached_tokens;
        let sent = self.sent[number].as_mut().expect("it has arrived");
        (sent.cached_tokens, sent.lease) = (cached_tokens, Some(lease));
        let time = (script.tokens() - cached_tokens) as f64 / TOKENS_PER_SECOND;
        self.at(0.005 + time, Event::FirstByte(number));
    }

    fn first_byte(&mut self, number: usize) {
        let sent = self.sent[number].as_mut().expect("it has arrived");
        let (index, worker) = (sent.worker, &mut self.workers[sent.worker]);
        self.waits.push(self.now - sent.begun);
        let lease = sent.lease.as_mut().expect("it is computed");
        worker.cache.publish(lease, &pages(&self.scripts[number].prompt));
        worker.busy = false;
        self.routers[sent.router].first_byte(sent);
        self.at(ANSWER_SECONDS, Event::End(number));
        self.start(index);
    }

    fn end(&mut self, number: usize) {
        let mut sent = self.sent[number].take().expect("it has arrived");
        let mut lease = sent.lease.take().expect("it is computed");
        let cache = &mut self.workers[sent.worker].cache;
        cache.publish(&mut lease, &pages(&self.scripts[number].whole));
        cache.release(lease);
        self.routers[sent.router].requests[sent.worker] -= 1;
        if let Some(next) = self.scripts.get(number + 1).filter(|next| next.follows) {
            self.at(next.delay, Event::Arrival(number + 1));
        }
        self.start(sent.worker);
    }
}

/// Share of prompt tokens cached, the most loaded worker's tokens over the mean, and the time to the
/// first byte: mean and 99th percentile.
fn measure(scripts: &[Script], policy: PolicyName, routers: usize) -> [f64; 4] {
    let pages = CACHE_TOKENS as usize / PAGE_BLOCKS / BLOCK_TOKENS as usize;
    fastrand::seed(11); // the policies' lots
    let mut simulation = Simulation {
        scripts,
        dice: fastrand::Rng::with_seed(routers as u64),
        routers: (0..routers).map(|_| Router::new(policy)).collect(),
        workers: (0..WORKERS).map(|_| Worker::new(pages)).collect(),
        sent: scripts.iter().map(|_| None).collect(),
        events: BinaryHeap::new(),
        now: 0.0,
        cached: 0,
        waits: Vec::new(),
    };
    simulation.run();
    let mut waits = simulation.waits;
    assert_eq!(waits.len(), scripts.len(), "every request is answered");
    waits.sort_unstable_by(f64::total_cmp);
    let taken = || simulation.workers.iter().map(|worker| worker.taken);
    let (total, most) = (taken().sum::<u64>() as f64, taken().max().expect("eight workers") as f64);
    [
        simulation.cached as f64 / total,
        most * WORKERS as f64 / total,
        waits.iter().sum::<f64>() / waits.len() as f64,
        waits[waits.len() * 99 / 100],
    ]
}

type Workload = fn(&mut fastrand::Rng) -> Vec<Script>;

fn main() {
    let workloads: [(&str, Workload); 2] =
        [("shared_prefix", shared_prefix), ("conversations", conversations)];
    let mut rows = Vec::new();
    println!("workload       policy                 routers  hits  max/mean  TTFT s   p99 s");
    for (workload, scripts) in workloads {
        let scripts = scripts(&mut fastrand::Rng::with_seed(3));
        for policy in POLICIES {
            for routers in ROUTERS {
                let [hits, load, wait, p99] = measure(&scripts, policy, routers);
                let policy = policy.as_str();
                println!(
                    "{workload:14} {policy:21} {routers:8} {hits:6.3} {load:8.2} {wait:8.3} {p99:7.2}"
                );
                rows.push(json!({
                    "workload": workload, "policy": policy, "routers": routers,
                    "hit_share": hits, "max_over_mean_load": load,
                    "ttft_mean_s": wait, "ttft_p99_s": p99,
                }));
            }
        }
    }
    println!("{}", json!({"bench": "several_routers", "rows": rows}));
}
