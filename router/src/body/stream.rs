//! A stream of events from a worker to the client. The router removes its own parts, fills silence, and continues a
//! broken stream on another worker or ends it with an error.
//!
//! The router guarantees the end of a stream, independently of the bytes that a worker sends. A complete answer ends
//! once with `[DONE]`, or with the last event of the Responses or Messages API. An incomplete answer ends with an
//! error event and never with `[DONE]`. Events in between are passed on unparsed.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use http::{StatusCode, header, response::Parts};
use tokio::time::{Instant, Interval, interval};

use crate::{
    body::{
        failure::Failure,
        replay::Replay,
        silence::{Due, Limits, MIN_SILENCE, SilenceTimers},
        usage,
        worker::WorkerFrames,
    },
    endpoint::Endpoint,
    engine::{include_usage, last_event},
    error::Error,
    fleet::{Outcome, Phase},
    metrics::ReplayOutcome,
    proxy::{self, Job, Reply},
    router::Router,
    wire::{
        events::{Events, Piece, parts},
        headers::content_type_is_event_stream,
    },
};

/// A keepalive comment. Clients skip it.
const PING: Bytes = Bytes::from_static(b": ping\n\n");

/// The last event of a complete answer.
const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// Time for the worker to end its response after the last event, so that the connection can be reused.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Factor for the longest pause of a stream if its worker reports progress but sends no other bytes.
const PROGRESS_ONLY_FACTOR: u32 = 10;

/// The stream. It owns all resources of its request, so dropping it releases them.
pub struct EventStream {
    state: State,
    endpoint: Endpoint,
    events: Events,
    /// Bytes that are not split into events yet.
    frame: Bytes,
    silence: SilenceTimers,
    replay: Option<Replay>,
    usage: usage::Reader,
    /// Whether the router, and not the client, has requested token counts.
    asked_usage: bool,
    progress: Progress,
}

/// The progress of a stream to its last event: `[DONE]`, a last event of the Responses or Messages API, or an error.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// The last event has not begun.
    Open,
    /// The present event is the last one. An answer is complete with it, unless it is an error.
    InLastEvent { completes: bool },
    /// The last event has been passed on. The client gets nothing more.
    Ended,
}

enum State {
    /// A worker sends. Fields are dropped in this order: the load is released before the request counts as ended.
    Streaming { frames: WorkerFrames, job: Box<Job> },
    /// Another worker is being asked to continue.
    Resuming(Resuming),
    /// The stream has ended.
    Over,
}

/// The reply of another worker, or the error if there is none.
type Resumed = (Box<Job>, Result<Reply, Error>);

struct Resuming {
    /// Dropping it drops the job.
    outcome: Pin<Box<dyn Future<Output = Resumed> + Send>>,
    ping: Interval,
    router: Arc<Router>,
}

/// Whether a response is an uncompressed stream of events.
pub fn is_event_stream(head: &Parts) -> bool {
    head.status == StatusCode::OK
        && content_type_is_event_stream(&head.headers) == Some(true)
        && !head.headers.contains_key(header::CONTENT_ENCODING)
}

impl EventStream {
    /// Starts the stream, and removes the fields that the client must not get from `head`.
    pub fn new(
        mut job: Box<Job>,
        head: &mut Parts,
        mut frames: WorkerFrames,
        asked_usage: bool,
    ) -> Self {
        let usage = usage::Reader::new(&job, &head.headers, &mut frames.guard);
        // The router adds and removes bytes.
        head.headers.remove(header::CONTENT_LENGTH);
        let replay = Replay::take(&mut head.headers).filter(|_| job.request.is_replayable());
        if replay.is_none() {
            job.request.release();
        }
        let config = &job.router.config;
        let limits = Limits {
            keepalive: config.sse_keepalive_secs.get(),
            inter_token: config.inter_token_timeout_secs.get(),
        };
        Self {
            silence: SilenceTimers::new(limits, job.deadline, Instant::now()),
            endpoint: job.endpoint,
            state: State::Streaming { frames, job },
            events: Events::default(),
            frame: Bytes::new(),
            replay,
            usage,
            asked_usage,
            progress: Progress::Open,
        }
    }

    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    fn has_ended(&self) -> bool {
        self.progress == Progress::Ended
    }

    /// The next bytes for the client.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        loop {
            let is_cut = self.is_cut();
            let polled = match &mut self.state {
                _ if is_cut => Err(Failure::Stopping),
                State::Streaming { .. } => ready!(self.poll_worker(cx)),
                State::Resuming(resuming) => match ready!(resuming.poll(cx)) {
                    Some(resumed) => match self.resume(resumed) {
                        Ok(()) => continue,
                        Err(failure) => Err(failure),
                    },
                    None => Ok(Some(PING)),
                },
                State::Over => return Poll::Ready(None),
            };
            match polled {
                Ok(Some(bytes)) => return Poll::Ready(Some(Ok(bytes))),
                Ok(None) => {
                    self.state = State::Over;
                    return Poll::Ready(None);
                }
                Err(failure) => {
                    if let Some(last) = self.fail(failure) {
                        return Poll::Ready(Some(last));
                    }
                }
            }
        }
    }

    /// Whether the router is shutting down and the stream has not ended.
    fn is_cut(&self) -> bool {
        let router = match &self.state {
            State::Streaming { job, .. } => &job.router,
            State::Resuming(resuming) => &resuming.router,
            State::Over => return false,
        };
        router.gate.is_cut() && !self.has_ended()
    }

    /// The next bytes from the worker; `None` when the stream is complete.
    fn poll_worker(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Failure>> {
        loop {
            match self.events.next(&mut self.frame) {
                Ok(Some(piece)) => match self.pass(piece) {
                    Ok(bytes) if bytes.is_empty() => continue,
                    outcome => return Poll::Ready(outcome.map(Some)),
                },
                Ok(None) => {}
                Err(_) => return Poll::Ready(Err(Failure::EventTooLong)),
            }
            let State::Streaming { frames, job } = &mut self.state else {
                return Poll::Ready(Ok(None));
            };
            match frames.poll_next(cx) {
                Poll::Ready(Some(Ok((frame, now)))) => {
                    self.frame = frame;
                    let pause = self.silence.received(now);
                    if pause >= MIN_SILENCE {
                        frames.backend().limits.stream_paused(pause);
                    }
                    continue;
                }
                Poll::Ready(_) if self.progress == Progress::Ended => return Poll::Ready(Ok(None)),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(Failure::Broken(error))),
                Poll::Ready(None) if job.endpoint.generates() => {
                    return Poll::Ready(Err(Failure::Truncated));
                }
                Poll::Ready(None) => {
                    // Streams of other endpoints have no last event.
                    frames.guard.record(Outcome::Answered);
                    let rest = self.events.rest();
                    return Poll::Ready(Ok((!rest.is_empty()).then_some(rest)));
                }
                Poll::Pending => {}
            }
            match ready!(self.silence.poll(&mut job.timer, cx)) {
                Due::End if self.has_ended() => return Poll::Ready(Ok(None)),
                Due::End => return Poll::Ready(Err(Failure::Timeout)),
                Due::KeepAlive if self.events.is_between_events() => {
                    return Poll::Ready(Ok(Some(PING)));
                }
                Due::StallCheck(pause) if self.is_stuck(pause) => {
                    return Poll::Ready(Err(Failure::Stuck(pause)));
                }
                Due::WorkerCheck if self.is_lost() => {
                    return Poll::Ready(Err(Failure::Stuck(self.silence.length())));
                }
                Due::WorkerCheck if self.is_starved() => {
                    return Poll::Ready(Err(Failure::Starved(self.silence.length())));
                }
                Due::KeepAlive | Due::WorkerCheck | Due::StallCheck(_) => {}
            }
        }
    }

    /// Returns the part of a piece that is for the client.
    fn pass(&mut self, piece: Piece) -> Result<Bytes, Failure> {
        let Piece { mut bytes, begins, ends } = piece;
        if self.has_ended() {
            return Ok(Bytes::new());
        }
        if begins {
            bytes = self.begin(bytes)?;
            if self.asked_usage && ends {
                bytes = include_usage::without(bytes);
            }
        }
        if ends && let Progress::InLastEvent { completes } = self.progress {
            self.progress = Progress::Ended;
            // An error event says nothing about the worker: the request may be the cause.
            if completes && let State::Streaming { frames, .. } = &mut self.state {
                frames.guard.record(Outcome::Answered);
                self.usage.ends(&frames.guard);
            }
            self.silence.end_by(Instant::now() + END_TIMEOUT);
        }
        Ok(bytes)
    }

    /// Handles the start of an event, usually the whole event. Returns the part for the client.
    fn begin(&mut self, mut bytes: Bytes) -> Result<Bytes, Failure> {
        if let Some(replay) = &mut self.replay {
            bytes.advance(replay.read(&bytes));
        }
        let (name, data) = parts(&bytes);
        if last_event::is_error(data) {
            if self.replay.is_some() && last_event::is_going_away(data) {
                return Err(Failure::WorkerEnded);
            }
            self.progress = Progress::InLastEvent { completes: false };
        } else if last_event::is_last(name, data) {
            let completes = last_event::completes_answer(name);
            self.progress = Progress::InLastEvent { completes };
        } else if bytes.trim_ascii().is_empty() {
            // The event has only token ids; their text follows later.
            return Ok(Bytes::new());
        }
        if let State::Streaming { frames, job } = &mut self.state {
            self.usage.read(job, &mut frames.guard, data);
        }
        if let Some(replay) = &mut self.replay {
            replay.passed(&bytes);
        }
        Ok(bytes)
    }

    /// Whether the worker has been found dead or frozen, and another one can continue. Requests a health check if
    /// no response of the worker makes progress.
    fn is_lost(&self) -> bool {
        let State::Streaming { frames, .. } = &self.state else { return false };
        let backend = frames.backend();
        if backend.silent_for() >= MIN_SILENCE {
            backend.health.probe_now();
        }
        backend.health.is_lost() && self.is_replayable()
    }

    fn is_replayable(&self) -> bool {
        self.replay.as_ref().is_some_and(Replay::is_possible)
    }

    /// Whether a stream with this pause is stuck. A false positive costs the answer if the stream cannot be
    /// continued, so then only a worker out of rotation counts.
    fn is_stuck(&self, pause: Duration) -> bool {
        let State::Streaming { frames, job } = &self.state else { return false };
        let backend = frames.backend();
        let is_stuck = || self.is_replayable() && backend.is_silent_for(pause);
        let is_gone = backend.phase() != Phase::Healthy || backend.is_frozen();
        is_gone || is_stuck() && job.router.registry.has_other(backend)
    }

    /// Whether this stream alone is stuck. Its pause is longer than the limit, which follows from its mean pause and
    /// from the latest pauses of the worker's streams. In the last two thirds of the pause, the worker has sent other
    /// bytes, or answered the check of its engine. If it only reports progress, the limit is [`PROGRESS_ONLY_FACTOR`]
    /// times as long.
    fn is_starved(&self) -> bool {
        let State::Streaming { frames, job } = &self.state else { return false };
        let (backend, pause) = (frames.backend(), self.silence.length());
        let limit = backend.limits.pause(self.silence.starvation_limit());
        let sends = || backend.silent_for() * 3 <= pause * 2;
        let is_late = || backend.makes_progress() && pause >= limit * PROGRESS_ONLY_FACTOR;
        pause >= limit
            && (sends() || is_late())
            && self.is_replayable()
            && job.router.registry.has_other(backend)
    }

    /// Handles a failure: starts a continuation, or returns the last bytes for the client.
    fn fail(&mut self, failure: Failure) -> Option<Result<Bytes, Failure>> {
        let state = std::mem::replace(&mut self.state, State::Over);
        let whole = self.events.is_between_events();
        // Bindings are dropped in reverse order: the frames before the job.
        if let State::Streaming { mut job, mut frames } = state {
            failure.record_on_worker(&job.router, &mut frames.guard);
            let replay = self.replay.as_mut().filter(|_| whole && failure.is_worker_fault());
            if replay.as_ref().is_some_and(|replay| replay.is_complete()) {
                return Some(Ok(DONE));
            }
            let body = replay.map(|replay| replay.next_body(&job.request.body));
            if let Some(None) = body {
                job.router.metrics.replays.increment(ReplayOutcome::GivenUp);
            }
            if let Some(Some(body)) = body {
                tracing::info!("continuing a stream of worker {}: {failure}", frames.backend().url);
                // The stream has progressed since earlier deaths, so only this worker counts.
                job.deaths = u32::from(matches!(failure, Failure::Broken(_) | Failure::Stuck(_)));
                // The counts of a continuation say nothing about the cache of the next worker.
                self.usage.close();
                self.events = Events::default();
                self.frame = Bytes::new();
                self.state = State::Resuming(Resuming::new(job, body));
                return None;
            }
            if let Some(log) = &job.log {
                log.mark_broken();
            }
        }
        Some(if whole { Ok(failure.to_event(self.endpoint)) } else { Err(failure) })
    }

    /// Continues with the response of another worker. Fails if there is no response, or if it is not a
    /// continuation.
    fn resume(&mut self, (job, outcome): Resumed) -> Result<(), Failure> {
        let replays = &job.router.metrics.replays;
        let mut answer = outcome.map_err(|error| {
            replays.increment(ReplayOutcome::Failed);
            Failure::NotContinued(error.to_string())
        })?;
        let replay = self.replay.as_mut();
        let goes_on = is_event_stream(&answer.head)
            && replay.is_some_and(|replay| replay.resume_with(&mut answer.head.headers));
        let frames = WorkerFrames::new(answer.first, answer.received, answer.rest, answer.guard);
        self.asked_usage = answer.asked_usage;
        if !goes_on {
            replays.increment(ReplayOutcome::Refused);
            let status = answer.head.status;
            return Err(Failure::NotContinued(format!("it answered with status {status}")));
        }
        replays.increment(ReplayOutcome::Continued);
        self.silence.restart(Instant::now());
        self.state = State::Streaming { frames, job };
        Ok(())
    }
}

impl Resuming {
    fn new(mut job: Box<Job>, body: Bytes) -> Self {
        let router = Arc::clone(&job.router);
        if let Some(key) = &router.config.replay_key {
            job.request.sign(key, &body);
        }
        let mut ping = interval(router.config.sse_keepalive_secs.get());
        // The first tick would be due at once.
        ping.reset();
        let outcome = Box::pin(async move {
            let outcome = proxy::dispatch(&mut job, Some(body)).await;
            (job, outcome)
        });
        Self { outcome, ping, router }
    }

    /// Ready with the outcome, or with `None` when a keepalive is due.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Resumed>> {
        if let Poll::Ready(outcome) = self.outcome.as_mut().poll(cx) {
            return Poll::Ready(Some(outcome));
        }
        self.ping.poll_tick(cx).map(|_| None)
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        let router = match &self.state {
            State::Streaming { job, .. } if !self.has_ended() => &job.router,
            State::Resuming(resuming) => &resuming.router,
            _ => return,
        };
        router.metrics.client_abort();
    }
}
