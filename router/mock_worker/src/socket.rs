//! A connection that can freeze, like that of a stopped process, and whose next write can be corrupted.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

/// Blocks all connections while it is frozen.
#[derive(Default)]
pub struct Freezer {
    /// Waiting tasks; `None` while it is not frozen.
    waiting: Mutex<Option<Vec<Waker>>>,
}

impl Freezer {
    pub fn freeze(&self) {
        self.waiting.lock().get_or_insert_default();
    }

    pub fn thaw(&self) {
        for waker in self.waiting.lock().take().unwrap_or_default() {
            waker.wake();
        }
    }

    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut *self.waiting.lock() {
            None => Poll::Ready(()),
            Some(waiting) => {
                waiting.push(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Returns when it is not frozen.
    pub async fn passed(&self) {
        std::future::poll_fn(|cx| self.poll(cx)).await;
    }
}

/// If set, the first byte of the connection's next write is replaced.
pub type Spoil = Arc<AtomicBool>;

pub struct Socket {
    pub stream: TcpStream,
    pub freezer: Arc<Freezer>,
    pub spoil: Spoil,
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        std::task::ready!(self.freezer.poll(cx));
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        std::task::ready!(self.freezer.poll(cx));
        if bytes.is_empty() || !self.spoil.swap(false, Ordering::Relaxed) {
            return Pin::new(&mut self.stream).poll_write(cx, bytes);
        }
        // No digit of a chunk's size.
        let written = Pin::new(&mut self.stream).poll_write(cx, b"Z");
        self.spoil.store(written.is_pending(), Ordering::Relaxed);
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        std::task::ready!(self.freezer.poll(cx));
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
