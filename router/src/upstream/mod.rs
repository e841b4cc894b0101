//! Connections to one worker, and one request over one of them.
//!
//! hyper hands out a connection as two halves: a sender for requests and a future that does the IO.
//! Usually the future is spawned. Here both stay together and whoever waits for the response drives
//! the IO: one task per request instead of two, no hand-over between threads, and an abort that needs
//! no code, because dropping the request drops the socket.

pub mod call;

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, Response};
use http_body::Body;
use http_body_util::Full;
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use thiserror::Error;
use tokio::{net::TcpStream, time::timeout};

use crate::fleet::address::WorkerAddress;

/// Why there is no response. Nothing of one has reached the client in any of these cases.
#[derive(Debug, Error)]
pub enum UpstreamError {
    #[error("cannot connect: {0}")]
    Connect(#[from] io::Error),
    #[error("no connection within {0:?}")]
    ConnectTimeout(Duration),
    #[error("connection lost before the response: {0}")]
    Reset(#[source] hyper::Error),
    #[error("connection lost in the response: {0}")]
    Cut(#[source] hyper::Error),
    #[error("a response of more than {0} bytes")]
    TooLarge(usize),
}

impl UpstreamError {
    /// The router itself has run out of something, which is no word against the worker.
    pub fn is_local(&self) -> bool {
        /// Too many open files, in the process or in the system (`EMFILE`, `ENFILE` on Unix).
        const TOO_MANY_FILES: [i32; 2] = [24, 23];
        let Self::Connect(error) = self else { return false };
        matches!(error.kind(), io::ErrorKind::AddrNotAvailable | io::ErrorKind::OutOfMemory)
            || error.raw_os_error().is_some_and(|code| TOO_MANY_FILES.contains(&code))
    }
}

/// The idle connections to one worker, last used first: the longer-idle ones get to time out.
#[derive(Debug)]
pub struct Pool {
    address: WorkerAddress,
    host_header: HeaderValue,
    authorization: Option<HeaderValue>,
    connect_timeout: Duration,
    idle_timeout: Duration,
    /// Held for a push or a pop, never across IO.
    idle: Mutex<Vec<Idle>>,
}

#[derive(Debug)]
struct Idle {
    connection: Connection,
    since: Instant,
}

impl Pool {
    /// `authorization` is what the router's own requests say of who it is.
    pub fn new(
        address: WorkerAddress,
        connect_timeout: Duration,
        idle_timeout: Duration,
        authorization: Option<HeaderValue>,
    ) -> Self {
        let host_header = address.url().authority();
        let idle = Mutex::default();
        Self { address, host_header, authorization, connect_timeout, idle_timeout, idle }
    }

    pub fn authorization(&self) -> Option<HeaderValue> {
        self.authorization.clone()
    }

    /// What goes into the `Host` header of a request to this worker.
    pub fn host_header(&self) -> HeaderValue {
        self.host_header.clone()
    }

    /// A live idle connection, or none.
    pub fn checkout(&self) -> Option<Connection> {
        loop {
            let Idle { mut connection, since } = self.idle.lock().pop()?;
            if since.elapsed() < self.idle_timeout && connection.is_reusable() {
                return Some(connection);
            }
        }
    }

    pub async fn connect(&self) -> Result<Connection, UpstreamError> {
        let Ok(opened) = timeout(self.connect_timeout, self.address.connect()).await else {
            return Err(UpstreamError::ConnectTimeout(self.connect_timeout));
        };
        let stream = opened?;
        // Without it the kernel holds back the small last segment of a request until the worker has
        // acknowledged the one before: 40 ms on every request of more than one segment.
        stream.set_nodelay(true)?;
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (sender, driver) = handshake.map_err(UpstreamError::Reset)?;
        Ok(Connection { sender, driver, opened_at: Instant::now(), finished: false })
    }

    /// Takes back a connection whose response has ended. One that cannot be used again is closed.
    pub fn checkin(&self, mut connection: Connection) {
        if connection.is_reusable() {
            self.idle.lock().push(Idle { connection, since: Instant::now() });
        }
    }

    /// Closes what has been idle for too long. Checkout does not reach the oldest ones.
    pub fn sweep(&self) {
        self.idle.lock().retain_mut(|idle| {
            idle.since.elapsed() < self.idle_timeout && idle.connection.is_reusable()
        });
    }

    pub fn clear(&self) {
        self.idle.lock().clear();
    }
}

/// An open connection, its IO included.
#[derive(Debug)]
pub struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    driver: http1::Connection<TokioIo<TcpStream>, Full<Bytes>>,
    opened_at: Instant,
    /// The driver has returned and must not be polled again.
    finished: bool,
}

impl Connection {
    /// Sends a request and waits for the head of its response. The body arrives as long as somebody
    /// calls [`Connection::drive`]. Cancelled halfway, the connection must be dropped.
    pub async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, UpstreamError> {
        let mut response = pin!(self.sender.send_request(request));
        poll_fn(|cx| {
            // The IO first: what it reads is what the response waits for.
            let _finished = self.drive(cx);
            response.as_mut().poll(cx)
        })
        .await
        .map_err(UpstreamError::Reset)
    }

    /// The next bytes of a response's body; `None` at its end.
    pub async fn next_data(&mut self, body: &mut Incoming) -> Result<Option<Bytes>, UpstreamError> {
        loop {
            let frame = poll_fn(|cx| {
                // What is already read comes first; then the IO gets a turn, and what that has read.
                let polled = Pin::new(&mut *body).poll_frame(cx);
                if polled.is_ready() {
                    return polled;
                }
                let _finished = self.drive(cx);
                Pin::new(&mut *body).poll_frame(cx)
            });
            let Some(frame) = frame.await else {
                return Ok(None);
            };
            // Trailers are the other kind of frame; nothing behind the proxy could use them.
            if let Ok(data) = frame.map_err(UpstreamError::Cut)?.into_data() {
                return Ok(Some(data));
            }
        }
    }

    /// Reads a small response to its end.
    pub async fn read(
        &mut self,
        body: &mut Incoming,
        limit: usize,
    ) -> Result<Bytes, UpstreamError> {
        let mut whole = BytesMut::new();
        while let Some(data) = self.next_data(body).await? {
            if whole.len() + data.len() > limit {
                return Err(UpstreamError::TooLarge(limit));
            }
            whole.extend_from_slice(&data);
        }
        Ok(whole.freeze())
    }

    /// Does the IO that is possible now. Ready when the connection is finished, for good or bad.
    pub fn drive(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.finished {
            self.finished = Pin::new(&mut self.driver).poll(cx).is_ready();
        }
        if self.finished { Poll::Ready(()) } else { Poll::Pending }
    }

    pub fn opened_at(&self) -> Instant {
        self.opened_at
    }

    /// Whether another request can be sent: the worker keeps it open and the last response was read.
    fn is_reusable(&mut self) -> bool {
        // One poll notices a connection that the worker has closed meanwhile. No task waits for it.
        let mut nobody = Context::from_waker(Waker::noop());
        self.drive(&mut nobody).is_pending() && self.sender.is_ready()
    }
}
