//! A reserved port: it stays reserved while no worker listens on it.

use std::{
    io,
    net::{Ipv4Addr, Shutdown, SocketAddr},
    ops::Deref,
};

use socket2::SockRef;
use tokio::net::{TcpListener, TcpSocket};

/// A worker that dies and comes back needs its port again. A closed port may be given to another worker, or to an
/// outgoing connection. A bound socket that does not listen prevents that: connections are refused, and the port can be
/// opened only by its number.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    _held: TcpSocket,
}

impl Port {
    /// Reserves a free port of 127.0.0.1.
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

    /// Listens until the listener is dropped.
    pub async fn listen(&self) -> io::Result<Listener> {
        Ok(Listener(TcpListener::bind(self.address).await?))
    }
}

/// The listener. Dropping it refuses connections, and the port can be opened again.
///
/// Closing the socket alone is not enough: a child process that another thread is starting has a copy of it until it
/// executes its program, and the port listens until then.
#[derive(Debug)]
pub struct Listener(TcpListener);

impl Deref for Listener {
    type Target = TcpListener;

    fn deref(&self) -> &TcpListener {
        &self.0
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // A shutdown ends a listening socket for all its owners. It fails only if the socket has ended already.
        let _ended = SockRef::from(&self.0).shutdown(Shutdown::Read);
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn a_copy_of_the_listener_does_not_keep_the_port() {
        let port = Port::free().expect("a free port");
        for _ in 0..2 {
            let listener = port.listen().await.expect("the port is ours");
            // The copy of a child process before it executes its program.
            let _copy = SockRef::from(&*listener).try_clone().expect("a descriptor");
            TcpStream::connect(port.address()).await.expect("it listens");
            drop(listener);
            TcpStream::connect(port.address()).await.expect_err("nobody listens");
        }
    }
}
