//! How much of the queue each client has, under `--queue-policy fair`.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::Client;

/// Waiting requests by client. A client that does not wait has no entry.
#[derive(Debug, Default)]
pub(super) struct Shares(Mutex<HashMap<Client, usize>>);

impl Shares {
    /// Adds a request of `client`. Returns the number of requests that have their turn up to and including this one.
    pub(super) fn add(&self, client: Client) -> usize {
        add(&mut self.0.lock(), client)
    }

    /// Adds a request of `client` unless that has as many in the queue as there are `free` places: so one client
    /// fills half of the queue at most, n clients n/(n+1) of it, and a place is left for the next client (dynamic
    /// thresholds, Choudhury and Hahne 1998). Returns as `add`.
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
