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

/// Selects the line of a request: its model if some worker serves that model, `None` for all other requests.
pub type LineKey = Option<ModelName>;

/// One line for each model that has had a waiting request.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// There are few models, so a search is cheap.
    lines: Mutex<Vec<(LineKey, Line<()>)>>,
    /// Number of requests in all lines, readable without the lock.
    waiting: AtomicUsize,
}

impl Lines {
    /// Whether requests wait in the line. `line_key` is called only if there is a request in any line.
    pub(super) fn has(&self, line_key: impl FnOnce() -> LineKey) -> bool {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let line_key = line_key();
        self.lines.lock().iter().any(|(of, line)| *of == line_key && !line.is_empty())
    }

    /// Joins the line at its end, or after the earlier requests of the client.
    pub(super) fn join(&self, line_key: LineKey, client: Option<Client>) -> LineGuard<'_> {
        let mut lines = self.lines.lock();
        let position = line_of(&mut lines, line_key).end(client);
        self.insert(line_key, position, &mut lines)
    }

    /// Returns a position before all requests except earlier broken streams.
    pub(super) fn front(&self, line_key: LineKey, client: Option<Client>) -> Position {
        line_of(&mut self.lines.lock(), line_key).front(client)
    }

    /// Joins the line at `position`.
    pub(super) fn join_at(&self, line_key: LineKey, position: Position) -> LineGuard<'_> {
        self.insert(line_key, position, &mut self.lines.lock())
    }

    /// Calls the first request of each line that was not called yet, because a worker may have room.
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
        line_key: LineKey,
        position: Position,
        lines: &mut Vec<(LineKey, Line<()>)>,
    ) -> LineGuard<'_> {
        line_of(lines, line_key).insert(position, None);
        self.count(lines);
        LineGuard { lines: self, line_key, position }
    }

    fn count(&self, lines: &[(LineKey, Line<()>)]) {
        let waiting = lines.iter().map(|(_, line)| line.len()).sum();
        self.waiting.store(waiting, Ordering::Relaxed);
    }
}

fn line_of(lines: &mut Vec<(LineKey, Line<()>)>, line_key: LineKey) -> &mut Line<()> {
    let at = lines.iter().position(|(of, _)| *of == line_key).unwrap_or_else(|| {
        lines.push((line_key, Line::default()));
        lines.len() - 1
    });
    &mut lines[at].1
}

/// The position of a request in a line. Dropping it leaves the line.
pub(super) struct LineGuard<'a> {
    lines: &'a Lines,
    line_key: LineKey,
    position: Position,
}

impl LineGuard<'_> {
    pub(super) fn position(&self) -> Position {
        self.position
    }

    /// Waits for the turn of this request. Returns false if it has not come by `at`.
    pub(super) async fn turn(&self, timer: &mut DeadlineTimer, at: Instant) -> bool {
        let &LineGuard { lines, line_key, position } = self;
        let (call, mut called) = oneshot::channel();
        line_of(&mut lines.lines.lock(), line_key).insert(position, Some(call));
        loop {
            let now = Instant::now();
            if now >= at {
                return false;
            }
            let pause = RETRY_PERIOD.mul_f64(0.5 + fastrand::f64());
            if timer.limit(at.min(now + pause), &mut called).await.is_some() {
                return true;
            }
            if line_of(&mut lines.lines.lock(), line_key).is_first(position) {
                return Instant::now() < at;
            }
        }
    }
}

impl Drop for LineGuard<'_> {
    fn drop(&mut self) {
        let mut lines = self.lines.lines.lock();
        line_of(&mut lines, self.line_key).remove(self.position);
        self.lines.count(&lines);
        drop(lines);
        // A worker has taken the request and may have more room, or the request has given up its turn.
        self.lines.call_next();
    }
}
