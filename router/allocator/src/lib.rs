//! mimalloc as the allocator of the programs that link this crate, and the return of unused memory to the
//! system.
//!
//! mimalloc keeps freed memory for a second, in case it is needed again. It returns memory only when some thread frees
//! a whole page of objects. A router that has read large bodies and then is idle would keep their memory. So a thread
//! returns unused memory once a second.
//!
//! The crate stands alone because the router's library has no `unsafe` code, and because a library must not
//! choose the allocator of its host program.

#![deny(unsafe_code)]

use std::{
    io,
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread,
    time::Duration,
};

// mimalloc is fast for small short-lived buffers of many sizes on many threads.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Time for which mimalloc keeps freed memory.
const PERIOD: Duration = Duration::from_secs(1);

/// Returns unused memory until it is dropped.
#[derive(Debug)]
pub struct Returning {
    _stop: Sender<()>,
}

impl Returning {
    /// Starts the thread. It uses a few microseconds of each second.
    pub fn start() -> io::Result<Self> {
        let (stop, stopped) = channel::<()>();
        thread::Builder::new().name("mla-memory".to_owned()).spawn(move || {
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                return_expired();
            }
        })?;
        Ok(Self { _stop: stop })
    }
}

/// Returns the memory that has been free for longer than mimalloc keeps it.
#[expect(unsafe_code, reason = "mimalloc is C")]
fn return_expired() {
    // SAFETY: any thread may call it at any time; it frees no memory that is in use.
    unsafe { libmimalloc_sys::mi_collect(false) }
}
