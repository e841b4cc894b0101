//! What the connections of one worker share, and its engine's clock.

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
    settings::Settings,
    socket::Freezer,
};

/// How far behind real time the engine may be and still catch up: what timers are late, not what a
/// machine without a free core costs.
const CATCH_UP: Duration = Duration::from_millis(10);

/// What the server's loop is told by a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Die,
    RestartEmpty,
}

/// From one look at whether a stopped engine goes on to the next.
const A_LITTLE: Duration = Duration::from_millis(5);

/// One worker.
pub struct State {
    pub settings: Settings,
    pub fault: CurrentFault,
    pub freezer: Arc<Freezer>,
    engine: Mutex<Engine>,
    work: Notify,
    boot: AtomicU64,
    orders: UnboundedSender<Order>,
}

impl State {
    pub fn new(settings: Settings, orders: UnboundedSender<Order>) -> Self {
        Self {
            fault: CurrentFault::new(settings.fault.clone()),
            freezer: Arc::default(),
            engine: Mutex::new(Engine::new(settings.clone())),
            work: Notify::new(),
            boot: AtomicU64::new(fastrand::u64(..)),
            orders,
            settings,
        }
    }

    /// Another process, as seen from outside: nothing cached, nothing running, another name.
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
        // A server that is gone has died already.
        let _sent = self.orders.send(order);
    }

    /// Whether a request of so many tokens, answer included, can ever run.
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

    /// Runs the engine's steps, each in its time.
    pub async fn run(&self) {
        let mut now = Instant::now();
        loop {
            let planned = self.engine.lock().plan();
            let Some(time) = planned else {
                self.work.notified().await;
                now = Instant::now();
                continue;
            };
            now = (now + time.mul_f64(self.fault.slowness())).max(Instant::now() - CATCH_UP);
            if time.is_zero() {
                tokio::task::yield_now().await;
            } else {
                sleep_until(now).await;
            }
            self.freezer.passed().await;
            while self.fault.stops_engine() {
                sleep(A_LITTLE).await;
            }
            self.engine.lock().finish();
        }
    }
}
