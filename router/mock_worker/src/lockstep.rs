//! Engines whose steps begin and end together, like those of ranks that share experts.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Barrier;

/// A group of engines. One that ends stops the others, as with real ranks.
pub struct Lockstep {
    pub engines: usize,
    turn: Mutex<Turn>,
    arrived: Barrier,
    agreed: Barrier,
}

#[derive(Default)]
struct Turn {
    slowest: Option<Duration>,
    /// The time of the present step. It is written when all engines have arrived, so all have read the last one.
    agreed: Option<Duration>,
}

impl Lockstep {
    pub fn new(engines: usize) -> Self {
        let [arrived, agreed] = [Barrier::new(engines), Barrier::new(engines)];
        Self { engines, turn: Mutex::default(), arrived, agreed }
    }

    /// Waits for all engines. Returns the time of the slowest one's step, or `None` if none has work. `own`: the same
    /// of this engine.
    pub async fn agree(&self, own: Option<Duration>) -> Option<Duration> {
        {
            let mut turn = self.turn.lock();
            turn.slowest = turn.slowest.max(own);
        }
        if self.arrived.wait().await.is_leader() {
            let mut turn = self.turn.lock();
            turn.agreed = turn.slowest.take();
        }
        self.agreed.wait().await;
        self.turn.lock().agreed
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::task::JoinSet;

    use super::*;

    #[tokio::test]
    async fn every_step_takes_the_time_of_the_slowest_engine() {
        let group = Arc::new(Lockstep::new(3));
        let mut engines = JoinSet::new();
        for number in 0..3 {
            let group = Arc::clone(&group);
            engines.spawn(async move {
                let mut agreed = Vec::new();
                for turn in 0..100 {
                    // Every fourth step nobody has work, in each other one two engines have.
                    let works = turn % 4 != 3 && turn % 3 != number;
                    let own = works.then(|| Duration::from_millis(10 * turn + number));
                    agreed.push(group.agree(own).await);
                }
                agreed
            });
        }
        let expected: Vec<_> = (0..100)
            .map(|turn| {
                let slowest = if turn % 3 == 2 { 1 } else { 2 };
                (turn % 4 != 3).then(|| Duration::from_millis(10 * turn + slowest))
            })
            .collect();
        while let Some(agreed) = engines.join_next().await {
            assert_eq!(agreed.expect("no panic"), expected);
        }
    }
}
