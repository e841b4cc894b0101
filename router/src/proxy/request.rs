//! A client's request on its way to a worker: read whole, sent as often as it takes.

use std::{error::Error as _, io};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Method, Request, Uri, header, uri::PathAndQuery};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;

use super::replay;
use crate::{
    admission::Held, config::ApiKey, error::Error, fleet::worker::Worker, key::session_of,
    router::Router, telemetry, wire::headers,
};

/// Room reserved on a client's word about its body; beyond it, memory follows what really arrives.
const TRUSTED_LENGTH: usize = 1 << 20;

/// The client's request as each worker in turn gets it. Copies share the body's bytes.
pub struct WorkerRequest {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    pub body: Bytes,
    /// Of `body`, while that is held.
    memory: Option<Held>,
}

impl WorkerRequest {
    /// Reads the client's request whole.
    pub async fn read(request: Request<Incoming>, router: &Router) -> Result<Self, Error> {
        let (mut head, body) = request.into_parts();
        headers::for_worker(&mut head.headers);
        if router.config.has_keys() {
            // The client has shown it to the router, whom it was meant for.
            head.headers.remove(header::AUTHORIZATION);
        }
        // In the form in which an origin server wants it, whatever form the client has used.
        let path = head.uri.into_parts().path_and_query;
        let uri = path.map_or_else(Uri::default, Uri::from);
        let mut memory = Held::new(&router.bodies);
        let body = read_body(body, router.config.max_payload_size, &mut memory).await?;
        Ok(Self { method: head.method, uri, headers: head.headers, body, memory: Some(memory) })
    }

    /// With nothing but a body.
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

    /// Hash of the session that the client names in the request's head.
    pub fn session(&self) -> Option<u64> {
        self.headers.get("x-mla-session").and_then(|name| session_of(name.as_bytes()))
    }

    /// The next worker is told of the trace that the request belongs to.
    pub fn name_trace(&mut self, traceparent: HeaderValue) {
        self.headers.insert(telemetry::HEADER, traceparent);
    }

    /// The worker is to be ready to have its answer continued by another one.
    pub fn ask_for_replay(&mut self) {
        self.headers.insert(replay::HEADER, replay::ASK);
    }

    /// Lets the worker know that `body`, which continues a stream, is the router's word.
    pub fn sign(&mut self, key: &ApiKey, body: &[u8]) {
        let target = self.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let signature = replay::sign(key, target, body);
        self.headers.insert(replay::SIGNATURE, signature);
    }

    /// For a request that will not be sent again.
    pub fn drop_body(&mut self) {
        self.body = Bytes::new();
        self.memory = None;
    }

    pub fn is_replayable(&self) -> bool {
        self.headers.contains_key(replay::HEADER)
    }

    /// With `body`, which is the client's own or one made from it.
    pub fn to(&self, worker: &Worker, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().insert(header::HOST, worker.pool.host_header());
        if let Some(key) = worker.pool.authorization() {
            request.headers_mut().insert(header::AUTHORIZATION, key);
        }
        request
    }
}

/// The whole body. One that came in a single piece, as most do, is not copied.
pub(crate) async fn read_body(
    mut body: Incoming,
    limit: usize,
    held: &mut Held,
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
        BytesMut::with_capacity(announced.clamp(first.len(), TRUSTED_LENGTH.max(first.len())));
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
        // Trailers are the other kind of frame; nothing after the proxy could use them.
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// Why a body could not be read to its end: the reason of the connection's guard, if it has one.
fn unread(error: &hyper::Error) -> Error {
    let io = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    let reason = io.and_then(|error| error.get_ref()?.downcast_ref::<Error>());
    reason.cloned().unwrap_or_else(|| Error::BadBody(error.to_string()))
}
