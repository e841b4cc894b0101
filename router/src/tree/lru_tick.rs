//! The LRU clock of the tree.

/// A tick of the LRU clock, which advances with each insertion. Ticks wrap at 2^32. A comparison is correct if the
/// ticks are less than two billion insertions apart. If they are further apart, a part of the tree that was not used
/// for days looks recent, which does no harm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LruTick(pub(super) u32);

impl LruTick {
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

    /// Number of ticks since `earlier`.
    pub fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }
}

#[cfg(test)]
mod tests {
    use super::LruTick;

    #[test]
    fn order_survives_the_wrap() {
        let (before, after) = (LruTick(u32::MAX - 1), LruTick(3));
        assert!(before.is_before(after) && !after.is_before(before) && !after.is_before(after));
        assert_eq!(after.since(before), 5);
    }
}
