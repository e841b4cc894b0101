//! A network link between the router and one worker that can be cut.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::{AbortHandle, JoinSet},
};

/// Passes bytes on in both directions. While the link is cut, nothing passes: no byte, no end, no reset. Bytes in
/// transit arrive after the repair, like TCP retransmissions. Unlike with dropped packets, the kernel still accepts
/// new connections.
pub(crate) struct Cable {
    address: SocketAddr,
    plugged: watch::Sender<bool>,
    carrying: AbortHandle,
}

impl Cable {
    pub(crate) async fn to(worker: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (plugged, seen) = watch::channel(true);
        let carrying = tokio::spawn(async move {
            // Connections end with the task that owns the set.
            let mut connections = JoinSet::new();
            loop {
                let (near, _) = listener.accept().await.expect("a listening socket");
                connections.spawn(connection(near, worker, seen.clone()));
            }
        });
        Self { address, plugged, carrying: carrying.abort_handle() }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn pull(&self) {
        self.plugged.send_replace(false);
    }

    pub(crate) fn plug(&self) {
        self.plugged.send_replace(true);
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.carrying.abort();
    }
}

async fn connection(near: TcpStream, worker: SocketAddr, mut plugged: watch::Receiver<bool>) {
    passes(&mut plugged).await;
    let Ok(far) = TcpStream::connect(worker).await else { return };
    for end in [&near, &far] {
        end.set_nodelay(true).expect("a TCP socket");
    }
    let (near_in, near_out) = near.into_split();
    let (far_in, far_out) = far.into_split();
    tokio::join!(carry(near_in, far_out, plugged.clone()), carry(far_in, near_out, plugged));
}

async fn carry(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut plugged: watch::Receiver<bool>,
) {
    let mut bytes = vec![0; 1 << 14];
    loop {
        let read = from.read(&mut bytes).await.unwrap_or(0);
        passes(&mut plugged).await;
        // The receiver may have gone.
        if read == 0 || to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}

async fn passes(plugged: &mut watch::Receiver<bool>) {
    plugged.wait_for(|plugged| *plugged).await.expect("the cable outlives its connections");
}
