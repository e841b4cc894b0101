//! Socket options.

use std::{net::SocketAddr, os::fd::BorrowedFd};

use mla_router::Config;
use socket2::SockRef;

use crate::support::{Client, FakeWorker, config, router, secs};

/// `TCP_NODELAY` of every TCP connection of this process between the two addresses' owners, seen
/// from the side for which `is_it` holds.
fn nodelay(is_it: impl Fn(SocketAddr, SocketAddr) -> bool) -> Vec<bool> {
    let open = std::fs::read_dir("/proc/self/fd").expect("Linux");
    let numbers = open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    numbers
        .filter_map(|number| {
            // SAFETY: the descriptor is only asked for its addresses and one option; if it was
            // closed since it was listed, the system call fails and it is passed over.
            let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
            let socket = SockRef::from(&descriptor);
            let local = socket.local_addr().ok()?.as_socket()?;
            let peer = socket.peer_addr().ok()?.as_socket()?;
            is_it(local, peer).then(|| socket.tcp_nodelay().expect("a TCP socket"))
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_nodelay_is_set_on_both_sides() {
    let worker = FakeWorker::plain().await;
    let config = Config { health_check_interval_secs: secs(3600.0), ..config() };
    let router = router(config, &[&worker]).await;
    let mut client = Client::connect(router.local_addr()).await;
    client.post("/generate", "{}").await;
    let accepted = nodelay(|local, _| local == router.local_addr());
    assert_eq!(accepted, [true], "the connection of the client");
    // One of the health check, one of the request.
    let opened = nodelay(|_, peer| peer == worker.address());
    assert_eq!(opened, [true, true], "the connections to the worker");
}
