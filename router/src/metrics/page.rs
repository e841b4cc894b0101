//! The metrics and their page in Prometheus' text format.

use std::fmt::{Display, Write as _};

use super::{Counter, Counters, Label};

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A metric: its name, type, help text and label names. It is a constant beside the code that counts it; the page of
/// `/metrics` and the table in `docs/metrics.md` are made from these constants.
#[derive(Debug, PartialEq, Eq)]
pub struct Family {
    pub name: &'static str,
    pub kind: Kind,
    pub help: &'static str,
    /// Names of the labels, in the order in which a sample gives their values.
    pub labels: &'static [&'static str],
}

impl Family {
    pub const fn counter(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
    ) -> Self {
        Self { name, kind: Kind::Counter, help, labels }
    }

    pub const fn gauge(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
    ) -> Self {
        Self { name, kind: Kind::Gauge, help, labels }
    }

    pub const fn histogram(name: &'static str, help: &'static str) -> Self {
        Self { name, kind: Kind::Histogram, help, labels: &[] }
    }
}

/// The page under construction. A sample belongs to the family that was added last.
#[derive(Default)]
pub struct Page {
    text: String,
    families: Vec<&'static Family>,
}

impl Page {
    /// Adds the header of `family`. The samples that follow belong to it.
    pub fn family(&mut self, family: &'static Family) {
        let Family { name, kind, help, .. } = family;
        self.families.push(family);
        self.write(format_args!("# HELP {name} {help}\n# TYPE {name} {}\n", kind.as_str()));
    }

    /// Adds a family of one series without labels.
    pub fn value(&mut self, family: &'static Family, value: impl Display) {
        self.family(family);
        self.sample(&[], value);
    }

    /// Adds a counter without labels.
    pub fn counter(&mut self, family: &'static Family, counter: &Counter) {
        self.value(family, counter.get());
    }

    /// Adds a family of one label, with a series for each of its values.
    pub fn counters<L: Label>(&mut self, family: &'static Family, counters: &Counters<L>) {
        self.family(family);
        for (value, count) in counters.iter() {
            self.sample(&[value.as_str()], count);
        }
    }

    /// Adds a sample of the last family. `labels` are the label values, in the order of the family's label names.
    pub fn sample(&mut self, labels: &[&str], value: impl Display) {
        let family = self.families.last().expect("contract: a sample comes after its family");
        assert_eq!(labels.len(), family.labels.len(), "labels of {}", family.name);
        self.series(family.name, "", family.labels, labels, value);
    }

    /// Adds one line of a histogram. `part` is the suffix of the name, such as `_bucket`.
    pub fn part(&mut self, part: &str, le: Option<&str>, value: impl Display) {
        let family = self.families.last().expect("contract: a sample comes after its family");
        let (names, values): (&[&str], &[&str]) = match &le {
            Some(le) => (&["le"], &[*le]),
            None => (&[], &[]),
        };
        self.series(family.name, part, names, values, value);
    }

    fn series(
        &mut self,
        name: &str,
        part: &str,
        labels: &[&str],
        values: &[&str],
        value: impl Display,
    ) {
        // Label values need no escapes: they are constants and URLs, which have no quotes.
        let labels: Vec<String> =
            labels.iter().zip(values).map(|(name, value)| format!("{name}=\"{value}\"")).collect();
        if labels.is_empty() {
            self.write(format_args!("{name}{part} {value}\n"));
        } else {
            self.write(format_args!("{name}{part}{{{}}} {value}\n", labels.join(",")));
        }
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        self.text.write_fmt(text).expect("contract: a String takes any text");
    }

    /// Returns the text and the families in it.
    pub fn finish(self) -> (String, Vec<&'static Family>) {
        (self.text, self.families)
    }
}
