//! Applies the worker sets of one source to the router.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, Weak},
};

use crate::{fleet::WorkerSpec, names::WorkerUrl, router::Router};

/// The workers of a source.
pub(super) type WorkerSet = BTreeMap<WorkerUrl, Listed>;

/// A worker in its source.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Listed {
    pub(super) spec: WorkerSpec,
    /// Identity of the process behind the URL, such as the uid of a pod: another pod may get the same address
    /// later. Empty if the source has no identities.
    pub(super) instance: String,
    /// Whether the worker should get requests. A worker that is not ready stays registered with its learned state.
    pub(super) ready: bool,
}

impl Listed {
    /// Whether both are the same process with the same description. Their readiness may differ.
    fn is_same(&self, other: &Self) -> bool {
        self.instance == other.instance && self.spec == other.spec
    }
}

/// Adds and removes the workers of one source, and leaves all other workers as they are. A worker of the source that
/// an operator has removed is added again only after it has left the source and come back.
pub(super) struct Follower {
    router: Weak<Router>,
    source: &'static str,
    /// The workers that this source has added.
    added: WorkerSet,
}

impl Follower {
    pub(super) fn new(router: &Arc<Router>, source: &'static str) -> Self {
        Self { router: Arc::downgrade(router), source, added: WorkerSet::new() }
    }

    /// Applies the present set of the source. A worker that has left the set finishes its requests.
    pub(super) fn update(&mut self, found: WorkerSet) {
        let Some(router) = self.router.upgrade() else {
            return;
        };
        let source = self.source;
        let before = mem::take(&mut self.added);
        for (url, was) in &before {
            if found.get(url).is_none_or(|now| !now.is_same(was))
                && let Err(error) = router.remove_worker(url)
            {
                tracing::debug!("{source}: {error}");
            }
        }
        for (url, now) in found {
            match before.get(&url).filter(|was| now.is_same(was)) {
                Some(was) => {
                    if was.ready != now.ready {
                        router.withhold(&url, !now.ready);
                    }
                    self.added.insert(url, now);
                }
                None if !now.ready => {}
                None => match router.add_worker(now.spec.clone()) {
                    Ok(_) => {
                        tracing::info!("{source}: worker {url} added");
                        self.added.insert(url, now);
                    }
                    Err(error) => tracing::debug!("{source}: {error}"),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn url(text: &str) -> WorkerUrl {
        text.parse().expect("a URL")
    }

    fn listed(address: &str, instance: &str, ready: bool) -> (WorkerUrl, Listed) {
        let spec = WorkerSpec::from(url(address));
        (spec.url.clone(), Listed { spec, instance: instance.to_owned(), ready })
    }

    fn found(pairs: &[(&str, &str)]) -> WorkerSet {
        pairs.iter().map(|(address, instance)| listed(address, instance, true)).collect()
    }

    fn ids(router: &Router) -> Vec<(String, u32)> {
        router.registry.views().into_iter().map(|view| (view.url, view.id)).collect()
    }

    #[tokio::test]
    async fn the_set_follows_the_source_and_keeps_other_workers() {
        let config = Config { worker_urls: vec![url("http://own:1")], ..Config::default() };
        let router = Router::new(config).expect("a good config");
        let mut follower = Follower::new(&router, "test");
        let own = ("http://own:1".to_owned(), 0);
        follower.update(found(&[("http://a:1", "x"), ("http://own:1", "x"), ("http://b:1", "y")]));
        let (a, b) = (("http://a:1".to_owned(), 1), ("http://b:1".to_owned(), 2));
        assert_eq!(ids(&router), [own.clone(), a.clone(), b.clone()]);
        follower.update(found(&[("http://b:1", "y"), ("http://a:1", "x")]));
        assert_eq!(ids(&router), [own.clone(), a, b.clone()], "nothing has changed");
        follower.update(found(&[("http://a:1", "z"), ("http://b:1", "y")]));
        let again = ("http://a:1".to_owned(), 3);
        assert_eq!(ids(&router), [own.clone(), b, again], "another instance at the same address");
        follower.update(WorkerSet::new());
        assert_eq!(ids(&router), [own]);
    }

    #[tokio::test]
    async fn a_worker_that_is_not_ready_stays_registered_with_its_learned_state() {
        let router = Router::new(Config::default()).expect("a good config");
        let mut follower = Follower::new(&router, "test");
        let away = |instance: &str| WorkerSet::from([listed("http://a:1", instance, false)]);
        follower.update(away("x"));
        assert!(ids(&router).is_empty(), "it has never been ready");
        follower.update(found(&[("http://a:1", "x")]));
        follower.update(away("x"));
        let worker = router.find(&url("http://a:1")).expect("it is still there");
        assert!(!worker.is_in_rotation());
        let reason = worker.last_failure().expect("it gets no requests").reason;
        assert_eq!(reason, "its discovery source reports it as not ready");
        follower.update(found(&[("http://a:1", "x")]));
        let same = router.find(&url("http://a:1")).expect("there");
        assert!(Arc::ptr_eq(&worker, &same) && !same.is_withheld());
        follower.update(away("y"));
        assert!(ids(&router).is_empty(), "another instance, and not ready");
    }

    #[tokio::test]
    async fn a_worker_removed_by_hand_stays_removed() {
        let router = Router::new(Config::default()).expect("a good config");
        let mut follower = Follower::new(&router, "test");
        follower.update(found(&[("http://a:1", "x")]));
        router.remove_worker(&url("http://a:1")).expect("there");
        follower.update(found(&[("http://a:1", "x"), ("http://b:1", "x")]));
        assert_eq!(ids(&router), [("http://b:1".to_owned(), 1)]);
        follower.update(WorkerSet::new());
        follower.update(found(&[("http://a:1", "x")]));
        assert_eq!(ids(&router), [("http://a:1".to_owned(), 2)]);
    }
}
