//! A worker's no, as its client may get to see it.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;

use crate::wire::headers;

/// A worker's answer that says no, kept for the client in case nobody says yes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Refusal {
    /// As the worker sent it, with the advice to come back if it gave none.
    pub fn to_response(&self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(self.body.clone()));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers.clone();
        let headers = response.headers_mut();
        headers::for_client(headers);
        // The length is what is sent, also if the body was too long to be kept.
        headers.remove(header::CONTENT_LENGTH);
        if matches!(self.status.as_u16(), 429 | 502 | 503) {
            headers.entry(header::RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
        }
        response
    }
}
