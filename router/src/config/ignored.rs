//! Flags of SGLang's router that mean nothing here: accepted, so that a command line that works there
//! works here, and named in a warning.

use clap::Args;

/// The tree is bounded when it grows and needs no sweeps; sessions are forgotten when the table of
/// sessions is full, and not by the clock.
#[derive(Clone, Debug, Default, PartialEq, Args)]
pub struct Ignored {
    #[arg(long, alias = "eviction-interval-secs", hide = true)]
    eviction_interval: Option<String>,
    #[arg(long, alias = "max-idle-time", hide = true)]
    max_idle_secs: Option<String>,
    #[arg(long, hide = true)]
    assignment_mode: Option<String>,
}

impl Ignored {
    /// Those that were given, as flags.
    pub fn given(&self) -> impl Iterator<Item = &'static str> {
        let flags = [
            ("--eviction-interval", &self.eviction_interval),
            ("--max-idle-secs", &self.max_idle_secs),
            ("--assignment-mode", &self.assignment_mode),
        ];
        flags.into_iter().filter(|(_, value)| value.is_some()).map(|(flag, _)| flag)
    }
}
