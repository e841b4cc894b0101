//! Prometheus' text format.

use std::fmt::{Display, Write as _};

use super::{Counter, Counters, Family, Label};

/// The text under construction. A sample belongs to the family that was begun last.
#[derive(Default)]
pub struct Page {
    text: String,
    families: Vec<&'static Family>,
}

impl Page {
    /// The samples that follow belong to `family`.
    pub fn family(&mut self, family: &'static Family) {
        let Family { name, kind, help, .. } = family;
        self.families.push(family);
        self.write(format_args!("# HELP {name} {help}\n# TYPE {name} {}\n", kind.as_str()));
    }

    /// A family of one series without labels.
    pub fn value(&mut self, family: &'static Family, value: impl Display) {
        self.family(family);
        self.sample(&[], value);
    }

    /// The same of a counter.
    pub fn counter(&mut self, family: &'static Family, counter: &Counter) {
        self.value(family, counter.get());
    }

    /// A family of one label, with a series for each of its values.
    pub fn counters<L: Label>(&mut self, family: &'static Family, counters: &Counters<L>) {
        self.family(family);
        for (value, count) in counters.iter() {
            self.sample(&[value.as_str()], count);
        }
    }

    /// `labels`: the values, in the order of the family's names.
    pub fn sample(&mut self, labels: &[&str], value: impl Display) {
        let family = self.families.last().expect("contract: a sample comes after its family");
        assert_eq!(labels.len(), family.labels.len(), "labels of {}", family.name);
        self.series(family.name, "", family.labels, labels, value);
    }

    /// A line of a histogram, such as `_bucket`.
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
        // No value needs escaping: they are names of ours, and URLs, which have no quotes.
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

    /// The text, and the families in it.
    pub fn finish(self) -> (String, Vec<&'static Family>) {
        (self.text, self.families)
    }
}
