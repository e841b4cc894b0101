//! The connection of one client: hyper over a guarded stream, and the first steps of each request.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use http::{HeaderValue, Request, Response, header};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    sync::watch,
    time::{Instant, timeout},
};
use tower::ServiceExt;

use crate::{
    admission::MemoryReservation,
    body::ResponseBody,
    deadline_timer::DeadlineTimer,
    endpoint::Endpoint,
    error::Error,
    proxy::request::read_body,
    router::Router,
    server::{
        answer::Answer,
        auth,
        connection_limit::{ConnectionLimit, ConnectionPermit},
        forward::forward,
        guard::{Guard, Limits},
        head::MAX_HEAD,
        keep_alive::{KeepAliveState, RELEASE_AFTER},
        probe, request_id,
        sites::{Sites, allow_reading},
        tls::Tls,
    },
    telemetry::request_log::RequestLog,
    wire::transport::{self, Transport},
};

/// hyper's buffer for a request, and for a response that the client does not read. When it is full, a slow client
/// slows its worker down. At least one head must fit.
const BUFFER: usize = MAX_HEAD + (16 << 10);

/// Longest idle time of a connection. Clients and proxies usually close earlier, so no request meets a closing
/// connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);

/// Time limit for a head on a connection without a permit.
const EXTRA_HEAD_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest wait for a permit. An idle connection that was told to close is gone by then.
const PERMIT_WAIT: Duration = Duration::from_millis(100);

/// Maximum size of the body of an admin request.
const ADMIN_BODY_LIMIT: usize = 1 << 20;

/// The lifecycle of the router. Its connections follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    /// Requests are served.
    Serving,
    /// Another router on the same port gets the new connections. Requests on the open ones are still served.
    HandingOver,
    /// New requests are refused; requests in flight finish.
    Draining,
    /// Connections close after their present response, or at this time.
    Stopping(Instant),
}

/// A connection whose first bytes have arrived, on its way from the accepting thread to a serving thread.
pub(super) struct AcceptedConnection {
    stream: std::net::TcpStream,
    serving: Serving,
}

impl AcceptedConnection {
    pub(super) async fn run(self) {
        if let Ok(stream) = TcpStream::from_std(self.stream) {
            self.serving.serve(stream, None).await;
        }
    }
}

/// A connection, with everything that it needs to answer requests.
pub(super) struct Serving {
    pub(super) router: Arc<Router>,
    pub(super) admin: axum::Router,
    pub(super) sites: Arc<Sites>,
    pub(super) connection_limit: Arc<ConnectionLimit>,
    /// Empty if no permit was free when the connection came; filled when one is free for a request.
    pub(super) permit: OnceLock<ConnectionPermit>,
    pub(super) client: SocketAddr,
    pub(super) lifecycle: watch::Receiver<Lifecycle>,
    /// Whether every response closes the connection.
    pub(super) closes: bool,
}

impl Serving {
    /// Waits on the accepting thread for the first bytes of a new connection without TLS. A probe is answered there, so
    /// that it does not wait for a busy core, and its connection is closed. Any other connection is returned.
    pub(super) async fn wait_for_bytes(mut self, stream: TcpStream) -> Option<AcceptedConnection> {
        transport::prepare(&stream);
        let mut first = [0; probe::LONGEST];
        let length =
            self.wait_until_readable(&stream, &KeepAliveState::default(), &mut first).await?;
        if !probe::is_probe(&first[..length]) {
            return Some(AcceptedConnection { stream: stream.into_std().ok()?, serving: self });
        }
        self.closes = true;
        self.serve(stream, None).await;
        None
    }

    /// Serves a new connection.
    pub(super) async fn run(self, stream: TcpStream, tls: Option<Arc<Tls>>) {
        transport::prepare(&stream);
        if self.wait_until_readable(&stream, &KeepAliveState::default(), &mut [0]).await.is_some() {
            self.serve(stream, tls).await;
        }
    }

    /// Serves a connection whose first bytes have arrived.
    async fn serve(self, stream: TcpStream, tls: Option<Arc<Tls>>) {
        let keep_alive = KeepAliveState::default();
        let config = &self.router.config;
        let head = config.header_read_timeout_secs.get();
        let limits = Limits {
            head: if self.permit.get().is_some() { head } else { head.min(EXTRA_HEAD_TIMEOUT) },
            body_pause: config.body_read_timeout_secs.get(),
            body_rate: config.body_min_rate,
        };
        let transport = match tls {
            None => Transport::Tcp(stream),
            Some(tls) => match handshake(stream, tls, limits.head).await {
                Ok(transport) => transport,
                Err(error) => return tracing::debug!("client connection: {error}"),
            },
        };
        let mut guard = Guard::new(transport, keep_alive.clone(), limits);
        loop {
            // Boxed in a statement of its own, so that the task does not reserve room for it: an idle client costs
            // no buffers.
            let talking = Box::pin(self.answer_requests(guard, &keep_alive));
            guard = match talking.await {
                Ok(Some(resting)) => resting,
                Ok(None) => return,
                Err(error) => return tracing::debug!("client connection: {error}"),
            };
            keep_alive.timer().clear();
            if self.wait_until_readable(guard.socket(), &keep_alive, &mut [0]).await.is_none() {
                // A failure cannot be reported to the client.
                let _closed = guard.shutdown().await;
                return;
            }
        }
    }

    /// Waits for bytes of an idle client, copies the first ones to `first`, and returns their number. Returns `None` if
    /// the connection is to be closed.
    async fn wait_until_readable(
        &self,
        stream: &TcpStream,
        keep_alive: &KeepAliveState,
        first: &mut [u8],
    ) -> Option<usize> {
        let mut lifecycle = self.lifecycle.clone();
        // An error means that the handle was dropped: the router ends.
        let leaving = lifecycle.wait_for(|lifecycle| match lifecycle {
            Lifecycle::Serving | Lifecycle::Draining => false,
            Lifecycle::HandingOver => keep_alive.is_used(),
            Lifecycle::Stopping(_) => true,
        });
        let (_idle, closed) = self.connection_limit.mark_idle();
        tokio::select! {
            biased;
            // Peeks at the bytes: a new socket counts as readable until it is read. hyper meets the same error.
            readable = timeout(IDLE_TIMEOUT, stream.peek(first)) => Some(readable.ok()?.unwrap_or(0)),
            _ = leaving => None,
            _ = closed => None,
        }
    }

    /// Answers requests until the connection ends, or is idle: then the guard is returned.
    async fn answer_requests(
        &self,
        guard: Guard,
        keep_alive: &KeepAliveState,
    ) -> hyper::Result<Option<Guard>> {
        // Boxed: between requests only a pointer is reserved.
        let service = service_fn(|request| Box::pin(self.respond(request, keep_alive)));
        let mut connection = http1::Builder::new()
            // The guard enforces the time limits.
            .header_read_timeout(None)
            .max_buf_size(BUFFER)
            .serve_connection(TokioIo::new(guard), service);
        let mut timer = DeadlineTimer::new(Instant::now() + RELEASE_AFTER);
        keep_alive.start_idle();
        let mut lifecycle = self.lifecycle.clone();
        loop {
            match *lifecycle.borrow_and_update() {
                // A client that has just connected is about to send a request.
                Lifecycle::HandingOver if !keep_alive.is_used() => {}
                Lifecycle::Serving => {}
                Lifecycle::Draining => keep_alive.drain(),
                Lifecycle::HandingOver | Lifecycle::Stopping(_) => {
                    Pin::new(&mut connection).graceful_shutdown();
                }
            }
            tokio::select! {
                // In this order: the connection is idle only if hyper has nothing left to do.
                biased;
                ended = &mut connection => return ended.map(|()| None),
                () = keep_alive.until_idle(&mut timer) => return Ok(Some(connection.into_parts().io.into_inner())),
                Ok(()) = lifecycle.changed() => {}
            }
        }
    }

    async fn respond(
        &self,
        mut request: Request<Incoming>,
        keep_alive: &KeepAliveState,
    ) -> Result<Response<Answer>, Infallible> {
        let chunked = request.headers().contains_key(header::TRANSFER_ENCODING);
        let endpoint = Endpoint::of(request.method(), request.uri().path());
        let named = *endpoint.as_ref().unwrap_or(&Endpoint::Admin);
        let config = &self.router.config;
        let id = request_id::choose(&config.request_id_headers, request.headers());
        request.headers_mut().insert(request_id::HEADER, id.clone());
        // Admin requests are not traced: they would be most of the traces.
        let tracer = self.router.tracer.as_ref().filter(|_| named != Endpoint::Admin);
        let trace = tracer.and_then(|tracer| tracer.begin(request.headers()));
        let log = (config.access_log || trace.is_some()).then(|| {
            Arc::new(RequestLog::new(id.clone(), named, self.client, config.access_log, trace))
        });
        let plane = *endpoint.as_ref().unwrap_or(&Endpoint::OtherV1);
        let reader = self.sites.reader(plane, request.headers());
        let answering = self.answer(endpoint, request, keep_alive, log.as_ref());
        let mut response = match answering.await {
            Ok(response) => response,
            Err(error) => error.to_response().map(ResponseBody::Own),
        };
        let headers = response.headers_mut();
        // Only hyper knows where a chunked body ends and the next head starts, so the connection is closed.
        let is_last =
            *self.lifecycle.borrow() != Lifecycle::Serving || self.router.gate.is_draining();
        let keeps = self.permit.get().is_some() && keep_alive.is_uploaded() && !self.closes;
        if chunked || is_last || !keeps {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        headers.insert(request_id::HEADER, id);
        if let Some(origin) = reader {
            allow_reading(headers, origin);
        }
        self.router.metrics.request(named, response.status());
        if let Some(log) = &log {
            log.answered(response.status());
        }
        Ok(response.map(|body| Answer::new(body, keep_alive.clone(), log)))
    }

    /// Whether the connection has a permit, or gets one within [`PERMIT_WAIT`].
    async fn has_permit(&self) -> bool {
        if self.permit.get().is_some() {
            return true;
        }
        let permit = timeout(PERMIT_WAIT, self.connection_limit.wait()).await;
        permit.is_ok_and(|permit| self.permit.set(permit).is_ok())
    }

    async fn answer(
        &self,
        endpoint: Result<Endpoint, Error>,
        request: Request<Incoming>,
        keep_alive: &KeepAliveState,
        log: Option<&Arc<RequestLog>>,
    ) -> Result<Response<ResponseBody>, Error> {
        if let Some(refusal) = keep_alive.take_refusal() {
            return Err(refusal);
        }
        // A data-plane path with a wrong method is still a data-plane path.
        let plane = *endpoint.as_ref().unwrap_or(&Endpoint::OtherV1);
        if let Some(permission) = self.sites.preflight(&request) {
            return permission.map(|response| response.map(ResponseBody::Own));
        }
        let sent = (request.method(), request.headers());
        auth::check(&self.router.config, plane, request.uri().path(), sent, &self.sites)?;
        if plane.is_work() && !self.has_permit().await {
            return Err(Error::TooManyConnections { limit: self.connection_limit.count });
        }
        match endpoint? {
            Endpoint::Admin | Endpoint::OpenApi => {
                let (head, body) = request.into_parts();
                let mut memory = MemoryReservation::new(&self.router.bodies);
                let body = read_body(body, ADMIN_BODY_LIMIT, &mut memory).await?;
                keep_alive.uploaded();
                let request = Request::from_parts(head, axum::body::Body::from(body));
                let Ok(response) = self.admin.clone().oneshot(request).await;
                Ok(response.map(ResponseBody::Admin))
            }
            // Boxed, because hyper moves the future of every request.
            endpoint => {
                let answering =
                    forward(&self.router, endpoint, request, self.client.ip(), keep_alive, log);
                let answered = self.router.gate.until_cut(Box::pin(answering)).await;
                answered.unwrap_or(Err(Error::Draining))
            }
        }
    }
}

/// Performs the TLS handshake. Boxed, because its future is large and short-lived.
fn handshake(
    stream: TcpStream,
    tls: Arc<Tls>,
    limit: Duration,
) -> Pin<Box<impl Future<Output = io::Result<Transport>>>> {
    Box::pin(async move {
        let stream = timeout(limit, tls.acceptor().accept(stream)).await??;
        Ok(Transport::Tls(Box::new(stream.into())))
    })
}
