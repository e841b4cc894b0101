//! The timers of a stream while its worker is silent.

use std::{
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::Instant;

use crate::deadline_timer::DeadlineTimer;

/// A stream may be stuck after a pause of this many times its mean pause.
const MAX_PAUSE_FACTOR: u32 = 20;

/// Pause after which a stream checks whether its worker is lost; --inter-token-timeout-secs if that is
/// shorter.
pub const MIN_SILENCE: Duration = Duration::from_secs(1);

/// Time between two such checks.
const WORKER_CHECK_PERIOD: Duration = Duration::from_millis(250);

/// Number of frames after which the mean pause of a stream is known.
const MIN_FRAMES: u32 = 16;

/// A stream whose mean pause is known may count as starved after this part of --inter-token-timeout-secs.
const STARVED_AFTER: f64 = 0.4;

/// Time until the next check of a stream that may be stuck while its worker may come back.
const STALL_CHECK_PERIOD: Duration = Duration::from_secs(1);

/// The silence of workers is measured in milliseconds, so it may appear shorter than the pause by this
/// amount.
const CLOCK_RESOLUTION: Duration = Duration::from_millis(1);

/// The action that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Send a comment that keeps the connection to the client open.
    KeepAlive,
    /// Check whether the worker has been found dead or frozen.
    WorkerCheck,
    /// Check whether the stream is stuck, after at least this pause.
    StallCheck(Duration),
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
    fn first_worker_check(&self) -> Duration {
        MIN_SILENCE.min(self.inter_token)
    }
}

/// The timers of one stream. A frame costs two additions and no timer operation.
#[derive(Debug)]
pub struct SilenceTimers {
    limits: Limits,
    end: Instant,
    started: Instant,
    frames: u32,
    /// Time of the last frame.
    last_frame: Instant,
    worker_check: Instant,
    stall_check: Instant,
    keepalive: Instant,
}

impl SilenceTimers {
    pub fn new(limits: Limits, end: Instant, now: Instant) -> Self {
        let (stall_check, keepalive) = (now + limits.inter_token, now + limits.keepalive);
        let worker_check = now + limits.first_worker_check();
        Self {
            limits,
            end,
            started: now,
            frames: 0,
            last_frame: now,
            worker_check,
            stall_check,
            keepalive,
        }
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
        (self.started, self.frames) = (now, 0);
        self.counts_from(now);
    }

    fn counts_from(&mut self, now: Instant) {
        self.last_frame = now;
        self.worker_check = now + self.limits.first_worker_check();
        self.stall_check = now + self.limits.inter_token;
    }

    /// Moves the deadline forward after the last event: the end of the response must come soon.
    pub fn end_by(&mut self, end: Instant) {
        self.end = self.end.min(end);
    }

    /// Ready when an action is due.
    pub fn poll(&mut self, timer: &mut DeadlineTimer, cx: &mut Context<'_>) -> Poll<Due> {
        loop {
            let next = self.end.min(self.worker_check).min(self.stall_check).min(self.keepalive);
            ready!(timer.poll(next, cx));
            let now = Instant::now();
            let stuck_after = self.last_frame + self.longest_pause();
            if now >= self.end {
                return Poll::Ready(Due::End);
            } else if now >= self.keepalive {
                self.keepalive = now + self.limits.keepalive;
                return Poll::Ready(Due::KeepAlive);
            } else if now >= self.worker_check {
                self.worker_check = now + WORKER_CHECK_PERIOD;
                return Poll::Ready(Due::WorkerCheck);
            } else if now >= self.stall_check && now < stuck_after {
                self.stall_check = stuck_after;
            } else if now >= self.stall_check {
                self.stall_check = now + STALL_CHECK_PERIOD;
                return Poll::Ready(Due::StallCheck(
                    (now - self.last_frame).saturating_sub(CLOCK_RESOLUTION),
                ));
            }
        }
    }

    /// Time since the last frame.
    pub fn length(&self) -> Duration {
        self.last_frame.elapsed()
    }

    /// The longest pause that is normal for this stream while its worker sends other streams.
    pub fn starvation_limit(&self) -> Duration {
        let part = if self.frames < MIN_FRAMES { 1.0 } else { STARVED_AFTER };
        self.limits.inter_token.mul_f64(part).max(self.mean_pause() * MAX_PAUSE_FACTOR)
    }

    /// The longest pause that is normal for this stream.
    fn longest_pause(&self) -> Duration {
        self.limits.inter_token.max(self.mean_pause() * MAX_PAUSE_FACTOR)
    }

    fn mean_pause(&self) -> Duration {
        (self.last_frame - self.started) / self.frames.max(1)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    const LIMITS: Limits =
        Limits { keepalive: Duration::from_secs(15), inter_token: Duration::from_secs(5) };

    struct Stream {
        started: Instant,
        silence: SilenceTimers,
        timer: DeadlineTimer,
    }

    impl Stream {
        fn new(limits: Limits, seconds: u64) -> Self {
            let started = Instant::now();
            let end = started + Duration::from_secs(seconds);
            Self {
                started,
                silence: SilenceTimers::new(limits, end, started),
                timer: DeadlineTimer::new(end),
            }
        }

        /// The next action, except worker checks, and its second in the stream.
        async fn next(&mut self) -> (u64, Due) {
            loop {
                let due = poll_fn(|cx| self.silence.poll(&mut self.timer, cx)).await;
                if due != Due::WorkerCheck {
                    return (self.started.elapsed().as_secs(), due);
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
                (second, Due::StallCheck(pause)) => {
                    assert_eq!((pause + CLOCK_RESOLUTION).as_secs(), second);
                    (second, "stall_check")
                }
                (second, Due::KeepAlive) => (second, "keepalive"),
                (second, Due::End) => (second, "end"),
                (_, Due::WorkerCheck) => unreachable!("left out"),
            });
        }
        let looks = seen.iter().filter(|(_, due)| *due == "stall_check").count();
        assert!((10..=13).contains(&looks), "{seen:?}");
        assert_eq!(seen[0], (5, "stall_check"));
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
        assert!(
            (119..=121).contains(&second) && matches!(due, Due::StallCheck(_)),
            "{second} {due:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn pause_of_a_lost_worker_does_not_extend_the_next_timeout() {
        let mut stream = Stream::new(LIMITS, 3600);
        stream.silence.received(Instant::now());
        assert!(matches!(stream.next().await, (5, Due::StallCheck(_))));
        stream.silence.restart(Instant::now());
        stream.silence.received(Instant::now());
        assert!(matches!(stream.next().await, (10, Due::StallCheck(_))));
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
    async fn silent_stream_checks_its_worker_from_the_first_second() {
        let mut stream = Stream::new(LIMITS, 3600);
        for quarter in 4..12 {
            let due = poll_fn(|cx| stream.silence.poll(&mut stream.timer, cx)).await;
            assert_eq!(
                (due, stream.started.elapsed() / 250),
                (Due::WorkerCheck, WORKER_CHECK_PERIOD * quarter / 250)
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn after_the_last_event_the_deadline_is_near() {
        let mut stream = Stream::new(LIMITS, 3600);
        stream.silence.end_by(stream.started + Duration::from_secs(1));
        assert_eq!(stream.next().await, (1, Due::End));
    }
}
