//! Collects the record of one request while it runs, and writes it out at the end.
//!
//! A request has a log only if the access log or traces are on: otherwise nothing is allocated or formatted. All parts
//! of the router that serve the request share the log through an `Arc`. The record is written when the last of them
//! drops it. So every path writes it, also when the client disconnects.

use std::{net::SocketAddr, sync::Arc, time::Instant};

use http::{HeaderValue, StatusCode};
use parking_lot::Mutex;

use super::{
    TraceContext, Tracer, access_log, new_span,
    record::{Attempt, End, RequestRecord},
};
use crate::{endpoint::Endpoint, fleet::Replica, policy::Reason};

/// The log of one request.
#[derive(Debug)]
pub struct RequestLog {
    record: Mutex<RequestRecord>,
    started: Instant,
    /// Whether the access log gets a line.
    logged: bool,
    trace: Option<Trace>,
}

/// The exporter of a traced request, and its place in the trace.
pub type Trace = (Arc<Tracer>, TraceContext);

impl RequestLog {
    pub fn new(
        request_id: HeaderValue,
        endpoint: Endpoint,
        client: SocketAddr,
        logged: bool,
        trace: Option<Trace>,
    ) -> Self {
        let record = RequestRecord::new(request_id, endpoint, client);
        Self { started: record.started, record: Mutex::new(record), logged, trace }
    }

    /// Adds an attempt on `replica`. Returns the `traceparent` header for the worker, if the request is traced.
    pub fn sent_to(&self, replica: &Arc<Replica>, reason: Reason) -> Option<HeaderValue> {
        let (replica, at) = (Arc::clone(replica), self.started.elapsed());
        let span = new_span();
        self.record.lock().attempts.push(Attempt { replica, reason, at, span });
        self.trace.as_ref().map(|(_, context)| context.header(span))
    }

    /// Sets the counts that the worker reported. A count that is `None` keeps its value.
    pub fn usage(&self, prompt_tokens: Option<u64>, cached_tokens: Option<u64>) {
        let mut record = self.record.lock();
        record.prompt_tokens = prompt_tokens.or(record.prompt_tokens);
        record.cached_tokens = cached_tokens.or(record.cached_tokens);
    }

    /// Sets the status of the response.
    pub fn answered(&self, status: StatusCode) {
        self.record.lock().status = Some(status);
    }

    /// Marks the response as broken. A later `ended` does not remove the mark, although the last frame may
    /// look complete.
    pub fn mark_broken(&self) {
        self.record.lock().end = End::Broken;
    }

    /// Sets the end of the response body.
    pub fn ended(&self, end: End, bytes: u64, first_byte: Option<Instant>) {
        let mut record = self.record.lock();
        record.first_byte = first_byte.map(|at| at - self.started);
        record.bytes = bytes;
        if record.end != End::Broken {
            record.end = end;
        }
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        let record = self.record.get_mut();
        if let Some((tracer, context)) = &self.trace {
            tracer.record(record, context);
        }
        if self.logged {
            access_log::write(record);
        }
    }
}
