//! Prometheus' text format.

use std::fmt::{Arguments, Write as _};

/// The text under construction. A sample belongs to the family that was begun last.
#[derive(Default)]
pub(super) struct Page {
    text: String,
    family: &'static str,
}

impl Page {
    /// Begins a family. `name` goes without the prefix that all of ours share.
    pub(super) fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        self.family = name;
        self.line(format_args!("# HELP mla_router_{name} {help}"));
        self.line(format_args!("# TYPE mla_router_{name} {kind}"));
    }

    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: u64) {
        self.series("", labels, format_args!("{value}"));
    }

    /// A sample of a part of the family, such as `_bucket`.
    pub(super) fn series(&mut self, part: &str, labels: &[(&str, &str)], value: Arguments<'_>) {
        let family = self.family;
        if labels.is_empty() {
            return self.line(format_args!("mla_router_{family}{part} {value}"));
        }
        // No value needs escaping: they are names of ours, and URLs, which have no quotes.
        let labels: Vec<String> =
            labels.iter().map(|(name, value)| format!("{name}=\"{value}\"")).collect();
        self.line(format_args!("mla_router_{family}{part}{{{}}} {value}", labels.join(",")));
    }

    fn line(&mut self, line: Arguments<'_>) {
        writeln!(self.text, "{line}").expect("contract: a String takes any text");
    }

    pub(super) fn finish(self) -> String {
        self.text
    }
}
