//! What the router has learned about one worker's cache.

use parking_lot::Mutex;

use super::{
    Usage,
    settling::{Epoch, Settling},
};
use crate::{
    key::{BLOCK_TOKENS, Measure, RouteKey},
    names::WorkerId,
    tree::{Note, PrefixTree, Stamp},
};

/// Blocks by which a true report may fall short of the tree's word: a worker caches whole pages only
/// (64 tokens, say), and computes at least the last token. An eighth of the word comes on top, as
/// parts of a prompt differ in tokens per byte.
const SLACK: f64 = 6.0;

/// A restart shows in prompts of which at least so many blocks should have been there, not long
/// unused, and nothing was;
const RESTART_BLOCKS: u32 = 32;

/// so many times, while nothing was found that had been used before them.
const RESTART_RUN: u32 = 3;

/// What one sign of too little room leaves of a worker's capacity, at least, and what one of more room
/// makes of it. A cache that is smaller than told shows itself again and again, so that small steps
/// get there; a restart looks the same for a few requests, and must not cost much.
const SHRINK: f64 = 0.9;
const GROW: f64 = 17.0 / 16.0;

/// What each further request leaves of the weight of those before, in the mean of tokens per block.
const DECAY: f64 = 0.99;

/// What the tree said of a request's worker, part of the request's booking.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prediction {
    /// `None` under a policy without a tree, and once there is nothing to take back.
    note: Option<Note>,
    /// Whether all that the tree promised had been computed by then.
    settled: bool,
    /// Whether the worker has told the prompt's tokens, and those cached.
    measured: bool,
    told: bool,
    /// How often the worker had been found empty by then.
    empties: u64,
}

impl Prediction {
    pub fn note(&self) -> Option<Note> {
        self.note
    }

    /// Whether it was made before the worker was last found empty: then it says nothing more.
    fn is_stale(&self, empties: u64) -> bool {
        self.empties != empties
    }

    /// What the tree has noted, to be taken back.
    pub fn take_note(&mut self) -> Option<Note> {
        self.note.take()
    }
}

/// What a report has changed, where people should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The worker has evicted what the tree believed it to have; so many blocks were taken from it.
    Evicted { blocks: u64 },
    /// The worker has lost its cache.
    Emptied,
    /// The worker has not had a single token cached so far.
    NoCache,
}

/// Tokens of a prompt as the metrics count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    pub prompt: u64,
    pub predicted: u64,
    pub cached: u64,
}

/// No lock is held while the tree evicts that a choice of a worker takes.
#[derive(Debug)]
pub struct Learned {
    state: Mutex<State>,
    /// Held by who changes the worker's share of the tree, and taken before `state`.
    correcting: Mutex<()>,
}

/// What a report asks to be done to the worker's share of the tree.
#[derive(Clone, Copy)]
enum Correction {
    Nothing,
    /// Its capacity has changed.
    Resize,
    /// It has evicted what it last used then.
    Evict {
        last_used: Stamp,
    },
    /// It has lost all that was noted before then.
    Empty {
        before: Stamp,
        finding: Finding,
    },
}

#[derive(Debug)]
struct State {
    settling: Settling,
    /// Tokens and blocks of the prompts so far, decayed.
    tokens: f64,
    blocks: f64,
    /// Tokens that the worker's cache holds, if it has told, and blocks otherwise.
    told_tokens: Option<u64>,
    default_blocks: u64,
    /// The part of that which prompts have: answers and running requests take room, too, and so
    /// does what other routers send.
    share: f64,
    /// What the tree has been told.
    applied: u64,
    /// Prompts of which nothing was cached; the last use of what the latest of them should have found; when the first one
    /// was noted, and the share of the cache before it.
    zeros: u32,
    lost: Stamp,
    first: Stamp,
    share_before: f64,
    /// Up to when it had used the older half of its share before the first of them.
    middle: Option<Stamp>,
    /// How often it was found empty, or told so: what was noted before says nothing more.
    empties: u64,
    /// Whether it has had anything cached since it was last found empty.
    has_hit: bool,
}

impl Learned {
    /// A worker that has not told its capacity, and is taken to hold `default_blocks`.
    pub fn new(default_blocks: u64) -> Self {
        Self {
            state: Mutex::new(State {
                settling: Settling::default(),
                tokens: 0.0,
                blocks: 0.0,
                told_tokens: None,
                default_blocks,
                share: 1.0,
                applied: default_blocks,
                zeros: 0,
                lost: Stamp::default(),
                first: Stamp::default(),
                share_before: 1.0,
                middle: None,
                empties: 0,
                has_hit: false,
            }),
            correcting: Mutex::default(),
        }
    }

    /// A request is booked; only afterwards may it be noted in the tree.
    pub fn begin(&self) -> Epoch {
        self.state.lock().settling.begin()
    }

    /// The tree has noted the request.
    pub fn predict(&self, note: Note) -> Prediction {
        let mut state = self.state.lock();
        let (settled, empties) = (state.settling.noted(&note), state.empties);
        Prediction { note: Some(note), settled, empties, ..Prediction::default() }
    }

    /// The request's prompt is computed, or never will be.
    pub fn end(&self, epoch: &Epoch) {
        self.state.lock().settling.end(epoch);
    }

    /// The worker says how many tokens its cache holds.
    pub fn set_capacity(&self, tree: &PrefixTree, worker: WorkerId, tokens: u64) {
        let mut state = self.state.lock();
        state.told_tokens = Some(tokens);
        let changed = state.resize();
        drop(state);
        if changed {
            self.correct(tree, worker, Correction::Resize);
        }
    }

    /// The worker's cache has been emptied, and so its share of the tree is: what requests on their way find of what they
    /// were promised says nothing more.
    pub fn forget(&self, tree: &PrefixTree, worker: WorkerId) {
        let mut state = self.state.lock();
        state.zeros = 0;
        state.empties += 1;
        drop(state);
        tree.purge_worker(worker);
    }

    /// What the tree takes the worker to hold at most, in blocks.
    pub fn capacity(&self) -> u64 {
        self.state.lock().applied
    }

    /// Takes in `usage`; what there is to count, if this is the first report of cached tokens, and
    /// what there is to say.
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

    /// What there is to count of `usage`, and what follows from it for the tree.
    fn judge(
        &self,
        tree: &PrefixTree,
        worker: WorkerId,
        key: &RouteKey,
        prediction: &mut Prediction,
        usage: Usage,
    ) -> (Option<Report>, Correction) {
        let mut state = self.state.lock();
        let mut changed = false;
        if let Some(tokens) = usage.prompt_tokens
            && !std::mem::replace(&mut prediction.measured, true)
            && key.measure != Measure::Unknown
        {
            state.tokens = state.tokens * DECAY + tokens as f64;
            state.blocks = state.blocks * DECAY + blocks_of(key);
            changed = state.resize();
        }
        let mut correction = if changed { Correction::Resize } else { Correction::Nothing };
        let Some(cached) = usage.cached_tokens else {
            return (None, correction);
        };
        if std::mem::replace(&mut prediction.told, true) {
            return (None, correction);
        }
        let tokens = state.tokens_per_block(key.measure);
        let prompt =
            usage.prompt_tokens.unwrap_or_else(|| whole(blocks_of(key) * tokens)).max(cached);
        let note = prediction.note.take();
        let held = note.map_or(0, |note| note.held);
        let predicted = whole(f64::from(held) * tokens).min(prompt);
        let is_evidence = key.measure != Measure::Unknown && prompt > 0;
        if let Some(note) = note.filter(|_| is_evidence && !prediction.is_stale(state.empties)) {
            // In the prompt's own measure, whatever tokens it has to a byte.
            let found = cached as f64 / prompt as f64 * blocks_of(key);
            match state.judge(tree, worker, &note, prediction.settled, found) {
                Correction::Nothing => {}
                found => correction = found,
            }
        }
        (Some(Report { prompt, predicted, cached }), correction)
    }

    /// Changes the worker's share of the tree. It may take long, and choices go on meanwhile.
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
                self.state.lock().shrink(tree.held_by(worker));
                Some(Finding::Evicted { blocks })
            }
        };
        let capacity = self.capacity();
        tree.set_capacity(worker, capacity);
        finding
    }
}

#[expect(clippy::cast_sign_loss, reason = "what is counted is not negative")]
fn whole(count: f64) -> u64 {
    count as u64
}

/// Blocks of a prompt, its tail included.
fn blocks_of(key: &RouteKey) -> f64 {
    key.prompt_tokens as f64 / f64::from(BLOCK_TOKENS)
}

impl State {
    fn tokens_per_block(&self, measure: Measure) -> f64 {
        let usual = f64::from(BLOCK_TOKENS);
        match measure {
            // A few short prompts are mostly the template's tokens.
            Measure::Text if self.blocks >= 64.0 => {
                (self.tokens / self.blocks).clamp(usual / 8.0, usual * 8.0)
            }
            _ => usual,
        }
    }

    /// Compares `found` blocks with what the tree said.
    fn judge(
        &mut self,
        tree: &PrefixTree,
        worker: WorkerId,
        note: &Note,
        settled: bool,
        found: f64,
    ) -> Correction {
        if found > 0.0 {
            self.has_hit = true;
            if note.last_used.is_some_and(|last_used| last_used.is_before(self.lost)) {
                self.zeros = 0;
            }
        }
        let held = f64::from(note.held);
        match note.last_used {
            Some(last_used) if settled => {
                if held > found + held / 8.0 + SLACK {
                    if self.zeros == 0 {
                        self.middle = tree.middle(worker);
                    }
                    // What has not been used for long may well have been evicted.
                    let nothing = found == 0.0
                        && note.held >= RESTART_BLOCKS
                        && self.middle.is_none_or(|middle| middle.is_before(last_used));
                    return self.miss(note.stamp, last_used, nothing);
                }
                if self.is_old(tree, worker, last_used) { self.grow() } else { Correction::Nothing }
            }
            // Forgotten here, and still there.
            None if found > SLACK => self.grow(),
            _ => Correction::Nothing,
        }
    }

    /// The worker has evicted what it last used at `last_used`, or has `nothing` of a long prompt.
    fn miss(&mut self, noted: Stamp, last_used: Stamp, nothing: bool) -> Correction {
        if nothing {
            if self.zeros == 0 {
                (self.share_before, self.lost, self.first) = (self.share, last_used, noted);
            }
            self.zeros += 1;
            if self.lost.is_before(last_used) {
                self.lost = last_used;
            }
            if self.zeros == RESTART_RUN {
                // It was not its size. What has been noted since the first of them is there again.
                self.share = self.share_before;
                self.zeros = 0;
                self.empties += 1;
                self.resize();
                let had = std::mem::take(&mut self.has_hit);
                let finding = if had { Finding::Emptied } else { Finding::NoCache };
                return Correction::Empty { before: self.first, finding };
            }
        }
        Correction::Evict { last_used }
    }

    /// It holds no more than the `blocks` that it has used since.
    fn shrink(&mut self, blocks: u64) {
        let holds = blocks as f64 / self.full();
        self.share = self.share.min(holds.max(self.share * SHRINK));
        self.resize();
    }

    /// Whether `last_used` lies in the older half of the worker's share of the tree, and the share is
    /// as large as it may be: a worker that still has this has room for more.
    fn is_old(&self, tree: &PrefixTree, worker: WorkerId, last_used: Stamp) -> bool {
        let is_full = tree.held_by(worker) >= self.applied - self.applied / 8;
        is_full && tree.middle(worker).is_some_and(|middle| !middle.is_before(last_used))
    }

    fn grow(&mut self) -> Correction {
        if self.share < 1.0 {
            self.share = (self.share * GROW).min(1.0);
            if self.resize() {
                return Correction::Resize;
            }
        }
        Correction::Nothing
    }

    /// Blocks that the worker would hold if prompts had all of its cache.
    fn full(&self) -> f64 {
        let told =
            self.told_tokens.map(|tokens| tokens as f64 / self.tokens_per_block(Measure::Text));
        told.unwrap_or(self.default_blocks as f64).max(1.0)
    }

    /// Whether the tree is to be told another capacity: not for nothing, as it may evict.
    fn resize(&mut self) -> bool {
        let blocks = whole(self.full() * self.share);
        let changed = blocks.abs_diff(self.applied) > self.applied / 64;
        if changed {
            self.applied = blocks;
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: WorkerId = WorkerId(0);

    /// A request that is noted at `stamp`, finds a prefix last used at `last_used`, and has nothing of it
    /// cached.
    fn miss(learned: &Learned, tree: &PrefixTree, last_used: u32, stamp: u32) -> Option<Finding> {
        let key = RouteKey { prompt_tokens: 1600, ..RouteKey::default() };
        let epoch = learned.begin();
        let last_used = Some(Stamp::at(last_used));
        let note = Note { held: 100, last_used, stamp: Stamp::at(stamp) };
        let mut prediction = learned.predict(note);
        learned.end(&epoch);
        let usage = Usage { prompt_tokens: Some(1600), cached_tokens: Some(0) };
        learned.learn(tree, WORKER, &key, &mut prediction, usage).1
    }

    #[test]
    fn a_worker_that_was_emptied_half_a_clock_ago_teaches_like_any_other() {
        let (learned, tree) = (Learned::new(1 << 20), PrefixTree::new(1 << 20));
        for stamp in 1..5 {
            miss(&learned, &tree, 0, stamp);
        }
        learned.forget(&tree, WORKER);
        for now in [100, 1 << 31, (1 << 31) + 100, u32::MAX - 100] {
            for stamp in now..now + 5 {
                miss(&learned, &tree, now, stamp);
            }
            assert!(miss(&learned, &tree, now, now + 5).is_some(), "{now}");
        }
    }

    #[test]
    fn a_request_that_was_under_way_when_the_worker_was_emptied_teaches_nothing() {
        let (learned, tree) = (Learned::new(1 << 20), PrefixTree::new(1 << 20));
        for stamp in 1..5 {
            miss(&learned, &tree, 0, stamp);
        }
        let key = RouteKey { prompt_tokens: 1600, ..RouteKey::default() };
        let note = Note { held: 100, last_used: Some(Stamp::at(1)), stamp: Stamp::at(6) };
        let mut prediction = learned.predict(note);
        learned.forget(&tree, WORKER);
        let usage = Usage { prompt_tokens: Some(1600), cached_tokens: Some(0) };
        assert_eq!(learned.learn(&tree, WORKER, &key, &mut prediction, usage).1, None);
    }
}
