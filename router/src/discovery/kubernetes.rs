//! `--service-discovery`: the workers are the pods of a Kubernetes cluster with the labels of `--selector`. Pods
//! that are not ready get no requests. A pod with several workers, such as data-parallel ranks, lists their ports in the
//! annotation [`PORTS`].

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    pin::{Pin, pin},
    time::Duration,
};

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    runtime::watcher::{self, Event, watcher},
};
use tokio::time::sleep;

use super::{
    Discovery,
    follower::{Follower, Listed, WorkerSet},
};
use crate::{config::Config, error::StartError, names::WorkerUrl};

/// Annotation of a pod with the ports of its workers, as `31000,31001`. It replaces `--service-discovery-port`.
const PORTS: &str = "mla-router/ports";

/// Pause after a failed request to the API server.
const PAUSE: Duration = Duration::from_secs(1);

/// Length of a watch. The API server ends it after this time, and the next one continues there.
const WATCH_SECONDS: u32 = 30;

/// Read timeout. A silence of this length means that the connection is dead.
const READ_TIMEOUT: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 10);

/// The pods to watch.
pub(super) struct Pods {
    api: Api<Pod>,
    labels: String,
    port: u16,
}

impl Pods {
    /// Finds the cluster: the one in which the router runs, or the one of the kubeconfig. Fails without --selector
    /// or without a cluster.
    pub(super) async fn prepare(config: &Config) -> Result<Self, StartError> {
        let refuse = |why: String| StartError::Discovery(format!("--service-discovery: {why}"));
        if config.selector.is_empty() {
            // Without labels, all pods of the namespace would be workers, including the router.
            return Err(refuse("needs --selector, the labels of the pods that are workers".into()));
        }
        let mut cluster = kube::Config::infer().await.map_err(|error| refuse(error.to_string()))?;
        cluster.read_timeout = Some(READ_TIMEOUT);
        let namespace = config.service_discovery_namespace.clone();
        let namespace = namespace.unwrap_or_else(|| cluster.default_namespace.clone());
        let client = Client::try_from(cluster).map_err(|error| refuse(error.to_string()))?;
        Ok(Self {
            api: Api::namespaced(client, &namespace),
            labels: config.selector.join(","),
            port: config.service_discovery_port,
        })
    }

    /// Follows the pods. The known pods stay known while the API server is unreachable: workers serve without it.
    async fn watch(self, follower: Follower) {
        let wanted = watcher::Config::default().labels(&self.labels).timeout(WATCH_SECONDS);
        let mut events = pin!(watcher(self.api, wanted));
        let mut known = Known::default();
        let mut away = false;
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    if std::mem::take(&mut away) {
                        tracing::info!("Kubernetes: the API server is back");
                    }
                    known.take(event, self.port);
                    follower.update(known.found());
                }
                Err(error) => {
                    if !std::mem::replace(&mut away, true) {
                        tracing::warn!("Kubernetes: {error}; the workers stay as they are");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }
}

impl Discovery for Pods {
    fn name(&self) -> &'static str {
        "Kubernetes"
    }

    fn follow(self: Box<Self>, follower: Follower) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.watch(follower))
    }
}

/// The pods that run and are not being deleted, by their uid.
#[derive(Default)]
struct Known {
    pods: BTreeMap<String, Place>,
    /// Pods of a new list of the API server, until the list is complete.
    listing: BTreeMap<String, Place>,
}

#[derive(Debug, PartialEq)]
struct Place {
    urls: Vec<WorkerUrl>,
    ready: bool,
}

impl Known {
    fn take(&mut self, event: Event<Pod>, port: u16) {
        match event {
            Event::Init => self.listing.clear(),
            Event::InitApply(pod) => {
                if let (Some(uid), Some(place)) = (pod.metadata.uid.clone(), place(&pod, port)) {
                    self.listing.insert(uid, place);
                }
            }
            Event::InitDone => self.pods = std::mem::take(&mut self.listing),
            Event::Apply(pod) => {
                if let Some(uid) = pod.metadata.uid.clone() {
                    match place(&pod, port) {
                        Some(place) => self.pods.insert(uid, place),
                        None => self.pods.remove(&uid),
                    };
                }
            }
            Event::Delete(pod) => {
                if let Some(uid) = pod.metadata.uid {
                    self.pods.remove(&uid);
                }
            }
        }
    }

    fn found(&self) -> WorkerSet {
        let mut found = WorkerSet::new();
        // Ready pods last: one of them may have the address of an ended pod.
        for ready in [false, true] {
            for (uid, place) in self.pods.iter().filter(|(_, place)| place.ready == ready) {
                for url in &place.urls {
                    let spec = url.clone().into();
                    found.insert(url.clone(), Listed { spec, instance: uid.clone(), ready });
                }
            }
        }
        found
    }
}

/// The URLs and the readiness of a pod; `None` if it has ended or is being deleted.
fn place(pod: &Pod, port: u16) -> Option<Place> {
    let status = pod.status.as_ref()?;
    let has_ended = matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"));
    // The condition Ready is withdrawn late, so a pod that is being deleted is dropped here.
    if has_ended || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let mut conditions = status.conditions.iter().flatten();
    let ready = conditions.any(|is| is.type_ == "Ready" && is.status == "True");
    let ip: IpAddr = status.pod_ip.as_ref()?.parse().ok()?;
    let url = |port| format!("http://{}", SocketAddr::new(ip, port)).parse().ok();
    Some(Place { urls: ports(pod, port)?.into_iter().map(url).collect::<Option<_>>()?, ready })
}

/// The ports of the workers in a pod; `None` if its annotation is not a list of ports.
fn ports(pod: &Pod, port: u16) -> Option<Vec<u16>> {
    let Some(listed) = pod.metadata.annotations.as_ref().and_then(|all| all.get(PORTS)) else {
        return Some(vec![port]);
    };
    let ports = listed.split(',').map(|port| port.trim().parse().ok().filter(|port| *port > 0));
    let ports: Option<Vec<u16>> = ports.collect();
    if ports.is_none() {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        tracing::warn!(
            "Kubernetes: pod {name} is left out: {PORTS}: {listed:?} is no list of ports"
        );
    }
    ports
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(uid: &str, ip: &str, ready: &str) -> Pod {
        let pod = json!({
            "metadata": { "name": uid, "uid": uid },
            "status": {
                "podIP": ip,
                "conditions": [{ "type": "Ready", "status": ready }],
            },
        });
        serde_json::from_value(pod).expect("a pod")
    }

    fn urls(known: &Known) -> Vec<String> {
        let line = |(url, listed): (WorkerUrl, Listed)| {
            let away = if listed.ready { "" } else { " away" };
            format!("{url} {}{away}", listed.instance)
        };
        known.found().into_iter().map(line).collect()
    }

    #[test]
    fn only_a_pod_that_stays_has_a_place() {
        let url = |pod: &Pod| place(pod, 8000).map(|place| place.urls[0].to_string());
        assert_eq!(url(&pod("a", "10.0.0.1", "True")).as_deref(), Some("http://10.0.0.1:8000"));
        assert_eq!(url(&pod("a", "fd00::1", "True")).as_deref(), Some("http://[fd00::1]:8000"));
        assert_eq!(place(&pod("a", "10.0.0.1", "False"), 80).map(|place| place.ready), Some(false));
        let mut ended = pod("a", "10.0.0.1", "False");
        ended.status.as_mut().expect("a status").phase = Some("Failed".to_owned());
        assert_eq!(url(&ended), None);
        assert_eq!(url(&pod("a", "", "True")), None);
        assert_eq!(url(&Pod::default()), None);
        let mut leaving = serde_json::to_value(pod("a", "10.0.0.1", "True")).expect("JSON");
        leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        assert_eq!(url(&serde_json::from_value(leaving).expect("a pod")), None);
    }

    #[test]
    fn a_pod_with_several_workers_lists_their_ports() {
        let listed = |ports: &str| {
            let mut pod = pod("a", "10.0.0.1", "True");
            pod.metadata.annotations = Some(BTreeMap::from([(PORTS.into(), ports.into())]));
            let mut known = Known::default();
            known.take(Event::Apply(pod), 8000);
            urls(&known)
        };
        assert_eq!(listed("31000, 31001"), ["http://10.0.0.1:31000 a", "http://10.0.0.1:31001 a"]);
        for bad in ["", "31000,", "0", "65536", "http"] {
            assert!(listed(bad).is_empty(), "{bad:?}");
        }
    }

    #[test]
    fn a_list_counts_when_it_is_complete() {
        let mut known = Known::default();
        let a = pod("a", "10.0.0.1", "True");
        known.take(Event::Apply(a), 1);
        known.take(Event::Init, 1);
        known.take(Event::InitApply(pod("b", "10.0.0.2", "True")), 1);
        assert_eq!(
            urls(&known),
            ["http://10.0.0.1:1 a"],
            "no pod is dropped before the list is complete"
        );
        known.take(Event::InitDone, 1);
        assert_eq!(urls(&known), ["http://10.0.0.2:1 b"]);
        known.take(Event::Delete(pod("b", "10.0.0.2", "True")), 1);
        assert!(urls(&known).is_empty());
    }

    #[test]
    fn the_next_pod_at_an_address_is_another_worker() {
        let mut known = Known::default();
        known.take(Event::Apply(pod("a", "10.0.0.1", "True")), 1);
        known.take(Event::Apply(pod("a", "10.0.0.1", "False")), 1);
        assert_eq!(urls(&known), ["http://10.0.0.1:1 a away"]);
        known.take(Event::Apply(pod("b", "10.0.0.1", "True")), 1);
        known.take(Event::Delete(pod("a", "10.0.0.1", "False")), 1);
        assert_eq!(urls(&known), ["http://10.0.0.1:1 b"]);
    }
}
