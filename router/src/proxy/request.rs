//! A client's request on its way to a worker: read completely, and sent once for each attempt.

use std::{error::Error as _, io};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header, uri::PathAndQuery};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;

use crate::{
    admission::MemoryReservation,
    config::ApiKey,
    engine::continuation,
    error::Error,
    fleet::{RANK_HEADER, Replica},
    key::session_of,
    router::Router,
    telemetry,
    wire::headers::{self, X_API_KEY},
};

/// Maximum number of bytes that are reserved for the client's Content-Length. Beyond it, memory grows with the bytes
/// that arrive.
const MAX_RESERVED: usize = 1 << 20;

/// Request header with the name of the client's session.
const SESSION_HEADER: HeaderName = HeaderName::from_static("x-mla-session");

/// The client's request as it is sent to workers. Copies share the bytes of the body.
pub struct WorkerRequest {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    pub body: Bytes,
    /// Memory of `body`; `None` once the body is dropped.
    memory: Option<MemoryReservation>,
}

impl WorkerRequest {
    /// Reads the client's request completely. Fails if the body is too large or cannot be read.
    pub async fn read(request: Request<Incoming>, router: &Router) -> Result<Self, Error> {
        let (mut head, body) = request.into_parts();
        headers::for_worker(&mut head.headers);
        if router.config.has_keys() {
            // The key of the client is for the router only.
            head.headers.remove(header::AUTHORIZATION);
            head.headers.remove(X_API_KEY);
        }
        // The origin form, also if the client sent an absolute URI.
        let path = head.uri.into_parts().path_and_query;
        let uri = path.map_or_else(Uri::default, Uri::from);
        let mut memory = MemoryReservation::new(&router.bodies);
        let body = read_body(body, router.config.max_payload_size, &mut memory).await?;
        Ok(Self { method: head.method, uri, headers: head.headers, body, memory: Some(memory) })
    }

    /// A request with only a body.
    #[cfg(test)]
    pub(super) fn of_body(body: &'static [u8]) -> Self {
        Self {
            method: Method::POST,
            uri: Uri::default(),
            headers: HeaderMap::new(),
            body: Bytes::from_static(body),
            memory: None,
        }
    }

    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// Hash of the session in the header `x-mla-session`.
    pub fn session(&self) -> Option<u64> {
        self.headers.get(SESSION_HEADER).and_then(|name| session_of(name.as_bytes()))
    }

    /// Sets the trace context for the next worker.
    pub fn set_trace_context(&mut self, traceparent: HeaderValue) {
        self.headers.insert(telemetry::HEADER, traceparent);
    }

    /// Asks the worker for a stream that another worker can continue.
    pub fn ask_for_replay(&mut self) {
        self.headers.insert(continuation::HEADER, continuation::ASK);
    }

    /// Signs `body`, which continues a stream.
    pub fn sign(&mut self, key: &ApiKey, body: &[u8]) {
        let target = self.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let signature = continuation::sign(key, target, body);
        self.headers.insert(continuation::SIGNATURE, signature);
    }

    /// Frees the body of a request that will not be sent again.
    pub fn drop_body(&mut self) {
        self.body = Bytes::new();
        self.memory = None;
    }

    /// Whether a continuable stream was requested.
    pub fn is_replayable(&self) -> bool {
        self.headers.contains_key(continuation::HEADER)
    }

    /// Builds the request for `replica`. `body` is the client's body, or one made from it.
    pub fn to(&self, replica: &Replica, body: Bytes) -> Request<Bytes> {
        let mut request = Request::new(body);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().insert(header::HOST, replica.backend.pool.host_header());
        if let Some(rank) = replica.rank_header() {
            request.headers_mut().insert(RANK_HEADER, rank);
        }
        if let Some(key) = replica.backend.pool.authorization() {
            let headers = request.headers_mut();
            headers.insert(header::AUTHORIZATION, key);
            headers.remove(X_API_KEY);
        }
        request
    }
}

/// Reads a whole body. A body in one piece, the usual case, is not copied.
pub(crate) async fn read_body(
    mut body: Incoming,
    limit: usize,
    held: &mut MemoryReservation,
) -> Result<Bytes, Error> {
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > limit {
        return Err(Error::PayloadTooLarge { limit });
    }
    let Some(first) = next_data(&mut body).await? else {
        return Ok(Bytes::new());
    };
    if first.len() > limit {
        return Err(Error::PayloadTooLarge { limit });
    }
    if body.is_end_stream() {
        return Ok(first);
    }
    let mut whole =
        BytesMut::with_capacity(announced.clamp(first.len(), MAX_RESERVED.max(first.len())));
    whole.extend_from_slice(&first);
    held.grow(whole.capacity())?;
    while let Some(data) = next_data(&mut body).await? {
        if whole.len() + data.len() > limit {
            return Err(Error::PayloadTooLarge { limit });
        }
        whole.extend_from_slice(&data);
        held.grow(whole.capacity())?;
    }
    Ok(whole.freeze())
}

async fn next_data(body: &mut Incoming) -> Result<Option<Bytes>, Error> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| unread(&error))?;
        // Trailers are dropped: no worker uses them.
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// The error for a body that could not be read: the reason of the connection's guard, if there is one.
fn unread(error: &hyper::Error) -> Error {
    let io = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    let reason = io.and_then(|error| error.get_ref()?.downcast_ref::<Error>());
    reason.cloned().unwrap_or_else(|| Error::BadBody(error.to_string()))
}
