//! An HTTP/1.1 connection to a worker.
//!
//! The task that waits for a response does the I/O: one task for each request, no hand-over between threads, and an
//! abort without code, because dropping the request drops the socket. hyper's client consists of a sender and a driver,
//! which pass request, response and body to each other over channels, and wake each other.

use std::{
    future::poll_fn,
    io::{self, Cursor, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, buf::Chain};
use http::{Method, header, response::Parts};
use http_body::SizeHint;
use tokio::io::AsyncWrite;

use super::{
    OutgoingRequest,
    response::{self, Framing, Head},
};
use crate::wire::{http1::poll_fill, transport::Transport};

/// Maximum size of a response head.
const MAX_HEAD: usize = 32 << 10;

/// A body of up to this size is copied after its head: a write of one buffer costs less than one of two.
const MAX_COPIED: usize = 4 << 10;

/// Head and body of a request.
type Unsent = Chain<Cursor<Vec<u8>>, Bytes>;

#[derive(Debug)]
pub(super) struct Http1 {
    transport: Transport,
    /// The part of the request that has not been sent.
    unsent: Option<Unsent>,
    /// Whether the request is a HEAD.
    is_head: bool,
    /// Bytes from the worker that have not been parsed.
    unread: Bytes,
    /// The rest of the present response.
    framing: Framing,
    /// Whether the connection may be used again after the present response.
    keeps_alive: bool,
}

impl Http1 {
    pub(super) fn new(transport: Transport) -> Self {
        let framing = Framing::Length(0);
        let unread = Bytes::new();
        Self { transport, unsent: None, is_head: false, unread, framing, keeps_alive: true }
    }

    /// Sends a request and waits for the head of its response.
    pub(super) fn send(
        &mut self,
        request: &OutgoingRequest<'_>,
    ) -> impl Future<Output = io::Result<Box<Parts>>> + use<'_> {
        // Until the response is read completely.
        self.keeps_alive = false;
        self.is_head = request.method == Method::HEAD;
        self.unsent = Some(to_bytes(request));
        poll_fn(|cx| {
            let sent = self.poll_send(cx);
            // Also after a failure: the worker may have refused the request before it closed the connection.
            match (self.poll_head(cx), sent) {
                (Poll::Pending, Poll::Ready(Err(error))) => Poll::Ready(Err(error)),
                (head, _) => head,
            }
        })
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(unsent) = &mut self.unsent else {
            return Poll::Ready(Ok(()));
        };
        let mut transport = Pin::new(&mut self.transport);
        while unsent.has_remaining() {
            let mut slices = [IoSlice::new(&[]); 2];
            let written = match unsent.chunks_vectored(&mut slices) {
                1 => transport.as_mut().poll_write(cx, &slices[0]),
                count => transport.as_mut().poll_write_vectored(cx, &slices[..count]),
            };
            match ready!(written)? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => unsent.advance(written),
            }
        }
        ready!(transport.poll_flush(cx))?;
        // Frees the body, which may be large.
        self.unsent = None;
        Poll::Ready(Ok(()))
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Box<Parts>>> {
        loop {
            if !self.unread.is_empty() {
                let head = response::read(&mut self.unread, self.is_head).map_err(malformed)?;
                if let Some(Head { parts, framing, keeps_alive }) = head {
                    (self.framing, self.keeps_alive) = (framing, keeps_alive);
                    return Poll::Ready(Ok(parts));
                }
                if self.unread.len() > MAX_HEAD {
                    return Poll::Ready(Err(malformed("a too large head")));
                }
            }
            if !ready!(self.poll_fill(cx))? {
                let error = io::Error::new(io::ErrorKind::UnexpectedEof, "the worker closed it");
                return Poll::Ready(Err(error));
            }
        }
    }

    /// The next bytes of the response body; `None` at its end. After an error the connection cannot be used.
    pub(super) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        // The worker may answer before it has read the whole request, and may not want the rest.
        if self.unsent.is_some() && !matches!(self.poll_send(cx), Poll::Ready(Ok(()))) {
            self.keeps_alive = false;
        }
        loop {
            match self.framing.next(&mut self.unread) {
                Ok(Some(data)) => return Poll::Ready(Some(Ok(data))),
                Ok(None) if self.framing.is_complete() => return Poll::Ready(None),
                Ok(None) => {}
                Err(defect) => return Poll::Ready(Some(Err(malformed(defect)))),
            }
            if !ready!(self.poll_fill(cx))? {
                if matches!(self.framing, Framing::UntilClose) {
                    self.framing = Framing::Length(0);
                    return Poll::Ready(None);
                }
                let error = io::Error::new(io::ErrorKind::UnexpectedEof, "the body is incomplete");
                return Poll::Ready(Some(Err(error)));
            }
        }
    }

    /// Reads bytes and appends them to `unread`. Ready with false at the end of the stream.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        poll_fill(&mut self.transport, &mut self.unread, cx)
    }

    /// Whether the response has been read to its end.
    pub(super) fn has_ended(&self) -> bool {
        self.framing.is_complete()
    }

    /// The number of bytes of the body that have not been returned.
    pub(super) fn size_hint(&self) -> SizeHint {
        match self.framing {
            Framing::Length(left) => SizeHint::with_exact(left),
            _ => SizeHint::default(),
        }
    }

    /// Whether the last response has been read, nothing was after it, and the worker keeps the connection open.
    pub(super) fn is_idle(&self) -> bool {
        self.keeps_alive && self.unsent.is_none() && self.has_ended() && self.unread.is_empty()
    }

    /// Whether the connection can take another request: it is idle, and the worker has neither closed it nor sent
    /// anything since.
    pub(super) fn is_reusable(&mut self) -> bool {
        self.is_idle() && self.transport.is_quiet()
    }
}

/// The request line, the header fields with the length of the body, and the body.
fn to_bytes(request: &OutgoingRequest<'_>) -> Unsent {
    let (copied, rest) = match request.body.len() {
        ..=MAX_COPIED => (&request.body[..], Bytes::new()),
        _ => (&[][..], request.body.clone()),
    };
    let fields = request.fields.len() + request.replaced.len();
    let mut head = Vec::with_capacity(64 * (fields + 2) + copied.len());
    let target = request.uri.path_and_query().map_or("/", |target| target.as_str());
    for part in [request.method.as_str(), " ", target, " HTTP/1.1\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    let mut add = |name: &str, value: &[u8]| {
        for part in [name.as_bytes(), b": ", value, b"\r\n"] {
            head.extend_from_slice(part);
        }
    };
    for (name, value) in request.sent_fields() {
        add(name.as_str(), value.as_bytes());
    }
    let length = request.body.len();
    // A method that defines no body needs no length for an empty one.
    if length > 0 || !matches!(*request.method, Method::GET | Method::HEAD) {
        add(header::CONTENT_LENGTH.as_str(), itoa::Buffer::new().format(length).as_bytes());
    }
    head.extend_from_slice(b"\r\n");
    head.extend_from_slice(copied);
    Cursor::new(head).chain(rest)
}

fn malformed(defect: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, defect)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::{Request, StatusCode};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
        time::timeout,
    };

    use super::*;

    /// A connection and its other end.
    async fn pair() -> (Http1, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (worker, router) = tokio::join!(listener.accept(), TcpStream::connect(address));
        (Http1::new(Transport::Tcp(router.expect("it listens"))), worker.expect("a client").0)
    }

    fn request(method: Method, body: impl Into<Bytes>) -> Request<Bytes> {
        let request = Request::builder().method(method).uri("/v1/x?y=1").header("host", "w:1");
        request.header("X-A", "b").body(body.into()).expect("a valid request")
    }

    /// Reads the rest of a body.
    async fn rest(connection: &mut Http1) -> io::Result<Vec<u8>> {
        let mut whole = Vec::new();
        while let Some(data) = poll_fn(|cx| connection.poll_data(cx)).await.transpose()? {
            whole.extend_from_slice(&data);
        }
        Ok(whole)
    }

    /// The outcome of a request to a worker that sends `response` and then closes the connection.
    async fn exchange(response: &str) -> io::Result<(StatusCode, Vec<u8>)> {
        let (mut connection, mut worker) = pair().await;
        worker.write_all(response.as_bytes()).await.expect("open");
        drop(worker);
        let parts = connection.send(&(&request(Method::GET, "")).into()).await?;
        Ok((parts.status, rest(&mut connection).await?))
    }

    #[tokio::test]
    async fn requests_are_sent_with_the_length_of_their_body() {
        let start = "/v1/x?y=1 HTTP/1.1\r\nhost: w:1\r\nx-a: b\r\n";
        for (method, body, end) in [
            (Method::GET, "", "\r\n"),
            (Method::POST, "", "content-length: 0\r\n\r\n"),
            (Method::POST, "text", "content-length: 4\r\n\r\ntext"),
        ] {
            let (mut connection, mut worker) = pair().await;
            worker.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.expect("open");
            connection.send(&(&request(method.clone(), body)).into()).await.expect("a response");
            drop(connection);
            let mut sent = String::new();
            worker.read_to_string(&mut sent).await.expect("text");
            assert_eq!(sent, format!("{method} {start}{end}"));
        }
    }

    #[tokio::test]
    async fn a_connection_is_reusable_after_a_whole_response_only() {
        let (mut connection, mut worker) = pair().await;
        assert!(connection.is_reusable());
        for response in [
            "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
        ] {
            worker.write_all(response.as_bytes()).await.expect("open");
            connection.send(&(&request(Method::POST, "x")).into()).await.expect("a response");
            assert!(!connection.is_reusable());
            assert_eq!(rest(&mut connection).await.expect("a body"), b"body");
            assert!(connection.is_reusable());
        }
        drop(worker);
        timeout(Duration::from_secs(20), async {
            while connection.is_reusable() {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("the end of the stream is detected");
    }

    #[tokio::test]
    async fn a_connection_with_bytes_behind_the_response_is_not_reusable() {
        let (mut connection, mut worker) = pair().await;
        worker.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab").await.expect("open");
        connection.send(&(&request(Method::GET, "")).into()).await.expect("a response");
        assert_eq!(rest(&mut connection).await.expect("a body"), b"a");
        assert!(!connection.is_reusable());
    }

    #[tokio::test]
    async fn a_body_ends_by_its_framing() {
        let good = Ok((StatusCode::OK, b"body".to_vec()));
        for (response, expected) in [
            ("content-length: 4\r\n\r\nbody", good.clone()),
            ("\r\nbody", good),
            ("content-length: 5\r\n\r\nbody", Err(io::ErrorKind::UnexpectedEof)),
            ("content-length: x\r\n\r\nbody", Err(io::ErrorKind::InvalidData)),
            ("transfer-encoding: chunked\r\n\r\n4\r\nbody\r\n", Err(io::ErrorKind::UnexpectedEof)),
            ("transfer-encoding: chunked\r\n\r\nbody", Err(io::ErrorKind::InvalidData)),
        ] {
            let outcome = exchange(&format!("HTTP/1.1 200 OK\r\n{response}")).await;
            assert_eq!(outcome.map_err(|error| error.kind()), expected, "{response:?}");
        }
        let cut = exchange("HTTP/1.1 200 OK\r\n").await;
        assert_eq!(cut.expect_err("no head").kind(), io::ErrorKind::UnexpectedEof);
        let long = exchange(&format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(MAX_HEAD))).await;
        assert_eq!(long.expect_err("no head").kind(), io::ErrorKind::InvalidData);
    }

    /// The worker refuses the request without reading its body, which is larger than the buffers of the sockets.
    #[tokio::test]
    async fn a_response_before_the_end_of_the_request_is_read() {
        let (mut connection, mut worker) = pair().await;
        let response = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno";
        worker.write_all(response).await.expect("open");
        let large = request(Method::POST, vec![b'x'; 64 << 20]);
        let parts = timeout(Duration::from_secs(20), connection.send(&(&large).into())).await;
        assert_eq!(parts.expect("in time").expect("a response").status, 413);
        assert_eq!(rest(&mut connection).await.expect("a body"), b"no");
        assert!(!connection.is_reusable());
    }
}
