//! A request to a worker, as it is sent: the fields of the client's request, and those that belong to the worker.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use smallvec::SmallVec;

/// The request. It borrows its head, so that an attempt copies no map of fields.
#[derive(Debug)]
pub struct OutgoingRequest<'a> {
    pub method: &'a Method,
    pub uri: &'a Uri,
    pub fields: &'a HeaderMap,
    /// Fields that replace those of the same name; `None` removes them.
    pub replaced: SmallVec<[(HeaderName, Option<&'a HeaderValue>); 4]>,
    pub body: &'a Bytes,
}

impl OutgoingRequest<'_> {
    /// All fields that are sent.
    pub(super) fn sent_fields(&self) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> {
        let is_kept = |name: &HeaderName| self.replaced.iter().all(|(other, _)| other != name);
        let own = self.replaced.iter().filter_map(|(name, value)| Some((name, (*value)?)));
        own.chain(self.fields.iter().filter(move |(name, _)| is_kept(name)))
    }

    /// The request with a map of its fields, for HTTP/2.
    pub(super) fn to_request(&self) -> Request<Bytes> {
        let mut request = Request::new(self.body.clone());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        for (name, value) in self.sent_fields() {
            request.headers_mut().append(name, value.clone());
        }
        request
    }
}

impl<'a> From<&'a Request<Bytes>> for OutgoingRequest<'a> {
    fn from(request: &'a Request<Bytes>) -> Self {
        Self {
            method: request.method(),
            uri: request.uri(),
            fields: request.headers(),
            replaced: SmallVec::new(),
            body: request.body(),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::header;

    use super::*;

    #[test]
    fn the_fields_of_the_worker_replace_those_of_the_client() {
        let client = Request::builder()
            .method(Method::PUT)
            .uri("/x?y=1")
            .header("host", "client")
            .header("a", "1")
            .header("authorization", "one")
            .header("authorization", "two")
            .header("a", "2")
            .body(Bytes::from_static(b"body"))
            .expect("a valid request");
        let host = HeaderValue::from_static("worker");
        let mut sent = OutgoingRequest::from(&client);
        sent.replaced.push((header::HOST, Some(&host)));
        sent.replaced.push((header::AUTHORIZATION, None));
        let sent = sent.to_request();
        assert_eq!(
            (sent.method(), sent.uri().path(), &sent.body()[..]),
            (&Method::PUT, "/x", &b"body"[..])
        );
        let mut fields: Vec<_> =
            sent.headers().iter().map(|(n, v)| (n.as_str(), v.as_bytes())).collect();
        fields.sort_unstable();
        assert_eq!(fields, [("a", &b"1"[..]), ("a", b"2"), ("host", b"worker")]);
    }
}
