//! How many connections may be open, and which of them give way.
//!
//! A connection with a place serves all requests. When all places are taken, the one that has been idle for
//! longest is closed for the next. Where none is idle, further connections come in without a place: they get
//! what is light, so that probes, operators and the router's metrics are answered however many clients there
//! are, and are refused the rest.

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

/// Connections beyond the places, at most.
const EXTRA: usize = 32;

/// A client that has just connected is about to ask.
const LEAST_IDLE: Duration = Duration::from_secs(1);

/// Descriptors for files that are read again, name look-ups, and connections that close.
const OTHER_FILES: usize = 8;

pub(super) struct Places {
    /// That there are.
    pub(super) most: usize,
    /// Connections that may be open without one.
    pub(super) extra: usize,
    taken: AtomicUsize,
    freed: Notify,
    idle: Mutex<Idle>,
}

/// By their order.
#[derive(Default)]
struct Idle {
    next: u64,
    /// Dropped, they tell the connection to close.
    waiting: BTreeMap<u64, (Instant, oneshot::Sender<()>)>,
}

/// Of one connection, until it is dropped.
pub(super) struct Place(Arc<Places>);

/// A connection that is idle, until this is dropped.
pub(super) struct Resting<'a> {
    places: &'a Places,
    number: u64,
}

impl Places {
    /// `asked` of them, or as many as open files allow: each connection may need one to a worker beside its
    /// client's, and each of `workers` one for its health checks.
    pub(super) fn new(asked: usize, workers: usize) -> Self {
        let (files, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((u64::MAX, 0));
        let files = usize::try_from(files).unwrap_or(usize::MAX);
        let open = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let possible = files.saturating_sub(open + workers + OTHER_FILES) / 2;
        let extra = EXTRA.min(possible / 4).max(1);
        let most = asked.min(possible.saturating_sub(extra)).max(1);
        if asked > most {
            tracing::info!("at most {most} connections, by the limit of {files} open files");
        }
        Self {
            most,
            extra,
            taken: AtomicUsize::new(0),
            freed: Notify::new(),
            idle: Mutex::default(),
        }
    }

    pub(super) fn take(self: &Arc<Self>) -> Option<Place> {
        let fitting = |taken: usize| (taken < self.most).then_some(taken + 1);
        let took = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fitting);
        took.is_ok().then(|| Place(Arc::clone(self)))
    }

    /// Resolves when there is one.
    pub(super) async fn wait(self: &Arc<Self>) -> Place {
        loop {
            if let Some(place) = self.take() {
                return place;
            }
            self.freed.notified().await;
        }
    }

    /// Tells the connection that has been idle for longest to close. False if none has been for long.
    pub(super) fn shed(&self) -> bool {
        let mut idle = self.idle.lock();
        let oldest = idle.waiting.first_entry();
        let oldest = oldest.filter(|oldest| oldest.get().0.elapsed() >= LEAST_IDLE);
        oldest.map(OccupiedEntry::remove).is_some()
    }

    /// The connection is idle from now on; the receiver ends when it is to close.
    pub(super) fn rest(&self) -> (Resting<'_>, oneshot::Receiver<()>) {
        let (sender, told) = oneshot::channel();
        let mut idle = self.idle.lock();
        let number = idle.next;
        idle.next += 1;
        idle.waiting.insert(number, (Instant::now(), sender));
        (Resting { places: self, number }, told)
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

/// As many open files as the system lets the process have: what a shell allows is for other programs.
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
        assert!(!places.shed(), "they have just come");
        tokio::time::advance(LEAST_IDLE).await;
        assert!(places.shed());
        assert!(one.await.is_err(), "told");
        assert!(places.shed());
        assert!(three.await.is_err(), "told");
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
