//! The connections of one worker: idle ones, or those that its requests share.

use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use http::HeaderValue;
use parking_lot::Mutex;
use tokio::time::sleep;

use super::{Connection, Dialer, UpstreamError};
use crate::{cores::PerCore, upstream::address::WorkerAddress};

/// Pause before the next attempt when the limit on open files is reached.
const FILES_PAUSE: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub struct Pool {
    address: WorkerAddress,
    host_header: HeaderValue,
    authorization: Option<HeaderValue>,
    dialer: Arc<Dialer>,
    idle_timeout: Duration,
    /// Idle connections by the thread that has opened them, because its runtime polls them. Last in, first out, so
    /// that the others time out. Locked for a push or a pop, never across I/O.
    idle: PerCore<Mutex<Vec<Idle>>>,
    /// The connections of HTTP/2: one, or more if the worker limits the streams of each.
    shared: Mutex<Vec<Connection>>,
    /// Locked while one task opens a shared connection.
    opening: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Idle {
    connection: Connection,
    since: Instant,
}

impl Pool {
    /// A pool without connections. `authorization` is the `Authorization` field of requests to this worker.
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

    pub fn authorization(&self) -> Option<&HeaderValue> {
        self.authorization.as_ref()
    }

    /// The `Host` field of requests to this worker.
    pub fn host_header(&self) -> &HeaderValue {
        &self.host_header
    }

    /// Takes an open connection, if there is one.
    pub fn checkout(&self, now: Instant) -> Option<Connection> {
        if self.dialer.shares() {
            return self.shared.lock().iter().find_map(Connection::share);
        }
        loop {
            let Idle { mut connection, since } = self.idle.own().lock().pop()?;
            if now.saturating_duration_since(since) < self.idle_timeout && connection.is_reusable()
            {
                return Some(connection);
            }
        }
    }

    /// Returns a connection for a request without one from [`Pool::checkout`]. `broken` is the opening time of a
    /// connection that broke under the request. A shared connection that was opened later is used as it is.
    pub async fn connect(&self, broken: Option<Instant>) -> Result<Connection, UpstreamError> {
        if !self.dialer.shares() {
            return self.open().await;
        }
        let _opening = self.opening.lock().await;
        let newer = |shared: &Connection| broken.is_none_or(|broken| shared.opened_at() > broken);
        let found = self.shared.lock().iter().filter(|old| newer(old)).find_map(Connection::share);
        if let Some(share) = found {
            return Ok(share);
        }
        let connection = self.open().await?;
        let mut shared = self.shared.lock();
        shared.retain(|old| old.is_open() && newer(old));
        shared.extend(connection.share());
        drop(shared);
        Ok(connection)
    }

    /// Opens a new connection.
    pub async fn open(&self) -> Result<Connection, UpstreamError> {
        let until = Instant::now() + self.dialer.timeout();
        loop {
            // Boxed because it is large and rare: it would be part of the future of every request.
            let outcome = Box::pin(self.dialer.connect(&self.address)).await;
            match outcome {
                // Frees the idle connections of this worker; those of other workers end soon as well.
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

    /// Returns a connection after its response has ended. A connection that cannot be reused is closed. Whether the
    /// worker has closed it is seen at the next checkout or sweep.
    pub fn checkin(&self, connection: Connection, now: Instant) {
        if connection.is_idle() {
            self.idle.own().lock().push(Idle { connection, since: now });
        }
    }

    /// Closes connections that were idle for too long. `checkout` does not reach the oldest ones.
    pub fn sweep(&self) {
        for idle in self.idle.iter() {
            idle.lock().retain_mut(|idle| {
                idle.since.elapsed() < self.idle_timeout && idle.connection.is_reusable()
            });
        }
        let mut keep_one = true;
        let is_needed = |shared: &Connection| shared.is_used() || mem::take(&mut keep_one);
        self.shared.lock().retain(is_needed);
    }

    pub fn clear(&self) {
        self.clear_idle();
        self.shared.lock().clear();
    }
}
