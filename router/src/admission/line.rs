//! A line of waiting requests, in the order of `--queue-policy`.
//!
//! Clients take turns in rounds. The n-th waiting request of a client belongs to round n; rounds are counted from the
//! round that is served when the request arrives (start-time fair queueing with equal costs, Goyal, Vin and Cheng
//! 1996). The requests of one client are served in the order of their arrival. `--queue-policy fcfs` treats all
//! requests as those of one client.

use std::collections::{BTreeMap, HashMap};

use tokio::sync::oneshot;

use super::Client;

/// A position in a line. A request that has left its position may return to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    /// The round; 0 for broken streams, which go before all requests without an answer.
    round: u64,
    number: u64,
    client: Option<Client>,
}

impl Position {
    pub(super) fn client(self) -> Option<Client> {
        self.client
    }
}

/// A line. The request at its head receives a `C`.
#[derive(Debug)]
pub(super) struct Line<C> {
    /// The waiting requests. A request whose turn it is has no sender.
    waiting: BTreeMap<Position, Option<oneshot::Sender<C>>>,
    /// The clients of the waiting requests.
    clients: HashMap<Option<Client>, Turns>,
    /// The round of the latest request that left the head of the line.
    round: u64,
    /// The highest round of any position.
    last_round: u64,
    /// Number of positions so far.
    next: u64,
}

#[derive(Debug, Default)]
struct Turns {
    waiting: usize,
    last_round: u64,
}

impl<C> Default for Line<C> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), clients: HashMap::new(), round: 1, last_round: 1, next: 0 }
    }
}

impl<C> Line<C> {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns a position after the earlier requests of the client.
    pub(super) fn end(&mut self, client: Option<Client>) -> Position {
        let earlier = self.clients.get(&client).map_or(0, |turns| turns.last_round);
        let round = self.round.max(earlier + 1);
        self.last_round = self.last_round.max(round);
        self.position(round, client)
    }

    /// Returns a position before all requests except earlier broken streams.
    pub(super) fn front(&mut self, client: Option<Client>) -> Position {
        self.position(0, client)
    }

    pub(super) fn insert(&mut self, at: Position, call: Option<oneshot::Sender<C>>) {
        let turns = self.clients.entry(at.client).or_default();
        turns.last_round = turns.last_round.max(at.round);
        if self.waiting.insert(at, call).is_none() {
            turns.waiting += 1;
        }
    }

    pub(super) fn is_first(&self, position: Position) -> bool {
        self.waiting.first_key_value().is_some_and(|(first, _)| *first == position)
    }

    pub(super) fn remove(&mut self, position: Position) {
        let was_first = self.is_first(position);
        if self.waiting.remove(&position).is_some() {
            self.leave(position, was_first);
        }
    }

    /// Takes the first request out of the line.
    pub(super) fn pop(&mut self) -> Option<oneshot::Sender<C>> {
        let (position, call) = self.waiting.pop_first()?;
        self.leave(position, true);
        call
    }

    /// Calls the first request that was not called yet.
    pub(super) fn call(&mut self, turn: impl Fn() -> C) {
        let mut calls = self.waiting.values_mut().filter_map(Option::take);
        // A request that is about to leave has dropped its receiver: the next one is called.
        let _called = calls.any(|call| call.send(turn()).is_ok());
    }

    fn position(&mut self, round: u64, client: Option<Client>) -> Position {
        self.next += 1;
        Position { round, number: self.next, client }
    }

    fn leave(&mut self, position: Position, was_first: bool) {
        if was_first {
            self.round = self.round.max(position.round);
        }
        if self.waiting.is_empty() {
            // A request may return to an earlier position, which is then before all new ones.
            self.round = self.last_round;
        }
        if let Some(turns) = self.clients.get_mut(&position.client) {
            turns.waiting -= 1;
            if turns.waiting == 0 {
                self.clients.remove(&position.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clients<const N: usize>() -> [Option<Client>; N] {
        std::array::from_fn(|hash| Some(Client::from(hash as u64)))
    }

    /// Requests join in the order of `clients`. Returns the order of their turns.
    fn served(line: &mut Line<usize>, clients: &[Option<Client>]) -> Vec<usize> {
        let mut calls = Vec::new();
        for &client in clients {
            let (call, called) = oneshot::channel();
            let position = line.end(client);
            line.insert(position, Some(call));
            calls.push(called);
        }
        let turns = (0..clients.len()).map(|turn| {
            line.pop().expect("as many as have joined").send(turn).expect("it listens");
        });
        assert_eq!(turns.count(), clients.len());
        let mut order = vec![0; clients.len()];
        for (request, mut call) in calls.into_iter().enumerate() {
            order[call.try_recv().expect("a turn")] = request;
        }
        order
    }

    #[test]
    fn clients_take_turns_and_the_requests_of_each_keep_their_order() {
        let [a, b, c] = clients();
        let mut line = Line::default();
        for _ in 0..2 {
            assert_eq!(served(&mut line, &[a, a, a, a, b, b, c]), [0, 4, 6, 1, 5, 2, 3]);
            assert!(line.is_empty() && line.clients.is_empty());
        }
    }

    #[test]
    fn without_clients_the_order_is_that_of_arrival() {
        assert_eq!(served(&mut Line::default(), &[None; 5]), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_client_that_comes_later_has_its_turn_in_the_present_round() {
        let [flood, late] = clients();
        let mut line: Line<()> = Line::default();
        let join = |line: &mut Line<()>, client| {
            let position = line.end(client);
            line.insert(position, None);
            position
        };
        let first: Vec<_> = (0..100).map(|_| join(&mut line, flood)).collect();
        for position in &first[..50] {
            assert!(line.is_first(*position));
            line.remove(*position);
        }
        // A request that leaves from the end of the line does not change the round.
        first[90..].iter().for_each(|position| line.remove(*position));
        let late = [join(&mut line, late), join(&mut line, late)];
        assert!(late[0] < first[50] && first[50] < late[1] && late[1] < first[51]);
    }

    #[test]
    fn a_request_returns_to_its_place_after_the_line_was_empty() {
        let mut line: Line<()> = Line::default();
        let positions: Vec<_> = (0..3)
            .map(|_| {
                let position = line.end(None);
                line.insert(position, None);
                position
            })
            .collect();
        for position in &positions {
            line.remove(*position);
        }
        let new = line.end(None);
        line.insert(new, None);
        line.insert(positions[2], None);
        assert!(line.is_first(positions[2]));
        let broken_stream = line.front(None);
        line.insert(broken_stream, None);
        assert!(line.is_first(broken_stream));
    }
}
