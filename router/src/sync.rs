//! The locks and atomics of the modules under model checking. `router/tests/tree_shuttle.rs` compiles these modules
//! again with locks that explore the interleavings of threads.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub(crate) use parking_lot::{Mutex, RwLock, RwLockReadGuard};
