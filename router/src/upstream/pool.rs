//! The connections of one worker that no request has now, or that all of them share.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use http::HeaderValue;
use parking_lot::Mutex;
use tokio::time::sleep;

use super::{Connection, Dialer, UpstreamError};
use crate::{cores, upstream::address::WorkerAddress};

/// Until the next try, when there are too many open files.
const FILES_PAUSE: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub struct Pool {
    address: WorkerAddress,
    host_header: HeaderValue,
    authorization: Option<HeaderValue>,
    dialer: Arc<Dialer>,
    idle_timeout: Duration,
    /// For each thread those that it has opened, which its runtime watches. Last used first: the
    /// longer-idle ones get to time out. Held for a push or a pop, never across IO.
    idle: [Mutex<Vec<Idle>>; cores::MOST + 1],
    /// The one that all requests share, if the protocol can do that.
    shared: Mutex<Option<Connection>>,
    /// Held while it is opened, by one for all.
    opening: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Idle {
    connection: Connection,
    since: Instant,
}

impl Pool {
    /// `authorization` is what requests to this worker say of who sends them.
    pub fn new(
        address: WorkerAddress,
        dialer: Arc<Dialer>,
        idle_timeout: Duration,
        authorization: Option<HeaderValue>,
    ) -> Self {
        let host_header = address.url().authority();
        let (idle, shared, opening) = Default::default();
        Self { address, host_header, authorization, dialer, idle_timeout, idle, shared, opening }
    }

    pub fn authorization(&self) -> Option<HeaderValue> {
        self.authorization.clone()
    }

    /// What goes into the `Host` header of a request to this worker.
    pub fn host_header(&self) -> HeaderValue {
        self.host_header.clone()
    }

    fn idle(&self) -> &Mutex<Vec<Idle>> {
        &self.idle[cores::current()]
    }

    /// A live connection that is already open, or none.
    pub fn checkout(&self) -> Option<Connection> {
        if self.dialer.shares() {
            return self.shared.lock().as_ref()?.share();
        }
        loop {
            let Idle { mut connection, since } = self.idle().lock().pop()?;
            if since.elapsed() < self.idle_timeout && connection.is_reusable() {
                return Some(connection);
            }
        }
    }

    /// A connection for a request that has got none from [`Pool::checkout`], or one that was opened
    /// at `broken` and broke. A shared one that somebody else has opened meanwhile will do.
    pub async fn connect(&self, broken: Option<Instant>) -> Result<Connection, UpstreamError> {
        if !self.dialer.shares() {
            return self.open().await;
        }
        let _opening = self.opening.lock().await;
        let newer = |shared: &&Connection| broken.is_none_or(|broken| shared.opened_at() > broken);
        if let Some(share) = self.shared.lock().as_ref().filter(newer).and_then(Connection::share) {
            return Ok(share);
        }
        let connection = self.open().await?;
        let share = connection.share();
        *self.shared.lock() = share;
        Ok(connection)
    }

    /// A new connection for whoever wants one of his own.
    pub async fn open(&self) -> Result<Connection, UpstreamError> {
        let until = Instant::now() + self.dialer.timeout();
        loop {
            // Boxed: it is large, rare, and would be part of the future of every request.
            let outcome = Box::pin(self.dialer.connect(&self.address)).await;
            match outcome {
                // Idle connections to other workers end soon, too.
                Err(error) if error.is_out_of_files() && Instant::now() < until => {
                    self.clear_idle();
                    sleep(FILES_PAUSE).await;
                }
                outcome => return outcome,
            }
        }
    }

    fn clear_idle(&self) {
        self.idle.iter().for_each(|idle| idle.lock().clear());
    }

    /// Takes back a connection whose response has ended. One that cannot be used again is closed.
    pub fn checkin(&self, mut connection: Connection) {
        if connection.is_reusable() {
            self.idle().lock().push(Idle { connection, since: Instant::now() });
        }
    }

    /// Closes what has been idle for too long. Checkout does not reach the oldest ones.
    pub fn sweep(&self) {
        for idle in &self.idle {
            idle.lock().retain_mut(|idle| {
                idle.since.elapsed() < self.idle_timeout && idle.connection.is_reusable()
            });
        }
    }

    pub fn clear(&self) {
        self.clear_idle();
        self.shared.lock().take();
    }
}
