//! A client's request on its way to a worker: read completely, and sent once for each attempt.

use std::mem;

use bytes::Bytes;
#[cfg(test)]
use http::Request;
use http::{HeaderMap, HeaderName, HeaderValue, Uri, header, request::Parts, uri::PathAndQuery};
use smallvec::SmallVec;

use crate::{
    admission::MemoryReservation,
    config::ApiKey,
    engine::continuation,
    fleet::{RANK_HEADER, Replica},
    key::session_of,
    telemetry,
    upstream::OutgoingRequest,
    wire::headers::{self, X_API_KEY},
};

/// Request header with the name of the client's session.
const SESSION_HEADER: HeaderName = HeaderName::from_static("x-mla-session");

/// The client's request as it is sent to workers. Copies share the bytes of the body.
pub struct WorkerRequest {
    /// Boxed, because it is large and passed on.
    head: Box<Parts>,
    pub body: Bytes,
    /// Memory of `body`; `None` if it needs no reservation, and once the body is dropped.
    memory: Option<MemoryReservation>,
}

impl WorkerRequest {
    /// Makes a request of this head and body. `memory` is the reservation for the body. If the router `has_keys`, it
    /// does not send the client's key to workers.
    pub(crate) fn new(
        mut head: Box<Parts>,
        body: Bytes,
        memory: Option<MemoryReservation>,
        has_keys: bool,
    ) -> Self {
        headers::for_worker(&mut head.headers);
        if has_keys {
            head.headers.remove(header::AUTHORIZATION);
            head.headers.remove(X_API_KEY);
        }
        // The origin form, also if the client sent an absolute URI.
        let path = mem::take(&mut head.uri).into_parts().path_and_query;
        head.uri = path.map_or_else(Uri::default, Uri::from);
        Self { head, body, memory }
    }

    /// A request with only a body.
    #[cfg(test)]
    pub(super) fn of_body(body: &'static [u8]) -> Self {
        let (head, ()) = Request::post("/").body(()).expect("a request").into_parts();
        Self { head: Box::new(head), body: Bytes::from_static(body), memory: None }
    }

    pub fn headers(&self) -> &HeaderMap {
        &self.head.headers
    }

    /// Hash of the session in the header `x-mla-session`.
    pub fn session(&self) -> Option<u64> {
        headers::find(&self.head.headers, &SESSION_HEADER)
            .and_then(|name| session_of(name.as_bytes()))
    }

    /// Sets the trace context for the next worker.
    pub fn set_trace_context(&mut self, traceparent: HeaderValue) {
        self.head.headers.insert(telemetry::HEADER, traceparent);
    }

    /// Asks the worker for a stream that another worker can continue.
    pub fn ask_for_replay(&mut self) {
        self.head.headers.insert(continuation::HEADER, continuation::ASK);
    }

    /// Signs `body`, which continues a stream.
    pub fn sign(&mut self, key: &ApiKey, body: &[u8]) {
        let target = self.head.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let signature = continuation::sign(key, target, body);
        self.head.headers.insert(continuation::SIGNATURE, signature);
    }

    /// Frees the memory of a request that will not be sent again: its body, and its head, which may be views of the same
    /// buffer.
    pub fn release(&mut self) {
        self.head.uri = Uri::default();
        self.head.headers = HeaderMap::new();
        self.body = Bytes::new();
        self.memory = None;
    }

    /// Whether a continuable stream was requested.
    pub fn is_replayable(&self) -> bool {
        self.head.headers.contains_key(continuation::HEADER)
    }

    /// The request for `replica`. `body` is the client's body, or one made from it.
    pub fn to<'a>(&'a self, replica: &'a Replica, body: &'a Bytes) -> OutgoingRequest<'a> {
        let pool = &replica.backend.pool;
        let mut replaced = SmallVec::new();
        replaced.push((header::HOST, Some(pool.host_header())));
        if let Some(rank) = &replica.rank_header {
            replaced.push((RANK_HEADER, Some(rank)));
        }
        if let Some(key) = pool.authorization() {
            replaced.extend([(header::AUTHORIZATION, Some(key)), (X_API_KEY, None)]);
        }
        let Parts { method, uri, headers: fields, .. } = &*self.head;
        OutgoingRequest { method, uri, fields, replaced, body }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_request_frees_the_buffer_that_it_was_read_to() {
        let read = Bytes::from(b"/generate value body".to_vec());
        let uri = Uri::from_maybe_shared(read.slice(..9)).expect("a path");
        let value = HeaderValue::from_maybe_shared(read.slice(10..15)).expect("text");
        let head = Request::post(uri).header("name", value).body(()).expect("a request");
        let (head, ()) = head.into_parts();
        let mut request = WorkerRequest::new(Box::new(head), read.slice(16..), None, false);
        assert!(!read.is_unique());
        request.release();
        assert!(read.is_unique());
    }
}
