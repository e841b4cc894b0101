//! What is remembered of one request, for its line in the access log and for its trace.
//!
//! Only kept when somebody will read it: without access log and traces there is no journal, and
//! nothing is allocated or formatted. Everybody who works on the request holds the same one and
//! writes down what it knows; the line is written when the last of them lets go, which is the end of
//! the request on every path, a client's leaving included.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use http::{HeaderValue, StatusCode};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::{
    endpoint::Endpoint,
    fleet::worker::Worker,
    policy::Reason,
    telemetry::{self, TraceContext, Tracer, access_log},
};

/// One request's journal. Hold it as `Option<Arc<Journal>>`.
#[derive(Debug)]
pub struct Journal {
    pub request_id: HeaderValue,
    pub endpoint: Endpoint,
    pub client: SocketAddr,
    pub begun: Instant,
    /// Whether the access log gets a line.
    logged: bool,
    trace: Option<Trace>,
    facts: Mutex<Facts>,
}

/// Whether and where the request's spans go.
pub type Trace = (Arc<Tracer>, TraceContext);

/// What becomes known on the way.
#[derive(Debug, Default)]
pub struct Facts {
    /// `None`: the client left before there was an answer.
    pub status: Option<StatusCode>,
    /// The workers that were asked, in order.
    pub tries: SmallVec<[Try; 1]>,
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    /// When the first byte of the response's body went to the client, after the beginning.
    pub first_byte: Option<Duration>,
    /// Of the response's body.
    pub bytes: u64,
    pub end: End,
}

/// A worker that was asked.
#[derive(Debug)]
pub struct Try {
    pub worker: Arc<Worker>,
    pub reason: Reason,
    /// After the beginning of the request.
    pub at: Duration,
    /// Its name in the trace.
    pub span: u64,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// Dropped before the response was complete: nobody was left to read it.
    #[default]
    ClientGone,
    /// The client got a whole response, be it an error.
    Complete,
    /// The response broke off after it had begun.
    Broken,
}

impl End {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ClientGone => "client_gone",
            Self::Complete => "complete",
            Self::Broken => "error",
        }
    }
}

impl Journal {
    pub fn new(
        request_id: HeaderValue,
        endpoint: Endpoint,
        client: SocketAddr,
        logged: bool,
        trace: Option<Trace>,
    ) -> Self {
        let (begun, facts) = (Instant::now(), Mutex::default());
        Self { request_id, endpoint, client, begun, logged, trace, facts }
    }

    /// The request goes to `worker`, chosen for `reason`. Returns what to tell it of the trace.
    pub fn sent_to(&self, worker: &Arc<Worker>, reason: Reason) -> Option<HeaderValue> {
        let (worker, at) = (Arc::clone(worker), self.begun.elapsed());
        let span = telemetry::new_span();
        self.facts.lock().tries.push(Try { worker, reason, at, span });
        self.trace.as_ref().map(|(_, context)| context.header(span))
    }

    /// What the worker said about the prompt.
    pub fn usage(&self, prompt_tokens: Option<u64>, cached_tokens: Option<u64>) {
        let mut facts = self.facts.lock();
        facts.prompt_tokens = prompt_tokens.or(facts.prompt_tokens);
        facts.cached_tokens = cached_tokens.or(facts.cached_tokens);
    }

    /// The status that goes to the client.
    pub fn answered(&self, status: StatusCode) {
        self.facts.lock().status = Some(status);
    }

    /// The response cannot be completed, whatever its last frame looks like.
    pub fn broke(&self) {
        self.facts.lock().end = End::Broken;
    }

    /// The response's body is over, or given up.
    pub fn ended(&self, end: End, bytes: u64, first_byte: Option<Instant>) {
        let mut facts = self.facts.lock();
        facts.first_byte = first_byte.map(|at| at - self.begun);
        facts.bytes = bytes;
        if facts.end != End::Broken {
            facts.end = end;
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let facts = std::mem::take(self.facts.get_mut());
        if let Some((tracer, context)) = &self.trace {
            tracer.record(self, &facts, context);
        }
        if self.logged {
            access_log::write(self, &facts);
        }
    }
}
