//! What the router knows, every second.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::body::Bytes;
use http_body::{Body, Frame};
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::router::Router;

const PERIOD: Duration = Duration::from_secs(1);

/// A stream of events that ends with the router, or when its reader leaves.
pub(super) struct Events {
    router: Arc<Router>,
    ticks: Interval,
}

impl Events {
    pub(super) fn new(router: Arc<Router>) -> Self {
        let mut ticks = interval(PERIOD);
        // A page in the background reads late; it wants the present and not what it has missed.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { router, ticks }
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
        // Drained: nothing changes any more, and this must not be what keeps the router up.
        if self.router.gate.is_draining() && self.router.gate.in_flight() == 0 {
            return Poll::Ready(None);
        }
        let stats = serde_json::to_string(&self.router.stats());
        let stats = stats.expect("contract: statistics are numbers and names");
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(format!("data: {stats}\n\n"))))))
    }
}
