//! The share of the queue that each client has, under `--queue-policy fair`.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::Client;

/// Waiting requests by client. A client that does not wait has no entry.
#[derive(Debug, Default)]
pub(super) struct Shares(Mutex<HashMap<Client, usize>>);

impl Shares {
    /// Adds a request of `client`. Returns the number of turns until it is served, including its own.
    pub(super) fn add(&self, client: Client) -> usize {
        add(&mut self.0.lock(), client)
    }

    /// Adds a request of `client`, unless the client has as many requests in the queue as there are `free` places. So
    /// one client fills at most half of the queue, n clients fill n/(n+1) of it, and the next client finds a place
    /// (dynamic thresholds, Choudhury and Hahne 1998). Returns the same number as `add`.
    pub(super) fn try_add(&self, client: Client, free: usize) -> Option<usize> {
        let mut shares = self.0.lock();
        let fits = shares.get(&client).is_none_or(|share| *share < free);
        fits.then(|| add(&mut shares, client))
    }

    pub(super) fn remove(&self, client: Client) {
        let mut shares = self.0.lock();
        if let Some(share) = shares.get_mut(&client) {
            *share -= 1;
            if *share == 0 {
                shares.remove(&client);
            }
        }
    }
}

fn add(shares: &mut HashMap<Client, usize>, client: Client) -> usize {
    let share = shares.entry(client).or_default();
    *share += 1;
    let round = *share;
    shares.values().map(|share| round.min(*share)).sum()
}
