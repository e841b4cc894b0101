//! The listening side: accepts connections, tells the data plane from the admin routes, and takes
//! connections down in order.

pub mod access_log;
mod answer;
pub mod framing;
pub mod journal;
pub mod request_id;

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use http::{HeaderValue, Request, Response, header};
use http_body::Body;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use subtle::{Choice, ConstantTimeEq};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout_at},
};
use tower::ServiceExt;

use crate::{
    admin,
    body::ResponseBody,
    config::Config,
    error::Error,
    handle::RouterHandle,
    proxy,
    proxy::endpoint::Endpoint,
    router::Router,
    server::{
        answer::Answer,
        framing::{Framing, Watched},
        journal::Journal,
    },
};

/// How long a client may leave its connection idle; longer than clients and proxies usually do, so
/// that it is they who close it and no request meets a closing connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);

/// Pause after a failed accept: out of file descriptors, most likely, which only time can mend.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// After the grace period, time to close what is still open.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Runs a router until it has come down: `drain` lets the requests in flight finish within the grace
/// period, `stop` ends them at once, also during a drain. The caller owns listener and signals.
pub async fn run(
    listener: TcpListener,
    config: Config,
    drain: impl Future<Output = ()>,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let grace = config.shutdown_grace_period_secs.get();
    let handle = RouterHandle::serve(listener, config)?;
    let drained = async {
        drain.await;
        handle.drain(grace).await
    };
    tokio::select! {
        _ = drained => {}
        () = stop => {}
    }
    handle.stop(LAST_WORDS).await;
    Ok(())
}

/// Accepts until told to stop by a deadline; then lets open connections finish until then.
pub(crate) async fn accept(
    listener: TcpListener,
    router: Arc<Router>,
    mut stopping: watch::Receiver<Option<Instant>>,
) {
    let admin = admin::routes(Arc::clone(&router));
    // Dropping the set aborts the connections that are left in it.
    let mut connections = JoinSet::new();
    let deadline = loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, client)) => {
                    let (router, admin) = (Arc::clone(&router), admin.clone());
                    let serving = Serving { router, admin, client };
                    connections.spawn(serving.connection(stream, stopping.clone()));
                }
                Err(error) => {
                    tracing::warn!("cannot accept a connection: {error}");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
            deadline = told(&mut stopping) => break deadline,
        }
    };
    drop(listener);
    let all_closed = async { while connections.join_next().await.is_some() {} };
    if timeout_at(deadline, all_closed).await.is_err() {
        tracing::warn!("closing {} connections that did not end in time", connections.len());
    }
}

async fn told(stopping: &mut watch::Receiver<Option<Instant>>) -> Instant {
    match stopping.wait_for(Option::is_some).await.map(|told| *told) {
        Ok(Some(deadline)) => deadline,
        // The handle is gone, and with it whoever could wait.
        Ok(None) | Err(_) => Instant::now(),
    }
}

/// What a connection needs to answer requests.
struct Serving {
    router: Arc<Router>,
    admin: axum::Router,
    client: SocketAddr,
}

impl Serving {
    async fn connection(self, stream: TcpStream, mut stopping: watch::Receiver<Option<Instant>>) {
        // Without it Nagle's algorithm holds back every frame of a stream until the client has
        // acknowledged the one before: 40 ms each.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("TCP_NODELAY: {error}");
        }
        let framing = Framing::default();
        let watched = Watched::new(stream, framing.clone());
        let service = service_fn(|request| self.serve(request, &framing));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_TIMEOUT)
            .serve_connection(TokioIo::new(watched), service);
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            _ = told(&mut stopping) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!("client connection: {error}");
        }
    }

    async fn serve(
        &self,
        mut request: Request<Incoming>,
        framing: &Framing,
    ) -> Result<Response<Answer>, Infallible> {
        let chunked = request.headers().contains_key(header::TRANSFER_ENCODING);
        let endpoint = Endpoint::of(request.method(), request.uri().path());
        let named = *endpoint.as_ref().unwrap_or(&Endpoint::Admin);
        let config = &self.router.config;
        let id = request_id::choose(&config.request_id_headers, request.headers());
        request.headers_mut().insert(request_id::HEADER, id.clone());
        let journal =
            config.access_log.then(|| Arc::new(Journal::new(id.clone(), named, self.client)));
        let answering = self.answer(endpoint, request, framing, journal.as_ref());
        let mut response = match answering.await {
            Ok(response) => response,
            Err(error) => error.to_response().map(ResponseBody::Own),
        };
        if chunked {
            // How long its encoding was is not known here, and so not where the next head begins.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response.headers_mut().insert(request_id::HEADER, id);
        self.router.metrics.request(named, response.status());
        if let Some(journal) = &journal {
            journal.answered(response.status());
        }
        Ok(response.map(|body| Answer::new(body, journal)))
    }

    async fn answer(
        &self,
        endpoint: Result<Endpoint, Error>,
        request: Request<Incoming>,
        framing: &Framing,
        journal: Option<&Arc<Journal>>,
    ) -> Result<Response<ResponseBody>, Error> {
        framing.begin(request.headers())?;
        if request.body().is_end_stream() {
            framing.end(0);
        }
        let length = request.body().size_hint().exact();
        if !self.is_allowed(&request) {
            return Err(Error::Unauthorized);
        }
        match endpoint? {
            Endpoint::Admin => {
                let Ok(response) = self.admin.clone().oneshot(request).await;
                if let Some(length) = length {
                    framing.end(length as usize);
                }
                Ok(response.map(ResponseBody::Admin))
            }
            endpoint => proxy::forward(&self.router, endpoint, request, framing, journal).await,
        }
    }

    fn is_allowed(&self, request: &Request<Incoming>) -> bool {
        let keys = &self.router.config.api_key;
        if keys.is_empty() {
            return true;
        }
        if admin::OPEN_PATHS.contains(&request.uri().path()) {
            return true;
        }
        let sent = request.headers().get(header::AUTHORIZATION);
        let sent = sent.and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        // In constant time, or the time to refuse a key would tell how much of it is right.
        sent.is_some_and(|sent| {
            keys.iter()
                .fold(Choice::from(0), |known, key| known | sent.ct_eq(key.as_bytes()))
                .into()
        })
    }
}
