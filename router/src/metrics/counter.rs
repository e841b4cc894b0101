//! Counters: one, or one for each value of a label.

use std::{
    marker::PhantomData,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

/// Counts up.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn increment(&self) {
        self.add(1);
    }

    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// What there is now, noted by the only one who knows.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A label whose values are known when the router is compiled. `labels!` makes one.
pub trait Label: Copy + 'static {
    /// In the order of [`Label::index`].
    const ALL: &'static [Self];

    /// As the metrics show it.
    fn as_str(self) -> &'static str;

    fn index(self) -> usize;
}

/// A counter for each value of a label: an array, so that to count is to index.
#[derive(Debug)]
pub struct Counters<L> {
    counts: Box<[Counter]>,
    label: PhantomData<L>,
}

impl<L: Label> Default for Counters<L> {
    fn default() -> Self {
        Self { counts: L::ALL.iter().map(|_| Counter::default()).collect(), label: PhantomData }
    }
}

impl<L: Label> Counters<L> {
    pub fn increment(&self, value: L) {
        self.add(value, 1);
    }

    pub fn add(&self, value: L, count: u64) {
        self.counts[value.index()].add(count);
    }

    pub fn get(&self, value: L) -> u64 {
        self.counts[value.index()].get()
    }

    pub fn total(&self) -> u64 {
        self.counts.iter().map(Counter::get).sum()
    }

    pub fn iter(&self) -> impl Iterator<Item = (L, u64)> {
        L::ALL.iter().zip(&self.counts).map(|(value, count)| (*value, count.get()))
    }
}

/// Declares an enum that is a metric's label, each variant with its text.
macro_rules! labels {
    (
        $(#[$attribute:meta])*
        $visible:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident => $text:literal,)+ }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $visible enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// As metrics and logs show it.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }

        impl $crate::metrics::Label for $name {
            const ALL: &'static [Self] = &[$(Self::$variant),+];

            fn as_str(self) -> &'static str {
                $name::as_str(self)
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}
pub(crate) use labels;
