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
    alloc::{GlobalAlloc, Layout},
    io,
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread,
    time::Duration,
};

use libmimalloc_sys::{mi_malloc, mi_realloc, mi_zalloc};
use mimalloc::MiMalloc;

// mimalloc is fast for small short-lived buffers of many sizes on many threads.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// mimalloc, with its aligned functions only where they are needed. [`MiMalloc`] calls them always: they allocate more
/// than was asked for if the size is over 1 KB and no power of two, and such a block takes longer to free.
struct Allocator;

/// Alignment of every block of at least this size.
const NATURAL_ALIGN: usize = 16;

/// Whether mimalloc aligns a block of `size` bytes to `align` by itself.
const fn is_natural(size: usize, align: usize) -> bool {
    align <= NATURAL_ALIGN && align <= size
}

// SAFETY: each method has the contract of `GlobalAlloc`. Blocks of all functions of mimalloc may be passed to each other.
#[expect(unsafe_code, reason = "the trait is unsafe, and mimalloc is C")]
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_natural(layout.size(), layout.align()) {
            // SAFETY: the size is not zero.
            unsafe { mi_malloc(layout.size()).cast() }
        } else {
            // SAFETY: the contract of the caller.
            unsafe { MiMalloc.alloc(layout) }
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_natural(layout.size(), layout.align()) {
            // SAFETY: the size is not zero.
            unsafe { mi_zalloc(layout.size()).cast() }
        } else {
            // SAFETY: the contract of the caller.
            unsafe { MiMalloc.alloc_zeroed(layout) }
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the contract of the caller.
        unsafe { MiMalloc.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if is_natural(size, layout.align()) {
            // SAFETY: the block is mimalloc's, and the size is not zero.
            unsafe { mi_realloc(block.cast(), size).cast() }
        } else {
            // SAFETY: the contract of the caller.
            unsafe { MiMalloc.realloc(block, layout, size) }
        }
    }
}

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
