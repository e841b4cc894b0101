//! Applies the worker sets of one source to the router.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, Weak},
};

use crate::{names::WorkerUrl, router::Router, upstream::address::WorkerAddress};

/// The workers of a source.
pub(super) type WorkerSet = BTreeMap<WorkerUrl, WorkerSpec>;

/// The state of one worker in its source.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct WorkerSpec {
    /// Identity of the process behind the URL, such as the uid of a pod: another pod may get the same address
    /// later. Empty if the source has no identities.
    pub(super) instance: String,
    /// Whether the worker should get requests. A worker that is not ready stays registered with its learned state.
    pub(super) ready: bool,
}

/// Adds and removes the workers of one source. Workers from elsewhere are not touched. A worker of the source that
/// was removed by hand is added again only after it has left the source and come back.
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
        for (url, spec) in &before {
            if found.get(url).is_none_or(|now| now.instance != spec.instance)
                && let Err(error) = router.remove_worker(url)
            {
                tracing::debug!("{source}: {error}");
            }
        }
        for (url, spec) in found {
            match before.get(&url).filter(|was| was.instance == spec.instance) {
                Some(was) => {
                    if was.ready != spec.ready {
                        router.withhold(&url, !spec.ready);
                    }
                    self.added.insert(url, spec);
                }
                None if !spec.ready => {}
                None => match router.add_worker(WorkerAddress::trusted(url.clone())) {
                    Ok(_) => {
                        tracing::info!("{source}: worker {url} added");
                        self.added.insert(url, spec);
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

    fn found(pairs: &[(&str, &str)]) -> WorkerSet {
        let spec = |instance: &str| WorkerSpec { instance: instance.to_owned(), ready: true };
        pairs.iter().map(|(address, instance)| (url(address), spec(instance))).collect()
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
        let away = |instance: &str| {
            let spec = WorkerSpec { instance: instance.to_owned(), ready: false };
            WorkerSet::from([(url("http://a:1"), spec)])
        };
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
