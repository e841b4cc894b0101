//! A worker's stream of events on its way to the client: what is for the router is taken out, silence is
//! filled, and what breaks is continued on another worker or ends with an error that says so.
//!
//! The end is the router's to keep, whatever a worker sends: an answer that is complete ends with
//! `[DONE]`, or with the last event of the Responses API, once, and nothing behind it; one that is not
//! ends with an error event and never with `[DONE]`. Events in between are passed on unread, a token
//! behind its choice's finish included: whether it makes sense would take parsing every event.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use http::{StatusCode, header, response::Parts};
use memchr::memmem;
use tokio::time::{Instant, Sleep, sleep};

use crate::{
    body::{
        asked_usage,
        failure::Failure,
        replay::Replay,
        silence::{Due, Limits, QUIET, Silence},
        usage,
        worker::WorkerFrames,
    },
    error::Error,
    fleet::worker::{Outcome, Phase},
    metrics::ReplayOutcome,
    proxy::{self, Job, Reply},
    router::Router,
    wire::{
        events::{Events, Piece, parts},
        headers::say_event_stream,
    },
};

/// A comment, which clients skip.
const PING: Bytes = Bytes::from_static(b": ping\n\n");

/// What a complete answer ends with.
const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// The names of the Responses API's last events: its streams have no `[DONE]`.
const LAST_NAMES: [&[u8]; 4] =
    [b"response.completed", b"response.incomplete", b"response.failed", b"error"];

/// Of these the names that tell of an error.
const ERROR_NAMES: [&[u8]; 2] = [b"response.failed", b"error"];

/// After the last event, time for the worker to end its response, so that the connection can be kept.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// In error events of our workers: this one is going away, another one could continue.
const GOING_AWAY: [&[u8]; 3] =
    [b"\"code\":\"scheduler_ended\"", b"\"code\":\"draining\"", b"\"code\":\"engine_died\""];

/// It owns all that its request holds, so that dropping it at any moment lets go of all.
#[expect(clippy::struct_excessive_bools, reason = "independent facts of one stream")]
pub struct EventStream {
    state: State,
    events: Events,
    /// Has come and is not yet cut into events.
    frame: Bytes,
    silence: Silence,
    replay: Option<Replay>,
    usage: usage::Reader,
    /// The client has said nothing of the counts that the worker was asked for.
    asked_usage: bool,
    /// The event that is being passed on is the last: `[DONE]`, one of [`LAST_NAMES`], or an error.
    is_last: bool,
    /// That one says that the answer is complete.
    is_answer: bool,
    /// The last event has been passed on.
    all_said: bool,
}

#[expect(clippy::large_enum_variant, reason = "the stream as a whole is in a box")]
enum State {
    /// A worker speaks. Its load is released before the request counts as gone: fields are dropped in
    /// this order.
    Flowing {
        frames: WorkerFrames,
        job: Job,
    },
    /// Another one is looked for.
    Resuming(Resuming),
    Over,
}

/// What another worker says, or why there is none.
type Resumed = (Job, Result<Reply, Error>);

struct Resuming {
    /// Dropping it gives up the job.
    outcome: Pin<Box<dyn Future<Output = Resumed> + Send>>,
    ping: Pin<Box<Sleep>>,
    router: Arc<Router>,
}

/// Whether a response is a stream of events that can be read.
pub fn is_event_stream(head: &Parts) -> bool {
    head.status == StatusCode::OK
        && say_event_stream(&head.headers) == Some(true)
        && !head.headers.contains_key(header::CONTENT_ENCODING)
}

impl EventStream {
    /// Changes the head to what the client is to see.
    pub fn new(
        mut job: Job,
        head: &mut Parts,
        mut frames: WorkerFrames,
        asked_usage: bool,
    ) -> Self {
        let usage = usage::Reader::new(&job, &head.headers, &mut frames.booking);
        // What is taken out or put in changes the length.
        head.headers.remove(header::CONTENT_LENGTH);
        let replay = Replay::take(&mut head.headers).filter(|_| job.request.is_replayable());
        if replay.is_none() {
            // Nobody will need it again, and it may be large.
            job.request.drop_body();
        }
        let config = &job.router.config;
        let limits = Limits {
            keepalive: config.sse_keepalive_secs.get(),
            inter_token: config.inter_token_timeout_secs.get(),
        };
        Self {
            silence: Silence::new(limits, job.deadline, Instant::now()),
            state: State::Flowing { frames, job },
            events: Events::default(),
            frame: Bytes::new(),
            replay,
            usage,
            asked_usage,
            is_last: false,
            is_answer: false,
            all_said: false,
        }
    }

    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// The next bytes for the client.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        loop {
            let is_cut = self.is_cut();
            let polled = match &mut self.state {
                _ if is_cut => Err(Failure::Stopping),
                State::Flowing { .. } => ready!(self.flow(cx)),
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

    /// The router is going down, and there is still something to say here.
    fn is_cut(&self) -> bool {
        let router = match &self.state {
            State::Flowing { job, .. } => &job.router,
            State::Resuming(resuming) => &resuming.router,
            State::Over => return false,
        };
        router.gate.is_cut() && !self.all_said
    }

    /// What the worker says next; `None` when the stream is complete.
    fn flow(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Failure>> {
        loop {
            match self.events.next(&mut self.frame) {
                Ok(Some(piece)) => match self.look(piece) {
                    Ok(bytes) if bytes.is_empty() => continue,
                    outcome => return Poll::Ready(outcome.map(Some)),
                },
                Ok(None) => {}
                Err(_) => return Poll::Ready(Err(Failure::Endless)),
            }
            let State::Flowing { frames, job } = &mut self.state else {
                return Poll::Ready(Ok(None));
            };
            match frames.poll_next(cx) {
                Poll::Ready(Some(Ok((frame, now)))) => {
                    self.frame = frame;
                    self.silence.broken(now);
                    continue;
                }
                Poll::Ready(_) if self.all_said => return Poll::Ready(Ok(None)),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(Failure::Broken(error))),
                Poll::Ready(None) if job.endpoint.generates() => {
                    return Poll::Ready(Err(Failure::Truncated));
                }
                Poll::Ready(None) => {
                    // Streams of other kinds may end as they like.
                    frames.booking.record(Outcome::Answered);
                    let rest = self.events.rest();
                    return Poll::Ready(Ok((!rest.is_empty()).then_some(rest)));
                }
                Poll::Pending => {}
            }
            match ready!(self.silence.poll(&mut job.alarm, cx)) {
                Due::End if self.all_said => return Poll::Ready(Ok(None)),
                Due::End => return Poll::Ready(Err(Failure::Timeout)),
                Due::KeepAlive if self.events.is_between() => return Poll::Ready(Ok(Some(PING))),
                Due::Look(pause) if self.is_stuck(pause) => {
                    return Poll::Ready(Err(Failure::Stuck(pause)));
                }
                Due::Glance if self.is_lost() => {
                    return Poll::Ready(Err(Failure::Stuck(self.silence.length())));
                }
                Due::KeepAlive | Due::Glance | Due::Look(_) => {}
            }
        }
    }

    /// What of an event is for the client.
    fn look(&mut self, piece: Piece) -> Result<Bytes, Failure> {
        let Piece { mut bytes, begins, ends } = piece;
        if self.all_said {
            return Ok(Bytes::new());
        }
        if begins {
            bytes = self.begin(bytes)?;
            if self.asked_usage && ends {
                bytes = asked_usage::without(bytes);
            }
        }
        if self.is_last && ends {
            self.all_said = true;
            // An error speaks neither for the worker nor against it: it may be the request's.
            if let State::Flowing { frames, .. } = &mut self.state
                && self.is_answer
            {
                frames.booking.record(Outcome::Answered);
                self.usage.ends(&frames.booking);
            }
            self.silence.ends_by(Instant::now() + LAST_WORDS);
        }
        Ok(bytes)
    }

    /// What of an event's beginning is for the client; most often it is all of the event.
    fn begin(&mut self, mut bytes: Bytes) -> Result<Bytes, Failure> {
        if let Some(replay) = &mut self.replay {
            bytes.advance(replay.note(&bytes));
        }
        let (name, data) = parts(&bytes);
        if data.starts_with(b"{\"error\"") {
            let goes_away = |code: &&[u8]| memmem::find(data, code).is_some();
            if self.replay.is_some() && GOING_AWAY.iter().any(goes_away) {
                return Err(Failure::WorkerEnded);
            }
            self.is_last = true;
        } else if data.starts_with(b"[DONE]") || LAST_NAMES.contains(&name) {
            self.is_last = true;
            self.is_answer = !ERROR_NAMES.contains(&name);
        } else if bytes.trim_ascii().is_empty() {
            // Nothing but tokens whose text is to come.
            return Ok(Bytes::new());
        }
        if let State::Flowing { frames, job } = &mut self.state {
            self.usage.look(job, &mut frames.booking, data);
        }
        if let Some(replay) = &mut self.replay {
            replay.passed(&bytes);
        }
        Ok(bytes)
    }

    /// Whether its worker has been found dead or frozen while the stream paused. A worker that is silent
    /// as a whole gets a health check now.
    fn is_lost(&self) -> bool {
        let State::Flowing { frames, .. } = &self.state else { return false };
        let worker = frames.worker();
        if worker.silent_for() >= QUIET {
            worker.doubt();
        }
        worker.is_lost() && self.is_replayable()
    }

    fn is_replayable(&self) -> bool {
        self.replay.as_ref().is_some_and(Replay::is_possible)
    }

    /// Whether a stream that has paused for so long will not go on. Where it cannot be continued, a
    /// wrong yes costs the answer: then only a worker that is out of rotation counts as gone.
    fn is_stuck(&self, pause: Duration) -> bool {
        let State::Flowing { frames, job } = &self.state else { return false };
        let worker = frames.worker();
        let is_stuck = || self.is_replayable() && worker.is_silent_for(pause);
        let is_gone = worker.phase() != Phase::Healthy || worker.is_frozen();
        is_gone || is_stuck() && job.router.registry.has_other(worker)
    }

    /// Looks for another worker if that may help; else returns the last that the client gets.
    fn fail(&mut self, failure: Failure) -> Option<Result<Bytes, Failure>> {
        let state = std::mem::replace(&mut self.state, State::Over);
        let whole = self.events.is_between();
        // Bindings are dropped the other way round.
        if let State::Flowing { mut job, mut frames } = state {
            failure.blame(&job.router, &mut frames.booking);
            let replay = self.replay.as_mut().filter(|_| whole && failure.is_of_worker());
            if replay.as_ref().is_some_and(|replay| replay.is_complete()) {
                return Some(Ok(DONE));
            }
            let body = replay.map(|replay| replay.next_body(&job.request.body));
            if let Some(None) = body {
                job.router.metrics.replays.increment(ReplayOutcome::GivenUp);
            }
            if let Some(Some(body)) = body {
                tracing::info!("continuing a stream of worker {}: {failure}", frames.worker().url);
                // There were events since the last one: only this worker may have died of them.
                job.deaths = u32::from(matches!(failure, Failure::Broken(_) | Failure::Stuck(_)));
                // The counts of a continuation are no word on the next worker's cache.
                self.usage.close();
                self.events = Events::default();
                self.frame = Bytes::new();
                self.state = State::Resuming(Resuming::new(job, body));
                return None;
            }
            if let Some(journal) = &job.journal {
                journal.broke();
            }
        }
        Some(if whole { Ok(failure.to_event()) } else { Err(failure) })
    }

    /// Goes on with what another worker has answered.
    fn resume(&mut self, (job, outcome): Resumed) -> Result<(), Failure> {
        let replays = &job.router.metrics.replays;
        let mut answer = outcome.map_err(|error| {
            replays.increment(ReplayOutcome::Failed);
            Failure::NotContinued(error.to_string())
        })?;
        let replay = self.replay.as_mut();
        let goes_on = is_event_stream(&answer.head)
            && replay.is_some_and(|replay| replay.go_on(&mut answer.head.headers));
        let frames = WorkerFrames::new(answer.first, answer.rest, answer.booking);
        self.asked_usage = answer.asked_usage;
        if !goes_on {
            replays.increment(ReplayOutcome::Refused);
            let status = answer.head.status;
            return Err(Failure::NotContinued(format!("it answered with status {status}")));
        }
        replays.increment(ReplayOutcome::Continued);
        self.silence.begins_anew(Instant::now());
        self.state = State::Flowing { frames, job };
        Ok(())
    }
}

impl Resuming {
    fn new(mut job: Job, body: Bytes) -> Self {
        let router = Arc::clone(&job.router);
        if let Some(key) = &router.config.replay_key {
            job.request.sign(key, &body);
        }
        let ping = Box::pin(sleep(router.config.sse_keepalive_secs.get()));
        let outcome = Box::pin(async move {
            let outcome = proxy::obtain(&mut job, Some(body)).await;
            (job, outcome)
        });
        Self { outcome, ping, router }
    }

    /// The outcome, or nothing when the client needs a sign of life.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Resumed>> {
        if let Poll::Ready(outcome) = self.outcome.as_mut().poll(cx) {
            return Poll::Ready(Some(outcome));
        }
        ready!(self.ping.as_mut().poll(cx));
        let next = Instant::now() + self.router.config.sse_keepalive_secs.get();
        self.ping.as_mut().reset(next);
        Poll::Ready(None)
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        let router = match &self.state {
            State::Flowing { job, .. } if !self.all_said => &job.router,
            State::Resuming(resuming) => &resuming.router,
            _ => return,
        };
        router.metrics.client_abort();
    }
}
