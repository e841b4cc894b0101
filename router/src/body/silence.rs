//! What becomes due while nothing comes from a worker.

use std::{
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::Instant;

use crate::alarm::Alarm;

/// A stream may be stuck after this many times its mean pause.
const PATIENCE: u32 = 20;

/// A stream that has paused for so long looks whether its worker is lost, or --inter-token-timeout-secs
/// if that is shorter,
pub const QUIET: Duration = Duration::from_secs(1);

/// and looks again after this.
const GLANCE: Duration = Duration::from_millis(250);

/// A stream that may be stuck, with a worker that may still come back, is looked at again after this.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// Workers count their silence in milliseconds: one that began with this one may seem that shorter.
const GRAIN: Duration = Duration::from_millis(1);

/// What the silence calls for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// A sign of life for the client and for the proxies on the way to it.
    KeepAlive,
    /// A look at whether the worker has been found dead or frozen meanwhile.
    Glance,
    /// A look at whether the worker is still there, after at least so long a pause.
    Look(Duration),
    /// The end of the request's time.
    End,
}

/// The settings that a silence is measured by.
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

/// When something was last said. A frame costs two additions here and no look at a timer.
#[derive(Debug)]
pub struct Silence {
    limits: Limits,
    end: Instant,
    begun: Instant,
    frames: u32,
    /// The last frame from the worker.
    heard: Instant,
    glance: Instant,
    look: Instant,
    keepalive: Instant,
}

impl Silence {
    pub fn new(limits: Limits, end: Instant, now: Instant) -> Self {
        let (look, keepalive) = (now + limits.inter_token, now + limits.keepalive);
        let glance = now + limits.quiet();
        Self { limits, end, begun: now, frames: 0, heard: now, glance, look, keepalive }
    }

    /// A frame has come, and the client gets it.
    pub fn broken(&mut self, now: Instant) {
        self.frames = self.frames.saturating_add(1);
        self.keepalive = now + self.limits.keepalive;
        self.counts_from(now);
    }

    /// Another worker goes on: its silence and its mean pause count from now. The pause in which the
    /// worker before it was lost would make the mean many times as long.
    pub fn begins_anew(&mut self, now: Instant) {
        (self.begun, self.frames) = (now, 0);
        self.counts_from(now);
    }

    fn counts_from(&mut self, now: Instant) {
        self.heard = now;
        self.glance = now + self.limits.quiet();
        self.look = now + self.limits.inter_token;
    }

    /// All is said; what is still to come must come soon.
    pub fn ends_by(&mut self, end: Instant) {
        self.end = self.end.min(end);
    }

    /// Ready when something is due.
    pub fn poll(&mut self, alarm: &mut Alarm, cx: &mut Context<'_>) -> Poll<Due> {
        loop {
            let next = self.end.min(self.glance).min(self.look).min(self.keepalive);
            ready!(alarm.poll(next, cx));
            let now = Instant::now();
            let patient_until = self.heard + self.patience();
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
                return Poll::Ready(Due::Look((now - self.heard).saturating_sub(GRAIN)));
            }
        }
    }

    /// For how long it has lasted.
    pub fn length(&self) -> Duration {
        self.heard.elapsed()
    }

    /// The longest pause that is like this stream.
    fn patience(&self) -> Duration {
        let mean = (self.heard - self.begun) / self.frames.max(1);
        self.limits.inter_token.max(mean * PATIENCE)
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
        alarm: Alarm,
    }

    impl Stream {
        fn new(limits: Limits, seconds: u64) -> Self {
            let begun = Instant::now();
            let end = begun + Duration::from_secs(seconds);
            Self { begun, silence: Silence::new(limits, end, begun), alarm: Alarm::new(end) }
        }

        /// What is due next, glances aside, and in which second of the stream.
        async fn next(&mut self) -> (u64, Due) {
            loop {
                let due = poll_fn(|cx| self.silence.poll(&mut self.alarm, cx)).await;
                if due != Due::Glance {
                    return (self.begun.elapsed().as_secs(), due);
                }
            }
        }
    }

    /// The clock stands still while anything moves and jumps to the next timer when nothing does.
    #[tokio::test(start_paused = true)]
    async fn looks_then_signs_of_life_then_the_end() {
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
    async fn a_slow_stream_has_more_patience() {
        let limits = Limits { keepalive: Duration::from_secs(3600), ..LIMITS };
        let mut stream = Stream::new(limits, 3600);
        for _ in 0..100 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            stream.silence.broken(Instant::now());
        }
        let (second, due) = stream.next().await;
        assert!((119..=121).contains(&second) && matches!(due, Due::Look(_)), "{second} {due:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_pause_that_lost_one_worker_gives_the_next_no_more_patience() {
        let mut stream = Stream::new(LIMITS, 3600);
        stream.silence.broken(Instant::now());
        assert!(matches!(stream.next().await, (5, Due::Look(_))));
        stream.silence.begins_anew(Instant::now());
        stream.silence.broken(Instant::now());
        assert!(matches!(stream.next().await, (10, Due::Look(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn every_frame_breaks_the_silence() {
        let mut stream = Stream::new(LIMITS, 3600);
        for _ in 0..100 {
            let wait = tokio::time::timeout(Duration::from_secs(4), stream.next()).await;
            assert!(wait.is_err(), "{wait:?}");
            stream.silence.broken(Instant::now());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_quiet_stream_glances_at_its_worker_from_the_first_second_on() {
        let mut stream = Stream::new(LIMITS, 3600);
        for quarter in 4..12 {
            let due = poll_fn(|cx| stream.silence.poll(&mut stream.alarm, cx)).await;
            assert_eq!((due, stream.begun.elapsed() / 250), (Due::Glance, GLANCE * quarter / 250));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn when_all_is_said_the_end_is_near() {
        let mut stream = Stream::new(LIMITS, 3600);
        stream.silence.ends_by(stream.begun + Duration::from_secs(1));
        assert_eq!(stream.next().await, (1, Due::End));
    }
}
