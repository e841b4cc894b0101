//! The engine: admission, chunked prefill mixed with decode, one token a step for each request. It has no clock:
//! [`Engine::plan`] returns the time of the next step, [`Engine::finish`] ends it.

use std::{
    collections::{HashSet, VecDeque},
    time::Duration,
};

use serde::Serialize;
use tokio::sync::mpsc::UnboundedSender;

use crate::{
    cache::{Cache, Lease, PageHash},
    settings::Settings,
    tokens::{Answer, page_hashes},
};

/// One prompt to complete.
pub struct Request {
    /// Its id for an abort.
    pub name: String,
    /// Its index among the prompts of the HTTP request.
    pub index: usize,
    /// Tokens to compute: the prompt, and the generated tokens of a continued request.
    pub tokens: Vec<u32>,
    /// Hash of everything except tokens that must be equal for a shared page.
    pub root: u64,
    pub answer: Answer,
    /// Positions of the answer: the first one to generate, and the end.
    pub from: usize,
    pub until: usize,
    /// The finish reason at `until`.
    pub finish: Finish,
    pub events: UnboundedSender<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    Length,
    Stop,
    Abort,
}

impl Finish {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Stop => "stop",
            Self::Abort => "abort",
        }
    }
}

/// The result of a step for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub index: usize,
    /// `None` only if the request was aborted.
    pub token: Option<u32>,
    /// Cached tokens of the prompt.
    pub cached: usize,
    pub finish: Option<Finish>,
}

struct Running {
    request: Request,
    pages: Vec<PageHash>,
    lease: Lease,
    cached: usize,
    to_prefill: usize,
    generated: Vec<u32>,
    /// Prompt tokens of the present step.
    planned: usize,
    decodes: bool,
}

/// Counts since the start. Prompt counts cover admitted requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    pub requests: u64,
    pub finished: u64,
    pub aborted: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    /// Time in steps.
    pub busy_seconds: f64,
    /// Integral over time of the number of requests, running and waiting.
    pub request_seconds: f64,
}

/// The present state.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stats {
    #[serde(flatten)]
    pub totals: Totals,
    pub running: usize,
    pub waiting: usize,
    pub used_tokens: usize,
}

pub struct Engine {
    settings: Settings,
    cache: Cache,
    waiting: VecDeque<Request>,
    running: Vec<Running>,
    totals: Totals,
}

impl Engine {
    pub fn new(settings: Settings) -> Self {
        let cache = Cache::new(settings.kv_tokens / settings.page_size);
        let (waiting, running) = (VecDeque::new(), Vec::new());
        Self { settings, cache, waiting, running, totals: Totals::default() }
    }

    /// Whether a request of `tokens` tokens, including the answer, can ever run.
    pub fn fits(&self, tokens: usize) -> bool {
        tokens.div_ceil(self.settings.page_size) <= self.cache.capacity()
    }

    /// `Err`: the queue is full.
    pub fn submit(&mut self, request: Request) -> Result<(), Request> {
        if self.waiting.len() >= self.settings.max_queued_requests {
            return Err(request);
        }
        self.totals.requests += 1;
        self.waiting.push_back(request);
        Ok(())
    }

    /// Aborts the requests with this id. Returns whether there was one.
    pub fn abort(&mut self, name: &str) -> bool {
        let mut found = false;
        let waiting = &mut self.waiting;
        let running = self.running.iter().map(|running| (&running.request, running.cached));
        for (request, cached) in waiting.iter().map(|request| (request, 0)).chain(running) {
            if request.name == name {
                found = true;
                let finish = Some(Finish::Abort);
                let event = Event { index: request.index, token: None, cached, finish };
                // A closed receiver means that the client has left.
                let _told = request.events.send(event);
            }
        }
        self.totals.aborted += waiting.iter().filter(|request| request.name == name).count() as u64;
        waiting.retain(|request| request.name != name);
        self.retire(|running| running.request.name == name);
        found
    }

    /// Drops all cached pages that no running request uses.
    pub fn flush(&mut self) {
        self.cache.flush();
    }

    pub fn stats(&self) -> Stats {
        Stats {
            totals: self.totals,
            running: self.running.len(),
            waiting: self.waiting.len(),
            used_tokens: self.cache.used() * self.settings.page_size,
        }
    }

    /// Starts a step. Returns its time, or `None` if there is no work.
    pub fn plan(&mut self) -> Option<Duration> {
        let before = self.waiting.len();
        self.waiting.retain(|request| !request.events.is_closed());
        self.totals.aborted += (before - self.waiting.len()) as u64;
        self.retire(|running| running.request.events.is_closed());
        let mut budget = self.settings.chunked_prefill_size;
        let mut decoding = 0;
        for running in &mut self.running {
            running.decodes = running.to_prefill == 0;
            decoding += usize::from(running.decodes);
            running.plan(&mut budget);
        }
        self.admit(&mut budget);
        if self.running.is_empty() {
            return None;
        }
        let prefill = self.settings.chunked_prefill_size - budget;
        let time = self.settings.step_time(prefill, decoding);
        let requests = self.running.len() + self.waiting.len();
        self.totals.busy_seconds += time.as_secs_f64();
        self.totals.request_seconds += time.as_secs_f64() * requests as f64;
        Some(time)
    }

    /// Ends the step that [`Engine::plan`] has started: prompts advance, requests get their tokens.
    pub fn finish(&mut self) {
        for running in &mut self.running {
            let prefilled = std::mem::take(&mut running.planned);
            running.to_prefill -= prefilled;
            if prefilled > 0 && running.to_prefill == 0 {
                self.cache.publish(&mut running.lease, &running.pages);
            } else if !std::mem::take(&mut running.decodes) {
                continue;
            }
            self.totals.completion_tokens += 1;
            running.emit();
        }
        self.retire(Running::is_done);
    }

    /// Admits requests, first come, first served. A request that does not fit blocks the later ones. A request is
    /// admitted only when its prefill can start, so that it finds the pages of earlier ones.
    fn admit(&mut self, budget: &mut usize) {
        // Prompt pages that are being computed.
        let mut computing: HashSet<PageHash> = HashSet::new();
        if self.settings.in_batch_sharing && !self.waiting.is_empty() {
            let prefilling = self.running.iter().filter(|running| running.to_prefill > 0);
            computing.extend(prefilling.flat_map(|running| &running.pages));
        }
        let mut held_back = VecDeque::new();
        while let Some(request) = self.waiting.pop_front() {
            let room = *budget > 0 && self.running.len() < self.settings.max_running_requests;
            let pages = page_hashes(&request.tokens, self.settings.page_size, request.root);
            let first_missing = pages.get(self.cache.matched(&pages));
            if room && first_missing.is_some_and(|hash| computing.contains(hash)) {
                held_back.push_back(request);
                continue;
            }
            let Some((lease, cached)) = room.then(|| self.start(&pages, &request)).flatten() else {
                self.waiting.push_front(request);
                break;
            };
            if self.settings.in_batch_sharing {
                computing.extend(&pages);
            }
            let to_prefill = request.tokens.len() - cached;
            self.totals.prompt_tokens += request.tokens.len() as u64;
            self.totals.cached_tokens += cached as u64;
            let mut running = Running {
                generated: Vec::with_capacity(request.until - request.from),
                request,
                pages,
                lease,
                cached,
                to_prefill,
                planned: 0,
                decodes: false,
            };
            running.plan(budget);
            self.running.push(running);
        }
        while let Some(request) = held_back.pop_back() {
            self.waiting.push_front(request);
        }
    }

    /// Returns the pages for a request, and the number of its prompt tokens in them.
    fn start(&mut self, pages: &[PageHash], request: &Request) -> Option<(Lease, usize)> {
        let page_size = self.settings.page_size;
        let all = request.tokens.len() + request.until - request.from;
        // At least one token is computed: its logits give the first token of the answer.
        let usable = &pages[..pages.len().min((request.tokens.len() - 1) / page_size)];
        let lease = self.cache.reserve(usable, all.div_ceil(page_size))?;
        let cached = lease.shared() * page_size;
        Some((lease, cached))
    }

    /// Removes requests. Their computed pages stay cached.
    fn retire(&mut self, gone: impl Fn(&Running) -> bool) {
        let page_size = self.settings.page_size;
        for mut running in self.running.extract_if(.., |running| gone(running)) {
            if running.is_done() {
                self.totals.finished += 1;
            } else {
                self.totals.aborted += 1;
            }
            if running.to_prefill == 0 {
                // The last token was sampled, but not computed.
                running.generated.pop();
                let mut tokens = std::mem::take(&mut running.request.tokens);
                tokens.append(&mut running.generated);
                let pages = page_hashes(&tokens, page_size, running.request.root);
                self.cache.publish(&mut running.lease, &pages);
            }
            self.cache.release(running.lease);
        }
    }
}

impl Running {
    /// Takes a part of the prompt tokens of the next step.
    fn plan(&mut self, budget: &mut usize) {
        self.planned = self.to_prefill.min(*budget);
        *budget -= self.planned;
    }

    fn emit(&mut self) {
        let request = &self.request;
        let token = request.answer.token(request.from + self.generated.len());
        self.generated.push(token);
        let finish = self.is_done().then_some(request.finish);
        let event = Event { index: request.index, token: Some(token), cached: self.cached, finish };
        // A disconnect is detected when the next step is planned.
        let _sent = self.request.events.send(event);
    }

    fn is_done(&self) -> bool {
        self.generated.len() == self.request.until - self.request.from
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;

    fn settings() -> Settings {
        Settings {
            kv_tokens: 256,
            page_size: 4,
            prefill_rate: 1000.0,
            chunked_prefill_size: 64,
            decode_base_ms: 10.0,
            decode_per_request_ms: 1.0,
            ..Settings::default()
        }
    }

    fn request(tokens: Vec<u32>, answer: usize) -> (Request, UnboundedReceiver<Event>) {
        let (events, received) = unbounded_channel();
        let request = Request {
            name: "r".to_owned(),
            index: 0,
            answer: Answer::to(&tokens, 0),
            tokens,
            root: 0,
            from: 0,
            until: answer,
            finish: Finish::Length,
            events,
        };
        (request, received)
    }

    fn submit(
        engine: &mut Engine,
        tokens: impl IntoIterator<Item = u32>,
        answer: usize,
    ) -> UnboundedReceiver<Event> {
        let (request, received) = request(tokens.into_iter().collect(), answer);
        assert!(engine.submit(request).is_ok());
        received
    }

    /// Runs until all requests are done. Returns the times of the steps in milliseconds.
    fn run(engine: &mut Engine) -> Vec<u128> {
        let mut steps = Vec::new();
        while let Some(time) = engine.plan() {
            steps.push(time.as_millis());
            engine.finish();
        }
        steps
    }

    fn drain(events: &mut UnboundedReceiver<Event>) -> Vec<Event> {
        std::iter::from_fn(|| events.try_recv().ok()).collect()
    }

    #[test]
    fn a_long_prompt_is_computed_in_chunks_while_others_decode() {
        let mut engine = Engine::new(settings());
        let _short = submit(&mut engine, 0..8, 4);
        assert_eq!(engine.plan(), Some(Duration::from_millis(8)));
        engine.finish();
        let _long = submit(&mut engine, 100..200, 2);
        // 64 and 36 prompt tokens with one decode, then two decodes, then one.
        assert_eq!(run(&mut engine), [64 + 11, 36 + 11, 12]);
        assert_eq!(engine.stats().totals.finished, 2);
    }

    #[test]
    fn an_answer_is_cached_with_its_prompt() {
        let mut engine = Engine::new(settings());
        let mut events = submit(&mut engine, 0..8, 5);
        run(&mut engine);
        let first = drain(&mut events);
        assert_eq!(first.len(), 5);
        assert_eq!(first[4].finish, Some(Finish::Length));
        let answer = first.iter().filter_map(|event| event.token);
        let mut next = submit(&mut engine, (0..8).chain(answer).chain(50..54), 1);
        run(&mut engine);
        assert_eq!(drain(&mut next)[0].cached, 12, "8 of the prompt, and 4 of the 5 of the answer");
    }

    #[test]
    fn the_last_token_of_a_prompt_is_always_computed() {
        let mut engine = Engine::new(settings());
        for expected in [0, 4] {
            let mut events = submit(&mut engine, 0..8, 1);
            run(&mut engine);
            assert_eq!(drain(&mut events)[0].cached, expected);
        }
    }

    #[test]
    fn a_common_prefix_is_computed_once_if_sharing_is_on() {
        for (in_batch_sharing, cached) in [(false, 0), (true, 32)] {
            let mut engine = Engine::new(Settings { in_batch_sharing, ..settings() });
            let _one = submit(&mut engine, 0..40, 1);
            let _two = submit(&mut engine, (0..32).chain(90..98), 1);
            let _other = submit(&mut engine, 200..208, 1);
            run(&mut engine);
            assert_eq!(engine.stats().totals.cached_tokens, cached);
            assert_eq!(engine.stats().totals.finished, 3);
        }
    }

    #[test]
    fn requests_wait_for_a_slot_and_for_memory() {
        let mut engine = Engine::new(Settings { max_running_requests: 2, ..settings() });
        let mut all: Vec<_> =
            (0..3).map(|i| submit(&mut engine, i * 100..i * 100 + 4, 3)).collect();
        engine.plan();
        assert_eq!((engine.stats().running, engine.stats().waiting), (2, 1));
        engine.finish();
        run(&mut engine);
        assert!(all.iter_mut().all(|events| drain(events).len() == 3));

        let mut engine = Engine::new(settings());
        assert!(engine.fits(256) && !engine.fits(257));
        let _large = submit(&mut engine, 0..150, 2);
        let _larger = submit(&mut engine, 1000..1150, 2);
        engine.plan();
        assert_eq!((engine.stats().running, engine.stats().waiting), (1, 1));
        run(&mut engine);
        assert_eq!(engine.stats().totals.finished, 2);
    }

    #[test]
    fn request_without_reader_is_dropped() {
        let mut engine = Engine::new(settings());
        let waiting = submit(&mut engine, 0..8, 100);
        drop(waiting);
        assert_eq!(engine.plan(), None);
        let running = submit(&mut engine, 0..8, 100);
        engine.plan();
        engine.finish();
        drop(running);
        assert_eq!(engine.plan(), None);
        assert_eq!(engine.stats().totals.aborted, 2);
        engine.flush();
        assert_eq!(engine.stats().used_tokens, 0);
    }

    #[test]
    fn aborted_request_is_reported() {
        let mut engine = Engine::new(settings());
        let mut events = submit(&mut engine, 0..8, 100);
        engine.plan();
        assert!(!engine.abort("another"));
        assert!(engine.abort("r"));
        let told = drain(&mut events).pop().expect("told");
        assert_eq!((told.token, told.finish), (None, Some(Finish::Abort)));
        assert_eq!(engine.plan(), None);
    }

    #[test]
    fn full_queue_refuses_requests() {
        let mut engine = Engine::new(Settings { max_queued_requests: 1, ..settings() });
        let _one = submit(&mut engine, 0..8, 1);
        let (second, _events) = request(vec![1], 1);
        assert!(engine.submit(second).is_err());
    }
}
