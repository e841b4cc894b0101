//! The limit on open connections.
//!
//! A connection with a permit serves all requests. When all permits are taken, a new connection closes the one that
//! was idle for longest. If no connection is idle, a few more are accepted without a permit. They serve light requests
//! only, and other requests on them are refused. So probes and operators get answers under any number of clients.

use std::{
    collections::{BTreeMap, btree_map::OccupiedEntry},
    fs,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

/// Maximum number of connections without a permit.
const MAX_EXTRA: usize = 32;

/// Minimum idle time of a connection that is closed. A client that has just connected is about to send a request.
const MIN_IDLE: Duration = Duration::from_secs(1);

/// Descriptors that are reserved for files, name look-ups and closing connections.
const RESERVED_FILES: usize = 8;

/// The permits of one router.
pub(super) struct ConnectionLimit {
    /// Number of permits.
    pub(super) count: usize,
    /// Maximum number of connections without a permit.
    pub(super) extra: usize,
    taken: AtomicUsize,
    freed: Notify,
    idle: Mutex<Idle>,
}

/// Idle connections in the order in which they became idle.
#[derive(Default)]
struct Idle {
    next: u64,
    /// Dropping the sender tells the connection to close.
    waiting: BTreeMap<u64, (Instant, oneshot::Sender<()>)>,
}

/// The permit of one connection. Dropping it frees the permit.
pub(super) struct ConnectionPermit(Arc<ConnectionLimit>);

/// A connection that is marked as idle. Dropping the value removes the mark.
pub(super) struct IdleConnection<'a> {
    limit: &'a ConnectionLimit,
    number: u64,
}

impl ConnectionLimit {
    /// Creates `asked` permits, or as many as the limit on open files allows. A request needs a descriptor
    /// for the client and one for the worker, and each worker one for its health checks.
    pub(super) fn new(asked: usize, workers: usize) -> Self {
        let (files, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((u64::MAX, 0));
        let files = usize::try_from(files).unwrap_or(usize::MAX);
        let open = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let possible = files.saturating_sub(open + workers + RESERVED_FILES) / 2;
        let extra = MAX_EXTRA.min(possible / 4).max(1);
        let count = asked.min(possible.saturating_sub(extra)).max(1);
        if asked > count {
            let cause = format!("at most {count} connections, by the limit of {files} open files");
            if count < asked / 10 {
                tracing::warn!("{cause}; raise the hard limit, as by `ulimit -n`");
            } else {
                tracing::info!("{cause}");
            }
        }
        Self {
            count,
            extra,
            taken: AtomicUsize::new(0),
            freed: Notify::new(),
            idle: Mutex::default(),
        }
    }

    pub(super) fn take(self: &Arc<Self>) -> Option<ConnectionPermit> {
        let fitting = |taken: usize| (taken < self.count).then_some(taken + 1);
        let took = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fitting);
        took.is_ok().then(|| ConnectionPermit(Arc::clone(self)))
    }

    /// Takes a permit, or waits for one.
    pub(super) async fn wait(self: &Arc<Self>) -> ConnectionPermit {
        loop {
            if let Some(permit) = self.take() {
                return permit;
            }
            self.freed.notified().await;
        }
    }

    /// Closes the connection that was idle for longest. Returns false if none was idle for [`MIN_IDLE`].
    pub(super) fn close_idle(&self) -> bool {
        let mut idle = self.idle.lock();
        let oldest = idle.waiting.first_entry();
        let oldest = oldest.filter(|oldest| oldest.get().0.elapsed() >= MIN_IDLE);
        oldest.map(OccupiedEntry::remove).is_some()
    }

    /// Marks a connection as idle. The receiver ends when the connection must close.
    pub(super) fn mark_idle(&self) -> (IdleConnection<'_>, oneshot::Receiver<()>) {
        let (sender, closed) = oneshot::channel();
        let mut idle = self.idle.lock();
        let number = idle.next;
        idle.next += 1;
        idle.waiting.insert(number, (Instant::now(), sender));
        (IdleConnection { limit: self, number }, closed)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
        self.0.freed.notify_one();
    }
}

impl Drop for IdleConnection<'_> {
    fn drop(&mut self) {
        self.limit.idle.lock().waiting.remove(&self.number);
    }
}

/// Raises the limit on open files to the hard limit.
pub(super) fn raise_file_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::debug!("the limit on open files stays at {soft}: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_gives_way() {
        let limit = ConnectionLimit::new(2, 0);
        let ((_first, one), (second, two)) = (limit.mark_idle(), limit.mark_idle());
        let (_third, three) = limit.mark_idle();
        drop(second);
        assert!(!limit.close_idle(), "they have just become idle");
        tokio::time::advance(MIN_IDLE).await;
        assert!(limit.close_idle());
        assert!(one.await.is_err(), "it is told to close");
        assert!(limit.close_idle());
        assert!(three.await.is_err(), "it is told to close");
        assert!(!limit.close_idle(), "none is idle");
        drop(two);
    }

    #[test]
    fn permits_are_given_back() {
        let limit = Arc::new(ConnectionLimit::new(2, 0));
        let held = [limit.take(), limit.take()];
        assert!(held.iter().all(Option::is_some) && limit.take().is_none());
        drop(held);
        assert!(limit.take().is_some());
    }
}
