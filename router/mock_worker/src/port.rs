//! A port that stays ours while nobody listens on it.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use tokio::net::{TcpListener, TcpSocket};

/// A worker that dies and comes back needs its port again. A port that is closed in between may be
/// given to anyone: to another worker, or to a connection that goes out. A socket that is bound and
/// does not listen prevents that: connections are refused, and only who names the port gets it.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    _held: TcpSocket,
}

impl Port {
    /// A free one of 127.0.0.1.
    pub fn free() -> io::Result<Self> {
        Self::at((Ipv4Addr::LOCALHOST, 0).into())
    }

    pub fn at(address: SocketAddr) -> io::Result<Self> {
        let held = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4(),
            SocketAddr::V6(_) => TcpSocket::new_v6(),
        }?;
        // So that a listener, which sets it too, gets the port beside this socket.
        held.set_reuseaddr(true)?;
        held.bind(address)?;
        Ok(Self { address: held.local_addr()?, _held: held })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Listens, until the listener is dropped.
    pub async fn listen(&self) -> io::Result<TcpListener> {
        TcpListener::bind(self.address).await
    }
}
