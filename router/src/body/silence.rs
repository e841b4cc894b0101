//! The timers of a stream while its worker is silent.

use std::{
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::Instant;

use crate::deadline_timer::DeadlineTimer;

/// A stream may be stuck after a pause of this many times its mean pause.
const PATIENCE: u32 = 20;

/// Pause after which a stream checks whether its worker is lost. --inter-token-timeout-secs counts if it is shorter.
pub const QUIET: Duration = Duration::from_secs(1);

/// Time between two such checks.
const GLANCE: Duration = Duration::from_millis(250);

/// Number of frames after which a stream has a known pace.
const PACE_KNOWN: u32 = 16;

/// A stream of known pace may be neglected after this part of --inter-token-timeout-secs.
const NEGLECT: f64 = 0.4;

/// Time until the next check of a stream that may be stuck while its worker may come back.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// The silence of workers is measured in milliseconds, so it may seem shorter than the pause by this much.
const GRAIN: Duration = Duration::from_millis(1);

/// The action that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Send a comment that keeps the connection to the client open.
    KeepAlive,
    /// Check whether the worker has been found dead or frozen.
    Glance,
    /// Check whether the stream is stuck, after at least this pause.
    Look(Duration),
    /// The deadline of the request has passed.
    End,
}

/// The settings for the timers.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub keepalive: Duration,
    pub inter_token: Duration,
}

impl Limits {
    fn quiet(&self) -> Duration {
        QUIET.min(self.inter_token)
    }
}

/// The timers of one stream. A frame costs two additions and no timer operation.
#[derive(Debug)]
pub struct Silence {
    limits: Limits,
    end: Instant,
    begun: Instant,
    frames: u32,
    /// Time of the last frame.
    last_frame: Instant,
    glance: Instant,
    look: Instant,
    keepalive: Instant,
}

impl Silence {
    pub fn new(limits: Limits, end: Instant, now: Instant) -> Self {
        let (look, keepalive) = (now + limits.inter_token, now + limits.keepalive);
        let glance = now + limits.quiet();
        Self { limits, end, begun: now, frames: 0, last_frame: now, glance, look, keepalive }
    }

    /// Records a frame that the client gets. Returns the pause before the frame.
    pub fn received(&mut self, now: Instant) -> Duration {
        let pause = now.saturating_duration_since(self.last_frame);
        self.frames = self.frames.saturating_add(1);
        self.keepalive = now + self.limits.keepalive;
        self.counts_from(now);
        pause
    }

    /// Restarts silence and mean pause for another worker. The pause in which the previous worker was lost would
    /// make the mean many times as long.
    pub fn restart(&mut self, now: Instant) {
        (self.begun, self.frames) = (now, 0);
        self.counts_from(now);
    }

    fn counts_from(&mut self, now: Instant) {
        self.last_frame = now;
        self.glance = now + self.limits.quiet();
        self.look = now + self.limits.inter_token;
    }

    /// Moves the deadline forward after the last event: the end of the response must come soon.
    pub fn end_by(&mut self, end: Instant) {
        self.end = self.end.min(end);
    }

    /// Ready when an action is due.
    pub fn poll(&mut self, timer: &mut DeadlineTimer, cx: &mut Context<'_>) -> Poll<Due> {
        loop {
            let next = self.end.min(self.glance).min(self.look).min(self.keepalive);
            ready!(timer.poll(next, cx));
            let now = Instant::now();
            let patient_until = self.last_frame + self.patience();
            if now >= self.end {
                return Poll::Ready(Due::End);
            } else if now >= self.keepalive {
                self.keepalive = now + self.limits.keepalive;
                return Poll::Ready(Due::KeepAlive);
            } else if now >= self.glance {
                self.glance = now + GLANCE;
                return Poll::Ready(Due::Glance);
            } else if now >= self.look && now < patient_until {
                self.look = patient_until;
            } else if now >= self.look {
                self.look = now + SECOND_LOOK;
                return Poll::Ready(Due::Look((now - self.last_frame).saturating_sub(GRAIN)));
            }
        }
    }

    /// Time since the last frame.
    pub fn length(&self) -> Duration {
        self.last_frame.elapsed()
    }

    /// The longest pause that is normal for this stream while its worker sends other streams.
    pub fn neglect_limit(&self) -> Duration {
        let part = if self.frames < PACE_KNOWN { 1.0 } else { NEGLECT };
        self.limits.inter_token.mul_f64(part).max(self.mean_pause() * PATIENCE)
    }

    /// The longest pause that is normal for this stream.
    fn patience(&self) -> Duration {
        self.limits.inter_token.max(self.mean_pause() * PATIENCE)
    }

    fn mean_pause(&self) -> Duration {
        (self.last_frame - self.begun) / self.frames.max(1)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    const LIMITS: Limits =
        Limits { keepalive: Duration::from_secs(15), inter_token: Duration::from_secs(5) };

    struct Stream {
        begun: Instant,
        silence: Silence,
        timer: DeadlineTimer,
    }

    impl Stream {
        fn new(limits: Limits, seconds: u64) -> Self {
            let begun = Instant::now();
            let end = begun + Duration::from_secs(seconds);
            Self {
                begun,
                silence: Silence::new(limits, end, begun),
                timer: DeadlineTimer::new(end),
            }
        }

        /// The next action, except glances, and its second in the stream.
        async fn next(&mut self) -> (u64, Due) {
            loop {
                let due = poll_fn(|cx| self.silence.poll(&mut self.timer, cx)).await;
                if due != Due::Glance {
                    return (self.begun.elapsed().as_secs(), due);
                }
            }
        }
    }

    /// The paused clock advances to the next timer when all tasks are idle.
    #[tokio::test(start_paused = true)]
    async fn checks_then_keepalives_then_the_deadline() {
        let mut stream = Stream::new(LIMITS, 17);
        let mut seen = Vec::new();
        while seen.last() != Some(&(17, "end")) {
            seen.push(match stream.next().await {
                (second, Due::Look(pause)) => {
                    assert_eq!((pause + GRAIN).as_secs(), second);
                    (second, "look")
                }
                (second, Due::KeepAlive) => (second, "keepalive"),
                (second, Due::End) => (second, "end"),
                (_, Due::Glance) => unreachable!("left out"),
            });
        }
        let looks = seen.iter().filter(|(_, due)| *due == "look").count();
        assert!((10..=13).contains(&looks), "{seen:?}");
        assert_eq!(seen[0], (5, "look"));
        let signs: Vec<_> = seen.iter().filter(|(_, due)| *due == "keepalive").collect();
        assert_eq!(signs, [&(15, "keepalive")]);
    }

    #[tokio::test(start_paused = true)]
    async fn slow_stream_has_a_longer_timeout() {
        let limits = Limits { keepalive: Duration::from_secs(3600), ..LIMITS };
        let mut stream = Stream::new(limits, 3600);
        for _ in 0..100 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            stream.silence.received(Instant::now());
        }
        let (second, due) = stream.next().await;
        assert!((119..=121).contains(&second) && matches!(due, Due::Look(_)), "{second} {due:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn pause_of_a_lost_worker_does_not_extend_the_next_timeout() {
        let mut stream = Stream::new(LIMITS, 3600);
        stream.silence.received(Instant::now());
        assert!(matches!(stream.next().await, (5, Due::Look(_))));
        stream.silence.restart(Instant::now());
        stream.silence.received(Instant::now());
        assert!(matches!(stream.next().await, (10, Due::Look(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn every_frame_restarts_the_silence() {
        let mut stream = Stream::new(LIMITS, 3600);
        for _ in 0..100 {
            let wait = tokio::time::timeout(Duration::from_secs(4), stream.next()).await;
            assert!(wait.is_err(), "{wait:?}");
            stream.silence.received(Instant::now());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn quiet_stream_checks_its_worker_from_the_first_second() {
        let mut stream = Stream::new(LIMITS, 3600);
        for quarter in 4..12 {
            let due = poll_fn(|cx| stream.silence.poll(&mut stream.timer, cx)).await;
            assert_eq!((due, stream.begun.elapsed() / 250), (Due::Glance, GLANCE * quarter / 250));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn after_the_last_event_the_deadline_is_near() {
        let mut stream = Stream::new(LIMITS, 3600);
        stream.silence.end_by(stream.begun + Duration::from_secs(1));
        assert_eq!(stream.next().await, (1, Due::End));
    }
}
