//! Writes a response to a client: head, framing and body.

use std::{
    io::{self, IoSlice, Write},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
use http::{Response, StatusCode, header, response::Parts};
use http_body::Body;
use hyper::ext::ReasonPhrase;
use tokio::io::AsyncWrite;

use super::date;
use crate::wire::transport::Transport;

/// Frames of up to this size are copied after the head or the frames before them, so that all go out in one write.
const MAX_COPIED: usize = 4 << 10;

/// Bytes that wait for the client from which on the body is not polled: a slow client slows its worker down.
const MAX_WAITING: usize = 16 << 10;

/// Memory that a connection keeps for its next frames.
const MAX_KEPT: usize = 4 << 10;

/// The request that is answered, as far as the form of the response depends on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) is_head: bool,
    pub(super) is_http_10: bool,
}

/// A response that is being written.
pub(super) struct ResponseWriter<B> {
    /// `None` once it has ended, or if the response has none.
    body: Option<B>,
    framing: Framing,
    /// The head and small frames, of which `sent` bytes are sent.
    copied: Vec<u8>,
    sent: usize,
    /// A large frame, after `copied`.
    large: Bytes,
    /// Bytes after the large frame.
    behind: &'static [u8],
    is_broken: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// The number of bytes that are left.
    Length(u64),
    Chunked,
    /// For clients of HTTP/1.0.
    UntilClose,
}

impl<B: Body<Data = Bytes> + Unpin> ResponseWriter<B> {
    /// Starts a response. Without `keeps`, the client is told that the connection will be closed.
    pub(super) fn new(response: Response<B>, asked: Asked, keeps: &mut bool) -> Self {
        let (parts, body) = response.into_parts();
        let has_no_body = asked.is_head
            || parts.status.is_informational()
            || matches!(parts.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        let framing = match body.size_hint().exact() {
            _ if has_no_body => Framing::Length(0),
            Some(length) => Framing::Length(length),
            None if asked.is_http_10 => Framing::UntilClose,
            None => Framing::Chunked,
        };
        *keeps &= framing != Framing::UntilClose;
        let copied = write_head(&parts, asked, (!has_no_body).then_some(framing), *keeps);
        let body = (!has_no_body).then_some(body);
        let (large, behind) = (Bytes::new(), &[][..]);
        Self { body, framing, copied, sent: 0, large, behind, is_broken: false }
    }

    /// Writes the response to its end. Fails if the connection or the body breaks.
    pub(super) fn poll_write(
        &mut self,
        transport: &mut Transport,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        // Whether the body wakes the task for its next frame.
        let mut is_waiting = false;
        loop {
            is_waiting |= self.poll_body(cx).is_pending();
            while self.is_unsent() {
                let copied = &self.copied[self.sent..];
                let transport = Pin::new(&mut *transport);
                let written = if self.large.is_empty() && self.behind.is_empty() {
                    transport.poll_write(cx, copied)
                } else {
                    let slices = [copied, &self.large, self.behind].map(IoSlice::new);
                    transport.poll_write_vectored(cx, &slices)
                };
                match ready!(written)? {
                    0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    written => self.advance(written),
                }
            }
            if self.body.is_none() {
                ready!(Pin::new(transport).poll_flush(cx))?;
                let cut = || io::Error::other("the body of the response broke");
                return Poll::Ready(if self.is_broken { Err(cut()) } else { Ok(()) });
            }
            if is_waiting {
                ready!(Pin::new(transport).poll_flush(cx))?;
                return Poll::Pending;
            }
        }
    }

    fn is_unsent(&self) -> bool {
        self.sent < self.copied.len() || !self.large.is_empty() || !self.behind.is_empty()
    }

    fn advance(&mut self, written: usize) {
        let copied = written.min(self.copied.len() - self.sent);
        self.sent += copied;
        let large = (written - copied).min(self.large.len());
        self.large.advance(large);
        self.behind = &self.behind[written - copied - large..];
        if self.sent == self.copied.len() {
            self.sent = 0;
            self.copied.clear();
            self.copied.shrink_to(MAX_KEPT);
        }
    }

    /// Takes frames while there is room for them. Pending if the body has none at present.
    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.large.is_empty() && self.behind.is_empty() && self.copied.len() < MAX_WAITING {
            let Some(body) = &mut self.body else { break };
            if body.is_end_stream() {
                self.end();
                break;
            }
            match ready!(Pin::new(body).poll_frame(cx)) {
                // Trailers are dropped.
                Some(Ok(frame)) => self.push(frame.into_data().unwrap_or_default()),
                Some(Err(_)) => self.break_off(),
                None => self.end(),
            }
        }
        Poll::Ready(())
    }

    fn push(&mut self, data: Bytes) {
        if data.is_empty() {
            return;
        }
        match &mut self.framing {
            Framing::Length(left) => match left.checked_sub(data.len() as u64) {
                Some(rest) => *left = rest,
                None => return self.break_off(),
            },
            Framing::Chunked => {
                write!(self.copied, "{:x}\r\n", data.len()).expect("contract: a vector grows");
            }
            Framing::UntilClose => {}
        }
        let end: &[u8] = if self.framing == Framing::Chunked { b"\r\n" } else { b"" };
        if data.len() <= MAX_COPIED {
            self.copied.extend_from_slice(&data);
            self.copied.extend_from_slice(end);
        } else {
            (self.large, self.behind) = (data, end);
        }
    }

    /// Ends the response with its last bytes.
    fn end(&mut self) {
        self.body = None;
        match self.framing {
            Framing::Length(0) | Framing::UntilClose => {}
            Framing::Length(_) => self.is_broken = true,
            Framing::Chunked => self.copied.extend_from_slice(b"0\r\n\r\n"),
        }
    }

    /// Ends the response so that the client sees that it is incomplete.
    fn break_off(&mut self) {
        self.body = None;
        self.is_broken = true;
    }
}

/// The status line and the fields. `framing` is `None` for a response without a body.
fn write_head(parts: &Parts, asked: Asked, framing: Option<Framing>, keeps: bool) -> Vec<u8> {
    let mut head = Vec::with_capacity(512);
    let version: &[u8] = if asked.is_http_10 { b"HTTP/1.0 " } else { b"HTTP/1.1 " };
    head.extend_from_slice(version);
    head.extend_from_slice(parts.status.as_str().as_bytes());
    head.push(b' ');
    match parts.extensions.get::<ReasonPhrase>() {
        Some(reason) => head.extend_from_slice(reason.as_bytes()),
        None => head.extend_from_slice(parts.status.canonical_reason().unwrap_or("").as_bytes()),
    }
    head.extend_from_slice(b"\r\n");
    // A response to HEAD and a 304 have no body. Their length is the length of the body that a GET would return.
    let keeps_length = framing.is_none() && parts.status != StatusCode::NO_CONTENT;
    for (name, value) in &parts.headers {
        let is_length = *name == header::CONTENT_LENGTH;
        if (keeps_length || !is_length) && *name != header::TRANSFER_ENCODING {
            add(&mut head, name.as_str(), value.as_bytes());
        }
    }
    match framing {
        Some(Framing::Length(length)) => {
            add(&mut head, "content-length", itoa::Buffer::new().format(length).as_bytes());
        }
        Some(Framing::Chunked) => add(&mut head, "transfer-encoding", b"chunked"),
        Some(Framing::UntilClose) | None => {}
    }
    match (keeps, asked.is_http_10) {
        (false, _) => add(&mut head, "connection", b"close"),
        (true, true) => add(&mut head, "connection", b"keep-alive"),
        (true, false) => {}
    }
    if !parts.headers.contains_key(header::DATE) {
        add(&mut head, "date", &date::now());
    }
    head.extend_from_slice(b"\r\n");
    head
}

fn add(head: &mut Vec<u8>, name: &str, value: &[u8]) {
    for part in [name.as_bytes(), b": ", value, b"\r\n"] {
        head.extend_from_slice(part);
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, future::poll_fn};

    use http::HeaderValue;
    use http_body::{Frame, SizeHint};
    use tokio::{
        io::AsyncReadExt,
        net::{TcpListener, TcpStream},
    };

    use super::*;

    const GET: Asked = Asked { is_head: false, is_http_10: false };

    /// Frames, then the end or an error.
    struct Scripted {
        frames: VecDeque<Bytes>,
        length: Option<u64>,
        breaks: bool,
    }

    fn frames<const N: usize>(frames: [&[u8]; N], length: Option<u64>) -> Scripted {
        let frames = frames.map(Bytes::copy_from_slice).into();
        Scripted { frames, length, breaks: false }
    }

    impl Body for Scripted {
        type Data = Bytes;
        type Error = ();

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, ()>>> {
            let next = self.frames.pop_front().map(|data| Ok(Frame::data(data)));
            Poll::Ready(next.or(self.breaks.then_some(Err(()))))
        }

        fn size_hint(&self) -> SizeHint {
            self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
        }
    }

    /// A response with a `Date`, so that its head is always the same.
    fn response<B>(body: B) -> Response<B> {
        let mut response = Response::new(body);
        response.headers_mut().insert(header::DATE, HeaderValue::from_static("today"));
        response
    }

    /// What a client reads until the connection is closed, whether it may send another request, and whether the
    /// response was complete.
    async fn written<B: Body<Data = Bytes> + Unpin>(
        response: Response<B>,
        asked: Asked,
    ) -> (String, bool, bool) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (router, client) = tokio::join!(listener.accept(), TcpStream::connect(address));
        let mut transport = Transport::Tcp(router.expect("a client").0);
        let mut keeps = true;
        let mut writer = ResponseWriter::new(response, asked, &mut keeps);
        let mut text = String::new();
        let writing = async move {
            let outcome = poll_fn(|cx| writer.poll_write(&mut transport, cx)).await;
            drop(transport);
            outcome.is_ok()
        };
        let mut client = client.expect("it listens");
        let (is_complete, read) = tokio::join!(writing, client.read_to_string(&mut text));
        read.expect("text");
        (text, keeps, is_complete)
    }

    #[tokio::test]
    async fn the_length_of_a_body_determines_its_framing() {
        const HEAD: &str = "HTTP/1.1 200 OK\r\ndate: today\r\n";
        for (length, expected) in [
            (Some(5), "content-length: 5\r\n\r\nab|cd"),
            (None, "transfer-encoding: chunked\r\n\r\n3\r\nab|\r\n2\r\ncd\r\n0\r\n\r\n"),
        ] {
            let response = response(frames([b"ab|", b"", b"cd"], length));
            let expected = (format!("{HEAD}{expected}"), true, true);
            assert_eq!(written(response, GET).await, expected);
        }
        let old = Asked { is_http_10: true, ..GET };
        let (text, keeps, is_complete) = written(response(frames([b"ab"], None)), old).await;
        let head = "HTTP/1.0 200 OK\r\ndate: today\r\nconnection: close\r\n\r\n";
        assert_eq!((text, keeps, is_complete), (format!("{head}ab"), false, true));
        let (text, keeps, _) = written(response(frames([b"ab"], Some(2))), old).await;
        assert!(keeps && text.contains("\r\nconnection: keep-alive\r\n"), "{text}");
    }

    /// The length that a worker has announced is not trusted.
    #[tokio::test]
    async fn fields_about_the_framing_are_replaced() {
        let mut response = response(frames([b"ab"], Some(2)));
        for (name, value) in [("content-length", "7"), ("transfer-encoding", "gzip, chunked")] {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        let (text, ..) = written(response, GET).await;
        assert_eq!(text, "HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 2\r\n\r\nab");
    }

    #[tokio::test]
    async fn large_and_small_frames_arrive_in_order() {
        let large = vec![b'x'; MAX_COPIED + 1];
        let huge = vec![b'y'; 4 << 20];
        let parts = [&b"a"[..], &large, b"b", &large, &huge, b"c"];
        let whole = parts.concat();
        let (text, ..) = written(response(frames(parts, Some(whole.len() as u64))), GET).await;
        assert!(text.as_bytes().ends_with(&whole), "{} bytes", text.len());
        let (text, ..) = written(response(frames(parts, None)), GET).await;
        let chunks =
            parts.map(|part| [format!("{:x}\r\n", part.len()).as_bytes(), part, b"\r\n"].concat());
        let body = [&chunks.concat()[..], b"0\r\n\r\n"].concat();
        let (_, sent) = text.split_once("\r\n\r\n").expect("a head");
        assert!(sent.as_bytes() == body, "{} bytes", text.len());
    }

    #[tokio::test]
    async fn a_broken_body_does_not_look_complete() {
        let broken = Scripted { breaks: true, ..frames([b"ab"], None) };
        let (text, _, is_complete) = written(response(broken), GET).await;
        assert!(text.ends_with("\r\n\r\n2\r\nab\r\n") && !is_complete, "{text}");
        for length in [1, 3] {
            let (text, _, is_complete) =
                written(response(frames([b"ab"], Some(length))), GET).await;
            let body = text.split_once("\r\n\r\n").expect("a head").1;
            assert!(body.len() < length as usize && !is_complete, "{length}: {text}");
        }
    }

    #[tokio::test]
    async fn responses_without_a_body_have_the_length_of_none() {
        let head = Asked { is_head: true, ..GET };
        for (status, asked, length) in [(200, head, true), (304, GET, true), (204, GET, false)] {
            let mut response = response(frames([b"abc"], Some(3)));
            *response.status_mut() = StatusCode::from_u16(status).expect("a status");
            response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from_static("9"));
            let (text, keeps, is_complete) = written(response, asked).await;
            assert!(text.ends_with("\r\n\r\n") && keeps && is_complete, "{text}");
            assert_eq!(text.contains("content-length: 9\r\n"), length, "{text}");
            assert_eq!(text.matches("content-length").count(), usize::from(length), "{text}");
        }
    }

    #[tokio::test]
    async fn the_reason_of_the_worker_is_kept() {
        let empty = http_body_util::Empty::<Bytes>::new;
        let mut named = Response::new(empty());
        named.extensions_mut().insert(ReasonPhrase::from_static(b"Fine"));
        assert!(written(named, GET).await.0.starts_with("HTTP/1.1 200 Fine\r\n"));
        let mut unknown = Response::new(empty());
        *unknown.status_mut() = StatusCode::from_u16(599).expect("a status");
        assert!(written(unknown, GET).await.0.starts_with("HTTP/1.1 599 \r\n"));
    }
}
