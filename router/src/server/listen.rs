//! The listening socket: opens the port, and accepts connections up to their limit.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use nix::{
    libc,
    sys::socket::{setsockopt, sockopt::AttachReusePortCbpf},
};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    net::{TcpListener, TcpStream, lookup_host},
    sync::watch,
    task::{JoinError, JoinSet},
    time::{Instant, sleep},
};

use crate::{
    admin,
    config::Config,
    cores::Cores,
    error::StartError,
    router::Router,
    server::{
        connection::{AcceptedConnection, Lifecycle, Serving},
        connection_limit::{ConnectionLimit, raise_file_limit},
        sites::Sites,
        tls::Tls,
    },
};

/// Pause after a failed accept. The usual cause is a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Time between two attempts to close an idle connection while the limit is reached.
const CLOSE_PERIOD: Duration = Duration::from_millis(20);

/// Minimum time between two warnings of the same kind.
const LOG_PERIOD: Duration = Duration::from_secs(1);

/// Connections that the kernel completes while no accept is waiting.
const BACKLOG: i32 = 4096;

/// Opens the port. Fails if others could reach it without a key, unless --insecure is set.
pub async fn bind(config: &Config) -> Result<TcpListener, StartError> {
    raise_file_limit();
    let (host, port) = (&config.host, config.port);
    let failed = |source| StartError::Listen { host: host.clone(), port, source };
    let addresses: Vec<_> = lookup_host((host.as_str(), port)).await.map_err(failed)?.collect();
    let exposed = addresses.iter().any(|address| !address.ip().to_canonical().is_loopback());
    if exposed && config.api_key.is_empty() {
        if !config.insecure {
            return Err(StartError::Exposed { host: host.clone() });
        }
        tracing::warn!(
            "--insecure: every client that can reach {host}:{port} may use it without a key"
        );
    }
    let nowhere = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let open = |address| open(address, config.reuse_port);
    // The first address that works, as in the standard library.
    let opened = addresses.into_iter().map(open).reduce(Result::or);
    opened.unwrap_or(Err(nowhere)).map_err(failed)
}

fn open(address: SocketAddr, reuse_port: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(reuse_port)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    if reuse_port {
        take_over(&socket)?;
    }
    TcpListener::from_std(socket.into())
}

/// Directs all new connections of the port to its second socket, which is this one if another router has the first.
/// So the other router can stop without losing a connection.
fn take_over(socket: &Socket) -> io::Result<()> {
    let second = 1;
    let code = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut program = [libc::sock_filter { code, jt: 0, jf: 0, k: second }];
    let program = libc::sock_fprog { len: 1, filter: program.as_mut_ptr() };
    Ok(setsockopt(socket, AttachReusePortCbpf, &program)?)
}

/// Accepts connections until the lifecycle is `Stopping`. Returns when all connections are closed.
pub(crate) async fn accept(
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    router: Arc<Router>,
    mut lifecycle: watch::Receiver<Lifecycle>,
    cores: Option<Cores>,
) {
    let address = listener.local_addr().expect("contract: a listening socket has an address");
    let mut acceptor = Acceptor::new(router, address, tls, lifecycle.clone(), cores);
    let mut listener = Some(listener);
    loop {
        let is_full = acceptor.is_full();
        tokio::select! {
            accepted = next(listener.as_ref()), if !is_full => acceptor.accepted(accepted).await,
            Some(left) = acceptor.connections.join_next() => acceptor.serve_on_core(left),
            () = sleep(CLOSE_PERIOD), if is_full => {
                acceptor.connection_limit.close_idle();
            }
            changed = lifecycle.changed() => match changed.map(|()| *lifecycle.borrow_and_update()) {
                Ok(Lifecycle::Serving | Lifecycle::Draining) => {}
                Ok(Lifecycle::HandingOver) => for left in listener.take().into_iter().flat_map(close) {
                    acceptor.serve(left);
                },
                Ok(Lifecycle::Stopping) => break,
                // The handle was dropped.
                Err(_) => return,
            },
        }
    }
    drop(listener);
    acceptor.finish().await;
}

/// The open connections, with everything that a new one needs.
struct Acceptor {
    /// A task for each connection. It returns the connection if a core is to serve it. Dropping the set aborts the tasks,
    /// so it is dropped before the cores.
    connections: JoinSet<Option<AcceptedConnection>>,
    router: Arc<Router>,
    admin: axum::Router,
    sites: Arc<Sites>,
    tls: Option<Arc<Tls>>,
    lifecycle: watch::Receiver<Lifecycle>,
    /// The threads that serve connections; `None` to serve them on the runtime of the caller.
    cores: Option<Cores>,
    connection_limit: Arc<ConnectionLimit>,
    warnings: Throttle,
}

impl Acceptor {
    fn new(
        router: Arc<Router>,
        address: SocketAddr,
        tls: Option<Arc<Tls>>,
        lifecycle: watch::Receiver<Lifecycle>,
        cores: Option<Cores>,
    ) -> Self {
        let workers = router.registry.replicas().len();
        let connection_limit = ConnectionLimit::new(router.config.max_connections, workers);
        Self {
            connections: JoinSet::new(),
            admin: admin::routes(Arc::clone(&router)),
            sites: Arc::new(Sites::new(&router.config, address)),
            router,
            tls,
            lifecycle,
            cores,
            connection_limit: Arc::new(connection_limit),
            warnings: Throttle::default(),
        }
    }

    /// Whether no further connection may be accepted. Updates the count of connections in the metrics.
    fn is_full(&self) -> bool {
        let count = self.connections.len();
        self.router.metrics.client_connections.set(count as u64);
        count >= self.connection_limit.count + self.connection_limit.extra
    }

    /// Handles the outcome of an accept.
    async fn accepted(&mut self, accepted: io::Result<(TcpStream, SocketAddr)>) {
        match accepted {
            Ok(accepted) => {
                self.router.metrics.client_connections_accepted.increment();
                let limit = self.connection_limit.count;
                let is_at_limit = self.connections.len() >= limit;
                // An idle connection is closed to free a permit.
                if is_at_limit && !self.connection_limit.close_idle() && self.warnings.allow() {
                    tracing::warn!("the limit of {limit} connections is reached");
                }
                self.serve(accepted);
            }
            // The client has closed the connection before it was accepted.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                if self.warnings.allow() {
                    tracing::warn!("cannot accept a connection: {error}");
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }

    /// Starts the task of a new connection.
    fn serve(&mut self, (stream, client): (TcpStream, SocketAddr)) {
        let serving = Serving {
            router: Arc::clone(&self.router),
            admin: self.admin.clone(),
            sites: Arc::clone(&self.sites),
            permit: self.connection_limit.take().map_or_else(OnceLock::new, OnceLock::from),
            connection_limit: Arc::clone(&self.connection_limit),
            client,
            lifecycle: self.lifecycle.clone(),
            closes: false,
        };
        let connections = &mut self.connections;
        match (&self.cores, self.tls.clone()) {
            (None, tls) => connections.spawn(serving.run(stream, tls)),
            (Some(_), None) => connections.spawn(serving.wait_for_bytes(stream)),
            // The first bytes are encrypted; the core decrypts them.
            (Some(cores), Some(tls)) => {
                let Ok(stream) = stream.into_std() else { return };
                let serve =
                    async move { serving.run(TcpStream::from_std(stream).ok()?, Some(tls)).await };
                connections.spawn_on(serve, cores.next())
            }
        };
    }

    /// Passes the connection of an ended task on to a core, if it is to be served there.
    fn serve_on_core(&mut self, left: Result<Option<AcceptedConnection>, JoinError>) {
        if let (Ok(Some(accepted)), Some(cores)) = (left, &self.cores) {
            self.connections.spawn_on(accepted.run(), cores.next());
        }
    }

    /// Waits until all connections are closed.
    async fn finish(mut self) {
        while let Some(left) = self.connections.join_next().await {
            self.serve_on_core(left);
        }
    }
}

async fn next(listener: Option<&TcpListener>) -> io::Result<(TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

/// Closes the listening socket. Returns the connections in its backlog, which would be reset otherwise.
fn close(listener: TcpListener) -> Vec<(TcpStream, SocketAddr)> {
    let taken = listener.into_std().map(|listener| {
        let waiting = std::iter::from_fn(|| listener.accept().ok());
        let adopt = |(stream, client): (std::net::TcpStream, SocketAddr)| {
            stream.set_nonblocking(true).ok()?;
            Some((TcpStream::from_std(stream).ok()?, client))
        };
        waiting.filter_map(adopt).collect()
    });
    taken.unwrap_or_default()
}

/// Limits the rate of a warning.
#[derive(Default)]
struct Throttle(Option<Instant>);

impl Throttle {
    /// Whether a warning may be logged now.
    fn allow(&mut self) -> bool {
        let now = Instant::now();
        let due = self.0.is_none_or(|last| now - last >= LOG_PERIOD);
        if due {
            self.0 = Some(now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        time::timeout,
    };

    use super::*;

    async fn asked(address: SocketAddr, request: &str) -> String {
        let mut client = TcpStream::connect(address).await.expect("a connection");
        client.write_all(request.as_bytes()).await.expect("a request");
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.expect("an answer");
        answer
    }

    /// A blocked core stands for a core that is busy with a burst of requests.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn probes_are_answered_while_all_cores_are_busy() {
        let cores = Cores::start().expect("threads");
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(parking_lot::Mutex::new(released));
        for _ in 0..cores.count() {
            let released = Arc::clone(&released);
            let block = async move {
                let _released = released.lock().recv();
            };
            drop(cores.next().spawn(block));
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let router = Router::new(Config::default()).expect("a config to start with");
        let (lifecycle, followed) = watch::channel(Lifecycle::Serving);
        tokio::spawn(accept(listener, None, Arc::clone(&router), followed, Some(cores)));
        let limit = Duration::from_secs(20);
        let probe = "GET /liveness HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
        let answer = timeout(limit, asked(address, probe)).await.expect("an answer in time");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let workers = "GET /workers HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n";
        let waiting = tokio::spawn(asked(address, workers));
        let answer = timeout(limit, asked(address, probe)).await.expect("an answer in time");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(!waiting.is_finished(), "no probe, and it was answered by a busy core");
        drop(release);
        let answer = timeout(limit, waiting).await.expect("in time").expect("no panic");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        drop(lifecycle);
        router.retire();
    }
}
