//! The statistics of the router every second, as server-sent events. The first event has the history of the last hour.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::body::Bytes;
use http_body::{Body, Frame};
use serde::Serialize;
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::{history::NewSamples, router::Router, stats::Stats};

const PERIOD: Duration = Duration::from_secs(1);

/// The body of the event stream. It ends with the router.
pub(super) struct Events {
    router: Arc<Router>,
    ticks: Interval,
    /// Number of the last sample sent.
    seen: Option<u64>,
}

#[derive(Serialize)]
struct Event {
    stats: Stats,
    history: NewSamples,
}

impl Events {
    pub(super) fn new(router: Arc<Router>) -> Self {
        let mut ticks = interval(PERIOD);
        // A page in the background reads late. It needs the present state, not the missed events.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { router, ticks, seen: None }
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        ready!(self.ticks.poll_tick(cx));
        // After a drain the stream must not keep the router running.
        if self.router.gate.is_draining() && self.router.gate.in_flight() == 0 {
            return Poll::Ready(None);
        }
        let event =
            Event { stats: self.router.stats(), history: self.router.history.since(self.seen) };
        self.seen = Some(event.history.tick);
        let event = serde_json::to_string(&event);
        let event = event.expect("contract: statistics are numbers and names");
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(format!("data: {event}\n\n"))))))
    }
}
