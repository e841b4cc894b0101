//! The `mla-router` command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    // An error means that freed memory is returned late. The router serves anyway.
    #[cfg(feature = "mimalloc")]
    let _returning = mla_allocator::Returning::start();
    mla_router::cli::main(std::env::args_os())
}
