//! A simulation of routers and workers in virtual time, deterministic. The policies, the trees and the learned
//! estimates are the real ones; each router knows only its own requests. A worker is the page cache of the mock
//! engine (64 tokens a page, least recently used leaves evicted first), a queue of prompts that are computed one
//! after the other, and a fixed time for each answer. Each request arrives at a random router.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    time::Duration,
};

use mla_mock_worker::cache::{Cache, Lease, PageHash};
use mla_router::{
    Config,
    config::PolicyName,
    correct::{Epoch, LearnedCache, OwnerShare, Prediction, Usage},
    fleet::{other_routers::OtherRouters, speed::Speed},
    key::{Measure, RouteKey},
    names::WorkerId,
    policy::{self, Candidate, Policy, PolicyRequest},
    tree::PrefixTree,
};
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub const CACHE_TOKENS: u64 = 1 << 16;
const PAGE_BLOCKS: usize = 4;
pub const BLOCK_TOKENS: u64 = 16;
/// Time for a prompt token on a worker of normal speed.
const TOKENS_PER_SECOND: f64 = 16_000.0;
pub const ANSWER_BLOCKS: u64 = 16;
const ANSWER_SECONDS: f64 = 3.0;

/// The fleet and its load.
#[derive(Clone)]
pub struct World {
    pub policy: PolicyName,
    pub routers: usize,
    /// Slowness of each worker: a factor on all its times.
    pub slowness: Vec<f64>,
    pub cache_tokens: u64,
    /// The request at which the routers restart and lose their state.
    pub restart: Option<usize>,
    /// Whether the workers report their number of requests.
    pub reports_load: bool,
}

impl World {
    /// Eight equal workers behind `routers` routers.
    pub fn new(policy: PolicyName, routers: usize) -> Self {
        Self {
            policy,
            routers,
            slowness: vec![1.0; 8],
            cache_tokens: CACHE_TOKENS,
            restart: None,
            reports_load: true,
        }
    }
}

/// A request of the load.
pub struct Script {
    /// Blocks of the prompt, and of prompt and answer, which stay in the cache.
    pub prompt: Vec<u64>,
    whole: Vec<u64>,
    /// Time of arrival: seconds after the end of the previous request, or from the start.
    delay: f64,
    follows: bool,
}

impl Script {
    /// A prompt of `blocks` blocks, the first `shared` of them common to its group, and an answer.
    pub fn new(group: u64, shared: u64, own: u64, prompt: u64, delay: f64, follows: bool) -> Self {
        let mut chain = 1;
        let block = |block: u64| {
            let part = if block < shared { group } else { 1 << 40 | own };
            chain = xxh3_64_with_seed(&(part << 16 | block).to_le_bytes(), chain);
            chain
        };
        let whole: Vec<u64> = (0..prompt + ANSWER_BLOCKS).map(block).collect();
        Self { prompt: whole[..prompt as usize].to_vec(), whole, delay, follows }
    }

    pub fn tokens(&self) -> u64 {
        self.prompt.len() as u64 * BLOCK_TOKENS
    }
}

pub fn exponential(dice: &mut fastrand::Rng, mean: f64) -> f64 {
    -mean * (1.0 - dice.f64()).ln()
}

/// A router. It knows only its own requests.
struct Router {
    policy: Box<dyn Policy>,
    tree: PrefixTree,
    learned: Vec<LearnedCache>,
    owner_share: OwnerShare,
    requests: Vec<u32>,
    pending: Vec<u64>,
    speeds: Vec<Speed>,
    other_routers: Vec<OtherRouters>,
}

/// A request in flight.
struct Sent {
    router: usize,
    /// Number of restarts of the router at that time.
    generation: usize,
    worker: usize,
    key: RouteKey,
    at_owner: Option<bool>,
    tokens_ahead: u64,
    pending: u64,
    prediction: Prediction,
    epoch: Option<Epoch>,
    begun: f64,
    cached_tokens: u64,
    lease: Option<Lease>,
}

impl Router {
    fn new(world: &World) -> Self {
        let (workers, blocks) = (world.slowness.len(), world.cache_tokens / BLOCK_TOKENS);
        let router = Self {
            policy: policy::of(&Config { policy: world.policy, ..Config::default() }),
            tree: PrefixTree::new(blocks),
            learned: (0..workers).map(|_| LearnedCache::new(blocks)).collect(),
            owner_share: OwnerShare::default(),
            requests: vec![0; workers],
            pending: vec![0; workers],
            speeds: (0..workers).map(|_| Speed::default()).collect(),
            other_routers: (0..workers).map(|_| OtherRouters::default()).collect(),
        };
        for (worker, learned) in router.learned.iter().enumerate() {
            learned.set_capacity(&router.tree, WorkerId(worker as u32), world.cache_tokens);
        }
        router
    }

    fn candidates(&self, key: &RouteKey, now: Instant) -> Vec<Candidate> {
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
                other_requests: self.other_routers[worker].requests(now),
                pending_tokens: self.pending[worker],
                matched_blocks: held.map_or(0, |(_, blocks)| *blocks),
                hash_seed: xxh3_64_with_seed(b"worker", worker as u64),
                token_seconds: self.speeds[worker].token_seconds(),
            }
        };
        (0..self.requests.len()).map(candidate).collect()
    }

    /// Chooses a worker like `Router::select`.
    fn send(&mut self, router: usize, script: &Script, begun: f64, now: Instant) -> Sent {
        let key = RouteKey {
            blocks: script.prompt.clone(),
            prompt_tokens: script.tokens(),
            measure: Measure::Ids,
            ..RouteKey::default()
        };
        let request = PolicyRequest { key: Some(&key), owner_share: self.owner_share.share(now) };
        let candidates = self.candidates(&key, now);
        let choice = self.policy.choose(&request, &candidates).expect("there are workers");
        let worker = choice.index;
        let pending = u64::from(choice.uncached_tokens);
        self.requests[worker] += 1;
        self.pending[worker] += pending;
        let epoch = Some(self.learned[worker].begin());
        let mut prediction = Prediction::default();
        if self.policy.uses_tree() {
            let receipt = self.tree.insert(&key, WorkerId(worker as u32));
            prediction = self.learned[worker].predict(receipt);
        }
        let (cached_tokens, lease) = (0, None);
        Sent {
            router,
            generation: 0,
            worker,
            key,
            at_owner: choice.at_owner,
            tokens_ahead: self.pending[worker],
            pending,
            prediction,
            epoch,
            begun,
            cached_tokens,
            lease,
        }
    }

    /// Learns from a response like `Router::learn`, with `load` requests on the worker.
    fn first_byte(&mut self, sent: &mut Sent, waited: f64, load: Option<u32>, now: Instant) {
        let own = sent.key.prompt_tokens - sent.cached_tokens;
        let before = sent.tokens_ahead - sent.pending;
        self.speeds[sent.worker].observe(before, own, Duration::from_secs_f64(waited));
        if let Some(load) = load {
            self.other_routers[sent.worker].observe(load, self.requests[sent.worker], now);
        }
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
        let (report, _) = learned.learn(&self.tree, worker, &sent.key, &mut sent.prediction, usage);
        if let Some((at_owner, report)) = sent.at_owner.zip(report) {
            let unknown = report.prompt - report.predicted;
            let found = report.cached.saturating_sub(report.predicted);
            self.owner_share.observe(at_owner, unknown, found, now);
        }
    }
}

struct Worker {
    cache: Cache,
    queue: VecDeque<usize>,
    busy: bool,
    taken: u64,
    /// Requests in flight, and the integral of their number over time.
    requests: u32,
    seconds: f64,
}

impl Worker {
    fn new(pages: usize) -> Self {
        let cache = Cache::new(pages);
        Self { cache, queue: VecDeque::new(), busy: false, taken: 0, requests: 0, seconds: 0.0 }
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

/// The result of a simulation.
pub struct Outcome {
    /// Share of the prompt tokens that were cached.
    pub hits: f64,
    /// Prompt tokens of the worker with the most, relative to the mean.
    pub most_over_mean: f64,
    /// Mean number of requests on each worker since the restart.
    pub in_flight: Vec<f64>,
    /// Number of requests of each worker since the restart.
    pub requests: Vec<usize>,
    /// Sorted times to the first byte and to the end of the answer, in seconds.
    pub first_bytes: Vec<f64>,
    pub ends: Vec<f64>,
}

impl Outcome {
    pub fn mean_first_byte(&self) -> f64 {
        self.first_bytes.iter().sum::<f64>() / self.first_bytes.len() as f64
    }
}

/// A percentile of `sorted`.
pub fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted[sorted.len() * percent / 100]
}

pub fn run(world: &World, scripts: &[Script]) -> Outcome {
    let pages = world.cache_tokens as usize / PAGE_BLOCKS / BLOCK_TOKENS as usize;
    fastrand::seed(11); // the policies' lots
    let mut simulation = Simulation {
        world,
        scripts,
        dice: fastrand::Rng::with_seed(world.routers as u64),
        routers: (0..world.routers).map(|_| Router::new(world)).collect(),
        generation: 0,
        workers: world.slowness.iter().map(|_| Worker::new(pages)).collect(),
        sent: scripts.iter().map(|_| None).collect(),
        events: BinaryHeap::new(),
        origin: Instant::now(),
        now: 0.0,
        since: 0.0,
        cached: 0,
        requests: vec![0; world.slowness.len()],
        first_bytes: Vec::new(),
        ends: Vec::new(),
    };
    simulation.run();
    simulation.outcome()
}

struct Simulation<'a> {
    world: &'a World,
    scripts: &'a [Script],
    dice: fastrand::Rng,
    routers: Vec<Router>,
    generation: usize,
    workers: Vec<Worker>,
    sent: Vec<Option<Sent>>,
    /// Events by their time in nanoseconds.
    events: BinaryHeap<Reverse<(u64, Event)>>,
    origin: Instant,
    now: f64,
    /// Start of the counts.
    since: f64,
    cached: u64,
    requests: Vec<usize>,
    first_bytes: Vec<f64>,
    ends: Vec<f64>,
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

    fn instant(&self) -> Instant {
        self.origin + Duration::from_secs_f64(self.now)
    }

    fn restart(&mut self) {
        self.routers = (0..self.world.routers).map(|_| Router::new(self.world)).collect();
        self.generation += 1;
        self.since = self.now;
        self.requests.fill(0);
        self.first_bytes.clear();
        self.ends.clear();
        for worker in &mut self.workers {
            worker.seconds = 0.0;
        }
    }

    fn arrive(&mut self, number: usize) {
        if self.world.restart == Some(number) {
            self.restart();
        }
        let router = self.dice.usize(..self.routers.len());
        let (script, now) = (&self.scripts[number], self.instant());
        let mut sent = self.routers[router].send(router, script, self.now, now);
        sent.generation = self.generation;
        let index = sent.worker;
        self.sent[number] = Some(sent);
        self.requests[index] += 1;
        let worker = &mut self.workers[index];
        worker.requests += 1;
        worker.taken += script.tokens();
        worker.queue.push_back(number);
        let worker = index;
        self.start(worker);
    }

    /// Starts the next prompt, if none is being computed and there is room.
    fn start(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        let Some(number) = worker.queue.front().copied().filter(|_| !worker.busy) else {
            return;
        };
        let script = &self.scripts[number];
        let path = pages(&script.prompt);
        // An engine always computes the last token.
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
        let time = 0.005 + (script.tokens() - cached_tokens) as f64 / TOKENS_PER_SECOND;
        self.at(time * self.world.slowness[index], Event::FirstByte(number));
    }

    fn first_byte(&mut self, number: usize) {
        let now = self.instant();
        let sent = self.sent[number].as_mut().expect("it has arrived");
        let (index, worker) = (sent.worker, &mut self.workers[sent.worker]);
        let waited = self.now - sent.begun;
        let lease = sent.lease.as_mut().expect("it is computed");
        worker.cache.publish(lease, &pages(&self.scripts[number].prompt));
        worker.busy = false;
        if sent.generation == self.generation {
            self.first_bytes.push(waited);
            let load = self.world.reports_load.then_some(worker.requests);
            self.routers[sent.router].first_byte(sent, waited, load, now);
        }
        self.at(ANSWER_SECONDS * self.world.slowness[index], Event::End(number));
        self.start(index);
    }

    fn end(&mut self, number: usize) {
        let mut sent = self.sent[number].take().expect("it has arrived");
        let mut lease = sent.lease.take().expect("it is computed");
        let worker = &mut self.workers[sent.worker];
        worker.cache.publish(&mut lease, &pages(&self.scripts[number].whole));
        worker.cache.release(lease);
        worker.requests -= 1;
        worker.seconds += self.now - sent.begun.max(self.since);
        if sent.generation == self.generation {
            self.ends.push(self.now - sent.begun);
            self.routers[sent.router].requests[sent.worker] -= 1;
        }
        if let Some(next) = self.scripts.get(number + 1).filter(|next| next.follows) {
            self.at(next.delay, Event::Arrival(number + 1));
        }
        self.start(sent.worker);
    }

    fn outcome(mut self) -> Outcome {
        assert!(self.sent.iter().all(Option::is_none), "every request is answered");
        let taken = || self.workers.iter().map(|worker| worker.taken);
        let total = taken().sum::<u64>() as f64;
        let most = taken().max().expect("there are workers") as f64;
        self.first_bytes.sort_unstable_by(f64::total_cmp);
        self.ends.sort_unstable_by(f64::total_cmp);
        let time = self.now - self.since;
        Outcome {
            hits: self.cached as f64 / total,
            most_over_mean: most * self.workers.len() as f64 / total,
            in_flight: self.workers.iter().map(|worker| worker.seconds / time).collect(),
            requests: self.requests,
            first_bytes: self.first_bytes,
            ends: self.ends,
        }
    }
}
