//! The connection of one client: one request after the other, and the first steps of each.

use std::{
    future::{pending, poll_fn},
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{Arc, OnceLock},
    task::{Poll, Waker},
    time::Duration,
};

use http::{Method, Request, Response, Version, request::Parts};
use parking_lot::Mutex;
use tokio::{net::TcpStream, sync::watch, time::timeout};
use tower::ServiceExt;

use crate::{
    body::ResponseBody,
    deadline_timer::SharedTimer,
    endpoint::Endpoint,
    error::Error,
    heap::boxed,
    router::Router,
    server::{
        answer::Answer,
        auth,
        client_stream::{ClientStream, Limits, Next, Orders},
        connection_limit::{ConnectionLimit, ConnectionPermit},
        forward::forward,
        head::{BodyLength, Head},
        probe,
        request_body::RequestBody,
        request_id,
        response_writer::{Asked, ResponseWriter},
        sites::{Sites, allow_reading},
        tls::Tls,
    },
    telemetry::request_log::RequestLog,
    wire::transport::{self, Transport},
};

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
    /// Another router on the same port gets the new connections. On each open one a request is still served.
    HandingOver,
    /// New requests are refused; requests in flight finish.
    Draining,
    /// Connections close after their present response.
    Stopping,
}

/// A connection whose first bytes have arrived, on its way from the accepting thread to a serving thread.
pub(super) struct AcceptedConnection {
    stream: std::net::TcpStream,
    serving: Serving,
}

impl AcceptedConnection {
    /// Serves the connection until it is closed. Returns `None`: it is passed on once.
    pub(super) async fn run(self) -> Option<Self> {
        let stream = TcpStream::from_std(self.stream).ok()?;
        self.serving.serve(stream, None).await;
        None
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
        let length = self.wait_until_readable(&stream, &mut first).await?;
        if !probe::is_probe(&first[..length]) {
            return Some(AcceptedConnection { stream: stream.into_std().ok()?, serving: self });
        }
        self.closes = true;
        self.serve(stream, None).await;
        None
    }

    /// Serves a new connection until it is closed. Returns `None`: it is not passed on.
    pub(super) async fn run(
        self,
        stream: TcpStream,
        tls: Option<Arc<Tls>>,
    ) -> Option<AcceptedConnection> {
        transport::prepare(&stream);
        self.wait_until_readable(&stream, &mut [0]).await?;
        self.serve(stream, tls).await;
        None
    }

    /// Serves a connection whose first bytes have arrived.
    async fn serve(self, stream: TcpStream, tls: Option<Arc<Tls>>) {
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
        let timer = SharedTimer::default();
        let mut stream = ClientStream::new(transport, limits, timer.clone());
        loop {
            // Boxed in a statement of its own, so that the task does not reserve room for it: an idle client costs
            // no buffers.
            let talking = Box::into_pin(boxed(|| self.answer_requests(stream, &timer)));
            stream = match talking.await {
                Ok(Some(resting)) => resting,
                Ok(None) => return,
                Err(error) => return tracing::debug!("client connection: {error}"),
            };
            timer.clear();
            if self.wait_until_readable(stream.socket(), &mut [0]).await.is_none() {
                // A failure cannot be reported to the client.
                let _closed = poll_fn(|cx| stream.poll_close(cx)).await;
                return;
            }
        }
    }

    /// Waits for bytes of an idle client, copies the first ones to `first`, and returns their number. Returns `None` if
    /// the connection is to be closed.
    async fn wait_until_readable(&self, stream: &TcpStream, first: &mut [u8]) -> Option<usize> {
        let mut lifecycle = self.lifecycle.clone();
        // An error means that the handle was dropped: the router ends.
        let leaving = lifecycle.wait_for(|lifecycle| *lifecycle == Lifecycle::Stopping);
        let (_idle, closed) = self.connection_limit.mark_idle();
        tokio::select! {
            biased;
            // Peeks at the bytes: a new socket counts as readable until it is read. The stream meets the same error.
            readable = timeout(IDLE_TIMEOUT, stream.peek(first)) => Some(readable.ok()?.unwrap_or(0)),
            _ = leaving => None,
            _ = closed => None,
        }
    }

    /// Answers requests until the connection ends, or is idle: then the stream is returned.
    async fn answer_requests(
        &self,
        stream: ClientStream,
        timer: &SharedTimer,
    ) -> io::Result<Option<ClientStream>> {
        // All users run in this task, so no one ever waits for the lock.
        let stream = Mutex::new(stream);
        let is_idle = {
            let mut talking = pin!(self.talk(&stream, timer));
            let mut lifecycle = self.lifecycle.clone();
            loop {
                let present = *lifecycle.borrow_and_update();
                stream.lock().orders = Orders {
                    closes: present != Lifecycle::Serving,
                    leaves: present == Lifecycle::Stopping,
                };
                let seen = lifecycle.clone();
                let mut change = pin!(async {
                    if lifecycle.changed().await.is_err() {
                        // The handle was dropped.
                        pending::<()>().await;
                    }
                });
                let mut waker: Option<Waker> = None;
                let ended = poll_fn(|cx| {
                    // Polled only for news or a new waker: it takes a lock that all connections share. The first change
                    // may wake a task twice, so from then on each poll has to register it again.
                    let is_woken = present == Lifecycle::Serving
                        && waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
                    if !is_woken || seen.has_changed().unwrap_or(true) {
                        waker = Some(cx.waker().clone());
                        if change.as_mut().poll(cx).is_ready() {
                            return Poll::Ready(None);
                        }
                    }
                    talking.as_mut().poll(cx).map(Some)
                });
                if let Some(ended) = ended.await {
                    break ended?;
                }
            }
        };
        Ok(is_idle.then(|| stream.into_inner()))
    }

    /// Answers requests until the connection is closed. Returns true if it is open and idle.
    async fn talk(&self, stream: &Mutex<ClientStream>, timer: &SharedTimer) -> io::Result<bool> {
        loop {
            let request = match poll_fn(|cx| stream.lock().poll_next(cx)).await? {
                Next::Request(head) => Ok(head),
                Next::Refused(error) => Err(error),
                Next::Idle => return Ok(true),
                Next::Closed => break,
            };
            if !self.exchange(request, stream, timer).await? {
                break;
            }
        }
        poll_fn(|cx| stream.lock().poll_close(cx)).await?;
        Ok(false)
    }

    /// Answers one request, or a refused one with its error. Returns whether another one may follow.
    async fn exchange(
        &self,
        request: Result<Head, Error>,
        stream: &Mutex<ClientStream>,
        timer: &SharedTimer,
    ) -> io::Result<bool> {
        // Other servers may read another end of a chunked body, so nothing after it is taken for a request.
        let mut keeps =
            request.as_ref().is_ok_and(|head| head.keeps_alive && head.body != BodyLength::Chunked);
        let (request, refusal) = match request {
            Ok(head) => (head.parts, None),
            // A refused request is counted and logged like any other.
            Err(error) => (Box::new(Request::new(()).into_parts().0), Some(error)),
        };
        let asked = Asked {
            is_head: request.method == Method::HEAD,
            is_http_10: request.version == Version::HTTP_10,
        };
        // Boxed, so that its memory is free while the response is sent.
        let mut responding =
            Box::into_pin(boxed(|| self.respond(request, RequestBody(stream), refusal, timer)));
        let response = poll_fn(|cx| match responding.as_mut().poll(cx) {
            Poll::Ready(response) => Poll::Ready(Some(response)),
            Poll::Pending => stream.lock().poll_disconnect(cx).map(|()| None),
        });
        let Some((response, may_follow)) = response.await else { return Ok(false) };
        drop(responding);
        keeps &= may_follow;
        let mut writer = ResponseWriter::new(response, asked, &mut keeps);
        poll_fn(|cx| {
            let mut stream = stream.lock();
            let written = writer.poll_write(&mut stream.transport, cx);
            if written.is_pending() && stream.poll_disconnect(cx).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            written
        })
        .await?;
        Ok(keeps)
    }

    /// Returns the response to a request, and whether another request may follow on the connection.
    async fn respond(
        &self,
        mut request: Box<Parts>,
        body: RequestBody<'_>,
        refusal: Option<Error>,
        timer: &SharedTimer,
    ) -> (Response<Answer>, bool) {
        let endpoint = Endpoint::of(&request.method, request.uri.path());
        // A wrong method on a data-plane path has no endpoint: it counts as a request to the router itself, but its key and
        // origin are checked as on any data-plane path.
        let named = *endpoint.as_ref().unwrap_or(&Endpoint::Admin);
        let plane = *endpoint.as_ref().unwrap_or(&Endpoint::OtherV1);
        let config = &self.router.config;
        let id = request_id::choose(&config.request_id_headers, &request.headers);
        request.headers.insert(request_id::HEADER, id.clone());
        // Admin requests are not traced: they would be most of the traces.
        let tracer = self.router.tracer.as_ref().filter(|_| named != Endpoint::Admin);
        let trace = tracer.and_then(|tracer| tracer.begin(&request.headers));
        let log = (config.access_log || trace.is_some()).then(|| {
            Arc::new(RequestLog::new(id.clone(), named, self.client, config.access_log, trace))
        });
        let reader = self.sites.reader(plane, &request.headers);
        let answer = match refusal {
            Some(error) => Err(error),
            None => self.answer(endpoint, plane, request, body, timer, log.as_ref()).await,
        };
        let mut response = match answer {
            Ok(response) => response,
            Err(error) => error.to_response().map(ResponseBody::Own),
        };
        let may_follow = {
            let mut stream = body.0.lock();
            stream.end_request() && !stream.orders.closes
        };
        let may_follow = may_follow
            && self.permit.get().is_some()
            && !(self.router.gate.is_draining() || self.closes);
        let headers = response.headers_mut();
        headers.insert(request_id::HEADER, id);
        if let Some(origin) = reader {
            allow_reading(headers, origin);
        }
        self.router.metrics.request(named, response.status());
        if let Some(log) = &log {
            log.answered(response.status());
        }
        (response.map(|body| Answer::new(body, log)), may_follow)
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
        plane: Endpoint,
        request: Box<Parts>,
        body: RequestBody<'_>,
        timer: &SharedTimer,
        log: Option<&Arc<RequestLog>>,
    ) -> Result<Response<ResponseBody>, Error> {
        // The futures below are boxed, because they are large and this one is moved.
        if let Some(permission) = self.sites.preflight(&request) {
            return permission.map(|response| response.map(ResponseBody::Own));
        }
        let sent = (&request.method, &request.headers);
        auth::check(&self.router.config, plane, request.uri.path(), sent, &self.sites)?;
        if plane.is_work() && !self.has_permit().await {
            return Err(Error::TooManyConnections { limit: self.connection_limit.count });
        }
        match endpoint? {
            Endpoint::Admin | Endpoint::OpenApi => {
                Box::pin(self.answer_admin(*request, body)).await
            }
            endpoint => {
                let (router, client) = (&self.router, self.client.ip());
                let answering =
                    boxed(|| forward(router, endpoint, request, body, client, timer, log));
                let answered = router.gate.until_cut(Box::into_pin(answering)).await;
                answered.unwrap_or(Err(Error::Draining))
            }
        }
    }

    async fn answer_admin(
        &self,
        head: Parts,
        body: RequestBody<'_>,
    ) -> Result<Response<ResponseBody>, Error> {
        let (body, _memory) = body.read(ADMIN_BODY_LIMIT, &self.router.bodies).await?;
        let request = Request::from_parts(head, axum::body::Body::from(body));
        let Ok(response) = self.admin.clone().oneshot(request).await;
        Ok(response.map(ResponseBody::Admin))
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
