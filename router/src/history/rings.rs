//! Ring buffers of samples: one a second for five minutes, one in ten seconds for an hour.

use std::collections::VecDeque;

use super::figure::Sample;

/// Number of fine samples: five minutes.
const FINE: usize = 300;

/// Every tenth sample is kept for an hour.
pub(super) const COARSE_EVERY: u64 = 10;

/// Number of coarse samples: an hour.
const COARSE: usize = 360;

/// The samples of one series, oldest first.
#[derive(Debug, Default)]
pub(super) struct Rings {
    fine: VecDeque<Sample>,
    coarse: VecDeque<Sample>,
}

impl Rings {
    /// Adds a sample. `tick` is its number since the start of the router.
    pub(super) fn push(&mut self, tick: u64, sample: Sample) {
        push(&mut self.fine, FINE, sample);
        if tick.is_multiple_of(COARSE_EVERY) {
            push(&mut self.coarse, COARSE, sample);
        }
    }

    /// The last samples, at most `count`.
    pub(super) fn fine(&self, count: usize) -> Vec<Sample> {
        self.fine.iter().skip(self.fine.len().saturating_sub(count)).copied().collect()
    }

    pub(super) fn coarse(&self) -> Vec<Sample> {
        self.coarse.iter().copied().collect()
    }
}

fn push(ring: &mut VecDeque<Sample>, length: usize, sample: Sample) {
    if ring.len() == length {
        ring.pop_front();
    }
    ring.push_back(sample);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Figure;

    #[test]
    fn an_hour_is_kept_and_no_more() {
        let mut rings = Rings::default();
        for tick in 1..=10_000u16 {
            let mut sample = Sample::default();
            sample.set(Figure::Running, Some(f64::from(tick)));
            rings.push(tick.into(), sample);
        }
        let ticks = |samples: Vec<Sample>| -> Vec<_> {
            samples.iter().filter_map(|sample| sample.get(Figure::Running)).collect()
        };
        let (fine, coarse) = (ticks(rings.fine(usize::MAX)), ticks(rings.coarse()));
        assert_eq!((fine.len(), fine[0], fine[299]), (300, 9_701.0, 10_000.0));
        assert_eq!((coarse.len(), coarse[0], coarse[359]), (360, 6_410.0, 10_000.0));
        assert_eq!(ticks(rings.fine(2)), [9_999.0, 10_000.0]);
    }
}
