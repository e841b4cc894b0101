//! A client that does not read slows its worker down with a bounded buffer, and is disconnected in the end.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mla_router::{Config, RouterHandle, fleet::Phase};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

use crate::support::{all_in, assert_nothing_reserved, config, router_without_waiting, soon};

/// Largest buffer of the router for one stream.
const BOUND: u64 = 256 << 10;

/// Allowed difference between the head and chunks of the router and those of the worker.
const SLACK: u64 = 4096;

const HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// Endless streams written directly to the socket, so that every byte is accounted for.
struct Firehose {
    address: SocketAddr,
    /// Bytes that the kernel has accepted.
    written: Arc<AtomicU64>,
    /// The router's port of each stream; the sender is dropped at the end of the stream.
    streams: mpsc::UnboundedReceiver<Option<u16>>,
}

impl Firehose {
    async fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let written = Arc::new(AtomicU64::new(0));
        let (told, streams) = mpsc::unbounded_channel();
        let counted = Arc::clone(&written);
        tokio::spawn(async move {
            while let Ok((stream, peer)) = listener.accept().await {
                tokio::spawn(serve(stream, peer.port(), Arc::clone(&counted), told.clone()));
            }
        });
        Self { address, written, streams }
    }

    fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}

async fn serve(
    mut stream: TcpStream,
    port: u16,
    written: Arc<AtomicU64>,
    told: mpsc::UnboundedSender<Option<u16>>,
) {
    let mut head = [0; 4096];
    while let Ok(read @ 1..) = stream.read(&mut head).await {
        if head[..read].starts_with(b"GET") {
            let healthy = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
            stream.write_all(healthy).await.expect("the router reads");
            continue;
        }
        told.send(Some(port)).expect("the test listens");
        // Large, so that the buffers are full long before the client is disconnected.
        let event = format!("data: {{\"choices\":[\"{}\"]}}\n\n", "x".repeat(16 << 10));
        let chunk = format!("{:x}\r\n{event}\r\n", event.len()).into_bytes();
        let mut out = HEAD;
        while let Ok(length @ 1..) = stream.write(out).await {
            written.fetch_add(length as u64, Ordering::Relaxed);
            out = &out[length..];
            if out.is_empty() {
                out = &chunk;
            }
        }
        told.send(None).expect("the test listens");
        return;
    }
}

/// Bytes in the kernel between two ports of this machine: sent and not acknowledged, and arrived and
/// not read.
fn queued(from: u16, to: u16) -> u64 {
    let table = std::fs::read_to_string("/proc/net/tcp").expect("Linux");
    let sockets = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let hex = |text: &str| u64::from_str_radix(text, 16).expect("hexadecimal");
    let port = |address: &str| hex(address.rsplit(':').next().expect("a port")) as u16;
    sockets
        .map(|fields| {
            let (out, arrived) = fields[4].split_once(':').expect("two queues");
            match (port(fields[1]), port(fields[2])) {
                (local, remote) if (local, remote) == (from, to) => hex(out),
                (local, remote) if (local, remote) == (to, from) => hex(arrived),
                _ => 0,
            }
        })
        .sum()
}

/// A router, its worker, and a client that has requested a stream and does not read it.
async fn unread_stream() -> (Firehose, RouterHandle, TcpStream) {
    let worker = Firehose::start().await;
    let url = format!("http://{}", worker.address).parse().expect("a valid URL");
    let config = Config { worker_urls: vec![url], ..config() };
    let router = router_without_waiting(config, &[]).await;
    all_in(Phase::Healthy, &router).await;
    let mut client = TcpStream::connect(router.local_addr()).await.expect("the router listens");
    let body = r#"{"messages":[],"stream":true}"#;
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    client.write_all(request.as_bytes()).await.expect("the router reads");
    (worker, router, client)
}

/// Waits until the stream stops because all buffers are full, with more bytes on the way than the router may hold.
/// Returns the bytes written.
async fn buffers_are_full(worker: &Firehose) -> u64 {
    let (mut written, mut same) = (0, 0);
    soon(async {
        while same < 5 || written <= BOUND {
            tokio::time::sleep(Duration::from_millis(50)).await;
            same = if worker.written() == written { same + 1 } else { 0 };
            written = worker.written();
        }
        written
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_reader_is_buffered_little_and_closed_after_a_timeout() {
    let (mut worker, router, client) = unread_stream().await;
    let upstream = soon(worker.streams.recv()).await.flatten().expect("a stream");
    let (router_port, client_port) =
        (router.local_addr().port(), client.local_addr().expect("bound").port());
    let outside = || queued(worker.address.port(), upstream) + queued(router_port, client_port);
    // Nothing moves between two readings of the same values.
    let (written, outside) = soon(async {
        loop {
            let before = (buffers_are_full(&worker).await, outside());
            if before == (worker.written(), outside()) {
                break before;
            }
        }
    })
    .await;
    let held = (written + SLACK).saturating_sub(outside);
    assert!(held <= BOUND + SLACK, "{held} of {written} bytes");
    // The kernel closes the connection of a client that reads nothing.
    assert_eq!(soon(worker.streams.recv()).await, Some(None));
    assert_nothing_reserved(&router).await;
    drop(client);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_reader_does_not_delay_the_stop() {
    let (mut worker, router, _client) = unread_stream().await;
    soon(worker.streams.recv()).await.flatten().expect("a stream");
    buffers_are_full(&worker).await;
    let stopped = router.stop(Duration::from_millis(1));
    // Less than the time after which the kernel closes the connection.
    tokio::time::timeout(Duration::from_secs(10), stopped).await.expect("the router has stopped");
    assert_eq!(soon(worker.streams.recv()).await, Some(None));
}
