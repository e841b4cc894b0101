//! The lines of requests for which all workers were busy: one line for each model.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::oneshot, time::Instant};

use super::{
    Client,
    line::{Line, Position},
};
use crate::{deadline_timer::DeadlineTimer, names::ModelName};

/// Time after which the first request in a line tries again even if nothing calls it.
const RETRY_PERIOD: Duration = Duration::from_millis(100);

/// The line of a request: the line of its model if some worker serves that model, or the line of all other requests.
pub type Lane = Option<ModelName>;

/// One line for each model that has had a waiting request.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// There are few models, so a search is cheap.
    lines: Mutex<Vec<(Lane, Line<()>)>>,
    /// Number of requests in all lines, readable without the lock.
    waiting: AtomicUsize,
}

impl Lines {
    /// Whether requests wait in the line. `lane` is called only if there is a request in any line.
    pub(super) fn has(&self, lane: impl FnOnce() -> Lane) -> bool {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let lane = lane();
        self.lines.lock().iter().any(|(of, line)| *of == lane && !line.is_empty())
    }

    /// Joins the line at its end, or behind the earlier requests of the client.
    pub(super) fn join(&self, lane: Lane, client: Option<Client>) -> LineGuard<'_> {
        let mut lines = self.lines.lock();
        let position = line_of(&mut lines, lane).end(client);
        self.insert(lane, position, &mut lines)
    }

    /// Returns a position before all requests except earlier broken streams.
    pub(super) fn front(&self, lane: Lane, client: Option<Client>) -> Position {
        line_of(&mut self.lines.lock(), lane).front(client)
    }

    /// Joins the line at `position`.
    pub(super) fn join_at(&self, lane: Lane, position: Position) -> LineGuard<'_> {
        self.insert(lane, position, &mut self.lines.lock())
    }

    /// Calls the first request of each line that is not trying already: a worker may have room.
    pub(super) fn call_next(&self) {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        for (_, line) in &mut *self.lines.lock() {
            line.call(|| ());
        }
    }

    fn insert(
        &self,
        lane: Lane,
        position: Position,
        lines: &mut Vec<(Lane, Line<()>)>,
    ) -> LineGuard<'_> {
        line_of(lines, lane).insert(position, None);
        self.count(lines);
        LineGuard { lines: self, lane, position }
    }

    fn count(&self, lines: &[(Lane, Line<()>)]) {
        let waiting = lines.iter().map(|(_, line)| line.len()).sum();
        self.waiting.store(waiting, Ordering::Relaxed);
    }
}

fn line_of(lines: &mut Vec<(Lane, Line<()>)>, lane: Lane) -> &mut Line<()> {
    let at = lines.iter().position(|(of, _)| *of == lane).unwrap_or_else(|| {
        lines.push((lane, Line::default()));
        lines.len() - 1
    });
    &mut lines[at].1
}

/// The position of a request in a line. Dropping it leaves the line.
pub(super) struct LineGuard<'a> {
    lines: &'a Lines,
    lane: Lane,
    position: Position,
}

impl LineGuard<'_> {
    pub(super) fn position(&self) -> Position {
        self.position
    }

    /// Waits for the turn of this request. Returns false if it has not come by `at`.
    pub(super) async fn turn(&self, timer: &mut DeadlineTimer, at: Instant) -> bool {
        let &LineGuard { lines, lane, position } = self;
        let (call, mut called) = oneshot::channel();
        line_of(&mut lines.lines.lock(), lane).insert(position, Some(call));
        loop {
            let now = Instant::now();
            if now >= at {
                return false;
            }
            let pause = RETRY_PERIOD.mul_f64(0.5 + fastrand::f64());
            if timer.limit(at.min(now + pause), &mut called).await.is_some() {
                return true;
            }
            if line_of(&mut lines.lines.lock(), lane).is_first(position) {
                return Instant::now() < at;
            }
        }
    }
}

impl Drop for LineGuard<'_> {
    fn drop(&mut self) {
        let mut lines = self.lines.lines.lock();
        line_of(&mut lines, self.lane).remove(self.position);
        self.lines.count(&lines);
        drop(lines);
        // A worker has taken the request and may have more room, or the request has given up its turn.
        self.lines.call_next();
    }
}
