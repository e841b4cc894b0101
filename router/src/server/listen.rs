//! The listening side: where, for whom, and how many at a time.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    net::{TcpListener, lookup_host},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout_at},
};
use tokio_rustls::TlsAcceptor;

use crate::{
    admin,
    config::Config,
    handle::StartError,
    router::Router,
    server::connection::{Course, Serving},
};

/// Pause after a failed accept: out of file descriptors, most likely, which only time can mend.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Between two lines that say so.
const LOG_PAUSE: Duration = Duration::from_secs(1);

/// Connections that the kernel completes while no accept is waiting.
const BACKLOG: i32 = 4096;

/// Opens the port, unless that would let strangers in.
pub async fn bind(config: &Config) -> Result<TcpListener, StartError> {
    let (host, port) = (&config.host, config.port);
    let failed = |source| StartError::Listen { host: host.clone(), port, source };
    let addresses: Vec<_> = lookup_host((host.as_str(), port)).await.map_err(failed)?.collect();
    let exposed = addresses.iter().any(|address| !address.ip().to_canonical().is_loopback());
    if exposed && config.api_key.is_empty() {
        if !config.insecure {
            return Err(StartError::Exposed { host: host.clone() });
        }
        tracing::warn!(
            "--insecure: everybody who can reach {host}:{port} may use it, without a key"
        );
    }
    let nowhere = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let open = |address| open(address, config.reuse_port);
    // The first one that works, as the standard library does.
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
    TcpListener::from_std(socket.into())
}

/// Accepts until told to stop by a deadline; then lets open connections finish until then.
pub(crate) async fn accept(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    router: Arc<Router>,
    mut course: watch::Receiver<Course>,
) {
    let admin = admin::routes(Arc::clone(&router));
    let most = router.config.max_connections;
    let mut noted = Throttle::default();
    // Dropping the set aborts the connections that are left in it.
    let mut connections = JoinSet::new();
    let deadline = loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < most => match accepted {
                Ok((stream, client)) => {
                    let (router, admin) = (Arc::clone(&router), admin.clone());
                    let serving = Serving { router, admin, client, course: course.clone() };
                    connections.spawn(serving.run(stream, tls.clone()));
                    if connections.len() == most && noted.now() {
                        tracing::warn!("{most} connections are open: more wait (--max-connections)");
                    }
                }
                // Gone before it was accepted, which is the client's business.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    if noted.now() {
                        tracing::warn!("cannot accept a connection: {error}");
                    }
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
            deadline = told(&mut course) => break deadline,
        }
    };
    drop(listener);
    let all_closed = async { while connections.join_next().await.is_some() {} };
    if timeout_at(deadline, all_closed).await.is_err() {
        tracing::warn!("closing {} connections that did not end in time", connections.len());
    }
}

/// Until when the connections may go on.
async fn told(course: &mut watch::Receiver<Course>) -> Instant {
    let stopping = course.wait_for(|course| matches!(course, Course::Stopping(_))).await;
    match stopping.map(|course| *course) {
        Ok(Course::Stopping(deadline)) => deadline,
        // The handle is gone, and with it whoever could wait.
        Ok(_) | Err(_) => Instant::now(),
    }
}

/// Keeps what happens often from filling the log.
#[derive(Default)]
struct Throttle(Option<Instant>);

impl Throttle {
    fn now(&mut self) -> bool {
        let now = Instant::now();
        let due = self.0.is_none_or(|last| now - last >= LOG_PAUSE);
        if due {
            self.0 = Some(now);
        }
        due
    }
}
