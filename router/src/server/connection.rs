//! One client's connection: hyper over a guarded stream, and what each request on it meets first.

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
    admission::Held,
    alarm::Alarm,
    body::ResponseBody,
    endpoint::Endpoint,
    error::Error,
    proxy::request::read_body,
    router::Router,
    server::{
        answer::Answer,
        auth,
        forward::forward,
        guard::{Guard, Limits},
        head::MAX_HEAD,
        places::{Place, Places},
        request_id,
        sites::{Sites, allow_reading},
        tls::Tls,
        turn::{REST_AFTER, Turn},
    },
    telemetry::journal::Journal,
    wire::transport::{self, Transport},
};

/// What hyper may hold of a response that its client does not take, or of a request. A stream whose
/// client is slow holds its worker back beyond this. Room for a head, at least.
const BUFFER: usize = MAX_HEAD + (16 << 10);

/// How long a client may leave its connection idle; longer than clients and proxies usually do, so
/// that it is they who close it and no request meets a closing connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);

/// For the head of a request on a connection without a place: others may be waiting for theirs.
const HURRY: Duration = Duration::from_secs(2);

/// For a place: an idle connection that was told to close for this one is gone by then.
const PLACE_WAIT: Duration = Duration::from_millis(100);

/// Bodies of the router's own routes are a URL or a request id.
const ADMIN_BODY_LIMIT: usize = 1 << 20;

/// What a router is doing, for its connections to follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Course {
    Serving,
    /// Another router on the same port gets the new connections. What these bring is still served.
    HandingOver,
    /// No new requests; those in flight finish.
    Draining,
    /// Connections close when their response is out, or at this time.
    Stopping(Instant),
}

/// What a connection needs to answer requests.
pub(super) struct Serving {
    pub(super) router: Arc<Router>,
    pub(super) admin: axum::Router,
    pub(super) sites: Arc<Sites>,
    pub(super) places: Arc<Places>,
    /// Empty if it came when there was none, until one is free for a request.
    pub(super) place: OnceLock<Place>,
    pub(super) client: SocketAddr,
    pub(super) course: watch::Receiver<Course>,
}

impl Serving {
    pub(super) async fn run(self, stream: TcpStream, tls: Option<Arc<Tls>>) {
        transport::prepare(&stream);
        let turn = Turn::default();
        if !self.hears_from(&stream, &turn).await {
            return;
        }
        let config = &self.router.config;
        let head = config.header_read_timeout_secs.get();
        let limits = Limits {
            head: if self.place.get().is_some() { head } else { head.min(HURRY) },
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
        let mut guard = Guard::new(transport, turn.clone(), limits);
        loop {
            // Boxed, and in a statement of its own, so that the task has no room for it: an idle
            // client, one of thousands, costs no buffers.
            let talking = Box::pin(self.talk(guard, &turn));
            guard = match talking.await {
                Ok(Some(resting)) => resting,
                Ok(None) => return,
                Err(error) => return tracing::debug!("client connection: {error}"),
            };
            if !self.hears_from(guard.socket(), &turn).await {
                // Nobody is there to be told of a failure.
                let _closed = guard.shutdown().await;
                return;
            }
        }
    }

    /// Waits for an idle client to say something. False if its time is over.
    async fn hears_from(&self, stream: &TcpStream, turn: &Turn) -> bool {
        let mut course = self.course.clone();
        // An error would be the handle gone, and with it whoever could want the router to go on.
        let leaving = course.wait_for(|course| match course {
            Course::Serving | Course::Draining => false,
            Course::HandingOver => turn.is_used(),
            Course::Stopping(_) => true,
        });
        // A look at the bytes: a new socket counts as readable until one has looked.
        let mut first = [0];
        let (_resting, told) = self.places.rest();
        tokio::select! {
            biased;
            heard = timeout(IDLE_TIMEOUT, stream.peek(&mut first)) => heard.is_ok(),
            _ = leaving => false,
            _ = told => false,
        }
    }

    /// Answers requests until the connection has ended, or rests: then it is given back.
    async fn talk(&self, guard: Guard, turn: &Turn) -> hyper::Result<Option<Guard>> {
        // Boxed: between requests there is room for a pointer and not for a request.
        let service = service_fn(|request| Box::pin(self.respond(request, turn)));
        let mut connection = http1::Builder::new()
            // The guard has the time limits.
            .header_read_timeout(None)
            .max_buf_size(BUFFER)
            .serve_connection(TokioIo::new(guard), service);
        let mut alarm = Alarm::new(Instant::now() + REST_AFTER);
        turn.is_quiet();
        let mut course = self.course.clone();
        loop {
            match *course.borrow_and_update() {
                // Whoever has just connected brings a request, and it gets its answer.
                Course::HandingOver if !turn.is_used() => {}
                Course::Serving => {}
                Course::Draining => turn.drain(),
                Course::HandingOver | Course::Stopping(_) => {
                    Pin::new(&mut connection).graceful_shutdown();
                }
            }
            tokio::select! {
                // In this order: whether there is rest shows when hyper has done what it can.
                biased;
                ended = &mut connection => return ended.map(|()| None),
                () = turn.rests(&mut alarm) => return Ok(Some(connection.into_parts().io.into_inner())),
                Ok(()) = course.changed() => {}
            }
        }
    }

    async fn respond(
        &self,
        mut request: Request<Incoming>,
        turn: &Turn,
    ) -> Result<Response<Answer>, Infallible> {
        let chunked = request.headers().contains_key(header::TRANSFER_ENCODING);
        let endpoint = Endpoint::of(request.method(), request.uri().path());
        let named = *endpoint.as_ref().unwrap_or(&Endpoint::Admin);
        let config = &self.router.config;
        let id = request_id::choose(&config.request_id_headers, request.headers());
        request.headers_mut().insert(request_id::HEADER, id.clone());
        // Probes and dashboards would be most of the traces.
        let tracer = self.router.tracer.as_ref().filter(|_| named != Endpoint::Admin);
        let trace = tracer.and_then(|tracer| tracer.begin(request.headers()));
        let journal = (config.access_log || trace.is_some()).then(|| {
            Arc::new(Journal::new(id.clone(), named, self.client, config.access_log, trace))
        });
        let plane = *endpoint.as_ref().unwrap_or(&Endpoint::OtherV1);
        let reader = self.sites.reader(plane, request.headers());
        let answering = self.answer(endpoint, request, turn, journal.as_ref());
        let mut response = match answering.await {
            Ok(response) => response,
            Err(error) => error.to_response().map(ResponseBody::Own),
        };
        let headers = response.headers_mut();
        // The end of an encoded body is known to hyper alone, and so is where the next head begins.
        let is_last = *self.course.borrow() != Course::Serving || self.router.gate.is_draining();
        if chunked || is_last || self.place.get().is_none() || !turn.is_uploaded() {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        headers.insert(request_id::HEADER, id);
        if let Some(origin) = reader {
            allow_reading(headers, origin);
        }
        self.router.metrics.request(named, response.status());
        if let Some(journal) = &journal {
            journal.answered(response.status());
        }
        Ok(response.map(|body| Answer::new(body, turn.clone(), journal)))
    }

    /// Whether the connection has a place, or gets one soon.
    async fn has_place(&self) -> bool {
        if self.place.get().is_some() {
            return true;
        }
        let place = timeout(PLACE_WAIT, self.places.wait()).await;
        place.is_ok_and(|place| self.place.set(place).is_ok())
    }

    async fn answer(
        &self,
        endpoint: Result<Endpoint, Error>,
        request: Request<Incoming>,
        turn: &Turn,
        journal: Option<&Arc<Journal>>,
    ) -> Result<Response<ResponseBody>, Error> {
        if let Some(refusal) = turn.take_refusal() {
            return Err(refusal);
        }
        // What the data plane refuses for its method is a path of the data plane all the same.
        let plane = *endpoint.as_ref().unwrap_or(&Endpoint::OtherV1);
        if let Some(permission) = self.sites.preflight(&request) {
            return permission.map(|response| response.map(ResponseBody::Own));
        }
        let sent = (request.method(), request.headers());
        auth::check(&self.router.config, plane, request.uri().path(), sent, &self.sites)?;
        if plane.is_work() && !self.has_place().await {
            return Err(Error::TooManyConnections { limit: self.places.most });
        }
        match endpoint? {
            Endpoint::Admin | Endpoint::OpenApi => {
                let (head, body) = request.into_parts();
                let mut memory = Held::new(&self.router.bodies);
                let body = read_body(body, ADMIN_BODY_LIMIT, &mut memory).await?;
                turn.uploaded();
                let request = Request::from_parts(head, axum::body::Body::from(body));
                let Ok(response) = self.admin.clone().oneshot(request).await;
                Ok(response.map(ResponseBody::Admin))
            }
            // Boxed, because hyper moves the future of every request about.
            endpoint => {
                let answering =
                    forward(&self.router, endpoint, request, self.client.ip(), turn, journal);
                let answered = self.router.gate.unless_cut(Box::pin(answering)).await;
                answered.unwrap_or(Err(Error::Draining))
            }
        }
    }
}

/// Boxed, for it is large and over when the connection has just begun.
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
