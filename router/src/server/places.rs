//! The limit on open connections.
//!
//! A connection with a place serves all requests. When all places are taken, the connection that was idle for
//! longest is closed for a new one. If no connection is idle, some further ones are accepted without a place. They
//! serve light requests only, so that probes and operators are answered under any number of clients; other requests
//! on them are refused.

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

/// Maximum number of connections without a place.
const MAX_EXTRA: usize = 32;

/// Minimum idle time of a connection that is closed. A client that has just connected is about to send a request.
const MIN_IDLE: Duration = Duration::from_secs(1);

/// Descriptors that are reserved for files, name look-ups and closing connections.
const RESERVED_FILES: usize = 8;

/// The places of one router.
pub(super) struct Places {
    /// Number of places.
    pub(super) count: usize,
    /// Maximum number of connections without a place.
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

/// The place of one connection. Dropping it frees the place.
pub(super) struct Place(Arc<Places>);

/// An idle connection. Dropping the value ends the idle state.
pub(super) struct Resting<'a> {
    places: &'a Places,
    number: u64,
}

impl Places {
    /// Creates `asked` places, or as many as the limit on open files allows: a request needs a descriptor for the
    /// client and one for the worker, and each worker one for its health checks.
    pub(super) fn new(asked: usize, workers: usize) -> Self {
        let (files, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((u64::MAX, 0));
        let files = usize::try_from(files).unwrap_or(usize::MAX);
        let open = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let possible = files.saturating_sub(open + workers + RESERVED_FILES) / 2;
        let extra = MAX_EXTRA.min(possible / 4).max(1);
        let count = asked.min(possible.saturating_sub(extra)).max(1);
        if asked > count {
            tracing::info!("at most {count} connections, by the limit of {files} open files");
        }
        Self {
            count,
            extra,
            taken: AtomicUsize::new(0),
            freed: Notify::new(),
            idle: Mutex::default(),
        }
    }

    pub(super) fn take(self: &Arc<Self>) -> Option<Place> {
        let fitting = |taken: usize| (taken < self.count).then_some(taken + 1);
        let took = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fitting);
        took.is_ok().then(|| Place(Arc::clone(self)))
    }

    /// Takes a place, or waits for one.
    pub(super) async fn wait(self: &Arc<Self>) -> Place {
        loop {
            if let Some(place) = self.take() {
                return place;
            }
            self.freed.notified().await;
        }
    }

    /// Closes the connection that was idle for longest. Returns false if none was idle for [`MIN_IDLE`].
    pub(super) fn shed(&self) -> bool {
        let mut idle = self.idle.lock();
        let oldest = idle.waiting.first_entry();
        let oldest = oldest.filter(|oldest| oldest.get().0.elapsed() >= MIN_IDLE);
        oldest.map(OccupiedEntry::remove).is_some()
    }

    /// Marks a connection as idle. The receiver ends when the connection must close.
    pub(super) fn rest(&self) -> (Resting<'_>, oneshot::Receiver<()>) {
        let (sender, closed) = oneshot::channel();
        let mut idle = self.idle.lock();
        let number = idle.next;
        idle.next += 1;
        idle.waiting.insert(number, (Instant::now(), sender));
        (Resting { places: self, number }, closed)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
        self.0.freed.notify_one();
    }
}

impl Drop for Resting<'_> {
    fn drop(&mut self) {
        self.places.idle.lock().waiting.remove(&self.number);
    }
}

/// Raises the limit on open files to the hard limit.
pub(super) fn allow_files() {
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
        let places = Places::new(2, 0);
        let ((_first, one), (second, two)) = (places.rest(), places.rest());
        let (_third, three) = places.rest();
        drop(second);
        assert!(!places.shed(), "they have just become idle");
        tokio::time::advance(MIN_IDLE).await;
        assert!(places.shed());
        assert!(one.await.is_err(), "it is told to close");
        assert!(places.shed());
        assert!(three.await.is_err(), "it is told to close");
        assert!(!places.shed(), "none is idle");
        drop(two);
    }

    #[test]
    fn places_are_given_back() {
        let places = Arc::new(Places::new(2, 0));
        let held = [places.take(), places.take()];
        assert!(held.iter().all(Option::is_some) && places.take().is_none());
        drop(held);
        assert!(places.take().is_some());
    }
}
