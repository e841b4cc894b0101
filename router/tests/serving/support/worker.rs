//! A worker with scripted responses, which reports its requests to the test.

use std::{
    io,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header, request::Parts};
use http_body_util::BodyExt;
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use mla_mock_worker::{Listener, Port};
use parking_lot::Mutex;

use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{Notify, Semaphore, mpsc},
    task::{AbortHandle, JoinSet},
};
use tokio_rustls::TlsAcceptor;

use super::{
    scripted::{ScriptedBody, Source, Unfinished},
    soon,
};

/// A data-plane request as it arrived.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) head: Parts,
    pub(crate) body: Bytes,
    /// Number of its connection.
    pub(crate) connection: usize,
}

/// An event at the worker. Health checks are not reported.
#[derive(Debug)]
pub(crate) enum Event {
    Request(Box<Seen>),
    /// The router has dropped a request before its response was complete.
    Aborted,
}

/// Size of a frame of [`Reply::Endless`].
pub(crate) const ENDLESS_FRAME: usize = 1 << 14;

/// An answer of every API.
pub(crate) const GOOD: &str = r#"{"choices":[],"output":[],"text":""}"#;

const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");

/// The reaction to a request.
pub(crate) enum Reply {
    Whole(StatusCode, HeaderMap, Bytes),
    /// Frames from a channel of the test; then the end.
    Frames(mpsc::UnboundedReceiver<Bytes>),
    /// The same as a stream of events.
    Events(mpsc::UnboundedReceiver<Bytes>),
    /// Endless frames, counted.
    Endless(Arc<AtomicUsize>),
    /// Frames, then the connection breaks.
    Broken(Vec<Bytes>),
    /// A stream of events: further headers, frames, then an end of some kind.
    Stream(HeaderMap, Vec<Bytes>, Then),
    /// No response until the router drops the request.
    Hang,
    /// The connection is closed without an answer.
    Close,
    /// A good answer once the test allows it.
    When(Arc<Semaphore>),
}

impl Reply {
    pub(crate) fn ok(body: impl Into<Bytes>) -> Self {
        Self::Whole(StatusCode::OK, HeaderMap::new(), body.into())
    }

    pub(crate) fn good() -> Self {
        Self::ok(GOOD)
    }

    pub(crate) fn status(status: u16) -> Self {
        let status = StatusCode::from_u16(status).expect("a status");
        Self::Whole(status, HeaderMap::new(), Bytes::from_static(b"{\"from\":\"worker\"}"))
    }
}

/// The end of a [`Reply::Stream`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Then {
    End,
    /// The connection breaks after the last frame.
    Break,
    /// Neither bytes nor an end.
    Silence,
}

type Script = Box<dyn Fn(&Seen) -> Reply + Send + Sync>;

struct State {
    script: Script,
    events: mpsc::UnboundedSender<Event>,
    /// Status and body of the answers to health checks.
    health: Mutex<(u16, &'static str)>,
    /// Connections stay open and nothing is answered, as after SIGSTOP.
    frozen: AtomicBool,
    /// Notified when connections should end; idle ones end at once.
    leaving: Notify,
    /// Numbers of bad and good answers to health checks.
    checks: Mutex<(usize, usize)>,
    info: Mutex<Option<String>>,
    /// Whether requests for its information stay without a response.
    withholds_info: AtomicBool,
    models: Mutex<Option<String>>,
    metrics: Mutex<Option<String>>,
    canary: Mutex<Canary>,
    /// A script panicked: hyper's task hides that, and the router's retry mends it.
    panicked: AtomicBool,
}

/// The reaction to `/health_generate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Canary {
    /// There is no such path.
    Missing,
    /// The engine answers it.
    Sings,
    /// The engine does not.
    Silent,
}

/// Records a panic that drops it.
struct Witness<'a>(&'a AtomicBool);

impl Drop for Witness<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::SeqCst);
        }
    }
}

impl State {
    /// The answer to a health check, which is counted.
    fn check(&self) -> (u16, &'static str) {
        let (health, mut checks) = (*self.health.lock(), self.checks.lock());
        let count = if health.0 == 200 { &mut checks.1 } else { &mut checks.0 };
        *count += 1;
        health
    }
}

/// The protocol of a worker.
#[derive(Clone)]
pub(crate) enum Speaks {
    Http1,
    /// By prior knowledge.
    Http2,
    /// The protocol that the client requests in the TLS handshake.
    Tls(TlsAcceptor),
}

pub(crate) struct FakeWorker {
    speaks: Speaks,
    port: Port,
    state: Arc<State>,
    events: mpsc::UnboundedReceiver<Event>,
    server: Option<AbortHandle>,
}

impl FakeWorker {
    pub(crate) async fn start(script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        Self::speaking(Speaks::Http1, script).await
    }

    pub(crate) async fn speaking(
        speaks: Speaks,
        script: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let state = Arc::new(State {
            script: Box::new(script),
            events: sender,
            health: Mutex::new((200, "")),
            frozen: AtomicBool::new(false),
            leaving: Notify::new(),
            checks: Mutex::default(),
            info: Mutex::new(None),
            withholds_info: AtomicBool::new(false),
            models: Mutex::new(None),
            metrics: Mutex::new(None),
            canary: Mutex::new(Canary::Missing),
            panicked: AtomicBool::new(false),
        });
        let port = Port::free().expect("a free port");
        let mut worker = Self { speaks, port, state, events, server: None };
        worker.restart().await;
        worker
    }

    /// Starts a worker that answers 200 to every request.
    pub(crate) async fn plain() -> Self {
        Self::start(|_| Reply::good()).await
    }

    /// Listens (again), on the same port as before.
    pub(crate) async fn restart(&mut self) {
        let listener = self.port.listen().await.expect("the port is ours");
        let accepting = accept(listener, self.speaks.clone(), Arc::clone(&self.state));
        self.server = Some(tokio::spawn(accepting).abort_handle());
    }

    /// Stops like after SIGKILL: all connections close, new ones are refused.
    pub(crate) async fn kill(&mut self) {
        let server = self.server.take().expect("running");
        server.abort();
        // The sockets close when the runtime drops the tasks, which is soon and not at once. Each
        // of them holds the state.
        while Arc::strong_count(&self.state) > 1 {
            tokio::task::yield_now().await;
        }
    }

    /// From now on health checks are not answered.
    pub(crate) fn freeze(&self) {
        self.state.frozen.store(true, Ordering::SeqCst);
    }

    /// Asks clients to open another connection for their next requests.
    pub(crate) fn go_away(&self) {
        self.state.leaving.notify_waiters();
    }

    /// Sets status and body of the answers to health checks.
    pub(crate) fn report(&self, status: u16, body: &'static str) {
        *self.state.health.lock() = (status, body);
    }

    pub(crate) fn set_healthy(&self, healthy: bool) {
        self.report(if healthy { 200 } else { 503 }, "");
    }

    /// Health checks so far: answered badly, answered well.
    pub(crate) fn checks(&self) -> (usize, usize) {
        *self.state.checks.lock()
    }

    /// Sets whether requests for its information stay without a response.
    pub(crate) fn withhold_info(&self, withhold: bool) {
        self.state.withholds_info.store(withhold, Ordering::SeqCst);
    }

    pub(crate) fn set_info(&self, json: &str) {
        *self.state.info.lock() = Some(json.to_owned());
    }

    pub(crate) fn set_models(&self, names: &[&str]) {
        let models: Vec<_> = names.iter().map(|name| serde_json::json!({"id": name})).collect();
        *self.state.models.lock() = Some(serde_json::json!({"data": models}).to_string());
    }

    pub(crate) fn set_metrics(&self, page: &str) {
        *self.state.metrics.lock() = Some(page.to_owned());
    }

    pub(crate) fn set_canary(&self, canary: Canary) {
        *self.state.canary.lock() = canary;
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address())
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.port.address()
    }

    pub(crate) async fn event(&mut self) -> Event {
        let event = soon(self.events.recv()).await;
        event.expect("the worker holds the sender")
    }

    /// The next event, which must be a request.
    pub(crate) async fn request(&mut self) -> Box<Seen> {
        match self.event().await {
            Event::Request(seen) => seen,
            Event::Aborted => panic!("aborted, where a request was expected"),
        }
    }

    /// Requests that have arrived since the last call.
    pub(crate) fn requests_so_far(&mut self) -> usize {
        self.count(|event| matches!(event, Event::Request(_)))
    }

    /// Requests that the router has dropped since the last call.
    pub(crate) fn aborts_so_far(&mut self) -> usize {
        self.count(|event| matches!(event, Event::Aborted))
    }

    fn count(&mut self, counted: impl Fn(&Event) -> bool) -> usize {
        let events = std::iter::from_fn(|| self.events.try_recv().ok());
        events.filter(counted).count()
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        if let Some(server) = &self.server {
            server.abort();
        }
        let hidden = self.state.panicked.load(Ordering::SeqCst) && !std::thread::panicking();
        assert!(!hidden, "the script of a fake worker panicked");
    }
}

async fn accept(listener: Listener, speaks: Speaks, state: Arc<State>) {
    // Connections die with the task that owns the set.
    let mut connections = JoinSet::new();
    for number in 0.. {
        let (stream, _) = listener.accept().await.expect("a listening socket");
        stream.set_nodelay(true).expect("a TCP socket");
        let (state, speaks) = (Arc::clone(&state), speaks.clone());
        connections.spawn(async move {
            match speaks {
                Speaks::Http1 => serve_http1(stream, state, number).await,
                Speaks::Http2 => serve_http2(stream, state, number).await,
                // A client that does not trust the worker leaves in the handshake.
                Speaks::Tls(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        match stream.get_ref().1.alpn_protocol() {
                            Some(b"h2") => serve_http2(stream, state, number).await,
                            _ => serve_http1(stream, state, number).await,
                        }
                    }
                }
            }
        });
    }
}

/// Fails if the script says so, here and below.
async fn serve_http1(stream: impl Stream, state: Arc<State>, number: usize) {
    let leaving = Arc::clone(&state);
    let service = service_fn(move |request| answer(Arc::clone(&state), number, request));
    let serving = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    let mut serving = pin!(serving);
    tokio::select! {
        _ended = serving.as_mut() => return,
        () = leaving.leaving.notified() => serving.as_mut().graceful_shutdown(),
    }
    let _ended = serving.await;
}

async fn serve_http2(stream: impl Stream, state: Arc<State>, number: usize) {
    let leaving = Arc::clone(&state);
    let service = service_fn(move |request| answer(Arc::clone(&state), number, request));
    let serving =
        http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service);
    let mut serving = pin!(serving);
    tokio::select! {
        _ended = serving.as_mut() => return,
        () = leaving.leaving.notified() => serving.as_mut().graceful_shutdown(),
    }
    let _ended = serving.await;
}

pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

async fn answer(
    state: Arc<State>,
    connection: usize,
    request: Request<Incoming>,
) -> io::Result<Response<ScriptedBody>> {
    let _witness = Witness(&state.panicked);
    let (head, body) = request.into_parts();
    match head.uri.path() {
        "/health" if state.frozen.load(Ordering::SeqCst) => std::future::pending().await,
        "/health" => {
            let (status, body) = state.check();
            let status = StatusCode::from_u16(status).expect("a status");
            let reply = Reply::Whole(status, HeaderMap::new(), body.into());
            return respond(Unfinished(None), reply).await;
        }
        "/get_server_info" | "/server_info" if state.withholds_info.load(Ordering::SeqCst) => {
            std::future::pending::<()>().await;
        }
        path @ ("/get_server_info" | "/server_info")
            if path == "/get_server_info" || is_own(&head) =>
        {
            let info = state.info.lock().clone();
            let reply = info.map_or_else(|| Reply::status(404), Reply::ok);
            return respond(Unfinished(None), reply).await;
        }
        "/health_generate" if is_own(&head) => {
            let canary = *state.canary.lock();
            let reply = match canary {
                Canary::Missing => Reply::status(404),
                Canary::Sings => Reply::ok(""),
                Canary::Silent => Reply::Hang,
            };
            return respond(Unfinished(None), reply).await;
        }
        path @ ("/v1/models" | "/metrics") if is_own(&head) => {
            let page = if path == "/metrics" { &state.metrics } else { &state.models };
            let reply = page.lock().clone().map_or_else(|| Reply::status(404), Reply::ok);
            return respond(Unfinished(None), reply).await;
        }
        _ => {}
    }
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let seen = Seen { head, body, connection };
    let reply = (state.script)(&seen);
    // The test may have ended.
    let _told = state.events.send(Event::Request(Box::new(seen)));
    respond(Unfinished(Some(state.events.clone())), reply).await
}

/// Whether a request comes from the router itself.
fn is_own(head: &Parts) -> bool {
    let agent = head.headers.get(http::header::USER_AGENT);
    agent.is_some_and(|agent| agent.as_bytes().starts_with(b"mla-router/"))
}

async fn respond(mut unfinished: Unfinished, reply: Reply) -> io::Result<Response<ScriptedBody>> {
    let (status, headers, frames) = match reply {
        Reply::Whole(status, headers, body) => (status, headers, Source::Whole(body)),
        Reply::Frames(frames) => (StatusCode::OK, HeaderMap::new(), Source::Live(frames)),
        Reply::Events(frames) => {
            let headers = [(header::CONTENT_TYPE, EVENT_STREAM)].into_iter().collect();
            (StatusCode::OK, headers, Source::Live(frames))
        }
        Reply::Endless(taken) => (StatusCode::OK, HeaderMap::new(), Source::Endless(taken)),
        Reply::Broken(frames) => (StatusCode::OK, HeaderMap::new(), Source::Broken(frames.into())),
        Reply::Stream(mut headers, frames, then) => {
            headers.insert(header::CONTENT_TYPE, EVENT_STREAM);
            (StatusCode::OK, headers, Source::Stream { frames: frames.into(), then, out: false })
        }
        Reply::Hang => std::future::pending().await,
        Reply::Close => {
            unfinished.done();
            return Err(io::Error::other("scripted"));
        }
        Reply::When(gate) => {
            gate.acquire().await.expect("an open semaphore").forget();
            (StatusCode::OK, HeaderMap::new(), Source::Whole(GOOD.into()))
        }
    };
    if matches!(&frames, Source::Whole(body) if body.is_empty()) {
        unfinished.done(); // hyper does not poll a body that is over before it begins
    }
    let mut response = Response::new(ScriptedBody { source: frames, unfinished });
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    Ok(response)
}
