//! A mock worker. It listens while its handle lives.

use std::{io, net::SocketAddr, sync::Arc};

use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::JoinSet,
};

use crate::{
    engine::Stats,
    fault::Fault,
    lockstep::Lockstep,
    port::{Listener, Port},
    server::answer,
    settings::Settings,
    socket::{Freezer, Socket, Spoil},
    state::{Order, State},
};

/// One mock engine on its own port. Dropping it ends it abruptly, like a process.
pub struct MockWorker {
    port: Port,
    state: Arc<State>,
    /// One task, which ends with its handle.
    server: JoinSet<()>,
}

impl MockWorker {
    /// Starts one on a free port.
    pub async fn start(settings: Settings) -> io::Result<Self> {
        Self::listen(Port::free()?, settings).await
    }

    pub async fn listen(port: Port, settings: Settings) -> io::Result<Self> {
        Self::listen_in(port, settings, None).await
    }

    /// `listen` of one of the engines in lockstep.
    pub async fn listen_in(
        port: Port,
        settings: Settings,
        lockstep: Option<Arc<Lockstep>>,
    ) -> io::Result<Self> {
        let listener = port.listen().await?;
        let (orders, received) = unbounded_channel();
        let state = Arc::new(State::new(settings, lockstep, orders));
        let mut server = JoinSet::new();
        server.spawn(serve(listener, Arc::clone(&state), received));
        Ok(Self { port, state, server })
    }

    pub fn address(&self) -> SocketAddr {
        self.port.address()
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address())
    }

    pub fn boot_id(&self) -> String {
        self.state.boot_id()
    }

    pub fn stats(&self) -> Stats {
        self.state.stats()
    }

    /// The same as `POST /mock/fault`.
    pub fn fault(&self, fault: impl Into<Fault>) {
        self.state.set_fault(fault.into());
    }

    /// Stops the worker without closing connections, like SIGSTOP.
    pub fn freeze(&self) {
        self.state.freezer.freeze();
    }

    /// Continues a stopped worker.
    pub fn thaw(&self) {
        self.state.freezer.thaw();
    }

    /// Returns when the worker has died, by [`Fault`] or otherwise.
    pub async fn died(&mut self) {
        // A panic is a death as well.
        let _ended = self.server.join_next().await;
    }

    /// Stops like after SIGKILL: all connections close, new ones are refused. Another worker may be started on the
    /// port.
    pub async fn kill(mut self) -> Port {
        self.server.shutdown().await;
        self.port
    }
}

async fn serve(listener: Listener, state: Arc<State>, mut orders: UnboundedReceiver<Order>) {
    // Connections and the clock of the engine end with this function.
    let mut connections = JoinSet::new();
    let mut engine = JoinSet::new();
    let run = |state: &Arc<State>| {
        let state = Arc::clone(state);
        async move { state.run().await }
    };
    engine.spawn(run(&state));
    loop {
        tokio::select! {
            accepted = accept(&listener, &state.freezer) => {
                // The client may have left meanwhile.
                if let Ok(socket) = accepted {
                    connections.spawn(converse(socket, Arc::clone(&state)));
                }
            }
            order = orders.recv() => match order {
                None | Some(Order::Die) => return,
                Some(Order::RestartEmpty) => {
                    connections.shutdown().await;
                    engine.shutdown().await;
                    state.restart();
                    engine.spawn(run(&state));
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn accept(listener: &Listener, freezer: &Arc<Freezer>) -> io::Result<Socket> {
    freezer.passed().await;
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok(Socket { stream, freezer: Arc::clone(freezer), spoil: Spoil::default() })
}

async fn converse(socket: Socket, state: Arc<State>) {
    let spoil = Arc::clone(&socket.spoil);
    let service = service_fn(|request| answer(Arc::clone(&state), Arc::clone(&spoil), request));
    // An error is a fault of the settings, or a disconnected client.
    let _ended = http1::Builder::new().serve_connection(TokioIo::new(socket), service).await;
}
