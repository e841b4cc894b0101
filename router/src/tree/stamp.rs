//! The tree's time.

/// A reading of the tree's clock, which ticks with each insert. Readings are compared as the shorter
/// way round the circle of 2^32: right as long as they lie less than two billion inserts apart, and
/// beyond that a part of the tree that has not been used for days merely looks fresh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp(pub(super) u32);

impl Stamp {
    #[cfg(test)]
    pub fn at(ticks: u32) -> Self {
        Self(ticks)
    }

    pub fn is_before(self, other: Self) -> bool {
        self.0.wrapping_sub(other.0).cast_signed() < 0
    }

    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    pub(super) fn earlier(self, other: Self) -> Self {
        if other.is_before(self) { other } else { self }
    }

    /// Ticks from `earlier` to this reading.
    pub fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }
}

#[cfg(test)]
mod tests {
    use super::Stamp;

    #[test]
    fn order_survives_the_wrap() {
        let (before, after) = (Stamp(u32::MAX - 1), Stamp(3));
        assert!(before.is_before(after) && !after.is_before(before) && !after.is_before(after));
        assert_eq!(after.since(before), 5);
    }
}
