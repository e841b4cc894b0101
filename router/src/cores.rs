//! The threads that serve connections. Each has a runtime of its own, so a connection and its memory stay on one
//! core. On a multi-threaded runtime they would move between cores.

use std::{
    cell::Cell,
    io,
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle, available_parallelism},
};

use tokio::{
    runtime::{self, Handle},
    sync::oneshot,
};

/// Maximum number of threads. 100,000 requests a second keep fewer busy, and the other cores of a GPU host belong
/// to the workers.
const MAX_CORES: usize = 16;

thread_local! {
    static NUMBER: Cell<usize> = const { Cell::new(0) };
}

/// The number of this thread, from 1 to [`MAX_CORES`]; 0 for other threads.
fn current() -> usize {
    NUMBER.get()
}

/// Number of threads: one for each core, up to [`MAX_CORES`].
static COUNT: LazyLock<usize> =
    LazyLock::new(|| available_parallelism().map_or(1, usize::from).min(MAX_CORES));

/// A value for each of these threads, and one for all other threads. Each has cache lines of its own: a line that two
/// cores write moves from cache to cache.
#[derive(Debug)]
pub(crate) struct PerCore<T>(Box<[OwnLines<T>]>);

#[derive(Debug)]
#[repr(align(64))]
struct OwnLines<T>(T);

impl<T: Default> Default for PerCore<T> {
    fn default() -> Self {
        Self::new(T::default)
    }
}

impl<T> PerCore<T> {
    pub(crate) fn new(value: impl Fn() -> T) -> Self {
        Self((0..=*COUNT).map(|_| OwnLines(value())).collect())
    }

    /// The value of this thread.
    pub(crate) fn own(&self) -> &T {
        &self.0[current()].0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|of_core| &of_core.0)
    }
}

/// The threads. They end when the value is dropped.
#[derive(Debug)]
pub struct Cores {
    cores: Vec<Core>,
    next: AtomicUsize,
}

#[derive(Debug)]
struct Core {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Cores {
    /// Starts the threads.
    pub fn start() -> io::Result<Self> {
        let cores = (1..=*COUNT).map(Core::start).collect::<io::Result<_>>()?;
        Ok(Self { cores, next: AtomicUsize::new(0) })
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.cores.len()
    }

    /// The next runtime, in round-robin order.
    pub(crate) fn next(&self) -> &Handle {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        &self.cores[turn % self.cores.len()].handle
    }
}

impl Core {
    fn start(number: usize) -> io::Result<Self> {
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let name = format!("mla-router-{number}");
        let thread = thread::Builder::new().name(name).spawn(move || {
            NUMBER.set(number);
            // An error means that the sender was dropped, which ends the thread as well.
            let _stopped = runtime.block_on(stopped);
            // Does not wait for a blocking name look-up.
            runtime.shutdown_background();
        })?;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}
