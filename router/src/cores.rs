//! The threads that serve connections: each with a runtime of its own, so that a connection and all
//! that it needs stay on one core. On a runtime of many threads connections wander between cores, and
//! their memory with them.

use std::{
    cell::Cell,
    io,
    sync::atomic::{AtomicUsize, Ordering},
    thread::{self, JoinHandle, available_parallelism},
};

use tokio::{
    runtime::{self, Handle},
    sync::oneshot,
};

/// More threads than this only wait: a router that moves 100,000 requests a second keeps fewer busy,
/// and GPU hosts have 100 cores and more that belong to the workers.
pub(crate) const MOST: usize = 16;

thread_local! {
    static NUMBER: Cell<usize> = const { Cell::new(0) };
}

/// The number of this thread, from 1 to [`MOST`]; 0 for all that are none of these.
pub(crate) fn current() -> usize {
    NUMBER.get()
}

/// The threads end when this is dropped.
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
    /// As many as the machine has, up to [`MOST`].
    pub fn start() -> io::Result<Self> {
        let count = available_parallelism().map_or(1, usize::from).min(MOST);
        let cores = (1..=count).map(Core::start).collect::<io::Result<_>>()?;
        Ok(Self { cores, next: AtomicUsize::new(0) })
    }

    /// Each in turn.
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
            // Either it is told, or nobody is left who could tell.
            let _stopped = runtime.block_on(stopped);
            // Without waiting for a name that is being looked up.
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
