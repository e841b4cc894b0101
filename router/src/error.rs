//! The errors of the router, and their HTTP responses.

use std::{fmt::Display, io, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde_json::{Value, json};
use thiserror::Error;

use crate::wire::headers;

/// An error response of the router.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    #[error("the request body is larger than {limit} bytes, the limit set by --max-payload-size")]
    PayloadTooLarge { limit: usize },
    #[error("the bodies of all requests together would take more than {limit} bytes")]
    BodiesTooLarge { limit: usize },
    #[error("the request body could not be read: {0}")]
    BadBody(String),
    #[error("the request cannot be read: {0}")]
    BadHead(&'static str),
    #[error("the head of the request is too large")]
    HeadTooLarge,
    #[error("the request has more than {limit} header fields")]
    TooManyFields { limit: usize },
    #[error("the request's target has more than {limit} bytes")]
    UriTooLong { limit: usize },
    #[error("the head of the request did not arrive within {after:?}")]
    HeadTimeout { after: Duration },
    #[error("no byte of the request body arrived for {after:?}")]
    BodyTimeout { after: Duration },
    #[error(
        "the request's body came slower than {rate} bytes a second, the limit set by --body-min-rate"
    )]
    BodyTooSlow { rate: u32 },
    #[error("{limit} connections are open, the limit set by --max-connections or by open files")]
    TooManyConnections { limit: usize },
    #[error("the request has both a content length and a transfer encoding")]
    AmbiguousLength,
    #[error("{message}")]
    BadRequest { param: &'static str, message: String },
    #[error("missing or wrong API key; send it as `Authorization: Bearer KEY`")]
    Unauthorized,
    #[error("the Host {0} is not a name of this router; to allow it, add it to --allowed-hosts")]
    ForeignHost(String),
    #[error("web pages of {0} may not send this request; to allow it, set --cors-allowed-origins")]
    ForeignOrigin(String),
    #[error("unknown path: {0}; /docs lists the paths")]
    NotFound(String),
    #[error("this path does not take that method{}", allow.map(|allow| format!("; use {allow}")).unwrap_or_default())]
    MethodNotAllowed { allow: Option<&'static str> },
    #[error("worker {0} is already registered")]
    WorkerExists(String),
    #[error("no worker {0} is registered")]
    WorkerUnknown(String),
    #[error("no worker is healthy{}", if waited.is_zero() { String::new() } else { format!("; waited {waited:?} for one") })]
    NoHealthyWorker { waited: Duration },
    #[error("{limit} requests already wait for a worker")]
    QueueFull { limit: usize, retry_after: u64 },
    #[error(
        "at the present rate a worker would take the request after {wait:.0?}, and --queue-timeout-secs allows \
         {limit:?}"
    )]
    QueueSlow { wait: Duration, limit: Duration, retry_after: u64 },
    #[error("no worker could take the request within {waited:?}")]
    QueueTimeout { waited: Duration, retry_after: u64 },
    #[error("the operator aborted all requests")]
    Aborted,
    #[error("the router is shutting down")]
    Draining,
    #[error("no worker answered; tried {attempts}, last: {last}")]
    WorkersFailed { attempts: u32, last: String },
    /// The error response of a worker, after all workers have failed.
    #[error("the worker answered {}", .0.status)]
    Refused(Box<Refusal>),
    #[error("workers broke the connection or froze {deaths} times when they had this request")]
    Poisonous { deaths: u32 },
    #[error("the request was not answered within {after:?}")]
    Timeout { after: Duration },
}

impl From<Box<Refusal>> for Error {
    fn from(refusal: Box<Refusal>) -> Self {
        Self::Refused(refusal)
    }
}

/// Builds an error body in OpenAI's shape.
pub fn openai(message: &impl Display, kind: &str, param: Option<&str>, code: &str) -> Value {
    json!({
        "error": {
            "message": message.to_string(),
            "type": kind,
            "param": param,
            "code": code,
        }
    })
}

impl Error {
    /// The HTTP status, OpenAI's `type`, and a stable `code`.
    pub fn status(&self) -> (StatusCode, &'static str, &'static str) {
        const INVALID: &str = "invalid_request_error";
        const SERVER: &str = "server_error";
        match self {
            Self::BodiesTooLarge { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, SERVER, "bodies_too_large")
            }
            Self::PayloadTooLarge { .. } => {
                (StatusCode::PAYLOAD_TOO_LARGE, INVALID, "payload_too_large")
            }
            Self::BadBody(_) => (StatusCode::BAD_REQUEST, INVALID, "bad_body"),
            Self::BadHead(_) => (StatusCode::BAD_REQUEST, INVALID, "bad_head"),
            Self::HeadTooLarge | Self::TooManyFields { .. } => {
                (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, INVALID, "head_too_large")
            }
            Self::UriTooLong { .. } => (StatusCode::URI_TOO_LONG, INVALID, "uri_too_long"),
            Self::TooManyConnections { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, SERVER, "too_many_connections")
            }
            Self::HeadTimeout { .. } | Self::BodyTimeout { .. } | Self::BodyTooSlow { .. } => {
                (StatusCode::REQUEST_TIMEOUT, INVALID, "request_timeout")
            }
            Self::AmbiguousLength => (StatusCode::BAD_REQUEST, INVALID, "ambiguous_length"),
            Self::BadRequest { .. } => (StatusCode::BAD_REQUEST, INVALID, "invalid_value"),
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, INVALID, "invalid_api_key"),
            Self::ForeignHost(_) => (StatusCode::FORBIDDEN, INVALID, "host_not_allowed"),
            Self::ForeignOrigin(_) => (StatusCode::FORBIDDEN, INVALID, "origin_not_allowed"),
            Self::NotFound(_) => (StatusCode::NOT_FOUND, INVALID, "unknown_path"),
            Self::MethodNotAllowed { .. } => {
                (StatusCode::METHOD_NOT_ALLOWED, INVALID, "method_not_allowed")
            }
            Self::WorkerExists(_) => (StatusCode::CONFLICT, INVALID, "worker_exists"),
            Self::WorkerUnknown(_) => (StatusCode::NOT_FOUND, INVALID, "worker_unknown"),
            Self::NoHealthyWorker { .. } => {
                (StatusCode::SERVICE_UNAVAILABLE, SERVER, "no_healthy_worker")
            }
            Self::QueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, SERVER, "queue_full"),
            Self::QueueSlow { .. } => (StatusCode::TOO_MANY_REQUESTS, SERVER, "queue_slow"),
            Self::QueueTimeout { .. } => (StatusCode::SERVICE_UNAVAILABLE, SERVER, "queue_timeout"),
            Self::Aborted => (StatusCode::SERVICE_UNAVAILABLE, SERVER, "aborted"),
            Self::Draining => (StatusCode::SERVICE_UNAVAILABLE, SERVER, "draining"),
            Self::WorkersFailed { .. } => (StatusCode::BAD_GATEWAY, SERVER, "workers_failed"),
            Self::Refused(refusal) => (refusal.status, SERVER, "worker_refused"),
            Self::Poisonous { .. } => {
                (StatusCode::INTERNAL_SERVER_ERROR, SERVER, "request_kills_workers")
            }
            Self::Timeout { .. } => (StatusCode::GATEWAY_TIMEOUT, SERVER, "timeout"),
        }
    }

    /// The invalid field of the request, if there is one.
    fn param(&self) -> Option<&'static str> {
        match self {
            Self::BadRequest { param, .. } => Some(param),
            _ => None,
        }
    }

    /// Builds the response in OpenAI's error shape.
    pub fn to_response(&self) -> Response<Full<Bytes>> {
        if let Self::Refused(refusal) = self {
            return refusal.to_response();
        }
        let (status, kind, code) = self.status();
        let body = openai(self, kind, self.param(), code);
        let mut response = Response::new(Full::from(body.to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self {
            Self::QueueFull { retry_after, .. }
            | Self::QueueSlow { retry_after, .. }
            | Self::QueueTimeout { retry_after, .. } => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(*retry_after));
            }
            Self::Poisonous { .. } | Self::Aborted => {
                // OpenAI's clients retry these statuses by default.
                let name = HeaderName::from_static("x-should-retry");
                headers.insert(name, HeaderValue::from_static("false"));
            }
            // One second, the interval of health checks: after it a retry may succeed.
            _ if matches!(status.as_u16(), 429 | 502 | 503) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Self::MethodNotAllowed { allow: Some(allow) } => {
                headers.insert(header::ALLOW, HeaderValue::from_static(allow));
            }
            Self::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

/// An error response of a worker, kept for the client in case every other worker fails too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Refusal {
    /// Returns the worker's response. Status 429, 502 and 503 get a Retry-After header if the worker sent none.
    pub fn to_response(&self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(self.body.clone()));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers.clone();
        let headers = response.headers_mut();
        headers::for_client(headers);
        // A body that was too long to be kept is empty here, so the worker's length may be wrong.
        headers.remove(header::CONTENT_LENGTH);
        if matches!(self.status.as_u16(), 429 | 502 | 503) {
            headers.entry(header::RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
        }
        response
    }
}

/// Why a router did not start. The message is one line.
#[derive(Debug, Error)]
pub enum StartError {
    #[error("cannot listen on {host}:{port}: {source}{}", if source.kind() == io::ErrorKind::AddrInUse {
        "; give another --port, or --port 0 for any free one"
    } else {
        ""
    })]
    Listen { host: String, port: u16, source: io::Error },
    #[error(
        "without a key, every client that can reach {host} could use the workers: set --api-key (or \
         MLA_ROUTER_API_KEY), listen on 127.0.0.1, or use --insecure"
    )]
    Exposed { host: String },
    #[error("{0}")]
    Tls(String),
    #[error("{0}")]
    Discovery(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}
