//! The locks and atomics of the parts that are model-checked: `router/tests/tree_shuttle.rs` compiles
//! them once more, with locks that try out the orders in which threads can run.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub(crate) use parking_lot::{Mutex, RwLock, RwLockReadGuard};
