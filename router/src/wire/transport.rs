//! The transport to a client or a worker: TCP, or TLS over TCP.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::TlsStream;

/// Keepalive of idle connections. A peer whose machine or network has failed is detected within half a minute. The user
/// timeout ends a connection whose probes have no answer, so it leaves time for several of them: a network may drop one,
/// and Linux drops most of a thousand that leave a machine at once.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(8);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(4);
/// Time limit for bytes that the peer does not acknowledge or does not read.
const USER_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(crate) enum Transport {
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Sets the options of a socket. A failure is logged only: the request works without them.
pub(crate) fn prepare(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
    let set = stream
        // Without this option Nagle's algorithm delays each small segment until the previous one is acknowledged:
        // 40 ms a frame.
        .set_nodelay(true)
        .and_then(|()| socket.set_tcp_keepalive(&keepalive))
        .and_then(|()| socket.set_tcp_user_timeout(Some(USER_TIMEOUT)));
    if let Err(error) = set {
        tracing::debug!("options of a socket: {error}");
    }
}

impl Transport {
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Self::Tcp(stream) => stream,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }

    /// Whether the peer has neither sent anything nor closed the connection. No task is woken when it does.
    pub(crate) fn is_quiet(&mut self) -> bool {
        let mut byte = [0];
        match self {
            // A system call only if the socket has become readable.
            Self::Tcp(stream) => {
                let read = stream.try_read(&mut byte);
                read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            }
            Self::Tls(stream) => {
                let mut nobody = Context::from_waker(Waker::noop());
                Pin::new(stream).poll_read(&mut nobody, &mut ReadBuf::new(&mut byte)).is_pending()
            }
        }
    }
}

/// Calls the same method on either variant.
macro_rules! either {
    ($self:expr, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Transport::Tcp($stream) => $call,
            Transport::Tls($stream) => $call,
        }
    };
}

impl AsyncRead for Transport {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Transport {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Tcp(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_dead_peer_is_detected_within_half_a_minute_and_two_lost_probes_are_none() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let stream = TcpStream::connect(address).await.expect("it listens");
        prepare(&stream);
        let socket = SockRef::from(&stream);
        assert!(stream.nodelay().expect("a socket") && socket.keepalive().expect("a socket"));
        let unacknowledged = socket.tcp_user_timeout().expect("Linux").expect("set");
        // With a user timeout, probes go on until that has passed since the last answer.
        let first = socket.tcp_keepalive_time().expect("a socket");
        let interval = socket.tcp_keepalive_interval().expect("a socket");
        assert!(unacknowledged.max(first + interval) + interval <= Duration::from_secs(30));
        // The third probe leaves before the timeout.
        assert!(first + interval * 2 < unacknowledged);
    }
}
