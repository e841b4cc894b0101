//! A place in a line for a busy model.

use std::{sync::atomic::Ordering, time::Duration};

use tokio::{sync::oneshot, time::Instant};

use super::{
    line::Position,
    queue::{Lane, Place, Queue},
};
use crate::alarm::Alarm;

/// Pause of the first in line when nothing happens.
const PAUSE: Duration = Duration::from_millis(100);

/// A place in the line, kept while its request tries again. Dropping it gives it up.
pub(crate) struct Ticket<'a> {
    pub(super) place: Place<'a>,
    pub(super) standing: Standing<'a>,
}

pub(super) struct Standing<'a> {
    pub(super) queue: &'a Queue,
    pub(super) lane: Lane,
    pub(super) position: Position,
}

impl Ticket<'_> {
    pub(crate) fn position(&self) -> Position {
        self.standing.position
    }

    pub(crate) fn served(self) {
        self.place.served();
    }

    pub(crate) fn give_up(self) {
        self.place.give_up();
    }

    /// Waits until it is this one's turn to try; false if it was not by `at`.
    pub(crate) async fn turn(&self, alarm: &mut Alarm, at: Instant) -> bool {
        let &Standing { queue, lane, position } = &self.standing;
        let (call, mut called) = oneshot::channel();
        queue.lines.lock().of(lane).insert(position, Some(call));
        loop {
            let now = Instant::now();
            if now >= at {
                return false;
            }
            let pause = PAUSE.mul_f64(0.5 + fastrand::f64());
            if alarm.limit(at.min(now + pause), &mut called).await.is_some() {
                return true;
            }
            if queue.lines.lock().of(lane).is_first(position) {
                return Instant::now() < at;
            }
        }
    }
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        let mut lines = self.queue.lines.lock();
        lines.of(self.lane).remove(self.position);
        self.queue.in_line.store(lines.len(), Ordering::Relaxed);
        drop(lines);
        // Either it was taken, and there may be room for more; or it has given up its turn.
        self.queue.call_next();
    }
}
