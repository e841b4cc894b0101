//! The `mla-router` command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    // Without it memory is returned late, which is no reason not to serve.
    #[cfg(feature = "mimalloc")]
    let _returning = mla_allocator::Returning::start();
    mla_router::cli::main(std::env::args_os())
}
