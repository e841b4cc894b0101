//! Files that are followed while the router runs.

use std::time::Duration;

use tokio::{task::spawn_blocking, time::sleep};

/// Looked at this often; a notification of the kernel's would not come over NFS or a mounted
/// ConfigMap.
const PERIOD: Duration = Duration::from_secs(1);

/// What is read from files that may be caught while they are written: it is believed when it reads
/// the same twice.
pub(crate) struct Settled<T> {
    /// What was read at the last look, good or bad.
    seen: Option<T>,
    /// It has been handed out.
    settled: bool,
}

impl<T: PartialEq> Settled<T> {
    /// Nothing is known yet, so that there is nothing to lose: the first look is believed at once.
    pub(crate) fn new() -> Self {
        Self { seen: None, settled: false }
    }

    /// This is known already.
    pub(crate) fn on(known: T) -> Self {
        Self { seen: Some(known), settled: true }
    }

    /// What there is to be told after another look, if anything.
    pub(crate) fn look(&mut self, read: T) -> Option<&T> {
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

    /// Looks with `read`, which may block, and tells `changed` of each change. Never ends.
    pub(crate) async fn follow(
        mut self,
        read: impl Fn() -> T + Clone + Send + 'static,
        mut changed: impl FnMut(&T),
    ) where
        T: Send + 'static,
    {
        loop {
            // An error would be a panic in it, and the next look may go better.
            if let Ok(read) = spawn_blocking(read.clone()).await
                && let Some(new) = self.look(read)
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
    fn a_change_counts_when_it_has_settled() {
        let mut file = Settled::new();
        assert_eq!(file.look("one"), Some(&"one"));
        assert_eq!(file.look("one"), None);
        // Truncated, written in two pieces, and then left alone.
        for read in ["", "t", "two"] {
            assert_eq!(file.look(read), None);
        }
        assert_eq!(file.look("two"), Some(&"two"));
        assert_eq!(file.look("two"), None);
    }

    #[test]
    fn what_is_known_is_no_news() {
        let mut file = Settled::on("one");
        assert_eq!(file.look("one"), None);
        assert_eq!(file.look("two"), None);
        assert_eq!(file.look("two"), Some(&"two"));
    }
}
