//! The `mla-router` command.

#![forbid(unsafe_code)]

fn main() {}
