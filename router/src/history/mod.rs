//! The history of the last hour, for the dashboard.
//!
//! It takes one sample a second from the counters. Memory is bounded: 38 KB for each worker and for all workers
//! together. The samples of a worker are dropped with the worker.

mod figure;
mod rings;
mod window;

use std::collections::BTreeMap;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

pub use figure::{Figure, Sample};
pub use window::Counts;

use crate::{metrics::Label, names::WorkerId};
use rings::{COARSE_EVERY, Rings};
use window::Window;

/// The figures of one worker at one time.
#[derive(Debug, Default)]
pub struct WorkerFigures {
    pub counts: Counts,
    pub running: Option<f64>,
    pub waiting: Option<f64>,
    pub kv_usage: Option<f64>,
}

/// The figures of the router at one time, without the figures of its workers.
#[derive(Debug, Default)]
pub struct RouterFigures {
    pub counts: Counts,
    pub in_flight: f64,
    pub waiting: f64,
}

/// The history.
#[derive(Debug, Default)]
pub struct History(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Number of samples so far.
    tick: u64,
    /// Counts of all workers together, including removed ones.
    counted: Counts,
    total: Series,
    workers: BTreeMap<u32, Series>,
}

#[derive(Debug, Default)]
struct Series {
    window: Window,
    rings: Rings,
}

/// The samples that a reader has not received.
#[derive(Debug, Serialize)]
pub struct NewSamples {
    /// Number of the last sample.
    pub tick: u64,
    pub coarse_every: u64,
    /// Names of the figures in a sample.
    figures: Vec<&'static str>,
    pub total: Samples,
    /// Samples by worker id. All lists end with the same sample; the list of a newer worker is shorter.
    pub workers: BTreeMap<u32, Samples>,
}

#[derive(Debug, Serialize)]
pub struct Samples {
    pub fine: Vec<Sample>,
    /// Empty unless the reader has received nothing so far.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub coarse: Vec<Sample>,
}

impl History {
    /// Records the sample of one second.
    pub fn record(
        &self,
        at: Instant,
        router: RouterFigures,
        workers: impl IntoIterator<Item = (WorkerId, WorkerFigures)>,
    ) {
        let State { tick, counted, total, workers: known } = &mut *self.0.lock();
        *tick += 1;
        let (mut waiting, mut kv_usages) = (router.waiting, Vec::new());
        let mut gone = std::mem::take(known);
        for (id, figures) in workers {
            let mut series = gone.remove(&id.0).unwrap_or_default();
            if let Some(before) = series.window.latest() {
                counted.add(before.clone(), figures.counts.clone());
            }
            series.window.push(at, figures.counts);
            let mut sample = series.window.sample();
            sample.set(Figure::Running, figures.running);
            sample.set(Figure::Waiting, figures.waiting);
            sample.set(Figure::KvUsage, figures.kv_usage);
            series.rings.push(*tick, sample);
            waiting += figures.waiting.unwrap_or(0.0);
            kv_usages.extend(figures.kv_usage);
            known.insert(id.0, series);
        }
        let Counts { requests, errors, first_token, .. } = router.counts;
        total.window.push(at, Counts { requests, errors, first_token, ..counted.clone() });
        let mut sample = total.window.sample();
        sample.set(Figure::Running, Some(router.in_flight));
        sample.set(Figure::Waiting, Some(waiting));
        let mean = kv_usages.iter().sum::<f64>() / kv_usages.len() as f64;
        sample.set(Figure::KvUsage, (!kv_usages.is_empty()).then_some(mean));
        total.rings.push(*tick, sample);
    }

    /// Returns the samples after the sample `seen`, or all samples.
    pub fn since(&self, seen: Option<u64>) -> NewSamples {
        let state = self.0.lock();
        let missed = seen.map_or(usize::MAX, |seen| state.tick.saturating_sub(seen) as usize);
        let samples = |series: &Series| Samples {
            fine: series.rings.fine(missed),
            coarse: if seen.is_none() { series.rings.coarse() } else { Vec::new() },
        };
        NewSamples {
            tick: state.tick,
            coarse_every: COARSE_EVERY,
            figures: Figure::ALL.iter().map(|figure| figure.as_str()).collect(),
            total: samples(&state.total),
            workers: state.workers.iter().map(|(id, series)| (*id, samples(series))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn figures(output_tokens: f64, kv_usage: f64) -> WorkerFigures {
        let counts = Counts { output_tokens: Some(output_tokens), ..Counts::default() };
        WorkerFigures { counts, waiting: Some(1.0), kv_usage: Some(kv_usage), running: None }
    }

    fn last(samples: &Samples, figure: Figure) -> Option<f32> {
        samples.fine.last().and_then(|sample| sample.get(figure))
    }

    #[test]
    fn all_workers_together_are_the_sum_of_each() {
        let (history, start) = (History::default(), Instant::now());
        for second in 0..20u8 {
            let at = start + Duration::from_secs(second.into());
            let time = f64::from(second);
            let mut workers = vec![(WorkerId(0), figures(time * 10.0, 0.2))];
            if second >= 5 {
                workers.push((WorkerId(7), figures(1000.0 + time * 30.0, 0.4)));
            }
            let router = RouterFigures { in_flight: 3.0, waiting: 1.0, ..RouterFigures::default() };
            history.record(at, router, workers);
        }
        let all = history.since(None);
        assert_eq!((all.tick, all.total.fine.len(), all.total.coarse.len()), (20, 20, 2));
        assert_eq!(all.workers[&7].fine.len(), 15);
        assert_eq!(last(&all.workers[&0], Figure::OutputTokens), Some(10.0));
        assert_eq!(last(&all.workers[&7], Figure::OutputTokens), Some(30.0));
        assert_eq!(last(&all.total, Figure::OutputTokens), Some(40.0));
        assert_eq!(last(&all.total, Figure::Waiting), Some(3.0));
        assert_eq!(last(&all.total, Figure::Running), Some(3.0));
        assert_eq!(last(&all.total, Figure::KvUsage), Some(0.3));
        assert_eq!(last(&all.total, Figure::Pause), None);
        let news = history.since(Some(18));
        assert_eq!((news.total.fine.len(), news.total.coarse.len()), (2, 0));
        assert_eq!(history.since(Some(20)).total.fine.len(), 0);
        // The samples of a removed worker are dropped.
        history.record(start + Duration::from_secs(20), RouterFigures::default(), []);
        assert!(history.since(None).workers.is_empty());
    }
}
