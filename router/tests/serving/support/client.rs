//! Clients: an HTTP client that sees each frame, and a client for raw bytes.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::convert::Infallible;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    task::JoinHandle,
};

type AnyBody = BoxBody<Bytes, Infallible>;

/// Sets TCP_NODELAY. A segment that waits for an acknowledgement would be late on a paused clock.
async fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).await.expect("the router listens");
    stream.set_nodelay(true).expect("a TCP socket");
    stream
}

/// One keep-alive connection. Dropping it closes the connection.
pub(crate) struct Client {
    sender: http1::SendRequest<AnyBody>,
    driver: JoinHandle<()>,
}

pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }

    /// Returns the `code` of an error. Checks that the body has OpenAI's error shape.
    pub(crate) fn error_code(&self) -> String {
        let body = self.json();
        let error = body["error"].as_object().expect("an error object");
        assert!(error["message"].is_string() && error["type"].is_string(), "{body}");
        assert!(error.contains_key("param"), "{body}");
        error["code"].as_str().expect("a code").to_owned()
    }
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::over(connect(address).await).await
    }

    pub(crate) async fn over(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        let (sender, driver) =
            http1::handshake(TokioIo::new(stream)).await.expect("a fresh connection");
        // A test may make it fail; the sender then returns the error.
        let driver = tokio::spawn(async move { drop(driver.await) });
        Self { sender, driver }
    }

    /// Returns the response head. The test reads the body.
    pub(crate) async fn send(
        &mut self,
        request: Request<AnyBody>,
    ) -> hyper::Result<Response<Incoming>> {
        self.sender.ready().await?;
        self.sender.send_request(request).await
    }

    pub(crate) async fn call(&mut self, request: Request<AnyBody>) -> hyper::Result<Answer> {
        let (head, body) = self.send(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Answer { status: head.status, headers: head.headers, body })
    }

    pub(crate) async fn post(&mut self, path: &str, body: impl Into<Bytes>) -> Answer {
        self.call(post(path, body)).await.expect("a whole response")
    }

    pub(crate) async fn get(&mut self, path: &str) -> Answer {
        self.call(request(Method::GET, path, Bytes::new())).await.expect("a whole response")
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

pub(crate) fn post(path: &str, body: impl Into<Bytes>) -> Request<AnyBody> {
    request(Method::POST, path, body)
}

pub(crate) fn request(method: Method, path: &str, body: impl Into<Bytes>) -> Request<AnyBody> {
    let builder = Request::builder().method(method).uri(path).header("host", "localhost");
    builder.body(Full::new(body.into()).boxed()).expect("a valid request")
}

/// A connection for raw bytes that no client library would send.
pub(crate) struct Raw(TcpStream);

impl Raw {
    pub(crate) async fn send(address: SocketAddr, bytes: &[u8]) -> Self {
        let mut stream = connect(address).await;
        stream.write_all(bytes).await.expect("the router reads");
        Self(stream)
    }

    pub(crate) async fn send_more(&mut self, bytes: &[u8]) {
        // The router may have refused the earlier bytes.
        let _sent = self.0.write_all(bytes).await;
    }

    /// Reads until the router closes the connection.
    pub(crate) async fn read_to_close(self) -> String {
        String::from_utf8(self.read_bytes_to_close().await).expect("text")
    }

    pub(crate) async fn read_bytes_to_close(mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        // A reset is an end as well: the router may close with unread bytes.
        let _ended = self.0.read_to_end(&mut bytes).await;
        bytes
    }
}
