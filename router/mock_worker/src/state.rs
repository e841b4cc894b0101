//! The shared state of one worker's connections, and the clock of its engine.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc::UnboundedSender},
    time::{Instant, sleep, sleep_until},
};

use crate::{
    engine::{Engine, Request, Stats},
    fault::{CurrentFault, Fault, Kind},
    lockstep::Lockstep,
    settings::Settings,
    socket::Freezer,
};

/// Largest delay that the engine catches up: late timers, but not a busy machine.
const CATCH_UP: Duration = Duration::from_millis(10);

/// A message from a request to the server loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Die,
    RestartEmpty,
}

/// Polling interval of a stopped engine, and of idle engines in lockstep.
const POLL_PERIOD: Duration = Duration::from_millis(5);

/// One worker.
pub struct State {
    pub settings: Settings,
    pub fault: CurrentFault,
    pub freezer: Arc<Freezer>,
    engine: Mutex<Engine>,
    work: Notify,
    lockstep: Option<Arc<Lockstep>>,
    boot: AtomicU64,
    orders: UnboundedSender<Order>,
}

impl State {
    pub fn new(
        settings: Settings,
        lockstep: Option<Arc<Lockstep>>,
        orders: UnboundedSender<Order>,
    ) -> Self {
        Self {
            fault: CurrentFault::new(settings.fault.clone()),
            freezer: Arc::default(),
            engine: Mutex::new(Engine::new(settings.clone())),
            work: Notify::new(),
            lockstep,
            boot: AtomicU64::new(fastrand::u64(..)),
            orders,
            settings,
        }
    }

    /// Restarts: nothing cached, nothing running, another `boot_id`.
    pub fn restart(&self) {
        *self.engine.lock() = Engine::new(self.settings.clone());
        self.boot.store(fastrand::u64(..), Ordering::Relaxed);
        self.fault.set(Kind::None.into());
    }

    pub fn boot_id(&self) -> String {
        format!("{:016x}", self.boot.load(Ordering::Relaxed))
    }

    pub fn set_fault(&self, fault: Fault) {
        match fault.kind {
            Kind::Die { after_tokens: None } => self.order(Order::Die),
            Kind::RestartEmpty => self.order(Order::RestartEmpty),
            _ => self.fault.set(fault),
        }
    }

    pub fn order(&self, order: Order) {
        // The server may have died already.
        let _sent = self.orders.send(order);
    }

    /// Whether a request of `tokens` tokens, including the answer, can ever run.
    pub fn fits(&self, tokens: usize) -> bool {
        self.engine.lock().fits(tokens)
    }

    /// `Err`: the queue is full.
    pub fn submit(&self, request: Request) -> Result<(), Request> {
        self.engine.lock().submit(request)?;
        self.work.notify_one();
        Ok(())
    }

    pub fn abort(&self, name: &str) -> bool {
        self.engine.lock().abort(name)
    }

    pub fn flush(&self) {
        self.engine.lock().flush();
    }

    pub fn stats(&self) -> Stats {
        self.engine.lock().stats()
    }

    /// Returns the number of engines in lockstep, this one included.
    pub fn group_size(&self) -> usize {
        self.lockstep.as_ref().map_or(1, |group| group.engines)
    }

    /// Returns the time of the next step, `own` or that of the slowest engine in lockstep. Without work it returns
    /// `None`, when there may be some.
    async fn agreed(&self, own: Option<Duration>) -> Option<Duration> {
        let Some(group) = &self.lockstep else {
            if own.is_none() {
                self.work.notified().await;
            }
            return own;
        };
        let slowest = group.agree(own).await;
        if slowest.is_none() {
            sleep(POLL_PERIOD).await;
        }
        slowest
    }

    /// Runs the steps of the engine in real time.
    pub async fn run(&self) {
        let mut now = Instant::now();
        loop {
            let planned = self.engine.lock().plan();
            let own = planned.map(|time| time.mul_f64(self.fault.slowness()));
            let Some(time) = self.agreed(own).await else {
                now = Instant::now();
                continue;
            };
            now = (now + time).max(Instant::now() - CATCH_UP);
            if time.is_zero() {
                tokio::task::yield_now().await;
            } else {
                sleep_until(now).await;
            }
            self.freezer.passed().await;
            while self.fault.stops_engine() {
                sleep(POLL_PERIOD).await;
            }
            self.engine.lock().finish();
        }
    }
}
