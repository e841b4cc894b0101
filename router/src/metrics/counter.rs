//! Counters, single or one for each value of a label, and gauges.

use std::{
    marker::PhantomData,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

/// A counter.
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

/// A present value. One task sets it.
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

/// A label with a closed set of values. `labels!` declares one.
pub trait Label: Copy + 'static {
    /// All values, in the order of [`Label::index`].
    const ALL: &'static [Self];

    /// The value in the metrics.
    fn as_str(self) -> &'static str;

    fn index(self) -> usize;
}

/// A counter for each value of a label, as an array.
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

/// Declares an enum that is a label of a metric, with the text of each variant.
macro_rules! labels {
    (
        $(#[$attribute:meta])*
        $visible:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident => $text:literal,)+ }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $visible enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// The value in metrics and logs.
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
