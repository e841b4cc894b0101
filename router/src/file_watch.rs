//! Watches files while the router runs.

use std::time::Duration;

use tokio::{task::spawn_blocking, time::sleep};

/// Time between two reads. Kernel notifications do not work on NFS or a mounted ConfigMap.
const PERIOD: Duration = Duration::from_secs(1);

/// Watches files by reading them. A change counts only if two consecutive reads agree, because a file may be read
/// while it is written.
pub(crate) struct DebouncedFileWatch<T> {
    /// The result of the last read.
    seen: Option<T>,
    /// Whether this result has been returned.
    settled: bool,
}

impl<T: PartialEq> DebouncedFileWatch<T> {
    /// A watch without a known content. The first read counts at once.
    pub(crate) fn new() -> Self {
        Self { seen: None, settled: false }
    }

    /// A watch that starts from a known content.
    pub(crate) fn on(known: T) -> Self {
        Self { seen: Some(known), settled: true }
    }

    /// Takes the result of a read. Returns the new content if it has changed and is stable.
    pub(crate) fn observe(&mut self, read: T) -> Option<&T> {
        let first = self.seen.is_none();
        if self.seen.as_ref() != Some(&read) {
            self.seen = Some(read);
            self.settled = false;
            if !first {
                return None;
            }
        }
        if std::mem::replace(&mut self.settled, true) { None } else { self.seen.as_ref() }
    }

    /// Reads with `read`, which may block, and passes each change to `changed`. Never ends.
    pub(crate) async fn follow(
        mut self,
        read: impl Fn() -> T + Clone + Send + 'static,
        mut changed: impl FnMut(&T),
    ) where
        T: Send + 'static,
    {
        loop {
            // An error means that `read` has panicked; the next read may succeed.
            if let Ok(read) = spawn_blocking(read.clone()).await
                && let Some(new) = self.observe(read)
            {
                changed(new);
            }
            sleep(PERIOD).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_counts_when_two_reads_agree() {
        let mut file = DebouncedFileWatch::new();
        assert_eq!(file.observe("one"), Some(&"one"));
        assert_eq!(file.observe("one"), None);
        // Truncated, written in two pieces, and then left alone.
        for read in ["", "t", "two"] {
            assert_eq!(file.observe(read), None);
        }
        assert_eq!(file.observe("two"), Some(&"two"));
        assert_eq!(file.observe("two"), None);
    }

    #[test]
    fn a_known_content_is_not_returned() {
        let mut file = DebouncedFileWatch::on("one");
        assert_eq!(file.observe("one"), None);
        assert_eq!(file.observe("two"), None);
        assert_eq!(file.observe("two"), Some(&"two"));
    }
}
