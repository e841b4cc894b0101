//! One client's connection: hyper over a guarded stream, and what each request on it meets first.

use std::{convert::Infallible, net::SocketAddr, sync::Arc};

use http::{HeaderValue, Request, Response, header};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    sync::watch,
    time::{Instant, timeout},
};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use crate::{
    body::ResponseBody,
    error::Error,
    proxy::{self, endpoint::Endpoint, request::read_body},
    router::Router,
    server::{
        answer::Answer,
        auth,
        guard::{Guard, Limits},
        head::MAX_HEAD,
        journal::Journal,
        request_id,
        turn::Turn,
    },
    transport::{self, Transport},
};

/// What hyper may hold of a response that its client does not take, or of a request. A stream whose
/// client is slow holds its worker back beyond this. Room for a head, at least.
const BUFFER: usize = MAX_HEAD + (16 << 10);

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
    pub(super) client: SocketAddr,
    pub(super) course: watch::Receiver<Course>,
}

impl Serving {
    pub(super) async fn run(self, stream: TcpStream, tls: Option<TlsAcceptor>) {
        transport::prepare(&stream);
        let mut course = self.course.clone();
        // Until it has something to say a client costs no buffers.
        tokio::select! {
            _ = stream.readable() => {}
            () = is_stopping(&mut course) => return,
        }
        // Boxed, so that waiting for it is small.
        if let Err(error) = Box::pin(self.serve(stream, tls)).await {
            tracing::debug!("client connection: {error}");
        }
    }

    async fn serve(
        self,
        stream: TcpStream,
        tls: Option<TlsAcceptor>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let config = &self.router.config;
        let limits = Limits {
            head: config.header_read_timeout_secs.get(),
            body_pause: config.body_read_timeout_secs.get(),
        };
        let transport = match tls {
            None => Transport::Tcp(stream),
            Some(tls) => {
                Transport::Tls(Box::new(timeout(limits.head, tls.accept(stream)).await??.into()))
            }
        };
        let turn = Turn::default();
        let guarded = Guard::new(transport, turn.clone(), limits);
        let service = service_fn(|request| self.respond(request, &turn));
        let connection = http1::Builder::new()
            // The guard has the time limits.
            .header_read_timeout(None)
            .max_buf_size(BUFFER)
            .serve_connection(TokioIo::new(guarded), service);
        tokio::pin!(connection);
        let mut course = self.course.clone();
        loop {
            match *course.borrow_and_update() {
                // Whoever has just connected brings a request, and it gets its answer.
                Course::HandingOver if !turn.is_used() => {}
                Course::Serving => {}
                Course::Draining => turn.drain(),
                Course::HandingOver | Course::Stopping(_) => {
                    connection.as_mut().graceful_shutdown();
                }
            }
            tokio::select! {
                ended = connection.as_mut() => return Ok(ended?),
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
        let answering = self.answer(endpoint, request, turn, journal.as_ref());
        let mut response = match answering.await {
            Ok(response) => response,
            Err(error) => error.to_response().map(ResponseBody::Own),
        };
        let headers = response.headers_mut();
        // The end of an encoded body is known to hyper alone, and so is where the next head begins.
        let is_last = *self.course.borrow() != Course::Serving || self.router.gate.is_draining();
        if chunked || is_last || !turn.is_uploaded() {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        headers.insert(request_id::HEADER, id);
        self.router.metrics.request(named, response.status());
        if let Some(journal) = &journal {
            journal.answered(response.status());
        }
        Ok(response.map(|body| Answer::new(body, turn.clone(), journal)))
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
        auth::check(&self.router.config, plane, request.uri().path(), request.headers())?;
        match endpoint? {
            Endpoint::Admin => {
                let (head, body) = request.into_parts();
                let body = read_body(body, ADMIN_BODY_LIMIT).await?;
                turn.uploaded();
                let request = Request::from_parts(head, axum::body::Body::from(body));
                let Ok(response) = self.admin.clone().oneshot(request).await;
                Ok(response.map(ResponseBody::Admin))
            }
            // Boxed, because hyper moves the future of every request about.
            endpoint => {
                Box::pin(proxy::forward(&self.router, endpoint, request, turn, journal)).await
            }
        }
    }
}

async fn is_stopping(course: &mut watch::Receiver<Course>) {
    // An error: the handle is gone, and with it whoever could want the router to go on.
    let _stopping = course.wait_for(|course| matches!(course, Course::Stopping(_))).await;
}
