//! The `mla-router` command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

// Small short-lived buffers of many sizes on many threads are what it is made for.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    mla_router::cli::main(std::env::args_os())
}
