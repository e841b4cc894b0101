//! Log lines, written by a thread of their own. A reader that pauses, such as a stopped terminal or a stuck log
//! collector, must not stop the router: lines that find no room are lost, and counted.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use tracing_subscriber::fmt::MakeWriter;

/// Maximum number of lines that wait for the thread.
const MAX_WAITING: usize = 4096;

/// Period in which a flush looks for room among them.
const ROOM_PERIOD: Duration = Duration::from_millis(1);

/// The sender of the lines.
#[derive(Clone, Debug)]
pub(crate) struct LogLines {
    items: SyncSender<Item>,
    lost: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Item {
    Line(Vec<u8>),
    /// Answered when the items before it are written.
    Flush(SyncSender<()>),
}

impl LogLines {
    /// Starts the thread. It ends when the last sender is dropped.
    pub(crate) fn to(output: impl Write + Send + 'static) -> io::Result<Self> {
        let (items, waiting) = sync_channel(MAX_WAITING);
        let lost = Arc::<AtomicU64>::default();
        let counted = Arc::clone(&lost);
        thread::Builder::new()
            .name("mla-router-log".to_owned())
            .spawn(move || write(output, &waiting, &counted))?;
        Ok(Self { items, lost })
    }

    /// Waits until the lines so far are written, at most `limit`.
    pub(crate) fn flush(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let (done, written) = sync_channel(1);
        while self.items.try_send(Item::Flush(done.clone())).is_err() {
            if Instant::now() >= end {
                return;
            }
            thread::sleep(ROOM_PERIOD);
        }
        let _late = written.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
}

impl<'a> MakeWriter<'a> for LogLines {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

/// Each write is a whole line. It never waits or fails.
impl Write for &LogLines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.items.try_send(Item::Line(line.to_vec())).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write(mut output: impl Write, waiting: &Receiver<Item>, lost: &AtomicU64) {
    while let Ok(item) = waiting.recv() {
        match item {
            Item::Line(line) => {
                // A failure, as on a full disk, loses this line. A later one is written when there is room again.
                let _lost = output.write_all(&line);
            }
            Item::Flush(done) => {
                let _gave_up = done.send(());
            }
        }
        let count = lost.swap(0, Ordering::Relaxed);
        if count > 0 {
            tracing::warn!("{count} log lines are lost: their reader has paused");
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    /// Waits for the lock before each write.
    struct Paused(Arc<Mutex<Vec<u8>>>);

    impl Write for Paused {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_paused_reader_loses_lines_and_stops_nothing() {
        let written = Arc::<Mutex<Vec<u8>>>::default();
        let lines = LogLines::to(Paused(Arc::clone(&written))).expect("a thread");
        let pause = written.lock();
        for _ in 0..MAX_WAITING + 100 {
            assert_eq!((&lines).write(b"line\n").expect("it never fails"), 5);
        }
        // The thread may hold one line more than may wait.
        assert!((99..=100).contains(&lines.lost.load(Ordering::Relaxed)));
        lines.flush(Duration::from_millis(1));
        thread::scope(|scope| {
            let flushing = scope.spawn(|| lines.flush(Duration::from_secs(60)));
            drop(pause);
            flushing.join().expect("no panic");
        });
        assert!(written.lock().len() >= 5 * MAX_WAITING, "the flush has waited for room");
        (&lines).write_all(b"last\n").expect("it never fails");
        lines.flush(Duration::from_secs(60));
        let text = String::from_utf8(written.lock().clone()).expect("text");
        assert!(text.ends_with("line\nlast\n"));
        assert!((MAX_WAITING + 1..=MAX_WAITING + 2).contains(&text.lines().count()));
    }
}
