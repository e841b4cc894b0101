//! The learned state of one worker's cache: its capacity, and whether it was lost.

use parking_lot::Mutex;

use super::{
    Usage,
    capacity::{Capacity, blocks_of, whole},
    settling::{Epoch, Settling},
};
use crate::{
    key::{Measure, RouteKey},
    names::WorkerId,
    tree::{InsertReceipt, LruTick, PrefixTree},
};

/// Blocks by which a report may fall short of the prediction without being a miss: a worker caches whole pages and
/// computes at least the last token. One eighth of the prediction is added, because parts of a prompt differ in
/// tokens per byte.
const SLACK: f64 = 6.0;

/// Minimum number of recently used blocks that the tree predicted for a prompt. If nothing of such a prompt was
/// cached, this is evidence of a restart.
const RESTART_BLOCKS: u32 = 32;

/// Number of such prompts that prove a restart, unless an older prefix is found cached in between.
const RESTART_RUN: u32 = 3;

/// The prediction of the tree for one request. Part of its load guard.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prediction {
    /// Receipt of the insertion. `None` under a policy without a tree, and once the insertion is settled or taken back.
    receipt: Option<InsertReceipt>,
    /// Whether the predicted prefix had been computed at that time.
    settled: bool,
    /// Whether the worker has reported the prompt tokens.
    measured: bool,
    /// Whether the worker has reported the cached tokens.
    reported: bool,
    /// `State::empties` at that time.
    empties: u64,
}

impl Prediction {
    pub fn receipt(&self) -> Option<InsertReceipt> {
        self.receipt
    }

    /// Whether the cache was emptied after the prediction: then a report says nothing about the prediction.
    fn is_stale(&self, empties: u64) -> bool {
        self.empties != empties
    }

    /// The insertion into the tree, which can be retracted.
    pub fn take_receipt(&mut self) -> Option<InsertReceipt> {
        self.receipt.take()
    }
}

/// A finding that the router logs and counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The worker has evicted a predicted prefix. `blocks` were removed from its share of the tree.
    Evicted { blocks: u64 },
    /// The worker has lost its cache.
    Emptied,
    /// The worker has never reported a cached token.
    NoCache,
}

/// Token counts of a prompt for the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    pub prompt: u64,
    pub predicted: u64,
    pub cached: u64,
}

/// The learned state of one worker. While the tree evicts, the choice of a worker does not wait for a lock
/// here. Each request takes the lock, so it has cache lines of its own.
#[derive(Debug)]
#[repr(align(64))]
pub struct LearnedCache {
    state: Mutex<State>,
    /// Held while the worker's share of the tree changes. Taken before `state`.
    correcting: Mutex<()>,
}

/// A correction of the worker's share of the tree.
#[derive(Clone, Copy)]
enum Correction {
    Nothing,
    /// The capacity has changed.
    Resize,
    /// The worker has evicted everything that it last used at `last_used` or earlier.
    Evict {
        last_used: LruTick,
    },
    /// The worker has lost everything inserted before this tick.
    Empty {
        before: LruTick,
        finding: Finding,
    },
}

impl Correction {
    fn resize_if(changed: bool) -> Self {
        if changed { Self::Resize } else { Self::Nothing }
    }
}

#[derive(Debug)]
struct State {
    settling: Settling,
    capacity: Capacity,
    /// `None` while nothing speaks for a restart.
    empty_run: Option<EmptyRun>,
    /// Number of times that the cache was emptied. Earlier predictions are ignored.
    empties: u64,
    /// Whether a token was cached since the cache was last found empty.
    has_hit: bool,
}

/// Consecutive prompts that are evidence of a restart: nothing of them was cached.
#[derive(Debug)]
struct EmptyRun {
    prompts: u32,
    /// Tick of the first of these prompts.
    first: LruTick,
    /// Latest use of the prefixes that these prompts should have found.
    lost: LruTick,
    /// Share of the capacity before the first of these prompts.
    share_before: f64,
    /// Tick that divided the worker's share of the tree into an older and a newer half at that time.
    middle: Option<LruTick>,
}

impl LearnedCache {
    /// The state of a worker that holds `default_blocks` until it reports its size.
    pub fn new(default_blocks: u64) -> Self {
        Self {
            state: Mutex::new(State {
                settling: Settling::default(),
                capacity: Capacity::new(default_blocks),
                empty_run: None,
                empties: 0,
                has_hit: false,
            }),
            correcting: Mutex::default(),
        }
    }

    /// Opens a request. Its prompt may be inserted into the tree only afterwards.
    pub fn begin(&self) -> Epoch {
        self.state.lock().settling.begin()
    }

    /// Makes a prediction from the receipt of the insertion.
    pub fn predict(&self, receipt: InsertReceipt) -> Prediction {
        let mut state = self.state.lock();
        let (settled, empties) = (state.settling.inserted(&receipt), state.empties);
        Prediction { receipt: Some(receipt), settled, empties, ..Prediction::default() }
    }

    /// Closes a request: its prompt is computed, or the request has ended before.
    pub fn end(&self, epoch: &Epoch) {
        self.state.lock().settling.end(epoch);
    }

    /// Sets the reported size of the cache, in tokens.
    pub fn set_capacity(&self, tree: &PrefixTree, worker: WorkerId, tokens: u64) {
        let mut state = self.state.lock();
        let resize = Correction::resize_if(state.capacity.report(tokens));
        drop(state);
        self.correct(tree, worker, resize);
    }

    /// Empties the worker's share of the tree after its cache was emptied. Reports of requests in flight are ignored.
    pub fn forget(&self, tree: &PrefixTree, worker: WorkerId) {
        let mut state = self.state.lock();
        state.empty_run = None;
        state.empties += 1;
        drop(state);
        tree.purge_worker(worker);
    }

    /// The capacity of the worker in the tree, in blocks.
    pub fn capacity(&self) -> u64 {
        self.state.lock().capacity.applied()
    }

    /// Applies a report. Returns the counts for the metrics if this is the first report with cached tokens, and a
    /// finding for the log.
    pub fn learn(
        &self,
        tree: &PrefixTree,
        worker: WorkerId,
        key: &RouteKey,
        prediction: &mut Prediction,
        usage: Usage,
    ) -> (Option<Report>, Option<Finding>) {
        let (report, correction) = self.judge(tree, worker, key, prediction, usage);
        (report, self.correct(tree, worker, correction))
    }

    /// Returns the counts of a report, and the correction of the tree that follows from it.
    fn judge(
        &self,
        tree: &PrefixTree,
        worker: WorkerId,
        key: &RouteKey,
        prediction: &mut Prediction,
        usage: Usage,
    ) -> (Option<Report>, Correction) {
        let mut state = self.state.lock();
        let resize = match usage.prompt_tokens {
            Some(tokens) if !std::mem::replace(&mut prediction.measured, true) => {
                Correction::resize_if(state.capacity.measure(key, tokens))
            }
            _ => Correction::Nothing,
        };
        let Some(cached) = usage.cached_tokens else { return (None, resize) };
        if std::mem::replace(&mut prediction.reported, true) {
            return (None, resize);
        }
        let tokens = state.capacity.tokens_per_block(key.measure);
        let prompt =
            usage.prompt_tokens.unwrap_or_else(|| whole(blocks_of(key) * tokens)).max(cached);
        let receipt = prediction.receipt.take();
        let held = receipt.map_or(0, |receipt| receipt.held);
        let predicted = whole(f64::from(held) * tokens).min(prompt);
        let report = Report { prompt, predicted, cached };
        let is_evidence = key.measure != Measure::Unknown && prompt > 0;
        let is_stale = prediction.is_stale(state.empties);
        let Some(receipt) = receipt.filter(|_| is_evidence && !is_stale) else {
            return (Some(report), resize);
        };
        // As a share of the prompt, so that the tokens per byte cancel out.
        let found = cached as f64 / prompt as f64 * blocks_of(key);
        match state.compare(tree, worker, &receipt, prediction.settled, found) {
            Correction::Nothing => (Some(report), resize),
            correction => (Some(report), correction),
        }
    }

    /// Applies a correction to the tree. It may take long; choices of workers go on meanwhile.
    fn correct(
        &self,
        tree: &PrefixTree,
        worker: WorkerId,
        correction: Correction,
    ) -> Option<Finding> {
        if let Correction::Nothing = correction {
            return None;
        }
        let _turn = self.correcting.lock();
        let finding = match correction {
            Correction::Nothing | Correction::Resize => None,
            Correction::Empty { before, finding } => {
                tree.evict_unused(worker, before);
                Some(finding)
            }
            Correction::Evict { last_used } => {
                let blocks = tree.evict_unused(worker, last_used);
                self.state.lock().capacity.shrink(tree.owned_by(worker));
                Some(Finding::Evicted { blocks })
            }
        };
        let capacity = self.capacity();
        tree.set_capacity(worker, capacity);
        finding
    }
}

impl State {
    /// Compares the `found` blocks with the prediction of the tree.
    fn compare(
        &mut self,
        tree: &PrefixTree,
        worker: WorkerId,
        receipt: &InsertReceipt,
        settled: bool,
        found: f64,
    ) -> Correction {
        if found > 0.0 {
            self.has_hit = true;
            let is_refuted = |run: &mut EmptyRun| {
                receipt.last_used.is_some_and(|last_used| last_used.is_before(run.lost))
            };
            self.empty_run.take_if(is_refuted);
        }
        let held = f64::from(receipt.held);
        match receipt.last_used {
            Some(last_used) if settled => {
                if held > found + held / 8.0 + SLACK {
                    let run = self.empty_run.as_ref();
                    let middle = run.map_or_else(|| tree.middle(worker), |run| run.middle);
                    // A prefix that was not used for long may have been evicted, so it is no evidence of a restart.
                    let nothing = found == 0.0
                        && receipt.held >= RESTART_BLOCKS
                        && middle.is_none_or(|middle| middle.is_before(last_used));
                    let restart = nothing
                        .then(|| self.found_nothing(receipt.tick, last_used, middle))
                        .flatten();
                    return restart.unwrap_or(Correction::Evict { last_used });
                }
                Correction::resize_if(self.is_old(tree, worker, last_used) && self.capacity.grow())
            }
            // The tree has forgotten a prefix that is still cached.
            None if found > SLACK => Correction::resize_if(self.capacity.grow()),
            _ => Correction::Nothing,
        }
    }

    /// Counts a long prompt of which the worker had nothing. Returns a correction if this proves a restart.
    fn found_nothing(
        &mut self,
        inserted: LruTick,
        last_used: LruTick,
        middle: Option<LruTick>,
    ) -> Option<Correction> {
        let run = self.empty_run.get_or_insert(EmptyRun {
            prompts: 0,
            first: inserted,
            lost: last_used,
            share_before: self.capacity.share(),
            middle,
        });
        run.prompts += 1;
        if run.lost.is_before(last_used) {
            run.lost = last_used;
        }
        let run = self.empty_run.take_if(|run| run.prompts == RESTART_RUN)?;
        // A restart, not a small cache: the capacity is restored. Prompts since the first one are cached again.
        self.capacity.set_share(run.share_before);
        self.empties += 1;
        let had = std::mem::take(&mut self.has_hit);
        let finding = if had { Finding::Emptied } else { Finding::NoCache };
        Some(Correction::Empty { before: run.first, finding })
    }

    /// Whether `last_used` lies in the older half of the worker's share of the tree, and the share is full. A
    /// worker that still has such a prefix has more room.
    fn is_old(&self, tree: &PrefixTree, worker: WorkerId, last_used: LruTick) -> bool {
        self.capacity.is_filled_by(tree.owned_by(worker))
            && tree.middle(worker).is_some_and(|middle| !middle.is_before(last_used))
    }
}

#[cfg(test)]
mod tests;
